//! MCP: Toolcrib as an MCP server.

mod access;
mod calling;
mod catalogue;
pub mod clients;
mod elicitation;
mod events;
mod listing;
mod long;
mod names;
mod oauth;
mod python;
mod resuming;
mod schemas;
mod stdio;
mod tasks;

use serde_json::Value;

/// Returns the arguments for `result.read` that a digest names.
pub fn parse_read_hint(result: &Value) -> Value {
    let digest = result["content"][0]["text"].as_str().unwrap_or_else(|| panic!("{result}"));
    let (_, after) = digest.split_once("result__read ").unwrap_or_else(|| panic!("{digest}"));
    let mut read = serde_json::Deserializer::from_str(after).into_iter();
    read.next().unwrap().unwrap_or_else(|error| panic!("{error}: {digest}"))
}
