//! Failures: one table of codes, and the two types that carry them.
//!
//! A [`Fault`] says why a call failed: it is recorded on the call and shown to the model. An
//! [`Error`] is a refused request: it is shown to the caller. The HTTP status, the UTP code,
//! whether a retry can help, and the help text all come from [`Code`]'s table; so do
//! `docs/errors.md` and the messages of the command line. No decision depends on the text of a
//! message.

use std::fmt;

use serde_json::Value;

use crate::domain::json::Json;

/// Every error code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Code {
    /// The arguments or the result do not match the schema.
    ValidationError,
    /// The request cannot be parsed.
    BadRequest,
    /// No tool has this name in the project.
    ToolNotFound,
    /// No call, run or other record has this id.
    NotFound,
    /// The request has no valid credentials.
    Unauthenticated,
    /// The caller lacks the permission for the operation.
    PermissionDenied,
    /// The request contradicts the recorded state.
    Conflict,
    /// The idempotency key belongs to a different request.
    IdempotencyMismatch,
    /// The deadline of the call passed.
    Timeout,
    /// The executor of the tool cannot be reached.
    UpstreamUnavailable,
    /// The tool ran and failed.
    RuntimeError,
    /// The attempt may have had an effect, and it is not repeated.
    OutcomeUnknown,
    /// The call was canceled.
    Canceled,
    /// A limit on calls is reached: of the agent, the user, the tool or the project.
    RateLimited,
    /// The server has no capacity for more work at present.
    Overloaded,
    /// A request body or a result exceeds its size limit.
    PayloadTooLarge,
    /// The server itself failed; its log has the details.
    Internal,
}

/// One row of the table.
struct Row {
    code: Code,
    name: &'static str,
    utp: &'static str,
    http: u16,
    retryable: bool,
    title: &'static str,
    help: &'static str,
}

const fn row(
    code: Code,
    name: &'static str,
    utp: &'static str,
    http: u16,
    retryable: bool,
    title: &'static str,
    help: &'static str,
) -> Row {
    Row { code, name, utp, http, retryable, title, help }
}

/// In the order of the enum; a test checks it.
const TABLE: [Row; 17] = [
    row(
        Code::ValidationError,
        "VALIDATION_ERROR",
        "bad_request",
        422,
        false,
        "the arguments or the result do not match the schema",
        "correct the fields in the message; `detail.problems` lists all of them",
    ),
    row(
        Code::BadRequest,
        "BAD_REQUEST",
        "bad_request",
        400,
        false,
        "the request cannot be read",
        "the message names the position of the error; send JSON as docs/http.md describes",
    ),
    row(
        Code::ToolNotFound,
        "TOOL_NOT_FOUND",
        "not_found",
        404,
        false,
        "there is no such tool",
        "GET /v1/tools lists the tools you may call; `detail.nearest` has similar names",
    ),
    row(
        Code::NotFound,
        "NOT_FOUND",
        "not_found",
        404,
        false,
        "no object has this id",
        "check the name or the id that the message shows",
    ),
    row(
        Code::Unauthenticated,
        "UNAUTHENTICATED",
        "auth_failed",
        401,
        false,
        "no valid credentials",
        "send Authorization: Bearer KEY; toolcrib keys create makes one",
    ),
    row(
        Code::PermissionDenied,
        "PERMISSION_DENIED",
        "auth_failed",
        403,
        false,
        "the caller may not do this",
        "the message says why; an operator can change it (toolcrib allow, toolcrib rules, toolcrib keys)",
    ),
    row(
        Code::Conflict,
        "CONFLICT",
        "conflict",
        409,
        false,
        "the request conflicts with the current state",
        "`detail` has the current state; repeating the same request does not help",
    ),
    row(
        Code::IdempotencyMismatch,
        "IDEMPOTENCY_MISMATCH",
        "conflict",
        422,
        false,
        "this idempotency key was used for another request",
        "use a new key for a new request",
    ),
    row(
        Code::Timeout,
        "TIMEOUT",
        "tool_timeout",
        504,
        false,
        "the call's deadline passed",
        "check whether the tool took effect, then retry with a longer `timeout_ms`",
    ),
    row(
        Code::UpstreamUnavailable,
        "UPSTREAM_UNAVAILABLE",
        "upstream_unavailable",
        503,
        true,
        "the executor of the tool cannot be reached",
        "retry later; the message names the executor",
    ),
    row(
        Code::RuntimeError,
        "RUNTIME_ERROR",
        "internal_error",
        502,
        true,
        "the tool ran and failed",
        "the message is the tool's own; a retry is safe for read and idempotent tools",
    ),
    row(
        Code::OutcomeUnknown,
        "OUTCOME_UNKNOWN",
        "internal_error",
        502,
        false,
        "the attempt may have taken effect; it was not repeated",
        "check the external system before you call again",
    ),
    row(
        Code::Canceled,
        "CANCELED",
        "canceled",
        409,
        false,
        "the call was canceled",
        "call again if the result is still needed",
    ),
    row(
        Code::RateLimited,
        "RATE_LIMITED",
        "upstream_unavailable",
        429,
        true,
        "too many calls for this tool or project",
        "retry after `Retry-After` seconds",
    ),
    row(
        Code::Overloaded,
        "OVERLOADED",
        "upstream_unavailable",
        503,
        true,
        "the server cannot accept more work now",
        "retry after `Retry-After` seconds",
    ),
    row(
        Code::PayloadTooLarge,
        "PAYLOAD_TOO_LARGE",
        "bad_request",
        413,
        false,
        "a body or result is over its limit",
        "send less, or raise the limit named in the message",
    ),
    row(
        Code::Internal,
        "INTERNAL",
        "internal_error",
        500,
        true,
        "an internal error of the server",
        "the server's log has the details under the request id",
    ),
];

