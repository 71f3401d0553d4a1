//! Approvals: a person's decision that a held call waits for. Pure.
//!
//! An approval is bound to one call and to a digest of what the person sees: the tool, the version
//! of its definition, the arguments to execute and the rule that asks. A call whose digest differs
//! when it is dispatched needs another approval. A standing approval releases later calls with the
//! same digest, of the same requester, in one run or until a date.

mod difference;

use std::str::FromStr;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::domain::call::{Call, Target};
use crate::domain::caller::{Caller, CallerAttributes};
use crate::domain::id::{CallId, hex};
use crate::domain::json::Json;

pub use difference::{ArgumentChange, MAX_CHANGES, find_changes};

/// Time after which an approval expires without a decision, unless its rule or the configuration
/// sets another.
pub const DEFAULT_EXPIRES_IN_MS: u64 = 24 * 60 * 60 * 1_000;

/// Maximum time that a standing approval for a run holds if Toolcrib does not drive the run.
pub const UNOBSERVED_RUN_MS: u64 = 24 * 60 * 60 * 1_000;

/// Maximum number of decisions in one request.
pub const MAX_DECISIONS: usize = 1_000;

/// Maximum length of a decision's reason, in bytes.
pub const MAX_REASON_BYTES: usize = 2_000;

/// Status of an approval.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ApprovalStatus {
    /// Waits for a decision.
    Pending,
    /// A person approved the call.
    Approved,
    /// A person rejected the call.
    Rejected,
    /// The time for a decision passed.
    Expired,
    /// The tool, its arguments or the rule changed, so the decision does not apply any more.
    Superseded,
    /// The call ended otherwise before a decision.
    Canceled,
}

impl ApprovalStatus {
    /// Every status.
    pub const ALL: [Self; 6] = [
        Self::Pending,
        Self::Approved,
        Self::Rejected,
        Self::Expired,
        Self::Superseded,
        Self::Canceled,
    ];

    /// Returns the status as stored and as shown on the wire.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Pending => "pending",
            Self::Approved => "approved",
            Self::Rejected => "rejected",
            Self::Expired => "expired",
            Self::Superseded => "superseded",
            Self::Canceled => "canceled",
        }
    }
}

impl FromStr for ApprovalStatus {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        Self::ALL.into_iter().find(|status| status.as_str() == text).ok_or(())
    }
}

/// The set of calls that an approval covers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ApprovalScope {
    /// This call only.
    #[default]
    Once,
    /// Every equal call of the same requester in the same run.
    Run,
    /// Every equal call of the same requester until a date.
    Until,
}

impl ApprovalScope {
    /// Returns the scope as shown on the wire.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Once => "once",
            Self::Run => "run",
            Self::Until => "until",
        }
    }
}

/// The caller whose call needs the approval.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct ApprovalRequester {
    /// Agent name of the caller.
    pub agent: String,
    /// Attributes of the caller.
    #[serde(default)]
    pub attributes: CallerAttributes,
}

impl ApprovalRequester {
    /// Returns the requester that a caller is.
    pub fn new(caller: &Caller) -> Self {
        Self { agent: caller.agent.clone(), attributes: (*caller.attributes).clone() }
    }

    /// Returns true if a call of the other requester may use a standing approval of this one: no
    /// standing approval is shared between agents, users or sessions.
    pub fn covers(&self, other: &Self) -> bool {
        fn same(one: &CallerAttributes, other: &CallerAttributes) -> bool {
            (&one.user, &one.session, &one.environment)
                == (&other.user, &other.session, &other.environment)
        }
        let (own, others) = (&self.attributes, &other.attributes);
        let same_above = own.callers_above().count() == others.callers_above().count()
            && own.callers_above().zip(others.callers_above()).all(|(one, other)| {
                one.agent == other.agent && same(&one.attributes, &other.attributes)
            });
        self.agent == other.agent && same(own, others) && same_above
    }
}

