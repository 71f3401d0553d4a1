//! The written form of rules: JSON objects, as HTTP, files and the configuration have them.
//!
//! Reading is strict: an unknown field, an empty list or a misspelled word is refused with its
//! position, because a rule that means less than its author thinks is a hole.

use serde_json::{Map, Value, json};

use crate::domain::access_rules::{AccessRule, RuleAction, RuleVerdict, check_pattern};
use crate::domain::fault::{Code, Error, Fault};
use crate::domain::tool::{Effect, Risk};
use crate::registry::catalog::rule_index::condition::{ConditionError, RuleCondition};
use crate::registry::keys::check_identifier;

/// The fields of a rule.
const FIELDS: [&str; 19] = [
    "id",
    "verdict",
    "agents",
    "groups",
    "users",
    "sessions",
    "environments",
    "tools",
    "sources",
    "effects",
    "risk_min",
    "actions",
    "when",
    "approvers",
    "expires_in_ms",
    "note",
    "agent",
    "pattern",
    "project",
];

const MAX_LIST_ENTRIES: usize = 200;
const MAX_PATTERN_CHARS: usize = 256;
const MAX_NOTE_CHARS: usize = 1_024;
/// Maximum of `expires_in_ms`, the time for an approval: a year.
const MAX_EXPIRY_MS: u64 = 366 * 24 * 3_600_000;

/// Returns the refusal of a document, with the position of the problem as a JSON pointer.
pub(crate) fn invalid_at(pointer: &str, message: impl Into<String>) -> Error {
    let message = message.into();
    let shown = pointer.trim_start_matches('/').to_owned();
    let text = if shown.is_empty() { message.clone() } else { format!("{shown}: {message}") };
    let problem = json!({ "pointer": pointer, "message": message });
    let detail = json!({ "pointer": pointer, "problems": [problem] });
    Fault::new(Code::ValidationError, text).with_detail(detail).without_side_effect().into()
}

/// Returns the refusal of a condition, with its line and column.
pub(crate) fn invalid_condition(pointer: &str, error: &ConditionError) -> Error {
    let ConditionError { message, line, column } = error;
    let pointer = format!("{pointer}/when");
    let text = format!("{}: {error}", pointer.trim_start_matches('/'));
    let problem = json!({ "pointer": pointer, "message": message, "line": line, "column": column });
    let detail = json!({
        "pointer": pointer, "line": line, "column": column, "problems": [problem],
    });
    Fault::new(Code::ValidationError, text).with_detail(detail).without_side_effect().into()
}

/// Returns the refusal of a field that does not exist, with the nearest name.
pub(crate) fn unknown_field(pointer: &str, name: &str, known: &[&str]) -> Error {
    let nearest = known
        .iter()
        .map(|field| (strsim::damerau_levenshtein(field, name), *field))
        .min()
        .filter(|(distance, field)| *distance <= 1 + field.len() / 3)
        .map(|(_, field)| field);
    let message = match nearest {
        Some(field) => format!("unknown field \"{name}\"; did you mean \"{field}\"?"),
        None => format!("unknown field \"{name}\"; the fields are {}", known.join(", ")),
    };
    invalid_at(&format!("{pointer}/{name}"), message)
}

/// Reads one rule. `pointer` is its position in the document.
///
/// # Errors
///
/// Refuses what is not a rule, with the position of the first problem.
pub fn parse_rule(
    project: &str,
    id: Option<&str>,
    value: &Value,
    pointer: &str,
) -> Result<AccessRule, Error> {
    let Some(fields) = value.as_object() else {
        return Err(invalid_at(pointer, "a rule is an object"));
    };
    if let Some(name) = fields.keys().find(|name| !FIELDS.contains(&name.as_str())) {
        return Err(unknown_field(pointer, name, &FIELDS));
    }
    let reader = RuleReader { fields, pointer };
    let verdict = reader.verdict()?;
    let (agent, pattern) = (reader.text("agent")?, reader.text("pattern")?);
    if let Some(agent) = agent {
        check_short_agent(&format!("{pointer}/agent"), agent)?;
    }
    let written_id = reader.text("id")?;
    let short_id = || Some(AccessRule::short_id(agent?, pattern?, verdict));
    let id = match (id, written_id) {
        (Some(id), Some(written)) if id != written => {
            return Err(invalid_at(&format!("{pointer}/id"), format!("the id is \"{id}\"")));
        }
        (Some(id), _) | (None, Some(id)) => id.to_owned(),
        (None, None) => {
            short_id().ok_or_else(|| invalid_at(&format!("{pointer}/id"), "a rule needs an id"))?
        }
    };
    check_rule_id(&format!("{pointer}/id"), &id)?;
    let rule = AccessRule {
        agents: reader.patterns("agents", agent.filter(|agent| *agent != "*"))?,
        groups: reader.patterns("groups", None)?,
        users: reader.patterns("users", None)?,
        sessions: reader.patterns("sessions", None)?,
        environments: reader.patterns("environments", None)?,
        tools: reader.patterns("tools", pattern)?,
        sources: reader.patterns("sources", None)?,
        effects: reader.words("effects", "read, idempotent or irreversible", parse_effect)?,
        risk_min: reader.word("risk_min", "low, medium, high or critical", parse_risk)?,
        actions: reader.words("actions", &action_names(), RuleAction::parse)?,
        when: reader.condition()?,
        approvers: reader.patterns("approvers", None)?,
        expires_in_ms: reader.expiry()?,
        note: reader.note()?,
        ..AccessRule::new(project, id, verdict)
    };
    for field in ["approvers", "expires_in_ms"] {
        if fields.contains_key(field) && verdict != RuleVerdict::Ask {
            let message = "only a rule with the verdict ask has it";
            return Err(invalid_at(&format!("{pointer}/{field}"), message));
        }
    }
    Ok(rule)
}

