//! `toolcrib approvals`: lists the calls that wait for a person, decides about them, and revokes
//! standing approvals.

use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};
use reqwest::Method;
use serde_json::{Value, json};

use crate::cli::client::{ApiClient, ApiRequest};
use crate::cli::failure::{CommandFailure, exit};
use crate::cli::output::{
    Column, format_age, format_local_time, now_ms, pretty_json, sanitize_line, sanitize_text,
    str_member, u64_member,
};
use crate::cli::{CommandContext, watch};

/// Maximum number of decisions in one request.
const MAX_DECISIONS: usize = 1_000;

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  toolcrib approvals
  toolcrib approvals show apr_01K…
  toolcrib approvals approve apr_01K… apr_01M…
  toolcrib approvals approve apr_01K… --scope until --until 2027-01-31T18:00:00Z
  toolcrib approvals approve apr_01K… --args '{\"amount\": 100}'
  toolcrib approvals approve --all --tool mail.send
  toolcrib approvals reject apr_01K… --reason 'the amount is too high'
  toolcrib approvals watch
  toolcrib approvals standing
  toolcrib approvals revoke sap_01K…")]
pub struct ApprovalsArgs {
    #[command(subcommand)]
    verb: Option<ApprovalsCommand>,
}

#[derive(Debug, Subcommand)]
enum ApprovalsCommand {
    /// List approvals, newest first
    #[command(alias = "list")]
    Ls(ApprovalFilters),
    /// Show one approval: who asks, for what, why, and what differs from the last approved call
    Show {
        /// The approval, apr_…
        id: String,
    },
    /// Approve calls, all in one commit
    Approve(ApproveArgs),
    /// Reject calls, all in one commit; the model sees the reason
    Reject(RejectArgs),
    /// Show approvals as they are requested and decided
    Watch,
    /// List standing approvals
    Standing,
    /// Revoke a standing approval
    Revoke {
        /// The standing approval, sap_…
        id: String,
    },
}

#[derive(Debug, Default, Args)]
struct ApprovalFilters {
    /// pending, approved, rejected, expired, superseded or canceled [default: pending]
    #[arg(long, conflicts_with = "all")]
    status: Option<String>,
    /// Approvals in every status
    #[arg(long)]
    all: bool,
    /// Only approvals of this tool
    #[arg(long, value_name = "NAME")]
    tool: Option<String>,
    /// Maximum number of approvals, up to 1000 [default: 50]
    #[arg(long, value_name = "N")]
    limit: Option<u32>,
    /// Continue after a page, with the cursor it printed
    #[arg(long)]
    cursor: Option<String>,
}

/// The approvals to decide about.
#[derive(Debug, Args)]
struct DecisionTargets {
    /// The approvals, apr_…
    #[arg(value_name = "ID", required_unless_present = "all", conflicts_with = "all")]
    ids: Vec<String>,
    /// Every pending approval that you may decide, up to 1000
    #[arg(long)]
    all: bool,
    /// With --all: only approvals of this tool
    #[arg(long, value_name = "NAME", requires = "all")]
    tool: Option<String>,
    /// Reason of the decision
    #[arg(long, value_name = "TEXT")]
    reason: Option<String>,
}

#[derive(Debug, Args)]
struct ApproveArgs {
    #[command(flatten)]
    targets: DecisionTargets,
    /// Approve this call, or every equal call of the same requester in its run or until a date
    #[arg(long, value_enum, default_value_t = Scope::Once)]
    scope: Scope,
    /// End of --scope until: an RFC 3339 time, or a duration such as 8h
    #[arg(long, value_name = "TIME", required_if_eq("scope", "until"))]
    until: Option<String>,
    /// Execute other arguments: a new call takes the place of the one that waits
    #[arg(long, value_name = "JSON", conflicts_with = "all")]
    args: Option<String>,
}

#[derive(Debug, Args)]
struct RejectArgs {
    #[command(flatten)]
    targets: DecisionTargets,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Scope {
    Once,
    Run,
    Until,
}

impl Scope {
    fn as_str(self) -> &'static str {
        match self {
            Self::Once => "once",
            Self::Run => "run",
            Self::Until => "until",
        }
    }
}

pub async fn run(context: &CommandContext, args: ApprovalsArgs) -> Result<(), CommandFailure> {
    match args.verb.unwrap_or(ApprovalsCommand::Ls(ApprovalFilters::default())) {
        ApprovalsCommand::Ls(filters) => list(context, filters).await,
        ApprovalsCommand::Show { id } => show(context, &id).await,
        ApprovalsCommand::Approve(args) => approve(context, args).await,
        ApprovalsCommand::Reject(args) => {
            let reason = args.targets.reason.clone();
            let decision = json!({ "verdict": "reject", "reason": reason });
            decide(context, args.targets, decision).await
        }
        ApprovalsCommand::Watch => watch::approval_events(context).await,
        ApprovalsCommand::Standing => list_standing(context).await,
        ApprovalsCommand::Revoke { id } => revoke(context, &id).await,
    }
}

