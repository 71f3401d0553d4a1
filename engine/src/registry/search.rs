//! Searches tools: ranked full-text search over names, descriptions and parameter names. Also waits
//! for changes of the directory.
//!
//! The index (BM25) is built per project at the first search, and rebuilt after the directory has
//! changed. It covers all tools of the project; tools that the caller may not call are removed from
//! the matches.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bm25::{Document, Language, SearchEngine, SearchEngineBuilder};
use parking_lot::Mutex;
use serde_json::Value;

use super::catalog::{Catalog, CatalogEntry};
use crate::domain::caller::Caller;
use crate::domain::fault::{Code, Error};
use crate::domain::tool::{Executor, ToolDefinition};
use crate::ports::bus::Topic;
use crate::ports::core::from_join_error;
use crate::registry::Registry;

/// Maximum length of a query. More text would not improve the matches.
const MAX_QUERY_BYTES: usize = 1_000;

/// Maximum number of cached indexes. Beyond it all are dropped and rebuilt.
const MAX_CACHED_INDEXES: usize = 64;

/// Weight of a word in the name, relative to one in the description.
const NAME_WEIGHT: usize = 3;

/// A tool that matches a query.
#[derive(Debug, Clone)]
pub struct ToolMatch {
    /// The matching tool.
    pub entry: Arc<CatalogEntry>,
    /// Relevance. Comparable only within one response.
    pub score: f32,
}

/// The tools that a search returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SearchScope {
    /// Those that a list of tools shows.
    Tools,
    /// Also the handoffs, which only a run can call.
    ToolsAndHandoffs,
}

impl SearchScope {
    fn has(self, entry: &CatalogEntry) -> bool {
        self == Self::ToolsAndHandoffs || entry.definition.executor != Executor::HANDOFF
    }
}

/// The index of one project at one version of the directory.
struct SearchIndex {
    version: u64,
    ranking: SearchEngine<u32>,
    tools: Vec<Arc<CatalogEntry>>,
}

/// Cached indexes by project.
#[derive(Default)]
pub(crate) struct SearchIndexes {
    by_project: Mutex<HashMap<String, Arc<SearchIndex>>>,
}

impl Registry {
    /// Returns the tools the caller may call that match the query, best first.
    pub async fn search(
        self: &Arc<Self>,
        caller: &Caller,
        query: &str,
        limit: usize,
    ) -> Result<Vec<ToolMatch>, Error> {
        self.search_in(caller, query, limit, SearchScope::Tools).await
    }

    /// Returns the tools and handoffs the caller may call that match the query, best first.
    pub(crate) async fn search_with_handoffs(
        self: &Arc<Self>,
        caller: &Caller,
        query: &str,
    ) -> Result<Vec<ToolMatch>, Error> {
        self.search_in(caller, query, usize::MAX, SearchScope::ToolsAndHandoffs).await
    }

    async fn search_in(
        self: &Arc<Self>,
        caller: &Caller,
        query: &str,
        limit: usize,
        scope: SearchScope,
    ) -> Result<Vec<ToolMatch>, Error> {
        if query.trim().is_empty() || query.len() > MAX_QUERY_BYTES {
            let message = format!("query must be 1 to {MAX_QUERY_BYTES} bytes of text");
            return Err(Error::refused(Code::ValidationError, message));
        }
        let (engine, caller, query) = (self.clone(), caller.clone(), query.to_owned());
        // Building an index is CPU-bound, and so is searching a large one.
        let searching = tokio::task::spawn_blocking(move || {
            let catalog = engine.catalog();
            let index = engine.search_indexes.for_project(&catalog, &caller.project);
            index.rank(&catalog, &caller, &query, limit, scope)
        });
        searching.await.map_err(from_join_error)
    }

    /// Returns the version of the directory of tools, keys and rules. While it stays the same, so
    /// does everything derived from them.
    pub fn directory_version(&self) -> u64 {
        self.catalog().version()
    }

    /// Returns the time of the last change of the directory, in Unix milliseconds. After a start of
    /// the process it is the time of the start.
    pub fn directory_changed_ms(&self) -> u64 {
        self.directory_changed_ms.load(Ordering::Acquire)
    }

    /// Waits until the directory has a version other than `seen`, and returns it. Returns `None`
    /// when the engine is shutting down.
    pub async fn wait_for_directory_change(&self, seen: u64) -> Option<u64> {
        let mut listener = self.core.bus.listen(Topic::Directory);
        loop {
            let version = self.directory_version();
            if self.core.shutdown.is_cancelled() {
                return None;
            }
            if version != seen {
                return Some(version);
            }
            tokio::select! {
                () = listener.wait_for_wake() => {}
                () = self.core.shutdown.cancelled() => {}
            }
        }
    }
}

impl SearchIndexes {
    fn for_project(&self, catalog: &Catalog, project: &str) -> Arc<SearchIndex> {
        let cached = self.by_project.lock().get(project).cloned();
        if let Some(index) = cached.filter(|index| index.version == catalog.version()) {
            return index;
        }
        let index = Arc::new(SearchIndex::new(catalog, project));
        let mut indexes = self.by_project.lock();
        if indexes.len() >= MAX_CACHED_INDEXES {
            indexes.clear();
        }
        indexes.insert(project.to_owned(), index.clone());
        index
    }
}

