//! The server card (SEP-2127): what an MCP client needs to know before it connects. It is public
//! and names no tools.

use axum::http::request::Parts;
use axum::http::{HeaderName, HeaderValue, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

/// The well-known path of the card, and the path that the specification reserves for the card of
/// one MCP endpoint.
pub(super) const CARD_PATHS: [&str; 2] = ["/.well-known/mcp/server-card.json", "/mcp/server-card"];

/// The well-known path of the list of a host's cards.
pub(super) const CATALOG_PATH: &str = "/.well-known/mcp/catalog.json";

const CARD_TYPE: &str = "application/mcp-server-card+json";
const CARD_SCHEMA: &str =
    "https://static.modelcontextprotocol.io/schemas/v2/server-card.schema.json";

/// Returns the URL at which the requester reaches this server.
fn base_url(parts: &Parts, public_url: Option<&str>) -> String {
    if let Some(url) = public_url {
        return url.trim_end_matches('/').to_owned();
    }
    let host = parts.headers.get(header::HOST).and_then(|host| host.to_str().ok());
    format!("http://{}", host.unwrap_or("127.0.0.1:8080"))
}

/// Returns the card.
pub(super) fn card_response(parts: &Parts, public_url: Option<&str>, needs_key: bool) -> Response {
    let url = format!("{}/mcp", base_url(parts, public_url));
    let mut remote = json!({
        "type": "streamable-http", "url": url,
        "supportedProtocolVersions": ["2026-07-28", "2025-11-25", "2025-06-18", "2025-03-26"],
    });
    if needs_key {
        remote["headers"] = json!([{
            "name": "Authorization", "description": "A key of this server: Bearer tck_…",
            "isRequired": true, "isSecret": true,
        }]);
    }
    public_json(
        CARD_TYPE,
        &json!({
            "$schema": CARD_SCHEMA,
            "name": "io.toolcrib/toolcrib",
            "version": env!("CARGO_PKG_VERSION"),
            "title": "Toolcrib",
            "description": "The tool crib for AI agents: durable tool calls through one server",
            "remotes": [remote],
        }),
    )
}

/// Returns the list of cards, which contains only the card of this server.
pub(super) fn catalog_response(parts: &Parts, public_url: Option<&str>) -> Response {
    let base = base_url(parts, public_url);
    let host = base.split("://").nth(1).unwrap_or_default();
    let host = host.split([':', '/']).next().unwrap_or_default();
    public_json(
        "application/json",
        &json!({
            "specVersion": "draft",
            "entries": [{
                "identifier": format!("urn:air:{host}:toolcrib"), "displayName": "Toolcrib",
                "type": CARD_TYPE, "url": format!("{base}{}", CARD_PATHS[1]),
            }],
        }),
    )
}

/// Returns a document that every web page may read and every cache may keep.
fn public_json(media_type: &'static str, body: &Value) -> Response {
    let headers: [(HeaderName, HeaderValue); 5] = [
        (header::CONTENT_TYPE, HeaderValue::from_static(media_type)),
        (header::CACHE_CONTROL, HeaderValue::from_static("public, max-age=3600")),
        (header::ACCESS_CONTROL_ALLOW_ORIGIN, HeaderValue::from_static("*")),
        (header::ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static("GET")),
        (header::ACCESS_CONTROL_ALLOW_HEADERS, HeaderValue::from_static("Content-Type")),
    ];
    (headers, body.to_string()).into_response()
}
