//! What a receiver gets, and what its answers lead to.

use serde_json::{Value, json};

use super::{World, codes};
use crate::support::process::typed;
use crate::support::receiver::{Answer, KEY, Receiver};
use crate::support::until;

#[tokio::test]
async fn the_end_of_a_call_is_told_once_and_signed() {
    let world = World::start().await;
    let receiver = Receiver::answering([]).await;
    let id = world.asked(&receiver, json!({})).await;
    let waiting = world.delivery(&id).await;
    assert_eq!((&waiting["status"], &waiting["tries"]), (&json!("waiting"), &json!(0)));
    let before = jiff::Timestamp::now().as_second();
    world.api.succeed(&id, json!({ "price": 1.10 })).await;
    let got = receiver.received(1).await.remove(0);
    assert_eq!(got.path, "/done?token=t1");
    assert_eq!(got.header("content-type"), "application/json");
    assert_eq!(got.header("webhook-id"), id.replace("tc_", "msg_"));
    let told: i64 = got.header("webhook-timestamp").parse().unwrap();
    assert!((before..=jiff::Timestamp::now().as_second()).contains(&told), "{told}");
    assert!(got.is_signed_with(KEY), "{got:?}");
    assert!(!got.is_signed_with("whsec_AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"));
    let body = got.json();
    assert_eq!(body["type"], "task.completed");
    let at: jiff::Timestamp = body["timestamp"].as_str().unwrap().parse().unwrap();
    let call = world.api.call(&id).await;
    assert_eq!(json!(at.as_millisecond()), call["completed_at_ms"], "when it ended");
    let data = &body["data"];
    for (field, value) in [
        ("task_id", json!(id)),
        ("tool_call_id", json!(id)),
        ("call_id", json!("mine-1")),
        ("run_id", json!("run_1")),
        ("tool_name", json!("a.task")),
        ("status", json!("completed")),
        ("ok", json!(true)),
        ("error", Value::Null),
        ("metrics", call["outcome"]["metrics"].clone()),
    ] {
        assert_eq!(data[field], value, "{field} in {body}");
    }
    assert!(got.body.contains(r#""data":{"price":1.1}"#), "{}", got.body);
    let delivered = world.until(&id, "delivered").await;
    assert_eq!(
        (&delivered["webhook_id"], &delivered["next_try_at_ms"]),
        (&json!(got.header("webhook-id")), &Value::Null)
    );
    assert_eq!(codes(&delivered), [200]);
    assert_eq!(receiver.came().len(), 1);
}

#[tokio::test]
async fn failures_are_told_too_and_of_every_tool() {
    let world = World::start().await;
    let receiver = Receiver::answering([]).await;
    let failed = world.asked(&receiver, json!({})).await;
    world.api.fail(&failed, json!({ "message": "no paper", "retryable": false })).await;
    let got = receiver.received(1).await.pop().unwrap().json();
    assert_eq!((&got["type"], &got["data"]["status"]), (&json!("task.failed"), &json!("failed")));
    assert_eq!(got["data"]["error"]["message"], "no paper");
    assert_eq!(got["data"]["error"]["code"], "RUNTIME_ERROR");
    let canceled = world.asked(&receiver, json!({})).await;
    world.api.post(&format!("/v1/tasks/{canceled}/cancel"), json!({})).await.is(200);
    let got = receiver.received(2).await.pop().unwrap().json();
    assert_eq!((&got["type"], &got["data"]["status"]), (&json!("task.failed"), &json!("canceled")));
    world.asked(&receiver, json!({ "timeout_ms": 1 })).await;
    let got = receiver.received(3).await.pop().unwrap().json();
    assert_eq!((&got["type"], &got["data"]["status"]), (&json!("task.failed"), &json!("timeout")));
    let body = json!({ "run_id": "r", "args": { "expression": "6*7" },
        "callback_url": format!("{}/sum", receiver.url) });
    world.api.invoke_with("calculation.eval", body).await;
    let got = receiver.received(4).await.pop().unwrap();
    assert_eq!((got.path.as_str(), &got.json()["type"]), ("/sum", &json!("task.completed")));
}

#[tokio::test]
async fn an_error_is_tried_again_with_the_same_message() {
    let world = World::start().await;
    let receiver = Receiver::answering([Answer::Code(500), Answer::Code(404)]).await;
    let id = world.succeeded(&receiver, json!(1)).await;
    let delivered = world.until(&id, "delivered").await;
    assert_eq!(codes(&delivered), [500, 404, 200]);
    let log = delivered["log"].as_array().unwrap();
    assert_eq!(log[0]["error"], "answered 500");
    for pair in log.windows(2) {
        let waited = pair[1]["at_ms"].as_u64().unwrap() - pair[0]["at_ms"].as_u64().unwrap();
        assert!(waited >= 50, "{waited}");
    }
    let came = receiver.received(3).await;
    for got in &came {
        assert_eq!(got.header("webhook-id"), came[0].header("webhook-id"));
        assert_eq!(got.body, came[0].body);
        assert!(got.is_signed_with(KEY), "each with its own time");
    }
}

#[tokio::test]
async fn a_redirect_is_not_followed() {
    let world = World::start().await;
    let elsewhere = Receiver::answering([]).await;
    let there = |code| Answer::With(code, "location", format!("{}/x", elsewhere.url));
    let receiver = Receiver::answering([there(302), there(307)]).await;
    let id = world.succeeded(&receiver, json!(1)).await;
    let delivered = world.until(&id, "delivered").await;
    assert_eq!(codes(&delivered), [302, 307, 200]);
    let why = delivered["log"][0]["error"].as_str().unwrap();
    assert!(why.contains("redirects are not followed"), "{why}");
    assert_eq!(elsewhere.came().len(), 0);
}

#[tokio::test]
async fn a_receiver_that_hangs_has_only_so_long() {
    // The try that is answered has no longer. Where that was not enough, there is more next time.
    for timeout_ms in [300, 1_200, 4_800] {
        let world = World::with(|config| {
            config.webhooks.timeout_ms = timeout_ms;
            config.webhooks.retry_schedule_ms = vec![50];
        })
        .await;
        let receiver = Receiver::answering([Answer::Hang]).await;
        let id = world.succeeded(&receiver, json!(1)).await;
        let over = until("the last try", || async {
            let delivery = world.delivery(&id).await;
            let over = delivery["status"] == "delivered" || delivery["status"] == "exhausted";
            over.then_some(delivery)
        });
        let over = over.await;
        let why = format!("no answer within {timeout_ms} ms");
        assert_eq!((&codes(&over)[0], &over["log"][0]["error"]), (&Value::Null, &why.into()));
        if over["status"] == "delivered" {
            assert_eq!(codes(&over), [Value::Null, json!(200)]);
            return;
        }
    }
    panic!("the second try never came in time");
}

#[tokio::test]
async fn nobody_there_is_tried_again() {
    let world = World::start().await;
    let port = crate::support::process::free_port();
    let url = format!("http://127.0.0.1:{port}/");
    let body = json!({ "run_id": "r", "args": {}, "callback_url": url });
    let id = world.api.invoke_with("a.tool", body).await;
    world.api.succeed(&id, json!(1)).await;
    let given_up = world.until(&id, "exhausted").await;
    assert_eq!((codes(&given_up).len(), &given_up["tries"]), (5, &json!(5)));
    let why = given_up["last_error"].as_str().unwrap();
    assert!(why.starts_with("cannot connect"), "{why}");
}

#[tokio::test]
async fn gone_is_the_end_of_it() {
    let world = World::start().await;
    let receiver = Receiver::answering([Answer::Code(410)]).await;
    let id = world.succeeded(&receiver, json!(1)).await;
    let gone = world.until(&id, "gone").await;
    assert_eq!((codes(&gone), &gone["next_try_at_ms"]), (vec![json!(410)], &Value::Null));
}

#[tokio::test]
async fn a_receiver_may_say_when_to_come_back() {
    let world = World::start().await;
    for (code, after) in [(503, "3600"), (429, "3600"), (500, "3600")] {
        let busy = Answer::With(code, "retry-after", after.to_owned());
        let receiver = Receiver::answering([busy]).await;
        let id = world.succeeded(&receiver, json!(1)).await;
        receiver.received(1).await;
        let pending = crate::support::until("the try to be kept", || async {
            let delivery = world.delivery(&id).await;
            (delivery["tries"] == 1).then_some(delivery)
        })
        .await;
        assert_eq!(pending["status"], "pending", "{code}");
        let at = pending["log"][0]["at_ms"].as_u64().unwrap();
        let next = pending["next_try_at_ms"].as_u64().unwrap();
        assert!(next - at >= 3_600_000, "{code}: {}", next - at);
    }
}

#[tokio::test]
async fn what_was_given_up_is_sent_again_on_request() {
    let world = World::with(|config| config.webhooks.retry_schedule_ms = vec![]).await;
    let receiver = Receiver::answering([Answer::Code(500), Answer::Code(500)]).await;
    let id = world.succeeded(&receiver, json!(1)).await;
    world.until(&id, "exhausted").await;
    let other = world.succeeded(&receiver, json!(2)).await;
    world.until(&other, "exhausted").await;
    let listed = world.api.get("/v1/deliveries?status=exhausted&limit=1").await.is(200);
    assert_eq!(listed["deliveries"][0]["tool_call_id"], json!(other), "the newest first");
    assert_eq!(listed["deliveries"][0]["last_error"], "answered 500");
    let cursor = listed["next_cursor"].as_str().unwrap();
    let path = format!("/v1/deliveries?status=exhausted&limit=1&cursor={cursor}");
    let listed = world.api.get(&path).await.is(200);
    assert_eq!(listed["deliveries"][0]["tool_call_id"], json!(id));
    assert_eq!(listed["next_cursor"], Value::Null);
    let repeat = format!("/v1/tool_calls/{id}/deliveries/repeat");
    let again = world.api.post(&repeat, json!({})).await.is(202);
    assert_eq!(
        (&again["status"], &again["url"]),
        (&json!("pending"), &json!(format!("{}/done?token=t1", receiver.url)))
    );
    let delivered = world.until(&id, "delivered").await;
    assert_eq!(codes(&delivered), [500, 200]);
    // Also what was delivered already: as the same message.
    world.api.post(&repeat, json!({})).await.is(202);
    let came = receiver.received(4).await;
    assert_eq!(came[3].header("webhook-id"), came[0].header("webhook-id"));
    assert_eq!(came[3].body, came[0].body);
}

#[tokio::test]
async fn the_command_line_shows_and_repeats() {
    let world = World::with(|config| config.webhooks.retry_schedule_ms = vec![]).await;
    let receiver = Receiver::answering([Answer::Code(500)]).await;
    let id = world.succeeded(&receiver, json!(1)).await;
    world.until(&id, "exhausted").await;
    let run = async |words: &[&str]| typed(&world.server, words).await;
    let (list, _) = run(&["webhooks", "deliveries", "--status", "exhausted"]).await;
    assert!(list.contains(&id) && list.contains("answered 500"), "{list}");
    let (log, told) = run(&["webhooks", "deliveries", &id]).await;
    assert!(log.contains("500") && told.contains("exhausted"), "{log}{told}");
    run(&["webhooks", "repeat", &id]).await;
    world.until(&id, "delivered").await;
    let (json, _) = run(&["webhooks", "deliveries", "--json"]).await;
    let json: Value = json.parse().unwrap();
    assert_eq!(json["deliveries"][0]["status"], "delivered");
    let (key, _) = run(&["webhooks", "key"]).await;
    std::fs::write(world.key_file(), key.trim()).unwrap();
    run(&["webhooks", "repeat", &id]).await;
    let got = receiver.received(3).await.remove(2);
    assert!(got.is_signed_with(key.trim()), "a new key is good to sign with");
}

#[tokio::test]
async fn a_key_is_changed_without_a_gap() {
    let world = World::start().await;
    let receiver = Receiver::answering([]).await;
    let new = "whsec_AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";
    std::fs::write(world.key_file(), format!("{new} {KEY}\n")).unwrap();
    world.succeeded(&receiver, json!(1)).await;
    let got = receiver.received(1).await.remove(0);
    assert!(got.is_signed_with(KEY) && got.is_signed_with(new), "{got:?}");
}

#[tokio::test]
async fn a_large_result_is_read_elsewhere() {
    let world = World::with(|config| config.webhooks.max_data_bytes = 100).await;
    let receiver = Receiver::answering([]).await;
    let id = world.succeeded(&receiver, json!("x".repeat(99))).await;
    let data = receiver.received(1).await.remove(0).json()["data"].clone();
    assert_eq!((&data["data"], &data["ok"]), (&Value::Null, &json!(true)));
    let read_at = format!("/v1/tool_calls/{id}");
    assert_eq!(data["data_omitted"], json!({ "bytes": 101, "read_at": read_at }));
    assert_eq!(world.api.get(&read_at).await.is(200)["result"], json!("x".repeat(99)));
    world.succeeded(&receiver, json!("x".repeat(98))).await;
    let data = receiver.received(2).await.remove(1).json()["data"].clone();
    assert!(data.get("data_omitted").is_none() && data["data"].is_string(), "{data}");
}

#[tokio::test]
async fn a_repeated_request_is_one_callback() {
    let world = World::start().await;
    let receiver = Receiver::answering([]).await;
    let key = json!({ "idempotency_key": "k1" });
    let id = world.asked(&receiver, key.clone()).await;
    assert_eq!(world.asked(&receiver, key).await, id);
    world.api.succeed(&id, json!(1)).await;
    world.until(&id, "delivered").await;
    let listed = world.api.get("/v1/deliveries").await.is(200);
    assert_eq!(listed["deliveries"].as_array().unwrap().len(), 1);
    let other = json!({ "run_id": "run_1", "call_id": "mine-1", "args": {}, "idempotency_key": "k1",
        "callback_url": format!("{}/other", receiver.url) });
    let refused = world.api.post("/v1/tools/a.task/invoke", other).await;
    refused.refused(422, "IDEMPOTENCY_MISMATCH");
}

#[tokio::test]
async fn an_entry_of_a_batch_may_have_a_callback_of_its_own() {
    let world = World::start().await;
    let (all, one) = (Receiver::answering([]).await, Receiver::answering([]).await);
    let call = |url: Option<&str>| json!({ "name": "calculation.eval", "args": { "expression": "1" }, "callback_url": url });
    let batch = json!({ "run_id": "r", "callback_url": all.url,
        "tool_calls": [call(Some(&one.url)), call(None)] });
    let answer = world.api.post("/v1/tool_calls", batch).await.is(200);
    let id = |n: usize| answer["results"][n]["tool_call_id"].clone();
    assert_eq!(one.received(1).await[0].json()["data"]["tool_call_id"], id(0));
    assert_eq!(all.received(1).await[0].json()["data"]["tool_call_id"], id(1));
    let bad = json!({ "run_id": "r", "tool_calls": [call(Some("ftp://x/")), call(None)] });
    let answer = world.api.post("/v1/tool_calls", bad).await.is(200);
    assert_eq!(answer["results"][0]["error"]["detail"]["pointer"], "/callback_url", "{answer}");
    assert_eq!(answer["results"][1]["ok"], true);
}
