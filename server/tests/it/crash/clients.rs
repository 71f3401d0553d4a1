//! Clients that execute calls, one over each kind of ingress. They outlive the server: they
//! reconnect when it is back, and submit a result until the server accepts it.
//!
//! `probe.once` is irreversible; a client executes it only after its acknowledgement was confirmed.
//! `probe.read` may be executed on every delivery.

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

/// The clients, and the number of executions of each call.
#[derive(Clone)]
pub struct ToolClients {
    http: Client,
    port: u16,
    executed: Arc<Mutex<HashMap<String, u32>>>,
    stopped: CancellationToken,
    tasks: TaskTracker,
}

impl ToolClients {
    /// Registers the tools without a connection.
    pub async fn register(server: &Server) -> Self {
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
            stopped: CancellationToken::new(),
            tasks: TaskTracker::new(),
        }
    }

    /// Connects one client over each kind of ingress.
    pub fn connect_all(&self) {
        self.repeat(Self::poll_once);
        self.repeat(Self::stream_once);
        self.repeat(Self::converse_once);
    }

    /// Repeats a function: after a disconnect the server is soon back.
    fn repeat<F>(&self, once: impl Fn(Self) -> F + Send + 'static)
    where
        F: Future<Output = Option<()>> + Send,
    {
        let this = self.clone();
        self.tasks.spawn(async move {
            while !this.stopped.is_cancelled() {
                tokio::select! {
                    done = once(this.clone()) => if done.is_none() {
                        tokio::time::sleep(Duration::from_millis(10)).await;
                    },
                    () = this.stopped.cancelled() => {}
                }
            }
        });
    }

    pub async fn disconnect(&self) {
        self.stopped.cancel();
        self.tasks.close();
        self.tasks.wait().await;
    }

    /// Returns the number of executions of each call.
    pub fn executed(&self) -> HashMap<String, u32> {
        self.executed.lock().unwrap().clone()
    }

    fn url(&self, path: &str) -> String {
        format!("127.0.0.1:{}{path}", self.port)
    }

    /// Executes a request; the result contains its arguments.
    fn execute(&self, request: &Value) -> Value {
        *self.executed.lock().unwrap().entry(text(request, "tool_call_id")).or_default() += 1;
        json!({ "echo": request["args"] })
    }

    /// Long poll: a delivered call counts as acknowledged.
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

    /// Server-sent events: acknowledged by a separate request, and executed after its answer.
    async fn stream_once(self) -> Option<()> {
        let path = "/internal/ingress/sse?client_id=streamer";
        let answer = self.http.get(format!("http://{}", self.url(path))).send().await.ok()?;
        let mut chunks = answer.error_for_status().ok()?.bytes_stream();
        let mut received = String::new();
        let disconnect = CancellationToken::new();
        while let Some(Ok(chunk)) =
            disconnect.run_until_cancelled(chunks.next()).await.unwrap_or_default()
        {
            received.push_str(std::str::from_utf8(&chunk).ok()?);
            while let Some((line, rest)) = received.split_once('\n') {
                let request = line.strip_prefix("data: ").map(|data| data.parse::<Value>());
                if let Some(Ok(request)) = request
                    && request["type"] == "tool_request"
                {
                    self.tasks
                        .spawn(self.clone().acknowledge_and_execute(request, disconnect.clone()));
                }
                received = rest.to_owned();
            }
        }
        None
    }

    async fn acknowledge_and_execute(self, request: Value, disconnect: CancellationToken) {
        let path = format!("/internal/tool_calls/{}/ack", text(&request, "tool_call_id"));
        let body = json!({ "client_id": "streamer", "attempt": request["attempt"] });
        let request_ack = self.http.post(format!("http://{}", self.url(&path))).json(&body);
        // Without an answer the acknowledgement is uncertain, so the call is not executed. An
        // unacknowledged call is delivered again on the next connection.
        let Ok(answer) = request_ack.send().await else { return disconnect.cancel() };
        if answer.status() == StatusCode::OK {
            let result = self.execute(&request);
            self.submit(request, result, "streamer").await;
        }
    }

    /// WebSocket: acknowledged and answered on one connection.
    async fn converse_once(self) -> Option<()> {
        let address = format!("ws://{}", self.url("/internal/ingress/ws"));
        let (mut socket, _) = tokio_tungstenite::connect_async(address).await.ok()?;
        let hello = json!({ "type": "hello", "client_id": "socket", "max_in_flight": 64 });
        socket.send(Message::text(hello.to_string())).await.ok()?;
        while let Some(Ok(frame)) = socket.next().await {
            let Message::Text(message) = frame else { continue };
            let request: Value = message.parse().ok()?;
            if request["type"] != "tool_request" {
                continue;
            }
            let (id, attempt) = (&request["tool_call_id"], &request["attempt"]);
            let ack = json!({ "type": "tool_ack", "tool_call_id": id, "attempt": attempt });
            socket.feed(Message::text(ack.to_string())).await.ok()?;
            let result = json!({
                "type": "tool_result", "tool_call_id": id, "attempt": attempt,
                "status": "SUCCEEDED", "result": self.execute(&request),
            });
            socket.send(Message::text(result.to_string())).await.ok()?;
        }
        None
    }

    /// Submits the result until the server answers, possibly after a restart.
    async fn submit(self, request: Value, result: Value, client_id: &'static str) {
        let id = text(&request, "tool_call_id");
        let url = format!("http://{}", self.url(&format!("/internal/tool_calls/{id}/submit")));
        let attempt = &request["attempt"];
        let body = json!({
            "status": "SUCCEEDED", "result": result, "client_id": client_id, "attempt": attempt,
        });
        while !self.stopped.is_cancelled() {
            match self.http.post(&url).json(&body).send().await.map(|answer| answer.status()) {
                // 409: the call timed out in the meantime.
                Ok(StatusCode::OK | StatusCode::CONFLICT) => return,
                Ok(StatusCode::SERVICE_UNAVAILABLE) | Err(_) => {}
                Ok(other) => panic!("submitting {id} was answered {other}"),
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}
