//! Meters the validator's access to an instance, so that no instance can make a validation run for
//! long or fill memory with errors.
//!
//! The meter never copies the instance and never decides validity. Once the steps are exhausted,
//! every value looks like `null`, which has no members, so the run ends quickly; the caller then
//! discards the outcome and reports that the value was too large to check.
//!
//! The guard bounds the work of a schema on one value. The meter bounds the sum over all values,
//! and the cost of errors.

use std::borrow::Cow;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};

use jsonschema::json::{Array, Json, Node, NodeIdentity, Object, cmp};
use jsonschema::{JsonType, Keyword, ValidationError};
use regex_automata::meta::Regex;
use serde_json::{Map, Number, Value};

use super::duplicates::find_duplicates;
use super::guard::SchemaProfile;
use super::pattern_weight::pattern_weight;
use super::phrases::truncate_chars;

/// Maximum number of steps of one validation; a step is one access to a value, about 20 ns of work.
pub(super) const MAX_STEPS: u64 = 20_000_000;
/// Cost of one error in steps: it allocates, and stays allocated until the end.
const ERROR_STEPS: u64 = 200;
/// Bytes of text that can be read for one step.
const BYTES_PER_STEP: usize = 4;

/// Replaces every value after the steps are exhausted.
static EXHAUSTED_VALUE: Value = Value::Null;
/// Replaces the instance in errors that were created after the steps were exhausted.
static EXHAUSTED_ERROR_VALUE: Value = Value::Bool(true);

/// The representation of JSON that the validator is compiled for.
pub(super) struct MeteredJson;

#[derive(Debug)]
pub(super) struct StepMeter {
    left: Cell<u64>,
    /// Cost of a member: its name may pass through `propertyNames`, which is not metered.
    per_name: u64,
    /// Weight of the patterns that a member's name is matched against.
    name_weight: usize,
}

impl StepMeter {
    /// Creates a meter for a check of validity alone.
    pub(super) fn for_validity(passed: &SchemaProfile) -> StepMeter {
        let SchemaProfile { per_name, name_weight, .. } = *passed;
        StepMeter { left: Cell::new(MAX_STEPS), per_name: 1 + per_name, name_weight }
    }

    /// Creates a meter for listing errors; each evaluation of a property name may create one.
    pub(super) fn for_errors(passed: &SchemaProfile) -> StepMeter {
        let SchemaProfile { per_name, name_weight, .. } = *passed;
        let per_name = 1 + per_name * ERROR_STEPS;
        StepMeter { left: Cell::new(MAX_STEPS), per_name, name_weight }
    }

    pub(super) fn is_exhausted(&self) -> bool {
        self.left.get() == 0
    }

    fn charge(&self, steps: usize) -> bool {
        self.left.set(self.left.get().saturating_sub(steps as u64));
        !self.is_exhausted()
    }
}

/// Returns the steps for matching that many bytes against a pattern: for each byte the engine
/// advances all active states, which are about half of them at worst.
fn pattern_steps(length: usize, weight: usize) -> usize {
    length.saturating_mul(weight) / 2
}

/// Returns whether an error stems from a value that was really accessed.
pub(super) fn is_genuine(error: &ValidationError<'_>) -> bool {
    error.instance().as_ref() != &EXHAUSTED_ERROR_VALUE
}

/// One value seen through the meter. Property names have none.
#[derive(Debug, Clone, Copy)]
pub(super) struct MeteredValue<'a> {
    value: &'a Value,
    meter: Option<&'a StepMeter>,
    /// Length of the path to this value, because every error contains it.
    path: usize,
}

