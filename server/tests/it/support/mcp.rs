//! An MCP client that writes its own messages, so that a test sees every byte in both directions.
//! Supports revision 2026-07-28, whose requests stand alone, and 2025-11-25, which begins with a
//! handshake.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};

use futures::StreamExt;
use reqwest::{Method, RequestBuilder, Response};
use serde_json::{Value, json};

use super::Api;
use super::soon;

pub const MODERN: &str = "2026-07-28";
pub const LEGACY: &str = "2025-11-25";

/// An MCP client of one revision.
pub struct Mcp {
    api: Api,
    pub revision: &'static str,
    pub session: Option<String>,
    capabilities: Value,
    path: String,
    name: String,
    next: AtomicU64,
}

/// A response with its HTTP status, headers and messages.
#[derive(Debug)]
pub struct McpResponse {
    pub status: u16,
    pub headers: reqwest::header::HeaderMap,
    pub text: String,
    /// The messages, in order; the last one is the response.
    pub messages: Vec<Value>,
}

impl McpResponse {
    /// Returns the result of the response.
    #[track_caller]
    pub fn result(&self) -> Value {
        let last = self.messages.last().unwrap_or_else(|| panic!("no message: {self:?}"));
        assert!(last["error"].is_null(), "{last}");
        last["result"].clone()
    }

    /// Asserts the error code. Returns the error of the response.
    #[track_caller]
    pub fn error(&self, code: i64) -> Value {
        let last = self.messages.last().unwrap_or_else(|| panic!("no message: {self:?}"));
        assert_eq!(last["error"]["code"], code, "{last}");
        last["error"].clone()
    }
}

impl Mcp {
    /// Returns an MCP client of revision 2026-07-28.
    pub fn modern(api: &Api) -> Self {
        Self {
            api: api.clone(),
            revision: MODERN,
            session: None,
            capabilities: json!({}),
            path: "/mcp".to_owned(),
            name: "test".to_owned(),
            next: AtomicU64::new(1),
        }
    }

    /// Returns an initialized MCP client of revision 2025-11-25.
    pub async fn legacy(api: &Api) -> Self {
        Self::legacy_with(api, json!({})).await
    }

    /// Returns an initialized client with these capabilities.
    pub async fn legacy_with(api: &Api, capabilities: Value) -> Self {
        let mut client = Self { revision: LEGACY, capabilities, ..Self::modern(api) };
        let params = json!({
            "protocolVersion": LEGACY,
            "capabilities": client.capabilities,
            "clientInfo": { "name": client.name, "version": "1" },
        });
        let response = client.ask("initialize", params).await;
        assert_eq!(response.result()["protocolVersion"], LEGACY);
        let session = response.headers.get("mcp-session-id").expect("a session");
        client.session = Some(session.to_str().unwrap().to_owned());
        client.notify("notifications/initialized", json!({})).await;
        client
    }

    /// Sets the capabilities of the client.
    pub fn able(mut self, capabilities: Value) -> Self {
        self.capabilities = capabilities;
        self
    }

    /// Sets the name of the client.
    pub fn named(mut self, name: &str) -> Self {
        self.name = name.to_owned();
        self
    }

    /// Adds support for tasks.
    pub fn with_tasks(self) -> Self {
        self.able(json!({ "extensions": { "io.modelcontextprotocol/tasks": {} } }))
    }

    /// Sets the path of the requests.
    pub fn with_path(mut self, path: &str) -> Self {
        self.path = path.to_owned();
        self
    }

    /// Sets the caller of the requests.
    pub fn calling_as(mut self, api: &Api) -> Self {
        self.api = api.clone();
        self
    }

