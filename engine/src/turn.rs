//! The loop: a model is asked, what it calls is executed, the results go back to it, until it
//! answers or a limit is reached.
//!
//! One turn is one request to the model and the execution of everything that its answer calls,
//! through [`Engine::batch`]. [`Engine::run_turn`] does one, [`Engine::run`] as many as it takes;
//! neither needs a server or a stored run. What is decided on the way (limits, repeated calls,
//! what the model is told) is decided in `rules`, which is pure; `ask` is the request with its
//! retries, `act` the execution, `offer` which tools the model is told of.
//!
//! A [`Talk`] is all there is to know about a conversation that goes on. It can be written down
//! between any two turns, and also between the model's answer and the execution of what it calls.

mod act;
mod ask;
mod before;
mod drive;
mod offer;
mod rules;
mod summary;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::batch::{Mode, Settled};
use crate::fault::Fault;
use crate::id::CallId;
use crate::model::{Piece, Reply, Stopped, Usage, Wanted};
use crate::retry::{Backoff, MAX_RETRIES_LIMIT, TIMEOUT_MS_RANGE};

pub use drive::Loop;
pub use offer::check_tools;
pub use rules::check_messages;
pub(crate) use rules::{closing_of, readdressed, same_call};

#[cfg(doc)]
use crate::engine::Engine;

/// How far a loop may go. When one of these is reached, the model is asked once more, without
/// tools, for the best answer it can give.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Limits {
    /// Requests to the model, without the last one.
    pub steps: u32,
    /// Calls of tools.
    pub calls: u32,
    /// Calls of tools in one answer; what is beyond is not done, and the model is told.
    pub calls_per_step: u32,
    /// Tokens of all requests and answers together.
    pub tokens: u64,
    /// How long it works, without the time it sleeps until late results come.
    pub time_ms: u64,
    /// A call that was made so often with the same arguments, and had the same result each time,
    /// is not made again.
    pub repeats: u32,
    /// Steps in a row in which every call failed.
    pub failures: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            steps: 32,
            calls: 256,
            calls_per_step: 64,
            tokens: 1_000_000,
            time_ms: 600_000,
            repeats: 3,
            failures: 4,
        }
    }
}

impl Limits {
    /// The field that makes no sense, and what it must be.
    pub fn problem(&self) -> Option<(&'static str, String)> {
        let ranges = [
            ("steps", u64::from(self.steps), 1, 10_000),
            ("calls", u64::from(self.calls), 0, 100_000),
            ("calls_per_step", u64::from(self.calls_per_step), 1, 256),
            ("tokens", self.tokens, 1, 1_000_000_000),
            ("time_ms", self.time_ms, 1, 604_800_000),
            ("repeats", u64::from(self.repeats), 0, 10_000),
            ("failures", u64::from(self.failures), 0, 10_000),
        ];
        let wrong =
            ranges.into_iter().find(|(_, value, least, most)| !(*least..=*most).contains(value));
        wrong.map(|(field, _, least, most)| (field, format!("must be from {least} to {most}")))
    }
}

/// How a model is asked, and asked again.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Asking {
    /// How often it is asked again after a fault that may pass.
    pub retries: u32,
    pub backoff: Backoff,
    /// The longest that one request may take.
    pub request_ms: u64,
    /// The longest answer.
    pub max_answer_bytes: usize,
}

impl Default for Asking {
    fn default() -> Self {
        Self {
            retries: 4,
            backoff: Backoff { initial_ms: 500, factor: 2.0, max_ms: 30_000, jitter: 0.5 },
            request_ms: 300_000,
            max_answer_bytes: 4 << 20,
        }
    }
}

/// How calls are executed.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Acting {
    /// Which calls of one answer run side by side; those that only read, unless said.
    pub mode: Side,
    pub max_parallel: Option<usize>,
    /// How long each call has; unless said, as long as its tool says.
    pub timeout_ms: Option<u64>,
    /// How many attempts may follow the first of each call; unless said, as the policies say.
    pub max_retries: Option<u32>,
    /// How long the model is kept waiting for the calls of one answer. What has not ended then
    /// goes on, and its result comes late.
    pub wait_ms: Option<u64>,
    /// How many tokens the results of one answer may have together; long ones are digests.
    pub result_tokens: Option<usize>,
}

