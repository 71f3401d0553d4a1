//! Runs over HTTP with a scripted model behind its wire format.

mod command;
mod conversations;
mod crash;
mod ending;
mod faults;
mod handoff;
mod late;
mod streaming;
mod tools;

use serde_json::{Value, json};
use toolcrib_bench::model::{
    ScriptedAnswer, ScriptedBehavior, ScriptedModel, text_reply, tool_call_reply,
};

use crate::support::{Api, Server};

/// Starts a server whose model gives these replies in order.
async fn start_with_model(
    replies: impl IntoIterator<Item = ScriptedBehavior>,
) -> (Server, ScriptedModel) {
    let model = ScriptedModel::start_with_replies(replies).await.unwrap();
    let url = model.url.clone();
    let server = Server::with(|config| {
        config.llm.base_url = Some(url);
        config.llm.model = Some("large-1".into());
        config.llm.retry_backoff_ms = 1;
        config.llm.max_retries = 2;
    })
    .await;
    (server, model)
}

fn question(text: &str) -> Value {
    json!({ "model": "large-1", "messages": [{ "role": "user", "content": text }] })
}

fn eval(id: &str, expression: &str) -> ScriptedBehavior {
    tool_call_reply(id, "calculation__eval", &json!({ "expression": expression }))
}

/// Starts a run, waits until it ends, and returns it.
async fn run_to_end(api: &Api, mut body: Value) -> Value {
    body["wait_ms"] = 30_000.into();
    api.post("/v1/runs", body).await.is(200)
}

#[tokio::test]
async fn a_run_executes_tool_calls_and_returns_an_answer() {
    let (server, model) = start_with_model([eval("c1", "6*7"), text_reply("It is 42.")]).await;
    let run = run_to_end(&server.api(), question("What is 6 * 7?")).await;
    assert_eq!((&run["status"], &run["answer"]), (&json!("SUCCEEDED"), &json!("It is 42.")));
    assert_eq!(
        run["usage"],
        json!({
            "prompt_tokens": 20, "completion_tokens": 10, "total_tokens": 30,
        })
    );
    assert_eq!((&run["step_count"], &run["call_count"]), (&json!(2), &json!(1)));
    let step = &run["steps"][0];
    assert_eq!(step["calls"][0]["name"], "calculation__eval");
    assert_eq!(step["results"][0]["status"], "SUCCEEDED");
    let ticket = run["calls"][0]["tool_call_id"].as_str().unwrap();
    assert_eq!(step["results"][0]["tool_call_id"], ticket);
    let call = server.api().get(&format!("/v1/tool_calls/{ticket}")).await.is(200);
    assert_eq!((&call["run_id"], &call["status"]), (&run["run_id"], &json!("SUCCEEDED")));
    assert_eq!(run["messages"].as_array().unwrap().len(), 4);
    // The model was offered Toolcrib's tools and got the result of its call.
    let requests = model.requests();
    assert!(
        requests[0].tool_names().contains(&"calculation__eval".to_owned()),
        "{:?}",
        requests[0].tool_names()
    );
    assert_eq!(requests[1].messages()[2]["tool_call_id"], "c1");
    assert!(requests[1].last_content().contains("42"), "{}", requests[1].last_content());
}

#[tokio::test]
async fn a_run_id_is_returned_at_once_and_can_be_polled() {
    let (server, _model) = start_with_model([text_reply("Hello.")]).await;
    let api = server.api();
    let answer = api.post("/v1/runs", question("Hi")).await;
    let location = answer.header("location").unwrap().to_owned();
    let started = answer.is(202);
    let id = started["run_id"].as_str().unwrap();
    assert_eq!(location, format!("/v1/runs/{id}"));
    let run = api.get(&format!("{location}?wait_ms=30000")).await.is(200);
    assert_eq!(run["answer"], "Hello.");
    api.get("/v1/runs/run_nobody").await.refused(404, "NOT_FOUND");
}

