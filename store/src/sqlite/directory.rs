//! The directory in SQLite: tools, clients, keys, rules and the audit log.

mod agents;
mod api_keys;
pub(super) mod audit;
mod limits;
mod rules;
use audit::insert_audit_entry;
use rusqlite::{Connection, Row, params};
use toolcrib::domain::directory::{
    AuditEntry, Client, Directory, DirectoryChange, Project, UnlistedTools,
};
use toolcrib::domain::tool::ToolDefinition;
use toolcrib::ports::store::{SaveResult, StoreError};

use super::reader::{query_map, to_store_error};
use super::upstreams;
use crate::row::{encode_definition, read_client, read_offer, read_project, read_tool};

pub(super) fn read_version(connection: &Connection) -> Result<u64, StoreError> {
    read_counter(connection, "directory_version")
}

fn read_counter(connection: &Connection, name: &str) -> Result<u64, StoreError> {
    connection
        .prepare_cached("SELECT value FROM counters WHERE name = ?1")
        .and_then(|mut select| select.query_row([name], |row| row.get::<_, i64>(0)))
        .map(|value| value as u64)
        .map_err(|error| to_store_error(&error))
}

/// Records the time of day, unless a later one is recorded.
pub(super) fn record_time(connection: &Connection, at_ms: u64) -> rusqlite::Result<()> {
    connection
        .prepare_cached(
            "UPDATE counters SET value = ?1 WHERE name = 'latest_time_ms' AND value < ?1",
        )?
        .execute([at_ms as i64])?;
    Ok(())
}

/// Loads the whole directory.
pub(super) fn load(connection: &Connection) -> Result<Directory, StoreError> {
    let directory = Directory {
        version: read_version(connection)?,
        tools: tools(connection)?,
        projects: projects(connection)?,
        roster: agents::list_roster(connection)?,
        clients: query_rows(
            connection,
            "SELECT project, client_id, owner, registered_ms FROM clients",
            |row| read_client(row),
        )?,
        offers: query_rows(connection, "SELECT project, tool, client_id FROM offers", |row| {
            read_offer(row)
        })?,
        keys: api_keys::list_keys(connection)?,
        session_tokens: api_keys::list_session_tokens(connection)?,
        latest_time_ms: read_counter(connection, "latest_time_ms")?,
        rules: rules::rules_in_force(connection)?,
        rule_versions: rules::present_versions(connection)?,
        upstreams: upstreams::list_upstreams(connection)?,
        limits: limits::list_limits(connection)?,
        switches: limits::list_switches(connection)?,
    };
    Ok(directory)
}

