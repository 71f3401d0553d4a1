//! Tests commands against a fake server: malformed responses, outages and restarts.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use axum::Router;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::{get, post};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

use super::context;
use crate::cli::client::{ApiClient, ApiRequest};
use crate::cli::failure::exit;
use crate::cli::{CommandContext, outcome, watch};

/// A server that stops when this value is dropped.
struct FakeApiServer {
    address: String,
    task: JoinHandle<()>,
}

impl FakeApiServer {
    async fn start(router: Router) -> Self {
        Self::start_at("127.0.0.1:0", router).await
    }

    async fn start_at(address: &str, router: Router) -> Self {
        let listener = TcpListener::bind(address).await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let task = tokio::spawn(async move {
            let _ = axum::serve(listener, router).await;
        });
        Self { address, task }
    }

    /// Stops the server. After this returns, the address is not listening.
    async fn stop(mut self) {
        self.task.abort();
        let _ = (&mut self.task).await;
    }

    fn client(&self) -> ApiClient {
        ApiClient::new(&self.address, Some("tck_test"), Some("acme")).unwrap()
    }

    fn context(&self) -> CommandContext {
        let mut context = context(true);
        context.global.server = Some(self.address.clone());
        context
    }
}

impl Drop for FakeApiServer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

#[tokio::test]
async fn credentials_are_sent_and_responses_are_read() {
    let show = |headers: HeaderMap| async move {
        let text_of = |name| headers.get(name).and_then(|v| v.to_str().ok()).map(str::to_owned);
        axum::Json(
            json!({"key": text_of("authorization"), "project": text_of("x-toolcrib-project")}),
        )
    };
    let server = FakeApiServer::start(Router::new().route("/v1/tools", get(show))).await;
    let answer = server.client().request_json(ApiRequest::get(&["v1", "tools"])).await.unwrap();
    assert_eq!(answer, json!({"key": "Bearer tck_test", "project": "acme"}));
}

#[tokio::test]
async fn responses_of_other_servers_are_reported() {
    let html = || async { ([(header::CONTENT_TYPE, "text/html")], "<h1>\u{1b}nginx</h1>") };
    let moved = || async { (StatusCode::FOUND, [(header::LOCATION, "http://elsewhere/")]) };
    let router = Router::new()
        .route("/v1/tools", get(html))
        .route("/v1/moved", get(moved))
        .route("/v1/refused", get(|| async { StatusCode::FORBIDDEN }));
    let server = FakeApiServer::start(router).await;
    let ask = |last| {
        let client = server.client();
        async move { client.request_json(ApiRequest::get(&["v1", last])).await.unwrap_err() }
    };
    let failure = ask("tools").await;
    assert_eq!((failure.exit, failure.code.as_str()), (exit::FAILURE, "NOT_JSON"));
    assert!(failure.message.contains("text/html") && !failure.message.contains('\u{1b}'));
    assert!(
        ask("moved").await.message.contains("status 302"),
        "the key is not sent to a redirect target"
    );
    assert_eq!(ask("refused").await.exit, exit::AUTH);
    let failure = server.client().open_event_stream(&["v1", "tools"], None).await.unwrap_err();
    assert_eq!(failure.code, "NOT_JSON");
}

#[tokio::test]
async fn a_stopped_server_is_reported_as_unreachable() {
    let server = FakeApiServer::start(Router::new()).await;
    let client = server.client();
    server.stop().await;
    let failure = client.request_json(ApiRequest::get(&["v1", "tools"])).await.unwrap_err();
    assert_eq!(failure.exit, exit::UNREACHABLE);
    assert!(failure.hint.unwrap().contains("toolcrib serve"));
}

fn state(status: &str) -> Value {
    json!({"tool_call_id": "tc_1", "tool_name": "a.b", "status": status, "result": 42})
}

#[tokio::test]
async fn waiting_for_a_call_survives_a_restart_of_the_server() {
    let running = FakeApiServer::start(
        Router::new().route("/v1/tool_calls/{id}", get(|| async { axum::Json(state("RUNNING")) })),
    )
    .await;
    let (address, client) = (running.address.clone(), running.client());
    let spinner = indicatif::ProgressBar::hidden();
    let until = Instant::now() + Duration::from_secs(20);
    let waiting =
        outcome::await_outcome(context(true).output, &client, &spinner, state("PENDING"), until);
    let restart = async {
        running.stop().await;
        let ended = get(|| async { axum::Json(state("SUCCEEDED")) });
        FakeApiServer::start_at(&address, Router::new().route("/v1/tool_calls/{id}", ended)).await
    };
    let (call, _server) = tokio::join!(waiting, restart);
    assert_eq!(call.unwrap()["result"], 42);
}

#[tokio::test]
async fn an_expired_wait_returns_the_current_call() {
    let client = ApiClient::new("127.0.0.1:1", None, None).unwrap();
    let spinner = indicatif::ProgressBar::hidden();
    let call = outcome::await_outcome(
        context(true).output,
        &client,
        &spinner,
        state("RUNNING"),
        Instant::now(),
    )
    .await;
    assert_eq!(call.unwrap()["status"], "RUNNING");
}

#[tokio::test]
async fn a_lost_event_stream_is_resumed_after_its_last_event() {
    static OPENED: AtomicUsize = AtomicUsize::new(0);
    let events = |headers: HeaderMap| async move {
        let last = headers.get("last-event-id").and_then(|v| v.to_str().ok()).map(str::to_owned);
        let body = match (OPENED.fetch_add(1, Ordering::Relaxed), last.as_deref()) {
            (0, None) => "id: 7\ndata: {\"type\":\"tool.call.started\"}\n\nid: 8\ndata: {\"cut",
            (1, Some("7")) => "id: 8\ndata: {\"type\":\"tool.call.finished\"}\n\n",
            _ => return StatusCode::IM_A_TEAPOT.into_response(),
        };
        ([(header::CONTENT_TYPE, "text/event-stream")], body).into_response()
    };
    let router = Router::new().route("/v1/tool_calls/{id}/events", get(events));
    let server = FakeApiServer::start(router).await;
    watch::call_events(&server.context(), "tc_1").await.unwrap();
    assert_eq!(OPENED.load(Ordering::Relaxed), 2);
}

#[tokio::test]
async fn a_denied_call_has_its_own_exit_code() {
    let denied = || async {
        let body = json!({"error": {"code": "PERMISSION_DENIED", "message": "no rule"}});
        (StatusCode::FORBIDDEN, axum::Json(body))
    };
    let router = Router::new().route("/v1/tools/{name}/invoke", post(denied));
    let server = FakeApiServer::start(router).await;
    let ask = ApiRequest::post(&["v1", "tools", "a/b", "invoke"], json!({})).for_tool_call();
    assert_eq!(server.client().request_json(ask).await.unwrap_err().exit, exit::DENIED);
}
