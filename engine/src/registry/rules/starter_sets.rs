//! Three sets of rules to start with.

use crate::domain::access_rules::{AccessRule, RuleVerdict};
use crate::domain::tool::{Effect, Risk};

/// Names of the starter sets.
pub const STARTER_SETS: [&str; 3] = ["open", "ask-before-writes", "locked-down"];

/// Returns the rules of a starter set.
pub fn starter_set(project: &str, name: &str) -> Option<Vec<AccessRule>> {
    let rule = |id: &str, verdict, note: &str| AccessRule {
        note: note.to_owned(),
        ..AccessRule::new(project, id, verdict)
    };
    let (allow, ask, deny) = (RuleVerdict::Allow, RuleVerdict::Ask, RuleVerdict::Deny);
    match name {
        "open" => Some(vec![rule("open", allow, "every agent may call every tool")]),
        "ask-before-writes" => Some(vec![
            rule("allow-all", allow, "every agent may call every tool"),
            AccessRule {
                effects: vec![Effect::Idempotent, Effect::Irreversible],
                ..rule("ask-before-writes", ask, "a tool that changes something needs an approval")
            },
        ]),
        "locked-down" => Some(vec![
            AccessRule {
                effects: vec![Effect::Read],
                ..rule("allow-reads", allow, "tools that only read")
            },
            AccessRule {
                effects: vec![Effect::Idempotent, Effect::Irreversible],
                ..rule("ask-before-writes", ask, "a tool that changes something needs an approval")
            },
            AccessRule {
                risk_min: Some(Risk::Critical),
                ..rule("deny-critical", deny, "no agent calls a tool of critical risk")
            },
        ]),
        _ => None,
    }
}
