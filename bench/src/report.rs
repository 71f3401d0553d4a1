//! Measurements, their limits, and the report as a table and as JSON.
//!
//! Nothing here measures: this module evaluates given figures. A measurement that cannot be
//! compared (a baseline of zero, a value that is not a number) misses its limit, because a limit
//! that cannot be shown to hold does not hold.

pub mod machine;
use std::fmt::Write as _;

use machine::Machine;
use serde::{Deserialize, Serialize};

/// The limit of a measurement: applies to its ratio when it has a baseline, else to its value.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Limit {
    /// More is better, and the figure must be at least this.
    AtLeast(f64),
    /// Less is better, and the figure must be at most this.
    AtMost(f64),
    /// Reported for information; it can be neither met nor missed.
    #[default]
    None,
}

impl Limit {
    /// Returns true if `figure` is within the limit. NaN is within no limit but [`Limit::None`].
    #[must_use]
    pub fn allows(self, figure: f64) -> bool {
        match self {
            Self::AtLeast(min) => figure >= min,
            Self::AtMost(max) => figure <= max,
            Self::None => true,
        }
    }
}

/// One figure of the report.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Measurement {
    /// The name of the measurement in the table.
    pub name: String,
    /// The unit of `value` and `baseline`: `calls/s`, `µs`, `MiB`.
    pub unit: String,
    /// The figure of the product.
    pub value: f64,
    /// The figure of the baseline in the same run; `floor` in the JSON and in the table.
    #[serde(rename = "floor")]
    pub baseline: Option<f64>,
    /// `value / baseline`; absent when there is no baseline or it was not above zero.
    pub ratio: Option<f64>,
    /// The limit that the figure has to meet.
    pub limit: Limit,
}

impl Measurement {
    /// Creates a measurement with a baseline: the limit applies to `value / baseline`.
    #[must_use]
    pub fn against_baseline(
        name: impl Into<String>,
        unit: impl Into<String>,
        value: f64,
        baseline: f64,
        limit: Limit,
    ) -> Self {
        let ratio = (baseline > 0.0).then_some(value / baseline).filter(|ratio| ratio.is_finite());
        Self { baseline: Some(baseline), ratio, ..Self::absolute(name, unit, value, limit) }
    }

    /// Creates a measurement without a baseline: the limit applies to `value`.
    #[must_use]
    pub fn absolute(
        name: impl Into<String>,
        unit: impl Into<String>,
        value: f64,
        limit: Limit,
    ) -> Self {
        Self { name: name.into(), unit: unit.into(), value, baseline: None, ratio: None, limit }
    }

    /// Returns true if the limit holds (always, when there is none).
    #[must_use]
    pub fn passed(&self) -> bool {
        let figure =
            if self.baseline.is_some() { self.ratio.unwrap_or(f64::NAN) } else { self.value };
        self.limit.allows(figure)
    }

    fn cells(&self) -> [String; 6] {
        let with_unit = |value: f64| format!("{} {}", format_figure(value), self.unit);
        // A limit on a ratio is printed as a ratio, so that the two columns can be compared.
        let bound = |sign: &str, bound: f64| {
            if self.baseline.is_some() {
                format!("{sign} {bound:.2}x")
            } else {
                format!("{sign} {}", with_unit(bound))
            }
        };
        let (limit, outcome) = match self.limit {
            Limit::AtLeast(min) => (bound(">=", min), self.outcome()),
            Limit::AtMost(max) => (bound("<=", max), self.outcome()),
            Limit::None => ("-".to_owned(), "-"),
        };
        let absent = || "-".to_owned();
        [
            self.name.clone(),
            with_unit(self.value),
            self.baseline.map_or_else(absent, with_unit),
            self.ratio.map_or_else(absent, |ratio| format!("{ratio:.2}x")),
            limit,
            outcome.to_owned(),
        ]
    }

    fn outcome(&self) -> &'static str {
        if self.passed() { "ok" } else { "missed" }
    }
}

/// All measurements of one run, and the machine on which they were taken.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// Version of the measured product.
    pub version: String,
    /// The time of the measurement, as the caller wrote it: this crate does not choose a format.
    pub date: String,
    /// The machine on which it was measured.
    pub machine: Machine,
    /// The measurements, in the order in which they are printed.
    pub measures: Vec<Measurement>,
}

impl Report {
    /// Creates a report without measurements.
    #[must_use]
    pub fn new(version: impl Into<String>, date: impl Into<String>, machine: Machine) -> Self {
        Self { version: version.into(), date: date.into(), machine, measures: Vec::new() }
    }

    /// Adds a measurement at the end.
    pub fn push(&mut self, measure: Measurement) {
        self.measures.push(measure);
    }

    /// Returns true if every limit holds.
    #[must_use]
    pub fn passed(&self) -> bool {
        self.measures.iter().all(Measurement::passed)
    }