/// A request for a person's decision about one call.
#[derive(Debug, Clone, PartialEq)]
pub struct Approval {
    /// Unique id, `apr_…`.
    pub id: String,
    /// Id of the project that the call belongs to.
    pub project: String,
    /// The call that waits.
    pub call_id: CallId,
    /// Content that does not change after the request.
    pub request: ApprovalRequest,
    /// Time of the request, in Unix milliseconds.
    pub created_ms: u64,
    /// Time at which the approval expires, in Unix milliseconds.
    pub expires_ms: u64,
    /// Current status.
    pub status: ApprovalStatus,
    /// The decision, or the reason why there is none; `None` while the approval is pending.
    pub decision: Option<ApprovalDecision>,
    /// The webhook that announces the approval.
    pub webhook: ApprovalWebhook,
}

/// Progress of the webhook that announces an approval.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ApprovalWebhook {
    /// Time of the next attempt, in Unix milliseconds; `None` if none follows.
    pub due_ms: Option<u64>,
    /// Number of attempts so far.
    pub tries: u32,
}

/// The content of an approval: everything that the person decides about.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ApprovalRequest {
    /// Id of the run that the call belongs to.
    pub run_id: String,
    /// Name of the tool to execute.
    pub tool: String,
    /// Fingerprint of the tool's definition.
    pub version: String,
    /// Arguments to execute, validated and with their defaults.
    pub args: Json,
    /// Digest of tool, version, arguments and rule.
    pub digest: String,
    /// Id of the rule that asks.
    pub rule_id: String,
    /// The rule's reason.
    pub reason: String,
    /// The caller that made the call.
    pub requester: ApprovalRequester,
    /// Patterns of the agents, groups and users that may decide; empty for every approver.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub approvers: Vec<String>,
    /// The last approved call of the tool, and the differences of its arguments to these.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub previous: Option<PreviousApproval>,
    /// The approval that this one replaces, because something that it was bound to has changed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub supersedes: Option<String>,
}

/// The last approved call of a tool, compared with the present one.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PreviousApproval {
    /// Id of that approval.
    pub approval_id: String,
    /// Id of its call.
    pub call_id: CallId,
    /// Changes from its arguments to the present ones.
    pub changes: Vec<ArgumentChange>,
}

/// A decision about an approval, or the reason why it ended without one.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct ApprovalDecision {
    /// Time of the decision, in Unix milliseconds.
    pub at_ms: u64,
    /// Agent that decided; `None` if no person did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub by: Option<String>,
    /// User that decided, if the credentials name one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Reason of the decision.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// The calls that an approval covers.
    #[serde(default)]
    pub scope: ApprovalScope,
    /// Time until which a standing approval holds, in Unix milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub until_ms: Option<u64>,
    /// The standing approval that the decision created.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub standing_id: Option<String>,
    /// The call with other arguments that was approved in place of this one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replaced_by: Option<CallId>,
}

/// An approval for every equal call of one requester, in one run or until a date.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StandingApproval {
    /// Unique id, `sap_…`.
    pub id: String,
    /// Id of the project.
    pub project: String,
    /// The approval whose decision created it.
    pub approval_id: String,
    /// Name of the tool.
    pub tool: String,
    /// Arguments that it is limited to.
    pub args: Json,
    /// Digest of tool, version, arguments and rule.
    pub digest: String,
    /// Id of the rule that asks.
    pub rule_id: String,
    /// The requester that it is limited to.
    pub requester: ApprovalRequester,
    /// The scope of the decision that granted it, never [`ApprovalScope::Once`].
    #[serde(default = "scope_of_unmarked_row")]
    pub scope: ApprovalScope,
    /// The run that it is limited to; `None` for one with a date.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub run_id: Option<String>,
    /// True if Toolcrib drives the run, and the approval ends with it. The end of a run that only
    /// the caller knows cannot be observed: such an approval has [`UNOBSERVED_RUN_MS`].
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub ends_with_run: bool,
    /// Time at which it expires, in Unix milliseconds.
    pub expires_ms: u64,
    /// Agent that granted it.
    pub granted_by: String,
    /// Time at which it was granted, in Unix milliseconds.
    pub granted_ms: u64,
    /// Time at which it was revoked, in Unix milliseconds. A standing approval that has ended
    /// otherwise is marked as revoked too, so that no change of the clock makes it valid again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revoked_ms: Option<u64>,
    /// Agent that revoked it; `None` if it ended otherwise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revoked_by: Option<String>,
}

