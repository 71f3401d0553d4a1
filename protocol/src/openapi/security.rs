//! The credentials of an operation, as names of environment variables.

use serde_json::Value;

use super::document::{DocumentOperation, OpenApiDocument};
use crate::http_operation::{OperationAuth, ParameterLocation};

/// Returns the credentials of the first security requirement that is supported, and whether they
/// are optional. Returns none if the operation needs none.
pub(super) fn parse_security(
    document: &OpenApiDocument<'_>,
    endpoint: &DocumentOperation<'_>,
    scope: &str,
) -> Result<(Vec<OperationAuth>, bool), String> {
    let security = endpoint.operation.get("security").or_else(|| document.root.get("security"));
    let ways = security.and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    let free = |way: &Value| way.as_object().is_some_and(|names| names.is_empty());
    let optional = ways.iter().any(free);
    let mut reason = None;
    for way in ways.iter().filter(|way| !free(way)) {
        let names = way.as_object().into_iter().flatten().map(|(name, _)| name);
        let auth: Result<Vec<OperationAuth>, String> =
            names.map(|name| parse_scheme(document, name, scope)).collect();
        match auth {
            Ok(auth) => return Ok((auth, optional)),
            Err(problem) => reason = Some(problem),
        }
    }
    reason.filter(|_| !optional).map_or(Ok((Vec::new(), false)), Err)
}

fn parse_scheme(
    document: &OpenApiDocument<'_>,
    name: &str,
    scope: &str,
) -> Result<OperationAuth, String> {
    let scheme = &document.root["components"]["securitySchemes"][name];
    if scheme.is_null() {
        return Err(format!("there is no security scheme \"{name}\""));
    }
    let scheme = document.resolve(scheme)?;
    let read_field = |key: &str| scheme[key].as_str().map(str::to_owned);
    let env =
        |end: &str| read_field("x-toolcrib-env").unwrap_or_else(|| variable_name(scope, name, end));
    let http = scheme["scheme"].as_str().unwrap_or_default().to_ascii_lowercase();
    match (scheme["type"].as_str().unwrap_or_default(), http.as_str()) {
        ("http", "basic") => Ok(OperationAuth::Basic {
            username_env: read_field("x-toolcrib-username-env")
                .unwrap_or_else(|| variable_name(scope, name, "USERNAME")),
            password_env: read_field("x-toolcrib-password-env")
                .unwrap_or_else(|| variable_name(scope, name, "PASSWORD")),
        }),
        // The operator obtains the token, by whatever flow the scheme defines.
        ("http", "bearer") | ("oauth2" | "openIdConnect", _) => {
            Ok(OperationAuth::Bearer { env: env("") })
        }
        ("apiKey", _) => {
            let location = match scheme["in"].as_str() {
                Some("query") => ParameterLocation::Query,
                Some("header") => ParameterLocation::Header,
                Some("cookie") => ParameterLocation::Cookie,
                _ => return Err(format!("the security scheme \"{name}\" has no valid location")),
            };
            let key = scheme["name"].as_str().filter(|key| !key.is_empty());
            let key = key.ok_or_else(|| format!("the security scheme \"{name}\" has no name"))?;
            Ok(OperationAuth::ApiKey { location, name: key.to_owned(), env: env("") })
        }
        (kind, _) => {
            Err(format!("the security scheme \"{name}\" ({kind} {http}) is not supported"))
        }
    }
}

/// Returns the variable name: `PETS_API_KEY` for the prefix `pets` and the scheme `api_key`.
fn variable_name(scope: &str, name: &str, end: &str) -> String {
    let mut words = vec![scope, name];
    words.extend(Some(end).filter(|end| !end.is_empty()));
    let mut output = String::new();
    let mut before = ' ';
    for c in words.join("_").chars() {
        match c.is_ascii_alphanumeric() {
            // Splits camel case, so that `apiKey` becomes `API_KEY`.
            true if c.is_ascii_uppercase() && before.is_ascii_lowercase() => {
                output.push('_');
                output.push(c);
            }
            true => output.push(c.to_ascii_uppercase()),
            false if !output.is_empty() && !output.ends_with('_') => output.push('_'),
            false => {}
        }
        before = c;
    }
    output.trim_end_matches('_').to_owned()
}
