//! Explains requests that rmcp could not parse. Without this module, an MCP client that forgot a
//! field would be answered that the method does not exist.

use rmcp::ErrorData;
use rmcp::model::{
    CallToolRequestParams, CancelTaskParams, CompleteRequestParams, CustomRequest, ErrorCode,
    GetPromptRequestParams, GetTaskParams, PaginatedRequestParams, ReadResourceRequestParams,
    UpdateTaskParams,
};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

/// Returns the error for a request that rmcp could not parse. Methods that 2026-07-28 removed count
/// as unknown.
pub(super) fn explain_rejection(request: &CustomRequest) -> ErrorData {
    let method = request.method.as_str();
    let params = request.params.clone().unwrap_or_else(|| Value::Object(Map::new()));
    let problem = match method {
        "tools/call" => params_error::<CallToolRequestParams>(params),
        "tools/list" | "prompts/list" | "resources/list" | "resources/templates/list" => {
            params_error::<PaginatedRequestParams>(params)
        }
        "tasks/get" => params_error::<GetTaskParams>(params),
        "tasks/update" => params_error::<UpdateTaskParams>(params),
        "tasks/cancel" => params_error::<CancelTaskParams>(params),
        "prompts/get" => params_error::<GetPromptRequestParams>(params),
        "resources/read" => params_error::<ReadResourceRequestParams>(params),
        "completion/complete" => params_error::<CompleteRequestParams>(params),
        _ => {
            let excerpt: String = method.chars().take(80).collect();
            let message = format!("there is no method \"{excerpt}\"");
            return ErrorData::new(ErrorCode::METHOD_NOT_FOUND, message, None);
        }
    };
    let problem = problem.unwrap_or_else(|| "they violate the MCP specification".to_owned());
    ErrorData::invalid_params(format!("the params of {method} cannot be read: {problem}"), None)
}

fn params_error<T: DeserializeOwned>(params: Value) -> Option<String> {
    serde_json::from_value::<T>(params).err().map(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn rejected_requests_are_explained() {
        let explain = |method: &str, params: Option<Value>| {
            let error = explain_rejection(&CustomRequest::new(method, params));
            (error.code, error.message.into_owned())
        };
        let (code, message) = explain("tools/call", Some(json!({ "name": "a", "arguments": "b" })));
        assert_eq!(code, ErrorCode::INVALID_PARAMS);
        assert!(message.contains("tools/call") && message.contains("expected a map"), "{message}");
        let (code, message) = explain("tools/call", None);
        assert_eq!(code, ErrorCode::INVALID_PARAMS);
        assert!(message.contains("name"), "{message}");
        assert_eq!(explain("tasks/get", Some(json!({}))).0, ErrorCode::INVALID_PARAMS);
        for removed in ["tools/listen", "logging/setLevel", "resources/subscribe"] {
            assert_eq!(explain(removed, None).0, ErrorCode::METHOD_NOT_FOUND, "{removed}");
        }
    }
}
