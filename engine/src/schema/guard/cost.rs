//! Bounds the work that a schema can cause, from its graph alone.
//!
//! The analysis never sees an instance. For ordinary schemas the bound is an upper estimate; the
//! cases that it underestimates (two patterns that match one name, a union whose tag is missing)
//! are stopped at run time by the step budget of `meter.rs`.
//!
//! Work explodes either in place (one value, many paths: counted) or by recursion (a value's member
//! is evaluated twice for each evaluation of the value: refused). The components of the graph are
//! therefore measured from the leaves up, each subschema once.

use std::collections::BTreeMap;

use serde_json::Value;

use super::graph::{MemberSelector, SchemaGraph, Subschema};
use super::{MAX_CHAIN, MAX_PATHS, SchemaError, SchemaProfile, schema_error};
use crate::schema::pattern_weight::{name_weight, pattern_weight};

/// Maximum number of steps of this analysis, so that the guard itself cannot be abused.
const MAX_WORK: usize = 1_000_000;

/// The load that evaluating one subschema puts on one member of the instance.
#[derive(Debug, Clone, Copy, Default)]
struct MemberLoad {
    /// Number of evaluations that lead back into the same component, that is, recurse.
    recursive: u64,
    /// Number of other evaluations at the busiest value further down.
    downstream: u64,
}

impl MemberLoad {
    fn add(self, o: MemberLoad) -> MemberLoad {
        MemberLoad {
            recursive: self.recursive.saturating_add(o.recursive),
            downstream: self.downstream.saturating_add(o.downstream),
        }
    }

    fn max(self, o: MemberLoad) -> MemberLoad {
        MemberLoad {
            recursive: self.recursive.max(o.recursive),
            downstream: self.downstream.max(o.downstream),
        }
    }
}

/// The load on each member: the named ones, and any other.
#[derive(Debug, Clone, Default)]
struct MemberLoads<'a> {
    by_selector: BTreeMap<MemberSelector<'a>, MemberLoad>,
    rest: MemberLoad,
}

impl<'a> MemberLoads<'a> {
    fn merge(&mut self, other: &MemberLoads<'a>, how: fn(MemberLoad, MemberLoad) -> MemberLoad) {
        if other.rest.recursive > 0 || other.rest.downstream > 0 {
            for (slot, current) in &mut self.by_selector {
                if !other.by_selector.contains_key(slot) {
                    *current = how(*current, other.rest);
                }
            }
        }
        for (slot, other_load) in &other.by_selector {
            let current = self.by_selector.get(slot).copied().unwrap_or(self.rest);
            self.by_selector.insert(*slot, how(current, *other_load));
        }
        self.rest = how(self.rest, other.rest);
    }

    fn heaviest(&self) -> MemberLoad {
        self.by_selector.values().copied().fold(self.rest, MemberLoad::max)
    }
}

/// The measured cost of one subschema.
#[derive(Debug, Clone, Default)]
struct SubschemaCost<'a> {
    /// Evaluations on the value itself.
    paths: u64,
    object: MemberLoads<'a>,
    array: MemberLoads<'a>,
}

impl<'a> SubschemaCost<'a> {
    fn merge(&mut self, other: &SubschemaCost<'a>, how: fn(MemberLoad, MemberLoad) -> MemberLoad) {
        self.object.merge(&other.object, how);
        self.array.merge(&other.array, how);
    }
}

/// Measures a schema. Also returns the number of steps that the analysis took.
pub(super) fn measure_profile(graph: &SchemaGraph) -> Result<(SchemaProfile, usize), SchemaError> {
    let chains = graph.chain_lengths()?;
    let component = graph.components();
    let mut order: Vec<usize> = (0..graph.subschemas.len()).collect();
    order.sort_by_key(|&site| (component[site], chains[site]));
    let mut measuring = CostAnalysis {
        graph,
        busiest: vec![0; graph.subschemas.len()],
        done: vec![SubschemaCost::default(); graph.subschemas.len()],
        component,
        work: 0,
    };
    for &site in &order {
        measuring.measure_subschema(site)?;
    }
    let schemas = || graph.subschemas.iter().map(|site| graph.value(site));
    let matched = schemas().filter_map(|schema| schema.get("pattern").and_then(Value::as_str));
    let heaviest = matched.map(pattern_weight).max().unwrap_or(0);
    let names = graph.subschemas.iter().flat_map(|site| &site.property_edges);
    let names = names.filter(|(slot, _)| *slot == MemberSelector::PropertyNames);
    let per_name = names.map(|(_, to)| measuring.done[*to].paths).max().unwrap_or(0);
    // Finding the patterns that `propertyNames` reaches is not worth the effort; assume the
    // heaviest.
    let through_names = if per_name > 0 { heaviest } else { 0 };
    let profile = SchemaProfile {
        draft: graph.draft,
        chain: chains.iter().copied().max().unwrap_or(1),
        per_name,
        name_weight: schemas().map(name_weight).max().unwrap_or(0) + through_names,
        subschemas: graph.subschemas.len(),
    };
    Ok((profile, measuring.work))
}

