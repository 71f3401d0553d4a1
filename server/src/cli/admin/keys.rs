//! `keys` and `tokens`: credentials of agents, and session tokens that narrow them.

use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};
use reqwest::Method;
use serde_json::{Map, Value, json};
use toolcrib::domain::directory::credential::ToolNameForm;
use toolcrib_protocol::duration::parse_duration;

use super::target::AdminTarget;
use super::{array_member, print_change};
use crate::cli::client::ApiRequest;
use crate::cli::failure::CommandFailure;
use crate::cli::output::{
    Column, format_local_time, now_ms, sanitize_line, str_member, u64_member,
};
use crate::cli::{CommandContext, StorageArgs, ToolNamesArg};

#[derive(Debug, Args)]
#[command(after_help = "\
The first key must have the role admin. Roles add up: agent calls tools, provider offers tools and
reports results, approver decides approvals, auditor reads calls, rules, keys and the audit log,
admin does everything in its project.

Examples:
  toolcrib keys create --agent operator --role admin
  toolcrib keys create --agent ada --allow 'weather.*' --allow calculation.eval
  toolcrib keys create --agent browser --role provider --project acme
  toolcrib keys create --agent bot --role agent --role approver --group eng --environment staging
  toolcrib keys create --agent ci --tools 'build.*' --network 10.0.0.0/8 --expires 30d
  toolcrib keys create --agent gateway --may-assert user --may-assert session --allow '*'
  toolcrib keys create --agent cron --allow 'mail.*' --no-rejoin
  toolcrib keys create --agent desktop --allow '*' --mcp-names dotted --mcp-wait-ms 20000
  toolcrib keys rotate key_01K… --overlap 1d
  toolcrib keys ls
  toolcrib keys revoke key_01K…
  KEY=$(toolcrib keys create --agent ci --allow '*')")]
pub struct KeysArgs {
    #[command(subcommand)]
    verb: Option<KeysCommand>,
    #[command(flatten)]
    storage: StorageArgs,
}

#[derive(Debug, Subcommand)]
enum KeysCommand {
    /// Create a key; its secret is printed once
    Create(Box<NewKeyArgs>),
    /// List keys, without their secrets
    #[command(alias = "list")]
    Ls,
    /// Replace a key by one with the same rights; the new secret is printed once
    Rotate {
        /// The key's id, key_…
        id: String,
        /// Time for which the old key stays valid, such as 1h or 1d
        #[arg(long, value_name = "TIME", default_value = "0s", value_parser = parse_duration)]
        overlap: Duration,
    },
    /// Revoke a key and its session tokens immediately
    Revoke {
        /// The key's id, key_…
        id: String,
    },
}

#[derive(Debug, Args)]
struct NewKeyArgs {
    /// The agent the key is for
    #[arg(long, value_name = "NAME")]
    agent: String,
    /// A role of the key; can be repeated [default: agent]
    #[arg(long, value_enum)]
    role: Vec<RoleArg>,
    /// A group of the agent; can be repeated
    #[arg(long, value_name = "NAME")]
    group: Vec<String>,
    /// The environment of the agent, such as production
    #[arg(long, value_name = "NAME")]
    environment: Option<String>,
    /// The user that the agent acts for
    #[arg(long, value_name = "NAME")]
    user: Option<String>,
    /// Pattern of tools that the key is limited to, whatever the rules allow; can be repeated
    #[arg(long, value_name = "PATTERN")]
    tools: Vec<String>,
    /// Network that the key may be used from, such as 10.0.0.0/8; can be repeated
    #[arg(long, value_name = "CIDR")]
    network: Vec<String>,
    /// End of the key: a time in RFC 3339, or a time from now such as 30d
    #[arg(long, value_name = "TIME", value_parser = parse_end)]
    expires: Option<String>,
    /// Attribute that requests may assert by a header; can be repeated
    #[arg(long, value_enum)]
    may_assert: Vec<AssertableArg>,
    /// Pattern of tools that the agent may call; can be repeated
    #[arg(long, value_name = "PATTERN")]
    allow: Vec<String>,
    /// A repeated request of the agent never joins an earlier call
    #[arg(long)]
    no_rejoin: bool,
    /// Form of the names of tools that MCP clients with the key see [default: the server's]
    #[arg(long, value_enum, value_name = "FORM")]
    mcp_names: Option<ToolNamesArg>,
    /// Time that tools/call of MCP clients with the key waits for a result [default: the server's]
    #[arg(long, value_name = "MS")]
    mcp_wait_ms: Option<u64>,
}

/// A role as a command-line value.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum RoleArg {
    /// Calls tools
    Agent,
    /// Provides tools and reports results
    Provider,
    /// Decides approvals and reads calls
    Approver,
    /// Reads calls, rules, keys and the audit log
    Auditor,
    /// Administers the server
    Admin,
}

