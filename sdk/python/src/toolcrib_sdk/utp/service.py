"""A tool service: receives commands, runs the tools, reports the results."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import inspect
import json
import logging
import re
import time
from dataclasses import dataclass, field
from typing import Any, Awaitable, Callable, Dict, Mapping, Optional, Set, Tuple, Union

import nats
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy
from nats.js.errors import NotFoundError

from . import rpc
from .cards import Card, CardBox, ToolCallContent
from .errors import BadRequest, CGError, NotFound, OutcomeUnknown, build_error_result_from_exception
from .process import run_until_signal
from .reports import ReportRefused, publish_tool_result_report
from .results import ToolResultBuilder, ToolResultContext
from .subjects import DEFAULT_VERSION, Subject, child_traceparent, parse_subject, safe_str

log = logging.getLogger("toolcrib_sdk.utp")

# The header of each identity field; version v1r4 has them in headers instead of the payload.
IDENTITY_HEADERS = {
    "tool_call_id": "cg-tool-call-id",
    "agent_turn_id": "cg-turn-id",
    "agent_id": "cg-agent-id",
    "turn_epoch": "cg-turn-epoch",
    "step_id": "cg-step-id",
    "effect": "toolcrib-effect",
    "deadline_at_ms": "toolcrib-deadline-at-ms",
}
FORBIDDEN_FIELDS = ("args", "arguments", "result")
REDELIVERY_DELAY_S = 2.0
MIN_REQUEST_S = 60.0
DEFAULT_REQUEST_S = 600.0


@dataclass(frozen=True)
class Result:
    """A result with a status other than success, or with another `after_execution`."""

    result: Any = None
    status: str = "success"
    error: Optional[Mapping[str, Any]] = None
    after_execution: Optional[str] = None


@dataclass(frozen=True)
class Call:
    """The call that a handler executes."""

    tool_name: str
    tool_call_id: str
    project_id: str
    channel_id: str
    agent_id: str
    agent_turn_id: str
    turn_epoch: int
    effect: str
    step_id: Optional[str] = None
    context_box_id: Optional[str] = None
    deadline_at_ms: Optional[int] = None
    traceparent: Optional[str] = None
    depth: int = 0
    metadata: Dict[str, Any] = field(default_factory=dict)

    def remaining_s(self) -> Optional[float]:
        """Returns the seconds until the deadline of the call, or None if it has none."""
        if self.deadline_at_ms is None:
            return None
        return self.deadline_at_ms / 1000 - time.time()


Handler = Callable[[Dict[str, Any], Call], Union[Any, Awaitable[Any]]]
CallKey = Tuple[str, str, str]


class _Unanswerable(Exception):
    """A command that names no call, so that no result can be reported."""


@dataclass
class _Command:
    subject: Subject
    data: Dict[str, Any]
    headers: Dict[str, str]
    context: ToolResultContext
    deliveries: int

    @classmethod
    def parse(cls, msg: Msg) -> "_Command":
        headers = {name.lower(): value for name, value in (msg.headers or {}).items()}
        subject = parse_subject(msg.subject)
        if subject is None:
            raise _Unanswerable("this is not a subject of UTP")
        try:
            data = json.loads(msg.data)
        except ValueError as error:
            raise _Unanswerable(f"the command is not JSON: {error}") from None
        if not isinstance(data, dict):
            raise _Unanswerable("the command is not an object")
        for name, header in IDENTITY_HEADERS.items():
            if data.get(name) is None and header in headers:
                data[name] = headers[header]
        for name, value in (("project", subject.project_id), ("channel", subject.channel_id)):
            if headers.get(f"cg-{name}-id", value) != value:
                raise _Unanswerable(f"the header cg-{name}-id does not match the subject")
        try:
            context = ToolResultContext.from_cmd_data(project_id=subject.project_id, cmd_data=data)
        except ValueError as error:
            raise _Unanswerable(str(error)) from None
        return cls(subject, data, headers, context, msg.metadata.num_delivered)

    def key(self) -> CallKey:
        return (self.context.project_id, self.context.agent_turn_id, self.context.tool_call_id)

    def check(self) -> None:
        for name in FORBIDDEN_FIELDS:
            if name in self.data:
                raise BadRequest(f"payload.{name} is forbidden: the card has the arguments")
        needed = ("tool_call_card_id", "after_execution")
        missing = [name for name in needed if safe_str(self.data.get(name)) is None]
        if missing:
            raise BadRequest(f"missing required fields {missing}")

    def may_run_twice(self) -> bool:
        return self.data.get("effect") in ("read", "idempotent")

    def request_s(self) -> float:
        """Returns the time for which requests about the call are repeated. A late result is still
        worth recording."""
        deadline = self.deadline_at_ms()
        if deadline is None:
            return DEFAULT_REQUEST_S
        return max(deadline / 1000 - time.time(), MIN_REQUEST_S)

    def deadline_at_ms(self) -> Optional[int]:
        try:
            return int(self.data["deadline_at_ms"])
        except (KeyError, TypeError, ValueError):
            return None

    def rpc_headers(self, sender: str) -> Dict[str, str]:
        sent = {"CG-Sender": sender}
        sent["traceparent"] = child_traceparent(self.headers.get("traceparent"))
        for name in ("tracestate", "cg-recursion-depth"):
            if name in self.headers:
                sent["CG-Recursion-Depth" if name.startswith("cg") else name] = self.headers[name]
        return sent

    def to_call(self, tool_name: str, metadata: Dict[str, Any]) -> Call:
        depth = self.headers.get("cg-recursion-depth", "0")
        return Call(
            tool_name=tool_name,
            tool_call_id=self.context.tool_call_id,
            project_id=self.subject.project_id,
            channel_id=self.subject.channel_id,
            agent_id=self.context.agent_id,
            agent_turn_id=self.context.agent_turn_id,
            turn_epoch=self.context.turn_epoch,
            effect=str(self.data.get("effect") or "irreversible"),
            step_id=self.context.step_id,
            context_box_id=safe_str(self.data.get("context_box_id")),
            deadline_at_ms=self.deadline_at_ms(),
            traceparent=self.headers.get("traceparent"),
            depth=int(depth) if depth.isdigit() else 0,
            metadata=metadata,
        )


class Service:
    """A tool service on NATS.

    Each tool is served at the target with its name: `word_count` receives the commands of
    `cmd.tool.word_count.*`. Name another target with `@service.tool(name, target=…)`, or one for
    all tools with `Service(url, target=…)`. Processes that serve the same target share its commands.

    A command that is delivered again is answered with the stored result of its call. If it may have
    started before and has no result, it runs again only if its effect is `read` or `idempotent`.
    """

    def __init__(
        self,
        url: str = "nats://127.0.0.1:4222",
        *,
        target: Optional[str] = None,
        name: str = "tool.python",
        version: Optional[str] = None,
        max_concurrency: int = 16,
        ack_wait_s: float = 30.0,
        **connect_options: Any,
    ) -> None:
        self.url = url
        self.target = target
        self.name = name
        self.version = version or rpc.protocol_version(None) or DEFAULT_VERSION
        self.max_concurrency = max(max_concurrency, 1)
        self.ack_wait_s = ack_wait_s
        self._connect_options = connect_options
        self._tools: Dict[str, Handler] = {}
        self._targets: Set[str] = set()
        self._running: Set[CallKey] = set()
        # The delivery number of each call that this process returned without starting it.
        self._returned: Dict[CallKey, int] = {}
        self._nats: Any = None
        self._cards: Any = None

    def tool(self, name: str, *, target: Optional[str] = None) -> Callable[[Handler], Handler]:
        """Registers a handler, `handler(args, call)`, as a tool. It returns the result, or raises an
        exception. A handler that is not `async` runs in a thread."""
        target = target or self.target or re.sub(r"[^A-Za-z0-9_-]", "_", name)
        if not re.fullmatch(r"[^\s.*>]+", target):
            raise ValueError(f'"{target}" cannot be part of a NATS subject')

        def register(handler: Handler) -> Handler:
            if name in self._tools:
                raise ValueError(f'the tool "{name}" is registered twice')
            self._tools[name] = handler
            self._targets.add(target)
            return handler

        return register

    def run(self) -> None:
        """Serves until the process is interrupted or terminated, then finishes running calls."""
        run_until_signal(self.serve)

    async def serve(self, stop: Optional[asyncio.Event] = None) -> None:
        """Serves until `stop` is set, then finishes running calls."""
        if not self._tools:
            raise ValueError("the service has no tools: register one with @service.tool(name)")
        stop = stop or asyncio.Event()
        options = {"max_reconnect_attempts": -1, "name": self.name, **self._connect_options}
        self._nats = await nats.connect(self.url, **options)
        self._cards = CardBox(self._nats, version=self.version)
        slots = asyncio.Semaphore(self.max_concurrency)
        try:
            targets = [self._serve_target(target, slots, stop) for target in sorted(self._targets)]
            await asyncio.gather(*targets)
        finally:
            await self._nats.close()

    async def _serve_target(
        self, target: str, slots: asyncio.Semaphore, stop: asyncio.Event
    ) -> None:
        tasks: Set[asyncio.Task] = set()
        while not stop.is_set():
            try:
                subscription = await self._subscribe(target)
                log.info("ready: %s", target)
                await self._take_commands(subscription, slots, stop, tasks)
            except NotFoundError:
                log.warning("the stream of commands is missing; is Toolcrib connected to this NATS?")
                await _wait(stop, 1.0)
            except (NatsError, OSError, asyncio.TimeoutError) as error:
                log.warning("commands cannot be received, retrying: %r", error)
                await _wait(stop, 1.0)
        if tasks:
            await asyncio.wait(tasks)

    async def _subscribe(self, target: str) -> Any:
        jetstream, stream = self._nats.jetstream(), f"cg_cmd_{self.version}"
        prefix = f"cg.{self.version}.*.*.cmd.tool.{target}."
        durable = f"tool_{re.sub(r'[^A-Za-z0-9]', '_', target)}_cmd_{self.version}"
        with contextlib.suppress(NotFoundError):
            existing = await jetstream.consumer_info(stream, durable)
            if not (existing.config.filter_subject or "").startswith(prefix):
                # Another target has the same consumer name, which allows fewer characters.
                durable += "_" + hashlib.sha256(target.encode()).hexdigest()[:8]
        config = ConsumerConfig(
            deliver_policy=DeliverPolicy.ALL,
            ack_policy=AckPolicy.EXPLICIT,
            ack_wait=self.ack_wait_s,
            # An unavailable server returns, and an unusable command becomes a dead letter.
            max_deliver=-1,
            max_ack_pending=10_000,
        )
        return await jetstream.pull_subscribe(f"{prefix}>", durable, stream=stream, config=config)

    async def _take_commands(
        self,
        subscription: Any,
        slots: asyncio.Semaphore,
        stop: asyncio.Event,
        tasks: Set[asyncio.Task],
    ) -> None:
        while not stop.is_set():
            # One command per free slot: a command that waited here would look started to others.
            await slots.acquire()
            try:
                fetch = asyncio.ensure_future(subscription.fetch(1, timeout=5))
                stopping = asyncio.ensure_future(stop.wait())
                await asyncio.wait({fetch, stopping}, return_when=asyncio.FIRST_COMPLETED)
                stopping.cancel()
                if not fetch.done():
                    fetch.cancel()
                    with contextlib.suppress(asyncio.CancelledError, NatsError, asyncio.TimeoutError):
                        await fetch
                    slots.release()
                    return
                messages = fetch.result()
            except asyncio.TimeoutError:
                slots.release()
                continue
            except BaseException:
                slots.release()
                raise
            task = asyncio.ensure_future(self._handle_all(messages, slots))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    async def _handle_all(self, messages: Any, slots: asyncio.Semaphore) -> None:
        try:
            for msg in messages:
                await self._handle(msg)
        finally:
            slots.release()

    async def _handle(self, msg: Msg) -> None:
        try:
            try:
                command = _Command.parse(msg)
            except _Unanswerable as reason:
                await self._send_dead_letter(msg, str(reason))
                await msg.term()
                return
            if command.key() in self._running:
                return
            self._running.add(command.key())
            heartbeat = asyncio.ensure_future(self._send_heartbeats(msg))
            try:
                await self._execute(command)
            finally:
                heartbeat.cancel()
                self._running.discard(command.key())
            await msg.ack()
        except rpc.ServerUnavailable as error:
            log.warning("%s", error)
            with contextlib.suppress(NatsError, OSError):
                await msg.nak(delay=REDELIVERY_DELAY_S)
        except (NatsError, OSError, asyncio.TimeoutError) as error:
            # The broker delivers the command again.
            log.warning("%s: %r", msg.subject, error)

    async def _send_heartbeats(self, msg: Msg) -> None:
        while True:
            await asyncio.sleep(self.ack_wait_s / 3)
            with contextlib.suppress(NatsError, OSError):
                await msg.in_progress()

    async def _execute(self, command: _Command) -> None:
        tool_name = safe_str(command.data.get("tool_name")) or "unknown"
        metadata: Dict[str, Any] = {}
        try:
            command.check()
            card, has_ended = await self._read_card(command)
            metadata = card.metadata
            tool_name = card.content.tool_name or tool_name
            seen = self._returned.pop(command.key(), None)
            is_repeated = command.deliveries > 1 and seen != command.deliveries - 1
            if is_repeated and await self._report_stored_result(command):
                return
            outcome = await self._run(command, tool_name, card, is_repeated, has_ended)
        except rpc.ServerUnavailable:
            self._returned[command.key()] = command.deliveries
            raise
        except CGError as error:
            result, body = build_error_result_from_exception(error)
            outcome = Result(result=result, status="failed", error=body)
        await self._report(command, tool_name, metadata, outcome)

    async def _read_card(self, command: _Command) -> Tuple[Card, bool]:
        """Returns the `tool.call` card, and true if the call has ended. Acknowledges the call."""
        card_id = str(command.data["tool_call_card_id"])
        subject = self._rpc_subject(command, "cards.get")
        headers = command.rpc_headers(self.name)
        try:
            reply = await rpc.request(
                self._nats,
                subject,
                {"card_ids": [card_id]},
                headers=headers,
                timeout_s=command.request_s(),
            )
        except rpc.RequestRefused as refused:
            raise CGError(refused.message, detail=refused.detail, code=refused.code) from None
        if not reply.get("cards"):
            raise NotFound(f'there is no card "{card_id}"')
        card = Card.from_json(reply["cards"][0], command.subject.project_id)
        if card.type != "tool.call" or not isinstance(card.content, ToolCallContent):
            raise BadRequest(f'card "{card_id}" is a {card.type}, not a tool.call')
        if card.tool_call_id and card.tool_call_id != command.context.tool_call_id:
            raise BadRequest(f'card "{card_id}" belongs to the call "{card.tool_call_id}"')
        return card, card_id in (reply.get("ended") or [])

    async def _run(
        self,
        command: _Command,
        tool_name: str,
        card: Card,
        is_repeated: bool,
        has_ended: bool,
    ) -> Result:
        if has_ended:
            error = CGError(f"{tool_name} was not started: its call has ended", code="canceled")
            result, body = build_error_result_from_exception(error)
            return Result(result=result, status="canceled", error=body)
        if is_repeated and not command.may_run_twice():
            raise OutcomeUnknown(
                f"{tool_name} was started before and its result is unknown: it may have happened, "
                "and was not started again; a retry is not safe"
            )
        handler = self._tools.get(tool_name)
        if handler is None:
            raise NotFound(
                f'this service has no tool "{tool_name}"',
                # Toolcrib adds no warning that an irreversible tool may have taken effect.
                detail={"toolcrib_side_effect": "none"},
            )
        call = command.to_call(tool_name, card.metadata)
        args = dict(card.content.arguments or {})
        try:
            if inspect.iscoroutinefunction(handler):
                value = await handler(args, call)
            else:
                value = await asyncio.get_running_loop().run_in_executor(None, handler, args, call)
                if inspect.isawaitable(value):
                    value = await value
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001: every failure of a tool is its result
            log.info("%s failed: %r", tool_name, error)
            result, body = build_error_result_from_exception(error)
            return Result(result=result, status="failed", error=body)
        return value if isinstance(value, Result) else Result(result=value)

    async def _report_stored_result(self, command: _Command) -> bool:
        """Reports the result of an earlier delivery, and returns false if there is none."""
        card_id = command.context.result_card_id()
        cards = await self._cards.get_cards(
            [card_id],
            project_id=command.subject.project_id,
            headers=command.rpc_headers(self.name),
            timeout_s=command.request_s(),
        )
        if not cards:
            return False
        content = cards[0].content
        payload = {
            "tool_call_id": command.context.tool_call_id,
            "agent_turn_id": command.context.agent_turn_id,
            "turn_epoch": command.context.turn_epoch,
            "agent_id": command.context.agent_id,
            "after_execution": command.context.after_execution or "suspend",
            "status": getattr(content, "status", "failed"),
            "tool_result_card_id": card_id,
            "step_id": command.context.step_id,
        }
        await self._send_report(command, payload, None)
        return True

    async def _report(
        self, command: _Command, tool_name: str, metadata: Dict[str, Any], outcome: Result
    ) -> None:
        context = ToolResultContext.from_cmd_data(
            project_id=command.subject.project_id,
            cmd_data=command.data,
            tool_call_meta=metadata,
        )
        builder = ToolResultBuilder(context, author_id=self.name, function_name=tool_name)
        control = outcome.result
        if outcome.after_execution is not None:
            # The report repeats the command's value; the result overrides it.
            fields = control if isinstance(control, dict) else {"value": control}
            control = {**fields, "__cg_control": {"after_execution": outcome.after_execution}}
        payload, card = builder.build(status=outcome.status, result=control, error=outcome.error)
        try:
            await self._send_report(command, payload, card)
        except rpc.MessageTooLarge as error:
            result, body = build_error_result_from_exception(
                CGError(f"the result of {tool_name} is too large: {error}", code="too_large")
            )
            payload, card = builder.build(status="failed", result=result, error=body)
            await self._send_report(command, payload, card)

    async def _send_report(
        self, command: _Command, payload: Dict[str, Any], card: Optional[Card]
    ) -> None:
        try:
            reply = await publish_tool_result_report(
                nats=self._nats,
                project_id=command.subject.project_id,
                channel_id=command.subject.channel_id,
                payload=payload,
                headers=command.rpc_headers(self.name),
                source_agent_id=self.name,
                card=card,
                version=self.version,
                timeout_s=command.request_s(),
            )
        except ReportRefused as refused:
            # Toolcrib keeps the report as a dead letter; sending it again changes nothing.
            log.warning("%s: the report was refused: %s", payload["tool_call_id"], refused)
            return
        state = "late" if reply.get("late") else "duplicate" if reply.get("duplicate") else "taken"
        log.info("%s %s %s", payload["tool_call_id"], payload["status"], state)

    async def _send_dead_letter(self, msg: Msg, reason: str) -> None:
        log.warning("%s: %s", msg.subject, reason)
        base = ".".join(msg.subject.split(".")[:4])
        letter = {
            "reason": "malformed",
            "message": reason,
            "subject": msg.subject,
            "headers": dict(msg.headers or {}),
            "payload": msg.data.decode(errors="replace"),
        }
        try:
            await rpc.request(
                self._nats,
                f"{base}.rpc.sys.l0.dead_letter",
                letter,
                headers={"CG-Sender": self.name},
                timeout_s=20.0,
            )
        except (rpc.RequestRefused, rpc.MessageTooLarge) as error:
            log.error("%s: the command was dropped: %s", msg.subject, error)

    def _rpc_subject(self, command: _Command, operation: str) -> str:
        subject = command.subject
        prefix = f"cg.{subject.version}.{subject.project_id}.{subject.channel_id}"
        return f"{prefix}.rpc.sys.{operation}"


async def _wait(stop: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(stop.wait(), seconds)
