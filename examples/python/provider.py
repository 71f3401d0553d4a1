"""A client in Python that provides tools: registers demo.greet with Toolcrib and executes its calls."""
import json, os, time, urllib.request

SERVER, CLIENT = os.environ.get("TOOLCRIB_SERVER", "http://127.0.0.1:8080"), "client_demo"
KEY = os.environ.get("TOOLCRIB_KEY")  # if the server has keys: toolcrib keys create --agent demo --role provider
SCHEMA = {"type": "object", "required": ["name"],
          "properties": {"name": {"type": "string"}, "seconds": {"type": "number"}}}
TOOL = {"name": "demo.greet", "description": "Greets a person, after some seconds of thought.",
        "schema": SCHEMA, "timeout_ms": 60000, "effect": "read"}

def ask(method, path, body=None):
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {KEY}"} if KEY else {})
    request = urllib.request.Request(SERVER + path, body and json.dumps(body).encode(), headers, method=method)
    while True:  # retry while the server is unavailable or busy: it has stored the calls
        try:
            return json.load(urllib.request.urlopen(request, timeout=60))
        except OSError as error:
            if getattr(error, "code", 503) not in (429, 503):
                problem = json.load(error)
                if error.code != 409: raise SystemExit(f"{path}: {error}: {problem['detail']} ({problem['hint']})")
                return problem  # rejected, for example because the call was canceled
            time.sleep(1)

print(ask("POST", "/internal/tools/register", {"client_id": CLIENT, "tools": [TOOL]}), flush=True)
while True:
    for call in ask("GET", f"/internal/ingress/poll?client_id={CLIENT}&wait_ms=30000")["requests"]:
        time.sleep(call["args"].get("seconds", 0))
        answer = {"status": "SUCCEEDED", "result": {"greeting": f"Hello, {call['args']['name']}!"}, "client_id": CLIENT}
        print(ask("POST", f"/internal/tool_calls/{call['tool_call_id']}/submit", answer), flush=True)
