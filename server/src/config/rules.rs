//! Access rules in the configuration and in files.

use std::collections::BTreeMap;
use std::path::Path;

use schemars::JsonSchema;
use serde_json::{Value, json};
use toolcrib::domain::access_rules::AccessRule;
use toolcrib::domain::caller::DEFAULT_PROJECT;
use toolcrib::registry::rules::parse_rule_set;

use super::{Config, ConfigError};

/// Schema of a rule, used to check keys. The engine reads the rule.
#[derive(JsonSchema)]
#[serde(deny_unknown_fields)]
#[allow(dead_code, reason = "only its schema is used")]
pub struct RuleSettings {
    /// Name of the rule, unique in its project.
    id: Option<String>,
    /// The project. Default: `default`.
    project: Option<String>,
    /// `allow`, `deny` or `ask`.
    verdict: String,
    /// Agents.
    agents: Option<Vec<String>>,
    /// Groups.
    groups: Option<Vec<String>>,
    /// Users.
    users: Option<Vec<String>>,
    /// Sessions.
    sessions: Option<Vec<String>>,
    /// Environments.
    environments: Option<Vec<String>>,
    /// Tools.
    tools: Option<Vec<String>>,
    /// Sources.
    sources: Option<Vec<String>>,
    /// Effects.
    effects: Option<Vec<String>>,
    /// The lowest risk that matches.
    risk_min: Option<String>,
    /// Actions.
    actions: Option<Vec<String>>,
    /// CEL expression.
    when: Option<String>,
    /// Agents, groups and users who may approve.
    approvers: Option<Vec<String>>,
    /// Time until a call without a decision fails.
    expires_in_ms: Option<u64>,
    /// Text for people.
    note: Option<String>,
    /// Short form: the agent.
    agent: Option<String>,
    /// Short form: the pattern.
    pattern: Option<String>,
}

impl Config {
    /// Returns the configured rules by project. A project without any is not listed.
    ///
    /// # Errors
    ///
    /// Refuses a file that cannot be read, and rules that are not valid.
    pub fn configured_rules(&self) -> Result<BTreeMap<String, Vec<AccessRule>>, ConfigError> {
        let mut by_project = group_by_project("rules", &self.rules)?;
        if let Some(file) = &self.rules_file {
            let invalid = |reason: String| ConfigError::invalid("rules_file", reason);
            let document = read_toml_or_json(file).map_err(invalid)?;
            let rules = document["rules"].as_array().cloned();
            let rules = rules.ok_or_else(|| invalid("has no list named rules".to_owned()))?;
            for (project, rules) in group_by_project("rules_file", &rules)? {
                by_project.entry(project).or_default().extend(rules);
            }
        }
        let parsed = by_project.into_iter().map(|(project, rules)| {
            let set = parse_rule_set(&project, &json!({ "rules": rules }));
            let set = set.map_err(|error| ConfigError::invalid("rules", error.to_string()))?;
            Ok((project, set))
        });
        parsed.collect()
    }
}

fn group_by_project(
    key: &str,
    rules: &[Value],
) -> Result<BTreeMap<String, Vec<Value>>, ConfigError> {
    let mut by_project: BTreeMap<String, Vec<Value>> = BTreeMap::new();
    for rule in rules {
        let mut rule = rule.clone();
        let project = rule.as_object_mut().and_then(|fields| fields.remove("project"));
        let project = match project {
            None | Some(Value::Null) => DEFAULT_PROJECT.to_owned(),
            Some(Value::String(project)) => project,
            Some(_) => return Err(ConfigError::invalid(key, "project must be a text".to_owned())),
        };
        by_project.entry(project).or_default().push(rule);
    }
    Ok(by_project)
}

/// Reads a document from a file: TOML if the name ends in `.toml`, otherwise JSON.
pub fn read_toml_or_json(file: &Path) -> Result<Value, String> {
    let shown = file.display();
    let text =
        std::fs::read_to_string(file).map_err(|error| format!("cannot read {shown}: {error}"))?;
    if file.extension().is_some_and(|extension| extension == "toml") {
        let source = config::File::from_str(&text, config::FileFormat::Toml);
        let parsed = config::Config::builder().add_source(source).build();
        let parsed = parsed.and_then(|parsed| parsed.try_deserialize());
        return parsed.map_err(|error| format!("{shown} is not TOML: {error}"));
    }
    serde_json::from_str(&text).map_err(|error| format!("{shown} is not JSON: {error}"))
}
