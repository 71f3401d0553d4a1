//! Calls that come again while their equal waits, and batches in which one entry waits.

use serde_json::{Value, json};

use super::Fixture;
use crate::support::mcp::Mcp;

#[tokio::test]
async fn a_repeated_call_joins_its_equal_that_waits() {
    let fixture = Fixture::start().await;
    let (call_id, approval_id) = fixture.held(&fixture.api, json!({ "a": 1, "b": 2 })).await;
    let body = json!({ "run_id": "run_1", "args": { "b": 2, "a": 1 } });
    let again = fixture.api.post("/v1/tools/mail.send/invoke", body).await.is(202);
    assert_eq!((&again["tool_call_id"], &again["joined"]), (&json!(call_id), &json!(true)));
    // A key of the repeated request leads to the joined call from now on.
    let keyed = json!({ "run_id": "run_1", "args": { "a": 1, "b": 2 }, "idempotency_key": "k" });
    let again = fixture.api.post("/v1/tools/mail.send/invoke", keyed.clone()).await.is(202);
    assert_eq!(again["tool_call_id"], json!(call_id), "{again}");
    for other in [
        json!({ "run_id": "run_2", "args": { "a": 1, "b": 2 } }),
        json!({ "run_id": "run_1", "args": { "a": 1, "b": 3 } }),
    ] {
        let ticket = fixture.api.post("/v1/tools/mail.send/invoke", other).await.is(202);
        assert_ne!(ticket["tool_call_id"], json!(call_id), "another run or other arguments");
    }
    fixture.approve(&approval_id).await;
    fixture.execute(json!("sent")).await;
    assert_eq!(fixture.api.finished(&call_id).await["result"], "sent");
    let replayed = fixture.api.post("/v1/tools/mail.send/invoke", keyed).await.is(202);
    assert_eq!(replayed["tool_call_id"], json!(call_id), "{replayed}");
    assert_eq!(replayed["call"]["result"], "sent", "the key has the result");
    // The first one has ended, so the same request is a new call.
    let (next, _) = fixture.held(&fixture.api, json!({ "a": 1, "b": 2 })).await;
    assert_ne!(next, call_id);
}

#[tokio::test]
async fn rejoin_false_makes_a_call_of_its_own() {
    let fixture = Fixture::start().await;
    let (call_id, approval_id) = fixture.held(&fixture.api, json!({ "n": 1 })).await;
    let body = json!({ "run_id": "run_1", "args": { "n": 1 }, "rejoin": false });
    let own = fixture.api.post("/v1/tools/mail.send/invoke", body).await.is(202);
    assert_eq!((&own["hold"], &own["joined"]), (&json!("approval"), &Value::Null), "{own}");
    let entries = json!([entry("a", "mail.send", json!({ "n": 1 }))]);
    let batch = json!({ "run_id": "run_1", "tool_calls": entries, "rejoin": false, "wait_ms": 0 });
    let in_batch = fixture.api.post("/v1/tool_calls", batch).await.body["results"][0].clone();
    let mcp = Mcp::modern(&fixture.api);
    let params = json!({ "name": "mail__send", "arguments": { "n": 1 },
        "_meta": { "toolcrib/run_id": "run_1", "toolcrib/rejoin": false } });
    mcp.ask("tools/call", params).await.result();
    let pending = fixture.operator.get("/v1/approvals?status=pending").await.is(200);
    let pending = pending["approvals"].as_array().unwrap();
    assert_eq!(pending.len(), 4, "each has an approval of its own: {pending:?}");
    let ids = [&json!(approval_id), &own["approval_id"], &in_batch["approval_id"]];
    for id in ids {
        assert!(pending.iter().any(|approval| approval["approval_id"] == *id), "{id}");
    }
    assert_ne!(own["tool_call_id"], json!(call_id));
    // Without it, the request joins one of them as before.
    let (joined, _) = fixture.held(&fixture.api, json!({ "n": 1 })).await;
    let is_joined = |approval: &Value| approval["tool_call_id"] == json!(joined);
    assert!(pending.iter().any(is_joined), "{joined}: {pending:?}");
}