async fn list(context: &CommandContext, filters: ApprovalFilters) -> Result<(), CommandFailure> {
    let status = match filters.all {
        true => None,
        false => Some(filters.status.unwrap_or_else(|| "pending".to_owned())),
    };
    let none = match status.as_deref() {
        Some("pending") => "no call waits for an approval".to_owned(),
        Some(status) => format!("no approval is {}", sanitize_line(&status.to_lowercase())),
        None => "no approvals".to_owned(),
    };
    let none = match &filters.tool {
        Some(tool) => format!("{none} (of {})", sanitize_line(tool)),
        None => none,
    };
    let request = ApiRequest::get(&["v1", "approvals"])
        .query("status", status)
        .query("tool_name", filters.tool)
        .query("limit", filters.limit)
        .query("cursor", filters.cursor);
    let answer = context.client()?.request_json(request).await?;
    let output = context.output;
    if output.json {
        return output.print_json(&answer);
    }
    let row = |approval: &Value| {
        let age_ms = u64_member(approval, "created_at_ms").map(|at| now_ms().saturating_sub(at));
        let left_ms = u64_member(approval, "expires_at_ms").map(|at| at.saturating_sub(now_ms()));
        let is_pending = str_member(approval, "status") == "pending";
        let left_ms = left_ms.filter(|_| is_pending);
        vec![
            str_member(approval, "status").to_owned(),
            str_member(approval, "tool_name").to_owned(),
            requester(approval),
            approval["args"].to_string(),
            str_member(approval, "reason").to_owned(),
            age_ms.map(format_age).unwrap_or_default(),
            left_ms.map(format_age).unwrap_or_default(),
            str_member(approval, "approval_id").to_owned(),
        ]
    };
    let columns = [
        Column::detail("STATUS", 3),
        Column::text("TOOL"),
        Column::detail("BY", 4),
        Column::optional_text("ARGS", 6),
        Column::optional_text("REASON", 5),
        Column::detail("AGE", 1),
        Column::detail("LEFT", 2),
        Column::id("ID"),
    ];
    let rows = members(&answer, "approvals").iter().map(row).collect();
    output.print_table(&columns, rows, &none)?;
    output.print_next_page(&answer);
    Ok(())
}

/// Returns the requester of an approval or a standing approval: the agent, and the user that it
/// acts for.
fn requester(approval: &Value) -> String {
    let by = &approval["requested_by"];
    match by["user"].as_str() {
        Some(user) => format!("{} for {user}", str_member(by, "agent")),
        None => str_member(by, "agent").to_owned(),
    }
}

async fn show(context: &CommandContext, id: &str) -> Result<(), CommandFailure> {
    let request = ApiRequest::get(&["v1", "approvals", id]);
    let approval = context.client()?.request_json(request).await?;
    let output = context.output;
    if output.json {
        return output.print_json(&approval);
    }
    let mut lines = vec![
        format!("approval    {}", str_member(&approval, "approval_id")),
        format!("status      {}", str_member(&approval, "status")),
        format!("tool        {}", str_member(&approval, "tool_name")),
        format!("requested   by {}, run {}", requester(&approval), str_member(&approval, "run_id")),
        format!("call        {}", str_member(&approval, "tool_call_id")),
        format!(
            "reason      {} (rule {})",
            str_member(&approval, "reason"),
            str_member(&approval, "rule_id")
        ),
    ];
    if let Some(at_ms) = u64_member(&approval, "expires_at_ms") {
        lines.push(format!("expires     {}", format_local_time(at_ms)));
    }
    let decision = &approval["decision"];
    if decision.is_object() {
        let by = decision["by"].as_str().unwrap_or("no person");
        let reason = decision["reason"].as_str().unwrap_or("no reason");
        lines.push(format!("decision    by {by}: {reason}"));
    }
    for line in lines {
        output.print_line(&sanitize_line(&line))?;
    }
    output.print_line("arguments")?;
    output.print_line(&sanitize_text(&pretty_json(&approval["args"])))?;
    let Some(changes) = approval["difference"].as_array() else {
        return output.print_line("no call of this tool was approved before");
    };
    if changes.is_empty() {
        return output.print_line("the arguments are those of the last approved call");
    }
    output.print_line("differences to the last approved call")?;
    for change in changes {
        let value = |name: &str| change.get(name).map_or("nothing".to_owned(), Value::to_string);
        let path = str_member(change, "path");
        let line = format!("  {path}: {} -> {}", value("before"), value("after"));
        output.print_line(&sanitize_line(&line))?;
    }
    Ok(())
}

async fn approve(context: &CommandContext, args: ApproveArgs) -> Result<(), CommandFailure> {
    let until = args.until.as_deref().map(parse_until);
    let new_args = args.args.as_deref().map(|text| {
        serde_json::from_str::<Value>(text)
            .map_err(|error| CommandFailure::usage(format!("--args is not JSON: {error}")))
    });
    if args.args.is_some() && args.targets.ids.len() != 1 {
        return Err(CommandFailure::usage("--args goes with one approval"));
    }
    let mut decision = json!({ "verdict": "approve", "scope": args.scope.as_str() });
    decision["reason"] = json!(args.targets.reason);
    if let Some(until) = until {
        decision["until"] = until;
    }
    if let Some(new_args) = new_args.transpose()? {
        decision["args"] = new_args;
    }
    decide(context, args.targets, decision).await
}

