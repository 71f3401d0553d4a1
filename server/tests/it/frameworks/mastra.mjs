// An agent of Mastra, whose model is Toolcrib. The AI SDK repeats a request whose connection broke; a
// stream that breaks later is started again by the program.
//
//   mastra.mjs URL generate|stream
import { createRequire } from 'node:module';
import { pathToFileURL } from 'node:url';
import { join } from 'node:path';

const require = createRequire(join(process.env.TOOLCRIB_TEST_NODE_DIRECTORY, 'package.json'));
const load = (name) => import(pathToFileURL(require.resolve(name)).href);
const { Agent } = await load('@mastra/core/agent');
const { createOpenAICompatible } = await load('@ai-sdk/openai-compatible');

const [url, way] = process.argv.slice(2);
const provider = createOpenAICompatible({
  name: 'toolcrib',
  baseURL: url,
  apiKey: 'unused',
  transformRequestBody: (body) => ({ ...body, toolcrib: { tools: ['bank.pay'] } }),
});
const agent = new Agent({ id: 'payer', name: 'payer', instructions: 'You pay.', model: provider('large') });

async function once() {
  if (way === 'generate') return (await agent.generate('pay')).text;
  const stream = await agent.stream('pay');
  let text = '';
  for await (const part of stream.textStream) text += part;
  if (!text) throw stream.error ?? new Error('the stream is empty');
  return text;
}

let text, attempts = 0;
while (!text && attempts < 4) {
  attempts += 1;
  try {
    text = await once();
  } catch (error) {
    console.error(`attempt ${attempts}: ${error}`);
  }
}
console.log(JSON.stringify({ text, attempts }));
process.exit(0);
