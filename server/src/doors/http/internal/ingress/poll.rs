//! Long poll: one request, one response. Toolcrib marks the requests that it hands over as taken
//! (RUNNING) before it responds, unless the client acknowledges each request itself.

use axum::Json;
use axum::extract::State;
use axum::http::HeaderMap;
use serde::{Deserialize, Serialize};
use toolcrib::desk::{Line, Memory, Message, Request};
use toolcrib::engine::Connecting;
use toolcrib::fault::Code;
use utoipa::{IntoParams, ToSchema};

use super::super::super::Door;
use super::super::super::answer::{Problem, Refused};
use super::super::super::question::{Asked, Who, wrong_parameter};
use super::{RequestBody, window};
use crate::auth::Standing;

/// Options of a poll.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(in super::super) struct Polling {
    client_id: String,
    /// Maximum time to wait for work, in milliseconds (default: 0).
    #[serde(default)]
    wait_ms: u64,
    /// Maximum number of requests (default: 1).
    max: Option<usize>,
    /// `auto` (default): requests count as taken when they are handed over. `explicit`: POST …/ack
    /// takes a request, and requests that are not acknowledged within 30 s are redelivered.
    ack: Option<String>,
}

/// Requests and cancellations for a client.
#[derive(Serialize, ToSchema)]
pub(in super::super) struct PolledBody {
    /// `tool_request` objects, as on the WebSocket.
    #[schema(value_type = Vec<Object>)]
    requests: Vec<RequestBody>,
    /// Requests of this client to stop, because they were canceled or have timed out. Omitted if
    /// empty.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    cancels: Vec<CanceledBody>,
}

/// A request that was canceled or has timed out.
#[derive(Serialize, ToSchema)]
pub(in super::super) struct CanceledBody {
    tool_call_id: String,
    attempt: u32,
}

impl CanceledBody {
    fn is_about(&self, request: &Request) -> bool {
        (self.tool_call_id.as_str(), self.attempt) == (request.call_id.as_str(), request.attempt)
    }
}

fn canceled(message: &Message) -> Option<CanceledBody> {
    let Message::Cancel { call_id, attempt } = message else { return None };
    Some(CanceledBody { tool_call_id: call_id.to_string(), attempt: *attempt })
}

/// Waits for work and returns it.
#[utoipa::path(get, path = "/internal/ingress/poll", tag = "providers", params(Polling),
    responses((status = 200, body = PolledBody), (status = 403, body = Problem),
        (status = 404, body = Problem)))]
pub(in super::super) async fn poll(
    State(door): State<Door>,
    Who(caller): Who,
    Asked(polling): Asked<Polling>,
    headers: HeaderMap,
) -> Result<Json<PolledBody>, Refused> {
    let explicit = match polling.ack.as_deref() {
        None | Some("auto") => false,
        Some("explicit") => true,
        Some(_) => {
            return Err(wrong_parameter("ack", "ack must be auto or explicit").into());
        }
    };
    let engine = &door.engine;
    let max = window("max", polling.max, 1)?;
    let connecting = Connecting {
        client_id: polling.client_id.clone(),
        window: max,
        memory: Memory::Forgets,
        line: Line::Poll,
    };
    let mut session = engine.connect(&caller, connecting)?;
    let wait_ms = polling.wait_ms.min(engine.limits().max_wait_ms);
    let wait = std::time::Duration::from_millis(wait_ms);
    let first = tokio::time::timeout(wait, session.next()).await.ok().flatten();
    let (mut waiting, mut next, mut has_cancels) = (Vec::new(), first, false);
    while let Some(message) = next {
        match message {
            Message::Request(request) => waiting.push(request),
            // Reported below, together with cancellations that arrive while the requests are taken.
            // Storing it in the session keeps it if that fails.
            cancel => {
                has_cancels = true;
                session.keep(cancel);
            }
        }
        next = session.ready();
    }
    Standing::new(&caller, &headers).check(engine)?;
    let mut requests = Vec::new();
    for request in waiting {
        if explicit {
            session.lend(&request.call_id);
        } else {
            let attempt = Some(request.attempt);
            let taken = engine.take(&caller, &request.call_id, &polling.client_id, attempt).await;
            match taken {
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
    let cancels: Vec<CanceledBody> = session.canceled().iter().filter_map(canceled).collect();
    // The client need not start requests that were canceled in the meantime.
    requests.retain(|request| !cancels.iter().any(|cancel| cancel.is_about(request)));
    let requests = requests.into_iter().map(|request| RequestBody::of(engine, request)).collect();
    Ok(Json(PolledBody { requests, cancels }))
}
