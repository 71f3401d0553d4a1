//! Lets the validator see an instance only through a meter, so that no instance can make a
//! validation run for long or fill the memory with errors.
//!
//! It never copies the instance and never decides validity: once the steps are used up every
//! value looks like `null`, which has no members, so the run ends quickly; the caller then throws
//! its outcome away and says that the value was too much to check.
//!
//! One idea: the guard bounds what a schema can do to one value, the meter bounds the sum over
//! all values, and what an error may cost.

use std::borrow::Cow;
use std::cell::Cell;
use std::collections::HashMap;
use std::fmt::Write as _;

use jsonschema::JsonType;
use jsonschema::json::{Array, Json, Node, NodeIdentity, Object, cmp};
use serde_json::{Map, Number, Value};

use super::guard::Passed;

/// Steps one validation may take; a step is a look at one value, some 20 ns of work.
pub(super) const MAX_STEPS: u64 = 20_000_000;
/// What making one error costs, in steps: it allocates, and stays allocated until the end.
const ERROR_STEPS: u64 = 200;
/// Bytes of text that can be read for one step.
const BYTES_PER_STEP: usize = 4;

/// Seen in place of a value after the steps ran out.
static NOTHING: Value = Value::Null;
/// Carried, in place of the instance, by errors that were made after the steps ran out.
static SPENT: Value = Value::Bool(true);

/// The representation of JSON that the validator is compiled for.
pub(super) struct Metered;

#[derive(Debug)]
pub(super) struct Meter {
    left: Cell<u64>,
    /// What a member costs: its name may pass through `propertyNames`, which sees no meter.
    per_name: u64,
    /// Weight of the patterns that a member's name is read through.
    name_weight: usize,
}

impl Meter {
    /// For asking only whether a value is valid.
    pub(super) fn for_verdict(passed: &Passed) -> Meter {
        let Passed { per_name, name_weight, .. } = *passed;
        Meter { left: Cell::new(MAX_STEPS), per_name: 1 + per_name, name_weight }
    }

    /// For listing errors, of which each evaluation of a property name may make one.
    pub(super) fn for_errors(passed: &Passed) -> Meter {
        let Passed { per_name, name_weight, .. } = *passed;
        let per_name = 1 + per_name * ERROR_STEPS;
        Meter { left: Cell::new(MAX_STEPS), per_name, name_weight }
    }

    pub(super) fn is_spent(&self) -> bool {
        self.left.get() == 0
    }

    fn charge(&self, steps: usize) -> bool {
        self.left.set(self.left.get().saturating_sub(steps as u64));
        !self.is_spent()
    }
}

/// Steps for reading that many bytes through a pattern: the engine advances all live states for
/// each byte, of which about half are, at worst.
fn heavy(length: usize, weight: usize) -> usize {
    length.saturating_mul(weight) / 2
}

/// Whether an error was made from a value that was really looked at.
pub(super) fn is_genuine(error: &jsonschema::ValidationError<'_>) -> bool {
    error.instance().as_ref() != &SPENT
}

/// One value seen through the meter. Property names come without one.
#[derive(Debug, Clone, Copy)]
pub(super) struct View<'a> {
    value: &'a Value,
    meter: Option<&'a Meter>,
    /// Length of the path to this value, because every error spells it out.
    path: usize,
}

impl<'a> View<'a> {
    pub(super) fn new(value: &'a Value, meter: &'a Meter) -> View<'a> {
        View { value, meter: Some(meter), path: 0 }
    }

    fn look(&self, steps: usize) -> &'a Value {
        match self.meter {
            Some(meter) if !meter.charge(steps) => &NOTHING,
            _ => self.value,
        }
    }

    fn member(&self, value: &'a Value, name: usize) -> View<'a> {
        View { value, meter: self.meter, path: self.path + name + 1 }
    }

    /// The value, to be matched with a pattern of that weight.
    pub(super) fn read(&self, weight: usize) -> &'a Value {
        let length = self.value.as_str().map_or(0, str::len);
        self.look(1 + length / BYTES_PER_STEP + heavy(length, weight))
    }

    fn text(&self) -> Option<&'a str> {
        let length = self.value.as_str().map_or(0, str::len);
        self.look(1 + length / BYTES_PER_STEP).as_str()
    }
}

impl Json for Metered {
    type Node<'a> = View<'a>;
    type PreparedKey = String;
    type StringBuffer = Value;

    fn prepare_key(key: &str) -> String {
        key.to_owned()
    }

    fn with_string_node<T>(buffer: &mut Value, string: &str, f: impl FnOnce(View<'_>) -> T) -> T {
        *buffer = Value::String(string.to_owned());
        f(View { value: buffer, meter: None, path: 0 })
    }
}

impl<'a> Node<'a, Metered> for View<'a> {
    type Object = Members<'a>;
    type Array = Items<'a>;
    type Number = &'a Number;

