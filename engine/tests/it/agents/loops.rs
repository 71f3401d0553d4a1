//! Runs of the loop that hand work on: notices of delegated work, provisioning, handoffs in
//! replays, and the tool that ends a run.

use toolcrib::calls::batch::{Batch, BatchMode};
use toolcrib::domain::directory::usage_limits::{LimitKind, LimitValues};
use toolcrib::domain::utp::Route;
use toolcrib::{Fault, FnTool};

use super::*;

/// Empty arguments: models call tools with objects.
#[derive(serde::Deserialize, schemars::JsonSchema)]
struct Nothing {}

fn call_with(name: &str, args: &Value) -> ModelReply {
    let call = tool_call_request(&("c1", name, &args.to_string()));
    ModelReply { calls: vec![call], finish_reason: FinishReason::ToolCalls, ..says("") }
}

fn tool_names(prompt: &ModelRequest) -> Vec<String> {
    let tools = prompt.tools.iter().map(Json::to_value);
    tools.filter_map(|tool| tool["function"]["name"].as_str().map(str::to_owned)).collect()
}

#[tokio::test]
async fn every_run_can_end_itself_also_without_other_tools() {
    let engine = engine_with(&Arc::default(), vec![], |prompt| {
        assert_eq!(tool_names(prompt), ["run__finish"]);
        ready(call_with("run__finish", &json!({ "answer": "That is all." })))
    })
    .await;
    let request = RunRequest { tools: Some(Vec::new()), ..RunRequest::default() };
    let id = start_run(&engine, request).await;
    let run = wait_for_end(&engine, &id).await;
    assert_eq!((run.status, answer_of(&run)), (RunStatus::Succeeded, "That is all."));
}

/// A root that hands a task to `b`, and answers at once.
fn delegating(prompt: &ModelRequest) -> BoxFuture<'static, ModelReply> {
    let late = |message: &&Value| {
        message["role"] == "user" && message["content"].as_str().unwrap().contains("b is done")
    };
    let notices = prompt.messages.iter().filter(late).count();
    ready(match (role(prompt).as_str(), tool_results(prompt).is_empty(), notices) {
        ("root", true, _) => {
            let args = json!({ "target_strategy": "new", "target_ref": "b", "instruction": "x" });
            call_with("delegate_async", &args)
        }
        ("root", false, 0) => says("I wait."),
        ("root", ..) => says(format!("{notices} notice")),
        _ => says("b is done"),
    })
}

#[tokio::test]
async fn a_run_gets_the_notice_of_a_task_that_it_handed_on() {
    let engine = engine_with(&Arc::default(), vec![agent("b")], delegating).await;
    let id = start_run(&engine, RunRequest::default()).await;
    let run = wait_for_end(&engine, &id).await;
    assert_eq!(answer_of(&run), "1 notice", "{run:?}");
    let tree = engine.runs().trees().find_tree(&caller(), &id).await.unwrap();
    assert_eq!((tree.run_count, tree.open_count), (2, 0));
}

#[tokio::test]
async fn a_notice_survives_the_process_of_its_run() {
    let store: Arc<MemoryStore> = Arc::default();
    let engine = engine_with(&store, vec![agent("b")], |prompt| match role(prompt).as_str() {
        "b" => Box::pin(std::future::pending()),
        _ => delegating(prompt),
    })
    .await;
    let id = start_run(&engine, RunRequest::default()).await;
    until("the run waits for b", async || {
        let run = engine.runs().find_run(&caller(), &id).await.unwrap();
        (run.status == RunStatus::Waiting).then_some(())
    })
    .await;
    engine.shut_down(Duration::ZERO).await;
    drop(engine);
    let engine = engine_with(&store, vec![], delegating).await;
    assert_eq!(answer_of(&wait_for_end(&engine, &id).await), "1 notice");
}

#[tokio::test]
async fn an_agent_provisions_nothing_beyond_its_own_bounds() {
    let profile =
        json!({ "instructions": "x", "tools": ["calculation.*"], "limits": { "tokens": 9_000 } });
    let engine_for = |profile: Value| async move {
        let mut maker = agent("maker");
        maker.profile.tools = Some(vec!["provision_agent".into(), "weather.*".into()]);
        maker.profile.limits =
            AgentLimits { tokens: Some(800), depth: Some(3), ..AgentLimits::default() };
        engine_with(&Arc::default(), vec![maker], move |prompt| {
            let results = tool_results(prompt);
            ready(match results.is_empty() {
                true => {
                    let args = json!({ "action": "create", "agent_id": "new", "profile": profile });
                    call_with("provision_agent", &args)
                }
                false => says(results.join(" ")),
            })
        })
        .await
    };
    let engine = engine_for(profile).await;
    let call = call_agent(&engine, "maker", json!({ "instruction": "x" })).await;
    let answer = call.outcome.as_ref().unwrap().data.as_ref().unwrap().text().to_owned();
    assert!(answer.contains("exceeds_creator"), "{answer}");

    let engine = engine_for(json!({ "instructions": "x" })).await;
    call_agent(&engine, "maker", json!({ "instruction": "x" })).await;
    let entry = engine.roster().agent_entry(&caller(), "new").unwrap();
    let profile = entry.definition.unwrap().profile;
    assert_eq!(profile.tools.unwrap(), ["provision_agent", "weather.*"]);
    assert_eq!((profile.limits.tokens, profile.limits.depth), (Some(800), Some(2)));
}

