//! MCP: the crib as a server.

mod asking;
mod calling;
mod catalogue;
mod entering;
mod listing;
mod long;
mod oauth;
mod python;
mod stdio;
mod tasks;

use serde_json::Value;

/// What a digest says that `result.read` is to be called with.
pub fn hint(result: &Value) -> Value {
    let digest = result["content"][0]["text"].as_str().unwrap_or_else(|| panic!("{result}"));
    let (_, after) = digest.split_once("result.read ").unwrap_or_else(|| panic!("{digest}"));
    let mut read = serde_json::Deserializer::from_str(after).into_iter();
    read.next().unwrap().unwrap_or_else(|error| panic!("{error}: {digest}"))
}
