"""A tool service over NATS that counts words; needs only nats-py. NATS_URL is the URL of NATS."""
import asyncio, hashlib, json, nats, os
from nats.js.api import ConsumerConfig
VERSION, TARGET, NAME = os.environ.get("UTP_VERSION", "v1r3"), "count", "tool.python"
IDS = {"tool_call_id": "cg-tool-call-id", "agent_turn_id": "cg-turn-id", "agent_id": "cg-agent-id",
       "turn_epoch": "cg-turn-epoch"}  # fields of the payload; with v1r4, headers

def run(args):  # the tool itself
    return {"words": len(args["text"].split())}

async def execute(nc, msg):
    base = ".".join(msg.subject.split(".")[:4])  # cg.<version>.<project>.<channel>
    given = {name.lower(): value for name, value in (msg.headers or {}).items()}
    headers = {"CG-Sender": NAME, "traceparent": given.get("traceparent", "")}
    async def ask(what, body):
        reply = await nc.request(f"{base}.rpc.sys.{what}", json.dumps(body).encode(), 10, headers=headers)
        return json.loads(reply.data)
    try:
        command = {name: given.get(header) for name, header in IDS.items()} | json.loads(msg.data)
        if not all(str(command[name] or "").strip() for name in IDS): raise ValueError(f"needs {[*IDS]}")
        ids = {name: str(command[name]) for name in IDS} | {"turn_epoch": int(command["turn_epoch"])}
    except (TypeError, ValueError) as reason:  # no call to answer: stored as a dead letter
        letter = {"reason": "malformed", "message": str(reason), "subject": msg.subject,
                  "headers": given, "payload": msg.data.decode(errors="replace")}
        print("malformed:", reason, await ask("l0.dead_letter", letter), flush=True)
        return await msg.term()
    got = await ask("cards.get", {"card_ids": [command.get("tool_call_card_id") or "none"]})
    if got.get("ended"): return await msg.ack()  # the call has ended: do not execute it
    try:
        if not got["ok"]: raise LookupError(got["error"]["message"])
        status, result, error = "success", run(got["cards"][0]["content"]["arguments"]), None
    except Exception as reason:
        error = {"code": "internal_error", "message": repr(reason), "source": "tool"}
        status, result = "failed", {"error_code": "internal_error", "error_message": repr(reason)}
    call = "/".join([msg.subject, ids["agent_turn_id"], ids["tool_call_id"]])  # one card per call
    said = {"status": status, "after_execution": command.get("after_execution") or "suspend"}
    card = {"card_id": "py" + hashlib.sha256(call.encode()).hexdigest()[:30], "type": "tool.result",
            "content": {"__type__": "ToolResultContent", **said, "result": result, "error": error},
            "metadata": {name: ids[name] for name in ("agent_turn_id", "tool_call_id")}, "author_id": NAME}
    taken = await ask("l0.report", {**ids, **said, "tool_result_card_id": card["card_id"], "card": card})
    print(ids["tool_call_id"], status, "taken" if taken["ok"] else taken["error"], flush=True)
    await msg.ack()

async def main():
    nc = await nats.connect(os.environ.get("NATS_URL", "nats://127.0.0.1:4222"), max_reconnect_attempts=-1)
    sub = await nc.jetstream().pull_subscribe(
        f"cg.{VERSION}.*.*.cmd.tool.{TARGET}.*", f"tool_{TARGET}_cmd_{VERSION}",
        stream=f"cg_cmd_{VERSION}", config=ConsumerConfig(ack_wait=30, max_deliver=3))
    print("ready", flush=True)
    while True:
        try:
            work = [execute(nc, msg) for msg in await sub.fetch(16, timeout=5)]
            wrong = [*filter(None, await asyncio.gather(*work, return_exceptions=True))]
        except Exception as reason:  # no commands yet, or NATS is unavailable
            wrong = [] if isinstance(reason, asyncio.TimeoutError) else [reason]
        for reason in wrong: print("it comes again:", repr(reason), flush=True)
        await asyncio.sleep(1 if wrong else 0)

asyncio.run(main())
