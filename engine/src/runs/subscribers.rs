//! Subscribers of an active run, each with a buffer of undelivered deltas.
//!
//! Buffered text is merged, so a burst of small deltas becomes a few large ones and none is lost.
//! If a subscriber reads nothing while megabytes arrive, the buffer drops the excess and marks the
//! gap.

use std::collections::VecDeque;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::domain::run::RunError;
use crate::ports::model::Delta;
use crate::runs::agent_loop::LoopEvent;

/// Maximum size of buffered deltas per subscriber.
const MAX_BUFFERED_BYTES: usize = 1 << 20;

/// Maximum number of buffered deltas per subscriber.
const MAX_BUFFERED_DELTAS: usize = 4_096;

/// A live update of a run. It is streamed and never stored.
#[derive(Debug, Clone, PartialEq)]
pub enum RunDelta {
    /// A request to the model has started.
    RequestStarted {
        /// Number of the step, from 1.
        step: u32,
        /// True if a limit is reached, so that this is the final request.
        last: bool,
    },
    /// More text of the reply.
    Text {
        /// Number of the step, from 1.
        step: u32,
        /// Text that follows the previous delta's.
        text: String,
    },
    /// More of a tool call in the reply. The call is executed only once it is complete.
    ToolCall {
        /// Number of the step, from 1.
        step: u32,
        /// Position of the call in the reply, from 0.
        index: usize,
        /// The model's own id of the call, in its first delta.
        id: Option<String>,
        /// Tool name as the model wrote it, in the first delta of the call.
        name: Option<String>,
        /// Next part of the arguments' JSON text.
        arguments: String,
    },
    /// The request failed and its deltas are void. It is retried after `wait_ms`.
    RequestRetried {
        /// Number of the step, from 1.
        step: u32,
        /// Number of the retry within the step, from 1.
        retry: u32,
        /// Time until the retry, in milliseconds.
        wait_ms: u64,
        /// Fault of the failed request.
        why: RunError,
    },
    /// The subscriber was too slow and deltas are missing here. The whole reply is stored.
    Lagged {
        /// Number of the step of the first missing delta, from 1.
        step: u32,
    },
}

impl RunDelta {
    /// Returns the step that the delta belongs to.
    pub fn step(&self) -> u32 {
        match self {
            Self::RequestStarted { step, .. }
            | Self::Text { step, .. }
            | Self::ToolCall { step, .. }
            | Self::RequestRetried { step, .. }
            | Self::Lagged { step } => *step,
        }
    }

    pub(crate) fn from_loop_event(event: &LoopEvent<'_>) -> Option<Self> {
        Some(match event {
            LoopEvent::ModelRequested { step, last } => {
                Self::RequestStarted { step: *step, last: *last }
            }
            LoopEvent::ReplyDelta { step, piece: Delta::Text(text) } => {
                Self::Text { step: *step, text: text.clone() }
            }
            LoopEvent::ReplyDelta { step, piece: Delta::Call { index, id, name, arguments } } => {
                let (step, index, arguments) = (*step, *index, arguments.clone());
                Self::ToolCall { step, index, id: id.clone(), name: name.clone(), arguments }
            }
            LoopEvent::ModelRetryScheduled { step, retry, wait_ms, why } => Self::RequestRetried {
                step: *step,
                retry: *retry,
                wait_ms: *wait_ms,
                why: RunError::from(*why),
            },
            _ => return None,
        })
    }
}

/// A subscription to the live deltas of a run.
#[derive(Default)]
pub struct RunSubscription {
    subscriber: Option<Arc<Subscriber>>,
    /// All subscribers of the conversation of OpenAI's API whose deltas these are.
    conversation: Option<Weak<SubscriberList>>,
}

impl RunSubscription {
    pub(crate) fn new(subscriber: Option<Arc<Subscriber>>) -> Self {
        Self { subscriber, conversation: None }
    }

    /// Subscribes to a conversation, which ends when its subscribers are dropped.
    pub(crate) fn of_conversation(subscribers: &Subscribers) -> Self {
        let conversation = Some(Arc::downgrade(&subscribers.0));
        Self { subscriber: Some(subscribers.subscribe()), conversation }
    }

