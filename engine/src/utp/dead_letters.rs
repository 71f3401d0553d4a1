//! Dead letters: messages that could not be processed, kept until an operator redrives them or they
//! are purged.

use std::sync::Arc;

use serde_json::{Map, Value};

use crate::domain::caller::Caller;
use crate::domain::fault::Error;
use crate::domain::utp::DeadLetter;
use crate::ports::core::{Core, from_store_error};
use crate::registry::Registry;

/// A message that could not be processed.
#[derive(Debug, Clone, Default)]
pub struct UnprocessableMessage {
    /// `report`, `command` or `letter` (a wakeup or an event).
    pub kind: &'static str,
    /// One word: `malformed`, `orphan`, `wrong_turn`, `wrong_epoch`, …
    pub reason: String,
    /// Description of the problem.
    pub message: String,
    /// NATS subject, HTTP path or table row of the message.
    pub subject: String,
    /// Headers of the message.
    pub headers: Map<String, Value>,
    /// Body of the message; truncated to 256 KiB when it is stored.
    pub payload: String,
    /// True if the sender already truncated the message.
    pub is_truncated: bool,
}

/// Maximum size of the payload, and of each other part of a dead letter, in bytes.
const MAX_PAYLOAD: usize = 262_144;
const MAX_MESSAGE: usize = 4_096;
const MAX_SUBJECT: usize = 1_024;
const MAX_REASON: usize = 64;
const MAX_HEADERS: usize = 16_384;

/// Reason codes of dead letters that are metric labels. Senders choose reasons freely, so all
/// others count as `other`.
pub const DEAD_LETTER_REASONS: [&str; 16] = [
    "after_execution_mismatch",
    "malformed",
    "no_card",
    "no_stream",
    "not_served",
    "orphan",
    "refused",
    "too_large",
    "unknown_command",
    "unpublishable",
    "wrong_agent",
    "wrong_attempt",
    "wrong_call",
    "wrong_card",
    "wrong_epoch",
    "wrong_turn",
];

/// Truncates a text to `limit` bytes. Also returns whether anything was cut off.
fn truncate_text(mut text: String, limit: usize) -> (String, bool) {
    let cut = text.len() > limit;
    if cut {
        let end = (0..=limit).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
        text.truncate(end);
    }
    (text, cut)
}

/// Keeps the headers that fit the limit. Also returns whether some were dropped.
fn limit_headers(headers: Map<String, Value>) -> (Map<String, Value>, bool) {
    let (count, mut remaining) = (headers.len(), MAX_HEADERS);
    let fits = |(name, value): &(String, Value)| {
        let size = name.len() + value.as_str().map_or_else(|| value.to_string().len(), str::len);
        let fits = size <= remaining;
        remaining -= if fits { size } else { 0 };
        fits
    };
    let limited: Map<String, Value> = headers.into_iter().filter(fits).collect();
    let fewer = limited.len() < count;
    (limited, fewer)
}

/// Messages that could not be processed.
pub struct DeadLetters {
    pub(crate) core: Arc<Core>,
    pub(crate) registry: Arc<Registry>,
}

impl DeadLetters {
    /// Stores a message that could not be processed as a dead letter.
    pub async fn save(
        &self,
        project: &str,
        message: UnprocessableMessage,
    ) -> Result<DeadLetter, Error> {
        let now_ms = self.core.clock.wall_ms();
        let (payload, cut) = truncate_text(message.payload, MAX_PAYLOAD);
        let (headers, fewer) = limit_headers(message.headers);
        let (subject, shorter) = truncate_text(message.subject, MAX_SUBJECT);
        let dead_letter = DeadLetter {
            id: self.core.id_generator.next_id("dl_", now_ms),
            project: project.to_owned(),
            kind: message.kind.to_owned(),
            reason: truncate_text(message.reason, MAX_REASON).0,
            message: truncate_text(message.message, MAX_MESSAGE).0,
            subject,
            headers,
            payload,
            truncated: message.is_truncated || cut || fewer || shorter,
            created_ms: now_ms,
            redriven_ms: None,
            last_redrive_result: None,
        };
        let mut known = DEAD_LETTER_REASONS.iter();
        let counted = known.find(|reason| **reason == dead_letter.reason).unwrap_or(&"other");
        metrics::counter!("toolcrib_dead_letters_total", "reason" => *counted).increment(1);
        self.core
            .store
            .utp()
            .save_dead_letter(dead_letter.clone())
            .await
            .map_err(from_store_error)?;
        Ok(dead_letter)
    }

    /// Returns the project's dead letters, newest first.
    pub async fn list(
        &self,
        caller: &Caller,
        before: Option<&str>,
        limit: usize,
    ) -> Result<Vec<DeadLetter>, Error> {
        self.registry.require_admin(caller, None)?;
        let found = self.core.store.utp().dead_letters(&caller.project, before, limit).await;
        found.map_err(from_store_error)
    }

    /// Returns one dead letter.
    pub async fn find(&self, caller: &Caller, id: &str) -> Result<DeadLetter, Error> {
        self.registry.require_admin(caller, None)?;
        let found = self.core.store.utp().dead_letter(&caller.project, id).await;
        found.map_err(from_store_error)?.ok_or_else(|| {
            let excerpt: String = id.chars().take(80).collect();
            let hint = "toolcrib utp dead-letters lists them";
            Error::not_found(format!("there is no dead letter \"{excerpt}\""), hint)
        })
    }

    /// Records the result of redriving a dead letter.
    pub async fn record_redrive(&self, mut message: DeadLetter, result: &str) -> Result<(), Error> {
        message.redriven_ms = Some(self.core.clock.wall_ms());
        message.last_redrive_result = Some(result.to_owned());
        self.core.store.utp().save_dead_letter(message).await.map_err(from_store_error)
    }
}
