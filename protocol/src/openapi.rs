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
use toolcrib::registry::{CatalogEntry, check_array_items};
use toolcrib::schema::CompileBudget;

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
///
/// Compiles the schemas of all operations, within the budget of one request. This can take long:
/// call it on a blocking thread. An operation over the budget is skipped.
pub fn import(
    document: &Value,
    project: &str,
    import_options: &ImportOptions,
    timeout_ms: u64,
) -> Result<ImportReport, String> {
    let document = OpenApiDocument::new(document)?;
    let paths = document.root["paths"].as_object();
    let paths = paths.ok_or("the document has no paths, so there is nothing to import")?;
    let mut import = ImportReport::default();
    let mut names = std::collections::BTreeSet::new();
    let mut budget = CompileBudget::for_request();
    for (path, path_item) in paths {
        let item = match document.resolve(path_item) {
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
            let endpoint = DocumentOperation { path, method, item, operation };
            let label = format!("{method} {path}");
            let definition = build_tool(&document, &endpoint, project, import_options, timeout_ms);
            match definition.and_then(|tool| check_schemas(tool, &mut budget)) {
                Ok(tool) if names.insert(tool.definition.name.clone()) => import.tools.push(tool),
                // Of two operations with one `operationId`, the second is named by its method and
                // path.
                Ok(mut tool) => {
                    match tool_name(
                        &endpoint,
                        import_options.prefix.as_deref(),
                        NameOrigin::MethodAndPath,
                    ) {
                        Ok(other) if names.insert(other.clone()) => {
                            tool.definition.name = other;
                            import.tools.push(tool);
                        }
                        _ => {
                            let reason =
                                format!("its name {} is already used", tool.definition.name);
                            import.skipped.push(SkippedOperation { operation: label, reason });
                        }
                    }
                }
                Err(reason) => import.skipped.push(SkippedOperation { operation: label, reason }),
            }
        }
    }
    Ok(import)
}

fn check_schemas(tool: ImportedTool, budget: &mut CompileBudget) -> Result<ImportedTool, String> {
    let entry = CatalogEntry::compile_within(tool.definition.clone(), budget);
    entry.map(|_| tool).map_err(|fault| fault.message)
}

fn build_tool(
    document: &OpenApiDocument<'_>,
    endpoint: &DocumentOperation<'_>,
    project: &str,
    import_options: &ImportOptions,
    timeout_ms: u64,
) -> Result<ImportedTool, String> {
    if endpoint.method == "TRACE" {
        return Err("the method TRACE is not supported".to_owned());
    }
    let name = tool_name(endpoint, import_options.prefix.as_deref(), NameOrigin::OperationId)?;
    let scope = import_options.prefix.as_deref().unwrap_or(document.title);
    let parsed =
        operations::parse_operation(document, endpoint, import_options.server.as_deref(), scope)?;
    check_array_items(&parsed.parameters, "")?;
    let options = json!({ "http": parsed.http });
    let envs: Vec<String> =
        parsed.http.auth.iter().flat_map(|auth| auth.envs()).map(str::to_owned).collect();
    let url = parsed.http.url.clone();
    let plan = HttpToolSpec::from_options(&options)?;
    let definition = ToolDefinition {
        project: Some(project.to_owned()),
        name,
        description: description(endpoint),
        executor: Executor::HTTP,
        input_schema: Json::from_value(&parsed.parameters),
        output_schema: None,
        // The call's timeout must not be shorter than the operation's own.
        timeout_ms: plan.timeout_ms(&options).map_or(timeout_ms, |tool_ms| tool_ms.max(timeout_ms)),
        background: false,
        effect: infer_effect(endpoint)?,
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
    Ok(ImportedTool {
        definition,
        operation: format!("{} {}", endpoint.method, endpoint.path),
        url,
        envs,
    })
}

/// Infers the effect from the method: GET and HEAD read, PUT and DELETE are idempotent, the rest is
/// irreversible. `x-toolcrib-effect` overrides it.
fn infer_effect(endpoint: &DocumentOperation<'_>) -> Result<Effect, String> {
    let declared = endpoint
        .operation
        .get("x-toolcrib-effect")
        .or_else(|| endpoint.item.get("x-toolcrib-effect"));
    match declared {
        Some(declared) => serde_json::from_value(declared.clone()).map_err(|_| {
            format!("x-toolcrib-effect must be read, idempotent or irreversible, not {declared}")
        }),
        None => Ok(match endpoint.method {
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
    endpoint: &DocumentOperation<'_>,
    prefix: Option<&str>,
    origin: NameOrigin,
) -> Result<String, String> {
    let operation_id =
        endpoint.operation["operationId"].as_str().map(str::trim).filter(|id| !id.is_empty());
    let base = match operation_id.filter(|_| origin == NameOrigin::OperationId) {
        Some(id) => sanitize_name(id),
        None => {
            sanitize_name(&format!("{}_{}", endpoint.method.to_ascii_lowercase(), endpoint.path))
        }
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
    let mut output = String::with_capacity(text.len());
    for c in text.chars() {
        let keep = c.is_ascii_alphanumeric() || matches!(c, '_' | '-');
        let last = output.chars().last();
        match (keep, c) {
            (true, c) => output.push(c),
            (false, '.') if last.is_some_and(|last| last != '.' && last != '_') => output.push('.'),
            (false, _) if last.is_some_and(|last| last != '_' && last != '.') => output.push('_'),
            _ => {}
        }
    }
    output.trim_start_matches(['_', '-', '.']).trim_end_matches(['_', '.']).to_owned()
}

fn description(endpoint: &DocumentOperation<'_>) -> String {
    let text =
        |object: &Value, name: &str| object[name].as_str().unwrap_or_default().trim().to_owned();
    let (summary, more) =
        (text(endpoint.operation, "summary"), text(endpoint.operation, "description"));
    let whole = match (summary.is_empty(), more.is_empty()) {
        (false, false) if more.starts_with(&summary) => more,
        (false, false) => format!("{}. {more}", summary.trim_end_matches('.')),
        (false, true) => summary,
        (true, false) => more,
        (true, true) => format!("{} {}", endpoint.method, endpoint.path),
    };
    whole.chars().take(4_000).collect()
}
