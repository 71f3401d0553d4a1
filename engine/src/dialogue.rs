//! Elicitation: a tool's request for input, and the answers to it. Pure.
//!
//! An attempt may end with questions instead of an outcome. The call then waits, with no attempt in
//! flight, until every question is answered through any transport; the next attempt receives the
//! answers and the state that the source stored for itself.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::fault::{Code, Fault};

/// Maximum number of questions in one request.
pub const MAX_QUESTIONS: usize = 64;

/// Maximum size of all questions, and of all answers to them, as JSON.
pub const MAX_DIALOGUE_BYTES: usize = 256 * 1024;

/// Questions by a key that the tool chooses. The source defines each question's JSON form.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Questions {
    pub asked: Map<String, Value>,
    /// State that the source receives back with the answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

impl Questions {
    /// Returns the reason why the request is invalid, if any.
    pub fn problem(&self) -> Option<String> {
        if self.asked.is_empty() {
            return Some("the tool asks, and says not what".to_owned());
        }
        if self.asked.len() > MAX_QUESTIONS {
            return Some(format!("the tool asks more than {MAX_QUESTIONS} questions at once"));
        }
        let bytes = size(&self.asked) + self.note.as_ref().map_or(0, String::len);
        let over = bytes > MAX_DIALOGUE_BYTES;
        over.then(|| format!("the tool's questions are over {MAX_DIALOGUE_BYTES} bytes"))
    }
}

/// Rejects answers over the size limit.
pub fn check(answers: &Map<String, Value>) -> Result<(), Fault> {
    if size(answers) <= MAX_DIALOGUE_BYTES {
        return Ok(());
    }
    let message = format!("the answers are over the limit of {MAX_DIALOGUE_BYTES} bytes");
    Err(Fault::new(Code::PayloadTooLarge, message).not_happened())
}

fn size(words: &Map<String, Value>) -> usize {
    words.iter().map(|(key, value)| key.len() + value.to_string().len()).sum()
}

/// The current round of a call's questions and answers.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Dialogue {
    /// Questions without an answer.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub open: Map<String, Value>,
    /// The answers so far.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub answers: Map<String, Value>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
    /// The executor's handle for the attempt in flight. With it, another process can resume the
    /// attempt.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub handle: Option<String>,
}

impl Dialogue {
    /// Starts a new round. The answers of the previous round were already delivered.
    pub fn asking(questions: &Questions) -> Self {
        let (open, note) = (questions.asked.clone(), questions.note.clone());
        Self { open, answers: Map::new(), note, handle: None }
    }

    /// Accepts the answers to open questions and ignores all others. Returns the accepted keys.
    pub fn answered(&mut self, answers: &Map<String, Value>) -> Vec<String> {
        let mut keys = Vec::new();
        for (key, answer) in answers {
            if self.open.remove(key).is_some() {
                self.answers.insert(key.clone(), answer.clone());
                keys.push(key.clone());
            }
        }
        keys
    }
}
