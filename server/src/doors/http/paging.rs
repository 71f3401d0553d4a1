//! Pages of lists: where the next one is, as the body says it and as a header for programs that
//! follow links (RFC 8288).

use axum::Extension;
use axum::Json;
use axum::http::{HeaderValue, Uri, header};
use axum::response::{IntoResponse, Response};
use percent_encoding::{AsciiSet, CONTROLS, utf8_percent_encode};
use serde::Serialize;

/// What must not stand bare in a query, or in the angle brackets of a link.
const QUERY: &AsciiSet = &CONTROLS
    .add(b' ')
    .add(b'"')
    .add(b'#')
    .add(b'<')
    .add(b'>')
    .add(b'&')
    .add(b'+')
    .add(b'%')
    .add(b'=');

/// Belongs to an answer: the cursor of the next page.
#[derive(Clone)]
pub(super) struct Next(String);

/// A page as an answer.
pub(super) fn page(list: impl Serialize, next: Option<String>) -> Response {
    match next {
        Some(cursor) => (Extension(Next(cursor)), Json(list)).into_response(),
        None => Json(list).into_response(),
    }
}

/// Adds the link to the next page, where there is one.
pub(super) fn linked(answer: &mut Response, asked: &Uri) {
    let Some(Next(cursor)) = answer.extensions_mut().remove::<Next>() else { return };
    let others = asked.query().unwrap_or_default().split('&');
    let others = others.filter(|pair| !pair.is_empty() && pair.split('=').next() != Some("cursor"));
    let cursor = format!("cursor={}", utf8_percent_encode(&cursor, QUERY));
    let query: Vec<&str> = others.chain([cursor.as_str()]).collect();
    let link = format!("<{}?{}>; rel=\"next\"", asked.path(), query.join("&"));
    if let Ok(link) = HeaderValue::from_str(&link) {
        answer.headers_mut().insert(header::LINK, link);
    }
}
