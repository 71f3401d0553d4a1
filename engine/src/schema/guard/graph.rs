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

use super::{
    MAX_ANCHORS, MAX_SUBSCHEMAS, SchemaDocument, SchemaError, address, detect_draft, schema_error,
};

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum MemberSelector<'a> {
    Property(&'a str),
    /// A pattern counts as a separate name: two different patterns rarely match the same name.
    Pattern(&'a str),
    PropertyNames,
    Index(usize),
    /// Members that no other selector of the same subschema covers.
    OtherMembers,
    /// All members, covered or not (`contains`).
    AllMembers,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct InPlaceEdge {
    pub(super) to: usize,
    /// Group and option: of the edges of one group, only those of one option apply to any given
    /// instance.
    pub(super) choice: Option<(usize, usize)>,
    /// True if the edge applies whenever its parent does (`$ref`, `allOf`), so that it can fix a
    /// union's tag.
    is_unconditional: bool,
}

/// One subschema.
pub(super) struct Subschema<'a> {
    pub(super) index: usize,
    base: Arc<Uri<String>>,
    pub(super) in_place_edges: Vec<InPlaceEdge>,
    pub(super) property_edges: Vec<(MemberSelector<'a>, usize)>,
    pub(super) item_edges: Vec<(MemberSelector<'a>, usize)>,
    /// Index ranges of the in-place edges that hold the branches of one `anyOf` or `oneOf`.
    unions: Vec<(usize, usize)>,
}

pub(super) struct SchemaGraph<'a, 'r> {
    pub(super) doc: SchemaDocument<'a>,
    pub(super) draft: Draft,
    registry: &'r Registry<'r>,
    pub(super) subschemas: Vec<Subschema<'a>>,
    /// Values by the name of their `$dynamicAnchor`.
    anchors: HashMap<&'a str, Vec<usize>>,
    /// Subschema by the index of its value in the document.
    by_value_index: HashMap<usize, usize>,
}

impl<'a, 'r> SchemaGraph<'a, 'r> {
    pub(super) fn new(
        doc: SchemaDocument<'a>,
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
        let mut graph =
            SchemaGraph { doc, draft, registry, subschemas: sites, anchors, by_value_index: at };
        graph.discover_subschemas(base)?;
        graph.mark_tagged_unions();
        Ok(graph)
    }

    pub(super) fn value(&self, site: &Subschema<'a>) -> &'a Value {
        self.doc.values[site.index].0
    }

    /// Finds every subschema, first below the root and then at the targets of references, which may
    /// lie under a keyword that this file does not know (`#/components/schemas/X`).
    fn discover_subschemas(&mut self, base: Arc<Uri<String>>) -> Result<(), SchemaError> {
        self.add_subschema(0, &base)?;
        let mut next = 0;
        while next < self.subschemas.len() {
            if let (Value::Object(map), _) = self.doc.values[self.subschemas[next].index] {
                self.expand(next, map)?;
            }
            next += 1;
        }
        Ok(())
    }

    /// Returns the subschema of the value at `index`, creating it if it is new.
    fn add_subschema(
        &mut self,
        index: usize,
        parent: &Arc<Uri<String>>,
    ) -> Result<usize, SchemaError> {
        if let Some(&existing) = self.by_value_index.get(&index) {
            return Ok(existing);
        }
        if self.subschemas.len() >= MAX_SUBSCHEMAS {
            let reason = format!("the schema has more than {MAX_SUBSCHEMAS} subschemas");
            return Err(schema_error(self.doc.pointer(index), reason));
        }
        let value = self.doc.values[index].0;
        if value.get("$schema").is_some() && detect_draft(value).ok() != Some(self.draft) {
            let pointer = self.doc.pointer(index) + "/$schema";
            return Err(schema_error(
                pointer,
                "a subschema must be in the dialect of the whole schema",
            ));
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
                schema_error(pointer, format!("not a usable identifier: {e}"))
            })?;
            inner.base_uri()
        };
        let site = Subschema {
            index,
            base,
            in_place_edges: Vec::new(),
            property_edges: Vec::new(),
            item_edges: Vec::new(),
            unions: Vec::new(),
        };
        self.subschemas.push(site);
        self.by_value_index.insert(index, self.subschemas.len() - 1);
        Ok(self.subschemas.len() - 1)
    }

    /// Returns the subschema of a value in a subschema position, or `None` if it is not a schema;
    /// the meta-schema reports that with a better message.
    fn child_subschema(
        &mut self,
        parent: usize,
        value: &Value,
    ) -> Result<Option<usize>, SchemaError> {
        let index = self.doc.by_address.get(&address(value)).copied();
        let base = Arc::clone(&self.subschemas[parent].base);
        match index {
            Some(index) if value.is_object() || value.is_boolean() => {
                self.add_subschema(index, &base).map(Some)
            }
            _ => Ok(None),
        }
    }

    fn expand(&mut self, me: usize, map: &'a Map<String, Value>) -> Result<(), SchemaError> {
        for (keyword, value) in map {
            match value {
                Value::Array(list) => {
                    let from = self.subschemas[me].in_place_edges.len();
                    for (i, item) in list.iter().enumerate() {
                        match keyword.as_str() {
                            "allOf" | "anyOf" | "oneOf" => {
                                self.add_in_place_edge(me, item, None, keyword == "allOf")?;
                            }
                            "items" | "prefixItems" => {
                                self.add_member_edge(me, MemberSelector::Index(i), item)?
                            }
                            _ => {}
                        }
                    }
                    if keyword == "anyOf" || keyword == "oneOf" {
                        let to = self.subschemas[me].in_place_edges.len();
                        self.subschemas[me].unions.push((from, to));
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
            let to = self.by_value_index.get(&to).copied();
            let site = &mut self.subschemas[me];
            site.in_place_edges.retain(|edge| edge.is_unconditional && Some(edge.to) == to);
            site.in_place_edges.truncate(1);
            (site.property_edges, site.item_edges, site.unions) =
                (Vec::new(), Vec::new(), Vec::new());
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
                "properties" => self.add_member_edge(me, MemberSelector::Property(name), member)?,
                "patternProperties" => {
                    self.add_member_edge(me, MemberSelector::Pattern(name), member)?
                }
                "dependentSchemas" | "dependencies" => {
                    self.add_in_place_edge(me, member, None, false)?
                }
                "$defs" | "definitions" => drop(self.child_subschema(me, member)?),
                _ => return self.expand_one(me, keyword, value),
            }
        }
        // An empty object is a schema too, but an empty map of schemas contains none.
        if members.is_empty() { self.expand_one(me, keyword, value) } else { Ok(()) }
    }

    fn expand_one(&mut self, me: usize, keyword: &str, v: &'a Value) -> Result<(), SchemaError> {
        match keyword {
            "not" | "if" => self.add_in_place_edge(me, v, None, false),
            // Only one of the two ever applies, hence one group with two options.
            "then" => self.add_in_place_edge(me, v, Some((1, 0)), false),
            "else" => self.add_in_place_edge(me, v, Some((1, 1)), false),
            "additionalProperties" | "unevaluatedProperties" => {
                self.add_member_edge(me, MemberSelector::OtherMembers, v)
            }
            "propertyNames" => self.add_member_edge(me, MemberSelector::PropertyNames, v),
            "items" | "additionalItems" | "unevaluatedItems" => {
                self.add_item_edge(me, MemberSelector::OtherMembers, v)
            }
            "contains" => self.add_item_edge(me, MemberSelector::AllMembers, v),
            "contentSchema" => self.child_subschema(me, v).map(drop),
            _ => Ok(()),
        }
    }

    fn add_in_place_edge(
        &mut self,
        me: usize,
        value: &Value,
        choice: Option<(usize, usize)>,
        certain: bool,
    ) -> Result<(), SchemaError> {
        if let Some(to) = self.child_subschema(me, value)? {
            self.subschemas[me].in_place_edges.push(InPlaceEdge {
                to,
                choice,
                is_unconditional: certain,
            });
        }
        Ok(())
    }

    fn add_member_edge(
        &mut self,
        me: usize,
        slot: MemberSelector<'a>,
        value: &Value,
    ) -> Result<(), SchemaError> {
        if matches!(slot, MemberSelector::Index(_)) {
            return self.add_item_edge(me, slot, value);
        }
        if let Some(to) = self.child_subschema(me, value)? {
            self.subschemas[me].property_edges.push((slot, to));
        }
        Ok(())
    }

    fn add_item_edge(
        &mut self,
        me: usize,
        slot: MemberSelector<'a>,
        value: &Value,
    ) -> Result<(), SchemaError> {
        if let Some(to) = self.child_subschema(me, value)? {
            self.subschemas[me].item_edges.push((slot, to));
        }
        Ok(())
    }

    fn expand_reference(&mut self, me: usize, key: &str, to: &str) -> Result<(), SchemaError> {
        if !matches!(key, "$ref" | "$dynamicRef" | "$recursiveRef") {
            return Ok(());
        }
        let (index, base) = self.resolve(me, key, to)?;
        let target = self.add_subschema(index, &base)?;
        if key == "$ref" {
            self.subschemas[me].in_place_edges.push(InPlaceEdge {
                to: target,
                choice: None,
                is_unconditional: true,
            });
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
            let pointer = self.doc.pointer(self.subschemas[me].index) + "/$dynamicRef";
            let reason = format!("more than {MAX_ANCHORS} subschemas have the dynamic anchor");
            return Err(schema_error(pointer, reason));
        }
        for (option, index) in options.into_iter().enumerate() {
            let to = self.add_subschema(index, &base)?;
            self.subschemas[me].in_place_edges.push(InPlaceEdge {
                to,
                choice: Some((0, option)),
                is_unconditional: false,
            });
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
        let site = &self.subschemas[me];
        let resolver = self.registry.resolver(site.base.as_ref().clone());
        let inside = |to: &str| {
            let found = resolver.lookup(to).ok()?;
            let index = self.doc.by_address.get(&address(found.contents())).copied()?;
            Some((index, found.resolver().base_uri()))
        };
        inside(reference).ok_or_else(|| {
            let document = reference.split('#').next().unwrap_or_default();
            let reason = if document.is_empty() || inside(document).is_some() {
                format!("{reference:?} does not resolve in this schema")
            } else {
                format!("{reference:?} refers outside itself; a schema must be self-contained")
            };
            schema_error(format!("{}/{key}", self.doc.pointer(site.index)), reason)
        })
    }

    /// Marks the branches of unions with a tag (`kind: {const: "a"}`) as options of one choice:
    /// recursion through such a union follows one branch per value.
    fn mark_tagged_unions(&mut self) {
        for me in 0..self.subschemas.len() {
            for (group, (from, to)) in self.subschemas[me].unions.clone().into_iter().enumerate() {
                let mut pins = Vec::new();
                for edge in &self.subschemas[me].in_place_edges[from..to] {
                    let mut found = BTreeMap::new();
                    self.collect_fixed_properties(edge.to, &mut 64, &mut found);
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
                for (edge, found) in
                    self.subschemas[me].in_place_edges[from..to].iter_mut().zip(&pins)
                {
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
    fn collect_fixed_properties(
        &self,
        at: usize,
        budget: &mut u32,
        found: &mut BTreeMap<&'a str, &'a str>,
    ) {
        *budget = budget.saturating_sub(1);
        let (value, _) = self.doc.values[self.subschemas[at].index];
        for (name, member) in
            value.get("properties").and_then(Value::as_object).into_iter().flatten()
        {
            let single = member.get("enum").and_then(Value::as_array).filter(|e| e.len() == 1);
            let fixed = member.get("const").or_else(|| single.and_then(|e| e.first()));
            if let Some(Value::String(fixed)) = fixed {
                found.insert(name, fixed);
            }
        }
        for edge in self.subschemas[at].in_place_edges.iter().filter(|edge| edge.is_unconditional) {
            if *budget > 0 {
                self.collect_fixed_properties(edge.to, budget, found);
            }
        }
    }
}
