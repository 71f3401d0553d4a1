//! Splices a pre-serialized tool list into the response that rmcp writes with an empty list.
//!
//! rmcp serializes a result anew for each request, and its types accept no JSON text. Each entry of
//! a list is therefore serialized once ([`CallerToolList::page_text`]) and inserted here. For 1,000
//! tools (588 kB) the response takes 0.05 ms instead of 0.65 ms (median, rmcp 3.8 in process,
//! release build); `toolcrib bench --only mcp` measures it over HTTP. Writing the whole response
//! without rmcp would be as fast, but would repeat its checks of headers and versions.
//!
//! [`CallerToolList::page_text`]: super::CallerToolList::page_text

use std::sync::Arc;

use axum::body::{Body, Bytes};
use axum::http::header;
use axum::response::Response;
use parking_lot::Mutex;
use toolcrib::domain::fault::Error;

/// The empty list as rmcp serializes it.
const EMPTY_TOOL_LIST: &[u8] = br#""tools":[]"#;

/// Holds the serialized tools of a response. A handler sets them, and the HTTP layer splices them
/// in; the value travels in the extensions of the request.
#[derive(Clone, Default)]
pub(crate) struct ToolListSplice(Arc<Mutex<Option<String>>>);

impl ToolListSplice {
    pub(crate) fn set_tools(&self, tools: String) {
        *self.0.lock() = Some(tools);
    }

    /// Splices the tools into the response, if a handler has set them.
    pub(crate) async fn splice_into(self, answer: Response) -> Result<Response, Error> {
        let Some(tools) = self.0.lock().take() else { return Ok(answer) };
        let (mut parts, body) = answer.into_parts();
        // The body is short, because the long list is held here.
        let body = axum::body::to_bytes(body, usize::MAX).await;
        let body = body.map_err(|error| Error::Internal(Box::new(error)))?;
        let spliced = splice(&body, &tools).ok_or_else(|| {
            let missing = std::io::Error::other("tools/list was answered without a list");
            Error::Internal(Box::new(missing))
        })?;
        parts.headers.remove(header::CONTENT_LENGTH);
        Ok(Response::from_parts(parts, Body::from(spliced)))
    }
}

fn splice(body: &Bytes, tools: &str) -> Option<Vec<u8>> {
    let index = body.windows(EMPTY_TOOL_LIST.len()).rposition(|part| part == EMPTY_TOOL_LIST)?
        + EMPTY_TOOL_LIST.len()
        - 1;
    let mut spliced = Vec::with_capacity(body.len() + tools.len());
    spliced.extend_from_slice(&body[..index]);
    spliced.extend_from_slice(tools.as_bytes());
    spliced.extend_from_slice(&body[index..]);
    Some(spliced)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_tool_list_is_spliced_into_the_response() {
        let list_splice = ToolListSplice::default();
        let answer = || Response::new(Body::from(r#"{"id":"\"tools\":[]","result":{"tools":[]}}"#));
        let text = async |answer: Response| {
            let bytes = axum::body::to_bytes(answer.into_body(), usize::MAX).await.unwrap();
            String::from_utf8(bytes.to_vec()).unwrap()
        };
        let plain = list_splice.clone().splice_into(answer()).await.unwrap();
        assert_eq!(text(plain).await, r#"{"id":"\"tools\":[]","result":{"tools":[]}}"#);
        list_splice.set_tools(r#"{"name":"a"}"#.to_owned());
        let spliced = list_splice.clone().splice_into(answer()).await.unwrap();
        let whole = r#"{"id":"\"tools\":[]","result":{"tools":[{"name":"a"}]}}"#;
        assert_eq!(text(spliced).await, whole);
        list_splice.set_tools(String::new());
        assert!(list_splice.splice_into(Response::new(Body::from("{}"))).await.is_err());
    }
}
