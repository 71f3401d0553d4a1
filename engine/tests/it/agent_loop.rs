//! Tests of the agent loop over a scripted model: executed calls, prompts, and stop conditions.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use toolcrib::calls::Until;

use async_trait::async_trait;
use parking_lot::Mutex;
use serde_json::{Value, json};
use toolcrib::domain::model_reply::{FinishReason, ModelReply, TokenUsage, ToolCallRequest};
use toolcrib::domain::retry::Backoff;
use toolcrib::domain::run::options::{ModelRequestPolicy, RunOptions};
use toolcrib::domain::run::progress::{Conversation, StopReason};
use toolcrib::ports::model::{Delta, DeltaListener, Model, ModelError, ModelRequest};
use toolcrib::runs::agent_loop::{AgentLoop, LoopEvent, StepOutcome, ignore_events};
use toolcrib::{Caller, Code, Effect, Engine, Fault, FnTool};

use crate::script::{Script, tool_call_request};

#[derive(serde::Deserialize, schemars::JsonSchema)]
struct Add {
    a: i64,
    b: i64,
}

struct Fixture {
    engine: Engine,
    executions: Arc<AtomicUsize>,
}

async fn fixture() -> Fixture {
    let executions = Arc::new(AtomicUsize::new(0));
    let count = executions.clone();
    let add = FnTool::new("calc.add", "Adds two integers", move |args: Add| {
        count.fetch_add(1, Ordering::SeqCst);
        async move { Ok::<i64, String>(args.a + args.b) }
    });
    let broken = FnTool::new("calc.broken", "Fails", |_: Add| async {
        Err::<i64, Fault>(Fault::runtime("out of paper").retryable(false))
    });
    let engine = Engine::builder()
        .tool(add.effect(Effect::Read))
        .tool(broken.effect(Effect::Read))
        .start()
        .await
        .unwrap();
    Fixture { engine, executions }
}

fn options() -> RunOptions {
    let backoff = Backoff { initial_ms: 1, factor: 1.0, max_ms: 1, jitter: 0.0 };
    let policy = ModelRequestPolicy { retries: 2, backoff, ..ModelRequestPolicy::default() };
    RunOptions { model_request_policy: policy, ..RunOptions::new("scripted", "run_1") }
}

async fn run(
    fixture: &Fixture,
    script: &Script,
    options: &RunOptions,
) -> (Result<StepOutcome, toolcrib::Error>, Conversation) {
    let mut conversation = Conversation::from_user_text("How much is it?");
    let caller = Caller::local("default");
    (
        fixture.engine.runs().run_agent_loop(&caller, script, options, &mut conversation).await,
        conversation,
    )
}

fn answer(next: Result<StepOutcome, toolcrib::Error>) -> (String, Option<StopReason>) {
    match next.unwrap() {
        StepOutcome::Answered(answer) => (answer.text, answer.stop_reason),
        other => panic!("{other:?}"),
    }
}

fn tool_result(conversation: &Conversation, call_id: &str) -> String {
    let mut messages = conversation.messages.iter();
    let message = messages.find(|message| message["tool_call_id"] == call_id).unwrap();
    message["content"].as_str().unwrap().to_owned()
}

const SUM: &str = r#"{"a":20,"b":22}"#;

