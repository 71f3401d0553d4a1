"""Runs the program of a page of docs/integrations in all cells of its row in the table of docs/integrations/README.md.

    matrix.py PAGE --toolcrib BINARY --runtime PATH --docs DIRECTORY [--short] [--only CELL]

PATH is a Python interpreter, or a directory with `node_modules`. The programs are the code blocks of the page,
unchanged: their environment names the server and the model. Prints one line of JSON for each cell, with the
expected word of the table and the word for what was seen.
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request

from scripted_model import CALL_ID, LAST_ORDER, NAME, ScriptedModel, letters

HERE = pathlib.Path(__file__).parent
CELLS = ["list", "call", "structure", "invalid", "slow", "question", "kill", "big", "names"]
ORDER = {"type": "object", "required": ["id", "total", "paid"],
         "properties": {"id": {"type": "integer"}, "total": {"type": "number"}, "paid": {"type": "boolean"},
                        "note": {"type": ["string", "null"]}}}
ORDERS = {"type": "object", "required": ["orders"], "properties": {"orders": {"type": "array", "items": ORDER}}}
TOOLS = [
    {"name": "orders.get", "description": "Returns one order.", "effect": "read", "output_schema": ORDER,
     "schema": {"type": "object", "required": ["id"], "additionalProperties": False,
                "properties": {"id": {"type": "integer", "minimum": 1, "description": "Number of the order"}}}},
    {"name": "orders.export", "description": "Returns all orders.", "effect": "read", "output_schema": ORDERS,
     "schema": {"type": "object", "properties": {}}},
    {"name": "orders.audit", "description": "Checks all orders.", "effect": "read", "timeout_ms": 600_000,
     "schema": {"type": "object", "required": ["seconds"], "properties": {"seconds": {"type": "number"}}}},
    {"name": "pay.once", "description": "Pays a sum.", "effect": "irreversible", "timeout_ms": 600_000,
     "schema": {"type": "object", "required": ["sum"], "properties": {"sum": {"type": "number"}}}},
]
LISTED = ["calculation.eval", "call.result", "desk.greet", "orders.get", "pay.once", "result.read"]
# The endpoint for OpenAI's SDKs is a model, and has no tool that returns results.
LISTED_IN_CHAT = [name for name in LISTED if name != "call.result"]


class Toolcrib:
    """The server as a process, with its own directory, and the tools of TOOLS, which this process provides."""

    def __init__(self, options, model):
        self.options = options
        self.directory = tempfile.TemporaryDirectory(prefix="toolcrib-matrix-")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        wait = "wait_ms = 3000\nretry_ms = 1000\n" if options.short else ""
        config = f"""
