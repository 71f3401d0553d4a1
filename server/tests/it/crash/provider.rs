//! Clients that execute calls, one over each kind of ingress. They outlive the server: they come
//! back when it does, and submit until somebody took what they have to say.
//!
//! `probe.once` is irreversible and executed only by who knows that it was taken; `probe.read` may
//! be executed as often as it is given.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::{SinkExt, StreamExt};
use reqwest::{Client, StatusCode};
use serde_json::{Value, json};
use tokio_tungstenite::tungstenite::Message;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::support::process::{Server, text};

/// The clients, and how often each call was executed.
#[derive(Clone)]
pub struct Providers {
    http: Client,
    port: u16,
    executed: Arc<Mutex<HashMap<String, u32>>>,
    gone: CancellationToken,
    tasks: TaskTracker,
}

impl Providers {
    /// Registers the tools; nobody is connected yet.
    pub async fn registered(server: &Server) -> Self {
        for (client_id, tool, effect) in [
            ("poller", "probe.once", "irreversible"),
            ("streamer", "probe.once", "irreversible"),
            ("socket", "probe.read", "read"),
        ] {
            server.register(client_id, tool, effect).await;
        }
        Self {
            http: server.http.clone(),
            port: server.port,
            executed: Arc::default(),
            gone: CancellationToken::new(),
            tasks: TaskTracker::new(),
        }
    }

    /// Connects one client over each kind of ingress.
    pub fn connect_all(&self) {
        self.keep_on(Self::poll_once);
        self.keep_on(Self::stream_once);
        self.keep_on(Self::converse_once);
    }

    /// Does it again and again: each time the server went away, it is there again soon.
    fn keep_on<F>(&self, once: impl Fn(Self) -> F + Send + 'static)
    where
        F: Future<Output = Option<()>> + Send,
    {
        let this = self.clone();
        self.tasks.spawn(async move {
            while !this.gone.is_cancelled() {
                tokio::select! {
                    done = once(this.clone()) => if done.is_none() {
                        tokio::time::sleep(Duration::from_millis(10)).await;
                    },
                    () = this.gone.cancelled() => {}
                }
            }
        });
    }

    pub async fn disconnect(&self) {
        self.gone.cancel();
        self.tasks.close();
        self.tasks.wait().await;
    }

    /// How often each call was executed.
    pub fn executed(&self) -> HashMap<String, u32> {
        self.executed.lock().unwrap().clone()
    }

    fn url(&self, path: &str) -> String {
        format!("127.0.0.1:{}{path}", self.port)
    }

    /// Executes a request: the result is its arguments.
    fn execute(&self, request: &Value) -> Value {
        *self.executed.lock().unwrap().entry(text(request, "tool_call_id")).or_default() += 1;
        json!({ "echo": request["args"] })
    }

    /// Long poll: what is handed over has been taken.
    async fn poll_once(self) -> Option<()> {
        let path = "/internal/ingress/poll?client_id=poller&wait_ms=1000&max=16";
        let answer = self.http.get(format!("http://{}", self.url(path))).send().await.ok()?;
        let body = answer.error_for_status().ok()?.json::<Value>().await.ok()?;
        for request in body["requests"].as_array()? {
            let result = self.execute(request);
            self.tasks.spawn(self.clone().submit(request.clone(), result, "poller"));
        }
        Some(())
    }

    /// Server-sent events: taken with a request of its own, and executed once that was answered.
    async fn stream_once(self) -> Option<()> {
        let path = "/internal/ingress/sse?client_id=streamer";
        let answer = self.http.get(format!("http://{}", self.url(path))).send().await.ok()?;
        let mut chunks = answer.error_for_status().ok()?.bytes_stream();
        let mut heard = String::new();
        let hang_up = CancellationToken::new();
        while let Some(Ok(chunk)) =
            hang_up.run_until_cancelled(chunks.next()).await.unwrap_or_default()
        {
            heard.push_str(std::str::from_utf8(&chunk).ok()?);
            while let Some((line, rest)) = heard.split_once('\n') {
                let request = line.strip_prefix("data: ").map(|data| data.parse::<Value>());
                if let Some(Ok(request)) = request
                    && request["type"] == "tool_request"
                {
                    self.tasks.spawn(self.clone().take_and_execute(request, hang_up.clone()));
                }
                heard = rest.to_owned();
            }
        }
        None
    }

    async fn take_and_execute(self, request: Value, hang_up: CancellationToken) {
        let path = format!("/internal/tool_calls/{}/ack", text(&request, "tool_call_id"));
        let body = json!({ "client_id": "streamer", "attempt": request["attempt"] });
        let asked = self.http.post(format!("http://{}", self.url(&path))).json(&body);
        // Without an answer nobody knows whether it was taken: it is not executed. What was not
        // taken comes again on the next connection.
        let Ok(answer) = asked.send().await else { return hang_up.cancel() };
        if answer.status() == StatusCode::OK {
            let result = self.execute(&request);
            self.submit(request, result, "streamer").await;
        }
    }

    /// WebSocket: taken and answered on one connection.
    async fn converse_once(self) -> Option<()> {
        let address = format!("ws://{}", self.url("/internal/ingress/ws"));
        let (mut socket, _) = tokio_tungstenite::connect_async(address).await.ok()?;
        let hello = json!({ "type": "hello", "client_id": "socket", "max_in_flight": 64 });
        socket.send(Message::text(hello.to_string())).await.ok()?;
        while let Some(Ok(frame)) = socket.next().await {
            let Message::Text(said) = frame else { continue };
            let request: Value = said.parse().ok()?;
            if request["type"] != "tool_request" {
                continue;
            }
            let (id, attempt) = (&request["tool_call_id"], &request["attempt"]);
            let taken = json!({ "type": "tool_ack", "tool_call_id": id, "attempt": attempt });
            socket.feed(Message::text(taken.to_string())).await.ok()?;
            let result = json!({
                "type": "tool_result", "tool_call_id": id, "attempt": attempt,
                "status": "SUCCEEDED", "result": self.execute(&request),
            });
            socket.send(Message::text(result.to_string())).await.ok()?;
        }
        None
    }

    /// Says how it went until the server answers; it may be another server process by then.
    async fn submit(self, request: Value, result: Value, client_id: &'static str) {
        let id = text(&request, "tool_call_id");
        let url = format!("http://{}", self.url(&format!("/internal/tool_calls/{id}/submit")));
        let attempt = &request["attempt"];
        let body = json!({
            "status": "SUCCEEDED", "result": result, "client_id": client_id, "attempt": attempt,
        });
        while !self.gone.is_cancelled() {
            match self.http.post(&url).json(&body).send().await.map(|answer| answer.status()) {
                // 409: it timed out meanwhile.
                Ok(StatusCode::OK | StatusCode::CONFLICT) => return,
                Ok(StatusCode::SERVICE_UNAVAILABLE) | Err(_) => {}
                Ok(other) => panic!("submitting {id} was answered {other}"),
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}
