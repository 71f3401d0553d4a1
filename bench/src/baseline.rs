//! The baseline: the minimal durable tool-call server on this stack.
//!
//! axum on tokio serves requests; one writer thread commits to one SQLite database in groups. A
//! call is stored as RUNNING and flushed, then executed (the tool does nothing), then stored as
//! SUCCEEDED and flushed, then reported. That is the flow of the product, and there is nothing
//! else: no authentication, no schemas, no policies, no retries, no events, no logs.
//!
//! The baseline never responds before the flush of the state that it reports, and it must never be
//! made slower to flatter the product: every storage optimization of the product is also in the
//! baseline.

use std::path::Path;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::Duration;

use anyhow::Context;
use axum::Router;
use axum::body::Bytes;
use axum::extract::{Path as UrlPath, Query, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::serve::ListenerExt;
use rusqlite::{Connection, OptionalExtension};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use tokio::sync::{oneshot, watch};
use tokio::time::Instant;
use ulid::Ulid;

pub mod nats;
mod storage;

/// The only tool: it does nothing and returns `{}`.
pub const TOOL: &str = "bench.noop";
/// Name of the database file within the directory given to [`serve`].
pub const DATABASE: &str = "floor.sqlite";

/// The work that a call does.
pub type BaselineTool = Arc<dyn Fn() -> Pin<Box<dyn Future<Output = ()> + Send>> + Send + Sync>;

const RESULT: &str = "{}";
const SOURCE: &str = "builtin";

/// Serves the baseline on `listener` with its database in `dir`, until the future is dropped.
///
/// The database is `dir/floor.sqlite`; the file must not exist yet or must be a database of the
/// baseline. It is prepared first (a fraction of a second, mostly for preallocating the write-ahead
/// log); connections made meanwhile wait in the listener's queue.
///
/// A `tool`, if given, runs in each call between its two flushes.
///
/// Routes: `POST /v1/tools/bench.noop/invoke[?wait_ms=N]`, `GET /v1/tool_calls/{id}[?wait_ms=N]`,
/// `GET /healthz`.
///
/// # Errors
///
/// When the database cannot be opened or the writer thread cannot be started.
pub async fn serve(
    listener: tokio::net::TcpListener,
    dir: &Path,
    tool: Option<BaselineTool>,
) -> anyhow::Result<()> {
    let path = dir.join(DATABASE);
    let opened = tokio::task::spawn_blocking(move || {
        let writer = storage::open_writer(&path)?;
        let reader = storage::open_reader(&path)?;
        anyhow::Ok((writer, reader))
    });
    let (writer, reader) = opened.await?.context("cannot open the baseline's database")?;
    let (ops, queue) = mpsc::channel();
    let (commits, committed) = watch::channel(());
    std::thread::Builder::new()
        .name("floor-writer".to_owned())
        .spawn(move || storage::write_loop(&writer, &queue, &commits))
        .context("cannot start the baseline's writer")?;
    let baseline =
        Arc::new(BaselineServer { write_queue: ops, reader: Mutex::new(reader), committed, tool });
    let router = Router::new()
        .route("/v1/tools/{name}/invoke", post(invoke))
        .route("/v1/tool_calls/{id}", get(read_call))
        .route("/healthz", get(async || "ok"))
        .with_state(baseline);
    // Responses are small and complete: delaying them to send more at once has no benefit.
    let listener = listener.tap_io(|stream| drop(stream.set_nodelay(true)));
    axum::serve(listener, router).await.context("the baseline stopped serving")
}

struct BaselineServer {
    write_queue: mpsc::Sender<storage::WriteRequest>,
    reader: Mutex<Connection>,
    /// Changes with every commit; requests that wait for a call then read it again.
    committed: watch::Receiver<()>,
    tool: Option<BaselineTool>,
}

impl BaselineServer {
    /// Sends a change to the writer; the receiver resolves once the change is flushed.
    fn submit_change(&self, change: storage::Change) -> oneshot::Receiver<()> {
        let (done, flushed) = oneshot::channel();
        // If the writer has stopped, the sender is dropped here and the receiver returns an error.
        let _ = self.write_queue.send(storage::WriteRequest { change, flushed: done });
        flushed
    }

    fn find(&self, id: &str) -> Result<Option<BaselineCall>, ErrorResponse> {
        // Reading one row from memory takes less time than a round trip to another thread.
        let reader = self.reader.lock().unwrap_or_else(PoisonError::into_inner);
        storage::find(&reader, id).optional().map_err(ErrorResponse::storage)
    }
}

/// A call, as stored and as returned.
#[derive(Debug, Clone, Serialize)]
struct BaselineCall {
    tool_call_id: String,
    run_id: String,
    tool_name: String,
    source: &'static str,
    status: &'static str,
    args: Box<RawValue>,
    result: Option<Box<RawValue>>,
    error: Option<Box<RawValue>>,
    created_at: String,
    completed_at: Option<String>,
}

#[derive(Serialize)]
struct Ticket<'a> {
    tool_call_id: &'a str,
    status: &'a str,
}

