"""A tool service over NATS with nothing but nats-py: counts words. NATS_URL says where NATS is."""
import asyncio, hashlib, json, nats, os
from nats.js.api import ConsumerConfig

VERSION, TARGET, NAME = os.environ.get("UTP_VERSION", "v1r3"), "count", "tool.python"


def run(args):  # the tool itself
    return {"words": len(args["text"].split())}


async def ask(nc, base, what, body, headers=None):
    reply = await nc.request(f"{base}.rpc.sys.{what}", json.dumps(body).encode(), 10, headers=headers)
    return json.loads(reply.data)


async def execute(nc, msg):
    command = json.loads(msg.data)
    base = ".".join(msg.subject.split(".")[:4])  # cg.<version>.<project>.<channel>
    headers = {"CG-Sender": NAME, "traceparent": msg.headers.get("traceparent", "")}
    got = await ask(nc, base, "cards.get", {"card_ids": [command["tool_call_card_id"]]}, headers)
    if got.get("ended"): return await msg.ack()  # nobody waits for it any more: it is not begun
    try:
        status, result, error = "success", run(got["cards"][0]["content"]["arguments"]), None
    except Exception as reason:
        error = {"code": "internal_error", "message": repr(reason), "source": "tool"}
        status, result = "failed", {"error_code": "internal_error", "error_message": repr(reason)}
    # The same call has the same card, however often its command is delivered.
    call = "/".join([msg.subject, command["agent_turn_id"], command["tool_call_id"]])
    card_id = "py" + hashlib.sha256(call.encode()).hexdigest()[:30]
    meta = {name: command[name] for name in ("agent_turn_id", "tool_call_id")}
    content = {"__type__": "ToolResultContent", "status": status, "result": result, "error": error,
               "after_execution": command["after_execution"]}
    put = await ask(nc, base, "cards.put", {"card": {
        "card_id": card_id, "type": "tool.result", "author_id": NAME, "content": content,
        "metadata": {**meta, "role": "tool", "function_name": command["tool_name"]}}}, headers)
    same = ("tool_call_id", "agent_turn_id", "turn_epoch", "agent_id", "after_execution", "step_id")
    report = {name: command.get(name) for name in same}
    report |= {"status": status, "tool_result_card_id": card_id}
    taken = await ask(nc, base, "l0.report", report, headers)
    print(command["tool_call_id"], status, "taken" if taken["ok"] else taken["error"], put["ok"])
    await msg.ack()


async def main():
    url = os.environ.get("NATS_URL", "nats://127.0.0.1:4222")
    nc = await nats.connect(url, max_reconnect_attempts=-1)
    sub = await nc.jetstream().pull_subscribe(
        f"cg.{VERSION}.*.*.cmd.tool.{TARGET}.*", f"tool_{TARGET}_cmd_{VERSION}",
        stream=f"cg_cmd_{VERSION}", config=ConsumerConfig(ack_wait=30, max_deliver=3))
    print("ready", flush=True)
    while True:
        try:
            await asyncio.gather(*[execute(nc, msg) for msg in await sub.fetch(16, timeout=5)])
        except Exception as reason:  # nothing to do yet, or nobody to ask: the command comes again
            await asyncio.sleep(0 if isinstance(reason, asyncio.TimeoutError) else 1)


asyncio.run(main())
