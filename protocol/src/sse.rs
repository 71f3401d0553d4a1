//! Parses server-sent events as the HTML standard defines them.
//!
//! The crate `sse-stream` (0.2.6), a dependency of `rmcp`, does not replace this parser: all three
//! tests of this module fail with it. It reports an error, and drops the rest of the chunk, for
//! five kinds of lines that the standard has a client accept or ignore: an unknown field, a field
//! without a colon, a second `event`, a `retry` that is not a number, and text that is not UTF-8. A
//! model's endpoint may send any of them. It also has no maximum size of an event. Toolcrib uses
//! its types only where a trait of `rmcp` requires them.

use serde_json::Value;

/// Default maximum size of an event; a longer one ends the stream. Toolcrib sends no event of this
/// size.
const MAX_EVENT_BYTES: usize = 64 << 20;

/// Some servers send a byte order mark before the first line.
const BYTE_ORDER_MARK: &[u8] = "\u{feff}".as_bytes();

/// One event.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct SseEvent {
    pub id: Option<String>,
    pub data: String,
}

impl SseEvent {
    /// Returns the data as JSON, or as a JSON string if it is not valid JSON.
    pub fn to_json(&self) -> Value {
        serde_json::from_str(&self.data).unwrap_or_else(|_| Value::from(self.data.as_str()))
    }
}

/// The error for an event over the maximum size.
#[derive(Debug)]
pub struct SseEventTooLong;

/// Assembles events from chunks of any size.
#[derive(Debug)]
pub struct SseParser {
    max_event_bytes: usize,
    line: Vec<u8>,
    /// True if the last byte was a carriage return, so that a line feed now belongs to it.
    after_return: bool,
    message: SseEvent,
    has_data: bool,
    last_id: Option<String>,
    /// True after the first line, before which a byte order mark may stand.
    bom_checked: bool,
}

impl Default for SseParser {
    fn default() -> Self {
        Self::with_max_event_bytes(MAX_EVENT_BYTES)
    }
}

impl SseParser {
    /// Creates a parser with another maximum size of an event.
    pub fn with_max_event_bytes(max_event_bytes: usize) -> Self {
        Self {
            max_event_bytes,
            line: Vec::new(),
            after_return: false,
            message: SseEvent::default(),
            has_data: false,
            last_id: None,
            bom_checked: false,
        }
    }

    /// Adds a chunk and returns the events that it completes.
    pub fn push(&mut self, chunk: &[u8]) -> Result<Vec<SseEvent>, SseEventTooLong> {
        let mut done = Vec::new();
        let mut rest = chunk;
        while !rest.is_empty() {
            // A line feed after a carriage return belongs to the same line end.
            if std::mem::take(&mut self.after_return)
                && let Some(after) = rest.strip_prefix(b"\n")
            {
                rest = after;
                continue;
            }
            let Some(end) = rest.iter().position(|byte| matches!(byte, b'\n' | b'\r')) else {
                self.line.extend_from_slice(rest);
                break;
            };
            self.line.extend_from_slice(&rest[..end]);
            self.after_return = rest[end] == b'\r';
            rest = &rest[end + 1..];
            done.extend(self.end_of_line());
        }
        if self.line.len() + self.message.data.len() > self.max_event_bytes {
            return Err(SseEventTooLong);
        }
        Ok(done)
    }

    /// Returns the id to resume after: of the last event, or of a block that contained only an id.
    pub fn last_id(&self) -> Option<&str> {
        self.last_id.as_deref()
    }

    fn end_of_line(&mut self) -> Option<SseEvent> {
        let line = std::mem::take(&mut self.line);
        let marked =
            if std::mem::replace(&mut self.bom_checked, true) { &[][..] } else { BYTE_ORDER_MARK };
        let line = line.strip_prefix(marked).unwrap_or(&line);
        if line.is_empty() {
            let message = std::mem::take(&mut self.message);
            if message.id.is_some() {
                self.last_id.clone_from(&message.id);
            }
            return std::mem::take(&mut self.has_data).then_some(message);
        }
        let line = String::from_utf8_lossy(line);
        let (field, value) = line.split_once(':').unwrap_or((&line, ""));
        let value = value.strip_prefix(' ').unwrap_or(value);
        match field {
            "data" => {
                if self.has_data {
                    self.message.data.push('\n');
                }
                self.message.data.push_str(value);
                self.has_data = true;
            }
            // The id is sent in a header later, so only digits are accepted.
            "id" if value.bytes().all(|b| b.is_ascii_digit()) && value.len() <= 20 => {
                self.message.id = Some(value.to_owned()).filter(|id| !id.is_empty());
            }
            // The event name is also in the data; comments serve as heartbeats.
            _ => {}
        }
        None
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const STREAM: &str = ": hello\r\n\r\nid: 7\nevent: tool.call.started\ndata: {\"a\":1}\n\n\
        data: one\ndata:two\n\nid: 8\r\ndata: x\r\n\r\n: alive\n\nid: a\u{1b}\ndata\n\ndata: cut";

    #[test]
    fn events_are_complete_however_the_bytes_are_split() {
        let bytes = STREAM.as_bytes();
        for size in [1, 2, 3, 7, bytes.len()] {
            let mut parser = SseParser::default();
            let mut all = Vec::new();
            for chunk in bytes.chunks(size) {
                all.extend(parser.push(chunk).unwrap());
            }
            let seen: Vec<(Option<&str>, &str)> =
                all.iter().map(|m| (m.id.as_deref(), m.data.as_str())).collect();
            let expected =
                [(Some("7"), "{\"a\":1}"), (None, "one\ntwo"), (Some("8"), "x"), (None, "")];
            assert_eq!(seen, expected, "in pieces of {size}");
            assert_eq!(parser.last_id(), Some("8"));
            assert_eq!(parser.push(b"\n\nid: 9\n\n").unwrap().len(), 1, "the event that was cut");
            assert_eq!(parser.last_id(), Some("9"), "also without an event");
        }
    }

    #[test]
    fn a_byte_order_mark_is_skipped_at_the_start_only() {
        for size in [1, 2, 100] {
            let mut parser = SseParser::default();
            let chunks = "\u{feff}data: one\n\n\u{feff}data: two\n\n".as_bytes().chunks(size);
            let all: Vec<SseEvent> = chunks.flat_map(|chunk| parser.push(chunk).unwrap()).collect();
            let seen: Vec<&str> = all.iter().map(|message| message.data.as_str()).collect();
            assert_eq!(seen, ["one"], "only at the beginning");
        }
    }

    #[test]
    fn invalid_utf8_and_huge_ids_are_tolerated() {
        let mut parser = SseParser::default();
        let all = parser.push(b"data: \xff\xfe\nid: 99999999999999999999999\n\n").unwrap();
        assert_eq!(all[0].id, None);
        assert!(all[0].to_json().is_string());
    }
}