impl Code {
    /// Iterates over every code, in the table's order.
    pub fn all() -> impl Iterator<Item = Code> {
        TABLE.iter().map(|row| row.code)
    }

    fn row(self) -> &'static Row {
        &TABLE[self as usize]
    }

    /// Returns the code as written on every wire, such as `TOOL_NOT_FOUND`.
    pub fn as_str(self) -> &'static str {
        self.row().name
    }

    /// Returns the UTP code.
    pub fn utp_code(self) -> &'static str {
        self.row().utp
    }

    /// Returns the HTTP status of a refused request with this code.
    pub fn http_status(self) -> u16 {
        self.row().http
    }

    /// Returns true if the same request can succeed later.
    pub fn is_retryable(self) -> bool {
        self.row().retryable
    }

    /// Returns a short description.
    pub fn title(self) -> &'static str {
        self.row().title
    }

    /// Returns one line of advice.
    pub fn help(self) -> &'static str {
        self.row().help
    }

    /// Returns advice for the error of a call. If the call may have taken effect, it says
    /// `retryable: false`, and the advice of its code to retry does not apply.
    pub fn help_for_outcome(self, retryable: bool) -> &'static str {
        match self {
            Self::RuntimeError | Self::UpstreamUnavailable if !retryable => {
                Self::OutcomeUnknown.help()
            }
            _ => self.help(),
        }
    }

    /// Parses a code in Toolcrib's or in UTP's spelling.
    pub fn parse(name: &str) -> Option<Code> {
        let by_name = TABLE.iter().find(|row| row.name == name);
        // One UTP code covers several of these: prefer the row of the same name, else the first.
        let is_same =
            || TABLE.iter().find(|row| row.utp == name && row.name.eq_ignore_ascii_case(name));
        let by_utp_name = || TABLE.iter().find(|row| row.utp == name);
        by_name.or_else(is_same).or_else(by_utp_name).map(|row| row.code)
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Possible side effect of a failed attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SideEffect {
    /// The attempt certainly had no effect: it never reached its executor.
    None,
    /// The attempt ran, or may have run.
    Possible,
}

/// Field of a fault's detail that holds the retry delay.
const RETRY_AFTER_MS: &str = "retry_after_ms";

/// Field of a fault's detail that holds the advice on its cause.
const HINT: &str = "hint";

/// Maximum length of advice.
const MAX_HINT_BYTES: usize = 1_000;

/// The reason why an attempt or a call failed.
#[derive(Debug, Clone, PartialEq)]
pub struct Fault {
    /// Code that programs decide by.
    pub code: Code,
    /// Text for people and models: names the subject and says what to do.
    pub message: String,
    /// Structured data: problems with pointers, similar names, the recorded state.
    pub detail: Option<Value>,
    /// True if another attempt, or the same request later, can succeed.
    pub retryable: bool,
    /// Possible side effect of the failed attempt.
    pub side_effect: SideEffect,
    /// The tool's rejected output, for operators. It is never part of a response to an agent.
    pub raw: Option<Json>,
}

impl Fault {
    /// Creates a fault that is retryable if its code is, and may have had a side effect.
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self {
            code,
            message: message.into(),
            detail: None,
            retryable: code.is_retryable(),
            side_effect: SideEffect::Possible,
            raw: None,
        }
    }

    /// Creates the fault of a tool that ran and failed, with the tool's message.
    pub fn runtime(message: impl Into<String>) -> Self {
        Self::new(Code::RuntimeError, message)
    }

    /// Creates the fault of an unreachable executor: the attempt had no side effect.
    pub fn unreachable(message: impl Into<String>) -> Self {
        Self { side_effect: SideEffect::None, ..Self::new(Code::UpstreamUnavailable, message) }
    }

    /// Adds structured data.
    pub fn with_detail(self, detail: Value) -> Self {
        Self { detail: Some(detail), ..self }
    }

    /// Adds the retry delay that the executor requested, if any.
    pub fn with_retry_after(self, retry_after_ms: Option<u64>) -> Self {
        match retry_after_ms {
            Some(ms) => self.with_detail(serde_json::json!({ RETRY_AFTER_MS: ms })),
            None => self,
        }
    }

    /// Returns the retry delay that the executor requested, if any.
    pub fn retry_after_ms(&self) -> Option<u64> {
        self.detail.as_ref()?.get(RETRY_AFTER_MS)?.as_u64()
    }

    /// Adds advice on the cause of this fault, in place of the general advice of its code: a
    /// "not found" of another system needs other advice than a mistyped id. The advice is part of
    /// `detail`, so it is stored with a call and reaches every transport.
    pub fn with_hint(mut self, hint: impl Into<String>) -> Self {
        let hint = Value::String(hint.into());
        match &mut self.detail {
            Some(Value::Object(fields)) => {
                fields.insert(HINT.to_owned(), hint);
            }
            Some(_) => {}
            None => self.detail = Some(serde_json::json!({ HINT: hint })),
        }
        self
    }

    /// Returns the advice on the cause of this fault, or the general advice of its code.
    pub fn hint(&self) -> &str {
        let cause = self.detail.as_ref().and_then(|detail| detail.get(HINT)?.as_str());
        // The detail of a tool can be long; advice is one line.
        let cause = cause.filter(|hint| hint.len() <= MAX_HINT_BYTES);
        cause.unwrap_or_else(|| self.code.help_for_outcome(self.retryable))
    }

    /// Adds the tool's rejected output, for operators.
    pub fn with_raw(self, raw: Json) -> Self {
        Self { raw: Some(raw), ..self }
    }

    /// Marks the fault as free of side effects.
    pub fn without_side_effect(self) -> Self {
        Self { side_effect: SideEffect::None, ..self }
    }

    /// Overrides whether a retry can help.
    pub fn retryable(self, retryable: bool) -> Self {
        Self { retryable, ..self }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.code, self.message)
    }
}

