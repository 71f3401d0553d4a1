//! Tests of a run's live stream with a slow subscriber: it is complete, or says that something is
//! missing.

use super::*;
use toolcrib::ports::model::Delta;

/// A model that sends this many deltas of this size, all at once.
struct BurstModel(usize, usize);

impl BurstModel {
    fn delta_text(&self, n: usize) -> String {
        format!("{n:>0$} ", self.1)
    }
}

#[async_trait]
impl Model for BurstModel {
    async fn reply(
        &self,
        _: &ModelRequest,
        listener: DeltaListener<'_>,
    ) -> Result<ModelReply, ModelError> {
        let deltas: Vec<String> = (0..self.0).map(|n| self.delta_text(n)).collect();
        for delta in &deltas {
            listener(Delta::Text(delta.clone()));
        }
        Ok(ModelReply { text: deltas.concat(), ..ModelReply::default() })
    }
}

/// Returns the deltas that a subscriber reads after the end of the run, and the answer.
async fn stream_after_end(model: BurstModel) -> (Vec<RunDelta>, String) {
    let engine = Fixture::new().engine(Arc::new(model)).await;
    let new = RunRequest { subscribes: true, ..new_run("Tell me everything") };
    let mut started = engine.runs().start_run(&caller(), new).await.unwrap();
    let answer = wait_for_end(&engine, &started.run.id).await.answer.unwrap().text;
    let received = std::iter::from_fn(|| started.subscription.try_next()).collect();
    (received, answer)
}

fn text(received: &[RunDelta]) -> String {
    let texts = received.iter().filter_map(|delta| match delta {
        RunDelta::Text { text, .. } => Some(text.as_str()),
        _ => None,
    });
    texts.collect()
}

#[tokio::test]
async fn a_burst_of_small_deltas_is_received_completely() {
    let (received, answer) = stream_after_end(BurstModel(20_000, 5)).await;
    assert_eq!(text(&received), answer);
    assert!(!received.contains(&RunDelta::Lagged { step: 1 }));
}

#[tokio::test]
async fn a_lagging_subscriber_gets_a_marker_in_place_of_missed_deltas() {
    let (received, answer) = stream_after_end(BurstModel(1_500, 1_000)).await;
    let gap = received.iter().position(|delta| *delta == RunDelta::Lagged { step: 1 }).unwrap();
    let before = text(&received[..gap]);
    assert!(
        !before.is_empty() && answer.starts_with(&before),
        "the text before the gap is complete"
    );
    assert!(text(&received).len() < answer.len());
}
