//! Decides, before a schema is compiled, whether it can harm the process that runs it.
//!
//! The guard never fetches anything and never sees an instance: it reads the schema as a graph of
//! subschemas, and refuses a schema that refers outside the document, loops in place, or multiplies
//! work.
//!
//! An edge of that graph either stays on the same instance value (`$ref`, `anyOf`, ...) or descends
//! into one of its members. In-place edges add up and may not form a loop. Edges that descend may
//! loop, but only so that each instance value is visited once per round.

use std::collections::HashMap;
use std::sync::Arc;

use jsonschema::{Draft, Registry, Retrieve, Uri};
use serde_json::Value;

use super::SchemaError;
use super::budget::{BudgetExceeded, CompileBudget, CompiledPatterns};

mod cost;
mod graph;

/// Maximum size of a schema, in bytes of compact JSON.
pub(super) const MAX_BYTES: usize = 256 * 1024;
/// Maximum nesting of objects and arrays in the schema document.
pub(super) const MAX_DEPTH: usize = 64;
/// Maximum number of subschemas in one document.
pub(super) const MAX_SUBSCHEMAS: usize = 10_000;
/// Maximum number of subschemas that share one `$dynamicAnchor`, because each reference may mean
/// any of them.
pub(super) const MAX_ANCHORS: usize = 64;
/// Maximum number of evaluations of one instance value per evaluation of the root.
pub(super) const MAX_PATHS: u64 = 20_000;
/// Maximum chain of subschemas on one instance value: the validator recurses along it.
pub(super) const MAX_CHAIN: u32 = 32;

/// Properties of an accepted schema that the rest of the module needs.
#[derive(Debug, Clone, Copy)]
pub(super) struct SchemaProfile {
    pub draft: Draft,
    /// Longest chain of subschemas on one instance value.
    pub chain: u32,
    /// Maximum number of evaluations of one property name through one `propertyNames`.
    pub per_name: u64,
    /// Total weight of the patterns that one property name may be matched against.
    pub name_weight: usize,
    /// Number of subschemas in the schema.
    pub subschemas: usize,
}

/// Analyzes a schema and compiles its patterns, both within the budget.
pub(super) fn check(
    schema: &Value,
    budget: &mut CompileBudget,
) -> Result<(SchemaProfile, CompiledPatterns), SchemaError> {
    if !schema.is_object() && !schema.is_boolean() {
        return Err(schema_error("", "a schema must be a JSON object or a boolean"));
    }
    let doc = SchemaDocument::index(schema)?;
    let draft = detect_draft(schema)?;
    let resource = draft.create_resource_ref(schema);
    // The compiler names the document the same way, so both resolve references alike.
    let id = resource.id().unwrap_or("json-schema:///").trim_end_matches('#');
    let wrong_id =
        |e: jsonschema::ReferencingError| schema_error("/$id", format!("not usable: {e}"));
    let base = jsonschema::uri::from_str(id).map_err(wrong_id)?;
    let registry = Registry::new()
        .retriever(OfflineRetriever)
        .draft(draft)
        .add(base.as_str(), resource)
        .and_then(|builder| builder.prepare())
        .map_err(|e| {
            schema_error(doc.locate_reference(&e.to_string()), format!("cannot be resolved: {e}"))
        })?;
    let graph = graph::SchemaGraph::new(doc, draft, &registry, Arc::new(base))?;
    let exceeded_error = |exceeded: BudgetExceeded| schema_error("", exceeded.reason());
    budget.charge_subschemas(graph.subschemas.len()).map_err(exceeded_error)?;
    let (profile, steps) = cost::measure_profile(&graph)?;
    budget.charge_analysis(steps).map_err(exceeded_error)?;
    Ok((profile, compile_patterns(&graph, budget)?))
}

/// Compiles the patterns of all subschemas, and refuses the first one over the budget.
fn compile_patterns(
    graph: &graph::SchemaGraph<'_, '_>,
    budget: &mut CompileBudget,
) -> Result<CompiledPatterns, SchemaError> {
    let schemas = || graph.subschemas.iter().map(|site| (site, graph.value(site)));
    let mut patterns = CompiledPatterns::new(schemas().map(|(_, v)| cost::count_patterns(v)).sum());
    for (site, schema) in schemas() {
        let exceeded_error = |keyword: &str, exceeded: BudgetExceeded| {
            let pointer = graph.doc.pointer(site.index);
            schema_error(format!("{pointer}/{keyword}"), exceeded.reason())
        };
        if let Some(text) = schema.get("pattern").and_then(Value::as_str) {
            patterns.add(text, budget).map_err(|e| exceeded_error("pattern", e))?;
        }
        let names = schema.get("patternProperties").and_then(Value::as_object);
        for text in names.into_iter().flat_map(|names| names.keys()) {
            let charged = patterns.add(text, budget);
            // The library compiles the patterns of property names itself.
            let charged = charged.and_then(|()| patterns.charge_again(text, budget));
            charged.map_err(|e| exceeded_error("patternProperties", e))?;
        }
    }
    Ok(patterns)
}

