//! Captures tool lists as upstreams wrote them. Here each tool is parsed on its own, so that a
//! malformed tool does not affect the others and is reported by name.
//!
//! `rmcp` 3.8.0 cannot do that: it parses a page as a whole or not at all
//! (`ServiceError::UnexpectedResponse`), and drops tools whose header annotations it rejects with a
//! log line only. Without the capture, an upstream with one malformed tool never becomes ready, and
//! the test `upstreams::bad::an_unreadable_tool_is_skipped` fails.

use std::sync::Arc;

use parking_lot::Mutex;
use rmcp::model::Tool;
use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Map, Value};

/// Maximum number of characters of a tool's name that are shown.
const MAX_LABEL_CHARS: usize = 80;

/// A page of the list, with each tool parsed on its own.
#[derive(Default)]
pub(super) struct RawToolPage {
    pub(super) tools: Vec<Tool>,
    /// Names of tools that cannot be parsed, with the reasons.
    pub(super) unreadable: Vec<(String, String)>,
    pub(super) next: Option<String>,
}

/// Holds the latest page while a capture is active.
#[derive(Clone, Default)]
pub(super) struct ToolListCapture(Arc<Mutex<Option<CapturedPage>>>);

type CapturedPage = Option<RawToolPage>;

/// Keeps a capture active until it is dropped.
pub(super) struct ToolListCaptureGuard<'a>(&'a ToolListCapture);

impl ToolListCaptureGuard<'_> {
    /// Takes the latest page.
    pub(super) fn take(&self) -> Option<RawToolPage> {
        self.0.0.lock().as_mut().and_then(Option::take)
    }
}

impl Drop for ToolListCaptureGuard<'_> {
    fn drop(&mut self) {
        *self.0.0.lock() = None;
    }
}

#[derive(Deserialize)]
struct RawToolListResponse<'a> {
    #[serde(borrow)]
    result: RawToolListResult<'a>,
}

#[derive(Deserialize)]
struct RawToolListResult<'a> {
    #[serde(borrow)]
    tools: Vec<&'a RawValue>,
    #[serde(rename = "nextCursor", default)]
    next: Option<Value>,
}

impl ToolListCapture {
    /// Starts a capture.
    pub(super) fn start_capture(&self) -> ToolListCaptureGuard<'_> {
        *self.0.lock() = Some(None);
        ToolListCaptureGuard(self)
    }

    /// Returns `true` while a capture is active.
    pub(super) fn is_capturing(&self) -> bool {
        self.0.lock().is_some()
    }

    /// Captures a response. If it is a page with tools that cannot be parsed, returns the same
    /// response without them.
    pub(super) fn capture_response(&self, text: &[u8]) -> Option<String> {
        if !self.is_capturing() {
            return None;
        }
        let answer: RawToolListResponse<'_> = serde_json::from_slice(text).ok()?;
        let (page, is_readable) = parse_page(answer.result);
        let without =
            (!page.unreadable.is_empty()).then(|| remove_unreadable(text, &is_readable)).flatten();
        if let Some(captured) = self.0.lock().as_mut() {
            *captured = Some(page);
        }
        without
    }
}

/// Parses each tool on its own. Also returns which of them could be parsed.
fn parse_page(list: RawToolListResult<'_>) -> (RawToolPage, Vec<bool>) {
    let next = list.next.as_ref().and_then(Value::as_str).filter(|next| !next.is_empty());
    let mut page = RawToolPage { next: next.map(str::to_owned), ..RawToolPage::default() };
    let mut is_readable = Vec::with_capacity(list.tools.len());
    for (index, text) in list.tools.into_iter().enumerate() {
        let read = serde_json::from_str::<Tool>(text.get());
        is_readable.push(read.is_ok());
        match read {
            Ok(tool) => page.tools.push(tool),
            Err(error) => {
                page.unreadable.push((tool_label(text, index), describe_parse_error(text, &error)))
            }
        }
    }
    (page, is_readable)
}

fn tool_label(tool: &RawValue, index: usize) -> String {
    let read = serde_json::from_str::<Map<String, Value>>(tool.get());
    let name = read.ok().and_then(|tool| Some(tool.get("name")?.as_str()?.to_owned()));
    let name = name.filter(|name| !name.is_empty());
    name.map_or_else(
        || format!("number {}", index + 1),
        |name| name.chars().take(MAX_LABEL_CHARS).collect(),
    )
}

/// Describes a parse error without its line and column, which refer to a text that is not shown.
fn describe_parse_error(tool: &RawValue, error: &serde_json::Error) -> String {
    let location = format!(" at line {} column {}", error.line(), error.column());
    let message = error.to_string();
    let message = message.strip_suffix(&location).unwrap_or(&message);
    // The error does not name the field.
    let field = serde_json::from_str::<Map<String, Value>>(tool.get()).ok().and_then(|tool| {
        let texts = ["name", "title", "description"].into_iter();
        let mut invalid_fields =
            texts.filter(|field| tool.get(*field).is_some_and(|v| !v.is_string()));
        let objects = ["inputSchema", "outputSchema", "annotations"].into_iter();
        let mut non_objects =
            objects.filter(|field| tool.get(*field).is_some_and(|v| !v.is_object()));
        invalid_fields.next().or_else(|| non_objects.next())
    });
    match field {
        Some(field) => format!("it cannot be read: {field}: {message}"),
        None => format!("it cannot be read: {message}"),
    }
}

/// Returns the response with only the parsable tools.
fn remove_unreadable(text: &[u8], is_readable: &[bool]) -> Option<String> {
    let mut answer: Value = serde_json::from_slice(text).ok()?;
    let tools = answer.pointer_mut("/result/tools")?.as_array_mut()?;
    let mut is_readable = is_readable.iter();
    tools.retain(|_| is_readable.next().copied().unwrap_or(false));
    Some(answer.to_string())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const PAGE: &str = r#"{"jsonrpc":"2.0","id":3,"result":{"resultType":"complete","_meta":{"a":1},
        "nextCursor":"","tools":[{"name":"fine","inputSchema":{"type":"object"}},
        {"name":"odd","description":7,"inputSchema":{"type":"object"}},{"inputSchema":{}},"text"]}}"#;

    #[test]
    fn each_tool_of_a_page_is_parsed_separately() {
        let capture = ToolListCapture::default();
        assert_eq!(capture.capture_response(PAGE.as_bytes()), None, "no capture is active");
        let capturing = capture.start_capture();
        let rest: Value =
            serde_json::from_str(&capture.capture_response(PAGE.as_bytes()).unwrap()).unwrap();
        assert_eq!(rest["result"]["tools"].as_array().unwrap().len(), 1, "{rest}");
        assert_eq!(rest["result"]["_meta"]["a"], 1);
        let page = capturing.take().unwrap();
        assert_eq!(page.tools[0].name, "fine");
        let names: Vec<&str> = page.unreadable.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["odd", "number 3", "number 4"]);
        let reason = &page.unreadable[0].1;
        assert!(reason.contains("description") && !reason.contains("column"), "{reason}");
        assert_eq!(page.next, None, "an empty cursor is none");
        assert!(capturing.take().is_none());
        for other in
            [r#"{"id":1,"result":{"tools":7}}"#, r#"{"id":1,"result":{"content":[]}}"#, "x"]
        {
            assert_eq!(capture.capture_response(other.as_bytes()), None);
            assert!(capturing.take().is_none(), "{other}");
        }
        drop(capturing);
        assert!(!capture.is_capturing());
    }
}
