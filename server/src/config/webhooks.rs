//! The settings of completion callbacks.

use std::collections::BTreeMap;
use std::path::PathBuf;

use schemars::JsonSchema;
use serde::Deserialize;
use toolcrib::delivery::Schedule;
use toolcrib::notify::Notifying;

use super::ConfigError;
use crate::outbound::Outbound;
use crate::task::MAX_DATA_BYTES;
use crate::webhooks::{KEY_PREFIX, KeyPlace, KeyRing};

/// The longest wait in the schedule: a week in milliseconds.
const WEEK_MS: u64 = 604_800_000;
const MAX_RETRIES: usize = 50;

/// Completion callbacks (Standard Webhooks).
#[derive(Debug, Clone, PartialEq, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct WebhookSettings {
    /// The environment variable with the signing key (`whsec_…`); several keys, with spaces
    /// between them, make several signatures, for changing keys.
    pub signing_key_env: String,
    /// A file with the same; it goes before the variable, and is read for every delivery.
    pub signing_key_file: Option<PathBuf>,
    /// Another key for one project: `[webhooks.projects.NAME]`.
    pub projects: BTreeMap<String, WebhookKeySettings>,
    /// Whether callbacks may go to private addresses.
    pub allow_private: bool,
    /// Hosts whose addresses may be private: names, addresses, or `*.name`.
    pub allow_hosts: Vec<String>,
    /// How long a receiver may take to answer.
    pub timeout_ms: u64,
    /// The wait after the first failure, after the second, and so on; then it is given up.
    pub retry_schedule_ms: Vec<u64>,
    /// How much longer a wait may be by chance, from 0 to 1 of its length.
    pub jitter: f64,
    /// Deliveries under way at once.
    pub max_parallel: u32,
    /// The same to one receiver (scheme, host and port).
    pub max_parallel_per_receiver: u32,
    /// Results that are larger are left out, with a note where to read them.
    pub max_data_bytes: usize,
}

impl Default for WebhookSettings {
    fn default() -> Self {
        let notifying = Notifying::default();
        Self {
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
    /// The environment variable with the project's key.
    pub signing_key_env: Option<String>,
    /// A file with it.
    pub signing_key_file: Option<PathBuf>,
}

impl WebhookSettings {
    /// Where keys come from.
    pub fn key_ring(&self) -> KeyRing {
        let usual = KeyPlace {
            variable: Some(self.signing_key_env.clone()),
            file: self.signing_key_file.clone(),
        };
        let projects = self.projects.iter().map(|(name, key)| {
            let (variable, file) = (key.signing_key_env.clone(), key.signing_key_file.clone());
            (name.clone(), KeyPlace { variable, file })
        });
        KeyRing { usual, projects: projects.collect() }
    }

    /// Where callbacks may go.
    pub fn outbound(&self) -> Outbound {
        Outbound::new("webhooks", self.allow_private, &self.allow_hosts)
    }

    /// What the engine is told about deliveries.
    pub fn notifying(&self) -> Notifying {
        Notifying {
            schedule: Schedule { retry_ms: self.retry_schedule_ms.clone(), jitter: self.jitter },
            max_parallel: self.max_parallel as usize,
            max_parallel_per_receiver: self.max_parallel_per_receiver as usize,
        }
    }

    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        let invalid =
            |key: &str, why: &str| Err(ConfigError::invalid(&format!("webhooks.{key}"), why));
        let word = |name: &str| {
            let plain = |c: char| c.is_ascii_alphanumeric() || c == '_';
            !name.is_empty() && name.chars().all(plain) && !name.starts_with(KEY_PREFIX)
        };
        // Whoever writes the key itself here is told so before it stands in a log.
        let not_a_name = "must be the name of an environment variable, not the key itself";
        if !word(&self.signing_key_env) {
            return invalid("signing_key_env", not_a_name);
        }
        for (name, project) in &self.projects {
            if project.signing_key_env.as_ref().is_some_and(|variable| !word(variable)) {
                return invalid(&format!("projects.{name}.signing_key_env"), not_a_name);
            }
            if project.signing_key_env.is_none() && project.signing_key_file.is_none() {
                let why = "needs signing_key_env or signing_key_file";
                return invalid(&format!("projects.{name}"), why);
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
            let why = "must be up to 50 waits, each from 1 to 604800000 (a week)";
            return invalid("retry_schedule_ms", why);
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
