//! The command line of `toolcrib-bench`: measures Toolcrib against a baseline, on this machine, in
//! one run.
//!
//! Toolcrib and the baseline server run as child processes, each with its own store. Their rounds
//! alternate and the report uses medians, so that other load on the machine affects both. Every
//! figure is printed with its limit, and a missed limit is a failure.
//!
//! The hidden commands are the child processes that are not `toolcrib` itself.

use std::io::{IsTerminal, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, bail};
use clap::{Args, Parser, Subcommand};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::json;

use crate::measurements::{self, Bench, BenchPlan, BenchSuite};
use crate::processes::{Launcher, ScratchDir};
use crate::report::{Report, machine};
use crate::{baseline, fill_store, mcp_server};

/// Number of finished calls in a store that has been in use for a while.
const FULL_STORE_CALLS: u64 = 1_000_000;

/// The exit code of a process that Ctrl-C ended.
const INTERRUPTED: u8 = 130;

/// Measure Toolcrib's throughput, latency, memory and startup on this machine, each against its
/// limit.
#[derive(Debug, Parser)]
#[command(
    name = "toolcrib-bench",
    version,
    args_conflicts_with_subcommands = true,
    max_term_width = 100,
    after_help = "\
The ratios are what counts: the absolute figures say more about the disk than about the program.
Run it on a machine that does nothing else.

Examples:
  cargo build --release -p toolcrib-server
  cargo run --release -p toolcrib-bench -- --quick
  cargo run --release -p toolcrib-bench -- --seconds 10 --out bench.json
  cargo run --release -p toolcrib-bench -- --only nats --only mcp
  cargo run --release -p toolcrib-bench -- --full --dir /var/lib/toolcrib-bench"
)]
struct Cli {
    #[command(flatten)]
    bench: BenchArgs,
    #[command(subcommand)]
    helper: Option<HelperCommand>,
}

#[derive(Debug, Args)]
struct BenchArgs {
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
    /// The program to measure [default: toolcrib, next to this program]
    #[arg(long, value_name = "PATH")]
    toolcrib: Option<PathBuf>,
    /// Print the report as JSON, and a failure as one line of JSON on standard error
    #[arg(long)]
    json: bool,
}

/// The child processes of a benchmark; [`Launcher`] starts them.
#[derive(Debug, Subcommand)]
#[command(disable_help_subcommand = true)]
enum HelperCommand {
    /// Run the baseline server
    #[command(hide = true)]
    Baseline {
        #[arg(long)]
        listen: String,
        #[arg(long)]
        dir: PathBuf,
        /// URL of the NATS server over which the tool is called
        #[arg(long)]
        nats: Option<String>,
    },
    /// Fill a store with finished calls
    #[command(hide = true)]
    FillStore {
        #[arg(long)]
        data_dir: PathBuf,
        #[arg(long)]
        count: u64,
    },
    /// Execute tools that are called over NATS
    #[command(hide = true)]
    ToolService {
        #[arg(long)]
        nats: String,
        /// Execute the tool of the baseline
        #[arg(long)]
        bare: bool,
    },
    /// Run an MCP server
    #[command(hide = true)]
    McpServer {
        #[arg(long)]
        listen: String,
    },
}

impl HelperCommand {
    async fn run(self) -> anyhow::Result<()> {
        match self {
            Self::Baseline { listen, dir, nats } => {
                let listener = tokio::net::TcpListener::bind(&listen).await?;
                let tool = match &nats {
                    Some(url) => Some(baseline::nats::remote_tool(url).await?),
                    None => None,
                };
                baseline::serve(listener, &dir, tool).await
            }
            Self::FillStore { data_dir, count } => {
                std::fs::create_dir_all(&data_dir)?;
                fill_store::fill_store(&data_dir, count).await
            }
            Self::ToolService { nats, bare: true } => baseline::nats::run_service(&nats).await,
            Self::ToolService { nats, bare: false } => measurements::run_tool_service(&nats).await,
            Self::McpServer { listen } => mcp_server::serve(&listen).await,
        }
    }

    /// Returns true for a server, which uses all cores. The load generator and the tool services
    /// use one thread, to leave the other cores to what is measured.
    fn needs_multi_thread(&self) -> bool {
        !matches!(self, Self::ToolService { .. })
    }
}

