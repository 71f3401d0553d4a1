//! Parses one operation: its URL, parameters, body and credentials.

use serde_json::Value;

use super::document::{DocumentOperation, OpenApiDocument};
use super::parameters::{ArgumentSchema, merge_parameters, parse_parameter};
use super::schema::SchemaTranslator;
use super::{body, security};
use crate::http_operation::{HttpOperation, Parameter, ParameterLocation, ResponseMapping};

/// An operation and the schema of its arguments.
pub(super) struct ParsedOperation {
    pub(super) http: HttpOperation,
    pub(super) parameters: Value,
}

pub(super) fn parse_operation(
    document: &OpenApiDocument<'_>,
    endpoint: &DocumentOperation<'_>,
    server: Option<&str>,
    scope: &str,
) -> Result<ParsedOperation, String> {
    let mut schemas = SchemaTranslator::new(document);
    let mut arguments = ArgumentSchema::default();
    let mut parameters = Vec::new();
    for definition in merge_parameters(document, endpoint)? {
        if let Some(parameter) = parse_parameter(definition, &mut schemas, &mut arguments)? {
            parameters.push(parameter);
        }
    }
    for name in path_placeholders(endpoint.path) {
        let is_declared = parameters
            .iter()
            .any(|p: &Parameter| p.location == ParameterLocation::Path && p.name == name);
        if !is_declared {
            return Err(format!("the path has {{{name}}} and no parameter of that name"));
        }
    }
    let body = body::parse_body(document, endpoint, &mut schemas, &mut arguments)?;
    let (auth, auth_optional) = security::parse_security(document, endpoint, scope)?;
    let http = HttpOperation {
        method: endpoint.method.to_owned(),
        url: format!("{}{}", server_url(document, endpoint, server)?, endpoint.path),
        parameters,
        body,
        headers: [("accept".to_owned(), "application/json, */*;q=0.5".to_owned())].into(),
        auth,
        auth_optional,
        timeout_s: parse_timeout(endpoint)?,
        response: ResponseMapping {
            pointer: endpoint.operation["x-toolcrib-result"].as_str().map(Into::into),
        },
    };
    let schema = arguments.into_schema(schemas.into_defs());
    Ok(ParsedOperation { http, parameters: schema })
}

fn parse_timeout(endpoint: &DocumentOperation<'_>) -> Result<Option<f64>, String> {
    match endpoint.operation.get("x-toolcrib-timeout-s") {
        None => Ok(None),
        Some(declared) => match declared.as_f64().filter(|seconds| *seconds > 0.0) {
            Some(seconds) => Ok(Some(seconds)),
            None => Err("x-toolcrib-timeout-s must be a number of seconds".to_owned()),
        },
    }
}

fn path_placeholders(path: &str) -> Vec<&str> {
    path.split('{').skip(1).filter_map(|part| part.split_once('}')).map(|(name, _)| name).collect()
}

/// Returns the base URL of the API: the requested one, or the first server of the operation, the
/// path or the document, with the defaults of its variables.
fn server_url(
    document: &OpenApiDocument<'_>,
    endpoint: &DocumentOperation<'_>,
    server_url: Option<&str>,
) -> Result<String, String> {
    let servers =
        [&endpoint.operation["servers"], &endpoint.item["servers"], &document.root["servers"]];
    let server = servers.into_iter().find_map(|servers| servers.get(0));
    let declared = server.and_then(|server| server["url"].as_str());
    let mut url = server_url.or(declared).unwrap_or_default().to_owned();
    if server_url.is_none() {
        let variables = server.and_then(|server| server["variables"].as_object());
        for (name, variable) in variables.into_iter().flatten() {
            let value = variable["default"].as_str().unwrap_or_default();
            url = url.replace(&format!("{{{name}}}"), value);
        }
    }
    if !url.starts_with("http://") && !url.starts_with("https://") {
        return Err(format!(
            "the server \"{url}\" is not a whole URL; name one when importing (server=https://…)"
        ));
    }
    Ok(url.trim_end_matches('/').to_owned())
}
