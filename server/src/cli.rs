//! The command line: parses arguments and runs commands.
//!
//! Commands for users of a server use HTTP. Commands for its operator (`keys`, `allow`, `deny`,
//! `rules`, `limits`, `switch`, `agents`, `audit`) open the data directory, because no key exists
//! that could authorize the creation of the first one; with `--server` they use HTTP too. Data goes
//! to standard output, everything else to standard error, and the exit code classifies the result
//! (see [`failure::exit`]).

mod admin;
mod call;
mod calls;
mod client;
mod doctor;
pub mod failure;
mod input;
mod mcp;
mod outcome;
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
use std::process::ExitCode;

use clap::parser::ValueSource;
use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand, ValueEnum};
use client::{ApiClient, DEFAULT_SERVER, url_of_listen_address};
use failure::{CommandFailure, exit};
use output::Output;
use toolcrib::domain::directory::audit::RequestOrigin;
use toolcrib::domain::directory::credential::ToolNameForm;
use toolcrib::registry::audit;

use crate::config::{Config, ConfigOverrides};

const EXAMPLES: &str = "\
Examples:
  toolcrib                                          start the server
  toolcrib --listen 127.0.0.1:9000                  start it on another port
  toolcrib call calculation.eval expression='2*21'  call a tool and wait for the result
  toolcrib calls --status failed --since 1h         failed calls of the last hour
  toolcrib run --model demo 'What is 6 * 7?'        ask a model and show its tool calls
  toolcrib watch                                    show calls as they happen
  toolcrib keys create --agent operator --role admin
  toolcrib keys create --agent ada --allow 'weather.*'
  toolcrib doctor                                   check the installation

Keys, rules, audit and mcp need no --key for a server on this machine whose operator.token you can
read.

Exit codes:
  0 ok   1 failure   2 usage   3 no valid key   4 server not reachable
  5 the tool failed   6 timed out   7 denied by policy   130 interrupted";

/// Durable tool calls for AI agents. Without a command it starts the server.
#[derive(Debug, Parser)]
#[command(name = "toolcrib", version, after_help = EXAMPLES, max_term_width = 100)]
pub struct Cli {
    #[command(flatten)]
    global: GlobalArgs,
    #[command(flatten)]
    server_options: ServerOptions,
    #[command(subcommand)]
    command: Option<CliCommand>,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Everywhere")]
struct GlobalArgs {
    /// Configuration file [default: toolcrib.toml in the current directory, if it exists]
    #[arg(long, global = true, value_name = "FILE", env = "TOOLCRIB_CONFIG")]
    config: Option<PathBuf>,
    /// URL of the server [default: the configured `listen`, or http://127.0.0.1:8080]
    #[arg(long, global = true, value_name = "URL", env = "TOOLCRIB_SERVER")]
    server: Option<String>,
    /// API key for the server
    #[arg(long, global = true, value_name = "KEY", env = "TOOLCRIB_KEY", hide_env_values = true)]
    key: Option<String>,
    /// Project; with a key, the key's project is used
    #[arg(long, global = true, value_name = "NAME")]
    project: Option<String>,
    /// Print JSON on standard output, and a failure as one line of JSON on standard error
    #[arg(long, global = true)]
    json: bool,
    /// Disable colors (also when NO_COLOR is set)
    #[arg(long, global = true)]
    no_color: bool,
}

#[derive(Debug, Subcommand)]
enum CliCommand {
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
    Call(call::CallCommandArgs),
    /// List, show, read, answer or cancel calls, and show their events
    Calls(calls::CallsArgs),
    /// List approvals, decide about them, and revoke standing ones
    Approvals(calls::approvals::ApprovalsArgs),
    /// Send a question to a model and show its tool calls
    Run(run::RunArgs),
    /// List, show, follow and cancel runs, and show the agents that a run called
    Runs(run::manage::RunsArgs),
    /// Show calls as they happen
    Watch(watch::WatchArgs),
    /// Run as an MCP server on standard input and output, or manage upstream MCP servers
    Mcp(mcp::McpArgs),
    /// Serve the built-in tools and HTTP API tools to other systems over NATS
    Utp(utp::UtpArgs),
    /// List webhook deliveries, repeat one, or generate a signing key
    Webhooks(webhooks::WebhooksArgs),
    /// Create, list, rotate and revoke keys
    Keys(admin::KeysArgs),
    /// Make, list and revoke session tokens, which narrow a key
    Tokens(admin::TokensArgs),
    /// Allow an agent to call tools
    Allow(admin::AllowDenyArgs),
    /// Deny an agent tools; deny takes precedence over allow
    Deny(admin::AllowDenyArgs),
    /// List, set, apply, explain and rehearse access rules
    Rules(admin::RulesArgs),
    /// List, set or remove limits on the calls of agents, users, tools and projects
    Limits(admin::limits::LimitsArgs),
    /// Switch a tool, an agent, a source or a project off at once, and on again
    Switch(admin::switches::SwitchArgs),
    /// List, show, define and remove agents, which are called like tools
    Agents(admin::agents::AgentsArgs),
    /// Show denied calls and administrative changes
    Audit(admin::AuditArgs),
    /// Check configuration, data directory, port, store, keys and NATS, with advice on each problem
    Doctor(doctor::DoctorArgs),
}

/// The options of `serve`, for a command line without a command. They are not global, so that no
/// other command accepts an option that it does not use. They have ids of their own, because clap
/// copies a global option of a command, such as `--data-dir`, to the command line as a whole.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Without a command")]
struct ServerOptions {
    /// Address and port to listen on
    #[arg(long = "listen", id = "server_listen", value_name = "ADDRESS")]
    listen: Option<String>,
    /// NATS server for tools over NATS: nats://127.0.0.1:4222
    #[arg(long = "nats", id = "server_nats", value_name = "URL")]
    nats: Option<String>,
    /// Directory for all stored data
    #[arg(long = "data-dir", id = "server_data_dir", value_name = "DIR")]
    data_dir: Option<PathBuf>,
    /// Database URL: postgres://USER:PASSWORD@HOST/NAME or sqlite:PATH [default: SQLite in the data
    /// directory]
    #[arg(long = "store", id = "server_store", value_name = "URL")]
    store: Option<String>,
}

impl ServerOptions {
    /// Returns the first option that was given.
    fn first_given(&self) -> Option<&'static str> {
        let given = [
            ("--listen", self.listen.is_some()),
            ("--nats", self.nats.is_some()),
            ("--data-dir", self.data_dir.is_some()),
            ("--store", self.store.is_some()),
        ];
        given.into_iter().find(|(_, is_given)| *is_given).map(|(option, _)| option)
    }

