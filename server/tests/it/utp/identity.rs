//! Identity over NATS: keys and rules, protocol version v1r4, agents of the roster.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use serde_json::json;
use toolcrib_sources::utp::host::ToolHost;

use crate::support::nats::{Nats, report, result_card, tool};
use crate::support::{Server, until};

#[tokio::test]
async fn with_keys_the_rules_of_an_agent_apply_over_nats() {
    let Some(nats) = Nats::start().await else { return };
    let server = nats.server().await;
    let admin = server.keyed("p", "boss", "admin", &[]).await;
    let ada = server.keyed("p", "ada", "agent", &["calculation.*"]).await;
    admin.put("/v1/agents/ada", json!({ "worker_target": "w1" })).await.is(200);
    let peer = nats.peer().await;
    let turn = peer.request_in("p", "agent.ada.lease", json!({}), &[]).await;
    assert_eq!(turn["ok"], true, "{turn}");
    let call = |id: &str, tool: &str, args| json!({ "tool_call_id": id, "tool_name": tool, "arguments": args });
    let id = turn["agent_turn_id"].as_str().unwrap();
    let body = json!({
        "agent_turn_id": id,
        "turn_epoch": 1,
        "calls": [
            call("good", "calculation.eval", json!({ "expression": "1+1" })),
            call("bad", "weather.query", json!({ "city": "Oslo" })),
        ],
    });
    assert_eq!(peer.request_in("p", "agent.ada.dispatch", body, &[]).await["ok"], true);
    let body = json!({ "agent_turn_id": id, "turn_epoch": 1, "wait_ms": 20_000 });
    let resumed = peer.request_in("p", "agent.ada.resume", body, &[]).await;
    assert_eq!(resumed["results"][0]["status"], "success", "{resumed}");
    assert_eq!(resumed["results"][1]["error"]["code"], "auth_failed", "{resumed}");
    // Her key gives access to her own inbox and turns over HTTP only.
    ada.get("/v1/agents/ada/inbox").await.is(200);
    ada.get(&format!("/v1/agents/ada/turns/{id}")).await.is(200);
    ada.get("/v1/agents/eve/inbox").await.refused(403, "PERMISSION_DENIED");
    // An admin of another project cannot see the turn.
    let other = server.keyed("q", "eve", "admin", &[]).await;
    other.get(&format!("/v1/agents/ada/turns/{id}")).await.refused(404, "NOT_FOUND");
}

#[tokio::test]
async fn v1r4_commands_carry_the_identity_in_headers() {
    let Some(nats) = Nats::start().await else { return };
    let url = nats.url();
    let server = Server::with(|config| {
        config.nats.url = Some(url);
        config.nats.version = "v1r4".to_owned();
    })
    .await;
    let api = server.api();
    let target = json!({ "target_subject": "cmd.tool.hand.run" });
    api.post("/projects/default/tools", tool("hand.work", "hand", target)).await.is(201);
    let id = api.invoke("hand.work", json!({ "a": 1 })).await;
    let peer = nats.peer().await;
    let subject = "cg.v1r4.default.public.cmd.tool.hand.run";
    let command = peer.next_in("cg_cmd_v1r4", subject, "later").await;
    let mut fields: Vec<&String> = command.payload.as_object().unwrap().keys().collect();
    fields.sort();
    assert_eq!(fields, ["after_execution", "tool_call_card_id", "tool_name"]);
    assert_eq!(command.header("CG-Tool-Call-Id"), id);
    let headers: Vec<(&str, String)> =
        ["CG-Agent-Id", "CG-Turn-Id", "CG-Turn-Epoch", "CG-Step-Id", "CG-Tool-Call-Id"]
            .map(|name| (name, command.header(name)))
            .into();
    let mut full = command.payload.clone();
    full["agent_turn_id"] = json!(command.header("CG-Turn-Id"));
    full["tool_call_id"] = json!(id);
    let report_body = json!({
        "after_execution": "suspend", "status": "success", "tool_result_card_id": "r1",
        "card": result_card(&full, "r1", "success", json!({ "later": true })),
    });
    let mut map = async_nats::HeaderMap::new();
    headers.iter().for_each(|(name, value)| map.insert(*name, value.as_str()));
    let request = async_nats::Request::new()
        .payload(report_body.to_string().into_bytes().into())
        .headers(map);
    let to = "cg.v1r4.default.public.rpc.sys.l0.report";
    let reply = peer.client.send_request(to, request).await.unwrap();
    let answer: serde_json::Value = serde_json::from_slice(&reply.payload).unwrap();
    assert_eq!(answer["ok"], true, "{answer}");
    assert_eq!(api.finished(&id).await["result"], json!({ "later": true }));
}

