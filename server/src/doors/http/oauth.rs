//! OAuth endpoints of Toolcrib as a client: the redirect target of a sign-in, and the client
//! metadata document that authorization servers read.
//!
//! These routes require no key. The callback trusts only the `state` parameter: an unguessable
//! value that is valid once, for a short time, and for one source.

use axum::Json;
use axum::extract::{Query, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use serde_json::{Value, json};
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::Door;
use super::v1::Returned;

/// Maximum length in bytes of a parameter of the callback.
const LONGEST: usize = 8 << 10;

pub(super) fn routes() -> OpenApiRouter<Door> {
    OpenApiRouter::new().routes(routes!(callback)).routes(routes!(client))
}

/// Parameters that an authorization server sends with the redirect.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct Brought {
    /// Identifies the sign-in.
    state: Option<String>,
    /// The authorization code, which is exchanged for tokens.
    code: Option<String>,
    /// The issuer of the response.
    iss: Option<String>,
    /// The error code, if there is no authorization code.
    error: Option<String>,
    error_description: Option<String>,
}

impl Brought {
    fn returned(self) -> Option<Returned> {
        let all = [&self.state, &self.code, &self.iss, &self.error, &self.error_description];
        if all.into_iter().flatten().any(|value| value.len() > LONGEST) {
            return None;
        }
        let code = match (self.code, self.error) {
            (Some(code), None) => Ok(code),
            (_, Some(error)) => Err(match self.error_description {
                Some(more) => format!("{error}: {more}"),
                None => error,
            }),
            (None, None) => return None,
        };
        Some(Returned { state: self.state?, code, issuer: self.iss })
    }
}

/// Completes a sign-in at an MCP server. The authorization server redirects a person's browser
/// here.
#[utoipa::path(get, path = "/oauth/callback", tag = "operators", params(Brought),
    responses((status = 200, description = "Signed in", content_type = "text/plain"),
        (status = 400, description = "No sign-in waits for this", content_type = "text/plain")))]
async fn callback(State(door): State<Door>, Query(brought): Query<Brought>) -> Response {
    let over = "No sign-in waits for this: it was used already, or took too long.\n\
                Begin another with: toolcrib mcp sign-in NAME\n";
    let (Some(sources), Some(returned)) = (&door.sources, brought.returned()) else {
        return page(StatusCode::BAD_REQUEST, over.to_owned());
    };
    match sources.signed_in(returned).await {
        None => page(StatusCode::BAD_REQUEST, over.to_owned()),
        Some((name, Ok(()))) => {
            let said = format!("Toolcrib is signed in to {name}. You can close this page.\n");
            page(StatusCode::OK, said)
        }
        Some((name, Err(why))) => {
            let why: String = why.chars().take(500).collect();
            page(StatusCode::BAD_REQUEST, format!("The sign-in to {name} failed: {why}\n"))
        }
    }
}

/// Builds a plain-text response that browsers neither interpret as another type nor cache.
fn page(status: StatusCode, text: String) -> Response {
    let mut headers = HeaderMap::new();
    for (name, value) in [
        (header::CONTENT_TYPE, "text/plain; charset=utf-8"),
        (header::CACHE_CONTROL, "no-store"),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
    (status, headers, text).into_response()
}

/// Client metadata document, for authorization servers that accept one in place of a registration.
#[utoipa::path(get, path = "/oauth/client.json", tag = "operators",
    responses((status = 200, body = Object)))]
async fn client(State(door): State<Door>) -> Json<Value> {
    let base = door.sources.as_ref().map(|sources| sources.base()).unwrap_or_default();
    Json(json!({
        "client_id": format!("{base}/oauth/client.json"),
        "client_name": "Toolcrib",
        "client_uri": base,
        "redirect_uris": [format!("{base}/oauth/callback")],
        "grant_types": ["authorization_code", "refresh_token"],
        "response_types": ["code"],
        "token_endpoint_auth_method": "none",
    }))
}
