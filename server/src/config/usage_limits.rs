//! Usage limits of the configuration: `[limits.agent.NAME]`, `[limits.user.NAME]`,
//! `[limits.tool."NAME"]`, `[limits.project.NAME]`.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::Deserialize;
use toolcrib::domain::directory::usage_limits::{ConfiguredLimit, LimitKind, LimitValues};

use super::{ConfigError, LimitSettings};

/// Usage limits by name; `*` is for each member without a value of its own.
pub type UsageLimitsByName = BTreeMap<String, UsageLimitSettings>;

/// A limit on the calls of one agent, user, tool or project. It holds in every project, in addition
/// to the limits that are set over the API.
#[derive(Debug, Clone, Default, PartialEq, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct UsageLimitSettings {
    /// Maximum number of calls in any 60 seconds.
    pub per_minute: Option<u32>,
    /// Maximum number of calls without an outcome.
    pub max_open: Option<u32>,
    /// Maximum number of attempts in flight; further calls are queued.
    pub max_parallel: Option<u32>,
}

impl LimitSettings {
    fn usage_limits(&self) -> [(LimitKind, &UsageLimitsByName); 4] {
        [
            (LimitKind::Agent, &self.agent),
            (LimitKind::User, &self.user),
            (LimitKind::Tool, &self.tool),
            (LimitKind::Project, &self.project),
        ]
    }

    /// Returns the usage limits for the engine.
    pub fn configured_limits(&self) -> Vec<ConfiguredLimit> {
        let all = self.usage_limits().into_iter();
        let limits = all.flat_map(|(kind, limits)| {
            limits.iter().map(move |(name, limit)| {
                let UsageLimitSettings { per_minute, max_open, max_parallel } = *limit;
                let values = LimitValues { per_minute, max_open, max_parallel };
                ConfiguredLimit { kind, name: name.clone(), values }
            })
        });
        limits.collect()
    }

    pub(super) fn check_usage_limits(&self) -> Result<(), ConfigError> {
        for (kind, limits) in self.usage_limits() {
            for (name, limit) in limits {
                let key = format!("limits.{}.\"{name}\"", kind.as_str());
                let values = [
                    ("per_minute", limit.per_minute),
                    ("max_open", limit.max_open),
                    ("max_parallel", limit.max_parallel),
                ];
                if name != "*" && name.contains('*') {
                    let reason = "must be one name, or * for each without a value of its own";
                    return Err(ConfigError::invalid(&key, reason));
                }
                for (field, value) in values {
                    if value == Some(0) {
                        let reason = "must be at least 1; a switch stops calls altogether";
                        return Err(ConfigError::invalid(&format!("{key}.{field}"), reason));
                    }
                }
            }
        }
        Ok(())
    }
}
