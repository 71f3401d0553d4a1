//! Rehearses a proposed set of rules: decides the recorded calls again and lists the differences.

use std::collections::BTreeMap;

use crate::domain::access_rules::{AccessDecision, AccessRule, RuleAction};
use crate::domain::call::Call;
use crate::domain::caller::Caller;
use crate::domain::fault::Error;
use crate::domain::tool::Executor;
use crate::ports::core::from_store_error;
use crate::ports::store::CallFilter;
use crate::registry::Admin;
use crate::registry::authorize::{AccessRequest, decide};
use crate::registry::catalog::Catalog;
use crate::registry::catalog::rule_index::ProjectRuleIndex;
use crate::registry::catalog::rule_index::compiled_rule::ToolProperties;

/// Maximum number of calls, and their size in bytes, that are read at a time.
const PAGE_CALLS: usize = 1_000;
const PAGE_BYTES: usize = 16 << 20;
/// Maximum number of different changes in a report.
const MAX_CHANGES: usize = 1_000;

/// The result of rehearsing a set of rules.
#[derive(Debug, Clone, Default)]
pub struct Rehearsal {
    /// Number of recorded calls that were decided again.
    pub calls: u64,
    /// Number of them that would be decided differently.
    pub changed: u64,
    /// The differences, the most frequent first.
    pub changes: Vec<RehearsedChange>,
    /// True if there are more differences than listed.
    pub truncated: bool,
}

/// A difference, for all calls of one agent and tool.
#[derive(Debug, Clone)]
pub struct RehearsedChange {
    /// Name of the tool.
    pub tool: String,
    /// Agent that made the calls.
    pub agent: String,
    /// Decision of the present rules: `allow`, `ask` or `deny`.
    pub before: &'static str,
    /// Decision of the proposed rules.
    pub after: &'static str,
    /// The rule that decides in the proposed set.
    pub rule_id: Option<String>,
    /// Number of calls.
    pub calls: u64,
    /// Id of the newest of these calls.
    pub example: String,
}

type ChangeKey = (String, String, &'static str, &'static str, Option<String>);

impl Admin {
    /// Decides the calls of the last `days` days again, by the present rules and by the proposed
    /// ones. Changes nothing.
    pub async fn rehearse_rules(
        &self,
        caller: &Caller,
        proposed: Vec<AccessRule>,
        days: u32,
    ) -> Result<Rehearsal, Error> {
        self.rules(caller)?;
        super::check_count(proposed.len())?;
        let catalog = self.registry.catalog();
        super::check_against_tools(&catalog, &proposed, "/rules")?;
        let proposed = ProjectRuleIndex::new(proposed, None);
        let span_ms = u64::from(days) * 24 * 3_600_000;
        let mut filter = CallFilter {
            project: caller.project.clone(),
            since_ms: Some(self.core.clock.wall_ms().saturating_sub(span_ms)),
            limit: PAGE_CALLS,
            max_bytes: Some(PAGE_BYTES),
            ..CallFilter::default()
        };
        let mut result = Rehearsal::default();
        let mut changes: BTreeMap<ChangeKey, (u64, String)> = BTreeMap::new();
        loop {
            let page = self.core.store.calls(filter.clone()).await.map_err(from_store_error)?;
            let bytes: usize = page.iter().map(Call::estimated_bytes).sum();
            let is_last = page.len() < filter.limit && !filter.is_page_full(bytes);
            for call in &page {
                let Some((before, after)) = decide_again(&catalog, &proposed, call) else {
                    continue;
                };
                result.calls += 1;
                let words = (word(&before), word(&after));
                if words.0 == words.1 {
                    continue;
                }
                result.changed += 1;
                let rule_id = after.rule_id().map(str::to_owned);
                let (tool, agent) = (call.tool_name.clone(), call.origin.agent.clone());
                let key = (tool, agent, words.0, words.1, rule_id);
                let count = changes.entry(key).or_insert_with(|| (0, call.id.to_string()));
                count.0 += 1;
            }
            filter.before = page.last().map(|call| call.id.clone());
            if is_last || filter.before.is_none() {
                break;
            }
            // Deciding a page takes milliseconds; other tasks go on in between.
            tokio::task::yield_now().await;
        }
        let mut listed: Vec<RehearsedChange> = changes.into_iter().map(to_change).collect();
        listed.sort_by_key(|change| std::cmp::Reverse(change.calls));
        result.truncated = listed.len() > MAX_CHANGES;
        listed.truncate(MAX_CHANGES);
        Ok(Rehearsal { changes: listed, ..result })
    }
}

fn to_change((key, (calls, example)): (ChangeKey, (u64, String))) -> RehearsedChange {
    let (tool, agent, before, after, rule_id) = key;
    RehearsedChange { tool, agent, before, after, rule_id, calls, example }
}

fn word(decision: &AccessDecision) -> &'static str {
    match decision {
        AccessDecision::Allowed => "allow",
        AccessDecision::Ask(_) => "ask",
        AccessDecision::Denied(_) => "deny",
    }
}

/// Decides a recorded call by the present and by the proposed rules. `None` if rules do not concern
/// it.
fn decide_again(
    catalog: &Catalog,
    proposed: &ProjectRuleIndex,
    call: &Call,
) -> Option<(AccessDecision, AccessDecision)> {
    let caller = call.caller();
    if caller.is_exempt_from_rules() || call.target.executor == Executor::CALLER {
        return None;
    }
    let entry = catalog.find(&call.project, &call.tool_name);
    let properties = entry.as_deref().map_or(ToolProperties::Unknown, ToolProperties::Known);
    // The arguments of a fallback are not those of the requested tool.
    let is_fallback = call.target.tool != call.tool_name;
    let request = AccessRequest {
        args: Some(if is_fallback { &call.args } else { &call.target.args }),
        run_id: Some(&call.run_id),
        now_ms: call.created_ms,
        ..AccessRequest::named(&call.tool_name)
    };
    let present = catalog.rules.project(&call.project).map(AsRef::as_ref);
    let by = |rules| {
        let input = catalog.rule_input(&caller, RuleAction::Invoke, &request, properties);
        decide(rules, input, catalog.is_companion(&call.tool_name))
    };
    Some((by(present), by(Some(proposed))))
}
