//! Elicitation: tools that request input, and the ways to answer them.

use std::sync::Arc;

use async_trait::async_trait;
use serde_json::{Value, json};
use toolcrib::domain::call::elicitation::ElicitationRequest;
use toolcrib::ports::source::{Attempt, ProgressSink, Source, StartResult};
use toolcrib::{CallId, Effect, Engine, Executor, Fault, Json, Risk, ToolDefinition};
use toolcrib_store::SqliteStore;

use crate::support::mcp::{Mcp, Stream};
use crate::support::{Server, soon};

/// Tools of an MCP server that elicit a name and a city and then return a greeting.
struct ElicitingSource;

fn elicitation_request(text: &str) -> Value {
    let schema = json!({ "type": "object", "properties": { "value": { "type": "string" } } });
    json!({ "method": "elicitation/create",
        "params": { "mode": "form", "message": text, "requestedSchema": schema } })
}

fn greeting_tool(name: &str, background: bool) -> ToolDefinition {
    ToolDefinition {
        project: None,
        name: name.to_owned(),
        description: "says hello".to_owned(),
        executor: Executor::MCP,
        input_schema: Json::from_value(&json!({ "type": "object" })),
        output_schema: None,
        timeout_ms: 60_000,
        background,
        effect: Effect::Irreversible,
        risk: Risk::Low,
        policy: Default::default(),
        fallback: Vec::new(),
        binding: None,
        metadata: None,
    }
}

#[async_trait]
impl Source for ElicitingSource {
    fn executor(&self) -> Executor {
        Executor::MCP
    }

    fn list(&self) -> Vec<ToolDefinition> {
        vec![
            greeting_tool("hello.one", false),
            greeting_tool("hello.later", true),
            greeting_tool("hello.never", false),
        ]
    }

    async fn start(&self, attempt: Attempt, _: ProgressSink) -> StartResult {
        if attempt.tool == "hello.never" {
            return StartResult::NeedsInput(ElicitationRequest::default());
        }
        let answers = attempt.elicitation.as_ref().map(|elicitation| &elicitation.answers);
        let value = |key: &str| Some(answers?.get(key)?["content"]["value"].as_str()?.to_owned());
        let (Some(name), Some(city)) = (value("name"), value("city")) else {
            let (name, city) = (elicitation_request("Who?"), elicitation_request("Where?"));
            let requests = json!({ "name": name, "city": city });
            let Value::Object(requests) = requests else { unreachable!() };
            return StartResult::NeedsInput(ElicitationRequest {
                questions: requests,
                source_state: Some("begun".to_owned()),
            });
        };
        let greeting = format!("hello {name} in {city}, attempt {}", attempt.number);
        let text = json!({ "content": [{ "type": "text", "text": greeting }] });
        StartResult::Finished(Ok::<_, Fault>(Json::from_value(&text)))
    }

    fn cancel(&self, _: &CallId, _: u32) {}
}

fn accept(value: &str) -> Value {
    json!({ "action": "accept", "content": { "value": value } })
}

async fn start_server() -> Server {
    Server::with_engine(Engine::builder().source(Arc::new(ElicitingSource)).start().await.unwrap())
        .await
}

fn text(result: &Value) -> &str {
    result["content"][0]["text"].as_str().unwrap_or_else(|| panic!("{result}"))
}

