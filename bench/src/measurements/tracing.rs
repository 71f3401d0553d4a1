//! Measures the cost of exporting traces.

use std::time::{Duration, Instant};

use anyhow::ensure;

use super::{Bench, CALLERS, median};
use crate::otlp_sink::OtlpSink;
use crate::report::{Limit, Measurement};

/// Pairs of measurements with and without tracing per round; the divisor that gives the length of
/// one measurement from that of a round, and its minimum length. Other load on the machine makes
/// two measurements differ by a tenth and more, so detecting a difference of a few percent takes
/// many pairs.
pub(super) const PAIRS: usize = 40;
const PAIRS_PER_ROUND: u32 = 20;
const MIN_PAIR_TIME: Duration = Duration::from_millis(100);
/// Maximum time until the first export.
const EXPORT_LIMIT: Duration = Duration::from_secs(15);

impl Bench<'_> {
    /// Measures the cost of exporting traces, against the same server without it. The difference is
    /// small, so the two alternate in many short pairs, and the result is the median of the ratios
    /// of the pairs: other load on the machine affects both halves of a pair.
    pub(super) async fn measure_tracing(&mut self) -> anyhow::Result<()> {
        self.advance_progress("start with tracing and without");
        let sink = OtlpSink::start().await?;
        let settings = [
            ("TOOLCRIB_TELEMETRY__OTLP_ENDPOINT", sink.url.as_str()),
            ("TOOLCRIB_TELEMETRY__SAMPLE_RATIO", "0.1"),
        ];
        let dirs = (self.scratch.dir("traced")?, self.scratch.dir("plain")?);
        let (traced, _) = self.launcher.start_toolcrib(&dirs.0, &settings).await?;
        let (untraced, _) = self.launcher.start_toolcrib(&dirs.1, &[]).await?;
        let (mut ratios, mut baselines) = (Vec::new(), Vec::new());
        let measurement_length = (self.plan.round_length / PAIRS_PER_ROUND).max(MIN_PAIR_TIME);
        for n in 0..PAIRS * self.plan.rounds {
            let (mut with_tracing, mut without_tracing) = (0.0, 0.0);
            let mut pair = [(&traced, &mut with_tracing), (&untraced, &mut without_tracing)];
            pair.rotate_left(n % 2);
            self.advance_progress("with tracing and without");
            for (server, rate) in pair {
                *rate = self
                    .run_load("the product", server, CALLERS, &server.call_path, measurement_length)
                    .await?
                    .calls_per_s;
            }
            ratios.push(with_tracing / without_tracing);
            baselines.push(without_tracing);
        }
        // A batch is sent after five seconds at the latest; a figure without any export would be
        // false.
        let since = Instant::now();
        while sink.trace_bytes() == 0 {
            ensure!(since.elapsed() < EXPORT_LIMIT, "the traced server exported nothing");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        let baseline = median(baselines);
        let with_tracing = baseline * median(ratios);
        let name = format!("traces of 10 %, {CALLERS} at once, against none");
        self.push_measurement(Measurement::against_baseline(
            name,
            "calls/s",
            with_tracing,
            baseline,
            Limit::AtLeast(0.95),
        ));
        Ok(())
    }
}
