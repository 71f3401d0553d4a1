//! Trees in which workers drive some of the agents: depth, cycles, budgets and ends hold across
//! both drivers.

use toolcrib::domain::agent::AgentDriver;
use toolcrib::domain::utp::{Turn, TurnStatus};
use toolcrib::utp::{
    DispatchRequest, StepCallRequest, StepResult, TurnFinish, TurnLeaseRequest, TurnResume,
};

use super::*;

fn worker(id: &str) -> AgentDefinition {
    AgentDefinition {
        driver: AgentDriver::Worker,
        worker_target: Some(format!("w_{id}")),
        ..agent(id)
    }
}

/// A root that calls `a`, which calls `w`; every other agent never answers.
fn tree_with_worker(prompt: &ModelRequest) -> BoxFuture<'static, ModelReply> {
    let (role, results) = (role(prompt), tool_results(prompt));
    Box::pin(async move {
        match (role.as_str(), results.is_empty()) {
            ("root", true) => calls(&["agent__a"]),
            ("a", true) => calls(&["agent__w"]),
            ("root" | "a", false) => says(results.join(" | ")),
            _ => std::future::pending().await,
        }
    })
}

async fn lease(engine: &Engine, agent_id: &str, turn_id: Option<String>) -> Turn {
    let request = TurnLeaseRequest { turn_id, ..TurnLeaseRequest::default() };
    engine.utp().lease_turn(&caller(), agent_id, request).await.unwrap()
}

/// Leases the turn that waits in an agent's inbox.
async fn take_turn(engine: &Engine, agent_id: &str) -> Turn {
    let items = engine.utp().inbox(&caller(), agent_id, 5, 20_000).await.unwrap();
    let item = items.iter().find(|item| item.message_type == "turn").unwrap();
    lease(engine, agent_id, Some(item.turn_id.clone())).await
}

async fn dispatch(engine: &Engine, turn: &Turn, id: &str, tool: &str, args: Value, suspend: bool) {
    let call = StepCallRequest {
        tool_call_id: id.to_owned(),
        tool_name: tool.to_owned(),
        arguments: Json::from_value(&args),
        timeout_ms: None,
        attempt_timeout_ms: None,
        input_timeout_ms: None,
    };
    let request = DispatchRequest {
        epoch: turn.epoch,
        step_id: Some(format!("step_{id}")),
        calls: vec![call],
        suspends_turn: suspend,
        tokens: None,
    };
    engine.utp().dispatch_step(&caller(), &turn.agent_id, &turn.turn_id, request).await.unwrap();
}

async fn resume(engine: &Engine, turn: &Turn) -> (Turn, StepResult) {
    let request = TurnResume { epoch: turn.epoch, wait_ms: 20_000, request_id: None };
    let (agent, id) = (&turn.agent_id, &turn.turn_id);
    let resumed = engine.utp().resume_turn(&caller(), agent, id, request).await.unwrap();
    (resumed.turn, resumed.results.into_iter().next().unwrap())
}

async fn finish(engine: &Engine, turn: &Turn) {
    let request = TurnFinish { epoch: turn.epoch, ..TurnFinish::default() };
    engine.utp().finish_turn(&caller(), &turn.agent_id, &turn.turn_id, request).await.unwrap();
}

/// Starts the tree, and returns the leased turn of its worker.
async fn start_tree(agents: Vec<AgentDefinition>) -> (Engine, String, Turn) {
    let engine = engine_with(&Arc::default(), agents, tree_with_worker).await;
    let id = start_run(&engine, RunRequest::default()).await;
    let turn = take_turn(&engine, "w").await;
    (engine, id, turn)
}

async fn run_of(engine: &Engine, agent_id: &str) -> Run {
    until("the agent has a run", async || {
        let tool_name = Some(format!("agent.{agent_id}"));
        let query = CallQuery { tool_name, limit: 10, ..CallQuery::default() };
        let calls = engine.calls().calls(&caller(), query).await.unwrap().calls;
        let run_id = calls.first()?.id.as_str().replace("tc_", "run_");
        engine.runs().find_run(&caller(), &run_id).await.ok()
    })
    .await
}

