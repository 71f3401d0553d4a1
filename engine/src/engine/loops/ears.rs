//! Subscribers of an active run, each with a buffer of undelivered deltas.
//!
//! Buffered text is merged, so a burst of small deltas becomes a few large ones and none is lost.
//! If a subscriber reads nothing while megabytes arrive, the buffer drops the excess and marks the
//! gap.

use std::collections::VecDeque;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use tokio::sync::Notify;

use super::LiveNote;

/// Maximum size of buffered deltas per subscriber.
const WAITING_BYTES: usize = 1 << 20;

/// Maximum number of buffered deltas per subscriber.
const WAITING_NOTES: usize = 4_096;

/// All subscribers of a run.
#[derive(Default)]
pub(super) struct Ears(Mutex<Vec<Weak<Ear>>>);

impl Ears {
    /// Adds a subscriber, which receives deltas from now on.
    pub(super) fn listen(&self) -> Arc<Ear> {
        let ear = Arc::new(Ear::default());
        let mut ears = self.0.lock();
        ears.retain(|ear| ear.strong_count() > 0);
        ears.push(Arc::downgrade(&ear));
        ear
    }

    pub(super) fn tell(&self, note: LiveNote) {
        let mut ears = self.0.lock();
        // Dropped subscribers are removed here.
        ears.retain(|ear| ear.upgrade().inspect(|ear| ear.hear(note.clone())).is_some());
    }
}

/// One subscriber.
#[derive(Default)]
pub(super) struct Ear {
    waiting: Mutex<Waiting>,
    woken: Notify,
}

#[derive(Default)]
struct Waiting {
    notes: VecDeque<LiveNote>,
    bytes: usize,
}

impl Ear {
    fn hear(&self, note: LiveNote) {
        self.waiting.lock().add(note);
        self.woken.notify_one();
    }

    pub(super) fn take(&self) -> Option<LiveNote> {
        let mut waiting = self.waiting.lock();
        let note = waiting.notes.pop_front()?;
        waiting.bytes = waiting.bytes.saturating_sub(size(&note));
        Some(note)
    }

    pub(super) async fn next(&self) -> LiveNote {
        loop {
            if let Some(note) = self.take() {
                return note;
            }
            self.woken.notified().await;
        }
    }
}

impl Waiting {
    fn add(&mut self, note: LiveNote) {
        let more = size(&note);
        let is_full = self.notes.len() >= WAITING_NOTES
            || (more > 0 && self.bytes > 0 && self.bytes + more > WAITING_BYTES);
        let last = self.notes.back_mut();
        if is_full {
            // The buffered deltas have no gap; the gap starts here.
            let step = note.step();
            if last.is_none_or(|last| *last != LiveNote::Missed { step }) {
                self.notes.push_back(LiveNote::Missed { step });
            }
            return;
        }
        self.bytes += more;
        let rest = match last {
            Some(last) => joined(last, note),
            None => Some(note),
        };
        self.notes.extend(rest);
    }
}

/// Merges a delta into the previous one. Returns it if the two cannot be merged.
fn joined(last: &mut LiveNote, note: LiveNote) -> Option<LiveNote> {
    match (last, note) {
        (LiveNote::Text { step, text }, LiveNote::Text { step: same, text: more })
            if *step == same =>
        {
            text.push_str(&more);
            None
        }
        (_, other) => Some(other),
    }
}

fn size(note: &LiveNote) -> usize {
    match note {
        LiveNote::Text { text, .. } => text.len(),
        LiveNote::Call { arguments, .. } => arguments.len(),
        _ => 0,
    }
}