    /// Returns the command to run. Options before `serve` count as its own; before any other
    /// command they are an error, because that command would ignore them.
    fn apply_to(self, command: Option<CliCommand>) -> Result<CliCommand, clap::Error> {
        let args = match command {
            None => ServeArgs::default(),
            Some(CliCommand::Serve(args)) => args,
            Some(command) => {
                return match self.first_given() {
                    None => Ok(command),
                    Some(option) => Err(Cli::command().error(
                        clap::error::ErrorKind::ArgumentConflict,
                        format!(
                            "{option} before the command is an option of the server; write an \
                             option of the command after it"
                        ),
                    )),
                };
            }
        };
        let storage = StorageArgs {
            data_dir: args.storage.data_dir.or(self.data_dir),
            store: args.storage.store.or(self.store),
        };
        Ok(CliCommand::Serve(ServeArgs {
            listen: args.listen.or(self.listen),
            nats: args.nats.or(self.nats),
            storage,
        }))
    }
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
    storage: StorageArgs,
}

/// The form of the names of tools as a command-line value.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum ToolNamesArg {
    /// Names that model APIs accept: calculation__eval
    Model,
    /// Toolcrib's own names: calculation.eval
    Dotted,
}

impl From<ToolNamesArg> for ToolNameForm {
    fn from(form: ToolNamesArg) -> Self {
        match form {
            ToolNamesArg::Model => Self::Model,
            ToolNamesArg::Dotted => Self::Dotted,
        }
    }
}

/// Options that select the stored data, for commands that work on it directly.
#[derive(Debug, Default, Clone, Args)]
struct StorageArgs {
    /// Directory for all stored data
    #[arg(long, value_name = "DIR", global = true)]
    data_dir: Option<PathBuf>,
    /// Database URL: postgres://USER:PASSWORD@HOST/NAME or sqlite:PATH [default: SQLite in the data
    /// directory]
    #[arg(long, value_name = "URL", global = true)]
    store: Option<String>,
}

impl StorageArgs {
    /// Returns true if a location was given.
    fn is_set(&self) -> bool {
        self.data_dir.is_some() || self.store.is_some()
    }
}

