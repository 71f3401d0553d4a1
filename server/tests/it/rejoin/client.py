"""One request with the official OpenAI client for Python, which repeats it after a broken connection."""

import json
import sys

from openai import OpenAI

client = OpenAI(base_url=sys.argv[1], api_key="unused")
EXTRA = {"toolcrib": {"tools": ["bank.pay"]}}
if sys.argv[2] == "chat":
    messages = [{"role": "user", "content": "pay"}]
    answer = client.chat.completions.create(model="large", messages=messages, extra_body=EXTRA)
    text = answer.choices[0].message.content
else:
    answer = client.responses.create(model="large", input="pay", extra_body=EXTRA)
    text = answer.output_text
print(json.dumps({"text": text, "joined": answer.to_dict()["toolcrib"].get("joined", False)}))