#[derive(Deserialize)]
struct InvokeBody {
    run_id: String,
    args: Box<RawValue>,
}

#[derive(Deserialize)]
struct WaitQuery {
    wait_ms: Option<u64>,
}

impl WaitQuery {
    fn deadline(&self) -> Option<Instant> {
        self.wait_ms.map(|millis| Instant::now() + Duration::from_millis(millis.min(3_600_000)))
    }
}

async fn invoke(
    State(floor): State<Arc<BaselineServer>>,
    UrlPath(name): UrlPath<String>,
    Query(wait): Query<WaitQuery>,
    body: Bytes,
) -> Result<Response, ErrorResponse> {
    if name != TOOL {
        return Err(ErrorResponse(StatusCode::NOT_FOUND, "no such tool".to_owned()));
    }
    let invoke: InvokeBody = serde_json::from_slice(&body)
        .map_err(|error| ErrorResponse(StatusCode::BAD_REQUEST, error.to_string()))?;
    let deadline = wait.deadline();
    let call = Arc::new(BaselineCall {
        tool_call_id: format!("tc_{}", Ulid::generate()),
        run_id: invoke.run_id,
        tool_name: name,
        source: SOURCE,
        status: "RUNNING",
        args: invoke.args,
        result: None,
        error: None,
        created_at: now(),
        completed_at: None,
    });
    floor
        .submit_change(storage::Change::Insert(Arc::clone(&call)))
        .await
        .map_err(ErrorResponse::commit_failed)?;

    // The tool runs here, between the two flushes. Without a tool, nothing runs.
    if let Some(tool) = &floor.tool {
        tool().await;
    }
    let completed_at = now();
    let id = call.tool_call_id.clone();
    let finish = storage::Change::Finish(id, completed_at.clone());
    let Some(deadline) = deadline else {
        // The writer finishes the call even if no request waits for it.
        drop(floor.submit_change(finish));
        let ticket = Ticket { tool_call_id: &call.tool_call_id, status: call.status };
        return json_response(StatusCode::ACCEPTED, &ticket);
    };
    match tokio::time::timeout_at(deadline, floor.submit_change(finish)).await {
        Ok(flushed) => flushed.map_err(ErrorResponse::commit_failed)?,
        // The wait has timed out: return the last state that is known to be flushed.
        Err(_) => return json_response(StatusCode::ACCEPTED, &*call),
    }
    // The writer has dropped its reference by now, so this takes the call without a copy.
    let mut call = Arc::unwrap_or_clone(call);
    call.status = "SUCCEEDED";
    call.result = RawValue::from_string(RESULT.to_owned()).ok();
    call.completed_at = Some(completed_at);
    json_response(StatusCode::ACCEPTED, &call)
}

async fn read_call(
    State(floor): State<Arc<BaselineServer>>,
    UrlPath(id): UrlPath<String>,
    Query(wait): Query<WaitQuery>,
) -> Result<Response, ErrorResponse> {
    let deadline = wait.deadline();
    let mut committed = floor.committed.clone();
    loop {
        // Marked before the read, so that a commit between the read and the wait is not missed.
        committed.mark_unchanged();
        let found = floor.find(&id)?;
        let call = found
            .ok_or_else(|| ErrorResponse(StatusCode::NOT_FOUND, "no such tool call".to_owned()))?;
        match deadline {
            Some(deadline) if call.status == "RUNNING" => {
                let change = tokio::time::timeout_at(deadline, committed.changed()).await;
                if !matches!(change, Ok(Ok(()))) {
                    return json_response(StatusCode::OK, &call);
                }
            }
            _ => return json_response(StatusCode::OK, &call),
        }
    }
}

fn now() -> String {
    jiff::Timestamp::now().to_string()
}

fn json_response(status: StatusCode, value: &impl Serialize) -> Result<Response, ErrorResponse> {
    let body = serde_json::to_vec(value).map_err(ErrorResponse::storage)?;
    Ok((status, [(header::CONTENT_TYPE, "application/json")], body).into_response())
}

/// A response that reports an error.
struct ErrorResponse(StatusCode, String);

impl ErrorResponse {
    fn storage(error: impl std::fmt::Display) -> Self {
        Self(StatusCode::INTERNAL_SERVER_ERROR, error.to_string())
    }

    fn commit_failed(_: oneshot::error::RecvError) -> Self {
        Self::storage("the change could not be committed")
    }
}

impl IntoResponse for ErrorResponse {
    fn into_response(self) -> Response {
        let body = serde_json::json!({ "error": self.1 }).to_string();
        (self.0, [(header::CONTENT_TYPE, "application/json")], body).into_response()
    }
}