#[tokio::test]
async fn answers_sent_with_a_repeated_request_complete_the_call() {
    let server = start_server().await;
    let api = server.api();
    let client = Mcp::modern(&api).able(json!({ "elicitation": {} }));
    let paused = client.call("hello.one", json!({})).await.result();
    assert_eq!(paused["resultType"], "input_required", "{paused}");
    assert_eq!(paused["inputRequests"]["name"]["params"]["message"], "Who?");
    let state = paused["requestState"].as_str().unwrap().to_owned();
    let repeat_with = |answers: Value, state: &str| {
        json!({ "name": "hello.one", "arguments": {}, "inputResponses": answers,
            "requestState": state })
    };
    // A partial answer leaves the other question open.
    let partial = repeat_with(json!({ "name": accept("Ada"), "age": accept("36") }), &state);
    let still = client.ask("tools/call", partial).await.result();
    assert_eq!(still["resultType"], "input_required");
    assert_eq!(still["inputRequests"].as_object().unwrap().len(), 1);
    // Another project, a changed state and an invalid answer are rejected.
    let city = json!({ "city": accept("Ulm") });
    let bob = Mcp::modern(&api.clone().project("other")).able(json!({ "elicitation": {} }));
    bob.ask("tools/call", repeat_with(city.clone(), &state)).await.error(-32602);
    client.ask("tools/call", repeat_with(city.clone(), &format!("{state}0"))).await.result();
    let other = state.replace(['0', '1'], "2");
    client.ask("tools/call", repeat_with(city.clone(), &other)).await.error(-32602);
    let wrong = repeat_with(json!({ "city": 7 }), &state);
    client.ask("tools/call", wrong).await.error(-32602);
    let misfit = json!({ "city": { "action": "accept", "content": { "value": 7 } } });
    client.ask("tools/call", repeat_with(misfit, &state)).await.error(-32602);
    // The name in the format of models refers to the same tool.
    let mut renamed = repeat_with(city.clone(), &state);
    renamed["name"] = "hello__one".into();
    let done = client.ask("tools/call", renamed).await.result();
    assert_eq!(text(&done), "hello Ada in Ulm, attempt 2");
    // A repeated request returns the same result and makes no second call.
    let repeated = client.ask("tools/call", repeat_with(city, &state)).await.result();
    assert_eq!(repeated, done);
    let id = done["_meta"]["toolcrib/tool_call_id"].as_str().unwrap();
    let history = api.history(id).await;
    assert_eq!(history.iter().filter(|kind| *kind == "tool.call.asked").count(), 1);
    assert_eq!(history.iter().filter(|kind| *kind == "tool.call.answered").count(), 2);
}

#[tokio::test]
async fn a_legacy_client_receives_elicitations_during_its_request() {
    let server = start_server().await;
    let client = Mcp::legacy_with(&server.api(), json!({ "elicitation": {} })).await;
    let params = json!({ "name": "hello.one", "arguments": {} });
    let mut stream = client.open("tools/call", params).await;
    for (message, answer) in [("Where?", "Ulm"), ("Who?", "Ada")] {
        let elicitation = stream.until("elicitation/create").await;
        assert_eq!(elicitation["params"]["message"], message);
        client.reply(&elicitation["id"], accept(answer)).await;
    }
    let response = soon("the answer", stream.next()).await.unwrap();
    assert_eq!(text(&response["result"]), "hello Ada in Ulm, attempt 2");
}

/// Waits until the elicitation is canceled and returns the result of the call.
async fn await_result_after_withdrawal(
    mut session_stream: Stream,
    mut stream: Stream,
    elicitation: &Value,
) -> Value {
    let canceled = session_stream.until("notifications/cancelled").await;
    assert_eq!(canceled["params"]["requestId"], elicitation["id"], "{canceled}");
    soon("the answer", stream.next()).await.unwrap()["result"].clone()
}

#[tokio::test]
async fn a_legacy_client_gets_the_result_when_the_answer_comes_over_http() {
    let server = start_server().await;
    let api = server.api();
    let client = Mcp::legacy_with(&api, json!({ "elicitation": {} })).await;
    let params = json!({ "name": "hello.one", "arguments": {} });
    let session_stream = client.session_stream().await;
    let mut stream = client.open("tools/call", params).await;
    let elicitation = stream.until("elicitation/create").await;
    let calls = api.get("/v1/tool_calls").await.is(200);
    let id = calls["tool_calls"][0]["tool_call_id"].as_str().unwrap();
    let path = format!("/v1/tool_calls/{id}/answer");
    // After a partial answer the elicitation stays open.
    api.post(&path, json!({ "answers": { "name": accept("Ada") } })).await.is(200);
    api.post(&path, json!({ "answers": { "city": accept("Ulm") } })).await.is(200);
    let result = await_result_after_withdrawal(session_stream, stream, &elicitation).await;
    assert_eq!(text(&result), "hello Ada in Ulm, attempt 2");
}

