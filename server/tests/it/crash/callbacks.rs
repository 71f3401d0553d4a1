//! Killed between the end of a call and the delivery of its callback: it is delivered by the next
//! start. And a receiver that hangs does not keep the server from stopping.

use serde_json::{Value, json};

use crate::support::process::{PATIENCE, Server, check, eventually};
use crate::support::receiver::{Answer, KEY, Receiver};

/// Signs with a key from its environment, and delivers one at a time.
fn server() -> Server {
    Server::new()
        .with("WEBHOOK_SIGNING_KEY", KEY)
        .with("WEBHOOKS__ALLOW_HOSTS", "127.0.0.1")
        .with("WEBHOOKS__MAX_PARALLEL", 1)
}

async fn ended(server: &Server, receiver: &Receiver, path: &str) -> String {
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

async fn delivered(server: &Server, id: &str) {
    let look = async || (delivery(server, id).await["status"] == "delivered").then_some(());
    eventually("the callback is delivered", PATIENCE, look).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_crash_between_the_end_and_the_delivery_loses_no_callback() {
    let mut server = server();
    server.start().await;
    let receiver = Receiver::answering([Answer::Hang]).await;
    let first = ended(&server, &receiver, "/first").await;
    receiver.received(1).await;
    // The only lane is taken by the one that hangs, so this one cannot have been tried.
    let second = ended(&server, &receiver, "/second").await;
    assert_eq!(delivery(&server, &second).await["tries"], 0);
    server.kill();
    assert_eq!(receiver.came().len(), 1);

    server.start().await;
    delivered(&server, &first).await;
    delivered(&server, &second).await;
    let came = receiver.received(3).await;
    let paths: Vec<&str> = came.iter().map(|got| got.path.as_str()).collect();
    assert_eq!(paths, ["/first", "/first", "/second"]);
    assert_eq!(came[0].header("webhook-id"), came[1].header("webhook-id"));
    assert_eq!(came[0].body, came[1].body);
    assert!(came.iter().all(|got| got.is_signed_with(KEY)));
    assert!(server.stop().await.success());
    assert_eq!(check(&server.data_dir()).open, 0);
    let log = server.log();
    assert!(!log.contains(KEY.trim_start_matches("whsec_")), "{log}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_receiver_that_hangs_does_not_hold_up_the_stop() {
    // Longer than the patience of the test.
    let mut server = server().with("WEBHOOKS__TIMEOUT_MS", 600_000);
    server.start().await;
    let receiver = Receiver::answering([Answer::Hang]).await;
    let id = ended(&server, &receiver, "/").await;
    receiver.received(1).await;
    assert!(server.stop().await.success());
    server.start().await;
    delivered(&server, &id).await;
    assert_eq!(delivery(&server, &id).await["log"].as_array().unwrap().len(), 1);
}
