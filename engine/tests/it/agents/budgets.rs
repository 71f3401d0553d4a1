//! Budgets of trees: reserved at the start, refunded at the end, shared where none is set.

use super::*;

/// A root run that calls `a`, and `b` after it; both report the budget that they got.
async fn run_in_order(limits: (AgentLimits, AgentLimits), root: u64) -> (Engine, Run) {
    let store = Arc::default();
    let agents = vec![with_limits("a", limits.0), with_limits("b", limits.1)];
    let engine = engine_with(&store, agents, |prompt| {
        let results = tool_results(prompt);
        ready(match (role(prompt).as_str(), results.len()) {
            ("root", 0) => calls(&["agent__a"]),
            ("root", 1) => calls(&["agent__b"]),
            ("root", _) => says(results.join(" | ")),
            _ => says("done"),
        })
    })
    .await;
    let mut request = RunRequest::default();
    request.limits.tokens = root;
    let id = start_run(&engine, request).await;
    let run = wait_for_end(&engine, &id).await;
    (engine, run)
}

#[tokio::test]
async fn a_budget_is_reserved_at_the_start_and_refunded_at_the_end() {
    let tokens = |tokens| AgentLimits { tokens: Some(tokens), ..AgentLimits::default() };
    let (engine, run) = run_in_order((tokens(600), tokens(600)), 1_000).await;
    let tree = engine.runs().trees().find_tree(&caller(), &run.id).await.unwrap();
    let granted: Vec<Option<u64>> = tree
        .node
        .children
        .iter()
        .map(|child| child.run().unwrap().lineage.as_ref().unwrap().budget.tokens)
        .collect();
    // Without the refund of the first child, the second would get a part of the rest only.
    assert_eq!(granted, [Some(600), Some(600)]);
    assert_eq!(tree.node.reserved.tokens, None, "nothing is reserved after the end");
}

#[tokio::test]
async fn agents_that_work_at_the_same_time_share_the_budget() {
    let store = Arc::default();
    let tokens = |tokens| AgentLimits { tokens: Some(tokens), ..AgentLimits::default() };
    let agents: Vec<AgentDefinition> =
        ["a", "b", "c", "d"].map(|id| with_limits(id, tokens(600))).into();
    let gate = Arc::new(tokio::sync::Semaphore::new(0));
    let opened = gate.clone();
    let engine = engine_with(&store, agents, move |prompt| {
        let (role, results, gate) = (role(prompt), tool_results(prompt), gate.clone());
        Box::pin(async move {
            if role != "root" {
                gate.acquire().await.unwrap().forget();
                return says("done");
            }
            match results.is_empty() {
                true => calls(&["agent__a", "agent__b", "agent__c", "agent__d"]),
                false => says("end"),
            }
        })
    })
    .await;
    let mut request = RunRequest::default();
    request.limits.tokens = 1_000;
    let id = start_run(&engine, request).await;
    let tree = until("all agents started", async || {
        let tree = engine.runs().trees().find_tree(&caller(), &id).await.unwrap();
        (tree.run_count == 5).then_some(tree)
    })
    .await;
    let granted: u64 = tree
        .node
        .children
        .iter()
        .map(|child| child.run().unwrap().lineage.as_ref().unwrap().budget.tokens.unwrap())
        .sum();
    assert_eq!(tree.node.reserved.tokens, Some(granted));
    assert!(granted + tree.node.usage.tokens <= 1_000, "{granted} of 1000");
    opened.add_permits(4);
    wait_for_end(&engine, &id).await;
}

#[tokio::test]
async fn agents_without_a_budget_of_their_own_draw_from_their_callers() {
    let (engine, run) = run_in_order((AgentLimits::default(), AgentLimits::default()), 40).await;
    // The root used 15 and the first agent 15; after the next reply of the root, 45 of 40 are used.
    let tree = engine.runs().trees().find_tree(&caller(), &run.id).await.unwrap();
    assert_eq!(tree.node.children.len(), 1, "{tree:?}");
    let reason = run.answer.as_ref().unwrap().stop_reason.unwrap();
    assert_eq!(reason.as_str(), "tokens");
}

#[tokio::test]
async fn fan_out_is_capped_with_a_message_for_the_model() {
    let store: Arc<MemoryStore> = Arc::default();
    let gate = Arc::new(tokio::sync::Semaphore::new(0));
    let opened = gate.clone();
    let model = SingleModel(Arc::new(AgentModel(Box::new(move |prompt: &ModelRequest| {
        let (role, results, gate) = (role(prompt), tool_results(prompt), gate.clone());
        Box::pin(async move {
            if role != "root" {
                gate.acquire().await.unwrap().forget();
                return says("done");
            }
            match results.is_empty() {
                true => calls(&["agent__a", "agent__b", "agent__c"]),
                false => says(results.join(" | ")),
            }
        })
    }))));
    let limits = toolcrib::EngineLimits { max_child_runs: 2, ..Default::default() };
    let engine = Engine::builder().store(store).models(Arc::new(model)).limits(limits);
    let engine = engine.start().await.unwrap();
    for id in ["a", "b", "c"] {
        engine.roster().define_agent(&caller(), agent(id), None).await.unwrap();
    }
    let id = start_run(&engine, RunRequest::default()).await;
    until("two agents work and the third is refused", async || {
        let tree = engine.runs().trees().find_tree(&caller(), &id).await.unwrap();
        let query = CallQuery { limit: 10, ..CallQuery::default() };
        let calls = engine.calls().calls(&caller(), query).await.unwrap().calls;
        // Before the third call is refused, an agent that ends would make room for it.
        let is_refused = calls.iter().any(|call| call.status == Status::Failed);
        (tree.run_count == 3 && is_refused).then_some(())
    })
    .await;
    opened.add_permits(2);
    let run = wait_for_end(&engine, &id).await;
    assert!(
        answer_of(&run).contains("has called 2 agents that still work, the maximum"),
        "{run:?}"
    );
    let tree = engine.runs().trees().find_tree(&caller(), &id).await.unwrap();
    assert_eq!(tree.run_count, 3);
}