#[tokio::test]
async fn a_legacy_client_gets_a_timeout_when_the_wait_for_input_ends() {
    let server = start_server().await;
    let client = Mcp::legacy_with(&server.api(), json!({ "elicitation": {} })).await;
    let params = json!({ "name": "hello.one", "arguments": {},
        "_meta": { "toolcrib/timeout_ms": 500, "toolcrib/input_timeout_ms": 1_000 } });
    let session_stream = client.session_stream().await;
    let mut stream = client.open("tools/call", params).await;
    let elicitation = stream.until("elicitation/create").await;
    let result = await_result_after_withdrawal(session_stream, stream, &elicitation).await;
    assert_eq!(result["isError"], true, "{result}");
    assert_eq!(result["structuredContent"]["error"]["code"], "TIMEOUT", "{result}");
    assert!(text(&result).contains("got no answer within 1000 ms"), "{result}");
}

#[tokio::test]
async fn an_irreversible_call_without_answers_says_that_a_retry_is_not_safe() {
    let server = start_server().await;
    let api = server.api();
    let invoke = |input_timeout_ms: u64| {
        let body = json!({ "run_id": "run_1", "args": {}, "input_timeout_ms": input_timeout_ms });
        api.invoke_with("hello.one", body)
    };
    let unanswered = invoke(300).await;
    let canceled = invoke(600_000).await;
    crate::support::until("the questions", || async {
        (api.call(&canceled).await["hold"] == "input").then_some(())
    })
    .await;
    api.post(&format!("/v1/tool_calls/{canceled}/cancel"), json!({})).await.is(200);
    for (id, status) in [(unanswered, "TIMEOUT"), (canceled, "CANCELED")] {
        let call = api.finished(&id).await;
        assert_eq!((&call["status"], &call["error"]["retryable"]), (&json!(status), &json!(false)));
        let message = call["error"]["message"].as_str().unwrap();
        assert!(message.contains("it had begun when it requested input"), "{call}");
        assert!(message.contains("a retry is not safe"), "{call}");
    }
}

#[tokio::test]
async fn the_time_in_which_a_person_answers_does_not_count() {
    let server = start_server().await;
    let api = server.api();
    let body = json!({ "run_id": "run_1", "args": {}, "timeout_ms": 700 });
    let id = api.invoke_with("hello.one", body).await;
    let waiting = crate::support::until("the questions", || async {
        let call = api.call(&id).await;
        (call["hold"] == "input").then_some(call)
    })
    .await;
    assert_eq!(waiting["input_timeout_ms"], 3_600_000);
    assert_eq!(waiting["hold_details"]["until_ms"], waiting["deadline_at_ms"]);
    let path = format!("/v1/tool_calls/{id}/answer");
    assert_eq!(waiting["hold_details"]["answer_with"], format!("POST {path}"));
    // The person answers after the time of the call would have been over.
    let created_ms = waiting["created_at_ms"].as_u64().unwrap();
    crate::support::until("the timeout to pass", || async {
        (server.engine.now_ms() > created_ms + 1_000).then_some(())
    })
    .await;
    let answers = json!({ "answers": { "name": accept("Ada"), "city": accept("Ulm") } });
    api.post(&path, answers).await.is(200);
    assert_eq!(api.finished(&id).await["status"], "SUCCEEDED");
}

