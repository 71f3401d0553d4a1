//! Tests of a batch's response: formats, budgets, limits, names.

use serde_json::{Value, json};
use toolcrib::calls::{BatchEntryState, BatchMode};
use toolcrib::domain::fault::Code;
use toolcrib::results::tokens;
use toolcrib::{Batch, Effect, Engine, EngineLimits, Fault, FnTool, Json};

use super::{
    Numbered, batch, caller, endless_tool, envelope, even_only_tool, run, stored_call_count,
};

#[tokio::test]
async fn each_call_format_gets_a_message_in_the_same_format() {
    let engine = Engine::builder().tool(even_only_tool()).start().await.unwrap();
    let entries = [
        json!({ "id": "call_a", "type": "function",
                "function": { "name": "t__picky", "arguments": "{\"n\":2}" } }),
        json!({ "type": "function_call", "id": "fc_1", "call_id": "call_b", "name": "t.picky",
                "arguments": "{\"n\":4}" }),
        json!({ "type": "tool_use", "id": "toolu_c", "name": "t__picky", "input": { "n": 5 } }),
        json!({ "call_id": "d", "name": "t.picky", "args": { "n": 6 }, "retry": 0 }),
        json!({ "function": { "name": "t__picky", "arguments": "" } }),
    ];
    let answer = run(&engine, batch(BatchMode::Parallel, entries)).await;
    let text: Vec<Value> = answer.messages.iter().map(Json::to_value).collect();
    assert_eq!(text[0], json!({ "role": "tool", "tool_call_id": "call_a", "content": "2" }));
    let item = json!({ "type": "function_call_output", "call_id": "call_b", "output": "4" });
    assert_eq!(text[1], item);
    assert_eq!((&text[2]["type"], &text[2]["is_error"]), (&json!("tool_result"), &json!(true)));
    assert_eq!(text[2]["tool_use_id"], "toolu_c");
    assert_eq!((&text[3]["call_id"], &text[3]["data"]), (&json!("d"), &json!(6)));
    assert_eq!(
        text[4]["tool_call_id"], "call_4",
        "a missing id is replaced by the entry's position"
    );
    let call = answer.results[0].call().unwrap();
    assert_eq!(
        (call.tool_name.as_str(), call.origin.caller_call_id.as_deref()),
        ("t.picky", Some("call_a"))
    );
}

#[tokio::test]
async fn messages_stay_within_the_token_budget_and_results_are_complete() {
    let long = FnTool::new("t.long", "A long text", |args: Numbered| async move {
        Ok::<_, Fault>("many words that nobody needs ".repeat(args.n))
    })
    .effect(Effect::Read);
    let engine = Engine::builder().tool(long).tool(even_only_tool()).start().await.unwrap();
    let model = |n: usize| {
        json!({ "id": format!("c{n}"), "type": "function",
                "function": { "name": "t__long", "arguments": format!("{{\"n\":{n}}}") } })
    };
    let entries = vec![model(1), model(1_000), model(2_000), envelope("t.picky", 3)];
    for budget in [1, 50, 600, 2_000] {
        let requested = batch(BatchMode::Parallel, entries.clone());
        let answer = run(&engine, Batch { budget_tokens: Some(budget), ..requested }).await;
        let contents = answer.messages[..3].iter().map(Json::to_value);
        let used: usize =
            contents.map(|text| tokens::count(text["content"].as_str().unwrap())).sum();
        assert!(used <= budget, "{used} of {budget}");
        let digested: Vec<bool> =
            answer.results.iter().map(|settled| settled.is_digested).collect();
        assert_eq!(&digested[1..3], [true, true]);
        if budget >= 600 {
            assert!(!digested[0] && !digested[3], "small results are not shortened");
            let digest = answer.messages[1].to_value();
            let digest = digest["content"].as_str().unwrap().to_owned();
            let id = answer.results[1].call().unwrap().id.to_string();
            assert!(digest.contains(&id), "the digest names the call: {digest}");
        }
        let whole = answer.results[2].data().unwrap().to_value();
        assert_eq!(whole.as_str().unwrap().len(), 2_000 * 29);
    }
    let answer = run(&engine, batch(BatchMode::Parallel, entries)).await;
    assert!(answer.results.iter().all(|settled| !settled.is_digested));
    assert_eq!(answer.messages[1].to_value()["content"].as_str().unwrap().len(), 1_000 * 29);
}

/// A tool that fails with a message and details larger than any budget.
fn verbose_failing_tool() -> FnTool {
    FnTool::new("t.wordy", "Fails at length", |_: Numbered| async move {
        let fault = Fault::runtime("it went wrong, and here is why. ".repeat(500));
        let detail = json!({ "trace": "a line of many\n".repeat(500) });
        Err::<usize, _>(fault.retryable(false).with_detail(detail))
    })
    .effect(Effect::Read)
}

#[tokio::test]
async fn a_failure_message_stays_within_the_budget_its_result_is_complete() {
    let engine = Engine::builder().tool(verbose_failing_tool()).start().await.unwrap();
    for budget in [60, 200] {
        let requested = batch(BatchMode::Parallel, [envelope("t.wordy", 1)]);
        let answer = run(&engine, Batch { budget_tokens: Some(budget), ..requested }).await;
        let message = &answer.messages[0];
        let used = tokens::count(message.text());
        assert!(used <= budget, "{used} of {budget}: {message:?}");
        let error = &message.to_value()["error"];
        assert_eq!((&error["code"], &error["detail"]), (&json!("RUNTIME_ERROR"), &Value::Null));
        let text = error["message"].as_str().unwrap();
        assert!(text.starts_with("it went") && text.ends_with('…'), "{text}");
        let whole = answer.results[0].error().unwrap();
        assert!(whole.message.len() > 10_000 && whole.detail.is_some());
    }
}