/// Reads a document with `rules`, a list of rules. A rule without an id gets its position as the
/// id, such as `rule-1`.
///
/// # Errors
///
/// Refuses the whole document if one rule is refused, or if two have the same id.
pub fn parse_rule_set(project: &str, value: &Value) -> Result<Vec<AccessRule>, Error> {
    let Some(fields) = value.as_object() else {
        return Err(invalid_at("", "the document is an object with rules"));
    };
    if let Some(name) = fields.keys().find(|name| !["rules", "version"].contains(&name.as_str())) {
        return Err(unknown_field("", name, &["rules"]));
    }
    let Some(list) = fields.get("rules").and_then(Value::as_array) else {
        return Err(invalid_at("/rules", "rules is a list of rules"));
    };
    let mut rules: Vec<AccessRule> = Vec::with_capacity(list.len());
    let mut ids = std::collections::HashSet::new();
    for (n, value) in list.iter().enumerate() {
        let pointer = format!("/rules/{n}");
        let has_id = ["id", "agent"].iter().any(|name| value.get(name).is_some());
        // A rule without an id is named by its position, so that a set can be written by hand.
        let position_id = (!has_id).then(|| format!("rule-{}", n + 1));
        let rule = parse_rule(project, position_id.as_deref(), value, &pointer)?;
        if !ids.insert(rule.id.clone()) {
            let message = format!("\"{}\" is the id of an earlier rule", rule.id);
            return Err(invalid_at(&format!("{pointer}/id"), message));
        }
        rules.push(rule);
    }
    Ok(rules)
}

/// Writes a rule. A rule of the short form also has its agent and pattern.
pub fn render_rule(rule: &AccessRule) -> Value {
    let mut fields = match serde_json::to_value(rule) {
        Ok(Value::Object(fields)) => fields,
        _ => Map::new(),
    };
    fields.insert("id".to_owned(), rule.id.clone().into());
    if let Some((agent, pattern)) = rule.as_short() {
        fields.insert("agent".to_owned(), agent.into());
        fields.insert("pattern".to_owned(), pattern.into());
    }
    Value::Object(fields)
}

fn action_names() -> String {
    RuleAction::ALL.map(RuleAction::as_str).join(", ")
}

fn parse_effect(text: &str) -> Option<Effect> {
    let all = [Effect::Read, Effect::Idempotent, Effect::Irreversible];
    all.into_iter().find(|effect| effect.as_str() == text)
}

fn parse_risk(text: &str) -> Option<Risk> {
    let all = [Risk::Low, Risk::Medium, Risk::High, Risk::Critical];
    all.into_iter().find(|risk| risk.as_str() == text)
}

/// Checks the agent of the short form: the name of one agent, or `*`. Patterns are for `agents`.
fn check_short_agent(pointer: &str, agent: &str) -> Result<(), Error> {
    check_identifier("agent", agent).map_err(|error| invalid_at(pointer, error.to_string()))?;
    if agent.contains('*') && agent != "*" {
        let message = "agent must be the name of one agent, or * for all; agents takes patterns";
        return Err(invalid_at(pointer, message));
    }
    Ok(())
}

/// Checks the id of a rule: visible ASCII characters.
fn check_rule_id(pointer: &str, id: &str) -> Result<(), Error> {
    if (1..=255).contains(&id.len()) && id.chars().all(|c| c.is_ascii_graphic()) {
        return Ok(());
    }
    Err(invalid_at(pointer, "an id has 1 to 255 visible ASCII characters and no spaces"))
}

/// Reads the fields of one rule.
struct RuleReader<'a> {
    fields: &'a Map<String, Value>,
    pointer: &'a str,
}

