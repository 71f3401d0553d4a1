//! SSE: streams requests and cancellations to a client. The client sends acknowledgements, progress
//! and results by POST.

use std::convert::Infallible;
use std::time::Duration;

use axum::Extension;
use axum::extract::State;
use axum::response::IntoResponse;
use axum::response::sse::{Event, KeepAlive, Sse};
use futures::stream;
use serde::Deserialize;
use toolcrib::clients::{ConnectOptions, Redelivery, Transport};
use utoipa::IntoParams;

use super::super::super::HttpState;
use super::{IngressMessage, resolve_window, to_json};
use crate::auth::RequestCredentials;
use crate::http::extract::{AuthenticatedCaller, QueryParams};
use crate::http::problem::{ApiError, ProblemDetails};
use crate::tcp_timeout::AckTimeout;

/// Options of the stream.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(in super::super) struct IngressStreamQuery {
    client_id: String,
    /// Maximum number of requests in flight (default: the server's setting).
    max_in_flight: Option<usize>,
    /// True if the client records its results and can answer a redelivered request from that
    /// record.
    #[serde(default)]
    resume: bool,
}

/// Streams requests and cancellations to a client.
#[utoipa::path(get, path = "/internal/ingress/sse", tag = "providers", params(IngressStreamQuery),
    responses(
        (status = 200, description = "Server-sent events tool_request and tool_cancel",
            content_type = "text/event-stream"),
        (status = 403, body = ProblemDetails), (status = 404, body = ProblemDetails)))]
pub(in super::super) async fn sse(
    State(http_state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    QueryParams(query): QueryParams<IngressStreamQuery>,
    credentials: RequestCredentials,
) -> Result<impl IntoResponse, ApiError> {
    let options = ConnectOptions {
        client_id: query.client_id,
        window: resolve_window(
            "max_in_flight",
            query.max_in_flight,
            http_state.settings.default_max_in_flight,
        )?,
        redelivery: if query.resume { Redelivery::All } else { Redelivery::ReversibleOnly },
        transport: Transport::Streaming,
    };
    let session = http_state.engine.clients().connect(&caller, options).await?;
    let state = (session, http_state.engine.clone(), credentials);
    // Dropping the stream drops the session, which returns unacknowledged requests to the queue.
    let messages = stream::unfold(state, async |(mut session, engine, credentials)| {
        let message = session.next().await?;
        credentials.revalidate(&engine).ok()?;
        let body = IngressMessage::new(&engine, message);
        let event = Event::default().event(body.kind()).data(to_json(&body));
        Some((Ok::<_, Infallible>(event), (session, engine, credentials)))
    });
    let heartbeat_interval = Duration::from_millis(http_state.settings.heartbeat_ms);
    // A client sends nothing on this connection, so undelivered heartbeats are the only sign that
    // it is gone.
    let dead_after = AckTimeout(Duration::from_millis(http_state.settings.dead_after_ms));
    let events = Sse::new(messages).keep_alive(KeepAlive::new().interval(heartbeat_interval));
    Ok((Extension(dead_after), events))
}
