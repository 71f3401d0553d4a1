//! Measures a server whose store holds many finished calls: startup, listing and memory.

use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, ensure};
use serde_json::Value;

use super::{Bench, SETTLE_TIME};
use crate::load;
use crate::processes::MeasuredServer;
use crate::report::{Limit, Measurement};

/// Number of pages fetched for each filter.
const PAGES: usize = 200;

impl Bench<'_> {
    /// Measures startup, listing and memory on a store that has been in use for a while.
    pub(super) async fn measure_full_store(&mut self, count: u64) -> anyhow::Result<()> {
        self.advance_progress(&format!("storing {count} finished calls"));
        let dir = self.scratch.dir("stored")?;
        // The steady tick shows activity during this long step.
        self.bar.enable_steady_tick(Duration::from_millis(500));
        self.launcher.start_fill(&dir, count)?.wait().await?;
        self.bar.disable_steady_tick();
        let size = directory_size_mib(&dir);
        self.push_measurement(Measurement::absolute(
            format!("store with {count} calls"),
            "MiB",
            size,
            Limit::None,
        ));
        self.advance_progress("start with a full store");
        let (product, took) = self.launcher.start_toolcrib(&dir, &[]).await?;
        let name = format!("start to first answer, {count} stored");
        let took = took.as_secs_f64() * 1e3;
        self.push_measurement(Measurement::absolute(name, "ms", took, Limit::AtMost(500.0)));
        self.advance_progress("pages of calls");
        self.measure_pages(&product, count).await?;
        tokio::time::sleep(SETTLE_TIME).await;
        let memory = product.resident_mib()?;
        let name = format!("memory, {count} stored, after listing");
        self.push_measurement(Measurement::absolute(name, "MiB", memory, Limit::AtMost(150.0)));
        Ok(())
    }

    async fn measure_pages(&mut self, product: &MeasuredServer, count: u64) -> anyhow::Result<()> {
        let cursor = fetch_deep_cursor(&product.addr).await?;
        // As `fill_store` writes them: one run per 100 calls, 20 tools, 10 ms between calls.
        let middle_run = count / 200;
        let now = SystemTime::now().duration_since(UNIX_EPOCH)?;
        let since = (now.as_millis() as u64).saturating_sub(count * 10 / 2);
        let filters = [
            ("no filter", String::new()),
            ("run_id", format!("run_id=run_{middle_run}")),
            ("tool_name", "tool_name=bench.tool_7".into()),
            ("status", "status=FAILED".into()),
            ("run_id and status", format!("run_id=run_{middle_run}&status=FAILED")),
            ("since", format!("since={since}")),
            ("cursor", format!("cursor={cursor}")),
            (
                "all of them",
                format!("tool_name=bench.tool_10&status=FAILED&since={since}&cursor={cursor}"),
            ),
        ];
        for (name, filter) in filters {
            let path = format!("/v1/tool_calls?limit=50&{filter}");
            let sample = load::get_latencies(&product.addr, &path, PAGES, None).await?;
            ensure!(sample.errors == 0, "{} pages by {name} were refused", sample.errors);
            let p99 = sample.p99_us as f64 / 1e3;
            let name = format!("page of calls by {name}, p99");
            self.push_measurement(Measurement::absolute(name, "ms", p99, Limit::AtMost(50.0)));
        }
        Ok(())
    }
}

/// Returns the cursor after many pages.
async fn fetch_deep_cursor(addr: &str) -> anyhow::Result<String> {
    let client = reqwest::Client::builder().no_proxy().build()?;
    let mut cursor: Option<String> = None;
    for _ in 0..20 {
        let request = client.get(format!("http://{addr}/v1/tool_calls")).query(&[("limit", "200")]);
        let request = request.query(&cursor.as_ref().map(|cursor| [("cursor", cursor)]));
        let page: Value = request.send().await?.error_for_status()?.json().await?;
        match page["next_cursor"].as_str() {
            Some(next) => cursor = Some(next.to_owned()),
            None => break,
        }
    }
    cursor.context("the calls that were stored are not listed")
}

fn directory_size_mib(dir: &Path) -> f64 {
    let files = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let bytes: u64 = files.filter_map(|file| file.metadata().ok()).map(|file| file.len()).sum();
    bytes as f64 / f64::from(1 << 20)
}
