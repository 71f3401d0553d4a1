//! Examples in the OpenAPI document: each succeeds when it is sent as it is to a new server, with
//! the credentials that the document requires for it. The page at `/docs` fills its forms with
//! them. The example that makes the first key comes last: from then on, every request needs a key.

use serde_json::{Value, json};
use utoipa::openapi::schema::Schema;
use utoipa::openapi::{OpenApi, RefOr};

use super::operations;

/// Paths that the document lists first, because a reader needs them first. The others follow in
/// alphabetical order.
const FIRST_PATHS: [&str; 5] = [
    "/v1/tools/{name}/invoke",
    "/v1/tools",
    "/v1/tools/{name}",
    "/v1/tool_calls",
    "/v1/tool_calls/{tool_call_id}",
];

/// The example of one operation.
struct OperationExample {
    method: &'static str,
    path: &'static str,
    /// Values of path parameters, by name.
    parameters: &'static [(&'static str, &'static str)],
    /// The body, or null if the operation has none.
    body: Value,
}

fn example(
    method: &'static str,
    path: &'static str,
    parameters: &'static [(&'static str, &'static str)],
    body: Value,
) -> OperationExample {
    OperationExample { method, path, parameters, body }
}

/// Returns the examples of operations about tools, calls and contexts.
fn call_examples() -> Vec<OperationExample> {
    let call = json!({ "call_id": "call_1", "name": "calculation.eval",
        "args": { "expression": "6 * 7" } });
    let forecast = json!({ "name": "demo.forecast", "description": "Returns a forecast",
        "schema": { "type": "object", "properties": { "city": { "type": "string" } } } });
    let context: &[_] = &[("run_id", "run_example")];
    vec![
        example(
            "post",
            "/v1/tools/{name}/invoke",
            &[("name", "calculation.eval")],
            json!({ "run_id": "run_example", "args": { "expression": "6 * 7" } }),
        ),
        example("get", "/v1/tools/{name}", &[("name", "calculation.eval")], Value::Null),
        example(
            "post",
            "/v1/tool_calls",
            &[],
            json!({ "run_id": "run_example", "mode": "parallel", "tool_calls": [call] }),
        ),
        example(
            "post",
            "/internal/tools/register",
            &[],
            json!({ "client_id": "example", "tools": [{ "name": "example.greet",
                "description": "Greets a person", "effect": "read",
                "schema": { "type": "object", "properties": { "name": { "type": "string" } } } }] }),
        ),
        example("get", "/v1/runs/{run_id}/context", context, Value::Null),
        example(
            "put",
            "/v1/runs/{run_id}/context/tool_definitions",
            context,
            json!({ "tool_definitions": [forecast], "crib_tools": ["calculation.eval"] }),
        ),
        example(
            "post",
            "/v1/runs/{run_id}/context/tool_calls",
            context,
            json!({ "tool_calls": [call] }),
        ),
    ]
}

/// Returns the examples of operations with models.
fn model_examples() -> Vec<OperationExample> {
    let question = "What is 6 * 7?";
    let messages = json!([{ "role": "user", "content": question }]);
    vec![
        example(
            "post",
            "/v1/chat/completions",
            &[],
            json!({ "model": "demo", "messages": messages }),
        ),
        example("post", "/v1/responses", &[], json!({ "model": "demo", "input": question })),
        example(
            "post",
            "/v1/runs",
            &[],
            json!({ "model": "demo", "messages": messages, "wait_ms": 10_000 }),
        ),
        example("get", "/v1/models/{model}", &[("model", "demo")], Value::Null),
    ]
}

/// Returns the examples of operations for operators.
fn operator_examples() -> Vec<OperationExample> {
    let rule = json!({ "id": "ada-calculates", "verdict": "allow", "agents": ["ada"],
        "tools": ["calculation.*"] });
    let limit: &[_] = &[("kind", "agent"), ("name", "ada")];
    let switch: &[_] = &[("kind", "tool"), ("name", "example.greet")];
    let project: &[_] = &[("project_id", "default")];
    vec![
        example(
            "post",
            "/projects",
            &[],
            json!({ "project_id": "example", "title": "An example" }),
        ),
        example("get", "/projects/{project_id}/tools", project, Value::Null),
        example("put", "/v1/rules/{id}", &[("id", "ada-calculates")], rule.clone()),
        example("put", "/v1/rules", &[], json!({ "rules": [rule] })),
        example(
            "post",
            "/v1/rules/explain",
            &[],
            json!({ "agent": "ada", "tool": "calculation.eval" }),
        ),
        example("post", "/v1/rules/lint", &[], json!({ "rules": [rule] })),
        example("post", "/v1/rules/rehearse", &[], json!({ "rules": [rule], "days": 7 })),
        example("put", "/v1/limits/{kind}/{name}", limit, json!({ "per_minute": 60 })),
        example(
            "put",
            "/v1/switches/{kind}/{name}",
            switch,
            json!({ "reason": "It is being repaired" }),
        ),
        example("post", "/v1/keys", &[], json!({ "agent": "operator", "roles": ["admin"] })),
    ]
}

/// Adds the examples to the operations of the document.
pub(crate) fn add_examples(mut document: OpenApi) -> OpenApi {
    let examples: Vec<_> =
        [call_examples(), model_examples(), operator_examples()].into_iter().flatten().collect();
    for (path, method, operation) in operations(&mut document) {
        let found = examples.iter().find(|e| e.method == method && e.path == path);
        let Some(OperationExample { parameters, body, .. }) = found else { continue };
        for parameter in operation.parameters.iter_mut().flatten() {
            let RefOr::T(parameter) = parameter else { continue };
            let value = parameters.iter().find(|(name, _)| *name == parameter.name);
            if let (Some((_, value)), Some(RefOr::T(Schema::Object(schema)))) =
                (value, &mut parameter.schema)
            {
                schema.example = Some(Value::from(*value));
            }
        }
        let Some(RefOr::T(request_body)) = &mut operation.request_body else { continue };
        for content in request_body.content.values_mut().filter(|_| !body.is_null()) {
            if let RefOr::T(content) = content {
                content.example = Some(body.clone());
            }
        }
    }
    document
}

/// Returns the document as JSON text, with the paths in the order in which a reader needs them.
pub(crate) fn to_ordered_json(mut document: OpenApi) -> String {
    let paths = std::mem::take(&mut document.paths.paths);
    let position = |path: &str| FIRST_PATHS.iter().position(|first| *first == path);
    let mut paths: Vec<_> = paths.into_iter().collect();
    paths.sort_by(|(a, _), (b, _)| {
        let rank = |path: &str| position(path).unwrap_or(FIRST_PATHS.len());
        rank(a).cmp(&rank(b)).then_with(|| a.cmp(b))
    });
    let items = paths.iter().filter_map(|(path, item)| {
        let item = serde_json::to_string_pretty(item).ok()?;
        Some(format!("    {}: {}", Value::from(path.as_str()), item.replace('\n', "\n    ")))
    });
    let items = items.collect::<Vec<_>>().join(",\n");
    let text = document.to_pretty_json().unwrap_or_default();
    text.replacen("\n  \"paths\": {}", &format!("\n  \"paths\": {{\n{items}\n  }}"), 1)
}
