//! Requests every documented route with every kind of caller. A route without a row fails the test.
//! Unknown and forbidden look alike: what belongs to another caller or project is answered with
//! 404.

use std::collections::{BTreeMap, BTreeSet};

use reqwest::Method;
use serde_json::{Value, json};

use crate::support::api::offer;
use crate::support::ws::Ws;
use crate::support::{Api, Server};

/// Expected status codes for agent, provider, admin, the admin of another project, approver,
/// auditor, the operator, and a session token of the agent. A caller without a key, or with a
/// wrong, revoked, rotated or expired one, gets 401 from every route that requires a key.
enum Row {
    Open,
    Keyed([u16; 8]),
}

use Row::{Keyed, Open};

/// The calls and runs in the paths are the admin's: what belongs to another agent looks unknown.
const TABLE: [(&str, &str, Row); 122] = [
    ("get", "/v1/tools", Keyed([200, 200, 200, 200, 200, 200, 200, 200])),
    ("get", "/v1/tools/{name}", Keyed([200, 404, 200, 404, 404, 404, 200, 200])),
    ("post", "/v1/tools/{name}/invoke", Keyed([202, 403, 202, 404, 403, 403, 202, 202])),
    ("get", "/v1/approvals", Keyed([200, 403, 200, 200, 200, 200, 200, 200])),
    ("get", "/v1/approvals/{approval_id}", Keyed([404, 404, 404, 404, 404, 404, 404, 404])),
    ("post", "/v1/approvals/decide", Keyed([403, 403, 404, 404, 404, 403, 404, 403])),
    ("get", "/v1/approvals/standing", Keyed([200, 403, 200, 200, 200, 200, 200, 200])),
    (
        "delete",
        "/v1/approvals/standing/{standing_id}",
        Keyed([403, 403, 404, 404, 404, 403, 404, 403]),
    ),
    ("get", "/v1/tool_calls", Keyed([200, 200, 200, 200, 200, 200, 200, 200])),
    ("post", "/v1/tool_calls", Keyed([202, 403, 202, 200, 403, 403, 202, 202])),
    ("get", "/v1/tool_calls/{tool_call_id}", Keyed([404, 404, 200, 404, 200, 200, 200, 404])),
    (
        "get",
        "/v1/tool_calls/{tool_call_id}/result",
        Keyed([404, 404, 200, 404, 200, 200, 200, 404]),
    ),
    (
        "post",
        "/v1/tool_calls/{tool_call_id}/cancel",
        Keyed([404, 403, 200, 404, 403, 403, 200, 404]),
    ),
    (
        "post",
        "/v1/tool_calls/{tool_call_id}/answer",
        Keyed([404, 403, 409, 404, 403, 403, 409, 404]),
    ),
    (
        "get",
        "/v1/tool_calls/{tool_call_id}/events",
        Keyed([404, 404, 200, 404, 200, 200, 200, 404]),
    ),
    (
        "get",
        "/v1/tool_calls/{tool_call_id}/deliveries",
        Keyed([404, 403, 200, 404, 403, 403, 200, 404]),
    ),
    (
        "post",
        "/v1/tool_calls/{tool_call_id}/deliveries/repeat",
        Keyed([404, 403, 202, 404, 403, 403, 202, 404]),
    ),
    ("get", "/v1/deliveries", Keyed([200, 403, 200, 200, 403, 403, 200, 200])),
    ("get", "/v1/tasks", Keyed([200, 200, 200, 200, 200, 200, 200, 200])),
    ("get", "/v1/tasks/{task_id}", Keyed([404, 404, 200, 404, 200, 200, 200, 404])),
    ("post", "/v1/tasks/{task_id}/cancel", Keyed([404, 403, 200, 404, 403, 403, 200, 404])),
    ("get", "/v1/tasks/{task_id}/events", Keyed([404, 404, 200, 404, 200, 200, 200, 404])),
    ("get", "/v1/runs/{run_id}/events", Keyed([200, 200, 200, 200, 200, 200, 200, 200])),
    ("get", "/v1/runs/{run_id}/context", Keyed([200, 200, 200, 200, 200, 200, 200, 200])),
    (
        "put",
        "/v1/runs/{run_id}/context/tool_definitions",
        Keyed([200, 403, 200, 200, 403, 403, 200, 200]),
    ),
    (
        "post",
        "/v1/runs/{run_id}/context/tool_calls",
        Keyed([201, 403, 201, 201, 403, 403, 201, 201]),
    ),
    // Only the agent that reported a call finds it by its call id.
    (
        "post",
        "/v1/runs/{run_id}/context/tool_results",
        Keyed([404, 403, 200, 404, 403, 403, 200, 404]),
    ),
    ("get", "/v1/runs", Keyed([200, 200, 200, 200, 200, 200, 200, 200])),
    ("post", "/v1/runs", Keyed([202, 403, 202, 202, 403, 403, 202, 202])),
    ("get", "/v1/runs/{run_id}", Keyed([404, 404, 200, 404, 200, 200, 200, 404])),
    ("get", "/v1/runs/{run_id}/tree", Keyed([404, 404, 200, 404, 200, 200, 200, 404])),
    ("post", "/v1/runs/{run_id}/cancel", Keyed([404, 403, 200, 404, 403, 403, 200, 404])),
    // A run acts with the rights of the agent that started it.
    ("post", "/v1/runs/{run_id}/messages", Keyed([404, 403, 202, 404, 403, 403, 202, 404])),
    ("post", "/v1/runs/{run_id}/resume", Keyed([404, 403, 202, 404, 403, 403, 202, 404])),
    ("post", "/v1/runs/{run_id}/replay", Keyed([404, 403, 200, 404, 403, 403, 200, 404])),
    ("get", "/v1/events", Keyed([200, 200, 200, 200, 200, 200, 200, 200])),
    ("get", "/v1/models", Keyed([200, 200, 200, 200, 200, 200, 200, 200])),
    ("get", "/v1/models/{model}", Keyed([200, 200, 200, 200, 200, 200, 200, 200])),
    ("post", "/v1/chat/completions", Keyed([200, 403, 200, 200, 403, 403, 200, 200])),
    ("post", "/v1/responses", Keyed([200, 403, 200, 200, 403, 403, 200, 200])),
    ("get", "/v1/keys", Keyed([403, 403, 200, 200, 403, 200, 200, 403])),
    ("post", "/v1/keys", Keyed([403, 403, 201, 201, 403, 403, 201, 403])),
    ("delete", "/v1/keys/{id}", Keyed([403, 403, 204, 404, 403, 403, 204, 403])),
    ("post", "/v1/keys/{id}/rotate", Keyed([403, 403, 201, 404, 403, 403, 201, 403])),
    ("get", "/v1/session_tokens", Keyed([200, 200, 200, 200, 200, 200, 200, 200])),
    ("post", "/v1/session_tokens", Keyed([201, 201, 201, 201, 403, 403, 403, 403])),
    ("delete", "/v1/session_tokens/{id}", Keyed([404, 404, 204, 404, 404, 403, 204, 404])),
    ("get", "/v1/rules", Keyed([403, 403, 200, 200, 403, 200, 200, 403])),
    ("put", "/v1/rules", Keyed([403, 403, 200, 200, 403, 403, 200, 403])),
    ("delete", "/v1/rules", Keyed([403, 403, 204, 404, 403, 403, 204, 403])),
    ("get", "/v1/rules/{id}", Keyed([403, 403, 200, 404, 403, 200, 200, 403])),
    ("put", "/v1/rules/{id}", Keyed([403, 403, 200, 200, 403, 403, 200, 403])),
    ("delete", "/v1/rules/{id}", Keyed([403, 403, 204, 404, 403, 403, 204, 403])),
    ("get", "/v1/rules/versions", Keyed([403, 403, 200, 200, 403, 200, 200, 403])),
    ("post", "/v1/rules/rollback", Keyed([403, 403, 200, 404, 403, 403, 200, 403])),
    ("post", "/v1/rules/explain", Keyed([403, 403, 200, 200, 403, 200, 200, 403])),
    ("post", "/v1/rules/lint", Keyed([403, 403, 200, 200, 403, 200, 200, 403])),
    ("post", "/v1/rules/rehearse", Keyed([403, 403, 200, 200, 403, 200, 200, 403])),
    ("get", "/v1/limits", Keyed([403, 403, 200, 200, 403, 200, 200, 403])),
    ("get", "/v1/limits/{kind}/{name}", Keyed([403, 403, 200, 404, 403, 200, 200, 403])),
    ("put", "/v1/limits/{kind}/{name}", Keyed([403, 403, 200, 200, 403, 403, 200, 403])),
    ("delete", "/v1/limits/{kind}/{name}", Keyed([403, 403, 204, 404, 403, 403, 204, 403])),
    ("get", "/v1/switches", Keyed([403, 403, 200, 200, 403, 200, 200, 403])),
    ("get", "/v1/switches/{kind}/{name}", Keyed([403, 403, 200, 404, 403, 200, 200, 403])),
    ("put", "/v1/switches/{kind}/{name}", Keyed([403, 403, 200, 200, 403, 403, 200, 403])),
    ("delete", "/v1/switches/{kind}/{name}", Keyed([403, 403, 204, 404, 403, 403, 204, 403])),
    ("get", "/v1/audit", Keyed([403, 403, 200, 200, 403, 200, 200, 403])),
    ("get", "/v1/audit/export", Keyed([403, 403, 200, 200, 403, 200, 200, 403])),
    ("get", "/v1/audit/verify", Keyed([403, 403, 200, 200, 403, 200, 200, 403])),
    ("get", "/v1/clients", Keyed([403, 403, 200, 200, 403, 403, 200, 403])),
    ("get", "/v1/sources/mcp", Keyed([403, 403, 200, 200, 403, 403, 200, 403])),
    ("post", "/v1/sources/mcp", Keyed([403, 403, 201, 201, 403, 403, 201, 403])),
    ("get", "/v1/sources/mcp/{name}", Keyed([403, 403, 200, 404, 403, 403, 200, 403])),
    ("delete", "/v1/sources/mcp/{name}", Keyed([403, 403, 204, 404, 403, 403, 204, 403])),
    ("post", "/v1/sources/mcp/{name}/accept", Keyed([403, 403, 200, 404, 403, 403, 200, 403])),
    ("post", "/v1/sources/mcp/{name}/refresh", Keyed([403, 403, 200, 404, 403, 403, 200, 403])),
    // A stdio server takes no access tokens.
    ("post", "/v1/sources/mcp/{name}/sign-in", Keyed([403, 403, 409, 404, 403, 403, 409, 403])),
    ("delete", "/v1/sources/mcp/{name}/sign-in", Keyed([403, 403, 204, 404, 403, 403, 204, 403])),
    ("get", "/oauth/callback", Open),
    ("get", "/oauth/client.json", Open),
    ("post", "/internal/tools/register", Keyed([403, 200, 200, 200, 403, 403, 200, 403])),
    ("delete", "/internal/tools/{name}", Keyed([403, 204, 204, 404, 403, 403, 204, 403])),
    ("delete", "/internal/clients/{client_id}", Keyed([403, 204, 204, 404, 403, 403, 204, 403])),
    (
        "post",
        "/internal/tool_calls/{tool_call_id}/submit",
        Keyed([403, 200, 200, 404, 403, 403, 200, 403]),
    ),
    (
        "post",
        "/internal/tool_calls/{tool_call_id}/ack",
        Keyed([403, 200, 200, 404, 403, 403, 200, 403]),
    ),
    (
        "post",
        "/internal/tool_calls/{tool_call_id}/progress",
        Keyed([403, 200, 200, 404, 403, 403, 200, 403]),
    ),
    ("get", "/internal/ingress/poll", Keyed([403, 200, 200, 404, 403, 403, 200, 403])),
    ("get", "/internal/ingress/sse", Keyed([403, 200, 200, 404, 403, 403, 200, 403])),
    ("get", "/projects", Keyed([200, 200, 200, 200, 200, 200, 200, 200])),
    ("post", "/projects", Keyed([403, 403, 403, 403, 403, 403, 201, 403])),
    ("get", "/projects/{project_id}/tools", Keyed([403, 200, 200, 404, 403, 403, 200, 403])),
    ("post", "/projects/{project_id}/tools", Keyed([403, 201, 201, 404, 403, 403, 201, 403])),
    (
        "post",
        "/projects/{project_id}/tools/import",
        Keyed([403, 201, 201, 404, 403, 403, 201, 403]),
    ),
    (
        "get",
        "/projects/{project_id}/tools/{tool_name}",
        Keyed([403, 200, 200, 404, 403, 403, 200, 403]),
    ),
    (
        "delete",
        "/projects/{project_id}/tools/{tool_name}",
        Keyed([403, 204, 204, 404, 403, 403, 204, 403]),
    ),
    ("get", "/v1/tool_calls/{tool_call_id}/cards", Keyed([404, 404, 200, 404, 200, 200, 200, 404])),
    ("get", "/v1/cards/{card_id}", Keyed([404, 200, 200, 404, 200, 200, 200, 404])),
    ("post", "/v1/cards", Keyed([403, 201, 201, 201, 403, 403, 201, 403])),
    ("post", "/v1/tool_results", Keyed([403, 404, 404, 404, 403, 403, 404, 403])),
    ("get", "/v1/dead_letters", Keyed([403, 403, 200, 200, 403, 403, 200, 403])),
    ("post", "/v1/dead_letters/{id}/redrive", Keyed([403, 403, 404, 404, 403, 403, 404, 403])),
    ("get", "/v1/agents", Keyed([200, 200, 200, 200, 200, 200, 200, 200])),
    ("get", "/v1/agents/{agent_id}", Keyed([200, 200, 200, 404, 200, 200, 200, 200])),
    ("put", "/v1/agents/{agent_id}", Keyed([403, 403, 200, 200, 403, 403, 200, 403])),
    ("delete", "/v1/agents/{agent_id}", Keyed([403, 403, 204, 404, 403, 403, 204, 403])),
    ("get", "/v1/agents/{agent_id}/versions", Keyed([200, 200, 200, 404, 200, 200, 200, 200])),
    ("post", "/v1/boxes", Keyed([201, 201, 201, 201, 403, 403, 201, 201])),
    ("get", "/v1/boxes/{box_id}", Keyed([200, 200, 200, 404, 200, 200, 200, 200])),
    ("get", "/v1/agents/{agent_id}/inbox", Keyed([200, 403, 200, 200, 403, 403, 200, 200])),
    ("post", "/v1/agents/{agent_id}/inbox/ack", Keyed([200, 403, 200, 200, 403, 403, 200, 200])),
    ("post", "/v1/agents/{agent_id}/turns", Keyed([201, 403, 201, 404, 403, 403, 201, 201])),
    (
        "get",
        "/v1/agents/{agent_id}/turns/{agent_turn_id}",
        Keyed([200, 403, 200, 404, 403, 403, 200, 200]),
    ),
    (
        "post",
        "/v1/agents/{agent_id}/turns/{agent_turn_id}/dispatch",
        Keyed([200, 403, 200, 404, 403, 403, 200, 200]),
    ),
    (
        "post",
        "/v1/agents/{agent_id}/turns/{agent_turn_id}/renew",
        Keyed([200, 403, 200, 404, 403, 403, 200, 200]),
    ),
    (
        "post",
        "/v1/agents/{agent_id}/turns/{agent_turn_id}/suspend",
        Keyed([409, 403, 409, 404, 403, 403, 409, 409]),
    ),
    (
        "post",
        "/v1/agents/{agent_id}/turns/{agent_turn_id}/resume",
        Keyed([409, 403, 409, 404, 403, 403, 409, 409]),
    ),
    (
        "post",
        "/v1/agents/{agent_id}/turns/{agent_turn_id}/finish",
        Keyed([200, 403, 200, 404, 403, 403, 200, 200]),
    ),
    (
        "post",
        "/v1/agents/{agent_id}/turns/{agent_turn_id}/stop",
        Keyed([200, 403, 200, 404, 403, 403, 200, 200]),
    ),
    ("get", "/healthz", Open),
    ("get", "/livez", Open),
    ("get", "/readyz", Open),
    ("get", "/metrics", Open),
];

