//! MCP Events: listed, polled, and delivered to a verified URL; and the server card.

use serde_json::{Value, json};

use crate::support::Server;
use crate::support::api::offer_with;
use crate::support::mcp::Mcp;
use crate::support::receiver::{Answer, KEY, Receiver};

async fn event_server() -> Server {
    Server::with(|config| config.webhooks.allow_private = true).await
}

fn occurrences(result: &Value) -> Vec<&str> {
    let events = result["events"].as_array().unwrap();
    events.iter().map(|event| event["data"]["tool_name"].as_str().unwrap_or_default()).collect()
}

#[tokio::test]
async fn events_are_listed_and_polled_from_a_cursor() {
    let server = event_server().await;
    let api = server.api();
    for client in [Mcp::modern(&api), Mcp::legacy(&api).await] {
        let listed = client.ask("events/list", json!({})).await.result();
        let names: Vec<&str> = listed["events"]
            .as_array()
            .unwrap()
            .iter()
            .map(|event| event["name"].as_str().unwrap())
            .collect();
        assert_eq!(
            names,
            ["tool_call.ended", "approval.requested", "input.requested", "tools.changed"]
        );
        let poll = async |params: Value| client.ask("events/poll", params).await.result();
        let start = poll(json!({ "name": "tool_call.ended" })).await;
        assert_eq!((&start["events"], &start["hasMore"]), (&json!([]), &json!(false)), "{start}");
        for expression in ["1", "2", "3"] {
            let id = api.invoke("calculation.eval", json!({ "expression": expression })).await;
            api.finished(&id).await;
        }
        let first = poll(json!({ "name": "tool_call.ended", "cursor": start["cursor"],
            "maxEvents": 2 }))
        .await;
        assert_eq!(occurrences(&first), ["calculation.eval"; 2], "{first}");
        assert_eq!(first["hasMore"], true);
        let rest = poll(json!({ "name": "tool_call.ended", "cursor": first["cursor"] })).await;
        assert_eq!(occurrences(&rest), ["calculation.eval"], "{rest}");
        assert_eq!(rest["events"][0]["data"]["status"], "SUCCEEDED");
        let none = poll(json!({ "name": "tool_call.ended", "cursor": start["cursor"],
            "arguments": { "tool": "weather.*" } }))
        .await;
        assert_eq!(none["events"], json!([]), "{none}");
        client.ask("events/poll", json!({ "name": "no.such" })).await.error(-32011);
        let wrong = json!({ "name": "tool_call.ended", "arguments": { "city": "Ulm" } });
        client.ask("events/poll", wrong).await.error(-32602);
    }
    let discovered = Mcp::modern(&api).ask("server/discover", json!({})).await.result();
    assert!(discovered["capabilities"]["events"].is_object(), "{discovered}");
    let changes = Mcp::modern(&api);
    let start = changes.ask("events/poll", json!({ "name": "tools.changed" })).await.result();
    api.register("pc_1", json!([offer_with("new.tool", json!({}))])).await;
    let next = json!({ "name": "tools.changed", "cursor": start["cursor"] });
    let next = changes.ask("events/poll", next).await.result();
    assert_eq!(next["events"].as_array().unwrap().len(), 1, "{next}");
    // The event has the time of the change, not of the poll.
    let again = json!({ "name": "tools.changed", "cursor": start["cursor"] });
    let again = changes.ask("events/poll", again).await.result();
    assert_eq!(again["events"], next["events"]);
}

#[tokio::test]
async fn a_poll_waits_for_an_event_and_leaves_old_ones_out() {
    let server = event_server().await;
    let api = server.api();
    let client = Mcp::modern(&api);
    let poll = async |params: Value| client.ask("events/poll", params).await.result();
    let start = poll(json!({ "name": "tool_call.ended" })).await;
    let call = api.invoke("calculation.eval", json!({ "expression": "1" })).await;
    api.finished(&call).await;
    let ended = poll(json!({ "name": "tool_call.ended", "cursor": start["cursor"] })).await;
    let again = json!({ "name": "tool_call.ended", "cursor": ended["cursor"],
        "timeoutMs": 30_000 });
    let (waited, later) = tokio::join!(poll(again), async {
        // The poll waits: it has no event before this call.
        api.invoke("calculation.eval", json!({ "expression": "2" })).await
    });
    assert_eq!(waited["events"][0]["data"]["tool_call_id"], later.as_str(), "{waited}");
    let old = json!({ "name": "tool_call.ended", "cursor": start["cursor"], "maxAgeMs": 0 });
    let old = poll(old).await;
    assert_eq!((&old["events"], &old["truncated"]), (&json!([]), &json!(true)), "{old}");
}

