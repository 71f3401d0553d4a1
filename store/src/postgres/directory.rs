//! The directory in PostgreSQL: tools, clients, keys, rules, upstreams and the audit log. The
//! projects' own tools and the roster of agents are in the tables that tool services know:
//! `resource.tools` and `resource.project_agents`.

use serde_json::Value;
use toolcrib::directory::{AuditEntry, Change, Client, Directory, Others};
use toolcrib::json::Json;
use toolcrib::store::{Saved, StoreError};
use toolcrib::tool::Definition;
use toolcrib::utp::Member;

use super::link::{Bound, Broke, Session};
use super::pool::Lent;
use super::writer::Desk;
use super::{limited, storable};
use crate::row::{
    Fields, decode, definition_text, encode, read_audit, read_client, read_key, read_offer,
    read_project, read_rule, read_tool, read_upstream,
};

pub(super) async fn version(session: &Session) -> Result<u64, Broke> {
    let sql = "SELECT value FROM counters WHERE name = 'directory_version'";
    let row = session.row(sql, &[]).await?;
    let none = || StoreError::Corrupt("there is no directory_version".to_owned());
    Ok(row.ok_or_else(none)?.whole(0)?)
}

const TOOLS: &str = "SELECT project, name, definition FROM tools UNION ALL \
     SELECT project_id, tool_name, toolcrib_definition FROM resource.tools \
     WHERE toolcrib_definition IS NOT NULL UNION ALL \
     SELECT project, name, definition FROM upstream_tools";
const CLIENTS: &str = "SELECT project, client_id, owner, registered_ms FROM clients";
const KEYS: &str =
    "SELECT id, digest, project, agent, role, created_ms, revoked_ms FROM keys ORDER BY id";
const UPSTREAMS: &str =
    "SELECT project, name, kind, settings, added_ms FROM upstreams ORDER BY project, name";
const ROSTER: &str = "SELECT project_id, agent_id, worker_target, toolcrib_profile, \
     toolcrib_allowed_tools, (extract(epoch FROM updated_at) * 1000)::bigint \
     FROM resource.project_agents ORDER BY project_id COLLATE \"C\", agent_id COLLATE \"C\"";

/// Loads the whole directory from one snapshot.
pub(super) async fn load(mut lent: Lent) -> Result<Directory, Broke> {
    lent.begin().await?;
    let session = &*lent;
    let directory = Directory {
        version: version(session).await?,
        tools: session.collect(TOOLS, &[], read_tool).await?,
        projects: session
            .collect("SELECT id, title, created_ms FROM projects ORDER BY id", &[], read_project)
            .await?,
        roster: session.collect(ROSTER, &[], read_member).await?,
        clients: session.collect(CLIENTS, &[], read_client).await?,
        offers: session
            .collect("SELECT project, tool, client_id FROM offers", &[], read_offer)
            .await?,
        keys: session.collect(KEYS, &[], read_key).await?,
        rules: session
            .collect("SELECT project, agent, pattern, verdict FROM rules", &[], read_rule)
            .await?,
        upstreams: session.collect(UPSTREAMS, &[], read_upstream).await?,
    };
    lent.end().await?;
    Ok(directory)
}

fn read_member(row: &tokio_postgres::Row) -> Result<Member, StoreError> {
    let (profile, allowed) = (row.maybe_text(3)?, row.maybe_text(4)?);
    Ok(Member {
        project: row.text(0)?,
        agent_id: row.text(1)?,
        worker_target: row.text(2)?,
        profile: profile.map(|text| decode(&text)).transpose()?,
        allowed_tools: allowed.map(|text| decode(&text)).transpose()?,
        updated_ms: row.whole(5)?,
    })
}