/// A call that its caller executes itself.
fn reported_call(call_id: &str) -> Value {
    json!({ "tool_calls": [{ "call_id": call_id, "name": "my.tool" }] })
}

/// An MCP server that cannot be reached.
fn source(name: &str) -> Value {
    json!({ "name": name, "url": "https://mcp.invalid/mcp" })
}

struct Fixture {
    server: Server,
    provider: Api,
    admin: Api,
    _unresponsive_model: std::net::TcpListener,
}

impl Fixture {
    /// Fills the UTP parameters of a path; creates the records that they name.
    async fn fill_utp_path(&self, path: &str, mut filled_path: String) -> String {
        filled_path = filled_path.replace("{project_id}", "p").replace("{tool_name}", "an.other");
        if path.contains("{agent_id}") {
            filled_path = filled_path.replace("{agent_id}", "ada");
            let entry = json!({ "worker_target": "w" });
            self.admin.put("/v1/agents/ada", entry).await.is(200);
        }
        if path.ends_with("/versions") && path.contains("{agent_id}") {
            self.admin.put("/v1/agents/ada", json!({ "driver": "loop" })).await.is(200);
        }
        if path.contains("{box_id}") {
            let made = self.admin.post("/v1/boxes", json!({})).await.is(201);
            filled_path = filled_path.replace("{box_id}", made["box_id"].as_str().unwrap());
        }
        if path.contains("{agent_turn_id}") {
            let turn = self.admin.post("/v1/agents/ada/turns", json!({})).await.is(201);
            filled_path =
                filled_path.replace("{agent_turn_id}", turn["agent_turn_id"].as_str().unwrap());
        }
        if path.contains("{card_id}") {
            let id = self.admin.invoke("a.tool", json!({})).await;
            let cards = self.admin.get(&format!("/v1/tool_calls/{id}/cards")).await.is(200);
            let id = cards["cards"][0]["card_id"].as_str().unwrap();
            filled_path = filled_path.replace("{card_id}", id);
        }
        if path.contains("{tool_name}") {
            self.admin.post("/projects/p/tools", project_tool()).await.is(201);
        }
        filled_path
    }

