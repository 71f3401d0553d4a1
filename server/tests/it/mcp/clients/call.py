"""Calls one tool with the MCP SDK for Python, and prints its result as a line of JSON.

    call.py CLIENT URL

CLIENT is one of the ways to connect: over HTTP or `toolcrib mcp`, with the newest revision or the one before.
"""

import asyncio
import json
import sys
from typing import Any

TOOL = "pay__once"
ARGUMENTS = {"sum": 7}


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


async def main(client: str, url: str) -> None:
    result = await globals()[client](url)
    print(json.dumps({"result": result}, default=str), flush=True)


asyncio.run(main(sys.argv[1], sys.argv[2]))
