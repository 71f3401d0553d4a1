//! Redacts the API key from an endpoint's reply. An endpoint may repeat the key that it received:
//! in the text, in the arguments of a call, or in the name of the model. The key is also found when
//! it is split over several deltas, and when it contains JSON escapes, as the arguments of a call
//! may. Listeners thus never see it.

use parking_lot::Mutex;
use toolcrib::domain::model_reply::ModelReply;
use toolcrib::ports::model::{Delta, DeltaListener};

/// The replacement for a key.
const REDACTED: &str = "…";

/// Minimum length of a key that is always redacted.
const MIN_SECRET_BYTES: usize = 8;

/// Minimum length of a key that is redacted if it contains letters and digits.
const MIN_MIXED_SECRET_BYTES: usize = 6;

/// Placeholder keys for local endpoints that require some key. They are not secret and may occur in
/// an ordinary reply.
const PLACEHOLDER_KEYS: [&str; 15] = [
    "anything",
    "dummy-key",
    "fake-key",
    "lm-studio",
    "localhost",
    "no-api-key",
    "no-key-required",
    "not-needed",
    "not-required",
    "not-used",
    "placeholder",
    "required",
    "something",
    "test-key",
    "whatever",
];

/// Returns whether a key must be redacted.
fn should_redact(key: &str) -> bool {
    let has_digits = key.bytes().any(|byte| byte.is_ascii_digit());
    let has_letters = key.chars().any(char::is_alphabetic);
    match key.len() {
        MIN_SECRET_BYTES.. => {
            let word = key.to_lowercase().replace('_', "-");
            !PLACEHOLDER_KEYS.contains(&word.as_str())
        }
        MIN_MIXED_SECRET_BYTES.. => has_digits && has_letters,
        _ => false,
    }
}

/// Returns the text with the key redacted, regardless of the length of the key.
pub(super) fn redact_key(text: &str, key: Option<&str>) -> String {
    match key.filter(|key| !key.is_empty()) {
        Some(key) => redact_all(text, &key.chars().collect::<Vec<_>>()),
        None => text.to_owned(),
    }
}

fn redact_all(text: &str, key: &[char]) -> String {
    let mut pending = String::new();
    let released = release_safe_prefix(&mut pending, text, key);
    released + &pending
}

/// Redacts the key from deltas before they reach the listener.
pub(super) struct KeyRedactor<'a> {
    key: Option<Vec<char>>,
    listener: DeltaListener<'a>,
    buffer: Mutex<RedactionBuffer>,
}

/// Text that may be the start of the key. It is released once that is decided.
#[derive(Default)]
struct RedactionBuffer {
    text: String,
    /// By call, for the arguments.
    calls: Vec<String>,
}

impl<'a> KeyRedactor<'a> {
    pub(super) fn new(key: Option<String>, listener: DeltaListener<'a>) -> Self {
        let key = key.filter(|key| should_redact(key)).map(|key| key.chars().collect());
        Self { key, listener, buffer: Mutex::default() }
    }

    /// Forwards the part of a delta that is safe to release.
    pub(super) fn push(&self, delta: Delta) {
        let Some(key) = &self.key else { return (self.listener)(delta) };
        let mut buffer = self.buffer.lock();
        match delta {
            Delta::Text(text) => {
                let released = release_safe_prefix(&mut buffer.text, &text, key);
                if !released.is_empty() {
                    (self.listener)(Delta::Text(released));
                }
            }
            Delta::Call { index, id, name, arguments } => {
                if buffer.calls.len() <= index {
                    buffer.calls.resize_with(index + 1, String::new);
                }
                let empty = arguments.is_empty();
                let arguments = release_safe_prefix(&mut buffer.calls[index], &arguments, key);
                // A delta that is held back completely is not forwarded.
                if id.is_some() || name.is_some() || empty || !arguments.is_empty() {
                    let [id, name] =
                        [id, name].map(|released| released.map(|s| redact_all(&s, key)));
                    (self.listener)(Delta::Call { index, id, name, arguments });
                }
            }
        }
    }

    /// Releases the held text after the last delta, and returns the reply with the key redacted.
    pub(super) fn finish(self, mut reply: ModelReply) -> ModelReply {
        let Some(key) = &self.key else { return reply };
        let buffer = self.buffer.into_inner();
        if !buffer.text.is_empty() {
            (self.listener)(Delta::Text(buffer.text));
        }
        for (index, arguments) in buffer.calls.into_iter().enumerate() {
            if !arguments.is_empty() {
                (self.listener)(Delta::Call { index, id: None, name: None, arguments });
            }
        }
        let calls = reply.calls.iter_mut();
        let fields = calls.flat_map(|call| [&mut call.id, &mut call.name, &mut call.arguments]);
        for text in fields.chain([&mut reply.text]).chain(&mut reply.model) {
            *text = redact_all(text, key);
        }
        reply
    }
}

/// Returns the part of a text that is safe to release, after the text held back before; the rest
/// stays in the buffer.
fn release_safe_prefix(pending: &mut String, more: &str, key: &[char]) -> String {
    pending.push_str(more);
    let (mut released, mut offset) = (String::new(), 0);
    while let Some(first) = pending[offset..].chars().next() {
        match match_key(&pending[offset..], key) {
            KeyMatch::Full(length) => {
                released.push_str(REDACTED);
                offset += length;
            }
            KeyMatch::Partial => break,
            KeyMatch::Mismatch => {
                released.push(first);
                offset += first.len_utf8();
            }
        }
    }
    pending.drain(..offset);
    released
}

/// The result of matching the start of a text against the key.
enum KeyMatch {
    /// The text starts with the full key, which takes this many bytes.
    Full(usize),
    /// The text ends before the key is complete.
    Partial,
    Mismatch,
}