/// Applies a change, unless the directory has changed since the caller decided on it.
pub(super) async fn change(
    desk: &mut Desk,
    (change, decided_on, entry): &(Change, u64, Option<AuditEntry>),
) -> Result<Saved, Broke> {
    let session = &desk.session;
    let sql = "UPDATE counters SET value = value + 1 \
               WHERE name = 'directory_version' AND value = $1";
    if session.execute(sql, &[&(*decided_on as i64)]).await? == 0 {
        return Ok(Saved::Stale);
    }
    match change {
        Change::Register { client, tools, others } => {
            register(session, client, tools, *others).await?;
        }
        Change::Withdraw { project, client_id, tool } => {
            let sql = "DELETE FROM offers WHERE project = $1 AND client_id = $2 AND tool = $3";
            session.execute(sql, &[project, client_id, tool]).await?;
            drop_orphans(session, project).await?;
        }
        Change::DropClient { project, client_id } => {
            for sql in [
                "DELETE FROM offers WHERE project = $1 AND client_id = $2",
                "DELETE FROM clients WHERE project = $1 AND client_id = $2",
            ] {
                session.execute(sql, &[project, client_id]).await?;
            }
            drop_orphans(session, project).await?;
        }
        Change::PutTools(tools) => {
            for tool in tools {
                put_tool(session, tool, entry.as_ref().map(|entry| entry.at_ms as i64)).await?;
            }
        }
        Change::DropTool { project, name } => {
            let at_ms = entry.as_ref().map(|entry| entry.at_ms as i64);
            retire_versions(session, project, name, at_ms).await?;
            let sql = "DELETE FROM resource.tools WHERE project_id = $1 AND tool_name = $2";
            session.execute(sql, &[project, name]).await?;
        }
        Change::PutMember(member) => put_member(session, member).await?,
        Change::SetUpstreamTools { project, upstream, tools } => {
            set_upstream_tools(session, project, upstream, tools).await?;
        }
        Change::AddProject(_)
        | Change::DropMember { .. }
        | Change::AddKey(_)
        | Change::RevokeKey { .. }
        | Change::PutRule(_)
        | Change::DropRule { .. }
        | Change::PutUpstream(_)
        | Change::DropUpstream { .. } => simple(session, change).await?,
    }
    if let Some(entry) = entry {
        write_audit(session, entry).await?;
    }
    Ok(Saved::Yes)
}

/// Applies a change that takes one or two statements.
async fn simple(session: &Session, change: &Change) -> Result<(), Broke> {
    let ms = |at_ms: u64| at_ms as i64;
    let done = match change {
        Change::AddProject(project) => {
            let sql = "INSERT INTO projects VALUES ($1, $2, $3) ON CONFLICT DO NOTHING";
            session.execute(sql, &[&project.id, &project.title, &ms(project.created_ms)]).await
        }
        Change::DropMember { project, agent_id } => {
            let sql = "DELETE FROM resource.project_agents \
                       WHERE project_id = $1 AND agent_id = $2";
            session.execute(sql, &[project, agent_id]).await
        }
        Change::AddKey(key) => {
            let bound: Bound<'_> = &[
                &key.id,
                &key.digest,
                &key.project,
                &key.agent,
                &key.role.as_str(),
                &ms(key.created_ms),
                &key.revoked_ms.map(ms),
            ];
            session.execute("INSERT INTO keys VALUES ($1, $2, $3, $4, $5, $6, $7)", bound).await
        }
        Change::RevokeKey { id, at_ms } => {
            let sql = "UPDATE keys SET revoked_ms = greatest(created_ms, $2) \
                       WHERE id = $1 AND revoked_ms IS NULL";
            session.execute(sql, &[id, &ms(*at_ms)]).await
        }
        Change::PutRule(rule) => {
            let sql = "INSERT INTO rules VALUES ($1, $2, $3, $4) \
                       ON CONFLICT (project, agent, pattern) \
                       DO UPDATE SET verdict = excluded.verdict";
            let bound: Bound<'_> =
                &[&rule.project, &rule.agent, &rule.pattern, &rule.verdict.as_str()];
            session.execute(sql, bound).await
        }
        Change::DropRule { project, agent, pattern } => {
            let sql = "DELETE FROM rules WHERE project = $1 AND agent = $2 AND pattern = $3";
            session.execute(sql, &[project, agent, pattern]).await
        }
        Change::PutUpstream(upstream) => {
            let sql = "INSERT INTO upstreams VALUES ($1, $2, $3, $4, $5) \
                       ON CONFLICT (project, name) DO UPDATE SET kind = excluded.kind, \
                       settings = excluded.settings, added_ms = excluded.added_ms";
            let bound: Bound<'_> = &[
                &upstream.project,
                &upstream.name,
                &upstream.kind,
                &upstream.settings.text(),
                &ms(upstream.added_ms),
            ];
            session.execute(sql, bound).await
        }
        Change::DropUpstream { project, name } => {
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
    tools: &[Definition],
) -> Result<(), Broke> {
    let sql = "DELETE FROM upstream_tools WHERE project = $1 AND upstream = $2";
    session.execute(sql, &[&project, &upstream]).await?;
    for tool in tools {
        let text = definition_text(tool)?;
        let sql = "INSERT INTO upstream_tools VALUES ($1, $2, $3, $4)";
        session.execute(sql, &[&project, &tool.name, &upstream, &text]).await?;
    }
    Ok(())
}

