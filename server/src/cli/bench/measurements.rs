//! The measurements and their limits.

mod mcp;
mod runs;

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::ensure;
use clap::ValueEnum;
use indicatif::{ProgressBar, ProgressStyle};
use toolcrib_bench::load;
use toolcrib_bench::machine::Machine;
use toolcrib_bench::report::{Limit, Measurement, Report};
use toolcrib_bench::sample::Sample;
use toolcrib_bench::sink::OtlpSink;

use super::{BenchSuite, digest};
use crate::cli::bench::processes::{
    BenchProcess, BenchServer, BenchServerKind, CALL_BODY, ScratchDir, batch_body, call_path,
};
use crate::cli::client::{ApiClient, ApiRequest};
use crate::cli::output::{Output, now_ms};

pub(super) const CALLERS: usize = 64;
const BURST: usize = 100;
/// Number of pages fetched for each filter.
const PAGES: usize = 200;
/// Pairs of measurements with and without tracing per round; the divisor that gives the length of
/// one measurement from that of a round, and its minimum length. Other load on the machine makes
/// two measurements differ by a tenth and more, so detecting a difference of a few percent takes
/// many pairs.
const TRACING_PAIRS: usize = 40;
const PAIRS_PER_ROUND: u32 = 20;
const MIN_PAIR_TIME: Duration = Duration::from_millis(100);
/// Maximum time until the first export.
const EXPORT_LIMIT: Duration = Duration::from_secs(15);
/// Idle time of a server before its memory is measured.
const SETTLE_TIME: Duration = Duration::from_secs(1);

/// The scope of a benchmark run.
#[derive(Debug, Clone)]
pub struct BenchPlan {
    /// Number of rounds, in which Toolcrib and the baseline alternate.
    pub(super) rounds: usize,
    pub(super) round_length: Duration,
    burst_count: usize,
    start_count: usize,
    stored_calls: Option<u64>,
    parts: Vec<BenchSuite>,
}

impl BenchPlan {
    pub fn new(quick: bool, seconds: Option<u64>, stored_calls: Option<u64>) -> Self {
        let parts = BenchSuite::value_variants().to_vec();
        let round_length = Duration::from_secs(seconds.unwrap_or(if quick { 1 } else { 3 }));
        if quick {
            return Self {
                rounds: 1,
                round_length,
                burst_count: 5,
                start_count: 1,
                stored_calls,
                parts,
            };
        }
        Self { rounds: 3, round_length, burst_count: 10, start_count: 3, stored_calls, parts }
    }

    /// Restricts the plan to these parts, if any are given.
    pub fn restrict_to(mut self, parts: Vec<BenchSuite>) -> Self {
        if !parts.is_empty() {
            self.parts.retain(|part| parts.contains(part));
        }
        self
    }

    /// Returns the number of steps on the progress bar.
    fn progress_steps(&self) -> u64 {
        let filled = if self.stored_calls.is_some() { 3 } else { 0 };
        (8 + self.start_count + (15 + TRACING_PAIRS) * self.rounds + filled) as u64
    }
}

pub struct Bench<'a> {
    pub(super) scratch: &'a ScratchDir,
    pub(super) plan: BenchPlan,
    bar: ProgressBar,
    report: Report,
}

impl<'a> Bench<'a> {
    pub fn new(scratch: &'a ScratchDir, plan: BenchPlan, output: Output) -> anyhow::Result<Self> {
        let bar = if output.is_interactive() {
            ProgressBar::new(plan.progress_steps())
        } else {
            ProgressBar::hidden()
        };
        if let Ok(style) = ProgressStyle::with_template("{bar:30} {pos}/{len} {msg} {elapsed}") {
            bar.set_style(style);
        }
        bar.set_message("the machine's flush rate");
        let machine = Machine::probe(scratch.path())?;
        let date = jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
        let report = Report::new(env!("CARGO_PKG_VERSION"), date, machine);
        Ok(Self { scratch, plan, bar, report })
    }

    pub async fn run(mut self) -> anyhow::Result<Report> {
        let measured = self.measure().await;
        self.bar.finish_and_clear();
        measured?;
        Ok(self.report)
    }

