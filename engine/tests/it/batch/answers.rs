//! Tests of a batch's response: formats, budgets, limits, names.

use serde_json::{Value, json};
use toolcrib::calls::batch::{BatchEntryState, BatchMode};
use toolcrib::domain::fault::Code;
use toolcrib::results::tokens;
use toolcrib::{Batch, Effect, Engine, EngineLimits, Fault, FnTool, Json};

use super::{Numbered, batch, caller, envelope, picky, run, stored, stuck};

#[tokio::test]
async fn each_form_is_answered_in_its_own() {
    let engine = Engine::builder().tool(picky()).start().await.unwrap();
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
    let said: Vec<Value> = answer.messages.iter().map(Json::to_value).collect();
    assert_eq!(said[0], json!({ "role": "tool", "tool_call_id": "call_a", "content": "2" }));
    let item = json!({ "type": "function_call_output", "call_id": "call_b", "output": "4" });
    assert_eq!(said[1], item);
    assert_eq!((&said[2]["type"], &said[2]["is_error"]), (&json!("tool_result"), &json!(true)));
    assert_eq!(said[2]["tool_use_id"], "toolu_c");
    assert_eq!((&said[3]["call_id"], &said[3]["data"]), (&json!("d"), &json!(6)));
    assert_eq!(said[4]["tool_call_id"], "call_4", "a model that gives no id gets its place");
    let call = answer.results[0].call().unwrap();
    assert_eq!(
        (call.tool_name.as_str(), call.origin.caller_call_id.as_deref()),
        ("t.picky", Some("call_a"))
    );
}

#[tokio::test]
async fn messages_keep_to_their_budget_and_results_are_whole() {
    let long = FnTool::new("t.long", "A long text", |args: Numbered| async move {
        Ok::<_, Fault>("many words that nobody needs ".repeat(args.n))
    })
    .effect(Effect::Read);
    let engine = Engine::builder().tool(long).tool(picky()).start().await.unwrap();
    let model = |n: usize| {
        json!({ "id": format!("c{n}"), "type": "function",
                "function": { "name": "t__long", "arguments": format!("{{\"n\":{n}}}") } })
    };
    let entries = vec![model(1), model(1_000), model(2_000), envelope("t.picky", 3)];
    for budget in [1, 50, 600, 2_000] {
        let asked = batch(BatchMode::Parallel, entries.clone());
        let answer = run(&engine, Batch { budget_tokens: Some(budget), ..asked }).await;
        let contents = answer.messages[..3].iter().map(Json::to_value);
        let used: usize =
            contents.map(|said| tokens::count(said["content"].as_str().unwrap())).sum();
        assert!(used <= budget, "{used} of {budget}");
        let digested: Vec<bool> =
            answer.results.iter().map(|settled| settled.is_digested).collect();
        assert_eq!(&digested[1..3], [true, true]);
        if budget >= 600 {
            assert!(!digested[0] && !digested[3], "the small ones are whole");
            let digest = answer.messages[1].to_value();
            let digest = digest["content"].as_str().unwrap().to_owned();
            let id = answer.results[1].call().unwrap().id.to_string();
            assert!(digest.contains(&id), "it says how to get the rest: {digest}");
        }
        let whole = answer.results[2].data().unwrap().to_value();
        assert_eq!(whole.as_str().unwrap().len(), 2_000 * 29);
    }
    let answer = run(&engine, batch(BatchMode::Parallel, entries)).await;
    assert!(answer.results.iter().all(|settled| !settled.is_digested));
    assert_eq!(answer.messages[1].to_value()["content"].as_str().unwrap().len(), 1_000 * 29);
}

/// A tool that fails with a message and details larger than any budget.
fn wordy() -> FnTool {
    FnTool::new("t.wordy", "Fails at length", |_: Numbered| async move {
        let fault = Fault::runtime("it went wrong, and here is why. ".repeat(500));
        let detail = json!({ "trace": "a line of many\n".repeat(500) });
        Err::<usize, _>(fault.retryable(false).with_detail(detail))
    })
    .effect(Effect::Read)
}

#[tokio::test]
async fn a_failed_envelope_keeps_to_the_budget_and_its_result_is_whole() {
    let engine = Engine::builder().tool(wordy()).start().await.unwrap();
    for budget in [60, 200] {
        let asked = batch(BatchMode::Parallel, [envelope("t.wordy", 1)]);
        let answer = run(&engine, Batch { budget_tokens: Some(budget), ..asked }).await;
        let message = &answer.messages[0];
        let used = tokens::count(message.text());
        assert!(used <= budget, "{used} of {budget}: {message:?}");
        let error = &message.to_value()["error"];
        assert_eq!((&error["code"], &error["detail"]), (&json!("RUNTIME_ERROR"), &Value::Null));
        let said = error["message"].as_str().unwrap();
        assert!(said.starts_with("it went") && said.ends_with('…'), "{said}");
        let whole = answer.results[0].error().unwrap();
        assert!(whole.message.len() > 10_000 && whole.detail.is_some());
    }
}

