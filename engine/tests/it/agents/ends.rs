//! The end of a tree: cancel, detach, failure, and a process that stops in between.

use toolcrib::Role;
use toolcrib::domain::caller::AuthMethod;

use super::*;

/// A root that calls `a`, which calls `b`; `b` never answers.
fn stuck_tree(prompt: &ModelRequest) -> BoxFuture<'static, ModelReply> {
    let (role, results) = (role(prompt), tool_results(prompt));
    Box::pin(async move {
        match (role.as_str(), results.is_empty()) {
            ("root", true) => calls(&["agent__a"]),
            ("a", true) => calls(&["agent__b"]),
            ("b", true) => std::future::pending().await,
            _ => says(results.join(" | ")),
        }
    })
}

async fn wait_for_tree(engine: &Engine, id: &str, runs: usize) -> toolcrib::runs::RunTree {
    until("the whole tree works", async || {
        let tree = engine.runs().trees().find_tree(&caller(), id).await.unwrap();
        (tree.run_count == runs).then_some(tree)
    })
    .await
}

#[tokio::test]
async fn a_cancel_reaches_the_whole_tree() {
    let store = Arc::default();
    let engine = engine_with(&store, vec![agent("a"), agent("b")], stuck_tree).await;
    let id = start_run(&engine, RunRequest::default()).await;
    wait_for_tree(&engine, &id, 3).await;
    let began = tokio::time::Instant::now();
    engine.runs().cancel_run(&caller(), &id, None).await.unwrap();
    let tree = until("all runs ended", async || {
        let tree = engine.runs().trees().find_tree(&caller(), &id).await.unwrap();
        (tree.open_count == 0).then_some(tree)
    })
    .await;
    assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
    for node in nodes(&tree.node) {
        assert_eq!(node.run().unwrap().status, RunStatus::Canceled, "{:?}", node.run());
        let Some(lineage) = &node.run().unwrap().lineage else { continue };
        let call = engine.calls().call(&caller(), &lineage.call_id).await.unwrap();
        assert_eq!(call.status, Status::Canceled, "{call:?}");
    }
}

#[tokio::test]
async fn a_canceled_call_stops_the_run_of_its_agent() {
    let store = Arc::default();
    let engine = engine_with(&store, vec![agent("b")], stuck_tree).await;
    let args = Json::from_value(&json!({ "instruction": "x" }));
    let request = CallRequest::of("agent.b", args);
    let ticket = engine.calls().invoke(&caller(), request).await.unwrap();
    let run_id = ticket.call.id.as_str().replace("tc_", "run_");
    until("the run started", async || engine.runs().find_run(&caller(), &run_id).await.ok()).await;
    engine.calls().cancel(&caller(), &ticket.call.id, None).await.unwrap();
    let run = wait_for_end(&engine, &run_id).await;
    assert_eq!(run.status, RunStatus::Canceled);
}

#[tokio::test]
async fn a_detached_agent_continues_after_its_callers_end() {
    let store = Arc::default();
    let gate = Arc::new(tokio::sync::Semaphore::new(0));
    let opened = gate.clone();
    let mut detached = agent("d");
    detached.on_parent_end = OnParentEnd::Detach;
    let engine = engine_with(&store, vec![agent("c"), detached], move |prompt| {
        let (role, results, gate) = (role(prompt), tool_results(prompt), gate.clone());
        Box::pin(async move {
            match (role.as_str(), results.is_empty()) {
                ("root", true) => calls(&["agent__c", "agent__d"]),
                ("c", _) => std::future::pending().await,
                ("d", _) => {
                    gate.acquire().await.unwrap().forget();
                    says("d is done")
                }
                _ => says("end"),
            }
        })
    })
    .await;
    let id = start_run(&engine, RunRequest::default()).await;
    let tree = wait_for_tree(&engine, &id, 3).await;
    let child = |name: &str| {
        let of_agent = |run: &Run| run.lineage.as_ref().unwrap().agent_id == name;
        let runs = tree.node.children.iter().map(|node| node.run().unwrap().clone());
        runs.into_iter().find(of_agent).unwrap()
    };
    let (c, d) = (child("c"), child("d"));
    engine.runs().cancel_run(&caller(), &id, None).await.unwrap();
    assert_eq!(wait_for_end(&engine, &c.id).await.status, RunStatus::Canceled);
    let open = engine.runs().find_run(&caller(), &d.id).await.unwrap();
    assert!(!open.status.is_terminal());
    opened.add_permits(1);
    let run = wait_for_end(&engine, &d.id).await;
    assert_eq!(answer_of(&run), "d is done");
    let call = d.lineage.unwrap().call_id;
    let call = engine.calls().wait(&caller(), &call, Until::EndedWithin(5_000)).await.unwrap();
    assert_eq!(call.status, Status::Succeeded, "its call has its result");
}

