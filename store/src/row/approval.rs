//! Converts approvals to rows and back.

use toolcrib::domain::call::approval::{
    Approval, ApprovalChange, ApprovalDecision, ApprovalStatus, ApprovalWebhook,
};
use toolcrib::domain::directory::AuditEntry;
use toolcrib::ports::store::StoreError;
use toolcrib::ports::store::approvals::NewApproval;

use super::{RowReader, columns, decode, encode};

columns! {
    /// The columns of `approvals` that [`read_approval`] reads.
    APPROVAL_COLUMNS, ApprovalColumn {
        Id = "approval_id",
        Project = "project",
        CallId = "tool_call_id",
        Status = "status",
        CreatedMs = "created_ms",
        ExpiresMs = "expires_ms",
        Request = "request",
        Decision = "decision",
        WebhookMs = "webhook_ms",
        WebhookTries = "webhook_tries",
    }
}

/// A new approval in the form that the writer binds.
pub(crate) struct ApprovalRow {
    pub(crate) approval: Box<Approval>,
    pub(crate) request: String,
}

/// A change of an approval in the form that the writer binds.
pub(crate) enum ApprovalChangeRow {
    Request(ApprovalRow),
    End { id: String, status: ApprovalStatus, decided_ms: i64, decision: String },
}

impl ApprovalRow {
    pub(crate) fn new(approval: Box<Approval>) -> Result<Self, StoreError> {
        let request = encode(&approval.request)?;
        Ok(Self { approval, request })
    }

    pub(crate) fn with_audit(new: NewApproval) -> Result<(Self, AuditEntry), StoreError> {
        Ok((Self::new(Box::new(new.approval))?, new.audit))
    }
}

impl ApprovalChangeRow {
    pub(crate) fn new(change: ApprovalChange) -> Result<Self, StoreError> {
        Ok(match change {
            ApprovalChange::Request(approval) => Self::Request(ApprovalRow::new(approval)?),
            ApprovalChange::End { id, status, decision } => Self::End {
                id,
                status,
                decided_ms: decision.at_ms as i64,
                decision: encode(&*decision)?,
            },
        })
    }
}

pub(crate) fn read_approval(row: &impl RowReader) -> Result<Approval, StoreError> {
    let text = |column: ApprovalColumn| row.text(column as usize);
    let status = text(ApprovalColumn::Status)?;
    let decision = row.optional_text(ApprovalColumn::Decision as usize)?;
    let decision = decision.map(|text| decode::<ApprovalDecision>(&text)).transpose()?;
    Ok(Approval {
        id: text(ApprovalColumn::Id)?,
        project: text(ApprovalColumn::Project)?,
        call_id: row.call_id(ApprovalColumn::CallId as usize)?,
        request: decode(&text(ApprovalColumn::Request)?)?,
        created_ms: row.unsigned(ApprovalColumn::CreatedMs as usize)?,
        expires_ms: row.unsigned(ApprovalColumn::ExpiresMs as usize)?,
        status: status
            .parse()
            .map_err(|()| StoreError::Corrupt(format!("approval status {status}")))?,
        decision,
        webhook: ApprovalWebhook {
            due_ms: row.optional_unsigned(ApprovalColumn::WebhookMs as usize)?,
            tries: row.count(ApprovalColumn::WebhookTries as usize)?,
        },
    })
}