    async fn measure(&mut self) -> anyhow::Result<()> {
        for part in self.plan.parts.clone() {
            match part {
                BenchSuite::Calls => self.measure_calls().await?,
                BenchSuite::Tracing => self.measure_tracing().await?,
                BenchSuite::Digest => self.measure_digests()?,
                BenchSuite::Runs => self.measure_runs().await?,
                BenchSuite::Nats => self.measure_nats_tools().await?,
                BenchSuite::Mcp => {
                    self.measure_tools_list().await?;
                    self.measure_mcp_calls().await?;
                }
            }
        }
        match self.plan.stored_calls {
            Some(count) => self.measure_full_store(count).await,
            None => Ok(()),
        }
    }

    async fn measure_calls(&mut self) -> anyhow::Result<()> {
        let product = self.measure_startup().await?;
        self.advance_progress("start of the floor");
        let (floor, _) =
            BenchServer::start(BenchServerKind::Baseline, &self.scratch.dir("floor")?).await?;
        self.advance_progress("warming up");
        for server in [&product, &floor] {
            let time = Duration::from_millis(500);
            load::closed_loop(&server.addr, 8, time, &call_path(), CALL_BODY, None).await?;
        }
        self.measure_throughput(&product, &floor).await?;
        self.measure_latency(&product, &floor).await?;
        self.measure_bursts(&product, &floor).await?;
        self.measure_batches(&product).await?;
        let after = product.resident_mib()?;
        self.push_measurement(Measurement::absolute(
            "memory after the load",
            "MiB",
            after,
            Limit::None,
        ));
        Ok(())
    }

    /// Measures startup with an empty store. Returns the last server, which keeps running.
    async fn measure_startup(&mut self) -> anyhow::Result<BenchServer> {
        let mut times = Vec::new();
        for n in 1..self.plan.start_count {
            self.advance_progress("start with an empty store");
            let dir = self.scratch.dir(&format!("start{n}"))?;
            times.push(
                BenchServer::start(BenchServerKind::Product, &dir).await?.1.as_secs_f64() * 1e3,
            );
        }
        self.advance_progress("start with an empty store");
        let dir = self.scratch.dir("product")?;
        let (product, took) = BenchServer::start(BenchServerKind::Product, &dir).await?;
        times.push(took.as_secs_f64() * 1e3);
        tokio::time::sleep(SETTLE_TIME).await;
        let limit = Limit::AtMost(200.0);
        self.push_measurement(Measurement::absolute(
            "start to first answer, empty store",
            "ms",
            median(times),
            limit,
        ));
        let idle = product.resident_mib()?;
        self.push_measurement(Measurement::absolute(
            "memory idle",
            "MiB",
            idle,
            Limit::AtMost(40.0),
        ));
        Ok(product)
    }

    async fn measure_throughput(
        &mut self,
        product: &BenchServer,
        floor: &BenchServer,
    ) -> anyhow::Result<()> {
        let (mut ours, mut base) = (Vec::new(), Vec::new());
        for _ in 0..self.plan.rounds {
            ours.push(self.sample_calls("the product", product, CALLERS).await?.calls_per_s);
            base.push(self.sample_calls("the floor", floor, CALLERS).await?.calls_per_s);
        }
        let name = format!("invoke and wait, {CALLERS} at once");
        let (ours, base) = (median(ours), median(base));
        self.push_measurement(Measurement::against_baseline(
            name,
            "calls/s",
            ours,
            base,
            Limit::AtLeast(0.6),
        ));
        Ok(())
    }

    async fn measure_latency(
        &mut self,
        product: &BenchServer,
        floor: &BenchServer,
    ) -> anyhow::Result<()> {
        let (mut ours, mut base) = (Vec::new(), Vec::new());
        for _ in 0..self.plan.rounds {
            ours.push(self.sample_calls("the product", product, 1).await?.p50_us as f64);
            base.push(self.sample_calls("the floor", floor, 1).await?.p50_us as f64);
        }
        let (ours, base) = (median(ours), median(base));
        let limit = Limit::AtMost(1.5);
        self.push_measurement(Measurement::against_baseline(
            "one at a time, p50",
            "µs",
            ours,
            base,
            limit,
        ));
        Ok(())
    }

    async fn sample_calls(
        &mut self,
        whose: &str,
        server: &BenchServer,
        callers: usize,
    ) -> anyhow::Result<Sample> {
        self.sample_round(whose, server, callers, &call_path()).await
    }

    pub(super) async fn sample_round(
        &mut self,
        whose: &str,
        server: &BenchServer,
        callers: usize,
        path: &str,
    ) -> anyhow::Result<Sample> {
        self.advance_progress(&format!("{callers} at once: {whose}"));
        self.run_load(whose, server, callers, path, self.plan.round_length).await
    }

