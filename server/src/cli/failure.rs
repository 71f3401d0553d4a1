//! Failures of commands: message, hint and exit code.
//!
//! Scripts rely on the exit code and people on the text, so both are part of the interface.

use std::fmt;

use serde_json::{Value, json};
use toolcrib::Code;

use crate::config::ConfigError;

/// Exit codes.
pub mod exit {
    pub const OK: u8 = 0;
    pub const FAILURE: u8 = 1;
    pub const USAGE: u8 = 2;
    pub const AUTH: u8 = 3;
    pub const UNREACHABLE: u8 = 4;
    pub const TOOL_FAILED: u8 = 5;
    pub const TIMED_OUT: u8 = 6;
    pub const DENIED: u8 = 7;
    pub const INTERRUPTED: u8 = 130;
}

/// The failure of a command.
#[derive(Debug)]
pub struct CommandFailure {
    pub exit: u8,
    /// Error code for programs.
    pub code: String,
    pub message: String,
    pub hint: Option<String>,
    pub detail: Option<Value>,
    pub retryable: bool,
    /// True if the request may have reached the server, so that its effect is unknown.
    pub may_have_been_sent: bool,
    /// True if nothing is to be printed: the failure is already reported, or the reader is gone.
    pub is_reported: bool,
}

impl CommandFailure {
    pub fn new(exit: u8, code: &str, message: impl Into<String>) -> Self {
        Self {
            exit,
            code: code.to_owned(),
            message: message.into(),
            hint: None,
            detail: None,
            retryable: false,
            may_have_been_sent: false,
            is_reported: false,
        }
    }

    /// Returns the failure of an invalid command line.
    pub fn usage(message: impl Into<String>) -> Self {
        Self::new(exit::USAGE, "USAGE", message)
    }

    /// Returns the failure for a server that does not respond.
    pub fn unreachable(message: impl Into<String>) -> Self {
        Self { retryable: true, ..Self::new(exit::UNREACHABLE, "UNREACHABLE", message) }
    }

    /// Returns the failure of a command that the user interrupted.
    pub fn interrupted() -> Self {
        Self { is_reported: true, ..Self::new(exit::INTERRUPTED, "INTERRUPTED", "interrupted") }
    }

    /// Returns a failure that only sets the exit code, because everything is already reported.
    pub fn already_reported(exit: u8) -> Self {
        Self { is_reported: true, ..Self::new(exit, "FAILED", "") }
    }

    /// Returns true if the request may have been accepted: its answer was lost, or the server
    /// itself does not know.
    pub fn leaves_outcome_unknown(&self) -> bool {
        self.may_have_been_sent && self.exit == exit::UNREACHABLE
            || self.code == Code::OutcomeUnknown.as_str()
    }

    /// Adds advice on fixing the problem.
    pub fn hint(self, hint: impl Into<String>) -> Self {
        Self { hint: Some(hint.into()), ..self }
    }

    /// Returns the failure as JSON for programs.
    pub fn json(&self) -> Value {
        json!({
            "error": {
                "code": self.code,
                "message": self.message,
                "detail": self.detail,
                "retryable": self.retryable,
            },
            "hint": self.hint,
            "exit": self.exit,
        })
    }
}

impl fmt::Display for CommandFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

/// Converts an I/O error. A closed pipe (`toolcrib calls | head`) is not a failure.
impl From<std::io::Error> for CommandFailure {
    fn from(error: std::io::Error) -> Self {
        if error.kind() == std::io::ErrorKind::BrokenPipe {
            return Self::already_reported(exit::OK);
        }
        Self::new(exit::FAILURE, "IO", error.to_string())
    }
}

impl From<anyhow::Error> for CommandFailure {
    fn from(error: anyhow::Error) -> Self {
        match error.downcast::<ConfigError>() {
            Ok(config) => config.into(),
            Err(error) => Self::new(exit::FAILURE, "FAILED", format!("{error:#}")),
        }
    }
}

impl From<ConfigError> for CommandFailure {
    fn from(error: ConfigError) -> Self {
        let hint = error.hint();
        Self::new(exit::USAGE, "CONFIGURATION", error.to_string()).hint(hint)
    }
}

/// Converts a refusal by the engine, for a command that uses the engine directly and not over HTTP.
impl From<toolcrib::Error> for CommandFailure {
    fn from(error: toolcrib::Error) -> Self {
        match error {
            toolcrib::Error::Refused { fault, .. } => {
                let exit = exit_code_for(fault.code);
                let failure = failure_for_code(fault.code.as_str(), fault.message.clone(), exit);
                let cause = (fault.hint() != fault.code.help()).then(|| fault.hint().to_owned());
                let hint = cause.or(failure.hint);
                Self { hint, detail: fault.detail, retryable: fault.retryable, ..failure }
            }
            toolcrib::Error::Internal(source) => {
                let message = format!("internal error: {source}");
                Self::new(exit::FAILURE, Code::Internal.as_str(), message)
            }
        }
    }
}