#[tokio::test]
async fn a_delegation_survives_a_restart_with_one_outcome_per_child() {
    let store: Arc<MemoryStore> = Arc::default();
    let engine = engine_with(&store, vec![agent("a"), agent("b")], stuck_tree).await;
    let id = start_run(&engine, RunRequest::default()).await;
    let before = wait_for_tree(&engine, &id, 3).await;
    engine.shut_down(Duration::ZERO).await;
    drop(engine);

    let engine = engine_with(&store, vec![], |prompt| {
        let results = tool_results(prompt);
        ready(match role(prompt).as_str() {
            "b" => says("b is done"),
            _ => says(results.join(" | ")),
        })
    })
    .await;
    let run = wait_for_end(&engine, &id).await;
    assert!(answer_of(&run).contains("b is done"), "{run:?}");
    let after = engine.runs().trees().find_tree(&caller(), &id).await.unwrap();
    let ids = |tree: &toolcrib::runs::RunTree| -> Vec<String> {
        nodes(&tree.node).iter().map(|node| node.run().unwrap().id.clone()).collect()
    };
    assert_eq!(ids(&before), ids(&after), "no run is started twice");
    for node in nodes(&after.node) {
        let Some(lineage) = &node.run().unwrap().lineage else { continue };
        let call = engine.calls().call(&caller(), &lineage.call_id).await.unwrap();
        assert_eq!((call.status, call.attempt), (Status::Succeeded, 1), "{call:?}");
    }
}

#[tokio::test]
async fn children_of_a_parent_that_ended_before_a_crash_are_canceled() {
    let store: Arc<MemoryStore> = Arc::default();
    let engine = engine_with(&store, vec![agent("a"), agent("b")], stuck_tree).await;
    let id = start_run(&engine, RunRequest::default()).await;
    let tree = wait_for_tree(&engine, &id, 3).await;
    engine.shut_down(Duration::ZERO).await;
    drop(engine);
    // As if the process had died between the end of the parent and the end of its children.
    use toolcrib::ports::store::Store;
    let mut ended = store.runs().run("default", &id).await.unwrap().unwrap();
    (ended.status, ended.ended_ms) = (RunStatus::Canceled, Some(ended.updated_ms));
    ended.version += 1;
    store.runs().save_run(ended, Vec::new()).await.unwrap();
    let engine = engine_with(&store, vec![], stuck_tree).await;
    for node in nodes(&tree.node).into_iter().skip(1) {
        let run = wait_for_end(&engine, &node.run().unwrap().id).await;
        assert_eq!(run.status, RunStatus::Canceled);
    }
}

#[tokio::test]
async fn the_run_id_of_a_call_gives_no_rights_of_another_caller() {
    let store = Arc::default();
    let engine = engine_with(&store, vec![agent("a"), agent("b")], stuck_tree).await;
    let id = start_run(&engine, RunRequest::default()).await;
    wait_for_tree(&engine, &id, 3).await;
    let other = Caller::new("default", "bob", Role::Agent, AuthMethod::Anonymous);
    let args = Json::from_value(&json!({ "instruction": "x" }));
    let request = CallRequest { run_id: id.clone(), ..CallRequest::of("agent.b", args) };
    let ticket = engine.calls().invoke(&other, request).await.unwrap();
    let run_id = ticket.call.id.as_str().replace("tc_", "run_");
    let run =
        until("the run started", async || engine.runs().find_run(&caller(), &run_id).await.ok())
            .await;
    assert_eq!(run.owner.agent, "bob");
    assert_eq!(run.lineage.unwrap().parent_run_id, None);
    let tree = engine.runs().trees().find_tree(&caller(), &id).await.unwrap();
    assert_eq!(tree.run_count, 3, "the tree of the other caller is unchanged");
}
