//! The catalogue: three tools in place of the full list, so that hundreds of tools do not fill the
//! context of a model. A model searches, describes and calls. The call is an ordinary call with the
//! same checks and the same durability.

use rmcp::model::{
    CallToolRequestParams, CallToolResponse, CallToolResult, ContentBlock, JsonObject, Tool,
    ToolAnnotations,
};
use rmcp::service::RequestContext;
use rmcp::{ErrorData, RoleServer};
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Value, json};
use toolcrib::domain::fault::{Code, Fault};

use super::server::{CallerView, McpHandler};
use super::{call, tools};
use crate::mcp::builtin_tools::{parse_arguments, read_only_tool};
use crate::mcp::tool_result;

pub(super) const SEARCH: &str = "tools.search";
pub(super) const DESCRIBE: &str = "tools.describe";
pub(super) const CALL: &str = "tools.call";

/// Default and maximum number of search results.
const DEFAULT_SEARCH_LIMIT: usize = 10;
const MAX_SEARCH_LIMIT: usize = 50;

/// Maximum number of tools described at once.
const MAX_DESCRIBED_TOOLS: usize = 20;

/// Maximum number of characters of a description in search results.
const MAX_SUMMARY_CHARS: usize = 240;

/// The form in which an MCP client sees the tools.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CatalogueMode {
    /// The full list of tools.
    Full,
    /// Three tools that search, describe and call all others.
    Search,
}

