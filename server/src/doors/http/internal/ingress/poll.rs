//! Long poll: one question, one answer. What is handed over is taken (RUNNING) before the answer
//! is sent, unless the client says that it acknowledges each request itself.

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

/// How to poll.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(in super::super) struct Polling {
    client_id: String,
    /// Wait this long for work; 0 unless said.
    #[serde(default)]
    wait_ms: u64,
    /// At most so many requests; 1 unless said.
    max: Option<usize>,
    /// `auto` (unless said): what is handed over is taken. `explicit`: POST …/ack takes it, and
    /// what was not acknowledged within 30 s is handed over again.
    ack: Option<String>,
}

/// Work.
#[derive(Serialize, ToSchema)]
pub(in super::super) struct PolledBody {
    /// `tool_request` objects, as on the WebSocket.
    #[schema(value_type = Vec<Object>)]
    requests: Vec<RequestBody>,
    /// What nobody wants any more, of what this client has: stop it. Left out when there is none.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    cancels: Vec<CanceledBody>,
}

/// A request that was canceled, or whose time is over.
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

/// Asks for work, and waits for it.
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
            // Told with what is canceled while the requests are taken; not lost if that fails.
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
                // It ended meanwhile: there is nothing to hand over.
                Err(error) if error.code() == Code::Conflict => continue,
                // The rest goes back in line when the session is dropped.
                Err(error) if requests.is_empty() && !has_cancels => return Err(error.into()),
                Err(_) => break,
            }
        }
        requests.push(request);
    }
    let cancels: Vec<CanceledBody> = session.canceled().iter().filter_map(canceled).collect();
    // What was canceled meanwhile need not be begun.
    requests.retain(|request| !cancels.iter().any(|cancel| cancel.is_about(request)));
    let requests = requests.into_iter().map(|request| RequestBody::of(engine, request)).collect();
    Ok(Json(PolledBody { requests, cancels }))
}
