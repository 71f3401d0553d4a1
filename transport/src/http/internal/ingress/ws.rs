//! WebSocket: the whole exchange with a client on one connection.
//!
//! The client sends `hello` first. Each message about a call is handled in a separate task, so that
//! a slow commit does not block the connection; messages about the same call are handled in the
//! order of arrival. A connection without a sign of life is closed.

mod approvals;
mod frame_inspector;
mod message_limiter;
use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::response::Response;
use futures::{SinkExt, StreamExt};
use hyper::upgrade::{OnUpgrade, Upgraded};
use hyper_util::rt::TokioIo;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::sync::{AcquireError, mpsc};
use tokio::task::JoinHandle;
use tokio::time::MissedTickBehavior;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::handshake::server::create_response_with_body;
use tokio_tungstenite::tungstenite::protocol::frame::coding::CloseCode;
use tokio_tungstenite::tungstenite::protocol::{CloseFrame, Role, WebSocketConfig};
use tokio_tungstenite::tungstenite::{self, Message as Frame, Utf8Bytes};
use toolcrib::calls::AttemptReport;
use toolcrib::clients::{ClientSession, ConnectOptions, Redelivery, Transport};
use toolcrib::domain::directory::audit::RequestOrigin;
use toolcrib::domain::fault::{Code, Error, Fault};
use toolcrib::registry::audit;
use toolcrib::{CallId, Caller, Engine};

use super::super::super::wire::FaultBody;
use super::super::super::{ConnectionPermit, HttpState};
use super::super::register::{RegisterBody, ToolOfferBody};
use super::super::submit::{ProgressBody, SubmitBody};
use super::{IngressMessage, resolve_window, to_json};
use crate::auth::RequestCredentials;
use crate::http::extract::{
    UnknownField, find_unknown_fields_in_json, parse_checked_json, refuse_unknown_fields,
    replace_lone_surrogates,
};
use crate::http::internal::ingress::ws::frame_inspector::FrameInspector;
use crate::http::internal::ingress::ws::message_limiter::{MessageLimiter, MessagePermit};
use crate::http::problem::ApiError;

/// Maximum number of messages of one client in progress; further ones are not read until one
/// finishes.
const MAX_CONCURRENT_MESSAGES: usize = 64;

/// Initial size of the buffers of a connection. It is small, because most connections are idle.
const BUFFER_BYTES: usize = 4 * 1024;

/// Maximum number of bytes drained of an oversized message, as a multiple of the message limit.
const MAX_DRAIN_FACTOR: usize = 4;

type Socket = WebSocketStream<FrameInspector<TokioIo<Upgraded>>>;

/// Types of messages that concern a call.
const CALL_MESSAGE_TYPES: [&str; 3] = ["tool_ack", "tool_progress", "tool_result"];

/// The first message of a connection.
#[derive(Deserialize)]
struct HelloMessage {
    client_id: String,
    /// Tools to register before the connection is established.
    tools: Option<Vec<ToolOfferBody>>,
    max_in_flight: Option<usize>,
    /// True if the client records its results and can answer a redelivered request from that
    /// record.
    #[serde(default)]
    resume: bool,
}

/// Fields that messages have in common.
#[derive(Deserialize)]
struct WsMessageHeader {
    #[serde(rename = "type")]
    kind: String,
    tool_call_id: Option<String>,
    attempt: Option<u32>,
    /// For `tool_ack`: request a confirmation once the acknowledgement is stored.
    #[serde(default)]
    confirm: bool,
}

pub(in super::super) async fn ws(
    State(state): State<HttpState>,
    credentials: RequestCredentials,
    mut request: Request,
) -> Result<Response, ApiError> {
    let caller = credentials.caller().clone();
    require_provider(&caller)?;
    let refused = |reason: String| {
        let message = format!("this is for WebSocket connections only: {reason}");
        Error::refused(Code::BadRequest, message)
    };
    let answer = create_response_with_body(&request, Body::empty)
        .map_err(|error| refused(error.to_string()))?;
    let upgrade = request.extensions_mut().remove::<OnUpgrade>();
    let upgrade =
        upgrade.ok_or_else(|| refused("this connection cannot be upgraded".to_owned()))?;
    let permit = request.extensions_mut().remove::<ConnectionPermit>();
    let origin = RequestOrigin { transport: Some("websocket".into()), ..audit::current_origin() };
    tokio::spawn(audit::with_origin(origin, async move {
        let Ok(upgraded) = upgrade.await else { return };
        let limit = state.max_report_bytes();
        let limits = WebSocketConfig::default();
        let limits = limits.max_message_size(Some(limit)).max_frame_size(Some(limit));
        // The library allocates both buffers at once, 128 KiB each by default. Larger messages make
        // them grow.
        let limits = limits.read_buffer_size(BUFFER_BYTES).write_buffer_size(BUFFER_BYTES);
        let inspector = FrameInspector::new(TokioIo::new(upgraded), limit);
        let socket = Socket::from_raw_socket(inspector, Role::Server, Some(limits)).await;
        run_connection(state, caller, credentials, socket).await;
        drop(permit);
    }));
    Ok(answer)
}

