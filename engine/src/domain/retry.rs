//! Execution policies: concurrency limits, timeouts, retries, backoff. Pure.
//!
//! A policy combines the global one, the project's and the tool's; the more specific one wins field
//! by field. Each call stores the policy it was accepted with.

use serde::{Deserialize, Serialize};

/// Range of a call's timeout.
pub const TIMEOUT_MS_RANGE: std::ops::RangeInclusive<u64> = 1..=86_400_000;

/// Maximum number of retries that a policy may set.
pub const MAX_RETRIES_LIMIT: u32 = 100;

/// Time that a call waits for the answers to its tool's elicitation, if nothing sets another.
pub const DEFAULT_INPUT_TIMEOUT_MS: u64 = 3_600_000;

/// Limits and retries of a tool's calls.
#[derive(Debug, Clone, PartialEq)]
pub struct ExecutionPolicy {
    /// Maximum number of concurrent calls; `None` means no limit at this level.
    pub max_parallel: Option<u32>,
    /// Default time from acceptance of a call to its outcome.
    pub default_timeout_ms: u64,
    /// Time limit of each attempt; `None` divides the remaining time by the remaining attempts.
    pub attempt_timeout_ms: Option<u64>,
    /// Time that a call waits for the answers to its tool's elicitation. It does not count against
    /// the timeout of the call.
    pub input_timeout_ms: u64,
    /// Maximum number of attempts after the first.
    pub max_retries: u32,
    /// Delays between attempts.
    pub backoff: Backoff,
    /// True if a repeated request joins an earlier call whose answer was not delivered.
    pub rejoin: bool,
    /// Maximum age of a call that a repeated request joins.
    pub rejoin_window_ms: u64,
    /// Time between the disconnect of a requester and the cancellation of its call.
    pub disconnect_grace_ms: u64,
}

impl Default for ExecutionPolicy {
    fn default() -> Self {
        Self {
            max_parallel: Some(256),
            default_timeout_ms: 30_000,
            attempt_timeout_ms: None,
            input_timeout_ms: DEFAULT_INPUT_TIMEOUT_MS,
            max_retries: 2,
            backoff: Backoff::default(),
            rejoin: true,
            rejoin_window_ms: 600_000,
            disconnect_grace_ms: 30_000,
        }
    }
}

/// The fields of a policy that one level sets.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ExecutionPolicyPatch {
    /// Maximum number of concurrent calls at this level, from 1; `None` sets no limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_parallel: Option<u32>,
    /// Default time from acceptance to outcome, in milliseconds; `None` inherits it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub default_timeout_ms: Option<u64>,
    /// Time limit of each attempt, in milliseconds; `None` inherits it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attempt_timeout_ms: Option<u64>,
    /// Time that a call waits for input, in milliseconds; `None` inherits it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub input_timeout_ms: Option<u64>,
    /// Maximum number of attempts after the first, from 0 to 100; `None` inherits it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_retries: Option<u32>,
    /// Delays between attempts; `None` inherits all of them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub backoff: Option<Backoff>,
    /// False if a repeated request never joins an earlier call; `None` inherits it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rejoin: Option<bool>,
    /// Maximum age of a call that a repeated request joins, up to a day; `None` inherits it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rejoin_window_ms: Option<u64>,
    /// Time from a disconnect to the cancellation of the call, up to a day; `None` inherits it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disconnect_grace_ms: Option<u64>,
}

impl ExecutionPolicyPatch {
    /// Returns the first invalid field as a message, if any.
    pub fn find_problem(&self) -> Option<String> {
        if self.max_parallel == Some(0) {
            return Some("max_parallel must be at least 1".into());
        }
        let timeouts = [
            ("default_timeout_ms", self.default_timeout_ms),
            ("attempt_timeout_ms", self.attempt_timeout_ms),
            ("input_timeout_ms", self.input_timeout_ms),
        ];
        let is_invalid = |ms: Option<u64>| ms.is_some_and(|ms| !TIMEOUT_MS_RANGE.contains(&ms));
        if let Some((field, _)) = timeouts.into_iter().find(|(_, ms)| is_invalid(*ms)) {
            return Some(format!("{field} must be from 1 to 86400000"));
        }
        if self.max_retries.is_some_and(|retries| retries > MAX_RETRIES_LIMIT) {
            return Some(format!("max_retries must be from 0 to {MAX_RETRIES_LIMIT}"));
        }
        for (field, ms) in [
            ("rejoin_window_ms", self.rejoin_window_ms),
            ("disconnect_grace_ms", self.disconnect_grace_ms),
        ] {
            if ms.is_some_and(|ms| ms > *TIMEOUT_MS_RANGE.end()) {
                return Some(format!("{field} must be from 0 to 86400000"));
            }
        }
        let backoff = self.backoff.as_ref()?;
        if !(1.0..=100.0).contains(&backoff.factor) {
            return Some("backoff.factor must be from 1 to 100".into());
        }
        (!(0.0..=1.0).contains(&backoff.jitter))
            .then(|| "backoff.jitter must be from 0 to 1".into())
    }
}

