//! `toolcrib bench`: measures Toolcrib against a baseline, on this machine, in one run.
//!
//! Toolcrib and the baseline server run as child processes of this same binary, each with its own
//! store. Their rounds alternate and the report uses medians, so that other load on the machine
//! affects both. Every figure is printed with its limit.

mod digest;
mod mcp_server;
mod measurements;
mod nats_baseline;
mod nats_tools;
mod processes;

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use toolcrib_bench::report::Report;

use super::CommandContext;
use super::doctor::disk;
use super::failure::{CommandFailure, exit};
use crate::cli::bench::measurements::{Bench, BenchPlan};
use crate::cli::bench::processes::ScratchDir;

/// Number of finished calls in a store that has been in use for a while.
const FULL_STORE_CALLS: u64 = 1_000_000;

#[derive(Debug, Args)]
#[command(after_help = "\
The ratios are what counts: the absolute figures say more about the disk than about the program.
Run it on a machine that does nothing else.

Examples:
  toolcrib bench --quick
  toolcrib bench --seconds 10 --out bench.json
  toolcrib bench --only nats --only mcp
  toolcrib bench --full --dir /var/lib/toolcrib-bench")]
pub struct BenchArgs {
    /// Length of each round of calls in seconds [default: 3]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=600))]
    seconds: Option<u64>,
    /// One short round of each measurement: a first impression in ten seconds
    #[arg(long)]
    quick: bool,
    /// Also measure with a million stored calls (filling the store takes some minutes)
    #[arg(long, conflicts_with = "quick")]
    full: bool,
    /// Also measure with this many stored calls
    #[arg(long, value_name = "N")]
    stored: Option<u64>,
    /// Only this part (can be repeated)
    #[arg(long, value_enum, value_name = "PART")]
    only: Vec<BenchSuite>,
    /// Directory for the measured stores [default: the system's temporary directory]
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Also write the report to this file, as JSON
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

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
}

#[derive(Debug, Args)]
pub struct BenchBaselineArgs {
    #[arg(long)]
    listen: String,
    #[arg(long)]
    dir: PathBuf,
    /// URL of the NATS server over which the tool is called
    #[arg(long, env = "TOOLCRIB_BENCH_NATS")]
    nats: Option<String>,
}

#[derive(Debug, Args)]
pub struct BenchFillArgs {
    #[arg(long)]
    data_dir: PathBuf,
    #[arg(long)]
    count: u64,
}

#[derive(Debug, Args)]
pub struct BenchToolServiceArgs {
    #[arg(long)]
    nats: String,
    /// Serve the commands of the baseline
    #[arg(long)]
    bare: bool,
}

/// Runs the tool service of the benchmark until it is killed.
pub async fn run_tool_service(args: BenchToolServiceArgs) -> Result<(), CommandFailure> {
    match args.bare {
        true => Ok(crate::cli::bench::nats_baseline::run_service(&args.nats).await?),
        false => Ok(crate::cli::bench::nats_tools::run_tool_service(&args.nats).await?),
    }
}

#[derive(Debug, Args)]
pub struct BenchMcpServerArgs {
    #[arg(long)]
    listen: String,
}

/// Runs the upstream MCP server of the benchmark until it is killed.
pub async fn run_mcp_server(args: BenchMcpServerArgs) -> Result<(), CommandFailure> {
    Ok(crate::cli::bench::mcp_server::serve_mcp(&args.listen).await?)
}

/// Runs the baseline server until it is killed.
pub async fn run_baseline(args: BenchBaselineArgs) -> Result<(), CommandFailure> {
    let listener = tokio::net::TcpListener::bind(&args.listen).await?;
    let tool = match &args.nats {
        Some(url) => Some(crate::cli::bench::nats_baseline::remote_tool(url).await?),
        None => None,
    };
    Ok(toolcrib_bench::baseline::serve(listener, &args.dir, tool).await?)
}

/// Fills a store with finished calls.
pub async fn fill_store(args: BenchFillArgs) -> Result<(), CommandFailure> {
    std::fs::create_dir_all(&args.data_dir)?;
    Ok(crate::bench_fill::fill_store(&args.data_dir, args.count).await?)
}

pub async fn run(context: &CommandContext, args: BenchArgs) -> Result<(), CommandFailure> {
    let output = context.output;
    if cfg!(debug_assertions) {
        output
            .print_note("this is a debug build: its figures mean nothing (cargo build --release)");
    }
    let parent = args.dir.clone().unwrap_or_else(std::env::temp_dir);
    if disk::filesystem_type(&parent).is_some_and(|kind| disk::is_memory_filesystem(&kind)) {
        let parent = parent.display();
        output
            .print_note(&format!("{parent} is memory, where a flush costs nothing: name a --dir"));
    }
    let stored = args.stored.or(args.full.then_some(FULL_STORE_CALLS));
    let plan = BenchPlan::new(args.quick, args.seconds, stored).restrict_to(args.only);
    let scratch = ScratchDir::new(&parent)?;
    let bench = Bench::new(&scratch, plan, context.output)?;
    let report = bench.run().await?;
    if let Some(out) = &args.out {
        let json = report.json().map_err(anyhow::Error::from)?;
        std::fs::write(out, json + "\n").map_err(|error| {
            let message = format!("cannot write {}: {error}", out.display());
            CommandFailure::new(exit::FAILURE, "IO", message)
        })?;
    }
    print_report(context, &report)
}

fn print_report(context: &CommandContext, report: &Report) -> Result<(), CommandFailure> {
    let output = context.output;
    if output.json {
        output.print_line(&report.json().map_err(anyhow::Error::from)?)?;
    } else {
        output.print_line(report.table().trim_end())?;
    }
    let missed: Vec<&str> = report
        .measures
        .iter()
        .filter(|measure| !measure.passed())
        .map(|measure| measure.name.as_str())
        .collect();
    if missed.is_empty() {
        return Ok(());
    }
    let message = format!("over the limit: {}", missed.join("; "));
    Err(CommandFailure::new(exit::FAILURE, "LIMIT_MISSED", message)
        .hint("is the machine busy with something else? run it again when it is not"))
}
