"""A language model that follows a script, in the formats of OpenAI (chat completions and responses) and Gemini.

A prompt is `[MARK] TOOL JSON`: the model calls the tool with these arguments. It picks the name from the tools of
the request, as a model does. A ticket makes it call the tool that returns results, and a digest of orders the tool
that reads them. Any other result ends its turn. Like OpenAI's API, it refuses names of tools with other characters
than letters, digits, `_` and `-`.
"""

import http.server
import json
import re
import socketserver
import threading

NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
CALL_ID = re.compile(r"tc_[0-9A-Z]{26}")
LAST_ORDER = 21_999


class Conversation:
    """The parts of a request that the script looks at."""

    def __init__(self, prompt, results, definitions):
        self.prompt, self.results, self.definitions = prompt, results, definitions
        self.mark = prompt[prompt.find("[") + 1:prompt.find("]")]
        self.names = [definition["name"] for definition in definitions]


def letters(name):
    return re.sub(r"[^a-z0-9]", "", name.lower())


def text_of(content):
    if isinstance(content, list):
        return "".join(part.get("text") or "" for part in content)
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


def read_chat(body):
    prompt, results = "", []
    for message in body["messages"]:
        text = text_of(message.get("content") or "")
        if message["role"] == "user" and text.startswith("["):
            prompt, results = text, []
        elif message["role"] in ("user", "tool"):
            # A message of the user without a prompt is a late result.
            results.append(text)
    return Conversation(prompt, results, [tool["function"] for tool in body.get("tools") or []])


def read_responses(body):
    items = body["input"]
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    prompt, results = "", []
    for item in items:
        if item.get("role") == "user":
            prompt, results = text_of(item["content"]), []
        elif item.get("type") == "function_call_output":
            results.append(text_of(item["output"]))
    return Conversation(prompt, results, body.get("tools") or [])


def read_gemini(body):
    prompt, results = "", []
    for content in body["contents"]:
        for part in content["parts"]:
            if "functionResponse" in part:
                results.append(json.dumps(part["functionResponse"]["response"], ensure_ascii=False))
            elif "text" in part and content["role"] == "user":
                prompt, results = part["text"], []
    tools = [tool for group in body.get("tools") or [] for tool in group.get("functionDeclarations", [])]
    return Conversation(prompt, results, tools)


def decide(talk):
    """Returns the answer: a text, or the name and the arguments of a call."""
    def pick(wanted):
        return next((name for name in talk.names if letters(name).endswith(letters(wanted))), wanted)

    if not talk.results:
        tool, arguments = talk.prompt[talk.prompt.find("]") + 1:].strip().split(" ", 1)
        return pick(tool), json.loads(arguments)
    last = talk.results[-1]
    ticket = CALL_ID.search(last)
    if ticket and re.search("call_+result", last) and len(talk.results) < 8:
        return pick("call.result"), {"tool_call_id": ticket.group(), "wait_ms": 20_000}
    if ticket and "[big]" in talk.prompt and len(talk.results) == 1:
        query = {"pointer": "/orders", "where": {"id": LAST_ORDER}}
        return pick("result.read"), {"tool_call_id": ticket.group(), **query}
    return "The tool returned: " + last[:300]


def chat_answer(body, answer, number):
    base = {"id": f"chatcmpl_{number}", "created": 1_700_000_000, "model": body["model"]}
    usage = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
    message = {"role": "assistant", "content": answer if isinstance(answer, str) else None}
    if not isinstance(answer, str):
        function = {"name": answer[0], "arguments": json.dumps(answer[1])}
        message["tool_calls"] = [{"index": 0, "id": f"call_{number}", "type": "function", "function": function}]
    reason = "stop" if isinstance(answer, str) else "tool_calls"
    if not body.get("stream"):
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": reason}
        return {**base, "object": "chat.completion", "choices": [choice], "usage": usage}, None
    base["object"] = "chat.completion.chunk"
    chunks = [{**base, "choices": [{"index": 0, "delta": message, "finish_reason": None}]},
              {**base, "choices": [{"index": 0, "delta": {}, "finish_reason": reason}]}]
    if (body.get("stream_options") or {}).get("include_usage"):
        chunks.append({**base, "choices": [], "usage": usage})
    return None, [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks] + ["data: [DONE]\n\n"]


