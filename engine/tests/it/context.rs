//! Tests of a run's context as an embedding program uses it: built from the store, followed, and
//! with calls that the program executed itself.

use std::sync::Arc;
use toolcrib::calls::Until;

use parking_lot::Mutex;
use schemars::JsonSchema;
use serde::Deserialize;
use toolcrib::domain::access_rules::{AccessRule, RuleVerdict};
use toolcrib::domain::caller::{AuthMethod, Role};
use toolcrib::domain::fault::Code;
use toolcrib::maintenance::deadlines;
use toolcrib::ports::clock::ManualClock;
use toolcrib::ports::store::MemoryStore;
use toolcrib::registry::NewKey;
use toolcrib::runs::context::{ToolCall, ToolCallContext};
use toolcrib::runs::{MessageFormat, ReportedCall, ReportedResult, RunToolSelection};
use toolcrib::{
    CallRequest, Caller, Engine, Executor, Fault, FnTool, Json, Status, Tool, ToolDefinition,
};

#[derive(Deserialize, JsonSchema)]
struct Nothing {}

fn json(text: &str) -> Json {
    Json::parse(text).unwrap()
}

fn quick() -> FnTool {
    FnTool::new("t.quick", "Answers at once", |_: Nothing| async { Ok::<_, Fault>(1) })
}

/// A background tool that ends on request.
fn slow(release: Arc<tokio::sync::Notify>) -> FnTool {
    FnTool::new("t.slow", "Takes its time", move |_: Nothing| {
        let release = release.clone();
        async move {
            release.notified().await;
            Ok::<_, Fault>("at last")
        }
    })
    .background()
}

fn call_request(tool: &str, call_id: &str) -> CallRequest {
    CallRequest { call_id: Some(call_id.into()), ..CallRequest::new(tool, "{}").unwrap() }
}

fn caller_call(tool: &str, call_id: &str) -> ReportedCall {
    ReportedCall { request: call_request(tool, call_id), background: None, result: None }
}

fn result(call_id: &str, result: Result<Json, Fault>) -> ReportedResult {
    ReportedResult { tool_call_id: None, call_id: Some(call_id.into()), result }
}

const RUN: &str = "run_default";

fn ids(calls: &[ToolCall]) -> Vec<&str> {
    calls.iter().map(|call| call.call_id.as_str()).collect()
}

#[tokio::test]
async fn refreshing_a_context_notifies_listeners_of_background_results() {
    let release = Arc::new(tokio::sync::Notify::new());
    let engine = Engine::builder().tool(quick()).tool(slow(release.clone()));
    let engine = engine.start().await.unwrap();
    let caller = Caller::local("default");
    let ticket = engine.calls().invoke(&caller, call_request("t.slow", "call_0")).await.unwrap();
    let quick = engine.calls().invoke(&caller, call_request("t.quick", "call_0")).await.unwrap();
    engine.calls().wait(&caller, &quick.call.id, Until::Ended).await.unwrap();

    let mut context = engine.runs().contexts().context(&caller, RUN, 50).await.unwrap();
    assert_eq!(ids(context.tool_calls()), ["call_0", "call_0"]);
    let pending: Vec<_> = context.pending_calls().map(|call| call.tool_call_id.clone()).collect();
    assert_eq!(
        pending,
        [Some(ticket.call.id.clone())],
        "matched by the call's id, not by the caller call id"
    );
    let received = Arc::new(Mutex::new(Vec::new()));
    context.on_tool_call(|_, _| panic!("a broken listener"));
    let note = received.clone();
    context.on_tool_call(move |call, result| {
        note.lock().push((call.name.clone(), result.outcome.clone()));
        Ok(())
    });
    assert_eq!(
        engine.runs().contexts().refresh_context(&caller, &mut context, 0).await.unwrap(),
        0,
        "no new results"
    );
    release.notify_one();
    assert_eq!(
        engine.runs().contexts().refresh_context(&caller, &mut context, 60_000).await.unwrap(),
        1
    );
    assert_eq!(*received.lock(), [("t.slow".to_owned(), Ok(json("\"at last\"")))]);
    assert_eq!(context.pending_calls().count(), 0);
    let third = engine.calls().invoke(&caller, call_request("t.quick", "call_1")).await.unwrap();
    engine.calls().wait(&caller, &third.call.id, Until::Ended).await.unwrap();
    assert_eq!(
        engine.runs().contexts().refresh_context(&caller, &mut context, 60_000).await.unwrap(),
        1
    );
    assert_eq!(ids(context.tool_calls()), ["call_0", "call_0", "call_1"]);
}

