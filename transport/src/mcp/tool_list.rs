//! Tool lists in MCP's format: their entries, order and pages.
//!
//! [`definition`] converts one tool, [`helper_tools`] has the tools of this transport itself, and
//! [`splice`] writes a list into a response.
//!
//! A list belongs to one caller and contains only tools that the caller may call. It is sorted by
//! Toolcrib's names, so two lists of the same tools are byte-identical; a cursor is such a name, so
//! pagination continues correctly after the list has changed. MCP clients see the names in the form
//! that they, their key or the server chose.

pub(super) mod definition;
pub(super) mod helper_tools;
pub(super) mod splice;
use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

use definition::{adapt_to_revision, to_mcp_tool};
use parking_lot::Mutex;
use rmcp::model::Tool;
use toolcrib::domain::directory::credential::ToolNameForm;
use toolcrib::registry::{
    CatalogEntry, RESULT_READ, hashed_name_for_model, name_for_model, names_for_model,
};
use toolcrib::{Caller, CallerAttributes, Engine};

use super::request::ProtocolRevision;

/// Maximum number of cached lists. When it is exceeded, the cache is cleared and lists are rebuilt,
/// which costs time only.
const MAX_CACHED_LISTS: usize = 512;

/// Returns a tool's name in the form that an MCP client sees.
pub(super) fn listed_name(name: &str, form: ToolNameForm) -> String {
    match form {
        ToolNameForm::Model => name_for_model(name),
        ToolNameForm::Dotted => name.to_owned(),
    }
}

/// One entry of a tool list: a registered tool or a helper tool of this transport.
#[derive(Clone)]
struct ToolListEntry {
    /// The catalog entry of the tool; `None` for a helper tool.
    entry: Option<Arc<CatalogEntry>>,
    /// The tool under Toolcrib's name.
    tool: Arc<Tool>,
    /// The tool's name as model APIs accept it.
    model_name: Arc<str>,
    texts: Arc<EntryTexts>,
}

/// An entry as JSON for the modern revision, serialized at the first request of its form.
#[derive(Default)]
struct EntryTexts {
    model: OnceLock<Box<str>>,
    dotted: OnceLock<Box<str>>,
}

impl ToolListEntry {
    fn new(entry: Option<Arc<CatalogEntry>>, tool: Tool) -> Self {
        let model_name = name_for_model(&tool.name).into();
        Self { entry, tool: Arc::new(tool), model_name, texts: Arc::default() }
    }

    fn name(&self) -> &str {
        &self.tool.name
    }

    /// Sets the name as model APIs accept it.
    fn set_model_name(&mut self, name: &str) {
        if *self.model_name != *name {
            (self.model_name, self.texts) = (name.into(), Arc::default());
        }
    }

    /// Returns the tool under the name of this form.
    fn listed_tool(&self, form: ToolNameForm) -> Tool {
        let mut tool = (*self.tool).clone();
        if form == ToolNameForm::Model {
            tool.name = self.model_name.to_string().into();
        }
        tool
    }

    fn text(&self, form: ToolNameForm) -> &str {
        let write = || serde_json::to_string(&self.listed_tool(form)).unwrap_or_default().into();
        match form {
            ToolNameForm::Model => self.texts.model.get_or_init(write),
            ToolNameForm::Dotted => self.texts.dotted.get_or_init(write),
        }
    }

    fn is_same_as(&self, other: &Self) -> bool {
        match (&self.entry, &other.entry) {
            (Some(one), Some(two)) => {
                let is_same_definition = Arc::ptr_eq(one, two)
                    || (self.name(), &one.version) == (other.name(), &two.version);
                is_same_definition && self.model_name == other.model_name
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
    /// last page by the helper tools and the tool that reads long results. These replace tools of
    /// the same names.
    pub(super) fn page(
        &self,
        after: Option<&str>,
        size: usize,
        revision: ProtocolRevision,
        form: ToolNameForm,
        prefix: Option<&str>,
    ) -> (Vec<Tool>, Option<String>) {
        let (page, more) = self.page_entries(after, size, prefix);
        let listed = |entry: &ToolListEntry| adapt_to_revision(entry.listed_tool(form), revision);
        let mut tools: Vec<Tool> = page.iter().map(listed).collect();
        if let Some(prefix) = prefix {
            let helpers = self.tools.iter().filter(|listed| is_source_helper(listed));
            let helper_tools: Vec<Tool> = helpers.map(listed).collect();
            let names = self.source_names(prefix, form);
            for (entry, tool) in page.iter().zip(&mut tools) {
                if let Some(name) = names.get(entry.name()) {
                    tool.name = name.clone().into();
                }
            }
            tools.retain(|tool| helper_tools.iter().all(|helper| helper.name != tool.name));
            if more.is_none() {
                tools.extend(helper_tools);
            }
        }
        (tools, more)
    }

    /// Returns the same page for the modern revision, as JSON. Each entry is serialized only once.
    pub(super) fn page_text(
        &self,
        after: Option<&str>,
        size: usize,
        form: ToolNameForm,
    ) -> (String, Option<String>) {
        let (page, more) = self.page_entries(after, size, None);
        let mut text = String::with_capacity(page.iter().map(|l| l.text(form).len() + 1).sum());
        for listed in page {
            text.push_str(if text.is_empty() { "" } else { "," });
            text.push_str(listed.text(form));
        }
        (text, more)
    }

    /// Returns the names under which the MCP client of one source sees the tools of that source, by
    /// Toolcrib's names.
    fn source_names(&self, prefix: &str, form: ToolNameForm) -> HashMap<&str, String> {
        let (tools, _) = self.page_entries(None, usize::MAX, Some(prefix));
        let own_names = tools.iter().map(|tool| &tool.name()[prefix.len()..]);
        let listed = match form {
            ToolNameForm::Model => names_for_model(own_names),
            ToolNameForm::Dotted => own_names.map(str::to_owned).collect(),
        };
        tools.iter().map(ToolListEntry::name).zip(listed).collect()
    }

    /// Returns Toolcrib's name of the tool that an MCP client of one source calls by this name, in
    /// either form.
    pub(super) fn find_in_source(&self, prefix: &str, name: &str) -> Option<String> {
        let qualified = format!("{prefix}{name}");
        let is_exact = self.tools.binary_search_by(|tool| tool.name().cmp(&qualified)).is_ok();
        if is_exact {
            return Some(qualified);
        }
        let names = self.source_names(prefix, ToolNameForm::Model);
        names.into_iter().find(|(_, listed)| listed == name).map(|(own, _)| own.to_owned())
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
            // The tools with one prefix are contiguous, because the list is sorted by name.
            Some(prefix) => {
                let first = self.tools.partition_point(|listed| listed.name() < prefix);
                let has_prefix = |listed: &ToolListEntry| listed.name().starts_with(prefix);
                let end = first + self.tools[first..].partition_point(has_prefix);
                &self.tools[begin.clamp(first, end)..end]
            }
            None => &self.tools[begin..],
        };
        let page = &rest[..size.min(rest.len())];
        let more = (rest.len() > page.len()).then(|| page.last().map(|l| l.name().to_owned()));
        (page, more.flatten())
    }
}

/// The properties of a caller that decide which tools are listed: project, agent, roles, whether
/// the caller is local, and attributes.
type ToolListKey = (String, String, toolcrib::RoleSet, bool, CallerAttributes);

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
        let tools =
            helper_tools::always_listed().into_iter().chain(helper_tools::catalogue()).map(listed);
        Arc::new(CallerToolList { version: 0, tools: tools.collect() })
    }