/// Answers every fetch with the `true` schema, so that the registry can be built and the offending
/// reference can then be reported with its pointer.
struct OfflineRetriever;

impl Retrieve for OfflineRetriever {
    fn retrieve(&self, _: &Uri<String>) -> Result<Value, Box<dyn std::error::Error + Send + Sync>> {
        Ok(Value::Bool(true))
    }
}

fn schema_error(pointer: impl Into<String>, reason: impl Into<String>) -> SchemaError {
    SchemaError { pointer: pointer.into(), reason: reason.into() }
}

fn detect_draft(schema: &Value) -> Result<Draft, SchemaError> {
    let Some(uri) = schema.get("$schema") else {
        return Ok(Draft::Draft202012);
    };
    match Draft::from_schema_uri(uri.as_str().unwrap_or_default()) {
        // The address without a version means "the newest", which is not a stable contract.
        draft @ (Draft::Draft202012 | Draft::Draft7)
            if !uri.as_str().unwrap_or_default().contains("json-schema.org/schema") =>
        {
            Ok(draft)
        }
        _ => Err(schema_error(
            "/$schema",
            "this dialect is not supported; use JSON Schema 2020-12 or draft-07",
        )),
    }
}

#[derive(Clone, Copy)]
enum PointerSegment<'a> {
    Key(&'a str),
    Index(usize),
}

/// Every value of the document, so that any of them can be named by its pointer. Stores parents
/// instead of pointers, because one very long key would otherwise be copied thousands of times.
struct SchemaDocument<'a> {
    values: Vec<(&'a Value, Option<(usize, PointerSegment<'a>)>)>,
    by_address: HashMap<usize, usize>,
}

fn address(value: &Value) -> usize {
    std::ptr::from_ref(value) as usize
}

impl<'a> SchemaDocument<'a> {
    /// Indexes the document iteratively, because its depth is not yet known to be safe.
    fn index(root: &'a Value) -> Result<SchemaDocument<'a>, SchemaError> {
        let mut doc = SchemaDocument { values: Vec::new(), by_address: HashMap::new() };
        let mut stack = vec![(root, None, 0)];
        while let Some((value, parent, depth)) = stack.pop() {
            let index = doc.values.len();
            doc.values.push((value, parent));
            doc.by_address.insert(address(value), index);
            if (value.is_object() || value.is_array()) && depth >= MAX_DEPTH {
                let reason = format!("the schema is nested deeper than {MAX_DEPTH} levels");
                return Err(schema_error(doc.pointer(index), reason));
            }
            if index > MAX_BYTES {
                return Err(Self::too_large_error());
            }
            let below = |seg| Some((index, seg));
            match value {
                Value::Object(map) => stack.extend(
                    map.iter()
                        .map(|(key, v)| (v, below(PointerSegment::Key(key.as_str())), depth + 1)),
                ),
                Value::Array(list) => stack.extend(
                    list.iter()
                        .enumerate()
                        .map(|(i, v)| (v, below(PointerSegment::Index(i)), depth + 1)),
                ),
                _ => {}
            }
        }
        // Recursion is safe from here on; the writer stops at the limit instead of filling memory.
        let mut sink = LimitedSink(MAX_BYTES);
        serde_json::to_writer(&mut sink, root).map_err(|_| Self::too_large_error())?;
        Ok(doc)
    }

    fn too_large_error() -> SchemaError {
        schema_error("", format!("the schema is larger than {} KiB", MAX_BYTES / 1024))
    }

    fn pointer(&self, mut index: usize) -> String {
        let mut parts = Vec::new();
        while let Some((_, Some((parent, segment)))) = self.values.get(index) {
            parts.push(match segment {
                PointerSegment::Key(key) => key.replace('~', "~0").replace('/', "~1"),
                PointerSegment::Index(i) => i.to_string(),
            });
            index = *parent;
        }
        parts.iter().rev().fold(String::new(), |path, part| path + "/" + part)
    }

    /// Locates a bad reference. The registry reports only an address and no pointer, so this
    /// searches for the value that contains it.
    fn locate_reference(&self, message: &str) -> String {
        let is_mentioned =
            |v: &Value| v.as_str().is_some_and(|s| !s.is_empty() && message.contains(s));
        let wrote = |(v, parent): &(&Value, Option<(usize, PointerSegment)>)| {
            matches!(parent, Some((_, PointerSegment::Key(k))) if k.starts_with('$'))
                && is_mentioned(v)
        };
        self.values.iter().position(wrote).map_or_else(String::new, |i| self.pointer(i))
    }
}

/// A sink with limited capacity, used to measure a document without storing it.
struct LimitedSink(usize);

impl std::io::Write for LimitedSink {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        match self.0.checked_sub(bytes.len()) {
            Some(left) => self.0 = left,
            None => return Err(std::io::Error::other("full")),
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}
