//! Explains validation errors in words that help a language model to correct itself.
//!
//! This module never decides validity and never repeats an instance at length: values are truncated
//! to fit a sentence. The errors carry no instance (see `meter.rs`); it is found by its path.
//!
//! For a union, only the useful errors are reported. A branch whose type or tag does not match was
//! not intended; the problems of the intended branch are the explanation.

use std::collections::BTreeSet;

use jsonschema::ValidationError;
use jsonschema::error::{TypeKind, ValidationErrorKind as Kind};
use serde_json::Value;

use super::duplicates::find_duplicates;
use super::phrases::{
    self, describe_value, format_phrase, join_values, pluralize, pointer_label, pointer_location,
    quote, short_json, truncate_chars, type_phrase,
};
use super::{MAX_PROBLEMS, SchemaError, SchemaProblem};

/// Maximum nesting of unions whose branches are distinguished; deeper ones are only listed.
const MAX_UNIONS: usize = 128;
/// Maximum number of branches of a union that a sentence mentions.
const MAX_BRANCHES: usize = 6;

type ErrorSlice<'e> = [ValidationError<'e>];

pub(super) fn explain(
    source: &Value,
    instance: &Value,
    errors: &ErrorSlice<'_>,
) -> Vec<SchemaProblem> {
    let explainer = ProblemExplainer { source, instance, name: None };
    let mut problems: Vec<SchemaProblem> = Vec::new();
    for error in errors {
        for problem in explainer.explain_error(error, 0) {
            if !problems.contains(&problem) {
                problems.push(problem);
            }
        }
        if problems.len() >= MAX_PROBLEMS {
            break;
        }
    }
    problems.truncate(MAX_PROBLEMS);
    if problems.is_empty() {
        // The value is invalid, but the steps were exhausted before a single error was complete.
        problems.push(whole_value_problem(
            instance,
            "a value that fits the schema",
            "the value does not fit the schema, and in too many ways to list; \
             send a smaller value, or follow the schema's alternatives more closely"
                .to_string(),
        ));
    }
    problems
}

pub(super) fn too_deep(instance: &Value, levels: usize) -> SchemaProblem {
    let expected = format!("a value nested at most {levels} levels deep");
    let message = format!("the value is nested deeper than the {levels} levels that are checked");
    whole_value_problem(instance, &expected, message)
}

pub(super) fn too_large(instance: &Value) -> SchemaProblem {
    whole_value_problem(
        instance,
        "a value small enough to be checked",
        "the value is too large to be checked against this schema; send a smaller one".to_string(),
    )
}

/// Returns the problem of every instance of a stored schema that cannot be compiled.
pub(super) fn unusable_schema(instance: &Value, error: &SchemaError) -> SchemaProblem {
    let message = format!("nothing can be checked against this schema: {error}");
    whole_value_problem(instance, "a value that a usable schema describes", message)
}

fn whole_value_problem(instance: &Value, expected: &str, message: String) -> SchemaProblem {
    let (pointer, expected) = (String::new(), expected.to_string());
    SchemaProblem { pointer, expected, given: describe_value(instance), message }
}

struct ProblemExplainer<'a> {
    source: &'a Value,
    instance: &'a Value,
    /// Set while errors about a property name are explained; their path is that of its object.
    name: Option<&'a Value>,
}

impl<'a> ProblemExplainer<'a> {
    fn explain_error(&self, error: &ValidationError<'_>, unions: usize) -> Vec<SchemaProblem> {
        let pointer = error.instance_path().as_str();
        match error.kind() {
            Kind::AnyOf { context } | Kind::OneOfNotValid { context } if unions < MAX_UNIONS => {
                self.explain_union(pointer, context, unions)
            }
            Kind::OneOfMultipleValid { context } => {
                vec![self.explain_ambiguous_union(pointer, context)]
            }
            Kind::AdditionalProperties { unexpected } => self.explain_unknown_properties(
                error,
                unexpected,
                self.known_properties(error, false),
            ),
            Kind::UnevaluatedProperties { unexpected } => self.explain_unknown_properties(
                error,
                unexpected,
                self.known_properties(error, true),
            ),
            Kind::Required { property } => vec![self.explain_missing_property(error, property)],
            Kind::PropertyNames { error: inner } => {
                self.explain_property_name(pointer, inner, unions)
            }
            _ => vec![self.explain_value(pointer, self.value_at(pointer), error)],
        }
    }

