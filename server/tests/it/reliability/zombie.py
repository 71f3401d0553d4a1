"""A client of standard Python only: polls one request, prints it, and submits its result when a line arrives.

    zombie.py URL CLIENT_ID
"""

import json
import sys
import urllib.error
import urllib.request

server, client = sys.argv[1:3]
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def send(path, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(server + path, data, {"Content-Type": "application/json"})
    try:
        return 200, json.load(opener.open(request, timeout=60))
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


_, polled = send(f"/internal/ingress/poll?client_id={client}&wait_ms=30000")
work = polled["requests"][0]
print(json.dumps(work), flush=True)
sys.stdin.readline()
report = {"status": "SUCCEEDED", "result": {"by": "zombie"}, "client_id": client, "attempt": work["attempt"]}
status, answer = send(f"/internal/tool_calls/{work['tool_call_id']}/submit", report)
print(json.dumps({"status": status, "answer": answer}), flush=True)
