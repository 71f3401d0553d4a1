//! The error of a setting that a type alone cannot check. Each crate validates its own settings;
//! the server reports the error with the file or variable that the setting came from.

/// A setting with a value that cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("{key}: {problem}")]
pub struct InvalidSetting {
    /// The setting, as a path of the configuration: `llm.base_url`.
    pub key: String,
    /// The problem, and the values that are allowed.
    pub problem: String,
}

impl InvalidSetting {
    /// Describes the problem of one setting.
    pub fn new(key: &str, problem: impl Into<String>) -> Self {
        Self { key: key.to_owned(), problem: problem.into() }
    }
}