impl SearchIndex {
    fn new(catalog: &Catalog, project: &str) -> Self {
        let mut tools = catalog.tools(project);
        tools.extend(catalog.handoffs(project));
        let documents = tools
            .iter()
            .zip(0_u32..)
            .map(|(entry, id)| Document { id, contents: searchable_text(&entry.definition) });
        let ranking = SearchEngineBuilder::with_documents(Language::English, documents).build();
        Self { version: catalog.version(), ranking, tools }
    }

    fn rank(
        &self,
        catalog: &Catalog,
        caller: &Caller,
        query: &str,
        limit: usize,
        scope: SearchScope,
    ) -> Vec<ToolMatch> {
        let mut scores: HashMap<u32, f32> = HashMap::new();
        for result in self.ranking.search(&split_into_words(query), self.tools.len()) {
            scores.insert(result.document.id, result.score);
        }
        // Part of a name is a valid query too.
        let part = query.trim().to_lowercase();
        for (entry, id) in self.tools.iter().zip(0_u32..) {
            let name = entry.definition.name.to_lowercase();
            if name == part {
                *scores.entry(id).or_default() += 1_000.0;
            } else if part.len() > 2 && name.contains(&part) {
                *scores.entry(id).or_default() += 10.0;
            }
        }
        let mut found: Vec<ToolMatch> = scores
            .into_iter()
            .filter_map(|(id, score)| {
                let entry = self.tools.get(id as usize).filter(|entry| scope.has(entry))?.clone();
                catalog.is_listed(caller, &entry).then_some(ToolMatch { entry, score })
            })
            .collect();
        let name = |found: &ToolMatch| found.entry.definition.name.clone();
        found.sort_by(|a, b| b.score.total_cmp(&a.score).then_with(|| name(a).cmp(&name(b))));
        found.truncate(limit);
        found
    }
}

/// Returns the searchable text of a tool.
fn searchable_text(definition: &ToolDefinition) -> String {
    let name = split_into_words(&definition.name);
    let mut words = [name.as_str(); NAME_WEIGHT].join(" ");
    words.push(' ');
    words.push_str(&definition.description);
    let title = definition.metadata.as_ref().map(|metadata| metadata.to_value());
    if let Some(title) = title.as_ref().and_then(|metadata| metadata.get("title")?.as_str()) {
        words.push(' ');
        words.push_str(title);
    }
    let schema = definition.input_schema.to_value();
    let parameters = schema.get("properties").and_then(Value::as_object);
    for parameter in parameters.into_iter().flat_map(|all| all.keys()) {
        words.push(' ');
        words.push_str(&split_into_words(parameter));
    }
    words
}

/// Splits a name into words: `issueTracker.create_issue` becomes `issue Tracker create issue`.
fn split_into_words(name: &str) -> String {
    let mut words = String::with_capacity(name.len() + 8);
    let mut before_was_lower = false;
    for character in name.chars() {
        if character.is_uppercase() && before_was_lower {
            words.push(' ');
        }
        before_was_lower = character.is_lowercase() || character.is_ascii_digit();
        words.push(if character.is_alphanumeric() { character } else { ' ' });
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Engine;
    use crate::ports::fn_tool::FnTool;

    #[derive(serde::Deserialize, schemars::JsonSchema)]
    #[serde(rename_all = "camelCase")]
    #[allow(dead_code, reason = "only its schema is used")]
    struct Args {
        postal_code: Option<String>,
    }

    async fn engine() -> Engine {
        let with_args = |_: Args| async { Ok::<_, String>(1) };
        let without_args = |_: serde_json::Map<String, Value>| async { Ok::<_, String>(1) };
        Engine::builder()
            .tool(FnTool::new("weather.query", "Tells the weather of a city", without_args))
            .tool(FnTool::new("mail.sendLetter", "Posts something to somebody", with_args))
            .tool(FnTool::new("invoice.create", "Creates an invoice for a customer", without_args))
            .tool(FnTool::new("invoice.list", "Shows which invoices are open", without_args))
            .start()
            .await
            .unwrap()
    }

    async fn names(query: &str) -> Vec<String> {
        let found =
            engine().await.registry().search(&Caller::local("default"), query, 10).await.unwrap();
        found.into_iter().map(|found| found.entry.definition.name.clone()).collect()
    }

    #[tokio::test]
    async fn tools_are_found_by_names_descriptions_and_parameters() {
        assert_eq!(names("what is the weather in a city").await[0], "weather.query");
        assert_eq!(names("sending letters").await[0], "mail.sendLetter");
        assert_eq!(names("postal code").await[0], "mail.sendLetter");
        assert_eq!(names("create invoice").await[0], "invoice.create");
        assert_eq!(names("invoice.list").await[0], "invoice.list");
        assert_eq!(names("invo").await.len(), 2, "by part of a name");
        assert!(names("zebra").await.is_empty());
    }

    #[tokio::test]
    async fn empty_and_overlong_queries_are_refused() {
        let long = "a".repeat(1_001);
        for query in ["", "  ", &long] {
            assert!(
                engine()
                    .await
                    .registry()
                    .search(&Caller::local("default"), query, 10)
                    .await
                    .is_err()
            );
        }
    }
}
