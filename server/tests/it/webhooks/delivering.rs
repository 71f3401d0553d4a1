//! Messages that a receiver gets, and the effects of its answers.

use serde_json::{Value, json};

use super::{Fixture, codes};
use crate::support::process::run_cli;
use crate::support::receiver::{Answer, KEY, Receiver};
use crate::support::until;

#[tokio::test]
async fn the_end_of_a_call_is_delivered_once_and_signed() {
    let fixture = Fixture::start().await;
    let receiver = Receiver::answering([]).await;
    let id = fixture.invoke_task(&receiver, json!({})).await;
    let waiting = fixture.delivery(&id).await;
    assert_eq!((&waiting["status"], &waiting["tries"]), (&json!("waiting"), &json!(0)));
    let before = jiff::Timestamp::now().as_second();
    fixture.api.succeed(&id, json!({ "price": 1.10 })).await;
    let got = receiver.received(1).await.remove(0);
    assert_eq!(got.path, "/done?token=t1");
    assert_eq!(got.header("content-type"), "application/json");
    assert_eq!(got.header("webhook-id"), id.replace("tc_", "msg_"));
    let timestamp: i64 = got.header("webhook-timestamp").parse().unwrap();
    assert!((before..=jiff::Timestamp::now().as_second()).contains(&timestamp), "{timestamp}");
    assert!(got.is_signed_with(KEY), "{got:?}");
    assert!(!got.is_signed_with("whsec_AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"));
    let body = got.json();
    assert_eq!(body["type"], "task.completed");
    let ended_at: jiff::Timestamp = body["timestamp"].as_str().unwrap().parse().unwrap();
    let call = fixture.api.call(&id).await;
    assert_eq!(json!(ended_at.as_millisecond()), call["completed_at_ms"], "when it ended");
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
    let delivered = fixture.until(&id, "delivered").await;
    assert_eq!(
        (&delivered["webhook_id"], &delivered["next_try_at_ms"]),
        (&json!(got.header("webhook-id")), &Value::Null)
    );
    assert_eq!(codes(&delivered), [200]);
    assert_eq!(receiver.messages().len(), 1);
}

#[tokio::test]
async fn webhooks_report_failures_and_work_for_every_tool() {
    let fixture = Fixture::start().await;
    let receiver = Receiver::answering([]).await;
    let failed = fixture.invoke_task(&receiver, json!({})).await;
    fixture.api.fail(&failed, json!({ "message": "no paper", "retryable": false })).await;
    let got = receiver.received(1).await.pop().unwrap().json();
    assert_eq!((&got["type"], &got["data"]["status"]), (&json!("task.failed"), &json!("failed")));
    let message = got["data"]["error"]["message"].as_str().unwrap();
    assert_eq!(message, "no paper; it may have taken effect, so a retry is not safe");
    assert_eq!(got["data"]["error"]["retryable"], false);
    assert_eq!(got["data"]["error"]["code"], "RUNTIME_ERROR");
    let canceled = fixture.invoke_task(&receiver, json!({})).await;
    fixture.api.post(&format!("/v1/tasks/{canceled}/cancel"), json!({})).await.is(200);
    let got = receiver.received(2).await.pop().unwrap().json();
    assert_eq!((&got["type"], &got["data"]["status"]), (&json!("task.failed"), &json!("canceled")));
    fixture.invoke_task(&receiver, json!({ "timeout_ms": 1 })).await;
    let got = receiver.received(3).await.pop().unwrap().json();
    assert_eq!((&got["type"], &got["data"]["status"]), (&json!("task.failed"), &json!("timeout")));
    let body = json!({ "run_id": "r", "args": { "expression": "6*7" },
        "callback_url": format!("{}/sum", receiver.url) });
    fixture.api.invoke_with("calculation.eval", body).await;
    let got = receiver.received(4).await.pop().unwrap();
    assert_eq!((got.path.as_str(), &got.json()["type"]), ("/sum", &json!("task.completed")));
}

