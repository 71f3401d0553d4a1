//! Every response has a status, a media type and a body that the OpenAPI document describes.

use reqwest::Method;
use serde_json::{Value, json};
use toolcrib::schema::Schema;
use toolcrib_transport::http::openapi_json;

use crate::support::api::{Reply, offer};
use crate::support::{Api, Server};

/// Compares responses with the document.
struct Document(Value);

impl Document {
    fn new() -> Self {
        Self(serde_json::from_str(&openapi_json()).unwrap())
    }

    /// Returns the operations whose responses end: all but event streams.
    fn operations(&self) -> Vec<(String, Method, Value)> {
        let mut found = Vec::new();
        for (path, methods) in self.0["paths"].as_object().unwrap() {
            for (method, operation) in methods.as_object().unwrap() {
                if operation["responses"]["200"]["content"].get("text/event-stream").is_none() {
                    let method = method.to_uppercase().parse().unwrap();
                    found.push((path.clone(), method, operation.clone()));
                }
            }
        }
        assert!(found.len() > 80, "{}", found.len());
        found
    }

    /// Returns the deviations of a response from its operation.
    fn find_deviation(&self, operation: &Value, reply: &Reply) -> Option<String> {
        let status = reply.status.as_u16().to_string();
        let Some(response) = operation["responses"].get(&status) else {
            return Some(format!("status {status} is not documented: {}", reply.text));
        };
        let content = response["content"].as_object()?;
        let media_type = reply.header("content-type").unwrap_or_default();
        let media_type = media_type.split(';').next().unwrap_or_default().to_owned();
        let Some(described) = content.get(&media_type) else {
            return Some(format!("{status}: {media_type} is not documented"));
        };
        if described["schema"].is_null() || !media_type.ends_with("json") {
            return None;
        }
        let schema = json!({ "allOf": [described["schema"]], "components": self.0["components"] });
        let problems = Schema::compile(&schema).unwrap().problems(&reply.body);
        (!problems.is_empty()).then(|| format!("{status}: {problems:?}"))
    }
}

/// Sends requests of many kinds, most of them malformed, to all operations.
async fn find_deviations(api: &Api) -> Vec<String> {
    let document = Document::new();
    let mut found = Vec::new();
    for (path, method, operation) in document.operations() {
        let ids = ["x", "tc_01ARZ3NDEKTSV4RRFFQ69G5FAV"];
        let queries = ["", "?limit=x&wait_ms=x&before=x&status=x&client_id=c1", "?client_id=c1"];
        let bodies = ["{}", "{", "[]", r#"{"turn_epoch":1,"client_id":"c1","run_id":"r"}"#];
        let has_body = operation.get("requestBody").is_some();
        for id in ids {
            let segments =
                path.split('/').map(|part| if part.starts_with('{') { id } else { part });
            let filled = segments.collect::<Vec<_>>().join("/");
            for query in queries {
                for body in bodies.iter().take(if has_body { bodies.len() } else { 1 }) {
                    let mut request = api.request(method.clone(), &format!("{filled}{query}"));
                    if has_body {
                        let json = "application/json";
                        request = request.header("content-type", json).body(*body);
                    }
                    let reply = api.send(request).await;
                    if let Some(deviation) = document.find_deviation(&operation, &reply) {
                        found.push(format!("{method} {filled}{query} {body}: {deviation}"));
                    }
                }
            }
        }
    }
    found
}

#[tokio::test]
async fn refusals_are_documented() {
    let server = Server::start().await;
    let found = find_deviations(&server.api()).await;
    assert!(found.is_empty(), "{} deviations:\n{}", found.len(), found.join("\n"));
}

#[tokio::test]
async fn refusals_without_credentials_are_documented() {
    let server = Server::start().await;
    server.keyed("p", "ada", "agent", &["*"]).await;
    let found = find_deviations(&server.api()).await;
    assert!(found.is_empty(), "{} deviations:\n{}", found.len(), found.join("\n"));
}

#[tokio::test]
async fn successes_fit_their_documented_schemas() {
    let server = Server::start().await;
    let api = server.operator();
    api.register("c1", json!([offer("a.tool")])).await;
    api.put("/v1/agents/ada", json!({ "worker_target": "w1" })).await.is(200);
    let document = Document::new();
    let check = |path: &str, method: &str, reply: &Reply| {
        assert!(reply.status.is_success(), "{path}: {}", reply.text);
        let operation = &document.0["paths"][path][method];
        assert_eq!(document.find_deviation(operation, reply), None, "{method} {path}");
    };
    // Every result is possible, not only an object.
    for result in [json!(42), json!("text"), json!([1]), json!({ "a": 1 }), Value::Null] {
        let body = json!({ "run_id": "run_1", "args": {}, "idempotency_key": result.to_string() });
        let reply = api.post("/v1/tools/a.tool/invoke", body.clone()).await;
        check("/v1/tools/{name}/invoke", "post", &reply);
        let id = reply.body["tool_call_id"].as_str().unwrap().to_owned();
        let submitted = api.submit(&id, json!({ "status": "SUCCEEDED", "result": result })).await;
        check("/internal/tool_calls/{tool_call_id}/submit", "post", &submitted);
        for query in ["", "?wait_ms=1000"] {
            let path = format!("/v1/tools/a.tool/invoke{query}");
            check("/v1/tools/{name}/invoke", "post", &api.post(&path, body.clone()).await);
        }
        let reply = api.get(&format!("/v1/tool_calls/{id}")).await;
        check("/v1/tool_calls/{tool_call_id}", "get", &reply);
        let reply = api.get(&format!("/v1/tool_calls/{id}/cards")).await;
        check("/v1/tool_calls/{tool_call_id}/cards", "get", &reply);
    }
    let lists = [
        "/v1/tools",
        "/v1/tool_calls",
        "/v1/agents",
        "/v1/dead_letters",
        "/v1/clients",
        "/v1/tasks",
        "/v1/runs",
        "/v1/keys",
        "/v1/rules",
        "/v1/sources/mcp",
        "/v1/audit",
        "/v1/deliveries",
        "/projects",
    ];
    for path in lists {
        check(path, "get", &api.get(path).await);
    }
}
