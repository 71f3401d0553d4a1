//! Reads the parts of the directory from rows.

use toolcrib::domain::access_rules::{AccessRule, RuleVerdict};
use toolcrib::domain::directory::kill_switches::KillSwitch;
use toolcrib::domain::directory::usage_limits::{LimitValues, UsageLimit};
use toolcrib::domain::directory::{ApiKey, AuditEntry, Client, Project, ToolOffer, Upstream};
use toolcrib::domain::tool::ToolDefinition;
use toolcrib::ports::store::StoreError;
use toolcrib::ports::store::usage::AcceptedCall;

use super::{RowReader, decode, decode_definition};

/// Reads `project, client_id, owner, registered_ms`.
pub(crate) fn read_client(row: &impl RowReader) -> Result<Client, StoreError> {
    Ok(Client {
        project: row.text(0)?,
        client_id: row.text(1)?,
        owner: row.text(2)?,
        registered_ms: row.unsigned(3)?,
    })
}

/// Reads `project, tool, client_id`.
pub(crate) fn read_offer(row: &impl RowReader) -> Result<ToolOffer, StoreError> {
    Ok(ToolOffer { project: row.text(0)?, tool: row.text(1)?, client_id: row.text(2)? })
}

/// Reads `project, agent, pattern, verdict`.
pub(crate) fn read_rule(row: &impl RowReader) -> Result<AccessRule, StoreError> {
    let allow = row.text(3)? == "allow";
    Ok(AccessRule {
        project: row.text(0)?,
        agent: row.text(1)?,
        pattern: row.text(2)?,
        verdict: if allow { RuleVerdict::Allow } else { RuleVerdict::Deny },
    })
}

/// Reads `id, digest, project, agent, role, created_ms, revoked_ms, rejoin`.
pub(crate) fn read_key(row: &impl RowReader) -> Result<ApiKey, StoreError> {
    let role = row.text(4)?;
    Ok(ApiKey {
        id: row.text(0)?,
        digest: row.text(1)?,
        project: row.text(2)?,
        agent: row.text(3)?,
        role: role.parse().map_err(|()| StoreError::Corrupt(format!("role {role}")))?,
        created_ms: row.unsigned(5)?,
        revoked_ms: row.optional_unsigned(6)?,
        rejoin: row.unsigned(7)? != 0,
    })
}

/// Reads `id, title, created_ms`.
pub(crate) fn read_project(row: &impl RowReader) -> Result<Project, StoreError> {
    Ok(Project { id: row.text(0)?, title: row.text(1)?, created_ms: row.unsigned(2)? })
}

/// Reads `project, name, definition`.
pub(crate) fn read_tool(row: &impl RowReader) -> Result<ToolDefinition, StoreError> {
    decode_definition(row.text(0)?, row.text(1)?, &row.text(2)?)
}

/// Reads `project, name, kind, settings, added_ms`.
pub(crate) fn read_upstream(row: &impl RowReader) -> Result<Upstream, StoreError> {
    Ok(Upstream {
        project: row.text(0)?,
        name: row.text(1)?,
        kind: row.text(2)?,
        settings: decode(&row.text(3)?)?,
        added_ms: row.unsigned(4)?,
    })
}

/// Reads `project, kind, name, per_minute, max_open, max_parallel, updated_ms`.
pub(crate) fn read_limit(row: &impl RowReader) -> Result<UsageLimit, StoreError> {
    let kind = row.text(1)?;
    let value = |column| -> Result<Option<u32>, StoreError> {
        let value = row.optional_unsigned(column)?;
        Ok(value.map(|value| u32::try_from(value).unwrap_or(u32::MAX)))
    };
    Ok(UsageLimit {
        project: row.text(0)?,
        kind: kind.parse().map_err(|()| StoreError::Corrupt(format!("kind {kind}")))?,
        name: row.text(2)?,
        values: LimitValues { per_minute: value(3)?, max_open: value(4)?, max_parallel: value(5)? },
        updated_ms: row.unsigned(6)?,
    })
}

/// Reads `project, kind, name, reason, set_by, set_ms`.
pub(crate) fn read_switch(row: &impl RowReader) -> Result<KillSwitch, StoreError> {
    let kind = row.text(1)?;
    Ok(KillSwitch {
        project: row.text(0)?,
        kind: kind.parse().map_err(|()| StoreError::Corrupt(format!("kind {kind}")))?,
        name: row.text(2)?,
        reason: row.text(3)?,
        set_by: row.text(4)?,
        set_ms: row.unsigned(5)?,
    })
}

/// Reads `place, project, tool_name, created_ms, envelope`.
pub(crate) fn read_accepted_call(row: &impl RowReader) -> Result<(u64, AcceptedCall), StoreError> {
    let (agent, user) = super::decode_agent_and_user(&row.text(4)?)?;
    let call = AcceptedCall {
        project: row.text(1)?,
        agent,
        user,
        tool: row.text(2)?,
        accepted_ms: row.unsigned(3)?,
    };
    Ok((row.unsigned(0)?, call))
}

/// Reads `at_ms, project, agent, action, subject, reason`.
pub(crate) fn read_audit(row: &impl RowReader) -> Result<AuditEntry, StoreError> {
    Ok(AuditEntry {
        at_ms: row.unsigned(0)?,
        project: row.text(1)?,
        agent: row.text(2)?,
        action: row.text(3)?,
        subject: row.text(4)?,
        reason: row.text(5)?,
    })
}
