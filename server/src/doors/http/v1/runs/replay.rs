//! Replays a recorded run. The response is an SSE stream, because a replay takes as long as the
//! model does.

use axum::extract::State;
use axum::response::sse::Event as Message;
use futures::stream;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::mpsc;
use toolcrib::fault::Error;
use toolcrib::model::Piece;
use toolcrib::run::Trouble;
use toolcrib::turn::Happening;
use utoipa::ToSchema;

use super::super::super::Door;
use super::super::super::answer::{Problem, Refused};
use super::super::super::question::{Body, NamePath, Who};
use super::super::events::{Messages, sent};

/// Maximum number of messages queued for a client.
const PLACES: usize = 4_096;

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
            `replay.replied`, and at last `replay.finished` or `replay.failed`",
            content_type = "text/event-stream"),
        (status = 403, body = Problem), (status = 404, body = Problem)))]
pub(in super::super) async fn replay(
    State(door): State<Door>,
    Who(caller): Who,
    NamePath(run_id): NamePath,
    Body(body): Body<ReplayBody>,
) -> Result<Messages, Refused> {
    door.engine.check_replay(&caller, &run_id).await?;
    let (say, said) = mpsc::channel::<Message>(PLACES);
    tokio::spawn(async move {
        let told = say.clone();
        let watch = move |happening: Happening<'_>| {
            // A slow client misses deltas of a response; it still gets the complete response.
            let is_piece = matches!(happening, Happening::Piece { .. });
            if is_piece && told.capacity() < PLACES / 2 {
                return;
            }
            if let Some((name, data)) = told_of(&happening) {
                let _ = told.try_send(message(name, data));
            }
        };
        let engine = door.engine;
        let playing = engine.replay_run(&caller, &run_id, body.model.as_deref(), &watch);
        let last = tokio::select! {
            // The client disconnected.
            () = say.closed() => return,
            played = playing => match played {
                Ok(played) => message("replay.finished", json!({
                    "run_id": run_id,
                    "same": played.differences.is_empty(),
                    "answer": played.answer,
                    "recorded_answer": played.recorded_answer,
                    "differences": played.differences.iter().map(Value::from).collect::<Vec<_>>(),
                    "steps": played.steps,
                    "unrecorded_calls": played.unrecorded,
                    "usage": played.usage,
                })),
                Err(Error::Refused { fault, .. }) => {
                    message("replay.failed", json!({ "error": Trouble::from(&fault) }))
                }
                Err(Error::Internal(error)) => {
                    tracing::error!(%error, "a replay failed");
                    message("replay.failed", json!({ "error": { "code": "INTERNAL" } }))
                }
            },
        };
        let _ = say.send(last).await;
    });
    Ok(sent(stream::unfold(said, async |mut said| Some((Ok(said.recv().await?), said)))))
}

fn message(name: &str, mut data: Value) -> Message {
    data["type"] = name.into();
    Message::default().event(name).data(data.to_string())
}

fn told_of(happening: &Happening<'_>) -> Option<(&'static str, Value)> {
    Some(match happening {
        Happening::Asking { step, last } => {
            ("replay.asking", json!({ "step": step, "last": last }))
        }
        Happening::Piece { step, piece: Piece::Text(text) } => {
            ("replay.text", json!({ "step": step, "text": text }))
        }
        Happening::AskingAgain { step, retry, wait_ms, why } => (
            "replay.asking_again",
            json!({
                "step": step, "retry": retry, "wait_ms": wait_ms, "error": Trouble::from(*why),
            }),
        ),
        Happening::Replied { step, reply } => {
            ("replay.replied", json!({ "step": step, "text": reply.text, "calls": reply.calls }))
        }
        _ => return None,
    })
}