data_dir = {json.dumps(self.directory.name + "/data")}
[llm]
base_url = {json.dumps(model.url + "/v1")}
model = "demo"
api_key_env = ""
[doors.mcp]
{wait}
[[mcp]]
name = "desk"
command = {json.dumps(sys.executable)}
args = [{json.dumps(str(HERE / "desk.py"))}]
"""
        self.config = pathlib.Path(self.directory.name, "toolcrib.toml")
        self.config.write_text(config)
        self.paid, self.stopped = threading.Event(), False
        self.finished_payments = threading.Event()
        self.start()
        self.request("POST", "/internal/tools/register", {"client_id": "shop", "tools": TOOLS})
        wait_for("the tool desk.greet", lambda: "desk.greet" in json.dumps(self.request("GET", "/v1/tools")))
        threading.Thread(target=self.provide, daemon=True).start()

    def start(self):
        command = [self.options.toolcrib, "serve", "--listen", f"127.0.0.1:{self.port}", "--config", self.config]
        self.log = open(self.directory.name + "/log", "ab")
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log, cwd=self.directory.name)
        wait_for("the server", lambda: self.is_ready())

    def is_ready(self):
        if self.process.poll() is not None:
            log = pathlib.Path(self.directory.name, "log").read_text()
            raise AssertionError(f"the server ended: {log[-2000:]}")
        return self.request("GET", "/v1/tools")

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self):
        self.stopped = True
        self.kill()
        self.log.close()
        self.directory.cleanup()

    def request(self, method, path, body=None):
        data = None if body is None else json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(self.url + path, method=method, data=data, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{method} {path}: {error.code} {error.read().decode()}") from error

    def provide(self):
        while not self.stopped:
            try:
                polled = self.request("GET", "/internal/ingress/poll?client_id=shop&max=10&wait_ms=5000")
            except (OSError, RuntimeError, ValueError):
                time.sleep(0.1)
                continue
            for request in polled["requests"]:
                threading.Thread(target=self.execute, args=(request,), daemon=True).start()

    def execute(self, request):
        tool, arguments = request["tool_name"], request["args"]
        if tool == "orders.get":
            result = {"id": arguments["id"], "total": 99.5, "paid": True, "note": None}
        elif tool == "orders.export":
            note = "an order of the year for the archive, number"
            result = {"orders": [{"id": n, "total": n * 1.25, "paid": n % 3 == 0, "note": f"{note} {n}"}
                                 for n in range(LAST_ORDER + 1)]}
        elif tool == "orders.audit":
            time.sleep(arguments["seconds"])
            result = {"checked": "all seven"}
        else:
            self.paid.set()
            self.finished_payments.wait()
            result = {"paid": "seven"}
        report = {"status": "SUCCEEDED", "result": result, "client_id": "shop", "attempt": request["attempt"]}
        path = f"/internal/tool_calls/{request['tool_call_id']}/submit"
        # The server may be down: a provider keeps its result until it is accepted.
        wait_for("the report", lambda: self.request("POST", path, report))

    def calls(self, tool):
        listed = self.request("GET", "/v1/tool_calls?limit=200")["tool_calls"]
        return [call for call in listed if call["tool_name"] == tool]

    def answer_as_person(self):
        """Answers the open question of a call of `desk.greet`, as a person does."""
        def held():
            for call in self.calls("desk.greet"):
                call = self.request("GET", "/v1/tool_calls/" + call["tool_call_id"])
                if call.get("hold") == "input":
                    return call
            return None

        call = wait_for("a question", held)
        answer = {"action": "accept", "content": {"name": "Ada"}}
        answers = {key: answer for key in call["hold_details"]["questions"]}
        self.request("POST", f"/v1/tool_calls/{call['tool_call_id']}/answer", {"answers": answers})


# A framework takes long to start on a busy machine.
def wait_for(description, look, seconds=150):
    until = time.monotonic() + seconds
    while True:
        try:
            if found := look():
                return found
            failure = "not yet"
        except (OSError, RuntimeError, ValueError) as error:
            failure = error
        if time.monotonic() > until:
            raise RuntimeError(f"{description} did not come: {failure}")
        time.sleep(0.05)


class Seen:
    """What a run of a program showed: its output, and for an agent what its model received."""

    def __init__(self, output, talks):
        self.output = output
        self.definitions = talks[0].definitions if talks else []
        self.results = talks[-1].results if talks else []
        if talks:
            self.names = talks[0].names
            self.received = self.results[-1] if self.results else ""
        elif lines := re.findall(r"^tools: (.*)$", output, re.MULTILINE):
            self.names = lines[0].split()
            self.received = output[output.find("text: "):]
        else:
            self.names, self.received = parse_inspector(output)


def parse_inspector(output):
    """The documents that the Inspector prints: the list of tools, then the result of the call."""
    decoder, documents, at = json.JSONDecoder(), [], output.find("{")
    while at >= 0:
        document, end = decoder.raw_decode(output, at)
        documents.append(document)
        at = output.find("{", end)
    names = [tool["name"] for tool in documents[0]["tools"]]
    # The structure is what a program uses; the text is what a model reads.
    last = documents[-1]
    texts = [part.get("text", "") for part in last.get("content", [])]
    structure = "structure: " + json.dumps(last.get("structuredContent"))
    return names, "\n".join(["text: ", *texts, structure]) if "content" in last else json.dumps(last)


class Failed(Exception):
    """A cell did not end as any word of the table says."""


class Row:
    """The programs of one page, and the cells of its row."""

    def __init__(self, options):
        self.options = options
        page = pathlib.Path(options.docs, "integrations", options.page + ".md").read_text()
        self.programs = re.findall(r"^```(python|javascript|sh)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
        assert self.programs, "the page has no program"
        self.expected = expected_words(options, len(self.programs))
        self.is_agent = "sys.argv[2]" not in page and "process.argv.slice(2)" not in page and "```sh" not in page
        self.is_chat = '+ "/v1"' in page or "+ '/v1'" in page
        self.model = ScriptedModel()
        self.workplace = tempfile.TemporaryDirectory(prefix="toolcrib-page-")
        if self.programs[0][0] != "python":
            modules = pathlib.Path(options.runtime, "node_modules")
            os.symlink(modules, pathlib.Path(self.workplace.name, "node_modules"))
        for number, (language, text) in enumerate(self.programs):
            pathlib.Path(self.workplace.name, self.file_name(number, language)).write_text(text)

    def file_name(self, number, language):
        return f"agent{number}." + {"python": "py", "javascript": "mjs", "sh": "sh"}[language]

    def command(self, number, mark, tool, arguments):
        language = self.programs[number][0]
        file = self.file_name(number, language)
        modules = f"{self.workplace.name}/node_modules/.bin"
        prefix = {"python": [self.options.runtime], "javascript": [f"{modules}/node"], "sh": ["sh"]}[language]
        name = tool.replace(".", "__")
        if self.is_agent:
            return [*prefix, file, f"[{mark}] {name} {json.dumps(arguments)}"]
        if language == "sh":
            return [*prefix, file, name, *(f"{key}={value}" for key, value in arguments.items())]
        return [*prefix, file, name, json.dumps(arguments)]

    def environment(self, server):
        modules = f"{self.workplace.name}/node_modules/.bin"
        return {**os.environ, "PATH": f"{modules}:{os.environ['PATH']}", "NO_PROXY": "127.0.0.1",
                "no_proxy": "127.0.0.1", "TOOLCRIB_SERVER": server.url,
                "OPENAI_API_KEY": "unused", "OPENAI_BASE_URL": self.model.url + "/v1",
                "OPENAI_API_BASE": self.model.url + "/v1", "GOOGLE_API_KEY": "unused",
                "GOOGLE_GEMINI_BASE_URL": self.model.url, "OPENAI_AGENTS_DISABLE_TRACING": "1",
                "HOME": self.workplace.name, "MASTRA_TELEMETRY_DISABLED": "1"}

    def start(self, server, number, cell, tool, arguments):
        return subprocess.Popen(
            self.command(number, cell, tool, arguments), cwd=self.workplace.name, env=self.environment(server),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def finish(self, process, cell, first_talk, seconds=150):
        """Waits for the end of a program. The Inspector reports an error of a tool in its exit status too."""
        try:
            out, err = process.communicate("Ada\n", timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            raise Failed(f"no end after {seconds} s: {out[-800:]} {err[-800:]}") from None
        is_reported = cell == "invalid" and "VALIDATION_ERROR" in out
        if process.returncode != 0 and not is_reported:
            raise Failed(f"exit status {process.returncode}: {out[-800:]} {err[-1600:]}")
        return Seen(out, self.model.talks(cell)[first_talk:])

    def run(self, server, number, cell, tool, arguments):
        first_talk = len(self.model.talks(cell))
        return self.finish(self.start(server, number, cell, tool, arguments), cell, first_talk)

    # The cells. Each returns a word, or fails.

    def see_list(self, server, number):
        seen = self.run(server, number, "list", "calculation.eval", {"expression": "6*7"})
        offered = [letters(name) for name in seen.names]
        wanted = LISTED_IN_CHAT if self.is_chat else LISTED
        missing = [name for name in wanted if not any(offer.endswith(letters(name)) for offer in offered)]
        return require(not missing, "yes", f"missing {missing} in {seen.names}")

    def see_call(self, server, number):
        seen = self.run(server, number, "call", "calculation.eval", {"expression": "6*7"})
        require("42" in seen.received, "yes", f"received {seen.received[:800]}")
        return require("42" in seen.output, "yes", f"printed {seen.output[:800]}")

    def see_structure(self, server, number):
        seen = self.run(server, number, "structure", "orders.get", {"id": 5})
        if not self.is_agent:
            structure = json.loads(seen.received[seen.received.find("structure: ") + 11:])
            wanted = {"id": 5, "total": 99.5, "paid": True, "note": None}
            return require(structure == wanted, "structure", f"received {seen.received[:800]}")
        plain = seen.received.replace("\\", "").replace(" ", "")
        has_fields = '"id":5' in plain and '"total":99.5' in plain and '"paid":true' in plain
        return require(has_fields, "structure", f"received {seen.received[:800]}")

    def see_invalid(self, server, number):
        seen = self.run(server, number, "invalid", "orders.get", {"id": "five"})
        if "/id must be an integer, but" in seen.received:
            return "message"
        return require("must be integer" in seen.received and not server_saw(server, "five"), "own-check",
                       f"received {seen.received[:800]}")

    def see_slow(self, server, number):
        seconds = 6 if self.options.short else 60
        seen = self.run(server, number, "slow", "orders.audit", {"seconds": seconds})
        if not self.is_agent and (ticket := CALL_ID.search(seen.received)) and "all seven" not in seen.received:
            arguments = {"tool_call_id": ticket.group()}
            seen = self.run(server, number, "slow", "call.result", arguments)
            return require("all seven" in seen.received, "ticket", f"received {seen.received[:800]}")
        is_answered = "all seven" in seen.received and "all seven" in seen.output
        require(is_answered, "", f"received {seen.received[:800]}; printed {seen.output[:400]}")
        # In a chat, Toolcrib adds a late result to the conversation by itself.
        return "ticket" if len(seen.results) > 1 and not self.is_chat else "result"

    def see_question(self, server, number):
        first_talk = len(self.model.talks("question"))
        process = self.start(server, number, "question", "desk.greet", {})
        is_asked = self.expected[number]["question"] == "asked"
        if self.is_agent and not is_asked:
            server.answer_as_person()
        seen = self.finish(process, "question", first_talk)
        if not self.is_agent and not is_asked and (ticket := CALL_ID.search(seen.received)):
            require("Which name?" in seen.received, "", f"received {seen.received[:800]}")
            server.answer_as_person()
            seen = self.run(server, number, "question", "call.result", {"tool_call_id": ticket.group()})
            return require("Hello, Ada!" in seen.received, "ticket", f"received {seen.received[:800]}")
        require("Hello, Ada!" in seen.received, "", f"received {seen.received[:800]}")
        if len(seen.results) > 1:
            return require("Which name?" in seen.results[0], "ticket", f"received {seen.results[0][:800]}")
        return "asked" if is_asked else "person"

    def see_kill(self, _, number):
        server = Toolcrib(self.options, self.model)
        try:
            first_talk = len(self.model.talks("kill"))
            process = self.start(server, number, "kill", "pay.once", {"sum": 7})
            wait_for("the payment", lambda: server.paid.is_set() or process.poll() is not None)
            time.sleep(0.5 if self.options.short else 3)
            server.kill()
            server.start()
            # The call has taken ten seconds when it ends.
            time.sleep(0.5 if self.options.short else 6)
            server.finished_payments.set()
            word = "result"
            try:
                seen = self.finish(process, "kill", first_talk)
            except Failed:
                if not self.is_chat:
                    raise
                # The program is started again, with the same request.
                word, seen = "repeat", self.run(server, number, "kill", "pay.once", {"sum": 7})
            calls = server.calls("pay.once")
            require(len(calls) == 1, "", f"{len(calls)} calls")
            is_answered = "seven" in seen.received and "seven" in seen.output
            return require(is_answered, word, f"received {seen.received[:800]}; printed {seen.output[:400]}")
        finally:
            server.stop()

    def see_big(self, server, number):
        seen = self.run(server, number, "big", "orders.export", {})
        digest = seen.results[0] if seen.results else seen.received
        require(len(digest) < 60_000, "", f"{len(digest)} characters: {digest[:400]}")
        require("result__read" in digest, "", f"no way to read the rest: {digest[:800]}")
        if not self.is_agent:
            query = {"tool_call_id": CALL_ID.search(digest).group(), "pointer": "/orders", "offset": LAST_ORDER}
            seen = self.run(server, number, "big", "result.read", query)
        return require(f"number {LAST_ORDER}" in seen.received, "digest", f"received {seen.received[:800]}")

    def see_names(self, server, number):
        seen = self.run(server, number, "names", "calculation.eval", {"expression": "6*7"})
        bad = [name for name in seen.names if not NAME.fullmatch(name)]
        require(not bad, "", f"names {bad}")
        require(len(set(seen.names)) == len(seen.names), "", f"a name is twice in {seen.names}")
        problems = [problem for definition in seen.definitions for problem in schema_problems(definition)]
        return require(not problems, "yes", f"schemas {problems}")


def server_saw(server, text):
    return any(text in json.dumps(call) for call in server.calls("orders.get"))


def require(condition, word, otherwise):
    if not condition:
        raise Failed(otherwise)
    return word


def schema_problems(definition):
    """Keywords that OpenAI's API, Gemini or the parsers of frameworks reject."""
    problems = []

    def walk(schema, path):
        if not isinstance(schema, dict):
            problems.append(f"{path} is {schema!r}")
            return
        if str(schema.get("format", "")).startswith(("uint", "int")):
            problems.append(f"{path}.format is {schema['format']}")
        if "items" in schema:
            walk(schema["items"], path + ".items")
        for key, value in (schema.get("properties") or {}).items():
            walk(value, f"{path}.{key}")

    parameters = definition.get("parameters") or definition.get("parametersJsonSchema")
    if parameters is not None:
        if str(parameters.get("type", "")).lower() != "object":
            problems.append(f"{definition['name']} has parameters of the type {parameters.get('type')}")
        walk(parameters, definition["name"])
    return problems