fn instruction() -> Value {
    json!({ "instruction": "x" })
}

#[tokio::test]
async fn an_agent_that_waits_behind_a_worker_is_not_called_again() {
    let (engine, id, turn) = start_tree(vec![agent("a"), worker("w")]).await;
    assert_eq!(turn.depth, 2, "two agents are above the worker's calls");
    dispatch(&engine, &turn, "c1", "agent.a", instruction(), true).await;
    let (turn, result) = resume(&engine, &turn).await;
    let message = result.error["message"].as_str().unwrap();
    assert!(message.contains("would wait for itself (a → w → a)"), "{message}");
    finish(&engine, &turn).await;
    assert_eq!(wait_for_end(&engine, &id).await.status, RunStatus::Succeeded);
}

#[tokio::test]
async fn the_depth_of_an_agent_holds_below_its_workers() {
    let limits = AgentLimits { depth: Some(1), ..AgentLimits::default() };
    let agents = vec![with_limits("a", limits), worker("w"), agent("c"), worker("v")];
    let (engine, _, turn) = start_tree(agents).await;
    for (id, tool) in [("c1", "agent.c"), ("c2", "agent.v")] {
        dispatch(&engine, &turn, id, tool, instruction(), false).await;
    }
    let request = TurnResume { epoch: turn.epoch, wait_ms: 20_000, request_id: None };
    engine.utp().suspend_turn(&caller(), "w", &turn.turn_id, turn.epoch).await.unwrap();
    let resumed = engine.utp().resume_turn(&caller(), "w", &turn.turn_id, request).await.unwrap();
    assert_eq!(resumed.results.len(), 2);
    for result in resumed.results {
        let message = result.error["message"].as_str().unwrap();
        assert!(message.contains("would be at depth 3, and the maximum here is 2"), "{message}");
    }
}

#[tokio::test]
async fn budgets_pass_through_workers() {
    let tokens = |tokens: u64| AgentLimits { tokens: Some(tokens), ..AgentLimits::default() };
    let mut w = worker("w");
    w.profile.limits = tokens(400);
    let agents = vec![with_limits("a", tokens(1_000)), w, with_limits("c", tokens(5_000))];
    let (engine, id, turn) = start_tree(agents).await;
    let lineage = turn.delegation.as_ref().unwrap().lineage.clone();
    assert_eq!(lineage.tokens, Some(400), "the turn reserves its part of the budget");
    dispatch(&engine, &turn, "c1", "agent.c", instruction(), true).await;
    let c = run_of(&engine, "c").await;
    let below = c.lineage.as_ref().unwrap();
    assert_eq!(below.budget.tokens, Some(200), "half of what is left to the worker");
    assert_eq!(below.root_run_id, id, "it is a part of the same tree");
    assert_eq!(
        (below.depth, below.ancestors.as_slice()),
        (3, &["a".to_owned(), "w".to_owned()][..])
    );
    let tree = engine.runs().trees().find_tree(&caller(), &id).await.unwrap();
    assert_eq!(tree.run_count, 3, "the run below the worker belongs to the tree");
    assert_eq!((tree.turn_count, tree.open_count), (1, 4));
    let a = &tree.node.children[0];
    assert_eq!(a.reserved.tokens, Some(400), "the turn reserves its part");
    let shown = a.children[0].turn().unwrap();
    assert_eq!((shown.agent_id.as_str(), &shown.turn_id), ("w", &turn.turn_id));
    let below_turn = a.children[0].children[0].run().unwrap();
    assert_eq!(below_turn.id, c.id, "a run is below the turn that called it");
    assert_eq!(a.children[0].usage.calls, 1);
}

fn step_call(id: &str, tool: &str) -> StepCallRequest {
    StepCallRequest {
        tool_call_id: id.to_owned(),
        tool_name: tool.to_owned(),
        arguments: Json::from_value(&instruction()),
        timeout_ms: None,
        attempt_timeout_ms: None,
        input_timeout_ms: None,
    }
}

