//! Redacts the API key from an endpoint's reply. An endpoint may repeat the key that it received:
//! in the text, in the arguments of a call, or in the name of the model. The key is also found when
//! it is split over several deltas, and when it contains JSON escapes, as the arguments of a call
//! may. Listeners thus never see it.

use parking_lot::Mutex;
use toolcrib::model::{Listener, Piece, Reply};

/// The replacement for a key.
const HIDDEN: &str = "…";

/// Minimum length of a key that is always redacted.
const SECRET_BYTES: usize = 8;

/// Minimum length of a key that is redacted if it contains letters and digits.
const MIXED_BYTES: usize = 6;

/// Placeholder keys for local endpoints that require some key. They are not secret and may occur in
/// an ordinary reply.
const WORDS: [&str; 15] = [
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
fn is_secret(key: &str) -> bool {
    let digits = key.bytes().any(|byte| byte.is_ascii_digit());
    let letters = key.chars().any(char::is_alphabetic);
    match key.len() {
        SECRET_BYTES.. => {
            let word = key.to_lowercase().replace('_', "-");
            !WORDS.contains(&word.as_str())
        }
        MIXED_BYTES.. => digits && letters,
        _ => false,
    }
}

/// Returns the text with the key redacted, whatever the length of the key.
pub(super) fn without(text: &str, key: Option<&str>) -> String {
    match key.filter(|key| !key.is_empty()) {
        Some(key) => hidden(text, &key.chars().collect::<Vec<_>>()),
        None => text.to_owned(),
    }
}

fn hidden(text: &str, key: &[char]) -> String {
    let mut held = String::new();
    let said = told(&mut held, text, key);
    said + &held
}

/// Redacts the key from deltas before they reach the listener.
pub(super) struct Discreet<'a> {
    key: Option<Vec<char>>,
    listener: Listener<'a>,
    held: Mutex<Held>,
}

/// Text that may be the start of the key. It is released once that is decided.
#[derive(Default)]
struct Held {
    text: String,
    /// By call, for the arguments.
    calls: Vec<String>,
}

impl<'a> Discreet<'a> {
    pub(super) fn new(key: Option<String>, listener: Listener<'a>) -> Self {
        let key = key.filter(|key| is_secret(key)).map(|key| key.chars().collect());
        Self { key, listener, held: Mutex::default() }
    }

    /// Forwards the part of a delta that is safe to release.
    pub(super) fn tell(&self, piece: Piece) {
        let Some(key) = &self.key else { return (self.listener)(piece) };
        let mut held = self.held.lock();
        match piece {
            Piece::Text(text) => {
                let said = told(&mut held.text, &text, key);
                if !said.is_empty() {
                    (self.listener)(Piece::Text(said));
                }
            }
            Piece::Call { index, id, name, arguments } => {
                if held.calls.len() <= index {
                    held.calls.resize_with(index + 1, String::new);
                }
                let empty = arguments.is_empty();
                let arguments = told(&mut held.calls[index], &arguments, key);
                // A delta that is held back completely is not forwarded.
                if id.is_some() || name.is_some() || empty || !arguments.is_empty() {
                    let [id, name] = [id, name].map(|said| said.map(|s| hidden(&s, key)));
                    (self.listener)(Piece::Call { index, id, name, arguments });
                }
            }
        }
    }

    /// Releases the held text after the last delta, and returns the reply with the key redacted.
    pub(super) fn end(self, mut reply: Reply) -> Reply {
        let Some(key) = &self.key else { return reply };
        let held = self.held.into_inner();
        if !held.text.is_empty() {
            (self.listener)(Piece::Text(held.text));
        }
        for (index, arguments) in held.calls.into_iter().enumerate() {
            if !arguments.is_empty() {
                (self.listener)(Piece::Call { index, id: None, name: None, arguments });
            }
        }
        let calls = reply.calls.iter_mut();
        let said = calls.flat_map(|call| [&mut call.id, &mut call.name, &mut call.arguments]);
        for text in said.chain([&mut reply.text]).chain(&mut reply.model) {
            *text = hidden(text, key);
        }
        reply
    }
}

/// Returns the part of a text that is safe to release, after the text held back before; the rest
/// stays in the buffer.
fn told(held: &mut String, more: &str, key: &[char]) -> String {
    held.push_str(more);
    let (mut said, mut at) = (String::new(), 0);
    while let Some(first) = held[at..].chars().next() {
        match begins(&held[at..], key) {
            Begins::Whole(length) => {
                said.push_str(HIDDEN);
                at += length;
            }
            Begins::Maybe => break,
            Begins::No => {
                said.push(first);
                at += first.len_utf8();
            }
        }
    }
    held.drain(..at);
    said
}

/// The result of matching the start of a text against the key.
enum Begins {
    /// The text starts with the full key, which takes this many bytes.
    Whole(usize),
    /// The text ends before the key is complete.
    Maybe,
    No,
}

