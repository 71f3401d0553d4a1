//! JSON Schemas as the crib uses them: compiled once when a tool is registered, then asked what
//! is wrong with the arguments and results of its calls.
//!
//! It never fetches a schema, never lets a schema or an instance take unbounded time, and never
//! says only "invalid": every problem names the place, what was expected and what was given, in
//! words that a language model can correct itself by.
//!
//! One idea: a schema comes from strangers, so it is judged as a program before it is run
//! (`guard`), run on a budget (`meter`), and its verdict is then put into words (`problem`).

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use jsonschema::error::ValidationErrorKind;
use jsonschema::{PatternOptions, ValidationError, Validator};
use serde::{Deserialize, Serialize};
use serde_json::Value;

mod guard;
mod meter;
mod pattern;
mod problem;
#[cfg(test)]
mod tests;

use guard::Passed;
use meter::{Meter, Metered, View};
use pattern::Pattern;

/// Most problems listed for one instance; a caller corrects those first and asks again.
pub const MAX_PROBLEMS: usize = 32;

/// Memory for all compiled patterns of one schema together, and the most for one of them.
const PATTERN_BYTES: usize = 32 * 1024 * 1024;
const ONE_PATTERN_BYTES: usize = 4 * 1024 * 1024;
/// Deepest nesting of an instance; no parsed document is deeper.
const MAX_LEVELS: usize = 128;
/// Levels of an instance times the chain of subschemas on each: the validator recurses that deep,
/// and must fit the 2 MiB stack of a worker thread.
const MAX_RECURSION: usize = 2048;

/// A compiled schema. Clones share the compiled form.
#[derive(Clone)]
pub struct Schema {
    inner: Arc<Inner>,
}

struct Inner {
    validator: Validator<Metered>,
    /// Kept to look up what a failed keyword says, for the wording of problems.
    source: Value,
    passed: Passed,
}

/// Why a schema was refused, and where in it.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("schema is not usable at {pointer}: {reason}")]
pub struct SchemaError {
    pub pointer: String,
    pub reason: String,
}

/// One thing that is wrong with an instance.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Problem {
    /// JSON pointer into the instance; for a missing property, where it should have been.
    pub pointer: String,
    pub expected: String,
    pub given: String,
    /// All of it in one sentence.
    pub message: String,
}

impl fmt::Debug for Schema {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Schema").field("source", &self.inner.source).finish_non_exhaustive()
    }
}

impl Schema {
    /// Compiles a schema of dialect 2020-12 (the default) or draft-07.
    ///
    /// # Errors
    ///
    /// When the schema is malformed, refers outside itself, or could take unbounded work.
    pub fn compile(schema: &Value) -> Result<Schema, SchemaError> {
        // The libraries below panic on some identifiers instead of returning an error.
        catch_unwind(AssertUnwindSafe(|| Schema::build(schema))).unwrap_or_else(|_| {
            let reason = "the schema could not be compiled".to_string();
            Err(SchemaError { pointer: String::new(), reason })
        })
    }

    fn build(schema: &Value) -> Result<Schema, SchemaError> {
        let passed = guard::check(schema)?;
        let share = PATTERN_BYTES / passed.patterns.max(1);
        let limit = share.min(ONE_PATTERN_BYTES);
        let patterns = move || PatternOptions::regex().size_limit(limit);
        let validator = jsonschema::options_for::<Metered>()
            .with_draft(passed.draft)
            .should_validate_formats(true)
            .with_pattern_options(patterns())
            .with_keyword("pattern", move |_, value, _| {
                let text = value.as_str().unwrap_or_default();
                match Pattern::compile(text, patterns()) {
                    Some(pattern) => Ok(Box::new(pattern)),
                    None => Err(ValidationError::schema(problem::about_pattern(text))),
                }
            })
            .build(schema)
            .map_err(|error| refusal(schema, &error))?;
        let inner = Inner { validator, source: schema.clone(), passed };
        Ok(Schema { inner: Arc::new(inner) })
    }

    /// What is wrong with an instance: nothing when the list is empty, and never more than
    /// [`MAX_PROBLEMS`] at once.
    pub fn problems(&self, instance: &Value) -> Vec<Problem> {
        let Inner { validator, source, passed } = self.inner.as_ref();
        let levels = MAX_LEVELS.min(MAX_RECURSION / (passed.chain as usize).max(1));
        if deeper_than(instance, levels) {
            return vec![problem::too_deep(instance, levels)];
        }
        let meter = Meter::for_verdict(passed);
        let valid = validator.is_valid(View::new(instance, &meter));
        if meter.is_spent() {
            return vec![problem::too_much(instance)];
        }
        if valid {
            return Vec::new();
        }
        let meter = Meter::for_errors(passed);
        let errors = validator.iter_errors(View::new(instance, &meter));
        let genuine: Vec<_> = errors.filter(meter::is_genuine).collect();
        problem::explain(source, instance, &genuine)
    }

    /// The same without a word of what the instance says: the place, what was expected there, and
    /// the type of what was given.
    pub fn problems_unquoted(&self, instance: &Value) -> Vec<Problem> {
        let problems = self.problems(instance).into_iter();
        problems.map(|problem| problem::unquoted(problem, instance)).collect()
    }
}

/// Puts a compile error into words, with the pointer to the fault.
fn refusal(schema: &Value, error: &ValidationError<'_>) -> SchemaError {
    let pointer = error.instance_path().as_str().to_string();
    let reason = match error.kind() {
        ValidationErrorKind::Format { format } if format == "regex" => {
            let at = error.instance().as_str().or_else(|| schema.pointer(&pointer)?.as_str());
            problem::about_pattern(at.or_else(|| pointer.rsplit('/').next()).unwrap_or_default())
        }
        ValidationErrorKind::Custom { message, .. } => message.clone(),
        ValidationErrorKind::AnyOf { .. } | ValidationErrorKind::OneOfNotValid { .. } => {
            format!("{} is not a valid value for this keyword", problem::given(error.instance()))
        }
        _ => problem::cut(&error.to_string(), 300),
    };
    SchemaError { pointer, reason }
}

/// Whether containers nest deeper than that; looks without recursion, as the depth is unknown.
fn deeper_than(instance: &Value, levels: usize) -> bool {
    let mut stack = vec![(instance, 1)];
    while let Some((value, depth)) = stack.pop() {
        let nested = |v: &&Value| v.is_object() || v.is_array();
        if nested(&value) && depth > levels {
            return true;
        }
        match value {
            Value::Array(items) => {
                stack.extend(items.iter().filter(nested).map(|v| (v, depth + 1)));
            }
            Value::Object(members) => {
                stack.extend(members.values().filter(nested).map(|v| (v, depth + 1)));
            }
            _ => {}
        }
    }
    false
}