impl CatalogueMode {
    /// Parses the value of the query parameter: `?catalogue=search`.
    pub fn parse(word: &str) -> Option<Self> {
        match word {
            "full" => Some(Self::Full),
            "search" => Some(Self::Search),
            _ => None,
        }
    }
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct SearchArgs {
    /// Purpose in plain words, or part of a tool name.
    query: String,
    /// Number of tools to show: 1 to 50. Default: 10.
    #[serde(default)]
    limit: Option<usize>,
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct DescribeArgs {
    /// Names of the tools, as returned by tools.search: 1 to 20.
    names: Vec<String>,
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "CallArgs")]
struct CatalogueCallArgs {
    /// Name of the tool.
    name: String,
    /// Arguments that match the inputSchema of the tool.
    #[serde(default)]
    arguments: JsonObject,
}

/// Returns the three tools, sorted by name.
pub(super) fn tools() -> Vec<Tool> {
    let calls = read_only_tool::<CatalogueCallArgs>(
        CALL,
        "Call a tool",
        "Calls a tool by its name. Look at its inputSchema with tools.describe first.",
    )
    .with_annotations(ToolAnnotations::new().read_only(false).destructive(true));
    vec![
        calls,
        read_only_tool::<DescribeArgs>(
            DESCRIBE,
            "Describe tools",
            "Shows tools with their whole description and the schema of their arguments.",
        ),
        read_only_tool::<SearchArgs>(
            SEARCH,
            "Search for tools",
            "Finds tools for a purpose, best first. There are many more tools than you see: search \
             before you conclude that something cannot be done.",
        ),
    ]
}

/// Handles a call of one of the three tools. Returns `None` for any other tool.
pub(super) async fn handle_call(
    server: &McpHandler,
    view: &CallerView,
    asked: &mut CallToolRequestParams,
    context: &RequestContext<RoleServer>,
) -> Option<Result<CallToolResponse, ErrorData>> {
    let given = |asked: &mut CallToolRequestParams| asked.arguments.take();
    let told = match asked.name.as_ref() {
        SEARCH => search(server, view, given(asked)).await,
        DESCRIBE => describe(server, view, given(asked)),
        CALL => match parse_arguments::<CatalogueCallArgs>(CALL, given(asked)) {
            Ok(args) => {
                asked.name = args.name.into();
                asked.arguments = Some(args.arguments);
                let seen = call::ToolDiscovery::Catalogue;
                return Some(call::call_tool(server, view, asked.clone(), context, seen).await);
            }
            Err(fault) => Err(fault),
        },
        _ => return None,
    };
    let result = told.unwrap_or_else(|fault| tool_result::error_result(&fault, None));
    Some(Ok(CallToolResponse::Complete(result)))
}

async fn search(
    server: &McpHandler,
    view: &CallerView,
    given: Option<JsonObject>,
) -> Result<CallToolResult, Fault> {
    let args: SearchArgs = parse_arguments(SEARCH, given)?;
    let limit = args.limit.unwrap_or(DEFAULT_SEARCH_LIMIT);
    if !(1..=MAX_SEARCH_LIMIT).contains(&limit) {
        let message = format!("limit must be from 1 to {MAX_SEARCH_LIMIT}");
        return Err(Fault::new(Code::ValidationError, message).without_side_effect());
    }
    let found =
        server.engine().search(&view.caller, &args.query, limit).await.map_err(into_fault)?;
    if found.is_empty() {
        let text = "Nothing fits. Try other words: what the tool does, or what it is about.";
        let mut result = CallToolResult::success(vec![ContentBlock::text(text)]);
        result.structured_content = Some(json!({ "tools": [] }));
        return Ok(result);
    }
    let shown: Vec<Value> = found
        .iter()
        .map(|found| {
            let tool = &found.entry.definition;
            let shown = json!({ "name": tool.name, "description": summarize_description(&tool.description) });
            match tools::injection_flags(tool) {
                Some(flags) => {
                    let mut shown = shown;
                    shown["flags"] = flags;
                    shown
                }
                None => shown,
            }
        })
        .collect();
    let lines = shown.iter().map(|tool| {
        let text = |key: &str| tool[key].as_str().unwrap_or_default().to_owned();
        let flagged =
            if tool["flags"].is_array() { " [flagged: its words are not trusted]" } else { "" };
        format!("{}{flagged}: {}", text("name"), text("description"))
    });
    let text = lines.collect::<Vec<_>>().join("\n");
    let mut result = CallToolResult::success(vec![ContentBlock::text(text)]);
    result.structured_content = Some(json!({ "tools": shown }));
    Ok(result)
}

fn describe(
    server: &McpHandler,
    view: &CallerView,
    given: Option<JsonObject>,
) -> Result<CallToolResult, Fault> {
    let args: DescribeArgs = parse_arguments(DESCRIBE, given)?;
    if !(1..=MAX_DESCRIBED_TOOLS).contains(&args.names.len()) {
        let message = format!("names must be 1 to {MAX_DESCRIBED_TOOLS} names");
        return Err(Fault::new(Code::ValidationError, message).without_side_effect());
    }
    let mut shown = Vec::new();
    for name in &args.names {
        let entry = server.engine().tool(&view.caller, name).map_err(into_fault)?;
        let tool = tools::to_mcp_tool(&entry.definition);
        shown.extend(tool.and_then(|tool| serde_json::to_value(tool).ok()));
    }
    let value = json!({ "tools": shown });
    let mut result = CallToolResult::success(vec![ContentBlock::text(value.to_string())]);
    result.structured_content = Some(value);
    Ok(result)
}

/// Returns the first line, truncated to [`MAX_SUMMARY_CHARS`].
fn summarize_description(text: &str) -> String {
    let first = text.lines().next().unwrap_or_default();
    if first.chars().count() <= MAX_SUMMARY_CHARS {
        return first.to_owned();
    }
    let cut: String = first.chars().take(MAX_SUMMARY_CHARS).collect();
    format!("{cut}…")
}

fn into_fault(error: toolcrib::Error) -> Fault {
    match error {
        toolcrib::Error::Refused { fault, .. } => fault,
        toolcrib::Error::Internal(source) => {
            tracing::error!(error = %source, "internal error");
            Fault::new(Code::Internal, "internal error; see the server's log")
        }
    }
}
