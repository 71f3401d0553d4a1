//! Outages of the broker and the server: calls wait, are published afterwards, and none is lost.

use std::sync::Arc;
use std::time::Duration;

use async_nats::jetstream::{self, message::PublishMessage};
use serde_json::json;
use tokio::sync::Notify;

use crate::support::nats::{Nats, NatsPeer, report, result_card, tool};
use crate::support::{process, until};

#[tokio::test]
async fn during_a_nats_outage_utp_calls_wait_and_other_calls_work() {
    let Some(mut nats) = Nats::start().await else { return };
    let server = nats.server().await;
    let api = server.api();
    api.post("/projects/default/tools", tool("echo.work", "echo", json!({}))).await.is(201);
    let _host = nats
        .host("echo", |host| host.with_tool("echo.work", |job| async move { Ok(job.args) }))
        .await;
    let first = api.invoke("echo.work", json!({ "n": 1 })).await;
    assert_eq!(api.finished(&first).await["status"], "SUCCEEDED");
    until("readiness", || async { (api.get("/readyz").await.status == 200).then_some(()) }).await;
    let verbose = api.get("/readyz?verbose").await;
    assert!(verbose.text.contains("[+]nats ok"), "{}", verbose.text);
    nats.down();
    until("the server to notice", || async {
        (api.get("/readyz").await.status == 503).then_some(())
    })
    .await;
    let report_text = api.get("/readyz").await.text;
    assert!(report_text.contains("[-]nats failed"), "{report_text}");
    let waiting = api.invoke("echo.work", json!({ "n": 2 })).await;
    let body = json!({ "run_id": "r", "args": {}, "timeout_ms": 300 });
    let short = api.invoke_with("echo.work", body).await;
    let sum = api.invoke("calculation.eval", json!({ "expression": "1+1" })).await;
    assert_eq!(api.finished(&sum).await["status"], "SUCCEEDED", "everything else works");
    let call = api.finished(&short).await;
    assert_eq!(call["status"], "TIMEOUT", "it waits until its deadline");
    assert!(
        call["error"]["message"].as_str().unwrap().contains("no tool service announced"),
        "{call}"
    );
    assert_eq!(api.call(&waiting).await["status"], "PENDING");
    nats.up().await;
    assert_eq!(
        api.finished(&waiting).await["result"],
        json!({ "n": 2 }),
        "the command is published"
    );
    until("readiness again", || async { (api.get("/readyz").await.status == 200).then_some(()) })
        .await;
}

#[tokio::test]
async fn a_server_started_without_nats_accepts_utp_calls() {
    let Some(mut nats) = Nats::start().await else { return };
    nats.down();
    let server = nats.server().await;
    let api = server.api();
    api.post("/projects/default/tools", tool("echo.work", "echo", json!({}))).await.is(201);
    let id = api.invoke("echo.work", json!({ "n": 1 })).await;
    nats.up().await;
    let _host = nats
        .host("echo", |host| host.with_tool("echo.work", |job| async move { Ok(job.args) }))
        .await;
    assert_eq!(api.finished(&id).await["result"], json!({ "n": 1 }));
}

