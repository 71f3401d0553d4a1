//! The stored form of a tool definition.

use serde::{Deserialize, Serialize};
use toolcrib::domain::json::Json;
use toolcrib::domain::retry::ExecutionPolicyPatch;
use toolcrib::domain::tool::{Effect, Executor, Fallback, Risk, ToolDefinition};
use toolcrib::domain::utp::Binding;
use toolcrib::ports::store::StoreError;

use super::{decode, encode, is_false};

#[derive(Serialize, Deserialize)]
struct StoredDefinition {
    description: String,
    executor: Executor,
    input_schema: Json,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    output_schema: Option<Json>,
    timeout_ms: u64,
    #[serde(default, skip_serializing_if = "is_false")]
    background: bool,
    effect: Effect,
    risk: Risk,
    #[serde(default)]
    policy: ExecutionPolicyPatch,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    fallback: Vec<Fallback>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    metadata: Option<Json>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    utp: Option<Binding>,
}

/// Encodes a tool definition as text. Its project and name are columns.
pub(crate) fn encode_definition(tool: &ToolDefinition) -> Result<String, StoreError> {
    encode(&StoredDefinition {
        description: tool.description.clone(),
        executor: tool.executor,
        input_schema: tool.input_schema.clone(),
        output_schema: tool.output_schema.clone(),
        timeout_ms: tool.timeout_ms,
        background: tool.background,
        effect: tool.effect,
        risk: tool.risk,
        policy: tool.policy.clone(),
        fallback: tool.fallback.clone(),
        metadata: tool.metadata.clone(),
        utp: tool.binding.clone(),
    })
}

/// Decodes a tool definition from its text.
pub(crate) fn decode_definition(
    project: String,
    name: String,
    text: &str,
) -> Result<ToolDefinition, StoreError> {
    let stored: StoredDefinition = decode(text)?;
    Ok(ToolDefinition {
        project: Some(project),
        name,
        description: stored.description,
        executor: stored.executor,
        input_schema: stored.input_schema,
        output_schema: stored.output_schema,
        timeout_ms: stored.timeout_ms,
        background: stored.background,
        effect: stored.effect,
        risk: stored.risk,
        policy: stored.policy,
        fallback: stored.fallback,
        metadata: stored.metadata,
        binding: stored.utp,
    })
}