impl<'a> MeteredValue<'a> {
    pub(super) fn new(value: &'a Value, meter: &'a StepMeter) -> MeteredValue<'a> {
        MeteredValue { value, meter: Some(meter), path: 0 }
    }

    fn charged_value(&self, steps: usize) -> &'a Value {
        match self.meter {
            Some(meter) if !meter.charge(steps) => &EXHAUSTED_VALUE,
            _ => self.value,
        }
    }

    fn member(&self, value: &'a Value, name: usize) -> MeteredValue<'a> {
        MeteredValue { value, meter: self.meter, path: self.path + name + 1 }
    }

    /// Returns the value, charged for a match against a pattern of that weight.
    pub(super) fn charged_for_pattern(&self, weight: usize) -> &'a Value {
        let length = self.value.as_str().map_or(0, str::len);
        self.charged_value(1 + length / BYTES_PER_STEP + pattern_steps(length, weight))
    }

    fn text(&self) -> Option<&'a str> {
        let length = self.value.as_str().map_or(0, str::len);
        self.charged_value(1 + length / BYTES_PER_STEP).as_str()
    }
}

impl Json for MeteredJson {
    type Node<'a> = MeteredValue<'a>;
    type PreparedKey = String;
    type StringBuffer = Value;

    fn prepare_key(key: &str) -> String {
        key.to_owned()
    }

    fn with_string_node<T>(
        buffer: &mut Value,
        string: &str,
        f: impl FnOnce(MeteredValue<'_>) -> T,
    ) -> T {
        *buffer = Value::String(string.to_owned());
        f(MeteredValue { value: buffer, meter: None, path: 0 })
    }
}

impl<'a> Node<'a, MeteredJson> for MeteredValue<'a> {
    type Object = MeteredObject<'a>;
    type Array = MeteredArray<'a>;
    type Number = &'a Number;

    fn as_object(&self) -> Option<MeteredObject<'a>> {
        let map = self.charged_value(1).as_object()?;
        Some(MeteredObject { map, view: *self })
    }

    fn as_array(&self) -> Option<MeteredArray<'a>> {
        let list = self.charged_value(1).as_array()?;
        Some(MeteredArray { list, view: *self })
    }

    fn as_string(&self) -> Option<Cow<'a, str>> {
        self.text().map(Cow::Borrowed)
    }

    fn as_number(&self) -> Option<&'a Number> {
        self.charged_value(1).as_number()
    }

    fn as_boolean(&self) -> Option<bool> {
        self.charged_value(1).as_bool()
    }

    fn is_null(&self) -> bool {
        self.charged_value(1).is_null()
    }

    fn json_type(&self) -> JsonType {
        match self.charged_value(1) {
            Value::Null => JsonType::Null,
            Value::Bool(_) => JsonType::Boolean,
            Value::Number(_) => JsonType::Number,
            Value::String(_) => JsonType::String,
            Value::Array(_) => JsonType::Array,
            Value::Object(_) => JsonType::Object,
        }
    }

    fn string_length(&self) -> Option<u64> {
        self.text().map(|text| text.chars().count() as u64)
    }

    fn equals_value(&self, expected: &Value) -> bool {
        let compared = match (self.value, expected) {
            (Value::Array(list), Value::Array(other)) => list.len().min(other.len()),
            (Value::Object(map), Value::Object(other)) => map.len().min(other.len()),
            // Strings of different lengths are unequal without being read.
            (Value::String(text), Value::String(other)) if text.len() == other.len() => {
                text.len() / BYTES_PER_STEP
            }
            _ => 0,
        };
        cmp::equal(self.charged_value(1 + compared), expected)
    }

    /// Only errors call this. They get no copy of the instance, which within `anyOf` would be one
    /// full copy per error; `problem.rs` finds the value by its path.
    fn to_value(&self) -> Cow<'a, Value> {
        match self.meter {
            None => Cow::Owned(Value::String(truncate_chars(self.text().unwrap_or(""), 80))),
            Some(meter) if meter.charge(ERROR_STEPS as usize + self.path) => {
                Cow::Borrowed(&EXHAUSTED_VALUE)
            }
            Some(_) => Cow::Borrowed(&EXHAUSTED_ERROR_VALUE),
        }
    }

    fn identity(&self) -> Option<NodeIdentity> {
        Some(NodeIdentity::new(std::ptr::from_ref(self.value) as usize))
    }
}

