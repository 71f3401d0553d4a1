//! `toolcrib utp`: serves Toolcrib's tools to other systems that use UTP, and manages dead letters.

mod dead_letters;
mod tool_catalogue;
use std::sync::Arc;
use std::time::Duration;

use clap::{Args, Subcommand};
use serde_json::json;
use tokio_util::sync::CancellationToken;
use toolcrib::calls::Until;
use toolcrib::domain::call::Status;
use toolcrib::domain::fault::{Code, Error, Fault};
use toolcrib::domain::utp::ToolStatus;
use toolcrib::{CallRequest, Caller, Engine};
use toolcrib_protocol::utp::NatsConnection;
use toolcrib_protocol::utp::nats_connection::NatsEndpoint;
use toolcrib_sources::utp::host::{ToolHost, ToolJob, ToolJobResult};

use super::failure::CommandFailure;
use super::{CommandContext, StorageArgs};
use crate::cli::utp::dead_letters::DeadLetterListArgs;
use crate::cli::utp::tool_catalogue::UtpToolCatalogue;
use crate::telemetry::OtlpExporter;

/// Retention of an ended call in this process.
const RETENTION_MS: u64 = 60_000;
/// Maximum time to send the last spans.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(2);

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  toolcrib utp serve --target crib --nats nats://127.0.0.1:4222
  toolcrib utp dead-letters
  toolcrib utp redrive dl_01K…")]
pub(super) struct UtpArgs {
    #[command(subcommand)]
    command: UtpCommand,
}

#[derive(Debug, Subcommand)]
enum UtpCommand {
    /// Serve the built-in tools, and the HTTP API tools of a project, for commands to a target
    ///
    /// The HTTP API tools are those of the data directory, in the project that the command names;
    /// with --project, those of that project, regardless of the command.
    ///
    /// Reading the arguments of a command needs a server on the same NATS server, started with
    /// `toolcrib serve --nats URL`. The log says so while none answers; commands wait until then.
    #[command(after_help = "\
Examples:
  toolcrib utp serve --target crib --nats nats://127.0.0.1:4222
  toolcrib --project shop utp serve --target crib --data-dir /var/lib/toolcrib")]
    Serve(UtpServeArgs),
    /// List the dead letters (messages that could not be processed), newest first
    #[command(after_help = "\
Examples:
  toolcrib utp dead-letters
  toolcrib --json utp dead-letters --limit 1")]
    DeadLetters(DeadLetterListArgs),
    /// Redrive a dead letter: a report is ingested as if it arrived now, any other message is
    /// published again
    #[command(after_help = "\
Examples:
  toolcrib utp redrive dl_01K…")]
    Redrive {
        /// The dead letter, dl_…
        id: String,
    },
}

#[derive(Debug, Args)]
struct UtpServeArgs {
    /// The target in cmd.tool.TARGET.*
    #[arg(long, value_name = "NAME")]
    target: String,
    /// URL of the NATS server [default: nats.url of the configuration]
    #[arg(long, value_name = "URL")]
    nats: Option<String>,
    #[command(flatten)]
    storage: StorageArgs,
}

pub(super) async fn run(context: &CommandContext, args: UtpArgs) -> Result<(), CommandFailure> {
    let args = match args.command {
        UtpCommand::Serve(args) => args,
        UtpCommand::DeadLetters(args) => {
            return crate::cli::utp::dead_letters::list(context, args).await;
        }
        UtpCommand::Redrive { id } => {
            return crate::cli::utp::dead_letters::redrive(context, &id).await;
        }
    };
    if !toolcrib::domain::utp::is_token(&args.target) {
        let message = format!("--target \"{}\" cannot be part of a NATS subject", args.target);
        return Err(CommandFailure::usage(message));
    }
    let mut config = context.config(None, &args.storage)?;
    crate::telemetry::start_logging(&config.log.level, config.log.format);
    config.nats.url = args.nats.or(config.nats.url);
    let Some(address) = crate::bootstrap::nats_endpoint(&config.nats) else {
        return Err(CommandFailure::usage("name the NATS server: --nats nats://127.0.0.1:4222"));
    };
    let project = context.global.project.clone();
    Ok(serve(&config, &address, &args.target, project).await?)
}

