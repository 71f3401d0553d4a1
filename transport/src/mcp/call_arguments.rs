//! Keeps the parts of the arguments of `tools/call` that a tree of values loses.
//!
//! rmcp reads a message into such a tree, in which only one of two equal keys remains, and a number
//! beyond 64 bits becomes the nearest double. This module reads the text of the message before
//! rmcp does, and adds a mark to `_meta`. If the arguments repeat a key, the mark is that key, and
//! the call is refused like any call with invalid arguments. If the tree changes a number, the mark
//! is the text of the arguments, which then replaces the tree.

use rmcp::model::MetaObject;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use serde_json::{Map, Value};
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncWriteExt, BufReader};
use toolcrib::domain::json::{DuplicateKey, Json};

/// Field of `_meta` that holds the repeated key.
const META_FIELD: &str = "toolcrib/duplicate_key";

/// Field of `_meta` that holds the text of the arguments.
const TEXT_FIELD: &str = "toolcrib/arguments_text";

/// Bytes that are read ahead of the MCP library.
const PIPE_BYTES: usize = 64 * 1024;

/// The parts of a message that decide whether its arguments are looked at.
#[derive(Deserialize)]
struct MessageParts<'a> {
    method: Option<String>,
    #[serde(borrow)]
    params: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct CallParts<'a> {
    #[serde(borrow)]
    arguments: Option<&'a RawValue>,
}

/// The repeated key, as stored in `_meta`.
#[derive(Serialize, Deserialize)]
struct MarkedKey {
    key: String,
    pointer: String,
}

/// Returns the message with a mark, if it calls a tool with arguments that repeat a key or that a
/// tree of values changes.
pub(super) fn mark_message(message: &[u8]) -> Option<Vec<u8>> {
    let parts: MessageParts<'_> = serde_json::from_slice(message).ok()?;
    let params = parts.params.filter(|_| parts.method.as_deref() == Some("tools/call"))?;
    let call: CallParts<'_> = serde_json::from_str(params.get()).ok()?;
    let arguments = Json::parse(call.arguments?.get()).ok()?;
    let (field, mark) = match arguments.to_value_with_unique_keys() {
        Err(DuplicateKey { key, pointer }) => {
            (META_FIELD, serde_json::to_value(MarkedKey { key, pointer }).ok()?)
        }
        Ok(tree) if Json::from_value(&tree) == arguments => return None,
        Ok(_) => (TEXT_FIELD, Value::from(arguments.text())),
    };
    let mut marked: Value = serde_json::from_slice(message).ok()?;
    let params = marked.get_mut("params")?.as_object_mut()?;
    let meta =
        params.entry("_meta").or_insert_with(|| Value::Object(Map::new())).as_object_mut()?;
    meta.insert(field.to_owned(), mark);
    serde_json::to_vec(&marked).ok()
}

/// Returns the arguments of a call: their text, if the call carries it, or the tree. The text is
/// used only if it is the text of this tree. In a call of the helper tool `tools.call`, whose
/// `arguments` field is the tree, the text of that field is used.
pub(super) fn read_arguments(meta: &MetaObject, tree: Map<String, Value>) -> Json {
    let tree = Value::Object(tree);
    let find_text = || {
        let text = Json::parse(meta.0.get(TEXT_FIELD)?.as_str()?).ok()?;
        if text.to_value() == tree {
            return Some(text);
        }
        let inner: CallParts<'_> = serde_json::from_str(text.text()).ok()?;
        Json::parse(inner.arguments?.get()).ok().filter(|inner| inner.to_value() == tree)
    };
    find_text().unwrap_or_else(|| Json::from_value(&tree))
}

/// Returns the repeated key of a marked call.
pub(super) fn find_mark(meta: &MetaObject) -> Option<DuplicateKey> {
    let marked: MarkedKey = serde_json::from_value(meta.0.get(META_FIELD)?.clone()).ok()?;
    Some(DuplicateKey { key: marked.key, pointer: marked.pointer })
}

/// Marks the messages that an MCP client writes to a pipe, one in each line.
pub fn mark_lines(input: impl AsyncRead + Send + Unpin + 'static) -> impl AsyncRead + Send + Unpin {
    let (read_side, mut write_side) = tokio::io::duplex(PIPE_BYTES);
    // Ends with either side: at the end of the input, or when the reader is dropped.
    tokio::spawn(async move {
        let mut lines = BufReader::new(input);
        let mut line = Vec::new();
        while lines.read_until(b'\n', &mut line).await.is_ok_and(|bytes| bytes > 0) {
            let written = match mark_message(&line) {
                Some(mut marked) => {
                    marked.push(b'\n');
                    write_side.write_all(&marked).await
                }
                None => write_side.write_all(&line).await,
            };
            if written.is_err() {
                break;
            }
            line.clear();
        }
    });
    read_side
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_that_a_tree_changes_keep_their_digits() {
        let message = |arguments: &str| {
            format!(r#"{{"method":"tools/call","params":{{"name":"a","arguments":{arguments}}}}}"#)
        };
        let read = |arguments: &str, outer: Option<&str>| {
            let sent = message(outer.unwrap_or(arguments)).into_bytes();
            let marked = mark_message(&sent).unwrap_or(sent);
            let mut marked: Value = serde_json::from_slice(&marked).unwrap();
            let meta = marked["params"]["_meta"].take();
            let meta = MetaObject(meta.as_object().cloned().unwrap_or_default());
            let tree: Value = serde_json::from_str(arguments).unwrap();
            read_arguments(&meta, tree.as_object().unwrap().clone()).text().to_owned()
        };
        let exact = r#"{"n": 123456789012345678901, "x": 1.0000000000000000000000000001}"#;
        assert_eq!(read(exact, None), exact);
        let outer = format!(r#"{{"name": "b", "arguments": {exact}}}"#);
        assert_eq!(read(exact, Some(&outer)), exact, "inside tools.call");
        assert_eq!(read(r#"{"n":2}"#, Some(exact)), r#"{"n":2}"#, "a text of other arguments");
        assert_eq!(
            mark_message(message(r#"{"n": 1.50, "m": 18446744073709551615}"#).as_bytes()),
            None
        );
    }

    #[test]
    fn only_calls_with_repeated_keys_are_marked() {
        let call = |arguments: &str| {
            format!(
                r#"{{"jsonrpc":"2.0","id":1,"method":"tools/call",
                    "params":{{"name":"a","arguments":{arguments}}}}}"#
            )
        };
        for unmarked in [
            call(r#"{"a":1,"b":{"a":1}}"#),
            call("7"),
            call(r#"{"a":1,"a":2}"#).replace("tools/call", "prompts/get"),
            r#"{"jsonrpc":"2.0","id":1,"method":"tools/call"}"#.to_owned(),
            r#"[{"a":1,"a":2}]"#.to_owned(),
            "{".to_owned(),
        ] {
            assert_eq!(mark_message(unmarked.as_bytes()), None, "{unmarked}");
        }
        let marked = mark_message(call(r#"{"x":[{"a":1,"a":2}]}"#).as_bytes()).unwrap();
        let marked: Value = serde_json::from_slice(&marked).unwrap();
        let duplicate = &marked["params"]["_meta"][META_FIELD];
        assert_eq!((&duplicate["key"], &duplicate["pointer"]), (&"a".into(), &"/x/0/a".into()));
    }
}
