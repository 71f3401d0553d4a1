//! Tests of a run's live stream with a slow subscriber: it is complete, or says that something is
//! missing.

use super::*;
use toolcrib::ports::model::Delta;

/// A model that sends this many deltas of this size, all at once.
struct Chatters(usize, usize);

impl Chatters {
    fn piece(&self, n: usize) -> String {
        format!("{n:>0$} ", self.1)
    }
}

#[async_trait]
impl Model for Chatters {
    async fn reply(
        &self,
        _: &ModelRequest,
        listener: DeltaListener<'_>,
    ) -> Result<ModelReply, ModelError> {
        let pieces: Vec<String> = (0..self.0).map(|n| self.piece(n)).collect();
        for piece in &pieces {
            listener(Delta::Text(piece.clone()));
        }
        Ok(ModelReply { text: pieces.concat(), ..ModelReply::default() })
    }
}

/// Returns the deltas that a subscriber reads after the end of the run, and the answer.
async fn heard(model: Chatters) -> (Vec<RunDelta>, String) {
    let engine = Site::new().engine(Arc::new(model)).await;
    let new = RunRequest { subscribes: true, ..new_run("Tell me everything") };
    let mut started = engine.start_run(&me(), new).await.unwrap();
    let answer = ended(&engine, &started.run.id).await.answer.unwrap().text;
    let notes = std::iter::from_fn(|| started.subscription.try_next()).collect();
    (notes, answer)
}

fn text(notes: &[RunDelta]) -> String {
    let texts = notes.iter().filter_map(|note| match note {
        RunDelta::Text { text, .. } => Some(text.as_str()),
        _ => None,
    });
    texts.collect()
}

#[tokio::test]
async fn a_burst_of_small_pieces_is_heard_whole() {
    let (notes, answer) = heard(Chatters(20_000, 5)).await;
    assert_eq!(text(&notes), answer);
    assert!(!notes.contains(&RunDelta::Lagged { step: 1 }));
}

#[tokio::test]
async fn who_misses_pieces_is_told_so_in_their_place() {
    let (notes, answer) = heard(Chatters(1_500, 1_000)).await;
    let gap = notes.iter().position(|note| *note == RunDelta::Lagged { step: 1 }).unwrap();
    let before = text(&notes[..gap]);
    assert!(!before.is_empty() && answer.starts_with(&before), "what came before has no gap");
    assert!(text(&notes).len() < answer.len());
}
