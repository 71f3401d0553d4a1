//! How a command fails: what it says, and with which exit code.
//!
//! Scripts decide by the exit code and people by the text, so both are part of the interface.

use std::fmt;

use serde_json::{Value, json};
use toolcrib::Code;

use crate::config::ConfigError;

/// The exit codes.
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

/// A command that did not do what it was asked to.
#[derive(Debug)]
pub struct Failure {
    pub exit: u8,
    /// A word for programs.
    pub code: String,
    pub message: String,
    pub hint: Option<String>,
    pub detail: Option<Value>,
    pub retryable: bool,
    /// What was asked may have arrived: it is not known what became of it.
    pub sent: bool,
    /// Everything was said already, or nobody is listening any more.
    pub silent: bool,
}

impl Failure {
    pub fn new(exit: u8, code: &str, message: impl Into<String>) -> Self {
        Self {
            exit,
            code: code.to_owned(),
            message: message.into(),
            hint: None,
            detail: None,
            retryable: false,
            sent: false,
            silent: false,
        }
    }

    /// The command line itself is wrong.
    pub fn usage(message: impl Into<String>) -> Self {
        Self::new(exit::USAGE, "USAGE", message)
    }

    /// Nobody answers there.
    pub fn unreachable(message: impl Into<String>) -> Self {
        Self { retryable: true, ..Self::new(exit::UNREACHABLE, "UNREACHABLE", message) }
    }

    /// Ended from outside.
    pub fn interrupted() -> Self {
        Self { silent: true, ..Self::new(exit::INTERRUPTED, "INTERRUPTED", "interrupted") }
    }

    /// Ends with this code; whatever there is to say was said.
    pub fn said(exit: u8) -> Self {
        Self { silent: true, ..Self::new(exit, "FAILED", "") }
    }

    /// The same with what to do about it.
    pub fn hint(self, hint: impl Into<String>) -> Self {
        Self { hint: Some(hint.into()), ..self }
    }

    /// The line for programs.
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

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

/// A reader that went away (`toolcrib calls | head`) is no fault of anybody.
impl From<std::io::Error> for Failure {
    fn from(error: std::io::Error) -> Self {
        if error.kind() == std::io::ErrorKind::BrokenPipe {
            return Self::said(exit::OK);
        }
        Self::new(exit::FAILURE, "IO", error.to_string())
    }
}

impl From<anyhow::Error> for Failure {
    fn from(error: anyhow::Error) -> Self {
        match error.downcast::<ConfigError>() {
            Ok(config) => config.into(),
            Err(error) => Self::new(exit::FAILURE, "FAILED", format!("{error:#}")),
        }
    }
}

impl From<ConfigError> for Failure {
    fn from(error: ConfigError) -> Self {
        let hint = error.hint();
        Self::new(exit::USAGE, "CONFIGURATION", error.to_string()).hint(hint)
    }
}

/// The engine refused, when it was asked directly and not over HTTP.
impl From<toolcrib::Error> for Failure {
    fn from(error: toolcrib::Error) -> Self {
        match error {
            toolcrib::Error::Refused { fault, .. } => Self {
                detail: fault.detail,
                retryable: fault.retryable,
                ..refused(fault.code.as_str(), fault.message, exit_of(fault.code))
            },
            toolcrib::Error::Internal(source) => {
                let message = format!("internal error: {source}");
                Self::new(exit::FAILURE, Code::Internal.as_str(), message)
            }
        }
    }
}

/// A refusal with a code of the table, whose help is the hint; unless there is a command to name.
pub fn refused(code: &str, message: String, exit: u8) -> Failure {
    let failure = Failure::new(exit, code, message);
    let Some(known) = Code::parse(code) else { return failure };
    failure.hint(match known {
        Code::ValidationError => "toolcrib tools NAME shows what the tool takes",
        Code::ToolNotFound => "toolcrib tools lists what you may call",
        Code::NotFound => {
            "check what you named: toolcrib calls, keys ls and rules list what there is"
        }
        Code::Unauthenticated => {
            "give a key with --key or TOOLCRIB_KEY; toolcrib keys create makes one"
        }
        Code::PermissionDenied if exit != exit::DENIED => {
            "use a key whose role permits it; toolcrib keys create --role admin makes one"
        }
        _ => known.help(),
    })
}

fn exit_of(code: Code) -> u8 {
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
    fn a_closed_pipe_is_no_failure() {
        let gone = std::io::Error::from(std::io::ErrorKind::BrokenPipe);
        let failure = Failure::from(gone);
        assert_eq!((failure.exit, failure.silent), (exit::OK, true));
    }

    #[test]
    fn refusals_carry_the_tables_help_and_the_exit_code() {
        let refused = toolcrib::Error::refused(Code::PermissionDenied, "no");
        let failure = Failure::from(refused);
        assert_eq!(failure.exit, exit::AUTH);
        assert!(failure.hint.as_ref().unwrap().contains("--role admin"));
        let denied = super::refused("PERMISSION_DENIED", "no".into(), exit::DENIED);
        assert!(denied.hint.unwrap().contains("toolcrib allow"));
        assert_eq!(failure.json()["error"]["code"], "PERMISSION_DENIED");
    }

    #[test]
    fn a_configuration_error_is_told_as_one_even_through_anyhow() {
        let error = crate::config::Config { listen: "x".into(), ..Default::default() };
        let error = anyhow::Error::from(error.validate().unwrap_err());
        let failure = Failure::from(error);
        assert_eq!((failure.exit, failure.code.as_str()), (exit::USAGE, "CONFIGURATION"));
        assert!(failure.hint.is_some());
    }
}