async fn serve(
    config: &crate::config::Config,
    address: &NatsEndpoint,
    target: &str,
    project: Option<String>,
) -> anyhow::Result<()> {
    crate::telemetry::metrics_handle();
    let otlp = OtlpExporter::start(&config.telemetry).await?;
    let mut builder = Engine::builder()
        .tools(crate::bootstrap::builtin_tools(config)?)
        .source(Arc::new(crate::bootstrap::build_http_source(config)?))
        .limits(crate::bootstrap::engine_limits(config))
        // The sender of the command stores the outcome; this process needs it only until it is
        // reported.
        .retention_ms(RETENTION_MS);
    if let Some(otlp) = &otlp {
        builder = builder.observer(otlp.clone());
    }
    let engine = builder.start().await?;
    let nats = NatsConnection::connect(address, "toolcrib utp serve").await?;
    let checked_project = project.clone().unwrap_or_else(|| "default".to_owned());
    let catalogue = Arc::new(UtpToolCatalogue::new(config.clone(), engine, project));
    println!("serving cmd.tool.{target}.*: {}", catalogue.tool_names().await.join("  "));
    let host = ToolHost::with_connection(nats)
        .with_sender("tool.toolcrib")
        .with_server_check(&checked_project)
        .with_fallback(move |job| {
            let catalogue = catalogue.clone();
            async move {
                match catalogue.prepare_call(&job).await {
                    Ok(caller) => run_tool(&catalogue.engine, &caller, job).await,
                    Err(error) => failed_result(&job.tool_name, error),
                }
            }
        });
    let stop = CancellationToken::new();
    let limit = Duration::from_millis(config.shutdown.drain_ms);
    let mut serving = std::pin::pin!(host.serve(target, stop.cancelled()));
    let ended = tokio::select! {
        ended = &mut serving => ended,
        () = crate::serve::shutdown_signal() => {
            stop.cancel();
            // Commands that are not finished by then are redelivered to another service.
            tokio::time::timeout(limit, serving).await.unwrap_or(Ok(()))
        }
    };
    if let Some(otlp) = otlp {
        let _ = tokio::task::spawn_blocking(move || otlp.stop(FLUSH_TIMEOUT)).await;
    }
    ended
}

/// Runs a tool of this process for another system's call.
async fn run_tool(engine: &Engine, caller: &Caller, job: ToolJob) -> ToolJobResult {
    let name = job.tool_name.clone();
    let outcome = async {
        let mut request = CallRequest::new(name.as_str(), &job.args.to_string())
            .map_err(|error| Error::refused(Code::BadRequest, error.to_string()))?;
        request.traceparent = Some(job.traceparent.clone());
        request.route = Some(Box::new(job.route.clone()));
        let left_ms = job.deadline_ms.map(|at_ms| at_ms.saturating_sub(engine.now_ms()).max(1));
        request.timeout_ms = left_ms;
        let ticket = engine.calls().invoke(caller, request).await?;
        engine.calls().wait(caller, &ticket.call.id, Until::Ended).await
    };
    let call = match outcome.await {
        Ok(call) => call,
        Err(error) => return failed_result(&name, error),
    };
    let ended = call.outcome.as_ref();
    let data = ended.and_then(|outcome| outcome.data.as_ref()).map(|data| data.to_value());
    match ended.and_then(|outcome| outcome.error.clone()) {
        None => ToolJobResult::success(data.unwrap_or(json!(null))),
        Some(fault) => {
            let status = match call.status {
                Status::Timeout => ToolStatus::Timeout,
                Status::Canceled => ToolStatus::Canceled,
                _ => ToolStatus::Failed,
            };
            ToolJobResult { status, ..ToolJobResult::failed(fault) }
        }
    }
}

fn failed_result(tool: &str, error: Error) -> ToolJobResult {
    match error {
        Error::Refused { fault, .. } => ToolJobResult::failed(fault),
        Error::Internal(error) => {
            tracing::error!(%error, tool, "internal error");
            ToolJobResult::failed(Fault::new(Code::Internal, "internal error"))
        }
    }
}