#[tokio::test]
async fn over_the_budget_failures_and_tickets_are_short_and_not_broken() {
    let builder = Engine::builder().tool(wordy()).tool(stuck("t.stuck"));
    let engine = builder.start().await.unwrap();
    let model = |name: &str| {
        json!({ "id": "c", "type": "function",
                "function": { "name": name, "arguments": "{\"n\":1}" } })
    };
    for budget in 1..=200 {
        let asked = batch(BatchMode::Unordered, [model("t__wordy"), model("t__stuck")]);
        let asked = Batch { budget_tokens: Some(budget), wait_ms: Some(0), ..asked };
        let answer = run(&engine, asked).await;
        let content = |n: usize| {
            let message = answer.messages[n].to_value();
            message["content"].as_str().unwrap().to_owned()
        };
        let used = tokens::count(&content(0)) + tokens::count(&content(1));
        assert!(used <= budget, "{used} of {budget}");
        for (settled, said) in answer.results.iter().zip([content(0), content(1)]) {
            if said.starts_with('{') {
                assert!(serde_json::from_str::<Value>(&said).is_ok(), "{budget}: {said}");
            }
            let id = settled.call().map(|call| call.id.to_string()).unwrap_or_default();
            assert_eq!(said.contains("tc_"), !id.is_empty() && said.contains(&id), "{said}");
            if matches!(settled.state, BatchEntryState::Ended { .. }) && budget >= 40 {
                let marked = said.starts_with("RUNTIME_ERROR: it went") && said.ends_with('…');
                assert!(marked, "{budget}: {said}");
            }
        }
    }
}

#[tokio::test]
async fn results_that_are_too_much_together_are_fetched_by_their_tickets() {
    let long = FnTool::new("t.long", "A long text", |args: Numbered| async move {
        Ok::<_, Fault>("x".repeat(args.n))
    });
    let limits = EngineLimits { max_batch_bytes: 1_000, ..EngineLimits::default() };
    let engine = Engine::builder().tool(long).limits(limits).start().await.unwrap();
    let entries = [600, 600, 100].map(|n| envelope("t.long", n));
    let answer = run(&engine, batch(BatchMode::Serial, entries)).await;
    assert!(answer.results.iter().all(|settled| settled.ok() == Some(true)));
    let here: Vec<bool> = answer.results.iter().map(|s| s.data().is_some()).collect();
    assert_eq!(here, [true, false, true]);
    let BatchEntryState::Ended { call, omitted_bytes: left_out_bytes } = &answer.results[1].state
    else {
        panic!()
    };
    assert_eq!(*left_out_bytes, Some(602));
    assert!(answer.messages[1].text().contains(call.id.as_str()));
    let whole = engine.call(&caller(), &call.id).await.unwrap();
    assert!(whole.outcome.as_ref().unwrap().data.is_some());
}

#[tokio::test]
async fn a_batch_that_makes_no_sense_is_refused_by_its_field() {
    let engine = Engine::builder().tool(picky()).start().await.unwrap();
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
        let error = engine.run_batch(&caller(), batch).await.unwrap_err();
        let toolcrib::Error::Refused { fault, .. } = error else { panic!() };
        assert_eq!(fault.code, Code::ValidationError);
        assert!(fault.message.contains(field), "{fault}");
        assert_eq!(fault.detail.unwrap()["pointer"], format!("/{field}"));
    }
    assert_eq!(stored(&engine).await, 0, "nothing of it was done");
}

#[tokio::test]
async fn tools_are_known_by_both_names() {
    let engine = Engine::builder().tool(picky()).tool(stuck("a.b")).tool(stuck("a__b"));
    let engine = engine.start().await.unwrap();
    let formats = toolcrib::model_formats::ToolFormat::ALL;
    let told = engine.model_tool_definitions(&caller(), formats[2]);
    let names: Vec<String> =
        told.iter().map(|tool| tool.to_value()["name"].as_str().unwrap().to_owned()).collect();
    assert_eq!(names[2], "t__picky");
    assert!(names[0].starts_with("a__b_") && names[1].starts_with("a__b_"), "{names:?}");
    let found = |name: &str| engine.tool(&caller(), name).unwrap().definition.name.clone();
    assert_eq!(found(&names[0]), "a.b");
    assert_eq!(found(&names[1]), "a__b");
    assert_eq!((found("a__b").as_str(), found("t__picky").as_str()), ("a__b", "t.picky"));
    for format in formats {
        assert_eq!(engine.model_tool_definitions(&caller(), format).len(), 3);
    }
}
