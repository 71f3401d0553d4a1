//! Converts a tool definition into MCP's format. A field of a listed tool is added here.

use std::sync::Arc;

use rmcp::model::{JsonObject, MetaObject, Tool, ToolAnnotations};
use serde_json::Value;
use toolcrib::model_formats::mcp_schema;
use toolcrib::{Effect, Risk, ToolDefinition};

use crate::mcp::request::ProtocolRevision;

/// Returns the MCP form of a definition, or `None` if its arguments cannot be an object: MCP cannot
/// call such a tool.
pub(crate) fn to_mcp_tool(definition: &ToolDefinition) -> Option<Tool> {
    let schema = mcp_schema(definition, &definition.input_schema);
    let Value::Object(mut input) = schema.to_value() else { return None };
    match input.get("type") {
        None => drop(input.insert("type".to_owned(), "object".into())),
        Some(kind) if kind == "object" => {}
        Some(_) => return None,
    }
    let metadata = definition.metadata.as_ref().map(|metadata| metadata.to_value());
    let metadata = metadata.unwrap_or_default();
    let mut tool =
        Tool::new(definition.name.clone(), definition.description.clone(), Arc::new(input))
            .with_title(title(definition, &metadata))
            .with_annotations(annotations(definition.effect, definition.risk, &metadata))
            .with_meta(tool_meta(definition, &metadata));
    let output = definition.output_schema.as_ref().map(|schema| mcp_schema(definition, schema));
    if let Some(Value::Object(output)) = output.map(|schema| schema.to_value()) {
        tool = tool.with_raw_output_schema(Arc::new(output));
    }
    Some(tool)
}

/// Returns the title in the tool's metadata, or its name as words.
fn title(definition: &ToolDefinition, metadata: &Value) -> String {
    let title = metadata.get("title").and_then(Value::as_str);
    if let Some(title) = title.filter(|title| !title.trim().is_empty()) {
        return title.to_owned();
    }
    let words: Vec<&str> =
        definition.name.split(['.', '_', '-', '/']).filter(|word| !word.is_empty()).collect();
    let text = words.join(" ");
    let mut chars = text.chars();
    chars.next().map_or_else(String::new, |first| first.to_uppercase().chain(chars).collect())
}

/// Returns hints for the MCP client. They reflect the definition and guarantee nothing.
/// `openWorldHint` is the upstream's own; tools of other sources have none.
fn annotations(effect: Effect, risk: Risk, metadata: &Value) -> ToolAnnotations {
    let destructive = match effect {
        Effect::Read => false,
        Effect::Idempotent => risk >= Risk::High,
        Effect::Irreversible => risk > Risk::Low,
    };
    let mut hints = ToolAnnotations::new()
        .read_only(effect == Effect::Read)
        .destructive(destructive)
        .idempotent(effect != Effect::Irreversible);
    hints.open_world_hint =
        metadata.pointer("/mcp/annotations/openWorldHint").and_then(Value::as_bool);
    hints
}

/// Returns the injection flags of a tool's texts, if any.
pub(crate) fn injection_flags(definition: &ToolDefinition) -> Option<Value> {
    let metadata = definition.metadata.as_ref()?;
    // Most tools have no flags; then the metadata is not parsed.
    let may_have_flags = metadata.text().contains("\"flags\"");
    may_have_flags.then(|| metadata.to_value().get("flags").cloned()).flatten()
}

/// Returns the upstream's own `_meta`, and the properties for which MCP has no field.
fn tool_meta(definition: &ToolDefinition, metadata: &Value) -> MetaObject {
    let upstream = metadata.pointer("/mcp/meta").and_then(Value::as_object);
    let mut meta: JsonObject = upstream.cloned().unwrap_or_default();
    // Only Toolcrib itself sets names with this prefix.
    meta.retain(|name, _| !name.starts_with("toolcrib/"));
    meta.insert("toolcrib/effect".to_owned(), definition.effect.as_str().into());
    meta.insert("toolcrib/risk".to_owned(), definition.risk.as_str().into());
    if let Some(flags) = injection_flags(definition) {
        meta.insert("toolcrib/flags".to_owned(), flags);
    }
    if definition.background {
        meta.insert("toolcrib/async".to_owned(), true.into());
    }
    MetaObject(meta)
}

/// Returns the tool as this revision can describe it: legacy revisions allow only objects as
/// structured results.
pub(super) fn adapt_to_revision(mut tool: Tool, revision: ProtocolRevision) -> Tool {
    let is_object =
        |schema: &Arc<JsonObject>| schema.get("type").is_some_and(|kind| kind == "object");
    if revision == ProtocolRevision::Legacy && !tool.output_schema.as_ref().is_some_and(is_object) {
        tool.output_schema = None;
    }
    tool
}
