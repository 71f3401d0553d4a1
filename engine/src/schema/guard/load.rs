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

use super::graph::{Graph, Site, Slot};
use super::{MAX_CHAIN, MAX_PATHS, Passed, SchemaError, fault};
use crate::schema::pattern;

/// Maximum number of steps of this analysis, so that the guard itself cannot be abused.
const MAX_WORK: usize = 1_000_000;

/// The load that evaluating one subschema puts on one member of the instance.
#[derive(Debug, Clone, Copy, Default)]
struct Load {
    /// Number of evaluations that lead back into the same component, that is, recurse.
    back: u64,
    /// Number of other evaluations at the busiest value further down.
    on: u64,
}

impl Load {
    fn add(self, o: Load) -> Load {
        Load { back: self.back.saturating_add(o.back), on: self.on.saturating_add(o.on) }
    }

    fn max(self, o: Load) -> Load {
        Load { back: self.back.max(o.back), on: self.on.max(o.on) }
    }
}

/// The load on each member: the named ones, and any other.
#[derive(Debug, Clone, Default)]
struct Loads<'a> {
    named: BTreeMap<Slot<'a>, Load>,
    rest: Load,
}

impl<'a> Loads<'a> {
    fn merge(&mut self, other: &Loads<'a>, how: fn(Load, Load) -> Load) {
        if other.rest.back > 0 || other.rest.on > 0 {
            for (slot, mine) in &mut self.named {
                if !other.named.contains_key(slot) {
                    *mine = how(*mine, other.rest);
                }
            }
        }
        for (slot, theirs) in &other.named {
            let mine = self.named.get(slot).copied().unwrap_or(self.rest);
            self.named.insert(*slot, how(mine, *theirs));
        }
        self.rest = how(self.rest, other.rest);
    }

    fn heaviest(&self) -> Load {
        self.named.values().copied().fold(self.rest, Load::max)
    }
}

/// The measured cost of one subschema.
#[derive(Debug, Clone, Default)]
struct Measured<'a> {
    /// Evaluations on the value itself.
    paths: u64,
    object: Loads<'a>,
    array: Loads<'a>,
}

impl<'a> Measured<'a> {
    fn merge(&mut self, other: &Measured<'a>, how: fn(Load, Load) -> Load) {
        self.object.merge(&other.object, how);
        self.array.merge(&other.array, how);
    }
}

pub(super) fn measure(graph: &Graph) -> Result<Passed, SchemaError> {
    let chains = graph.chains()?;
    let component = graph.components();
    let mut order: Vec<usize> = (0..graph.sites.len()).collect();
    order.sort_by_key(|&site| (component[site], chains[site]));
    let mut measuring = Measuring {
        graph,
        busiest: vec![0; graph.sites.len()],
        done: vec![Measured::default(); graph.sites.len()],
        component,
        work: 0,
    };
    for &site in &order {
        measuring.site(site)?;
    }
    let schemas = || graph.sites.iter().map(|site| graph.value(site));
    let matched = schemas().filter_map(|schema| schema.get("pattern").and_then(Value::as_str));
    let heaviest = matched.map(pattern::weight).max().unwrap_or(0);
    let names = graph.sites.iter().flat_map(|site| &site.object);
    let names = names.filter(|(slot, _)| *slot == Slot::Names);
    let per_name = names.map(|(_, to)| measuring.done[*to].paths).max().unwrap_or(0);
    // Finding the patterns that `propertyNames` reaches is not worth the effort; assume the
    // heaviest.
    let through_names = if per_name > 0 { heaviest } else { 0 };
    Ok(Passed {
        draft: graph.draft,
        chain: chains.iter().copied().max().unwrap_or(1),
        per_name,
        name_weight: schemas().map(pattern::name_weight).max().unwrap_or(0) + through_names,
        patterns: schemas().map(patterns).sum(),
    })
}

fn patterns(schema: &Value) -> usize {
    let named = schema.get("patternProperties").and_then(Value::as_object);
    usize::from(schema.get("pattern").is_some()) + named.map_or(0, serde_json::Map::len)
}

struct Measuring<'a, 'g, 'r> {
    graph: &'g Graph<'a, 'r>,
    component: Vec<usize>,
    /// By component: evaluations at the busiest single value per evaluation of a member.
    busiest: Vec<u64>,
    done: Vec<Measured<'a>>,
    work: usize,
}

