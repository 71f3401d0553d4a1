//! Turn events on `evt.agent.…`.

use serde_json::{Value, json};

use crate::support::nats::{Nats, NatsPeer, report, result_card, tool};

async fn next_event(peer: &NatsPeer, kind: &str) -> (Value, String) {
    let subject = format!("cg.v1r3.default.public.evt.agent.ada.{kind}");
    let message = peer.next_in("cg_evt_v1r3", &subject, &format!("news_{kind}")).await;
    message.ack().await;
    (message.payload.clone(), message.header("traceparent"))
}

#[tokio::test]
async fn a_turn_publishes_its_states_steps_and_end() {
    let Some(nats) = Nats::start().await else { return };
    let server = nats.server().await;
    let (api, peer) = (server.api(), nats.peer().await);
    api.put("/v1/agents/ada", json!({ "worker_target": "w1" })).await.is(200);
    let ends = json!({ "after_execution": "terminate" });
    api.post("/projects/default/tools", tool("hand.last", "hand", ends)).await.is(201);
    let trace = "00-4BF92F3577B34DA6A3CE929D0E0E4736-00F067AA0BA902B7-01";
    let lease = json!({ "agent_turn_id": "t1", "traceparent": trace });
    let turn = api.post("/v1/agents/ada/turns", lease).await.is(201);
    assert_eq!(turn["traceparent"], trace.to_lowercase(), "in lower case");
    let (state, traceparent) = next_event(&peer, "state").await;
    assert_eq!((&state["agent_id"], &state["agent_turn_id"]), (&json!("ada"), &json!("t1")));
    assert_eq!((&state["status"], &state["turn_epoch"]), (&json!("running"), &json!(1)));
    assert!(state["updated_at"].as_str().unwrap().ends_with('Z'), "{state}");
    assert_eq!(&traceparent[3..35], &trace[3..35].to_lowercase(), "in the turn's trace");
    let call = |id: &str, tool: &str, args: Value| json!({ "tool_call_id": id, "tool_name": tool, "arguments": args });
    let body = json!({ "turn_epoch": 1, "step_id": "s1", "calls": [
        call("c1", "calculation.eval", json!({ "expression": "6*7" })),
    ]});
    let sent = api.post("/v1/agents/ada/turns/t1/dispatch", body).await.is(200);
    let (state, _) = next_event(&peer, "state").await;
    assert_eq!(state["status"], "suspended");
    assert_eq!(state["metadata"]["waiting_tool_call_ids"], json!(["c1"]), "{state}");
    let (step, _) = next_event(&peer, "step").await;
    assert_eq!((&step["phase"], &step["step_id"]), (&json!("executing"), &json!("s1")), "{step}");
    let id = sent["calls"][0]["call_id"].as_str().unwrap();
    let cards = api.get(&format!("/v1/tool_calls/{id}/cards")).await.is(200);
    assert_eq!(step["new_card_ids"], json!([cards["cards"][0]["card_id"]]));
    // The call belongs to the turn's trace, regardless of the case of the trace id.
    assert_eq!(cards["cards"][0]["metadata"]["trace_id"], trace[3..35].to_lowercase());
    let resume = json!({ "turn_epoch": 1, "wait_ms": 20_000 });
    api.post("/v1/agents/ada/turns/t1/resume", resume).await.is(200);
    assert_eq!(next_event(&peer, "state").await.0["status"], "running");
    assert_eq!(next_event(&peer, "step").await.0["phase"], "completed");
    // The renewal of a lease is not published; a stop is.
    api.post("/v1/agents/ada/turns/t1/renew", json!({ "turn_epoch": 2 })).await.is(200);
    api.post("/v1/agents/ada/turns/t1/stop", json!({ "reason": "enough" })).await.is(200);
    let (state, _) = next_event(&peer, "state").await;
    assert_eq!((&state["status"], &state["turn_epoch"]), (&json!("idle"), &json!(3)), "{state}");
    let (task, _) = next_event(&peer, "task").await;
    assert_eq!((&task["agent_turn_id"], &task["status"]), (&json!("t1"), &json!("failed")));
    assert_eq!((&task["error_code"], &task["error"]), (&json!("stopped"), &json!("enough")));
    // The next published end is the end of the next turn.
    let turn = json!({ "agent_turn_id": "t2" });
    api.post("/v1/agents/ada/turns", turn).await.is(201);
    api.post("/v1/agents/ada/turns/t2/finish", json!({ "turn_epoch": 1 })).await.is(200);
    let (task, _) = next_event(&peer, "task").await;
    assert_eq!((&task["agent_turn_id"], &task["status"]), (&json!("t2"), &json!("success")));
}

