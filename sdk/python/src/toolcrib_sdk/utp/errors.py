"""Errors of tools, and the form in which a result carries them."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Dict, Optional, Tuple


class CGError(Exception):
    """An error with a code that callers and models can act on."""

    code = "internal_error"
    http_status = 500
    retryable = False

    def __init__(
        self,
        message: str,
        *,
        detail: Any = None,
        retryable: Optional[bool] = None,
        code: Optional[str] = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.detail = detail
        if retryable is not None:
            self.retryable = retryable
        if code is not None:
            self.code = code


class BadRequest(CGError):
    """The arguments are invalid."""

    code, http_status = "bad_request", 400


class ProtocolViolation(BadRequest):
    """A message does not follow the protocol."""


class AuthFailed(CGError):
    """The tool may not do this, or its credentials are refused."""

    code, http_status = "auth_failed", 403


class NotFound(CGError):
    """The subject of the request does not exist."""

    code, http_status = "not_found", 404


class Conflict(CGError):
    """The request conflicts with the present state."""

    code, http_status = "conflict", 409


class UpstreamUnavailable(CGError):
    """A service that the tool needs does not respond."""

    code, http_status, retryable = "upstream_unavailable", 503, True


class ToolTimeout(CGError):
    """The tool took too long."""

    code, http_status = "tool_timeout", 504


class OutcomeUnknown(CGError):
    """The tool may have taken effect, but its result is not known."""

    def __init__(self, message: str, *, detail: Any = None) -> None:
        # UTP has no code for this; Toolcrib reads its own code from the detail.
        known = detail if isinstance(detail, dict) else ({} if detail is None else {"detail": detail})
        super().__init__(message, detail={**known, "toolcrib_code": "OUTCOME_UNKNOWN"})


def to_json(value: Any) -> str:
    """Returns the value as JSON. NaN and infinity are errors, because they are not JSON."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _classify(error: BaseException) -> Tuple[str, int, bool, Any]:
    if isinstance(error, CGError):
        return error.code, error.http_status, error.retryable, error.detail
    if isinstance(error, (TimeoutError, asyncio.TimeoutError)):
        return ToolTimeout.code, ToolTimeout.http_status, False, None
    if isinstance(error, KeyError):
        return NotFound.code, NotFound.http_status, False, None
    if isinstance(error, (ValueError, TypeError)):
        return BadRequest.code, BadRequest.http_status, False, None
    if isinstance(error, ConnectionError):
        return UpstreamUnavailable.code, UpstreamUnavailable.http_status, True, None
    return CGError.code, CGError.http_status, False, None


def build_error_result_from_exception(
    error: BaseException, *, source: str = "tool"
) -> Tuple[Dict[str, Any], Dict[str, Any]]:
    """Returns the `result` and the `error` of a result card for an exception."""
    code, http_status, retryable, detail = _classify(error)
    message = str(error)
    if isinstance(error, KeyError):
        # The text of a KeyError is only the key.
        message = f"{type(error).__name__}: {message}"
    message = message or type(error).__name__
    try:
        to_json(detail)
    except (TypeError, ValueError):
        detail = repr(detail)
    body = {
        "code": code,
        "message": message,
        "source": source,
        "detail": detail,
        "retryable": retryable,
        "http_status": http_status,
    }
    return error_as_result(body), body


def error_as_result(error: Dict[str, Any]) -> Dict[str, Any]:
    """Returns the `result` that accompanies an `error`."""
    return {
        "error_code": error.get("code"),
        "error_message": error.get("message"),
        "error": error,
        "error_detail": error.get("detail"),
    }
