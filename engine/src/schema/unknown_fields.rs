//! Unknown fields of a document, such as the body of a request: their positions, and the known
//! names that they resemble.

use std::collections::BTreeSet;

use serde_json::json;

use super::nearest_name;
use crate::domain::fault::{Code, Error, Fault};
use crate::domain::json::pointer_segment;

/// Maximum number of unknown fields that an error lists.
const MAX_LISTED: usize = 20;

/// Maximum number of characters of an unknown name that an error repeats.
const MAX_NAME_CHARS: usize = 80;

/// A field that the type of a document does not know.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnknownField {
    /// JSON pointer of the field.
    pointer: String,
    name: String,
    /// Known name that the field is most likely a misspelling of.
    suggestion: Option<&'static str>,
    known: &'static [&'static str],
}

impl UnknownField {
    /// Describes the field `name` of the object at `pointer`, which knows the fields `known`.
    pub fn new(pointer: &str, name: &str, known: &'static [&'static str]) -> Self {
        let candidates: BTreeSet<&'static str> = known.iter().copied().collect();
        Self {
            pointer: format!("{pointer}{}", pointer_segment(name)),
            name: name.chars().take(MAX_NAME_CHARS).collect(),
            suggestion: nearest_name(name, &candidates),
            known,
        }
    }

    /// Returns the JSON pointer of the field.
    pub fn pointer(&self) -> &str {
        &self.pointer
    }

    /// Returns the known name that the field is most likely a misspelling of.
    pub fn suggestion(&self) -> Option<&'static str> {
        self.suggestion
    }

    /// Returns true if the position of the field begins with this JSON pointer.
    pub fn is_within(&self, pointer: &str) -> bool {
        self.pointer.starts_with(pointer)
    }

    /// Returns the problem in words.
    pub fn message(&self) -> String {
        let name = &self.name;
        match self.suggestion {
            Some(known) => format!("unknown field `{name}`; did you mean `{known}`?"),
            None => format!("unknown field `{name}`; known fields are {}", self.known.join(", ")),
        }
    }
}

/// Refuses a document with unknown fields. The detail lists each with its position.
///
/// # Errors
///
/// Fails if there are unknown fields.
pub fn refuse_unknown_fields(unknown: &[UnknownField]) -> Result<(), Error> {
    let Some(first) = unknown.first() else { return Ok(()) };
    let mut message = first.message();
    if unknown.len() > 1 {
        let others = unknown.len() - 1;
        message += &format!(" ({others} more in detail.problems)");
    }
    let problem = |field: &UnknownField| {
        let mut problem = json!({ "pointer": field.pointer, "message": field.message() });
        if let Some(suggestion) = field.suggestion {
            problem["suggestion"] = suggestion.into();
        }
        problem
    };
    let problems: Vec<_> = unknown.iter().take(MAX_LISTED).map(problem).collect();
    let detail = json!({ "in": "body", "problems": problems });
    let fault = Fault::new(Code::ValidationError, message).without_side_effect();
    Err(fault.with_detail(detail).into())
}
