//! Explains a decision: the rule that decides, and every rule that was considered.

use std::sync::Arc;

use crate::domain::access_rules::{AccessDecision, RuleAction, RuleVerdict};
use crate::domain::caller::{AuthMethod, Caller, CallerAttributes, Role, RoleSet};
use crate::domain::fault::Error;
use crate::domain::json::Json;
use crate::registry::Admin;
use crate::registry::authorize::AccessRequest;
use crate::registry::catalog::rule_index::compiled_rule::{RuleCheck, RuleMatch, ToolProperties};

/// A request to explain.
#[derive(Debug, Clone)]
pub struct ExplainRequest {
    /// Agent of the imagined caller.
    pub agent: String,
    /// Roles of the imagined caller; empty: agent.
    pub roles: RoleSet,
    /// Groups of the imagined caller.
    pub groups: Vec<String>,
    /// User that the imagined caller acts for.
    pub user: Option<String>,
    /// Session that the imagined caller asserts.
    pub session: Option<String>,
    /// Environment of the imagined caller.
    pub environment: Option<String>,
    /// Run of the imagined call.
    pub run_id: Option<String>,
    /// Name of the tool.
    pub tool: String,
    /// Arguments of the imagined call; `None` leaves conditions on arguments open.
    pub args: Option<Json>,
    /// The operation.
    pub action: RuleAction,
}

/// The explanation of a decision.
#[derive(Debug, Clone)]
pub struct Explanation {
    /// `allow`, `ask` or `deny`.
    pub decision: &'static str,
    /// Id of the rule that decides; `None` if none does.
    pub rule_id: Option<String>,
    /// The reason in words.
    pub reason: String,
    /// The rules on this action and tool, in the order of precedence.
    pub considered: Vec<ConsideredRule>,
}

/// One rule that was considered.
#[derive(Debug, Clone)]
pub struct ConsideredRule {
    /// Id of the rule.
    pub rule_id: String,
    /// Verdict of the rule.
    pub verdict: RuleVerdict,
    /// True if the rule matches.
    pub matches: bool,
    /// The condition that is not met, or the reason of a failure.
    pub reason: String,
}

impl Admin {
    /// Explains the decision about an imagined request in the caller's project.
    pub async fn explain_rules(
        &self,
        caller: &Caller,
        request: ExplainRequest,
    ) -> Result<Explanation, Error> {
        self.rules(caller)?;
        let ExplainRequest { agent, roles, groups, user, session, environment, .. } =
            request.clone();
        let roles = if roles.is_empty() { RoleSet::from(Role::Agent) } else { roles };
        let attributes =
            CallerAttributes { groups, user, session, environment, ..Default::default() };
        let imagined = match self.registry.credentials.has_keys() {
            true => Caller::new(&caller.project, agent, roles, AuthMethod::Key),
            // Without keys, every caller is anonymous.
            false => Caller { agent, ..Caller::anonymous(&caller.project) },
        };
        let imagined = Caller { attributes: Arc::new(attributes), ..imagined };
        let catalog = self.registry.catalog();
        let found = catalog.resolve(&imagined, &request.tool);
        let args = match (&found, &request.args) {
            (Some(entry), Some(args)) => {
                entry.prepare_input().await;
                let filled = entry.input_schema.with_defaults(args, usize::MAX).ok().flatten();
                Some(filled.unwrap_or_else(|| args.clone()))
            }
            (_, args) => args.clone(),
        };
        let tool = found.as_ref().map_or(request.tool.as_str(), |entry| &entry.definition.name);
        let access = AccessRequest {
            entry: found.as_deref(),
            args: args.as_ref(),
            run_id: request.run_id.as_deref(),
            ..AccessRequest::named(tool)
        };
        let decision = catalog.authorize(&imagined, request.action, &access);
        let properties = found.as_deref().map_or(ToolProperties::Unknown, ToolProperties::Known);
        let input = catalog.rule_input(&imagined, request.action, &access, properties);
        let check = RuleCheck::new(input);
        let rules = catalog.rules.project(&caller.project);
        let considered = rules.map(|rules| rules.consider(&check)).unwrap_or_default();
        let allowing = considered.iter().find(|(rule, result)| {
            let met = matches!(result, RuleMatch::Yes | RuleMatch::UnlessArguments);
            rule.rule.verdict == RuleVerdict::Allow && met
        });
        let allowed_by = allowing.map(|(rule, _)| rule.rule.id.clone());
        let (word, rule_id, reason) = match decision {
            AccessDecision::Allowed => {
                let reason = match &allowed_by {
                    Some(id) => format!("rule \"{id}\" allows it"),
                    None => "no rule denies it, and this caller needs none that allows".to_owned(),
                };
                ("allow", allowed_by, reason)
            }
            AccessDecision::Ask(ask) => ("ask", Some(ask.rule_id), ask.reason),
            AccessDecision::Denied(denial) => ("deny", denial.rule_id, denial.reason),
        };
        let considered = considered.into_iter().map(|(rule, result)| ConsideredRule {
            rule_id: rule.rule.id.clone(),
            verdict: rule.rule.verdict,
            matches: !matches!(result, RuleMatch::No(_)),
            reason: match result {
                RuleMatch::Yes => "it matches".to_owned(),
                RuleMatch::UnlessArguments => "it depends on the arguments".to_owned(),
                RuleMatch::No(field) => format!("{field} does not match"),
                RuleMatch::Failed(reason) => format!("its condition failed: {reason}"),
            },
        });
        Ok(Explanation { decision: word, rule_id, reason, considered: considered.collect() })
    }
}
