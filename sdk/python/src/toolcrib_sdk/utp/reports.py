"""Reports a result to Toolcrib."""

from __future__ import annotations

from typing import Any, Dict, Mapping, Optional

from . import rpc
from .cards import Card
from .errors import CGError


class ReportRefused(CGError):
    """Toolcrib refused a report, and keeps it as a dead letter."""


async def publish_tool_result_report(
    *,
    nats: Any,
    project_id: str,
    channel_id: str,
    payload: Mapping[str, Any],
    headers: Optional[Mapping[str, str]] = None,
    source_agent_id: str,
    execution_store: Any = None,
    resource_store: Any = None,
    state_store: Any = None,
    card: Optional[Card] = None,
    version: Optional[str] = None,
    timeout_s: float = 60.0,
) -> Dict[str, Any]:
    """Reports a result and returns `{ok, inbox_id, duplicate, late}`. Repeats the request until
    Toolcrib responds. `card` is the result card, if it is not stored yet.

    Toolcrib writes the inbox and wakes the agent, so the three stores are not used; they are
    parameters because services pass them."""
    version = version or rpc.protocol_version(nats)
    subject = f"cg.{version}.{project_id}.{channel_id}.rpc.sys.l0.report"
    body = dict(payload)
    if card is not None:
        body["card"] = card.to_json()
    sent = {"CG-Sender": source_agent_id, **(headers or {})}
    try:
        return await rpc.request(nats, subject, body, headers=sent, timeout_s=timeout_s)
    except rpc.RequestRefused as refused:
        raise ReportRefused(
            refused.message, detail=refused.detail, retryable=False, code=refused.code
        ) from None