    /// Returns the id of a run for a path. Routes of the agent loop get a new, canceled run.
    async fn make_run_for(&self, path: &str) -> String {
        let rest_of_path = path.strip_prefix("/v1/runs/{run_id}");
        if rest_of_path.is_none_or(|rest| rest.starts_with("/context") || rest == "/events") {
            return "run_1".to_owned();
        }
        let run = self.admin.post("/v1/runs", run_body()).await.is(202);
        let id = run["run_id"].as_str().unwrap().to_owned();
        self.admin.post(&format!("/v1/runs/{id}/cancel"), json!({})).await.is(200);
        id
    }

    /// Returns the path and body of one request; creates the records that it names.
    async fn request(&self, method: &str, path: &str) -> (String, Value) {
        let tools = json!([offer("a.tool")]);
        self.provider.register("c1", tools.clone()).await;
        if path.ends_with("/{kind}/{name}") {
            return self.limit_request(method, path).await;
        }
        let mut filled_path = path.replace("{name}", "a.tool");
        filled_path = filled_path.replace("{run_id}", &self.make_run_for(path).await);
        filled_path = filled_path.replace("{model}", "demo");
        filled_path = self.fill_utp_path(path, filled_path).await;
        if path.starts_with("/v1/sources/mcp/{name}") {
            self.admin.post("/v1/sources/mcp", source("behind")).await.is(201);
            filled_path = path.replace("{name}", "behind");
        }
        filled_path = filled_path.replace("{task_id}", "{tool_call_id}");
        if path.ends_with("/repeat") {
            let url = "https://hooks.example/x";
            let body = json!({ "run_id": "run_1", "callback_url": url });
            let id = self.admin.invoke_with("a.tool", body).await;
            self.admin.post(&format!("/v1/tasks/{id}/cancel"), json!({})).await.is(200);
            filled_path = filled_path.replace("{tool_call_id}", &id);
        }
        if filled_path.contains("{tool_call_id}") {
            let id = self.admin.invoke("a.tool", json!({})).await;
            if path.ends_with("/result") {
                self.provider.succeed(&id, json!({})).await;
            }
            filled_path = filled_path.replace("{tool_call_id}", &id);
        }
        if path.contains("/keys/{id}") {
            let created =
                self.admin.post("/v1/keys", json!({ "agent": "temporary" })).await.is(201);
            filled_path = filled_path.replace("{id}", created["id"].as_str().unwrap());
        }
        if path.contains("/rules/{id}") {
            let rule = json!({ "verdict": "deny", "agents": ["eve"], "tools": ["z.*"] });
            self.admin.put("/v1/rules/no-z", rule).await.is(200);
            filled_path = filled_path.replace("{id}", "no-z");
        }
        if path.contains("/session_tokens/{id}") {
            let minted = self.admin.post("/v1/session_tokens", json!({ "ttl_s": 60 })).await;
            let minted = minted.is(201);
            filled_path = filled_path.replace("{id}", minted["id"].as_str().unwrap());
        }
        if path.contains("{client_id}") {
            self.provider.register("temporary", json!([offer("t.tool")])).await;
            filled_path = filled_path.replace("{client_id}", "temporary");
        }
        if (method, path) == ("delete", "/v1/rules") {
            let rule = json!({ "agent": "eve", "pattern": "x.*", "verdict": "deny" });
            self.admin.put("/v1/rules", rule).await.is(200);
            filled_path.push_str("?agent=eve&pattern=x.*");
        }
        if path.starts_with("/internal/ingress")
            || method == "delete" && path.starts_with("/internal")
        {
            filled_path.push_str("?client_id=c1");
        }
        (filled_path, self.body(path).await)
    }

