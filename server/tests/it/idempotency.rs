//! The same idempotency key with the same request returns the same ticket.

use std::collections::HashSet;

use serde_json::{Value, json};

use crate::support::api::{Reply, message, offer, offer_with};
use crate::support::{Api, Server};

async fn invoke(api: &Api, key: &str, body: Value) -> Reply {
    let request = api.request(reqwest::Method::POST, "/v1/tools/a.tool/invoke");
    api.send(request.header("idempotency-key", key).json(&body)).await
}

fn body(n: u64) -> Value {
    json!({ "run_id": "run_1", "args": { "n": n } })
}

async fn start_with_tool() -> (Server, Api) {
    let server = Server::start().await;
    let api = server.api();
    api.register("c1", json!([offer("a.tool")])).await;
    (server, api)
}

#[tokio::test]
async fn the_same_key_and_request_return_the_same_ticket() {
    let (_server, api) = start_with_tool().await;
    let first = invoke(&api, "key-1", body(1)).await;
    assert_eq!(first.header("idempotent-replayed"), None);
    let first = first.is(202);
    let second = invoke(&api, "key-1", body(1)).await;
    assert_eq!(second.header("idempotent-replayed"), Some("true"));
    assert_eq!(second.is(202), first, "byte for byte");
    let spaced = "{ \"args\": {\"n\":  1}, \"run_id\": \"run_1\" }";
    let request = api.request(reqwest::Method::POST, "/v1/tools/a.tool/invoke");
    let third = api.send(request.header("idempotency-key", "key-1").body(spaced)).await;
    assert_eq!(third.is(202), first, "in any formatting");
    let other = invoke(&api, "key-2", body(1)).await.is(202);
    assert_ne!(other["tool_call_id"], first["tool_call_id"], "another key, another call");
    let list = api.get("/v1/tool_calls").await.is(200);
    assert_eq!(list["tool_calls"].as_array().unwrap().len(), 2);
}

#[tokio::test]
async fn the_key_works_in_the_body_and_after_the_call_ended() {
    let (_server, api) = start_with_tool().await;
    let mut within = body(1);
    within["idempotency_key"] = json!("key-1");
    let id = api.invoke_with("a.tool", within.clone()).await;
    api.succeed(&id, json!("done")).await;
    let again = invoke(&api, "key-1", within).await;
    assert_eq!(again.header("idempotent-replayed"), Some("true"));
    assert_eq!(again.is(202)["tool_call_id"], json!(id));
    let request = api.request(reqwest::Method::POST, "/v1/tools/a.tool/invoke?wait_ms=20000");
    let call = api.send(request.header("idempotency-key", "key-1").json(&body(1))).await.is(202);
    assert_eq!((&call["status"], &call["result"]), (&json!("SUCCEEDED"), &json!("done")));
}

#[tokio::test]
async fn a_replay_returns_the_current_status_and_the_ended_call() {
    let (_server, api) = start_with_tool().await;
    let first = invoke(&api, "key-1", body(1)).await;
    assert!(first.header("retry-after").is_some());
    let first = first.is(202);
    let id = first["tool_call_id"].as_str().unwrap();
    api.poll("c1").await;
    let running = invoke(&api, "key-1", body(1)).await;
    assert!(running.header("retry-after").is_some());
    let running = running.is(202);
    assert_eq!((&running["tool_call_id"], &running["status"]), (&json!(id), &json!("running")));
    assert_eq!(running.get("call"), None, "{running}");
    assert!(running["message"].as_str().unwrap().contains("poll"), "{running}");
    api.succeed(id, json!("done")).await;
    let ended = invoke(&api, "key-1", body(1)).await;
    assert_eq!(ended.header("idempotent-replayed"), Some("true"));
    assert_eq!(ended.header("retry-after"), None, "there is nothing to poll for");
    let ended = ended.is(202);
    assert_eq!((&ended["tool_call_id"], &ended["status"]), (&json!(id), &json!("succeeded")));
    assert_eq!(ended["message"], "tool call succeeded, call has the result");
    assert_eq!(ended["call"], api.call(id).await, "the whole call");
}

