//! Imports OpenAPI 3.0 and 3.1 documents: each operation becomes a tool. Pure.
//!
//! The parameters and the body of an operation become one schema of arguments; `options.http` of
//! the definition says where each argument goes in the request. Only references within the document
//! are followed. An operation that cannot become a tool is skipped and reported with the reason.

mod body;
mod document;
mod operations;
mod parameters;
mod schema;
mod security;

#[cfg(test)]
mod tests;
use document::{DocumentOperation, OpenApiDocument};
use serde_json::{Value, json};
use toolcrib::domain::json::Json;
use toolcrib::domain::retry::ExecutionPolicyPatch;
use toolcrib::domain::tool::{Effect, Executor, Risk, ToolDefinition, check_tool_name};
use toolcrib::domain::utp::{AfterExecution, Binding, RESERVED_NAMES};
use toolcrib::registry::check_array_items;

use crate::http_operation::{HttpToolSpec, METHODS};

/// Maximum number of operations in one document.
pub(crate) const MAX_OPERATIONS: usize = 500;

/// Options of an import.
#[derive(Debug, Clone, Default)]
pub struct ImportOptions {
    /// Prefix of every tool name, followed by a dot.
    pub prefix: Option<String>,
    /// Base URL of the API. Default: the server in the document.
    pub server: Option<String>,
}

/// An operation that became a tool.
#[derive(Debug, Clone)]
pub struct ImportedTool {
    pub definition: ToolDefinition,
    /// For example `GET /pets/{id}`.
    pub operation: String,
    pub url: String,
    /// The environment variables that the tool needs.
    pub envs: Vec<String>,
}

/// An operation that could not become a tool.
#[derive(Debug, Clone, PartialEq)]
pub struct SkippedOperation {
    pub operation: String,
    pub reason: String,
}

/// The result of an import.
#[derive(Debug, Default)]
pub struct ImportReport {
    pub tools: Vec<ImportedTool>,
    pub skipped: Vec<SkippedOperation>,
}

/// Imports a document for a project. Fails if it is not a valid OpenAPI document.
pub fn import(
    document: &Value,
    project: &str,
    wanted: &ImportOptions,
    timeout_ms: u64,
) -> Result<ImportReport, String> {
    let document = OpenApiDocument::new(document)?;
    let paths = document.root["paths"].as_object();
    let paths = paths.ok_or("the document has no paths, so there is nothing to import")?;
    let mut import = ImportReport::default();
    let mut names = std::collections::BTreeSet::new();
    for (path, given) in paths {
        let item = match document.resolve(given) {
            Ok(item) => item,
            Err(reason) => {
                import.skipped.push(SkippedOperation { operation: path.clone(), reason });
                continue;
            }
        };
        for method in METHODS {
            let Some(operation) = item.get(method.to_ascii_lowercase()) else { continue };
            if import.tools.len() + import.skipped.len() >= MAX_OPERATIONS {
                return Err(format!("the document has more than {MAX_OPERATIONS} operations"));
            }
            let place = DocumentOperation { path, method, item, operation };
            let named = format!("{method} {path}");
            match import_operation(&document, &place, project, wanted, timeout_ms) {
                Ok(tool) if names.insert(tool.definition.name.clone()) => import.tools.push(tool),
                // Of two operations with one `operationId`, the second is named by its method and
                // path.
                Ok(mut tool) => {
                    match tool_name(&place, wanted.prefix.as_deref(), NameOrigin::MethodAndPath) {
                        Ok(other) if names.insert(other.clone()) => {
                            tool.definition.name = other;
                            import.tools.push(tool);
                        }
                        _ => {
                            let reason = format!("its name {} is another's", tool.definition.name);
                            import.skipped.push(SkippedOperation { operation: named, reason });
                        }
                    }
                }
                Err(reason) => import.skipped.push(SkippedOperation { operation: named, reason }),
            }
        }
    }
    Ok(import)
}