/// Parses the command line, runs the command and returns the exit code.
#[must_use]
pub fn main() -> ExitCode {
    let cli = Cli::parse();
    let as_json = cli.bench.json;
    let mut builder = match &cli.helper {
        Some(helper) if helper.needs_multi_thread() => tokio::runtime::Builder::new_multi_thread(),
        _ => tokio::runtime::Builder::new_current_thread(),
    };
    let runtime = builder.enable_all().build().context("the runtime cannot be started");
    let outcome = runtime.and_then(|runtime| {
        runtime.block_on(async {
            tokio::select! {
                outcome = run(cli) => outcome,
                // Dropping the benchmark ends its child processes and removes its stores.
                _ = tokio::signal::ctrl_c() => Ok(ExitCode::from(INTERRUPTED)),
            }
        })
    });
    outcome.unwrap_or_else(|error| {
        print_failure(&error, as_json);
        ExitCode::FAILURE
    })
}

async fn run(cli: Cli) -> anyhow::Result<ExitCode> {
    match cli.helper {
        Some(helper) => helper.run().await,
        None => run_bench(cli.bench).await,
    }
    .map(|()| ExitCode::SUCCESS)
}

async fn run_bench(args: BenchArgs) -> anyhow::Result<()> {
    let launcher = Launcher::new(args.toolcrib)?;
    let note = |text: &str| {
        if !args.json {
            eprintln!("{text}");
        }
    };
    if cfg!(debug_assertions) {
        note("this is a debug build: its figures mean nothing (cargo build --release)");
    }
    let parent = args.dir.unwrap_or_else(std::env::temp_dir);
    if machine::is_in_memory(&parent) {
        let parent = parent.display();
        note(&format!(
            "{parent} is a file system in memory, where a flush costs nothing: set --dir"
        ));
    }
    let stored = args.stored.or(args.full.then_some(FULL_STORE_CALLS));
    let plan = BenchPlan::new(args.quick, args.seconds, stored).restrict_to(args.only);
    let bar = if args.json || !std::io::stderr().is_terminal() {
        ProgressBar::hidden()
    } else {
        ProgressBar::new(plan.progress_steps())
    };
    if let Ok(style) = ProgressStyle::with_template("{bar:30} {pos}/{len} {msg} {elapsed}") {
        bar.set_style(style);
    }
    let scratch = ScratchDir::new(&parent)?;
    let report = Bench::new(&launcher, &scratch, plan, bar)?.run().await?;
    let json = report.json()?;
    if let Some(out) = &args.out {
        std::fs::write(out, format!("{json}\n"))
            .with_context(|| format!("cannot write {}", out.display()))?;
    }
    let text = if args.json { json } else { report.table() };
    writeln!(std::io::stdout(), "{}", text.trim_end())?;
    require_limits(&report)
}

/// Fails with the names of the missed limits.
fn require_limits(report: &Report) -> anyhow::Result<()> {
    let missed = report.measures.iter().filter(|measure| !measure.passed());
    let missed: Vec<&str> = missed.map(|measure| measure.name.as_str()).collect();
    if missed.is_empty() {
        return Ok(());
    }
    bail!(
        "over the limit: {}\nhint:  is the machine busy with something else? run it again when it \
         is not",
        missed.join("; ")
    )
}

fn print_failure(error: &anyhow::Error, as_json: bool) {
    if as_json {
        eprintln!("{}", json!({ "error": { "message": format!("{error:#}") }, "exit": 1 }));
    } else {
        eprintln!("error: {error:#}");
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    fn parse(line: &str) -> Result<Cli, clap::Error> {
        Cli::try_parse_from(std::iter::once("toolcrib-bench").chain(line.split_whitespace()))
    }

    #[test]
    fn the_clap_definition_is_valid() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_command_parses_and_help_has_examples() {
        for line in [
            "",
            "--quick --out x.json",
            "--seconds 10 --json --toolcrib /opt/toolcrib",
            "--only nats --only mcp",
            "--full --dir /var/lib/toolcrib-bench",
            "baseline --listen 127.0.0.1:0 --dir /tmp/x",
            "fill-store --data-dir /tmp/x --count 10",
            "tool-service --nats nats://127.0.0.1:4222 --bare",
            "mcp-server --listen 127.0.0.1:0",
        ] {
            assert!(parse(line).is_ok(), "{line}");
        }
        let after = Cli::command().get_after_help().map(ToString::to_string).unwrap();
        assert!(after.contains("Examples:"));
    }

    #[test]
    fn invalid_command_lines_are_usage_errors() {
        for line in ["nonsense", "--seconds 0", "--quick --full", "--only sleep", "baseline"] {
            assert_eq!(parse(line).unwrap_err().exit_code(), 2, "{line}");
        }
    }
}
