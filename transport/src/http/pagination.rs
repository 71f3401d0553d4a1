//! Pagination of lists. A page carries the next cursor in its body and in a `Link` header (RFC
//! 8288), for programs that follow links.

use axum::http::{HeaderValue, Uri, header};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use percent_encoding::{AsciiSet, CONTROLS, utf8_percent_encode};
use serde::Serialize;

/// Characters to escape in a query or in the angle brackets of a link.
const QUERY_ENCODE_SET: &AsciiSet = &CONTROLS
    .add(b' ')
    .add(b'"')
    .add(b'#')
    .add(b'<')
    .add(b'>')
    .add(b'&')
    .add(b'+')
    .add(b'%')
    .add(b'=');

/// A response extension that holds the cursor of the next page.
#[derive(Clone)]
pub(super) struct NextCursor(String);

/// Builds the response of one page.
pub(super) fn page_response(list: impl Serialize, next: Option<String>) -> Response {
    match next {
        Some(cursor) => (Extension(NextCursor(cursor)), Json(list)).into_response(),
        None => Json(list).into_response(),
    }
}

/// Adds the `Link` header for the next page, if there is one.
pub(super) fn add_link_header(answer: &mut Response, uri: &Uri) {
    let Some(NextCursor(cursor)) = answer.extensions_mut().remove::<NextCursor>() else { return };
    let params = uri.query().unwrap_or_default().split('&');
    let params = params.filter(|pair| !pair.is_empty() && pair.split('=').next() != Some("cursor"));
    let cursor = format!("cursor={}", utf8_percent_encode(&cursor, QUERY_ENCODE_SET));
    let query: Vec<&str> = params.chain([cursor.as_str()]).collect();
    let link = format!("<{}?{}>; rel=\"next\"", uri.path(), query.join("&"));
    if let Ok(link) = HeaderValue::from_str(&link) {
        answer.headers_mut().insert(header::LINK, link);
    }
}