#[tokio::test]
async fn a_restarted_server_publishes_each_command_once() {
    let Some(mut nats) = Nats::start().await else { return };
    let mut server = process::Server::new().with("NATS__URL", nats.url());
    server.start().await;
    let api = crate::support::Api::new(&format!("127.0.0.1:{}", server.port));
    api.post("/projects/default/tools", tool("hand.work", "hand", json!({}))).await.is(201);
    let peer = nats.peer().await;
    let published = api.invoke("hand.work", json!({ "n": 1 })).await;
    let command = peer.next("hand").await;
    command.ack().await;
    nats.down();
    let waiting = api.invoke("hand.work", json!({ "n": 2 })).await;
    server.kill();
    nats.up().await;
    server.spawn();
    until("the server", || async {
        (api.request(reqwest::Method::GET, "/livez").send().await.ok()?.status() == 200)
            .then_some(())
    })
    .await;
    // The server publishes the pending command now, and does not publish the first one again.
    let peer = nats.peer().await;
    let mut second = peer.next("hand").await;
    second.ack().await;
    // A killed broker may have lost the acknowledgement and redeliver the first command.
    while second.payload["tool_call_id"] == published.as_str() {
        second = peer.next("hand").await;
        second.ack().await;
    }
    assert_eq!(second.payload["tool_call_id"], waiting.as_str());
    let jetstream = async_nats::jetstream::new(peer.client.clone());
    let stream = jetstream.get_stream("cg_cmd_v1r3").await.unwrap();
    assert_eq!(stream.cached_info().state.messages, 2, "each was published once");
    for (id, command, card) in [(&published, &command, "r1"), (&waiting, &second, "r2")] {
        let mut report_body = report(&command.payload, card, "success");
        report_body["card"] = result_card(&command.payload, card, "success", json!(card));
        assert_eq!(peer.request("sys.l0.report", report_body).await["ok"], true);
        assert_eq!(api.finished(id).await["result"], card);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_result_reaches_the_restarted_server() {
    let Some(nats) = Nats::start().await else { return };
    let mut server = process::Server::new().with("NATS__URL", nats.url());
    server.start().await;
    let api = crate::support::Api::new(&format!("127.0.0.1:{}", server.port));
    api.post("/projects/default/tools", tool("slow.work", "slow", json!({}))).await.is(201);
    let (started, resume) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let (start_signal, resume_signal) = (started.clone(), resume.clone());
    let _host = nats
        .host("slow", move |host| {
            host.with_tool("slow.work", move |_| {
                let (start_signal, resume_signal) = (start_signal.clone(), resume_signal.clone());
                async move {
                    start_signal.notify_one();
                    resume_signal.notified().await;
                    Ok(json!("done once"))
                }
            })
        })
        .await;
    let id = api.invoke("slow.work", json!({})).await;
    crate::support::soon("the tool to begin", started.notified()).await;
    api.until_status(&id, "RUNNING").await;
    server.kill();
    // The tool finishes while the server is down.
    resume.notify_one();
    server.start().await;
    let call = api.finished(&id).await;
    assert_eq!((&call["status"], &call["result"]), (&json!("SUCCEEDED"), &json!("done once")));
}

#[tokio::test]
async fn without_nats_results_can_be_reported_over_http() {
    let server = crate::support::Server::start().await;
    let api = server.api();
    assert!(!api.get("/readyz?verbose").await.text.contains("nats"));
    api.post("/projects/default/tools", tool("hand.work", "hand", json!({}))).await.is(201);
    let id = api.invoke("hand.work", json!({ "n": 1 })).await;
    let cards = api.get(&format!("/v1/tool_calls/{id}/cards")).await.is(200);
    let call_card = &cards["cards"][0];
    let command = json!({
        "tool_call_id": call_card["tool_call_id"],
        "agent_turn_id": call_card["metadata"]["agent_turn_id"],
        "turn_epoch": 1,
        "agent_id": "default",
        "after_execution": "suspend",
        "step_id": call_card["metadata"]["step_id"],
    });
    let card = result_card(&command, "r1", "success", json!({ "done": true }));
    api.post("/v1/cards", card).await.is(201);
    let answer = api.post("/v1/tool_results", report(&command, "r1", "success")).await.is(200);
    assert_eq!(answer["duplicate"], false);
    assert_eq!(api.finished(&id).await["result"], json!({ "done": true }));
}

/// Creates the stream of commands with a short duplicate window.
async fn create_stream_with_short_window(peer: &NatsPeer) -> jetstream::Context {
    let jetstream = jetstream::new(peer.client.clone());
    let config = jetstream::stream::Config {
        name: "cg_cmd_v1r3".to_owned(),
        subjects: vec!["cg.v1r3.*.*.cmd.*.*.>".to_owned()],
        duplicate_window: Duration::from_millis(200),
        ..Default::default()
    };
    jetstream.create_stream(config).await.unwrap();
    jetstream
}

/// Waits until the duplicate window of all earlier messages is over.
async fn wait_for_duplicate_window(jetstream: &jetstream::Context) {
    let publish = async || {
        let message = PublishMessage::build().message_id("probe").payload("{}".into());
        let subject = "cg.v1r3.default.public.cmd.tool.probe.run";
        jetstream.send_publish(subject, message).await.unwrap().await.unwrap()
    };
    assert!(!publish().await.duplicate);
    until("the end of the duplicate window", || async {
        (!publish().await.duplicate).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_stored_command_is_not_republished_after_the_duplicate_window() {
    let Some(mut nats) = Nats::start().await else { return };
    let peer = nats.peer().await;
    let jetstream = create_stream_with_short_window(&peer).await;
    let mut server = nats.server().await;
    let long = json!({ "timeout_ms": 600_000, "effect": "irreversible" });
    server.api().post("/projects/default/tools", tool("hand.work", "hand", long)).await.is(201);
    let first = server.api().invoke("hand.work", json!({})).await;
    let next = peer.next("hand").await;
    next.ack().await;
    assert_eq!(next.payload["tool_call_id"], first.as_str());
    wait_for_duplicate_window(&jetstream).await;
    server = server.restart().await;
    let second = server.api().invoke("hand.work", json!({})).await;
    let next = peer.next("hand").await;
    assert_eq!(next.payload["tool_call_id"], second.as_str(), "{:?}", next.payload);
    // A command that the broker does not have is published once.
    nats.down();
    let third = server.api().invoke("hand.work", json!({})).await;
    server = server.restart().await;
    nats.up().await;
    let peer = nats.peer().await;
    let next = async || {
        let message = peer.next_on("cg.v1r3.*.*.cmd.tool.hand.>", "from_the_beginning").await;
        message.ack().await;
        message.payload["tool_call_id"].clone()
    };
    assert_eq!([next().await, next().await, next().await], [first, second, third]);
    let fourth = server.api().invoke("hand.work", json!({})).await;
    assert_eq!(next().await, fourth.as_str());
}
