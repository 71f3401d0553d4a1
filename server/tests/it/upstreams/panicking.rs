//! A panic in the supervisor of an upstream: the upstream is restarted and its calls do not hang.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use async_trait::async_trait;
use toolcrib::domain::tool::ToolDefinition;
use toolcrib_protocol::outbound::OutboundPolicy;
use toolcrib_sources::mcp::{McpSource, UpstreamPhase, UpstreamRegistry};

use super::http_upstream;
use crate::support::until;
use crate::support::upstream::Http;

/// A registry that panics on its first request.
#[derive(Default)]
struct PanickingRegistry(AtomicU64);

#[async_trait]
impl UpstreamRegistry for PanickingRegistry {
    fn accepted_tools(&self, _project: &str, _upstream: &str) -> BTreeMap<String, ToolDefinition> {
        assert!(self.0.fetch_add(1, Ordering::SeqCst) > 0, "intended panic");
        BTreeMap::new()
    }

    async fn set_tools(
        &self,
        _project: &str,
        _upstream: &str,
        _tools: Vec<ToolDefinition>,
        _reason: &str,
    ) -> Result<Vec<(String, String)>, String> {
        Ok(Vec::new())
    }

    async fn credential(&self, _project: &str, _upstream: &str) -> Result<Option<String>, String> {
        Ok(None)
    }

    async fn set_credential(
        &self,
        _project: &str,
        _upstream: &str,
        _grant: Option<String>,
    ) -> Result<(), String> {
        Ok(())
    }

    fn default_timeout_ms(&self, _project: &str) -> u64 {
        1_000
    }
}

#[tokio::test]
async fn an_upstream_whose_supervisor_panics_is_restarted() {
    let upstream = Http::start().await;
    let upstreams = McpSource::new(OutboundPolicy::new("upstreams", true, &[]), String::new());
    upstreams.set_registry(Arc::new(PanickingRegistry::default()));
    upstreams.set_servers(vec![http_upstream(&upstream.url())]);
    let current_state = || upstreams.status("default", "fixture").unwrap().state;
    let waiting = until("it to wait", || async {
        Some(current_state()).filter(|state| state.phase == UpstreamPhase::Waiting)
    })
    .await;
    assert!(waiting.problem.unwrap().contains("an internal error of Toolcrib"));
    until("it to be there", || async {
        (current_state().phase == UpstreamPhase::Ready).then_some(())
    })
    .await;
    upstreams.close().await;
}