#[tokio::test]
async fn a_failed_delivery_is_retried_with_the_same_message() {
    let fixture = Fixture::start().await;
    let receiver = Receiver::answering([Answer::Code(500), Answer::Code(404)]).await;
    let id = fixture.complete_task(&receiver, json!(1)).await;
    let delivered = fixture.until(&id, "delivered").await;
    assert_eq!(codes(&delivered), [500, 404, 200]);
    let log = delivered["log"].as_array().unwrap();
    assert_eq!(log[0]["error"], "answered 500");
    for pair in log.windows(2) {
        let waited = pair[1]["at_ms"].as_u64().unwrap() - pair[0]["at_ms"].as_u64().unwrap();
        assert!(waited >= 50, "{waited}");
    }
    let messages = receiver.received(3).await;
    for got in &messages {
        assert_eq!(got.header("webhook-id"), messages[0].header("webhook-id"));
        assert_eq!(got.body, messages[0].body);
        assert!(got.is_signed_with(KEY), "each attempt is signed with its own timestamp");
    }
}

#[tokio::test]
async fn a_redirect_is_not_followed() {
    let fixture = Fixture::start().await;
    let other = Receiver::answering([]).await;
    let redirect = |code| Answer::With(code, "location", format!("{}/x", other.url));
    let receiver = Receiver::answering([redirect(302), redirect(307)]).await;
    let id = fixture.complete_task(&receiver, json!(1)).await;
    let delivered = fixture.until(&id, "delivered").await;
    assert_eq!(codes(&delivered), [302, 307, 200]);
    let reason = delivered["log"][0]["error"].as_str().unwrap();
    assert!(reason.contains("redirects are not followed"), "{reason}");
    assert_eq!(other.messages().len(), 0);
}

#[tokio::test]
async fn a_delivery_attempt_times_out() {
    // The answered attempt has the same timeout; a slow machine needs a longer one.
    for timeout_ms in [300, 1_200, 4_800] {
        let fixture = Fixture::with(|config| {
            config.webhooks.timeout_ms = timeout_ms;
            config.webhooks.retry_schedule_ms = vec![50];
        })
        .await;
        let receiver = Receiver::answering([Answer::Hang]).await;
        let id = fixture.complete_task(&receiver, json!(1)).await;
        let ended = until("the last attempt", || async {
            let delivery = fixture.delivery(&id).await;
            let ended = delivery["status"] == "delivered" || delivery["status"] == "exhausted";
            ended.then_some(delivery)
        });
        let ended = ended.await;
        let expected = format!("no answer within {timeout_ms} ms");
        assert_eq!(
            (&codes(&ended)[0], &ended["log"][0]["error"]),
            (&Value::Null, &expected.into())
        );
        if ended["status"] == "delivered" {
            assert_eq!(codes(&ended), [Value::Null, json!(200)]);
            return;
        }
    }
    panic!("the second attempt never succeeded in time");
}

#[tokio::test]
async fn an_unreachable_receiver_is_retried_until_exhausted() {
    let fixture = Fixture::start().await;
    let port = crate::support::process::free_port();
    let url = format!("http://127.0.0.1:{port}/");
    let body = json!({ "run_id": "r", "args": {}, "callback_url": url });
    let id = fixture.api.invoke_with("a.tool", body).await;
    fixture.api.succeed(&id, json!(1)).await;
    let exhausted = fixture.until(&id, "exhausted").await;
    assert_eq!((codes(&exhausted).len(), &exhausted["tries"]), (5, &json!(5)));
    let reason = exhausted["last_error"].as_str().unwrap();
    assert!(reason.starts_with("cannot connect"), "{reason}");
}

#[tokio::test]
async fn status_410_ends_the_delivery() {
    let fixture = Fixture::start().await;
    let receiver = Receiver::answering([Answer::Code(410)]).await;
    let id = fixture.complete_task(&receiver, json!(1)).await;
    let ended = fixture.until(&id, "gone").await;
    assert_eq!((codes(&ended), &ended["next_try_at_ms"]), (vec![json!(410)], &Value::Null));
}

