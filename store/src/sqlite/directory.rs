//! Tools, clients, keys, rules and the audit log in SQLite.

use rusqlite::{Connection, params};
use toolcrib::directory::{AuditEntry, Change, Client, Directory, Key, Offer, Others, Project};
use toolcrib::json::Json;
use toolcrib::policy::{Rule, Verdict};
use toolcrib::store::{Saved, StoreError};
use toolcrib::tool::Definition;
use toolcrib::utp::Member;

use super::reader::failed;
use crate::row::{definition_text, read_definition};

pub(super) fn version(connection: &Connection) -> Result<u64, StoreError> {
    connection
        .prepare_cached("SELECT value FROM counters WHERE name = 'directory_version'")
        .and_then(|mut select| select.query_row([], |row| row.get::<_, i64>(0)))
        .map(|version| version as u64)
        .map_err(|error| failed(&error))
}

/// All of it, as of one moment.
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
            |r| {
                Ok(Client {
                    project: r.get(0)?,
                    client_id: r.get(1)?,
                    owner: r.get(2)?,
                    registered_ms: r.get::<_, i64>(3)? as u64,
                })
            },
        )?,
        offers: all(&moment, "SELECT project, tool, client_id FROM offers", |r| {
            Ok(Offer { project: r.get(0)?, tool: r.get(1)?, client_id: r.get(2)? })
        })?,
        keys: keys(&moment)?,
        rules: all(&moment, "SELECT project, agent, pattern, verdict FROM rules", |r| {
            let verdict: String = r.get(3)?;
            Ok(Rule {
                project: r.get(0)?,
                agent: r.get(1)?,
                pattern: r.get(2)?,
                verdict: if verdict == "allow" { Verdict::Allow } else { Verdict::Deny },
            })
        })?,
    };
    Ok(directory)
}

fn all<T>(
    connection: &Connection,
    sql: &str,
    read: impl FnMut(&rusqlite::Row<'_>) -> rusqlite::Result<T>,
) -> Result<Vec<T>, StoreError> {
    let rows = || -> rusqlite::Result<Vec<T>> {
        let mut select = connection.prepare_cached(sql)?;
        select.query_map([], read)?.collect()
    };
    rows().map_err(|error| failed(&error))
}

const TOOLS: &str = "SELECT project, name, definition FROM tools UNION ALL \
     SELECT project, name, definition FROM project_tools";

fn projects(connection: &Connection) -> Result<Vec<Project>, StoreError> {
    all(connection, "SELECT id, title, created_ms FROM projects ORDER BY id", |row| {
        let created_ms = row.get::<_, i64>(2)? as u64;
        Ok(Project { id: row.get(0)?, title: row.get(1)?, created_ms })
    })
}

fn roster(connection: &Connection) -> Result<Vec<Member>, StoreError> {
    let sql = "SELECT project, agent_id, worker_target, profile, allowed_tools, updated_ms \
               FROM roster ORDER BY project, agent_id";
    let unreadable = |_| rusqlite::Error::InvalidQuery;
    all(connection, sql, |row| {
        let profile: Option<String> = row.get(3)?;
        let allowed: Option<String> = row.get(4)?;
        let parsed = allowed.map(|text| serde_json::from_str(&text).map_err(unreadable));
        Ok(Member {
            project: row.get(0)?,
            agent_id: row.get(1)?,
            worker_target: row.get(2)?,
            profile: profile.map(|text| Json::parse(&text)).transpose().unwrap_or_default(),
            allowed_tools: parsed.transpose()?,
            updated_ms: row.get::<_, i64>(5)? as u64,
        })
    })
}

fn put_tool(connection: &Connection, tool: &Definition) -> rusqlite::Result<()> {
    let text = definition_text(tool).map_err(|_| rusqlite::Error::InvalidQuery)?;
    for sql in [
        "INSERT OR REPLACE INTO project_tools VALUES (?1, ?2, ?3, ?4)",
        "INSERT OR REPLACE INTO tool_versions VALUES (?1, ?2, ?3, ?4)",
    ] {
        connection.execute(sql, params![tool.project, tool.name, tool.version(), text])?;
    }
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
    let rows =
        all(connection, TOOLS, |row| Ok((row.get(0)?, row.get(1)?, row.get::<_, String>(2)?)))?;
    rows.into_iter().map(|(project, name, text)| read_definition(project, name, &text)).collect()
}

fn keys(connection: &Connection) -> Result<Vec<Key>, StoreError> {
    let sql = "SELECT id, digest, project, agent, role, created_ms, revoked_ms FROM keys \
               ORDER BY id";
    let rows = all(connection, sql, |row| {
        let role: String = row.get(4)?;
        let key = Key {
            id: row.get(0)?,
            digest: row.get(1)?,
            project: row.get(2)?,
            agent: row.get(3)?,
            role: role.parse().map_err(|()| rusqlite::Error::InvalidQuery)?,
            created_ms: row.get::<_, i64>(5)? as u64,
            revoked_ms: row.get::<_, Option<i64>>(6)?.map(|ms| ms as u64),
        };
        Ok(key)
    })?;
    Ok(rows)
}

/// A change of a project's own tools, or of who can be woken in it.
fn change_project(connection: &Connection, change: &Change) -> rusqlite::Result<()> {
    match change {
        Change::AddProject(project) => {
            connection.execute(
                "INSERT OR IGNORE INTO projects VALUES (?1, ?2, ?3)",
                params![project.id, project.title, project.created_ms as i64],
            )?;
        }
        Change::PutTool(tool) => put_tool(connection, tool)?,
        Change::DropTool { project, name } => {
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

/// Makes a change, unless the directory is not the one it was decided on.
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
        Change::AddProject(_)
        | Change::PutTool(_)
        | Change::DropTool { .. }
        | Change::PutMember(_)
        | Change::DropMember { .. } => change_project(connection, change)?,
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

/// A tool that no client offers any more is gone.
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
    let read = || -> rusqlite::Result<Vec<AuditEntry>> {
        let mut select = connection.prepare_cached(
            "SELECT at_ms, project, agent, action, subject, reason FROM audit \
             WHERE ?1 IS NULL OR project = ?1 ORDER BY number DESC LIMIT ?2",
        )?;
        let rows = select.query_map(params![project, limit as i64], |row| {
            Ok(AuditEntry {
                at_ms: row.get::<_, i64>(0)? as u64,
                project: row.get(1)?,
                agent: row.get(2)?,
                action: row.get(3)?,
                subject: row.get(4)?,
                reason: row.get(5)?,
            })
        })?;
        rows.collect()
    };
    read().map_err(|error| failed(&error))
}