fn import_operation(
    document: &OpenApiDocument<'_>,
    at: &DocumentOperation<'_>,
    project: &str,
    wanted: &ImportOptions,
    timeout_ms: u64,
) -> Result<ImportedTool, String> {
    if at.method == "TRACE" {
        return Err("the method TRACE is not sent".to_owned());
    }
    let name = tool_name(at, wanted.prefix.as_deref(), NameOrigin::OperationId)?;
    let scope = wanted.prefix.as_deref().unwrap_or(document.title);
    let made = operations::parse_operation(document, at, wanted.server.as_deref(), scope)?;
    check_array_items(&made.parameters, "")?;
    let options = json!({ "http": made.http });
    let envs: Vec<String> =
        made.http.auth.iter().flat_map(|auth| auth.envs()).map(str::to_owned).collect();
    let url = made.http.url.clone();
    let plan = HttpToolSpec::from_options(&options)?;
    let definition = ToolDefinition {
        project: Some(project.to_owned()),
        name,
        description: description(at),
        executor: Executor::HTTP,
        input_schema: Json::from_value(&made.parameters),
        output_schema: None,
        // The call's timeout must not be shorter than the operation's own.
        timeout_ms: plan.timeout_ms(&options).map_or(timeout_ms, |own_ms| own_ms.max(timeout_ms)),
        background: false,
        effect: infer_effect(at)?,
        risk: Risk::default(),
        policy: ExecutionPolicyPatch::default(),
        fallback: Vec::new(),
        metadata: None,
        binding: Some(Binding {
            target_subject: None,
            after_execution: AfterExecution::Suspend,
            options: Json::from_value(&options),
            parameters: None,
        }),
    };
    let entry = toolcrib::registry::CatalogEntry::compile(definition);
    let definition = entry.map_err(|fault| fault.message)?.definition;
    Ok(ImportedTool { definition, operation: format!("{} {}", at.method, at.path), url, envs })
}

/// Infers the effect from the method: GET and HEAD read, PUT and DELETE are idempotent, the rest is
/// irreversible. `x-toolcrib-effect` overrides it.
fn infer_effect(at: &DocumentOperation<'_>) -> Result<Effect, String> {
    let said = at.operation.get("x-toolcrib-effect").or_else(|| at.item.get("x-toolcrib-effect"));
    match said {
        Some(said) => serde_json::from_value(said.clone()).map_err(|_| {
            format!("x-toolcrib-effect must be read, idempotent or irreversible, not {said}")
        }),
        None => Ok(match at.method {
            "GET" | "HEAD" | "OPTIONS" => Effect::Read,
            "PUT" | "DELETE" => Effect::Idempotent,
            _ => Effect::Irreversible,
        }),
    }
}

/// The origin of a tool name.
#[derive(Clone, Copy, PartialEq, Eq)]
enum NameOrigin {
    /// The `operationId`, if there is one.
    OperationId,
    /// The method and the path.
    MethodAndPath,
}

/// Returns the tool name: the `operationId`, or the method and the path, in the characters that a
/// name may have.
fn tool_name(
    at: &DocumentOperation<'_>,
    prefix: Option<&str>,
    by: NameOrigin,
) -> Result<String, String> {
    let own = at.operation["operationId"].as_str().map(str::trim).filter(|id| !id.is_empty());
    let base = match own.filter(|_| by == NameOrigin::OperationId) {
        Some(id) => sanitize_name(id),
        None => sanitize_name(&format!("{}_{}", at.method.to_ascii_lowercase(), at.path)),
    };
    let name = match prefix {
        Some(prefix) => format!("{prefix}.{base}"),
        None => base,
    };
    let name: String = name.chars().take(128).collect();
    let name = name.trim_end_matches(['.', '_', '-']).to_owned();
    check_tool_name(&name).map_err(|error| error.to_string())?;
    if RESERVED_NAMES.contains(&name.as_str()) {
        return Err(format!("{name} is a reserved name; import with a prefix"));
    }
    Ok(name)
}

/// Replaces every sequence of other characters with one underscore.
fn sanitize_name(text: &str) -> String {
    let mut made = String::with_capacity(text.len());
    for c in text.chars() {
        let keep = c.is_ascii_alphanumeric() || matches!(c, '_' | '-');
        let last = made.chars().last();
        match (keep, c) {
            (true, c) => made.push(c),
            (false, '.') if last.is_some_and(|last| last != '.' && last != '_') => made.push('.'),
            (false, _) if last.is_some_and(|last| last != '_' && last != '.') => made.push('_'),
            _ => {}
        }
    }
    made.trim_start_matches(['_', '-', '.']).trim_end_matches(['_', '.']).to_owned()
}

fn description(at: &DocumentOperation<'_>) -> String {
    let text = |of: &Value, name: &str| of[name].as_str().unwrap_or_default().trim().to_owned();
    let (summary, more) = (text(at.operation, "summary"), text(at.operation, "description"));
    let whole = match (summary.is_empty(), more.is_empty()) {
        (false, false) if more.starts_with(&summary) => more,
        (false, false) => format!("{}. {more}", summary.trim_end_matches('.')),
        (false, true) => summary,
        (true, false) => more,
        (true, true) => format!("{} {}", at.method, at.path),
    };
    whole.chars().take(4_000).collect()
}
