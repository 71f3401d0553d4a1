"""The official Python SDK against a crib: lists, calls, and follows a task across a restart.

Says what it saw as lines of JSON; the test that runs it checks them. One line on standard input says
that the server has been started again.
"""

import json
import sys
from typing import Any, ClassVar, Literal

import anyio
import mcp_types as types
from mcp.client.client import Client
from mcp.client.extension import ClaimContext, ClientExtension, ResultClaim


def say(**seen: Any) -> None:
    print(json.dumps(seen), flush=True)


class TaskMade(types.Result):
    """A call that continues as a task."""

    result_type: Literal["task"]
    task_id: str
    status: str


class TaskSeen(types.Result):
    """A task, and its result once it has one."""

    task_id: str
    status: str
    result: dict[str, Any] | None = None


class TaskParams(types.RequestParams):
    task_id: str


class GetTask(types.Request[TaskParams, Literal["tasks/get"]]):
    method: Literal["tasks/get"] = "tasks/get"
    params: TaskParams
    name_param: ClassVar[str | None] = "taskId"


async def unresolved(made: TaskMade, context: ClaimContext) -> types.CallToolResult:
    raise RuntimeError("the script follows tasks itself")


class Tasks(ClientExtension):
    """Says that this client knows tasks."""

    identifier = "io.modelcontextprotocol/tasks"

    def claims(self) -> list[ResultClaim[TaskMade]]:
        return [ResultClaim(result_type="task", model=TaskMade, resolve=unresolved)]


async def main(url: str) -> None:
    async with Client(url, extensions=[Tasks()]) as client:
        tools = await client.list_tools()
        say(protocol=client.session.protocol_version, tools=[tool.name for tool in tools.tools])
        result = await client.call_tool("calculation.eval", {"expression": "6*7"})
        say(result=result.structured_content)
        wrong = await client.call_tool("calculation.eval", {"expresion": "1"})
        say(is_error=wrong.is_error)
        made = await client.session.call_tool("report.make", {}, allow_claimed=True)
        assert isinstance(made, TaskMade), made
        say(task=made.task_id)
        await anyio.to_thread.run_sync(sys.stdin.readline)
        get = GetTask(params=TaskParams(task_id=made.task_id))
        task = await client.session.send_request(get, TaskSeen)
        say(status=task.status)
        while task.status == "working":
            await anyio.sleep(0.05)
            task = await client.session.send_request(get, TaskSeen)
        say(status=task.status, result=task.result)


anyio.run(main, sys.argv[1])