#[tokio::test]
async fn an_open_call_is_kept_when_older_calls_are_truncated() {
    let release = Arc::new(tokio::sync::Notify::new());
    let engine = Engine::builder().tool(quick()).tool(slow(release.clone()));
    let engine = engine.start().await.unwrap();
    let caller = Caller::local("default");
    engine.calls().invoke(&caller, call_request("t.slow", "old")).await.unwrap();
    for n in 0..8 {
        let ticket = engine
            .calls()
            .invoke(&caller, call_request("t.quick", &format!("q{n}")))
            .await
            .unwrap();
        engine.calls().wait(&caller, &ticket.call.id, Until::Ended).await.unwrap();
    }
    let context = engine.runs().contexts().context(&caller, RUN, 3).await.unwrap();
    assert_eq!(ids(context.tool_calls()), ["old", "q5", "q6", "q7"]);
    assert!(context.truncated());
    assert!(!engine.runs().contexts().context(&caller, RUN, 9).await.unwrap().truncated());
    let prompt = engine.runs().contexts().prompt(&caller, RUN, 3, 400).await.unwrap();
    assert!(prompt.text.contains("t__slow (async, in the background), call_id old"), "{prompt:?}");
    let (openai, truncated) = engine
        .runs()
        .contexts()
        .conversation(&caller, RUN, 3, MessageFormat::OpenAi, None)
        .await
        .unwrap();
    let answers = openai.messages.iter().filter(|message| message.to_value()["role"] == "tool");
    assert!(truncated && answers.count() == 4, "{openai:?}");
}

#[tokio::test]
async fn calls_that_the_caller_executed_are_recorded() {
    let engine = Engine::builder().tool(quick()).start().await.unwrap();
    let caller = Caller::local("default");
    let done = ReportedCall { result: Some(Ok(json("[7]"))), ..caller_call("my.search", "call_0") };
    let made = engine
        .runs()
        .contexts()
        .record_calls(&caller, RUN, vec![done, caller_call("my.mail", "call_1")])
        .await
        .unwrap();
    let statuses: Vec<Status> = made.iter().map(|call| call.status).collect();
    assert_eq!(statuses, [Status::Succeeded, Status::Running]);
    assert!(made.iter().all(|call| call.target.executor == Executor::CALLER));
    let failed = result("call_1", Err(Fault::unreachable("no network")));
    let ended =
        engine.runs().contexts().record_results(&caller, RUN, vec![failed.clone()]).await.unwrap();
    assert_eq!((ended[0].status, ended[0].attempt), (Status::Failed, 1), "never retried");
    let again = engine.runs().contexts().record_results(&caller, RUN, vec![failed]).await.unwrap();
    assert_eq!(again[0].id, ended[0].id, "a duplicate result is accepted");
    let other = engine
        .runs()
        .contexts()
        .record_results(&caller, RUN, vec![result("call_1", Ok(json("1")))])
        .await;
    assert_eq!(other.err().unwrap().code(), Code::Conflict);
    let nowhere = engine
        .runs()
        .contexts()
        .record_results(&caller, RUN, vec![result("call_7", Ok(json("1")))])
        .await;
    assert_eq!(nowhere.err().unwrap().code(), Code::NotFound);
    let context = engine.runs().contexts().context(&caller, RUN, 50).await.unwrap();
    assert_eq!(context.tool_results().len(), 2);
    let other_project =
        engine.runs().contexts().context(&Caller::local("other"), RUN, 50).await.unwrap();
    assert!(other_project.tool_calls().is_empty(), "runs of other projects are separate");
}

#[tokio::test]
async fn a_repeated_call_id_refers_to_the_newest_pending_call() {
    let engine = Engine::builder().start().await.unwrap();
    let caller = Caller::local("default");
    let first = engine
        .runs()
        .contexts()
        .record_calls(&caller, RUN, vec![caller_call("my.a", "call_0")])
        .await
        .unwrap();
    let second = engine
        .runs()
        .contexts()
        .record_calls(&caller, RUN, vec![caller_call("my.b", "call_0")])
        .await
        .unwrap();
    let both = vec![result("call_0", Ok(json("2"))), result("call_0", Ok(json("1")))];
    let ended = engine.runs().contexts().record_results(&caller, RUN, both).await.unwrap();
    assert_eq!([&ended[0].id, &ended[1].id], [&second[0].id, &first[0].id]);
    let third = engine
        .runs()
        .contexts()
        .record_calls(&caller, RUN, vec![caller_call("my.c", "call_0")])
        .await
        .unwrap();
    let by_ticket = ReportedResult {
        tool_call_id: Some(third[0].id.clone()),
        call_id: None,
        result: Ok(json("3")),
    };
    let ended =
        engine.runs().contexts().record_results(&caller, RUN, vec![by_ticket]).await.unwrap();
    assert_eq!((&ended[0].id, ended[0].status), (&third[0].id, Status::Succeeded));
}