impl Acting {
    /// The field that makes no sense, and what it must be.
    pub fn problem(&self, limits: &crate::engine::Limits) -> Option<(&'static str, String)> {
        let number = |value: Option<usize>| value.map(|value| value as u64);
        let ranges = [
            ("max_parallel", number(self.max_parallel), 1, limits.max_batch_parallel as u64),
            ("timeout_ms", self.timeout_ms, 1, *TIMEOUT_MS_RANGE.end()),
            ("max_retries", self.max_retries.map(u64::from), 0, u64::from(MAX_RETRIES_LIMIT)),
            ("wait_ms", self.wait_ms, 0, limits.max_wait_ms),
            ("result_tokens", number(self.result_tokens), 1, 1_000_000),
        ];
        let wrong = ranges.into_iter().find(|(_, value, least, most)| {
            value.is_some_and(|value| !(*least..=*most).contains(&value))
        });
        wrong.map(|(field, _, least, most)| (field, format!("must be from {least} to {most}")))
    }
}

/// How many tokens the results of one answer have together where nobody says otherwise.
pub const RESULT_TOKENS: usize = 8_000;

/// [`Mode`] as it is written down.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Side {
    Serial,
    #[default]
    Parallel,
    Unordered,
}

impl From<Side> for Mode {
    fn from(side: Side) -> Self {
        match side {
            Side::Serial => Self::Serial,
            Side::Parallel => Self::Parallel,
            Side::Unordered => Self::Unordered,
        }
    }
}

/// What is agreed for a conversation.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Terms {
    /// The model, as its endpoint names it.
    pub model: String,
    /// What its calls are grouped by.
    pub run_id: String,
    /// Which tools of the crib are offered, by names and patterns (`weather.*`); none = all that
    /// the caller may call.
    pub tools: Option<Vec<String>>,
    /// Tools that the asker runs itself, in the chat form; their calls are handed back to it.
    pub own_tools: Vec<Value>,
    /// What else goes into each request to the model: `temperature`, `max_tokens`, ….
    pub settings: Map<String, Value>,
    pub limits: Limits,
    pub asking: Asking,
    pub acting: Acting,
    /// Calls get idempotency keys made of this, the step and their place, so that a step that is
    /// done again after a crash makes none twice. It must be used for one conversation only.
    pub key: Option<String>,
    /// A label of the calls; never used to decide anything.
    pub user_id: Option<String>,
    /// The trace the calls are made in, as W3C's `traceparent`.
    pub traceparent: Option<String>,
}

impl Terms {
    /// A conversation with this model, with all tools the caller may call.
    pub fn new(model: impl Into<String>, run_id: impl Into<String>) -> Self {
        Self { model: model.into(), run_id: run_id.into(), ..Self::default() }
    }
}

/// A call whose result comes late.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Awaited {
    pub tool_call_id: CallId,
    /// The model's own id of it.
    pub call_id: String,
    /// The tool, as the model knows it.
    pub name: String,
}

/// How often the same call was made in a row with the same result.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Seen {
    pub times: u32,
    /// A hash of what the model was told.
    pub told: u64,
}

/// Why the next request to the model is the last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Closing {
    Steps,
    Calls,
    Tokens,
    Time,
    /// It goes on making the same calls.
    Repeats,
    /// Its calls fail again and again.
    Failures,
}

impl Closing {
    /// Every one.
    pub const ALL: [Self; 6] =
        [Self::Steps, Self::Calls, Self::Tokens, Self::Time, Self::Repeats, Self::Failures];

    /// As written on the wire.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Steps => "steps",
            Self::Calls => "calls",
            Self::Tokens => "tokens",
            Self::Time => "time",
            Self::Repeats => "repeats",
            Self::Failures => "failures",
        }
    }
}

/// What had been used up when the user last spoke: limits count from there.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spent {
    pub steps: u32,
    pub calls: u32,
    pub tokens: u64,
    pub spent_ms: u64,
}