/// Stores a tool in the columns that the protocol defines, with the full definition in a column of
/// Toolcrib.
async fn put_tool(session: &Session, tool: &Definition, at_ms: Option<i64>) -> Result<(), Broke> {
    let project = tool.project.clone().unwrap_or_default();
    let (text, version) = (definition_text(tool)?, tool.version());
    retire_versions(session, &project, &tool.name, at_ms).await?;
    let binding = tool.utp.as_ref();
    let parameters = binding.and_then(|binding| binding.parameters.as_ref());
    let parameters = parameters.unwrap_or(&tool.input_schema);
    let json = |json: &Json| storable(json.value());
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
    let bound: Bound<'_> = &[
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
    session.execute(sql, bound).await?;
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
) -> Result<(), Broke> {
    let sql = "UPDATE tool_versions SET replaced_ms = $3 \
               WHERE project = $1 AND name = $2 AND replaced_ms IS NULL";
    session.execute(sql, &[&project, &name, &at_ms]).await?;
    Ok(())
}

async fn put_member(session: &Session, member: &Member) -> Result<(), Broke> {
    let allowed = member.allowed_tools.as_ref().map(encode).transpose()?;
    let sql = "INSERT INTO resource.project_agents (project_id, agent_id, worker_target, \
               toolcrib_profile, toolcrib_allowed_tools, updated_at) \
               VALUES ($1, $2, $3, $4, $5, to_timestamp($6::bigint / 1000.0)) \
               ON CONFLICT (project_id, agent_id) DO UPDATE SET \
               worker_target = excluded.worker_target, \
               toolcrib_profile = excluded.toolcrib_profile, \
               toolcrib_allowed_tools = excluded.toolcrib_allowed_tools, \
               updated_at = excluded.updated_at";
    let bound: Bound<'_> = &[
        &member.project,
        &member.agent_id,
        &member.worker_target,
        &member.profile.as_ref().map(Json::text),
        &allowed,
        &(member.updated_ms as i64),
    ];
    session.execute(sql, bound).await?;
    Ok(())
}

async fn register(
    session: &Session,
    client: &Client,
    tools: &[Definition],
    others: Others,
) -> Result<(), Broke> {
    let sql = "INSERT INTO clients VALUES ($1, $2, $3, $4) ON CONFLICT DO NOTHING";
    let registered = client.registered_ms as i64;
    let bound: Bound<'_> = &[&client.project, &client.client_id, &client.owner, &registered];
    session.execute(sql, bound).await?;
    if others == Others::Withdraw {
        let sql = "DELETE FROM offers WHERE project = $1 AND client_id = $2";
        session.execute(sql, &[&client.project, &client.client_id]).await?;
    }
    for tool in tools {
        let text = definition_text(tool)?;
        let sql = "INSERT INTO tools VALUES ($1, $2, $3) \
                   ON CONFLICT (project, name) DO UPDATE SET definition = excluded.definition";
        session.execute(sql, &[&client.project, &tool.name, &text]).await?;
        let sql = "INSERT INTO offers VALUES ($1, $2, $3) ON CONFLICT DO NOTHING";
        session.execute(sql, &[&client.project, &tool.name, &client.client_id]).await?;
    }
    drop_orphans(session, &client.project).await
}

/// Deletes the tools that no client offers any more.
async fn drop_orphans(session: &Session, project: &str) -> Result<(), Broke> {
    let sql = "DELETE FROM tools WHERE project = $1 AND NOT EXISTS \
               (SELECT 1 FROM offers o WHERE o.project = tools.project AND o.tool = tools.name)";
    session.execute(sql, &[&project]).await?;
    Ok(())
}

pub(super) async fn audit(desk: &mut Desk, entry: &AuditEntry) -> Result<(), Broke> {
    write_audit(&desk.session, entry).await
}

async fn write_audit(session: &Session, entry: &AuditEntry) -> Result<(), Broke> {
    let sql = "INSERT INTO audit (at_ms, project, agent, action, subject, reason) \
               VALUES ($1, $2, $3, $4, $5, $6)";
    let bound: Bound<'_> = &[
        &(entry.at_ms as i64),
        &entry.project,
        &entry.agent,
        &entry.action,
        &entry.subject.replace('\0', ""),
        &entry.reason.replace('\0', ""),
    ];
    session.execute(sql, bound).await?;
    Ok(())
}

pub(super) async fn audit_log(
    session: &Session,
    project: Option<&str>,
    limit: usize,
) -> Result<Vec<AuditEntry>, Broke> {
    let sql = "SELECT at_ms, project, agent, action, subject, reason FROM audit \
               WHERE $1::text IS NULL OR project = $1 ORDER BY number DESC LIMIT $2";
    session.collect(sql, &[&project, &limited(limit)], read_audit).await
}
