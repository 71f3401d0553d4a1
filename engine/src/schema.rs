//! JSON Schemas: compiled when a tool is registered or first used, then used to validate the
//! arguments and results of its calls.
//!
//! This module never fetches a schema, never lets a schema or an instance take unbounded time, and
//! never reports only "invalid": every problem names the location, the expected value and the given
//! value, in words that help a language model to correct itself.
//!
//! Schemas come from untrusted sources. A schema is therefore analyzed as a program before it runs
//! (`guard`), compiled within the budget of its request (`budget`), held in bounded memory
//! (`cache`), runs with a step budget (`meter`), and its errors are then explained (`problem`). A
//! limiter divides the threads that compile between projects (`project_limiter`); other costly work
//! of projects uses it too.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use jsonschema::error::ValidationErrorKind;
use jsonschema::{PatternOptions, ValidationError, Validator};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::domain::json::Json;

mod budget;
mod cache;
mod defaults;
mod duplicates;
mod guard;
mod meter;
mod pattern_weight;
mod phrases;
mod portable;
mod problem;
mod project_limiter;
#[cfg(test)]
mod tests;
mod unknown_fields;

pub use budget::{CompileBudget, FORM_BYTES, REQUEST_BYTES};
pub use cache::{compile_off_thread, compiled_bytes};
pub use defaults::DefaultsTooLarge;
pub use phrases::nearest_name;
pub use portable::{to_model_schema, to_portable_schema};
pub use project_limiter::{ProjectLimiter, ProjectPermit};
pub use unknown_fields::{UnknownField, refuse_unknown_fields};

use cache::SchemaSlot;
use guard::SchemaProfile;
use meter::{MeteredJson, MeteredPattern, MeteredValue, StepMeter};

/// Maximum number of problems listed for one instance; a caller fixes those first and retries.
pub const MAX_PROBLEMS: usize = 32;

/// Memory of one compiled subschema, without its patterns.
const SUBSCHEMA_MEMORY: usize = 1024;
/// Maximum nesting of an instance; no parsed document is deeper.
const MAX_LEVELS: usize = 128;
/// Maximum product of an instance's nesting levels and the chain of subschemas on each level. The
/// validator recurses that deep, and must fit the 2 MiB stack of a worker thread.
const MAX_RECURSION: usize = 2048;

/// A schema, compiled at its first use at the latest. Clones share the compiled form.
#[derive(Clone)]
pub struct Schema {
    slot: Arc<SchemaSlot>,
}

struct CompiledSchema {
    validator: Validator<MeteredJson>,
    /// The schema document, used to look up failed keywords when problems are explained.
    source: Value,
    passed: SchemaProfile,
    has_defaults: bool,
    /// Estimated memory of the compiled form.
    bytes: usize,
}

/// The reason why a schema was refused, and the location.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("schema is not usable at {pointer}: {reason}")]
pub struct SchemaError {
    /// JSON pointer into the schema; empty for the whole schema.
    pub pointer: String,
    /// Reason for the refusal, in words.
    pub reason: String,
}

/// One problem of an instance.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SchemaProblem {
    /// JSON pointer into the instance; for a missing property, the location where it is expected.
    pub pointer: String,
    /// Description of an acceptable value.
    pub expected: String,
    /// Description of the given value.
    pub given: String,
    /// The whole problem in one sentence.
    pub message: String,
}

impl fmt::Debug for Schema {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Schema").field("source", &self.slot.source).finish_non_exhaustive()
    }
}

impl Schema {
    /// Compiles a schema of dialect 2020-12 (the default) or draft-07.
    ///
    /// # Errors
    ///
    /// Returns an error if the schema is malformed, refers outside itself, or could take unbounded
    /// work.
    pub fn compile(schema: &Value) -> Result<Schema, SchemaError> {
        Schema::compile_within("", schema, &mut CompileBudget::unlimited())
    }

    /// Compiles a schema of a project within a budget. Can take some hundred milliseconds: call it
    /// through [`compile_off_thread`] where other work must not wait.
    ///
    /// # Errors
    ///
    /// Returns an error as [`Schema::compile`] does, and if the budget does not cover the schema.
    pub fn compile_within(
        project: &str,
        schema: &Value,
        budget: &mut CompileBudget,
    ) -> Result<Schema, SchemaError> {
        let compiled = CompiledSchema::compile(schema, budget)?;
        let source = Json::from_value(schema);
        Ok(Schema { slot: SchemaSlot::compiled_now(project, source, compiled) })
    }

    /// Creates a schema that was accepted before and is compiled at its first use.
    pub fn deferred(project: &str, source: Json) -> Schema {
        Schema { slot: SchemaSlot::deferred(project, source) }
    }

    /// Returns whether the next validation starts without compiling the schema.
    pub fn is_ready(&self) -> bool {
        self.slot.is_ready()
    }

    /// Compiles the schema on another thread if it is not compiled.
    pub async fn prepare(&self) {
        if self.is_ready() {
            return;
        }
        let slot = Arc::clone(&self.slot);
        let compiling = move || drop(slot.compiled());
        if let Err(error) = compile_off_thread(self.slot.project(), compiling).await {
            tracing::error!(%error, "the compilation of a schema failed");
        }
    }