    fn as_object(&self) -> Option<Members<'a>> {
        let map = self.look(1).as_object()?;
        Some(Members { map, view: *self })
    }

    fn as_array(&self) -> Option<Items<'a>> {
        let list = self.look(1).as_array()?;
        Some(Items { list, view: *self })
    }

    fn as_string(&self) -> Option<Cow<'a, str>> {
        self.text().map(Cow::Borrowed)
    }

    fn as_number(&self) -> Option<&'a Number> {
        self.look(1).as_number()
    }

    fn as_boolean(&self) -> Option<bool> {
        self.look(1).as_bool()
    }

    fn is_null(&self) -> bool {
        self.look(1).is_null()
    }

    fn json_type(&self) -> JsonType {
        match self.look(1) {
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
            // Texts of unlike length are unequal without being read.
            (Value::String(text), Value::String(other)) if text.len() == other.len() => {
                text.len() / BYTES_PER_STEP
            }
            _ => 0,
        };
        cmp::equal(self.look(1 + compared), expected)
    }

    /// Only errors ask for this. They get no copy of the instance, which within `anyOf` would be
    /// one full copy per error; `problem.rs` finds the value again by its path.
    fn to_value(&self) -> Cow<'a, Value> {
        match self.meter {
            None => Cow::Owned(Value::String(super::problem::cut(self.text().unwrap_or(""), 80))),
            Some(meter) if meter.charge(ERROR_STEPS as usize + self.path) => {
                Cow::Borrowed(&NOTHING)
            }
            Some(_) => Cow::Borrowed(&SPENT),
        }
    }

    fn identity(&self) -> Option<NodeIdentity> {
        Some(NodeIdentity::new(std::ptr::from_ref(self.value) as usize))
    }
}

pub(super) struct Members<'a> {
    map: &'a Map<String, Value>,
    view: View<'a>,
}

impl<'a> Object<'a, Metered> for Members<'a> {
    type Node = View<'a>;
    type MemberName = &'a str;
    type MembersIter = MembersIter<'a>;

    fn len(&self) -> usize {
        self.map.len()
    }

    fn get(&self, key: &String) -> Option<View<'a>> {
        self.view.look(1);
        self.map.get(key).map(|value| self.view.member(value, key.len()))
    }

    fn members(&self) -> MembersIter<'a> {
        MembersIter { rest: self.map.iter(), view: self.view }
    }
}

pub(super) struct MembersIter<'a> {
    rest: serde_json::map::Iter<'a>,
    view: View<'a>,
}

impl<'a> Iterator for MembersIter<'a> {
    type Item = (&'a str, View<'a>);

    fn next(&mut self) -> Option<Self::Item> {
        let (name, value) = self.rest.next()?;
        if let Some(meter) = self.view.meter {
            let read = name.len() / BYTES_PER_STEP + heavy(name.len(), meter.name_weight);
            let steps = meter.per_name as usize + read;
            if !meter.charge(steps) {
                return None;
            }
        }
        Some((name, self.view.member(value, name.len())))
    }
}

pub(super) struct Items<'a> {
    list: &'a [Value],
    view: View<'a>,
}

impl<'a> Array<'a, Metered> for Items<'a> {
    type Node = View<'a>;
    type ElementsIter = ItemsIter<'a>;

    fn len(&self) -> usize {
        self.list.len()
    }

    fn elements(&self) -> ItemsIter<'a> {
        ItemsIter { rest: self.list.iter(), view: self.view }
    }

    /// The default compares by a hash that nested empty arrays all share, which makes a crafted
    /// array quadratic; canonical text does not.
    fn is_unique(&self) -> bool {
        repeated(self.list, |written| {
            self.view.meter.is_none_or(|meter| meter.charge(1 + written / 4))
        })
        .is_none()
    }
}

pub(super) struct ItemsIter<'a> {
    rest: std::slice::Iter<'a, Value>,
    view: View<'a>,
}

impl<'a> Iterator for ItemsIter<'a> {
    type Item = View<'a>;

    fn next(&mut self) -> Option<View<'a>> {
        let value = self.rest.next()?;
        if let Some(meter) = self.view.meter
            && !meter.charge(1)
        {
            return None;
        }
        // Twenty digits are the longest index.
        Some(self.view.member(value, 20))
    }
}

/// The first two equal items; stops early, finding none, when `go_on` says so.
pub(super) fn repeated(items: &[Value], go_on: impl Fn(usize) -> bool) -> Option<(usize, usize)> {
    let mut seen = HashMap::with_capacity(items.len().min(1024));
    for (index, item) in items.iter().enumerate() {
        let mut text = String::new();
        canonical(item, &mut text);
        if !go_on(text.len()) {
            return None;
        }
        if let Some(first) = seen.insert(text, index) {
            return Some((first, index));
        }
    }
    None
}

/// Text that is equal for equal JSON values: numbers by value, members in order of their names.
fn canonical(value: &Value, out: &mut String) {
    match value {
        Value::Number(number) => canonical_number(number, out),
        Value::Array(items) => {
            out.push('[');
            for item in items {
                canonical(item, out);
                out.push(',');
            }
            out.push(']');
        }
        Value::Object(members) => {
            let mut members: Vec<_> = members.iter().collect();
            members.sort_by_key(|(name, _)| *name);
            out.push('{');
            for (name, member) in members {
                // Length first, so that no name can imitate the text of another value.
                let _ = write!(out, "{}:{name}", name.len());
                canonical(member, out);
                out.push(',');
            }
            out.push('}');
        }
        Value::String(text) => {
            let _ = write!(out, "\"{}:{text}", text.len());
        }
        other => {
            let _ = write!(out, "{other}");
        }
    }
}

fn canonical_number(number: &Number, out: &mut String) {
    let whole = |float: f64| float.fract() == 0.0 && float.abs() < 1e38;
    let _ = match (number.as_i128(), number.as_f64()) {
        (Some(integer), _) => write!(out, "{integer}"),
        (None, Some(float)) if whole(float) => write!(out, "{}", float as i128),
        (None, Some(float)) => write!(out, "{float:e}"),
        (None, None) => write!(out, "{number}"),
    };
}