/// How far a conversation has come, beside its messages.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Progress {
    /// Answers of the model so far.
    pub steps: u32,
    pub calls: u32,
    pub failed_calls: u32,
    pub usage: Usage,
    /// How long it has worked.
    pub spent_ms: u64,
    pub since: Spent,
    /// An answer that was given and not acted on yet.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reply: Option<Reply>,
    /// Nobody wants what that answer calls any more: what is not begun is not made.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub canceled: bool,
    /// Calls whose results come late.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub awaited: Vec<Awaited>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub seen: BTreeMap<String, Seen>,
    /// Steps in a row in which nothing but repeated calls was asked for.
    pub stubborn: u32,
    /// Steps in a row in which every call failed.
    pub failures: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub closing: Option<Closing>,
}

impl Progress {
    /// What has been used up so far.
    pub fn spent(&self) -> Spent {
        let tokens = self.usage.prompt_tokens.saturating_add(self.usage.completion_tokens);
        Spent { steps: self.steps, calls: self.calls, tokens, spent_ms: self.spent_ms }
    }

    /// It is taken up again: what was counted for the limits begins anew.
    pub(crate) fn count_anew(&mut self) {
        self.since = self.spent();
        (self.stubborn, self.failures) = (0, 0);
        if self.reply.is_none() {
            self.closing = None;
        }
    }
}

/// A conversation that goes on.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Talk {
    /// In the chat form.
    pub messages: Vec<Value>,
    #[serde(default)]
    pub progress: Progress,
}

impl Talk {
    /// A conversation that begins with these messages.
    pub fn new(messages: Vec<Value>) -> Self {
        Self { messages, progress: Progress::default() }
    }

    /// The user asks something.
    pub fn question(text: &str) -> Self {
        Self::new(vec![serde_json::json!({ "role": "user", "content": text })])
    }

    /// The user says something more: what was counted for the limits begins anew.
    pub fn say(&mut self, messages: Vec<Value>) {
        self.messages.extend(messages);
        let before = std::mem::take(&mut self.progress);
        self.progress = Progress {
            // Numbers of steps are part of the keys of calls, and never come again.
            steps: before.steps,
            calls: before.calls,
            failed_calls: before.failed_calls,
            usage: before.usage,
            spent_ms: before.spent_ms,
            since: before.spent(),
            awaited: before.awaited,
            reply: before.reply,
            ..Progress::default()
        };
    }
}

/// The last word of the model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FinalAnswer {
    pub text: String,
    pub stopped: Stopped,
    /// The limit at which it was asked for it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub closing: Option<Closing>,
}

/// What a turn came to.
#[derive(Debug, Clone, PartialEq)]
pub enum Next {
    /// Its calls were executed and the results are in the conversation: the model can be asked
    /// again.
    GoesOn,
    /// The model has answered.
    Answered(FinalAnswer),
    /// The model called tools that the asker runs itself. The crib's own calls of the same answer
    /// are done and answered in the conversation; these wait for messages of the asker.
    HandedBack(Vec<Wanted>),
    /// The model has nothing to do until late results come. What it said meanwhile is in the
    /// conversation.
    Sleeps,
}

/// What happens in a loop, told while it happens.
#[derive(Debug)]
#[non_exhaustive]
pub enum Happening<'a> {
    /// The model is asked.
    Asking { step: u32, last: bool },
    /// A piece of its answer.
    Piece { step: u32, piece: Piece },
    /// There was no answer; the model is asked again after a wait. Pieces that were told are void.
    AskingAgain { step: u32, retry: u32, wait_ms: u64, why: &'a Fault },
    /// The whole answer. Nothing of it has been executed.
    Replied { step: u32, reply: &'a Reply },
    /// A call has ended, or goes on in the background, or was refused.
    Settled { step: u32, settled: &'a Settled, message: &'a Value },
    /// A result that came late is in the conversation.
    Late { call: &'a Awaited, message: &'a Value },
}

/// Who is told what happens.
pub type Watch<'a> = &'a (dyn Fn(Happening<'_>) + Send + Sync);

/// Nobody is told.
pub fn unwatched(_: Happening<'_>) {}