    /// Returns the path and body of a request about a usage limit or a kill switch.
    async fn limit_request(&self, method: &str, path: &str) -> (String, Value) {
        let filled_path = path.replace("{kind}/{name}", &format!("agent/{method}"));
        let body = match path.starts_with("/v1/limits") {
            true => json!({ "per_minute": 9 }),
            false => json!({ "reason": "a test" }),
        };
        if method != "put" {
            self.admin.put(&filled_path, body.clone()).await.is(200);
        }
        (filled_path, body)
    }

    /// Returns the body of a request to this path.
    async fn body(&self, path: &str) -> Value {
        match path {
            "/v1/tools/{name}/invoke" => json!({ "run_id": "run_1", "args": {} }),
            "/projects" => {
                let id = ulid::Ulid::generate().to_string().to_lowercase();
                json!({ "project_id": format!("fresh-{id}") })
            }
            "/projects/{project_id}/tools" => project_tool(),
            "/projects/{project_id}/tools/import" => openapi(),
            "/v1/cards" => result_card(),
            "/v1/tool_results" => json!({
                "tool_call_id": "none", "agent_turn_id": "t", "turn_epoch": 1, "agent_id": "a",
            }),
            "/v1/agents/{agent_id}" => json!({ "worker_target": "w" }),
            "/v1/agents/{agent_id}/inbox/ack" => json!({ "inbox_ids": [] }),
            "/v1/agents/{agent_id}/turns" => json!({}),
            "/v1/boxes" => json!({}),
            _ if path.ends_with("{agent_turn_id}/finish") => json!({ "turn_epoch": 1 }),
            _ if path.contains("{agent_turn_id}") => json!({
                "turn_epoch": 1,
                "calls": [{ "tool_call_id": "c", "tool_name": "a.tool", "arguments": {} }],
            }),
            "/v1/runs/{run_id}/context/tool_definitions" => json!({ "crib_tools": [] }),
            "/v1/runs/{run_id}/context/tool_calls" => reported_call("own"),
            "/v1/runs/{run_id}/context/tool_results" => {
                self.admin
                    .post("/v1/runs/run_1/context/tool_calls", reported_call("his"))
                    .await
                    .is(201);
                json!({ "tool_results": [{ "call_id": "his" }] })
            }
            "/v1/runs" => run_body(),
            "/v1/runs/{run_id}/messages" => run_body(),
            "/v1/runs/{run_id}/cancel" | "/v1/runs/{run_id}/replay" => json!({}),
            "/v1/tool_calls/{tool_call_id}/answer" => json!({ "answers": {} }),
            "/v1/tool_calls" => {
                json!({ "run_id": "run_1", "tool_calls": [{ "name": "a.tool" }], "wait_ms": 0 })
            }
            "/v1/approvals/decide" => {
                json!({ "decisions": [{ "approval_id": "apr_none", "verdict": "approve" }] })
            }
            "/v1/keys" => json!({ "agent": "made" }),
            "/v1/rules/{id}" => json!({ "verdict": "deny", "agents": ["eve"], "tools": ["z.*"] }),
            "/v1/rules/rollback" => {
                let set = self.admin.get("/v1/rules").await.is(200);
                json!({ "version": set["version"] })
            }
            "/v1/rules/explain" => json!({ "agent": "ada", "tool": "a.tool", "args": {} }),
            "/v1/rules/lint" => json!({}),
            "/v1/rules/rehearse" => json!({ "rules": [], "days": 1 }),
            "/v1/keys/{id}/rotate" => json!({ "overlap_s": 5 }),
            "/v1/session_tokens" => json!({ "ttl_s": 60 }),
            "/v1/sources/mcp" => source("fresh"),
            "/v1/chat/completions" => {
                json!({ "model": "demo", "messages": [{ "role": "user", "content": "hello" }] })
            }
            "/v1/responses" => json!({ "model": "demo", "input": "hello" }),
            "/v1/rules" => json!({ "agent": "eve", "pattern": "y.*", "verdict": "deny" }),
            "/internal/tools/register" => json!({ "client_id": "fresh", "tools": [] }),
            _ => json!({ "status": "SUCCEEDED", "client_id": "c1" }),
        }
    }

