//! Tests of the agent loop over a scripted model: executed calls, prompts, and stop conditions.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use parking_lot::Mutex;
use serde_json::{Value, json};
use toolcrib::domain::retry::Backoff;
use toolcrib::ports::model::{
    Delta, DeltaListener, FinishReason, Model, ModelError, ModelReply, ModelRequest, TokenUsage,
    ToolCallRequest,
};
use toolcrib::runs::agent_loop::{
    AgentLoop, Conversation, LoopEvent, ModelRequestPolicy, RunOptions, StepOutcome, StopReason,
    ignore_events,
};
use toolcrib::{Caller, Code, Effect, Engine, Fault, FnTool};

use crate::script::{Script, wanted};

#[derive(serde::Deserialize, schemars::JsonSchema)]
struct Add {
    a: i64,
    b: i64,
}

struct Bench {
    engine: Engine,
    made: Arc<AtomicUsize>,
}

async fn bench() -> Bench {
    let made = Arc::new(AtomicUsize::new(0));
    let count = made.clone();
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
    Bench { engine, made }
}

fn terms() -> RunOptions {
    let backoff = Backoff { initial_ms: 1, factor: 1.0, max_ms: 1, jitter: 0.0 };
    let asking = ModelRequestPolicy { retries: 2, backoff, ..ModelRequestPolicy::default() };
    RunOptions { model_request_policy: asking, ..RunOptions::new("scripted", "run_1") }
}

async fn run(
    bench: &Bench,
    script: &Script,
    terms: &RunOptions,
) -> (Result<StepOutcome, toolcrib::Error>, Conversation) {
    let mut talk = Conversation::from_user_text("How much is it?");
    let caller = Caller::local("default");
    (bench.engine.run_agent_loop(&caller, script, terms, &mut talk).await, talk)
}

fn answer(next: Result<StepOutcome, toolcrib::Error>) -> (String, Option<StopReason>) {
    match next.unwrap() {
        StepOutcome::Answered(answer) => (answer.text, answer.stop_reason),
        other => panic!("{other:?}"),
    }
}

fn told(talk: &Conversation, call_id: &str) -> String {
    let mut messages = talk.messages.iter();
    let message = messages.find(|message| message["tool_call_id"] == call_id).unwrap();
    message["content"].as_str().unwrap().to_owned()
}

const SUM: &str = r#"{"a":20,"b":22}"#;

