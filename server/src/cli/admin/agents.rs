//! `toolcrib agents`: lists, shows, defines and removes agents, which are called like tools.

use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use reqwest::Method;
use serde_json::{Value, json};
use toolcrib_transport::http::AgentBody;

use super::target::AdminTarget;
use super::{array_member, print_change};
use crate::cli::client::ApiRequest;
use crate::cli::failure::CommandFailure;
use crate::cli::output::{Column, sanitize_line, str_member, u64_member};
use crate::cli::{CommandContext, StorageArgs};

#[derive(Debug, Args)]
#[command(after_help = "\
An agent is a profile: instructions, a model, tools, limits. It is offered as the tool agent.ID with
the arguments instruction and context, to everything that calls tools.

A file is YAML, JSON or TOML with the fields of PUT /v1/agents/ID and agent_id, or a list of them
named agents:

  agent_id: researcher
  profile:
    instructions: You find facts. Answer in two sentences.
    tools: ['web.*', calculation.eval]
    limits: {steps: 10, tokens: 50000, ms: 120000, depth: 1}
    result_fields: [summary, {name: sources, type: array}]

Examples:
  toolcrib agents
  toolcrib agents apply researcher.yaml
  toolcrib call agent.researcher instruction='How high is the Eiffel Tower?'
  toolcrib agents show researcher
  toolcrib agents versions researcher
  toolcrib agents rm researcher")]
pub struct AgentsArgs {
    #[command(subcommand)]
    verb: Option<AgentsCommand>,
    #[command(flatten)]
    storage: StorageArgs,
}

#[derive(Debug, Subcommand)]
enum AgentsCommand {
    /// List the agents
    #[command(alias = "list")]
    Ls,
    /// Show one agent
    #[command(alias = "get")]
    Show {
        /// Id of the agent
        agent: String,
    },
    /// List the versions of an agent, newest first
    Versions {
        /// Id of the agent
        agent: String,
    },
    /// Define the agents of a file, or new versions of them
    #[command(alias = "import")]
    Apply {
        /// File with YAML, JSON or TOML; - reads YAML or JSON from standard input
        file: PathBuf,
    },
    /// Remove an agent and its tool
    Rm {
        /// Id of the agent
        agent: String,
    },
}

pub async fn agents(context: &CommandContext, args: AgentsArgs) -> Result<(), CommandFailure> {
    match args.verb.unwrap_or(AgentsCommand::Ls) {
        AgentsCommand::Ls => {
            let target = AdminTarget::open_existing(context, &args.storage).await?;
            print_agents(context, &target.agents().await?)
        }
        AgentsCommand::Show { agent } => {
            let target = AdminTarget::open_existing(context, &args.storage).await?;
            context.output.print_json(&target.agent(&agent).await?)
        }
        AgentsCommand::Versions { agent } => {
            let target = AdminTarget::open_existing(context, &args.storage).await?;
            print_versions(context, &target.agent_versions(&agent).await?)
        }
        AgentsCommand::Apply { file } => {
            let documents = read_agents(&file)?;
            let target = AdminTarget::open_or_create(context, &args.storage).await?;
            for document in documents {
                let agent = target.put_agent(&document).await?;
                let id = sanitize_line(str_member(&agent, "agent_id"));
                let text = match u64_member(&agent, "version") {
                    Some(version) => {
                        format!("agent {id} is at version {version}: toolcrib call agent.{id}")
                    }
                    None => format!("agent {id} is on the roster: it can be woken, not called"),
                };
                print_change(context, &agent, &text)?;
            }
            Ok(())
        }
        AgentsCommand::Rm { agent } => {
            let target = AdminTarget::open_existing(context, &args.storage).await?;
            target.remove_agent(&agent).await?;
            let text = format!("removed agent {}", sanitize_line(&agent));
            print_change(context, &json!({ "agent_id": agent, "removed": true }), &text)
        }
    }
}

/// Reads the agents of a file: one, or a list named `agents`.
fn read_agents(file: &Path) -> Result<Vec<Value>, CommandFailure> {
    let file_name = file.display();
    let document = if file.as_os_str() == "-" {
        let text = std::io::read_to_string(std::io::stdin())?;
        parse_yaml("standard input", &text)?
    } else if file.extension().is_some_and(|extension| extension == "toml") {
        crate::config::rules::read_toml_or_json(file).map_err(CommandFailure::usage)?
    } else {
        let text = std::fs::read_to_string(file);
        let unreadable = |error| CommandFailure::usage(format!("cannot read {file_name}: {error}"));
        parse_yaml(&file_name.to_string(), &text.map_err(unreadable)?)?
    };
    let documents = match document.get("agents") {
        Some(Value::Array(agents)) => agents.clone(),
        _ => vec![document],
    };
    for document in &documents {
        if str_member(document, "agent_id").is_empty() {
            return Err(CommandFailure::usage(format!("{file_name}: an agent has no agent_id")));
        }
    }
    Ok(documents)
}

