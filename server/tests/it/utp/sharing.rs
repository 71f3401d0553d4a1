//! Several tool hosts serve one target.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use serde_json::json;
use toolcrib_sources::utp::host::ToolHost;

use crate::support::nats::{HostGuard, Nats, tool};

/// Starts a host that executes one command at a time and counts executions.
async fn start_slow_host(nats: &Nats, done: &Arc<AtomicUsize>) -> HostGuard {
    let done = done.clone();
    let make = |host: ToolHost| {
        let run = move |job: toolcrib_sources::utp::host::ToolJob| {
            let done = done.clone();
            async move {
                tokio::time::sleep(Duration::from_millis(700)).await;
                done.fetch_add(1, Ordering::SeqCst);
                Ok(job.args)
            }
        };
        host.with_max_concurrency(1)
            .with_ack_wait(Duration::from_secs(1))
            .with_tool("slow.work", run)
    };
    nats.host("slow", make).await
}

/// A host that fetched more commands than it can execute would block them for other hosts. After
/// the ack wait, another host could not know that such a command was never started.
#[tokio::test(flavor = "multi_thread")]
async fn commands_go_to_the_host_with_free_capacity() {
    let Some(nats) = Nats::start().await else { return };
    let server = nats.server().await;
    let api = server.api();
    let definition = tool("slow.work", "slow", json!({ "effect": "irreversible" }));
    api.post("/projects/default/tools", definition).await.is(201);
    let (one, other) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let _one = start_slow_host(&nats, &one).await;
    let mut ids = Vec::new();
    for n in 0..6 {
        ids.push(api.invoke("slow.work", json!({ "n": n })).await);
    }
    let _other = start_slow_host(&nats, &other).await;
    for (n, id) in ids.iter().enumerate() {
        let call = api.finished(id).await;
        assert_eq!((&call["status"], &call["result"]), (&json!("SUCCEEDED"), &json!({ "n": n })));
    }
    let (one, other) = (one.load(Ordering::SeqCst), other.load(Ordering::SeqCst));
    assert_eq!(one + other, 6, "each once");
    assert!(one >= 2 && other >= 2, "{one} and {other}: both had capacity");
}
