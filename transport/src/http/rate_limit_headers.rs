//! The header fields `RateLimit-Policy` and `RateLimit` (draft-ietf-httpapi-ratelimit-headers):
//! the usage limits that apply to a caller, and what is left of them.

use axum::http::{HeaderName, HeaderValue};
use axum::response::Response;
use toolcrib::calls::LimitStatus;
use toolcrib::domain::directory::usage_limits::LimitKind;
use toolcrib::{Caller, Engine};

const RATE_LIMIT_POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");
const RATE_LIMIT: HeaderName = HeaderName::from_static("ratelimit");

/// Adds the limits of the caller and of these tools to a response. Without limits, adds nothing.
pub(super) fn set_rate_limit_headers<'a>(
    response: &mut Response,
    engine: &Engine,
    caller: &Caller,
    tools: impl Iterator<Item = &'a str>,
) {
    let statuses = engine.calls().limit_statuses(caller, tools);
    if statuses.is_empty() {
        return;
    }
    let (policy, left) = format_headers(&tightest_per_policy(statuses));
    for (name, text) in [(RATE_LIMIT_POLICY, policy), (RATE_LIMIT, left)] {
        if let Ok(value) = HeaderValue::from_str(&text) {
            response.headers_mut().insert(name, value);
        }
    }
}

/// Keeps one limit per policy: of several tools, the one with the fewest calls left.
fn tightest_per_policy(statuses: Vec<LimitStatus>) -> Vec<LimitStatus> {
    let mut kept: Vec<LimitStatus> = Vec::new();
    for status in statuses {
        let same = |other: &&mut LimitStatus| policy_name(other) == policy_name(&status);
        match kept.iter_mut().find(same) {
            Some(other) if other.remaining <= status.remaining => {}
            Some(other) => *other = status,
            None => kept.push(status),
        }
    }
    kept
}

fn policy_name(status: &LimitStatus) -> &'static str {
    match (status.member.kind, status.window_s) {
        (LimitKind::Agent, Some(_)) => "agent",
        (LimitKind::User, Some(_)) => "user",
        (LimitKind::Tool, Some(_)) => "tool",
        (LimitKind::Project, Some(_)) => "project",
        (LimitKind::Agent, None) => "agent-open",
        (LimitKind::User, None) => "user-open",
        (LimitKind::Tool, None) => "tool-open",
        (LimitKind::Project, None) => "project-open",
    }
}

/// Returns the values of both fields: lists of structured fields (RFC 9651).
fn format_headers(statuses: &[LimitStatus]) -> (String, String) {
    let (mut policies, mut left) = (Vec::new(), Vec::new());
    for status in statuses {
        let (name, quota) = (policy_name(status), status.quota);
        policies.push(match status.window_s {
            Some(window_s) => format!("\"{name}\";q={quota};w={window_s}"),
            None => format!("\"{name}\";q={quota};qu=\"concurrent-requests\""),
        });
        let reset = status.reset_s.map(|reset_s| format!(";t={reset_s}")).unwrap_or_default();
        left.push(format!("\"{name}\";r={}{reset}", status.remaining));
    }
    (policies.join(", "), left.join(", "))
}

#[cfg(test)]
mod tests {
    use toolcrib::domain::directory::usage_limits::LimitMember;

    use super::*;

    #[test]
    fn limits_are_written_as_structured_fields() {
        let status = |kind, name: &str, window_s, remaining, reset_s| LimitStatus {
            member: LimitMember { kind, project: "p".into(), name: name.into() },
            quota: 60,
            window_s,
            remaining,
            reset_s,
        };
        let statuses = vec![
            status(LimitKind::Agent, "ada", Some(60), 12, Some(48)),
            status(LimitKind::Agent, "ada", None, 3, None),
            status(LimitKind::Tool, "a", Some(60), 7, None),
            status(LimitKind::Tool, "b", Some(60), 0, Some(9)),
        ];
        let (policy, left) = format_headers(&tightest_per_policy(statuses));
        let open = "\"agent-open\";q=60;qu=\"concurrent-requests\"";
        assert_eq!(policy, format!("\"agent\";q=60;w=60, {open}, \"tool\";q=60;w=60"));
        assert_eq!(left, "\"agent\";r=12;t=48, \"agent-open\";r=3, \"tool\";r=0;t=9");
    }
}