impl ExecutionPolicy {
    /// Returns this policy with a more specific one applied to it. `max_parallel` is not inherited:
    /// each level has its own limit, and all of them apply.
    pub fn with_patch(&self, patch: &ExecutionPolicyPatch) -> Self {
        Self {
            max_parallel: patch.max_parallel,
            default_timeout_ms: patch.default_timeout_ms.unwrap_or(self.default_timeout_ms),
            attempt_timeout_ms: patch.attempt_timeout_ms.or(self.attempt_timeout_ms),
            input_timeout_ms: patch.input_timeout_ms.unwrap_or(self.input_timeout_ms),
            max_retries: patch.max_retries.unwrap_or(self.max_retries),
            backoff: patch.backoff.clone().unwrap_or_else(|| self.backoff.clone()),
            rejoin: patch.rejoin.unwrap_or(self.rejoin),
            rejoin_window_ms: patch.rejoin_window_ms.unwrap_or(self.rejoin_window_ms),
            disconnect_grace_ms: patch.disconnect_grace_ms.unwrap_or(self.disconnect_grace_ms),
        }
    }
}

/// Delay before the next attempt.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Backoff {
    /// Delay after the first failed attempt, in milliseconds.
    pub initial_ms: u64,
    /// Factor by which the delay grows with each further attempt, from 1 to 100.
    pub factor: f64,
    /// Maximum delay, in milliseconds.
    pub max_ms: u64,
    /// Random part of the delay, as a fraction from 0 to 1.
    pub jitter: f64,
}

impl Default for Backoff {
    fn default() -> Self {
        Self { initial_ms: 200, factor: 2.0, max_ms: 30_000, jitter: 0.5 }
    }
}

impl Backoff {
    /// Returns the delay after this many attempts. The jitter comes from `seed` (the call's id), so
    /// that deciding stays a pure function and many calls still spread out.
    pub fn wait_ms(&self, attempts: u32, seed: &str) -> u64 {
        let exponent = attempts.saturating_sub(1).min(64);
        let full = (self.initial_ms as f64) * self.factor.powi(exponent as i32);
        let capped = full.min(self.max_ms as f64);
        let chance = seeded_fraction(seed, attempts);
        (capped * (1.0 - self.jitter * chance)).round() as u64
    }
}

/// Returns a number from 0 to 1 that depends only on the arguments (FNV-1a, then a mix).
pub(crate) fn seeded_fraction(seed: &str, salt: u32) -> f64 {
    let mut hash: u64 = 0xcbf2_9ce4_8422_2325 ^ u64::from(salt);
    for byte in seed.bytes() {
        hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    }
    hash ^= hash >> 33;
    hash = hash.wrapping_mul(0xff51_afd7_ed55_8ccd);
    hash ^= hash >> 33;
    (hash >> 11) as f64 / (1_u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_grow_to_the_maximum_with_jitter() {
        let backoff = Backoff { initial_ms: 100, factor: 2.0, max_ms: 1_000, jitter: 0.0 };
        let waits: Vec<u64> = (1..6).map(|n| backoff.wait_ms(n, "tc_a")).collect();
        assert_eq!(waits, [100, 200, 400, 800, 1_000]);
        let spread = Backoff { jitter: 0.5, ..backoff };
        let some: std::collections::HashSet<u64> =
            (0..100).map(|n| spread.wait_ms(3, &format!("tc_{n}"))).collect();
        assert!(some.len() > 50, "jitter spreads: {some:?}");
        assert!(some.iter().all(|wait| (200..=400).contains(wait)));
    }

    #[test]
    fn a_patch_overrides_a_policy_field_by_field() {
        let global = ExecutionPolicy::default();
        let patch =
            ExecutionPolicyPatch { max_retries: Some(7), ..ExecutionPolicyPatch::default() };
        let policy = global.with_patch(&patch);
        assert_eq!((policy.max_retries, policy.default_timeout_ms), (7, 30_000));
        assert_eq!(policy.max_parallel, None);
    }

    #[test]
    fn an_invalid_policy_is_reported_with_its_field() {
        let zero =
            ExecutionPolicyPatch { max_parallel: Some(0), ..ExecutionPolicyPatch::default() };
        assert!(zero.find_problem().unwrap().contains("max_parallel"));
        let long = ExecutionPolicyPatch {
            default_timeout_ms: Some(86_400_001),
            ..ExecutionPolicyPatch::default()
        };
        assert!(long.find_problem().unwrap().contains("default_timeout_ms"));
        assert_eq!(ExecutionPolicyPatch::default().find_problem(), None);
    }
}
