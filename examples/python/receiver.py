"""A webhook receiver in Python: verifies the signature before it processes the message.

    export TOOLCRIB_WEBHOOK_SIGNING_KEY=$(toolcrib webhooks key)   # the same key for server and receiver
    python3 receiver.py 9000
"""
import base64
import hashlib
import hmac
import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

KEYS = os.environ["TOOLCRIB_WEBHOOK_SIGNING_KEY"].split()
seen = set()  # a real receiver stores these ids durably


def verified(headers, body):
    """Returns True if the message is recent and signed with one of our keys (Standard Webhooks)."""
    message_id, timestamp = headers["webhook-id"], headers["webhook-timestamp"]
    if abs(time.time() - int(timestamp)) > 300:
        return False
    signed = f"{message_id}.{timestamp}.".encode() + body
    for key in KEYS:
        secret = base64.b64decode(key.removeprefix("whsec_"))
        digest = base64.b64encode(hmac.new(secret, signed, hashlib.sha256).digest()).decode()
        for signature in headers["webhook-signature"].split():
            if hmac.compare_digest(signature, f"v1,{digest}"):
                return True
    return False


class Receiver(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        if not verified(self.headers, body):
            self.answer(401)
            return
        if self.headers["webhook-id"] not in seen:  # a message may be delivered twice
            seen.add(self.headers["webhook-id"])
            message = json.loads(body)
            task = message["data"]
            print(message["type"], task["call_id"], json.dumps(task["data"] or task["error"]), flush=True)
        self.answer(204)

    def answer(self, code):
        self.send_response(code)
        self.end_headers()

    def log_message(self, *_):
        pass


server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1]) if sys.argv[1:] else 9000), Receiver)
print(f"listening on http://127.0.0.1:{server.server_port}", flush=True)
server.serve_forever()