fn require_provider(caller: &Caller) -> Result<(), Error> {
    if caller.may_provide() {
        return Ok(());
    }
    let message = format!("a key with the role {} cannot execute calls", caller.roles);
    Err(Error::refused(Code::PermissionDenied, message))
}

async fn run_connection(
    state: HttpState,
    caller: Caller,
    credentials: RequestCredentials,
    mut socket: Socket,
) {
    let dead_after = Duration::from_millis(state.settings.dead_after_ms);
    let greeted = tokio::time::timeout(dead_after, handshake(&state, &caller, &mut socket)).await;
    let (client_id, session) = match greeted {
        Ok(Ok(greeted)) => greeted,
        Ok(Err(Some(error))) => {
            let _ = socket.send(text_frame(&error_body(None, &error))).await;
            let _ = socket.send(Frame::Close(None)).await;
            return;
        }
        // The client disconnected or sent nothing, so there is no one to respond to.
        Ok(Err(None)) | Err(_) => return,
    };
    let conversation = WsConnection {
        engine: state.engine.clone(),
        caller,
        credentials,
        client_id,
        heartbeat: Duration::from_millis(state.settings.heartbeat_ms),
        dead_after,
        max_message_bytes: state.max_report_bytes(),
    };
    conversation.run(socket, session).await;
}

/// Refuses unknown fields of the tools in a `hello`, as a registration over HTTP does. The message
/// itself may have further fields.
fn refuse_unknown_offer_fields(payload: &[u8]) -> Result<(), Error> {
    let unknown = find_unknown_fields_in_json::<HelloMessage>(payload);
    let in_offers: Vec<UnknownField> =
        unknown.into_iter().filter(|field| field.is_within("/tools/")).collect();
    refuse_unknown_fields(&in_offers)
}

/// Waits for `hello`. Returns `Err(None)` if the client disconnected.
async fn handshake(
    state: &HttpState,
    caller: &Caller,
    socket: &mut Socket,
) -> Result<(String, ClientSession), Option<Error>> {
    let first = loop {
        match socket.next().await {
            Some(Ok(Frame::Text(text))) => break text,
            Some(Ok(Frame::Ping(_) | Frame::Pong(_))) => {}
            _ => return Err(None),
        }
    };
    let limit = state.settings.max_body_bytes;
    if first.len() > limit {
        let message = format!("hello is over the limit of {limit} bytes");
        return Err(Some(Error::refused(Code::PayloadTooLarge, message)));
    }
    let (header, payload) = parse_message(first);
    if header.map_err(Some)?.kind != "hello" {
        let message = "the first message must be hello";
        return Err(Some(Error::refused(Code::BadRequest, message)));
    }
    refuse_unknown_offer_fields(&payload).map_err(Some)?;
    let hello: HelloMessage = parse_payload(&payload).map_err(Some)?;
    let window =
        resolve_window("max_in_flight", hello.max_in_flight, state.settings.default_max_in_flight);
    let window = window.map_err(Some)?;
    if let Some(tools) = hello.tools {
        let body = RegisterBody::new(hello.client_id.clone(), tools);
        state
            .engine
            .registry()
            .register(caller, body.into_registration(&state.engine, caller))
            .await
            .map_err(Some)?;
    }
    let connecting = ConnectOptions {
        client_id: hello.client_id.clone(),
        window,
        redelivery: if hello.resume { Redelivery::All } else { Redelivery::ReversibleOnly },
        transport: Transport::Streaming,
    };
    let session = state.engine.clients().connect(caller, connecting).await.map_err(Some)?;
    let answer = json!({
        "type": "hello_ack",
        "client_id": hello.client_id,
        "heartbeat_ms": state.settings.heartbeat_ms,
        "dead_after_ms": state.settings.dead_after_ms,
        "max_in_flight": window,
    });
    socket.send(text_frame(&answer)).await.map_err(|_| None)?;
    Ok((hello.client_id, session))
}

