//! Elicitation: a tool's request for input, and the answers to it. Pure.
//!
//! An attempt may end with questions instead of an outcome. The call then waits, with no attempt in
//! flight, until every question is answered through any transport; the next attempt receives the
//! answers and the state that the source stored for itself.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::domain::fault::{Code, Fault};

/// Maximum number of questions in one request.
pub const MAX_QUESTIONS: usize = 64;

/// Maximum size of all questions, and of all answers to them, as JSON.
pub const MAX_ELICITATION_BYTES: usize = 256 * 1024;

/// Questions by a key that the tool chooses. The source defines each question's JSON form.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct ElicitationRequest {
    /// Questions by key; each answer is given under the key of its question.
    #[serde(rename = "asked")]
    pub questions: Map<String, Value>,
    /// State that the source receives back with the answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[serde(rename = "note")]
    pub source_state: Option<String>,
}

impl ElicitationRequest {
    /// Returns the reason why the request is invalid, if any.
    pub fn find_problem(&self) -> Option<String> {
        if self.questions.is_empty() {
            return Some("the tool requested input without a question".to_owned());
        }
        if self.questions.len() > MAX_QUESTIONS {
            return Some(format!("the tool asks more than {MAX_QUESTIONS} questions at once"));
        }
        let bytes = json_size(&self.questions) + self.source_state.as_ref().map_or(0, String::len);
        let is_too_large = bytes > MAX_ELICITATION_BYTES;
        is_too_large.then(|| format!("the tool's questions are over {MAX_ELICITATION_BYTES} bytes"))
    }
}

/// Rejects answers over the size limit.
pub fn check_answers_size(answers: &Map<String, Value>) -> Result<(), Fault> {
    if json_size(answers) <= MAX_ELICITATION_BYTES {
        return Ok(());
    }
    let message = format!("the answers are over the limit of {MAX_ELICITATION_BYTES} bytes");
    Err(Fault::new(Code::PayloadTooLarge, message).without_side_effect())
}

fn json_size(words: &Map<String, Value>) -> usize {
    words.iter().map(|(key, value)| key.len() + value.to_string().len()).sum()
}

/// The current round of a call's questions and answers.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Elicitation {
    /// Questions without an answer.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    #[serde(rename = "open")]
    pub unanswered: Map<String, Value>,
    /// The answers so far.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub answers: Map<String, Value>,
    /// State that the source receives back with the answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[serde(rename = "note")]
    pub source_state: Option<String>,
    /// The executor's handle for the attempt in flight. With it, another process can resume the
    /// attempt.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub handle: Option<String>,
}

impl Elicitation {
    /// Starts a new round. The answers of the previous round were already delivered.
    pub fn from_request(questions: &ElicitationRequest) -> Self {
        let (unanswered, source_state) =
            (questions.questions.clone(), questions.source_state.clone());
        Self { unanswered, answers: Map::new(), source_state, handle: None }
    }

    /// Accepts the answers to open questions and ignores all others. Returns the accepted keys.
    pub fn accept_answers(&mut self, answers: &Map<String, Value>) -> Vec<String> {
        let mut keys = Vec::new();
        for (key, answer) in answers {
            if self.unanswered.remove(key).is_some() {
                self.answers.insert(key.clone(), answer.clone());
                keys.push(key.clone());
            }
        }
        keys
    }
}