pub(super) fn count_patterns(schema: &Value) -> usize {
    let patterns = schema.get("patternProperties").and_then(Value::as_object);
    usize::from(schema.get("pattern").is_some()) + patterns.map_or(0, serde_json::Map::len)
}

struct CostAnalysis<'a, 'g, 'r> {
    graph: &'g SchemaGraph<'a, 'r>,
    component: Vec<usize>,
    /// By component: evaluations at the busiest single value per evaluation of a member.
    busiest: Vec<u64>,
    done: Vec<SubschemaCost<'a>>,
    work: usize,
}

impl<'a> CostAnalysis<'a, '_, '_> {
    /// Measures one subschema. Everything that `me` leads to has been measured, except recursive
    /// edges.
    fn measure_subschema(&mut self, me: usize) -> Result<(), SchemaError> {
        let graph = self.graph;
        let site = &graph.subschemas[me];
        let value = graph.value(site);
        let mut total = self.own_cost(me, site);
        let mut choices: BTreeMap<usize, BTreeMap<usize, SubschemaCost>> = BTreeMap::new();
        for edge in &site.in_place_edges {
            let child = self.cost_seen_from(me, edge.to);
            total.paths = total.paths.saturating_add(child.paths);
            match edge.choice {
                None => total.merge(&child, MemberLoad::add),
                Some((group, option)) => {
                    let options = choices.entry(group).or_default();
                    options.entry(option).or_default().merge(&child, MemberLoad::add);
                }
            }
        }
        for options in choices.values() {
            let mut heaviest = SubschemaCost::default();
            options.values().for_each(|option| heaviest.merge(option, MemberLoad::max));
            total.merge(&heaviest, MemberLoad::add);
        }
        // Draft-07 ignores the siblings of `$ref`, so they exclude no type there.
        let alone = graph.draft == jsonschema::Draft::Draft7 && value.get("$ref").is_some();
        if !alone && !admits_type(value, "object", Value::is_object) {
            total.object = MemberLoads::default();
        }
        if !alone && !admits_type(value, "array", Value::is_array) {
            total.array = MemberLoads::default();
        }
        self.work += total.object.by_selector.len() + total.array.by_selector.len();
        let load = total.object.heaviest().max(total.array.heaviest());
        let fail = |reason: String| Err(schema_error(graph.doc.pointer(site.index), reason));
        if load.recursive > 1 {
            return fail(
                "the schema recurses more than once into the same value, so that the work \
                 doubles with every level of the value; recurse once, or tell the branches apart \
                 by a property with a `const`"
                    .to_string(),
            );
        }
        if total.paths.max(load.downstream) > MAX_PATHS {
            return fail(format!("one value could be evaluated along more than {MAX_PATHS} paths"));
        }
        if self.work > MAX_WORK {
            return fail("the schema is too tangled to be analysed".to_string());
        }
        let busiest = &mut self.busiest[self.component[me]];
        *busiest = (*busiest).max(total.paths).max(load.downstream);
        self.done[me] = total;
        Ok(())
    }

