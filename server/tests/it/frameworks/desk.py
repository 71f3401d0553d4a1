"""An MCP server of revision 2025-11-25 on standard input and output, with one tool that asks the caller for a name."""

import itertools
import json
import sys

FORM = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
GREET = {"name": "greet", "description": "Greets a person, whose name it asks for.",
         "inputSchema": {"type": "object", "properties": {}}}
ids = itertools.count(1)
waiting = {}


def send(message):
    print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)


for line in sys.stdin:
    message = json.loads(line)
    method, params = message.get("method"), message.get("params") or {}
    if method == "initialize":
        info = {"name": "desk", "version": "1"}
        result = {"protocolVersion": "2025-11-25", "capabilities": {"tools": {}}, "serverInfo": info}
        send({"id": message["id"], "result": result})
    elif method == "tools/list":
        send({"id": message["id"], "result": {"tools": [GREET]}})
    elif method == "tools/call":
        question = f"question-{next(ids)}"
        waiting[question] = message["id"]
        params = {"mode": "form", "message": "Which name?", "requestedSchema": FORM}
        send({"id": question, "method": "elicitation/create", "params": params})
    elif method == "ping":
        send({"id": message["id"], "result": {}})
    elif method is None and message.get("id") in waiting:
        name = message["result"]["content"]["name"]
        content = [{"type": "text", "text": f"Hello, {name}!"}]
        send({"id": waiting.pop(message["id"]), "result": {"content": content}})
    elif method and "id" in message:
        send({"id": message["id"], "error": {"code": -32601, "message": f"no method {method}"}})