    /// Returns the caller's list for the present state of the directory.
    pub(super) fn for_caller(&self, engine: &Engine, caller: &Caller) -> Arc<CallerToolList> {
        let local = caller.spans_projects();
        // Two session tokens with the same attributes have the same list.
        let attributes = CallerAttributes { credential: None, ..(*caller.attributes).clone() };
        let (project, agent) = (caller.project.clone(), caller.agent.clone());
        let key = (project, agent, caller.roles, local, attributes);
        // Read before the tools: if the directory changes in between, the next request rebuilds the
        // list.
        let version = engine.registry().directory_version();
        let before = self.cached.lock().get(&key).cloned();
        // A rule on the time can change the list without a change of the directory.
        let is_stable = !engine.registry().decides_by_time(caller);
        if let Some(list) = before.as_ref().filter(|list| is_stable && list.version == version) {
            return list.clone();
        }
        let list = Arc::new(build_list(engine, caller, version, before.as_deref()));
        let mut cached = self.cached.lock();
        if cached.len() >= MAX_CACHED_LISTS && !cached.contains_key(&key) {
            cached.clear();
        }
        cached.insert(key, list.clone());
        list
    }
}

/// Returns the caller's tools, sorted by name, with the one that reads what a digest omits.
fn listed_tools(engine: &Engine, caller: &Caller) -> Vec<Arc<CatalogEntry>> {
    let mut tools = engine.registry().tools(caller);
    let index = tools.partition_point(|entry| entry.definition.name.as_str() < RESULT_READ);
    let is_listed = tools.get(index).is_some_and(|entry| entry.definition.name == RESULT_READ);
    if !tools.is_empty()
        && !is_listed
        && let Ok(reader) = engine.registry().tool(caller, RESULT_READ)
    {
        tools.insert(index, reader);
    }
    tools
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
    let previous = before.map(|list| list.tools.as_slice()).unwrap_or_default();
    let reuse = |entry: &Arc<CatalogEntry>| {
        let name = entry.definition.name.as_str();
        let index = previous.binary_search_by(|listed| listed.name().cmp(name)).ok()?;
        let is_same =
            previous[index].entry.as_ref().is_some_and(|previous| Arc::ptr_eq(previous, entry));
        is_same.then(|| previous[index].clone())
    };
    let mut tools: Vec<ToolListEntry> = Vec::new();
    for entry in listed_tools(engine, caller) {
        let fresh = || {
            Some(ToolListEntry::new(Some(entry.clone()), to_mcp_tool(&entry.shown_definition())?))
        };
        tools.extend(reuse(&entry).or_else(fresh));
    }
    let model_names = names_for_model(tools.iter().map(ToolListEntry::name));
    for (listed, model_name) in tools.iter_mut().zip(model_names) {
        // The helper tools keep their names, whatever a registered tool is called.
        match helper_tools::helper_name(&model_name) {
            Some(_) => listed.set_model_name(&hashed_name_for_model(&listed.tool.name)),
            None => listed.set_model_name(&model_name),
        }
    }
    for tool in helper_tools::always_listed() {
        // A helper tool replaces a registered tool of the same name.
        tools.retain(|listed| listed.name() != tool.name);
        let index = tools.partition_point(|listed| listed.name() < tool.name.as_ref());
        tools.insert(index, ToolListEntry::new(None, tool));
    }
    CallerToolList { version, tools }
}

/// Returns whether an MCP client that sees only one source sees this tool as well: the helper tools
/// and the tool that reads long results.
fn is_source_helper(listed: &ToolListEntry) -> bool {
    listed.entry.is_none() || listed.name() == RESULT_READ
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