impl<'a> Measuring<'a, '_, '_> {
    /// Measures one subschema. Everything that `me` leads to has been measured, except recursive
    /// edges.
    fn site(&mut self, me: usize) -> Result<(), SchemaError> {
        let graph = self.graph;
        let site = &graph.sites[me];
        let value = graph.value(site);
        let mut total = self.own(me, site);
        let mut choices: BTreeMap<usize, BTreeMap<usize, Measured>> = BTreeMap::new();
        for edge in &site.stay {
            let child = self.seen_from(me, edge.to);
            total.paths = total.paths.saturating_add(child.paths);
            match edge.choice {
                None => total.merge(&child, Load::add),
                Some((group, option)) => {
                    let options = choices.entry(group).or_default();
                    options.entry(option).or_default().merge(&child, Load::add);
                }
            }
        }
        for options in choices.values() {
            let mut heaviest = Measured::default();
            options.values().for_each(|option| heaviest.merge(option, Load::max));
            total.merge(&heaviest, Load::add);
        }
        // Draft-07 ignores the siblings of `$ref`, so they exclude no type there.
        let alone = graph.draft == jsonschema::Draft::Draft7 && value.get("$ref").is_some();
        if !alone && !admits(value, "object", Value::is_object) {
            total.object = Loads::default();
        }
        if !alone && !admits(value, "array", Value::is_array) {
            total.array = Loads::default();
        }
        self.work += total.object.named.len() + total.array.named.len();
        let load = total.object.heaviest().max(total.array.heaviest());
        let here = |reason: String| Err(fault(graph.doc.pointer(site.index), reason));
        if load.back > 1 {
            return here(
                "the schema recurses more than once into the same value, so that the work \
                 doubles with every level of the value; recurse once, or tell the branches apart \
                 by a property with a `const`"
                    .to_string(),
            );
        }
        if total.paths.max(load.on) > MAX_PATHS {
            return here(format!("one value could be evaluated along more than {MAX_PATHS} paths"));
        }
        if self.work > MAX_WORK {
            return here("the schema is too tangled to be analysed".to_string());
        }
        let busiest = &mut self.busiest[self.component[me]];
        *busiest = (*busiest).max(total.paths).max(load.on);
        self.done[me] = total;
        Ok(())
    }

    /// Returns the cost of the subschema's own edges into members.
    fn own(&self, me: usize, site: &Site<'a>) -> Measured<'a> {
        let load = |to: usize| match self.component[to] == self.component[me] {
            true => Load { back: 1, on: 0 },
            false => Load { back: 0, on: self.busiest[self.component[to]] },
        };
        let gather = |steps: &[(Slot<'a>, usize)]| {
            let mut loads = Loads::default();
            for (slot, to) in steps {
                match slot {
                    Slot::Rest | Slot::Every => loads.rest = loads.rest.add(load(*to)),
                    named => drop(loads.named.insert(*named, load(*to))),
                }
            }
            for (_, to) in steps.iter().filter(|(slot, _)| *slot == Slot::Every) {
                for named in loads.named.values_mut() {
                    *named = named.add(load(*to));
                }
            }
            loads
        };
        Measured { paths: 1, object: gather(&site.object), array: gather(&site.array) }
    }

    /// Returns a child's cost from its parent's perspective: recursion within the child's component
    /// is not recursion within the parent's, unless both are the same component.
    fn seen_from(&mut self, me: usize, child: usize) -> Measured<'a> {
        let mut seen = self.done[child].clone();
        self.work += seen.object.named.len() + seen.array.named.len();
        if self.component[me] != self.component[child] {
            let around = self.busiest[self.component[child]];
            let settle = |load: &mut Load| {
                load.on = load.on.saturating_add(load.back.saturating_mul(around));
                load.back = 0;
            };
            for loads in [&mut seen.object, &mut seen.array] {
                loads.named.values_mut().for_each(settle);
                settle(&mut loads.rest);
            }
        }
        seen
    }
}

/// Returns whether a value of this type can pass `type`, `const` and `enum`. If a subschema
/// excludes a type, nothing below it matters for values of that type.
fn admits(schema: &Value, name: &str, is: fn(&Value) -> bool) -> bool {
    let by_type = match schema.get("type") {
        Some(Value::String(only)) => only == name,
        Some(Value::Array(several)) => several.iter().any(|one| one == name),
        _ => true,
    };
    let by_const = schema.get("const").is_none_or(is);
    let by_enum = schema.get("enum").and_then(Value::as_array).is_none_or(|e| e.iter().any(is));
    by_type && by_const && by_enum
}

impl<'a> Graph<'a, '_> {
    /// Returns the longest chain of in-place edges below each subschema; refuses loops.
    fn chains(&self) -> Result<Vec<u32>, SchemaError> {
        let mut known = vec![None; self.sites.len()];
        for site in 0..self.sites.len() {
            self.chain(site, &mut Vec::new(), &mut known)?;
        }
        Ok(known.into_iter().map(Option::unwrap_or_default).collect())
    }

    fn chain(
        &self,
        at: usize,
        open: &mut Vec<usize>,
        known: &mut Vec<Option<u32>>,
    ) -> Result<u32, SchemaError> {
        if let Some(length) = known[at] {
            return Ok(length);
        }
        let here = |reason: String| Err(fault(self.doc.pointer(self.sites[at].index), reason));
        if open.contains(&at) {
            return here("the schema refers back to itself without ever descending".to_string());
        }
        let too_long =
            || here(format!("more than {MAX_CHAIN} subschemas apply to one value in a chain"));
        if open.len() >= MAX_CHAIN as usize {
            return too_long();
        }
        open.push(at);
        let mut longest = 0;
        for edge in &self.sites[at].stay {
            longest = longest.max(self.chain(edge.to, open, known)?);
        }
        open.pop();
        if longest >= MAX_CHAIN {
            return too_long();
        }
        known[at] = Some(longest + 1);
        Ok(longest + 1)
    }

    /// Returns the strongly connected components, numbered so that edges lead to smaller or equal
    /// numbers.
    fn components(&self) -> Vec<usize> {
        let next = |site: &Site| -> Vec<usize> {
            let steps = site.object.iter().chain(&site.array).map(|(_, to)| *to);
            site.stay.iter().map(|edge| edge.to).chain(steps).collect()
        };
        let n = self.sites.len();
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
                        next(&self.sites[at]).into_iter()
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
