//! Replays a recorded run. The response is an SSE stream, because a replay takes as long as the
//! model does.

use axum::extract::State;
use axum::response::sse::Event as Message;
use futures::stream;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::mpsc;
use toolcrib::domain::fault::Error;
use toolcrib::domain::run::RunError;
use toolcrib::ports::model::Delta;
use toolcrib::runs::agent_loop::LoopEvent;
use utoipa::ToSchema;

use super::super::super::HttpState;
use super::super::events::{SseResponse, into_sse};
use crate::http::extract::{AuthenticatedCaller, NamePath, StrictJsonBody};
use crate::http::problem::{ApiError, ProblemDetails};

/// Maximum number of messages queued for a client.
const CHANNEL_CAPACITY: usize = 4_096;

/// Options of a replay.
#[derive(Deserialize, ToSchema)]
pub(in super::super) struct ReplayBody {
    /// The model to use (default: the recorded one).
    model: Option<String>,
}

/// Replays a run against the model, with recorded results, and reports the differences.
///
/// Toolcrib sends the recorded conversation to the model again and answers its calls with the
/// recorded results. It executes and stores nothing.
#[utoipa::path(post, path = "/v1/runs/{run_id}/replay", tag = "runs",
    params(("run_id" = String, Path, description = "The run")),
    request_body = ReplayBody,
    responses(
        (status = 200, description = "Server-sent events: `replay.asking`, `replay.text`, \
                                      `replay.replied`, and finally `replay.finished` or \
                                      `replay.failed`",
            content_type = "text/event-stream"),
        (status = 403, body = ProblemDetails), (status = 404, body = ProblemDetails)))]
pub(in super::super) async fn replay(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    NamePath(run_id): NamePath,
    StrictJsonBody(body): StrictJsonBody<ReplayBody>,
) -> Result<SseResponse, ApiError> {
    state.engine.runs().check_replay(&caller, &run_id).await?;
    let (sender, receiver) = mpsc::channel::<Message>(CHANNEL_CAPACITY);
    tokio::spawn(async move {
        let delta_sender = sender.clone();
        let event_sink = move |event: LoopEvent<'_>| {
            // A slow client misses deltas of a response; it still gets the complete response.
            let is_delta = matches!(event, LoopEvent::ReplyDelta { .. });
            if is_delta && delta_sender.capacity() < CHANNEL_CAPACITY / 2 {
                return;
            }
            if let Some((name, data)) = replay_event(&event) {
                let _ = delta_sender.try_send(sse_message(name, data));
            }
        };
        let engine = state.engine.clone();
        let playing =
            engine.runs().replay_run(&caller, &run_id, body.model.as_deref(), &event_sink);
        let last = tokio::select! {
            // The client disconnected.
            () = sender.closed() => return,
            played = playing => match played {
                Ok(played) => sse_message("replay.finished", json!({
                    "run_id": run_id,
                    "same": played.differences.is_empty(),
                    "answer": played.answer,
                    "recorded_answer": played.recorded_answer,
                    "differences": played.differences.iter().map(Value::from).collect::<Vec<_>>(),
                    "steps": played.steps,
                    "unrecorded_calls": played.unrecorded_calls,
                    "usage": played.usage,
                })),
                Err(Error::Refused { fault, .. }) => {
                    sse_message("replay.failed", json!({ "error": RunError::from(&fault) }))
                }
                Err(Error::Internal(error)) => {
                    tracing::error!(%error, "a replay failed");
                    sse_message("replay.failed", json!({ "error": { "code": "INTERNAL" } }))
                }
            },
        };
        let _ = sender.send(last).await;
    });
    Ok(into_sse(stream::unfold(receiver, async |mut receiver| {
        Some((Ok(receiver.recv().await?), receiver))
    })))
}

fn sse_message(name: &str, mut data: Value) -> Message {
    data["type"] = name.into();
    Message::default().event(name).data(data.to_string())
}

fn replay_event(event: &LoopEvent<'_>) -> Option<(&'static str, Value)> {
    Some(match event {
        LoopEvent::ModelRequested { step, last } => {
            ("replay.asking", json!({ "step": step, "last": last }))
        }
        LoopEvent::ReplyDelta { step, piece: Delta::Text(text) } => {
            ("replay.text", json!({ "step": step, "text": text }))
        }
        LoopEvent::ModelRetryScheduled { step, retry, wait_ms, why: reason } => (
            "replay.asking_again",
            json!({
                "step": step, "retry": retry, "wait_ms": wait_ms, "error": RunError::from(*reason),
            }),
        ),
        LoopEvent::ModelReplied { step, reply } => {
            ("replay.replied", json!({ "step": step, "text": reply.text, "calls": reply.calls }))
        }
        _ => return None,
    })
}
