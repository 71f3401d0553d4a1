//! The directory in PostgreSQL: tools, clients, keys, rules, upstreams and the audit log. The
//! projects' own tools and the roster of agents are in the tables that tool services know:
//! `resource.tools` and `resource.project_agents`.

mod agents;
mod api_keys;
pub(super) mod audit;
mod limits;
mod rules;
use audit::insert_audit_entry;
use serde_json::Value;
use toolcrib::domain::directory::{AuditEntry, Client, Directory, DirectoryChange, UnlistedTools};
use toolcrib::domain::json::Json;
use toolcrib::domain::tool::ToolDefinition;
use toolcrib::ports::store::{SaveResult, StoreError};

use super::change::WriterConnection;
use super::pool::PooledSession;
use super::strip_nul_chars;
use crate::postgres::session::{Session, SessionError, SqlParams};
use crate::row::{
    RowReader, encode_definition, read_client, read_limit, read_offer, read_project, read_switch,
    read_tool, read_upstream,
};

pub(super) async fn read_version(session: &Session) -> Result<u64, SessionError> {
    read_counter(session, "directory_version").await
}

async fn read_counter(session: &Session, name: &str) -> Result<u64, SessionError> {
    let sql = "SELECT value FROM counters WHERE name = $1";
    let row = session.query_first(sql, &[&name]).await?;
    let none = || StoreError::Corrupt(format!("there is no {name}"));
    Ok(row.ok_or_else(none)?.unsigned(0)?)
}

/// Records the time of day, unless a later one is recorded.
pub(super) async fn record_time(
    writer: &mut WriterConnection,
    at_ms: &u64,
) -> Result<(), SessionError> {
    let sql = "UPDATE counters SET value = $1 WHERE name = 'latest_time_ms' AND value < $1";
    writer.session.execute(sql, &[&(*at_ms as i64)]).await?;
    Ok(())
}

const TOOLS: &str = "SELECT project, name, definition FROM client_tools UNION ALL \
     SELECT project_id, tool_name, toolcrib_definition FROM resource.tools \
     WHERE toolcrib_definition IS NOT NULL UNION ALL \
     SELECT project, name, definition FROM upstream_tools";
const CLIENTS: &str = "SELECT project, client_id, owner, registered_ms FROM clients";
const UPSTREAMS: &str =
    "SELECT project, name, kind, settings, added_ms FROM upstreams ORDER BY project, name";
/// Loads the whole directory from one snapshot.
pub(super) async fn load(mut pooled: PooledSession) -> Result<Directory, SessionError> {
    pooled.begin_snapshot().await?;
    let session = &*pooled;
    let directory = Directory {
        version: read_version(session).await?,
        tools: session.query_map(TOOLS, &[], read_tool).await?,
        projects: session
            .query_map("SELECT id, title, created_ms FROM projects ORDER BY id", &[], read_project)
            .await?,
        roster: session.query_map(agents::ROSTER, &[], agents::read_agent_entry).await?,
        clients: session.query_map(CLIENTS, &[], read_client).await?,
        offers: session
            .query_map("SELECT project, tool, client_id FROM offers", &[], read_offer)
            .await?,
        keys: api_keys::list_keys(session).await?,
        session_tokens: api_keys::list_session_tokens(session).await?,
        latest_time_ms: read_counter(session, "latest_time_ms").await?,
        rules: rules::rules_in_force(session).await?,
        rule_versions: rules::present_versions(session).await?,
        upstreams: session.query_map(UPSTREAMS, &[], read_upstream).await?,
        limits: session.query_map(limits::LIMITS, &[], read_limit).await?,
        switches: session.query_map(limits::SWITCHES, &[], read_switch).await?,
    };
    pooled.end_snapshot().await?;
    Ok(directory)
}

