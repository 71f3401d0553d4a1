// Calls one tool with one of the MCP clients for JavaScript, and prints its result as a line of JSON.
//
//     call.mjs CLIENT URL
//
// The clients are used as their documentation shows, with timeouts that are longer than the test.
// Packages are looked up in the directory that TOOLCRIB_TEST_NODE_DIRECTORY names.

import { createRequire } from 'node:module';
import { pathToFileURL } from 'node:url';

const TOOL = 'pay__once';
const ARGUMENTS = { sum: 7 };
const TIMEOUT = 120_000;

const require = createRequire(`${process.env.TOOLCRIB_TEST_NODE_DIRECTORY}/package.json`);
const load = name => import(pathToFileURL(require.resolve(name)).href);

const info = { name: 'test', version: '1' };

const clients = {
  async sdk_v1(url) {
    const { Client } = await load('@modelcontextprotocol/sdk/client/index.js');
    const { StreamableHTTPClientTransport } = await load(
      '@modelcontextprotocol/sdk/client/streamableHttp.js',
    );
    const client = new Client(info);
    await client.connect(new StreamableHTTPClientTransport(new URL(url)));
    const params = { name: TOOL, arguments: ARGUMENTS };
    return client.callTool(params, undefined, { timeout: TIMEOUT });
  },

  async sdk_v2(url) {
    const { Client, StreamableHTTPClientTransport } = await load('@modelcontextprotocol/client');
    const client = new Client(info);
    await client.connect(new StreamableHTTPClientTransport(new URL(url)));
    return client.callTool({ name: TOOL, arguments: ARGUMENTS }, { timeout: TIMEOUT });
  },

  async ai_sdk(url) {
    const { createMCPClient } = await load('@ai-sdk/mcp');
    const errors = [];
    const client = await createMCPClient({
      transport: { type: 'http', url },
      onUncaughtError: error => errors.push(String(error)),
    });
    const tools = await client.tools();
    const result = await tools[TOOL].execute(ARGUMENTS, { toolCallId: 'one', messages: [] });
    return { result, unreadable: errors.filter(error => error.includes('parse')) };
  },

};

const [client, url] = process.argv.slice(2);
const result = await clients[client](url);
console.log(JSON.stringify({ result }));
process.exit(0);