#[tokio::test]
async fn a_v1r4_tool_service_reads_the_identity_from_headers() {
    let Some(nats) = Nats::start().await else { return };
    let url = nats.url();
    let server = Server::with(|config| {
        config.nats.url = Some(url);
        config.nats.version = "v1r4".to_owned();
    })
    .await;
    let api = server.api();
    let target = json!({ "target_subject": "cmd.tool.later.run" });
    api.post("/projects/default/tools", tool("later.work", "later", target)).await.is(201);
    let executions = Arc::new(AtomicUsize::new(0));
    let make = |host: ToolHost| {
        let executions = executions.clone();
        host.with_ack_wait(Duration::from_secs(1)).with_tool("later.work", move |job| {
            executions.fetch_add(1, Ordering::SeqCst);
            async move {
                if job.args["hangs"] == true {
                    std::future::pending::<()>().await;
                }
                Ok(json!({ "agent": job.agent_id, "has_deadline": job.deadline_ms.is_some() }))
            }
        })
    };
    let host = nats.host_version("v1r4", "later", make).await;
    let id = api.invoke("later.work", json!({})).await;
    let result = api.finished(&id).await["result"].clone();
    assert_eq!(result, json!({ "agent": "default", "has_deadline": true }));
    // A command without identity headers cannot be answered.
    let peer = nats.peer().await;
    let subject = "cg.v1r4.default.public.cmd.tool.later.run";
    peer.command(subject, b"{\"tool_call_card_id\": \"x\"}".to_vec()).await;
    let dead = until("a dead letter", || async {
        api.get("/v1/dead_letters").await.is(200)["dead_letters"].get(0).cloned()
    })
    .await;
    assert_eq!((&dead["kind"], &dead["subject"]), (&json!("command"), &json!(subject)), "{dead}");
    // After the host died in mid-call, the next host does not repeat an irreversible call.
    executions.store(0, Ordering::SeqCst);
    let id = api.invoke("later.work", json!({ "hangs": true })).await;
    until("the execution to start", || async {
        (executions.load(Ordering::SeqCst) == 1).then_some(())
    })
    .await;
    drop(host);
    let _host = nats.host_version("v1r4", "later", make).await;
    let call = api.finished(&id).await;
    assert!(call["error"]["message"].as_str().unwrap().contains("may have taken effect"), "{call}");
    assert_eq!(call["error"]["code"], "OUTCOME_UNKNOWN", "{call}");
    assert_eq!(call["error"]["retryable"], false, "{call}");
    assert_eq!(executions.load(Ordering::SeqCst), 1);
    // Wakeups and events of a turn carry the identity in headers, too.
    api.put("/v1/agents/ada", json!({ "worker_target": "w1" })).await.is(200);
    let turn = json!({ "agent_turn_id": "t1", "channel_id": "u_1" });
    api.post("/v1/agents/ada/turns", turn).await.is(201);
    api.post("/v1/agents/ada/turns/t1/stop", json!({})).await.is(200);
    let wakeup = "cg.v1r4.default.u_1.cmd.agent.w1.wakeup";
    let state = "cg.v1r4.default.u_1.evt.agent.ada.state";
    for (stream, subject) in [("cg_cmd_v1r4", wakeup), ("cg_evt_v1r4", state)] {
        let message = peer.next_in(stream, subject, "told").await;
        assert_eq!(message.header("CG-Agent-Id"), "ada");
        assert!(message.payload.get("agent_id").is_none(), "{}", message.payload);
    }
}

