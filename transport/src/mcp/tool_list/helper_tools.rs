//! Definitions of the helper tools, which the MCP transport itself adds to its lists: their names,
//! descriptions and arguments.
//!
//! `call.result` is in every list. The three tools of the search catalogue stand in place of the
//! full list, so that hundreds of tools do not fill the context of a model.
//! `operations::helper_calls` handles their calls. The built-in tools, such as `calculation.eval`,
//! are not among them: they are a source (`sources/src/builtin`).

use std::sync::Arc;

use rmcp::model::{JsonObject, Tool, ToolAnnotations};
use schemars::JsonSchema;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use toolcrib::Json;
use toolcrib::domain::fault::{Code, Fault};
use toolcrib::domain::tool::MCP_HELPER_TOOLS;
use toolcrib::registry::name_for_model;
use toolcrib::schema::to_model_schema;

/// The tool that returns the result of a call that had not ended when its MCP client got a
/// response.
pub(crate) const CALL_RESULT: &str = MCP_HELPER_TOOLS[0];
/// The tool that searches all tools.
pub(crate) const SEARCH: &str = MCP_HELPER_TOOLS[1];
/// The tool that describes tools by name.
pub(crate) const DESCRIBE: &str = MCP_HELPER_TOOLS[2];
/// The tool that calls a tool by name.
pub(crate) const CALL: &str = MCP_HELPER_TOOLS[3];

/// Returns the helper tool that an MCP client calls by this name, in either form.
pub(crate) fn helper_name(name: &str) -> Option<&'static str> {
    MCP_HELPER_TOOLS.into_iter().find(|helper| *helper == name || name_for_model(helper) == name)
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "ResultArgs")]
pub(crate) struct CallResultArgs {
    /// Id of the tool call: tc_ followed by 26 letters and digits.
    pub(crate) tool_call_id: String,
    /// Maximum time to wait for the result, in milliseconds. Default: 20000.
    #[serde(default)]
    pub(crate) wait_ms: Option<u64>,
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct SearchArgs {
    /// Purpose in plain words, or part of a tool name.
    pub(crate) query: String,
    /// Number of tools to show: 1 to 50. Default: 10.
    #[serde(default)]
    pub(crate) limit: Option<usize>,
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct DescribeArgs {
    /// Names of the tools, as returned by tools.search: 1 to 20.
    pub(crate) names: Vec<String>,
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "CallArgs")]
pub(crate) struct CatalogueCallArgs {
    /// Name of the tool.
    pub(crate) name: String,
    /// Arguments that match the inputSchema of the tool.
    #[serde(default)]
    pub(crate) arguments: JsonObject,
}

/// Returns the helper tools of every list, sorted by name.
pub(super) fn always_listed() -> Vec<Tool> {
    vec![read_only_tool::<CallResultArgs>(
        CALL_RESULT,
        "Result of a call",
        "Returns the result of a tool call by its ticket. Waits a while for it; call again if it \
         is not finished yet.",
    )]
}

/// Returns the three tools of the catalogue, sorted by name.
pub(super) fn catalogue() -> Vec<Tool> {
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
            "Returns tools with their full description and the schema of their arguments.",
        ),
        read_only_tool::<SearchArgs>(
            SEARCH,
            "Search for tools",
            "Finds tools for a purpose, best first. There are many more tools than you see: search \
             before you conclude that something cannot be done.",
        ),
    ]
}

/// Returns the definition of a helper tool that only reads.
fn read_only_tool<A: JsonSchema>(name: &'static str, title: &str, text: &'static str) -> Tool {
    let schema = Json::from_value(&schemars::schema_for!(A).to_value());
    let schema = match to_model_schema(&schema).to_value() {
        Value::Object(schema) => schema,
        _ => JsonObject::new(),
    };
    let annotations = ToolAnnotations::new()
        .read_only(true)
        .destructive(false)
        .idempotent(true)
        .open_world(false);
    Tool::new(name, text, Arc::new(schema)).with_title(title).with_annotations(annotations)
}

/// Deserializes the arguments, or returns a fault that says what is wrong with them.
pub(crate) fn parse_arguments<A: DeserializeOwned>(
    tool: &str,
    arguments: Option<JsonObject>,
) -> Result<A, Fault> {
    let value = Value::Object(arguments.unwrap_or_default());
    serde_json::from_value(value).map_err(|error| {
        let message = format!("the arguments of {tool} do not fit its schema: {error}");
        Fault::new(Code::ValidationError, message).without_side_effect()
    })
}