#[tokio::test]
async fn all_calls_of_a_reply_are_executed_and_their_results_recorded() {
    let fixture = fixture().await;
    let both = [("c1", "calc__add", SUM), ("c2", "calc__add", r#"{"a":1,"b":1}"#)];
    let calls: Vec<ToolCallRequest> = both.iter().map(tool_call_request).collect();
    let script = Script::default()
        .replies_with(|_| Ok(ModelReply { text: "I add.".into(), calls, ..ModelReply::default() }))
        .says("42 and 2");
    let (next, conversation) = run(&fixture, &script, &options()).await;
    assert_eq!(answer(next), ("42 and 2".into(), None));
    assert_eq!(
        (tool_result(&conversation, "c1"), tool_result(&conversation, "c2")),
        ("42".into(), "2".into())
    );
    assert_eq!(conversation.messages[1]["content"], "I add.");
    assert_eq!(conversation.messages[1]["tool_calls"][1]["function"]["name"], "calc__add");
    assert_eq!((conversation.progress.steps, conversation.progress.calls), (2, 2));
    assert!(
        conversation.progress.usage.prompt_tokens > 0,
        "estimated when the endpoint reports no usage"
    );
    let names: Vec<Value> = script
        .request(0)
        .tools
        .iter()
        .map(|tool| tool.to_value()["function"]["name"].clone())
        .collect();
    assert_eq!(names, ["calc__add", "calc__broken"]);
}

#[tokio::test]
async fn invalid_calls_become_messages_that_the_model_can_correct() {
    let fixture = fixture().await;
    let script = Script::default()
        .calls(&[
            ("c1", "calc__ad", SUM),
            ("c2", "calc__add", r#"{"a":20,"#),
            ("c3", "calc__add", r#"{"a":"x","b":1}"#),
            ("c4", "calc__add", SUM),
            ("c4", "calc__add", r#"{"a":1,"b":2}"#),
            ("", "calc__add", r#"{"a":1,"b":3}"#),
        ])
        .says("done");
    let (next, conversation) = run(&fixture, &script, &options()).await;
    assert_eq!(answer(next).0, "done");
    assert!(
        tool_result(&conversation, "c1").contains("did you mean \\\"calc__add\\\""),
        "{}",
        tool_result(&conversation, "c1")
    );
    assert!(
        tool_result(&conversation, "c2").contains("not JSON"),
        "{}",
        tool_result(&conversation, "c2")
    );
    assert!(
        tool_result(&conversation, "c3").contains("VALIDATION_ERROR"),
        "{}",
        tool_result(&conversation, "c3")
    );
    assert_eq!(tool_result(&conversation, "c4"), "42");
    assert_eq!(
        tool_result(&conversation, "call_1_4"),
        "3",
        "the second call with an id gets a new one"
    );
    assert_eq!(tool_result(&conversation, "call_1_5"), "4");
    assert_eq!(fixture.executions.load(Ordering::SeqCst), 3);
}

#[tokio::test]
async fn tool_name_suggestions_are_limited_in_length_and_number() {
    let fixture = fixture().await;
    let long = format!("calc__add{}", "d".repeat(100_000));
    let ids: Vec<String> = (0..66).map(|n| format!("c{n}")).collect();
    let mut calls: Vec<_> = ids.iter().map(|id| (id.as_str(), "calc__ad", SUM)).collect();
    calls[1].1 = &long;
    let script = Script::default().calls(&calls).says("done");
    let (next, conversation) = run(&fixture, &script, &options()).await;
    assert_eq!(answer(next).0, "done");
    let has_hint =
        |id: &str| tool_result(&conversation, id).contains("did you mean \\\"calc__add\\\"");
    assert!(has_hint("c0") && has_hint("c63"), "{}", tool_result(&conversation, "c63"));
    for id in ["c1", "c64"] {
        let tool_result = tool_result(&conversation, id);
        assert!(
            tool_result.contains("use only the tools you were given") && tool_result.len() < 500,
            "{tool_result}"
        );
    }
}

#[tokio::test]
async fn calls_beyond_the_limit_per_step_are_refused() {
    let fixture = fixture().await;
    let arguments: Vec<String> = (0..200).map(|n| format!("{{\"a\":{n},\"b\":0}}")).collect();
    let ids: Vec<String> = (0..200).map(|n| format!("c{n}")).collect();
    let all = ids.iter().zip(&arguments);
    let calls: Vec<_> =
        all.map(|(id, arguments)| (id.as_str(), "calc__add", arguments.as_str())).collect();
    let script = Script::default().calls(&calls).says("enough");
    let (next, conversation) = run(&fixture, &script, &options()).await;
    assert_eq!(answer(next).0, "enough");
    assert_eq!(fixture.executions.load(Ordering::SeqCst), 64);
    assert_eq!(tool_result(&conversation, "c63"), "63");
    assert!(
        tool_result(&conversation, "c64").contains("at most 64 tools"),
        "{}",
        tool_result(&conversation, "c64")
    );
    assert_eq!(conversation.messages.len(), 1 + 1 + 200 + 1, "every call is answered");
}

#[tokio::test]
async fn a_reached_limit_leads_to_one_last_request_without_tools() {
    let fixture = fixture().await;
    let mut options = options();
    options.limits.steps = 2;
    let script = Script::default()
        .calls(&[("c1", "calc__add", SUM)])
        .calls(&[("c2", "calc__add", r#"{"a":1,"b":1}"#)])
        .says("I could only add twice.");
    let (next, _) = run(&fixture, &script, &options).await;
    assert_eq!(answer(next), ("I could only add twice.".into(), Some(StopReason::Steps)));
    let last = script.request(2);
    assert!(last.tools.is_empty());
    let words = last.messages.last().unwrap()["content"].as_str().unwrap().to_owned();
    assert!(words.contains("limit of 2 steps") && words.contains("could not be done"), "{words}");
}

#[tokio::test]
async fn a_model_that_calls_tools_in_the_last_request_gets_a_fixed_answer() {
    let fixture = fixture().await;
    let mut options = options();
    options.limits.calls = 1;
    let script = Script::default().calls(&[("c1", "calc__add", SUM)]).calls(&[(
        "c2",
        "calc__add",
        r#"{"a":1,"b":1}"#,
    )]);
    let (next, conversation) = run(&fixture, &script, &options).await;
    let (text, closing) = answer(next);
    assert!(text.contains("no complete answer") && text.contains("1 tool calls"), "{text}");
    assert_eq!(closing, Some(StopReason::Calls));
    assert_eq!(fixture.executions.load(Ordering::SeqCst), 1);
    assert!(conversation.messages.last().unwrap().get("tool_calls").is_none());
}

#[tokio::test]
async fn repeated_identical_calls_are_warned_about_and_then_stopped() {
    let fixture = fixture().await;
    let again = [("c1", "calc__add", SUM)];
    let other_order = [("c1", "calc__add", r#"{ "b":22, "a":20 }"#)];
    let script = Script::default()
        .calls(&again)
        .calls(&other_order)
        .calls(&again)
        .calls(&again)
        .calls(&again)
        .says("It stays 42.");
    let (next, conversation) = run(&fixture, &script, &options()).await;
    assert_eq!(answer(next), ("It stays 42.".into(), Some(StopReason::Repeats)));
    assert_eq!(fixture.executions.load(Ordering::SeqCst), 3);
    let tool_result: Vec<&str> = conversation
        .messages
        .iter()
        .filter(|message| message["role"] == "tool")
        .map(|message| message["content"].as_str().unwrap())
        .collect();
    assert_eq!(tool_result[..3], ["42", "42", "42"]);
    assert!(tool_result[3].contains("exactly these arguments"), "{}", tool_result[3]);
}

#[tokio::test]
async fn repeated_tool_failures_end_the_loop_with_an_answer() {
    let fixture = fixture().await;
    let arguments: Vec<String> = (0..4).map(|n| format!("{{\"a\":{n},\"b\":0}}")).collect();
    let mut script = Script::default();
    for arguments in &arguments {
        script = script.calls(&[("c", "calc__broken", arguments)]);
    }
    let script = script.says("The printer has no paper.");
    let (next, conversation) = run(&fixture, &script, &options()).await;
    assert_eq!(answer(next), ("The printer has no paper.".into(), Some(StopReason::Failures)));
    assert!(tool_result(&conversation, "c").contains("out of paper"));
}

#[tokio::test]
async fn only_transient_model_errors_are_retried() {
    let fixture = fixture().await;
    let cut = |_: &ModelRequest| {
        let fault = Fault::new(Code::UpstreamUnavailable, "the stream was cut");
        Err(ModelError { fault, is_transient: true, retry_after: None })
    };
    let script = Script::default()
        .fails(true, Some(Duration::from_millis(5)))
        .replies_with(cut)
        .says("here I am");
    assert_eq!(answer(run(&fixture, &script, &options()).await.0).0, "here I am");

    let script = Script::default().fails(true, None).fails(true, None).fails(true, None);
    let (next, mut conversation) = run(&fixture, &script, &options()).await;
    let error = next.unwrap_err();
    assert_eq!(error.code(), Code::UpstreamUnavailable);
    assert!(error.to_string().contains("(3 attempts)"), "{error}");
    // Nothing is lost: the same conversation continues.
    let script = Script::default().says("back");
    let caller = Caller::local("default");
    let next =
        fixture.engine.runs().run_agent_loop(&caller, &script, &options(), &mut conversation).await;
    assert_eq!(answer(next).0, "back");
    assert_eq!(conversation.messages.len(), 2);

    let script = Script::default().fails(false, None);
    assert!(run(&fixture, &script, &options()).await.0.is_err());
}

/// A model whose reply must be cut off.
struct EndlessModel(bool);

#[async_trait]
impl Model for EndlessModel {
    async fn reply(
        &self,
        _: &ModelRequest,
        listener: DeltaListener<'_>,
    ) -> Result<ModelReply, ModelError> {
        loop {
            if self.0 {
                listener(Delta::Text("a".repeat(100_000)));
            }
            tokio::task::yield_now().await;
        }
    }
}

#[tokio::test]
async fn endless_empty_and_oversized_replies_are_cut_off() {
    let fixture = fixture().await;
    let caller = Caller::local("default");
    let mut options = options();
    options.model_request_policy.request_ms = 20;
    options.model_request_policy.retries = 1;
    for (model, words) in
        [(EndlessModel(true), "longer than"), (EndlessModel(false), "within 20 ms")]
    {
        let mut conversation = Conversation::from_user_text("?");
        let error = fixture
            .engine
            .runs()
            .run_agent_loop(&caller, &model, &options, &mut conversation)
            .await
            .unwrap_err();
        assert_eq!(error.code(), Code::UpstreamUnavailable);
        assert!(error.to_string().contains(words), "{error}");
    }
    let script = Script::default().says("").says(" ");
    let error = run(&fixture, &script, &options).await.0.unwrap_err();
    assert!(error.to_string().contains("the answer was empty"), "{error}");
    let huge = "x".repeat(5 << 20);
    let script =
        Script::default().replies_with(|_| Ok(ModelReply { text: huge, ..ModelReply::default() }));
    assert!(run(&fixture, &script, &options).await.0.is_err());
}

#[tokio::test]
async fn calls_with_truncated_arguments_are_not_executed() {
    let fixture = fixture().await;
    let calls = vec![tool_call_request(&("c1", "calc__add", r#"{"a":20,"b":2"#))];
    let script = Script::default()
        .replies_with(|_| {
            Ok(ModelReply { calls, finish_reason: FinishReason::Length, ..ModelReply::default() })
        })
        .says("sorry");
    let (next, conversation) = run(&fixture, &script, &options()).await;
    assert_eq!(answer(next).0, "sorry");
    assert!(
        tool_result(&conversation, "c1").contains("limit of tokens in the middle"),
        "{}",
        tool_result(&conversation, "c1")
    );
    assert_eq!(fixture.executions.load(Ordering::SeqCst), 0);
}

#[tokio::test]
async fn calls_of_caller_tools_are_returned_after_toolcribs_own_calls_ran() {
    let fixture = fixture().await;
    let mut options = options();
    let function = json!({ "name": "open_door", "parameters": { "type": "object" } });
    options.caller_tools = vec![json!({ "type": "function", "function": function })];
    let script = Script::default()
        .calls(&[("c1", "calc__add", SUM), ("c2", "open_door", "{}")])
        .says("It is 42, and the door is open.");
    let (next, mut conversation) = run(&fixture, &script, &options).await;
    let StepOutcome::CallerToolCalls(caller_calls) = next.unwrap() else { panic!() };
    assert_eq!(caller_calls, [tool_call_request(&("c2", "open_door", "{}"))]);
    assert_eq!(tool_result(&conversation, "c1"), "42");
    conversation.messages.push(json!({ "role": "tool", "tool_call_id": "c2", "content": "open" }));
    let caller = Caller::local("default");
    let next =
        fixture.engine.runs().run_agent_loop(&caller, &script, &options, &mut conversation).await;
    assert_eq!(answer(next).0, "It is 42, and the door is open.");
}

#[tokio::test]
async fn only_the_selected_tools_are_offered_and_unknown_names_are_refused() {
    let fixture = fixture().await;
    let mut options = options();
    options.tools = Some(vec!["calc.a*".into()]);
    let script = Script::default().calls(&[("c1", "calc__broken", SUM)]).says("no");
    let (next, conversation) = run(&fixture, &script, &options).await;
    assert_eq!(answer(next).0, "no");
    assert_eq!(script.request(0).tools.len(), 1);
    assert!(tool_result(&conversation, "c1").contains("TOOL_NOT_FOUND"));
    options.tools = Some(vec!["calc.ad".into()]);
    let error = run(&fixture, &Script::default(), &options).await.0.unwrap_err();
    assert_eq!(error.code(), Code::ValidationError);
    assert!(error.to_string().contains("tools/0"), "{error}");
}

#[tokio::test]
async fn a_loop_waiting_only_for_a_late_result_continues_with_it() {
    let (go, released) = tokio::sync::oneshot::channel::<()>();
    let released = Mutex::new(Some(released));
    let slow = FnTool::new("job.start", "Takes long", move |_: Add| {
        let released = released.lock().take();
        async move {
            released.unwrap().await.unwrap();
            Ok::<&str, String>("the report")
        }
    });
    let engine = Engine::builder().tool(slow.background()).start().await.unwrap();
    let go = Mutex::new(Some(go));
    let script = Script::default()
        .calls(&[("c1", "job__start", SUM)])
        .says("It runs; I wait.")
        .says("The report is there.");
    let observed = Mutex::new(Vec::new());
    let on_event = |event: LoopEvent<'_>| match event {
        LoopEvent::ModelRequested { step, .. } => observed.lock().push(format!("ask {step}")),
        LoopEvent::ModelReplied { step: 2, .. } => {
            // The call ends only now.
            go.lock().take().unwrap().send(()).unwrap();
        }
        LoopEvent::LateResult { call, .. } => {
            observed.lock().push(format!("late {}", call.call_id))
        }
        _ => {}
    };
    let (caller, options) = (Caller::local("default"), options());
    let mut conversation = Conversation::from_user_text("Make a report");
    let mut agent_loop =
        AgentLoop::new(engine.runs(), &caller, &script, &options, &on_event).unwrap();
    assert_eq!(answer(agent_loop.run(&mut conversation).await).0, "The report is there.");
    assert_eq!(*observed.lock(), ["ask 1", "ask 2", "late c1", "ask 3"]);
    assert!(tool_result(&conversation, "c1").contains("pending"));
    let late = script.request(2).messages.last().unwrap()["content"].clone();
    assert!(late.as_str().unwrap().contains("called as c1, has come:\nthe report"), "{late}");
}

#[tokio::test]
async fn late_results_that_arrive_together_share_one_token_budget() {
    let long = FnTool::new("job.start", "Tells much", |args: Add| async move {
        let lines: Vec<String> = (0..args.a).map(|n| format!("line {n} of text")).collect();
        Ok::<String, String>(lines.join("\n"))
    });
    let engine = Engine::builder().tool(long.background()).start().await.unwrap();
    let (much, little) = (r#"{"a":20000,"b":0}"#, r#"{"a":3,"b":0}"#);
    let calls = [("c1", much), ("c2", much), ("c3", little), ("c4", much)];
    let calls = calls.map(|(id, arguments)| (id, "job__start", arguments));
    let script = Script::default().calls(&calls).says("done");
    let (caller, mut options) = (Caller::local("default"), options());
    options.execution_options.result_tokens = Some(1_000);
    let mut conversation = Conversation::from_user_text("Tell me");
    let mut agent_loop =
        AgentLoop::new(engine.runs(), &caller, &script, &options, &ignore_events).unwrap();
    assert_eq!(agent_loop.run_step(&mut conversation).await.unwrap(), StepOutcome::Continue);
    for call in conversation.progress.pending_calls.clone() {
        engine.calls().wait(&caller, &call.tool_call_id, Until::EndedWithin(30_000)).await.unwrap();
    }
    agent_loop.request_reply(&mut conversation).await.unwrap();
    let prompt = script.request(1).messages;
    let late_results =
        prompt.iter().filter_map(|message| message["content"].as_str()?.split_once("come:\n"));
    let late_results: Vec<&str> = late_results.map(|(_, content)| content).collect();
    assert_eq!(late_results.len(), 4);
    assert_eq!(
        late_results[2], "line 0 of text\nline 1 of text\nline 2 of text",
        "short results are not shortened"
    );
    let tokens: Vec<usize> =
        late_results.iter().map(|content| toolcrib::results::tokens::count(content)).collect();
    assert!(tokens.iter().sum::<usize>() <= 1_000, "{tokens:?}");
    assert!(tokens.iter().enumerate().all(|(n, tokens)| n == 2 || *tokens > 200), "{tokens:?}");
}

#[tokio::test]
async fn the_token_limit_uses_the_endpoints_usage_figures() {
    let fixture = fixture().await;
    let mut options = options();
    options.limits.tokens = 100;
    let usage = TokenUsage { prompt_tokens: 90, completion_tokens: 15 };
    let calls = vec![tool_call_request(&("c1", "calc__add", SUM))];
    let script = Script::default()
        .replies_with(move |_| Ok(ModelReply { calls, usage, ..ModelReply::default() }))
        .says("short");
    let (next, conversation) = run(&fixture, &script, &options).await;
    assert_eq!(answer(next), ("short".into(), Some(StopReason::Tokens)));
    assert_eq!(tool_result(&conversation, "c1"), "42", "calls of the last reply still run");
}

#[tokio::test]
async fn a_reply_with_too_many_calls_is_rejected_as_a_whole() {
    let fixture = fixture().await;
    let many = |count: usize| {
        let call = |n| ToolCallRequest {
            id: format!("c{n}"),
            name: "calc__add".into(),
            arguments: format!("{{\"a\":{n},\"b\":0}}"),
        };
        ModelReply { calls: (0..count).map(call).collect(), ..ModelReply::default() }
    };
    let script = Script::default().replies_with(move |_| Ok(many(1_000))).says("enough");
    let (next, conversation) = run(&fixture, &script, &options()).await;
    assert_eq!(answer(next).0, "enough");
    assert_eq!(conversation.messages.len(), 1 + 1 + 1_000 + 1, "every call is answered");
    let executions = fixture.executions.load(Ordering::SeqCst);
    let script = Script::default().replies_with(move |_| Ok(many(1_001)));
    let (next, conversation) = run(&fixture, &script, &options()).await;
    let error = next.unwrap_err();
    assert_eq!(error.code(), Code::UpstreamUnavailable);
    assert!(error.to_string().contains("more than 1000 calls"), "{error}");
    assert_eq!(conversation.messages.len(), 1, "the conversation is unchanged");
    assert_eq!(fixture.executions.load(Ordering::SeqCst), executions, "none of its calls run");
}
