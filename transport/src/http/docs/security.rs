//! The credentials that operations need, in the OpenAPI document. The page at `/docs` offers them
//! under Authorize.

use utoipa::Modify;
use utoipa::openapi::OpenApi;
use utoipa::openapi::path::Operation;
use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityRequirement, SecurityScheme};

use super::operations;

/// Name of the scheme for keys and session tokens.
const KEY: &str = "key";

/// Name of the scheme for the operator token.
const OPERATOR: &str = "operator";

/// Beginnings of the paths that only a caller with credentials may use, also on a server without
/// keys.
const OPERATOR_PATHS: [&str; 7] = [
    "/v1/audit",
    "/v1/keys",
    "/v1/limits",
    "/v1/rules",
    "/v1/session_tokens",
    "/v1/sources/mcp",
    "/v1/switches",
];

/// Operations under other paths of which the same is true.
const OPERATOR_OPERATIONS: [(&str, &str); 2] =
    [("post", "/v1/approvals/decide"), ("delete", "/v1/approvals/standing/{standing_id}")];

const OPERATOR_NOTE: &str = "Requires the operator token or a key with the role for it, also on a \
                             server without keys.";

const SESSION_TOKEN_NOTE: &str = "Requires an API key.";

/// Declares bearer authentication for all operations. A server without keys does not require it.
pub(in super::super) struct BearerSecurity;

impl Modify for BearerSecurity {
    fn modify(&self, document: &mut OpenApi) {
        let components = document.components.get_or_insert_default();
        let bearer = |description: &str| {
            let scheme = HttpBuilder::new().scheme(HttpAuthScheme::Bearer);
            SecurityScheme::Http(scheme.description(Some(description)).build())
        };
        let key = "An API key (`tck_…`) or a session token (`tcs_…`). A server without keys \
                   requires none.";
        let operator = "The operator token, for operations of operators: the text of the file \
                        `operator.token` in the data directory of the server.";
        components.add_security_scheme(KEY, bearer(key));
        components.add_security_scheme(OPERATOR, bearer(operator));
        document.security = Some(vec![SecurityRequirement::default(), require(KEY)]);
    }
}

fn require(scheme: &str) -> SecurityRequirement {
    let scopes: [&str; 0] = [];
    SecurityRequirement::new(scheme, scopes)
}

/// Declares the operations that need credentials on every server, and says so in their
/// descriptions.
pub(in super::super) fn add_requirements(mut document: OpenApi) -> OpenApi {
    for (path, method, operation) in operations(&mut document) {
        let is_operators = OPERATOR_PATHS.iter().any(|prefix| path.starts_with(prefix))
            || OPERATOR_OPERATIONS.contains(&(method, path.as_str()));
        if (method, path.as_str()) == ("post", "/v1/session_tokens") {
            operation.security = Some(vec![require(KEY)]);
            add_note(operation, SESSION_TOKEN_NOTE);
        } else if is_operators {
            operation.security = Some(vec![require(OPERATOR), require(KEY)]);
            add_note(operation, OPERATOR_NOTE);
        }
    }
    document
}

fn add_note(operation: &mut Operation, note: &str) {
    let description = operation.description.take().filter(|text| !text.is_empty());
    operation.description = Some(match description {
        Some(text) => format!("{text}\n\n{note}"),
        None => note.to_owned(),
    });
}