#[tokio::test]
async fn a_poll_passes_events_of_other_callers() {
    let server = event_server().await;
    let ada = server.keyed("default", "ada", "agent", &["calculation.*"]).await;
    let bob = server.keyed("default", "bob", "agent", &["calculation.*"]).await;
    let poll = async |client: &Mcp, cursor: Option<&Value>| {
        let began = std::time::Instant::now();
        let params = json!({ "name": "tool_call.ended", "cursor": cursor });
        let polled = client.ask("events/poll", params).await.result();
        assert!(began.elapsed().as_millis() < 4_000, "{polled}");
        polled
    };
    let (as_ada, as_bob) = (Mcp::modern(&ada), Mcp::modern(&bob));
    let start = poll(&as_bob, None).await;
    let call = ada.invoke("calculation.eval", json!({ "expression": "1" })).await;
    ada.finished(&call).await;
    let other = poll(&as_bob, Some(&start["cursor"])).await;
    assert_eq!((&other["events"], &other["hasMore"]), (&json!([]), &json!(false)), "{other}");
    assert_ne!(other["cursor"], start["cursor"], "the cursor passes the event");
    let own = bob.invoke("calculation.eval", json!({ "expression": "2" })).await;
    bob.finished(&own).await;
    for (client, call) in [(&as_ada, &call), (&as_bob, &own)] {
        let polled = poll(client, Some(&start["cursor"])).await;
        assert_eq!(polled["events"].as_array().unwrap().len(), 1, "{polled}");
        assert_eq!(polled["events"][0]["data"]["tool_call_id"], call.as_str());
        assert_eq!(polled["hasMore"], false, "{polled}");
        let rest = poll(client, Some(&polled["cursor"])).await;
        assert_eq!((&rest["events"], &rest["hasMore"]), (&json!([]), &json!(false)), "{rest}");
    }
}

#[tokio::test]
async fn a_stream_carries_events_from_a_cursor_with_the_id_of_its_request() {
    let server = event_server().await;
    let api = server.api();
    let client = Mcp::modern(&api);
    let listed = client.ask("events/list", json!({})).await.result();
    assert_eq!(listed["events"][0]["delivery"], json!(["poll", "push", "webhook"]));
    let params = json!({ "name": "tool_call.ended", "arguments": { "tool": "calculation.*" } });
    let mut stream = client.open("events/stream", params.clone()).await;
    let active = stream.until("notifications/events/active").await;
    let request_id = active["params"]["_meta"]["io.modelcontextprotocol/subscriptionId"].clone();
    assert!(request_id.is_number(), "{active}");
    let cursor = active["params"]["cursor"].clone();
    assert!(cursor.is_string() && active["params"]["truncated"] == false, "{active}");
    let mut calls = Vec::new();
    for expression in ["1", "2"] {
        calls.push(api.invoke("calculation.eval", json!({ "expression": expression })).await);
    }
    for call in &calls {
        let event = stream.until("notifications/events/event").await["params"].clone();
        assert_eq!(event["data"]["tool_call_id"], call.as_str(), "{event}");
        assert_eq!(event["name"], "tool_call.ended");
        assert!(event["eventId"].is_string() && event["timestamp"].is_string(), "{event}");
        assert!(event["cursor"].is_string(), "{event}");
        assert_eq!(event["_meta"]["io.modelcontextprotocol/subscriptionId"], request_id);
    }
    drop(stream);
    // Another stream continues at the cursor.
    let mut params = params;
    params["cursor"] = cursor;
    let mut stream = client.open("events/stream", params).await;
    let event = stream.until("notifications/events/event").await;
    assert_eq!(event["params"]["data"]["tool_call_id"], calls[0].as_str(), "{event}");
    let wrong = json!({ "name": "no.such" });
    client.ask("events/stream", wrong).await.error(-32011);
    // A session has no stream that belongs to one request.
    let session = Mcp::legacy(&api).await;
    session.ask("events/stream", json!({ "name": "tool_call.ended" })).await.error(-32014);
}

