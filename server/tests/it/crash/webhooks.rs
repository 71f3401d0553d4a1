//! After a kill between the end of a call and the delivery of its webhook, the next start delivers
//! it. A receiver that does not answer does not delay the shutdown.

use serde_json::{Value, json};

use crate::support::process::{PATIENCE, Server, check, eventually};
use crate::support::receiver::{Answer, KEY, Receiver};

/// Returns a server that takes the signing key from its environment and delivers one at a time.
fn server() -> Server {
    Server::new()
        .with("WEBHOOK_SIGNING_KEY", KEY)
        .with("WEBHOOKS__ALLOW_HOSTS", "127.0.0.1")
        .with("WEBHOOKS__MAX_PARALLEL", 1)
}

async fn end_a_call(server: &Server, receiver: &Receiver, path: &str) -> String {
    let args = json!({ "expression": "6*7" });
    let url = format!("{}{path}", receiver.url);
    let body = json!({ "run_id": "r", "args": args, "callback_url": url, "wait_ms": 10_000 });
    let call = server.invoke("calculation.eval", body).await;
    assert_eq!(call["status"], "SUCCEEDED", "{call}");
    call["tool_call_id"].as_str().unwrap().to_owned()
}

async fn delivery(server: &Server, id: &str) -> Value {
    let url = server.url(&format!("/v1/tool_calls/{id}/deliveries"));
    let answer = server.http.get(url).send().await.unwrap().json::<Value>().await.unwrap();
    answer["deliveries"][0].clone()
}

async fn wait_until_delivered(server: &Server, id: &str) {
    let look = async || (delivery(server, id).await["status"] == "delivered").then_some(());
    eventually("the webhook is delivered", PATIENCE, look).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_crash_between_outcome_and_delivery_loses_no_webhook() {
    let mut server = server();
    server.start().await;
    let receiver = Receiver::answering([Answer::Hang]).await;
    let first = end_a_call(&server, &receiver, "/first").await;
    receiver.received(1).await;
    // The unanswered delivery holds the only permit, so this one has not been attempted.
    let second = end_a_call(&server, &receiver, "/second").await;
    assert_eq!(delivery(&server, &second).await["tries"], 0);
    server.kill();
    assert_eq!(receiver.messages().len(), 1);

    server.start().await;
    wait_until_delivered(&server, &first).await;
    wait_until_delivered(&server, &second).await;
    let messages = receiver.received(3).await;
    let paths: Vec<&str> = messages.iter().map(|got| got.path.as_str()).collect();
    assert_eq!(paths, ["/first", "/first", "/second"]);
    assert_eq!(messages[0].header("webhook-id"), messages[1].header("webhook-id"));
    assert_eq!(messages[0].body, messages[1].body);
    assert!(messages.iter().all(|got| got.is_signed_with(KEY)));
    assert!(server.stop().await.success());
    assert_eq!(check(&server.data_dir()).open, 0);
    let log = server.log();
    assert!(!log.contains(KEY.trim_start_matches("whsec_")), "{log}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unresponsive_receiver_does_not_delay_shutdown() {
    // Longer than `PATIENCE`.
    let mut server = server().with("WEBHOOKS__TIMEOUT_MS", 600_000);
    server.start().await;
    let receiver = Receiver::answering([Answer::Hang]).await;
    let id = end_a_call(&server, &receiver, "/").await;
    receiver.received(1).await;
    assert!(server.stop().await.success());
    server.start().await;
    wait_until_delivered(&server, &id).await;
    assert_eq!(delivery(&server, &id).await["log"].as_array().unwrap().len(), 1);
}