fn my_tool(name: &str) -> ToolDefinition {
    ToolDefinition {
        project: None,
        name: name.into(),
        executor: Executor::CALLER,
        input_schema: json(r#"{"type":"object","required":["q"]}"#),
        output_schema: Some(json(r#"{"type":"integer"}"#)),
        ..quick().definition()
    }
}

#[tokio::test]
async fn recorded_calls_are_validated_against_the_tools_of_the_run() {
    let engine = Engine::builder().tool(quick()).tool(slow(Arc::default())).start().await.unwrap();
    let caller = Caller::local("default");
    let names = |context: ToolCallContext| -> Vec<String> {
        context.tool_definitions().iter().map(|tool| tool.name.clone()).collect()
    };
    assert_eq!(
        names(engine.runs().contexts().context(&caller, RUN, 1).await.unwrap()),
        ["t.quick", "t.slow"]
    );
    let tools = RunToolSelection {
        caller_tools: vec![my_tool("my.tool")],
        toolcrib_tools: Some(vec!["t__slow".into()]),
    };
    engine.runs().contexts().set_run_tools(&caller, RUN, tools).await.unwrap();
    assert_eq!(
        names(engine.runs().contexts().context(&caller, RUN, 1).await.unwrap()),
        ["my.tool", "t.slow"]
    );
    let override_selection =
        RunToolSelection { caller_tools: vec![my_tool("t.quick")], toolcrib_tools: None };
    let set = engine
        .runs()
        .contexts()
        .set_run_tools(&caller, "other_run", override_selection)
        .await
        .unwrap();
    assert_eq!(set.len(), 2, "a caller tool replaces Toolcrib's tool of the same name");
    assert_eq!(set[0].executor, Executor::CALLER);

    let invalid = engine
        .runs()
        .contexts()
        .record_calls(&caller, RUN, vec![caller_call("my.tool", "call_0")])
        .await;
    let error = invalid.err().unwrap();
    assert_eq!(error.code(), Code::ValidationError);
    assert!(error.to_string().contains("tool_calls/0"), "{error}");
    let mut valid = caller_call("my__tool", "call_0");
    valid.request.args = json(r#"{"q":1}"#);
    valid.result = Some(Ok(json("\"no integer\"")));
    let calls = engine.runs().contexts().record_calls(&caller, RUN, vec![valid]).await.unwrap();
    assert_eq!((calls[0].tool_name.as_str(), calls[0].status), ("my.tool", Status::Failed));
    let fault = calls[0].outcome.as_ref().unwrap().error.as_ref().unwrap();
    assert!(fault.message.contains("output schema"), "{fault}");

    for (tools, field) in [
        (
            RunToolSelection { caller_tools: vec![], toolcrib_tools: Some(vec!["t.quik".into()]) },
            "crib_tools/0",
        ),
        (
            RunToolSelection {
                caller_tools: vec![my_tool("a"), my_tool("a")],
                toolcrib_tools: None,
            },
            "tool_definitions/1",
        ),
        (
            RunToolSelection { caller_tools: vec![my_tool("no name")], toolcrib_tools: None },
            "tool_definitions/0",
        ),
    ] {
        let error =
            engine.runs().contexts().set_run_tools(&caller, RUN, tools).await.err().unwrap();
        assert_eq!(error.code(), Code::ValidationError, "{error}");
        assert!(error.to_string().contains(field), "{error}");
    }
}

/// An agent with a key, in a project with these rules.
async fn agent(engine: &Engine, name: &str, deny: Option<&str>) -> Caller {
    let operator = Caller::local("p");
    if !engine.registry().credentials().has_keys() {
        let first = NewKey::new("p", "operator", Role::Admin);
        engine.admin().create_key(&operator, first, "x".repeat(40)).await.unwrap();
    }
    let allow = vec!["t.quick".into()];
    let new = NewKey { allow, ..NewKey::new("p", name, Role::Agent) };
    engine.admin().create_key(&operator, new, format!("secret of {name}")).await.unwrap();
    if let Some(pattern) = deny {
        let rule = AccessRule::short("p", name, pattern, RuleVerdict::Deny);
        engine.admin().set_rule(&operator, rule).await.unwrap();
    }
    Caller::new("p", name, Role::Agent, AuthMethod::Key)
}

#[tokio::test]
async fn only_the_recording_agent_can_record_and_answer_its_calls() {
    let engine = Engine::builder().tool(quick()).tool(slow(Arc::default())).start().await.unwrap();
    let ada = agent(&engine, "ada", Some("secret.*")).await;
    let bob = agent(&engine, "bob", None).await;
    // No rule allows these tools; their existence makes no difference.
    let names = ["my.own", "t.slow"].map(|name| caller_call(name, name));
    let made = engine.runs().contexts().record_calls(&ada, RUN, names.to_vec()).await.unwrap();
    assert!(made.iter().all(|call| call.target.executor == Executor::CALLER));
    let denied = engine
        .runs()
        .contexts()
        .record_calls(&ada, RUN, vec![caller_call("secret.tool", "x")])
        .await
        .err()
        .unwrap();
    assert_eq!(denied.code(), Code::PermissionDenied);
    assert!(denied.to_string().contains("secret.*"), "{denied}");
    let provider = Caller { roles: Role::Provider.into(), ..ada.clone() };
    let refused = engine
        .runs()
        .contexts()
        .record_calls(&provider, RUN, vec![caller_call("my.own", "x")])
        .await;
    assert_eq!(refused.err().unwrap().code(), Code::PermissionDenied);
    // Bob finds no call of his, neither by the caller's id nor by the ticket of ada's call.
    let answer = result("my.own", Ok(json("1")));
    let by_id = engine
        .runs()
        .contexts()
        .record_results(&bob, RUN, vec![answer.clone()])
        .await
        .err()
        .unwrap();
    assert_eq!(by_id.code(), Code::NotFound);
    let ticket = Some(made[0].id.clone());
    let by_ticket = ReportedResult { tool_call_id: ticket, ..answer.clone() };
    let refused = engine
        .runs()
        .contexts()
        .record_results(&bob, RUN, vec![by_ticket.clone()])
        .await
        .err()
        .unwrap();
    assert_eq!(refused.code(), Code::NotFound, "like a call that does not exist");
    let report =
        toolcrib::calls::AttemptReport { attempt: None, client_id: None, result: Ok(json("1")) };
    let reported = engine.calls().report(&provider, &made[0].id, report).await;
    assert_eq!(
        reported.err().unwrap().code(),
        Code::PermissionDenied,
        "a provider cannot report a caller's call"
    );
    let ended = engine.runs().contexts().record_results(&ada, RUN, vec![answer]).await.unwrap();
    assert_eq!(ended[0].status, Status::Succeeded);
    // A caller cannot answer a call that Toolcrib executes.
    let executed_by_toolcrib = engine
        .calls()
        .invoke(&ada, CallRequest { run_id: RUN.into(), ..call_request("t.quick", "q") });
    executed_by_toolcrib.await.unwrap();
    let refused =
        engine.runs().contexts().record_results(&ada, RUN, vec![result("q", Ok(json("1")))]).await;
    assert_eq!(refused.err().unwrap().code(), Code::Conflict);
}

#[tokio::test]
async fn a_recorded_call_survives_a_restart_and_ends_at_its_deadline() {
    let clock = ManualClock::at(1_700_000_000_000);
    let store = Arc::new(MemoryStore::default());
    let start = || {
        let builder = Engine::builder().clock(Arc::new(clock.clone())).store(store.clone());
        async { builder.build_idle().await.unwrap() }
    };
    let caller = Caller::local("default");
    let engine = start().await;
    let mut later = caller_call("my.tool", "call_0");
    later.request.timeout_ms = Some(5_000);
    let id = engine.runs().contexts().record_calls(&caller, RUN, vec![later]).await.unwrap()[0]
        .id
        .clone();
    drop(engine);
    let engine = start().await;
    assert_eq!(engine.calls().recover().await.unwrap(), 1);
    let call = engine.calls().call(&caller, &id).await.unwrap();
    assert_eq!((call.status, call.attempt), (Status::Running, 1), "the caller still executes it");
    assert_eq!(
        engine.runs().contexts().context(&caller, RUN, 1).await.unwrap().pending_calls().count(),
        1
    );
    clock.advance(5_000);
    deadlines::run_once(engine.calls()).await;
    assert_eq!(engine.calls().call(&caller, &id).await.unwrap().status, Status::Timeout);
    let late = engine
        .runs()
        .contexts()
        .record_results(&caller, RUN, vec![result("call_0", Ok(json("1")))])
        .await;
    assert_eq!(late.err().unwrap().code(), Code::Conflict);
}
