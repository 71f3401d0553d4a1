//! Wakeups by webhook: one for each new item of an agent's inbox.

use parking_lot::Mutex;
use toolcrib::domain::agent::AgentDriver;
use toolcrib::domain::delivery::DeliveryResponse;
use toolcrib::ports::webhook_sender::{
    DeliverySettings, WakeupMessage, WebhookMessage, WebhookSender,
};

use super::*;

/// A receiver that refuses the first wakeup and accepts every other one.
#[derive(Default)]
struct Receiver(Mutex<Vec<WakeupMessage>>);

#[async_trait]
impl WebhookSender for Receiver {
    fn check_url(&self, _: &str, url: &str) -> Result<String, String> {
        Ok(url.to_owned())
    }

    async fn send(&self, _: WebhookMessage) -> DeliveryResponse {
        DeliveryResponse { result: Ok(200), retry_after_ms: None }
    }

    async fn send_wakeup(&self, message: WakeupMessage) -> DeliveryResponse {
        let mut received = self.0.lock();
        received.push(message);
        let code = if received.len() == 1 { 503 } else { 200 };
        DeliveryResponse { result: Ok(code), retry_after_ms: None }
    }
}

#[tokio::test]
async fn each_new_item_has_one_wakeup_with_its_own_id_and_turn() {
    let receiver = Arc::new(Receiver::default());
    let builder = Engine::builder().webhook_sender(receiver.clone(), DeliverySettings::default());
    let engine = builder.start().await.unwrap();
    let hooked = AgentDefinition {
        driver: AgentDriver::Worker,
        wakeup_url: Some("https://w.example/".into()),
        ..agent("w")
    };
    engine.roster().define_agent(&caller(), hooked, None).await.unwrap();
    let expected = async || -> Vec<(String, String)> {
        let items = engine.utp().inbox(&caller(), "w", 10, 0).await.unwrap();
        items.into_iter().map(|item| (item.inbox_id, item.turn_id)).collect()
    };
    for count in 1..=3 {
        let request = CallRequest::of("agent.w", Json::from_value(&json!({ "instruction": "x" })));
        let request = CallRequest { run_id: format!("r{count}"), ..request };
        engine.calls().invoke(&caller(), request).await.unwrap();
        until("the item has its wakeup", async || {
            // The first item has two: one that was refused, and its repetition.
            (receiver.0.lock().len() > count).then_some(())
        })
        .await;
    }
    let sent: Vec<(String, String)> = receiver.0.lock()[1..]
        .iter()
        .map(|message| (message.inbox_id.clone(), message.turn_id.clone()))
        .collect();
    assert_eq!(sent, expected().await);
    assert_eq!(receiver.0.lock()[0].inbox_id, sent[0].0);
}
