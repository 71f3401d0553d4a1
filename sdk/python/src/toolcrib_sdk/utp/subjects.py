"""Subjects, identifiers and trace headers."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from typing import Any, Optional

DEFAULT_VERSION = "v1r3"

_TRACEPARENT = re.compile(r"^[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}$")


@dataclass(frozen=True)
class Subject:
    """The parts of `cg.<version>.<project>.<channel>.<category>.<component>.<target>.<suffix>`."""

    version: str
    project_id: str
    channel_id: str
    category: str
    component: str
    target: str
    suffix: str


def parse_subject(text: str) -> Optional[Subject]:
    """Returns the parts of a subject, or None if it is not a subject of UTP."""
    tokens = text.split(".")
    if len(tokens) < 8 or tokens[0] != "cg" or not all(tokens):
        return None
    return Subject(*tokens[1:7], suffix=".".join(tokens[7:]))


def safe_str(value: Any) -> Optional[str]:
    """Returns the value as text without surrounding blanks, or None if nothing remains."""
    if value is None:
        return None
    return str(value).strip() or None


def child_traceparent(parent: Optional[str]) -> str:
    """Returns a new span of the parent's trace, or the first span of a new trace."""
    match = _TRACEPARENT.match((parent or "").strip().lower())
    trace_id = match.group(1) if match and int(match.group(1), 16) else secrets.token_hex(16)
    return f"00-{trace_id}-{secrets.token_hex(8)}-01"