/// Builds the failure for an error code, with a hint from the error table or, for some codes, a
/// command to run.
pub fn failure_for_code(code: &str, message: String, exit: u8) -> CommandFailure {
    let failure = CommandFailure::new(exit, code, message);
    let Some(parsed) = Code::parse(code) else { return failure };
    failure.hint(match parsed {
        Code::ValidationError => "toolcrib tools NAME shows the arguments of a tool",
        Code::ToolNotFound => "toolcrib tools lists what you may call",
        Code::Unauthenticated => {
            "give a key with --key or TOOLCRIB_KEY; toolcrib keys create makes one"
        }
        Code::PermissionDenied if exit != exit::DENIED => {
            "use a key whose role permits it; toolcrib keys create --role admin makes one"
        }
        _ => parsed.help(),
    })
}

/// Returns the advice for a call that failed. The executor of the tool reported the code, so advice
/// on the request to Toolcrib does not apply: an API's "not found" is no mistyped ticket.
pub fn hint_for_outcome(error: &Value) -> Option<String> {
    if let Some(hint) = error["detail"]["hint"].as_str() {
        return Some(hint.to_owned());
    }
    let code = Code::parse(error["code"].as_str()?)?;
    let hint = match code {
        Code::ValidationError if error["detail"]["problems"].is_array() => {
            "toolcrib tools NAME shows the arguments and the result of a tool"
        }
        Code::RateLimited | Code::Overloaded => "wait before you call again",
        Code::Timeout
        | Code::UpstreamUnavailable
        | Code::RuntimeError
        | Code::OutcomeUnknown
        | Code::Canceled
        | Code::PayloadTooLarge
        | Code::Internal => code.help_for_outcome(error["retryable"] != false),
        Code::ValidationError
        | Code::BadRequest
        | Code::ToolNotFound
        | Code::NotFound
        | Code::Unauthenticated
        | Code::PermissionDenied
        | Code::Conflict
        | Code::IdempotencyMismatch => {
            "this is the tool's own error; toolcrib calls get ID shows the details"
        }
    };
    Some(hint.to_owned())
}

fn exit_code_for(code: Code) -> u8 {
    match code {
        Code::Unauthenticated | Code::PermissionDenied => exit::AUTH,
        Code::Timeout => exit::TIMED_OUT,
        _ => exit::FAILURE,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_closed_pipe_is_not_a_failure() {
        let broken_pipe = std::io::Error::from(std::io::ErrorKind::BrokenPipe);
        let failure = CommandFailure::from(broken_pipe);
        assert_eq!((failure.exit, failure.is_reported), (exit::OK, true));
    }

    #[test]
    fn refusals_have_the_hint_and_exit_code_of_their_code() {
        let refused = toolcrib::Error::refused(Code::PermissionDenied, "no");
        let failure = CommandFailure::from(refused);
        assert_eq!(failure.exit, exit::AUTH);
        assert!(failure.hint.as_ref().unwrap().contains("--role admin"));
        let denied = super::failure_for_code("PERMISSION_DENIED", "no".into(), exit::DENIED);
        assert!(denied.hint.unwrap().contains("toolcrib allow"));
        assert_eq!(failure.json()["error"]["code"], "PERMISSION_DENIED");
    }

    #[test]
    fn the_hint_of_a_failed_call_is_not_about_the_request() {
        for code in ["NOT_FOUND", "UNAUTHENTICATED", "PERMISSION_DENIED", "BAD_REQUEST"] {
            let hint = hint_for_outcome(&json!({"code": code, "detail": null})).unwrap();
            assert!(hint.starts_with("this is the tool's own error"), "{code}: {hint}");
        }
        let error = json!({"code": "NOT_FOUND", "detail": {"hint": "look there"}});
        assert_eq!(hint_for_outcome(&error).as_deref(), Some("look there"));
        let unsafe_retry = json!({"code": "RUNTIME_ERROR", "retryable": false});
        let hint = hint_for_outcome(&unsafe_retry).unwrap();
        assert!(!hint.contains("retry is safe"), "{hint}");
        assert_eq!(hint_for_outcome(&json!({"code": "LATER"})), None);
    }

    #[test]
    fn a_configuration_error_is_recognized_inside_anyhow() {
        let error = crate::config::Config { listen: "x".into(), ..Default::default() };
        let error = anyhow::Error::from(error.validate().unwrap_err());
        let failure = CommandFailure::from(error);
        assert_eq!((failure.exit, failure.code.as_str()), (exit::USAGE, "CONFIGURATION"));
        assert!(failure.hint.is_some());
    }
}
