//! Tools as MCP describes them: what is listed, in which order and in which portions.
//!
//! The list is the caller's: what it may not call it does not see. It is ordered by name, so two
//! lists of the same tools are the same bytes, and a cursor is a name, so a page goes on rightly
//! also after the list has changed.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use rmcp::model::{JsonObject, MetaObject, ProtocolVersion, Tool, ToolAnnotations};
use serde_json::Value;
use toolcrib::engine::{CatalogEntry, RESULT_READ};
use toolcrib::{Caller, Definition, Effect, Engine, Risk};

use super::{catalogue, own};

/// How many callers' lists are kept. Beyond it all are made again, which costs time and no more.
const KEPT_LISTS: usize = 512;

/// A tool of the crib, or of the door, as it is listed.
#[derive(Clone)]
struct Listed {
    /// What it was made of; none for the door's own.
    entry: Option<Arc<CatalogEntry>>,
    tool: Arc<Tool>,
    /// As it is written on the later wire, once somebody has asked for it.
    text: Arc<OnceLock<Box<str>>>,
}

impl Listed {
    fn new(entry: Option<Arc<CatalogEntry>>, tool: Tool) -> Self {
        Self { entry, tool: Arc::new(tool), text: Arc::default() }
    }

    fn name(&self) -> &str {
        &self.tool.name
    }

    fn text(&self) -> &str {
        let write = || serde_json::to_string(&*self.tool).unwrap_or_default().into();
        self.text.get_or_init(write)
    }

    fn same_as(&self, other: &Self) -> bool {
        match (&self.entry, &other.entry) {
            (Some(one), Some(two)) => {
                Arc::ptr_eq(one, two) || (self.name(), &one.version) == (other.name(), &two.version)
            }
            (None, None) => self.name() == other.name(),
            _ => false,
        }
    }
}

/// One caller's list.
#[derive(Default)]
pub(super) struct List {
    version: u64,
    tools: Vec<Listed>,
}

impl List {
    /// How many there are.
    pub(super) fn len(&self) -> usize {
        self.tools.len()
    }

    /// Whether both name the same tools with the same definitions.
    pub(super) fn same_as(&self, other: &Self) -> bool {
        let mut pairs = self.tools.iter().zip(&other.tools);
        self.tools.len() == other.tools.len() && pairs.all(|(one, two)| one.same_as(two))
    }

    /// The tools behind this name, at most so many; and the name to go on behind, when there are
    /// more. With a prefix: those that have it, without it, and behind them the door's own and what
    /// reads long results, which go before others of these names.
    pub(super) fn page(
        &self,
        after: Option<&str>,
        size: usize,
        revision: Revision,
        prefix: Option<&str>,
    ) -> (Vec<Tool>, Option<String>) {
        let (page, more) = self.part(after, size, prefix);
        let mut tools: Vec<Tool> = page.iter().map(|l| revision.shown(&l.tool)).collect();
        if let Some(prefix) = prefix {
            let mut beside = if self.len() > 0 { own::tools() } else { Vec::new() };
            let reads = self.tools.iter().find(|listed| listed.name() == RESULT_READ);
            beside.extend(reads.map(|listed| revision.shown(&listed.tool)));
            for tool in &mut tools {
                tool.name = tool.name.strip_prefix(prefix).unwrap_or(&tool.name).to_owned().into();
            }
            tools.retain(|tool| beside.iter().all(|ours| ours.name != tool.name));
            if more.is_none() {
                tools.extend(beside);
            }
        }
        (tools, more)
    }

    /// The same for the later wire, written: nothing is written that was written before.
    pub(super) fn page_text(&self, after: Option<&str>, size: usize) -> (String, Option<String>) {
        let (page, more) = self.part(after, size, None);
        let mut text = String::with_capacity(page.iter().map(|l| l.text().len() + 1).sum());
        for listed in page {
            text.push_str(if text.is_empty() { "" } else { "," });
            text.push_str(listed.text());
        }
        (text, more)
    }

