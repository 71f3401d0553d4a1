//! Fetches complete lists from upstreams, page by page. The size is limited, because an upstream
//! may return pages without end.

use std::collections::HashSet;

use rmcp::model::{
    ErrorCode, ListPromptsResult, ListResourceTemplatesResult, ListResourcesResult,
    PaginatedRequestParams, Prompt, Resource, ResourceTemplate, Tool,
};
use rmcp::service::Peer;
use rmcp::{ErrorData, RoleClient, ServiceError};
use serde::Serialize;

use crate::mcp::raw_tool_list::{self, ToolListCapture};

/// Limits of one list.
const MAX_ITEMS: usize = 20_000;
const MAX_PAGES: usize = 2_000;
const MAX_LIST_BYTES: usize = 64 << 20;

/// A page of a list.
trait McpListPage {
    type Item: Serialize;

    fn split(self) -> (Vec<Self::Item>, Option<String>);
}

macro_rules! page {
    ($page:ty, $item:ty, $field:ident) => {
        impl McpListPage for $page {
            type Item = $item;

            fn split(self) -> (Vec<$item>, Option<String>) {
                (self.$field, self.next_cursor)
            }
        }
    };
}

page!(ListResourcesResult, Resource, resources);
page!(ListResourceTemplatesResult, ResourceTemplate, resource_templates);
page!(ListPromptsResult, Prompt, prompts);

fn unbounded_list_error(item_kind: &str, reason: &str) -> ServiceError {
    let message = format!("its list of {item_kind} does not end: {reason}");
    ServiceError::McpError(ErrorData::new(ErrorCode::INTERNAL_ERROR, message, None))
}

/// A writer that counts bytes and discards them.
struct ByteCountWriter(usize);

impl std::io::Write for ByteCountWriter {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0 += bytes.len();
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

async fn fetch_all<P, F>(
    item_kind: &str,
    mut request_page: impl FnMut(Option<PaginatedRequestParams>) -> F,
) -> Result<Vec<P::Item>, ServiceError>
where
    P: McpListPage,
    F: Future<Output = Result<P, ServiceError>>,
{
    let (mut items, mut cursor, mut bytes) = (Vec::new(), None::<String>, ByteCountWriter(0));
    for _ in 0..MAX_PAGES {
        let params = cursor.take().map(|c| PaginatedRequestParams::default().with_cursor(Some(c)));
        let (page, next) = request_page(params).await?.split();
        // A page that cannot be serialized counts as zero bytes.
        let _ = serde_json::to_writer(&mut bytes, &page);
        items.extend(page);
        if items.len() > MAX_ITEMS {
            return Err(unbounded_list_error(item_kind, &format!("{} so far", items.len())));
        }
        if bytes.0 > MAX_LIST_BYTES {
            return Err(unbounded_list_error(item_kind, &format!("{} bytes so far", bytes.0)));
        }
        if next.is_none() {
            return Ok(items);
        }
        cursor = next;
    }
    Err(unbounded_list_error(item_kind, &format!("{MAX_PAGES} pages so far")))
}

/// A listed tool, or the reason why it cannot be used.
#[derive(Serialize)]
#[serde(untagged)]
pub(super) enum UpstreamToolEntry {
    Tool(Box<Tool>),
    Unreadable(String, String),
}

struct ToolListPage(Vec<UpstreamToolEntry>, Option<String>);

impl McpListPage for ToolListPage {
    type Item = UpstreamToolEntry;