def expected_words(options, programs):
    """The rows of the page in the table of docs/integrations/README.md, one for each of its programs."""
    table = pathlib.Path(options.docs, "integrations", "README.md").read_text()
    lines = re.findall(rf"^\|.*\({options.page}\.md(?:#.*)?\).*\|$", table, re.MULTILINE)
    assert len(lines) == programs, f"{options.page} has {programs} programs and {len(lines)} rows"
    rows = []
    for line in lines:
        words = [word.strip() for word in line.strip("|").split("|")][1:]
        assert len(words) == len(CELLS) and all(words), f"a row of {options.page} misses a cell"
        rows.append(dict(zip(CELLS, words)))
    return rows


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("page")
    for option in ["--toolcrib", "--runtime", "--docs"]:
        parser.add_argument(option, required=True)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--only")
    options = parser.parse_args()
    row = Row(options)
    server = Toolcrib(options, row.model)

    def look(cell):
        for number, expected in enumerate(row.expected):
            try:
                seen, detail = getattr(row, "see_" + cell)(server, number), ""
            except (Failed, RuntimeError, ValueError, KeyError, AttributeError) as failed:
                seen, detail = "failed", f"{type(failed).__name__}: {failed}"
            line = {"program": number, "cell": cell, "expected": expected[cell], "seen": seen, "detail": detail}
            print(json.dumps(line), flush=True)

    # The cells that mostly wait run at the same time as the others.
    cells = [options.only] if options.only else CELLS
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(look, cell) for cell in cells if cell in ("slow", "kill")]
        waiting.append(pool.submit(lambda: [look(cell) for cell in cells if cell not in ("slow", "kill")]))
        for future in waiting:
            future.result()
    server.stop()


main()