/// Context shared by all commands.
struct CommandContext {
    global: GlobalArgs,
    output: Output,
    /// True if `--server` was given as a flag, not only in the environment.
    server_from_flag: bool,
}

impl CommandContext {
    /// Returns the client for the server that user commands talk to: `--server`, then
    /// `TOOLCRIB_SERVER`, then the address that the settings make a server listen on.
    fn client(&self) -> Result<ApiClient, CommandFailure> {
        let server = match &self.global.server {
            Some(server) => server.clone(),
            None => {
                let listen = Config::load_listen_address(self.global.config.as_deref())?;
                url_of_listen_address(&listen).unwrap_or_else(|| DEFAULT_SERVER.to_owned())
            }
        };
        let client =
            ApiClient::new(&server, self.global.key.as_deref(), self.global.project.as_deref())?;
        // Settings that cannot be read concern the server, not this command.
        let config = self.config(None, &StorageArgs::default()).ok();
        let file = config.map(|config| crate::operator_token::token_file(&config.data_dir));
        Ok(client.operator_token_file(file))
    }

    fn config(
        &self,
        listen: Option<&String>,
        storage: &StorageArgs,
    ) -> Result<Config, CommandFailure> {
        let (data_dir, store) = (storage.data_dir.clone(), storage.store.clone());
        let overrides = ConfigOverrides { listen: listen.cloned(), data_dir, store };
        Ok(Config::load(self.global.config.as_deref(), &overrides)?)
    }

    /// Refuses a server and a data directory or database in one command: each of them is a target
    /// of its own.
    fn check_one_target(&self, storage: &StorageArgs) -> Result<(), CommandFailure> {
        let flag = match (&storage.data_dir, &storage.store) {
            (Some(_), _) => "--data-dir",
            (None, Some(_)) => "--store",
            (None, None) => return Ok(()),
        };
        if !self.server_from_flag {
            return Ok(());
        }
        let message = format!("--server and {flag} exclude each other");
        Err(CommandFailure::usage(message).hint("name the server, or the data to work on"))
    }

    /// Returns the project to use when no key determines it.
    fn project(&self) -> &str {
        self.global.project.as_deref().unwrap_or("default")
    }
}

/// Parses the command line of this process, builds the async runtime, runs the command and returns
/// the exit code. It is part of the library so that the compiler generates the async code once.
pub fn main() -> ExitCode {
    if let Some(code) =
        toolcrib_sources::child_reaper::run_if_reaper(std::env::args_os().nth(1).as_deref())
    {
        return code;
    }
    let ready = match parse_command_line(std::env::args_os().collect()) {
        Ok(ready) => ready,
        Err(code) => return code.into(),
    };
    let mut builder = if ready.needs_multi_thread() {
        tokio::runtime::Builder::new_multi_thread()
    } else {
        tokio::runtime::Builder::new_current_thread()
    };
    let runtime = match builder.enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("error: the runtime cannot be started: {error}");
            return ExitCode::FAILURE;
        }
    };
    let code = runtime.block_on(run(ready));
    // An abandoned blocking read must not keep the process alive.
    runtime.shutdown_background();
    code.into()
}

/// A parsed command line.
struct ParsedCommand {
    context: CommandContext,
    command: CliCommand,
}

impl ParsedCommand {
    /// Returns true if the command needs a multi-threaded runtime because it serves many requests.
    /// For all others one thread is enough and cheaper.
    fn needs_multi_thread(&self) -> bool {
        matches!(
            self.command,
            CliCommand::Serve(_) | CliCommand::Run(_) | CliCommand::Mcp(_) | CliCommand::Utp(_)
        )
    }
}

/// Parses the command line. On failure, and after `--help`, prints the message and returns the exit
/// code.
fn parse_command_line(arguments: Vec<OsString>) -> Result<ParsedCommand, u8> {
    // Read before parsing, because parsing can fail.
    let has = |flag: &str| arguments.iter().any(|argument| argument == flag);
    let (json, no_color) = (has("--json"), has("--no-color"));
    let output = Output::new(json, no_color);
    parse_arguments(arguments, json, no_color).map_err(|error| report_usage_error(output, &error))
}