/// Dispatches calls of `agent.d` in one step, and returns the resumed turn with the error of each
/// call; empty for one that succeeded.
async fn call_d(
    engine: &Engine,
    turn: &Turn,
    ids: &[&str],
    tokens: Option<u64>,
) -> (Turn, Vec<String>) {
    let request = || DispatchRequest {
        epoch: turn.epoch,
        step_id: Some(format!("s_{}", ids[0])),
        calls: ids.iter().map(|id| step_call(id, "agent.d")).collect(),
        suspends_turn: true,
        tokens,
    };
    let (utp, id) = (engine.utp(), turn.turn_id.as_str());
    for _ in 0..2 {
        // The repetition finds the same calls and charges nothing.
        utp.dispatch_step(&caller(), "w", id, request()).await.unwrap();
    }
    let resume = TurnResume { epoch: turn.epoch, wait_ms: 20_000, request_id: None };
    let resumed = utp.resume_turn(&caller(), "w", id, resume).await.unwrap();
    let message = |result: &StepResult| match &result.error["message"] {
        Value::String(message) => message.clone(),
        _ => String::new(),
    };
    (resumed.turn, resumed.results.iter().map(message).collect())
}

/// A tree whose agent `d` answers at once.
async fn start_tree_with_quick_agent(
    store: &Arc<MemoryStore>,
    w: AgentLimits,
) -> (Engine, String, Turn) {
    let w = AgentDefinition { profile: with_limits("w", w).profile, ..worker("w") };
    let agents = vec![agent("a"), w, agent("d")];
    let engine = engine_with(store, agents, |prompt| match role(prompt).as_str() {
        "d" => ready(says("done")),
        _ => tree_with_worker(prompt),
    })
    .await;
    let id = start_run(&engine, RunRequest::default()).await;
    let turn = take_turn(&engine, "w").await;
    (engine, id, turn)
}

const CALLS_USED_UP: &str = "not done: the limit of 3 tool calls is reached";

#[tokio::test]
async fn the_calls_of_a_worker_count_in_its_budget_also_after_a_restart() {
    let store = Arc::default();
    let limits = AgentLimits { calls: Some(3), ..AgentLimits::default() };
    let (engine, id, turn) = start_tree_with_quick_agent(&store, limits).await;
    let (turn, errors) = call_d(&engine, &turn, &["c1", "c2"], None).await;
    assert_eq!(errors, ["", ""]);
    let usage = |turn: &Turn| turn.delegation.as_ref().map(|turn| turn.used_calls);
    assert_eq!(usage(&turn), Some(2));
    engine.shut_down(Duration::from_secs(5)).await;

    let engine = engine_with(&store, vec![], |prompt| match role(prompt).as_str() {
        "d" => ready(says("done")),
        _ => tree_with_worker(prompt),
    })
    .await;
    let (turn, errors) = call_d(&engine, &turn, &["c3", "c4"], None).await;
    let mut errors = errors;
    errors.sort_unstable();
    assert_eq!(errors, ["", CALLS_USED_UP]);
    assert_eq!(usage(&turn), Some(3));
    finish(&engine, &turn).await;
    assert_eq!(wait_for_end(&engine, &id).await.status, RunStatus::Succeeded);
}

#[tokio::test]
async fn a_worker_without_a_limit_draws_its_calls_from_the_budget_above() {
    let store = Arc::default();
    let limits = AgentLimits { calls: Some(5), ..AgentLimits::default() };
    let agents = vec![with_limits("a", limits), worker("w"), agent("d")];
    let engine = engine_with(&store, agents, |prompt| match role(prompt).as_str() {
        "d" => ready(says("done")),
        _ => tree_with_worker(prompt),
    })
    .await;
    let id = start_run(&engine, RunRequest::default()).await;
    let turn = take_turn(&engine, "w").await;
    let ids = ["c1", "c2", "c3", "c4", "c5", "c6"];
    let (turn, mut errors) = call_d(&engine, &turn, &ids, None).await;
    errors.sort_unstable();
    let refused = "not done: the limit of 5 tool calls is reached";
    assert_eq!(errors, ["", "", "", "", "", refused]);
    finish(&engine, &turn).await;
    let run = wait_for_end(&engine, &id).await;
    let a = run_of(&engine, "a").await;
    let reason = a.answer.as_ref().unwrap().stop_reason.unwrap();
    assert_eq!(reason.as_str(), "calls", "the calls of the worker count for its caller: {run:?}");
}

