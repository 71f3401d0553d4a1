//! Several processes serve one target.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use serde_json::json;
use toolcrib_sources::utp::host::ToolHost;

use crate::support::nats::{Hosted, Nats, tool};

/// One that does one thing at a time, and counts.
async fn slow(nats: &Nats, done: &Arc<AtomicUsize>) -> Hosted {
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

/// Who takes more than it can do lets it wait where nobody else can take it; and when the broker
/// has waited long enough, the next one cannot know that it was never begun.
#[tokio::test(flavor = "multi_thread")]
async fn commands_are_taken_by_who_has_a_place_for_them() {
    let Some(nats) = Nats::start().await else { return };
    let server = nats.server().await;
    let api = server.api();
    let definition = tool("slow.work", "slow", json!({ "effect": "irreversible" }));
    api.post("/projects/default/tools", definition).await.is(201);
    let (one, other) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let _one = slow(&nats, &one).await;
    let mut ids = Vec::new();
    for n in 0..6 {
        ids.push(api.invoke("slow.work", json!({ "n": n })).await);
    }
    let _other = slow(&nats, &other).await;
    for (n, id) in ids.iter().enumerate() {
        let call = api.finished(id).await;
        assert_eq!((&call["status"], &call["result"]), (&json!("SUCCEEDED"), &json!({ "n": n })));
    }
    let (one, other) = (one.load(Ordering::SeqCst), other.load(Ordering::SeqCst));
    assert_eq!(one + other, 6, "each once");
    assert!(one >= 2 && other >= 2, "{one} and {other}: both had places");
}