pub(super) struct MeteredObject<'a> {
    map: &'a Map<String, Value>,
    view: MeteredValue<'a>,
}

impl<'a> Object<'a, MeteredJson> for MeteredObject<'a> {
    type Node = MeteredValue<'a>;
    type MemberName = &'a str;
    type MembersIter = MembersIter<'a>;

    fn len(&self) -> usize {
        self.map.len()
    }

    fn get(&self, key: &String) -> Option<MeteredValue<'a>> {
        self.view.charged_value(1);
        self.map.get(key).map(|value| self.view.member(value, key.len()))
    }

    fn members(&self) -> MembersIter<'a> {
        MembersIter { rest: self.map.iter(), view: self.view }
    }
}

pub(super) struct MembersIter<'a> {
    rest: serde_json::map::Iter<'a>,
    view: MeteredValue<'a>,
}

impl<'a> Iterator for MembersIter<'a> {
    type Item = (&'a str, MeteredValue<'a>);

    fn next(&mut self) -> Option<Self::Item> {
        let (name, value) = self.rest.next()?;
        if let Some(meter) = self.view.meter {
            let read = name.len() / BYTES_PER_STEP + pattern_steps(name.len(), meter.name_weight);
            let steps = meter.per_name as usize + read;
            if !meter.charge(steps) {
                return None;
            }
        }
        Some((name, self.view.member(value, name.len())))
    }
}

pub(super) struct MeteredArray<'a> {
    list: &'a [Value],
    view: MeteredValue<'a>,
}

impl<'a> Array<'a, MeteredJson> for MeteredArray<'a> {
    type Node = MeteredValue<'a>;
    type ElementsIter = ItemsIter<'a>;

    fn len(&self) -> usize {
        self.list.len()
    }

    fn elements(&self) -> ItemsIter<'a> {
        ItemsIter { rest: self.list.iter(), view: self.view }
    }

    /// The default implementation compares by a hash that all nested empty arrays share, which
    /// makes a crafted array quadratic. Comparing canonical text avoids that.
    fn is_unique(&self) -> bool {
        find_duplicates(self.list, |written| {
            self.view.meter.is_none_or(|meter| meter.charge(1 + written / 4))
        })
        .is_none()
    }
}

pub(super) struct ItemsIter<'a> {
    rest: std::slice::Iter<'a, Value>,
    view: MeteredValue<'a>,
}

impl<'a> Iterator for ItemsIter<'a> {
    type Item = MeteredValue<'a>;

    fn next(&mut self) -> Option<MeteredValue<'a>> {
        let value = self.rest.next()?;
        if let Some(meter) = self.view.meter
            && !meter.charge(1)
        {
            return None;
        }
        // The longest index has twenty digits.
        Some(self.view.member(value, 20))
    }
}

/// The `pattern` keyword, replacing the built-in one, which is not metered.
pub(super) struct MeteredPattern {
    regex: Regex,
    weight: usize,
    text: String,
}

impl MeteredPattern {
    pub(super) fn new(text: &str, regex: Regex) -> MeteredPattern {
        MeteredPattern { regex, weight: pattern_weight(text), text: text.to_string() }
    }
}

impl<'i> Keyword<'i, MeteredJson> for MeteredPattern {
    fn validate(&self, instance: MeteredValue<'i>) -> Result<(), ValidationError<'i>> {
        if self.is_valid(instance) {
            return Ok(());
        }
        // Becomes `Custom` with the keyword's name, by which `problem.rs` recognizes it.
        Err(ValidationError::custom(self.text.as_str()))
    }

    fn is_valid(&self, instance: MeteredValue<'i>) -> bool {
        let Some(text) = instance.charged_for_pattern(self.weight).as_str() else { return true };
        // The engine panics on some patterns (rust-lang/regex#1344); then nothing matches.
        catch_unwind(AssertUnwindSafe(|| self.regex.is_match(text))).unwrap_or(false)
    }
}