#[tokio::test]
async fn a_replay_of_a_failed_call_names_its_end() {
    let (_server, api) = start_with_tool().await;
    for (key, end) in [("key-f", "failed"), ("key-c", "canceled"), ("key-t", "timeout")] {
        let mut request = body(1);
        if end == "timeout" {
            request["timeout_ms"] = json!(20);
        }
        let first = invoke(&api, key, request.clone()).await.is(202);
        let id = first["tool_call_id"].as_str().unwrap();
        match end {
            "failed" => drop(api.fail(id, json!("broken")).await),
            "canceled" => {
                let path = format!("/v1/tool_calls/{id}/cancel");
                api.post(&path, json!({})).await.is(200);
            }
            _ => drop(api.finished(id).await),
        }
        let again = invoke(&api, key, request).await.is(202);
        assert_eq!(again["status"], end, "{again}");
        assert_eq!(again["call"]["status"], end.to_uppercase(), "{again}");
        assert!(again["message"].as_str().unwrap().contains(end), "{again}");
        assert!(again["call"]["error"]["code"].is_string(), "{again}");
    }
}

#[tokio::test]
async fn a_replay_after_a_restart_returns_the_ended_call() {
    let (server, api) = start_with_tool().await;
    let first = invoke(&api, "key-1", body(1)).await.is(202);
    api.succeed(first["tool_call_id"].as_str().unwrap(), json!("done")).await;
    let server = server.restart().await;
    let again = invoke(&server.api(), "key-1", body(1)).await.is(202);
    assert_eq!((&again["status"], &again["call"]["result"]), (&json!("succeeded"), &json!("done")));
}

#[tokio::test]
async fn another_request_with_the_same_key_is_rejected() {
    let (_server, api) = start_with_tool().await;
    let first = invoke(&api, "key-1", body(1)).await.is(202);
    for other in [
        body(2),
        json!({ "run_id": "run_2", "args": { "n": 1 } }),
        json!({ "run_id": "run_1", "args": { "n": 1 }, "timeout_ms": 5_000 }),
    ] {
        let error = invoke(&api, "key-1", other).await.refused(422, "IDEMPOTENCY_MISMATCH");
        assert_eq!(error["detail"]["tool_call_id"], first["tool_call_id"]);
        assert!(message(&error).contains("another request"), "{error}");
    }
    assert_eq!(
        invoke(&api, "key-1", body(1)).await.is(202),
        first,
        "the first request is still replayed"
    );
}