#[tokio::test]
async fn a_client_that_cannot_ask_learns_what_is_asked_and_how_to_answer() {
    let engine = Engine::builder().source(Arc::new(ElicitingSource)).start().await.unwrap();
    // Longer than any test: the response must not wait for a person.
    let server =
        Server::with_engine_and(engine, |config| config.transports.mcp.wait_ms = 600_000).await;
    let api = server.api();
    let legacy = Mcp::legacy(&api).await;
    let params = json!({ "name": "hello.one", "arguments": {} });
    let pending_result =
        soon("the legacy response", legacy.ask("tools/call", params)).await.result();
    assert!(text(&pending_result).contains("Who?"), "{pending_result}");
    let modern = Mcp::modern(&api);
    let pending = soon("the response", modern.call("hello.one", json!({}))).await.result();
    let id = pending["_meta"]["toolcrib/tool_call_id"].as_str().unwrap();
    for part in [
        "Who?".to_owned(),
        "Where?".to_owned(),
        format!("POST /v1/tool_calls/{id}/answer"),
        format!("toolcrib calls answer {id}"),
    ] {
        assert!(text(&pending).contains(&part), "{part}: {pending}");
    }
    // A batch tells a model the same.
    let entry = json!({ "call_id": "a", "name": "hello.one", "args": {} });
    let body = json!({ "run_id": "run_1", "tool_calls": [entry], "wait_ms": 300 });
    let answer = api.post("/v1/tool_calls", body).await.is(202);
    let result = &answer["results"][0];
    assert!(result["message"].as_str().unwrap().contains("/answer"), "{answer}");
    assert_eq!(result["questions"]["name"]["params"]["message"], "Who?");
}

#[tokio::test]
async fn an_error_instead_of_an_answer_fails_the_legacy_call() {
    let server = start_server().await;
    let api = server.api();
    let client = Mcp::legacy_with(&api, json!({ "elicitation": {} })).await;
    let params = json!({ "name": "hello.one", "arguments": {} });
    let mut stream = client.open("tools/call", params).await;
    let elicitation = stream.until("elicitation/create").await;
    client.reply_error(&elicitation["id"], json!({ "code": -32603, "message": "no" })).await;
    let response = soon("the answer", stream.next()).await.unwrap();
    // The model can act on a result, and never sees a protocol error.
    assert_eq!(response["result"]["isError"], true, "{response}");
    assert!(response["result"]["content"][0]["text"].as_str().unwrap().contains("did not answer"));
    let call = api.get("/v1/tool_calls").await.is(200)["tool_calls"][0].clone();
    assert_eq!(call["status"], "FAILED", "no caller canceled it: {call}");
    assert_eq!(call["error"]["code"], "RUNTIME_ERROR", "{call}");
}

#[tokio::test]
async fn an_answer_that_violates_the_schema_fails_the_legacy_call() {
    let server = start_server().await;
    let api = server.api();
    let client = Mcp::legacy_with(&api, json!({ "elicitation": {} })).await;
    let params = json!({ "name": "hello.one", "arguments": {} });
    let mut stream = client.open("tools/call", params).await;
    for answer in [json!({ "action": "accept", "content": { "value": 7 } }), accept("Ada")] {
        let elicitation = stream.until("elicitation/create").await;
        client.reply(&elicitation["id"], answer).await;
    }
    let response = soon("the answer", stream.next()).await.unwrap();
    assert_eq!(response["result"]["isError"], true, "{response}");
    let text = response["result"]["content"][0]["text"].as_str().unwrap();
    assert!(text.starts_with("VALIDATION_ERROR"), "{text}");
    let calls = api.get("/v1/tool_calls").await.is(200);
    let call = &calls["tool_calls"][0];
    assert_eq!(call["status"], "FAILED", "no caller canceled it: {call}");
    assert_eq!(call["error"]["code"], "VALIDATION_ERROR", "{call}");
}