    /// Builds a request.
    pub fn request(&self, method: &str, mut params: Value) -> RequestBuilder {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let mut request = self.post();
        if self.revision == MODERN {
            let meta = &mut params["_meta"];
            meta["io.modelcontextprotocol/protocolVersion"] = MODERN.into();
            meta["io.modelcontextprotocol/clientInfo"] =
                json!({ "name": self.name, "version": "1" });
            meta["io.modelcontextprotocol/clientCapabilities"] = self.capabilities.clone();
            request = request.header("mcp-method", method);
            let subject =
                ["name", "uri", "taskId"].into_iter().find_map(|key| params[key].as_str());
            if let Some(name) = subject.filter(|_| method != "server/discover") {
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

    /// Sends a request and reads the complete response.
    pub async fn ask(&self, method: &str, params: Value) -> McpResponse {
        McpResponse::read(self.request(method, params).send().await.unwrap()).await
    }

    /// Sends a request with a body of its own and reads the complete response.
    pub async fn send(&self, request: RequestBuilder) -> McpResponse {
        McpResponse::read(request.send().await.unwrap()).await
    }

    pub async fn notify(&self, method: &str, params: Value) {
        let body = json!({ "jsonrpc": "2.0", "method": method, "params": params });
        let response = self.post().json(&body).send().await.unwrap();
        assert_eq!(response.status().as_u16(), 202);
    }

    /// Answers a request of the server.
    pub async fn reply(&self, id: &Value, result: Value) {
        let body = json!({ "jsonrpc": "2.0", "id": id, "result": result });
        let response = self.post().json(&body).send().await.unwrap();
        assert_eq!(response.status().as_u16(), 202);
    }

    /// Refuses a request of the server.
    pub async fn reply_error(&self, id: &Value, error: Value) {
        let body = json!({ "jsonrpc": "2.0", "id": id, "error": error });
        let response = self.post().json(&body).send().await.unwrap();
        assert_eq!(response.status().as_u16(), 202);
    }

    /// Returns the tools of all pages.
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

    /// Returns the names of the tools.
    pub async fn names(&self) -> Vec<String> {
        let names = self.tools().await.into_iter();
        names.map(|tool| tool["name"].as_str().unwrap().to_owned()).collect()
    }

    pub async fn call(&self, name: &str, arguments: Value) -> McpResponse {
        self.ask("tools/call", json!({ "name": name, "arguments": arguments })).await
    }

    /// Sends a request and returns its stream.
    pub async fn open(&self, method: &str, params: Value) -> Stream {
        Stream::new(self.request(method, params).send().await.unwrap())
    }

    /// Opens the stream of a session for messages that the server initiates.
    pub async fn session_stream(&self) -> Stream {
        Stream::new(self.get().send().await.unwrap())
    }

    /// Builds a request for a stream.
    pub fn get(&self) -> RequestBuilder {
        let request = self.api.request(Method::GET, &self.path);
        let request = request
            .header("accept", "text/event-stream")
            .header("mcp-protocol-version", self.revision);
        match &self.session {
            Some(session) => request.header("mcp-session-id", session),
            None => request,
        }
    }

    /// Continues the stream that ended after this event.
    pub async fn resume(&self, last_event_id: &str) -> Stream {
        let request = self.get().header("last-event-id", last_event_id);
        Stream::new(request.send().await.unwrap())
    }

    /// Closes the session. Returns the status.
    pub async fn close(&self) -> u16 {
        let request = self.api.request(Method::DELETE, &self.path);
        let request = request
            .header("mcp-protocol-version", self.revision)
            .header("mcp-session-id", self.session.as_ref().unwrap());
        request.send().await.unwrap().status().as_u16()
    }
}

impl McpResponse {
    pub async fn read(response: Response) -> Self {
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

/// A stream of messages.
pub struct Stream {
    body: std::pin::Pin<Box<dyn futures::Stream<Item = reqwest::Result<axum::body::Bytes>> + Send>>,
    text: String,
}

impl Stream {
    fn new(response: Response) -> Self {
        assert_eq!(response.status().as_u16(), 200);
        Self { body: Box::pin(response.bytes_stream()), text: String::new() }
    }

    /// Returns the fields of the next event, or `None` at the end of the stream. Skips comments.
    pub async fn event(&mut self) -> Option<HashMap<String, String>> {
        loop {
            while let Some((block, rest)) = self.text.split_once("\n\n") {
                let fields: HashMap<String, String> = block
                    .lines()
                    .filter_map(|line| line.split_once(':'))
                    .filter(|(name, _)| !name.is_empty())
                    .map(|(name, value)| (name.to_owned(), value.trim().to_owned()))
                    .collect();
                self.text = rest.to_owned();
                if !fields.is_empty() {
                    return Some(fields);
                }
            }
            let chunk = soon("an event", self.body.next()).await?;
            self.text.push_str(std::str::from_utf8(&chunk.ok()?).unwrap());
        }
    }

    /// Returns the next message, or `None` at the end of the stream.
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

    /// Waits for the next notification or request with this method.
    pub async fn until(&mut self, method: &str) -> Value {
        loop {
            let message = self.next().await.unwrap_or_else(|| panic!("no {method} before the end"));
            if message["method"] == method {
                return message;
            }
        }
    }
}
