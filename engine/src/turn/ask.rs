//! Sends one request to the model, with limits on time and size, and with retries.
//!
//! Only a complete reply is returned. Deltas of an interrupted reply are void, and none of its
//! calls is ever executed.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::sync::Notify;

use super::{Asking, Happening, Watch};
use crate::clock::Clock;
use crate::engine::measure;
use crate::fault::{Code, Fault};
use crate::model::{Model, Piece, Prompt, Reply, Silence, Stopped};

/// Maximum number of calls in one reply. Each of them is answered, executed or not, so this bounds
/// the growth of the conversation per reply.
const MAX_CALLS: usize = 1_000;

/// A request with everything that a retry needs.
pub(super) struct Request<'a> {
    pub(super) model: &'a dyn Model,
    pub(super) prompt: &'a Prompt,
    pub(super) asking: &'a Asking,
    pub(super) clock: &'a dyn Clock,
    pub(super) step: u32,
    /// Deadline of the whole request, including waits between retries.
    pub(super) until_ms: u64,
    /// True if an empty reply is acceptable.
    pub(super) may_be_empty: bool,
    pub(super) watch: Watch<'a>,
}

/// The reason why there is no reply.
pub(super) struct NoAnswer {
    pub(super) silence: Silence,
    /// True if the deadline passed before a reply, or before the next retry. False if the endpoint
    /// itself requested a delay beyond the deadline: an earlier retry would violate it.
    pub(super) out_of_time: bool,
}

impl Request<'_> {
    /// Sends the request until there is a reply, a permanent error, or no time or retry left.
    pub(super) async fn answer(&self) -> Result<Reply, NoAnswer> {
        let mut retry = 0;
        loop {
            let silence = match self.once().await {
                Ok(reply) => {
                    measure::asked("ok");
                    return Ok(reply);
                }
                Err(silence) => silence,
            };
            retry += 1;
            let wait_ms = self.wait_ms(retry, silence.retry_after);
            let now_ms = self.clock.now_ms();
            let in_time = now_ms.saturating_add(wait_ms) < self.until_ms;
            let again = silence.passing && retry <= self.asking.retries;
            if !again || !in_time {
                measure::asked("failed");
                let over = now_ms >= self.until_ms && silence.passing;
                let out_of_time = (again || over) && silence.retry_after.is_none();
                return Err(NoAnswer { silence: after(silence, retry), out_of_time });
            }
            measure::asked("again");
            tracing::info!(step = self.step, retry, wait_ms, why = %silence, "retrying request");
            let why = &silence.fault;
            (self.watch)(Happening::AskingAgain { step: self.step, retry, wait_ms, why });
            self.clock.sleep_until(self.clock.now_ms() + wait_ms).await;
        }
    }

    fn wait_ms(&self, retry: u32, retry_after: Option<Duration>) -> u64 {
        // The deadline seeds the jitter, so that requests that failed together do not retry
        // together.
        let seed = format!("{}/{}", self.prompt.messages.len(), self.until_ms);
        let own_ms = self.asking.backoff.wait_ms(retry, &seed);
        let asked_ms = retry_after.map_or(0, |wait| wait.as_millis() as u64);
        own_ms.max(asked_ms)
    }

    async fn once(&self) -> Result<Reply, Silence> {
        let most = self.asking.max_answer_bytes;
        let (heard, full) = (AtomicUsize::new(0), Notify::new());
        let listener = |piece: Piece| {
            let size = piece_bytes(&piece);
            if heard.fetch_add(size, Ordering::Relaxed) + size > most {
                full.notify_one();
                return;
            }
            (self.watch)(Happening::Piece { step: self.step, piece });
        };
        let now_ms = self.clock.now_ms();
        let until_ms = self.until_ms.min(now_ms.saturating_add(self.asking.request_ms));
        let reply = tokio::select! {
            biased;
            () = full.notified() => Err(too_long(most)),
            reply = self.model.reply(self.prompt, &listener) => reply,
            () = self.clock.sleep_until(until_ms) => Err(too_slow(until_ms.saturating_sub(now_ms))),
        }?;
        self.checked(reply)
    }

    fn checked(&self, reply: Reply) -> Result<Reply, Silence> {
        let most = self.asking.max_answer_bytes;
        let calls = reply.calls.iter();
        let bytes: usize = calls.map(|call| call.name.len() + call.arguments.len()).sum();
        if reply.text.len() + bytes > most {
            return Err(too_long(most));
        }
        if reply.calls.len() > MAX_CALLS {
            return Err(too_many());
        }
        let empty = reply.calls.is_empty() && reply.text.trim().is_empty();
        if !empty || self.may_be_empty {
            return Ok(reply);
        }
        let (why, passing) = match reply.stopped {
            Stopped::ContentFilter => ("its content filter stopped the answer", false),
            Stopped::Length => ("its limit of tokens was reached before it said anything", false),
            Stopped::Stop | Stopped::ToolCalls => ("it answered with nothing", true),
        };
        Err(silence(format!("the model gave no answer: {why}"), passing))
    }
}

fn piece_bytes(piece: &Piece) -> usize {
    match piece {
        Piece::Text(text) => text.len(),
        Piece::Call { name, arguments, .. } => {
            name.as_ref().map_or(0, String::len) + arguments.len()
        }
    }
}

fn silence(message: String, passing: bool) -> Silence {
    let fault = Fault::new(Code::UpstreamUnavailable, message);
    Silence { fault, passing, retry_after: None }
}

fn too_long(most: usize) -> Silence {
    silence(format!("the model's answer was cut off: it is longer than {most} bytes"), false)
}

fn too_many() -> Silence {
    let message = format!("the model's answer was refused: it has more than {MAX_CALLS} calls");
    silence(message, false)
}

fn too_slow(within_ms: u64) -> Silence {
    silence(format!("the model gave no whole answer within {within_ms} ms"), true)
}

/// Adds the number of attempts to the error and sets the common fault code.
fn after(mut silence: Silence, tries: u32) -> Silence {
    if tries > 1 {
        silence.fault.message = format!("{} (asked {tries} times)", silence.fault.message);
    }
    silence.fault.code = Code::UpstreamUnavailable;
    silence
}