    fn split(self) -> (Vec<UpstreamToolEntry>, Option<String>) {
        (self.0, self.1)
    }
}

/// Returns every tool of an upstream, including those that cannot be parsed.
pub(super) async fn tools(
    peer: &Peer<RoleClient>,
    capture: &ToolListCapture,
) -> Result<Vec<UpstreamToolEntry>, ServiceError> {
    let capture_guard = capture.start_capture();
    let capture_guard = &capture_guard;
    let request_page = |page: Option<PaginatedRequestParams>| async move {
        match (peer.list_tools(page).await, capture_guard.take()) {
            (Ok(page), raw_page) => {
                let omitted = raw_page
                    .map(|raw_page| omitted_tools(raw_page, &page.tools))
                    .unwrap_or_default();
                let tools =
                    page.tools.into_iter().map(|tool| UpstreamToolEntry::Tool(Box::new(tool)));
                Ok(ToolListPage(tools.chain(omitted).collect(), page.next_cursor))
            }
            // One malformed tool makes the whole page unreadable for `rmcp`: use the tools parsed
            // one by one.
            (Err(ServiceError::UnexpectedResponse), Some(raw_page)) => {
                Ok(tool_page_from_raw(raw_page))
            }
            (Err(ServiceError::UnexpectedResponse), None) => Err(unreadable()),
            (Err(error), _) => Err(error),
        }
    };
    fetch_all("tools", request_page).await
}

fn unreadable() -> ServiceError {
    let message = "it violates the MCP specification: every tool needs a name that is a string and \
                   an inputSchema that is an object";
    ServiceError::McpError(ErrorData::new(ErrorCode::INTERNAL_ERROR, message, None))
}

fn unreadable_tools(unreadable: Vec<(String, String)>) -> impl Iterator<Item = UpstreamToolEntry> {
    unreadable.into_iter().map(|(name, reason)| UpstreamToolEntry::Unreadable(name, reason))
}

fn tool_page_from_raw(page: raw_tool_list::RawToolPage) -> ToolListPage {
    let tools = page.tools.into_iter().map(|tool| UpstreamToolEntry::Tool(Box::new(tool)));
    ToolListPage(tools.chain(unreadable_tools(page.unreadable)).collect(), page.next)
}

/// Returns the tools that the upstream offers on a page and that `rmcp` omitted.
fn omitted_tools(raw_page: raw_tool_list::RawToolPage, read: &[Tool]) -> Vec<UpstreamToolEntry> {
    let mut omitted: Vec<UpstreamToolEntry> = unreadable_tools(raw_page.unreadable).collect();
    if raw_page.tools.len() == read.len() {
        return omitted;
    }
    let read_names: HashSet<&str> = read.iter().map(|tool| tool.name.as_ref()).collect();
    let reason = "its arguments in headers (x-mcp-header) violate the MCP specification";
    let missing =
        raw_page.tools.into_iter().filter(|tool| !read_names.contains(tool.name.as_ref()));
    omitted.extend(missing.map(|tool| {
        UpstreamToolEntry::Unreadable(tool.name.chars().take(80).collect(), reason.to_owned())
    }));
    omitted
}

/// Returns every resource of an upstream.
pub async fn resources(peer: &Peer<RoleClient>) -> Result<Vec<Resource>, ServiceError> {
    fetch_all("resources", |page| peer.list_resources(page)).await
}

/// Returns every resource template of an upstream.
pub async fn resource_templates(
    peer: &Peer<RoleClient>,
) -> Result<Vec<ResourceTemplate>, ServiceError> {
    fetch_all("templates", |page| peer.list_resource_templates(page)).await
}

/// Returns every prompt of an upstream.
pub async fn prompts(peer: &Peer<RoleClient>) -> Result<Vec<Prompt>, ServiceError> {
    fetch_all("prompts", |page| peer.list_prompts(page)).await
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn page(items: usize, bytes: usize, more: bool) -> ListPromptsResult {
        let prompt = || Prompt::new("p", Some("x".repeat(bytes)), None);
        let mut page = ListPromptsResult::with_all_items((0..items).map(|_| prompt()).collect());
        page.next_cursor = more.then(|| "more".to_owned());
        page
    }

    async fn fetch_pages(items: usize, bytes: usize, pages: usize) -> Result<usize, String> {
        let mut fetched = 0;
        let list = fetch_all("prompts", |_| {
            fetched += 1;
            let page = page(items, bytes, fetched < pages);
            async move { Ok(page) }
        });
        list.await.map(|list| list.len()).map_err(|error| error.to_string())
    }

    #[tokio::test]
    async fn endless_lists_are_cut_off_by_pages_and_size() {
        assert_eq!(fetch_pages(3, 10, 4).await, Ok(12));
        assert!(fetch_pages(0, 0, usize::MAX).await.unwrap_err().contains("2000 pages so far"));
        assert!(fetch_pages(500, 0, usize::MAX).await.unwrap_err().contains("does not end"));
        let heavy = fetch_pages(1, 8 << 20, usize::MAX).await.unwrap_err();
        assert!(heavy.contains("bytes so far"), "{heavy}");
    }
}