    /// Returns true if the deltas are those of a conversation of OpenAI's API in progress: they
    /// precede its stored events, and follow those of earlier conversations under its run id. Each
    /// conversation numbers its steps from 1.
    pub fn is_of_conversation(&self) -> bool {
        self.conversation.is_some()
    }

    /// Returns true if the conversation has ended, so that its events are stored.
    pub fn has_conversation_ended(&self) -> bool {
        self.conversation.as_ref().is_some_and(|list| list.strong_count() == 0)
    }

    /// Returns the next delta. Never returns once there are no more: the run's stored events show
    /// its end. A subscriber that is too slow receives [`RunDelta::Lagged`] in place of the deltas
    /// it missed; the whole reply is stored.
    pub async fn next(&mut self) -> RunDelta {
        match &self.subscriber {
            Some(subscriber) => subscriber.next().await,
            None => std::future::pending().await,
        }
    }

    /// Returns the next buffered delta, if there is one.
    pub fn try_next(&mut self) -> Option<RunDelta> {
        self.subscriber.as_ref()?.try_next()
    }
}

/// All subscribers of a run.
#[derive(Default)]
pub(crate) struct Subscribers(Arc<SubscriberList>);

type SubscriberList = Mutex<Vec<Weak<Subscriber>>>;

impl Subscribers {
    /// Adds a subscriber, which receives deltas from now on.
    pub(crate) fn subscribe(&self) -> Arc<Subscriber> {
        let subscriber = Arc::new(Subscriber::default());
        let mut subscribers = self.0.lock();
        subscribers.retain(|subscriber| subscriber.strong_count() > 0);
        subscribers.push(Arc::downgrade(&subscriber));
        subscriber
    }

    pub(crate) fn publish(&self, delta: RunDelta) {
        let mut subscribers = self.0.lock();
        // Dropped subscribers are removed here.
        subscribers.retain(|subscriber| {
            subscriber.upgrade().inspect(|subscriber| subscriber.push(delta.clone())).is_some()
        });
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
    fn push(&self, delta: RunDelta) {
        self.buffer.lock().append(delta);
        self.woken.notify_one();
    }

    pub(crate) fn try_next(&self) -> Option<RunDelta> {
        let mut buffer = self.buffer.lock();
        let delta = buffer.deltas.pop_front()?;
        buffer.bytes = buffer.bytes.saturating_sub(delta_bytes(&delta));
        Some(delta)
    }

    pub(crate) async fn next(&self) -> RunDelta {
        loop {
            if let Some(delta) = self.try_next() {
                return delta;
            }
            self.woken.notified().await;
        }
    }
}

impl DeltaBuffer {
    fn append(&mut self, delta: RunDelta) {
        let more = delta_bytes(&delta);
        let is_full = self.deltas.len() >= MAX_BUFFERED_DELTAS
            || (more > 0 && self.bytes > 0 && self.bytes + more > MAX_BUFFERED_BYTES);
        let last = self.deltas.back_mut();
        if is_full {
            // The buffered deltas have no gap; the gap starts here.
            let step = delta.step();
            if last.is_none_or(|last| *last != RunDelta::Lagged { step }) {
                self.deltas.push_back(RunDelta::Lagged { step });
            }
            return;
        }
        self.bytes += more;
        let rest = match last {
            Some(last) => merge_delta(last, delta),
            None => Some(delta),
        };
        self.deltas.extend(rest);
    }
}

/// Merges a delta into the previous one. Returns it if the two cannot be merged.
fn merge_delta(last: &mut RunDelta, delta: RunDelta) -> Option<RunDelta> {
    match (last, delta) {
        (RunDelta::Text { step, text }, RunDelta::Text { step: same, text: more })
            if *step == same =>
        {
            text.push_str(&more);
            None
        }
        (_, other) => Some(other),
    }
}

fn delta_bytes(delta: &RunDelta) -> usize {
    match delta {
        RunDelta::Text { text, .. } => text.len(),
        RunDelta::ToolCall { arguments, .. } => arguments.len(),
        _ => 0,
    }
}
