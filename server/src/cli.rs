//! The command line: what can be asked, and who answers it.
//!
//! Commands for users of a server speak HTTP. Commands for its operator (`keys`, `allow`, `deny`,
//! `rules`, `audit`) open the data directory, because the first key must come from somewhere; with
//! a server named they speak HTTP too. Data goes to standard output, everything else to standard
//! error, and the exit code says what kind of end it was (see [`failure::exit`]).

mod admin;
mod bench;
mod call;
mod calls;
mod client;
mod doctor;
pub mod failure;
mod input;
mod mcp;
mod output;
mod run;
mod tools;
mod utp;
mod watch;
mod webhooks;

#[cfg(test)]
mod tests;

use std::ffi::OsString;
use std::path::PathBuf;

use clap::parser::ValueSource;
use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand};

use crate::config::{Config, Overrides};
use client::{Client, DEFAULT_SERVER};
use failure::{Failure, exit};
use output::Output;

const EXAMPLES: &str = "\
Examples:
  toolcrib                                          start the server
  toolcrib call calculation.eval expression='2*21'  call a tool and wait for the result
  toolcrib calls --status failed --since 1h         what went wrong in the last hour
  toolcrib run --model demo 'What is 6 * 7?'        ask a model, and see its calls happen
  toolcrib watch                                    see calls as they happen
  toolcrib keys create --agent ada --allow 'weather.*'
  toolcrib doctor                                   is everything all right?

Exit codes:
  0 ok   1 failure   2 usage   3 no valid key   4 server not reachable
  5 the tool failed   6 timed out   7 denied by policy   130 interrupted";

/// The tool crib for AI agents: durable tool calls. Without a command it starts the server.
#[derive(Debug, Parser)]
#[command(name = "toolcrib", version, after_help = EXAMPLES, max_term_width = 100)]
pub struct Cli {
    #[command(flatten)]
    global: Global,
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Everywhere")]
struct Global {
    /// Configuration file; toolcrib.toml in the current directory when there is one
    #[arg(long, global = true, value_name = "FILE", env = "TOOLCRIB_CONFIG")]
    config: Option<PathBuf>,
    /// The server to talk to [default: http://127.0.0.1:8080]
    #[arg(long, global = true, value_name = "URL", env = "TOOLCRIB_SERVER")]
    server: Option<String>,
    /// The key to show there
    #[arg(long, global = true, value_name = "KEY", env = "TOOLCRIB_KEY", hide_env_values = true)]
    key: Option<String>,
    /// The project; with a key, the key decides
    #[arg(long, global = true, value_name = "NAME")]
    project: Option<String>,
    /// JSON on standard output; a failure as one line of JSON on standard error
    #[arg(long, global = true)]
    json: bool,
    /// No colours (also when NO_COLOR is set)
    #[arg(long, global = true)]
    no_color: bool,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Start the server
    #[command(after_help = "\
Examples:
  toolcrib serve
  toolcrib serve --listen 127.0.0.1:9000 --data-dir /var/lib/toolcrib
  TOOLCRIB_POLICY__MAX_PARALLEL=64 toolcrib serve")]
    Serve(ServeArgs),
    /// List the tools you may call, or show one with its schema
    Tools(tools::ToolsArgs),
    /// Call a tool and wait for its result
    Call(call::CallArgs),
    /// List calls, show one, cancel one, see what happened to it
    Calls(calls::CallsArgs),
    /// Ask a model, and see its tool calls happen
    Run(run::RunArgs),
    /// See calls as they happen
    Watch(watch::WatchArgs),
    /// Be an MCP server on standard input and output, for clients that start their servers
    Mcp(mcp::McpArgs),
    /// Serve the built-in tools, and tools that are HTTP APIs, to other systems over NATS
    Utp(utp::UtpArgs),
    /// See what became of callbacks, send one again, make a signing key
    Webhooks(webhooks::WebhooksArgs),
    /// Make, list and revoke keys
    Keys(admin::KeysArgs),
    /// Allow tools to an agent
    Allow(admin::VerdictArgs),
    /// Deny tools to an agent; deny wins over allow
    Deny(admin::VerdictArgs),
    /// List or remove rules
    Rules(admin::RulesArgs),
    /// Show what was denied and what was changed
    Audit(admin::AuditArgs),
    /// Check configuration, data directory, port, store, keys and NATS, and say what to do
    Doctor(doctor::DoctorArgs),
    /// Measure this machine: throughput, latency, memory, start; each against its limit
    Bench(bench::BenchArgs),
    #[command(hide = true)]
    BenchFloor(bench::FloorArgs),
    #[command(hide = true)]
    BenchFill(bench::FillArgs),
    #[command(hide = true)]
    BenchUtp(bench::HostArgs),
    #[command(hide = true)]
    BenchUpstream(bench::UpstreamArgs),
}

#[derive(Debug, Default, Args)]
struct ServeArgs {
    /// Address and port to listen on
    #[arg(long, value_name = "ADDRESS")]
    listen: Option<String>,
    /// NATS server for tools over NATS: nats://127.0.0.1:4222
    #[arg(long, value_name = "URL")]
    nats: Option<String>,
    #[command(flatten)]
    place: Place,
}

/// Where the data is, for whoever works on it directly.
#[derive(Debug, Default, Clone, Args)]
struct Place {
    /// Directory for everything that is kept
    #[arg(long, value_name = "DIR", global = true)]
    data_dir: Option<PathBuf>,
    /// Where calls are kept, when not there: postgres://USER:PASSWORD@HOST/NAME or sqlite:PATH
    #[arg(long, value_name = "URL", global = true)]
    store: Option<String>,
}

impl Place {
    /// Whether a place was named at all.
    fn is_named(&self) -> bool {
        self.data_dir.is_some() || self.store.is_some()
    }
}

/// What every command gets.
struct Context {
    global: Global,
    output: Output,
    /// Whether `--server` was typed, and not only set in the environment.
    server_typed: bool,
}

impl Context {
    /// The server that client commands talk to.
    fn client(&self) -> Result<Client, Failure> {
        let server = self.global.server.as_deref().unwrap_or(DEFAULT_SERVER);
        Client::new(server, self.global.key.as_deref(), self.global.project.as_deref())
    }

