//! Reads a schema document as a graph of subschemas and the evaluation edges between them.
//!
//! This module refuses only references that lead nowhere or outside the document; `cost.rs` judges
//! the graph itself.
//!
//! References are resolved by the same resolver that the compiler uses, and a target counts as
//! inside only if it is, by address, a value of this document.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use jsonschema::{Draft, Registry, Uri};
use serde_json::{Map, Value};

use super::{Doc, MAX_ANCHORS, MAX_SUBSCHEMAS, SchemaError, address, dialect, fault};

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Slot<'a> {
    Property(&'a str),
    /// A pattern counts as a separate name: two different patterns rarely match the same name.
    Pattern(&'a str),
    Names,
    Index(usize),
    /// Members that no other selector of the same subschema covers.
    Rest,
    /// All members, covered or not (`contains`).
    Every,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Stay {
    pub(super) to: usize,
    /// Group and option: of the edges of one group, only those of one option apply to any given
    /// instance.
    pub(super) choice: Option<(usize, usize)>,
    /// True if the edge applies whenever its parent does (`$ref`, `allOf`), so that it can fix a
    /// union's tag.
    certain: bool,
}

/// One subschema.
pub(super) struct Site<'a> {
    pub(super) index: usize,
    base: Arc<Uri<String>>,
    pub(super) stay: Vec<Stay>,
    pub(super) object: Vec<(Slot<'a>, usize)>,
    pub(super) array: Vec<(Slot<'a>, usize)>,
    /// Index ranges of the in-place edges that hold the branches of one `anyOf` or `oneOf`.
    unions: Vec<(usize, usize)>,
}

pub(super) struct Graph<'a, 'r> {
    pub(super) doc: Doc<'a>,
    pub(super) draft: Draft,
    registry: &'r Registry<'r>,
    pub(super) sites: Vec<Site<'a>>,
    /// Values by the name of their `$dynamicAnchor`.
    anchors: HashMap<&'a str, Vec<usize>>,
    /// Subschema by the index of its value in the document.
    at: HashMap<usize, usize>,
}

impl<'a, 'r> Graph<'a, 'r> {
    pub(super) fn new(
        doc: Doc<'a>,
        draft: Draft,
        registry: &'r Registry<'r>,
        base: Arc<Uri<String>>,
    ) -> Result<Self, SchemaError> {
        let mut anchors: HashMap<&str, Vec<usize>> = HashMap::new();
        for (index, (value, _)) in doc.values.iter().enumerate() {
            if let Some(name) = value.get("$dynamicAnchor").and_then(Value::as_str) {
                anchors.entry(name).or_default().push(index);
            }
        }
        let (sites, at) = (Vec::new(), HashMap::new());
        let mut graph = Graph { doc, draft, registry, sites, anchors, at };
        graph.grow(base)?;
        graph.split_unions();
        Ok(graph)
    }

    pub(super) fn value(&self, site: &Site<'a>) -> &'a Value {
        self.doc.values[site.index].0
    }

    /// Finds every subschema, first below the root and then at the targets of references, which may
    /// lie under a keyword that this file does not know (`#/components/schemas/X`).
    fn grow(&mut self, base: Arc<Uri<String>>) -> Result<(), SchemaError> {
        self.site(0, &base)?;
        let mut next = 0;
        while next < self.sites.len() {
            if let (Value::Object(map), _) = self.doc.values[self.sites[next].index] {
                self.expand(next, map)?;
            }
            next += 1;
        }
        Ok(())
    }

    /// Returns the subschema of the value at `index`, creating it if it is new.
    fn site(&mut self, index: usize, parent: &Arc<Uri<String>>) -> Result<usize, SchemaError> {
        if let Some(&known) = self.at.get(&index) {
            return Ok(known);
        }
        if self.sites.len() >= MAX_SUBSCHEMAS {
            let reason = format!("the schema has more than {MAX_SUBSCHEMAS} subschemas");
            return Err(fault(self.doc.pointer(index), reason));
        }
        let value = self.doc.values[index].0;
        if value.get("$schema").is_some() && dialect(value).ok() != Some(self.draft) {
            let pointer = self.doc.pointer(index) + "/$schema";
            return Err(fault(pointer, "a subschema must be in the dialect of the whole schema"));
        }
        let resolver = self.registry.resolver(parent.as_ref().clone());
        // A reference by identifier already has the base URI that the target's own `$id` defines.
        let arrived = resolver.lookup("").is_ok_and(|found| std::ptr::eq(found.contents(), value));
        let base = if arrived {
            Arc::clone(parent)
        } else {
            let resource = self.draft.create_resource_ref(value);
            let inner = resolver.in_subresource(resource).map_err(|e| {
                let pointer = self.doc.pointer(index) + "/$id";
                fault(pointer, format!("not a usable identifier: {e}"))
            })?;
            inner.base_uri()
        };
        let site = Site {
            index,
            base,
            stay: Vec::new(),
            object: Vec::new(),
            array: Vec::new(),
            unions: Vec::new(),
        };
        self.sites.push(site);
        self.at.insert(index, self.sites.len() - 1);
        Ok(self.sites.len() - 1)
    }

    /// Returns the subschema of a value in a subschema position, or `None` if it is not a schema;
    /// the meta-schema reports that with a better message.
    fn child(&mut self, of: usize, value: &Value) -> Result<Option<usize>, SchemaError> {
        let index = self.doc.by_address.get(&address(value)).copied();
        let base = Arc::clone(&self.sites[of].base);
        match index {
            Some(index) if value.is_object() || value.is_boolean() => {
                self.site(index, &base).map(Some)
            }
            _ => Ok(None),
        }
    }

    fn expand(&mut self, me: usize, map: &'a Map<String, Value>) -> Result<(), SchemaError> {
        for (keyword, value) in map {
            match value {
                Value::Array(list) => {
                    let from = self.sites[me].stay.len();
                    for (i, item) in list.iter().enumerate() {
                        match keyword.as_str() {
                            "allOf" | "anyOf" | "oneOf" => {
                                self.stay(me, item, None, keyword == "allOf")?;
                            }
                            "items" | "prefixItems" => self.step(me, Slot::Index(i), item)?,
                            _ => {}
                        }
                    }
                    if keyword == "anyOf" || keyword == "oneOf" {
                        let to = self.sites[me].stay.len();
                        self.sites[me].unions.push((from, to));
                    }
                }
                Value::Object(members) => self.expand_members(me, keyword, value, members)?,
                Value::Bool(_) => self.expand_one(me, keyword, value)?,
                Value::String(target) => self.expand_reference(me, keyword, target)?,
                _ => {}
            }
        }
        // Draft-07 ignores the siblings of `$ref`. They remain valid targets of references, but
        // evaluation does not pass through here to them.
        if let (Draft::Draft7, Some(Value::String(target))) = (self.draft, map.get("$ref")) {
            let (to, _) = self.resolve(me, "$ref", target)?;
            let to = self.at.get(&to).copied();
            let site = &mut self.sites[me];
            site.stay.retain(|edge| edge.certain && Some(edge.to) == to);
            site.stay.truncate(1);
            (site.object, site.array, site.unions) = (Vec::new(), Vec::new(), Vec::new());
        }
        Ok(())
    }

    fn expand_members(
        &mut self,
        me: usize,
        keyword: &'a str,
        value: &'a Value,
        members: &'a Map<String, Value>,
    ) -> Result<(), SchemaError> {
        for (name, member) in members {
            match keyword {
                "properties" => self.step(me, Slot::Property(name), member)?,
                "patternProperties" => self.step(me, Slot::Pattern(name), member)?,
                "dependentSchemas" | "dependencies" => self.stay(me, member, None, false)?,
                "$defs" | "definitions" => drop(self.child(me, member)?),
                _ => return self.expand_one(me, keyword, value),
            }
        }
        // An empty object is a schema too, but an empty map of schemas contains none.
        if members.is_empty() { self.expand_one(me, keyword, value) } else { Ok(()) }
    }

    fn expand_one(&mut self, me: usize, keyword: &str, v: &'a Value) -> Result<(), SchemaError> {
        match keyword {
            "not" | "if" => self.stay(me, v, None, false),
            // Only one of the two ever applies, hence one group with two options.
            "then" => self.stay(me, v, Some((1, 0)), false),
            "else" => self.stay(me, v, Some((1, 1)), false),
            "additionalProperties" | "unevaluatedProperties" => self.step(me, Slot::Rest, v),
            "propertyNames" => self.step(me, Slot::Names, v),
            "items" | "additionalItems" | "unevaluatedItems" => self.step_item(me, Slot::Rest, v),
            "contains" => self.step_item(me, Slot::Every, v),
            "contentSchema" => self.child(me, v).map(drop),
            _ => Ok(()),
        }
    }

    fn stay(
        &mut self,
        me: usize,
        value: &Value,
        choice: Option<(usize, usize)>,
        certain: bool,
    ) -> Result<(), SchemaError> {
        if let Some(to) = self.child(me, value)? {
            self.sites[me].stay.push(Stay { to, choice, certain });
        }
        Ok(())
    }

    fn step(&mut self, me: usize, slot: Slot<'a>, value: &Value) -> Result<(), SchemaError> {
        if matches!(slot, Slot::Index(_)) {
            return self.step_item(me, slot, value);
        }
        if let Some(to) = self.child(me, value)? {
            self.sites[me].object.push((slot, to));
        }
        Ok(())
    }

    fn step_item(&mut self, me: usize, slot: Slot<'a>, value: &Value) -> Result<(), SchemaError> {
        if let Some(to) = self.child(me, value)? {
            self.sites[me].array.push((slot, to));
        }
        Ok(())
    }

    fn expand_reference(&mut self, me: usize, key: &str, to: &str) -> Result<(), SchemaError> {
        if !matches!(key, "$ref" | "$dynamicRef" | "$recursiveRef") {
            return Ok(());
        }
        let (index, base) = self.resolve(me, key, to)?;
        let target = self.site(index, &base)?;
        if key == "$ref" {
            self.sites[me].stay.push(Stay { to: target, choice: None, certain: true });
        }
        if key != "$dynamicRef" {
            return Ok(());
        }
        // The evaluation path decides which of the anchors with the same name applies, so all of
        // them are options of one choice.
        let name = to.rsplit_once('#').map_or("", |(_, name)| name);
        let mut options = self.anchors.get(name).cloned().unwrap_or_default();
        if !options.contains(&index) {
            options.push(index);
        }
        if options.len() > MAX_ANCHORS {
            let pointer = self.doc.pointer(self.sites[me].index) + "/$dynamicRef";
            let reason = format!("more than {MAX_ANCHORS} subschemas have the dynamic anchor");
            return Err(fault(pointer, reason));
        }
        for (option, index) in options.into_iter().enumerate() {
            let to = self.site(index, &base)?;
            self.sites[me].stay.push(Stay { to, choice: Some((0, option)), certain: false });
        }
        Ok(())
    }

    /// Resolves a reference with the same resolver that the compiler uses.
    fn resolve(
        &self,
        me: usize,
        key: &str,
        reference: &str,
    ) -> Result<(usize, Arc<Uri<String>>), SchemaError> {
        let site = &self.sites[me];
        let resolver = self.registry.resolver(site.base.as_ref().clone());
        let inside = |to: &str| {
            let found = resolver.lookup(to).ok()?;
            let index = self.doc.by_address.get(&address(found.contents())).copied()?;
            Some((index, found.resolver().base_uri()))
        };
        inside(reference).ok_or_else(|| {
            let document = reference.split('#').next().unwrap_or_default();
            let reason = if document.is_empty() || inside(document).is_some() {
                format!("{reference:?} leads to nothing in this schema")
            } else {
                format!("{reference:?} refers outside itself; a schema must be self-contained")
            };
            fault(format!("{}/{key}", self.doc.pointer(site.index)), reason)
        })
    }

    /// Marks the branches of unions with a tag (`kind: {const: "a"}`) as options of one choice:
    /// recursion through such a union follows one branch per value.
    fn split_unions(&mut self) {
        for me in 0..self.sites.len() {
            for (group, (from, to)) in self.sites[me].unions.clone().into_iter().enumerate() {
                let mut pins = Vec::new();
                for edge in &self.sites[me].stay[from..to] {
                    let mut found = BTreeMap::new();
                    self.pins(edge.to, &mut 64, &mut found);
                    pins.push(found);
                }
                let mut count: BTreeMap<&str, usize> = BTreeMap::new();
                for key in pins.iter().flat_map(BTreeMap::keys) {
                    *count.entry(key).or_default() += 1;
                }
                let Some((&tag, _)) = count.iter().max_by_key(|(_, n)| **n) else {
                    continue;
                };
                let mut options: BTreeMap<&str, usize> = BTreeMap::new();
                for (edge, found) in self.sites[me].stay[from..to].iter_mut().zip(&pins) {
                    let Some(value) = found.get(tag) else {
                        continue;
                    };
                    let next = options.len();
                    edge.choice = Some((group + 2, *options.entry(value).or_insert(next)));
                }
            }
        }
    }

    /// Collects the properties that a subschema fixes to one string.
    fn pins(&self, at: usize, budget: &mut u32, found: &mut BTreeMap<&'a str, &'a str>) {
        *budget = budget.saturating_sub(1);
        let (value, _) = self.doc.values[self.sites[at].index];
        for (name, member) in
            value.get("properties").and_then(Value::as_object).into_iter().flatten()
        {
            let single = member.get("enum").and_then(Value::as_array).filter(|e| e.len() == 1);
            let fixed = member.get("const").or_else(|| single.and_then(|e| e.first()));
            if let Some(Value::String(fixed)) = fixed {
                found.insert(name, fixed);
            }
        }
        for edge in self.sites[at].stay.iter().filter(|edge| edge.certain) {
            if *budget > 0 {
                self.pins(edge.to, budget, found);
            }
        }
    }
}