    /// Returns the problems of an instance: an empty list if it is valid, and never more than
    /// [`MAX_PROBLEMS`]. Compiles the schema first if it is not compiled; see [`Schema::prepare`].
    pub fn problems(&self, instance: &Value) -> Vec<SchemaProblem> {
        match self.slot.compiled() {
            Ok(schema) => schema.problems(instance),
            Err(error) => vec![problem::unusable_schema(instance, &error)],
        }
    }

    /// Returns the instance with the defaults of the schema, or `None` if it lacks none. A default
    /// never replaces a given value, and the text of given values stays as it is. The module
    /// `defaults` has the rules.
    ///
    /// # Errors
    ///
    /// Returns an error if the instance with its defaults has more than `max_bytes`.
    pub fn with_defaults(
        &self,
        instance: &Json,
        max_bytes: usize,
    ) -> Result<Option<Json>, DefaultsTooLarge> {
        // An unusable schema has no defaults; `problems` reports it.
        let Ok(schema) = self.slot.compiled() else { return Ok(None) };
        if !schema.has_defaults {
            return Ok(None);
        }
        defaults::add_defaults(&schema.source, schema.passed.draft, instance, max_bytes)
    }

    /// Returns true if the schema itself lists a property of this name.
    pub fn lists_property(&self, name: &str) -> bool {
        let lists =
            |source: &Value| source.get("properties").is_some_and(|p| p.get(name).is_some());
        self.slot.compiled().is_ok_and(|schema| lists(&schema.source))
    }

    /// Returns the problems without any content of the instance: the location, the expected value,
    /// and the type of the given value.
    pub fn problems_redacted(&self, instance: &Value) -> Vec<SchemaProblem> {
        let problems = self.problems(instance).into_iter();
        problems.map(|problem| phrases::redact_value(problem, instance)).collect()
    }
}

impl CompiledSchema {
    fn compile(schema: &Value, budget: &mut CompileBudget) -> Result<Self, SchemaError> {
        // The libraries below panic on some identifiers instead of returning an error.
        catch_unwind(AssertUnwindSafe(|| Self::build(schema, budget))).unwrap_or_else(|_| {
            let reason = "the schema could not be compiled".to_string();
            Err(SchemaError { pointer: String::new(), reason })
        })
    }

    fn build(schema: &Value, budget: &mut CompileBudget) -> Result<Self, SchemaError> {
        let before = budget.charged();
        let (passed, patterns) = guard::check(schema, budget)?;
        let options = PatternOptions::regex().size_limit(patterns.size_limit());
        let validator = jsonschema::options_for::<MeteredJson>()
            .with_draft(passed.draft)
            .should_validate_formats(true)
            .with_pattern_options(options)
            .with_keyword("pattern", move |_, value, _| {
                let text = value.as_str().unwrap_or_default();
                match patterns.get(text) {
                    Some(regex) => Ok(Box::new(MeteredPattern::new(text, regex))),
                    None => Err(ValidationError::schema(phrases::pattern_refusal_reason(text))),
                }
            })
            .build(schema)
            .map_err(|error| schema_error_from(schema, &error))?;
        let charged = budget.charged().saturating_sub(before);
        let bytes = charged.saturating_add(passed.subschemas.saturating_mul(SUBSCHEMA_MEMORY));
        let has_defaults = defaults::has_defaults(schema);
        Ok(Self { validator, source: schema.clone(), passed, has_defaults, bytes })
    }

    fn problems(&self, instance: &Value) -> Vec<SchemaProblem> {
        let CompiledSchema { validator, source, passed, .. } = self;
        let levels = MAX_LEVELS.min(MAX_RECURSION / (passed.chain as usize).max(1));
        if nests_deeper_than(instance, levels) {
            return vec![problem::too_deep(instance, levels)];
        }
        let meter = StepMeter::for_validity(passed);
        let valid = validator.is_valid(MeteredValue::new(instance, &meter));
        if meter.is_exhausted() {
            return vec![problem::too_large(instance)];
        }
        if valid {
            return Vec::new();
        }
        let meter = StepMeter::for_errors(passed);
        let errors = validator.iter_errors(MeteredValue::new(instance, &meter));
        let genuine: Vec<_> = errors.filter(meter::is_genuine).collect();
        problem::explain(source, instance, &genuine)
    }
}

/// Converts a compile error, with the pointer to its location.
fn schema_error_from(schema: &Value, error: &ValidationError<'_>) -> SchemaError {
    let pointer = error.instance_path().as_str().to_string();
    let reason = match error.kind() {
        ValidationErrorKind::Format { format } if format == "regex" => {
            let at = error.instance().as_str().or_else(|| schema.pointer(&pointer)?.as_str());
            phrases::pattern_refusal_reason(
                at.or_else(|| pointer.rsplit('/').next()).unwrap_or_default(),
            )
        }
        ValidationErrorKind::Custom { message, .. } => message.clone(),
        ValidationErrorKind::AnyOf { .. } | ValidationErrorKind::OneOfNotValid { .. } => {
            format!(
                "{} is not a valid value for this keyword",
                phrases::describe_value(error.instance())
            )
        }
        _ => phrases::truncate_chars(&error.to_string(), 300),
    };
    SchemaError { pointer, reason }
}

/// Returns whether containers nest deeper than `levels`. Iterative, because the depth is unknown.
fn nests_deeper_than(instance: &Value, levels: usize) -> bool {
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