#[tokio::test]
async fn a_key_or_a_tool_without_rejoin_joins_no_waiting_call() {
    let fixture = Fixture::start().await;
    // The tool.
    let tool = json!([{ "name": "count.up", "rejoin": false }]);
    fixture.api.register("counter", tool).await;
    let rule = json!({ "verdict": "ask", "tools": ["count.up"] });
    fixture.operator.put("/v1/rules/count", rule).await.is(200);
    let body = json!({ "run_id": "run_1", "args": {} });
    let up = || fixture.api.post("/v1/tools/count.up/invoke", body.clone());
    let (first, second) = (up().await.is(202), up().await.is(202));
    assert_ne!(first["approval_id"], second["approval_id"], "{second}");
    // The key: the first one of a server is an admin's.
    let admin = json!({ "agent": "root", "roles": ["admin"] });
    fixture.operator.post("/v1/keys", admin).await.is(201);
    for (agent, rejoin) in [("ada", true), ("bob", false)] {
        let key = json!({ "agent": agent, "rejoin": rejoin, "allow": ["mail.*"] });
        let key = fixture.operator.post("/v1/keys", key).await.is(201);
        let api = fixture.server.with_key(key["key"].as_str().unwrap());
        let send = || api.post("/v1/tools/mail.send/invoke", body.clone());
        let (first, second) = (send().await.is(202), send().await.is(202));
        assert_eq!(first["hold"], "approval", "{first}");
        assert_eq!(first["approval_id"] == second["approval_id"], rejoin, "{agent}: {second}");
    }
}

#[tokio::test]
async fn a_repeated_call_joins_after_a_restart_too() {
    let fixture = Fixture::start().await;
    let (call_id, approval_id) = fixture.held(&fixture.api, json!({ "n": 1 })).await;
    let server = fixture.server.restart().await;
    let (api, operator) = (server.api(), server.operator());
    let fixture = Fixture { server, api, operator };
    let (joined, same) = fixture.held(&fixture.api, json!({ "n": 1 })).await;
    assert_eq!((joined, same), (call_id.clone(), approval_id.clone()));
    fixture.approve(&approval_id).await;
    fixture.execute(json!(1)).await;
    assert_eq!(fixture.api.finished(&call_id).await["status"], "SUCCEEDED");
}

fn entry(id: &str, name: &str, args: Value) -> Value {
    json!({ "call_id": id, "name": name, "args": args })
}

#[tokio::test]
async fn the_other_entries_of_a_batch_go_on() {
    let fixture = Fixture::start().await;
    let eval = |id: &str| entry(id, "calculation.eval", json!({ "expression": "6*7" }));
    for mode in ["serial", "parallel"] {
        let calls = json!([
            eval("a"),
            entry("b", "mail.send", json!({ "mode": mode })),
            eval("c"),
            entry("d", "mail.send", json!({ "mode": mode })),
            eval("e"),
        ]);
        let body = json!({ "run_id": "r", "tool_calls": calls, "mode": mode, "wait_ms": 300 });
        let reply = fixture.api.post("/v1/tool_calls", body).await;
        let answer = reply.body.clone();
        let results = answer["results"].as_array().unwrap();
        for n in [0, 2, 4] {
            assert_eq!(results[n]["data"]["result"], 42, "{mode}: {answer}");
        }
        let ids: Vec<&str> = [1, 3].map(|n| results[n]["approval_id"].as_str().unwrap()).to_vec();
        assert_ne!(ids[0], ids[1], "two entries of one batch never join each other");
        assert_eq!(results[1]["hold"], "approval");
        let text = answer["messages"].to_string();
        assert!(text.contains("approval"), "the model learns why: {text}");
        // One rejected, one approved: none is dropped, none runs twice.
        let decisions = json!({ "decisions": [
            { "approval_id": ids[0], "verdict": "reject", "reason": "no" },
            { "approval_id": ids[1], "verdict": "approve" },
        ] });
        fixture.operator.post("/v1/approvals/decide", decisions).await.is(200);
        let request = fixture.execute(json!("sent")).await;
        assert_eq!(request["tool_call_id"], results[3]["tool_call_id"]);
        let state = |n: usize| results[n]["tool_call_id"].as_str().unwrap().to_owned();
        assert_eq!(fixture.api.finished(&state(1)).await["status"], "FAILED");
        assert_eq!(fixture.api.finished(&state(3)).await["status"], "SUCCEEDED");
        let none =
            fixture.api.get("/internal/ingress/poll?client_id=mailer&wait_ms=0").await.is(200);
        assert_eq!(none["requests"], json!([]));
    }
}

#[tokio::test]
async fn a_batch_gets_the_result_if_the_decision_comes_within_its_wait() {
    let fixture = Fixture::start().await;
    let calls = json!([entry("a", "mail.send", json!({}))]);
    let body = json!({ "run_id": "r", "tool_calls": calls, "wait_ms": 30_000 });
    let api = fixture.api.clone();
    let batch = tokio::spawn(async move { api.post("/v1/tool_calls", body).await.is(200) });
    let pending = crate::support::until("the approval", || async {
        let list = fixture.operator.get("/v1/approvals?status=pending").await.is(200);
        list["approvals"][0]["approval_id"].as_str().map(str::to_owned)
    })
    .await;
    fixture.approve(&pending).await;
    fixture.execute(json!("sent")).await;
    let answer = batch.await.unwrap();
    assert_eq!(answer["results"][0]["data"], "sent", "{answer}");
}