fn query_rows<T>(
    connection: &Connection,
    sql: &str,
    read: impl Fn(&Row<'_>) -> Result<T, StoreError>,
) -> Result<Vec<T>, StoreError> {
    query_map(connection, sql, &[], read)
}

const TOOLS_SQL: &str = "SELECT project, name, definition FROM client_tools UNION ALL \
     SELECT project, name, definition FROM project_tools UNION ALL \
     SELECT project, name, definition FROM upstream_tools";

fn projects(connection: &Connection) -> Result<Vec<Project>, StoreError> {
    query_rows(connection, "SELECT id, title, created_ms FROM projects ORDER BY id", |row| {
        read_project(row)
    })
}

fn put_tool(
    connection: &Connection,
    tool: &ToolDefinition,
    at_ms: Option<i64>,
) -> rusqlite::Result<()> {
    let text = encode_definition(tool).map_err(|_| rusqlite::Error::InvalidQuery)?;
    retire_versions(connection, tool.project.as_deref().unwrap_or_default(), &tool.name, at_ms)?;
    for sql in [
        "INSERT INTO project_tools VALUES (?1, ?2, ?3, ?4, CURRENT_TIMESTAMP) \
         ON CONFLICT (project, name) \
         DO UPDATE SET version = excluded.version, definition = excluded.definition",
        "INSERT OR REPLACE INTO tool_versions (project, name, version, definition) \
         VALUES (?1, ?2, ?3, ?4)",
    ] {
        connection.execute(sql, params![tool.project, tool.name, tool.version(), text])?;
    }
    Ok(())
}

/// Marks the stored versions of a tool as replaced: no new call uses them.
fn retire_versions(
    connection: &Connection,
    project: &str,
    name: &str,
    at_ms: Option<i64>,
) -> rusqlite::Result<()> {
    connection.execute(
        "UPDATE tool_versions SET replaced_ms = ?3 \
         WHERE project = ?1 AND name = ?2 AND replaced_ms IS NULL",
        params![project, name, at_ms],
    )?;
    Ok(())
}

fn tools(connection: &Connection) -> Result<Vec<ToolDefinition>, StoreError> {
    query_rows(connection, TOOLS_SQL, |row| read_tool(row))
}

/// Applies a change to the projects, their own tools or their roster of agents.
fn apply_project_change(
    connection: &Connection,
    change: &DirectoryChange,
    at_ms: Option<i64>,
) -> rusqlite::Result<()> {
    match change {
        DirectoryChange::AddProject(project) => {
            connection.execute(
                "INSERT OR IGNORE INTO projects VALUES (?1, ?2, ?3)",
                params![project.id, project.title, project.created_ms as i64],
            )?;
        }
        DirectoryChange::PutTools(tools) => {
            tools.iter().try_for_each(|tool| put_tool(connection, tool, at_ms))?;
        }
        DirectoryChange::DropTool { project, name } => {
            retire_versions(connection, project, name, at_ms)?;
            connection.execute(
                "DELETE FROM project_tools WHERE project = ?1 AND name = ?2",
                [project, name],
            )?;
        }
        DirectoryChange::PutAgent(entry) => agents::put_agent_entry(connection, entry)?,
        DirectoryChange::DropAgent { project, agent_id } => {
            connection.execute(
                "DELETE FROM roster WHERE project = ?1 AND agent_id = ?2",
                [project, agent_id],
            )?;
        }
        _ => {}
    }
    Ok(())
}

/// Applies a change, unless the directory has changed since the caller decided on it.
pub(super) fn apply_change(
    connection: &Connection,
    change: &DirectoryChange,
    decided_on: u64,
    entry: Option<&AuditEntry>,
) -> rusqlite::Result<SaveResult> {
    let moved = connection
        .prepare_cached(
            "UPDATE counters SET value = value + 1 WHERE name = 'directory_version' AND value = ?1",
        )?
        .execute([decided_on as i64])?;
    if moved == 0 {
        return Ok(SaveResult::Conflict);
    }
    match change {
        DirectoryChange::Register { client, tools, unlisted_tools } => {
            register_client(connection, client, tools, *unlisted_tools)?;
        }
        DirectoryChange::Withdraw { project, client_id, tool } => {
            delete_offer(connection, project, client_id, tool)?
        }
        DirectoryChange::SetClientOwner { project, client_id, owner } => {
            set_client_owner(connection, project, client_id, owner)?
        }
        DirectoryChange::DropClient { project, client_id } => {
            delete_client(connection, project, client_id)?
        }
        DirectoryChange::AddProject(_)
        | DirectoryChange::PutTools(_)
        | DirectoryChange::DropTool { .. }
        | DirectoryChange::PutAgent(_)
        | DirectoryChange::DropAgent { .. } => {
            apply_project_change(connection, change, entry.map(|entry| entry.at_ms as i64))?
        }
        DirectoryChange::PutUpstream(_)
        | DirectoryChange::DropUpstream { .. }
        | DirectoryChange::SetUpstreamTools { .. } => {
            upstreams::apply_upstream_change(connection, change)?
        }
        DirectoryChange::AddKey(_)
        | DirectoryChange::RevokeKey { .. }
        | DirectoryChange::RotateKey { .. }
        | DirectoryChange::AddSessionToken(_)
        | DirectoryChange::RevokeSessionToken { .. }
        | DirectoryChange::ExpireSessionTokens { .. } => {
            api_keys::apply_credential_change(connection, change)?
        }
        DirectoryChange::ChangeRules(change) => rules::apply(connection, change)?,
        _ => limits::apply_change(connection, change)?,
    }
    if let Some(entry) = entry {
        insert_audit_entry(connection, entry)?;
    }
    Ok(SaveResult::Saved)
}

fn register_client(
    connection: &Connection,
    client: &Client,
    tools: &[ToolDefinition],
    unlisted_tools: UnlistedTools,
) -> rusqlite::Result<()> {
    connection.execute(
        "INSERT OR IGNORE INTO clients VALUES (?1, ?2, ?3, ?4)",
        params![client.project, client.client_id, client.owner, client.registered_ms as i64],
    )?;
    if unlisted_tools == UnlistedTools::Withdraw {
        connection.execute(
            "DELETE FROM offers WHERE project = ?1 AND client_id = ?2",
            params![client.project, client.client_id],
        )?;
    }
    for tool in tools {
        let text = encode_definition(tool).map_err(|_| rusqlite::Error::InvalidQuery)?;
        connection
            .prepare_cached(
                "INSERT INTO client_tools VALUES (?1, ?2, ?3, CURRENT_TIMESTAMP) \
                 ON CONFLICT (project, name) DO UPDATE SET definition = excluded.definition",
            )?
            .execute(params![client.project, tool.name, text])?;
        connection
            .prepare_cached("INSERT OR IGNORE INTO offers VALUES (?1, ?2, ?3)")?
            .execute(params![client.project, tool.name, client.client_id])?;
    }
    delete_unoffered_tools(connection, &client.project)
}

fn delete_client(connection: &Connection, project: &str, client_id: &str) -> rusqlite::Result<()> {
    for sql in [
        "DELETE FROM offers WHERE project = ?1 AND client_id = ?2",
        "DELETE FROM clients WHERE project = ?1 AND client_id = ?2",
    ] {
        connection.execute(sql, params![project, client_id])?;
    }
    delete_unoffered_tools(connection, project)
}

fn delete_offer(
    connection: &Connection,
    project: &str,
    client_id: &str,
    tool: &str,
) -> rusqlite::Result<()> {
    let sql = "DELETE FROM offers WHERE project = ?1 AND client_id = ?2 AND tool = ?3";
    connection.execute(sql, params![project, client_id, tool])?;
    delete_unoffered_tools(connection, project)
}

fn set_client_owner(
    connection: &Connection,
    project: &str,
    client_id: &str,
    owner: &str,
) -> rusqlite::Result<()> {
    let sql = "UPDATE clients SET owner = ?3 WHERE project = ?1 AND client_id = ?2";
    connection.execute(sql, params![project, client_id, owner])?;
    Ok(())
}

/// Deletes the tools that no client offers any more.
fn delete_unoffered_tools(connection: &Connection, project: &str) -> rusqlite::Result<()> {
    connection.execute(
        "DELETE FROM client_tools AS t WHERE project = ?1 AND NOT EXISTS \
         (SELECT 1 FROM offers o WHERE o.project = t.project AND o.tool = t.name)",
        [project],
    )?;
    Ok(())
}
