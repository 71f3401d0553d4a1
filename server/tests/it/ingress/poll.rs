//! Long poll: one request, one response.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::support::Server;
use crate::support::api::{message, offer};

const POLL: &str = "/internal/ingress/poll?client_id=c1";

#[tokio::test]
async fn a_poll_delivers_and_acknowledges_pending_calls() {
    let server = Server::start().await;
    let api = server.api();
    api.register("c1", json!([offer("a.tool")])).await;
    assert_eq!(api.get(POLL).await.is(200), json!({ "requests": [] }));
    let id = api.invoke("a.tool", json!({ "n": 1 })).await;
    let request = api.poll("c1").await;
    assert_eq!(request["type"], "tool_request");
    assert_eq!(request["tool_call_id"], json!(id));
    assert_eq!((&request["args"], &request["tool_name"]), (&json!({ "n": 1 }), &json!("a.tool")));
    let call = api.call(&id).await;
    assert_eq!((&call["status"], &call["taken_by"]), (&json!("RUNNING"), &json!("c1")));
    assert_eq!(api.get(POLL).await.is(200), json!({ "requests": [] }), "not a second time");
    let body = json!({ "status": "SUCCEEDED", "result": 2, "client_id": "c1", "attempt": 1 });
    assert_eq!(api.submit(&id, body).await.is(200)["status"], "SUCCEEDED");
    assert_eq!(api.call(&id).await["result"], 2);
}

#[tokio::test]
async fn a_poll_waits_for_work() {
    let server = Server::start().await;
    let api = server.api();
    api.register("c1", json!([offer("a.tool")])).await;
    let began = Instant::now();
    let empty = api.get(&format!("{POLL}&wait_ms=100")).await.is(200);
    assert_eq!(empty, json!({ "requests": [] }));
    assert!(began.elapsed() >= Duration::from_millis(100));
    let polling = {
        let api = api.clone();
        tokio::spawn(async move { api.poll("c1").await })
    };
    crate::support::until("the poll", || async {
        (server.engine.clients().client_connection_count() == 1).then_some(())
    })
    .await;
    let id = api.invoke("a.tool", json!({})).await;
    assert_eq!(polling.await.unwrap()["tool_call_id"], json!(id));
}

#[tokio::test]
async fn a_poll_returns_at_most_max_calls() {
    let server = Server::start().await;
    let api = server.api();
    api.register("c1", json!([offer("a.tool")])).await;
    let mut ids = Vec::new();
    for _ in 0..5 {
        ids.push(Value::from(api.invoke("a.tool", json!({})).await));
    }
    let mut delivered = Vec::new();
    for (max, count) in [(3, 3), (3, 2), (3, 0)] {
        let answer = api.get(&format!("{POLL}&max={max}")).await.is(200);
        let requests = answer["requests"].as_array().unwrap();
        assert_eq!(requests.len(), count);
        delivered.extend(requests.iter().map(|request| request["tool_call_id"].clone()));
    }
    assert_eq!(delivered, ids, "the oldest first");
}

#[tokio::test]
async fn a_client_can_acknowledge_explicitly() {
    let server = Server::start().await;
    let api = server.api();
    api.register("c1", json!([offer("a.tool")])).await;
    let id = api.invoke("a.tool", json!({})).await;
    let answer = api.get(&format!("{POLL}&ack=explicit")).await.is(200);
    assert_eq!(answer["requests"][0]["tool_call_id"], json!(id));
    assert_eq!(api.call(&id).await["status"], "PENDING", "delivered and not acknowledged");
    let ack = format!("/internal/tool_calls/{id}/ack");
    let body = json!({ "client_id": "c1", "attempt": 1 });
    let acknowledged = api.post(&ack, body.clone()).await.is(200);
    assert_eq!(acknowledged, json!({ "ok": true, "tool_call_id": id, "status": "RUNNING" }));
    assert_eq!(api.post(&ack, body).await.is(200), acknowledged, "twice is the same as once");
    api.succeed(&id, json!(1)).await;
    let error = api.post(&ack, json!({ "client_id": "c1" })).await.refused(409, "CONFLICT");
    assert_eq!(error["detail"]["status"], "SUCCEEDED");
}

