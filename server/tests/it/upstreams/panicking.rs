//! A fault of our own in keeping an upstream: it is begun again, and its calls do not hang.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use async_trait::async_trait;
use toolcrib::tool::Definition;
use toolcrib_server::outbound::Outbound;
use toolcrib_server::sources::mcp::{Ledger, Phase, Upstreams};

use super::at;
use crate::support::until;
use crate::support::upstream::Http;

/// Panics when it is first asked.
#[derive(Default)]
struct Torn(AtomicU64);

#[async_trait]
impl Ledger for Torn {
    fn known(&self, _project: &str, _upstream: &str) -> BTreeMap<String, Definition> {
        assert!(self.0.fetch_add(1, Ordering::SeqCst) > 0, "meant to be");
        BTreeMap::new()
    }

    async fn keep(
        &self,
        _project: &str,
        _upstream: &str,
        _tools: Vec<Definition>,
        _why: &str,
    ) -> Result<Vec<(String, String)>, String> {
        Ok(Vec::new())
    }

    async fn grant(&self, _project: &str, _upstream: &str) -> Result<Option<String>, String> {
        Ok(None)
    }

    async fn keep_grant(
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
async fn one_whose_supervision_panics_is_begun_again() {
    let upstream = Http::start().await;
    let upstreams = Upstreams::new(Outbound::new("upstreams", true, &[]), String::new());
    upstreams.open(Arc::new(Torn::default()));
    upstreams.set(vec![at(&upstream.url())]);
    let shown = || upstreams.one("default", "fixture").unwrap().state;
    let waiting = until("it to wait", || async {
        Some(shown()).filter(|state| state.phase == Phase::Waiting)
    })
    .await;
    assert!(waiting.problem.unwrap().contains("a fault of Toolcrib's own"));
    until("it to be there", || async { (shown().phase == Phase::Ready).then_some(()) }).await;
    upstreams.close().await;
}