/// An assertable attribute as a command-line value.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum AssertableArg {
    /// X-Toolcrib-User
    User,
    /// X-Toolcrib-Session
    Session,
}

/// Returns the end of a key in RFC 3339.
fn parse_end(text: &str) -> Result<String, String> {
    if let Ok(after) = parse_duration(text) {
        let end_ms = now_ms().saturating_add(after.as_millis() as u64);
        let end = jiff::Timestamp::from_millisecond(end_ms as i64);
        return end.map(|end| end.to_string()).map_err(|error| error.to_string());
    }
    let end = text.parse::<jiff::Timestamp>();
    end.map(|end| end.to_string())
        .map_err(|_| format!("\"{text}\" is neither a time in RFC 3339 nor a time such as 30d"))
}

/// Returns the names of command-line values.
fn value_names<T: ValueEnum>(values: &[T]) -> Vec<String> {
    let values = values.iter().filter_map(ValueEnum::to_possible_value);
    values.map(|value| value.get_name().to_owned()).collect()
}

impl NewKeyArgs {
    /// Returns the body of the request that creates the key.
    fn into_body(self, project: Option<&str>) -> Value {
        let mut body = Map::new();
        let list = |names: Vec<String>| Some(names).filter(|names| !names.is_empty());
        for (name, value) in [
            ("agent", Some(json!(self.agent))),
            ("project", project.map(Value::from)),
            ("roles", list(value_names(&self.role)).map(Value::from)),
            ("groups", list(self.group).map(Value::from)),
            ("environment", self.environment.map(Value::from)),
            ("user", self.user.map(Value::from)),
            ("tools", list(self.tools).map(Value::from)),
            ("networks", list(self.network).map(Value::from)),
            ("expires_at", self.expires.map(Value::from)),
            ("may_assert", list(value_names(&self.may_assert)).map(Value::from)),
            ("allow", list(self.allow).map(Value::from)),
            ("rejoin", self.no_rejoin.then_some(json!(false))),
            ("mcp_names", self.mcp_names.map(|form| ToolNameForm::from(form).as_str().into())),
            ("mcp_wait_ms", self.mcp_wait_ms.map(Value::from)),
        ] {
            body.extend(value.map(|value| (name.to_owned(), value)));
        }
        Value::Object(body)
    }
}

pub async fn keys(context: &CommandContext, args: KeysArgs) -> Result<(), CommandFailure> {
    match args.verb.unwrap_or(KeysCommand::Ls) {
        KeysCommand::Create(new) => {
            let target = AdminTarget::open_or_create(context, &args.storage).await?;
            let body = new.into_body(context.global.project.as_deref());
            print_created_key(context, &target.create_key(body).await?)
        }
        KeysCommand::Ls => {
            let keys = AdminTarget::open_existing(context, &args.storage).await?.keys().await?;
            print_keys(context, &keys)
        }
        KeysCommand::Rotate { id, overlap } => {
            let target = AdminTarget::open_existing(context, &args.storage).await?;
            print_created_key(context, &target.rotate_key(&id, overlap.as_secs()).await?)
        }
        KeysCommand::Revoke { id } => {
            AdminTarget::open_existing(context, &args.storage).await?.revoke_key(&id).await?;
            print_change(
                context,
                &json!({"id": id, "revoked": true}),
                &format!("revoked {}", sanitize_line(&id)),
            )
        }
    }
}

fn print_keys(context: &CommandContext, keys: &Value) -> Result<(), CommandFailure> {
    if context.output.json {
        return context.output.print_json(keys);
    }
    let row = |key: &Value| {
        let time_cell = |member| u64_member(key, member).map(format_local_time).unwrap_or_default();
        let words =
            ["id", "project", "agent", "role", "status"].map(|m| str_member(key, m).to_owned());
        words.into_iter().chain([time_cell("created_at_ms"), time_cell("expires_at_ms")]).collect()
    };
    let columns = [
        Column::id("ID"),
        Column::detail("PROJECT", 2),
        Column::text("AGENT"),
        Column::detail("ROLE", 4),
        Column::id("STATUS"),
        Column::detail("CREATED", 1),
        Column::detail("EXPIRES", 3),
    ];
    let none = "no keys: every program that reaches the loopback address may call tools; \
                administration needs the operator token";
    let rows = array_member(keys, "keys").iter().map(row).collect();
    context.output.print_table(&columns, rows, none)
}

