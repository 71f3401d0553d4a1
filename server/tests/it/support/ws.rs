//! A tool provider on a WebSocket.

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
    /// Heard while something else was waited for.
    kept: VecDeque<Value>,
}

impl Ws {
    /// Connects and says nothing yet.
    pub async fn open(api: &Api) -> Result<Self, Error> {
        let url = format!("ws://{}/internal/ingress/ws", api.address);
        let mut request = url.into_client_request().unwrap();
        if let Some(key) = api.secret() {
            let value = format!("Bearer {key}").parse().unwrap();
            request.headers_mut().insert("authorization", value);
        }
        let (socket, _) = soon("a WebSocket", connect_async(request)).await?;
        Ok(Self { socket, kept: VecDeque::new() })
    }

    /// Connects, says hello with these fields, and waits for the answer.
    pub async fn hello(api: &Api, client_id: &str, more: Value) -> Self {
        let mut ws = Self::open(api).await.unwrap();
        let mut hello = json!({ "type": "hello", "client_id": client_id });
        for (key, value) in more.as_object().unwrap() {
            hello[key] = value.clone();
        }
        ws.say(hello).await;
        let answer = ws.hear().await;
        assert_eq!(answer["type"], "hello_ack", "{answer}");
        assert_eq!(answer["client_id"], client_id);
        ws
    }

    /// The same for a client that offers these tools.
    pub async fn offering(api: &Api, client_id: &str, tools: Value) -> Self {
        Self::hello(api, client_id, json!({ "tools": tools })).await
    }

    pub async fn say(&mut self, message: Value) {
        self.say_raw(Message::text(message.to_string())).await;
    }

    pub async fn say_raw(&mut self, message: Message) {
        soon("a message to be sent", self.socket.send(message)).await.unwrap();
    }

    /// The next message; none when the connection has ended.
    pub async fn next(&mut self) -> Option<Value> {
        if let Some(kept) = self.kept.pop_front() {
            return Some(kept);
        }
        self.next_heard().await
    }

    async fn next_heard(&mut self) -> Option<Value> {
        // Pings come all the time; it is a message that is waited for.
        soon("a message", async {
            loop {
                match self.socket.next().await {
                    Some(Ok(Message::Text(text))) => {
                        return Some(serde_json::from_str(&text).unwrap());
                    }
                    Some(Ok(Message::Ping(_) | Message::Pong(_))) => {}
                    _ => return None,
                }
            }
        })
        .await
    }

    /// The next message, which must come.
    pub async fn hear(&mut self) -> Value {
        self.next().await.expect("the connection ended")
    }

    /// The next message, which must be of this type.
    pub async fn hear_a(&mut self, kind: &str) -> Value {
        let message = self.hear().await;
        assert_eq!(message["type"], kind, "{message}");
        message
    }

    /// Waits for a request and takes it.
    pub async fn take(&mut self) -> Value {
        let request = self.hear_a("tool_request").await;
        self.ack(&request).await;
        request
    }

    /// Takes a request.
    pub async fn ack(&mut self, request: &Value) {
        let (id, attempt) = (&request["tool_call_id"], &request["attempt"]);
        self.say(json!({ "type": "tool_ack", "tool_call_id": id, "attempt": attempt })).await;
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
        self.say(message).await;
        loop {
            let heard = self.next_heard().await.expect("the connection ended");
            if heard["type"] == "result_ack" {
                assert_eq!(heard["tool_call_id"], request["tool_call_id"]);
                return heard;
            }
            // More work may come in between.
            self.kept.push_back(heard);
        }
    }

    /// Proves that nothing else was sent: a ping is answered next.
    pub async fn quiet(&mut self) {
        self.say(json!({ "type": "ping" })).await;
        self.hear_a("pong").await;
    }

    /// Hangs up, and waits until the server has noticed.
    pub async fn hang_up(mut self) {
        self.socket.close(None).await.unwrap();
        while let Some(Ok(_)) = soon("the connection's end", self.socket.next()).await {}
    }
}