fn begins(text: &str, key: &[char]) -> Begins {
    let mut at = 0;
    for wanted in key {
        let Some(first) = text[at..].chars().next() else { return Begins::Maybe };
        at += match first {
            same if same == *wanted => same.len_utf8(),
            '\\' => match escaped(&text[at..], *wanted) {
                Begins::Whole(length) => length,
                other => return other,
            },
            _ => return Begins::No,
        };
    }
    Begins::Whole(at)
}

/// Matches the start of a text against a character in JSON's escaped form: `\/`, `\u002b`.
fn escaped(text: &str, wanted: char) -> Begins {
    let mut rest = text.chars().skip(1);
    match rest.next() {
        None => Begins::Maybe,
        Some('u') => {
            let digits: String = rest.take(4).collect();
            let number = format!("{:04x}", u32::from(wanted));
            match number.starts_with(&digits.to_ascii_lowercase()) {
                true if digits.len() == number.len() => Begins::Whole(6),
                true => Begins::Maybe,
                false => Begins::No,
            }
        }
        Some(same) if same == wanted && matches!(same, '/' | '"' | '\\') => Begins::Whole(2),
        Some(_) => Begins::No,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: &str = "sk-sk-test-12345";

    fn heard(pieces: &[&str], key: &str) -> (Vec<String>, String) {
        let heard = Mutex::new(Vec::new());
        let listener = |piece: Piece| match piece {
            Piece::Text(text) => heard.lock().push(text),
            Piece::Call { .. } => unreachable!(),
        };
        let discreet = Discreet::new(Some(key.to_owned()), &listener);
        for piece in pieces {
            discreet.tell(Piece::Text((*piece).to_owned()));
        }
        let reply = discreet.end(Reply { text: pieces.concat(), ..Reply::default() });
        (heard.into_inner(), reply.text)
    }

    #[test]
    fn a_key_is_not_heard_wherever_the_pieces_end() {
        let said = format!("a sk-{KEY}{KEY}, süß: s{KEY} sk-sk-");
        let wanted = "a sk-……, süß: s… sk-sk-";
        let ends: Vec<usize> = said.char_indices().map(|(at, _)| at).collect();
        for first in &ends {
            for second in ends.iter().filter(|second| *second >= first) {
                let parts = [&said[..*first], &said[*first..*second], &said[*second..]];
                let (heard, kept) = heard(&parts, KEY);
                assert_eq!((heard.concat().as_str(), kept.as_str()), (wanted, wanted), "{parts:?}");
            }
        }
    }

    #[test]
    fn a_key_is_not_heard_with_the_escapes_of_json_either() {
        let key = "Kq/9+z=\"x4";
        for said in [r#"Kq\/9+z=\"x4"#, r#"Kq\u002F9\u002bz\u003d\u0022x4"#, r#"\u004bq/9+z="x4"#] {
            let said = format!(r#"{{"a\n\u00e4":"{said}\\"}}"#);
            let ends: Vec<usize> = said.char_indices().map(|(at, _)| at).collect();
            for end in ends {
                let (heard, kept) = heard(&[&said[..end], &said[end..]], key);
                let wanted = r#"{"a\n\u00e4":"…\\"}"#;
                assert_eq!((heard.concat().as_str(), kept.as_str()), (wanted, wanted), "{end}");
            }
        }
    }

    #[test]
    fn only_what_may_be_a_key_waits() {
        let (pieces, _) = heard(&["All is", " well, sk-", "ouch", "s"], KEY);
        assert_eq!(pieces, ["All i", "s well, ", "sk-ouch", "s"]);
    }

    #[test]
    fn words_that_stand_for_no_key_are_left_alone() {
        for word in ["ollama", "lm-studio", "not-needed", "NOT_NEEDED", "EMPTY", "123", "1234567"] {
            assert_eq!(heard(&[word], word).0, [word]);
        }
        let keys = ["hunter2", "sk-secret", "abcdefg8", "opensesame", "AbCdEfGhIj", "12345678"];
        for key in keys.into_iter().chain(["a-word-of-letters"]) {
            assert_eq!(heard(&[key], key).0, ["…"], "{key}");
        }
    }

    #[test]
    fn the_pieces_of_a_call_have_no_key() {
        let heard = Mutex::new(Vec::new());
        let listener = |piece: Piece| heard.lock().push(piece);
        let call = |index: usize, id: Option<&str>, arguments: &str| Piece::Call {
            index,
            id: id.map(str::to_owned),
            name: None,
            arguments: arguments.to_owned(),
        };
        let discreet = Discreet::new(Some(KEY.to_owned()), &listener);
        discreet.tell(call(0, Some(KEY), r#"{"a":"sk-sk-"#));
        discreet.tell(call(1, Some("b"), "sk-"));
        discreet.tell(call(0, None, "test-"));
        discreet.tell(call(0, None, r#"12345"}"#));
        discreet.end(Reply::default());
        let wanted = [
            call(0, Some("…"), r#"{"a":""#),
            call(1, Some("b"), ""),
            call(0, None, r#"…"}"#),
            call(1, None, "sk-"),
        ];
        assert_eq!(heard.into_inner(), wanted);
    }
}