#[tokio::test]
async fn a_replay_follows_the_handoffs_of_its_run() {
    let mut billing = agent("billing");
    billing.profile.tools = Some(vec!["weather.*".into()]);
    let engine = engine_with(&Arc::default(), vec![billing], |prompt| {
        ready(match role(prompt).as_str() {
            "root" => call_with("transfer_to_billing", &json!({ "reason": "an invoice" })),
            other => says(format!("{other}: {}", prompt.messages.len())),
        })
    })
    .await;
    let id = start_run(&engine, RunRequest::default()).await;
    let run = wait_for_end(&engine, &id).await;
    assert!(answer_of(&run).starts_with("billing: "), "{run:?}");
    let sink = toolcrib::runs::agent_loop::ignore_events;
    let report = engine.runs().replay_run(&caller(), &id, None, &sink).await.unwrap();
    assert_eq!(report.differences, [], "{report:?}");
    assert_eq!(report.answer, answer_of(&run));
}

#[tokio::test]
async fn an_agent_that_continues_a_run_knows_the_fields_of_its_result() {
    let mut front = agent("front");
    front.profile.result_fields =
        serde_json::from_value(json!([{ "name": "amount", "type": "integer" }])).unwrap();
    let engine = engine_with(&Arc::default(), vec![front, agent("billing")], |prompt| {
        ready(match role(prompt).as_str() {
            "front" => call_with("transfer_to_billing", &json!({})),
            _ => {
                let text = json!(prompt.messages).to_string();
                assert!(text.contains("- amount (integer)"), "{text}");
                assert!(text.contains("front hands this conversation over to you"), "{text}");
                says(r#"{"amount":7}"#)
            }
        })
    })
    .await;
    let call = call_agent(&engine, "front", json!({ "instruction": "x" })).await;
    assert_eq!(call.status, Status::Succeeded, "{call:?}");
    assert_eq!(call.outcome.as_ref().unwrap().data.as_ref().unwrap().to_value()["amount"], 7);
}

#[tokio::test]
async fn the_calls_of_an_agent_carry_its_depth() {
    let engine = engine_with(&Arc::default(), vec![agent("a"), agent("b")], |prompt| {
        let results = tool_results(prompt);
        ready(match (role(prompt).as_str(), results.is_empty()) {
            ("a", true) => calls(&["agent__b"]),
            ("b", true) => call_with("run__finish", &json!({ "answer": "b is done" })),
            _ => says(results.join(" ")),
        })
    })
    .await;
    call_agent(&engine, "a", json!({ "instruction": "x" })).await;
    let query = CallQuery { limit: 10, ..CallQuery::default() };
    let calls = engine.calls().calls(&caller(), query).await.unwrap().calls;
    let mut depths: Vec<(String, u32)> =
        calls.iter().map(|call| (call.tool_name.clone(), Route::for_call(call).depth)).collect();
    depths.sort();
    let expected = [("agent.a", 0), ("agent.b", 1), ("run.finish", 2)];
    assert_eq!(depths, expected.map(|(tool, depth)| (tool.to_owned(), depth)));
}

#[tokio::test]
async fn a_call_of_an_agent_that_waits_survives_a_graceful_shutdown() {
    let store: Arc<MemoryStore> = Arc::default();
    let gate = Arc::new(tokio::sync::Semaphore::new(0));
    let opened = gate.clone();
    let slow = FnTool::new("slow", "Waits", move |_: Nothing| {
        let gate = gate.clone();
        async move {
            gate.acquire().await.unwrap().forget();
            Ok::<_, Fault>(1)
        }
    });
    let reply = |_: &ModelRequest| ready(says("b is done"));
    let model = SingleModel(Arc::new(AgentModel(Box::new(reply))));
    let builder = Engine::builder().store(store.clone()).models(Arc::new(model)).tool(slow);
    let engine = builder.start().await.unwrap();
    engine.roster().define_agent(&caller(), agent("b"), None).await.unwrap();
    let entry = |id: &str, name: &str, args: Value| {
        let function = json!({ "name": name, "arguments": args.to_string() });
        Json::from_value(&json!({ "id": id, "type": "function", "function": function }))
    };
    let entries =
        vec![entry("c1", "slow", json!({})), entry("c2", "agent.b", json!({ "instruction": "x" }))];
    let batch =
        Batch { mode: BatchMode::Serial, wait_ms: Some(0), ..Batch::new("r".to_owned(), entries) };
    engine.calls().run_batch(&caller(), batch).await.unwrap();
    let waiting = until("both calls are stored", async || {
        let query =
            CallQuery { tool_name: Some("agent.b".into()), limit: 1, ..CallQuery::default() };
        engine.calls().calls(&caller(), query).await.unwrap().calls.into_iter().next()
    })
    .await;
    let engine = Arc::new(engine);
    let stopping = {
        let engine = engine.clone();
        tokio::spawn(async move { engine.shut_down(Duration::from_secs(20)).await })
    };
    until("the engine drains", async || engine.is_draining().then_some(())).await;
    opened.add_permits(1);
    stopping.await.unwrap();
    drop(engine);
    let engine = engine_with(&store, vec![], reply).await;
    let id = waiting.id;
    let call = engine.calls().wait(&caller(), &id, Until::EndedWithin(20_000)).await.unwrap();
    assert_eq!(call.status, Status::Succeeded, "{:?}", call.outcome);
}

#[tokio::test]
async fn a_box_is_limited_together_with_those_that_it_inherits() {
    let engine = engine_with(&Arc::default(), vec![], |_| ready(says("x"))).await;
    let mut boxes = Vec::new();
    for n in 0..11 {
        let ids: Vec<String> = (0..1_000).map(|k| format!("card_{n}_{k}")).collect();
        for id in &ids {
            let card = json!({
                "card_id": id, "type": "agent.thought", "author_id": "me", "metadata": {},
                "content": { "__type__": "TextContent", "text": "x" },
            });
            engine.utp().cards().put_card(&caller(), &card).await.unwrap();
        }
        boxes.push(engine.utp().boxes().create_box(&caller(), ids, vec![]).await.unwrap().box_id);
    }
    let refused = engine.utp().boxes().create_box(&caller(), vec![], boxes.clone()).await;
    let message = refused.unwrap_err().to_string();
    assert!(message.contains("11000 cards"), "{message}");
    boxes.pop();
    let made = engine.utp().boxes().create_box(&caller(), vec![], boxes).await.unwrap();
    let (_, cards) = engine.utp().boxes().card_box(&caller(), &made.box_id).await.unwrap();
    assert_eq!(cards.len(), 10_000);
}

#[tokio::test]
async fn a_project_has_a_limited_number_of_boxes() {
    let store: Arc<MemoryStore> = Arc::default();
    let start = async || {
        let limits = toolcrib::EngineLimits { max_boxes_per_project: 3, ..Default::default() };
        Engine::builder().store(store.clone()).limits(limits).start().await.unwrap()
    };
    let engine = start().await;
    let create = async |engine: &Engine, project: &str| {
        let caller = Caller::local(project);
        engine.utp().boxes().create_box(&caller, vec![], vec![]).await
    };
    let made = futures::future::join_all((0..5).map(|_| create(&engine, "default"))).await;
    assert_eq!(made.iter().filter(|made| made.is_ok()).count(), 3, "{made:?}");
    let refused = made.into_iter().find_map(Result::err).unwrap();
    assert_eq!(refused.code(), Code::PayloadTooLarge);
    let message = refused.to_string();
    assert!(message.contains("has 3 boxes, the maximum (limits.max_boxes_per_project)"));
    create(&engine, "elsewhere").await.unwrap();
    engine.shut_down(Duration::from_secs(5)).await;

    let engine = start().await;
    assert!(create(&engine, "default").await.is_err(), "the stored boxes count after a restart");
    toolcrib::ports::store::Store::purge(&*store, u64::MAX, 10).await.unwrap();
    create(&engine, "default").await.unwrap();
}

#[tokio::test]
async fn a_join_takes_no_slot_also_after_a_change_of_limits() {
    let model = SingleModel(Arc::new(AgentModel(Box::new(|_| Box::pin(std::future::pending())))));
    let quick = FnTool::new("t.quick", "Ends at once", |_: Nothing| async { Ok::<_, Fault>(1) });
    let engine = Engine::builder().models(Arc::new(model)).tool(quick).start().await.unwrap();
    engine.roster().define_agent(&caller(), agent("d"), None).await.unwrap();
    let task = json!({ "target_strategy": "new", "target_ref": "d", "instruction": "x" });
    let args = Json::from_value(&json!({ "tasks": [task] }));
    let request = CallRequest::of("fork_join", args);
    let join = engine.calls().invoke(&caller(), request).await.unwrap().call.id.clone();
    let running = until("the join runs", async || {
        let call = engine.calls().call(&caller(), &join).await.unwrap();
        (call.status == Status::Running).then_some(call)
    })
    .await;
    let limit = LimitValues { max_parallel: Some(1), ..LimitValues::default() };
    let agent = caller().agent;
    engine.admin().set_limit(&caller(), LimitKind::Agent, &agent, limit).await.unwrap();
    let request = CallRequest::of("t.quick", Json::empty_object());
    let ticket = engine.calls().invoke(&caller(), request).await.unwrap();
    let quick = engine.calls().wait(&caller(), &ticket, Until::EndedWithin(10_000)).await.unwrap();
    assert_eq!(quick.status, Status::Succeeded, "it has the only slot: {running:?}");
}

#[tokio::test]
async fn a_refused_retry_of_an_agent_says_why() {
    let engine = engine_with(&Arc::default(), vec![agent("a")], |_| ready(says("x"))).await;
    let args = Json::from_value(&json!({ "instruction": "x" }));
    let request = CallRequest { retry: Some(1), ..CallRequest::of("agent.a", args) };
    let refused = engine.calls().invoke(&caller(), request).await.err().unwrap().to_string();
    assert!(refused.contains("retry must be 0 for agent.a: an agent may have done"), "{refused}");
}

#[tokio::test]
async fn a_derived_agent_inherits_the_limits_one_level_below() {
    let limits = AgentLimits { tokens: Some(800), depth: Some(2), ..AgentLimits::default() };
    let engine = engine_with(&Arc::default(), vec![with_limits("par", limits)], |prompt| {
        let args = json!({ "action": "derive", "agent_id": "kid", "derived_from": "par" });
        ready(match tool_results(prompt).is_empty() {
            true => call_with("provision_agent", &args),
            false => says(tool_results(prompt).join(" ")),
        })
    })
    .await;
    let id = start_run(&engine, RunRequest::default()).await;
    let run = wait_for_end(&engine, &id).await;
    assert!(answer_of(&run).contains("accepted"), "{run:?}");
    let kid = engine.roster().agent_entry(&caller(), "kid").unwrap().definition.unwrap();
    let limits = kid.profile.limits;
    assert_eq!((limits.tokens, limits.depth), (Some(800), Some(1)));
}

#[tokio::test]
async fn a_refusal_that_started_nothing_does_not_warn_of_an_effect() {
    let engine = engine_with(&Arc::default(), vec![agent("a"), agent("b")], |prompt| {
        ready(match (role(prompt).as_str(), tool_results(prompt).is_empty()) {
            ("a", true) => calls(&["agent__b"]),
            ("b", true) => calls(&["agent__a"]),
            _ => says("I could not."),
        })
    })
    .await;
    let fork = json!({ "tasks": [
        { "target_strategy": "new", "target_ref": "a", "instruction": "x" },
    ] });
    for (tool, args, reason) in [
        ("agent.a", json!({ "instruction": "x", "context_box_id": "none" }), "there is no box"),
        ("agent.a", json!({ "instruction": "x" }), "would wait for itself"),
        ("fork_join", fork, "would wait for itself"),
    ] {
        let request = CallRequest::of(tool.to_owned(), Json::from_value(&args));
        let ticket = engine.calls().invoke(&caller(), request).await.unwrap();
        let until = Until::EndedWithin(20_000);
        let call = engine.calls().wait(&caller(), &ticket.call.id, until).await.unwrap();
        let fault = call.outcome.as_ref().unwrap().error.clone().unwrap();
        assert!(fault.message.contains(reason), "{fault}");
        assert!(!fault.message.contains("may have taken effect"), "{fault}");
    }
}

#[tokio::test]
async fn the_calls_of_a_tree_belong_to_one_trace() {
    let engine = engine_with(&Arc::default(), vec![agent("a"), agent("b")], |prompt| {
        let results = tool_results(prompt);
        ready(match (role(prompt).as_str(), results.is_empty()) {
            ("root", true) => calls(&["agent__a", "agent__b"]),
            ("a" | "b", true) => call_with("run__finish", &json!({ "answer": "done" })),
            _ => says(results.join(" ")),
        })
    })
    .await;
    let mut traces = Vec::new();
    for _ in 0..2 {
        let id = start_run(&engine, RunRequest::default()).await;
        wait_for_end(&engine, &id).await;
        let query = CallQuery { limit: 10, ..CallQuery::default() };
        let calls = engine.calls().calls(&caller(), query).await.unwrap().calls;
        let new = calls.iter().map(toolcrib::domain::derived::trace_id_of);
        traces = new.chain(traces).collect::<Vec<_>>();
        traces.dedup();
    }
    traces.sort();
    traces.dedup();
    assert_eq!(traces.len(), 2, "one trace for each tree: {traces:?}");
}
