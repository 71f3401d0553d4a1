//! Tests of matching, listening, saving and rendering.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;
use crate::domain::fault::Code;
use crate::domain::retry::ExecutionPolicyPatch;
use crate::domain::tool::{Effect, Executor, Risk};
use crate::results::tokens;

const NOW: u64 = 1_700_000_000_000;

fn json(text: &str) -> Json {
    Json::parse(text).unwrap()
}

fn tool(name: &str, description: &str) -> ToolDefinition {
    ToolDefinition {
        project: None,
        name: name.into(),
        description: description.into(),
        executor: Executor::BUILTIN,
        input_schema: json(r#"{"type":"object"}"#),
        output_schema: None,
        timeout_ms: 1_000,
        background: false,
        effect: Effect::Read,
        risk: Risk::Low,
        policy: ExecutionPolicyPatch::default(),
        fallback: vec![],
        metadata: None,
        binding: None,
    }
}

fn tool_call(call_id: &str, name: &str) -> ToolCall {
    ToolCall::new(call_id, name, json(r#"{"q": 1.10}"#)).at_ms(NOW)
}

fn answer(call_id: &str, text: &str) -> ToolResult {
    ToolResult::new(call_id, Ok(Json::from_serialize(text).unwrap())).at_ms(NOW + 5_000)
}

fn answers_of(context: &ToolCallContext) -> Vec<Option<String>> {
    let calls = context.tool_calls().iter();
    calls
        .map(|call| {
            let result = context.result_of(call)?;
            Some(result.outcome.as_ref().map_or_else(Fault::to_string, |d| d.text().to_owned()))
        })
        .collect()
}

#[test]
fn a_repeated_id_answers_the_newest_pending_call() {
    let mut context = ToolCallContext::new("run");
    context.set_tool_calls([tool_call("call_0", "a"), tool_call("call_1", "b")]);
    context.set_tool_call_result(answer("call_0", "first")).unwrap();
    context.set_tool_calls([tool_call("call_0", "c")]);
    context.set_tool_call_result(answer("call_0", "second")).unwrap();
    let expected_answer = |text: &str| Some(format!("\"{text}\""));
    assert_eq!(answers_of(&context), [expected_answer("first"), None, expected_answer("second")]);
    // With two pending calls, the newest is answered first, then the other.
    context.set_tool_calls([tool_call("call_1", "d")]);
    context.set_tool_call_result(answer("call_1", "new")).unwrap();
    context.set_tool_call_result(answer("call_1", "old")).unwrap();
    assert_eq!(
        answers_of(&context),
        [
            expected_answer("first"),
            expected_answer("old"),
            expected_answer("second"),
            expected_answer("new")
        ]
    );
    assert_eq!(context.pending_calls().count(), 0);
    let order: Vec<&str> = context.finished_calls().map(|(call, _)| call.name.as_str()).collect();
    assert_eq!(order, ["a", "c", "d", "b"], "in the order of the results");
}

#[test]
fn a_call_id_takes_precedence_over_the_caller_call_id() {
    let ticket = |n: u64| Some(CallId::min_at(n));
    let call_with = |n| ToolCall { tool_call_id: ticket(n), ..tool_call("call_0", "a") };
    let mut context = ToolCallContext::new("run");
    context.set_tool_calls([call_with(1), call_with(2)]);
    context.set_tool_calls([ToolCall { status: Status::Pending, ..call_with(1) }]);
    assert_eq!(context.tool_calls().len(), 2, "one call per call id");
    assert_eq!(context.tool_calls()[0].status, Status::Pending, "the call is updated");
    let first = ToolResult { tool_call_id: ticket(1), ..answer("call_0", "one") };
    context.set_tool_call_result(first).unwrap();
    assert_eq!(answers_of(&context), [Some("\"one\"".into()), None]);
    assert_eq!(context.tool_calls()[0].status, Status::Succeeded);
}

#[test]
fn unmatched_results_are_refused_and_duplicates_have_no_effect() {
    let received = Arc::new(AtomicUsize::new(0));
    let mut context = ToolCallContext::new("run");
    let count = received.clone();
    context.on_tool_call(move |_, _| {
        count.fetch_add(1, Ordering::SeqCst);
        Ok(())
    });
    let unknown = context.set_tool_call_result(answer("call_9", "x"));
    assert_eq!(unknown, Err(ResultMatchError::UnknownCall("call_9".into())));
    context.set_tool_calls([tool_call("call_0", "a")]);
    context.set_tool_call_result(answer("call_0", "x")).unwrap();
    context.set_tool_call_result(answer("call_0", "x")).unwrap();
    let other = context.set_tool_call_result(answer("call_0", "y"));
    assert_eq!(other, Err(ResultMatchError::AlreadyAnswered("call_0".into())));
    assert_eq!((context.tool_results().len(), received.load(Ordering::SeqCst)), (1, 1));
}

/// Collects logged lines.
#[derive(Clone, Default)]
struct Log(Arc<parking_lot::Mutex<Vec<String>>>);

impl tracing::Subscriber for Log {
    fn enabled(&self, _: &tracing::Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}

    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}

    fn event(&self, event: &tracing::Event<'_>) {
        struct Line(String);
        impl tracing::field::Visit for Line {
            fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn std::fmt::Debug) {
                self.0.push_str(&format!(" {field}={value:?}"));
            }
        }
        let mut line = Line(event.metadata().level().to_string());
        event.record(&mut line);
        self.0.lock().push(line.0);
    }

    fn enter(&self, _: &tracing::span::Id) {}

    fn exit(&self, _: &tracing::span::Id) {}
}

/// One test covers both cases: tracing caches per callsite whether it is enabled, decided by the
/// first thread that reaches it, so a second test without a subscriber could silence this one.
#[test]
fn a_failing_or_panicking_listener_is_logged_and_others_still_run() {
    let log = Log::default();
    let received = Arc::new(parking_lot::Mutex::new(Vec::new()));
    let note = |n: u32| {
        let received = received.clone();
        move |call: &ToolCall, result: &ToolResult| -> ListenerResult {
            received.lock().push((n, call.name.clone(), result.ok()));
            Ok(())
        }
    };
    let mut context = ToolCallContext::new("run");
    tracing::subscriber::with_default(log.clone(), || {
        context.on_tool_call(note(1));
        context.on_tool_call(|_, _| Err("no room".into()));
        context.on_tool_call(|_, _| panic!("out of cheese"));
        context.on_tool_call(note(2));
        context.set_tool_calls([tool_call("call_0", "a.tool"), tool_call("call_1", "b.tool")]);
        context.set_tool_call_result(answer("call_0", "x")).unwrap();
        let broke = ToolResult::new("call_1", Err(Fault::runtime("broke")));
        context.set_tool_call_result(broke).unwrap();
    });
    let all: Vec<_> = received.lock().clone();
    let (a, b) = ("a.tool".to_owned(), "b.tool".to_owned());
    assert_eq!(all, [(1, a.clone(), true), (2, a, true), (1, b.clone(), false), (2, b, false)]);
    assert_eq!(context.tool_results().len(), 2, "the results are stored");
    let lines = log.0.lock().clone();
    assert_eq!(lines.len(), 4, "{lines:?}");
    let reasons = ["no room", "it panicked: out of cheese"];
    let calls = [("a.tool", "call_0"), ("b.tool", "call_1")];
    let expected = calls.iter().flat_map(|call| reasons.iter().map(move |reason| (call, reason)));
    for (line, ((tool, call_id), reason)) in lines.iter().zip(expected) {
        assert!(line.starts_with("ERROR") && line.contains(reason), "{line}");
        assert!(line.contains(tool) && line.contains(call_id), "{line}");
    }
}

#[test]
fn a_context_is_saved_and_read_back() {
    let mut context = ToolCallContext::new("run");
    let rich = ToolDefinition {
        output_schema: Some(json("true")),
        metadata: Some(json(r#"{"a":1.10}"#)),
        background: true,
        ..tool("a.b", "Does it")
    };
    context.set_tool_definitions([rich.clone(), tool("c", "")]);
    context.set_tool_calls([tool_call("call_0", "a.b").background(), tool_call("call_1", "c")]);
    context.set_tool_call_result(ToolResult::new("call_0", Ok(json("[1.10]")))).unwrap();
    let fault = Fault::new(Code::PermissionDenied, "no").without_side_effect();
    let fault = fault.with_detail(serde_json::json!({ "rule": 7 }));
    context.set_tool_call_result(ToolResult::new("call_1", Err(fault))).unwrap();
    context.set_tool_calls([tool_call("call_0", "c")]);
    let text = serde_json::to_string(&context).unwrap();
    assert!(text.contains("[1.10]"), "the text is unchanged: {text}");
    let mut read: ToolCallContext = serde_json::from_str(&text).unwrap();
    assert_eq!(read.tool_definitions(), context.tool_definitions());
    assert_eq!(read.tool_calls(), context.tool_calls());
    assert_eq!(read.tool_results(), context.tool_results());
    // The restored context continues where the saved one stopped.
    read.set_tool_call_result(answer("call_0", "later")).unwrap();
    assert_eq!(read.pending_calls().count(), 0);
    assert_eq!(read.result_of(&read.tool_calls()[0]).unwrap().outcome, Ok(json("[1.10]")));
}

/// Two finished calls, one pending call, three tools.
fn sample_context() -> ToolCallContext {
    let mut context = ToolCallContext::new("run");
    context.set_tool_definitions([
        tool("calc.add", "Adds two integers. Nothing else."),
        ToolDefinition { background: true, ..tool("report.build", "Builds\na report") },
        tool("mute", ""),
    ]);
    context.set_tool_calls([tool_call("call_0", "report.build").background()]);
    context.set_tool_calls([tool_call("call_0", "calc.add"), tool_call("call_1", "mute")]);
    context.set_tool_call_result(answer("call_0", "42")).unwrap();
    let fault = Fault::runtime("no paper");
    let failed = ToolResult::new("call_1", Err(fault)).at_ms(NOW + 60_000);
    context.set_tool_call_result(failed).unwrap();
    context
}

#[test]
fn a_prompt_lists_tools_pending_calls_and_recent_results() {
    let prompt = sample_context().prompt(DEFAULT_BUDGET_TOKENS, NOW + 65_000);
    let lines: Vec<&str> = prompt.text.lines().collect();
    assert_eq!(lines[0], "# Tools");
    assert!(lines[1].contains("async runs in the background"), "{}", lines[1]);
    assert_eq!(
        lines[2..],
        [
            "",
            "## Available (3)",
            "- calc__add (sync): Adds two integers",
            "- report__build (async): Builds",
            "- mute (sync)",
            "",
            "## Pending (1)",
            "- report__build (async, in the background), call_id call_0, pending for 1 min 5 s: \
             {\"q\": 1.10}",
            "",
            "## Just finished (2)",
            "- mute, call_id call_1, 5 s ago, failed: RUNTIME_ERROR: no paper",
            "- calc__add, call_id call_0, 1 min 0 s ago, ok: 42",
        ]
    );
    assert_eq!(prompt.tokens, tokens::count(&prompt.text));
    assert_eq!(
        prompt,
        sample_context().prompt(DEFAULT_BUDGET_TOKENS, NOW + 65_000),
        "the prompt is deterministic"
    );
}

#[test]
fn a_prompt_fits_any_budget_and_states_what_it_omits() {
    let mut context = sample_context();
    let many = (0..300).map(|n| tool(&format!("tool.number_{n}"), "One of very many tools"));
    context.set_tool_definitions(many);
    for n in 0..30 {
        context.set_tool_calls([tool_call(&format!("done_{n}"), "tool.number_1")]);
        let long = "a long result with many words ".repeat(200);
        context.set_tool_call_result(answer(&format!("done_{n}"), &long)).unwrap();
        context.set_tool_calls([tool_call(&format!("open_{n}"), "tool.number_2").background()]);
    }
    let mut before = 0;
    for budget in (1..200).chain([256, 300, 500, 1_000, 2_000, 8_000, 32_000]) {
        let prompt = context.prompt(budget, NOW);
        assert!(tokens::count(&prompt.text) <= budget, "{budget}: {}", prompt.tokens);
        assert_eq!(prompt.tokens, tokens::count(&prompt.text));
        let omitted = prompt.omitted;
        let states = |count: usize, title: &str, note: &str| {
            let phrases = [format!("and {count} {note}"), format!("{title}: {count}, not shown")];
            budget < 40 || count == 0 || phrases.iter().any(|phrase| prompt.text.contains(phrase))
        };
        let text = &prompt.text;
        assert!(states(omitted.tools, "Available", "more tools"), "{budget}: {text}");
        assert!(states(omitted.pending, "Pending", "more that have not"), "{budget}: {text}");
        assert!(states(omitted.finished, "Just finished", "that came before"), "{budget}: {text}");
        assert!(budget < 100 || omitted.pending < 31, "what is pending comes first: {text}");
        if budget >= 500 {
            assert!(
                omitted.tools < 300 && omitted.pending < 31 && omitted.finished < 32,
                "{omitted:?}"
            );
            assert!(prompt.tokens > before, "a larger budget shows more");
            before = prompt.tokens;
        }
    }
    let everything = context.prompt(100_000, NOW).omitted;
    assert_eq!((everything.tools, everything.pending), (0, 0));
    assert_eq!(everything.finished, 32 - 10, "only the newest results are listed");
}

#[test]
fn every_call_of_a_conversation_is_answered_under_a_unique_id() {
    let context = sample_context();
    let openai = context.to_openai(None, NOW + 65_000);
    let messages: Vec<serde_json::Value> = openai.messages.iter().map(Json::to_value).collect();
    assert_eq!(messages.len(), 5, "two turns: 1 + 1 and 1 + 2 messages");
    assert_eq!(
        messages[0],
        serde_json::json!({ "role": "assistant", "content": null, "tool_calls": [{
            "id": "call_0", "type": "function",
            "function": { "name": "report__build", "arguments": "{\"q\": 1.10}" }
        }] })
    );
    assert_eq!(
        (&messages[1]["role"], &messages[1]["tool_call_id"]),
        (&"tool".into(), &"call_0".into())
    );
    let text = messages[1]["content"].as_str().unwrap();
    assert!(text.starts_with("still running in the background for 1 min 5 s"), "{text}");
    let ids: Vec<&str> =
        [1, 3, 4].iter().map(|n| messages[*n]["tool_call_id"].as_str().unwrap()).collect();
    assert_eq!(ids, ["call_0", "call_n2", "call_1"], "call_0 was used before");
    assert_eq!(messages[2]["tool_calls"][0]["id"], "call_n2");
    assert_eq!(messages[3]["content"], "42");
    assert!(messages[4]["content"].as_str().unwrap().contains("no paper"));
    assert_eq!(openai.tools[0].to_value()["function"]["name"], "calc__add");

    let anthropic = context.to_anthropic(None, NOW + 65_000);
    let messages: Vec<serde_json::Value> = anthropic.messages.iter().map(Json::to_value).collect();
    let roles: Vec<&str> = messages.iter().map(|m| m["role"].as_str().unwrap()).collect();
    assert_eq!(roles, ["assistant", "user", "assistant", "user"]);
    for pair in messages.chunks(2) {
        let collect_ids = |message: &serde_json::Value, field: &str| -> Vec<String> {
            let blocks = message["content"].as_array().unwrap().iter();
            blocks.map(|block| block[field].as_str().unwrap().to_owned()).collect()
        };
        assert_eq!(collect_ids(&pair[0], "id"), collect_ids(&pair[1], "tool_use_id"));
    }
    assert_eq!(messages[2]["content"][0]["input"], serde_json::json!({ "q": 1.10 }));
    assert_eq!(messages[3]["content"][1]["is_error"], true);
}

#[test]
fn the_results_of_a_conversation_stay_within_their_budget() {
    let mut context = ToolCallContext::new("run");
    for n in 0..4 {
        let id = format!("call_{n}");
        let ticket = Some(CallId::min_at(n));
        context.set_tool_calls([ToolCall { tool_call_id: ticket, ..tool_call(&id, "a") }]);
        let long = "many words of a result ".repeat(if n == 0 { 1 } else { 500 });
        context.set_tool_call_result(answer(&id, &long)).unwrap();
    }
    let contents = |budget| -> Vec<String> {
        let messages = context.to_openai(budget, NOW).messages;
        let values = messages.iter().map(Json::to_value).filter(|m| m["role"] == "tool");
        values.map(|m| m["content"].as_str().unwrap().to_owned()).collect()
    };
    for budget in [1, 10, 100, 500, 1_000] {
        let together: usize = contents(Some(budget)).iter().map(|c| tokens::count(c)).sum();
        assert!(together <= budget, "{budget}: {together}");
    }
    let some = contents(Some(500));
    assert_eq!(some[0], "many words of a result ", "the short result is not shortened");
    assert!(some[1].contains("result__read"), "{}", some[1]);
    assert!(!some[1].contains("result.read"), "{}", some[1]);
    assert!(contents(None)[1].len() > 10_000);
}