fn print_created_key(context: &CommandContext, created: &Value) -> Result<(), CommandFailure> {
    let output = context.output;
    if output.json {
        return output.print_json(created);
    }
    let part = |member| sanitize_line(str_member(created, member));
    output.print_note(&format!(
        "{} for agent {} of project {}, role {}",
        part("id"),
        part("agent"),
        part("project"),
        part("role"),
    ));
    if created["first"] == true {
        output.print_note("this is the first key: from now on every request needs one");
        output.print_note(
            "programs that provide tools need one too: toolcrib keys create --agent NAME --role \
             provider",
        );
    }
    if str_member(created, "role") == "agent"
        && created["allow"].as_array().is_some_and(Vec::is_empty)
    {
        let agent = part("agent");
        output.print_note(&format!(
            "it may call nothing yet: toolcrib allow --agent {agent} PATTERN"
        ));
    }
    output.print_note("the secret is shown this once, and is not kept:");
    output.print_line(&part("key"))
}

#[derive(Debug, Args)]
#[command(after_help = "\
A session token narrows the key that you give with --key or TOOLCRIB_KEY: for a browser, an MCP
client or a child process. It has at most the key's roles agent and provider, and ends with the key.

Examples:
  toolcrib tokens create --ttl 15m --tools 'weather.*'
  toolcrib tokens create --ttl 8h --user bob --session s-1
  TOOLCRIB_KEY=$(toolcrib tokens create --ttl 1h) toolcrib mcp
  toolcrib tokens ls
  toolcrib tokens revoke st_01K…")]
pub struct TokensArgs {
    #[command(subcommand)]
    verb: Option<TokensCommand>,
}

#[derive(Debug, Subcommand)]
enum TokensCommand {
    /// Make a session token; its secret is printed once
    Create {
        /// Time until the token ends, such as 15m or 8h
        #[arg(long, value_name = "TIME", value_parser = parse_duration)]
        ttl: Duration,
        /// The user that the bearer acts for; the key must be allowed to assert one
        #[arg(long, value_name = "NAME")]
        user: Option<String>,
        /// The session of the bearer; the key must be allowed to assert one
        #[arg(long, value_name = "NAME")]
        session: Option<String>,
        /// The environment of the bearer
        #[arg(long, value_name = "NAME")]
        environment: Option<String>,
        /// Pattern of tools that the token is limited to; can be repeated
        #[arg(long, value_name = "PATTERN")]
        tools: Vec<String>,
    },
    /// List session tokens, without their secrets
    #[command(alias = "list")]
    Ls,
    /// Revoke a session token immediately
    Revoke {
        /// The token's id, st_…
        id: String,
    },
}

pub async fn tokens(context: &CommandContext, args: TokensArgs) -> Result<(), CommandFailure> {
    let (client, output) = (context.client()?, context.output);
    match args.verb.unwrap_or(TokensCommand::Ls) {
        TokensCommand::Create { ttl, user, session, environment, tools } => {
            let mut body = json!({ "ttl_s": ttl.as_secs() });
            let tools = Some(tools).filter(|tools| !tools.is_empty()).map(Value::from);
            for (name, value) in [
                ("user", user.map(Value::from)),
                ("session", session.map(Value::from)),
                ("environment", environment.map(Value::from)),
                ("tools", tools),
            ] {
                if let Some(value) = value {
                    body[name] = value;
                }
            }
            let ask = ApiRequest::post(&["v1", "session_tokens"], body);
            let created = client.request_json(ask).await?;
            if output.json {
                return output.print_json(&created);
            }
            let part = |member| sanitize_line(str_member(&created, member));
            output.print_note(&format!("{}, valid until {}", part("id"), part("expires_at")));
            output.print_note("the secret is shown this once, and is not kept:");
            output.print_line(&part("token"))
        }
        TokensCommand::Ls => {
            let tokens = client.request_json(ApiRequest::get(&["v1", "session_tokens"])).await?;
            if output.json {
                return output.print_json(&tokens);
            }
            let row = |token: &Value| {
                let words = ["id", "key_id", "user", "session", "status"]
                    .map(|member| str_member(token, member).to_owned());
                let end = u64_member(token, "expires_at_ms").map(format_local_time);
                words.into_iter().chain([end.unwrap_or_default()]).collect()
            };
            let columns = [
                Column::id("ID"),
                Column::detail("KEY", 2),
                Column::text("USER"),
                Column::text("SESSION"),
                Column::id("STATUS"),
                Column::detail("EXPIRES", 1),
            ];
            let rows = array_member(&tokens, "session_tokens").iter().map(row).collect();
            output.print_table(&columns, rows, "no session tokens")
        }
        TokensCommand::Revoke { id } => {
            let ask = ApiRequest::new(Method::DELETE, &["v1", "session_tokens", &id]);
            client.request_json(ask).await?;
            let text = format!("revoked {}", sanitize_line(&id));
            print_change(context, &json!({"id": id, "revoked": true}), &text)
        }
    }
}