#[tokio::test]
async fn failures_and_tickets_over_the_budget_are_short_and_valid() {
    let builder = Engine::builder().tool(verbose_failing_tool()).tool(endless_tool("t.stuck"));
    let engine = builder.start().await.unwrap();
    let model = |name: &str| {
        json!({ "id": "c", "type": "function",
                "function": { "name": name, "arguments": "{\"n\":1}" } })
    };
    for budget in 1..=200 {
        let requested = batch(BatchMode::Unordered, [model("t__wordy"), model("t__stuck")]);
        let requested = Batch { budget_tokens: Some(budget), wait_ms: Some(0), ..requested };
        let answer = run(&engine, requested).await;
        let content = |n: usize| {
            let message = answer.messages[n].to_value();
            message["content"].as_str().unwrap().to_owned()
        };
        let used = tokens::count(&content(0)) + tokens::count(&content(1));
        assert!(used <= budget, "{used} of {budget}");
        for (settled, text) in answer.results.iter().zip([content(0), content(1)]) {
            if text.starts_with('{') {
                assert!(serde_json::from_str::<Value>(&text).is_ok(), "{budget}: {text}");
            }
            let id = settled.call().map(|call| call.id.to_string()).unwrap_or_default();
            assert_eq!(text.contains("tc_"), !id.is_empty() && text.contains(&id), "{text}");
            if matches!(settled.state, BatchEntryState::Ended { .. }) && budget >= 40 {
                let marked = text.starts_with("RUNTIME_ERROR: it went") && text.ends_with('…');
                assert!(marked, "{budget}: {text}");
            }
        }
    }
}

#[tokio::test]
async fn results_beyond_the_batch_size_limit_are_omitted() {
    let long = FnTool::new("t.long", "A long text", |args: Numbered| async move {
        Ok::<_, Fault>("x".repeat(args.n))
    });
    let limits = EngineLimits { max_batch_bytes: 1_000, ..EngineLimits::default() };
    let engine = Engine::builder().tool(long).limits(limits).start().await.unwrap();
    let entries = [600, 600, 100].map(|n| envelope("t.long", n));
    let answer = run(&engine, batch(BatchMode::Serial, entries)).await;
    assert!(answer.results.iter().all(|settled| settled.ok() == Some(true)));
    let has_data: Vec<bool> = answer.results.iter().map(|s| s.data().is_some()).collect();
    assert_eq!(has_data, [true, false, true]);
    let BatchEntryState::Ended { call, omitted_bytes: omitted } = &answer.results[1].state else {
        panic!()
    };
    assert_eq!(*omitted, Some(602));
    assert!(answer.messages[1].text().contains(call.id.as_str()));
    let whole = engine.calls().call(&caller(), &call.id).await.unwrap();
    assert!(whole.outcome.as_ref().unwrap().data.is_some());
}

#[tokio::test]
async fn an_invalid_batch_is_refused_with_the_name_of_the_field() {
    let engine = Engine::builder().tool(even_only_tool()).start().await.unwrap();
    let good = batch(BatchMode::Serial, [envelope("t.picky", 2)]);
    let many = vec![Json::from_value(&envelope("t.picky", 2)); 257];
    let bad = [
        ("tool_calls", Batch { entries: Vec::new(), ..good.clone() }),
        ("tool_calls", Batch { entries: many, ..good.clone() }),
        ("max_parallel", Batch { max_parallel: Some(0), ..good.clone() }),
        ("max_parallel", Batch { max_parallel: Some(129), ..good.clone() }),
        ("budget_tokens", Batch { budget_tokens: Some(0), ..good.clone() }),
        ("run_id", Batch { run_id: String::new(), ..good.clone() }),
        ("idempotency_key", Batch { idempotency_key: Some("k".repeat(241)), ..good.clone() }),
    ];
    for (field, batch) in bad {
        let error = engine.calls().run_batch(&caller(), batch).await.unwrap_err();
        let toolcrib::Error::Refused { fault, .. } = error else { panic!() };
        assert_eq!(fault.code, Code::ValidationError);
        assert!(fault.message.contains(field), "{fault}");
        assert_eq!(fault.detail.unwrap()["pointer"], format!("/{field}"));
    }
    assert_eq!(stored_call_count(&engine).await, 0, "nothing was stored");
}

#[tokio::test]
async fn tools_are_found_by_name_and_by_model_facing_name() {
    let engine = Engine::builder()
        .tool(even_only_tool())
        .tool(endless_tool("a.b"))
        .tool(endless_tool("a__b"));
    let engine = engine.start().await.unwrap();
    let formats = toolcrib::model_formats::ToolFormat::ALL;
    let definitions = engine.registry().model_tool_definitions(&caller(), formats[2]);
    let names: Vec<String> = definitions
        .iter()
        .map(|tool| tool.to_value()["name"].as_str().unwrap().to_owned())
        .collect();
    assert_eq!(names[2], "t__picky");
    assert!(names[0].starts_with("a__b_") && names[1].starts_with("a__b_"), "{names:?}");
    let found =
        |name: &str| engine.registry().tool(&caller(), name).unwrap().definition.name.clone();
    assert_eq!(found(&names[0]), "a.b");
    assert_eq!(found(&names[1]), "a__b");
    assert_eq!((found("a__b").as_str(), found("t__picky").as_str()), ("a__b", "t.picky"));
    for format in formats {
        assert_eq!(engine.registry().model_tool_definitions(&caller(), format).len(), 3);
    }
}
