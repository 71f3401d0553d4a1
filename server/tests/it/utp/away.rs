//! The broker comes and goes, and so does the server: calls wait and go out, nothing is lost.

use std::sync::Arc;
use std::time::Duration;

use async_nats::jetstream::{self, message::PublishMessage};
use serde_json::json;
use tokio::sync::Notify;

use crate::support::nats::{Hand, Nats, report, result_card, tool};
use crate::support::{process, until};

#[tokio::test]
async fn while_nats_is_away_calls_wait_and_everything_else_works() {
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
    let said = api.get("/readyz").await.text;
    assert!(said.contains("[-]nats failed"), "{said}");
    let waiting = api.invoke("echo.work", json!({ "n": 2 })).await;
    let body = json!({ "run_id": "r", "args": {}, "timeout_ms": 300 });
    let short = api.invoke_with("echo.work", body).await;
    let sum = api.invoke("calculation.eval", json!({ "expression": "1+1" })).await;
    assert_eq!(api.finished(&sum).await["status"], "SUCCEEDED", "everything else works");
    let call = api.finished(&short).await;
    assert_eq!(call["status"], "TIMEOUT", "it waits until its deadline");
    assert!(call["error"]["message"].as_str().unwrap().contains("nobody took"), "{call}");
    assert_eq!(api.call(&waiting).await["status"], "PENDING");
    nats.up().await;
    assert_eq!(api.finished(&waiting).await["result"], json!({ "n": 2 }), "it goes out");
    until("readiness again", || async { (api.get("/readyz").await.status == 200).then_some(()) })
        .await;
}

