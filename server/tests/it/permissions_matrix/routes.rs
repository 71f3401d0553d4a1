//! Every route of the OpenAPI document.

use std::collections::BTreeMap;

use reqwest::Method;
use serde_json::{Value, json};

use super::{Fixture, assert_matrix, letter, shape_of};
use crate::support::Api;

/// The routes and their cells: none, agent, provider, approver, auditor, admin, operator, session
/// token of the agent. The ids in the paths are the agent's, if there is something of that kind.
const EXPECTED: &[(&str, &str)] = &[];

/// Returns the path of a request for a route.
fn request_path(fixture: &Fixture, route: &str) -> String {
    let path = route
        .replace("{tool_call_id}", &fixture.call_id)
        .replace("{task_id}", &fixture.call_id)
        .replace("{run_id}", &fixture.run_id)
        .replace("{project_id}", "default")
        .replace("{agent_id}", "ada")
        .replace("{agent_turn_id}", "turn_none")
        .replace("{client_id}", "c1")
        .replace("{model}", "demo")
        .replace("{card_id}", "card_none")
        .replace("{id}", "none_1")
        .replace("{tool_name}", "none.tool");
    let path = match path.as_str() {
        "/v1/tools/{name}" | "/v1/tools/{name}/invoke" => {
            path.replace("{name}", "calculation.eval")
        }
        _ => path.replace("{name}", "none"),
    };
    let query = match route {
        "/internal/ingress/poll" | "/internal/ingress/sse" => "?client_id=c1",
        "/internal/tools/{name}" => "?client_id=c1",
        "/projects/{project_id}/tools/import" => "?dry_run=true",
        _ => "",
    };
    format!("{path}{query}")
}

/// Returns the query of `DELETE /v1/rules`, whose other methods take none.
fn query_of(method: &str, route: &str) -> &'static str {
    match (method, route) {
        ("DELETE", "/v1/rules") => "?agent=none&pattern=none",
        _ => "",
    }
}

/// Returns a body that a permitted caller may send.
fn request_body(method: &str, route: &str) -> Option<Value> {
    let turn = || json!({ "epoch": 1, "turn_epoch": 1 });
    Some(match (method, route) {
        ("POST", "/internal/tool_calls/{tool_call_id}/ack") => {
            json!({ "client_id": "c1", "attempt": 1 })
        }
        ("POST", "/internal/tool_calls/{tool_call_id}/progress") => {
            json!({ "client_id": "c1", "attempt": 1, "progress": 1, "message": "half" })
        }
        ("POST", "/internal/tool_calls/{tool_call_id}/submit") => {
            json!({ "status": "SUCCEEDED", "result": 1 })
        }
        ("POST", "/internal/tools/register") => json!({ "client_id": "c9", "tools": [] }),
        ("POST", "/projects") => json!({ "project_id": "default", "title": "x" }),
        ("PUT", "/v1/agents/{agent_id}") => json!({ "worker_target": "w" }),
        ("POST", "/v1/agents/{agent_id}/inbox/ack") => json!({ "items": ["none"] }),
        ("POST", "/v1/agents/{agent_id}/turns") => json!({ "agent_turn_id": "turn_x" }),
        ("POST", "/v1/agents/{agent_id}/turns/{agent_turn_id}/dispatch") => {
            json!({ "epoch": 1, "tool_calls": [] })
        }
        ("POST", path) if path.contains("/turns/{agent_turn_id}/") => turn(),
        ("POST", "/v1/cards") => json!({ "card": { "type": "tool.call" } }),
        ("POST", "/v1/chat/completions") => {
            json!({ "model": "demo", "messages": [{ "role": "user", "content": "Hello" }] })
        }
        ("POST", "/v1/responses") => json!({ "model": "demo", "input": "Hello" }),
        ("POST", "/v1/keys") => json!({ "agent": "new" }),
        ("POST", "/v1/session_tokens") => json!({ "ttl_s": 60 }),
        ("PUT", "/v1/rules") => json!({ "agent": "new", "pattern": "x.y", "verdict": "allow" }),
        ("POST", "/v1/runs") => json!({ "model": "demo", "input": "Hello" }),
        ("POST", "/v1/runs/{run_id}/messages") => json!({ "input": "Hello" }),
        ("POST", "/v1/runs/{run_id}/context/tool_calls") => {
            let call = json!({ "id": "own_1", "name": "own.tool", "args": {} });
            json!({ "tool_calls": [call] })
        }
        ("PUT", "/v1/runs/{run_id}/context/tool_definitions") => json!({ "tool_definitions": [] }),
        ("POST", "/v1/runs/{run_id}/context/tool_results") => json!({ "tool_results": [] }),
        ("POST", "/v1/sources/mcp") => json!({ "name": "none", "url": "http://127.0.0.1:9/mcp" }),
        ("POST", "/v1/sources/mcp/{name}/accept") => json!({}),
        ("POST", "/v1/tool_calls") => {
            let call = json!({ "tool_name": "calculation.eval", "args": { "expression": "1" } });
            json!({ "run_id": "r", "calls": [call] })
        }
        ("POST", "/v1/tool_calls/{tool_call_id}/answer") => json!({ "answers": {} }),
        ("POST", "/v1/tool_results") => json!({ "card_id": "card_none" }),
        ("POST", "/v1/tools/{name}/invoke") => {
            json!({ "run_id": "r", "args": { "expression": "1" } })
        }
        _ => return None,
    })
}

