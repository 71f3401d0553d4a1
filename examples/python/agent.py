"""An agent's tool loop in Python: call a tool by name, receive a ticket, wait for the outcome.

    python3 agent.py                                            three example calls
    python3 agent.py demo.greet '{"name": "Ada"}'               one call
"""
import json
import os
import sys
import time
import urllib.error
import urllib.request
import uuid

SERVER = os.environ.get("TOOLCRIB_SERVER", "http://127.0.0.1:8080")
KEY = os.environ.get("TOOLCRIB_KEY")  # a key with the role agent, if the server has keys
ENDED = ("SUCCEEDED", "FAILED", "TIMEOUT", "CANCELED")


def ask(method, path, body=None):
    """Sends a request and returns the JSON response. Retries while the server is unavailable or busy."""
    headers = {"Content-Type": "application/json"}
    if KEY:
        headers["Authorization"] = f"Bearer {KEY}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(SERVER + path, data, headers, method=method)
    while True:
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            if error.code not in (429, 503):
                raise RuntimeError(json.load(error)["detail"]) from None
            time.sleep(int(error.headers.get("Retry-After", 1)))
        except OSError:
            time.sleep(1)


def invoke_tool_and_wait(tool_name, args, run_id="run_001", timeout=30):
    """Calls a tool and returns its result. The same for every tool, whatever executes it."""
    # The idempotency key makes a retry safe: the same key returns the same ticket.
    ticket = ask("POST", f"/v1/tools/{tool_name}/invoke",
                 {"run_id": run_id, "args": args, "idempotency_key": str(uuid.uuid4())})
    until = time.monotonic() + timeout
    while (left := until - time.monotonic()) > 0:
        # The server responds as soon as the call has ended, so this is not a tight polling loop.
        wait_ms = int(min(left, 20) * 1000)
        call = ask("GET", f"/v1/tool_calls/{ticket['tool_call_id']}?wait_ms={wait_ms}")
        if call["status"] == "SUCCEEDED":
            return call["result"]
        if call["status"] in ENDED:
            raise RuntimeError(f"{tool_name}: {call['error']['code']}: {call['error']['message']}")
    raise TimeoutError(f"{tool_name} is still open: {ticket['tool_call_id']}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        steps = [(sys.argv[1], json.loads(sys.argv[2] if len(sys.argv) > 2 else "{}"))]
    else:
        steps = [
            ("calculation.eval", {"expression": "round(199 * 1.19, 2)"}),
            ("database.query", {"sql": "SELECT name, stock FROM products WHERE stock < 20"}),
            ("calculation.eval", {"expression": "1/0"}),
        ]
    for tool_name, args in steps:
        try:
            print(tool_name, "->", json.dumps(invoke_tool_and_wait(tool_name, args)))
        except (RuntimeError, TimeoutError) as error:
            print(tool_name, "failed:", error)
