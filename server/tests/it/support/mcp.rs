//! An MCP client that writes its messages itself, so that a test sees every byte both ways: of the
//! revision 2026-07-28, which says everything with each request, and of 2025-11-25, which begins
//! with a handshake.

use std::sync::atomic::{AtomicU64, Ordering};

use futures::StreamExt;
use reqwest::{Method, RequestBuilder, Response};
use serde_json::{Value, json};

use super::Api;
use super::soon;

pub const MODERN: &str = "2026-07-28";
pub const LEGACY: &str = "2025-11-25";

/// A client of one revision.
pub struct Mcp {
    api: Api,
    pub revision: &'static str,
    pub session: Option<String>,
    capabilities: Value,
    path: String,
    next: AtomicU64,
}

/// An answer with what it came in.
#[derive(Debug)]
pub struct Told {
    pub status: u16,
    pub headers: reqwest::header::HeaderMap,
    pub text: String,
    /// The messages, in order; the answer is the last.
    pub messages: Vec<Value>,
}

impl Told {
    /// The answer's result.
    #[track_caller]
    pub fn result(&self) -> Value {
        let last = self.messages.last().unwrap_or_else(|| panic!("no message: {self:?}"));
        assert!(last["error"].is_null(), "{last}");
        last["result"].clone()
    }

    /// The answer's error.
    #[track_caller]
    pub fn error(&self, code: i64) -> Value {
        let last = self.messages.last().unwrap_or_else(|| panic!("no message: {self:?}"));
        assert_eq!(last["error"]["code"], code, "{last}");
        last["error"].clone()
    }
}

impl Mcp {
    /// A client of 2026-07-28.
    pub fn modern(api: &Api) -> Self {
        Self {
            api: api.clone(),
            revision: MODERN,
            session: None,
            capabilities: json!({}),
            path: "/mcp".to_owned(),
            next: AtomicU64::new(1),
        }
    }

    /// A client of 2025-11-25 that has introduced itself.
    pub async fn legacy(api: &Api) -> Self {
        Self::legacy_with(api, json!({})).await
    }

    /// The same with capabilities.
    pub async fn legacy_with(api: &Api, capabilities: Value) -> Self {
        let mut client = Self { revision: LEGACY, capabilities, ..Self::modern(api) };
        let params = json!({
            "protocolVersion": LEGACY,
            "capabilities": client.capabilities,
            "clientInfo": { "name": "test", "version": "1" },
        });
        let told = client.ask("initialize", params).await;
        assert_eq!(told.result()["protocolVersion"], LEGACY);
        let session = told.headers.get("mcp-session-id").expect("a session");
        client.session = Some(session.to_str().unwrap().to_owned());
        client.notify("notifications/initialized", json!({})).await;
        client
    }

    /// The same client that can do more.
    pub fn able(mut self, capabilities: Value) -> Self {
        self.capabilities = capabilities;
        self
    }

    /// The same client that knows tasks.
    pub fn with_tasks(self) -> Self {
        self.able(json!({ "extensions": { "io.modelcontextprotocol/tasks": {} } }))
    }

    /// The same client at another address.
    pub fn at(mut self, path: &str) -> Self {
        self.path = path.to_owned();
        self
    }

    /// The same client as somebody else.
    pub fn played_by(mut self, api: &Api) -> Self {
        self.api = api.clone();
        self
    }

    /// A request that is not sent yet.
    pub fn request(&self, method: &str, mut params: Value) -> RequestBuilder {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let mut request = self.post();
        if self.revision == MODERN {
            let meta = &mut params["_meta"];
            meta["io.modelcontextprotocol/protocolVersion"] = MODERN.into();
            meta["io.modelcontextprotocol/clientInfo"] = json!({ "name": "test", "version": "1" });
            meta["io.modelcontextprotocol/clientCapabilities"] = self.capabilities.clone();
            request = request.header("mcp-method", method);
            let named = ["name", "uri", "taskId"].into_iter().find_map(|key| params[key].as_str());
            if let Some(name) = named.filter(|_| method != "server/discover") {
                request = request.header("mcp-name", name);
            }
        }
        request.json(&json!({ "jsonrpc": "2.0", "id": id, "method": method, "params": params }))
    }