fn openapi_document() -> Value {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../api/openapi.json");
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

async fn status_of(fixture: &Fixture, api: &Api, method: &str, route: &str) -> u16 {
    let path = format!("{}{}", request_path(fixture, route), query_of(method, route));
    let mut request = api.request(Method::from_bytes(method.as_bytes()).unwrap(), &path);
    if let Some(body) = request_body(method, route) {
        request = request.json(&body);
    }
    if route.starts_with("/projects/") && method == "POST" {
        request = request.header("content-type", "application/yaml").body("tools: []\n");
    }
    request.send().await.unwrap().status().as_u16()
}

#[tokio::test]
async fn every_route_answers_every_role_as_expected() {
    let fixture = Fixture::new().await;
    let document = openapi_document();
    let mut found = BTreeMap::new();
    for (route, methods) in document["paths"].as_object().unwrap() {
        for method in methods.as_object().unwrap().keys() {
            let method = method.to_uppercase();
            let mut cells = String::new();
            for api in &fixture.callers {
                cells.push(letter(status_of(&fixture, api, &method, route).await));
            }
            found.insert(format!("{method} {route}"), cells);
        }
    }
    assert_matrix(&found, EXPECTED);
}

#[tokio::test]
async fn forged_expired_revoked_and_foreign_credentials_open_no_route() {
    let fixture = Fixture::new().await;
    let (server, admin) = (&fixture.server, &fixture.callers[5]);
    let revoked = admin.post("/v1/keys", json!({ "agent": "gone" })).await.is(201);
    let path = format!("/v1/keys/{}", revoked["id"].as_str().unwrap());
    assert_eq!(admin.delete(&path).await.status, 204);
    let rotated = admin.post("/v1/keys", json!({ "agent": "old" })).await.is(201);
    let path = format!("/v1/keys/{}/rotate", rotated["id"].as_str().unwrap());
    admin.post(&path, json!({ "overlap_s": 0 })).await.is(201);
    let token = fixture.callers[1].post("/v1/session_tokens", json!({ "ttl_s": 60 })).await.is(201);
    let path = format!("/v1/session_tokens/{}", token["id"].as_str().unwrap());
    assert_eq!(admin.delete(&path).await.status, 204);
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let mut forged = text(&token["token"]);
    forged.replace_range(4..5, if forged.as_bytes()[4] == b'0' { "1" } else { "0" });
    let document = openapi_document();
    for secret in [
        text(&revoked["key"]),
        text(&rotated["key"]),
        text(&token["token"]),
        forged,
        "tc_operator_0000".to_owned(),
        "a.b.c".to_owned(),
    ] {
        let api = server.with_key(&secret);
        for (route, methods) in document["paths"].as_object().unwrap() {
            let is_open = EXPECTED.iter().any(|(row, cells)| {
                row.split(' ').nth(1) == Some(route) && !cells.starts_with('U')
            });
            if is_open {
                continue;
            }
            for method in methods.as_object().unwrap().keys() {
                let method = method.to_uppercase();
                let status = status_of(&fixture, &api, &method, route).await;
                assert_eq!(status, 401, "{method} {route} with {secret}");
            }
        }
    }
}

#[tokio::test]
async fn what_belongs_to_another_project_looks_unknown() {
    let fixture = Fixture::new().await;
    let server = &fixture.server;
    let foreign = server.keyed("other", "eve", "admin", &[]).await;
    let own_key = fixture.callers[5].get("/v1/keys").await.is(200)["keys"][0]["id"].clone();
    let own_token = fixture.callers[5].get("/v1/session_tokens").await.is(200)["session_tokens"][0]
        ["id"]
        .clone();
    let (key, token) = (own_key.as_str().unwrap(), own_token.as_str().unwrap());
    let (call, run) = (&fixture.call_id, &fixture.run_id);
    let unknown_call = "tc_01ARZ3NDEKTSV4RRFFQ69G5FAV";
    for (method, path, id, unknown) in [
        (Method::GET, "/v1/tool_calls/{}", call.as_str(), unknown_call),
        (Method::GET, "/v1/tool_calls/{}/result", call, unknown_call),
        (Method::POST, "/v1/tool_calls/{}/cancel", call, unknown_call),
        (Method::GET, "/v1/tasks/{}", call, unknown_call),
        (Method::GET, "/v1/runs/{}", run, "run_none"),
        (Method::POST, "/v1/runs/{}/cancel", run, "run_none"),
        (Method::DELETE, "/v1/keys/{}", key, "key_none"),
        (Method::DELETE, "/v1/session_tokens/{}", token, "st_none"),
        (Method::GET, "/v1/agents/{}", "ada", "none"),
    ] {
        let ask = async |id: &str| {
            let path = path.replace("{}", id);
            foreign.send(foreign.request(method.clone(), &path)).await
        };
        let (found, missing) = (ask(id).await, ask(unknown).await);
        assert_eq!(found.status, missing.status, "{method} {path}: {}", found.text);
        assert_eq!(found.status, 404, "{method} {path}");
        assert_eq!(shape_of(&found.body), shape_of(&missing.body), "{method} {path}");
    }
}
