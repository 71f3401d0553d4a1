//! The written form of requests about rules and of their results: explain, lint, rehearse and
//! versions. HTTP and the command line share it.

use serde_json::{Map, Value, json};

use super::document::{invalid_at, parse_rule_set, render_rule, unknown_field};
use super::{ExplainRequest, Explanation, Rehearsal, RuleFinding, RuleSet};
use crate::domain::access_rules::{AccessRule, RuleAction, RuleSetVersion};
use crate::domain::caller::{Role, RoleSet};
use crate::domain::fault::Error;
use crate::domain::json::Json;

const EXPLAIN_FIELDS: [&str; 10] = [
    "agent",
    "user",
    "session",
    "environment",
    "groups",
    "roles",
    "run_id",
    "tool",
    "args",
    "action",
];
/// Number of days of a rehearsal that names none, and the maximum.
const REHEARSAL_DAYS: (u32, u32) = (7, 366);

/// Reads a request to explain a decision.
///
/// # Errors
///
/// Refuses unknown fields and wrong values, with their position.
pub fn parse_explain_request(value: &Value) -> Result<ExplainRequest, Error> {
    let fields = object(value, &EXPLAIN_FIELDS)?;
    let text = |field: &str| match fields.get(field) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.clone())),
        Some(_) => Err(invalid_at(&format!("/{field}"), "this is a text")),
    };
    let texts = |field: &str| match fields.get(field) {
        None | Some(Value::Null) => Ok(Vec::new()),
        Some(value) => serde_json::from_value::<Vec<String>>(value.clone())
            .map_err(|_| invalid_at(&format!("/{field}"), "this is a list of texts")),
    };
    let required = |field: &str| {
        text(field)?.ok_or_else(|| invalid_at(&format!("/{field}"), "this field is needed"))
    };
    let roles: Result<RoleSet, Error> =
        texts("roles")?.iter().map(|role| role.parse::<Role>()).collect::<Result<_, ()>>().map_err(
            |()| invalid_at("/roles", "the roles are agent, provider, approver, auditor, admin"),
        );
    let action = match text("action")? {
        None => RuleAction::Invoke,
        Some(word) => RuleAction::parse(&word).ok_or_else(|| {
            let names = RuleAction::ALL.map(RuleAction::as_str).join(", ");
            invalid_at("/action", format!("the actions are {names}"))
        })?,
    };
    let args = fields.get("args").filter(|args| !args.is_null());
    Ok(ExplainRequest {
        agent: required("agent")?,
        roles: roles?,
        groups: texts("groups")?,
        user: text("user")?,
        session: text("session")?,
        environment: text("environment")?,
        run_id: text("run_id")?,
        tool: required("tool")?,
        args: args.map(Json::from_value),
        action,
    })
}

/// Reads a request to rehearse rules: the rules, and the number of days.
///
/// # Errors
///
/// Refuses unknown fields and wrong values, with their position.
pub fn parse_rehearsal(project: &str, value: &Value) -> Result<(Vec<AccessRule>, u32), Error> {
    let fields = object(value, &["rules", "days"])?;
    let rules = json!({ "rules": fields.get("rules") });
    let (default, max) = REHEARSAL_DAYS;
    let days = match fields.get("days") {
        None | Some(Value::Null) => Some(default),
        Some(days) => days.as_u64().and_then(|days| u32::try_from(days).ok()),
    };
    let days = days.filter(|days| (1..=max).contains(days));
    let days = days.ok_or_else(|| invalid_at("/days", format!("days must be from 1 to {max}")))?;
    Ok((parse_rule_set(project, &rules)?, days))
}

/// Reads a request to lint: no field, or the rules to lint in place of the present ones.
///
/// # Errors
///
/// Refuses unknown fields and wrong rules, with their position.
pub fn parse_lint_request(project: &str, value: &Value) -> Result<Option<Vec<AccessRule>>, Error> {
    let fields = object(value, &["rules"])?;
    match fields.contains_key("rules") {
        true => parse_rule_set(project, value).map(Some),
        false => Ok(None),
    }
}

/// Reads a request to roll back: the number of the version.
///
/// # Errors
///
/// Refuses unknown fields and a wrong number, with their position.
pub fn parse_rollback(value: &Value) -> Result<u64, Error> {
    let fields = object(value, &["version"])?;
    let version = fields.get("version").and_then(Value::as_u64).filter(|version| *version > 0);
    version.ok_or_else(|| invalid_at("/version", "this is the number of a version, from 1"))
}

fn object<'v>(value: &'v Value, known: &[&str]) -> Result<&'v Map<String, Value>, Error> {
    let fields = value.as_object().ok_or_else(|| invalid_at("", "the body is an object"))?;
    match fields.keys().find(|name| !known.contains(&name.as_str())) {
        Some(name) => Err(unknown_field("", name, known)),
        None => Ok(fields),
    }
}

/// Writes the rules of a project with their version.
pub fn render_rule_set(set: &RuleSet) -> Value {
    let rules: Vec<Value> = set.rules.iter().map(render_rule).collect();
    json!({ "version": set.version, "rules": rules })
}

/// Writes the versions of a project's rules.
pub fn render_versions(versions: &[RuleSetVersion]) -> Value {
    let versions = versions.iter().map(|version| {
        json!({
            "version": version.version,
            "at_ms": version.at_ms,
            "agent": version.agent,
            "summary": version.summary,
        })
    });
    json!({ "versions": versions.collect::<Vec<Value>>() })
}

/// Writes an explanation.
pub fn render_explanation(explanation: &Explanation) -> Value {
    let considered = explanation.considered.iter().map(|rule| {
        json!({
            "rule_id": rule.rule_id,
            "verdict": rule.verdict.as_str(),
            "matches": rule.matches,
            "reason": rule.reason,
        })
    });
    json!({
        "decision": explanation.decision,
        "rule_id": explanation.rule_id,
        "reason": explanation.reason,
        "considered": considered.collect::<Vec<Value>>(),
    })
}

/// Writes the findings of lint.
pub fn render_findings(findings: &[RuleFinding]) -> Value {
    let findings = findings.iter().map(|finding| {
        json!({
            "rule_id": finding.rule_id,
            "kind": finding.kind,
            "message": finding.message,
            "shadowed_by": finding.shadowed_by,
        })
    });
    json!({ "findings": findings.collect::<Vec<Value>>() })
}

/// Writes the result of a rehearsal.
pub fn render_rehearsal(rehearsal: &Rehearsal) -> Value {
    let changes = rehearsal.changes.iter().map(|change| {
        json!({
            "tool": change.tool,
            "agent": change.agent,
            "before": change.before,
            "after": change.after,
            "rule_id": change.rule_id,
            "calls": change.calls,
            "example": change.example,
        })
    });
    json!({
        "calls": rehearsal.calls,
        "changed": rehearsal.changed,
        "changes": changes.collect::<Vec<Value>>(),
        "truncated": rehearsal.truncated,
    })
}