/// Applies a change, unless the directory has changed since the caller decided on it.
pub(super) async fn apply_change(
    writer: &mut WriterConnection,
    (change, decided_on, entry): &(DirectoryChange, u64, Option<AuditEntry>),
) -> Result<SaveResult, SessionError> {
    let session = &writer.session;
    let sql = "UPDATE counters SET value = value + 1 \
               WHERE name = 'directory_version' AND value = $1";
    if session.execute(sql, &[&(*decided_on as i64)]).await? == 0 {
        return Ok(SaveResult::Conflict);
    }
    match change {
        DirectoryChange::Register { client, tools, unlisted_tools } => {
            register_client(session, client, tools, *unlisted_tools).await?;
        }
        DirectoryChange::Withdraw { project, client_id, tool } => {
            let sql = "DELETE FROM offers WHERE project = $1 AND client_id = $2 AND tool = $3";
            session.execute(sql, &[project, client_id, tool]).await?;
            delete_unoffered_tools(session, project).await?;
        }
        DirectoryChange::SetClientOwner { project, client_id, owner } => {
            let sql = "UPDATE clients SET owner = $3 WHERE project = $1 AND client_id = $2";
            session.execute(sql, &[project, client_id, owner]).await?;
        }
        DirectoryChange::DropClient { project, client_id } => {
            for sql in [
                "DELETE FROM offers WHERE project = $1 AND client_id = $2",
                "DELETE FROM clients WHERE project = $1 AND client_id = $2",
            ] {
                session.execute(sql, &[project, client_id]).await?;
            }
            delete_unoffered_tools(session, project).await?;
        }
        DirectoryChange::PutTools(tools) => {
            for tool in tools {
                put_tool(session, tool, entry.as_ref().map(|entry| entry.at_ms as i64)).await?;
            }
        }
        DirectoryChange::DropTool { project, name } => {
            let at_ms = entry.as_ref().map(|entry| entry.at_ms as i64);
            retire_versions(session, project, name, at_ms).await?;
            let sql = "DELETE FROM resource.tools WHERE project_id = $1 AND tool_name = $2";
            session.execute(sql, &[project, name]).await?;
        }
        DirectoryChange::PutAgent(entry) => agents::put_agent_entry(session, entry).await?,
        DirectoryChange::SetUpstreamTools { project, upstream, tools } => {
            set_upstream_tools(session, project, upstream, tools).await?;
        }
        DirectoryChange::PutLimit(_)
        | DirectoryChange::DropLimit { .. }
        | DirectoryChange::PutSwitch(_)
        | DirectoryChange::DropSwitch { .. } => limits::apply_change(session, change).await?,
        DirectoryChange::ChangeRules(change) => rules::apply(session, change).await?,
        DirectoryChange::AddKey(_)
        | DirectoryChange::RevokeKey { .. }
        | DirectoryChange::RotateKey { .. }
        | DirectoryChange::AddSessionToken(_)
        | DirectoryChange::RevokeSessionToken { .. }
        | DirectoryChange::ExpireSessionTokens { .. } => {
            api_keys::apply_credential_change(session, change).await?;
        }
        DirectoryChange::AddProject(_)
        | DirectoryChange::DropAgent { .. }
        | DirectoryChange::PutUpstream(_)
        | DirectoryChange::DropUpstream { .. } => apply_simple_change(session, change).await?,
    }
    if let Some(entry) = entry {
        insert_audit_entry(session, entry).await?;
    }
    Ok(SaveResult::Saved)
}

/// Applies a change that takes one or two statements.
async fn apply_simple_change(
    session: &Session,
    change: &DirectoryChange,
) -> Result<(), SessionError> {
    let ms = |at_ms: u64| at_ms as i64;
    let done = match change {
        DirectoryChange::AddProject(project) => {
            let sql = "INSERT INTO projects VALUES ($1, $2, $3) ON CONFLICT DO NOTHING";
            session.execute(sql, &[&project.id, &project.title, &ms(project.created_ms)]).await
        }
        DirectoryChange::DropAgent { project, agent_id } => {
            let sql = "DELETE FROM resource.project_agents \
                       WHERE project_id = $1 AND agent_id = $2";
            session.execute(sql, &[project, agent_id]).await
        }
        DirectoryChange::PutUpstream(upstream) => {
            let sql = "INSERT INTO upstreams VALUES ($1, $2, $3, $4, $5) \
                       ON CONFLICT (project, name) DO UPDATE SET kind = excluded.kind, \
                       settings = excluded.settings, added_ms = excluded.added_ms";
            let params: SqlParams<'_> = &[
                &upstream.project,
                &upstream.name,
                &upstream.kind,
                &upstream.settings.text(),
                &ms(upstream.added_ms),
            ];
            session.execute(sql, params).await
        }
        DirectoryChange::DropUpstream { project, name } => {
            let sql = "DELETE FROM upstreams WHERE project = $1 AND name = $2";
            session.execute(sql, &[project, name]).await?;
            let sql = "DELETE FROM upstream_grants WHERE project = $1 AND upstream = $2";
            session.execute(sql, &[project, name]).await?;
            let sql = "DELETE FROM upstream_tools WHERE project = $1 AND upstream = $2";
            session.execute(sql, &[project, name]).await
        }
        _ => Ok(0),
    };
    done.map(drop)
}