    fn post(&self) -> RequestBuilder {
        let request = self.api.request(Method::POST, &self.path);
        let request = request.header("accept", "application/json, text/event-stream");
        let request = match &self.session {
            Some(session) => request.header("mcp-session-id", session),
            None => request,
        };
        match self.revision == MODERN || self.session.is_some() {
            true => request.header("mcp-protocol-version", self.revision),
            false => request,
        }
    }

    /// Asks and reads the answer to its end.
    pub async fn ask(&self, method: &str, params: Value) -> Told {
        Told::read(self.request(method, params).send().await.unwrap()).await
    }

    pub async fn notify(&self, method: &str, params: Value) {
        let body = json!({ "jsonrpc": "2.0", "method": method, "params": params });
        let response = self.post().json(&body).send().await.unwrap();
        assert_eq!(response.status().as_u16(), 202);
    }

    /// Answers something that the server asked.
    pub async fn reply(&self, id: &Value, result: Value) {
        let body = json!({ "jsonrpc": "2.0", "id": id, "result": result });
        let response = self.post().json(&body).send().await.unwrap();
        assert_eq!(response.status().as_u16(), 202);
    }

    /// The tools, all pages.
    pub async fn tools(&self) -> Vec<Value> {
        let (mut all, mut cursor) = (Vec::new(), Value::Null);
        loop {
            let params = if cursor.is_null() { json!({}) } else { json!({ "cursor": cursor }) };
            let page = self.ask("tools/list", params).await.result();
            all.extend(page["tools"].as_array().unwrap().iter().cloned());
            cursor = page["nextCursor"].clone();
            if cursor.is_null() {
                return all;
            }
        }
    }

    /// Their names.
    pub async fn names(&self) -> Vec<String> {
        let names = self.tools().await.into_iter();
        names.map(|tool| tool["name"].as_str().unwrap().to_owned()).collect()
    }

    pub async fn call(&self, name: &str, arguments: Value) -> Told {
        self.ask("tools/call", json!({ "name": name, "arguments": arguments })).await
    }

    /// A stream that stays open.
    pub async fn open(&self, method: &str, params: Value) -> Stream {
        Stream::of(self.request(method, params).send().await.unwrap())
    }

    /// The stream of a session, on which the server speaks by itself.
    pub async fn session_stream(&self) -> Stream {
        let request = self.api.request(Method::GET, &self.path);
        let request = request
            .header("accept", "text/event-stream")
            .header("mcp-protocol-version", self.revision)
            .header("mcp-session-id", self.session.as_ref().unwrap());
        Stream::of(request.send().await.unwrap())
    }
}

impl Told {
    async fn read(response: Response) -> Self {
        let (status, headers) = (response.status().as_u16(), response.headers().clone());
        let kind = headers.get("content-type").map(|kind| kind.to_str().unwrap().to_owned());
        let text = response.text().await.unwrap();
        let messages = match kind.as_deref() {
            Some("text/event-stream") => messages_in(&text),
            _ => serde_json::from_str(&text).into_iter().collect(),
        };
        Self { status, headers, text, messages }
    }
}

fn messages_in(text: &str) -> Vec<Value> {
    let data = text.lines().filter_map(|line| line.strip_prefix("data:"));
    data.filter_map(|data| serde_json::from_str(data.trim()).ok()).collect()
}

/// Messages as they come.
pub struct Stream {
    body: std::pin::Pin<Box<dyn futures::Stream<Item = reqwest::Result<axum::body::Bytes>> + Send>>,
    text: String,
}

impl Stream {
    fn of(response: Response) -> Self {
        assert_eq!(response.status().as_u16(), 200);
        Self { body: Box::pin(response.bytes_stream()), text: String::new() }
    }

    /// The next message; none at the end of the stream.
    pub async fn next(&mut self) -> Option<Value> {
        loop {
            while let Some((line, rest)) = self.text.split_once('\n') {
                let message = line.strip_prefix("data:").map(|data| data.trim().to_owned());
                self.text = rest.to_owned();
                if let Some(message) = message.and_then(|text| serde_json::from_str(&text).ok()) {
                    return Some(message);
                }
            }
            let chunk = soon("a message", self.body.next()).await?;
            self.text.push_str(std::str::from_utf8(&chunk.unwrap()).unwrap());
        }
    }

    /// The next notification or request of this method.
    pub async fn until(&mut self, method: &str) -> Value {
        loop {
            let message = self.next().await.unwrap_or_else(|| panic!("no {method} before the end"));
            if message["method"] == method {
                return message;
            }
        }
    }
}
