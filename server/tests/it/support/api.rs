//! HTTP client of the server, for agents, providers and operators.

use reqwest::{Client, Method, RequestBuilder, StatusCode, header};
use serde_json::{Value, json};

use super::sse::Sse;
use super::until;

/// A caller with its credentials.
#[derive(Clone)]
pub struct Api {
    pub address: String,
    http: Client,
    key: Option<String>,
    project: Option<String>,
    asserted: Vec<(&'static str, String)>,
}

/// A complete response.
#[derive(Debug)]
pub struct Reply {
    pub status: StatusCode,
    pub headers: header::HeaderMap,
    pub text: String,
    /// `null` when the text is not JSON.
    pub body: Value,
}

impl Reply {
    async fn read(response: reqwest::Response) -> Self {
        let (status, headers) = (response.status(), response.headers().clone());
        let text = response.text().await.unwrap();
        let body = serde_json::from_str(&text).unwrap_or(Value::Null);
        Self { status, headers, text, body }
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(|value| value.to_str().unwrap())
    }

    /// Asserts the status. Returns the body.
    #[track_caller]
    pub fn is(self, status: u16) -> Value {
        assert_eq!(self.status.as_u16(), status, "{}", self.text);
        self.body
    }

    /// Asserts the status, the code and the format of an error response. Returns its `error`.
    #[track_caller]
    pub fn refused(self, status: u16, code: &str) -> Value {
        assert_eq!(self.status.as_u16(), status, "{}", self.text);
        let kind = self.header("content-type").unwrap_or("").to_owned();
        assert_eq!(kind, "application/problem+json", "{}", self.text);
        assert!(self.header("x-request-id").is_some());
        let body = &self.body;
        assert_eq!(body["status"], status, "{body}");
        assert_eq!(body["code"], code, "{body}");
        let type_ = format!("/docs/errors#{}", code.to_lowercase());
        assert_eq!(body["type"], type_, "{body}");
        assert!(body["title"].as_str().is_some_and(|title| !title.is_empty()), "{body}");
        let error = body["error"].as_object().unwrap();
        let fields: Vec<&str> = error.keys().map(String::as_str).collect();
        assert_eq!(fields, ["code", "detail", "message", "retryable"], "{body}");
        assert_eq!(error["code"], code, "{body}");
        assert_eq!(error["message"], body["detail"], "{body}");
        assert!(error["message"].as_str().is_some_and(|text| !text.is_empty()), "{body}");
        assert!(error["retryable"].is_boolean(), "{body}");
        self.body["error"].clone()
    }
}

/// Returns the `message` of an error.
pub fn message(error: &Value) -> &str {
    error["message"].as_str().unwrap()
}

impl Api {
    /// Returns the same caller at another address.
    pub fn at(mut self, address: &str) -> Self {
        address.clone_into(&mut self.address);
        self
    }

    pub fn new(address: &str) -> Self {
        let http = Client::builder().no_proxy().timeout(super::PATIENCE * 2).build().unwrap();
        Self { address: address.to_owned(), http, key: None, project: None, asserted: Vec::new() }
    }

    pub fn key(mut self, key: &str) -> Self {
        self.key = Some(key.to_owned());
        self
    }

    pub fn project(mut self, project: &str) -> Self {
        self.project = Some(project.to_owned());
        self
    }

    /// Asserts a user with every request.
    pub fn user(mut self, user: &str) -> Self {
        self.asserted.push(("x-toolcrib-user", user.to_owned()));
        self
    }

    /// Asserts a session with every request.
    pub fn session(mut self, session: &str) -> Self {
        self.asserted.push(("x-toolcrib-session", session.to_owned()));
        self
    }

    pub fn secret(&self) -> Option<&str> {
        self.key.as_deref()
    }

    /// Returns a request with the caller's credentials.
    pub fn request(&self, method: Method, path: &str) -> RequestBuilder {
        let url = format!("http://{}{path}", self.address);
        let mut request = self.http.request(method, url);
        if let Some(key) = &self.key {
            request = request.bearer_auth(key);
        }
        if let Some(project) = &self.project {
            request = request.header("x-toolcrib-project", project);
        }
        for (name, value) in &self.asserted {
            request = request.header(*name, value);
        }
        request
    }

    pub async fn send(&self, request: RequestBuilder) -> Reply {
        Reply::read(request.send().await.unwrap()).await
    }

    pub async fn get(&self, path: &str) -> Reply {
        self.send(self.request(Method::GET, path)).await
    }

    pub async fn delete(&self, path: &str) -> Reply {
        self.send(self.request(Method::DELETE, path)).await
    }

    pub async fn post(&self, path: &str, body: Value) -> Reply {
        self.send(self.request(Method::POST, path).json(&body)).await
    }

    pub async fn put(&self, path: &str, body: Value) -> Reply {
        self.send(self.request(Method::PUT, path).json(&body)).await
    }

