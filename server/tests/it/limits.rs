//! Usage limits and kill switches over every transport, on both stores and after a kill.

mod stores;
mod switches;

use serde_json::{Value, json};
use toolcrib_bench::model::{ScriptedModel, text_reply, tool_call_reply};

use crate::support::api::{message, offer};
use crate::support::mcp::Mcp;
use crate::support::nats::Nats;
use crate::support::process::run_cli;
use crate::support::ws::Ws;
use crate::support::{Api, Server};

fn eval_body() -> Value {
    json!({ "run_id": "r", "args": { "expression": "1+1" } })
}

const EVAL: &str = "/v1/tools/calculation.eval/invoke";

async fn set_limit(server: &Server, path: &str, values: Value) -> Value {
    server.operator().put(&format!("/v1/limits/{path}"), values).await.is(200)
}

/// Starts a server with an admin key and a key of agent ada that may call everything.
async fn with_keys() -> (Server, Api) {
    let server = Server::start().await;
    server.keyed("default", "ops", "admin", &[]).await;
    let ada = server.keyed("default", "ada", "agent", &["*"]).await;
    (server, ada)
}

#[tokio::test]
async fn a_call_over_the_rate_gets_429_and_every_answer_has_the_rate_limit_headers() {
    let (server, ada) = with_keys().await;
    let before = ada.post(EVAL, eval_body()).await;
    assert_eq!(before.header("ratelimit"), None, "no limit applies");
    let limit = set_limit(&server, "agent/ada", json!({ "per_minute": 2, "max_open": 9 })).await;
    assert_eq!((&limit["kind"], &limit["per_minute"]), (&json!("agent"), &json!(2)), "{limit}");
    set_limit(&server, "tool/calculation.eval", json!({ "per_minute": 50 })).await;
    let first = ada.post(EVAL, eval_body()).await;
    let open = "\"agent-open\";q=9;qu=\"concurrent-requests\"";
    let policy = format!("\"agent\";q=2;w=60, {open}, \"tool\";q=50;w=60");
    assert_eq!(first.header("ratelimit-policy"), Some(policy.as_str()));
    let left = first.header("ratelimit").unwrap().to_owned();
    assert!(left.starts_with("\"agent\";r=1;t=6"), "{left}");
    first.is(202);
    let invalid = ada.post(EVAL, json!({ "run_id": "r", "args": {} })).await;
    assert!(invalid.header("ratelimit").unwrap().contains("\"agent\";r=1"), "a refusal is free");
    invalid.refused(422, "VALIDATION_ERROR");
    ada.post(EVAL, eval_body()).await.is(202);
    let over = ada.post(EVAL, eval_body()).await;
    let retry_after: u64 = over.header("retry-after").unwrap().parse().unwrap();
    assert!((50..=61).contains(&retry_after), "{retry_after}");
    assert!(over.header("ratelimit").unwrap().starts_with("\"agent\";r=0;t="));
    let error = over.refused(429, "RATE_LIMITED");
    let text = message(&error);
    assert!(text.contains("rate limit: agent \"ada\" may make 2 calls per minute"), "{text}");
    assert!(text.ends_with(&format!("retry after {retry_after} s")), "{text}");
    server.operator().post(EVAL, eval_body()).await.is(202);
    let metrics = server.api().get("/metrics").await;
    let line = "toolcrib_limit_refusals_total{kind=\"agent\",limit=\"per_minute\"} ";
    let count = metrics.text.lines().find_map(|metric| metric.strip_prefix(line)).unwrap();
    assert!(count.parse::<u64>().unwrap() >= 1, "{count}");
}