    fn config(&self, listen: Option<&String>, place: &Place) -> Result<Config, Failure> {
        let (data_dir, store) = (place.data_dir.clone(), place.store.clone());
        let overrides = Overrides { listen: listen.cloned(), data_dir, store };
        Ok(Config::load(self.global.config.as_deref(), &overrides)?)
    }

    /// The project that is meant where no key decides.
    fn project(&self) -> &str {
        self.global.project.as_deref().unwrap_or("default")
    }
}

/// A command line that could be read.
pub struct Ready {
    context: Context,
    command: Command,
}

impl Ready {
    /// Whether it serves many at once; for everything else one thread is enough and cheaper.
    pub fn serves(&self) -> bool {
        matches!(
            self.command,
            Command::Serve(_)
                | Command::Run(_)
                | Command::Mcp(_)
                | Command::Utp(_)
                | Command::BenchFloor(_)
                | Command::BenchFill(_)
                | Command::BenchUpstream(_)
        )
    }
}

/// Reads the command line; on failure (and after `--help`), the exit code, everything being said.
pub fn read(arguments: Vec<OsString>) -> Result<Ready, u8> {
    // Before the rest can be read at all, since reading it can fail.
    let has = |flag: &str| arguments.iter().any(|argument| argument == flag);
    let (json, no_color) = (has("--json"), has("--no-color"));
    let output = Output::new(json, no_color);
    parse(arguments, json, no_color).map_err(|error| usage(output, &error))
}

fn parse(arguments: Vec<OsString>, json: bool, no_color: bool) -> Result<Ready, clap::Error> {
    let mut command = Cli::command();
    if no_color || json {
        command = command.color(clap::ColorChoice::Never);
    }
    let matches = command.try_get_matches_from(arguments)?;
    let server_typed = matches.value_source("server") == Some(ValueSource::CommandLine);
    let mut cli = Cli::from_arg_matches(&matches)?;
    // A variable that is set to nothing says nothing.
    let global = &mut cli.global;
    global.server = global.server.take().filter(|server| !server.is_empty());
    global.key = global.key.take().filter(|key| !key.is_empty());
    global.config = global.config.take().filter(|file| !file.as_os_str().is_empty());
    let output = Output::new(cli.global.json, cli.global.no_color);
    let command = cli.command.unwrap_or_else(|| Command::Serve(ServeArgs::default()));
    Ok(Ready { context: Context { global: cli.global, output, server_typed }, command })
}

fn usage(output: Output, error: &clap::Error) -> u8 {
    if error.use_stderr() && output.json {
        // What is wrong stands before the first empty line; behind it are usage and help.
        let text = error.to_string();
        let lines = text.lines().take_while(|line| !line.is_empty()).map(str::trim);
        let message = lines.collect::<Vec<_>>().join(" ");
        output.failure(&Failure::usage(message.strip_prefix("error: ").unwrap_or(&message)));
    } else {
        // With nobody to read it, the exit code is what is left.
        let _ = error.print();
    }
    u8::try_from(error.exit_code()).unwrap_or(exit::USAGE)
}

/// Runs the command to its end and gives the exit code.
pub async fn run(ready: Ready) -> u8 {
    let Ready { context, command } = ready;
    let outcome = match command {
        // What serves finishes what it began, so it listens for signals itself.
        Command::Serve(args) => serve(&context, args).await,
        Command::Utp(args) => utp::run(&context, args).await,
        command => tokio::select! {
            // The command first: one that has something to say about being interrupted says it.
            biased;
            outcome = dispatch(&context, command) => outcome,
            // Dropping the command ends its connections and its child processes.
            _ = tokio::signal::ctrl_c() => Err(Failure::interrupted()),
        },
    };
    match outcome {
        Ok(()) => exit::OK,
        Err(failure) => {
            context.output.failure(&failure);
            failure.exit
        }
    }
}

async fn dispatch(context: &Context, command: Command) -> Result<(), Failure> {
    match command {
        Command::Serve(args) => serve(context, args).await,
        Command::Tools(args) => tools::run(context, args).await,
        Command::Call(args) => call::run(context, args).await,
        Command::Calls(args) => calls::run(context, args).await,
        Command::Run(args) => run::run(context, args).await,
        Command::Watch(args) => watch::run(context, args).await,
        Command::Mcp(args) => mcp::run(context, args).await,
        Command::Utp(args) => utp::run(context, args).await,
        Command::Webhooks(args) => webhooks::run(context, args).await,
        Command::Keys(args) => admin::keys(context, args).await,
        Command::Allow(args) => admin::set(context, args, toolcrib::policy::Verdict::Allow).await,
        Command::Deny(args) => admin::set(context, args, toolcrib::policy::Verdict::Deny).await,
        Command::Rules(args) => admin::rules(context, args).await,
        Command::Audit(args) => admin::audit(context, args).await,
        Command::Doctor(args) => doctor::run(context, args).await,
        Command::Bench(args) => bench::run(context, args).await,
        Command::BenchFloor(args) => bench::floor(args).await,
        Command::BenchUtp(args) => bench::host(args).await,
        Command::BenchUpstream(args) => bench::upstream(args).await,
        Command::BenchFill(args) => bench::fill(args).await,
    }
}

async fn serve(context: &Context, args: ServeArgs) -> Result<(), Failure> {
    let mut config = context.config(args.listen.as_ref(), &args.place)?;
    if args.nats.is_some() {
        config.nats.url = args.nats;
        config.validate()?;
    }
    Ok(crate::serve::run(config).await?)
}
