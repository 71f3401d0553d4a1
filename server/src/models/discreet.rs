//! An endpoint may say the key that it was sent: in words, in what a tool is asked, in the name of
//! the model. The key is taken out of all of that, also while it comes piece by piece, and with the
//! escapes of JSON, which the arguments of a call are written in; so that nobody who listens hears
//! it.

use parking_lot::Mutex;
use toolcrib::model::{Listener, Piece, Reply};

/// What stands in the place of a key.
const HIDDEN: &str = "…";

/// A key of this length is hidden wherever it is said.
const SECRET_BYTES: usize = 8;

/// A shorter one too from this length on, if it has letters and digits.
const MIXED_BYTES: usize = 6;

/// What endpoints on one's own machine are given because they want some key. They are no secrets,
/// and may be in an answer for its own sake.
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

/// Whether a key is one that must be hidden.
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

/// A text without a key, whatever its length.
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

/// Between an answer that comes and whoever listens to it.
pub(super) struct Discreet<'a> {
    key: Option<Vec<char>>,
    listener: Listener<'a>,
    held: Mutex<Held>,
}

/// What may be the beginning of the key and is told when that is known.
#[derive(Default)]
struct Held {
    text: String,
    /// Of the arguments of each call.
    calls: Vec<String>,
}

impl<'a> Discreet<'a> {
    pub(super) fn new(key: Option<String>, listener: Listener<'a>) -> Self {
        let key = key.filter(|key| is_secret(key)).map(|key| key.chars().collect());
        Self { key, listener, held: Mutex::default() }
    }

    /// Tells a piece, or as much of it as can be told by now.
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
                // A piece of which everything is held back says nothing.
                if id.is_some() || name.is_some() || empty || !arguments.is_empty() {
                    let [id, name] = [id, name].map(|said| said.map(|s| hidden(&s, key)));
                    (self.listener)(Piece::Call { index, id, name, arguments });
                }
            }
        }
    }

    /// The answer is whole: what was held back is told, and the answer has no key in it.
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

/// What of a text can be told after what was held back of it; the rest is held back.
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

/// Whether a text begins with the key.
enum Begins {
    /// With all of it, which is so long there.
    Whole(usize),
    /// As far as it goes.
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

/// Whether a text begins with a character as JSON may write it: `\/`, `\u002b`.
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
