//! Denials in the audit log: none is lost, and a caller that is denied cannot fill the log.

use std::sync::Arc;

use toolcrib::domain::caller::AuthMethod;
use toolcrib::maintenance::repeated_denials;
use toolcrib::ports::clock::ManualClock;
use toolcrib::{CallRequest, Caller, Code, Engine, Role};

async fn try_call(engine: &Engine, agent: &str, tool: &str) {
    let caller = Caller::new("default", agent, Role::Agent, AuthMethod::Key);
    let request = CallRequest::new(tool, "{}").unwrap();
    let refused = engine.calls().invoke(&caller, request).await.err().unwrap();
    assert_eq!(refused.code(), Code::PermissionDenied);
}

/// Returns subject and reason of the denials in the log, oldest first.
async fn denials(engine: &Engine) -> Vec<(String, String)> {
    let log = engine.admin().audit_log(&Caller::operator("default"), None, 1_000).await.unwrap();
    let denials = log.into_iter().filter(|row| row.entry.action == "call.denied");
    let mut denials: Vec<_> = denials.map(|row| (row.entry.subject, row.entry.reason)).collect();
    denials.reverse();
    denials
}

#[tokio::test]
async fn equal_denials_are_one_entry_and_a_number() {
    let clock = ManualClock::at(1_700_000_000_000);
    let builder = Engine::builder().clock(Arc::new(clock.clone()));
    let engine = builder.build_idle().await.unwrap();
    for _ in 0..1_000 {
        try_call(&engine, "ada", "file.write").await;
    }
    try_call(&engine, "bob", "file.write").await;
    assert_eq!(denials(&engine).await.len(), 2, "one of each agent");
    repeated_denials::run_once(engine.registry()).await;
    assert_eq!(denials(&engine).await.len(), 2, "the minute is not over");
    clock.advance(60_000);
    repeated_denials::run_once(engine.registry()).await;
    let found = denials(&engine).await;
    assert_eq!(found.len(), 3, "{found:?}");
    assert_eq!(found[2].0, "file.write");
    assert!(found[2].1.starts_with("999 more like it: no rule"), "{found:?}");
    try_call(&engine, "ada", "file.write").await;
    assert_eq!(denials(&engine).await.len(), 4, "the next minute begins with an entry");
}

#[tokio::test]
async fn names_that_an_agent_tries_fill_no_log() {
    let clock = ManualClock::at(1_700_000_000_000);
    let builder = Engine::builder().clock(Arc::new(clock.clone()));
    let engine = builder.build_idle().await.unwrap();
    for n in 0..500 {
        try_call(&engine, "ada", &format!("tool.n{n}")).await;
    }
    assert_eq!(denials(&engine).await.len(), 100);
    clock.advance(60_000);
    repeated_denials::run_once(engine.registry()).await;
    let found = denials(&engine).await;
    assert_eq!(found.len(), 101, "{found:?}");
    assert!(found[100].1.starts_with("400 other denials"), "{found:?}");
    assert!(found[100].1.contains("tool.n499"), "{found:?}");
}

#[tokio::test]
async fn numbers_of_denials_are_written_at_the_end_of_the_process() {
    let store = Arc::new(toolcrib::ports::store::MemoryStore::default());
    let engine = Engine::builder().store(store.clone()).start().await.unwrap();
    for _ in 0..3 {
        try_call(&engine, "ada", "file.write").await;
    }
    engine.shut_down(std::time::Duration::ZERO).await;
    let engine = Engine::builder().store(store).build_idle().await.unwrap();
    let found = denials(&engine).await;
    assert_eq!(found.len(), 2, "{found:?}");
    assert!(found[1].1.starts_with("2 more like it"), "{found:?}");
}