#[tokio::test]
async fn headers_that_contradict_the_subject_are_rejected() {
    let Some(nats) = Nats::start().await else { return };
    let server = nats.server().await;
    let (api, peer) = (server.api(), nats.peer().await);
    api.post("/projects/default/tools", tool("hand.work", "hand", json!({}))).await.is(201);
    let _host = nats
        .host("served", |host| host.with_tool("hand.work", |job| async move { Ok(job.args) }))
        .await;
    let id = api.invoke("hand.work", json!({ "x": 1 })).await;
    let command = peer.next("hand").await;
    command.ack().await;
    let mut report_body = report(&command.payload, "r1", "success");
    report_body["card"] = result_card(&command.payload, "r1", "success", json!(1));
    let other = [("CG-Project-Id", "other")];
    let answer = peer.request_in("default", "sys.l0.report", report_body.clone(), &other).await;
    assert_eq!((&answer["ok"], &answer["error"]["code"]), (&json!(false), &json!("bad_request")));
    for name in ["CG-Project-Id", "CG-Channel-Id"] {
        let mut headers = async_nats::HeaderMap::new();
        headers.insert(name, "other");
        let subject = "cg.v1r3.default.public.cmd.tool.served.run";
        let bytes = command.payload.to_string().into_bytes();
        let jetstream = async_nats::jetstream::new(peer.client.clone());
        jetstream
            .publish_with_headers(subject, headers, bytes.into())
            .await
            .unwrap()
            .await
            .unwrap();
        until("a dead letter", || async {
            let dead_letters = api.get("/v1/dead_letters").await.is(200);
            let dead_letters = dead_letters["dead_letters"].as_array().unwrap().clone();
            let word = name.to_lowercase();
            dead_letters.iter().find(|l| l["message"].as_str().unwrap().contains(&word)).map(|_| ())
        })
        .await;
    }
    assert_eq!(api.call(&id).await["status"], "PENDING", "no message was applied");
    let same_project = [("CG-Project-Id", "default")];
    assert_eq!(
        peer.request_in("default", "sys.l0.report", report_body, &same_project).await["ok"],
        true
    );
}

#[tokio::test]
async fn a_call_outside_a_turn_reaches_the_inbox_of_a_roster_agent() {
    let Some(nats) = Nats::start().await else { return };
    let server = nats.server().await;
    let (api, peer) = (server.api(), nats.peer().await);
    api.post("/projects/default/tools", tool("hand.work", "hand", json!({}))).await.is(201);
    for on_the_roster in [false, true] {
        if on_the_roster {
            api.put("/v1/agents/default", json!({ "worker_target": "w9" })).await.is(200);
        }
        let id = api.invoke("hand.work", json!({})).await;
        let command = peer.next("hand").await;
        command.ack().await;
        let mut report_body = report(&command.payload, &format!("r-{on_the_roster}"), "success");
        report_body["card"] =
            result_card(&command.payload, &format!("r-{on_the_roster}"), "success", json!(1));
        let answer = peer.request("sys.l0.report", report_body).await;
        assert_eq!(answer["inbox_id"].is_string(), on_the_roster, "{answer}");
        assert_eq!(api.finished(&id).await["status"], "SUCCEEDED");
    }
    let items = api.get("/v1/agents/default/inbox?wait_ms=20000").await.is(200);
    assert_eq!(items["items"].as_array().unwrap().len(), 1, "{items}");
    let woken = peer.next_on("cg.v1r3.default.public.cmd.agent.w9.wakeup", "w9").await;
    assert_eq!(woken.payload["inbox_id"], items["items"][0]["inbox_id"]);
}