#[tokio::test]
async fn runs_are_listed_newest_first_by_status_and_page() {
    let (server, _model) =
        start_with_model((0..3).map(|n| text_reply(format!("answer {n}")))).await;
    let api = server.api();
    let mut ids = Vec::new();
    for n in 0..3 {
        ids.push(run_to_end(&api, question(&format!("question {n}"))).await["run_id"].clone());
    }
    ids.reverse();
    let run_ids = |page: &Value| -> Vec<Value> {
        page["runs"].as_array().unwrap().iter().map(|run| run["run_id"].clone()).collect()
    };
    let first = api.get("/v1/runs?limit=2&status=succeeded").await.is(200);
    assert_eq!(run_ids(&first), ids[..2]);
    let cursor = first["next_cursor"].as_str().unwrap();
    let second = api.get(&format!("/v1/runs?limit=2&cursor={cursor}")).await.is(200);
    assert_eq!((run_ids(&second), &second["next_cursor"]), (ids[2..].to_vec(), &Value::Null));
    assert!(run_ids(&api.get("/v1/runs?status=FAILED").await.is(200)).is_empty());
    assert!(run_ids(&api.get("/v1/runs?model=small").await.is(200)).is_empty());
    assert_eq!(run_ids(&api.get("/v1/runs?model=large-1").await.is(200)).len(), 3);
    assert!(run_ids(&api.clone().project("other").get("/v1/runs").await.is(200)).is_empty());
    for bad in ["status=ended", "limit=0", "limit=201", "cursor=tc_1", "since=yesterday"] {
        api.get(&format!("/v1/runs?{bad}")).await.refused(422, "VALIDATION_ERROR");
    }
}

#[tokio::test]
async fn a_run_continues_with_new_messages() {
    let (server, model) =
        start_with_model([text_reply("Hello."), text_reply("It is Tuesday.")]).await;
    let api = server.api();
    let id = run_to_end(&api, question("Hi")).await["run_id"].as_str().unwrap().to_owned();
    let more = json!({
        "messages": [{ "role": "user", "content": "Which day is it?" }], "wait_ms": 30_000,
    });
    let answer = api.post(&format!("/v1/runs/{id}/messages"), more).await.is(200);
    assert_eq!(answer["answer"], "It is Tuesday.", "{answer}");
    assert_eq!(model.requests()[1].messages().len(), 3);
    let bad = json!({ "messages": "hello" });
    api.post(&format!("/v1/runs/{id}/messages"), bad).await.refused(422, "VALIDATION_ERROR");
    let more = json!({ "messages": [{ "role": "user", "content": "?" }] });
    api.post("/v1/runs/run_nobody/messages", more).await.refused(404, "NOT_FOUND");
}

#[tokio::test]
async fn only_requested_and_permitted_tools_are_offered() {
    let (server, model) = start_with_model([text_reply("ok"), text_reply("ok")]).await;
    let mut body = question("?");
    body["tools"] = json!(["calculation.*"]);
    run_to_end(&server.api(), body).await;
    assert_eq!(
        model.requests()[0].tool_names(),
        ["calculation__eval", "result__read", "run__finish"]
    );
    // An agent is offered only the tools that it may call.
    let agent = server.keyed("p", "ada", "agent", &["time.*"]).await;
    run_to_end(&agent, question("?")).await;
    let offered = model.requests()[1].tool_names();
    assert!(
        offered.iter().all(|tool| tool.starts_with("time__")
            || tool == "result__read"
            || tool == "run__finish")
    );
}

#[tokio::test]
async fn an_idempotency_key_creates_one_run() {
    let (server, model) = start_with_model([text_reply("once")]).await;
    let api = server.api();
    let mut body = question("?");
    body["idempotency_key"] = "k-1".into();
    let first = run_to_end(&api, body.clone()).await;
    let again = api.post("/v1/runs?wait_ms=30000", body.clone()).await;
    assert_eq!(again.header("idempotent-replayed"), Some("true"));
    assert_eq!(again.is(200)["run_id"], first["run_id"]);
    assert_eq!(model.requests().len(), 1);
    body["messages"][0]["content"] = "something else".into();
    api.post("/v1/runs", body).await.refused(422, "IDEMPOTENCY_MISMATCH");
}

