"""A streamed request with the official OpenAI client for Python. A stream that breaks is requested again.

    stream.py URL chat|responses
"""

import json
import sys

from openai import OpenAI

client = OpenAI(base_url=sys.argv[1], api_key="unused")
EXTRA = {"toolcrib": {"tools": ["bank.pay"]}}


def once():
    if sys.argv[2] == "chat":
        messages = [{"role": "user", "content": "pay"}]
        response = client.chat.completions.with_raw_response.create(
            model="large", messages=messages, stream=True, extra_body=EXTRA)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in response.parse() if chunk.choices)
    else:
        response = client.responses.with_raw_response.create(
            model="large", input="pay", stream=True, extra_body=EXTRA)
        text = "".join(event.delta for event in response.parse() if event.type == "response.output_text.delta")
    return text, "toolcrib-joined" in response.headers


for _ in range(4):
    try:
        text, joined = once()
        break
    except Exception as error:  # whatever the HTTP library of this version raises
        print(repr(error), file=sys.stderr)
print(json.dumps({"text": text, "joined": joined}))