struct WsConnection {
    engine: Engine,
    caller: Caller,
    credentials: RequestCredentials,
    client_id: String,
    heartbeat: Duration,
    dead_after: Duration,
    max_message_bytes: usize,
}

impl WsConnection {
    async fn run(self, mut socket: Socket, mut session: ClientSession) {
        let (answers, mut outbox) = mpsc::channel::<Value>(MAX_CONCURRENT_MESSAGES);
        let limiter = MessageLimiter::new(MAX_CONCURRENT_MESSAGES, self.max_message_bytes);
        let mut last_on_call: HashMap<CallId, JoinHandle<()>> = HashMap::new();
        let mut heartbeat = tokio::time::interval(self.heartbeat);
        // After this process was suspended, `Delay` sends one ping instead of all missed ones, and
        // leaves time for the response.
        heartbeat.set_missed_tick_behavior(MissedTickBehavior::Delay);
        // Number of consecutive pings without a sign of life. It counts pings and not time, so that
        // a client is not disconnected because this process or its machine was suspended.
        let mut unanswered = 0;
        let bearable = (self.dead_after.as_millis() / self.heartbeat.as_millis().max(1)).max(1);
        let this = Arc::new(self);
        loop {
            tokio::select! {
                message = session.next() => {
                    let Some(message) = message else {
                        this.send(&mut socket, Frame::Close(Some(shutdown_close_frame()))).await;
                        break;
                    };
                    if !this.ensure_authorized(&mut socket).await { break }
                    let body = IngressMessage::new(&this.engine, message);
                    if !this.send(&mut socket, text_frame(&body)).await { break }
                }
                Some(answer) = outbox.recv() => {
                    if !this.send(&mut socket, text_frame(&answer)).await { break }
                }
                _ = heartbeat.tick() => {
                    let silent = unanswered >= bearable;
                    if silent || !this.ensure_authorized(&mut socket).await { break }
                    unanswered += 1;
                    if !this.send(&mut socket, Frame::Ping(Vec::new().into())).await { break }
                    last_on_call.retain(|_, task| !task.is_finished());
                }
                (permit, frame) = next_frame(&limiter, &mut socket) => {
                    let (Ok(permit), Some(frame)) = (permit, frame) else { break };
                    let frame = match frame {
                        Ok(frame) => frame,
                        Err(error) => {
                            this.close_with_error(&mut socket, error, last_on_call).await;
                            break;
                        }
                    };
                    let permit = limiter.reserve_bytes(permit, frame.len());
                    unanswered = 0;
                    let (header, payload) = match frame {
                        Frame::Text(text) => parse_message(text),
                        Frame::Binary(_) => (Err(binary_frame_error()), Bytes::new()),
                        Frame::Ping(_) | Frame::Pong(_) | Frame::Frame(_) => continue,
                        Frame::Close(_) => {
                            // Flushes the close frame, so that the client sees its close confirmed.
                            let _ = tokio::time::timeout(this.dead_after, socket.flush()).await;
                            break;
                        }
                    };
                    if !this.ensure_authorized(&mut socket).await { break }
                    let id = header.as_ref().ok().and_then(|header| header.call_id());
                    let before = id.as_ref().and_then(|id| last_on_call.remove(id));
                    let (this, answers) = (this.clone(), answers.clone());
                    let task = tokio::spawn(async move {
                        if let Some(before) = before {
                            let _ = before.await;
                        }
                        this.answer_message(header, payload, permit, &answers).await;
                    });
                    if let Some(id) = id {
                        last_on_call.insert(id, task);
                    }
                }
            }
        }
    }

    /// Handles a message and sends the responses to it. The permit bounds messages in progress.
    async fn answer_message(
        &self,
        header: Result<WsMessageHeader, Error>,
        payload: Bytes,
        permit: MessagePermit,
        answers: &mpsc::Sender<Value>,
    ) {
        if header.as_ref().is_ok_and(|header| header.kind == "approvals_follow") {
            // The subscription lasts as long as the connection, so it must not hold the permit that
            // other messages need.
            drop((permit, payload));
            if let Err(error) = self.follow_approvals(answers).await {
                let _ = answers.send(error_body(None, &error)).await;
            }
            return;
        }
        if let Some(answer) = self.handle_message(header, &payload).await {
            let _ = answers.send(answer).await;
        }
        drop(permit);
    }