    /// Formats the report for people: the facts in two lines, then one aligned line per
    /// measurement.
    #[must_use]
    pub fn table(&self) -> String {
        let machine = &self.machine;
        let mut text = format!(
            "toolcrib {}, {}, {} cores, kernel {}\nfsync/s: {} append, {} overwrite\n\n",
            self.version,
            self.date,
            machine.cores,
            machine.kernel,
            format_figure(machine.fsync_append_per_s),
            format_figure(machine.fsync_overwrite_per_s),
        );
        let heads = ["measure", "value", "floor", "ratio", "limit", ""].map(str::to_owned);
        let rows: Vec<[String; 6]> =
            std::iter::once(heads).chain(self.measures.iter().map(Measurement::cells)).collect();
        let mut widths = [0; 6];
        for row in &rows {
            for (width, cell) in widths.iter_mut().zip(row) {
                // Characters and not bytes: "µs" is three bytes and two columns.
                *width = cell.chars().count().max(*width);
            }
        }
        for row in &rows {
            push_row(&mut text, row, &widths);
        }
        text
    }

    /// Formats the report for programs.
    ///
    /// # Errors
    ///
    /// Never for a report made by this crate; the error is serde's.
    pub fn json(&self) -> serde_json::Result<String> {
        serde_json::to_string_pretty(self)
    }
}

fn push_row(text: &mut String, row: &[String; 6], widths: &[usize; 6]) {
    let mut line = String::new();
    for (column, (cell, &width)) in row.iter().zip(widths).enumerate() {
        // Names and outcomes are words and align left; the columns between them end in a unit and
        // align right.
        // Writing to a String cannot fail.
        let _ = match column {
            0 => write!(line, "{cell:<width$}"),
            5 => write!(line, "  {cell:<width$}"),
            _ => write!(line, "  {cell:>width$}"),
        };
    }
    text.push_str(line.trim_end());
    text.push('\n');
}

/// Formats a figure with enough digits to compare: none after the decimal point from a hundred on,
/// more for small figures.
fn format_figure(value: f64) -> String {
    match value.abs() {
        size if size >= 100.0 => format!("{value:.0}"),
        size if size >= 10.0 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn calls(value: f64, baseline: f64, limit: Limit) -> Measurement {
        Measurement::against_baseline("invoke", "calls/s", value, baseline, limit)
    }

    #[test]
    fn with_a_baseline_the_limit_applies_to_the_ratio() {
        assert!(calls(50.0, 100.0, Limit::AtLeast(0.5)).passed());
        assert!(!calls(49.0, 100.0, Limit::AtLeast(0.5)).passed());
        assert!(calls(200.0, 100.0, Limit::AtMost(2.0)).passed());
        assert!(!calls(201.0, 100.0, Limit::AtMost(2.0)).passed());
    }

    #[test]
    fn without_a_baseline_the_limit_applies_to_the_value() {
        assert!(Measurement::absolute("memory", "MiB", 40.0, Limit::AtMost(40.0)).passed());
        assert!(!Measurement::absolute("memory", "MiB", 41.0, Limit::AtMost(40.0)).passed());
        assert!(Measurement::absolute("memory", "MiB", 1e9, Limit::None).passed());
    }

    #[test]
    fn a_measurement_that_cannot_be_compared_misses_its_limit() {
        let measure = calls(50.0, 0.0, Limit::AtMost(2.0));
        assert_eq!(measure.ratio, None);
        assert!(!measure.passed());
        assert!(!calls(f64::NAN, 10.0, Limit::AtLeast(0.0)).passed());
        assert!(!Measurement::absolute("x", "s", f64::NAN, Limit::AtMost(1.0)).passed());
        assert!(calls(50.0, 0.0, Limit::None).passed());
    }

    fn report() -> Report {
        let mut report = Report::new("0.1.0", "2025-06-01", Machine::default());
        report.push(calls(900.0, 1000.0, Limit::AtLeast(0.5)));
        report.push(Measurement::against_baseline("p50", "µs", 900.0, 300.0, Limit::AtMost(2.0)));
        report.push(Measurement::absolute("resident memory", "MiB", 21.25, Limit::None));
        report
    }

    #[test]
    fn one_missed_limit_fails_the_report() {
        let mut report = report();
        assert!(!report.passed());
        report.measures.remove(1);
        assert!(report.passed());
        assert!(Report::default().passed());
    }

    #[test]
    fn the_table_is_aligned() {
        let table = report().table();
        let lines: Vec<&str> = table.lines().skip(3).collect();
        assert_eq!(
            lines,
            [
                "measure                value         floor  ratio     limit",
                "invoke           900 calls/s  1000 calls/s  0.90x  >= 0.50x  ok",
                "p50                   900 µs        300 µs  3.00x  <= 2.00x  missed",
                "resident memory     21.2 MiB             -      -         -  -",
            ]
        );
        assert!(table.starts_with("toolcrib 0.1.0, 2025-06-01, 0 cores"));
    }

    #[test]
    fn a_report_round_trips_through_json() {
        let text = report().json().unwrap();
        assert!(text.contains("\"at_least\": 0.5"));
        let back: Report = serde_json::from_str(&text).unwrap();
        assert_eq!(back, report());
    }

    #[test]
    fn figures_have_about_three_significant_digits() {
        assert_eq!(format_figure(12345.6), "12346");
        assert_eq!(format_figure(12.345), "12.3");
        assert_eq!(format_figure(0.123), "0.12");
    }
}
