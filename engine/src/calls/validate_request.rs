//! Validates the fields of a request other than the tool's arguments: sizes, ranges and names.

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::calls::accept::CallRequest;
use crate::domain::caller::Caller;
use crate::domain::elicitation;
use crate::domain::fault::{Code, Error, Fault};
use crate::domain::retry::{MAX_RETRIES_LIMIT, TIMEOUT_MS_RANGE};
use crate::domain::tool::hex;
use crate::ports::store::IdempotencyKey;
use crate::schema::SchemaProblem;

pub(crate) fn check_request(asked: &CallRequest, max_args_bytes: usize) -> Result<(), Error> {
    let invalid = |message: String| {
        let fault = Fault::new(Code::ValidationError, message).without_side_effect();
        Err(Error::from(fault))
    };
    if asked.args.text().len() > max_args_bytes {
        let message = format!("args are over the limit of {max_args_bytes} bytes");
        return Err(Error::refused(Code::PayloadTooLarge, message));
    }
    asked.answers.as_ref().map_or(Ok(()), elicitation::check_answers_size)?;
    if asked.timeout_ms.is_some_and(|timeout_ms| !TIMEOUT_MS_RANGE.contains(&timeout_ms)) {
        return invalid("timeout_ms must be from 1 to 86400000 (24 h)".into());
    }
    if asked.retry.is_some_and(|retry| retry > MAX_RETRIES_LIMIT) {
        return invalid(format!("retry must be from 0 to {MAX_RETRIES_LIMIT}"));
    }
    let words = [
        ("run_id", Some(&asked.run_id)),
        ("call_id", asked.call_id.as_ref()),
        ("client_id", asked.client_id.as_ref()),
        ("user_id", asked.user_id.as_ref()),
        ("idempotency_key", asked.idempotency_key.as_ref()),
    ];
    for (field, word) in words {
        let Some(word) = word else { continue };
        check_label(field, word)?;
    }
    Ok(())
}

/// Checks an id or a label that the caller chose.
pub(crate) fn check_label(field: &str, word: &str) -> Result<(), Error> {
    if word.is_empty() || word.len() > 255 || word.chars().any(char::is_control) {
        let message = format!("{field} must be 1 to 255 bytes without control characters");
        return Err(Fault::new(Code::ValidationError, message).without_side_effect().into());
    }
    Ok(())
}

/// Builds a fault that lists every problem.
pub(crate) fn schema_fault(what: &str, problems: &[SchemaProblem]) -> Fault {
    let listed: Vec<&str> = problems.iter().map(|problem| problem.message.as_str()).collect();
    let message = format!("{what}: {}", listed.join("; "));
    Fault::new(Code::ValidationError, message).with_detail(json!({ "problems": problems }))
}

/// Builds the idempotency key with a fingerprint of the request, so that the same key cannot be
/// used for a different one.
pub(crate) fn build_idempotency_key(
    caller: &Caller,
    asked: &CallRequest,
) -> Option<IdempotencyKey> {
    let key = asked.idempotency_key.clone()?;
    let mut hash = Sha256::new();
    let rest = json!([
        asked.tool,
        asked.run_id,
        asked.call_id,
        asked.timeout_ms,
        asked.retry,
        asked.client_id
    ]);
    hash.update(rest.to_string().as_bytes());
    if let Some(url) = &asked.callback_url {
        hash.update(Value::from(url.as_str()).to_string().as_bytes());
    }
    hash.update(asked.args.canonical_text().as_bytes());
    let fingerprint = hex(&hash.finalize());
    Some(IdempotencyKey { agent: caller.agent.clone(), key, fingerprint })
}