    /// Returns true if the key of this connection is still valid; otherwise closes the connection
    /// with the reason.
    async fn ensure_authorized(&self, socket: &mut Socket) -> bool {
        let Err(error) = self.credentials.revalidate(&self.engine) else { return true };
        let reason = error.to_string().chars().take(100).collect::<String>().into();
        let frame = CloseFrame { code: CloseCode::Policy, reason };
        self.send(socket, Frame::Close(Some(frame))).await;
        false
    }

    /// Closes the connection with a reason, if the error is in data that the client sent.
    async fn close_with_error(
        &self,
        socket: &mut Socket,
        error: tungstenite::Error,
        in_flight: HashMap<CallId, JoinHandle<()>>,
    ) {
        let (code, reason) = match error {
            tungstenite::Error::Capacity(_) => {
                if let Some(answer) = self.fail_oversized_result(socket.get_mut(), in_flight).await
                {
                    self.send(socket, text_frame(&answer)).await;
                }
                (CloseCode::Size, format!("a message may have {} bytes", self.max_message_bytes))
            }
            tungstenite::Error::Utf8(_) => (CloseCode::Invalid, "a text was not UTF-8".to_owned()),
            tungstenite::Error::Protocol(error) => (CloseCode::Protocol, error.to_string()),
            // The client disconnected.
            _ => return,
        };
        tracing::warn!(client_id = self.client_id, "closed the connection: {reason}");
        let reason = reason.chars().take(100).collect::<String>().into();
        self.send(socket, Frame::Close(Some(CloseFrame { code, reason }))).await;
    }

    /// Fails the attempt whose result is too large to be read, because a redelivery would only
    /// produce the same oversized result. Returns the response to the client, if the call could be
    /// identified.
    async fn fail_oversized_result(
        &self,
        inspector: &mut FrameInspector<TokioIo<Upgraded>>,
        mut in_flight: HashMap<CallId, JoinHandle<()>>,
    ) -> Option<Value> {
        let drain_limit = self.max_message_bytes.saturating_mul(MAX_DRAIN_FACTOR);
        let _ = tokio::time::timeout(self.dead_after, inspector.drain_oversized(drain_limit)).await;
        let about = inspector.oversized_header();
        let id: CallId = about
            .tool_call_id
            .filter(|_| about.kind.as_deref() == Some("tool_result"))?
            .parse()
            .ok()?;
        if let Some(before) = in_flight.remove(&id) {
            let _ = before.await;
        }
        let limit = self.engine.limits().max_result_bytes;
        let message = format!("the result is too large to be read, over the limit of {limit}");
        let report = AttemptReport {
            attempt: about.attempt,
            client_id: Some(self.client_id.clone()),
            result: Err(Fault::new(Code::PayloadTooLarge, message)),
        };
        Some(
            self.submit_report(&id, report)
                .await
                .unwrap_or_else(|error| error_body(Some(id.as_str()), &error)),
        )
    }

    /// Sends a frame. Returns false if the client does not read: the connection then ends, and its
    /// unacknowledged requests go to other clients.
    async fn send(&self, socket: &mut Socket, frame: Frame) -> bool {
        matches!(tokio::time::timeout(self.dead_after, socket.send(frame)).await, Ok(Ok(())))
    }

    /// Handles a message and returns the response, if any.
    async fn handle_message(
        &self,
        header: Result<WsMessageHeader, Error>,
        payload: &[u8],
    ) -> Option<Value> {
        let header = match header {
            Ok(header) => header,
            Err(error) => return Some(error_body(None, &error)),
        };
        if header.kind == "ping" {
            return Some(json!({ "type": "pong" }));
        }
        if header.kind == "pong" {
            return None;
        }
        match self.dispatch_message(&header, payload).await {
            Ok(answer) => answer,
            Err(error) => Some(error_body(header.tool_call_id.as_deref(), &error)),
        }
    }

