//! Tools that want to know something before they go on, and everybody who can tell them.

use std::sync::Arc;

use async_trait::async_trait;
use serde_json::{Value, json};
use toolcrib::domain::elicitation::ElicitationRequest;
use toolcrib::ports::source::{Attempt, ProgressSink, Source, Started};
use toolcrib::{CallId, Effect, Engine, Executor, Fault, Json, Risk, ToolDefinition};
use toolcrib_store::SqliteStore;

use crate::support::mcp::{Mcp, Stream};
use crate::support::{Server, soon};

/// Tools of an MCP server that ask for a name (and a city) and then say hello.
struct Curious;

fn question(text: &str) -> Value {
    let schema = json!({ "type": "object", "properties": { "value": { "type": "string" } } });
    json!({ "method": "elicitation/create",
        "params": { "mode": "form", "message": text, "requestedSchema": schema } })
}

fn tool(name: &str, background: bool) -> ToolDefinition {
    ToolDefinition {
        project: None,
        name: name.to_owned(),
        description: "says hello".to_owned(),
        executor: Executor::Mcp,
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
impl Source for Curious {
    fn executor(&self) -> Executor {
        Executor::Mcp
    }

    fn list(&self) -> Vec<ToolDefinition> {
        vec![tool("hello.one", false), tool("hello.later", true), tool("hello.never", false)]
    }

    async fn start(&self, attempt: Attempt, _: ProgressSink) -> Started {
        if attempt.tool == "hello.never" {
            return Started::NeedsInput(ElicitationRequest::default());
        }
        let heard = attempt.elicitation.as_ref().map(|dialogue| &dialogue.answers);
        let value = |key: &str| Some(heard?.get(key)?["content"]["value"].as_str()?.to_owned());
        let (Some(name), Some(city)) = (value("name"), value("city")) else {
            let asked = json!({ "name": question("Who?"), "city": question("Where?") });
            let Value::Object(asked) = asked else { unreachable!() };
            return Started::NeedsInput(ElicitationRequest {
                questions: asked,
                source_state: Some("begun".to_owned()),
            });
        };
        let said = format!("hello {name} in {city}, attempt {}", attempt.number);
        let text = json!({ "content": [{ "type": "text", "text": said }] });
        Started::Finished(Ok::<_, Fault>(Json::from_value(&text)))
    }

    fn cancel(&self, _: &CallId, _: u32) {}
}

fn accept(value: &str) -> Value {
    json!({ "action": "accept", "content": { "value": value } })
}

async fn server() -> Server {
    Server::of(Engine::builder().source(Arc::new(Curious)).start().await.unwrap()).await
}

fn text(result: &Value) -> &str {
    result["content"][0]["text"].as_str().unwrap_or_else(|| panic!("{result}"))
}

#[tokio::test]
async fn a_client_is_given_the_questions_and_asks_again_with_the_answers() {
    let server = server().await;
    let api = server.api();
    let client = Mcp::modern(&api).able(json!({ "elicitation": {} }));
    let asked = client.call("hello.one", json!({})).await.result();
    assert_eq!(asked["resultType"], "input_required", "{asked}");
    assert_eq!(asked["inputRequests"]["name"]["params"]["message"], "Who?");
    let state = asked["requestState"].as_str().unwrap().to_owned();
    let again = |answers: Value, state: &str| {
        json!({ "name": "hello.one", "arguments": {}, "inputResponses": answers,
            "requestState": state })
    };
    // Some of it is not all of it.
    let some = again(json!({ "name": accept("Ada"), "age": accept("36") }), &state);
    let still = client.ask("tools/call", some).await.result();
    assert_eq!(still["resultType"], "input_required");
    assert_eq!(still["inputRequests"].as_object().unwrap().len(), 1);
    // Nobody else can go on with it, and nothing else than what was given.
    let city = json!({ "city": accept("Ulm") });
    let bob = Mcp::modern(&api.clone().project("other")).able(json!({ "elicitation": {} }));
    bob.ask("tools/call", again(city.clone(), &state)).await.error(-32602);
    client.ask("tools/call", again(city.clone(), &format!("{state}0"))).await.result();
    let other = state.replace(['0', '1'], "2");
    client.ask("tools/call", again(city.clone(), &other)).await.error(-32602);
    let wrong = again(json!({ "city": 7 }), &state);
    client.ask("tools/call", wrong).await.error(-32602);
    let misfit = json!({ "city": { "action": "accept", "content": { "value": 7 } } });
    client.ask("tools/call", again(misfit, &state)).await.error(-32602);
    // By the name that models know, it is the same tool.
    let mut named = again(city.clone(), &state);
    named["name"] = "hello__one".into();
    let done = client.ask("tools/call", named).await.result();
    assert_eq!(text(&done), "hello Ada in Ulm, attempt 2");
    // The same once more is the same answer, not a second call.
    let repeated = client.ask("tools/call", again(city, &state)).await.result();
    assert_eq!(repeated, done);
    let id = done["_meta"]["toolcrib/tool_call_id"].as_str().unwrap();
    let history = api.history(id).await;
    assert_eq!(history.iter().filter(|kind| *kind == "tool.call.asked").count(), 1);
    assert_eq!(history.iter().filter(|kind| *kind == "tool.call.answered").count(), 2);
}

#[tokio::test]
async fn an_older_client_is_asked_while_it_waits() {
    let server = server().await;
    let client = Mcp::legacy_with(&server.api(), json!({ "elicitation": {} })).await;
    let params = json!({ "name": "hello.one", "arguments": {} });
    let mut stream = client.open("tools/call", params).await;
    for (message, answer) in [("Where?", "Ulm"), ("Who?", "Ada")] {
        let asked = stream.until("elicitation/create").await;
        assert_eq!(asked["params"]["message"], message);
        client.reply(&asked["id"], accept(answer)).await;
    }
    let told = soon("the answer", stream.next()).await.unwrap();
    assert_eq!(text(&told["result"]), "hello Ada in Ulm, attempt 2");
}

/// The answer to a call whose client was asked something that nobody wants to know any more.
async fn answer_without_asking(mut beside: Stream, mut stream: Stream, asked: &Value) -> Value {
    let dropped = beside.until("notifications/cancelled").await;
    assert_eq!(dropped["params"]["requestId"], asked["id"], "{dropped}");
    soon("the answer", stream.next()).await.unwrap()["result"].clone()
}

#[tokio::test]
async fn an_older_client_that_is_asked_gets_its_answer_when_somebody_else_has_answered() {
    let server = server().await;
    let api = server.api();
    let client = Mcp::legacy_with(&api, json!({ "elicitation": {} })).await;
    let params = json!({ "name": "hello.one", "arguments": {} });
    let beside = client.session_stream().await;
    let mut stream = client.open("tools/call", params).await;
    let asked = stream.until("elicitation/create").await;
    let calls = api.get("/v1/tool_calls").await.is(200);
    let id = calls["tool_calls"][0]["tool_call_id"].as_str().unwrap();
    let path = format!("/v1/tool_calls/{id}/answer");
    // Some of it is not all of it: it is still asked.
    api.post(&path, json!({ "answers": { "name": accept("Ada") } })).await.is(200);
    api.post(&path, json!({ "answers": { "city": accept("Ulm") } })).await.is(200);
    let told = answer_without_asking(beside, stream, &asked).await;
    assert_eq!(text(&told), "hello Ada in Ulm, attempt 2");
}

#[tokio::test]
async fn an_older_client_that_is_asked_gets_its_answer_at_the_calls_deadline() {
    let server = server().await;
    let client = Mcp::legacy_with(&server.api(), json!({ "elicitation": {} })).await;
    let params = json!({ "name": "hello.one", "arguments": {},
        "_meta": { "toolcrib/timeout_ms": 1_000 } });
    let beside = client.session_stream().await;
    let mut stream = client.open("tools/call", params).await;
    let asked = stream.until("elicitation/create").await;
    let told = answer_without_asking(beside, stream, &asked).await;
    assert_eq!(told["isError"], true, "{told}");
    assert_eq!(told["structuredContent"]["error"]["code"], "TIMEOUT", "{told}");
}

#[tokio::test]
async fn an_older_client_whose_answer_does_not_fit_is_told_and_nothing_waits_for_it() {
    let server = server().await;
    let api = server.api();
    let client = Mcp::legacy_with(&api, json!({ "elicitation": {} })).await;
    let params = json!({ "name": "hello.one", "arguments": {} });
    let mut stream = client.open("tools/call", params).await;
    for answer in [json!({ "action": "accept", "content": { "value": 7 } }), accept("Ada")] {
        let asked = stream.until("elicitation/create").await;
        client.reply(&asked["id"], answer).await;
    }
    let told = soon("the answer", stream.next()).await.unwrap();
    assert_eq!(told["error"]["code"], -32602, "{told}");
    let calls = api.get("/v1/tool_calls").await.is(200);
    assert_eq!(calls["tool_calls"][0]["status"], "CANCELED", "{calls}");
}

#[tokio::test]
async fn who_did_not_say_that_they_can_answer_is_not_asked_and_others_can_answer() {
    let server = server().await;
    let api = server.api();
    let plain = Mcp::modern(&api);
    let request = plain.request("tools/call", json!({ "name": "hello.one", "arguments": {} }));
    let waiting = tokio::spawn(async move { request.send().await.unwrap().text().await.unwrap() });
    let mut events = api.follow("/v1/events?after=0", None).await;
    let asked = events.named("tool.call.asked").await;
    let id = asked.data["tool_call_id"].as_str().unwrap();
    let call = api.call(id).await;
    assert_eq!((&call["status"], &call["hold"]["reason"]), (&json!("PENDING"), &json!("input")));
    assert_eq!(call["hold"]["questions"]["name"]["params"]["message"], "Who?");
    let path = format!("/v1/tool_calls/{id}/answer");
    let answers = json!({ "answers": { "name": accept("Ada"), "city": accept("Ulm") } });
    api.post(&path, answers.clone()).await.is(200);
    let told = soon("the answer", waiting).await.unwrap();
    assert!(told.contains("hello Ada in Ulm"), "{told}");
    api.post(&path, answers).await.refused(409, "CONFLICT");
    api.post(&path, json!({ "answers": 7 })).await.refused(400, "BAD_REQUEST");
}

#[tokio::test]
async fn a_task_asks_through_its_ticket_and_goes_on_asking_after_a_restart() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("toolcrib.db");
    let open = || async {
        let store = Arc::new(SqliteStore::open(&path).unwrap());
        let builder = Engine::builder().store(store).source(Arc::new(Curious));
        Server::of(builder.start().await.unwrap()).await
    };
    let able = json!({ "elicitation": {}, "extensions": { "io.modelcontextprotocol/tasks": {} } });
    let first = open().await;
    let client = Mcp::modern(&first.api()).able(able.clone());
    let made = client.call("hello.later", json!({})).await.result();
    assert_eq!(made["resultType"], "task");
    let id = made["taskId"].as_str().unwrap().to_owned();
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
async fn a_tool_that_asks_nothing_has_failed() {
    let server = server().await;
    let client = Mcp::modern(&server.api()).able(json!({ "elicitation": {} }));
    let failed = client.call("hello.never", json!({})).await.result();
    assert_eq!(failed["isError"], true);
    assert!(text(&failed).contains("says not what"), "{failed}");
}