#[tokio::test]
async fn a_server_that_starts_without_nats_takes_calls_for_it() {
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
async fn a_killed_server_publishes_what_it_had_not_and_keeps_what_it_had() {
    let Some(mut nats) = Nats::start().await else { return };
    let mut server = process::Server::new().with("NATS__URL", nats.url());
    server.start().await;
    let api = crate::support::Api::new(&format!("127.0.0.1:{}", server.port));
    api.post("/projects/default/tools", tool("hand.work", "hand", json!({}))).await.is(201);
    let hand = nats.hand().await;
    let out = api.invoke("hand.work", json!({ "n": 1 })).await;
    let command = hand.next("hand").await;
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
    // What was not published before is published now; what was is not published a second time.
    let hand = nats.hand().await;
    let mut second = hand.next("hand").await;
    second.ack().await;
    // A broker that is killed may have lost the acknowledgement, and gives the first once more.
    while second.payload["tool_call_id"] == out.as_str() {
        second = hand.next("hand").await;
        second.ack().await;
    }
    assert_eq!(second.payload["tool_call_id"], waiting.as_str());
    let jetstream = async_nats::jetstream::new(hand.client.clone());
    let stream = jetstream.get_stream("cg_cmd_v1r3").await.unwrap();
    assert_eq!(stream.cached_info().state.messages, 2, "each was published once");
    for (id, command, card) in [(&out, &command, "r1"), (&waiting, &second, "r2")] {
        let mut said = report(&command.payload, card, "success");
        said["card"] = result_card(&command.payload, card, "success", json!(card));
        assert_eq!(hand.ask("sys.l0.report", said).await["ok"], true);
        assert_eq!(api.finished(id).await["result"], card);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_result_waits_for_the_server_to_come_back() {
    let Some(nats) = Nats::start().await else { return };
    let mut server = process::Server::new().with("NATS__URL", nats.url());
    server.start().await;
    let api = crate::support::Api::new(&format!("127.0.0.1:{}", server.port));
    api.post("/projects/default/tools", tool("slow.work", "slow", json!({}))).await.is(201);
    let (begun, go_on) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let (begins, waits) = (begun.clone(), go_on.clone());
    let _host = nats
        .host("slow", move |host| {
            host.with_tool("slow.work", move |_| {
                let (begins, waits) = (begins.clone(), waits.clone());
                async move {
                    begins.notify_one();
                    waits.notified().await;
                    Ok(json!("done once"))
                }
            })
        })
        .await;
    let id = api.invoke("slow.work", json!({})).await;
    crate::support::soon("the tool to begin", begun.notified()).await;
    api.until_status(&id, "RUNNING").await;
    server.kill();
    // It is done, and there is nobody to tell.
    go_on.notify_one();
    server.start().await;
    let call = api.finished(&id).await;
    assert_eq!((&call["status"], &call["result"]), (&json!("SUCCEEDED"), &json!("done once")));
}

#[tokio::test]
async fn without_nats_the_http_side_works() {
    let server = crate::support::Server::start().await;
    let api = server.api();
    assert!(!api.get("/readyz?verbose").await.text.contains("nats"));
    api.post("/projects/default/tools", tool("hand.work", "hand", json!({}))).await.is(201);
    let id = api.invoke("hand.work", json!({ "n": 1 })).await;
    let cards = api.get(&format!("/v1/tool_calls/{id}/cards")).await.is(200);
    let asked = &cards["cards"][0];
    let command = json!({
        "tool_call_id": asked["tool_call_id"],
        "agent_turn_id": asked["metadata"]["agent_turn_id"],
        "turn_epoch": 1,
        "agent_id": "default",
        "after_execution": "suspend",
        "step_id": asked["metadata"]["step_id"],
    });
    let card = result_card(&command, "r1", "success", json!({ "done": true }));
    api.post("/v1/cards", card).await.is(201);
    let taken = api.post("/v1/tool_results", report(&command, "r1", "success")).await.is(200);
    assert_eq!(taken["duplicate"], false);
    assert_eq!(api.finished(&id).await["result"], json!({ "done": true }));
}

/// A stream of commands that somebody has made, which soon forgets what it was sent.
async fn forgetful(hand: &Hand) -> jetstream::Context {
    let jetstream = jetstream::new(hand.client.clone());
    let config = jetstream::stream::Config {
        name: "cg_cmd_v1r3".to_owned(),
        subjects: vec!["cg.v1r3.*.*.cmd.*.*.>".to_owned()],
        duplicate_window: Duration::from_millis(200),
        ..Default::default()
    };
    jetstream.create_stream(config).await.unwrap();
    jetstream
}

/// Returns when the broker has forgotten all that it was sent before.
async fn forgotten(jetstream: &jetstream::Context) {
    let publish = async || {
        let message = PublishMessage::build().message_id("probe").payload("{}".into());
        let subject = "cg.v1r3.default.public.cmd.tool.probe.run";
        jetstream.send_publish(subject, message).await.unwrap().await.unwrap()
    };
    assert!(!publish().await.duplicate);
    until("the broker to forget", || async { (!publish().await.duplicate).then_some(()) }).await;
}

#[tokio::test]
async fn a_command_that_the_broker_has_is_not_published_again_however_late() {
    let Some(mut nats) = Nats::start().await else { return };
    let hand = nats.hand().await;
    let jetstream = forgetful(&hand).await;
    let mut server = nats.server().await;
    let long = json!({ "timeout_ms": 600_000, "effect": "irreversible" });
    server.api().post("/projects/default/tools", tool("hand.work", "hand", long)).await.is(201);
    let first = server.api().invoke("hand.work", json!({})).await;
    let next = hand.next("hand").await;
    next.ack().await;
    assert_eq!(next.payload["tool_call_id"], first.as_str());
    forgotten(&jetstream).await;
    server = server.restart().await;
    let second = server.api().invoke("hand.work", json!({})).await;
    let next = hand.next("hand").await;
    assert_eq!(next.payload["tool_call_id"], second.as_str(), "{:?}", next.payload);
    // What the broker does not have goes out, once.
    nats.down();
    let third = server.api().invoke("hand.work", json!({})).await;
    server = server.restart().await;
    nats.up().await;
    let hand = nats.hand().await;
    let next = async || {
        let given = hand.next_on("cg.v1r3.*.*.cmd.tool.hand.>", "from_the_beginning").await;
        given.ack().await;
        given.payload["tool_call_id"].clone()
    };
    assert_eq!([next().await, next().await, next().await], [first, second, third]);
    let fourth = server.api().invoke("hand.work", json!({})).await;
    assert_eq!(next().await, fourth.as_str());
}
