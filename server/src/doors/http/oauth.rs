//! Where issuers of tokens send a person's browser back to, and where they read who we are.
//!
//! Nobody has a key here: what is trusted is a state that nobody can guess, that is good for one
//! time and a short while, and that one source waits for.

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

/// The longest value that an issuer may send back.
const LONGEST: usize = 8 << 10;

pub(super) fn routes() -> OpenApiRouter<Door> {
    OpenApiRouter::new().routes(routes!(callback)).routes(routes!(client))
}

/// What an issuer sends back.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct Brought {
    /// Which sign-in it is about.
    state: Option<String>,
    /// What is exchanged for the tokens.
    code: Option<String>,
    /// Who sends it.
    iss: Option<String>,
    /// Why there is no code.
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

/// The end of a sign-in at an MCP server: a person's browser is sent here by the issuer of tokens.
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

/// Plain text, which no browser takes for anything else, and which nobody keeps.
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

/// Who we are to issuers that read that in place of a registration.
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