#[tokio::test]
async fn retry_after_of_the_receiver_is_respected() {
    let fixture = Fixture::start().await;
    for (code, after) in [(503, "3600"), (429, "3600"), (500, "3600")] {
        let answer = Answer::With(code, "retry-after", after.to_owned());
        let receiver = Receiver::answering([answer]).await;
        let id = fixture.complete_task(&receiver, json!(1)).await;
        receiver.received(1).await;
        let pending = crate::support::until("the attempt to be stored", || async {
            let delivery = fixture.delivery(&id).await;
            (delivery["tries"] == 1).then_some(delivery)
        })
        .await;
        assert_eq!(pending["status"], "pending", "{code}");
        let attempt_ms = pending["log"][0]["at_ms"].as_u64().unwrap();
        let next = pending["next_try_at_ms"].as_u64().unwrap();
        assert!(next - attempt_ms >= 3_600_000, "{code}: {}", next - attempt_ms);
    }
}

#[tokio::test]
async fn an_exhausted_delivery_can_be_repeated() {
    let fixture = Fixture::with(|config| config.webhooks.retry_schedule_ms = vec![]).await;
    let receiver = Receiver::answering([Answer::Code(500), Answer::Code(500)]).await;
    let id = fixture.complete_task(&receiver, json!(1)).await;
    fixture.until(&id, "exhausted").await;
    let other = fixture.complete_task(&receiver, json!(2)).await;
    fixture.until(&other, "exhausted").await;
    let listed = fixture.api.get("/v1/deliveries?status=exhausted&limit=1").await.is(200);
    assert_eq!(listed["deliveries"][0]["tool_call_id"], json!(other), "the newest first");
    assert_eq!(listed["deliveries"][0]["last_error"], "answered 500");
    let cursor = listed["next_cursor"].as_str().unwrap();
    let path = format!("/v1/deliveries?status=exhausted&limit=1&cursor={cursor}");
    let listed = fixture.api.get(&path).await.is(200);
    assert_eq!(listed["deliveries"][0]["tool_call_id"], json!(id));
    assert_eq!(listed["next_cursor"], Value::Null);
    let repeat = format!("/v1/tool_calls/{id}/deliveries/repeat");
    let again = fixture.api.post(&repeat, json!({})).await.is(202);
    assert_eq!(
        (&again["status"], &again["url"]),
        (&json!("pending"), &json!(format!("{}/done?token=t1", receiver.url)))
    );
    let delivered = fixture.until(&id, "delivered").await;
    assert_eq!(codes(&delivered), [500, 200]);
    // A delivered webhook can be repeated, too, as the same message.
    fixture.api.post(&repeat, json!({})).await.is(202);
    let messages = receiver.received(4).await;
    assert_eq!(messages[3].header("webhook-id"), messages[0].header("webhook-id"));
    assert_eq!(messages[3].body, messages[0].body);
}

#[tokio::test]
async fn the_command_line_lists_and_repeats_deliveries() {
    let fixture = Fixture::with(|config| config.webhooks.retry_schedule_ms = vec![]).await;
    let receiver = Receiver::answering([Answer::Code(500)]).await;
    let id = fixture.complete_task(&receiver, json!(1)).await;
    fixture.until(&id, "exhausted").await;
    let run = async |words: &[&str]| run_cli(&fixture.server, words).await;
    let (list, _) = run(&["webhooks", "deliveries", "--status", "exhausted"]).await;
    assert!(list.contains(&id) && list.contains("answered 500"), "{list}");
    let (log, stderr) = run(&["webhooks", "deliveries", &id]).await;
    assert!(log.contains("500") && stderr.contains("exhausted"), "{log}{stderr}");
    run(&["webhooks", "repeat", &id]).await;
    fixture.until(&id, "delivered").await;
    let (json, _) = run(&["webhooks", "deliveries", "--json"]).await;
    let json: Value = json.parse().unwrap();
    assert_eq!(json["deliveries"][0]["status"], "delivered");
    let (key, _) = run(&["webhooks", "key"]).await;
    std::fs::write(fixture.key_file(), key.trim()).unwrap();
    run(&["webhooks", "repeat", &id]).await;
    let got = receiver.received(3).await.remove(2);
    assert!(got.is_signed_with(key.trim()), "the new key is used at once");
}