#[tokio::test]
async fn all_calls_of_an_answer_are_executed_and_told_beside_its_text() {
    let bench = bench().await;
    let both = [("c1", "calc__add", SUM), ("c2", "calc__add", r#"{"a":1,"b":1}"#)];
    let calls: Vec<ToolCallRequest> = both.iter().map(wanted).collect();
    let script = Script::default()
        .line(|_| Ok(ModelReply { text: "I add.".into(), calls, ..ModelReply::default() }))
        .says("42 and 2");
    let (next, talk) = run(&bench, &script, &terms()).await;
    assert_eq!(answer(next), ("42 and 2".into(), None));
    assert_eq!((told(&talk, "c1"), told(&talk, "c2")), ("42".into(), "2".into()));
    assert_eq!(talk.messages[1]["content"], "I add.");
    assert_eq!(talk.messages[1]["tool_calls"][1]["function"]["name"], "calc__add");
    assert_eq!((talk.progress.steps, talk.progress.calls), (2, 2));
    assert!(talk.progress.usage.prompt_tokens > 0, "guessed where nobody says");
    let names: Vec<Value> =
        script.asked(0).tools.iter().map(|tool| tool["function"]["name"].clone()).collect();
    assert_eq!(names, ["calc__add", "calc__broken"]);
}

#[tokio::test]
async fn what_makes_no_sense_becomes_a_message_that_the_model_can_act_on() {
    let bench = bench().await;
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
    let (next, talk) = run(&bench, &script, &terms()).await;
    assert_eq!(answer(next).0, "done");
    assert!(told(&talk, "c1").contains("did you mean \\\"calc__add\\\""), "{}", told(&talk, "c1"));
    assert!(told(&talk, "c2").contains("not JSON"), "{}", told(&talk, "c2"));
    assert!(told(&talk, "c3").contains("VALIDATION_ERROR"), "{}", told(&talk, "c3"));
    assert_eq!(told(&talk, "c4"), "42");
    assert_eq!(told(&talk, "call_1_4"), "3", "the second of one id has another");
    assert_eq!(told(&talk, "call_1_5"), "4");
    assert_eq!(bench.made.load(Ordering::SeqCst), 3);
}

#[tokio::test]
async fn an_unknown_name_is_compared_with_others_only_as_far_as_a_name_can_be_mistyped() {
    let bench = bench().await;
    let long = format!("calc__add{}", "d".repeat(100_000));
    let ids: Vec<String> = (0..66).map(|n| format!("c{n}")).collect();
    let mut calls: Vec<_> = ids.iter().map(|id| (id.as_str(), "calc__ad", SUM)).collect();
    calls[1].1 = &long;
    let script = Script::default().calls(&calls).says("done");
    let (next, talk) = run(&bench, &script, &terms()).await;
    assert_eq!(answer(next).0, "done");
    let has_hint = |id: &str| told(&talk, id).contains("did you mean \\\"calc__add\\\"");
    assert!(has_hint("c0") && has_hint("c63"), "{}", told(&talk, "c63"));
    for id in ["c1", "c64"] {
        let told = told(&talk, id);
        assert!(told.contains("use only the tools you were given") && told.len() < 500, "{told}");
    }
}

#[tokio::test]
async fn two_hundred_calls_at_once_meet_a_clear_limit() {
    let bench = bench().await;
    let arguments: Vec<String> = (0..200).map(|n| format!("{{\"a\":{n},\"b\":0}}")).collect();
    let ids: Vec<String> = (0..200).map(|n| format!("c{n}")).collect();
    let all = ids.iter().zip(&arguments);
    let calls: Vec<_> =
        all.map(|(id, arguments)| (id.as_str(), "calc__add", arguments.as_str())).collect();
    let script = Script::default().calls(&calls).says("enough");
    let (next, talk) = run(&bench, &script, &terms()).await;
    assert_eq!(answer(next).0, "enough");
    assert_eq!(bench.made.load(Ordering::SeqCst), 64);
    assert_eq!(told(&talk, "c63"), "63");
    assert!(told(&talk, "c64").contains("at most 64 tools"), "{}", told(&talk, "c64"));
    assert_eq!(talk.messages.len(), 1 + 1 + 200 + 1, "every call is answered");
}

#[tokio::test]
async fn a_limit_ends_in_one_last_request_without_tools() {
    let bench = bench().await;
    let mut terms = terms();
    terms.limits.steps = 2;
    let script = Script::default()
        .calls(&[("c1", "calc__add", SUM)])
        .calls(&[("c2", "calc__add", r#"{"a":1,"b":1}"#)])
        .says("I could only add twice.");
    let (next, _) = run(&bench, &script, &terms).await;
    assert_eq!(answer(next), ("I could only add twice.".into(), Some(StopReason::Steps)));
    let last = script.asked(2);
    assert!(last.tools.is_empty());
    let words = last.messages.last().unwrap()["content"].as_str().unwrap().to_owned();
    assert!(words.contains("limit of 2 steps") && words.contains("could not be done"), "{words}");
}

#[tokio::test]
async fn a_model_that_calls_even_then_is_answered_for() {
    let bench = bench().await;
    let mut terms = terms();
    terms.limits.calls = 1;
    let script = Script::default().calls(&[("c1", "calc__add", SUM)]).calls(&[(
        "c2",
        "calc__add",
        r#"{"a":1,"b":1}"#,
    )]);
    let (next, talk) = run(&bench, &script, &terms).await;
    let (text, closing) = answer(next);
    assert!(text.contains("no complete answer") && text.contains("1 tool calls"), "{text}");
    assert_eq!(closing, Some(StopReason::Calls));
    assert_eq!(bench.made.load(Ordering::SeqCst), 1);
    assert!(talk.messages.last().unwrap().get("tool_calls").is_none());
}

#[tokio::test]
async fn the_same_call_again_and_again_is_told_and_then_broken() {
    let bench = bench().await;
    let again = [("c1", "calc__add", SUM)];
    let other_order = [("c1", "calc__add", r#"{ "b":22, "a":20 }"#)];
    let script = Script::default()
        .calls(&again)
        .calls(&other_order)
        .calls(&again)
        .calls(&again)
        .calls(&again)
        .says("It stays 42.");
    let (next, talk) = run(&bench, &script, &terms()).await;
    assert_eq!(answer(next), ("It stays 42.".into(), Some(StopReason::Repeats)));
    assert_eq!(bench.made.load(Ordering::SeqCst), 3);
    let told: Vec<&str> = talk
        .messages
        .iter()
        .filter(|message| message["role"] == "tool")
        .map(|message| message["content"].as_str().unwrap())
        .collect();
    assert_eq!(told[..3], ["42", "42", "42"]);
    assert!(told[3].contains("exactly these arguments"), "{}", told[3]);
}

#[tokio::test]
async fn tools_that_keep_failing_end_in_an_answer_that_says_so() {
    let bench = bench().await;
    let arguments: Vec<String> = (0..4).map(|n| format!("{{\"a\":{n},\"b\":0}}")).collect();
    let mut script = Script::default();
    for arguments in &arguments {
        script = script.calls(&[("c", "calc__broken", arguments)]);
    }
    let script = script.says("The printer has no paper.");
    let (next, talk) = run(&bench, &script, &terms()).await;
    assert_eq!(answer(next), ("The printer has no paper.".into(), Some(StopReason::Failures)));
    assert!(told(&talk, "c").contains("out of paper"));
}

#[tokio::test]
async fn faults_of_the_model_that_pass_are_asked_again_and_others_are_not() {
    let bench = bench().await;
    let cut = |_: &ModelRequest| {
        let fault = Fault::new(Code::UpstreamUnavailable, "the stream was cut");
        Err(ModelError { fault, is_transient: true, retry_after: None })
    };
    let script =
        Script::default().fails(true, Some(Duration::from_millis(5))).line(cut).says("here I am");
    assert_eq!(answer(run(&bench, &script, &terms()).await.0).0, "here I am");

    let script = Script::default().fails(true, None).fails(true, None).fails(true, None);
    let (next, mut talk) = run(&bench, &script, &terms()).await;
    let error = next.unwrap_err();
    assert_eq!(error.code(), Code::UpstreamUnavailable);
    assert!(error.to_string().contains("asked 3 times"), "{error}");
    // Nothing is lost: the same conversation continues.
    let script = Script::default().says("back");
    let caller = Caller::local("default");
    let next = bench.engine.run_agent_loop(&caller, &script, &terms(), &mut talk).await;
    assert_eq!(answer(next).0, "back");
    assert_eq!(talk.messages.len(), 2);

    let script = Script::default().fails(false, None);
    assert!(run(&bench, &script, &terms()).await.0.is_err());
}

/// A model whose reply must be cut off.
struct Endless(bool);

#[async_trait]
impl Model for Endless {
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
async fn a_model_that_answers_for_ever_or_nothing_is_cut_off() {
    let bench = bench().await;
    let caller = Caller::local("default");
    let mut terms = terms();
    terms.model_request_policy.request_ms = 20;
    terms.model_request_policy.retries = 1;
    for (model, words) in [(Endless(true), "longer than"), (Endless(false), "within 20 ms")] {
        let mut talk = Conversation::from_user_text("?");
        let error =
            bench.engine.run_agent_loop(&caller, &model, &terms, &mut talk).await.unwrap_err();
        assert_eq!(error.code(), Code::UpstreamUnavailable);
        assert!(error.to_string().contains(words), "{error}");
    }
    let script = Script::default().says("").says(" ");
    let error = run(&bench, &script, &terms).await.0.unwrap_err();
    assert!(error.to_string().contains("answered with nothing"), "{error}");
    let huge = "x".repeat(5 << 20);
    let script = Script::default().line(|_| Ok(ModelReply { text: huge, ..ModelReply::default() }));
    assert!(run(&bench, &script, &terms).await.0.is_err());
}

#[tokio::test]
async fn arguments_that_were_cut_off_are_not_executed() {
    let bench = bench().await;
    let calls = vec![wanted(&("c1", "calc__add", r#"{"a":20,"b":2"#))];
    let script = Script::default()
        .line(|_| {
            Ok(ModelReply { calls, finish_reason: FinishReason::Length, ..ModelReply::default() })
        })
        .says("sorry");
    let (next, talk) = run(&bench, &script, &terms()).await;
    assert_eq!(answer(next).0, "sorry");
    assert!(told(&talk, "c1").contains("limit of tokens in the middle"), "{}", told(&talk, "c1"));
    assert_eq!(bench.made.load(Ordering::SeqCst), 0);
}

#[tokio::test]
async fn the_askers_own_tools_are_handed_back_beside_what_is_done_here() {
    let bench = bench().await;
    let mut terms = terms();
    let function = json!({ "name": "open_door", "parameters": { "type": "object" } });
    terms.caller_tools = vec![json!({ "type": "function", "function": function })];
    let script = Script::default()
        .calls(&[("c1", "calc__add", SUM), ("c2", "open_door", "{}")])
        .says("It is 42, and the door is open.");
    let (next, mut talk) = run(&bench, &script, &terms).await;
    let StepOutcome::CallerToolCalls(own) = next.unwrap() else { panic!() };
    assert_eq!(own, [wanted(&("c2", "open_door", "{}"))]);
    assert_eq!(told(&talk, "c1"), "42");
    talk.messages.push(json!({ "role": "tool", "tool_call_id": "c2", "content": "open" }));
    let caller = Caller::local("default");
    let next = bench.engine.run_agent_loop(&caller, &script, &terms, &mut talk).await;
    assert_eq!(answer(next).0, "It is 42, and the door is open.");
}

#[tokio::test]
async fn only_the_tools_that_were_named_are_offered_and_a_wrong_name_is_refused() {
    let bench = bench().await;
    let mut terms = terms();
    terms.tools = Some(vec!["calc.a*".into()]);
    let script = Script::default().calls(&[("c1", "calc__broken", SUM)]).says("no");
    let (next, talk) = run(&bench, &script, &terms).await;
    assert_eq!(answer(next).0, "no");
    assert_eq!(script.asked(0).tools.len(), 1);
    assert!(told(&talk, "c1").contains("TOOL_NOT_FOUND"));
    terms.tools = Some(vec!["calc.ad".into()]);
    let error = run(&bench, &Script::default(), &terms).await.0.unwrap_err();
    assert_eq!(error.code(), Code::ValidationError);
    assert!(error.to_string().contains("tools/0"), "{error}");
}

#[tokio::test]
async fn a_late_result_wakes_who_waits_only_for_it() {
    let (go, gone) = tokio::sync::oneshot::channel::<()>();
    let gone = Mutex::new(Some(gone));
    let slow = FnTool::new("job.start", "Takes long", move |_: Add| {
        let gone = gone.lock().take();
        async move {
            gone.unwrap().await.unwrap();
            Ok::<&str, String>("the report")
        }
    });
    let engine = Engine::builder().tool(slow.background()).start().await.unwrap();
    let go = Mutex::new(Some(go));
    let script = Script::default()
        .calls(&[("c1", "job__start", SUM)])
        .says("It runs; I wait.")
        .says("The report is there.");
    let seen = Mutex::new(Vec::new());
    let watch = |happening: LoopEvent<'_>| match happening {
        LoopEvent::ModelRequested { step, .. } => seen.lock().push(format!("ask {step}")),
        LoopEvent::ModelReplied { step: 2, .. } => {
            // The call ends only now.
            go.lock().take().unwrap().send(()).unwrap();
        }
        LoopEvent::LateResult { call, .. } => seen.lock().push(format!("late {}", call.call_id)),
        _ => {}
    };
    let (caller, terms) = (Caller::local("default"), terms());
    let mut talk = Conversation::from_user_text("Make a report");
    let mut turns = AgentLoop::new(&engine, &caller, &script, &terms, &watch).unwrap();
    assert_eq!(answer(turns.run(&mut talk).await).0, "The report is there.");
    assert_eq!(*seen.lock(), ["ask 1", "ask 2", "late c1", "ask 3"]);
    assert!(told(&talk, "c1").contains("pending"));
    let late = script.asked(2).messages.last().unwrap()["content"].clone();
    assert!(late.as_str().unwrap().contains("called as c1, has come:\nthe report"), "{late}");
}

#[tokio::test]
async fn results_that_come_late_together_share_the_tokens_of_one_answer() {
    let long = FnTool::new("job.start", "Tells much", |args: Add| async move {
        let lines: Vec<String> = (0..args.a).map(|n| format!("line {n} of text")).collect();
        Ok::<String, String>(lines.join("\n"))
    });
    let engine = Engine::builder().tool(long.background()).start().await.unwrap();
    let (much, little) = (r#"{"a":20000,"b":0}"#, r#"{"a":3,"b":0}"#);
    let calls = [("c1", much), ("c2", much), ("c3", little), ("c4", much)];
    let calls = calls.map(|(id, arguments)| (id, "job__start", arguments));
    let script = Script::default().calls(&calls).says("done");
    let (caller, mut terms) = (Caller::local("default"), terms());
    terms.execution_options.result_tokens = Some(1_000);
    let mut talk = Conversation::from_user_text("Tell me");
    let mut turns = AgentLoop::new(&engine, &caller, &script, &terms, &ignore_events).unwrap();
    assert_eq!(turns.run_step(&mut talk).await.unwrap(), StepOutcome::Continue);
    for call in talk.progress.pending_calls.clone() {
        engine.wait(&caller, &call.tool_call_id, 30_000).await.unwrap();
    }
    turns.request_reply(&mut talk).await.unwrap();
    let asked = script.asked(1).messages;
    let come =
        asked.iter().filter_map(|message| message["content"].as_str()?.split_once("come:\n"));
    let come: Vec<&str> = come.map(|(_, content)| content).collect();
    assert_eq!(come.len(), 4);
    assert_eq!(come[2], "line 0 of text\nline 1 of text\nline 2 of text", "what is short is whole");
    let tokens: Vec<usize> =
        come.iter().map(|content| toolcrib::results::tokens::count(content)).collect();
    assert!(tokens.iter().sum::<usize>() <= 1_000, "{tokens:?}");
    assert!(tokens.iter().enumerate().all(|(n, tokens)| n == 2 || *tokens > 200), "{tokens:?}");
}

#[tokio::test]
async fn tokens_are_counted_as_the_endpoint_says_and_limited() {
    let bench = bench().await;
    let mut terms = terms();
    terms.limits.tokens = 100;
    let usage = TokenUsage { prompt_tokens: 90, completion_tokens: 15 };
    let calls = vec![wanted(&("c1", "calc__add", SUM))];
    let script = Script::default()
        .line(move |_| Ok(ModelReply { calls, usage, ..ModelReply::default() }))
        .says("short");
    let (next, talk) = run(&bench, &script, &terms).await;
    assert_eq!(answer(next), ("short".into(), Some(StopReason::Tokens)));
    assert_eq!(told(&talk, "c1"), "42", "what was asked for is still done");
}

#[tokio::test]
async fn an_answer_with_more_calls_than_anybody_means_is_refused_whole() {
    let bench = bench().await;
    let many = |count: usize| {
        let call = |n| ToolCallRequest {
            id: format!("c{n}"),
            name: "calc__add".into(),
            arguments: format!("{{\"a\":{n},\"b\":0}}"),
        };
        ModelReply { calls: (0..count).map(call).collect(), ..ModelReply::default() }
    };
    let script = Script::default().line(move |_| Ok(many(1_000))).says("enough");
    let (next, talk) = run(&bench, &script, &terms()).await;
    assert_eq!(answer(next).0, "enough");
    assert_eq!(talk.messages.len(), 1 + 1 + 1_000 + 1, "every call is answered");
    let made = bench.made.load(Ordering::SeqCst);
    let script = Script::default().line(move |_| Ok(many(1_001)));
    let (next, talk) = run(&bench, &script, &terms()).await;
    let error = next.unwrap_err();
    assert_eq!(error.code(), Code::UpstreamUnavailable);
    assert!(error.to_string().contains("more than 1000 calls"), "{error}");
    assert_eq!(talk.messages.len(), 1, "the conversation is as it was");
    assert_eq!(bench.made.load(Ordering::SeqCst), made, "nothing of it is executed");
}