/// Scope of a stored approval that has none. [`StandingApproval::normalized`] replaces it.
fn scope_of_unmarked_row() -> ApprovalScope {
    ApprovalScope::Once
}

impl StandingApproval {
    /// Returns the approval as earlier versions stored it, without a scope, in the present form.
    #[must_use]
    pub fn normalized(self) -> Self {
        if self.scope != ApprovalScope::Once {
            return self;
        }
        if self.run_id.is_none() {
            return Self { scope: ApprovalScope::Until, ..self };
        }
        let limit_ms = self.granted_ms.saturating_add(UNOBSERVED_RUN_MS);
        let expires_ms = self.expires_ms.min(limit_ms);
        Self { scope: ApprovalScope::Run, expires_ms, ..self }
    }

    /// Returns true if it is neither revoked nor expired.
    pub fn is_active(&self, now_ms: u64) -> bool {
        self.revoked_ms.is_none() && now_ms < self.expires_ms
    }

    /// Returns true if it releases a call of this requester, run and digest.
    pub fn covers(&self, requester: &ApprovalRequester, run_id: &str, digest: &str) -> bool {
        self.digest == digest
            && self.requester.covers(requester)
            && self.run_id.as_deref().is_none_or(|own| own == run_id)
    }
}

/// The approval of a call, as stored with the call.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CallApproval {
    /// Id of the approval.
    pub id: String,
    /// Digest of what the approval is bound to.
    pub digest: String,
    /// True once the approval was given.
    #[serde(default, rename = "granted", skip_serializing_if = "std::ops::Not::not")]
    pub is_granted: bool,
    /// True once an attempt has started under the approval.
    #[serde(default, rename = "used", skip_serializing_if = "std::ops::Not::not")]
    pub is_used: bool,
    /// The standing approval that released the call.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub standing_id: Option<String>,
    /// The call with other arguments that was approved in place of this one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replaced_by: Option<CallId>,
}

impl CallApproval {
    /// Creates the approval that a call waits for.
    pub fn pending(approval: &Approval) -> Self {
        let (id, digest) = (approval.id.clone(), approval.request.digest.clone());
        Self { id, digest, is_granted: false, is_used: false, standing_id: None, replaced_by: None }
    }

    /// Creates the approval that a standing approval gives a call.
    pub fn from_standing(standing: &StandingApproval) -> Self {
        Self {
            id: standing.approval_id.clone(),
            digest: standing.digest.clone(),
            is_granted: true,
            is_used: false,
            standing_id: Some(standing.id.clone()),
            replaced_by: None,
        }
    }
}

/// A change of an approval that belongs in the same commit as a change of its call.
#[derive(Debug, Clone, PartialEq)]
pub enum ApprovalChange {
    /// A new approval is requested.
    Request(Box<Approval>),
    /// An approval ends. It was pending, or was given and is superseded.
    End {
        /// Id of the approval.
        id: String,
        /// Status that it has from now on.
        status: ApprovalStatus,
        /// The decision. If the approval has a stored decision, that one stays.
        decision: Box<ApprovalDecision>,
    },
}

/// Computes the digest that an approval is bound to. `rule` is the content of the rule that asks.
pub fn binding_digest(target: &Target, rule_id: &str, rule: &str) -> String {
    let args = target.args.canonical_text();
    let mut hash = Sha256::new();
    for part in [target.tool.as_str(), &target.version, &args, rule_id, rule] {
        // The length keeps the parts apart.
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part.as_bytes());
    }
    hex(&hash.finalize())
}

impl Call {
    /// Returns true if the call waits for an approval.
    pub fn waits_for_approval(&self) -> bool {
        matches!(self.hold, Some(super::Hold::Approval { .. }))
    }

    /// Returns the id of the approval that the call waits for.
    pub fn pending_approval(&self) -> Option<&str> {
        let approval = self.approval.as_ref().filter(|_| self.waits_for_approval());
        approval.map(|approval| approval.id.as_str())
    }

    /// Returns the call that executes this one with other arguments.
    pub fn replaced_by(&self) -> Option<&CallId> {
        self.approval.as_ref()?.replaced_by.as_ref()
    }