#[tokio::test]
async fn two_signing_keys_sign_during_a_rotation() {
    let fixture = Fixture::start().await;
    let receiver = Receiver::answering([]).await;
    let new = "whsec_AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";
    std::fs::write(fixture.key_file(), format!("{new} {KEY}\n")).unwrap();
    fixture.complete_task(&receiver, json!(1)).await;
    let got = receiver.received(1).await.remove(0);
    assert!(got.is_signed_with(KEY) && got.is_signed_with(new), "{got:?}");
}

#[tokio::test]
async fn a_large_result_is_omitted_with_a_link() {
    let fixture = Fixture::with(|config| config.webhooks.max_data_bytes = 100).await;
    let receiver = Receiver::answering([]).await;
    let id = fixture.complete_task(&receiver, json!("x".repeat(99))).await;
    let data = receiver.received(1).await.remove(0).json()["data"].clone();
    assert_eq!((&data["data"], &data["ok"]), (&Value::Null, &json!(true)));
    let read_at = format!("/v1/tool_calls/{id}");
    assert_eq!(data["data_omitted"], json!({ "bytes": 101, "read_at": read_at }));
    assert_eq!(fixture.api.get(&read_at).await.is(200)["result"], json!("x".repeat(99)));
    fixture.complete_task(&receiver, json!("x".repeat(98))).await;
    let data = receiver.received(2).await.remove(1).json()["data"].clone();
    assert!(data.get("data_omitted").is_none() && data["data"].is_string(), "{data}");
}

#[tokio::test]
async fn a_replayed_request_has_one_webhook() {
    let fixture = Fixture::start().await;
    let receiver = Receiver::answering([]).await;
    let key = json!({ "idempotency_key": "k1" });
    let id = fixture.invoke_task(&receiver, key.clone()).await;
    assert_eq!(fixture.invoke_task(&receiver, key).await, id);
    fixture.api.succeed(&id, json!(1)).await;
    fixture.until(&id, "delivered").await;
    let listed = fixture.api.get("/v1/deliveries").await.is(200);
    assert_eq!(listed["deliveries"].as_array().unwrap().len(), 1);
    let other = json!({ "run_id": "run_1", "call_id": "mine-1", "args": {}, "idempotency_key": "k1",
        "callback_url": format!("{}/other", receiver.url) });
    let refused = fixture.api.post("/v1/tools/a.task/invoke", other).await;
    refused.refused(422, "IDEMPOTENCY_MISMATCH");
}

#[tokio::test]
async fn a_batch_entry_can_have_its_own_callback_url() {
    let fixture = Fixture::start().await;
    let (all, one) = (Receiver::answering([]).await, Receiver::answering([]).await);
    let call = |url: Option<&str>| json!({ "name": "calculation.eval", "args": { "expression": "1" }, "callback_url": url });
    let batch = json!({ "run_id": "r", "callback_url": all.url,
        "tool_calls": [call(Some(&one.url)), call(None)] });
    let answer = fixture.api.post("/v1/tool_calls", batch).await.is(200);
    let id = |n: usize| answer["results"][n]["tool_call_id"].clone();
    assert_eq!(one.received(1).await[0].json()["data"]["tool_call_id"], id(0));
    assert_eq!(all.received(1).await[0].json()["data"]["tool_call_id"], id(1));
    let bad = json!({ "run_id": "r", "tool_calls": [call(Some("ftp://x/")), call(None)] });
    let answer = fixture.api.post("/v1/tool_calls", bad).await.is(200);
    assert_eq!(answer["results"][0]["error"]["detail"]["pointer"], "/callback_url", "{answer}");
    assert_eq!(answer["results"][1]["ok"], true);
}
