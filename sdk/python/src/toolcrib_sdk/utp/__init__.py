"""UTP, the protocol between Toolcrib and programs on NATS.

`Service` is a whole tool service, and `Worker` a whole worker of agents. The other names are parts of
a service, for programs that receive their commands themselves.
"""

from .cards import Card, CardBox, ToolCallContent, ToolResultContent
from .errors import (
    AuthFailed,
    BadRequest,
    CGError,
    Conflict,
    NotFound,
    OutcomeUnknown,
    ProtocolViolation,
    ToolTimeout,
    UpstreamUnavailable,
    build_error_result_from_exception,
)
from .reports import ReportRefused, publish_tool_result_report
from .results import ToolResultBuilder, ToolResultContext
from .service import Call, Result, Service
from .subjects import Subject, parse_subject, safe_str
from .worker import ToolFailed, Turn, Worker

__all__ = [
    "AuthFailed",
    "BadRequest",
    "CGError",
    "Call",
    "Card",
    "CardBox",
    "Conflict",
    "NotFound",
    "OutcomeUnknown",
    "ProtocolViolation",
    "ReportRefused",
    "Result",
    "Service",
    "Subject",
    "ToolCallContent",
    "ToolFailed",
    "ToolResultBuilder",
    "ToolResultContent",
    "ToolResultContext",
    "ToolTimeout",
    "Turn",
    "UpstreamUnavailable",
    "Worker",
    "build_error_result_from_exception",
    "parse_subject",
    "publish_tool_result_report",
    "safe_str",
]
