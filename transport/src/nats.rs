//! The NATS transport. Serves cards, reports, inboxes and turns by request and reply, publishes the
//! messages of the outbox, and turns commands for internal tools into calls. Any other command to
//! the system becomes a dead letter.
//!
//! A subject names the project, and every client that may publish under it acts for that project:
//! the permissions of NATS are the credentials here. If the server has API keys, the access rules
//! of the agent apply.

mod agent;
mod outbox;
mod request_limiter;
mod sys;
mod sys_commands;
use std::time::Duration;

use async_nats::Message;
use futures::StreamExt;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use toolcrib::domain::caller::{AuthMethod, Role};
use toolcrib::domain::directory::audit::RequestOrigin;
use toolcrib::domain::fault::{Code, Error};
use toolcrib::domain::utp::subject::{self, Subject};
use toolcrib::registry::audit;
use toolcrib::{Caller, Engine};
use toolcrib_protocol::utp::{NatsConnection, wire};

use crate::nats::request_limiter::{RequestLimiter, RequestPermit};

/// A handle to the running transport, which stops when the handle is dropped.
pub struct NatsTransportHandle {
    stop: CancellationToken,
}

impl Drop for NatsTransportHandle {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

/// Starts the transport.
pub fn start(engine: Engine, nats: NatsConnection) -> NatsTransportHandle {
    let stop = CancellationToken::new();
    for component in ["sys", "agent"] {
        let (engine, nats, stop) = (engine.clone(), nats.clone(), stop.clone());
        tokio::spawn(async move {
            tokio::select! {
                () = serve_subscription(engine, nats, component) => {}
                () = stop.cancelled() => {}
            }
        });
    }
    let (refusing_engine, refusing_nats, refusing) = (engine.clone(), nats.clone(), stop.clone());
    tokio::spawn(async move {
        tokio::select! {
            () = sys_commands::run_consumer(refusing_engine, refusing_nats) => {}
            () = refusing.cancelled() => {}
        }
    });
    let publishing = stop.clone();
    tokio::spawn(async move {
        tokio::select! {
            () = outbox::run_publisher(engine, nats) => {}
            () = publishing.cancelled() => {}
        }
    });
    NatsTransportHandle { stop }
}

async fn serve_subscription(engine: Engine, nats: NatsConnection, component: &'static str) {
    let limiter = RequestLimiter::new();
    let subject = format!("cg.{}.*.*.rpc.{component}.*.*", nats.version());
    loop {
        let queue = "toolcrib".to_owned();
        let mut requests = match nats.client().queue_subscribe(subject.clone(), queue).await {
            Ok(requests) => requests,
            Err(error) => {
                tracing::warn!(%error, subject, "subscribing failed; retrying");
                tokio::time::sleep(Duration::from_secs(1)).await;
                continue;
            }
        };
        while let Some(request) = requests.next().await {
            let Some(mut permit) = limiter.acquire().await else { return };
            let (engine, nats) = (engine.clone(), nats.clone());
            let origin = RequestOrigin { transport: Some("nats".into()), ..Default::default() };
            tokio::spawn(audit::with_origin(origin, async move {
                handle_request(&engine, &nats, request, &mut permit).await;
            }));
        }
    }
}

async fn handle_request(
    engine: &Engine,
    nats: &NatsConnection,
    request: Message,
    permit: &mut RequestPermit,
) {
    let answered = match subject::parse(&request.subject) {
        Some(parts) => route(engine, nats, &parts, &request, permit).await,
        None => Err(Error::refused(Code::BadRequest, "this is not a subject of this server")),
    };
    let refused = |error| wire::error_json(&error).to_string().into_bytes();
    let mut bytes = answered.unwrap_or_else(refused);
    let Some(reply) = request.reply else { return };
    // The broker would drop a reply over its payload limit, so send an error instead.
    let limit = nats.client().max_payload();
    if limit > 0 && bytes.len() > limit {
        bytes = refused(reply_too_large(limit));
    }
    if let Err(error) = nats.client().publish(reply, bytes.into()).await {
        tracing::debug!(%error, "a reply was not sent");
    }
}

fn reply_too_large(limit: usize) -> Error {
    let message = format!("the answer is over NATS's limit of {limit} bytes; use HTTP");
    Error::refused(Code::PayloadTooLarge, message)
}

async fn route(
    engine: &Engine,
    nats: &NatsConnection,
    parts: &Subject<'_>,
    request: &Message,
    permit: &mut RequestPermit,
) -> Result<Vec<u8>, Error> {
    match parts.component {
        "sys" => {
            let sender = sender(request);
            let caller = caller(engine, parts.project, &sender, Role::Provider);
            sys::handle_request(engine, nats, &caller, parts, request, &sender).await
        }
        _ => {
            let caller = caller(engine, parts.project, parts.target, Role::Agent);
            let answer = agent::handle_request(engine, &caller, parts, request, permit).await?;
            Ok(answer.to_string().into_bytes())
        }
    }
}

fn sender(request: &Message) -> String {
    let header = request.headers.as_ref().and_then(|headers| headers.get("CG-Sender"));
    header.map_or("nats", |value| value.as_str()).chars().take(128).collect()
}

/// Returns the caller for a request. A server without API keys allows everything, on this transport
/// as on every other.
fn caller(engine: &Engine, project: &str, agent: &str, role: Role) -> Caller {
    let (role, trust) = match engine.registry().credentials().has_keys() {
        true => (role, AuthMethod::Key),
        false => (Role::Admin, AuthMethod::Anonymous),
    };
    Caller::new(project, agent, role, trust)
}

/// Returns the request body, which must be an object. An empty body counts as `{}`.
fn parse_body(request: &Message) -> Result<Value, Error> {
    let unreadable = |reason: String| {
        Error::refused(Code::BadRequest, format!("the request is not JSON: {reason}"))
    };
    if request.payload.is_empty() {
        return Ok(json!({}));
    }
    toolcrib::domain::json::check(&request.payload)
        .map_err(|error| unreadable(error.to_string()))?;
    let body: Value =
        serde_json::from_slice(&request.payload).map_err(|error| unreadable(error.to_string()))?;
    match body {
        Value::Object(_) => Ok(body),
        _ => Err(Error::refused(Code::BadRequest, "a request is an object")),
    }
}

fn unknown_subject(parts: &Subject<'_>) -> Error {
    let subject = format!("rpc.{}.{}.{}", parts.component, parts.target, parts.suffix);
    Error::refused(Code::NotFound, format!("there is no subject {subject}"))
}