    /// Returns the cost of the subschema's own edges into members.
    fn own_cost(&self, me: usize, site: &Subschema<'a>) -> SubschemaCost<'a> {
        let load = |to: usize| match self.component[to] == self.component[me] {
            true => MemberLoad { recursive: 1, downstream: 0 },
            false => MemberLoad { recursive: 0, downstream: self.busiest[self.component[to]] },
        };
        let gather = |steps: &[(MemberSelector<'a>, usize)]| {
            let mut loads = MemberLoads::default();
            for (slot, to) in steps {
                match slot {
                    MemberSelector::OtherMembers | MemberSelector::AllMembers => {
                        loads.rest = loads.rest.add(load(*to))
                    }
                    selector => drop(loads.by_selector.insert(*selector, load(*to))),
                }
            }
            for (_, to) in steps.iter().filter(|(slot, _)| *slot == MemberSelector::AllMembers) {
                for member_load in loads.by_selector.values_mut() {
                    *member_load = member_load.add(load(*to));
                }
            }
            loads
        };
        SubschemaCost {
            paths: 1,
            object: gather(&site.property_edges),
            array: gather(&site.item_edges),
        }
    }

    /// Returns a child's cost from its parent's perspective: recursion within the child's component
    /// is not recursion within the parent's, unless both are the same component.
    fn cost_seen_from(&mut self, me: usize, child: usize) -> SubschemaCost<'a> {
        let mut seen = self.done[child].clone();
        self.work += seen.object.by_selector.len() + seen.array.by_selector.len();
        if self.component[me] != self.component[child] {
            let around = self.busiest[self.component[child]];
            let settle = |load: &mut MemberLoad| {
                load.downstream =
                    load.downstream.saturating_add(load.recursive.saturating_mul(around));
                load.recursive = 0;
            };
            for loads in [&mut seen.object, &mut seen.array] {
                loads.by_selector.values_mut().for_each(settle);
                settle(&mut loads.rest);
            }
        }
        seen
    }
}

/// Returns whether a value of this type can pass `type`, `const` and `enum`. If a subschema
/// excludes a type, nothing below it matters for values of that type.
fn admits_type(schema: &Value, name: &str, is: fn(&Value) -> bool) -> bool {
    let by_type = match schema.get("type") {
        Some(Value::String(only)) => only == name,
        Some(Value::Array(several)) => several.iter().any(|item| item == name),
        _ => true,
    };
    let by_const = schema.get("const").is_none_or(is);
    let by_enum = schema.get("enum").and_then(Value::as_array).is_none_or(|e| e.iter().any(is));
    by_type && by_const && by_enum
}

impl<'a> SchemaGraph<'a, '_> {
    /// Returns the longest chain of in-place edges below each subschema; refuses loops.
    fn chain_lengths(&self) -> Result<Vec<u32>, SchemaError> {
        let mut lengths = vec![None; self.subschemas.len()];
        for site in 0..self.subschemas.len() {
            self.chain_length(site, &mut Vec::new(), &mut lengths)?;
        }
        Ok(lengths.into_iter().map(Option::unwrap_or_default).collect())
    }

    fn chain_length(
        &self,
        at: usize,
        open: &mut Vec<usize>,
        lengths: &mut Vec<Option<u32>>,
    ) -> Result<u32, SchemaError> {
        if let Some(length) = lengths[at] {
            return Ok(length);
        }
        let fail =
            |reason: String| Err(schema_error(self.doc.pointer(self.subschemas[at].index), reason));
        if open.contains(&at) {
            return fail("the schema refers back to itself without ever descending".to_string());
        }
        let too_long =
            || fail(format!("more than {MAX_CHAIN} subschemas apply to one value in a chain"));
        if open.len() >= MAX_CHAIN as usize {
            return too_long();
        }
        open.push(at);
        let mut longest = 0;
        for edge in &self.subschemas[at].in_place_edges {
            longest = longest.max(self.chain_length(edge.to, open, lengths)?);
        }
        open.pop();
        if longest >= MAX_CHAIN {
            return too_long();
        }
        lengths[at] = Some(longest + 1);
        Ok(longest + 1)
    }

    /// Returns the strongly connected components, numbered so that edges lead to smaller or equal
    /// numbers.
    fn components(&self) -> Vec<usize> {
        let next = |site: &Subschema| -> Vec<usize> {
            let steps = site.property_edges.iter().chain(&site.item_edges).map(|(_, to)| *to);
            site.in_place_edges.iter().map(|edge| edge.to).chain(steps).collect()
        };
        let n = self.subschemas.len();
        let (mut order, mut low, mut component) = (vec![0; n], vec![0; n], vec![usize::MAX; n]);
        let (mut clock, mut count, mut open) = (0, 0, Vec::new());
        for root in 0..n {
            let mut stack = if order[root] == 0 { vec![(root, None)] } else { vec![] };
            while let Some((at, edges)) = stack.pop() {
                let mut edges: std::vec::IntoIter<usize> = match edges {
                    Some(edges) => edges,
                    None => {
                        clock += 1;
                        (order[at], low[at]) = (clock, clock);
                        open.push(at);
                        next(&self.subschemas[at]).into_iter()
                    }
                };
                // A finished child propagates its low link through `low` below.
                if let Some(to) = edges.next() {
                    stack.push((at, Some(edges)));
                    if order[to] == 0 {
                        stack.push((to, None));
                    } else if component[to] == usize::MAX {
                        low[at] = low[at].min(order[to]);
                    }
                    continue;
                }
                if low[at] == order[at] {
                    while let Some(member) = open.pop() {
                        component[member] = count;
                        if member == at {
                            break;
                        }
                    }
                    count += 1;
                }
                if let Some((parent, _)) = stack.last() {
                    low[*parent] = low[*parent].min(low[at]);
                }
            }
        }
        component
    }
}
