//! Reads the parts of the directory from rows.

use toolcrib::domain::access_rules::{AccessRule, RuleSetVersion};
use toolcrib::domain::agent::AgentVersion;
use toolcrib::domain::directory::audit::{AuditRow, RequestOrigin};
use toolcrib::domain::directory::kill_switches::KillSwitch;
use toolcrib::domain::directory::usage_limits::{LimitValues, UsageLimit};
use toolcrib::domain::directory::{
    ApiKey, AuditEntry, Client, Project, SessionToken, ToolOffer, Upstream,
};
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

/// Reads `definition, created_ms`.
pub(crate) fn read_agent_version(row: &impl RowReader) -> Result<AgentVersion, StoreError> {
    Ok(AgentVersion { definition: decode(&row.text(0)?)?, created_ms: row.unsigned(1)? })
}

/// Reads `project, tool, client_id`.
pub(crate) fn read_offer(row: &impl RowReader) -> Result<ToolOffer, StoreError> {
    Ok(ToolOffer { project: row.text(0)?, tool: row.text(1)?, client_id: row.text(2)? })
}

/// Reads `project, id, rule`.
pub(crate) fn read_rule(row: &impl RowReader) -> Result<AccessRule, StoreError> {
    let rule: AccessRule = decode(&row.text(2)?)?;
    Ok(AccessRule { project: row.text(0)?, id: row.text(1)?, ..rule })
}

/// Reads `project, version, at_ms, agent, summary`.
pub(crate) fn read_rule_version(row: &impl RowReader) -> Result<RuleSetVersion, StoreError> {
    Ok(RuleSetVersion {
        project: row.text(0)?,
        version: row.unsigned(1)?,
        at_ms: row.unsigned(2)?,
        agent: row.text(3)?,
        summary: row.text(4)?,
    })
}

/// The columns of a key, in the order in which [`read_key`] reads them.
pub(crate) const KEY_COLUMNS: &str = "id, digest, project, agent, roles, attributes, created_ms, \
                                      expires_ms, revoked_ms, rejoin";

pub(crate) fn read_key(row: &impl RowReader) -> Result<ApiKey, StoreError> {
    let roles = row.text(4)?;
    Ok(ApiKey {
        id: row.text(0)?,
        digest: row.text(1)?,
        project: row.text(2)?,
        agent: row.text(3)?,
        roles: roles.parse().map_err(|()| StoreError::Corrupt(format!("roles {roles}")))?,
        attributes: decode(&row.text(5)?)?,
        created_ms: row.unsigned(6)?,
        expires_ms: row.optional_unsigned(7)?,
        revoked_ms: row.optional_unsigned(8)?,
        rejoin: row.unsigned(9)? != 0,
    })
}

/// The columns of a session token, in the order in which [`read_session_token`] reads them.
pub(crate) const SESSION_TOKEN_COLUMNS: &str =
    "id, digest, key_id, project, attributes, created_ms, expires_ms, revoked_ms";

pub(crate) fn read_session_token(row: &impl RowReader) -> Result<SessionToken, StoreError> {
    Ok(SessionToken {
        id: row.text(0)?,
        digest: row.text(1)?,
        key_id: row.text(2)?,
        project: row.text(3)?,
        attributes: decode(&row.text(4)?)?,
        created_ms: row.unsigned(5)?,
        expires_ms: row.unsigned(6)?,
        revoked_ms: row.optional_unsigned(7)?,
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
    let (agent, user) = super::call::decode_agent_and_user(&row.text(4)?)?;
    let call = AcceptedCall {
        project: row.text(1)?,
        agent,
        user,
        tool: row.text(2)?,
        accepted_ms: row.unsigned(3)?,
    };
    Ok((row.unsigned(0)?, call))
}

/// Columns of a row of the audit log, for [`read_audit_row`].
pub(crate) const AUDIT_COLUMNS: &str = "number, at_ms, project, agent, action, subject, reason, \
     \"user\", credential, transport, peer, request_id, hash";

/// Reads [`AUDIT_COLUMNS`].
pub(crate) fn read_audit_row(row: &impl RowReader) -> Result<AuditRow, StoreError> {
    Ok(AuditRow {
        number: row.unsigned(0)?,
        entry: AuditEntry {
            at_ms: row.unsigned(1)?,
            project: row.text(2)?,
            agent: row.text(3)?,
            action: row.text(4)?,
            subject: row.text(5)?,
            reason: row.text(6)?,
            user: row.optional_text(7)?,
            credential: row.optional_text(8)?,
            origin: RequestOrigin {
                transport: row.optional_text(9)?,
                peer: row.optional_text(10)?,
                request_id: row.optional_text(11)?,
            },
        },
        hash: row.text(12)?,
    })
}