#[tokio::test]
async fn the_tokens_that_a_worker_reports_count_in_its_budget() {
    let store = Arc::default();
    let limits = AgentLimits { tokens: Some(900), ..AgentLimits::default() };
    let (engine, id, turn) = start_tree_with_quick_agent(&store, limits).await;
    let (turn, errors) = call_d(&engine, &turn, &["c1"], Some(500)).await;
    assert_eq!(errors, [""], "500 of 900 tokens are used");
    let (turn, errors) = call_d(&engine, &turn, &["c2"], Some(900)).await;
    assert_eq!(errors, ["not done: the limit of 900 tokens is reached"]);
    let request = TurnFinish { epoch: turn.epoch, tokens: Some(950), ..TurnFinish::default() };
    let ended = engine.utp().finish_turn(&caller(), "w", &turn.turn_id, request).await.unwrap();
    assert_eq!(ended.delegation.unwrap().used_tokens, 950);
    assert_eq!(wait_for_end(&engine, &id).await.status, RunStatus::Succeeded);
}

#[tokio::test]
async fn a_call_that_a_failed_request_started_is_not_refused_by_the_budget() {
    let limits = toolcrib::EngineLimits { max_open_calls_per_project: 3, ..Default::default() };
    let model = SingleModel(Arc::new(AgentModel(Box::new(tree_with_worker))));
    let builder = Engine::builder().models(Arc::new(model)).limits(limits);
    let engine = builder.with_run_finish_tool().start().await.unwrap();
    let w = AgentLimits { tokens: Some(900), ..AgentLimits::default() };
    let w = AgentDefinition { profile: with_limits("w", w).profile, ..worker("w") };
    for agent in [agent("a"), w, agent("c")] {
        engine.roster().define_agent(&caller(), agent, None).await.unwrap();
    }
    start_run(&engine, RunRequest::default()).await;
    let turn = take_turn(&engine, "w").await;
    let request = |ids: &[&str], tokens| DispatchRequest {
        epoch: turn.epoch,
        step_id: Some("s1".to_owned()),
        calls: ids.iter().map(|id| step_call(id, "agent.c")).collect(),
        suspends_turn: true,
        tokens,
    };
    let (utp, id) = (engine.utp(), turn.turn_id.as_str());
    let full = utp.dispatch_step(&caller(), "w", id, request(&["c1", "c2"], None)).await;
    assert_eq!(full.err().unwrap().code(), Code::RateLimited, "one of the calls finds no room");
    let c = run_of(&engine, "c").await;
    let made = &c.lineage.as_ref().unwrap().call_id;
    // Either of the two may have found the room.
    let started = engine.calls().call(&caller(), made).await.unwrap();
    let started = started.origin.caller_call_id.as_deref().unwrap();
    // Meanwhile the budget is used up.
    let sent = utp.dispatch_step(&caller(), "w", id, request(&[started], Some(900))).await.unwrap();
    assert_eq!(sent.calls[0].call_id.as_deref(), Some(made.as_str()), "{:?}", sent.calls);
    assert_eq!(sent.calls[0].result_card_id, None, "it still works");
    assert_eq!(sent.turn.delegation.unwrap().used_calls, 1);
}

#[tokio::test]
async fn the_tokens_of_an_ended_worker_count_above_it() {
    let store = Arc::default();
    let limits = AgentLimits { tokens: Some(2_000), ..AgentLimits::default() };
    let agents = vec![with_limits("a", limits), worker("w")];
    let engine = engine_with(&store, agents, tree_with_worker).await;
    let id = start_run(&engine, RunRequest::default()).await;
    let turn = take_turn(&engine, "w").await;
    let request = TurnFinish { epoch: turn.epoch, tokens: Some(5_000), ..TurnFinish::default() };
    engine.utp().finish_turn(&caller(), "w", &turn.turn_id, request).await.unwrap();
    wait_for_end(&engine, &id).await;
    let a = run_of(&engine, "a").await;
    let reason = a.answer.as_ref().unwrap().stop_reason.map(|reason| reason.as_str());
    assert_eq!(reason, Some("tokens"), "{a:?}");
}

