"""Requests to Toolcrib over NATS."""

from __future__ import annotations

import asyncio
import json
import os
import time
from typing import Any, Dict, Mapping, Optional

from nats.errors import MaxPayloadError
from nats.errors import Error as NatsError

from .errors import CGError, to_json
from .subjects import DEFAULT_VERSION


class ServerUnavailable(CGError):
    """Toolcrib did not respond in time. The request may be repeated."""

    code, http_status, retryable = "upstream_unavailable", 503, True


class MessageTooLarge(CGError):
    """The message is larger than the broker accepts."""

    code, http_status = "too_large", 413


class RequestRefused(CGError):
    """Toolcrib refused a request."""

    def __init__(self, error: Mapping[str, Any]) -> None:
        super().__init__(
            str(error.get("message") or "the request was refused"),
            detail=error.get("detail"),
            retryable=bool(error.get("retryable")),
            code=str(error.get("code") or "internal_error"),
        )


def protocol_version(nats: Any) -> str:
    """Returns the protocol version of a connection: its attribute `utp_version`, the environment
    variable `UTP_VERSION`, or the default."""
    version = getattr(nats, "utp_version", None)
    return version or os.environ.get("UTP_VERSION") or DEFAULT_VERSION


async def request(
    nats: Any,
    subject: str,
    body: Mapping[str, Any],
    *,
    headers: Optional[Mapping[str, str]] = None,
    timeout_s: float = 60.0,
) -> Dict[str, Any]:
    """Sends a request until there is a response: the server may be restarting. Returns the response,
    or raises `RequestRefused`, `MessageTooLarge` or `ServerUnavailable`."""
    payload = to_json(body).encode()
    until, pause, reason = time.monotonic() + timeout_s, 0.05, "no response"
    while True:
        left = until - time.monotonic()
        if left <= 0:
            raise ServerUnavailable(f"{subject}: {reason} within {timeout_s:g} s")
        try:
            reply = await nats.request(
                subject, payload, timeout=min(left, 10.0), headers=dict(headers or {})
            )
            response = json.loads(reply.data)
        except MaxPayloadError:
            raise MessageTooLarge(f"{len(payload)} bytes exceed the limit of the broker") from None
        except (NatsError, asyncio.TimeoutError, OSError) as error:
            reason = str(error) or type(error).__name__
        except ValueError:
            reason = "a response that is not JSON"
        else:
            if response.get("ok"):
                return response
            refused = RequestRefused(response.get("error") or {})
            if not refused.retryable:
                raise refused
            reason = refused.message
        await asyncio.sleep(min(pause, max(until - time.monotonic(), 0)))
        pause = min(pause * 2, 2.0)
