//! Commands to the system itself (`cmd.sys.…`) that cannot be executed: each becomes a dead letter.

use async_nats::jetstream::stream::Config as StreamConfig;
use serde_json::{Value, json};

use crate::support::nats::Nats;
use crate::support::process::{PATIENCE, eventually};
use crate::support::{Api, process, until};

async fn wait_for_dead_letter(api: &Api, subject: &str) -> Value {
    until(&format!("a dead letter of {subject}"), || async {
        let listed = api.get("/v1/dead_letters?limit=200").await.is(200);
        let all = listed["dead_letters"].as_array().unwrap();
        all.iter().find(|dead| dead["subject"] == subject).cloned()
    })
    .await
}

#[tokio::test]
async fn every_command_that_cannot_be_answered_becomes_a_dead_letter() {
    let Some(nats) = Nats::start().await else { return };
    let server = nats.server().await;
    let (api, peer) = (server.api(), nats.peer().await);
    let body = json!({ "tool_call_id": "c1", "agent_id": "ada", "tool_name": "fork_join" });
    for tool in ["delegate_async", "launch_principal", "ask_expert", "fork_join", "provision_agent"]
    {
        let subject = format!("cg.v1r3.default.public.cmd.sys.pmo.internal.{tool}");
        peer.command(&subject, body.to_string().into_bytes()).await;
        let dead = wait_for_dead_letter(&api, &subject).await;
        assert_eq!((&dead["kind"], &dead["reason"]), (&json!("command"), &json!("malformed")));
        let message = dead["message"].as_str().unwrap();
        assert!(message.contains(tool) && message.contains("was not executed"), "{dead}");
        assert_eq!(dead["payload"], body.to_string());
    }
    // Unknown commands, whatever their subject and body.
    for (subject, body) in [
        ("cg.v1r3.default.public.cmd.sys.ui.action", &b"{\"action_id\": \"a\"}"[..]),
        ("cg.v1r3.default.u_7.cmd.sys.pmo.internal.make_coffee", b"{}"),
        ("cg.v1r3.default.public.cmd.sys.pmo.other.deep.down", b"\xff\xfe"),
        ("cg.v1r3.default.public.cmd.sys.judge.retry", b""),
        ("cg.v1r3.default.public.cmd.sys.judge", b"{}"),
    ] {
        peer.command(subject, body.to_vec()).await;
        let dead = wait_for_dead_letter(&api, subject).await;
        assert_eq!(
            (&dead["kind"], &dead["reason"]),
            (&json!("command"), &json!("unknown_command"))
        );
        let command = subject.split(".cmd.").nth(1).unwrap();
        assert!(dead["message"].as_str().unwrap().contains(&format!("cmd.{command}")), "{dead}");
        // Publishing it again would only make another dead letter.
        let path = format!("/v1/dead_letters/{}/redrive", dead["id"].as_str().unwrap());
        let error = api.post(&path, json!({})).await.refused(409, "CONFLICT");
        assert!(error["message"].as_str().unwrap().contains("cmd.sys"), "{error}");
    }
    // A project that was never created keeps its dead letters, too.
    let subject = "cg.v1r3.elsewhere.public.cmd.sys.pmo.internal.fork_join";
    peer.command(subject, b"{}".to_vec()).await;
    wait_for_dead_letter(&api.clone().project("elsewhere"), subject).await;
    let metrics = api.get("/metrics").await.text;
    for reason in ["malformed", "unknown_command"] {
        let line = format!("toolcrib_dead_letters_total{{reason=\"{reason}\"}}");
        assert!(metrics.contains(&line), "{metrics}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_to_the_system_waits_for_a_server_that_was_killed() {
    let Some(nats) = Nats::start().await else { return };
    let mut server = process::Server::new().with("NATS__URL", nats.url());
    server.start().await;
    let peer = nats.peer().await;
    let subject = |n: usize| format!("cg.v1r3.default.public.cmd.sys.pmo.internal.job_{n}");
    peer.command(&subject(1), b"{}".to_vec()).await;
    let count = async |server: &process::Server| {
        let listed = server.http.get(server.url("/v1/dead_letters?limit=200")).send().await;
        let listed: Value = listed.unwrap().json().await.unwrap();
        listed["dead_letters"].as_array().unwrap().len()
    };
    eventually("the first dead letter", PATIENCE, async || {
        (count(&server).await == 1).then_some(())
    })
    .await;
    server.kill();
    for n in 2..=4 {
        peer.command(&subject(n), b"{}".to_vec()).await;
    }
    server.start().await;
    eventually("the commands sent meanwhile", PATIENCE, async || {
        (count(&server).await == 4).then_some(())
    })
    .await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_cannot_be_changed_costs_one_warning() {
    let Some(mut nats) = Nats::start().await else { return };
    let jetstream = async_nats::jetstream::new(nats.peer().await.client);
    let commands = |subjects: &[&str]| StreamConfig {
        name: "cg_cmd_v1r3".into(),
        subjects: subjects.iter().map(|subject| (*subject).to_owned()).collect(),
        ..StreamConfig::default()
    };
    let (long, short) = ("cg.v1r3.*.*.cmd.*.*.>", "cg.v1r3.*.*.cmd.sys.*");
    jetstream.create_stream(commands(&[long])).await.unwrap();
    // Another stream has the subject, so the broker refuses to add it to this one.
    let other = StreamConfig { name: "other".into(), ..commands(&[short]) };
    jetstream.create_stream(other).await.unwrap();
    let mut server = process::Server::new().with("NATS__URL", nats.url());
    server.start().await;
    let has_dead_letter = async |server: &process::Server, subject: &str| {
        let listed = server.http.get(server.url("/v1/dead_letters?limit=200")).send().await;
        let listed: Value = listed.unwrap().json().await.unwrap();
        let all = listed["dead_letters"].as_array().unwrap();
        all.iter().any(|dead| dead["subject"] == subject).then_some(())
    };
    let subject = "cg.v1r3.default.public.cmd.sys.judge.retry";
    nats.peer().await.command(subject, b"{}".to_vec()).await;
    eventually("the command with a suffix", PATIENCE, async || {
        has_dead_letter(&server, subject).await
    })
    .await;
    let log = server.log();
    assert_eq!(log.matches("does not store commands to the system").count(), 1, "{log}");
    assert!(!log.contains("cannot be received"), "{log}");
    // An operator moves the subject, and the server finds it after the next reconnect.
    jetstream.delete_stream("other").await.unwrap();
    jetstream.update_stream(commands(&[long, short])).await.unwrap();
    nats.down();
    nats.up().await;
    let subject = "cg.v1r3.default.public.cmd.sys.judge";
    nats.peer().await.command(subject, b"{}".to_vec()).await;
    eventually("the command without a suffix", PATIENCE, async || {
        has_dead_letter(&server, subject).await
    })
    .await;
    server.stop().await;
}