impl<'a> RuleReader<'a> {
    fn refuse(&self, field: &str, message: impl Into<String>) -> Error {
        invalid_at(&format!("{}/{field}", self.pointer), message)
    }

    /// Returns the value of a field; null counts as absent.
    fn get(&self, field: &str) -> Option<&'a Value> {
        self.fields.get(field).filter(|value| !value.is_null())
    }

    fn text(&self, field: &str) -> Result<Option<&'a str>, Error> {
        match self.get(field) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(_) => Err(self.refuse(field, "this is a text")),
        }
    }

    fn verdict(&self) -> Result<RuleVerdict, Error> {
        let text = self.text("verdict")?;
        text.and_then(RuleVerdict::parse)
            .ok_or_else(|| self.refuse("verdict", "verdict must be allow, deny or ask"))
    }

    fn list(&self, field: &str) -> Result<Vec<&'a str>, Error> {
        let Some(value) = self.get(field) else { return Ok(Vec::new()) };
        let Some(items) = value.as_array() else {
            return Err(self.refuse(field, "this is a list of texts"));
        };
        if items.is_empty() {
            let message = "an empty list matches nothing; omit the field to match everything";
            return Err(self.refuse(field, message));
        }
        if items.len() > MAX_LIST_ENTRIES {
            let message = format!("a list has at most {MAX_LIST_ENTRIES} entries");
            return Err(self.refuse(field, message));
        }
        let texts = items.iter().enumerate().map(|(n, item)| {
            item.as_str().ok_or_else(|| self.refuse(&format!("{field}/{n}"), "this is a text"))
        });
        texts.collect()
    }

    /// Reads a list of patterns. `single` is the same field in the short form.
    fn patterns(&self, field: &str, single: Option<&str>) -> Result<Vec<String>, Error> {
        let list = self.list(field)?;
        let list = match single {
            Some(single) if list.is_empty() => vec![single],
            Some(single) if list != [single] => {
                let message = format!("\"{single}\" is given as well, and is not the same");
                return Err(self.refuse(field, message));
            }
            _ => list,
        };
        for (n, pattern) in list.iter().enumerate() {
            let position = || format!("{field}/{n}");
            if field == "tools" {
                check_pattern(pattern).map_err(|problem| self.refuse(&position(), problem))?;
            }
            let is_plain = |c: char| !c.is_control() && !c.is_whitespace();
            let length = pattern.chars().count();
            if !(1..=MAX_PATTERN_CHARS).contains(&length) || !pattern.chars().all(is_plain) {
                let message = format!(
                    "a pattern has 1 to {MAX_PATTERN_CHARS} visible characters; * stands for any"
                );
                return Err(self.refuse(&position(), message));
            }
        }
        Ok(list.into_iter().map(str::to_owned).collect())
    }

    fn words<T>(
        &self,
        field: &str,
        known: &str,
        parse: impl Fn(&str) -> Option<T>,
    ) -> Result<Vec<T>, Error> {
        let words = self.list(field)?.into_iter().enumerate().map(|(n, word)| {
            let position = format!("{field}/{n}");
            parse(word).ok_or_else(|| self.refuse(&position, format!("this is {known}")))
        });
        words.collect()
    }

    fn word<T>(
        &self,
        field: &str,
        known: &str,
        parse: impl Fn(&str) -> Option<T>,
    ) -> Result<Option<T>, Error> {
        let Some(word) = self.text(field)? else { return Ok(None) };
        parse(word).map(Some).ok_or_else(|| self.refuse(field, format!("this is {known}")))
    }

    fn condition(&self) -> Result<Option<String>, Error> {
        let Some(source) = self.text("when")? else { return Ok(None) };
        RuleCondition::compile(source).map_err(|error| invalid_condition(self.pointer, &error))?;
        Ok(Some(source.to_owned()))
    }

    fn expiry(&self) -> Result<Option<u64>, Error> {
        let Some(value) = self.get("expires_in_ms") else { return Ok(None) };
        match value.as_u64().filter(|ms| (1_000..=MAX_EXPIRY_MS).contains(ms)) {
            Some(ms) => Ok(Some(ms)),
            None => {
                let message = format!("this is a number of milliseconds, 1000 to {MAX_EXPIRY_MS}");
                Err(self.refuse("expires_in_ms", message))
            }
        }
    }

    fn note(&self) -> Result<String, Error> {
        let note = self.text("note")?.unwrap_or_default();
        let is_text = |c: char| !c.is_control() || c == '\n';
        if note.chars().count() > MAX_NOTE_CHARS || !note.chars().all(is_text) {
            let message = format!("a note has at most {MAX_NOTE_CHARS} characters");
            return Err(self.refuse("note", message));
        }
        Ok(note.to_owned())
    }
}
