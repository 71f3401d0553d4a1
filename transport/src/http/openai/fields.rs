//! Parses the fields of a request; an error names the invalid field.

use serde::Deserialize;
use serde_json::{Map, Value};
use toolcrib::domain::run::options::{ExecutionOptions, RunLimits};
use toolcrib::domain::tool::tool_mode::ToolMode;

use crate::http::openai::error::{OpenAiError, invalid_field};

/// A request whose fields are taken one by one.
pub(super) struct RequestFields(pub(super) Map<String, Value>);

/// Options for Toolcrib itself, in the field `toolcrib`.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct ToolcribOptions {
    /// Names and patterns of Toolcrib's tools to offer (default: all that the caller may call).
    pub(super) tools: Option<Vec<String>>,
    /// Tool definitions that the model receives: `auto`, `all`, `search` or `pinned`.
    pub(super) tool_mode: Option<ToolMode>,
    /// Names and patterns of the tools that every request offers in `search` and `pinned`.
    pub(super) pinned_tools: Option<Vec<String>>,
    /// Run that the calls belong to (default: a new run).
    pub(super) run_id: Option<String>,
    pub(super) limits: RunLimits,
    pub(super) policy: ExecutionOptions,
    /// Maximum time to wait for late results.
    pub(super) wait_ms: Option<u64>,
    /// False if the request never joins the conversation of an earlier one (default: true).
    pub(super) rejoin: Option<bool>,
}

impl RequestFields {
    /// Removes and returns a field; null counts as absent.
    pub(super) fn take(&mut self, name: &str) -> Option<Value> {
        self.0.remove(name).filter(|value| !value.is_null())
    }

    pub(super) fn text(&mut self, name: &str) -> Result<Option<String>, OpenAiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(_) => Err(invalid_field(name, "must be a text")),
        }
    }

    pub(super) fn required_text(&mut self, name: &str) -> Result<String, OpenAiError> {
        self.text(name)?.ok_or_else(|| invalid_field(name, "is missing"))
    }

    pub(super) fn flag(&mut self, name: &str) -> Result<bool, OpenAiError> {
        match self.take(name) {
            None => Ok(false),
            Some(Value::Bool(flag)) => Ok(flag),
            Some(_) => Err(invalid_field(name, "must be true or false")),
        }
    }

    pub(super) fn list(&mut self, name: &str) -> Result<Option<Vec<Value>>, OpenAiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::Array(list)) => Ok(Some(list)),
            Some(_) => Err(invalid_field(name, "must be a list")),
        }
    }

    pub(super) fn toolcrib_options(&mut self) -> Result<ToolcribOptions, OpenAiError> {
        let Some(value) = self.take("toolcrib") else { return Ok(ToolcribOptions::default()) };
        let extras: ToolcribOptions = serde_path_to_error::deserialize(value).map_err(|error| {
            let path = error.path().to_string();
            let field = if path == "." { "toolcrib".into() } else { format!("toolcrib.{path}") };
            invalid_field(&field, format!("cannot be read: {}", error.inner()))
        })?;
        let fits =
            |word: &String| (1..=255).contains(&word.len()) && !word.chars().any(char::is_control);
        if extras.run_id.as_ref().is_some_and(|run_id| !fits(run_id)) {
            let reason = "must be 1 to 255 bytes, without control characters";
            return Err(invalid_field("toolcrib.run_id", reason));
        }
        Ok(extras)
    }
}

/// Checks the caller's own tools: each must be a function, with a unique name.
pub(super) fn check_tools(tools: &[Value]) -> Result<(), OpenAiError> {
    let mut names: Vec<&str> = Vec::new();
    for (n, tool) in tools.iter().enumerate() {
        let kind = tool.get("type").and_then(Value::as_str);
        if kind != Some("function") {
            return Err(invalid_field(&format!("tools.{n}.type"), "must be \"function\""));
        }
        let name = tool.get("function").and_then(|function| function.get("name"));
        let Some(name) = name.and_then(Value::as_str).filter(|name| !name.is_empty()) else {
            return Err(invalid_field(&format!("tools.{n}.function.name"), "is missing"));
        };
        if names.contains(&name) {
            let reason = format!("is listed twice: {name:?}");
            return Err(invalid_field(&format!("tools.{n}.function.name"), reason));
        }
        names.push(name);
    }
    Ok(())
}
