//! Tool lists in MCP's format: their entries, order and pages.
//!
//! A list belongs to one caller and contains only tools that the caller may call. It is sorted by
//! name, so two lists of the same tools are byte-identical; a cursor is a name, so pagination
//! continues correctly after the list has changed.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use rmcp::model::{JsonObject, MetaObject, ProtocolVersion, Tool, ToolAnnotations};
use serde_json::Value;
use toolcrib::engine::{CatalogEntry, RESULT_READ};
use toolcrib::{Caller, Effect, Engine, Risk, ToolDefinition};

use super::catalogue;
use crate::mcp::builtin_tools;

/// Maximum number of cached lists. When it is exceeded, the cache is cleared and lists are rebuilt,
/// which costs time only.
const MAX_CACHED_LISTS: usize = 512;

/// One entry of a tool list: a registered tool or a built-in tool of this transport.
#[derive(Clone)]
struct ToolListEntry {
    /// The catalog entry of the tool; `None` for a built-in tool.
    entry: Option<Arc<CatalogEntry>>,
    tool: Arc<Tool>,
    /// The entry as JSON for the modern revision, serialized at the first request.
    text: Arc<OnceLock<Box<str>>>,
}

impl ToolListEntry {
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

    fn is_same_as(&self, other: &Self) -> bool {
        match (&self.entry, &other.entry) {
            (Some(one), Some(two)) => {
                Arc::ptr_eq(one, two) || (self.name(), &one.version) == (other.name(), &two.version)
            }
            (None, None) => self.name() == other.name(),
            _ => false,
        }
    }
}

/// The tool list of one caller.
#[derive(Default)]
pub(super) struct CallerToolList {
    version: u64,
    tools: Vec<ToolListEntry>,
}

impl CallerToolList {
    pub(super) fn len(&self) -> usize {
        self.tools.len()
    }

    /// Returns whether both lists name the same tools with the same definitions.
    pub(super) fn is_same_as(&self, other: &Self) -> bool {
        let mut pairs = self.tools.iter().zip(&other.tools);
        self.tools.len() == other.tools.len() && pairs.all(|(one, two)| one.is_same_as(two))
    }