#[tokio::test]
async fn batches_mcp_and_nats_give_the_same_reason() {
    let Some(nats) = Nats::start().await else { return };
    let server = nats.server().await;
    let api = server.api();
    set_limit(&server, "agent/default", json!({ "per_minute": 1 })).await;
    let call = json!({ "call_id": "c", "name": "calculation.eval", "args": { "expression": "2" } });
    let batch = json!({ "run_id": "r", "tool_calls": [call, call] });
    let reply = api.post("/v1/tool_calls", batch).await;
    assert!(reply.header("ratelimit").unwrap().contains("\"agent\";r=0"));
    let answer = reply.is(200);
    assert_eq!(answer["results"][0]["ok"], true, "{answer}");
    let error = &answer["results"][1]["error"];
    assert_eq!((&error["code"], &error["retryable"]), (&json!("RATE_LIMITED"), &json!(true)));
    assert!(error["detail"]["retry_after_ms"].as_u64() > Some(0), "{error}");
    let content = answer["messages"][1].to_string();
    assert!(content.contains("rate limit") && content.contains("retry after"), "{content}");
    for client in [Mcp::modern(&api), Mcp::legacy(&api).await] {
        let result = client.call("calculation.eval", json!({ "expression": "1" })).await.result();
        assert_eq!(result["isError"], true, "{result}");
        let text = result["content"][0]["text"].as_str().unwrap();
        assert!(text.contains("RATE_LIMITED: rate limit: agent \"default\""), "{text}");
        assert!(text.contains("retry after") && text.contains("can succeed later"), "{text}");
    }
    let peer = nats.peer().await;
    peer.request("agent.default.lease", json!({ "agent_turn_id": "t1" })).await;
    api.put("/v1/agents/default", json!({ "worker_target": "w1" })).await.is(200);
    let turn = peer.request("agent.default.lease", json!({ "agent_turn_id": "t1" })).await;
    assert_eq!(turn["ok"], true, "{turn}");
    let args = json!({ "expression": "1" });
    let call = json!({ "tool_call_id": "a", "tool_name": "calculation.eval", "arguments": args });
    let body = json!({ "agent_turn_id": "t1", "turn_epoch": 1, "calls": [call] });
    let refused = peer.request("agent.default.dispatch", body).await;
    assert_eq!(refused["ok"], false, "{refused}");
    assert!(refused.to_string().contains("may make 1 calls per minute"), "{refused}");
}

#[tokio::test]
async fn the_agent_loop_waits_for_a_limit_and_goes_on() {
    let calls = ["a", "b"].map(|id| {
        tool_call_reply(
            id,
            "calculation__eval",
            &json!({ "expression": format!("{}+1", id.len()) }),
        )
    });
    let model = ScriptedModel::start_with_replies(calls.into_iter().chain([text_reply("done")]));
    let model = model.await.unwrap();
    let url = model.url.clone();
    let server = Server::with(|config| {
        config.llm.base_url = Some(url);
        config.llm.model = Some("large-1".into());
    })
    .await;
    let api = server.api();
    set_limit(&server, "tool/calculation.eval", json!({ "max_open": 1 })).await;
    // The one open call that the limit permits is at a client: the run has to wait for its end.
    let mut client = Ws::offering(&api, "c1", json!([offer("door.open")])).await;
    set_limit(&server, "agent/default", json!({ "max_open": 1 })).await;
    let door = api.invoke("door.open", json!({})).await;
    let request = client.take().await;
    assert_eq!(request["tool_call_id"], door.as_str());
    let body = json!({ "model": "large-1", "messages": [{ "role": "user", "content": "Add." }] });
    let run = api.post("/v1/runs", body).await.is(202);
    let path = format!("/v1/runs/{}", run["run_id"].as_str().unwrap());
    crate::support::until("the run to be refused once", || async {
        let metrics = api.get("/metrics").await;
        let line = "toolcrib_limit_refusals_total{kind=\"agent\",limit=\"max_open\"} ";
        let count = metrics.text.lines().find_map(|metric| metric.strip_prefix(line))?;
        (count.parse::<f64>().unwrap() >= 1.0).then_some(())
    })
    .await;
    client.succeed(&request, json!(1)).await;
    let run = api.get(&format!("{path}?wait_ms=30000")).await.is(200);
    assert_eq!((&run["status"], &run["answer"]), (&json!("SUCCEEDED"), &json!("done")), "{run}");
    assert_eq!(run["call_count"], 2, "{run}");
    assert!(!run["messages"].to_string().contains("RATE_LIMITED"), "the model saw no refusal");
}

