//! Settings of webhooks.

use std::collections::BTreeMap;
use std::path::PathBuf;

use schemars::JsonSchema;
use serde::Deserialize;
use toolcrib::ports::webhook_sender::DeliverySettings;
use toolcrib_protocol::background_task::MAX_DATA_BYTES;
use toolcrib_protocol::secrets::SecretReference;

use super::ConfigError;

/// The prefix of every signing key.
pub const SIGNING_KEY_PREFIX: &str = "whsec_";

/// The longest wait in the retry schedule: a week in milliseconds.
const WEEK_MS: u64 = 604_800_000;
const MAX_RETRIES: usize = 50;

/// Webhooks that report finished calls (Standard Webhooks).
#[derive(Debug, Clone, PartialEq, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct WebhookSettings {
    /// Reference to the signing key: `env:NAME` or `file:/path`. It takes precedence over
    /// `signing_key_env` and `signing_key_file`.
    pub signing_key: Option<String>,
    /// The environment variable with the signing key (`whsec_…`). Several keys, separated by
    /// spaces, produce several signatures, for key rotation.
    pub signing_key_env: String,
    /// A file with the signing key. It takes precedence over the variable and is read for every
    /// delivery.
    pub signing_key_file: Option<PathBuf>,
    /// Signing key for one project: `[webhooks.projects.NAME]`.
    pub projects: BTreeMap<String, WebhookKeySettings>,
    /// Allows webhooks to private addresses.
    pub allow_private: bool,
    /// Hosts that may have private addresses: names, addresses, or `*.name`.
    pub allow_hosts: Vec<String>,
    /// Maximum time a receiver takes to respond.
    pub timeout_ms: u64,
    /// Waits after the first failure, after the second, and so on. After the last one the delivery
    /// is abandoned.
    pub retry_schedule_ms: Vec<u64>,
    /// Maximum random extension of a wait, as a share of its length from 0 to 1.
    pub jitter: f64,
    /// Maximum number of deliveries in flight.
    pub max_parallel: u32,
    /// Maximum number of deliveries in flight to one receiver (scheme, host and port).
    pub max_parallel_per_receiver: u32,
    /// Larger results are omitted, with a path to read them from.
    pub max_data_bytes: usize,
}

impl Default for WebhookSettings {
    fn default() -> Self {
        let notifying = DeliverySettings::default();
        Self {
            signing_key: None,
            signing_key_env: "TOOLCRIB_WEBHOOK_SIGNING_KEY".into(),
            signing_key_file: None,
            projects: BTreeMap::new(),
            allow_private: false,
            allow_hosts: Vec::new(),
            timeout_ms: 20_000,
            retry_schedule_ms: notifying.schedule.retry_ms,
            jitter: notifying.schedule.jitter,
            max_parallel: notifying.max_parallel as u32,
            max_parallel_per_receiver: notifying.max_parallel_per_receiver as u32,
            max_data_bytes: MAX_DATA_BYTES,
        }
    }
}

/// The signing key of one project.
#[derive(Debug, Clone, Default, PartialEq, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct WebhookKeySettings {
    /// Reference to the project's key: `env:NAME` or `file:/path`.
    pub signing_key: Option<String>,
    /// The environment variable with the project's key.
    pub signing_key_env: Option<String>,
    /// A file with the project's key.
    pub signing_key_file: Option<PathBuf>,
}

impl WebhookSettings {
    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        let invalid =
            |key: &str, reason: &str| Err(ConfigError::invalid(&format!("webhooks.{key}"), reason));
        let word = |name: &str| {
            let plain = |c: char| c.is_ascii_alphanumeric() || c == '_';
            !name.is_empty() && name.chars().all(plain) && !name.starts_with(SIGNING_KEY_PREFIX)
        };
        // Catches a key that was written here by mistake, before it appears in a log.
        let not_a_name = "must be the name of an environment variable, not the key itself";
        let is_reference = |text: &Option<String>| {
            text.as_ref().is_none_or(|text| SecretReference::parse(text).is_some())
        };
        let not_a_reference = "must be env:NAME or file:/path, not the key itself";
        if !is_reference(&self.signing_key) {
            return invalid("signing_key", not_a_reference);
        }
        if !word(&self.signing_key_env) {
            return invalid("signing_key_env", not_a_name);
        }
        for (name, project) in &self.projects {
            if project.signing_key_env.as_ref().is_some_and(|variable| !word(variable)) {
                return invalid(&format!("projects.{name}.signing_key_env"), not_a_name);
            }
            if !is_reference(&project.signing_key) {
                return invalid(&format!("projects.{name}.signing_key"), not_a_reference);
            }
            let sources = [&project.signing_key, &project.signing_key_env];
            if sources.iter().all(|key| key.is_none()) && project.signing_key_file.is_none() {
                let reason = "needs signing_key, signing_key_env or signing_key_file";
                return invalid(&format!("projects.{name}"), reason);
            }
        }
        if self.allow_hosts.iter().any(|host| host.is_empty() || host.contains(['/', '@', ' '])) {
            return invalid("allow_hosts", "must be host names or addresses, without http://");
        }
        if !(1..=600_000).contains(&self.timeout_ms) {
            return invalid("timeout_ms", "must be from 1 to 600000");
        }
        let waits = &self.retry_schedule_ms;
        if waits.len() > MAX_RETRIES || waits.iter().any(|wait| !(1..=WEEK_MS).contains(wait)) {
            let reason = "must be up to 50 waits, each from 1 to 604800000 (a week)";
            return invalid("retry_schedule_ms", reason);
        }
        if !(0.0..=1.0).contains(&self.jitter) {
            return invalid("jitter", "must be from 0 to 1");
        }
        for (key, count) in [
            ("max_parallel", self.max_parallel),
            ("max_parallel_per_receiver", self.max_parallel_per_receiver),
        ] {
            if count == 0 {
                return invalid(key, "must be at least 1");
            }
        }
        Ok(())
    }
}
