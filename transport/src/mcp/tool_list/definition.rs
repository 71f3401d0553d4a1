//! Converts a tool definition into MCP's format. A field of a listed tool is added here.

use std::sync::Arc;

use rmcp::model::{JsonObject, MetaObject, Tool, ToolAnnotations};
use serde_json::Value;
use toolcrib::{Effect, Risk, ToolDefinition};

use crate::mcp::request::ProtocolRevision;

/// Returns the MCP form of a definition, or `None` if its arguments cannot be an object: MCP cannot
/// call such a tool.
pub(crate) fn to_mcp_tool(definition: &ToolDefinition) -> Option<Tool> {
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
    let title = metadata.as_ref().and_then(|metadata| metadata.get("title")?.as_str());
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
pub(crate) fn injection_flags(definition: &ToolDefinition) -> Option<Value> {
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

/// Returns the tool as this revision can describe it: legacy revisions allow only objects as
/// structured results.
pub(super) fn adapt_to_revision(tool: &Tool, revision: ProtocolRevision) -> Tool {
    let mut tool = tool.clone();
    let is_object =
        |schema: &Arc<JsonObject>| schema.get("type").is_some_and(|kind| kind == "object");
    if revision == ProtocolRevision::Legacy && !tool.output_schema.as_ref().is_some_and(is_object) {
        tool.output_schema = None;
    }
    tool
}