#[tokio::test]
async fn limits_are_listed_shown_and_removed_and_unknown_fields_are_refused() {
    let (server, ada) = with_keys().await;
    let operator = server.operator();
    let misspelt = operator.put("/v1/limits/agent/ada", json!({ "perminute": 2 })).await;
    let error = misspelt.refused(422, "VALIDATION_ERROR");
    assert!(message(&error).contains("did you mean `per_minute`?"), "{error}");
    for (path, body) in [
        ("agent/ada", json!({})),
        ("agent/ada", json!({ "per_minute": 0 })),
        ("team/ada", json!({ "per_minute": 1 })),
        ("agent/a*", json!({ "per_minute": 1 })),
    ] {
        let reply = operator.put(&format!("/v1/limits/{path}"), body).await;
        reply.refused(422, "VALIDATION_ERROR");
    }
    set_limit(&server, "agent/*", json!({ "per_minute": 60 })).await;
    set_limit(&server, "user/uma%40example.com", json!({ "max_parallel": 2 })).await;
    let list = operator.get("/v1/limits").await.is(200);
    let names: Vec<_> = list["limits"].as_array().unwrap().iter().map(|l| &l["name"]).collect();
    assert_eq!(names, ["*", "uma@example.com"]);
    assert_eq!(operator.get("/v1/limits/agent/*").await.is(200)["per_minute"], 60);
    ada.get("/v1/limits").await.refused(403, "PERMISSION_DENIED");
    ada.put("/v1/limits/agent/ada", json!({ "per_minute": 99 }))
        .await
        .refused(403, "PERMISSION_DENIED");
    assert_eq!(operator.delete("/v1/limits/agent/*").await.status, 204);
    operator.delete("/v1/limits/agent/*").await.refused(404, "NOT_FOUND");
    let log = operator.get("/v1/audit").await.is(200);
    let entries = log["audit"].as_array().unwrap().iter();
    let of_limits = |entry: &&Value| entry["action"].as_str().unwrap().starts_with("limit.");
    let changes: Vec<_> = entries.filter(of_limits).take(2).collect();
    let fields = |entry: &Value| ["action", "subject", "reason"].map(|field| entry[field].clone());
    assert_eq!(fields(changes[0]), ["limit.removed", "agent *", ""]);
    assert_eq!(fields(changes[1]), ["limit.set", "user uma@example.com", "max_parallel 2"]);
}

#[tokio::test]
async fn the_commands_set_and_list_limits_and_switches() {
    let server = Server::start().await;
    run_cli(&server, &["limits", "set", "agent", "ada", "--per-minute", "60"]).await;
    let (out, _) = run_cli(&server, &["limits"]).await;
    assert!(out.contains("PER MINUTE") && out.contains("ada") && out.contains("60"), "{out}");
    run_cli(&server, &["switch", "off", "tool", "mail.*", "--reason", "wrong receivers"]).await;
    let (out, _) = run_cli(&server, &["switch", "ls", "--json"]).await;
    let listed: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(listed["switches"][0]["reason"], "wrong receivers", "{listed}");
    run_cli(&server, &["switch", "on", "tool", "mail.*"]).await;
    run_cli(&server, &["limits", "rm", "agent", "ada"]).await;
    let (out, _) = run_cli(&server, &["limits", "--json"]).await;
    assert_eq!(serde_json::from_str::<Value>(&out).unwrap(), json!({ "limits": [] }));
}

#[tokio::test]
async fn the_configuration_presets_limits() {
    let server = Server::with(|config| {
        let limit = toolcrib_server::config::UsageLimitSettings {
            per_minute: Some(1),
            ..Default::default()
        };
        config.limits.tool.insert("calculation.eval".into(), limit);
    })
    .await;
    server.api().post(EVAL, eval_body()).await.is(202);
    let error = server.api().post(EVAL, eval_body()).await.refused(429, "RATE_LIMITED");
    assert!(message(&error).contains("tool \"calculation.eval\""), "{error}");
}

#[tokio::test]
async fn users_of_one_service_have_limits_of_their_own() {
    let (server, _) = with_keys().await;
    let operator = server.operator();
    let body = json!({
        "agent": "portal", "roles": ["agent"], "may_assert": ["user"], "allow": ["*"],
    });
    let key = operator.post("/v1/keys", body).await.is(201);
    let portal = server.with_key(key["key"].as_str().unwrap());
    set_limit(&server, "user/*", json!({ "per_minute": 1 })).await;
    let as_user = async |user: &str| {
        let request = portal.request(reqwest::Method::POST, EVAL).json(&eval_body());
        portal.send(request.header("x-toolcrib-user", user)).await
    };
    as_user("uma").await.is(202);
    as_user("max").await.is(202);
    let error = as_user("uma").await.refused(429, "RATE_LIMITED");
    assert!(message(&error).contains("user \"uma\""), "{error}");
    portal.post(EVAL, eval_body()).await.is(202);
    let server = server.restart().await;
    let portal = portal.at(&server.address);
    let request = portal.request(reqwest::Method::POST, EVAL).json(&eval_body());
    let again = portal.send(request.header("x-toolcrib-user", "max")).await;
    again.refused(429, "RATE_LIMITED");
}
