//! What a tool asks before it goes on, and what it was answered. Pure.
//!
//! An attempt may end with questions instead of an outcome. The call then waits, with no attempt
//! out, until each question is answered, by whichever door; the next attempt gets the answers and
//! what the source noted for itself.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::fault::{Code, Fault};

/// How many questions a tool may ask at once.
pub const MAX_QUESTIONS: usize = 64;

/// The size of all its questions, and of all answers to them, as JSON.
pub const MAX_DIALOGUE_BYTES: usize = 256 * 1024;

/// Questions by a key of the tool's choosing. Each is what the source makes of it, as JSON.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Questions {
    pub asked: Map<String, Value>,
    /// What the source wants to be told again with the answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

impl Questions {
    /// Why these cannot be asked.
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

/// Refuses answers that are too long.
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

/// The present round of a call's questions and answers.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Dialogue {
    /// What has not been answered.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub open: Map<String, Value>,
    /// What has been.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub answers: Map<String, Value>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
    /// What the attempt that is out is known by at whoever executes it. With it, it is gone on
    /// with when this process is another.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub handle: Option<String>,
}

impl Dialogue {
    /// A new round. Answers of the one before have been heard.
    pub fn asking(questions: &Questions) -> Self {
        let (open, note) = (questions.asked.clone(), questions.note.clone());
        Self { open, answers: Map::new(), note, handle: None }
    }

    /// Takes the answers to what is open; answers to nothing are passed over. Says which keys
    /// they were.
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
