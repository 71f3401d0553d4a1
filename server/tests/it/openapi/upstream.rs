//! An HTTP API that records its requests; the path of a request selects the response.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{HeaderMap, Method, Response, StatusCode, Uri, header};
use parking_lot::Mutex;
use serde_json::{Value, json};
use toolcrib_server::config::Config;

use crate::support::{Api, Server};

/// A request that the upstream received.
#[derive(Debug, Clone)]
pub struct RecordedRequest {
    pub method: String,
    /// The path with its query.
    pub path: String,
    pub headers: Vec<(String, String)>,
    pub body: String,
}

impl RecordedRequest {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(header, _)| header == name).map(|(_, value)| value.as_str())
    }
}

#[derive(Clone, Default)]
pub struct Upstream {
    pub address: String,
    log: Arc<Mutex<Vec<RecordedRequest>>>,
}

impl Upstream {
    pub async fn start() -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let upstream = Self { address, log: Arc::default() };
        let router = Router::new().fallback(answer).with_state(upstream.clone());
        tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
        upstream
    }

    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    pub fn requests(&self) -> Vec<RecordedRequest> {
        self.log.lock().clone()
    }

    pub fn last(&self) -> RecordedRequest {
        self.requests().last().cloned().unwrap()
    }

    /// Starts a server that may send requests to this upstream.
    pub async fn server(&self) -> Server {
        self.server_with(|_| {}).await
    }

    pub async fn server_with(&self, change: impl FnOnce(&mut Config)) -> Server {
        let host = format!("http://{}", self.address);
        let port = self.address.rsplit(':').next().unwrap().to_owned();
        Server::with(|config| {
            config.http.hosts = vec![host.clone(), format!("http://localhost:{port}")];
            config.http.allow_private = true;
            config.http.jina.search_url = host;
            config.http.jina.reader_url = format!("http://localhost:{port}");
            change(config);
        })
        .await
    }
}

async fn answer(
    State(upstream): State<Upstream>,
    method: Method,
    uri: Uri,
    headers: HeaderMap,
    body: Bytes,
) -> Response<Body> {
    let request = RecordedRequest {
        method: method.to_string(),
        path: uri.to_string(),
        headers: headers
            .iter()
            .map(|(name, value)| {
                (name.to_string(), String::from_utf8_lossy(value.as_bytes()).into())
            })
            .collect(),
        body: String::from_utf8_lossy(&body).into_owned(),
    };
    upstream.log.lock().push(request.clone());
    let segments = uri.path().trim_start_matches('/').split('/').collect::<Vec<_>>();
    let echo = json!({
        "method": request.method, "path": request.path, "body": request.body,
        "headers": request.headers.iter().map(|(n, v)| json!([n, v])).collect::<Vec<_>>(),
    });
    let answer = Response::builder();
    let as_json = |answer: axum::http::response::Builder, value: Value| {
        let kind = (header::CONTENT_TYPE, "application/json");
        answer.header(kind.0, kind.1).body(Body::from(value.to_string())).unwrap()
    };
    match segments.as_slice() {
        ["status", code, ..] => {
            let code: u16 = code.parse().unwrap();
            as_json(answer.status(StatusCode::from_u16(code).unwrap()), echo)
        }
        // Refuses the first request, with a delay of 1.5 s.
        ["busy", ..] if upstream.log.lock().len() == 1 => {
            as_json(answer.status(429).header(header::RETRY_AFTER, "1.5"), echo)
        }
        ["redirect", "same", ..] => {
            answer.status(302).header(header::LOCATION, "/landed").body(Body::empty()).unwrap()
        }
        ["redirect", "elsewhere", ..] => answer
            .status(302)
            .header(header::LOCATION, "http://169.254.169.254/latest/meta-data")
            .body(Body::empty())
            .unwrap(),
        ["redirect", "round", ..] => answer
            .status(302)
            .header(header::LOCATION, "/redirect/round")
            .body(Body::empty())
            .unwrap(),
        ["hang", ..] => {
            tokio::time::sleep(Duration::from_secs(3_600)).await;
            Response::new(Body::empty())
        }
        ["large", ..] => Response::new(Body::from("x".repeat(100_000))),
        ["text", ..] => answer
            .header(header::CONTENT_TYPE, "text/plain")
            .body(Body::from(format!("you sent {echo}")))
            .unwrap(),
        ["binary", ..] => answer
            .header(header::CONTENT_TYPE, "image/png")
            .body(Body::from(vec![0x89, 0x50, 0xff, 0x00]))
            .unwrap(),
        ["empty", ..] => answer.status(204).body(Body::empty()).unwrap(),
        ["nested", ..] => as_json(answer, json!({ "data": { "items": [1, 2] } })),
        ["list", ..] => as_json(answer, json!([1, 2])),
        ["error", ..] => as_json(answer, json!({ "error": "out of order", "asked": echo })),
        ["broken", ..] => answer
            .header(header::CONTENT_TYPE, "application/json")
            .body(Body::from("{\"a\": "))
            .unwrap(),
        _ => as_json(answer, echo),
    }
}

/// Defines a tool of the project `default`.
pub async fn define(api: &Api, definition: Value) -> Value {
    api.post("/projects/default/tools", definition).await.is(201)
}

/// Defines a tool with these options and calls it to its end.
pub async fn define_and_call(api: &Api, options: Value, args: Value) -> Value {
    define(api, json!({ "tool_name": "api.ask", "options": options })).await;
    call(api, "api.ask", args).await
}

/// Calls a tool to its end.
pub async fn call(api: &Api, tool: &str, args: Value) -> Value {
    let id = api.invoke(tool, args).await;
    api.finished(&id).await
}
