//! `toolcrib utp serve`: the crib's own tools, for other systems that speak UTP.

use std::sync::Arc;

use clap::{Args, Subcommand};
use serde_json::json;
use toolcrib::call::Status;
use toolcrib::fault::{Code, Error, Fault};
use toolcrib::utp::ToolStatus;
use toolcrib::{Caller, Engine, Invocation};

use super::failure::Failure;
use super::{Context, Place};
use crate::utp::link::Address;
use crate::utp::{Answer, Host, Job, Link};

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  toolcrib utp serve --target crib --nats nats://127.0.0.1:4222")]
pub(super) struct UtpArgs {
    #[command(subcommand)]
    command: UtpCommand,
}

#[derive(Debug, Subcommand)]
enum UtpCommand {
    /// Serve the built-in tools to whoever publishes commands for a target
    #[command(after_help = "\
Examples:
  toolcrib utp serve --target crib --nats nats://127.0.0.1:4222")]
    Serve(HostArgs),
}

#[derive(Debug, Args)]
struct HostArgs {
    /// The target in cmd.tool.TARGET.*
    #[arg(long, value_name = "NAME")]
    target: String,
    /// The NATS server [default: nats.url of the configuration]
    #[arg(long, value_name = "URL")]
    nats: Option<String>,
    #[command(flatten)]
    place: Place,
}

pub(super) async fn run(context: &Context, args: UtpArgs) -> Result<(), Failure> {
    let UtpCommand::Serve(args) = args.command;
    let mut config = context.config(None, &args.place)?;
    crate::telemetry::start_logging(&config.log.level, config.log.format);
    config.nats.url = args.nats.or(config.nats.url);
    let Some(address) = config.nats.address() else {
        return Err(Failure::usage("name the NATS server: --nats nats://127.0.0.1:4222"));
    };
    Ok(serve(&config, &address, &args.target).await?)
}

async fn serve(
    config: &crate::config::Config,
    address: &Address,
    target: &str,
) -> anyhow::Result<()> {
    let tools = crate::assemble::builtin_tools(config)?;
    let engine = Engine::builder().tools(tools).limits(config.limits()).start().await?;
    let link = Link::connect(address, "toolcrib utp serve").await?;
    let names: Vec<String> = engine
        .tools(&Caller::local("default"))
        .iter()
        .map(|tool| tool.definition.name.clone())
        .collect();
    println!("serving cmd.tool.{target}.*: {}", names.join("  "));
    let engine = Arc::new(engine);
    let host = Host::over(link).named("tool.toolcrib").any(move |job| {
        let engine = engine.clone();
        async move { run_tool(&engine, job).await }
    });
    // Interrupted by a signal, the command is dropped; what it had is given to another.
    host.serve(target, std::future::pending()).await
}

/// Runs a tool of this process for somebody else's call.
async fn run_tool(engine: &Engine, job: Job) -> Answer {
    let caller = Caller::local("default");
    let name = job.tool_name.clone();
    let outcome = async {
        let mut asked = Invocation::new(name.as_str(), &job.args.to_string())
            .map_err(|error| Error::refused(Code::BadRequest, error.to_string()))?;
        asked.traceparent = Some(job.traceparent.clone());
        let left_ms = job.deadline_ms.map(|at_ms| at_ms.saturating_sub(engine.now_ms()).max(1));
        asked.timeout_ms = left_ms;
        let ticket = engine.invoke(&caller, asked).await?;
        engine.finished(&caller, &ticket.call.id).await
    };
    let call = match outcome.await {
        Ok(call) => call,
        Err(Error::Refused { fault, .. }) => return Answer::failed(fault),
        Err(Error::Internal(error)) => {
            tracing::error!(%error, tool = name, "internal error");
            return Answer::failed(Fault::new(Code::Internal, "internal error"));
        }
    };
    let ended = call.outcome.as_ref();
    let data = ended.and_then(|outcome| outcome.data.as_ref()).map(|data| data.value());
    match ended.and_then(|outcome| outcome.error.clone()) {
        None => Answer::success(data.unwrap_or(json!(null))),
        Some(fault) => {
            let status = match call.status {
                Status::Timeout => ToolStatus::Timeout,
                Status::Canceled => ToolStatus::Canceled,
                _ => ToolStatus::Failed,
            };
            Answer { status, ..Answer::failed(fault) }
        }
    }
}