    /// Posts a body unchanged, byte for byte.
    pub async fn post_raw(&self, path: &str, body: impl Into<reqwest::Body>) -> Reply {
        let request = self.request(Method::POST, path);
        self.send(request.header(header::CONTENT_TYPE, "application/json").body(body)).await
    }

    /// Registers tools and asserts success.
    #[track_caller]
    pub fn register(&self, client_id: &str, tools: Value) -> impl Future<Output = ()> {
        let (api, count) = (self.clone(), tools.as_array().unwrap().len());
        let body = json!({ "client_id": client_id, "tools": tools });
        async move {
            let answer = api.post("/internal/tools/register", body).await.is(200);
            assert_eq!(answer, json!({ "ok": true, "registered_count": count }));
        }
    }

    /// Calls a tool and asserts that the call is accepted. Returns its id.
    pub async fn invoke(&self, tool: &str, args: Value) -> String {
        self.invoke_with(tool, json!({ "run_id": "run_1", "args": args })).await
    }

    /// Calls a tool with a complete request body.
    pub async fn invoke_with(&self, tool: &str, body: Value) -> String {
        let ticket = self.post(&format!("/v1/tools/{tool}/invoke"), body).await.is(202);
        assert_eq!(ticket["status"], "pending", "{ticket}");
        ticket["tool_call_id"].as_str().unwrap().to_owned()
    }

    /// Returns the current state of a call.
    pub async fn call(&self, id: &str) -> Value {
        self.get(&format!("/v1/tool_calls/{id}")).await.is(200)
    }

    /// Returns the audit log without sign-ins, which are written in the background. Newest first.
    pub async fn audit_entries(&self) -> Vec<Value> {
        let log = self.get("/v1/audit?limit=1000").await.is(200);
        let is_sign_in = |entry: &Value| entry["action"].as_str().unwrap().starts_with("sign_in");
        let entries = log["audit"].as_array().unwrap().iter();
        entries.filter(|entry| !is_sign_in(entry)).cloned().collect()
    }

    /// Returns the headers that assert a user or a session.
    pub fn asserted(&self) -> &[(&'static str, String)] {
        &self.asserted
    }

    /// Waits until a call has ended.
    pub async fn finished(&self, id: &str) -> Value {
        let path = format!("/v1/tool_calls/{id}?wait_ms=30000");
        for _ in 0..2 {
            let call = self.get(&path).await.is(200);
            if !matches!(call["status"].as_str().unwrap(), "PENDING" | "RUNNING") {
                return call;
            }
        }
        panic!("call {id} does not end: {}", self.call(id).await);
    }

    /// Waits until a call has this status.
    pub async fn until_status(&self, id: &str, status: &str) -> Value {
        until(&format!("{id} to be {status}"), || async {
            let call = self.call(id).await;
            (call["status"] == status).then_some(call)
        })
        .await
    }

    /// Submits a result. Returns the response.
    pub async fn submit(&self, id: &str, body: Value) -> Reply {
        self.post(&format!("/internal/tool_calls/{id}/submit"), body).await
    }

    /// Submits a success and asserts that it is accepted.
    pub async fn succeed(&self, id: &str, result: Value) -> Value {
        self.submit(id, json!({ "status": "SUCCEEDED", "result": result })).await.is(200)
    }

    /// Submits a failure and asserts that it is accepted.
    pub async fn fail(&self, id: &str, error: Value) -> Value {
        self.submit(id, json!({ "status": "FAILED", "error": error })).await.is(200)
    }

    /// Waits for the next request of a client by long poll.
    pub async fn poll(&self, client_id: &str) -> Value {
        let path = format!("/internal/ingress/poll?client_id={client_id}&wait_ms=30000");
        let answer = self.get(&path).await.is(200);
        answer["requests"].get(0).cloned().unwrap_or_else(|| panic!("no work for {client_id}"))
    }

    /// Subscribes to an event stream.
    pub async fn follow(&self, path: &str, after: Option<u64>) -> Sse {
        let mut request = self.request(Method::GET, path);
        if let Some(after) = after {
            request = request.header("last-event-id", after);
        }
        Sse::open(request).await
    }

    /// Returns the event types of an ended call.
    pub async fn history(&self, id: &str) -> Vec<String> {
        let mut events = self.follow(&format!("/v1/tool_calls/{id}/events"), None).await;
        let all = events.rest().await;
        all.into_iter().map(|event| event.name).collect()
    }
}

/// Returns the definition of a tool that takes any object.
pub fn offer(name: &str) -> Value {
    json!({ "name": name, "schema": { "type": "object" }, "timeout_ms": 30_000 })
}

/// Returns the same definition with more fields.
pub fn offer_with(name: &str, more: Value) -> Value {
    let mut offer = offer(name);
    for (key, value) in more.as_object().unwrap() {
        offer[key] = value.clone();
    }
    offer
}
