//! Rejected webhooks: invalid URLs, private addresses, missing keys; and isolation of projects.

use serde_json::{Value, json};

use super::Fixture;
use crate::support::Server;
use crate::support::api::message;
use crate::support::receiver::{KEY, Receiver};

fn body(url: &str) -> Value {
    json!({ "run_id": "r", "args": { "expression": "1" }, "callback_url": url })
}

const INVOKE: &str = "/v1/tools/calculation.eval/invoke";

#[tokio::test]
async fn private_addresses_are_rejected_by_default() {
    let fixture = Fixture::with(|config| config.webhooks.allow_hosts.clear()).await;
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
        let error = fixture.api.post(INVOKE, body(url)).await.refused(422, "VALIDATION_ERROR");
        assert!(message(&error).starts_with("callback_url must not lead to a private"), "{error}");
        assert!(message(&error).contains("webhooks.allow_private"), "{error}");
        assert_eq!(error["detail"]["pointer"], "/callback_url");
    }
    let calls = fixture.api.get("/v1/tool_calls").await.is(200);
    assert_eq!(calls["tool_calls"], json!([]), "no call was stored");
}

#[tokio::test]
async fn invalid_callback_urls_are_rejected() {
    let fixture = Fixture::start().await;
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
        let error = fixture.api.post(INVOKE, body(url)).await.refused(422, "VALIDATION_ERROR");
        assert!(message(&error).starts_with("callback_url "), "{error}");
        assert_eq!(error["detail"]["pointer"], "/callback_url");
    }
    let number = json!({ "run_id": "r", "args": {}, "callback_url": 7 });
    fixture.api.post(INVOKE, number).await.refused(400, "BAD_REQUEST");
}

/// A host that was allowed at the invoke may be forbidden at the delivery.
#[tokio::test]
async fn allowed_hosts_are_checked_again_at_delivery() {
    let fixture = Fixture::with(|config| config.webhooks.retry_schedule_ms = vec![]).await;
    let receiver = Receiver::answering([]).await;
    let id = fixture.invoke_task(&receiver, json!({})).await;
    let Fixture { server, keys, .. } = fixture;
    let mut config = server.config.clone();
    config.webhooks.allow_hosts.clear();
    let server = server.restart_with(config).await;
    let api = server.api();
    let fixture = Fixture { server, api, keys };
    fixture.api.succeed(&id, json!(1)).await;
    let exhausted = fixture.until(&id, "exhausted").await;
    let reason = exhausted["last_error"].as_str().unwrap();
    assert!(reason.contains("private network"), "{reason}");
    assert_eq!(receiver.messages().len(), 0);
}

#[tokio::test]
async fn without_a_signing_key_a_callback_url_is_rejected() {
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
async fn the_webhook_of_an_open_call_cannot_be_repeated() {
    let fixture = Fixture::start().await;
    let receiver = Receiver::answering([]).await;
    let id = fixture.invoke_task(&receiver, json!({})).await;
    let repeat = format!("/v1/tool_calls/{id}/deliveries/repeat");
    let error = fixture.api.post(&repeat, json!({})).await.refused(409, "CONFLICT");
    assert!(message(&error).contains("has not ended"), "{error}");
    let error = fixture.api.get("/v1/deliveries?status=lost").await;
    let error = error.refused(422, "VALIDATION_ERROR");
    assert!(message(&error).contains("waiting, pending"), "{error}");
}

#[tokio::test]
async fn each_project_has_its_own_key_and_deliveries() {
    let other = tempfile::tempdir().unwrap();
    let file = other.path().join("key");
    let key = "whsec_AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";
    std::fs::write(&file, key).unwrap();
    let fixture = Fixture::with(|config| {
        let key_settings = toolcrib_server::config::WebhookKeySettings {
            signing_key: None,
            signing_key_env: None,
            signing_key_file: Some(file),
        };
        config.webhooks.projects.insert("acme".into(), key_settings);
    })
    .await;
    let (default_receiver, theirs) = (Receiver::answering([]).await, Receiver::answering([]).await);
    let acme = fixture.server.api().project("acme");
    let id = acme.invoke_with("calculation.eval", body(&theirs.url)).await;
    let call_id = fixture.api.invoke_with("calculation.eval", body(&default_receiver.url)).await;
    let got = theirs.received(1).await.remove(0);
    assert!(got.is_signed_with(key) && !got.is_signed_with(KEY));
    assert!(default_receiver.received(1).await.remove(0).is_signed_with(KEY));
    let path = format!("/v1/tool_calls/{id}/deliveries");
    fixture.api.get(&path).await.refused(404, "NOT_FOUND");
    fixture.api.post(&format!("{path}/repeat"), json!({})).await.refused(404, "NOT_FOUND");
    let listed = fixture.api.get("/v1/deliveries").await.is(200);
    let ids: Vec<&Value> = listed["deliveries"]
        .as_array()
        .unwrap()
        .iter()
        .map(|delivery| &delivery["tool_call_id"])
        .collect();
    assert_eq!(ids, [&json!(call_id)]);
}

/// The server reports an invalid key before it listens, without the key itself.
#[tokio::test]
async fn an_invalid_signing_key_prevents_the_start() {
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
async fn errors_do_not_reveal_the_path_of_the_key() {
    let fixture = Fixture::start().await;
    std::fs::remove_file(fixture.keys.path().join("signing.key")).unwrap();
    let call = body("http://127.0.0.1:9/x");
    let error = fixture.api.post("/v1/tools/calculation.eval/invoke", call).await;
    let error = error.refused(422, "VALIDATION_ERROR");
    let error_text = error.to_string();
    assert!(message(&error).contains("signing key"), "{error_text}");
    assert!(!error_text.contains("signing.key"), "{error_text}");
    assert!(!error_text.contains(fixture.keys.path().to_str().unwrap()), "{error_text}");
}
