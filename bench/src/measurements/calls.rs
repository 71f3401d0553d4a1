//! Measures calls of a built-in tool: startup, memory, throughput, latency, bursts and batches.

use std::time::Duration;

use anyhow::ensure;
use serde_json::json;
use toolcrib::registry::name_for_model;

use super::{Bench, CALLERS, SETTLE_TIME, median};
use crate::load;
use crate::processes::{CALL_BODY, MeasuredServer, TOOL};
use crate::report::{Limit, Measurement};

/// Number of calls that one client sends at once.
const BURST: usize = 100;

impl Bench<'_> {
    /// Measures startup, memory, single calls, concurrent calls and batches.
    pub(super) async fn measure_calls(&mut self) -> anyhow::Result<()> {
        let product = self.measure_startup().await?;
        self.advance_progress("start of the baseline");
        let baseline = self.launcher.start_baseline(&self.scratch.dir("floor")?, None).await?;
        self.advance_progress("warming up");
        for server in [&product, &baseline] {
            let time = Duration::from_millis(500);
            load::closed_loop(&server.addr, 8, time, &server.call_path, CALL_BODY, None).await?;
        }
        self.measure_throughput(&product, &baseline).await?;
        self.measure_latency(&product, &baseline).await?;
        self.measure_bursts(&product, &baseline).await?;
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
    async fn measure_startup(&mut self) -> anyhow::Result<MeasuredServer> {
        let mut times = Vec::new();
        for n in 1..self.plan.start_count {
            self.advance_progress("start with an empty store");
            let dir = self.scratch.dir(&format!("start{n}"))?;
            times.push(self.launcher.start_toolcrib(&dir, &[]).await?.1.as_secs_f64() * 1e3);
        }
        self.advance_progress("start with an empty store");
        let dir = self.scratch.dir("product")?;
        let (product, took) = self.launcher.start_toolcrib(&dir, &[]).await?;
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
        product: &MeasuredServer,
        baseline: &MeasuredServer,
    ) -> anyhow::Result<()> {
        let (mut measured, mut base) = (Vec::new(), Vec::new());
        for _ in 0..self.plan.rounds {
            measured.push(self.sample_calls("the product", product, CALLERS).await?.calls_per_s);
            base.push(self.sample_calls("the floor", baseline, CALLERS).await?.calls_per_s);
        }
        let name = format!("invoke and wait, {CALLERS} at once");
        let (measured, base) = (median(measured), median(base));
        self.push_measurement(Measurement::against_baseline(
            name,
            "calls/s",
            measured,
            base,
            Limit::AtLeast(0.6),
        ));
        Ok(())
    }

    async fn measure_latency(
        &mut self,
        product: &MeasuredServer,
        baseline: &MeasuredServer,
    ) -> anyhow::Result<()> {
        let (mut measured, mut base) = (Vec::new(), Vec::new());
        for _ in 0..self.plan.rounds {
            measured.push(self.sample_calls("the product", product, 1).await?.p50_us as f64);
            base.push(self.sample_calls("the floor", baseline, 1).await?.p50_us as f64);
        }
        let (measured, base) = (median(measured), median(base));
        let limit = Limit::AtMost(1.5);
        self.push_measurement(Measurement::against_baseline(
            "one at a time, p50",
            "µs",
            measured,
            base,
            limit,
        ));
        Ok(())
    }

    async fn measure_bursts(
        &mut self,
        product: &MeasuredServer,
        baseline: &MeasuredServer,
    ) -> anyhow::Result<()> {
        let (mut measured, mut base) = (Vec::new(), Vec::new());
        for _ in 0..self.plan.rounds {
            for (subject, server, times) in
                [("the product", product, &mut measured), ("the floor", baseline, &mut base)]
            {
                self.advance_progress(&format!("{BURST} from one client: {subject}"));
                let (addr, bursts) = (server.addr.as_str(), self.plan.burst_count);
                let sample =
                    load::burst(addr, BURST, bursts, &server.call_path, CALL_BODY, None).await?;
                let bad = sample.errors;
                ensure!(bad == 0, "{subject} answered {bad} calls of a burst with an error");
                times.push(sample.median_us as f64 / 1e3);
            }
        }
        let name = format!("{BURST} calls at once, until all results");
        let (measured, base) = (median(measured), median(base));
        self.push_measurement(Measurement::against_baseline(
            name,
            "ms",
            measured,
            base,
            Limit::AtMost(2.0),
        ));
        Ok(())
    }

    /// Measures many calls in one batch against a single call, both on Toolcrib.
    async fn measure_batches(&mut self, product: &MeasuredServer) -> anyhow::Result<()> {
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
}

/// Returns the body of a batch of calls, in the form that a model uses.
fn batch_body(entries: usize) -> String {
    let arguments = r#"{"expression":"0"}"#;
    let function = json!({ "name": name_for_model(TOOL), "arguments": arguments });
    let entry = json!({ "id": "call_0", "type": "function", "function": function });
    let entries = vec![entry; entries];
    json!({ "run_id": "run_bench", "mode": "parallel", "tool_calls": entries }).to_string()
}