async fn set_upstream_tools(
    session: &Session,
    project: &str,
    upstream: &str,
    tools: &[ToolDefinition],
) -> Result<(), SessionError> {
    let names: Vec<&str> = tools.iter().map(|tool| tool.name.as_str()).collect();
    let sql = "DELETE FROM upstream_tools \
               WHERE project = $1 AND upstream = $2 AND name <> ALL($3)";
    session.execute(sql, &[&project, &upstream, &names]).await?;
    for tool in tools {
        let text = encode_definition(tool)?;
        let sql = "INSERT INTO upstream_tools (project, name, upstream, definition) \
                   VALUES ($1, $2, $3, $4) ON CONFLICT (project, name) DO UPDATE \
                   SET upstream = excluded.upstream, definition = excluded.definition";
        session.execute(sql, &[&project, &tool.name, &upstream, &text]).await?;
    }
    Ok(())
}

/// Stores a tool in the columns that the protocol defines, with the full definition in a column of
/// Toolcrib.
async fn put_tool(
    session: &Session,
    tool: &ToolDefinition,
    at_ms: Option<i64>,
) -> Result<(), SessionError> {
    let project = tool.project.clone().unwrap_or_default();
    let (text, version) = (encode_definition(tool)?, tool.version());
    retire_versions(session, &project, &tool.name, at_ms).await?;
    let binding = tool.binding.as_ref();
    let parameters = binding.and_then(|binding| binding.parameters.as_ref());
    let parameters = parameters.unwrap_or(&tool.input_schema);
    let json = |json: &Json| strip_nul_chars(json.to_value());
    let options = binding.map_or_else(|| Value::Object(Default::default()), |b| json(&b.options));
    let sql = "INSERT INTO resource.tools (project_id, tool_name, description, parameters, \
               target_subject, after_execution, options, toolcrib_version, toolcrib_definition) \
               VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9) \
               ON CONFLICT (project_id, tool_name) DO UPDATE SET \
               description = excluded.description, parameters = excluded.parameters, \
               target_subject = excluded.target_subject, \
               after_execution = excluded.after_execution, options = excluded.options, \
               toolcrib_version = excluded.toolcrib_version, \
               toolcrib_definition = excluded.toolcrib_definition";
    let params: SqlParams<'_> = &[
        &project,
        &tool.name,
        &tool.description.replace('\0', ""),
        &json(parameters),
        &binding.and_then(|binding| binding.target_subject.as_deref()),
        &binding.map(|binding| binding.after_execution.as_str()),
        &options,
        &version,
        &text,
    ];
    session.execute(sql, params).await?;
    let sql = "INSERT INTO tool_versions (project, name, version, definition) \
               VALUES ($1, $2, $3, $4) ON CONFLICT (project, name, version) \
               DO UPDATE SET definition = excluded.definition, replaced_ms = NULL";
    session.execute(sql, &[&project, &tool.name, &version, &text]).await?;
    Ok(())
}

/// Marks the stored versions of a tool as replaced: no new call uses them.
async fn retire_versions(
    session: &Session,
    project: &str,
    name: &str,
    at_ms: Option<i64>,
) -> Result<(), SessionError> {
    let sql = "UPDATE tool_versions SET replaced_ms = $3 \
               WHERE project = $1 AND name = $2 AND replaced_ms IS NULL";
    session.execute(sql, &[&project, &name, &at_ms]).await?;
    Ok(())
}

async fn register_client(
    session: &Session,
    client: &Client,
    tools: &[ToolDefinition],
    unlisted_tools: UnlistedTools,
) -> Result<(), SessionError> {
    let sql = "INSERT INTO clients VALUES ($1, $2, $3, $4) ON CONFLICT DO NOTHING";
    let registered = client.registered_ms as i64;
    let params: SqlParams<'_> = &[&client.project, &client.client_id, &client.owner, &registered];
    session.execute(sql, params).await?;
    if unlisted_tools == UnlistedTools::Withdraw {
        let sql = "DELETE FROM offers WHERE project = $1 AND client_id = $2";
        session.execute(sql, &[&client.project, &client.client_id]).await?;
    }
    for tool in tools {
        let text = encode_definition(tool)?;
        let sql = "INSERT INTO client_tools (project, name, definition) VALUES ($1, $2, $3) \
                   ON CONFLICT (project, name) DO UPDATE SET definition = excluded.definition";
        session.execute(sql, &[&client.project, &tool.name, &text]).await?;
        let sql = "INSERT INTO offers VALUES ($1, $2, $3) ON CONFLICT DO NOTHING";
        session.execute(sql, &[&client.project, &tool.name, &client.client_id]).await?;
    }
    delete_unoffered_tools(session, &client.project).await
}

/// Deletes the tools that no client offers any more.
async fn delete_unoffered_tools(session: &Session, project: &str) -> Result<(), SessionError> {
    let sql = "DELETE FROM client_tools t WHERE project = $1 AND NOT EXISTS \
               (SELECT 1 FROM offers o WHERE o.project = t.project AND o.tool = t.name)";
    session.execute(sql, &[&project]).await?;
    Ok(())
}