/// Returns the end of a standing approval: the end of a duration from now in Unix milliseconds, or
/// the text itself, which the server parses as a time.
fn parse_until(text: &str) -> Value {
    match toolcrib_protocol::duration::parse_duration(text) {
        Ok(duration) => {
            let ms = u64::try_from(Duration::as_millis(&duration)).unwrap_or(u64::MAX);
            json!(now_ms().saturating_add(ms))
        }
        Err(_) => json!(text),
    }
}

async fn decide(
    context: &CommandContext,
    targets: DecisionTargets,
    decision: Value,
) -> Result<(), CommandFailure> {
    let client = context.client()?;
    let ids = match targets.all {
        true => find_pending(&client, targets.tool).await?,
        false => targets.ids,
    };
    let output = context.output;
    if ids.is_empty() {
        output.print_note("no call waits for an approval");
        return Ok(());
    }
    let decisions: Vec<Value> = ids
        .iter()
        .map(|id| {
            let mut decision = decision.clone();
            decision["approval_id"] = json!(id);
            decision
        })
        .collect();
    let request =
        ApiRequest::post(&["v1", "approvals", "decide"], json!({ "decisions": decisions }));
    let answer = client.request_json(request).await?;
    if output.json {
        output.print_json(&answer)?;
    } else {
        for result in members(&answer, "results") {
            output.print_line(&sanitize_line(&describe_result(result)))?;
        }
    }
    match u64_member(&answer, "failed") {
        Some(0) | None => Ok(()),
        Some(failed) => {
            let message = format!("{failed} of {} decisions were refused", ids.len());
            Err(CommandFailure::new(exit::FAILURE, "REFUSED", message))
        }
    }
}

/// Returns the ids of the pending approvals that the caller may see.
async fn find_pending(
    client: &ApiClient,
    tool: Option<String>,
) -> Result<Vec<String>, CommandFailure> {
    let request = ApiRequest::get(&["v1", "approvals"])
        .query("status", Some("pending"))
        .query("tool_name", tool)
        .query("limit", Some(MAX_DECISIONS));
    let answer = client.request_json(request).await?;
    let approvals = members(&answer, "approvals").iter();
    Ok(approvals.map(|approval| str_member(approval, "approval_id").to_owned()).collect())
}

fn describe_result(result: &Value) -> String {
    let id = str_member(result, "approval_id");
    if result["ok"] != true {
        return format!("{id}  refused: {}", str_member(&result["error"], "message"));
    }
    let status = str_member(result, "status");
    let mut line = format!("{id}  {status}  {}", str_member(result, "tool_call_id"));
    for (member, words) in [("replaced_by", "replaced by"), ("standing_id", "standing approval")] {
        if let Some(value) = result[member].as_str() {
            line.push_str(&format!("  {words} {value}"));
        }
    }
    if result["repeated"] == true {
        line.push_str("  (decided before)");
    }
    line
}

async fn list_standing(context: &CommandContext) -> Result<(), CommandFailure> {
    let request = ApiRequest::get(&["v1", "approvals", "standing"]);
    let answer = context.client()?.request_json(request).await?;
    let output = context.output;
    if output.json {
        return output.print_json(&answer);
    }
    let row = |standing: &Value| {
        vec![
            str_member(standing, "tool_name").to_owned(),
            requester(standing),
            str_member(standing, "scope").to_owned(),
            standing["args"].to_string(),
            u64_member(standing, "expires_at_ms").map(format_local_time).unwrap_or_default(),
            str_member(standing, "granted_by").to_owned(),
            str_member(standing, "standing_id").to_owned(),
        ]
    };
    let columns = [
        Column::id("TOOL"),
        Column::id("BY"),
        Column::id("SCOPE"),
        Column::text("ARGS"),
        Column::detail("EXPIRES", 1),
        Column::detail("GRANTED BY", 2),
        Column::id("ID"),
    ];
    let rows = members(&answer, "standing").iter().map(row).collect();
    output.print_table(&columns, rows, "there are no standing approvals")
}

async fn revoke(context: &CommandContext, id: &str) -> Result<(), CommandFailure> {
    let request = ApiRequest::new(Method::DELETE, &["v1", "approvals", "standing", id]);
    let revoked = context.client()?.request_json(request).await?;
    if context.output.json {
        return context.output.print_json(&revoked);
    }
    context.output.print_note(&format!("{} is revoked", sanitize_line(id)));
    Ok(())
}

fn members<'v>(value: &'v Value, name: &str) -> &'v [Value] {
    value[name].as_array().map(Vec::as_slice).unwrap_or_default()
}