    async fn run_load(
        &self,
        whose: &str,
        server: &BenchServer,
        callers: usize,
        path: &str,
        time: Duration,
    ) -> anyhow::Result<Sample> {
        let addr = server.addr.as_str();
        let sample = load::closed_loop(addr, callers, time, path, CALL_BODY, None).await?;
        let (bad, all) = (sample.errors, sample.errors + sample.count);
        ensure!(bad == 0 && all > 0, "{whose} answered {bad} of {all} calls with an error");
        Ok(sample)
    }

    async fn measure_bursts(
        &mut self,
        product: &BenchServer,
        floor: &BenchServer,
    ) -> anyhow::Result<()> {
        let (mut ours, mut base) = (Vec::new(), Vec::new());
        for _ in 0..self.plan.rounds {
            for (whose, server, times) in
                [("the product", product, &mut ours), ("the floor", floor, &mut base)]
            {
                self.advance_progress(&format!("{BURST} from one client: {whose}"));
                let (addr, bursts) = (server.addr.as_str(), self.plan.burst_count);
                let sample =
                    load::burst(addr, BURST, bursts, &call_path(), CALL_BODY, None).await?;
                let bad = sample.errors;
                ensure!(bad == 0, "{whose} answered {bad} calls of a burst with an error");
                times.push(sample.median_us as f64 / 1e3);
            }
        }
        let name = format!("{BURST} calls at once, until all results");
        let (ours, base) = (median(ours), median(base));
        self.push_measurement(Measurement::against_baseline(
            name,
            "ms",
            ours,
            base,
            Limit::AtMost(2.0),
        ));
        Ok(())
    }

    /// Measures many calls in one batch against a single call, both on Toolcrib.
    async fn measure_batches(&mut self, product: &BenchServer) -> anyhow::Result<()> {
        let (body, time) = (batch_body(BURST), self.plan.round_length);
        let (mut many, mut one) = (Vec::new(), Vec::new());
        for _ in 0..self.plan.rounds {
            one.push(self.sample_calls("the product", product, 1).await?.p50_us as f64 / 1e3);
            self.advance_progress(&format!("batches of {BURST}"));
            let path = "/v1/tool_calls?wait_ms=10000";
            let sample = load::batch_loop(&product.addr, BURST, time, path, &body, None).await?;
            let bad = sample.errors;
            ensure!(bad == 0 && sample.count > 0, "{bad} batches had calls that failed");
            many.push(sample.p50_us as f64 / 1e3);
        }
        let name = format!("batch of {BURST} in parallel, against one call alone");
        let (many, one) = (median(many), median(one));
        self.push_measurement(Measurement::against_baseline(
            name,
            "ms",
            many,
            one,
            Limit::AtMost(4.0),
        ));
        Ok(())
    }

