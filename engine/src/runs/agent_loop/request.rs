//! Sends one request to the model, with limits on time and size, and with retries.
//!
//! Only a complete reply is returned. Deltas of an interrupted reply are void, and none of its
//! calls is ever executed.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::sync::Notify;

use super::{EventSink, LoopEvent};
use crate::domain::fault::{Code, Fault};
use crate::domain::model_reply::{FinishReason, ModelReply};
use crate::domain::run::options::ModelRequestPolicy;
use crate::ports::clock::Clock;
use crate::ports::engine_metrics;
use crate::ports::model::{Delta, Model, ModelError, ModelRequest};

/// Maximum number of calls in one reply. Each of them is answered, executed or not, so this bounds
/// the growth of the conversation per reply.
const MAX_CALLS: usize = 1_000;

/// A request with everything that a retry needs.
pub(super) struct ModelRequester<'a> {
    pub(super) model: &'a dyn Model,
    pub(super) prompt: &'a ModelRequest,
    pub(super) policy: &'a ModelRequestPolicy,
    pub(super) clock: &'a dyn Clock,
    pub(super) step: u32,
    /// Deadline of the whole request, including waits between retries.
    pub(super) until_ms: u64,
    /// True if an empty reply is acceptable.
    pub(super) allows_empty_reply: bool,
    pub(super) event_sink: EventSink<'a>,
}

/// The reason why there is no reply.
pub(super) struct ModelRequestError {
    pub(super) error: ModelError,
    /// True if the deadline passed before a reply, or would pass before the next retry. False if
    /// the endpoint itself requested a delay: more time would not permit an earlier retry.
    pub(super) out_of_time: bool,
}

impl ModelRequester<'_> {
    /// Sends the request until there is a reply, a permanent error, or no time or retry left.
    pub(super) async fn request_reply(&self) -> Result<ModelReply, ModelRequestError> {
        let mut retry = 0;
        loop {
            let error = match self.attempt().await {
                Ok(reply) => {
                    engine_metrics::count_model_request("ok");
                    return Ok(reply);
                }
                Err(error) => error,
            };
            retry += 1;
            let wait_ms = self.wait_ms(retry, error.retry_after);
            let now_ms = self.clock.now_ms();
            let in_time = now_ms.saturating_add(wait_ms) < self.until_ms;
            let can_retry = error.is_transient && retry <= self.policy.retries;
            if !can_retry || !in_time {
                engine_metrics::count_model_request("failed");
                let deadline_passed = now_ms >= self.until_ms && error.is_transient;
                let out_of_time = (can_retry || deadline_passed) && error.retry_after.is_none();
                return Err(ModelRequestError {
                    error: with_attempt_count(error, retry),
                    out_of_time,
                });
            }
            engine_metrics::count_model_request("again");
            tracing::info!(step = self.step, retry, wait_ms, why = %error, "retrying request");
            (self.event_sink)(LoopEvent::ModelRetryScheduled {
                step: self.step,
                retry,
                wait_ms,
                why: &error.fault,
            });
            self.clock.sleep_until(self.clock.now_ms() + wait_ms).await;
        }
    }

    fn wait_ms(&self, retry: u32, retry_after: Option<Duration>) -> u64 {
        // The deadline seeds the jitter, so that requests that failed together do not retry
        // together.
        let seed = format!("{}/{}", self.prompt.messages.len(), self.until_ms);
        let backoff_ms = self.policy.backoff.wait_ms(retry, &seed);
        let requested_ms = retry_after.map_or(0, |wait| wait.as_millis() as u64);
        backoff_ms.max(requested_ms)
    }

    async fn attempt(&self) -> Result<ModelReply, ModelError> {
        let max_bytes = self.policy.max_answer_bytes;
        let (received_bytes, full) = (AtomicUsize::new(0), Notify::new());
        let listener = |delta: Delta| {
            let size = delta_bytes(&delta);
            if received_bytes.fetch_add(size, Ordering::Relaxed) + size > max_bytes {
                full.notify_one();
                return;
            }
            (self.event_sink)(LoopEvent::ReplyDelta { step: self.step, piece: delta });
        };
        let now_ms = self.clock.now_ms();
        let until_ms = self.until_ms.min(now_ms.saturating_add(self.policy.request_ms));
        let reply = tokio::select! {
            biased;
            () = full.notified() => Err(reply_too_long(max_bytes)),
            reply = self.model.reply(self.prompt, &listener) => reply,
            () = self.clock.sleep_until(until_ms) => {
                Err(reply_timed_out(until_ms.saturating_sub(now_ms)))
            }
        }?;
        self.validate_reply(reply)
    }

    fn validate_reply(&self, reply: ModelReply) -> Result<ModelReply, ModelError> {
        let max_bytes = self.policy.max_answer_bytes;
        let calls = reply.calls.iter();
        let bytes: usize = calls.map(|call| call.name.len() + call.arguments.len()).sum();
        if reply.text.len() + bytes > max_bytes {
            return Err(reply_too_long(max_bytes));
        }
        if reply.calls.len() > MAX_CALLS {
            return Err(too_many_calls());
        }
        let empty = reply.calls.is_empty() && reply.text.trim().is_empty();
        if !empty || self.allows_empty_reply {
            return Ok(reply);
        }
        let (reason, is_transient) = match reply.finish_reason {
            FinishReason::ContentFilter => ("its content filter stopped the answer", false),
            FinishReason::Length => ("its token limit was reached before any text", false),
            FinishReason::Stop | FinishReason::ToolCalls => ("the answer was empty", true),
        };
        Err(model_error(format!("the model gave no answer: {reason}"), is_transient))
    }
}

fn delta_bytes(delta: &Delta) -> usize {
    match delta {
        Delta::Text(text) => text.len(),
        Delta::Call { name, arguments, .. } => {
            name.as_ref().map_or(0, String::len) + arguments.len()
        }
    }
}

fn model_error(message: String, is_transient: bool) -> ModelError {
    let fault = Fault::new(Code::UpstreamUnavailable, message);
    ModelError { fault, is_transient, retry_after: None }
}

fn reply_too_long(max_bytes: usize) -> ModelError {
    model_error(
        format!("the model's answer was cut off: it is longer than {max_bytes} bytes"),
        false,
    )
}

fn too_many_calls() -> ModelError {
    let message = format!("the model's answer was refused: it has more than {MAX_CALLS} calls");
    model_error(message, false)
}

fn reply_timed_out(within_ms: u64) -> ModelError {
    model_error(format!("the model gave no complete answer within {within_ms} ms"), true)
}

/// Adds the number of attempts to the error and sets the common fault code.
fn with_attempt_count(mut error: ModelError, attempts: u32) -> ModelError {
    if attempts > 1 {
        error.fault.message = format!("{} ({attempts} attempts)", error.fault.message);
    }
    error.fault.code = Code::UpstreamUnavailable;
    error
}
