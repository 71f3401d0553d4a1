//! Webhooks: signed, retried, delivered at least once, and never to a private address unless the
//! operator allows it. The receivers are real, on loopback.

mod delivering;
mod refusing;
mod wakeups;

use std::path::PathBuf;

use serde_json::{Value, json};
use tempfile::TempDir;
use toolcrib_server::config::Config;

use crate::support::api::{offer, offer_with};
use crate::support::receiver::{KEY, Receiver};
use crate::support::{Api, Server, until};

/// A server that signs with [`KEY`], may send webhooks to loopback, and retries four times, after
/// 50 ms each.
struct Fixture {
    server: Server,
    api: Api,
    keys: TempDir,
}

impl Fixture {
    async fn start() -> Self {
        Self::with(|_| {}).await
    }

    async fn with(change: impl FnOnce(&mut Config)) -> Self {
        let keys = tempfile::tempdir().unwrap();
        let file = keys.path().join("signing.key");
        std::fs::write(&file, KEY).unwrap();
        let server = Server::with(|config| {
            config.webhooks.signing_key_file = Some(file);
            config.webhooks.allow_hosts = vec!["127.0.0.1".into()];
            config.webhooks.retry_schedule_ms = vec![50; 4];
            config.webhooks.jitter = 0.0;
            change(config);
        })
        .await;
        let api = server.api();
        let task = offer_with("a.task", json!({ "async": true }));
        api.register("c1", json!([task, offer("a.tool")])).await;
        Self { server, api, keys }
    }

    fn key_file(&self) -> PathBuf {
        self.keys.path().join("signing.key")
    }

    /// Invokes a task with a webhook to this receiver.
    async fn invoke_task(&self, receiver: &Receiver, more: Value) -> String {
        let mut body = json!({
            "run_id": "run_1", "call_id": "mine-1", "args": {},
            "callback_url": format!("{}/done?token=t1", receiver.url),
        });
        for (name, value) in more.as_object().unwrap() {
            body[name] = value.clone();
        }
        self.api.invoke_with("a.task", body).await
    }

    /// Invokes a task and completes it with this result.
    async fn complete_task(&self, receiver: &Receiver, result: Value) -> String {
        let id = self.invoke_task(receiver, json!({})).await;
        self.api.succeed(&id, result).await;
        id
    }

    async fn delivery(&self, id: &str) -> Value {
        let path = format!("/v1/tool_calls/{id}/deliveries");
        self.api.get(&path).await.is(200)["deliveries"][0].clone()
    }

    /// Waits until the delivery has this status.
    async fn until(&self, id: &str, status: &str) -> Value {
        until(&format!("the webhook of {id} to be {status}"), || async {
            let delivery = self.delivery(id).await;
            (delivery["status"] == status).then_some(delivery)
        })
        .await
    }
}

/// Returns the status code of each delivery attempt.
fn codes(delivery: &Value) -> Vec<Value> {
    let log = delivery["log"].as_array().unwrap();
    log.iter().map(|tried| tried["status_code"].clone()).collect()
}
