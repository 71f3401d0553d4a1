"""A tool service that uses the parts of the package without `Service`: its handler is the example
in the guide for tool developers. NATS_URL is the URL of NATS."""

import asyncio
import json
import os

import nats as nats_client
from nats.js.api import ConsumerConfig

from toolcrib_sdk.utp import (
    CardBox,
    ToolCallContent,
    ToolResultBuilder,
    ToolResultContext,
    parse_subject,
    publish_tool_result_report,
    safe_str,
)


def do_something(args):
    return {"words": len(args["text"].split())}


async def handle_tool_command(msg, *, cardbox, nats, execution_store, resource_store=None, state_store=None):
    data = json.loads(msg.data)
    parts = parse_subject(msg.subject)
    if parts is None:
        raise RuntimeError("invalid subject")

    tool_call_id = data["tool_call_id"]
    agent_turn_id = data["agent_turn_id"]
    turn_epoch = data["turn_epoch"]
    after_exec = data.get("after_execution")
    tool_call_card_id = data["tool_call_card_id"]
    project_id = parts.project_id

    cards = await cardbox.get_cards([tool_call_card_id], project_id=project_id)
    if not cards:
        raise RuntimeError(f"tool_call_card not found: {tool_call_card_id}")
    tool_call_card = cards[0]
    args = {}
    if isinstance(tool_call_card.content, ToolCallContent):
        args = dict(tool_call_card.content.arguments or {})

    tool_call_meta = getattr(tool_call_card, "metadata", {}) or {}

    try:
        result = do_something(args)
        status = "success"
    except Exception as exc:
        result = {
            "error_code": "internal_error",
            "error_message": str(exc),
            "error": {"code": "internal_error", "message": str(exc)},
        }
        status = "failed"

    ctx = ToolResultContext.from_cmd_data(
        project_id=project_id,
        cmd_data=data,
        tool_call_meta=tool_call_meta,
    )
    payload, result_card = (
        ToolResultBuilder(ctx, author_id="tool.example", function_name=safe_str(data.get("tool_name")) or "unknown")
        .build(status=status, result=result)
    )
    await cardbox.save_card(result_card)

    await publish_tool_result_report(
        nats=nats,
        execution_store=execution_store,
        resource_store=resource_store,
        state_store=state_store,
        project_id=project_id,
        channel_id=parts.channel_id,
        payload=payload,
        headers={},
        source_agent_id="tool.example",
    )
    return {
        "tool_call_id": tool_call_id,
        "agent_turn_id": agent_turn_id,
        "turn_epoch": turn_epoch,
        "after_execution": after_exec,
        "status": status,
    }


async def main():
    nats = await nats_client.connect(os.environ["NATS_URL"])
    commands = await nats.jetstream().pull_subscribe(
        "cg.v1r3.*.*.cmd.tool.count.>", "tool_count_cmd_v1r3",
        stream="cg_cmd_v1r3", config=ConsumerConfig(ack_wait=30, max_deliver=3))
    print("ready", flush=True)
    while True:
        try:
            messages = await commands.fetch(1, timeout=5)
        except asyncio.TimeoutError:
            continue
        for msg in messages:
            print(await handle_tool_command(msg, cardbox=CardBox(nats), nats=nats, execution_store=None), flush=True)
            await msg.ack()


asyncio.run(main())
