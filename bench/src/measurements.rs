//! The measurements and their limits, one module per part of the benchmark.

mod agents;
mod calls;
mod digest;
mod mcp;
mod nats;
mod rules;
mod runs;
mod stored_calls;
mod tracing;
use std::time::Duration;

use anyhow::ensure;
use clap::ValueEnum;
use indicatif::ProgressBar;

use crate::load;
use crate::load::sample::Sample;
use crate::processes::{CALL_BODY, Launcher, MeasuredServer, ScratchDir};
use crate::report::machine::Machine;
use crate::report::{Measurement, Report};

pub use nats::run_tool_service;

/// Number of concurrent callers where many are measured.
const CALLERS: usize = 64;
/// Idle time of a server before its memory is measured.
const SETTLE_TIME: Duration = Duration::from_secs(1);

/// The parts that can be measured separately. The variants have plain comments, because doc
/// comments would lengthen the help.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum BenchSuite {
    // Startup, memory, single calls, concurrent calls and batches
    Calls,
    // Tracing compared with no tracing
    Tracing,
    // Digests of long results
    Digest,
    // Runs with a model
    Runs,
    // Tools over NATS
    Nats,
    // MCP in both directions
    Mcp,
    // Access rules
    Rules,
    // Agents that call agents
    Agents,
}

/// The scope of a benchmark run.
#[derive(Debug, Clone)]
pub struct BenchPlan {
    /// Number of rounds, in which Toolcrib and the baseline alternate.
    rounds: usize,
    round_length: Duration,
    burst_count: usize,
    start_count: usize,
    stored_calls: Option<u64>,
    parts: Vec<BenchSuite>,
}

impl BenchPlan {
    #[must_use]
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
    #[must_use]
    pub fn restrict_to(mut self, parts: Vec<BenchSuite>) -> Self {
        if !parts.is_empty() {
            self.parts.retain(|part| parts.contains(part));
        }
        self
    }

    /// Returns the number of steps on the progress bar.
    #[must_use]
    pub fn progress_steps(&self) -> u64 {
        let stored_steps = if self.stored_calls.is_some() { 3 } else { 0 };
        (11 + self.start_count + (16 + tracing::PAIRS) * self.rounds + stored_steps) as u64
    }
}

/// A benchmark run: measures Toolcrib against the baseline and collects the report.
pub struct Bench<'a> {
    launcher: &'a Launcher,
    scratch: &'a ScratchDir,
    plan: BenchPlan,
    bar: ProgressBar,
    report: Report,
}

impl<'a> Bench<'a> {
    /// Prepares a run and examines the machine.
    ///
    /// # Errors
    ///
    /// When the scratch directory cannot be written or `toolcrib` cannot be run.
    pub fn new(
        launcher: &'a Launcher,
        scratch: &'a ScratchDir,
        plan: BenchPlan,
        bar: ProgressBar,
    ) -> anyhow::Result<Self> {
        bar.set_message("the machine's flush rate");
        let machine = Machine::probe(scratch.path())?;
        let date = jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
        let report = Report::new(launcher.toolcrib_version()?, date, machine);
        Ok(Self { launcher, scratch, plan, bar, report })
    }

    /// Takes all measurements of the plan.
    ///
    /// # Errors
    ///
    /// When a server cannot be started or answers a call with an error.
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
                BenchSuite::Rules => self.measure_rules().await?,
                BenchSuite::Agents => self.measure_agents().await?,
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

    async fn sample_calls(
        &mut self,
        subject: &str,
        server: &MeasuredServer,
        callers: usize,
    ) -> anyhow::Result<Sample> {
        self.sample_round(subject, server, callers, &server.call_path).await
    }

    async fn sample_round(
        &mut self,
        subject: &str,
        server: &MeasuredServer,
        callers: usize,
        path: &str,
    ) -> anyhow::Result<Sample> {
        self.advance_progress(&format!("{callers} at once: {subject}"));
        self.run_load(subject, server, callers, path, self.plan.round_length).await
    }

    async fn run_load(
        &self,
        subject: &str,
        server: &MeasuredServer,
        callers: usize,
        path: &str,
        time: Duration,
    ) -> anyhow::Result<Sample> {
        let addr = server.addr.as_str();
        let sample = load::closed_loop(addr, callers, time, path, CALL_BODY, None).await?;
        let (bad, all) = (sample.errors, sample.errors + sample.count);
        ensure!(bad == 0 && all > 0, "{subject} answered {bad} of {all} calls with an error");
        Ok(sample)
    }

    fn push_measurement(&mut self, measure: Measurement) {
        self.report.push(measure);
    }

    fn advance_progress(&self, message: &str) {
        self.bar.inc(1);
        self.bar.set_message(message.to_owned());
    }
}

/// Returns the median: for an even count the mean of the middle two, for none NaN.
fn median(mut figures: Vec<f64>) -> f64 {
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
    fn the_median_of_odd_even_and_no_values() {
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
