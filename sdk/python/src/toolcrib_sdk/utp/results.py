"""Builds the result card of a call and the payload of its report."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any, Dict, Mapping, Optional, Tuple

from .cards import Card, ToolResultContent
from .errors import error_as_result, to_json
from .subjects import safe_str

STATUSES = ("success", "failed", "canceled", "timeout", "partial")
AFTER_EXECUTION = ("suspend", "terminate")


@dataclass(frozen=True)
class ToolResultContext:
    """The identity of a call, which its report repeats unchanged."""

    project_id: str
    tool_call_id: str
    agent_turn_id: str
    turn_epoch: int
    agent_id: str
    after_execution: Optional[str] = None
    tool_call_card_id: Optional[str] = None
    step_id: Optional[str] = None
    trace_id: Optional[str] = None
    parent_step_id: Optional[str] = None
    card_step_id: Optional[str] = None

    @classmethod
    def from_cmd_data(
        cls,
        *,
        project_id: str,
        cmd_data: Mapping[str, Any],
        tool_call_meta: Optional[Mapping[str, Any]] = None,
    ) -> "ToolResultContext":
        """Takes the identity from a command, and the lineage from the metadata of its `tool.call`
        card."""
        meta = tool_call_meta or {}
        needed = ("tool_call_id", "agent_turn_id", "agent_id")
        ids = {name: safe_str(cmd_data.get(name)) for name in needed}
        missing = [name for name in needed if ids[name] is None]
        if missing:
            raise ValueError(f"the command lacks {', '.join(missing)}")
        try:
            epoch = int(cmd_data["turn_epoch"])
        except (KeyError, TypeError, ValueError):
            raise ValueError("the turn_epoch of the command is not an integer") from None
        return cls(
            project_id=project_id,
            turn_epoch=epoch,
            after_execution=safe_str(cmd_data.get("after_execution")),
            tool_call_card_id=safe_str(cmd_data.get("tool_call_card_id")),
            step_id=safe_str(cmd_data.get("step_id")) or safe_str(meta.get("step_id")),
            trace_id=safe_str(meta.get("trace_id")),
            parent_step_id=safe_str(meta.get("parent_step_id")),
            card_step_id=safe_str(meta.get("step_id")),
            **ids,
        )

    def result_card_id(self) -> str:
        """Returns the id of the result card. It depends only on the call, so that a call has one
        result however often its command is delivered."""
        identity = json.dumps(
            [self.project_id, self.agent_turn_id, self.tool_call_id],
            ensure_ascii=False,
            separators=(",", ":"),
        )
        return "res" + hashlib.sha256(identity.encode()).hexdigest()[:32]


class ToolResultBuilder:
    """Builds a result that the protocol accepts, whatever a tool returned."""

    def __init__(
        self,
        ctx: ToolResultContext,
        *,
        author_id: str,
        function_name: str,
        error_source: str = "tool",
    ) -> None:
        self.ctx = ctx
        self.author_id = author_id
        self.function_name = function_name
        self.error_source = error_source

    def build(
        self,
        *,
        status: str,
        result: Any = None,
        error: Optional[Mapping[str, Any]] = None,
        after_execution: Optional[str] = None,
    ) -> Tuple[Dict[str, Any], Card]:
        """Returns the payload of the report, and the card to store before it is sent."""
        status, result, error = self._normalize(status, result, error)
        after = after_execution or self.ctx.after_execution or "suspend"
        if after not in AFTER_EXECUTION:
            message = f'after_execution "{after}" is neither suspend nor terminate'
            status, error = "failed", self._error("invalid_after_execution", message)
            result, after = error_as_result({**error, "code": "bad_request"}), "suspend"
        content = ToolResultContent(
            status=status, after_execution=after, result=result, error=error
        )
        card = Card(
            card_id=self.ctx.result_card_id(),
            type="tool.result",
            content=content,
            project_id=self.ctx.project_id,
            author_id=self.author_id,
            metadata=self._metadata(),
            tool_call_id=self.ctx.tool_call_id,
        )
        payload = {
            "tool_call_id": self.ctx.tool_call_id,
            "agent_turn_id": self.ctx.agent_turn_id,
            "turn_epoch": self.ctx.turn_epoch,
            "agent_id": self.ctx.agent_id,
            "after_execution": after,
            "status": status,
            "tool_result_card_id": card.card_id,
            "step_id": self.ctx.step_id,
        }
        return payload, card

    def _metadata(self) -> Dict[str, Any]:
        metadata = {
            "agent_turn_id": self.ctx.agent_turn_id,
            "tool_call_id": self.ctx.tool_call_id,
            "role": "tool",
            "function_name": self.function_name,
            "step_id": self.ctx.card_step_id,
            "trace_id": self.ctx.trace_id,
            "parent_step_id": self.ctx.parent_step_id,
        }
        return {name: value for name, value in metadata.items() if value is not None}

    def _error(self, code: str, message: str, detail: Any = None) -> Dict[str, Any]:
        return {"code": code, "message": message, "source": self.error_source, "detail": detail}

    def _normalize(
        self, status: str, result: Any, error: Optional[Mapping[str, Any]]
    ) -> Tuple[str, Any, Optional[Dict[str, Any]]]:
        body = dict(error) if error is not None else None
        if status not in STATUSES:
            body = body or self._error("invalid_status", f'the status "{status}" is unknown')
            status = "failed"
        if status == "success" and body is not None:
            status = "failed"
        if status != "success":
            body = self._complete(body, result)
            try:
                to_json(body)
            except (TypeError, ValueError) as reason:
                body = self._error("error_not_serializable", str(reason))
        try:
            to_json(result)
        except (TypeError, ValueError) as reason:
            status, result = "failed", None
            body = self._error("result_not_serializable", str(reason))
        if status not in ("success", "partial") and result is None and body is not None:
            result = error_as_result(body)
        return status, result, body

    def _complete(self, error: Optional[Dict[str, Any]], result: Any) -> Dict[str, Any]:
        """Returns the error with a code and a message, taken from the result if necessary."""
        named = result if isinstance(result, dict) else {}
        nested = named.get("error") if isinstance(named.get("error"), dict) else {}
        body = dict(error) if error is not None else dict(nested)
        body["code"] = body.get("code") or named.get("error_code") or "unknown_error"
        body["message"] = body.get("message") or named.get("error_message") or "the tool failed"
        body.setdefault("source", self.error_source)
        return body