#[tokio::test]
async fn two_polls_receive_different_calls() {
    let server = Server::start().await;
    let api = server.api();
    let tools = json!([offer("a.tool")]);
    api.register("c1", tools.clone()).await;
    api.register("c2", tools).await;
    let polls = ["c1", "c2"].map(|client| {
        let api = api.clone();
        tokio::spawn(async move { api.poll(client).await["tool_call_id"].to_string() })
    });
    crate::support::until("both polls", || async {
        (server.engine.clients().client_connection_count() == 2).then_some(())
    })
    .await;
    let mut call_ids = Vec::new();
    for _ in 0..2 {
        call_ids.push(json!(api.invoke("a.tool", json!({})).await).to_string());
    }
    let mut delivered = Vec::new();
    for poll in polls {
        delivered.push(poll.await.unwrap());
    }
    delivered.sort();
    assert_eq!(delivered, call_ids);
}

#[tokio::test]
async fn an_aborted_poll_loses_no_call() {
    let server = Server::start().await;
    let api = server.api();
    api.register("c1", json!([offer("a.tool")])).await;
    let aborted = {
        let api = api.clone();
        tokio::spawn(async move { api.poll("c1").await })
    };
    crate::support::until("the poll", || async {
        (server.engine.clients().client_connection_count() == 1).then_some(())
    })
    .await;
    aborted.abort();
    crate::support::until("its end", || async {
        (server.engine.clients().client_connection_count() == 0).then_some(())
    })
    .await;
    let id = api.invoke("a.tool", json!({})).await;
    assert_eq!(api.poll("c1").await["tool_call_id"], json!(id));
}

#[tokio::test]
async fn an_invalid_poll_is_rejected() {
    let server = Server::start().await;
    let api = server.api();
    let error = api.get(POLL).await.refused(404, "NOT_FOUND");
    assert!(message(&error).contains("has not registered"), "{error}");
    let error = api.get("/internal/ingress/poll").await.refused(400, "BAD_REQUEST");
    assert!(message(&error).contains("client_id"), "{error}");
    api.register("c1", json!([offer("a.tool")])).await;
    let error = api.get(&format!("{POLL}&ack=never")).await.refused(422, "VALIDATION_ERROR");
    assert!(message(&error).contains("explicit"), "{error}");
}

#[tokio::test]
async fn a_poll_delivers_cancellations() {
    let server = Server::start().await;
    let api = server.api();
    api.register("c1", json!([offer("a.tool")])).await;
    let cancel = async |id: &str| {
        let canceled = api.post(&format!("/v1/tool_calls/{id}/cancel"), json!({})).await;
        assert_eq!(canceled.is(200)["status"], "CANCELED");
    };
    // Without a pending poll, the next one delivers the cancellation.
    let first = api.invoke("a.tool", json!({})).await;
    api.poll("c1").await;
    cancel(&first).await;
    let answer = api.get(POLL).await.is(200);
    assert_eq!(answer["cancels"], json!([{ "tool_call_id": first, "attempt": 1 }]));
    assert_eq!(api.get(POLL).await.is(200), json!({ "requests": [] }), "not a second time");
    // A pending poll delivers it immediately.
    let second = api.invoke("a.tool", json!({})).await;
    api.poll("c1").await;
    let polling = {
        let api = api.clone();
        tokio::spawn(async move { api.get(&format!("{POLL}&wait_ms=60000")).await.is(200) })
    };
    crate::support::until("the poll", || async {
        (server.engine.clients().client_connection_count() == 1).then_some(())
    })
    .await;
    cancel(&second).await;
    let answer = polling.await.unwrap();
    assert_eq!(answer["cancels"], json!([{ "tool_call_id": second, "attempt": 1 }]));
    // No client receives the cancellation of an undelivered call.
    let third = api.invoke("a.tool", json!({})).await;
    cancel(&third).await;
    assert_eq!(api.get(POLL).await.is(200), json!({ "requests": [] }));
}