    fn part(
        &self,
        after: Option<&str>,
        size: usize,
        prefix: Option<&str>,
    ) -> (&[Listed], Option<String>) {
        let begin =
            after.map_or(0, |after| self.tools.partition_point(|listed| listed.name() <= after));
        let rest = match prefix {
            // They stand together: the list is in the order of the names.
            Some(prefix) => {
                let first = self.tools.partition_point(|listed| listed.name() < prefix);
                let theirs = |listed: &Listed| listed.name().starts_with(prefix);
                let end = first + self.tools[first..].partition_point(theirs);
                &self.tools[begin.clamp(first, end)..end]
            }
            None => &self.tools[begin..],
        };
        let page = &rest[..size.min(rest.len())];
        let more = (rest.len() > page.len()).then(|| page.last().map(|l| l.name().to_owned()));
        (page, more.flatten())
    }
}

/// Which of the two wires is spoken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Revision {
    /// 2025-11-25 and older.
    Legacy,
    /// 2026-07-28.
    Modern,
}

impl Revision {
    /// Of a request that names this version.
    pub(super) fn of(version: Option<&ProtocolVersion>) -> Self {
        match version {
            Some(version) if version.as_str() >= ProtocolVersion::V_2026_07_28.as_str() => {
                Self::Modern
            }
            _ => Self::Legacy,
        }
    }

    /// The older wire knows structured results only as objects.
    fn shown(self, tool: &Tool) -> Tool {
        let mut tool = tool.clone();
        let is_object =
            |schema: &Arc<JsonObject>| schema.get("type").is_some_and(|kind| kind == "object");
        if self == Self::Legacy && !tool.output_schema.as_ref().is_some_and(is_object) {
            tool.output_schema = None;
        }
        tool
    }
}

/// Who a list is for, as far as it matters to what is on it.
type Whose = (String, String, toolcrib::Role, bool);

/// The lists of recent callers. They are made again when the directory has changed; descriptions
/// of tools that have not changed are kept.
#[derive(Default)]
pub(super) struct Lists {
    kept: Mutex<HashMap<Whose, Arc<List>>>,
}

impl Lists {
    /// The list of who searches: the same for everybody.
    pub(super) fn of_catalogue(&self) -> Arc<List> {
        let listed = |tool: Tool| Listed::new(None, tool);
        let tools = own::tools().into_iter().chain(catalogue::tools()).map(listed);
        Arc::new(List { version: 0, tools: tools.collect() })
    }

    /// The caller's list, as the directory is now.
    pub(super) fn of(&self, engine: &Engine, caller: &Caller) -> Arc<List> {
        let local = caller.trust == toolcrib::caller::Trust::Local;
        let whose = (caller.project.clone(), caller.agent.clone(), caller.role, local);
        // Asked before the tools are: a change between the two makes the list again next time.
        let version = engine.directory_version();
        let before = self.kept.lock().get(&whose).cloned();
        if let Some(list) = before.as_ref().filter(|list| list.version == version) {
            return list.clone();
        }
        let list = Arc::new(made(engine, caller, version, before.as_deref()));
        let mut kept = self.kept.lock();
        if kept.len() >= KEPT_LISTS && !kept.contains_key(&whose) {
            kept.clear();
        }
        kept.insert(whose, list.clone());
        list
    }
}