    /// Measures the cost of exporting traces, against the same server without it. The difference is
    /// small, so the two alternate in many short pairs, and the result is the median of the ratios
    /// of the pairs: other load on the machine affects both halves of a pair.
    async fn measure_tracing(&mut self) -> anyhow::Result<()> {
        self.advance_progress("start with tracing and without");
        let sink = OtlpSink::start().await?;
        let settings = [
            ("TOOLCRIB_TELEMETRY__OTLP_ENDPOINT", sink.url.as_str()),
            ("TOOLCRIB_TELEMETRY__SAMPLE_RATIO", "0.1"),
        ];
        let dirs = (self.scratch.dir("traced")?, self.scratch.dir("plain")?);
        let (traced, _) =
            BenchServer::start_with(BenchServerKind::Product, &dirs.0, &settings).await?;
        let (plain, _) = BenchServer::start(BenchServerKind::Product, &dirs.1).await?;
        let (mut ratios, mut without) = (Vec::new(), Vec::new());
        let turn = (self.plan.round_length / PAIRS_PER_ROUND).max(MIN_PAIR_TIME);
        for n in 0..TRACING_PAIRS * self.plan.rounds {
            let (mut with, mut plainly) = (0.0, 0.0);
            let mut pair = [(&traced, &mut with), (&plain, &mut plainly)];
            pair.rotate_left(n % 2);
            self.advance_progress("with tracing and without");
            for (server, rate) in pair {
                *rate = self
                    .run_load("the product", server, CALLERS, &call_path(), turn)
                    .await?
                    .calls_per_s;
            }
            ratios.push(with / plainly);
            without.push(plainly);
        }
        // A batch is sent after five seconds at the latest; a figure without any export would be
        // false.
        let since = Instant::now();
        while sink.trace_bytes() == 0 {
            ensure!(since.elapsed() < EXPORT_LIMIT, "the traced server exported nothing");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        let without = median(without);
        let with = without * median(ratios);
        let name = format!("traces of 10 %, {CALLERS} at once, against none");
        self.push_measurement(Measurement::against_baseline(
            name,
            "calls/s",
            with,
            without,
            Limit::AtLeast(0.95),
        ));
        Ok(())
    }
    /// Measures the cost of digesting a long result for a model.
    fn measure_digests(&mut self) -> anyhow::Result<()> {
        self.advance_progress("digests of 10 MB");
        let costs = digest::measure()?;
        let limit = Limit::AtMost(150.0);
        self.push_measurement(Measurement::absolute(
            "digest of a 10 MB JSON result",
            "ms",
            costs.ms,
            limit,
        ));
        let name = "memory with its digest, of its size";
        self.push_measurement(Measurement::absolute(
            name,
            "x",
            costs.memory_ratio,
            Limit::AtMost(3.0),
        ));
        Ok(())
    }

    /// Measures startup, listing and memory on a store that has been in use for a while.
    async fn measure_full_store(&mut self, count: u64) -> anyhow::Result<()> {
        self.advance_progress(&format!("storing {count} finished calls"));
        let dir = self.scratch.dir("stored")?;
        // The steady tick shows activity during this long step.
        self.bar.enable_steady_tick(Duration::from_millis(500));
        BenchProcess::start_fill(&dir, count)?.wait().await?;
        self.bar.disable_steady_tick();
        let size = directory_size_mib(&dir);
        self.push_measurement(Measurement::absolute(
            format!("store with {count} calls"),
            "MiB",
            size,
            Limit::None,
        ));
        self.advance_progress("start with a full store");
        let (product, took) = BenchServer::start(BenchServerKind::Product, &dir).await?;
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

    async fn measure_pages(&mut self, product: &BenchServer, count: u64) -> anyhow::Result<()> {
        let cursor = fetch_deep_cursor(&product.addr).await?;
        // As `bench_fill` writes them: one run per 100 calls, 20 tools, 10 ms between calls.
        let middle_run = count / 200;
        let since = now_ms().saturating_sub(count * 10 / 2);
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

    pub(super) fn push_measurement(&mut self, measure: Measurement) {
        self.report.push(measure);
    }

    pub(super) fn advance_progress(&self, message: &str) {
        self.bar.inc(1);
        self.bar.set_message(message.to_owned());
    }
}

/// Returns the cursor after many pages.
async fn fetch_deep_cursor(addr: &str) -> anyhow::Result<String> {
    let client =
        ApiClient::new(addr, None, None).map_err(|failure| anyhow::anyhow!("{failure}"))?;
    let mut cursor: Option<String> = None;
    for _ in 0..20 {
        let ask = ApiRequest::get(&["v1", "tool_calls"])
            .query("limit", Some(200))
            .query("cursor", cursor.as_deref());
        let page =
            client.request_json(ask).await.map_err(|failure| anyhow::anyhow!("{failure}"))?;
        match page["next_cursor"].as_str() {
            Some(next) => cursor = Some(next.to_owned()),
            None => break,
        }
    }
    cursor.ok_or_else(|| anyhow::anyhow!("the calls that were stored are not listed"))
}

fn directory_size_mib(dir: &Path) -> f64 {
    let files = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let bytes: u64 = files.filter_map(|file| file.metadata().ok()).map(|file| file.len()).sum();
    bytes as f64 / f64::from(1 << 20)
}

/// Returns the median: for an even count the mean of the middle two, for none NaN.
pub(super) fn median(mut figures: Vec<f64>) -> f64 {
    figures.sort_by(f64::total_cmp);
    let middle = figures.len() / 2;
    match figures.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => figures[middle],
        _ => f64::midpoint(figures[middle - 1], figures[middle]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians() {
        assert_eq!(median(vec![3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(vec![4.0, 1.0]), 2.5);
        assert!(median(vec![]).is_nan());
    }

    #[test]
    fn a_quick_plan_is_shorter() {
        let quick = BenchPlan::new(true, None, None);
        let full = BenchPlan::new(false, None, Some(1));
        assert!(
            quick.progress_steps() < full.progress_steps()
                && quick.round_length < full.round_length
        );
        assert_eq!(BenchPlan::new(false, Some(9), None).round_length, Duration::from_secs(9));
    }
}
