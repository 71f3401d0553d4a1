"""Cards: the stored arguments and results of calls."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Dict, List, Mapping, Optional, Sequence

from . import rpc
from .errors import to_json


@dataclass(frozen=True)
class ToolCallContent:
    """The content of a `tool.call` card."""

    tool_name: str
    arguments: Dict[str, Any]
    status: str = "called"
    target_subject: Optional[str] = None


@dataclass(frozen=True)
class ToolResultContent:
    """The content of a `tool.result` card. A success has no error; any other status has one with a
    code and a message."""

    status: str
    after_execution: str
    result: Any = None
    error: Optional[Dict[str, Any]] = None

    def __post_init__(self) -> None:
        if self.status == "success":
            if self.error is not None:
                raise ValueError("a successful result has no error")
            return
        if not isinstance(self.error, dict) or not (
            self.error.get("code") and self.error.get("message")
        ):
            raise ValueError("the error of a result needs a code and a message")
        to_json(self.error)


_CONTENTS = {"ToolCallContent": ToolCallContent, "ToolResultContent": ToolResultContent}


@dataclass(frozen=True)
class Card:
    """A card. `content` is a `ToolCallContent`, a `ToolResultContent`, or the JSON of another kind."""

    card_id: str
    type: str
    content: Any
    project_id: str = ""
    author_id: str = ""
    metadata: Dict[str, Any] = field(default_factory=dict)
    tool_call_id: Optional[str] = None
    created_at: Optional[str] = None

    @classmethod
    def from_json(cls, card: Mapping[str, Any], project_id: str = "") -> "Card":
        """Reads a card as Toolcrib sends it."""
        return cls(
            card_id=card["card_id"],
            type=card.get("type") or "unknown",
            content=_read_content(card.get("content")),
            project_id=card.get("project_id") or project_id,
            author_id=card.get("author_id") or "",
            metadata=dict(card.get("metadata") or {}),
            tool_call_id=card.get("tool_call_id"),
            created_at=card.get("created_at"),
        )

    def to_json(self) -> Dict[str, Any]:
        """Returns the card as Toolcrib reads it."""
        content = self.content
        if isinstance(content, tuple(_CONTENTS.values())):
            content = {"__type__": type(content).__name__, **asdict(content)}
        card = {
            "card_id": self.card_id,
            "type": self.type,
            "content": content,
            "author_id": self.author_id,
            "metadata": self.metadata,
        }
        if self.tool_call_id:
            card["tool_call_id"] = self.tool_call_id
        return card


def _read_content(content: Any) -> Any:
    kind = _CONTENTS.get(content.get("__type__")) if isinstance(content, dict) else None
    if kind is None:
        return content
    names = kind.__dataclass_fields__
    try:
        return kind(**{name: value for name, value in content.items() if name in names})
    except (TypeError, ValueError):
        return content


class CardBox:
    """The cards of a server, over NATS. `nats` is a connection of nats-py."""

    def __init__(
        self, nats: Any, *, version: Optional[str] = None, channel_id: str = "public"
    ) -> None:
        self._nats = nats
        self._version = version or rpc.protocol_version(nats)
        self._channel_id = channel_id

    def _subject(self, project_id: str, operation: str) -> str:
        return f"cg.{self._version}.{project_id}.{self._channel_id}.rpc.sys.cards.{operation}"

    async def get_cards(
        self,
        card_ids: Sequence[str],
        *,
        project_id: str,
        headers: Optional[Mapping[str, str]] = None,
        timeout_s: float = 60.0,
    ) -> List[Card]:
        """Returns the cards, in the order of the ids; a card that does not exist is omitted."""
        body = {"card_ids": list(card_ids)}
        try:
            reply = await rpc.request(
                self._nats,
                self._subject(project_id, "get"),
                body,
                headers=headers,
                timeout_s=timeout_s,
            )
        except rpc.RequestRefused as refused:
            if refused.code == "not_found":
                return []
            raise
        return [Card.from_json(card, project_id) for card in reply["cards"]]

    async def save_card(self, card: Card, *, timeout_s: float = 60.0) -> str:
        """Stores a card and returns its id. Storing the same card again has no effect."""
        if not card.project_id:
            raise ValueError("the card has no project_id")
        subject = self._subject(card.project_id, "put")
        reply = await rpc.request(
            self._nats, subject, {"card": card.to_json()}, timeout_s=timeout_s
        )
        return reply["card_id"]
