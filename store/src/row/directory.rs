//! Reads the parts of the directory from rows.

use toolcrib::domain::access_rules::{AccessRule, RuleVerdict};
use toolcrib::domain::directory::audit::{AuditRow, RequestOrigin};
use toolcrib::domain::directory::{ApiKey, AuditEntry, Client, Project, ToolOffer, Upstream};
use toolcrib::domain::tool::ToolDefinition;
use toolcrib::ports::store::StoreError;

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
