//! Results that end or suspend a run, over HTTP, NATS and the OpenAI forms.

use reqwest::Method;
use serde_json::{Value, json};
use toolcrib_bench::model::{ScriptedAnswer, ScriptedBehavior, ScriptedModel, tool_call_reply};

use super::{question, run_to_end, start_with_model};
use crate::support::api::offer;
use crate::support::nats::{Nats, report, result_card, tool};
use crate::support::process::{self, text};
use crate::support::sse::Sse;
use crate::support::{Api, Server};

/// A result that ends the run.
fn ending(result: &str) -> Value {
    json!({ "said": result, "__cg_control": { "after_execution": "terminate" } })
}

/// Answers the next call of the client with this result.
async fn answer_next(api: &Api, result: Value) -> String {
    let id = text(&api.poll("c1").await, "tool_call_id");
    api.succeed(&id, result).await;
    id
}

#[tokio::test]
async fn a_result_of_a_client_ends_the_run() {
    let (server, model) =
        start_with_model([tool_call_reply("c1", "desk__close", &json!({}))]).await;
    let api = server.api();
    api.register("c1", json!([offer("desk.close")])).await;
    let (run, call_id) =
        tokio::join!(run_to_end(&api, question("Close")), answer_next(&api, ending("closed")));
    assert_eq!(
        (&run["status"], &run["answer"]),
        (&json!("SUCCEEDED"), &json!(r#"{"said":"closed"}"#))
    );
    assert_eq!(model.requests().len(), 1, "no request follows the result");
    assert_eq!(run["terminated_by"], json!({ "tool_call_id": call_id, "name": "desk.close" }));
    assert_eq!(run["steps"][0]["results"][0]["after_execution"], "terminate");
    let card_id = run["deliverable_card_id"].as_str().unwrap();
    let card = api.get(&format!("/v1/cards/{card_id}")).await.is(200);
    assert_eq!(card["content"]["result"]["said"], "closed", "{card}");
    assert_eq!(api.call(&call_id).await["after_execution"], "terminate");
    let listed = api.get("/v1/runs").await.is(200);
    assert_eq!(listed["runs"][0]["deliverable_card_id"], card_id);
}

#[tokio::test]
async fn a_model_ends_its_run_with_run_finish() {
    let finish = json!({ "answer": "It is 42.", "result_fields": { "n": 42 } });
    let reply = || tool_call_reply("c1", "run__finish", &finish);
    let (server, model) = start_with_model([reply(), reply()]).await;
    let api = server.api();
    let run = run_to_end(&api, question("How much?")).await;
    assert_eq!((&run["status"], &run["answer"]), (&json!("SUCCEEDED"), &json!("It is 42.")));
    assert_eq!(run["terminated_by"]["result_fields"], json!({ "n": 42 }));
    assert!(model.requests()[0].tool_names().contains(&"run__finish".to_owned()));
    let tools = api.get("/v1/tools").await.is(200).to_string();
    assert!(!tools.contains("run.finish"), "{tools}");
    // The replay ends at the same step.
    let path = format!("/v1/runs/{}/replay", text(&run, "run_id"));
    let mut events = Sse::open(api.request(Method::POST, &path).json(&json!({}))).await;
    let end = events.wait_for("replay.finished").await;
    assert_eq!((&end.data["same"], &end.data["answer"]), (&json!(true), &json!("It is 42.")));
}

#[tokio::test]
async fn a_tool_service_suspends_and_ends_runs() {
    let Some(nats) = Nats::start().await else { return };
    let model = ScriptedModel::start_with_replies([
        tool_call_reply("c1", "desk__look", &json!({})),
        tool_call_reply("c2", "desk__close", &json!({})),
    ])
    .await
    .unwrap();
    let (nats_url, model_url) = (nats.url(), model.url.clone());
    let server = Server::with(|config| {
        config.nats.url = Some(nats_url);
        config.llm.base_url = Some(model_url);
        config.llm.model = Some("large-1".into());
        config.limits.max_wait_ms = 200;
    })
    .await;
    let (api, peer) = (server.api(), nats.peer().await);
    for (name, after) in [("desk.look", "suspend"), ("desk.close", "terminate")] {
        let definition = tool(name, "desk", json!({ "after_execution": after }));
        api.post("/projects/default/tools", definition).await.is(201);
    }
    let id = text(&api.post("/v1/runs", question("Close")).await.is(202), "run_id");
    let mut events = api.follow(&format!("/v1/runs/{id}/events"), None).await;
    for (n, card_id) in ["looked", "closed"].into_iter().enumerate() {
        let command = peer.next("desk").await;
        command.ack().await;
        // The call outlasts the wait of its step: the run is suspended.
        events.wait_for("run.waiting").await;
        assert_eq!(model.requests().len(), n + 1, "no request while the run is suspended");
        let mut body = report(&command.payload, card_id, "success");
        body["card"] = result_card(&command.payload, card_id, "success", json!(card_id));
        assert_eq!(peer.request("sys.l0.report", body).await["ok"], true);
    }
    events.wait_for("run.finished").await;
    let run = api.get(&format!("/v1/runs/{id}")).await.is(200);
    assert_eq!((&run["status"], &run["answer"]), (&json!("SUCCEEDED"), &json!("closed")), "{run}");
    assert_eq!(run["deliverable_card_id"], "closed", "the service's own card: {run}");
    assert_eq!(model.requests().len(), 2);
}

#[tokio::test]
async fn chat_completions_and_responses_end_with_the_result() {
    let reply = || {
        let answer = ScriptedAnswer::text("I close it.").with_call("c1", "desk__close", "{}");
        ScriptedBehavior::Reply(answer.with_call("c2", "mine", "{}"))
    };
    let (server, model) = start_with_model([reply(), reply(), reply()]).await;
    let api = server.api();
    api.register("c1", json!([offer("desk.close")])).await;
    let function = json!({ "name": "mine", "parameters": { "type": "object" } });
    let mut body = question("Close");
    body["tools"] = json!([{ "type": "function", "function": function }]);
    let (chat, _) = tokio::join!(
        api.post("/v1/chat/completions", body.clone()),
        answer_next(&api, ending("closed"))
    );
    let chat = chat.is(200);
    let choice = &chat["choices"][0];
    assert_eq!(choice["message"]["content"], r#"{"said":"closed"}"#);
    assert_eq!(
        (&choice["finish_reason"], choice["message"].get("tool_calls")),
        (&json!("stop"), None)
    );
    let details = &chat["toolcrib"];
    assert_eq!(details["tool_calls"][0]["after_execution"], "terminate", "{details}");
    assert_eq!(details["terminated_by"]["name"], "desk.close");
    let card_id = details["deliverable_card_id"].as_str().unwrap();
    api.get(&format!("/v1/cards/{card_id}")).await.is(200);
    // As a stream, the answer follows the model's text.
    body["stream"] = true.into();
    let (streamed, _) = tokio::join!(
        api.post("/v1/chat/completions", body),
        answer_next(&api, ending("closed again"))
    );
    let chunks = streamed.text.lines().filter_map(|line| line.strip_prefix("data: "));
    let chunks = chunks.filter_map(|chunk| serde_json::from_str::<Value>(chunk).ok());
    let delta = |chunk: Value| Some(chunk["choices"][0]["delta"]["content"].as_str()?.to_owned());
    let streamed: String = chunks.filter_map(delta).collect();
    assert_eq!(streamed, "I close it.\n\n{\"said\":\"closed again\"}");
    let ask = json!({ "model": "large-1", "input": "Close" });
    let (response, _) =
        tokio::join!(api.post("/v1/responses", ask), answer_next(&api, ending("closed")));
    let response = response.is(200);
    assert_eq!(response["status"], "completed");
    let last = response["output"].as_array().unwrap().last().unwrap();
    assert_eq!(last["content"][0]["text"], r#"{"said":"closed"}"#);
    assert_eq!(response["toolcrib"]["terminated_by"]["name"], "desk.close");
    assert_eq!(model.requests().len(), 3, "one request each");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_run_killed_after_the_ending_result_ends_with_it() {
    // The other call keeps the step open until the kill.
    let both = ScriptedAnswer::text("").with_call("c1", "desk__close", "{}").with_call(
        "c2",
        "desk__look",
        "{}",
    );
    let model = ScriptedModel::start_with_replies([ScriptedBehavior::Reply(both)]).await.unwrap();
    let mut server =
        process::Server::new().with("LLM__BASE_URL", &model.url).with("LLM__MODEL", "large-1");
    server.start().await;
    let tools = json!([
        { "name": "desk.close", "timeout_ms": 60_000 }, { "name": "desk.look", "timeout_ms": 60_000 },
    ]);
    server.post("/internal/tools/register", json!({ "client_id": "desk", "tools": tools })).await;
    let body = json!({ "messages": [{ "role": "user", "content": "Close" }] });
    let request = server.http.post(server.url("/v1/runs")).json(&body);
    let started: Value = request.send().await.unwrap().json().await.unwrap();
    let id = text(&started, "run_id");
    let first = server.poll_requests("desk", 1).await.remove(0);
    assert_eq!(first["tool_name"], "desk.close");
    let done = json!({ "status": "SUCCEEDED", "result": ending("closed") });
    server.submit(&text(&first, "tool_call_id"), done).await;
    let second = server.poll_requests("desk", 1).await.remove(0);
    server.kill();

    server.start().await;
    let done = json!({ "status": "SUCCEEDED", "result": {} });
    server.submit(&text(&second, "tool_call_id"), done).await;
    let url = server.url(&format!("/v1/runs/{id}?wait_ms=20000"));
    let run: Value = server.http.get(url).send().await.unwrap().json().await.unwrap();
    assert_eq!(run["answer"], r#"{"said":"closed"}"#, "{run}\n{}", server.log());
    assert_eq!(run["calls"].as_array().unwrap().len(), 2, "no call is repeated: {run}");
    assert_eq!(model.requests().len(), 1, "no request follows the result");
    let card_id = run["deliverable_card_id"].as_str().unwrap();
    let url = server.url(&format!("/v1/cards/{card_id}"));
    let card: Value = server.http.get(url).send().await.unwrap().json().await.unwrap();
    assert_eq!(card["content"]["result"]["said"], "closed");
    server.stop().await;
}