/// Parses YAML, of which JSON is a subset. `origin` names the text in an error.
fn parse_yaml(origin: &str, text: &str) -> Result<Value, CommandFailure> {
    toolcrib_protocol::yaml::parse(text)
        .map_err(|reason| CommandFailure::usage(format!("{origin} cannot be read: {reason}")))
}

fn print_agents(context: &CommandContext, agents: &Value) -> Result<(), CommandFailure> {
    if context.output.json {
        return context.output.print_json(agents);
    }
    let row = |agent: &Value| {
        let version = u64_member(agent, "version").map(|n| n.to_string()).unwrap_or_default();
        let profile = &agent["profile"];
        let about = match str_member(profile, "description") {
            "" => str_member(profile, "instructions"),
            about => about,
        };
        let [id, driver, target] =
            ["agent_id", "driver", "worker_target"].map(|name| str_member(agent, name).to_owned());
        vec![id, version, driver, target, about.chars().take(200).collect()]
    };
    let rows = array_member(agents, "agents").iter().map(row).collect();
    let columns = [
        Column::id("AGENT"),
        Column::id("VERSION"),
        Column::id("DRIVER"),
        Column::id("WORKER"),
        Column::text("ABOUT"),
    ];
    context.output.print_table(&columns, rows, "there are no agents (toolcrib agents apply FILE)")
}

fn print_versions(context: &CommandContext, versions: &Value) -> Result<(), CommandFailure> {
    if context.output.json {
        return context.output.print_json(versions);
    }
    let row = |agent: &Value| {
        let number = |member| u64_member(agent, member).unwrap_or_default();
        vec![
            number("version").to_string(),
            crate::cli::output::format_local_time(number("updated_at_ms")),
            str_member(agent, "created_by").to_owned(),
            str_member(&agent["profile"], "instructions").chars().take(200).collect(),
        ]
    };
    let rows = array_member(versions, "versions").iter().map(row).collect();
    let columns =
        [Column::id("VERSION"), Column::id("AT"), Column::id("BY"), Column::text("INSTRUCTIONS")];
    context.output.print_table(&columns, rows, "there are no versions")
}

fn agent_json(body: AgentBody) -> Result<Value, CommandFailure> {
    Ok(serde_json::to_value(body).map_err(anyhow::Error::from)?)
}

impl AdminTarget {
    async fn agents(&self) -> Result<Value, CommandFailure> {
        match self {
            Self::Remote { client } => {
                client.request_json(ApiRequest::get(&["v1", "agents"])).await
            }
            Self::Local { engine, caller, .. } => {
                let roster = engine.roster().list(caller).into_iter();
                let agents = roster.map(|entry| agent_json(entry.into()));
                Ok(json!({ "agents": agents.collect::<Result<Vec<Value>, _>>()? }))
            }
        }
    }

    async fn agent(&self, agent: &str) -> Result<Value, CommandFailure> {
        match self {
            Self::Remote { client } => {
                client.request_json(ApiRequest::get(&["v1", "agents", agent])).await
            }
            Self::Local { engine, caller, .. } => {
                agent_json(engine.roster().agent_entry(caller, agent)?.into())
            }
        }
    }

    async fn agent_versions(&self, agent: &str) -> Result<Value, CommandFailure> {
        match self {
            Self::Remote { client } => {
                client.request_json(ApiRequest::get(&["v1", "agents", agent, "versions"])).await
            }
            Self::Local { engine, caller, .. } => {
                let versions = engine.roster().agent_versions(caller, agent, usize::MAX).await?;
                let versions = versions.into_iter().map(|version| agent_json(version.into()));
                Ok(json!({ "versions": versions.collect::<Result<Vec<Value>, _>>()? }))
            }
        }
    }

    async fn put_agent(&self, document: &Value) -> Result<Value, CommandFailure> {
        let agent_id = str_member(document, "agent_id");
        match self {
            Self::Remote { client } => {
                let request = ApiRequest::new(Method::PUT, &["v1", "agents", agent_id]);
                client.request_json(request.body(document.clone())).await
            }
            Self::Local { engine, caller, .. } => {
                agent_json(engine.roster().put_agent(caller, None, document).await?.into())
            }
        }
    }

    async fn remove_agent(&self, agent: &str) -> Result<(), CommandFailure> {
        match self {
            Self::Remote { client } => {
                let request = ApiRequest::new(Method::DELETE, &["v1", "agents", agent]);
                client.request_json(request).await.map(drop)
            }
            Self::Local { engine, caller, .. } => {
                Ok(engine.roster().remove_agent_entry(caller, agent).await?)
            }
        }
    }
}
