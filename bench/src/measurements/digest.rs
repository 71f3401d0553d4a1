//! Measures the cost of a digest of a long result: time, also as a multiple of the time to parse
//! the result, and memory as a multiple of the result's size.
//!
//! The measurement runs in this process. It loads the tokenizer's tables beforehand, as a server
//! does once in its life, so that time and memory cover the digest alone.

use std::time::Instant;

use anyhow::Context;
use toolcrib::registry::RESULT_READ;
use toolcrib::results::digest::{DigestSource, digest};
use toolcrib::results::tokens;
use toolcrib::{CallId, Json};

use super::Bench;
use crate::processes::memory;
use crate::report::{Limit, Measurement};

/// Size of the result in bytes.
const SIZE: usize = 10 << 20;
/// Token budget of the digest.
const BUDGET: usize = 2_000;
const REPETITIONS: usize = 5;

/// Cost of the most expensive of several documents of the same size.
struct DigestCost {
    ms: f64,
    /// Time of the digest, as a multiple of the time to parse the document.
    time_ratio: f64,
    /// Memory of the document and its digest, as a multiple of the document's size.
    memory_ratio: f64,
}

impl Bench<'_> {
    /// Measures the cost of digesting a long result for a model.
    pub(super) fn measure_digests(&mut self) -> anyhow::Result<()> {
        self.advance_progress("digests of 10 MB");
        let costs = measure()?;
        let limit = Limit::AtMost(150.0);
        self.push_measurement(Measurement::absolute(
            "digest of a 10 MB JSON result",
            "ms",
            costs.ms,
            limit,
        ));
        self.push_measurement(Measurement::absolute(
            "digest of 10 MB, of the time to parse it",
            "x",
            costs.time_ratio,
            Limit::AtMost(2.0),
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
}

fn measure() -> anyhow::Result<DigestCost> {
    tokens::count("made ready");
    let mut costs = DigestCost { ms: 0.0, time_ratio: 0.0, memory_ratio: 0.0 };
    for make in [table_document, nested_document, text_document] {
        let text = make();
        let data = Json::parse(&text).context("a document of the benchmark is not JSON")?;
        // Occupies the memory freed after building the document, so that the digest cannot reuse
        // it.
        let filler = vec![1_u8; text.len()];
        let before = memory::resident_bytes(std::process::id())?;
        reset_peak();
        let mut times: Vec<f64> =
            (0..REPETITIONS).map(|_| time_digest(&data)).collect::<Result<_, _>>()?;
        let peak = memory::peak_resident_bytes(std::process::id())?;
        times.sort_by(f64::total_cmp);
        let extra = peak.saturating_sub(before) as f64;
        let mut parse_times: Vec<f64> =
            (0..REPETITIONS).map(|_| time_parsing(&text)).collect::<Result<_, _>>()?;
        parse_times.sort_by(f64::total_cmp);
        let (ms, parse_ms) = (times[REPETITIONS / 2], parse_times[REPETITIONS / 2]);
        costs.ms = costs.ms.max(ms);
        costs.time_ratio = costs.time_ratio.max(ms / parse_ms);
        costs.memory_ratio = costs.memory_ratio.max(1.0 + extra / text.len() as f64);
        drop((text, filler));
    }
    Ok(costs)
}

fn time_digest(data: &Json) -> anyhow::Result<f64> {
    let call_id: CallId = "tc_00000000000000000000000000".parse()?;
    let hint = Some("which order failed");
    let source = DigestSource { call_id: &call_id, tool: "bench.noop", hint, reader: RESULT_READ };
    let started = Instant::now();
    let result = digest(data, BUDGET, &source).context("the document is longer than the budget")?;
    let took = started.elapsed();
    anyhow::ensure!(result.tokens <= BUDGET, "a digest is over its budget");
    Ok(took.as_secs_f64() * 1e3)
}

/// Returns the time of one pass that parses the document into a tree.
fn time_parsing(text: &str) -> anyhow::Result<f64> {
    let started = Instant::now();
    let value: serde_json::Value = serde_json::from_str(text)?;
    let took = started.elapsed();
    std::hint::black_box(value);
    Ok(took.as_secs_f64() * 1e3)
}

/// Resets the peak memory counter. On systems without this feature the peak is that of the whole
/// process, so the figure is too high rather than too low.
fn reset_peak() {
    let _ = std::fs::write("/proc/self/clear_refs", "5");
}

fn build_document(begin: &str, end: &str, part: impl Fn(usize) -> String) -> String {
    let mut text = String::with_capacity(SIZE + 1_000);
    text.push_str(begin);
    for n in 0.. {
        text.push_str(&part(n));
        if text.len() >= SIZE {
            break;
        }
    }
    text.push_str(end);
    text
}

/// Returns a document of rows of orders.
fn table_document() -> String {
    build_document(r#"{"columns":["id","name","sum"],"rows":["#, r#"[0,"",0]]}"#, |n| {
        format!(r#"[{n},"customer number {n}",{}.5],"#, n * 7)
    })
}

/// Returns a document of nested objects of several shapes.
fn nested_document() -> String {
    build_document(r#"{"page":{"orders":["#, "null]}}", |n| {
        let note = if n % 3 == 0 { r#","note":"fragile""# } else { "" };
        format!(r#"{{"id":{n},"to":{{"city":"c{n}","at":[1.5,{n}]}},"tags":["a","b"]{note}}},"#)
    })
}

/// Returns a document of one long text.
fn text_document() -> String {
    build_document("\"", "\"", |n| {
        format!(r"2026-01-01T00:00:00Z INFO order {n} was packed and sent\n")
    })
}