fn made(engine: &Engine, caller: &Caller, version: u64, before: Option<&List>) -> List {
    if !caller.may_invoke() {
        return List { version, tools: Vec::new() };
    }
    let known = before.map(|list| list.tools.as_slice()).unwrap_or_default();
    let kept = |entry: &Arc<CatalogEntry>| {
        let name = entry.definition.name.as_str();
        let place = known.binary_search_by(|listed| listed.name().cmp(name)).ok()?;
        let same = known[place].entry.as_ref().is_some_and(|known| Arc::ptr_eq(known, entry));
        same.then(|| known[place].clone())
    };
    let mut tools: Vec<Listed> = Vec::new();
    for entry in engine.tools(caller) {
        let fresh = || Some(Listed::new(Some(entry.clone()), described(&entry.definition)?));
        tools.extend(kept(&entry).or_else(fresh));
    }
    for tool in own::tools() {
        // The door's own goes before one of the crib that has taken its name.
        tools.retain(|listed| listed.name() != tool.name);
        let place = tools.partition_point(|listed| listed.name() < tool.name.as_ref());
        tools.insert(place, Listed::new(None, tool));
    }
    List { version, tools }
}

/// A definition as MCP writes it. None where its arguments cannot be an object: MCP has no way to
/// call it.
pub(super) fn described(definition: &Definition) -> Option<Tool> {
    let Value::Object(mut input) = definition.input_schema.value() else { return None };
    match input.get("type") {
        None => drop(input.insert("type".to_owned(), "object".into())),
        Some(kind) if kind == "object" => {}
        Some(_) => return None,
    }
    let mut tool =
        Tool::new(definition.name.clone(), definition.description.clone(), Arc::new(input))
            .with_title(title(definition))
            .with_annotations(annotations(definition.effect, definition.risk))
            .with_meta(facts(definition));
    if let Some(Value::Object(output)) = definition.output_schema.as_ref().map(|s| s.value()) {
        tool = tool.with_raw_output_schema(Arc::new(output));
    }
    Some(tool)
}

/// What its owner called it, or its name in words.
fn title(definition: &Definition) -> String {
    let metadata = definition.metadata.as_ref().map(|metadata| metadata.value());
    let given = metadata.as_ref().and_then(|metadata| metadata.get("title")?.as_str());
    if let Some(title) = given.filter(|title| !title.trim().is_empty()) {
        return title.to_owned();
    }
    let words: Vec<&str> =
        definition.name.split(['.', '_', '-', '/']).filter(|word| !word.is_empty()).collect();
    let text = words.join(" ");
    let mut letters = text.chars();
    letters.next().map_or_else(String::new, |first| first.to_uppercase().chain(letters).collect())
}

/// Hints for the client. They say what the crib knows: nobody has to believe them.
fn annotations(effect: Effect, risk: Risk) -> ToolAnnotations {
    let destructive = match effect {
        Effect::Read => false,
        Effect::Idempotent => risk >= Risk::High,
        Effect::Irreversible => risk > Risk::Low,
    };
    ToolAnnotations::new()
        .read_only(effect == Effect::Read)
        .destructive(destructive)
        .idempotent(effect != Effect::Irreversible)
}

/// What is suspicious about the words of a tool, where something is.
pub(super) fn flags(definition: &Definition) -> Option<Value> {
    let metadata = definition.metadata.as_ref()?;
    // Most have none: then nothing is read.
    let flagged = metadata.text().contains("\"flags\"");
    flagged.then(|| metadata.value().get("flags").cloned()).flatten()
}

/// What MCP has no words for.
fn facts(definition: &Definition) -> MetaObject {
    let mut facts = JsonObject::new();
    facts.insert("toolcrib/effect".to_owned(), definition.effect.as_str().into());
    facts.insert("toolcrib/risk".to_owned(), definition.risk.as_str().into());
    if let Some(flags) = flags(definition) {
        facts.insert("toolcrib/flags".to_owned(), flags);
    }
    if definition.background {
        facts.insert("toolcrib/async".to_owned(), true.into());
    }
    MetaObject(facts)
}

const AFTER: &str = "after:";

/// A cursor that goes on behind this name.
pub(super) fn cursor(name: &str) -> String {
    format!("{AFTER}{name}")
}

/// The name in a cursor, if it is one of ours.
pub(super) fn name_in(cursor: &str) -> Option<&str> {
    cursor.strip_prefix(AFTER).filter(|name| toolcrib::tool::check_name(name).is_ok())
}
