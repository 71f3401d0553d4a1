//! An endpoint may say the key that it was sent: in words, in what a tool is asked, in the name of
//! the model. The key is taken out of all of that, also while it comes piece by piece, so that
//! nobody who listens hears it.

use parking_lot::Mutex;
use toolcrib::model::{Listener, Piece, Reply};

/// What stands in the place of a key.
const HIDDEN: &str = "…";

/// A key of this length is hidden wherever it is said.
const SECRET_BYTES: usize = 16;

/// One of this length too, if it looks like a key. What is left are the words that endpoints on
/// one's own machine are given because they want some: they may be in an answer for its own sake.
const KEY_BYTES: usize = 8;

/// Whether a key is one that must be hidden.
fn is_secret(key: &str) -> bool {
    let digits = key.bytes().any(|byte| byte.is_ascii_digit());
    key.len() >= SECRET_BYTES
        || (key.len() >= KEY_BYTES && (digits || key.to_ascii_lowercase().starts_with("sk-")))
}

/// A text without a key, whatever its length.
pub(super) fn without(text: &str, key: Option<&str>) -> String {
    match key.filter(|key| !key.is_empty()) {
        Some(key) => text.replace(key, HIDDEN),
        None => text.to_owned(),
    }
}

/// Between an answer that comes and whoever listens to it.
pub(super) struct Discreet<'a> {
    key: Option<String>,
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
        let key = key.filter(|key| is_secret(key));
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
                    let [id, name] = [id, name].map(|said| said.map(|s| s.replace(key, HIDDEN)));
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
            if text.contains(key) {
                *text = text.replace(key, HIDDEN);
            }
        }
        reply
    }
}

/// What of a text can be told after what was held back of it; the rest is held back.
fn told(held: &mut String, more: &str, key: &str) -> String {
    held.push_str(more);
    let mut said = String::new();
    while let Some(at) = held.find(key) {
        said.push_str(&held[..at]);
        said.push_str(HIDDEN);
        held.drain(..at + key.len());
    }
    // The longest end of it that a key may begin with.
    let begins = |at: &usize| held.is_char_boundary(*at) && key.starts_with(&held[*at..]);
    let from = held.len().saturating_sub(key.len() - 1);
    let at = (from..held.len()).find(begins).unwrap_or(held.len());
    let rest = held.split_off(at);
    said.push_str(held);
    *held = rest;
    said
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
    fn only_what_may_be_a_key_waits() {
        let (pieces, _) = heard(&["All is", " well, sk-", "ouch", "s"], KEY);
        assert_eq!(pieces, ["All i", "s well, ", "sk-ouch", "s"]);
    }

    #[test]
    fn words_that_stand_for_no_key_are_left_alone() {
        for word in ["ollama", "lm-studio", "not-needed", "EMPTY", "123"] {
            assert_eq!(heard(&[word], word).0, [word]);
        }
        for key in ["sk-secret", "abcdefg8", "a-word-of-letters"] {
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