    async fn request_status(&self, api: &Api, method: &str, path: &str) -> u16 {
        let (filled_path, body) = self.request(method, path).await;
        let method: Method = method.to_uppercase().parse().unwrap();
        let mut request = api.request(method.clone(), &filled_path);
        if method != Method::GET {
            request = request.json(&body);
        }
        let answer = request.send().await.unwrap();
        let status = answer.status().as_u16();
        if status >= 400 {
            let kind = answer.headers()["content-type"].to_str().unwrap();
            // OpenAI-compatible routes have their own error format.
            let openai = ["/v1/models", "/v1/chat", "/v1/responses"];
            let openai = openai.iter().any(|prefix| path.starts_with(prefix));
            let expected = match openai {
                true => "application/json",
                // A browser gets plain text.
                false if path == "/oauth/callback" => "text/plain; charset=utf-8",
                false => "application/problem+json",
            };
            assert_eq!(kind, expected, "{method} {filled_path}");
        }
        status
    }
}

/// A run that does not end before it is canceled: its model never answers.
fn run_body() -> Value {
    json!({ "messages": [{ "role": "user", "content": "a.tool {}" }] })
}

/// A result card of an unknown call, with a new id each time.
fn result_card() -> Value {
    json!({
        "type": "tool.result",
        "author_id": "t",
        "content": {
            "__type__": "ToolResultContent", "status": "success", "after_execution": "suspend",
        },
        "metadata": { "agent_turn_id": "t", "tool_call_id": ulid::Ulid::generate().to_string() },
    })
}

