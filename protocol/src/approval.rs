//! The form of an approval. HTTP, MCP, events, webhooks and the command line show the same object.

use serde::Serialize;
use toolcrib::Json;
use toolcrib::domain::call::approval::{
    Approval, ApprovalDecision, ApprovalRequester, StandingApproval,
};
use utoipa::ToSchema;

/// A person's decision that a call waits for.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Approval)]
pub struct ApprovalBody<'a> {
    pub approval_id: &'a str,
    /// `pending`, `approved`, `rejected`, `expired`, `superseded` or `canceled`.
    pub status: &'static str,
    /// The call that waits.
    pub tool_call_id: &'a str,
    pub run_id: &'a str,
    pub tool_name: &'a str,
    /// Fingerprint of the tool's definition.
    pub tool_version: &'a str,
    /// The arguments to execute, with their defaults.
    #[schema(value_type = serde_json::Value)]
    pub args: &'a Json,
    pub requested_by: RequesterBody<'a>,
    /// The rule that asks.
    pub rule_id: &'a str,
    /// Why the rule asks.
    pub reason: &'a str,
    /// Patterns of the agents, groups and users that may decide; empty for every approver.
    pub approvers: &'a [String],
    pub created_at_ms: u64,
    pub expires_at_ms: u64,
    /// The last approved call of the tool; null if there is none.
    pub previous: Option<PreviousBody<'a>>,
    /// The differences of the arguments to those of the last approved call; null if there is none.
    #[schema(value_type = Option<Vec<Object>>)]
    pub difference: Option<Vec<DifferenceBody<'a>>>,
    /// The approval that this one replaces, because what it was bound to has changed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub supersedes: Option<&'a str>,
    /// The decision; null while the approval is pending.
    pub decision: Option<DecisionBody<'a>>,
    /// Link to the approval.
    pub link: String,
}

/// The caller that made a call.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Requester)]
pub struct RequesterBody<'a> {
    pub agent: &'a str,
    pub user: Option<&'a str>,
    pub session: Option<&'a str>,
    pub environment: Option<&'a str>,
}

/// The last approved call of a tool.
#[derive(Debug, Serialize, ToSchema)]
pub struct PreviousBody<'a> {
    pub approval_id: &'a str,
    pub tool_call_id: &'a str,
}

/// One changed argument. `before` or `after` is absent if there is no value.
#[derive(Debug, Serialize)]
pub struct DifferenceBody<'a> {
    /// JSON pointer to the value.
    pub path: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub before: Option<&'a serde_json::Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub after: Option<&'a serde_json::Value>,
}

/// A decision about an approval, or the reason why it ended without one.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Decision)]
pub struct DecisionBody<'a> {
    /// The agent that decided; null if no person did.
    pub by: Option<&'a str>,
    pub user: Option<&'a str>,
    pub reason: Option<&'a str>,
    pub at_ms: u64,
    /// `once`, `run` or `until`.
    pub scope: &'static str,
    /// End of a standing approval.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub until_ms: Option<u64>,
    /// The standing approval that the decision created.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub standing_id: Option<&'a str>,
    /// The call with other arguments that was approved in place of this one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub replaced_by: Option<&'a str>,
}

/// An approval for every equal call of one requester, in one run or until a date.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = StandingApproval)]
pub struct StandingApprovalBody<'a> {
    pub standing_id: &'a str,
    pub approval_id: &'a str,
    pub tool_name: &'a str,
    #[schema(value_type = serde_json::Value)]
    pub args: &'a Json,
    pub rule_id: &'a str,
    pub requested_by: RequesterBody<'a>,
    /// `run` or `until`.
    pub scope: &'static str,
    /// The run that it is limited to; null for one with a date.
    pub run_id: Option<&'a str>,
    pub expires_at_ms: u64,
    pub granted_by: &'a str,
    pub granted_at_ms: u64,
    pub revoked_at_ms: Option<u64>,
    pub revoked_by: Option<&'a str>,
}

impl<'a> RequesterBody<'a> {
    fn new(requester: &'a ApprovalRequester) -> Self {
        let attributes = &requester.attributes;
        Self {
            agent: &requester.agent,
            user: attributes.user.as_deref(),
            session: attributes.session.as_deref(),
            environment: attributes.environment.as_deref(),
        }
    }
}

impl<'a> DecisionBody<'a> {
    fn new(decision: &'a ApprovalDecision) -> Self {
        Self {
            by: decision.by.as_deref(),
            user: decision.user.as_deref(),
            reason: decision.reason.as_deref(),
            at_ms: decision.at_ms,
            scope: decision.scope.as_str(),
            until_ms: decision.until_ms,
            standing_id: decision.standing_id.as_deref(),
            replaced_by: decision.replaced_by.as_ref().map(|id| id.as_str()),
        }
    }
}

impl<'a> ApprovalBody<'a> {
    /// Builds the body of an approval. `link` is the path or URL to read it from.
    pub fn new(approval: &'a Approval, link: String) -> Self {
        let request = &approval.request;
        let previous = request.previous.as_ref();
        Self {
            approval_id: &approval.id,
            status: approval.status.as_str(),
            tool_call_id: approval.call_id.as_str(),
            run_id: &request.run_id,
            tool_name: &request.tool,
            tool_version: &request.version,
            args: &request.args,
            requested_by: RequesterBody::new(&request.requester),
            rule_id: &request.rule_id,
            reason: &request.reason,
            approvers: &request.approvers,
            created_at_ms: approval.created_ms,
            expires_at_ms: approval.expires_ms,
            previous: previous.map(|previous| PreviousBody {
                approval_id: &previous.approval_id,
                tool_call_id: previous.call_id.as_str(),
            }),
            difference: previous.map(|previous| {
                let changes = previous.changes.iter();
                let body = changes.map(|change| DifferenceBody {
                    path: &change.path,
                    before: change.before.as_ref(),
                    after: change.after.as_ref(),
                });
                body.collect()
            }),
            supersedes: request.supersedes.as_deref(),
            decision: approval.decision.as_ref().map(DecisionBody::new),
            link,
        }
    }
}

impl<'a> StandingApprovalBody<'a> {
    /// Builds the body of a standing approval.
    pub fn new(standing: &'a StandingApproval) -> Self {
        Self {
            standing_id: &standing.id,
            approval_id: &standing.approval_id,
            tool_name: &standing.tool,
            args: &standing.args,
            rule_id: &standing.rule_id,
            requested_by: RequesterBody::new(&standing.requester),
            scope: standing.scope.as_str(),
            run_id: standing.run_id.as_deref(),
            expires_at_ms: standing.expires_ms,
            granted_by: &standing.granted_by,
            granted_at_ms: standing.granted_ms,
            revoked_at_ms: standing.revoked_ms,
            revoked_by: standing.revoked_by.as_deref(),
        }
    }
}
