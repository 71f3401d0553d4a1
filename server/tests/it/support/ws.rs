//! A client that provides tools over a WebSocket.

use std::collections::VecDeque;

use futures::{SinkExt, StreamExt};
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio_tungstenite::tungstenite::client::IntoClientRequest;
use tokio_tungstenite::tungstenite::{Error, Message};
use tokio_tungstenite::{MaybeTlsStream, WebSocketStream, connect_async};

use super::api::Api;
use super::soon;

/// One connection.
pub struct Ws {
    pub socket: WebSocketStream<MaybeTlsStream<TcpStream>>,
    /// Messages that arrived while the client waited for another one.
    buffered: VecDeque<Value>,
}

impl Ws {
    /// Connects without a hello.
    pub async fn open(api: &Api) -> Result<Self, Error> {
        let url = format!("ws://{}/internal/ingress/ws", api.address);
        let mut request = url.into_client_request().unwrap();
        if let Some(key) = api.secret() {
            let value = format!("Bearer {key}").parse().unwrap();
            request.headers_mut().insert("authorization", value);
        }
        for (name, value) in api.asserted() {
            request.headers_mut().insert(*name, value.parse().unwrap());
        }
        let (socket, _) = soon("a WebSocket", connect_async(request)).await?;
        Ok(Self { socket, buffered: VecDeque::new() })
    }

    /// Connects, sends a hello with these fields, and waits for the answer.
    pub async fn hello(api: &Api, client_id: &str, more: Value) -> Self {
        let mut ws = Self::open(api).await.unwrap();
        let mut hello = json!({ "type": "hello", "client_id": client_id });
        for (key, value) in more.as_object().unwrap() {
            hello[key] = value.clone();
        }
        ws.send(hello).await;
        let answer = ws.receive().await;
        assert_eq!(answer["type"], "hello_ack", "{answer}");
        assert_eq!(answer["client_id"], client_id);
        ws
    }

    /// Connects a client that offers these tools.
    pub async fn offering(api: &Api, client_id: &str, tools: Value) -> Self {
        Self::hello(api, client_id, json!({ "tools": tools })).await
    }

    pub async fn send(&mut self, message: Value) {
        self.send_raw(Message::text(message.to_string())).await;
    }

    pub async fn send_raw(&mut self, message: Message) {
        soon("a message to be sent", self.socket.send(message)).await.unwrap();
    }

    /// Returns the next message, or `None` after the end of the connection.
    pub async fn next(&mut self) -> Option<Value> {
        if let Some(buffered) = self.buffered.pop_front() {
            return Some(buffered);
        }
        self.read_message().await
    }

    async fn read_message(&mut self) -> Option<Value> {
        let text = self.next_text().await?;
        Some(serde_json::from_str(&text).unwrap())
    }

    /// Returns the next message as it was sent, or `None` after the end of the connection. Skips
    /// pings and pongs.
    pub async fn next_text(&mut self) -> Option<String> {
        soon("a message", async {
            loop {
                match self.socket.next().await {
                    Some(Ok(Message::Text(text))) => return Some(text.to_string()),
                    Some(Ok(Message::Ping(_) | Message::Pong(_))) => {}
                    _ => return None,
                }
            }
        })
        .await
    }

    /// Returns the next message; panics after the end of the connection.
    pub async fn receive(&mut self) -> Value {
        self.next().await.expect("the connection ended")
    }

    /// Returns the next message and asserts its type.
    pub async fn expect_message(&mut self, kind: &str) -> Value {
        let message = self.receive().await;
        assert_eq!(message["type"], kind, "{message}");
        message
    }

    /// Waits for a request and acknowledges it.
    pub async fn take(&mut self) -> Value {
        let request = self.expect_message("tool_request").await;
        self.ack(&request).await;
        request
    }

    /// Acknowledges a request.
    pub async fn ack(&mut self, request: &Value) {
        let (id, attempt) = (&request["tool_call_id"], &request["attempt"]);
        self.send(json!({ "type": "tool_ack", "tool_call_id": id, "attempt": attempt })).await;
    }

    /// Sends a result and waits until it is acknowledged.
    pub async fn succeed(&mut self, request: &Value, result: Value) -> Value {
        self.finish(request, json!({ "status": "SUCCEEDED", "result": result })).await
    }

    /// Sends a failure and waits until it is acknowledged.
    pub async fn fail(&mut self, request: &Value, error: Value) -> Value {
        self.finish(request, json!({ "status": "FAILED", "error": error })).await
    }

    async fn finish(&mut self, request: &Value, mut message: Value) -> Value {
        message["type"] = "tool_result".into();
        message["tool_call_id"] = request["tool_call_id"].clone();
        message["attempt"] = request["attempt"].clone();
        self.send(message).await;
        loop {
            let answer = self.read_message().await.expect("the connection ended");
            if answer["type"] == "result_ack" {
                assert_eq!(answer["tool_call_id"], request["tool_call_id"]);
                return answer;
            }
            // Other requests may arrive first.
            self.buffered.push_back(answer);
        }
    }

    /// Asserts that no other message was sent: the next message answers a ping.
    pub async fn expect_no_message(&mut self) {
        self.send(json!({ "type": "ping" })).await;
        self.expect_message("pong").await;
    }

    /// Closes the connection and waits until the server has closed it, too.
    pub async fn close(mut self) {
        self.socket.close(None).await.unwrap();
        while let Some(Ok(_)) = soon("the connection's end", self.socket.next()).await {}
    }
}