    /// Returns at most `size` tools after the given name, and the name to continue after if there
    /// are more. With a prefix, returns the tools that have it, without the prefix, followed on the
    /// last page by the built-in tools and the tool that reads long results. These replace tools of
    /// the same names.
    pub(super) fn page(
        &self,
        after: Option<&str>,
        size: usize,
        revision: ProtocolRevision,
        prefix: Option<&str>,
    ) -> (Vec<Tool>, Option<String>) {
        let (page, more) = self.page_entries(after, size, prefix);
        let mut tools: Vec<Tool> = page.iter().map(|l| revision.adapt_tool(&l.tool)).collect();
        if let Some(prefix) = prefix {
            let mut beside = if self.len() > 0 { builtin_tools::tools() } else { Vec::new() };
            let reads = self.tools.iter().find(|listed| listed.name() == RESULT_READ);
            beside.extend(reads.map(|listed| revision.adapt_tool(&listed.tool)));
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

    /// Returns the same page for the modern revision, as JSON. Each entry is serialized only once.
    pub(super) fn page_text(&self, after: Option<&str>, size: usize) -> (String, Option<String>) {
        let (page, more) = self.page_entries(after, size, None);
        let mut text = String::with_capacity(page.iter().map(|l| l.text().len() + 1).sum());
        for listed in page {
            text.push_str(if text.is_empty() { "" } else { "," });
            text.push_str(listed.text());
        }
        (text, more)
    }

    fn page_entries(
        &self,
        after: Option<&str>,
        size: usize,
        prefix: Option<&str>,
    ) -> (&[ToolListEntry], Option<String>) {
        let begin =
            after.map_or(0, |after| self.tools.partition_point(|listed| listed.name() <= after));
        let rest = match prefix {
            // They are contiguous, because the list is sorted by name.
            Some(prefix) => {
                let first = self.tools.partition_point(|listed| listed.name() < prefix);
                let theirs = |listed: &ToolListEntry| listed.name().starts_with(prefix);
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

/// The protocol revision of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ProtocolRevision {
    /// 2025-11-25 and older.
    Legacy,
    /// 2026-07-28.
    Modern,
}

impl ProtocolRevision {
    /// Returns the revision for a protocol version.
    pub(super) fn of(version: Option<&ProtocolVersion>) -> Self {
        match version {
            Some(version) if version.as_str() >= ProtocolVersion::V_2026_07_28.as_str() => {
                Self::Modern
            }
            _ => Self::Legacy,
        }
    }

    /// Returns the tool as this revision can describe it: legacy revisions allow only objects as
    /// structured results.
    fn adapt_tool(self, tool: &Tool) -> Tool {
        let mut tool = tool.clone();
        let is_object =
            |schema: &Arc<JsonObject>| schema.get("type").is_some_and(|kind| kind == "object");
        if self == Self::Legacy && !tool.output_schema.as_ref().is_some_and(is_object) {
            tool.output_schema = None;
        }
        tool
    }
}

/// The properties of a caller that decide which tools are listed: project, agent, role, and whether
/// the caller is local.
type ToolListKey = (String, String, toolcrib::Role, bool);

/// The lists of recent callers. A list is rebuilt when the directory has changed; entries of
/// unchanged tools are reused.
#[derive(Default)]
pub(super) struct ToolListCache {
    cached: Mutex<HashMap<ToolListKey, Arc<CallerToolList>>>,
}

impl ToolListCache {
    /// Returns the catalogue list, which is the same for every caller.
    pub(super) fn for_catalogue(&self) -> Arc<CallerToolList> {
        let listed = |tool: Tool| ToolListEntry::new(None, tool);
        let tools = builtin_tools::tools().into_iter().chain(catalogue::tools()).map(listed);
        Arc::new(CallerToolList { version: 0, tools: tools.collect() })
    }

    /// Returns the caller's list for the present state of the directory.
    pub(super) fn for_caller(&self, engine: &Engine, caller: &Caller) -> Arc<CallerToolList> {
        let local = caller.auth_method == toolcrib::domain::caller::AuthMethod::Local;
        let whose = (caller.project.clone(), caller.agent.clone(), caller.role, local);
        // Read before the tools: if the directory changes in between, the next request rebuilds the
        // list.
        let version = engine.directory_version();
        let before = self.cached.lock().get(&whose).cloned();
        if let Some(list) = before.as_ref().filter(|list| list.version == version) {
            return list.clone();
        }
        let list = Arc::new(build_list(engine, caller, version, before.as_deref()));
        let mut kept = self.cached.lock();
        if kept.len() >= MAX_CACHED_LISTS && !kept.contains_key(&whose) {
            kept.clear();
        }
        kept.insert(whose, list.clone());
        list
    }
}

fn build_list(
    engine: &Engine,
    caller: &Caller,
    version: u64,
    before: Option<&CallerToolList>,
) -> CallerToolList {
    if !caller.may_invoke() {
        return CallerToolList { version, tools: Vec::new() };
    }
    let known = before.map(|list| list.tools.as_slice()).unwrap_or_default();
    let kept = |entry: &Arc<CatalogEntry>| {
        let name = entry.definition.name.as_str();
        let place = known.binary_search_by(|listed| listed.name().cmp(name)).ok()?;
        let same = known[place].entry.as_ref().is_some_and(|known| Arc::ptr_eq(known, entry));
        same.then(|| known[place].clone())
    };
    let mut tools: Vec<ToolListEntry> = Vec::new();
    for entry in engine.tools(caller) {
        let fresh =
            || Some(ToolListEntry::new(Some(entry.clone()), to_mcp_tool(&entry.definition)?));
        tools.extend(kept(&entry).or_else(fresh));
    }
    for tool in builtin_tools::tools() {
        // A built-in tool replaces a registered tool of the same name.
        tools.retain(|listed| listed.name() != tool.name);
        let place = tools.partition_point(|listed| listed.name() < tool.name.as_ref());
        tools.insert(place, ToolListEntry::new(None, tool));
    }
    CallerToolList { version, tools }
}

/// Returns the MCP form of a definition, or `None` if its arguments cannot be an object: MCP cannot
/// call such a tool.
pub(super) fn to_mcp_tool(definition: &ToolDefinition) -> Option<Tool> {
    let Value::Object(mut input) = definition.input_schema.to_value() else { return None };
    match input.get("type") {
        None => drop(input.insert("type".to_owned(), "object".into())),
        Some(kind) if kind == "object" => {}
        Some(_) => return None,
    }
    let mut tool =
        Tool::new(definition.name.clone(), definition.description.clone(), Arc::new(input))
            .with_title(title(definition))
            .with_annotations(annotations(definition.effect, definition.risk))
            .with_meta(tool_meta(definition));
    if let Some(Value::Object(output)) = definition.output_schema.as_ref().map(|s| s.to_value()) {
        tool = tool.with_raw_output_schema(Arc::new(output));
    }
    Some(tool)
}

/// Returns the title in the tool's metadata, or its name as words.
fn title(definition: &ToolDefinition) -> String {
    let metadata = definition.metadata.as_ref().map(|metadata| metadata.to_value());
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

/// Returns hints for the MCP client. They reflect the definition and guarantee nothing.
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

/// Returns the injection flags of a tool's description, if any.
pub(super) fn injection_flags(definition: &ToolDefinition) -> Option<Value> {
    let metadata = definition.metadata.as_ref()?;
    // Most tools have no flags; then the metadata is not parsed.
    let flagged = metadata.text().contains("\"flags\"");
    flagged.then(|| metadata.to_value().get("flags").cloned()).flatten()
}

/// Returns the properties for which MCP has no field.
fn tool_meta(definition: &ToolDefinition) -> MetaObject {
    let mut facts = JsonObject::new();
    facts.insert("toolcrib/effect".to_owned(), definition.effect.as_str().into());
    facts.insert("toolcrib/risk".to_owned(), definition.risk.as_str().into());
    if let Some(flags) = injection_flags(definition) {
        facts.insert("toolcrib/flags".to_owned(), flags);
    }
    if definition.background {
        facts.insert("toolcrib/async".to_owned(), true.into());
    }
    MetaObject(facts)
}

const CURSOR_PREFIX: &str = "after:";

/// Returns a cursor that continues after this name.
pub(super) fn cursor_after(name: &str) -> String {
    format!("{CURSOR_PREFIX}{name}")
}

/// Returns the name in a cursor, or `None` if the cursor is not one of Toolcrib's.
pub(super) fn parse_cursor(cursor: &str) -> Option<&str> {
    cursor
        .strip_prefix(CURSOR_PREFIX)
        .filter(|name| toolcrib::domain::tool::check_tool_name(name).is_ok())
}
