//! T39 and T42: after a rule is withdrawn, no call that it allowed is handed out, and the audit log
//! has every decision.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::by_form;
use crate::support::api::offer;
use crate::support::{Api, Server, until};

/// Time after a revocation in which a call may still be handed out.
const EFFECTIVE_WITHIN: Duration = Duration::from_secs(1);

/// Polls until `stopped`. Returns the ids that were handed out, with their times.
async fn poll_all(
    provider: Api,
    stopped: tokio_util::sync::CancellationToken,
) -> Vec<(String, Instant)> {
    let mut received = Vec::new();
    while !stopped.is_cancelled() {
        let path = "/internal/ingress/poll?client_id=pc_1&wait_ms=100&max=1";
        let work = provider.get(path).await.is(200);
        for request in work["requests"].as_array().unwrap() {
            let id = request["tool_call_id"].as_str().unwrap().to_owned();
            received.push((id, Instant::now()));
        }
    }
    received
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_call_is_handed_out_a_second_after_its_rule_was_withdrawn() {
    let calls = by_form(300, 3_000);
    let server = Server::start().await;
    let admin = server.keyed("p", "boss", "admin", &[]).await;
    let provider = server.keyed("p", "prov", "provider", &[]).await;
    let ada = server.keyed("p", "ada", "agent", &["x.*"]).await;
    provider.register("pc_1", json!([offer("x.one")])).await;
    let mut ids = Vec::new();
    for _ in 0..calls {
        ids.push(ada.invoke("x.one", json!({})).await);
    }
    // A client takes the calls one by one while the rule goes.
    let stopped = tokio_util::sync::CancellationToken::new();
    let polling = tokio::spawn(poll_all(provider.clone(), stopped.clone()));
    until("some calls are handed out", || async {
        let listed = admin.get("/v1/tool_calls?status=RUNNING&limit=10").await.is(200);
        (listed["tool_calls"].as_array().unwrap().len() >= 5).then_some(())
    })
    .await;
    admin.delete("/v1/rules?agent=ada&pattern=x.*").await.is(204);
    let withdrawn = Instant::now();
    until("no call is pending", || async {
        let listed = admin.get("/v1/tool_calls?status=PENDING&limit=1").await.is(200);
        listed["tool_calls"].as_array().unwrap().is_empty().then_some(())
    })
    .await;
    let took = withdrawn.elapsed();
    stopped.cancel();
    let received = polling.await.unwrap();
    let late: Vec<_> =
        received.iter().filter(|(_, at)| *at > withdrawn + EFFECTIVE_WITHIN).collect();
    assert!(late.is_empty(), "{} calls were handed out too late", late.len());
    let denied = ids.len() - received.len();
    assert!(denied > 0, "every call was handed out before the rule went");
    eprintln!("{denied} of {calls} calls denied {took:?} after the rule was withdrawn");
    for id in ids.iter().filter(|id| !received.iter().any(|(taken, _)| taken == *id)) {
        let call = admin.call(id).await;
        assert_eq!(call["error"]["code"], "PERMISSION_DENIED", "{call}");
    }
    // The audit log has each denial, once, with its tool, agent and reason.
    let mut entries: Vec<Value> = Vec::new();
    loop {
        let before =
            entries.last().map_or(String::new(), |last| format!("&before={}", last["number"]));
        let page = admin.get(&format!("/v1/audit?limit=1000{before}")).await.is(200);
        match page["audit"].as_array().unwrap().as_slice() {
            [] => break,
            listed => entries.extend_from_slice(listed),
        }
    }
    let denials = entries.iter().filter(|entry| entry["action"] == "call.denied");
    let denials: Vec<_> = denials.collect();
    assert_eq!(denials.len(), denied, "{} entries", entries.len());
    assert!(denials.iter().all(|entry| entry["agent"] == "ada" && entry["subject"] == "x.one"));
}
