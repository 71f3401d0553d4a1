//! What is not a callback: bad URLs, private addresses, no key; and whose deliveries are whose.

use serde_json::{Value, json};

use super::World;
use crate::support::Server;
use crate::support::api::message;
use crate::support::receiver::{KEY, Receiver};

fn body(url: &str) -> Value {
    json!({ "run_id": "r", "args": { "expression": "1" }, "callback_url": url })
}

const INVOKE: &str = "/v1/tools/calculation.eval/invoke";

#[tokio::test]
async fn private_addresses_are_refused_by_default() {
    let world = World::with(|config| config.webhooks.allow_hosts.clear()).await;
    for url in [
        "http://127.0.0.1:9/x",
        "http://localhost/x",
        "http://[::1]/x",
        "http://[::ffff:10.0.0.1]/",
        "http://169.254.169.254/latest/meta-data",
        "http://10.1.2.3/",
        "https://192.168.1.1:8443/",
        "http://0x7f000001/",
        "http://100.64.0.1/",
    ] {
        let error = world.api.post(INVOKE, body(url)).await.refused(422, "VALIDATION_ERROR");
        assert!(message(&error).starts_with("callback_url must not lead to a private"), "{error}");
        assert!(message(&error).contains("webhooks.allow_private"), "{error}");
        assert_eq!(error["detail"]["pointer"], "/callback_url");
    }
    let calls = world.api.get("/v1/tool_calls").await.is(200);
    assert_eq!(calls["tool_calls"], json!([]), "nothing was done");
}

#[tokio::test]
async fn urls_that_cannot_be_are_refused() {
    let world = World::start().await;
    let long = format!("https://hooks.example/{}", "x".repeat(2_048));
    for url in [
        "",
        "hooks.example",
        "/x",
        "ftp://hooks.example/",
        "https://",
        "https://u:p@hooks.example/",
        &long,
    ] {
        let error = world.api.post(INVOKE, body(url)).await.refused(422, "VALIDATION_ERROR");
        assert!(message(&error).starts_with("callback_url "), "{error}");
        assert_eq!(error["detail"]["pointer"], "/callback_url");
    }
    let number = json!({ "run_id": "r", "args": {}, "callback_url": 7 });
    world.api.post(INVOKE, number).await.refused(400, "BAD_REQUEST");
}

/// What was allowed when it was asked may not be any more when it is sent.
#[tokio::test]
async fn the_rules_of_the_moment_decide() {
    let world = World::with(|config| config.webhooks.retry_schedule_ms = vec![]).await;
    let receiver = Receiver::answering([]).await;
    let id = world.asked(&receiver, json!({})).await;
    let World { server, keys, .. } = world;
    let mut config = server.config.clone();
    config.webhooks.allow_hosts.clear();
    let server = server.restart_with(config).await;
    let api = server.api();
    let world = World { server, api, keys };
    world.api.succeed(&id, json!(1)).await;
    let given_up = world.until(&id, "exhausted").await;
    let why = given_up["last_error"].as_str().unwrap();
    assert!(why.contains("private network"), "{why}");
    assert_eq!(receiver.came().len(), 0);
}

#[tokio::test]
async fn without_a_key_there_are_no_callbacks_and_it_says_how() {
    let server = Server::with(|config| {
        config.webhooks.signing_key_env = "TOOLCRIB_WEBHOOK_OF_NOBODY".into();
    })
    .await;
    let api = server.api();
    let answer = api.post(INVOKE, body("https://hooks.example/")).await;
    let error = answer.refused(422, "VALIDATION_ERROR");
    for word in ["callback_url", "toolcrib webhooks key", "TOOLCRIB_WEBHOOK_OF_NOBODY"] {
        assert!(message(&error).contains(word), "{error}");
    }
    let without = json!({ "run_id": "r", "args": { "expression": "1" } });
    let id = api.invoke_with("calculation.eval", without).await;
    let none = api.get(&format!("/v1/tool_calls/{id}/deliveries")).await.is(200);
    assert_eq!(none, json!({ "deliveries": [], "next_cursor": null }));
    let repeat = format!("/v1/tool_calls/{id}/deliveries/repeat");
    api.post(&repeat, json!({})).await.refused(404, "NOT_FOUND");
}

#[tokio::test]
async fn a_call_that_has_not_ended_cannot_be_told_of() {
    let world = World::start().await;
    let receiver = Receiver::answering([]).await;
    let id = world.asked(&receiver, json!({})).await;
    let repeat = format!("/v1/tool_calls/{id}/deliveries/repeat");
    let error = world.api.post(&repeat, json!({})).await.refused(409, "CONFLICT");
    assert!(message(&error).contains("has not ended"), "{error}");
    let error = world.api.get("/v1/deliveries?status=lost").await;
    let error = error.refused(422, "VALIDATION_ERROR");
    assert!(message(&error).contains("waiting, pending"), "{error}");
}

#[tokio::test]
async fn each_project_has_its_own_key_and_sees_its_own() {
    let other = tempfile::tempdir().unwrap();
    let file = other.path().join("key");
    let key = "whsec_AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";
    std::fs::write(&file, key).unwrap();
    let world = World::with(|config| {
        let own = toolcrib_server::config::WebhookKeySettings {
            signing_key_env: None,
            signing_key_file: Some(file),
        };
        config.webhooks.projects.insert("acme".into(), own);
    })
    .await;
    let (mine, theirs) = (Receiver::answering([]).await, Receiver::answering([]).await);
    let acme = world.server.api().project("acme");
    let id = acme.invoke_with("calculation.eval", body(&theirs.url)).await;
    let own = world.api.invoke_with("calculation.eval", body(&mine.url)).await;
    let got = theirs.received(1).await.remove(0);
    assert!(got.is_signed_with(key) && !got.is_signed_with(KEY));
    assert!(mine.received(1).await.remove(0).is_signed_with(KEY));
    let path = format!("/v1/tool_calls/{id}/deliveries");
    world.api.get(&path).await.refused(404, "NOT_FOUND");
    world.api.post(&format!("{path}/repeat"), json!({})).await.refused(404, "NOT_FOUND");
    let listed = world.api.get("/v1/deliveries").await.is(200);
    let ids: Vec<&Value> = listed["deliveries"]
        .as_array()
        .unwrap()
        .iter()
        .map(|delivery| &delivery["tool_call_id"])
        .collect();
    assert_eq!(ids, [&json!(own)]);
}

/// Whoever writes a key that is none is told before anything is served, and not what they wrote.
#[tokio::test]
async fn a_key_that_is_none_stops_the_start() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("key");
    std::fs::write(&file, "hunter2").unwrap();
    let mut config = toolcrib_server::config::Config {
        data_dir: directory.path().join("data"),
        ..Default::default()
    };
    config.webhooks.signing_key_file = Some(file);
    let error = toolcrib_server::bootstrap::start_server(&config).await.err().unwrap().to_string();
    assert!(error.contains("whsec_") && !error.contains("hunter2"), "{error}");
}

#[tokio::test]
async fn callers_do_not_learn_where_the_key_is() {
    let world = World::start().await;
    std::fs::remove_file(world.keys.path().join("signing.key")).unwrap();
    let call = body("http://127.0.0.1:9/x");
    let error = world.api.post("/v1/tools/calculation.eval/invoke", call).await;
    let error = error.refused(422, "VALIDATION_ERROR");
    let shown = error.to_string();
    assert!(message(&error).contains("signing key"), "{shown}");
    assert!(!shown.contains("signing.key"), "{shown}");
    assert!(!shown.contains(world.keys.path().to_str().unwrap()), "{shown}");
}