def response_item(answer, number):
    if isinstance(answer, str):
        content = [{"type": "output_text", "text": answer, "annotations": []}]
        return {"type": "message", "id": f"msg_{number}", "role": "assistant", "status": "completed",
                "content": content}
    return {"type": "function_call", "id": f"fc_{number}", "call_id": f"call_{number}", "name": answer[0],
            "arguments": json.dumps(answer[1]), "status": "completed"}


def response_answer(body, answer, number):
    item = response_item(answer, number)
    usage = {"input_tokens": 10, "input_tokens_details": {"cached_tokens": 0}, "output_tokens": 5,
             "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": 15}
    document = {"id": f"resp_{number}", "object": "response", "created_at": 1_700_000_000, "model": body["model"],
                "status": "completed", "error": None, "incomplete_details": None, "instructions": None,
                "metadata": {}, "output": [item], "parallel_tool_calls": True, "temperature": 1,
                "tool_choice": "auto", "tools": [], "top_p": 1, "usage": usage}
    return (None, response_events(document, item, answer)) if body.get("stream") else (document, None)


def response_events(document, item, answer):
    events = []

    def add(kind, **fields):
        event = {"type": kind, "sequence_number": len(events), **fields}
        events.append(f"event: {kind}\ndata: {json.dumps(event)}\n\n")

    place = {"item_id": item["id"], "output_index": 0}
    begun = {"content": []} if isinstance(answer, str) else {"arguments": ""}
    add("response.created", response={**document, "status": "in_progress", "output": []})
    add("response.output_item.added", output_index=0, item={**item, "status": "in_progress", **begun})
    if isinstance(answer, str):
        part = item["content"][0]
        add("response.content_part.added", **place, content_index=0, part={**part, "text": ""})
        add("response.output_text.delta", **place, content_index=0, delta=answer, logprobs=[])
        add("response.output_text.done", **place, content_index=0, text=answer, logprobs=[])
        add("response.content_part.done", **place, content_index=0, part=part)
    else:
        add("response.function_call_arguments.delta", **place, delta=item["arguments"])
        add("response.function_call_arguments.done", **place, name=item["name"], arguments=item["arguments"])
    add("response.output_item.done", output_index=0, item=item)
    add("response.completed", response=document)
    return events


def gemini_answer(body, answer, number):
    part = {"text": answer} if isinstance(answer, str) else {"functionCall": {"name": answer[0], "args": answer[1]}}
    candidate = {"content": {"role": "model", "parts": [part]}, "finishReason": "STOP", "index": 0}
    usage = {"promptTokenCount": 10, "candidatesTokenCount": 5, "totalTokenCount": 15}
    return {"candidates": [candidate], "usageMetadata": usage, "modelVersion": "scripted"}, None


FORMATS = {"/chat/completions": (read_chat, chat_answer), "/responses": (read_responses, response_answer),
           ":generateContent": (read_gemini, gemini_answer)}


class ScriptedModel:
    """A running model. `talks(mark)` returns the conversations of its requests, in order."""

    def __init__(self):
        model = self
        self.recorded, self.lock = [], threading.Lock()

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *arguments):
                pass

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                status, document, events = model.answer(self.path, body)
                data = json.dumps(document).encode() if events is None else "".join(events).encode()
                kind = "application/json" if events is None else "text/event-stream"
                self.send_response(status)
                self.send_header("content-type", kind)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        class Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
            daemon_threads = True

        server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()

    def answer(self, path, body):
        read, write = next(entry for end, entry in FORMATS.items() if path.split("?")[0].endswith(end))
        talk = read(body)
        with self.lock:
            self.recorded.append(talk)
            number = len(self.recorded)
        for name in talk.names:
            if not NAME.fullmatch(name):
                error = {"message": f"invalid tool name {name!r}", "type": "invalid_request_error"}
                return 400, {"error": error}, None
        return 200, *write(body, decide(talk), number)

    def talks(self, mark):
        with self.lock:
            return [talk for talk in self.recorded if talk.mark == mark]