#[tokio::test]
async fn the_end_of_a_turn_names_its_deliverable() {
    let Some(nats) = Nats::start().await else { return };
    let server = nats.server().await;
    let (api, peer) = (server.api(), nats.peer().await);
    api.put("/v1/agents/ada", json!({ "worker_target": "w1" })).await.is(200);
    let card = json!({
        "card_id": "answer", "type": "task.deliverable", "author_id": "ada",
        "content": { "__type__": "TextContent", "text": "42" },
    });
    api.post("/v1/cards", card).await.is(201);
    api.post("/v1/agents/ada/turns", json!({ "agent_turn_id": "t1" })).await.is(201);
    let finish = |card: &str| json!({ "turn_epoch": 1, "deliverable_card_id": card });
    let path = "/v1/agents/ada/turns/t1/finish";
    api.post(path, finish("nothing")).await.refused(404, "NOT_FOUND");
    assert_eq!(api.post(path, finish("answer")).await.is(200)["deliverable_card_id"], "answer");
    let turn = api.get("/v1/agents/ada/turns/t1").await.is(200);
    assert_eq!(turn["deliverable_card_id"], "answer", "{turn}");
    let (task, _) = next_event(&peer, "task").await;
    let ended = (&task["status"], &task["deliverable_card_id"]);
    assert_eq!(ended, (&json!("success"), &json!("answer")), "{task}");
    // A result that ends the turn is its deliverable.
    let ends = json!({ "after_execution": "terminate" });
    api.post("/projects/default/tools", tool("hand.last", "hand", ends)).await.is(201);
    api.post("/v1/agents/ada/turns", json!({ "agent_turn_id": "t2" })).await.is(201);
    let call = json!({ "tool_call_id": "c", "tool_name": "hand.last", "arguments": {} });
    let step = json!({ "turn_epoch": 1, "calls": [call] });
    api.post("/v1/agents/ada/turns/t2/dispatch", step).await.is(200);
    let command = peer.next("hand").await;
    command.ack().await;
    let mut body = report(&command.payload, "r1", "success");
    body["card"] = result_card(&command.payload, "r1", "success", json!({ "answer": 42 }));
    assert_eq!(peer.request("sys.l0.report", body).await["ok"], true);
    let resume = json!({ "turn_epoch": 1, "wait_ms": 20_000 });
    let ended = api.post("/v1/agents/ada/turns/t2/resume", resume).await.is(200);
    let outcome = (&ended["status"], &ended["deliverable_card_id"]);
    assert_eq!(outcome, (&json!("finished"), &json!("r1")), "{ended}");
    let (task, _) = next_event(&peer, "task").await;
    let cards = (&task["deliverable_card_id"], &task["tool_result_card_id"]);
    assert_eq!(cards, (&json!("r1"), &json!("r1")), "{task}");
}

#[tokio::test]
async fn doctor_checks_nats() {
    let Some(mut nats) = Nats::start().await else { return };
    let doctor = |url: String| {
        let dir = tempfile::tempdir().unwrap();
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_toolcrib"));
        command.args(["doctor", "--json", "--listen", "127.0.0.1:0"]).current_dir(dir.path());
        let output = command.env("TOOLCRIB_NATS__URL", url).output().unwrap();
        let output: Value = serde_json::from_slice(&output.stdout).unwrap();
        let checks = output["checks"].as_array().unwrap().clone();
        checks.into_iter().find(|check| check["check"] == "nats").unwrap()
    };
    let found = doctor(nats.url());
    assert_eq!(found["state"], "ok", "{found}");
    assert!(found["message"].as_str().unwrap().contains("with JetStream"), "{found}");
    nats.down();
    let found = doctor(nats.url());
    assert_eq!(found["state"], "error", "{found}");
    assert!(found["hint"].as_str().unwrap().contains("nats.url"), "{found}");
}