fn project_tool() -> Value {
    let target = "cmd.tool.other.run";
    json!({ "tool_name": "an.other", "target_subject": target, "after_execution": "suspend" })
}

fn openapi() -> Value {
    json!({
        "openapi": "3.1.0",
        "servers": [{ "url": "https://api.example.com" }],
        "paths": { "/pets": { "get": { "operationId": "listPets" } } },
    })
}

async fn fixture() -> (Fixture, Vec<(&'static str, Api)>) {
    // A model that accepts connections and never answers.
    let unresponsive_model = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let server = Server::with(|config| {
        let file = config.data_dir.with_file_name("signing.key");
        std::fs::write(&file, crate::support::receiver::KEY).unwrap();
        config.webhooks.signing_key_file = Some(file);
        config.llm.base_url =
            Some(format!("http://{}/v1", unresponsive_model.local_addr().unwrap()));
    })
    .await;
    let admin = server.keyed("p", "boss", "admin", &[]).await;
    let agent = server.keyed("p", "ada", "agent", &["*"]).await;
    let provider = server.keyed("p", "tools", "provider", &[]).await;
    let other = server.keyed("other", "boss", "admin", &[]).await;
    let created = admin.post("/v1/keys", json!({ "agent": "gone", "role": "admin" })).await.is(201);
    let revoked = server.with_key(created["key"].as_str().unwrap());
    admin.delete(&format!("/v1/keys/{}", created["id"].as_str().unwrap())).await.is(204);
    let rotated = admin.post("/v1/keys", json!({ "agent": "old", "role": "admin" })).await.is(201);
    let path = format!("/v1/keys/{}/rotate", rotated["id"].as_str().unwrap());
    admin.post(&path, json!({ "overlap_s": 0 })).await.is(201);
    let mint = async || {
        let minted = agent.post("/v1/session_tokens", json!({ "ttl_s": 3_600 })).await.is(201);
        (server.with_key(minted["token"].as_str().unwrap()), minted)
    };
    let (session, minted) = mint().await;
    let (revoked_token, revocable) = mint().await;
    let path = format!("/v1/session_tokens/{}", revocable["id"].as_str().unwrap());
    agent.delete(&path).await.is(204);
    let mut forged = minted["token"].as_str().unwrap().to_owned();
    forged.replace_range(4..5, if forged.as_bytes()[4] == b'0' { "1" } else { "0" });
    let approver = server.keyed("p", "judge", "approver", &[]).await;
    let auditor = server.keyed("p", "eye", "auditor", &[]).await;
    let callers = vec![
        ("agent", agent),
        ("provider", provider.clone()),
        ("admin", admin.clone()),
        ("another project", other),
        ("approver", approver),
        ("auditor", auditor),
        ("operator", server.operator().project("p")),
        ("session token", session),
        ("no key", server.api()),
        ("bad key", server.with_key("tck_0000000000000000000000000000000000000000000000000000")),
        ("revoked key", revoked),
        ("rotated key", server.with_key(rotated["key"].as_str().unwrap())),
        ("revoked token", revoked_token),
        ("forged token", server.with_key(&forged)),
        ("wrong operator token", server.with_key("tc_operator_0000")),
        ("unsigned JWT", server.with_key("a.b.c")),
    ];
    (Fixture { server, provider, admin, _unresponsive_model: unresponsive_model }, callers)
}

fn documented_routes(document: &Value) -> BTreeSet<(String, String)> {
    let mut routes = BTreeSet::new();
    for (path, methods) in document["paths"].as_object().unwrap() {
        for method in methods.as_object().unwrap().keys() {
            routes.insert((method.clone(), path.clone()));
        }
    }
    routes
}

#[tokio::test]
async fn every_route_answers_every_role_with_the_documented_status() {
    let (fixture, callers) = fixture().await;
    let document = fixture.server.api().get("/openapi.json").await.is(200);
    let rows: BTreeMap<(String, String), &Row> = TABLE
        .iter()
        .map(|(method, path, row)| (((*method).to_owned(), (*path).to_owned()), row))
        .collect();
    let listed: BTreeSet<_> = rows.keys().cloned().collect();
    assert_eq!(documented_routes(&document), listed, "routes and rows match");
    let mut differences = Vec::new();
    for ((method, path), row) in rows {
        let mut found = Vec::new();
        let count = differences.len();
        for (n, (name, api)) in callers.iter().enumerate() {
            let expected = match row {
                // No sign-in is pending.
                Open if path == "/oauth/callback" => 400,
                Open => 200,
                Keyed(answers) => answers.get(n).copied().unwrap_or(401),
            };
            let status = fixture.request_status(api, &method, &path).await;
            found.push(status);
            if status != expected {
                differences.push(format!("{method} {path} for {name}: {status}, not {expected}"));
            }
        }
        if differences.len() > count {
            differences.push(format!("(\"{method}\", \"{path}\", Keyed({:?})),", &found[..8]));
        }
    }
    assert!(differences.is_empty(), "{differences:#?}");
}

#[tokio::test]
async fn the_websocket_answers_every_role_with_the_expected_status() {
    let (fixture, callers) = fixture().await;
    fixture.provider.register("c1", json!([offer("a.tool")])).await;
    for ((name, api), expected) in callers
        .iter()
        .zip([403, 101, 101, 101, 403, 403, 101, 403, 401, 401, 401, 401, 401, 401, 401, 401])
    {
        let status = match Ws::open(api).await {
            Ok(_) => 101,
            Err(tokio_tungstenite::tungstenite::Error::Http(answer)) => answer.status().as_u16(),
            Err(error) => panic!("{name}: {error}"),
        };
        assert_eq!(status, expected, "{name}");
    }
    let mut other = Ws::open(&callers[3].1).await.unwrap();
    other.send(json!({ "type": "hello", "client_id": "c1" })).await;
    assert_eq!(other.expect_message("error").await["error"]["code"], "NOT_FOUND");
}

#[tokio::test]
async fn a_call_by_a_provider_is_denied_and_audited() {
    let (fixture, _) = fixture().await;
    let body = json!({ "run_id": "run_1", "args": { "expression": "1" } });
    let answer = fixture.provider.post("/v1/tools/calculation.eval/invoke", body).await;
    let error = answer.refused(403, "PERMISSION_DENIED");
    assert!(error["message"].as_str().unwrap().contains("role provider"), "{error}");
    let entries = fixture.admin.audit_entries().await;
    let entry = entries.iter().find(|entry| entry["action"] == "call.denied").unwrap();
    assert_eq!(entry["agent"], "tools");
}

/// Returns the code and message of a problem, without the names that it quotes.
fn shape_of(body: &Value) -> String {
    let message = body["error"]["message"].as_str().unwrap_or_default();
    let parts = message.split('"').step_by(2);
    format!("{} {}", body["code"], parts.collect::<Vec<_>>().join("…"))
}

#[tokio::test]
async fn what_belongs_to_another_project_looks_unknown() {
    let (fixture, callers) = fixture().await;
    let (agent, foreign) = (&callers[0].1, &callers[3].1);
    let keys = fixture.admin.get("/v1/keys").await.is(200);
    let tokens = agent.get("/v1/session_tokens").await.is(200);
    let key = keys["keys"][0]["id"].as_str().unwrap();
    let token = tokens["session_tokens"][0]["id"].as_str().unwrap();
    let call = agent.invoke("calculation.eval", json!({ "expression": "1" })).await;
    agent.finished(&call).await;
    let run = agent.post("/v1/runs", run_body()).await.is(202);
    let run = run["run_id"].as_str().unwrap();
    fixture.admin.put("/v1/agents/ada", json!({ "worker_target": "w" })).await.is(200);
    let unknown_call = "tc_01ARZ3NDEKTSV4RRFFQ69G5FAV";
    for (method, path, id, unknown) in [
        (Method::GET, "/v1/tool_calls/{}", call.as_str(), unknown_call),
        (Method::GET, "/v1/tool_calls/{}/result", &call, unknown_call),
        (Method::POST, "/v1/tool_calls/{}/cancel", &call, unknown_call),
        (Method::GET, "/v1/tasks/{}", &call, unknown_call),
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
