//! The tool search of the agent loop: its definition, its execution and its results.
//!
//! A search executes nothing, so it has no ticket. Its result is a message of the conversation,
//! from which the next request takes the tools that were found.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use serde::Deserialize;
use serde_json::{Value, json};

use crate::domain::caller::Caller;
use crate::domain::fault::{Code, Error, Fault};
use crate::domain::model_reply::{ModelReply, ToolCallRequest};
use crate::domain::tool::MCP_HELPER_TOOLS;
use crate::model_formats::fault_content;
use crate::results::tokens;
use crate::runs::Runs;
use crate::runs::context::{first_line, truncate_to_tokens};

/// Model-facing name of the tool, the same as in the search catalogue of MCP.
pub(super) const NAME: &str = "tools__search";

/// Number of tools that a search returns: default and maximum.
const LIMITS: (usize, usize) = (5, 10);

/// Maximum number of searches that one reply may request.
const MAX_SEARCHES: usize = 8;

/// Maximum tokens of one description in the result.
const DESCRIPTION_TOKENS: usize = 40;

/// Maximum tokens of the list of groups in the definition.
const GROUP_TOKENS: usize = 250;

/// The arguments of a search.
#[derive(Deserialize)]
struct ToolSearchArgs {
    query: String,
    #[serde(default)]
    limit: Option<usize>,
}

/// The answer to one search.
pub(super) struct ToolSearchAnswer {
    /// Content of the message that answers the call.
    pub(super) content: String,
    /// Model-facing names of the tools that were found; `None` if the search was refused.
    pub(super) tools: Option<Vec<String>>,
}

/// Describes the tool in the chat format, with the groups of the tools that it searches.
pub(super) fn definition<'n>(names: impl Iterator<Item = &'n str>) -> Value {
    let mut groups: BTreeMap<&str, usize> = BTreeMap::new();
    let mut total = 0;
    for name in names {
        let group = name.split(['.', '/']).next().unwrap_or(name);
        *groups.entry(group).or_default() += 1;
        total += 1;
    }
    let mut sizes: Vec<(&str, usize)> = groups.into_iter().collect();
    sizes.sort_by(|a, b| b.1.cmp(&a.1).then(a.0.cmp(b.0)));
    let mut list = String::new();
    for (n, (group, count)) in sizes.iter().enumerate() {
        let separator = if n == 0 { "" } else { ", " };
        let next = format!("{list}{separator}{group} ({count})");
        if tokens::exceeds(&next, GROUP_TOKENS) {
            list.push_str(", …");
            break;
        }
        list = next;
    }
    let description = format!(
        "Finds tools for a purpose and loads them: you can call them in your next reply. There are \
         {total} tools, far more than you see. Search before you conclude that something cannot \
         be done. Groups: {list}"
    );
    debug_assert_eq!(crate::registry::name_for_model(MCP_HELPER_TOOLS[1]), NAME);
    json!({ "type": "function", "function": {
        "name": NAME,
        "description": description,
        "parameters": {
            "type": "object",
            "properties": {
                "query": { "type": "string",
                    "description": "Purpose in plain words, or part of a tool name" },
                "limit": { "type": "integer", "minimum": 1, "maximum": LIMITS.1,
                    "description": "Number of tools to load (default: 5)" },
            },
            "required": ["query"],
        },
    } })
}

/// Executes the searches of a reply among `tools`, which maps model-facing names to tool names.
/// Returns the answers by the index of the call.
pub(super) async fn execute_searches(
    engine: &Arc<Runs>,
    caller: &Caller,
    tools: &HashMap<String, String>,
    reply: &ModelReply,
) -> Result<HashMap<usize, ToolSearchAnswer>, Error> {
    let mut answers = HashMap::new();
    let calls = reply.calls.iter().enumerate().filter(|(_, call)| is_search(call));
    for (n, (index, call)) in calls.enumerate() {
        let answer = match n < MAX_SEARCHES {
            true => search(engine, caller, tools, call).await?,
            false => refuse(&format!("at most {MAX_SEARCHES} searches can be made in one reply")),
        };
        answers.insert(index, answer);
    }
    Ok(answers)
}

fn is_search(call: &ToolCallRequest) -> bool {
    call.name == NAME || call.name == MCP_HELPER_TOOLS[1]
}

async fn search(
    engine: &Arc<Runs>,
    caller: &Caller,
    tools: &HashMap<String, String>,
    call: &ToolCallRequest,
) -> Result<ToolSearchAnswer, Error> {
    let args: ToolSearchArgs = match serde_json::from_str(&call.arguments) {
        Ok(args) => args,
        Err(error) => return Ok(refuse(&format!("the arguments of {NAME} are invalid: {error}"))),
    };
    let limit = args.limit.unwrap_or(LIMITS.0).clamp(1, LIMITS.1);
    let matches = match engine.registry.search_with_handoffs(caller, &args.query).await {
        Ok(matches) => matches,
        Err(Error::Refused { fault, .. }) => return Ok(refuse(&fault.message)),
        Err(other) => return Err(other),
    };
    let by_tool: HashMap<&str, &str> =
        tools.iter().map(|(name, tool)| (tool.as_str(), name.as_str())).collect();
    let (mut names, mut found, mut total) = (Vec::new(), Vec::new(), 0);
    for tool in matches.iter().map(|found| &found.entry.definition) {
        let Some(name) = by_tool.get(tool.name.as_str()) else { continue };
        total += 1;
        if names.len() < limit {
            let description = truncate_to_tokens(first_line(&tool.description), DESCRIPTION_TOKENS);
            let mut entry = json!({ "name": name, "description": description });
            if tool.background {
                entry["async"] = true.into();
            }
            found.push(entry);
            names.push((*name).to_owned());
        }
    }
    let note = match names.is_empty() {
        true => "No tool matches. Use other words, or part of a name.",
        false => "These tools are loaded: call them by name.",
    };
    let content = json!({ "tools": found, "more": total - names.len(), "note": note }).to_string();
    Ok(ToolSearchAnswer { content, tools: Some(names) })
}

fn refuse(message: &str) -> ToolSearchAnswer {
    let fault = Fault::new(Code::ValidationError, message).without_side_effect();
    ToolSearchAnswer { content: fault_content(&fault), tools: None }
}

/// Returns the names of the tools in the result of a search.
pub(super) fn found_names(content: &str) -> Vec<String> {
    let result: Value = serde_json::from_str(content).unwrap_or_default();
    let tools = result["tools"].as_array().into_iter().flatten();
    tools.filter_map(|tool| tool["name"].as_str().map(str::to_owned)).collect()
}