fn parse_arguments(
    arguments: Vec<OsString>,
    json: bool,
    no_color: bool,
) -> Result<ParsedCommand, clap::Error> {
    let mut command = Cli::command();
    if no_color || json {
        command = command.color(clap::ColorChoice::Never);
    }
    let matches = command.try_get_matches_from(arguments)?;
    let server_typed = matches.value_source("server") == Some(ValueSource::CommandLine);
    let mut cli = Cli::from_arg_matches(&matches)?;
    // A variable that is set but empty counts as unset.
    let global = &mut cli.global;
    global.server = global.server.take().filter(|server| !server.is_empty());
    global.key = global.key.take().filter(|key| !key.is_empty());
    global.config = global.config.take().filter(|file| !file.as_os_str().is_empty());
    let output = Output::new(cli.global.json, cli.global.no_color);
    let command = cli.server_options.apply_to(cli.command)?;
    Ok(ParsedCommand {
        context: CommandContext { global: cli.global, output, server_from_flag: server_typed },
        command,
    })
}

fn report_usage_error(output: Output, error: &clap::Error) -> u8 {
    if error.use_stderr() && output.json {
        // The message ends at the first empty line; usage and help follow it.
        let text = error.to_string();
        let lines = text.lines().take_while(|line| !line.is_empty()).map(str::trim);
        let message = lines.collect::<Vec<_>>().join(" ");
        output.print_failure(&CommandFailure::usage(
            message.strip_prefix("error: ").unwrap_or(&message),
        ));
    } else {
        // If standard error is closed, only the exit code reports the error.
        let _ = error.print();
    }
    u8::try_from(error.exit_code()).unwrap_or(exit::USAGE)
}

/// Runs the command to its end and returns the exit code.
async fn run(ready: ParsedCommand) -> u8 {
    let ParsedCommand { context, command } = ready;
    let outcome = match command {
        // Serving commands finish running work first, so they handle signals themselves.
        CliCommand::Serve(args) => serve(&context, args).await,
        CliCommand::Utp(args) => utp::run(&context, args).await,
        command => tokio::select! {
            // Poll the command first: one that handles the interrupt itself reports it.
            biased;
            outcome = audit::with_origin(command_origin(), dispatch(&context, command)) => outcome,
            // Dropping the command closes its connections and ends its child processes.
            _ = tokio::signal::ctrl_c() => Err(CommandFailure::interrupted()),
        },
    };
    match outcome {
        Ok(()) => exit::OK,
        Err(failure) => {
            context.output.print_failure(&failure);
            failure.exit
        }
    }
}

/// Returns the origin of changes that a command makes in a data directory.
fn command_origin() -> RequestOrigin {
    RequestOrigin { transport: Some("command".to_owned()), ..RequestOrigin::default() }
}

async fn dispatch(context: &CommandContext, command: CliCommand) -> Result<(), CommandFailure> {
    match command {
        CliCommand::Serve(args) => serve(context, args).await,
        CliCommand::Tools(args) => tools::run(context, args).await,
        CliCommand::Call(args) => call::run(context, args).await,
        CliCommand::Calls(args) => calls::run(context, args).await,
        CliCommand::Approvals(args) => calls::approvals::run(context, args).await,
        CliCommand::Run(args) => run::run(context, args).await,
        CliCommand::Runs(args) => run::manage::run(context, args).await,
        CliCommand::Watch(args) => watch::run(context, args).await,
        CliCommand::Mcp(args) => mcp::run(context, args).await,
        CliCommand::Utp(args) => utp::run(context, args).await,
        CliCommand::Webhooks(args) => webhooks::run(context, args).await,
        CliCommand::Keys(args) => admin::keys(context, args).await,
        CliCommand::Tokens(args) => admin::tokens(context, args).await,
        CliCommand::Allow(args) => {
            admin::set_rules(context, args, toolcrib::domain::access_rules::RuleVerdict::Allow)
                .await
        }
        CliCommand::Deny(args) => {
            admin::set_rules(context, args, toolcrib::domain::access_rules::RuleVerdict::Deny).await
        }
        CliCommand::Rules(args) => admin::rules(context, args).await,
        CliCommand::Limits(args) => admin::limits::limits(context, args).await,
        CliCommand::Switch(args) => admin::switches::switch(context, args).await,
        CliCommand::Agents(args) => admin::agents::agents(context, args).await,
        CliCommand::Audit(args) => admin::audit(context, args).await,
        CliCommand::Doctor(args) => doctor::run(context, args).await,
    }
}

async fn serve(context: &CommandContext, args: ServeArgs) -> Result<(), CommandFailure> {
    let mut config = context.config(args.listen.as_ref(), &args.storage)?;
    if args.nats.is_some() {
        config.nats.url = args.nats;
        config.validate()?;
    }
    Ok(crate::serve::run(config).await?)
}