#[tokio::test]
async fn a_cancellation_during_a_poll_is_delivered_once() {
    let server = Server::start().await;
    let api = server.api();
    api.register("c1", json!([offer("a.tool")])).await;
    for _ in 0..5 {
        let unwanted = api.invoke("a.tool", json!({})).await;
        api.poll("c1").await;
        let mut ids = Vec::new();
        for _ in 0..50 {
            ids.push(api.invoke("a.tool", json!({})).await);
        }
        let polling = {
            let api = api.clone();
            tokio::spawn(async move { api.get(&format!("{POLL}&max=100")).await.is(200) })
        };
        // Once the first call is acknowledged, the poll is processing the others.
        api.until_status(&ids[0], "RUNNING").await;
        for id in [&unwanted, &ids[0]] {
            api.post(&format!("/v1/tool_calls/{id}/cancel"), json!({})).await.is(200);
        }
        let (answer, next) = (polling.await.unwrap(), api.get(POLL).await.is(200));
        let delivered = [&answer["cancels"], &next["cancels"]].map(|cancels| cancels.to_string());
        for id in [&unwanted, &ids[0]] {
            let count = delivered.iter().filter(|delivered| delivered.contains(id)).count();
            assert_eq!(count, 1, "{id}: {delivered:?}");
        }
        let requested = answer["requests"].to_string().contains(&ids[0]);
        assert_eq!(
            requested,
            !delivered[0].contains(&ids[0]),
            "a poll delivers either the call or its cancellation"
        );
        for id in &ids[1..] {
            api.succeed(id, json!(1)).await;
        }
    }
}

#[tokio::test]
async fn only_an_eligible_client_can_acknowledge_a_call() {
    let server = Server::start().await;
    let api = server.api();
    api.register("c1", json!([offer("a.tool")])).await;
    api.register("c2", json!([offer("a.tool"), offer("b.tool")])).await;
    api.register("c3", json!([offer("b.tool")])).await;
    let free = api.invoke("a.tool", json!({})).await;
    let pinned = json!({ "run_id": "run_1", "args": {}, "client_id": "c1" });
    let pinned = api.invoke_with("a.tool", pinned).await;
    let ack = async |id: &str, client_id: &str| {
        let body = json!({ "client_id": client_id, "attempt": 1 });
        api.post(&format!("/internal/tool_calls/{id}/ack"), body).await
    };
    let error = ack(&free, "ghost").await.refused(404, "NOT_FOUND");
    assert!(message(&error).contains("has not registered"), "{error}");
    let error = ack(&free, "c3").await.refused(403, "PERMISSION_DENIED");
    assert!(message(&error).contains("does not offer"), "{error}");
    let error = ack(&pinned, "c2").await.refused(403, "PERMISSION_DENIED");
    assert!(message(&error).contains("for client \"c1\""), "{error}");
    let body = json!({ "client_id": "c2", "status": "SUCCEEDED", "result": 1 });
    api.submit(&pinned, body).await.refused(403, "PERMISSION_DENIED");
    for id in [&free, &pinned] {
        assert_eq!(api.call(id).await["status"], "PENDING");
    }
    let clients = api.get("/v1/clients").await.is(200);
    let names = clients["clients"].as_array().unwrap().iter().map(|client| &client["client_id"]);
    assert_eq!(json!(names.collect::<Vec<_>>()), json!(["c1", "c2", "c3"]));
    assert_eq!(ack(&free, "c2").await.is(200)["status"], "RUNNING");
    assert_eq!(ack(&pinned, "c1").await.is(200)["status"], "RUNNING");
    api.succeed(&pinned, json!(1)).await;
}