#[tokio::test]
async fn without_the_elicitation_capability_answers_come_over_http() {
    let server = start_server().await;
    let api = server.api();
    let plain = Mcp::modern(&api);
    let pending = plain.call("hello.one", json!({})).await.result();
    assert_eq!(pending["structuredContent"]["questions"]["name"]["params"]["message"], "Who?");
    let id = pending["structuredContent"]["tool_call_id"].as_str().unwrap();
    let call = api.call(id).await;
    assert_eq!((&call["status"], &call["hold"]), (&json!("PENDING"), &json!("input")));
    assert_eq!(call["hold_details"]["questions"]["name"]["params"]["message"], "Who?");
    let path = format!("/v1/tool_calls/{id}/answer");
    let answers = json!({ "answers": { "name": accept("Ada"), "city": accept("Ulm") } });
    api.post(&path, answers.clone()).await.is(200);
    let result = plain.call("call.result", json!({ "tool_call_id": id })).await.result();
    assert!(text(&result).contains("hello Ada in Ulm"), "{result}");
    api.post(&path, answers).await.refused(409, "CONFLICT");
    api.post(&path, json!({ "answers": 7 })).await.refused(400, "BAD_REQUEST");
    // A client with tasks reads the questions in the status message.
    let client = Mcp::modern(&api).with_tasks();
    let created = client.call("hello.later", json!({})).await.result();
    let id = created["taskId"].as_str().unwrap();
    let task = crate::support::until("the questions", || async {
        let task = client.ask("tasks/get", json!({ "taskId": id })).await.result();
        let message = task["statusMessage"].as_str().unwrap().to_owned();
        message.contains("Who?").then_some((task, message))
    });
    let (task, message) = task.await;
    assert_eq!(task["status"], "working", "{task}");
    for part in ["city: \"Where?\"", &format!("POST /v1/tool_calls/{id}/answer")] {
        assert!(message.contains(part), "{message}");
    }
}

#[tokio::test]
async fn a_task_requests_input_before_and_after_a_restart() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("toolcrib.db");
    let open = || async {
        let store = Arc::new(SqliteStore::open(&path).unwrap());
        let builder = Engine::builder().store(store).source(Arc::new(ElicitingSource));
        Server::with_engine(builder.start().await.unwrap()).await
    };
    let able = json!({ "elicitation": {}, "extensions": { "io.modelcontextprotocol/tasks": {} } });
    let first = open().await;
    let client = Mcp::modern(&first.api()).able(able.clone());
    let created = client.call("hello.later", json!({})).await.result();
    assert_eq!(created["resultType"], "task");
    let id = created["taskId"].as_str().unwrap().to_owned();
    let get = json!({ "taskId": id });
    first.engine.shut_down(std::time::Duration::from_secs(5)).await;
    drop(first);

    let second = open().await;
    let client = Mcp::modern(&second.api()).able(able);
    let task = crate::support::until("the questions", || async {
        let task = client.ask("tasks/get", get.clone()).await.result();
        (task["status"] == "input_required").then_some(task)
    })
    .await;
    assert_eq!(task["inputRequests"].as_object().unwrap().len(), 2);
    let update = |answers: Value| json!({ "taskId": id, "inputResponses": answers });
    client.ask("tasks/update", update(json!({ "name": accept("Ada") }))).await.result();
    let task = client.ask("tasks/get", get.clone()).await.result();
    let open: Vec<&String> = task["inputRequests"].as_object().unwrap().keys().collect();
    assert_eq!(open, ["city"]);
    client.ask("tasks/update", update(json!({ "city": accept("Ulm") }))).await.result();
    second.api().finished(&id).await;
    let task = client.ask("tasks/get", get).await.result();
    assert_eq!(task["status"], "completed", "{task}");
    assert!(text(&task["result"]).contains("hello Ada in Ulm"));
}

#[tokio::test]
async fn an_elicitation_without_questions_fails_the_call() {
    let server = start_server().await;
    let client = Mcp::modern(&server.api()).able(json!({ "elicitation": {} }));
    let failed = client.call("hello.never", json!({})).await.result();
    assert_eq!(failed["isError"], true);
    assert!(text(&failed).contains("requested input without a question"), "{failed}");
}
