"""Calls one tool with one of the MCP clients for Python, and prints its result as a line of JSON.

    call.py CLIENT URL

The clients are used as their documentation shows, with timeouts that are longer than the test.
"""

import asyncio
import json
import sys
from typing import Any

TOOL = "pay__once"
ARGUMENTS = {"sum": 7}
TIMEOUT = 120


async def sdk(url: str, mode: str = "auto") -> Any:
    from mcp.client.client import Client

    async with Client(url, mode=mode) as client:
        return (await client.call_tool(TOOL, ARGUMENTS)).structured_content


async def sdk_legacy(url: str) -> Any:
    return await sdk(url, "legacy")


async def sdk_stdio(url: str, mode: str = "auto") -> Any:
    """The SDK over standard input and output, with `toolcrib mcp` in front of the server."""
    import os

    from mcp.client.client import Client
    from mcp.client.stdio import StdioServerParameters, stdio_client

    command = os.environ["TOOLCRIB_TEST_BINARY"]
    server = url.removesuffix("/mcp")
    parameters = StdioServerParameters(command=command, args=["mcp", "--server", server])
    async with Client(stdio_client(parameters), mode=mode) as client:
        return (await client.call_tool(TOOL, ARGUMENTS)).structured_content


async def sdk_stdio_legacy(url: str) -> Any:
    return await sdk_stdio(url, "legacy")


async def sdk_v1(url: str) -> Any:
    from mcp import ClientSession
    from mcp.client.streamable_http import streamablehttp_client

    async with streamablehttp_client(url) as (read, write, _), ClientSession(read, write) as session:
        await session.initialize()
        return (await session.call_tool(TOOL, ARGUMENTS)).structuredContent


async def fastmcp(url: str) -> Any:
    from fastmcp import Client

    async with Client(url) as client:
        return (await client.call_tool(TOOL, ARGUMENTS)).structured_content


async def langchain(url: str) -> Any:
    from langchain_mcp_adapters.client import MultiServerMCPClient

    client = MultiServerMCPClient({"toolcrib": {"transport": "streamable_http", "url": url}})
    tools = {tool.name: tool for tool in await client.get_tools()}
    return await tools[TOOL].ainvoke(ARGUMENTS)


async def pydantic_ai(url: str) -> Any:
    from pydantic_ai.mcp import MCPToolset

    async with MCPToolset(url) as toolset:
        return await toolset.direct_call_tool(TOOL, ARGUMENTS)


async def openai_agents(url: str) -> Any:
    from agents.mcp import MCPServerStreamableHttp

    server = MCPServerStreamableHttp({"url": url}, client_session_timeout_seconds=TIMEOUT)
    async with server:
        return (await server.call_tool(TOOL, ARGUMENTS)).model_dump(mode="json")


async def llama_index(url: str) -> Any:
    from llama_index.tools.mcp import BasicMCPClient

    client = BasicMCPClient(url, timeout=TIMEOUT)
    return (await client.call_tool(TOOL, ARGUMENTS)).model_dump(mode="json")


async def google_adk(url: str) -> Any:
    from google.adk.agents import LlmAgent
    from google.adk.agents.invocation_context import InvocationContext
    from google.adk.sessions import InMemorySessionService
    from google.adk.tools.mcp_tool import McpToolset, StreamableHTTPConnectionParams
    from google.adk.tools.tool_context import ToolContext

    toolset = McpToolset(connection_params=StreamableHTTPConnectionParams(url=url, timeout=TIMEOUT))
    tools = {tool.name: tool for tool in await toolset.get_tools()}
    sessions = InMemorySessionService()
    session = await sessions.create_session(app_name="test", user_id="test")
    agent = LlmAgent(name="test", model="none")
    invocation = InvocationContext(
        session_service=sessions, invocation_id="one", agent=agent, session=session
    )
    result = await tools[TOOL].run_async(args=ARGUMENTS, tool_context=ToolContext(invocation))
    await toolset.close()
    return result


async def main(client: str, url: str) -> None:
    result = await globals()[client](url)
    print(json.dumps({"result": result}, default=str), flush=True)


asyncio.run(main(sys.argv[1], sys.argv[2]))