#[tokio::test]
async fn a_cancel_reaches_agents_below_workers() {
    let (engine, id, turn) = start_tree(vec![agent("a"), worker("w"), agent("c")]).await;
    dispatch(&engine, &turn, "c1", "agent.c", instruction(), true).await;
    let c = run_of(&engine, "c").await;
    engine.runs().cancel_run(&caller(), &id, None).await.unwrap();
    let began = tokio::time::Instant::now();
    assert_eq!(wait_for_end(&engine, &c.id).await.status, RunStatus::Canceled);
    assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
    let stopped = engine.utp().turn(&caller(), "w", &turn.turn_id).await.unwrap();
    assert_eq!(stopped.status, TurnStatus::Stopped);
}

#[tokio::test]
async fn the_end_of_a_turn_ends_its_agents_as_they_request() {
    let mut detached = agent("d");
    detached.on_parent_end = OnParentEnd::Detach;
    let mut detached_worker = worker("v");
    detached_worker.on_parent_end = OnParentEnd::Detach;
    let agents = vec![worker("p"), agent("c"), detached, worker("w"), detached_worker];
    let engine = engine_with(&Arc::default(), agents, tree_with_worker).await;
    let turn = lease(&engine, "p", None).await;
    let called = ["c", "d", "w", "v"];
    for agent_id in called {
        let args = json!({
            "target_strategy": "new", "target_ref": agent_id, "instruction": "x",
        });
        dispatch(&engine, &turn, agent_id, "delegate_async", args, false).await;
    }
    let call_of = async |agent_id: &str| {
        until("the agent is called", async || {
            let tool_name = Some(format!("agent.{agent_id}"));
            let query = CallQuery { tool_name, limit: 1, ..CallQuery::default() };
            let found = engine.calls().calls(&caller(), query).await.unwrap().calls;
            found.into_iter().next().filter(|call| call.status != Status::Pending)
        })
        .await
    };
    for agent_id in called {
        call_of(agent_id).await;
    }
    finish(&engine, &turn).await;
    for agent_id in ["c", "w"] {
        let id = call_of(agent_id).await.id;
        let ended = engine.calls().wait(&caller(), &id, Until::EndedWithin(1_000)).await.unwrap();
        assert_eq!(ended.status, Status::Canceled, "{agent_id}");
    }
    for agent_id in ["d", "v"] {
        assert_eq!(call_of(agent_id).await.status, Status::Running, "{agent_id} continues");
    }
}

#[tokio::test]
async fn an_agent_does_not_start_after_the_end_of_its_caller() {
    let mut detached = agent("d");
    detached.on_parent_end = OnParentEnd::Detach;
    let engine = engine_with(&Arc::default(), vec![agent("b"), detached, worker("w")], |_| {
        ready(says("done"))
    })
    .await;
    let id = start_run(&engine, RunRequest::default()).await;
    wait_for_end(&engine, &id).await;
    for agent_id in ["b", "w"] {
        let args = Json::from_value(&instruction());
        let request = CallRequest::of(format!("agent.{agent_id}"), args);
        let request = CallRequest { run_id: id.clone(), ..request };
        let ticket = engine.calls().invoke(&caller(), request).await.unwrap();
        let call = engine.calls().wait(&caller(), &ticket, Until::Ended).await.unwrap();
        let fault = call.outcome.as_ref().unwrap().error.clone().unwrap();
        assert_eq!(fault.code, Code::Canceled, "{fault:?}");
        assert!(fault.message.contains("has ended"), "{}", fault.message);
    }
    let request = CallRequest::of("agent.d", Json::from_value(&instruction()));
    let request = CallRequest { run_id: id.clone(), ..request };
    engine.calls().invoke(&caller(), request).await.unwrap();
    let run = run_of(&engine, "d").await;
    assert_eq!(run.lineage.unwrap().parent_run_id, Some(id), "it stays in the tree");
}

