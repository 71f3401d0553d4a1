"""A worker: drives the turns that Toolcrib hands to agents."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import logging
import re
import time
import uuid
from typing import Any, Awaitable, Callable, Dict, Mapping, Optional, Tuple, Union

import nats
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy
from nats.js.errors import NotFoundError

from . import rpc
from .errors import CGError
from .process import run_until_signal
from .subjects import DEFAULT_VERSION, parse_subject

log = logging.getLogger("toolcrib_sdk.utp")

INBOX_PAGE = 50
MAX_REASON = 500


class ToolFailed(CGError):
    """A tool that the agent called did not succeed."""


class Turn:
    """The turn that a handler executes: its instruction, and the tools of its agent."""

    def __init__(self, worker: "Worker", base: str, item: Mapping[str, Any]) -> None:
        payload = item["payload"]
        self.agent_id: str = payload["agent_id"]
        self.agent_turn_id: str = payload["agent_turn_id"]
        self.turn_epoch: int = int(payload["turn_epoch"])
        self.instruction: str = payload.get("instruction") or ""
        self.context: Any = payload.get("context")
        self.context_box_id: Optional[str] = payload.get("context_box_id")
        self.parent_agent_id: Optional[str] = payload.get("parent_agent_id")
        self.call_id: Optional[str] = payload.get("call_id")
        self.deadline_at_ms: Optional[int] = payload.get("deadline_at_ms")
        self.traceparent: Optional[str] = item.get("traceparent")
        self.depth: int = int(item.get("recursion_depth") or 0)
        # Tokens that the handler's model has used; a handler that has one adds them.
        self.tokens: int = 0
        self._instruction_card_id: Optional[str] = payload.get("instruction_card_id")
        self._worker, self._base, self._calls = worker, base, 0
        # A renewal must not use the epoch of a turn that is being resumed.
        self._lock = asyncio.Lock()

    def remaining_s(self) -> Optional[float]:
        """Returns the seconds until the caller gives up, or None if it has no deadline."""
        if self.deadline_at_ms is None:
            return None
        return self.deadline_at_ms / 1000 - time.time()

    async def call_tool(self, name: str, **arguments: Any) -> Any:
        """Calls a tool as the agent and returns its result, or raises `ToolFailed`."""
        self._calls += 1
        call_id = f"call_{self.turn_epoch}_{self._calls}"
        call = {"tool_call_id": call_id, "tool_name": name, "arguments": arguments}
        async with self._lock:
            body = {
                "turn_epoch": self.turn_epoch,
                "step_id": f"step_{call_id}",
                "calls": [call],
                **self._usage(),
            }
            await self._request("dispatch", body)
            # With the same id, a repeated request gets the response that was lost.
            request_id = uuid.uuid4().hex
            while True:
                body = {
                    "turn_epoch": self.turn_epoch,
                    "wait_ms": 5_000,
                    "request_id": request_id,
                }
                try:
                    resumed = await self._request("resume", body)
                    break
                except rpc.RequestRefused as refused:
                    if not (refused.detail or {}).get("waiting"):
                        raise
            self.turn_epoch = resumed["turn_epoch"]
        [result] = resumed["results"]
        if result["status"] not in ("success", "partial"):
            error = result.get("error") or {}
            raise ToolFailed(str(error.get("message") or f"{name} failed"))
        return result["result"]

    def _usage(self) -> Dict[str, int]:
        # A server that does not know the field refuses it.
        return {"tokens": self.tokens} if self.tokens else {}

    async def _request(self, operation: str, body: Mapping[str, Any]) -> Dict[str, Any]:
        body = {"agent_turn_id": self.agent_turn_id, **body}
        subject = f"{self._base}.rpc.agent.{self.agent_id}.{operation}"
        return await self._worker._request(subject, body)

    async def _begin(self, lease_s: float) -> None:
        body = {"lease_ms": int(lease_s * 1000), "request_id": uuid.uuid4().hex}
        leased = await self._request("lease", body)
        self.turn_epoch = leased["turn_epoch"]
        if not self.instruction and self._instruction_card_id:
            subject = f"{self._base}.rpc.sys.cards.get"
            reply = await self._worker._request(
                subject, {"card_ids": [self._instruction_card_id]}
            )
            self.instruction = reply["cards"][0]["content"].get("text", "")

    async def _renew(self, lease_s: float) -> None:
        while True:
            await asyncio.sleep(lease_s / 3)
            async with self._lock:
                try:
                    await self._request("renew", {"turn_epoch": self.turn_epoch})
                except rpc.ServerUnavailable:
                    continue
                except rpc.RequestRefused as refused:
                    log.warning("%s is no longer leased: %s", self.agent_turn_id, refused)
                    return

    async def _finish(self, deliverable: Any) -> None:
        content = {"__type__": "JsonContent", "data": deliverable}
        if isinstance(deliverable, str):
            content = {"__type__": "TextContent", "text": deliverable}
        card = {
            "card_id": f"dlv_{self.agent_turn_id}_{self.turn_epoch}",
            "type": "task.deliverable",
            "author_id": self.agent_id,
            "content": content,
            "metadata": {"agent_turn_id": self.agent_turn_id},
        }
        await self._worker._request(f"{self._base}.rpc.sys.cards.put", {"card": card})
        body = {
            "turn_epoch": self.turn_epoch,
            "deliverable_card_id": card["card_id"],
            **self._usage(),
        }
        await self._request("finish", body)

    async def _fail(self, error: BaseException) -> None:
        reason = (str(error) or type(error).__name__)[:MAX_REASON]
        body = {
            "turn_epoch": self.turn_epoch,
            "status": "failed",
            "reason": reason,
            **self._usage(),
        }
        await self._request("finish", body)


Handler = Callable[[Turn], Union[Any, Awaitable[Any]]]


class Worker:
    """A worker of agents on NATS.

    It is woken at `cmd.agent.<target>.wakeup`, the `worker_target` of its agents, leases the turns in
    their inboxes, and runs the handler of the agent, or else the handler without an agent. The value
    that a handler returns is the deliverable of the turn; an exception fails the turn. Workers with
    the same target share its turns. If a worker dies, its lease expires and another one gets the turn.
    """

    def __init__(
        self,
        url: str = "nats://127.0.0.1:4222",
        *,
        target: str,
        version: Optional[str] = None,
        max_concurrency: int = 16,
        lease_s: float = 60.0,
        **connect_options: Any,
    ) -> None:
        if not re.fullmatch(r"[^\s.*>]+", target):
            raise ValueError(f'"{target}" cannot be part of a NATS subject')
        self.url, self.target, self.lease_s = url, target, max(lease_s, 1.0)
        self.version = version or rpc.protocol_version(None) or DEFAULT_VERSION
        self._slots = asyncio.Semaphore(max(max_concurrency, 1))
        self._connect_options = connect_options
        self._handlers: Dict[Optional[str], Handler] = {}
        self._running: Dict[Tuple[str, str], asyncio.Task] = {}
        self._nats: Any = None

    def agent(self, agent_id: Optional[str] = None) -> Callable[[Handler], Handler]:
        """Registers the handler of an agent, `handler(turn)`; without an id, that of all others. A
        handler that is not `async` runs in a thread."""

        def register(handler: Handler) -> Handler:
            if agent_id in self._handlers:
                raise ValueError(f'the agent "{agent_id}" is registered twice')
            self._handlers[agent_id] = handler
            return handler

        return register

    def run(self) -> None:
        """Serves until the process is interrupted or terminated, then finishes running turns."""
        run_until_signal(self.serve)

    async def serve(self, stop: Optional[asyncio.Event] = None) -> None:
        """Serves until `stop` is set, then finishes running turns."""
        if not self._handlers:
            raise ValueError("the worker has no agents: register one with @worker.agent(id)")
        stop = stop or asyncio.Event()
        options = {"max_reconnect_attempts": -1, "name": self.target, **self._connect_options}
        self._nats = await nats.connect(self.url, **options)
        try:
            while not stop.is_set():
                try:
                    await self._take_wakeups(stop)
                except NotFoundError:
                    log.warning("the stream is missing; is Toolcrib connected to this NATS?")
                    await _wait(stop, 1.0)
                except (NatsError, OSError, asyncio.TimeoutError) as error:
                    log.warning("wakeups cannot be received, retrying: %r", error)
                    await _wait(stop, 1.0)
            if self._running:
                await asyncio.wait(set(self._running.values()))
        finally:
            await self._nats.close()

    async def _take_wakeups(self, stop: asyncio.Event) -> None:
        jetstream, stream = self._nats.jetstream(), f"cg_cmd_{self.version}"
        subject = f"cg.{self.version}.*.*.cmd.agent.{self.target}.wakeup"
        name = re.sub(r"[^A-Za-z0-9_-]+", "_", self.target)
        config = ConsumerConfig(deliver_policy=DeliverPolicy.ALL, ack_policy=AckPolicy.EXPLICIT)
        durable = f"agent_worker_{name}_wakeup_{self.version}"
        subscription = await jetstream.pull_subscribe(
            subject, durable, stream=stream, config=config
        )
        log.info("ready: %s", self.target)
        while not stop.is_set():
            try:
                messages = await subscription.fetch(16, timeout=1)
            except asyncio.TimeoutError:
                continue
            for msg in messages:
                # The inbox holds the turn, and Toolcrib repeats the wakeup until it is read.
                await msg.ack()
                # A wakeup that cannot be read must not end the worker.
                with contextlib.suppress(rpc.ServerUnavailable, rpc.RequestRefused, ValueError):
                    await self._read_inbox(msg)

    async def _read_inbox(self, msg: Msg) -> None:
        subject, headers = parse_subject(msg.subject), msg.headers or {}
        if subject is None:
            return
        payload = json.loads(msg.data or b"{}")
        agent_id = payload.get("agent_id") or headers.get("CG-Agent-Id")
        base = f"cg.{self.version}.{subject.project_id}.{subject.channel_id}"
        inbox = f"{base}.rpc.agent.{agent_id}"
        reply = await self._request(f"{inbox}.inbox", {"limit": INBOX_PAGE})
        done = []
        for item in reply["items"]:
            key = (subject.project_id, item["payload"].get("agent_turn_id") or "")
            if item["message_type"] == "stop":
                done.append(item["inbox_id"])
                if key in self._running:
                    self._running[key].cancel()
            elif item["message_type"] == "turn" and key not in self._running:
                task = asyncio.ensure_future(self._drive(Turn(self, base, item)))
                self._running[key] = task
                task.add_done_callback(lambda _, key=key: self._running.pop(key, None))
        if done:
            await self._request(f"{inbox}.ack", {"inbox_ids": done})

    async def _drive(self, turn: Turn) -> None:
        handler = self._handlers.get(turn.agent_id) or self._handlers.get(None)
        async with self._slots:
            try:
                await turn._begin(self.lease_s)
            except (rpc.RequestRefused, rpc.ServerUnavailable) as error:
                # Another worker has the turn, or its caller no longer waits.
                log.info("%s was not leased: %s", turn.agent_turn_id, error)
                return
            renewing = asyncio.ensure_future(turn._renew(self.lease_s))
            try:
                await self._execute(turn, handler)
            except (rpc.RequestRefused, rpc.ServerUnavailable) as error:
                log.warning("%s was not finished: %s", turn.agent_turn_id, error)
            finally:
                renewing.cancel()

    async def _execute(self, turn: Turn, handler: Optional[Handler]) -> None:
        try:
            if handler is None:
                raise CGError(f'this worker does not drive the agent "{turn.agent_id}"')
            if inspect.iscoroutinefunction(handler):
                deliverable = await handler(turn)
            else:
                loop = asyncio.get_running_loop()
                deliverable = await loop.run_in_executor(None, handler, turn)
                if inspect.isawaitable(deliverable):
                    deliverable = await deliverable
        except asyncio.CancelledError:
            log.info("%s was stopped", turn.agent_turn_id)
            raise
        except Exception as error:  # noqa: BLE001: every failure of an agent ends its turn
            log.info("%s failed: %r", turn.agent_turn_id, error)
            await turn._fail(error)
            return
        try:
            await turn._finish(deliverable)
        except rpc.ServerUnavailable:
            raise
        except (CGError, TypeError, ValueError) as error:
            # A turn that has not ended would run again, and its handler would repeat its effects.
            log.warning("%s: the deliverable was not accepted: %r", turn.agent_turn_id, error)
            await turn._fail(error)
            return
        log.info("%s finished", turn.agent_turn_id)

    async def _request(self, subject: str, body: Mapping[str, Any]) -> Dict[str, Any]:
        headers = {"CG-Sender": self.target}
        return await rpc.request(self._nats, subject, body, headers=headers, timeout_s=30.0)


async def _wait(stop: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(stop.wait(), seconds)