    /// Returns the call whose end this call waits for or waited for: its replacement, or its
    /// predecessor.
    pub fn awaited_call(&self) -> Option<&CallId> {
        self.replaced_by().or(self.origin.predecessor.as_ref())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::domain::tool::{Effect, Executor};

    fn target(tool: &str, version: &str, args: &str) -> Target {
        Target {
            tool: tool.into(),
            version: version.into(),
            executor: Executor::BUILTIN,
            traits: Executor::BUILTIN.traits(),
            effect: Effect::Irreversible,
            after_execution: None,
            args: Json::parse(args).unwrap(),
        }
    }

    #[test]
    fn a_digest_binds_tool_version_arguments_and_rule() {
        let base = binding_digest(&target("t", "1", r#"{"a":1,"b":2}"#), "r", "{}");
        let same = binding_digest(&target("t", "1", r#"{ "b": 2, "a": 1 }"#), "r", "{}");
        assert_eq!(base, same, "the order of keys does not matter");
        for other in [
            binding_digest(&target("u", "1", r#"{"a":1,"b":2}"#), "r", "{}"),
            binding_digest(&target("t", "2", r#"{"a":1,"b":2}"#), "r", "{}"),
            binding_digest(&target("t", "1", r#"{"a":1,"b":3}"#), "r", "{}"),
            binding_digest(&target("t", "1", r#"{"a":1,"b":2}"#), "s", "{}"),
            binding_digest(&target("t", "1", r#"{"a":1,"b":2}"#), "r", "{ }"),
        ] {
            assert_ne!(base, other);
        }
    }

    #[test]
    fn a_standing_approval_covers_no_other_requester_run_or_digest() {
        let of = |agent: &str, user: Option<&str>| ApprovalRequester {
            agent: agent.into(),
            attributes: CallerAttributes {
                user: user.map(str::to_owned),
                ..CallerAttributes::default()
            },
        };
        let standing = StandingApproval {
            id: "sap_1".into(),
            project: "p".into(),
            approval_id: "apr_1".into(),
            tool: "t".into(),
            args: Json::empty_object(),
            digest: "d".into(),
            rule_id: "r".into(),
            requester: of("ada", Some("eve")),
            scope: ApprovalScope::Run,
            run_id: Some("run_1".into()),
            ends_with_run: false,
            expires_ms: 100,
            granted_by: "bob".into(),
            granted_ms: 1,
            revoked_ms: None,
            revoked_by: None,
        };
        assert!(standing.covers(&of("ada", Some("eve")), "run_1", "d"));
        assert!(!standing.covers(&of("bob", Some("eve")), "run_1", "d"));
        assert!(!standing.covers(&of("ada", None), "run_1", "d"));
        assert!(!standing.covers(&of("ada", Some("eve")), "run_2", "d"));
        assert!(!standing.covers(&of("ada", Some("eve")), "run_1", "e"));
        assert!(standing.is_active(99) && !standing.is_active(100));
        assert!(!StandingApproval { revoked_ms: Some(5), ..standing }.is_active(50));
    }

    #[test]
    fn a_standing_approval_that_was_stored_without_a_scope_gets_one() {
        let row = |run_id: &str| {
            let text = format!(
                r#"{{"id": "sap_1", "project": "p", "approval_id": "apr_1", "tool": "t",
                "args": {{}}, "digest": "d", "rule_id": "r", "requester": {{"agent": "ada"}},
                {run_id} "expires_ms": 9000000000000, "granted_by": "bob", "granted_ms": 5}}"#
            );
            serde_json::from_str::<StandingApproval>(&text).unwrap().normalized()
        };
        let of_run = row(r#""run_id": "run_1","#);
        assert_eq!((of_run.scope, of_run.expires_ms), (ApprovalScope::Run, 5 + UNOBSERVED_RUN_MS));
        let until = row("");
        assert_eq!((until.scope, until.expires_ms), (ApprovalScope::Until, 9_000_000_000_000));
        let stored: StandingApproval =
            serde_json::from_str(&serde_json::to_string(&of_run).unwrap()).unwrap();
        assert_eq!(stored.clone().normalized(), stored);
    }
}
