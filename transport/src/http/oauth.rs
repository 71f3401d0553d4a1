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

use super::HttpState;
use super::v1::OauthCallback;

/// Maximum length in bytes of a parameter of the callback.
const MAX_PARAM_BYTES: usize = 8 << 10;

pub(super) fn routes() -> OpenApiRouter<HttpState> {
    OpenApiRouter::new().routes(routes!(callback)).routes(routes!(client_metadata))
}

/// Parameters that an authorization server sends with the redirect.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct OauthCallbackQuery {
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

impl OauthCallbackQuery {
    fn into_callback(self) -> Option<OauthCallback> {
        let all = [&self.state, &self.code, &self.iss, &self.error, &self.error_description];
        if all.into_iter().flatten().any(|value| value.len() > MAX_PARAM_BYTES) {
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
        Some(OauthCallback { state: self.state?, code, issuer: self.iss })
    }
}

/// Completes a sign-in at an MCP server. The authorization server redirects a person's browser
/// here.
#[utoipa::path(get, path = "/oauth/callback", tag = "operators", params(OauthCallbackQuery),
    responses((status = 200, description = "Signed in", content_type = "text/plain"),
        (status = 400, description = "There is no pending sign-in for this link", content_type = "text/plain")))]
async fn callback(
    State(state): State<HttpState>,
    Query(query): Query<OauthCallbackQuery>,
) -> Response {
    let unknown = "There is no pending sign-in for this link: it was already used, or it expired.\n\
                   Start another one with: toolcrib mcp sign-in NAME\n";
    let (Some(sources), Some(returned)) = (&state.sources, query.into_callback()) else {
        return text_response(StatusCode::BAD_REQUEST, unknown.to_owned());
    };
    match sources.complete_sign_in(returned).await {
        None => text_response(StatusCode::BAD_REQUEST, unknown.to_owned()),
        Some((name, Ok(()))) => {
            let message = format!("Toolcrib is signed in to {name}. You can close this page.\n");
            text_response(StatusCode::OK, message)
        }
        Some((name, Err(reason))) => {
            let reason: String = reason.chars().take(500).collect();
            text_response(
                StatusCode::BAD_REQUEST,
                format!("The sign-in to {name} failed: {reason}\n"),
            )
        }
    }
}

/// Builds a plain-text response that browsers neither interpret as another type nor cache.
fn text_response(status: StatusCode, text: String) -> Response {
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
async fn client_metadata(State(state): State<HttpState>) -> Json<Value> {
    let base = state.sources.as_ref().map(|sources| sources.public_base_url()).unwrap_or_default();
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
