//! The directory in SQLite: tools, clients, keys, rules and the audit log.

use rusqlite::{Connection, Row, params};
use toolcrib::directory::{AuditEntry, Change, Client, Directory, Key, Others, Project};
use toolcrib::json::Json;
use toolcrib::store::{Saved, StoreError};
use toolcrib::tool::Definition;
use toolcrib::utp::Member;

use super::reader::{collect, failed};
use super::upstreams;
use crate::row::{
    Fields, decode, definition_text, read_audit, read_client, read_key, read_offer, read_project,
    read_rule, read_tool,
};

pub(super) fn version(connection: &Connection) -> Result<u64, StoreError> {
    connection
        .prepare_cached("SELECT value FROM counters WHERE name = 'directory_version'")
        .and_then(|mut select| select.query_row([], |row| row.get::<_, i64>(0)))
        .map(|version| version as u64)
        .map_err(|error| failed(&error))
}

/// Loads the whole directory from one snapshot.
pub(super) fn load(connection: &Connection) -> Result<Directory, StoreError> {
    let moment = connection.unchecked_transaction().map_err(|error| failed(&error))?;
    let directory = Directory {
        version: version(&moment)?,
        tools: tools(&moment)?,
        projects: projects(&moment)?,
        roster: roster(&moment)?,
        clients: all(
            &moment,
            "SELECT project, client_id, owner, registered_ms FROM clients",
            |row| read_client(row),
        )?,
        offers: all(&moment, "SELECT project, tool, client_id FROM offers", |row| read_offer(row))?,
        keys: keys(&moment)?,
        rules: all(&moment, "SELECT project, agent, pattern, verdict FROM rules", |row| {
            read_rule(row)
        })?,
        upstreams: upstreams::all(&moment)?,
    };
    Ok(directory)
}