    fn value_at(&self, pointer: &str) -> &'a Value {
        self.name.or_else(|| self.instance.pointer(pointer)).unwrap_or(&Value::Null)
    }

    /// Returns the expectation of a keyword that concerns one value alone, phrased to follow "must
    /// be".
    fn expected(&self, error: &ValidationError<'_>) -> Option<String> {
        Some(match error.kind() {
            Kind::Type { kind: TypeKind::Single(only) } => type_phrase([only.as_str()]),
            Kind::Type { kind: TypeKind::Multiple(several) } => {
                type_phrase(several.iter().map(|kind| kind.as_str()))
            }
            Kind::Enum { options } => match options.as_array() {
                Some(options) if options.len() > 1 => format!("one of {}", join_values(options)),
                Some(options) => format!("exactly {}", join_values(options)),
                None => "one of the allowed values".to_string(),
            },
            Kind::Constant { expected_value } => format!("exactly {}", short_json(expected_value)),
            Kind::Minimum { limit } => format!("at least {limit}"),
            Kind::Maximum { limit } => format!("at most {limit}"),
            Kind::ExclusiveMinimum { limit } => format!("greater than {limit}"),
            Kind::ExclusiveMaximum { limit } => format!("less than {limit}"),
            Kind::MultipleOf { multiple_of } => format!("a multiple of {multiple_of}"),
            Kind::Pattern { pattern } | Kind::Custom { message: pattern, .. } => {
                format!("a string that matches the pattern {}", truncate_chars(pattern, 200))
            }
            Kind::Format { format } => format_phrase(format),
            Kind::ContentEncoding { content_encoding } => {
                format!("a string in the encoding {}", truncate_chars(content_encoding, 80))
            }
            Kind::ContentMediaType { content_media_type } => {
                format!("a document of the media type {}", truncate_chars(content_media_type, 80))
            }
            Kind::FalseSchema => "omitted, because nothing is allowed here".to_string(),
            Kind::Not { schema } => format!("something that does not fit {}", short_json(schema)),
            _ => return None,
        })
    }

    /// Returns a size limit and the actual size: "at least 2 items", "1 item".
    fn size_limit(&self, error: &ValidationError<'_>, value: &Value) -> Option<(String, String)> {
        let length = || value.as_str().map_or(0, |text| text.chars().count() as u64);
        let items = || value.as_array().map_or(0, Vec::len) as u64;
        let members = || value.as_object().map_or(0, serde_json::Map::len) as u64;
        let (bound, limit, has, unit) = match error.kind() {
            Kind::MinLength { limit } => ("at least", *limit, length(), "character"),
            Kind::MaxLength { limit } => ("at most", *limit, length(), "character"),
            Kind::MinItems { limit } => ("at least", *limit, items(), "item"),
            Kind::MaxItems { limit } => ("at most", *limit, items(), "item"),
            Kind::AdditionalItems { limit } => ("at most", *limit as u64, items(), "item"),
            Kind::MinProperties { limit } => ("at least", *limit, members(), "property"),
            Kind::MaxProperties { limit } => ("at most", *limit, members(), "property"),
            _ => return None,
        };
        Some((format!("{bound} {}", pluralize(limit, unit)), pluralize(has, unit)))
    }

    fn explain_value(
        &self,
        pointer: &str,
        value: &Value,
        error: &ValidationError<'_>,
    ) -> SchemaProblem {
        let (label, found) = (pointer_label(pointer), describe_value(value));
        let problem = |expected: String, message: String| SchemaProblem {
            pointer: truncate_chars(pointer, 512),
            expected,
            given: found.clone(),
            message,
        };
        if let Some(expected) = self.expected(error) {
            let message = format!("{label} must be {expected}, but {found} was given");
            return problem(expected, message);
        }
        if let Some((expected, has)) = self.size_limit(error, value) {
            let message = format!("{label} must have {expected}, but has {has}");
            return problem(expected, message);
        }
        match error.kind() {
            Kind::UniqueItems => {
                let items = value.as_array().map_or(&[][..], Vec::as_slice);
                let which = find_duplicates(items, |_| true).map_or_else(String::new, |(a, b)| {
                    format!(", but items {a} and {b} are equal")
                });
                let message = format!("{label} must not repeat items{which}");
                problem("an array without repeated items".to_string(), message)
            }
            Kind::Contains => {
                let expected = self.expected_contents(error);
                let message = format!("{label} must contain {expected}, but {found} was given");
                problem(format!("an array that contains {expected}"), message)
            }
            Kind::UnevaluatedItems { unexpected } => {
                let more = pluralize(unexpected.len() as u64, "item");
                let message = format!("{label} has {more} more than the schema describes");
                problem("no items beyond those the schema describes".to_string(), message)
            }
            other => {
                let expected = format!("a value that passes the schema's {}", other.keyword());
                let message = format!("{label} must be {expected}, but {found} was given");
                problem(expected, message)
            }
        }
    }

    fn expected_contents(&self, error: &ValidationError<'_>) -> String {
        let path = error.schema_path().as_str();
        let parent = path.rsplit_once('/').map_or("", |(parent, _)| parent);
        let schema = self.source.pointer(parent).unwrap_or(&Value::Null);
        let contents = schema.get("contains").map_or_else(|| "the schema".to_string(), short_json);
        let limit = |key: &str| schema.get(key).and_then(Value::as_u64);
        let amount = match (limit("minContains"), limit("maxContains")) {
            (None, None) => "at least 1 item".to_string(),
            (min, None) => format!("at least {}", pluralize(min.unwrap_or(1), "item")),
            (min, Some(max)) => {
                format!("between {} and {}", min.unwrap_or(1), pluralize(max, "item"))
            }
        };
        format!("{amount} fitting {contents}")
    }

    fn explain_missing_property(
        &self,
        error: &ValidationError<'_>,
        property: &Value,
    ) -> SchemaProblem {
        let name = property.as_str().unwrap_or_default();
        let pointer = error.instance_path().as_str();
        let path = error.schema_path().as_str();
        let (parent, keyword) = path.rsplit_once('/').unwrap_or(("", path));
        let schema = self.source.pointer(parent).unwrap_or(&Value::Null);
        let described = schema.get("properties").and_then(|properties| properties.get(name));
        let expected = match described.and_then(|schema| schema.get("type")) {
            Some(Value::String(only)) => type_phrase([only.as_str()]),
            Some(Value::Array(several)) => type_phrase(several.iter().filter_map(Value::as_str)),
            _ => "a value".to_string(),
        };
        // `dependentRequired` names the properties whose presence requires this one.
        let asks = schema.get(keyword).and_then(Value::as_object).into_iter().flatten();
        let present = |key: &str| self.value_at(pointer).get(key).is_some();
        let because = asks
            .filter(|(_, list)| list.as_array().is_some_and(|list| list.contains(property)))
            .find(|(key, _)| present(key))
            .map(|(key, _)| format!(", because {} is present", quote(key)));
        let because = because.unwrap_or_default();
        SchemaProblem {
            pointer: truncate_chars(&child_pointer(pointer, name), 512),
            expected,
            given: "nothing".to_string(),
            message: format!(
                "the required property {} is missing {}{because}",
                quote(name),
                pointer_location(pointer)
            ),
        }
    }

    fn explain_unknown_properties(
        &self,
        error: &ValidationError<'_>,
        unexpected: &[String],
        properties: BTreeSet<&str>,
    ) -> Vec<SchemaProblem> {
        let pointer = error.instance_path().as_str();
        let object = self.value_at(pointer);
        let suffix = match pointer {
            "" => String::new(),
            _ => format!(" of {}", pointer_label(pointer)),
        };
        let names: Vec<Value> = properties.iter().map(|name| Value::from(*name)).collect();
        let describe = |name: &String| {
            let mut message = format!("{} is not a known property{suffix}", quote(name));
            if let Some(nearest) = phrases::nearest_name(name, &properties) {
                message += &format!("; did you mean {}?", quote(nearest));
            }
            let expected = match names.as_slice() {
                [] => "no such property".to_string(),
                names => {
                    let separator = if message.ends_with('?') { "" } else { ";" };
                    message += &format!("{separator} known are: {}", join_values(names));
                    format!("only the known properties: {}", join_values(names))
                }
            };
            let value = object.get(name).unwrap_or(&Value::Null);
            SchemaProblem {
                pointer: truncate_chars(&child_pointer(pointer, name), 512),
                expected,
                given: describe_value(value),
                message,
            }
        };
        unexpected.iter().take(MAX_PROBLEMS).map(describe).collect()
    }

    /// Returns the property names that the schema around a failed keyword describes.
    fn known_properties(&self, error: &ValidationError<'_>, everywhere: bool) -> BTreeSet<&'a str> {
        let path = error.schema_path().as_str();
        let parent = path.rsplit_once('/').map_or("", |(parent, _)| parent);
        let mut names = BTreeSet::new();
        if let Some(schema) = self.source.pointer(parent) {
            self.collect_properties(schema, if everywhere { 5 } else { 0 }, &mut names);
        }
        names
    }

    fn collect_properties(&self, schema: &'a Value, depth: usize, names: &mut BTreeSet<&'a str>) {
        let properties = schema.get("properties").and_then(Value::as_object);
        names.extend(
            properties.into_iter().flat_map(|properties| properties.keys().map(String::as_str)),
        );
        if depth == 0 || names.len() > 200 {
            return;
        }
        let local = schema.get("$ref").and_then(Value::as_str).and_then(|r| r.strip_prefix('#'));
        let target = local.and_then(|pointer| self.source.pointer(pointer));
        let lists = ["allOf", "anyOf", "oneOf"].into_iter().filter_map(|key| schema.get(key));
        let branches = lists.filter_map(Value::as_array).flatten();
        let ones = ["then", "else"].into_iter().filter_map(|key| schema.get(key));
        for next in target.into_iter().chain(branches).chain(ones) {
            self.collect_properties(next, depth - 1, names);
        }
    }

    fn explain_property_name(
        &self,
        at: &str,
        inner: &ValidationError<'_>,
        unions: usize,
    ) -> Vec<SchemaProblem> {
        // The name is the only instance that an error carries, already truncated.
        let name = inner.instance().as_str().unwrap_or_default();
        let explainer = ProblemExplainer {
            source: self.source,
            instance: self.instance,
            name: Some(inner.instance()),
        };
        let expected = match explainer.explain_error(inner, unions + 1).into_iter().next() {
            Some(problem) => problem.expected,
            None => "a name that fits the schema".to_string(),
        };
        vec![SchemaProblem {
            pointer: truncate_chars(&child_pointer(at, name), 512),
            given: describe_value(inner.instance()),
            message: format!(
                "the property name {} {} is not allowed; a name must be {expected}",
                quote(name),
                pointer_location(at)
            ),
            expected,
        }]
    }

    fn explain_ambiguous_union(
        &self,
        pointer: &str,
        context: &[Vec<ValidationError<'static>>],
    ) -> SchemaProblem {
        let fits = context.iter().enumerate().filter(|(_, errors)| errors.is_empty());
        let fits: Vec<Value> = fits.map(|(i, _)| Value::from(i + 1)).collect();
        let (label, found, total) =
            (pointer_label(pointer), describe_value(self.value_at(pointer)), context.len());
        SchemaProblem {
            pointer: truncate_chars(pointer, 512),
            expected: format!("a value that fits exactly one of {total} alternatives"),
            message: format!(
                "{label} must fit exactly one of {total} alternatives, but {found} fits \
                 several of them (numbers {})",
                join_values(&fits)
            ),
            given: found,
        }
    }

    fn explain_union(
        &self,
        pointer: &str,
        context: &[Vec<ValidationError<'static>>],
        unions: usize,
    ) -> Vec<SchemaProblem> {
        let value = self.value_at(pointer);
        let right_type = |errors: &&Vec<_>| !is_wrong_type(errors, pointer, value);
        let fitting: Vec<_> = context.iter().filter(right_type).collect();
        if fitting.is_empty() {
            return vec![self.explain_no_branch(pointer, &self.explain_branches(context, unions))];
        }
        let untagged = |errors: &&Vec<_>| find_tag_error(errors, pointer).is_none();
        let meant: Vec<_> = fitting.iter().copied().filter(untagged).collect();
        match (meant.as_slice(), fitting.as_slice()) {
            ([only], _) | (_, [only]) => self.explain_all(only, unions),
            ([], _) => {
                let tags: Vec<_> =
                    fitting.iter().filter_map(|e| find_tag_error(e, pointer)).collect();
                let paths: BTreeSet<&str> =
                    tags.iter().map(|e| e.instance_path().as_str()).collect();
                match paths.first() {
                    Some(at) if paths.len() == 1 => vec![self.explain_wrong_tag(at, &tags)],
                    _ => vec![
                        self.explain_no_branch(pointer, &self.explain_branches(fitting, unions)),
                    ],
                }
            }
            _ => {
                // Requirements shared by all branches apply whichever branch was intended.
                let branches = self.explain_branches(meant, unions);
                let mut common = branches.first().cloned().unwrap_or_default();
                common.retain(|problem| branches.iter().all(|branch| branch.contains(problem)));
                if common.is_empty() {
                    common.push(self.explain_no_branch(pointer, &branches));
                }
                common
            }
        }
    }

    /// Explains every error once: explaining errors twice per union would double the work with
    /// every union.
    fn explain_all(&self, errors: &ErrorSlice<'_>, unions: usize) -> Vec<SchemaProblem> {
        let problems = errors
            .iter()
            .take(MAX_PROBLEMS)
            .flat_map(|error| self.explain_error(error, unions + 1));
        problems.take(MAX_PROBLEMS).collect()
    }

    fn explain_branches<'c>(
        &self,
        branches: impl IntoIterator<Item = &'c Vec<ValidationError<'static>>>,
        unions: usize,
    ) -> Vec<Vec<SchemaProblem>> {
        branches.into_iter().map(|errors| self.explain_all(errors, unions)).collect()
    }

    fn explain_wrong_tag(&self, pointer: &str, tags: &[&ValidationError<'_>]) -> SchemaProblem {
        let mut allowed: Vec<Value> = Vec::new();
        for tag in tags {
            match tag.kind() {
                Kind::Constant { expected_value } => allowed.push(expected_value.as_ref().clone()),
                Kind::Enum { options } => {
                    allowed.extend(options.as_array().into_iter().flatten().cloned());
                }
                _ => {}
            }
        }
        let expected = format!("one of {}", join_values(&allowed));
        let found = describe_value(self.value_at(pointer));
        let message =
            format!("{} must be {expected}, but {found} was given", pointer_label(pointer));
        SchemaProblem { pointer: truncate_chars(pointer, 512), expected, given: found, message }
    }

    /// Explains a union in which no branch stands out: lists briefly what each branch requires.
    fn explain_no_branch(&self, pointer: &str, branches: &[Vec<SchemaProblem>]) -> SchemaProblem {
        let mut wants: Vec<String> = Vec::new();
        for branch in branches.iter().take(MAX_BRANCHES) {
            let brief: Vec<_> =
                branch.iter().take(2).map(|p| phrases::alternative_phrase(p, pointer)).collect();
            let brief = truncate_chars(&brief.join(" and "), 300);
            if !wants.contains(&brief) {
                wants.push(brief);
            }
        }
        if branches.len() > MAX_BRANCHES {
            wants.push(format!("{} more", branches.len() - MAX_BRANCHES));
        }
        let expected = wants.join(", or ");
        let found = describe_value(self.value_at(pointer));
        let message =
            format!("{} must be {expected}, but {found} was given", pointer_label(pointer));
        SchemaProblem { pointer: truncate_chars(pointer, 512), expected, given: found, message }
    }
}

fn child_pointer(pointer: &str, name: &str) -> String {
    format!("{pointer}/{}", name.replace('~', "~0").replace('/', "~1"))
}

/// Returns whether a branch was not intended because it does not admit the value's type.
fn is_wrong_type(errors: &ErrorSlice<'_>, pointer: &str, value: &Value) -> bool {
    let has_same_type =
        |other: &Value| std::mem::discriminant(other) == std::mem::discriminant(value);
    errors.iter().filter(|error| error.instance_path().as_str() == pointer).any(|error| match error
        .kind()
    {
        Kind::Type { .. } | Kind::FalseSchema => true,
        Kind::Constant { expected_value } => !has_same_type(expected_value),
        Kind::Enum { options } => !options.as_array().is_some_and(|o| o.iter().any(has_same_type)),
        _ => false,
    })
}

/// Returns the error about a direct member of the value, its tag, which shows that a branch was not
/// intended.
fn find_tag_error<'e, 'v>(
    errors: &'e ErrorSlice<'v>,
    pointer: &str,
) -> Option<&'e ValidationError<'v>> {
    errors.iter().find(|error| {
        let member = error.instance_path().as_str().strip_prefix(pointer);
        let member = member.and_then(|rest| rest.strip_prefix('/'));
        member.is_some_and(|name| !name.contains('/'))
            && matches!(error.kind(), Kind::Constant { .. } | Kind::Enum { .. })
    })
}