#[tokio::test]
async fn long_numbers_in_arguments_are_compared_exactly() {
    let (_server, api) = start_with_tool().await;
    let send = |n: &str| {
        let body = format!(r#"{{"run_id":"run_1","args":{{"n":{n}}}}}"#);
        let request = api.request(reqwest::Method::POST, "/v1/tools/a.tool/invoke");
        api.send(request.header("idempotency-key", "key-1").body(body))
    };
    let first = send("100000000000000000001").await.is(202);
    send("100000000000000000002").await.refused(422, "IDEMPOTENCY_MISMATCH");
    assert_eq!(send("100000000000000000001").await.is(202), first);
}

#[tokio::test]
async fn invalid_idempotency_keys_are_rejected() {
    let (_server, api) = start_with_tool().await;
    let mut both = body(1);
    both["idempotency_key"] = json!("key-1");
    let error = invoke(&api, "key-2", both).await.refused(400, "BAD_REQUEST");
    assert!(message(&error).contains("different"), "{error}");
    invoke(&api, &"k".repeat(256), body(1)).await.refused(400, "BAD_REQUEST");
    invoke(&api, "", body(1)).await.refused(400, "BAD_REQUEST");
    for key in ["k".repeat(256), String::new()] {
        let mut within = body(1);
        within["idempotency_key"] = json!(key);
        let answer = api.post("/v1/tools/a.tool/invoke", within).await;
        answer.refused(422, "VALIDATION_ERROR");
    }
    invoke(&api, &"k".repeat(255), body(1)).await.is(202);
    let list = api.get("/v1/tool_calls").await.is(200);
    assert_eq!(list["tool_calls"].as_array().unwrap().len(), 1);
}

#[tokio::test]
async fn fifty_concurrent_requests_make_one_call() {
    let (_server, api) = start_with_tool().await;
    let answers = (0..50).map(|_| invoke(&api, "key-1", body(1)));
    let answers = futures::future::join_all(answers).await;
    let replayed = |reply: &&Reply| reply.header("idempotent-replayed").is_some();
    assert_eq!(answers.iter().filter(replayed).count(), 49);
    let ids: HashSet<String> =
        answers.into_iter().map(|reply| reply.is(202)["tool_call_id"].to_string()).collect();
    assert_eq!(ids.len(), 1);
    let list = api.get("/v1/tool_calls").await.is(200);
    assert_eq!(list["tool_calls"].as_array().unwrap().len(), 1);
    let request = api.poll("c1").await;
    assert!(ids.contains(&request["tool_call_id"].to_string()));
    let more = api.get("/internal/ingress/poll?client_id=c1").await.is(200);
    assert_eq!(more, json!({ "requests": [] }), "the client receives the call once");
}

#[tokio::test]
async fn agents_do_not_share_idempotency_keys() {
    let server = Server::start().await;
    let provider = server.keyed("p", "tools", "provider", &[]).await;
    provider.register("c1", json!([offer("a.tool")])).await;
    let ada = server.keyed("p", "ada", "agent", &["*"]).await;
    let bob = server.keyed("p", "bob", "agent", &["*"]).await;
    let first = invoke(&ada, "key-1", body(1)).await.is(202);
    let other = invoke(&bob, "key-1", body(2)).await;
    assert_eq!(other.header("idempotent-replayed"), None);
    assert_ne!(other.is(202)["tool_call_id"], first["tool_call_id"]);
}

#[tokio::test]
async fn an_idempotency_key_survives_a_restart() {
    let (server, api) = start_with_tool().await;
    let first = invoke(&api, "key-1", body(1)).await.is(202);
    let server = server.restart().await;
    let api = server.api();
    let again = invoke(&api, "key-1", body(1)).await;
    assert_eq!(again.header("idempotent-replayed"), Some("true"));
    assert_eq!(again.is(202), first);
    invoke(&api, "key-1", body(2)).await.refused(422, "IDEMPOTENCY_MISMATCH");
}

#[tokio::test]
async fn a_replay_works_after_the_tool_has_changed_or_is_gone() {
    let (_server, api) = start_with_tool().await;
    let first = invoke(&api, "key-1", body(1)).await.is(202);
    // First the tool requires other arguments, then it is gone.
    let strict = json!({ "schema": { "type": "object", "required": ["b"] } });
    let changes = [json!([offer_with("a.tool", strict)]), json!([])];
    let refusals = [(422, "VALIDATION_ERROR"), (404, "TOOL_NOT_FOUND")];
    for (tools, (status, code)) in changes.into_iter().zip(refusals) {
        let register = json!({ "client_id": "c1", "tools": tools, "replace": true });
        api.post("/internal/tools/register", register).await.is(200);
        let again = invoke(&api, "key-1", body(1)).await;
        assert_eq!(again.header("idempotent-replayed"), Some("true"));
        assert_eq!(again.is(202), first);
        invoke(&api, "key-2", body(1)).await.refused(status, code);
        invoke(&api, "key-1", body(2)).await.refused(422, "IDEMPOTENCY_MISMATCH");
    }
}
