//! Long poll: one request, one response. Toolcrib marks the requests that it hands over as
//! acknowledged (RUNNING) before it responds, unless the client acknowledges each one itself.

use axum::Json;
use axum::extract::State;
use axum::http::request::Parts;
use serde::{Deserialize, Serialize};
use toolcrib::clients::{ClientMessage, ConnectOptions, Redelivery, Transport, WorkItem};
use toolcrib::domain::fault::Code;
use utoipa::{IntoParams, ToSchema};

use super::super::super::HttpState;
use super::{ToolRequestMessage, resolve_window};
use crate::auth::RequestCredentials;
use crate::http::extract::{AuthenticatedCaller, QueryParams, invalid_parameter};
use crate::http::problem::{ApiError, ProblemDetails};
use crate::http::wait_param::admit_long_poll;

/// Options of a poll.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(in super::super) struct PollQuery {
    client_id: String,
    /// Maximum time to wait for work, in milliseconds (default: 0).
    #[serde(default)]
    wait_ms: u64,
    /// Maximum number of requests (default: 1).
    max: Option<usize>,
    /// `auto` (default): requests count as acknowledged when they are returned. `explicit`: POST
    /// …/ack acknowledges a request; one that is not acknowledged within 30 s is redelivered.
    ack: Option<String>,
}

/// Requests and cancellations for a client.
#[derive(Serialize, ToSchema)]
#[schema(as = PolledBody)]
pub(in super::super) struct PollResponseBody {
    /// `tool_request` objects, as on the WebSocket.
    #[schema(value_type = Vec<Object>)]
    requests: Vec<ToolRequestMessage>,
    /// Requests of this client to stop, because they were canceled or have timed out. Omitted if
    /// empty.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    cancels: Vec<CanceledRequestBody>,
}

/// A request that was canceled or has timed out.
#[derive(Serialize, ToSchema)]
#[schema(as = CanceledBody)]
pub(in super::super) struct CanceledRequestBody {
    tool_call_id: String,
    attempt: u32,
}

impl CanceledRequestBody {
    fn matches_request(&self, request: &WorkItem) -> bool {
        (self.tool_call_id.as_str(), self.attempt) == (request.call_id.as_str(), request.attempt)
    }
}

fn to_canceled_body(message: &ClientMessage) -> Option<CanceledRequestBody> {
    let ClientMessage::Cancel { call_id, attempt } = message else { return None };
    Some(CanceledRequestBody { tool_call_id: call_id.to_string(), attempt: *attempt })
}

/// Waits for work and returns it.
#[utoipa::path(get, path = "/internal/ingress/poll", tag = "providers", params(PollQuery),
    responses((status = 200, body = PollResponseBody), (status = 403, body = ProblemDetails),
        (status = 404, body = ProblemDetails)))]
pub(in super::super) async fn poll(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    QueryParams(polling): QueryParams<PollQuery>,
    credentials: RequestCredentials,
    request: Parts,
) -> Result<Json<PollResponseBody>, ApiError> {
    let _permit = admit_long_poll(&request, polling.wait_ms)?;
    let explicit = match polling.ack.as_deref() {
        None | Some("auto") => false,
        Some("explicit") => true,
        Some(_) => {
            return Err(invalid_parameter("ack", "ack must be auto or explicit").into());
        }
    };
    let engine = &state.engine;
    let max = resolve_window("max", polling.max, 1)?;
    let connecting = ConnectOptions {
        client_id: polling.client_id.clone(),
        window: max,
        redelivery: Redelivery::ReversibleOnly,
        transport: Transport::Polling,
    };
    let mut session = engine.clients().connect(&caller, connecting).await?;
    let wait_ms = polling.wait_ms.min(engine.limits().max_wait_ms);
    let wait = std::time::Duration::from_millis(wait_ms);
    let first = tokio::time::timeout(wait, session.next()).await.ok().flatten();
    let (mut waiting, mut next, mut has_cancels) = (Vec::new(), first, false);
    while let Some(message) = next {
        match message {
            ClientMessage::Execute(request) => waiting.push(request),
            // Reported below, together with cancellations that arrive while the requests are being
            // acknowledged. The session keeps the cancellation if this poll fails.
            cancel => {
                has_cancels = true;
                session.defer_cancel(cancel);
            }
        }
        next = session.try_next();
    }
    credentials.revalidate(engine)?;
    let mut requests = Vec::new();
    for request in waiting {
        if explicit {
            session.start_poll_lease(&request.call_id);
        } else {
            let attempt = Some(request.attempt);
            let polled = engine
                .calls()
                .acknowledge_call(&caller, &request.call_id, &polling.client_id, attempt)
                .await;
            match polled {
                Ok(_) => {}
                // The call has ended in the meantime, so there is nothing to hand over.
                Err(error) if error.code() == Code::Conflict => continue,
                // Dropping the session returns the remaining requests to the queue.
                Err(error) if requests.is_empty() && !has_cancels => return Err(error.into()),
                Err(_) => break,
            }
        }
        requests.push(request);
    }
    let cancels: Vec<CanceledRequestBody> =
        session.take_cancels().iter().filter_map(to_canceled_body).collect();
    // The client need not start requests that were canceled in the meantime.
    requests.retain(|request| !cancels.iter().any(|cancel| cancel.matches_request(request)));
    let requests =
        requests.into_iter().map(|request| ToolRequestMessage::new(engine, request)).collect();
    Ok(Json(PollResponseBody { requests, cancels }))
}