#[tokio::test]
async fn a_verified_subscriber_gets_every_event_once_more_after_a_failure_and_a_restart() {
    let server = event_server().await;
    let root = server.keyed("default", "root", "admin", &[]).await;
    let receiver = Receiver::answering([Answer::Code(503)]).await;
    let client = Mcp::modern(&root);
    let params = |url: &str| {
        json!({ "name": "tool_call.ended", "arguments": { "tool": "calculation.*" },
            "delivery": { "mode": "webhook", "url": url, "secret": KEY } })
    };
    let hooks = format!("{}/hooks", receiver.url);
    let subscribed = client.ask("events/subscribe", params(&hooks)).await.result();
    let id = subscribed["id"].as_str().unwrap().to_owned();
    assert!(id.starts_with("sub_") && subscribed["refreshBefore"].is_string(), "{subscribed}");
    let verification = &receiver.received(1).await[0];
    assert_eq!(verification.json()["type"], "verification");
    assert!(verification.is_signed_with(KEY));
    let call = root.invoke("calculation.eval", json!({ "expression": "6*7" })).await;
    // The first attempt is refused, the second one accepted.
    let messages = receiver.received(3).await;
    for message in &messages[1..3] {
        assert!(message.is_signed_with(KEY), "{message:?}");
        assert_eq!(message.header("x-mcp-subscription-id"), id);
        let event = message.json();
        assert_eq!(message.header("webhook-id"), event["eventId"].as_str().unwrap());
        assert_eq!(event["name"], "tool_call.ended");
        assert_eq!(event["data"]["tool_call_id"], call.as_str(), "{event}");
    }
    // A refresh is the same subscription, and is not verified again.
    let refreshed = client.ask("events/subscribe", params(&hooks)).await.result();
    assert_eq!(refreshed["id"], id.as_str());
    assert_eq!(refreshed["deliveryStatus"]["active"], true, "{refreshed}");
    // After a rotation of the secret, messages are signed with both for a while.
    let rotated = "whsec_bmV3IHNlY3JldCBvZiB0d2VudHktZm91ciBieXRlcw==";
    let mut rotation = params(&hooks);
    rotation["delivery"]["secret"] = rotated.into();
    assert_eq!(client.ask("events/subscribe", rotation).await.result()["id"], id.as_str());
    root.invoke("calculation.eval", json!({ "expression": "5*7" })).await;
    let message = &receiver.received(4).await[3];
    assert!(message.is_signed_with(rotated) && message.is_signed_with(KEY), "{message:?}");
    // The next process continues it without a request.
    let secret = root.secret().unwrap().to_owned();
    let server = server.restart().await;
    let root = server.with_key(&secret);
    let later = root.invoke("calculation.eval", json!({ "expression": "7*7" })).await;
    let messages = receiver.received(5).await;
    assert_eq!(messages[4].json()["data"]["tool_call_id"], later.as_str(), "{messages:?}");
    assert!(messages[4].is_signed_with(rotated) && messages[4].is_signed_with(KEY));
    let client = Mcp::modern(&root);
    client.ask("events/unsubscribe", params(&hooks)).await.result();
    client.ask("events/unsubscribe", params(&hooks)).await.error(-32011);
}

#[tokio::test]
async fn a_subscription_needs_credentials_a_secret_and_a_url_that_confirms() {
    let server = event_server().await;
    let receiver = Receiver::answering([]).await;
    let params = |url: &str, secret: &str| json!({ "name": "tool_call.ended", "delivery": { "url": url, "secret": secret } });
    let anonymous = Mcp::modern(&server.api());
    anonymous.ask("events/subscribe", params(&receiver.url, KEY)).await.error(-32012);
    let root = server.keyed("default", "root", "admin", &[]).await;
    let client = Mcp::modern(&root);
    client.ask("events/subscribe", params(&receiver.url, "whsec_c2hvcnQ=")).await.error(-32602);
    client.ask("events/subscribe", params("ftp://example.com", KEY)).await.error(-32602);
    client.ask("events/subscribe", params("http://example.com/a", KEY)).await.error(-32602);
    let mute = format!("{}/mute", receiver.url);
    let error = client.ask("events/subscribe", params(&mute, KEY)).await.error(-32015);
    assert_eq!(error["data"]["reason"], "challenge_failed", "{error}");
    let gone = "http://127.0.0.1:9/hooks";
    let error = client.ask("events/subscribe", params(gone, KEY)).await.error(-32015);
    assert_eq!(error["data"]["reason"], "connection_refused", "{error}");
    let mut push = params(&receiver.url, KEY);
    push["delivery"]["mode"] = "push".into();
    client.ask("events/subscribe", push).await.error(-32014);
}

#[tokio::test]
async fn the_server_card_is_public() {
    let server = Server::start().await;
    server.keyed("default", "root", "admin", &[]).await;
    let api = server.api();
    for path in ["/.well-known/mcp/server-card.json", "/mcp/server-card"] {
        let reply = api.get(path).await;
        assert_eq!(reply.header("content-type"), Some("application/mcp-server-card+json"));
        assert_eq!(reply.header("access-control-allow-origin"), Some("*"));
        let card = reply.is(200);
        assert_eq!(card["remotes"][0]["type"], "streamable-http", "{card}");
        let url = card["remotes"][0]["url"].as_str().unwrap();
        assert!(url.starts_with("http://127.0.0.1:") && url.ends_with("/mcp"), "{url}");
        assert_eq!(card["remotes"][0]["headers"][0]["name"], "Authorization", "{card}");
    }
    let catalog = api.get("/.well-known/mcp/catalog.json").await.is(200);
    let entry = &catalog["entries"][0];
    assert!(entry["url"].as_str().unwrap().ends_with("/mcp/server-card"), "{catalog}");
}