fn match_key(text: &str, key: &[char]) -> KeyMatch {
    let mut offset = 0;
    for expected in key {
        let Some(first) = text[offset..].chars().next() else { return KeyMatch::Partial };
        offset += match first {
            same if same == *expected => same.len_utf8(),
            '\\' => match match_escaped_char(&text[offset..], *expected) {
                KeyMatch::Full(length) => length,
                other => return other,
            },
            _ => return KeyMatch::Mismatch,
        };
    }
    KeyMatch::Full(offset)
}

/// Matches the start of a text against a character in JSON's escaped form: `\/`, `\u002b`.
fn match_escaped_char(text: &str, expected: char) -> KeyMatch {
    let mut rest = text.chars().skip(1);
    match rest.next() {
        None => KeyMatch::Partial,
        Some('u') => {
            let has_digits: String = rest.take(4).collect();
            let number = format!("{:04x}", u32::from(expected));
            match number.starts_with(&has_digits.to_ascii_lowercase()) {
                true if has_digits.len() == number.len() => KeyMatch::Full(6),
                true => KeyMatch::Partial,
                false => KeyMatch::Mismatch,
            }
        }
        Some(is_same) if is_same == expected && matches!(is_same, '/' | '"' | '\\') => {
            KeyMatch::Full(2)
        }
        Some(_) => KeyMatch::Mismatch,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: &str = "sk-sk-test-12345";

    fn redacted_stream(deltas: &[&str], key: &str) -> (Vec<String>, String) {
        let redacted_stream = Mutex::new(Vec::new());
        let listener = |delta: Delta| match delta {
            Delta::Text(text) => redacted_stream.lock().push(text),
            Delta::Call { .. } => unreachable!(),
        };
        let redactor = KeyRedactor::new(Some(key.to_owned()), &listener);
        for delta in deltas {
            redactor.push(Delta::Text((*delta).to_owned()));
        }
        let reply = redactor.finish(ModelReply { text: deltas.concat(), ..ModelReply::default() });
        (redacted_stream.into_inner(), reply.text)
    }

    #[test]
    fn a_key_is_redacted_wherever_the_deltas_are_split() {
        let streamed = format!("a sk-{KEY}{KEY}, süß: s{KEY} sk-sk-");
        let expected = "a sk-……, süß: s… sk-sk-";
        let ends: Vec<usize> = streamed.char_indices().map(|(offset, _)| offset).collect();
        for first in &ends {
            for second in ends.iter().filter(|second| *second >= first) {
                let parts = [&streamed[..*first], &streamed[*first..*second], &streamed[*second..]];
                let (redacted_stream, reply_text) = redacted_stream(&parts, KEY);
                assert_eq!(
                    (redacted_stream.concat().as_str(), reply_text.as_str()),
                    (expected, expected),
                    "{parts:?}"
                );
            }
        }
    }

    #[test]
    fn a_key_with_json_escapes_is_redacted() {
        let key = "Kq/9+z=\"x4";
        for streamed in
            [r#"Kq\/9+z=\"x4"#, r#"Kq\u002F9\u002bz\u003d\u0022x4"#, r#"\u004bq/9+z="x4"#]
        {
            let streamed = format!(r#"{{"a\n\u00e4":"{streamed}\\"}}"#);
            let ends: Vec<usize> = streamed.char_indices().map(|(offset, _)| offset).collect();
            for end in ends {
                let (redacted_stream, reply_text) =
                    redacted_stream(&[&streamed[..end], &streamed[end..]], key);
                let expected = r#"{"a\n\u00e4":"…\\"}"#;
                assert_eq!(
                    (redacted_stream.concat().as_str(), reply_text.as_str()),
                    (expected, expected),
                    "{end}"
                );
            }
        }
    }

    #[test]
    fn only_a_possible_key_prefix_is_held_back() {
        let (deltas, _) = redacted_stream(&["All is", " well, sk-", "ouch", "s"], KEY);
        assert_eq!(deltas, ["All i", "s well, ", "sk-ouch", "s"]);
    }

    #[test]
    fn placeholder_keys_are_not_redacted() {
        for word in ["ollama", "lm-studio", "not-needed", "NOT_NEEDED", "EMPTY", "123", "1234567"] {
            assert_eq!(redacted_stream(&[word], word).0, [word]);
        }
        let keys = ["hunter2", "sk-secret", "abcdefg8", "opensesame", "AbCdEfGhIj", "12345678"];
        for key in keys.into_iter().chain(["a-word-of-letters"]) {
            assert_eq!(redacted_stream(&[key], key).0, ["…"], "{key}");
        }
    }

    #[test]
    fn deltas_of_a_call_are_redacted() {
        let redacted_stream = Mutex::new(Vec::new());
        let listener = |delta: Delta| redacted_stream.lock().push(delta);
        let call = |index: usize, id: Option<&str>, arguments: &str| Delta::Call {
            index,
            id: id.map(str::to_owned),
            name: None,
            arguments: arguments.to_owned(),
        };
        let redactor = KeyRedactor::new(Some(KEY.to_owned()), &listener);
        redactor.push(call(0, Some(KEY), r#"{"a":"sk-sk-"#));
        redactor.push(call(1, Some("b"), "sk-"));
        redactor.push(call(0, None, "test-"));
        redactor.push(call(0, None, r#"12345"}"#));
        redactor.finish(ModelReply::default());
        let expected = [
            call(0, Some("…"), r#"{"a":""#),
            call(1, Some("b"), ""),
            call(0, None, r#"…"}"#),
            call(1, None, "sk-"),
        ];
        assert_eq!(redacted_stream.into_inner(), expected);
    }
}