/// Treats a plain message from a tool as "the tool ran and failed".
impl From<String> for Fault {
    fn from(message: String) -> Self {
        Self::runtime(message)
    }
}

impl From<&str> for Fault {
    fn from(message: &str) -> Self {
        Self::runtime(message)
    }
}

/// A refused request, or an internal failure of the server.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The caller can act on it.
    #[error("{fault}")]
    Refused {
        /// Reason of the refusal.
        fault: Fault,
        /// Delay before a retry, if known.
        retry_after_ms: Option<u64>,
    },
    /// An internal failure: logged with its whole error chain, answered as `INTERNAL`.
    #[error("internal error")]
    Internal(#[source] Box<dyn std::error::Error + Send + Sync>),
}

impl Code {
    /// Returns true if a request that was refused with this code may still be executed: it is
    /// unknown how far it came.
    pub fn leaves_outcome_open(self) -> bool {
        matches!(self, Self::OutcomeUnknown | Self::Internal)
    }
}

impl Error {
    /// Creates a refusal.
    pub fn refused(code: Code, message: impl Into<String>) -> Self {
        Fault::new(code, message).into()
    }

    /// Creates a refusal with the code `NOT_FOUND` and advice on finding the right name.
    pub fn not_found(message: impl Into<String>, hint: impl Into<String>) -> Self {
        Fault::new(Code::NotFound, message).with_hint(hint).into()
    }

    /// Creates a refusal that says when to retry.
    pub fn retry_later(code: Code, message: impl Into<String>, retry_after_ms: u64) -> Self {
        let fault = Fault::new(code, message).without_side_effect();
        Self::Refused { fault, retry_after_ms: Some(retry_after_ms) }
    }

    /// Returns the code.
    pub fn code(&self) -> Code {
        match self {
            Self::Refused { fault, .. } => fault.code,
            Self::Internal(_) => Code::Internal,
        }
    }
}

impl From<Fault> for Error {
    fn from(fault: Fault) -> Self {
        Self::Refused { fault, retry_after_ms: None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_in_the_order_of_the_enum() {
        for (n, row) in TABLE.iter().enumerate() {
            assert_eq!(row.code as usize, n, "{}", row.name);
            assert_eq!(Code::parse(row.name), Some(row.code));
        }
        assert_eq!(Code::Internal as usize + 1, TABLE.len());
    }

    #[test]
    fn the_hint_follows_the_cause_and_then_the_code() {
        let fault = Fault::new(Code::NotFound, "HTTP 404");
        assert_eq!(fault.hint(), Code::NotFound.help());
        let fault = fault.with_detail(serde_json::json!({ "status_code": 404 })).with_hint("look");
        assert_eq!(fault.hint(), "look");
        assert_eq!(fault.detail, Some(serde_json::json!({ "status_code": 404, "hint": "look" })));
        assert_eq!(Fault::runtime("x").with_hint("y").hint(), "y");
    }

    #[test]
    fn utp_error_names_are_parsed() {
        assert_eq!(Code::parse("tool_timeout"), Some(Code::Timeout));
        assert_eq!(Code::parse("bad_request"), Some(Code::BadRequest));
        assert_eq!(Code::parse("not_found"), Some(Code::NotFound));
        assert_eq!(Code::parse("upstream_unavailable"), Some(Code::UpstreamUnavailable));
        assert_eq!(Code::parse("nonsense"), None);
    }
}