    async fn dispatch_message(
        &self,
        header: &WsMessageHeader,
        payload: &[u8],
    ) -> Result<Option<Value>, Error> {
        match header.kind.as_str() {
            "approval_decide" => return self.decide_approvals(payload).await.map(Some),
            // `answer_message` handles this type, because more than one message follows.
            "approvals_follow" => return Ok(None),
            _ => {}
        }
        let id = header.require_call_id()?;
        match header.kind.as_str() {
            "tool_ack" => {
                let acknowledged = self.engine.calls().acknowledge_call(
                    &self.caller,
                    &id,
                    &self.client_id,
                    header.attempt,
                );
                let call = acknowledged.await?;
                // For clients that must not start before the acknowledgement is stored.
                Ok(header.confirm.then(
                    || json!({ "type": "tool_taken", "tool_call_id": id, "attempt": call.attempt }),
                ))
            }
            "tool_progress" => {
                let body: ProgressBody = parse_payload(payload)?;
                let (_, attempt, progress) = body.into_parts();
                let by = Some(self.client_id.as_str());
                self.engine
                    .calls()
                    .report_progress(&self.caller, &id, by, attempt, progress)
                    .await?;
                Ok(None)
            }
            "tool_result" => {
                let body: SubmitBody = parse_payload(payload)?;
                let report = body.with_client_id(&self.client_id).into_report()?;
                Ok(Some(self.submit_report(&id, report).await?))
            }
            _ => Ok(None),
        }
    }

    async fn submit_report(&self, id: &CallId, report: AttemptReport) -> Result<Value, Error> {
        let call = self.engine.calls().report(&self.caller, id, report).await?;
        let status = call.status.as_str();
        Ok(json!({ "type": "result_ack", "tool_call_id": id, "status": status }))
    }
}

impl WsMessageHeader {
    fn call_id(&self) -> Option<CallId> {
        self.tool_call_id.as_ref()?.parse().ok()
    }

    /// Returns the call that the message concerns, or an error if its type does not concern a call.
    fn require_call_id(&self) -> Result<CallId, Error> {
        let kind: String = self.kind.chars().take(80).collect();
        if !CALL_MESSAGE_TYPES.contains(&kind.as_str()) {
            let message = format!("there is no message of the type \"{kind}\"");
            return Err(Error::refused(Code::BadRequest, message));
        }
        let Some(call_id) = &self.tool_call_id else {
            return Err(Error::refused(Code::BadRequest, format!("{kind} needs a tool_call_id")));
        };
        let call_id: String = call_id.chars().take(80).collect();
        let unknown = || Error::refused(Code::NotFound, format!("there is no call \"{call_id}\""));
        self.call_id().ok_or_else(unknown)
    }
}

/// Reads the next frame once there is a permit to handle it. Until then the connection keeps
/// sending responses, because handlers release their permits only after their responses are queued.
async fn next_frame(
    limiter: &MessageLimiter,
    socket: &mut Socket,
) -> (Result<MessagePermit, AcquireError>, Option<Result<Frame, tungstenite::Error>>) {
    let permit = limiter.acquire().await;
    (permit, socket.next().await)
}

fn binary_frame_error() -> Error {
    Error::refused(Code::BadRequest, "messages are JSON in text frames; this one was binary")
}

/// Parses the header of a message, and returns it with the checked bytes.
fn parse_message(payload: Utf8Bytes) -> (Result<WsMessageHeader, Error>, Bytes) {
    let payload = Bytes::from(payload);
    let payload = match replace_lone_surrogates(&payload) {
        Err(refused) => return (Err(refused.into_error()), Bytes::new()),
        Ok(Cow::Borrowed(_)) => payload,
        Ok(Cow::Owned(mended)) => mended.into(),
    };
    (parse_payload(&payload), payload)
}

/// Parses a message that was checked before.
fn parse_payload<T: serde::de::DeserializeOwned>(payload: &[u8]) -> Result<T, Error> {
    parse_checked_json(payload).map_err(ApiError::into_error)
}

fn error_body(id: Option<&str>, error: &Error) -> Value {
    let fault = match error {
        Error::Refused { fault, .. } => fault.clone(),
        Error::Internal(source) => {
            tracing::error!(error = %source, "internal error");
            Fault::new(Code::Internal, "internal error; see the server's log")
        }
    };
    json!({ "type": "error", "tool_call_id": id, "error": FaultBody::from(&fault) })
}

fn shutdown_close_frame() -> CloseFrame {
    CloseFrame { code: CloseCode::Away, reason: "the server is stopping".into() }
}

fn text_frame(body: &impl Serialize) -> Frame {
    Frame::Text(to_json(body).into())
}