#[tokio::test]
async fn an_invalid_run_request_is_refused_with_its_field() {
    let (server, model) = start_with_model([]).await;
    let api = server.api();
    let changed = |field: &str, value: Value| {
        let mut body = question("?");
        body[field] = value;
        body
    };
    let bad = [
        (changed("messages", json!([])), "messages"),
        (changed("messages", json!("hello")), "messages"),
        (changed("messages", Value::Null), "messages"),
        (changed("messages", json!([{ "role": "user" }])), "messages/0/content"),
        (changed("messages", json!([{ "role": "tool", "content": "x" }])), "tool_call_id"),
        (changed("model", json!(7)), "model"),
        (changed("model", json!("")), "model"),
        (changed("tools", json!("calc")), "tools"),
        (changed("tools", json!(["calculation.evil"])), "tools/0"),
        (changed("limits", json!({ "steps": 0 })), "limits/steps"),
        (changed("limits", json!({ "steps": -1 })), "limits/steps"),
        (changed("limits", json!({ "stepps": 1 })), "stepps"),
        (changed("policy", json!({ "mode": "sideways" })), "policy/mode"),
        (changed("policy", json!({ "wait_ms": "1 s" })), "policy/wait_ms"),
        (changed("policy", json!("serial")), "policy"),
        (changed("policy", json!({ "timeout_ms": 0 })), "policy/timeout_ms"),
        (changed("settings", json!({ "stream": true })), "settings/stream"),
        (changed("stream", json!("yes")), "stream"),
        (changed("wait_ms", json!(-1)), "wait_ms"),
    ];
    for (body, field) in bad {
        let error = api.post("/v1/runs", body.clone()).await.refused(422, "VALIDATION_ERROR");
        assert!(error["message"].as_str().unwrap().contains(field), "{field}: {error}");
    }
    api.post_raw("/v1/runs", "{\"messages\": [").await.refused(400, "BAD_REQUEST");
    assert!(model.requests().is_empty());
    assert!(api.get("/v1/runs").await.is(200)["runs"].as_array().unwrap().is_empty());
}

#[tokio::test]
async fn a_run_with_many_calls_sets_calls_truncated() {
    let mut answer = ScriptedAnswer::text("");
    for n in 0..201 {
        let sum = format!("{{\"expression\":\"{n}\"}}");
        answer = answer.with_call(&format!("c{n}"), "calculation__eval", sum);
    }
    let (server, _model) =
        start_with_model([ScriptedBehavior::Reply(answer), text_reply("many"), text_reply("few")])
            .await;
    let mut body = question("?");
    body["limits"] = json!({ "calls_per_step": 256 });
    let many = run_to_end(&server.api(), body).await;
    assert_eq!((&many["answer"], &many["call_count"]), (&json!("many"), &json!(201)), "{many}");
    assert_eq!(many["calls"].as_array().unwrap().len(), 200);
    assert_eq!(many["calls_truncated"], true);
    assert_eq!(run_to_end(&server.api(), question("?")).await["calls_truncated"], false);
}

#[tokio::test]
async fn canceling_a_run_keeps_the_calls_of_other_agents() {
    let (server, _model) =
        start_with_model([tool_call_reply("c1", "slow__tool", &json!({}))]).await;
    let ada = server.keyed("default", "ada", "agent", &["slow.*"]).await;
    let bob = server.keyed("default", "bob", "agent", &["slow.*"]).await;
    let tools = server.keyed("default", "tools", "provider", &[]).await;
    tools.register("c1", json!([{ "name": "slow.tool", "timeout_ms": 60_000 }])).await;
    let id = ada.post("/v1/runs", question("?")).await.is(202)["run_id"].clone();
    let id = id.as_str().unwrap();
    let mut events = ada.follow(&format!("/v1/runs/{id}/events"), None).await;
    let own_call = events.wait_for("tool.call.requested").await.data["tool_call_id"].clone();
    let body = json!({ "args": {}, "run_id": id });
    let other = bob.post("/v1/tools/slow.tool/invoke", body).await.is(202)["tool_call_id"].clone();
    assert_eq!(
        ada.post(&format!("/v1/runs/{id}/cancel"), json!({})).await.is(200)["status"],
        "CANCELED"
    );
    let status = async |reader: &Api, ticket: &Value| {
        let path = format!("/v1/tool_calls/{}", ticket.as_str().unwrap());
        reader.get(&path).await.is(200)["status"].clone()
    };
    assert_eq!(status(&ada, &own_call).await, "CANCELED");
    assert_ne!(status(&bob, &other).await, "CANCELED", "a call of another agent must stay");
}