#[tokio::test]
async fn a_repeated_lease_or_resume_returns_the_same_response() {
    let engine = engine_with(&Arc::default(), vec![worker("p")], |_| ready(says("x"))).await;
    let request =
        || TurnLeaseRequest { request_id: Some("r1".to_owned()), ..TurnLeaseRequest::default() };
    let turn = engine.utp().lease_turn(&caller(), "p", request()).await.unwrap();
    let again = engine.utp().lease_turn(&caller(), "p", request()).await.unwrap();
    assert_eq!((&again.turn_id, again.epoch), (&turn.turn_id, turn.epoch));
    let named = TurnLeaseRequest { turn_id: Some(turn.turn_id.clone()), ..request() };
    let named = engine.utp().lease_turn(&caller(), "p", named).await.unwrap();
    assert_eq!(named.epoch, turn.epoch);
    let other = TurnLeaseRequest {
        turn_id: Some(turn.turn_id.clone()),
        request_id: Some("r2".to_owned()),
        ..TurnLeaseRequest::default()
    };
    assert!(engine.utp().lease_turn(&caller(), "p", other).await.is_err(), "it is leased");

    dispatch(&engine, &turn, "c1", "no.such.tool", json!({}), true).await;
    let resume = |id: &str| TurnResume {
        epoch: turn.epoch,
        wait_ms: 5_000,
        request_id: Some(id.to_owned()),
    };
    let utp = engine.utp();
    let first = utp.resume_turn(&caller(), "p", &turn.turn_id, resume("r3")).await.unwrap();
    let again = utp.resume_turn(&caller(), "p", &turn.turn_id, resume("r3")).await.unwrap();
    assert_eq!(again.turn.epoch, first.turn.epoch);
    assert_eq!(again.results.len(), 1);
    assert_eq!(again.results[0].card_id, first.results[0].card_id);
    let other = utp.resume_turn(&caller(), "p", &turn.turn_id, resume("r4")).await;
    assert!(other.is_err(), "another request is refused");

    let card = json!({
        "card_id": "d1", "type": "task.deliverable", "author_id": "p", "metadata": {},
        "content": { "__type__": "TextContent", "text": "done" },
    });
    utp.cards().put_card(&caller(), &card).await.unwrap();
    let finish = || TurnFinish {
        epoch: first.turn.epoch,
        deliverable_card_id: Some("d1".to_owned()),
        ..TurnFinish::default()
    };
    let ended = utp.finish_turn(&caller(), "p", &turn.turn_id, finish()).await.unwrap();
    let again = utp.finish_turn(&caller(), "p", &turn.turn_id, finish()).await.unwrap();
    assert_eq!(again.version, ended.version);
}

#[tokio::test]
async fn the_fan_out_of_a_turn_is_capped_with_a_message_for_the_model() {
    let engine =
        engine_with(&Arc::default(), vec![worker("p"), agent("c")], tree_with_worker).await;
    let turn = lease(&engine, "p", None).await;
    let call = |n: usize| StepCallRequest {
        tool_call_id: format!("c{n}"),
        tool_name: "agent.c".to_owned(),
        arguments: Json::from_value(&instruction()),
        timeout_ms: None,
        attempt_timeout_ms: None,
        input_timeout_ms: None,
    };
    let request = DispatchRequest {
        epoch: turn.epoch,
        step_id: Some("s1".to_owned()),
        calls: (0..65).map(call).collect(),
        suspends_turn: true,
        tokens: None,
    };
    let utp = engine.utp();
    utp.dispatch_step(&caller(), "p", &turn.turn_id, request).await.unwrap();
    let refused = until("one call is refused", async || {
        let items = utp.inbox(&caller(), "p", 100, 1_000).await.unwrap();
        items.into_iter().find(|item| item.message_type == "tool_result")
    })
    .await;
    let card_id = refused.payload["tool_result_card_id"].as_str().unwrap().to_owned();
    let card = utp.cards().card(&caller(), &card_id).await.unwrap();
    let text = Value::Object(card.content).to_string();
    assert!(text.contains("has called 64 agents that still work"), "{text}");
}