fn all<T>(
    connection: &Connection,
    sql: &str,
    read: impl Fn(&Row<'_>) -> Result<T, StoreError>,
) -> Result<Vec<T>, StoreError> {
    collect(connection, sql, &[], read)
}

const TOOLS: &str = "SELECT project, name, definition FROM tools UNION ALL \
     SELECT project, name, definition FROM project_tools UNION ALL \
     SELECT project, name, definition FROM upstream_tools";

fn projects(connection: &Connection) -> Result<Vec<Project>, StoreError> {
    all(connection, "SELECT id, title, created_ms FROM projects ORDER BY id", |row| {
        read_project(row)
    })
}

fn roster(connection: &Connection) -> Result<Vec<Member>, StoreError> {
    let sql = "SELECT project, agent_id, worker_target, profile, allowed_tools, updated_ms \
               FROM roster ORDER BY project, agent_id";
    all(connection, sql, |row| {
        let (profile, allowed) = (row.maybe_text(3)?, row.maybe_text(4)?);
        Ok(Member {
            project: row.text(0)?,
            agent_id: row.text(1)?,
            worker_target: row.text(2)?,
            profile: profile.map(|text| Json::parse(&text)).transpose().unwrap_or_default(),
            allowed_tools: allowed.map(|text| decode(&text)).transpose()?,
            updated_ms: row.whole(5)?,
        })
    })
}

fn put_tool(
    connection: &Connection,
    tool: &Definition,
    at_ms: Option<i64>,
) -> rusqlite::Result<()> {
    let text = definition_text(tool).map_err(|_| rusqlite::Error::InvalidQuery)?;
    retire_versions(connection, tool.project.as_deref().unwrap_or_default(), &tool.name, at_ms)?;
    for sql in [
        "INSERT OR REPLACE INTO project_tools VALUES (?1, ?2, ?3, ?4)",
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

fn put_member(connection: &Connection, member: &Member) -> rusqlite::Result<()> {
    let allowed = member.allowed_tools.as_ref().map(serde_json::to_string).transpose();
    connection.execute(
        "INSERT OR REPLACE INTO roster VALUES (?1, ?2, ?3, ?4, ?5, ?6)",
        params![
            member.project,
            member.agent_id,
            member.worker_target,
            member.profile.as_ref().map(Json::text),
            allowed.map_err(|_| rusqlite::Error::InvalidQuery)?,
            member.updated_ms as i64
        ],
    )?;
    Ok(())
}

fn tools(connection: &Connection) -> Result<Vec<Definition>, StoreError> {
    all(connection, TOOLS, |row| read_tool(row))
}

fn keys(connection: &Connection) -> Result<Vec<Key>, StoreError> {
    let sql = "SELECT id, digest, project, agent, role, created_ms, revoked_ms FROM keys \
               ORDER BY id";
    all(connection, sql, |row| read_key(row))
}

/// Applies a change to the projects, their own tools or their roster of agents.
fn change_project(
    connection: &Connection,
    change: &Change,
    at_ms: Option<i64>,
) -> rusqlite::Result<()> {
    match change {
        Change::AddProject(project) => {
            connection.execute(
                "INSERT OR IGNORE INTO projects VALUES (?1, ?2, ?3)",
                params![project.id, project.title, project.created_ms as i64],
            )?;
        }
        Change::PutTools(tools) => {
            tools.iter().try_for_each(|tool| put_tool(connection, tool, at_ms))?;
        }
        Change::DropTool { project, name } => {
            retire_versions(connection, project, name, at_ms)?;
            connection.execute(
                "DELETE FROM project_tools WHERE project = ?1 AND name = ?2",
                [project, name],
            )?;
        }
        Change::PutMember(member) => put_member(connection, member)?,
        Change::DropMember { project, agent_id } => {
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
pub(super) fn change(
    connection: &Connection,
    change: &Change,
    decided_on: u64,
    entry: Option<&AuditEntry>,
) -> rusqlite::Result<Saved> {
    let moved = connection
        .prepare_cached(
            "UPDATE counters SET value = value + 1 WHERE name = 'directory_version' AND value = ?1",
        )?
        .execute([decided_on as i64])?;
    if moved == 0 {
        return Ok(Saved::Stale);
    }
    match change {
        Change::Register { client, tools, others } => {
            register(connection, client, tools, *others)?;
        }
        Change::Withdraw { project, client_id, tool } => {
            connection.execute(
                "DELETE FROM offers WHERE project = ?1 AND client_id = ?2 AND tool = ?3",
                params![project, client_id, tool],
            )?;
            drop_orphans(connection, project)?;
        }
        Change::DropClient { project, client_id } => drop_client(connection, project, client_id)?,
        Change::AddProject(_)
        | Change::PutTools(_)
        | Change::DropTool { .. }
        | Change::PutMember(_)
        | Change::DropMember { .. } => {
            change_project(connection, change, entry.map(|entry| entry.at_ms as i64))?
        }
        Change::PutUpstream(_) | Change::DropUpstream { .. } | Change::SetUpstreamTools { .. } => {
            upstreams::change(connection, change)?
        }
        Change::AddKey(key) => {
            connection.execute(
                "INSERT INTO keys VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)",
                params![
                    key.id,
                    key.digest,
                    key.project,
                    key.agent,
                    key.role.as_str(),
                    key.created_ms as i64,
                    key.revoked_ms.map(|ms| ms as i64)
                ],
            )?;
        }
        Change::RevokeKey { id, at_ms } => {
            connection.execute(
                "UPDATE keys SET revoked_ms = max(created_ms, ?2) \
                 WHERE id = ?1 AND revoked_ms IS NULL",
                params![id, *at_ms as i64],
            )?;
        }
        Change::PutRule(rule) => {
            connection.execute(
                "INSERT OR REPLACE INTO rules VALUES (?1, ?2, ?3, ?4)",
                params![rule.project, rule.agent, rule.pattern, rule.verdict.as_str()],
            )?;
        }
        Change::DropRule { project, agent, pattern } => {
            connection.execute(
                "DELETE FROM rules WHERE project = ?1 AND agent = ?2 AND pattern = ?3",
                params![project, agent, pattern],
            )?;
        }
    }
    if let Some(entry) = entry {
        audit(connection, entry)?;
    }
    Ok(Saved::Yes)
}

fn register(
    connection: &Connection,
    client: &Client,
    tools: &[Definition],
    others: Others,
) -> rusqlite::Result<()> {
    connection.execute(
        "INSERT OR IGNORE INTO clients VALUES (?1, ?2, ?3, ?4)",
        params![client.project, client.client_id, client.owner, client.registered_ms as i64],
    )?;
    if others == Others::Withdraw {
        connection.execute(
            "DELETE FROM offers WHERE project = ?1 AND client_id = ?2",
            params![client.project, client.client_id],
        )?;
    }
    for tool in tools {
        let text = definition_text(tool).map_err(|_| rusqlite::Error::InvalidQuery)?;
        connection
            .prepare_cached(
                "INSERT INTO tools VALUES (?1, ?2, ?3) \
                 ON CONFLICT (project, name) DO UPDATE SET definition = excluded.definition",
            )?
            .execute(params![client.project, tool.name, text])?;
        connection
            .prepare_cached("INSERT OR IGNORE INTO offers VALUES (?1, ?2, ?3)")?
            .execute(params![client.project, tool.name, client.client_id])?;
    }
    drop_orphans(connection, &client.project)
}

fn drop_client(connection: &Connection, project: &str, client_id: &str) -> rusqlite::Result<()> {
    for sql in [
        "DELETE FROM offers WHERE project = ?1 AND client_id = ?2",
        "DELETE FROM clients WHERE project = ?1 AND client_id = ?2",
    ] {
        connection.execute(sql, params![project, client_id])?;
    }
    drop_orphans(connection, project)
}

/// Deletes the tools that no client offers any more.
fn drop_orphans(connection: &Connection, project: &str) -> rusqlite::Result<()> {
    connection.execute(
        "DELETE FROM tools WHERE project = ?1 AND NOT EXISTS \
         (SELECT 1 FROM offers o WHERE o.project = tools.project AND o.tool = tools.name)",
        [project],
    )?;
    Ok(())
}

pub(super) fn audit(connection: &Connection, entry: &AuditEntry) -> rusqlite::Result<()> {
    connection
        .prepare_cached(
            "INSERT INTO audit (at_ms, project, agent, action, subject, reason) \
             VALUES (?1, ?2, ?3, ?4, ?5, ?6)",
        )?
        .execute(params![
            entry.at_ms as i64,
            entry.project,
            entry.agent,
            entry.action,
            entry.subject,
            entry.reason
        ])?;
    Ok(())
}

pub(super) fn audit_log(
    connection: &Connection,
    project: Option<&str>,
    limit: usize,
) -> Result<Vec<AuditEntry>, StoreError> {
    let sql = "SELECT at_ms, project, agent, action, subject, reason FROM audit \
               WHERE ?1 IS NULL OR project = ?1 ORDER BY number DESC LIMIT ?2";
    collect(connection, sql, params![project, limit as i64], |row| read_audit(row))
}
