//! SSE: streams requests and cancellations to a client. The client sends acknowledgements, progress
//! and results by POST.

use std::convert::Infallible;
use std::time::Duration;

use axum::Extension;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::IntoResponse;
use axum::response::sse::{Event, KeepAlive, Sse};
use futures::stream;
use serde::Deserialize;
use toolcrib::desk::{Line, Memory};
use toolcrib::engine::Connecting;
use utoipa::IntoParams;

use super::super::super::Door;
use super::super::super::answer::{Problem, Refused};
use super::super::super::question::{Asked, Who};
use super::{MessageBody, text, window};
use crate::auth::Standing;
use crate::peer::DeadAfter;

/// Options of the stream.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(in super::super) struct Listening {
    client_id: String,
    /// Maximum number of requests in flight (default: the server's setting).
    max_in_flight: Option<usize>,
    /// True if the client records its results and can answer a redelivered request from that
    /// record.
    #[serde(default)]
    resume: bool,
}

/// Streams requests and cancellations to a client.
#[utoipa::path(get, path = "/internal/ingress/sse", tag = "providers", params(Listening),
    responses(
        (status = 200, description = "Server-sent events tool_request and tool_cancel",
            content_type = "text/event-stream"),
        (status = 403, body = Problem), (status = 404, body = Problem)))]
pub(in super::super) async fn sse(
    State(door): State<Door>,
    Who(caller): Who,
    Asked(listening): Asked<Listening>,
    headers: HeaderMap,
) -> Result<impl IntoResponse, Refused> {
    let connecting = Connecting {
        client_id: listening.client_id,
        window: window("max_in_flight", listening.max_in_flight, door.settings.window)?,
        memory: if listening.resume { Memory::Remembers } else { Memory::Forgets },
        line: Line::Open,
    };
    let session = door.engine.connect(&caller, connecting)?;
    let state = (session, door.engine.clone(), Standing::new(&caller, &headers));
    // Dropping the stream drops the session, which returns unacknowledged requests to the queue.
    let messages = stream::unfold(state, async |(mut session, engine, standing)| {
        let message = session.next().await?;
        standing.check(&engine).ok()?;
        let body = MessageBody::of(&engine, message);
        let event = Event::default().event(body.kind()).data(text(&body));
        Some((Ok::<_, Infallible>(event), (session, engine, standing)))
    });
    let every = Duration::from_millis(door.settings.heartbeat_ms);
    // An SSE client sends nothing, so undelivered heartbeats are the only sign that it is gone.
    let dead_after = DeadAfter(Duration::from_millis(door.settings.dead_after_ms));
    let events = Sse::new(messages).keep_alive(KeepAlive::new().interval(every));
    Ok((Extension(dead_after), events))
}
