//! Subscribers of an active run, each with a buffer of undelivered deltas.
//!
//! Buffered text is merged, so a burst of small deltas becomes a few large ones and none is lost.
//! If a subscriber reads nothing while megabytes arrive, the buffer drops the excess and marks the
//! gap.

use std::collections::VecDeque;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::runs::lifecycle::RunDelta;

/// Maximum size of buffered deltas per subscriber.
const MAX_BUFFERED_BYTES: usize = 1 << 20;

/// Maximum number of buffered deltas per subscriber.
const MAX_BUFFERED_DELTAS: usize = 4_096;

/// All subscribers of a run.
#[derive(Default)]
pub(crate) struct Subscribers(Mutex<Vec<Weak<Subscriber>>>);

impl Subscribers {
    /// Adds a subscriber, which receives deltas from now on.
    pub(crate) fn subscribe(&self) -> Arc<Subscriber> {
        let ear = Arc::new(Subscriber::default());
        let mut ears = self.0.lock();
        ears.retain(|ear| ear.strong_count() > 0);
        ears.push(Arc::downgrade(&ear));
        ear
    }

    pub(crate) fn publish(&self, note: RunDelta) {
        let mut ears = self.0.lock();
        // Dropped subscribers are removed here.
        ears.retain(|ear| ear.upgrade().inspect(|ear| ear.push(note.clone())).is_some());
    }
}

/// One subscriber.
#[derive(Default)]
pub(crate) struct Subscriber {
    buffer: Mutex<DeltaBuffer>,
    woken: Notify,
}

#[derive(Default)]
struct DeltaBuffer {
    deltas: VecDeque<RunDelta>,
    bytes: usize,
}

impl Subscriber {
    fn push(&self, note: RunDelta) {
        self.buffer.lock().append(note);
        self.woken.notify_one();
    }

    pub(crate) fn try_next(&self) -> Option<RunDelta> {
        let mut waiting = self.buffer.lock();
        let note = waiting.deltas.pop_front()?;
        waiting.bytes = waiting.bytes.saturating_sub(delta_bytes(&note));
        Some(note)
    }

    pub(crate) async fn next(&self) -> RunDelta {
        loop {
            if let Some(note) = self.try_next() {
                return note;
            }
            self.woken.notified().await;
        }
    }
}

impl DeltaBuffer {
    fn append(&mut self, note: RunDelta) {
        let more = delta_bytes(&note);
        let is_full = self.deltas.len() >= MAX_BUFFERED_DELTAS
            || (more > 0 && self.bytes > 0 && self.bytes + more > MAX_BUFFERED_BYTES);
        let last = self.deltas.back_mut();
        if is_full {
            // The buffered deltas have no gap; the gap starts here.
            let step = note.step();
            if last.is_none_or(|last| *last != RunDelta::Lagged { step }) {
                self.deltas.push_back(RunDelta::Lagged { step });
            }
            return;
        }
        self.bytes += more;
        let rest = match last {
            Some(last) => merge_delta(last, note),
            None => Some(note),
        };
        self.deltas.extend(rest);
    }
}

/// Merges a delta into the previous one. Returns it if the two cannot be merged.
fn merge_delta(last: &mut RunDelta, note: RunDelta) -> Option<RunDelta> {
    match (last, note) {
        (RunDelta::Text { step, text }, RunDelta::Text { step: same, text: more })
            if *step == same =>
        {
            text.push_str(&more);
            None
        }
        (_, other) => Some(other),
    }
}

fn delta_bytes(note: &RunDelta) -> usize {
    match note {
        RunDelta::Text { text, .. } => text.len(),
        RunDelta::ToolCall { arguments, .. } => arguments.len(),
        _ => 0,
    }
}
