//! An agent: a named profile that can be called like a tool, and boxes of cards that agents share.
//! Pure.

use std::str::FromStr;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::domain::access_rules;
use crate::domain::json::Json;
use crate::domain::tool::tool_mode::ToolMode;
use crate::domain::utp::MAX_DEPTH;

/// Prefix of the tools that call agents: agent `a` is the tool `agent.a`.
pub const AGENT_TOOL_PREFIX: &str = "agent.";

/// Maximum size of an agent's instructions, in bytes.
pub const MAX_INSTRUCTIONS_BYTES: usize = 256 << 10;

/// Maximum number of result fields of an agent.
pub const MAX_RESULT_FIELDS: usize = 64;

/// Returns the name of the tool that calls an agent.
pub fn agent_tool_name(agent_id: &str) -> String {
    format!("{AGENT_TOOL_PREFIX}{agent_id}")
}

/// The party that drives an agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AgentDriver {
    /// Toolcrib's agent loop.
    #[default]
    Loop,
    /// An external worker that Toolcrib wakes.
    Worker,
}

impl AgentDriver {
    /// Returns the name used on the wire.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Loop => "loop",
            Self::Worker => "worker",
        }
    }
}

impl FromStr for AgentDriver {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        [Self::Loop, Self::Worker].into_iter().find(|driver| driver.as_str() == text).ok_or(())
    }
}

/// The fate of an agent's work when the run that called the agent ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnParentEnd {
    /// It is canceled.
    #[default]
    Cancel,
    /// It continues.
    Detach,
}

impl OnParentEnd {
    /// Returns the name used on the wire.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Cancel => "cancel",
            Self::Detach => "detach",
        }
    }
}

impl FromStr for OnParentEnd {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        [Self::Cancel, Self::Detach].into_iter().find(|end| end.as_str() == text).ok_or(())
    }
}

/// Limits of an agent. A limit that is set is a budget of the agent and all agents that it calls;
/// one that is not set comes from the caller's budget, or else from the defaults of runs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AgentLimits {
    /// Maximum number of requests to the model.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub steps: Option<u32>,
    /// Maximum number of tool calls.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub calls: Option<u32>,
    /// Maximum number of tokens of all requests and replies together.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokens: Option<u64>,
    /// Maximum time of one call of the agent, in milliseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ms: Option<u64>,
    /// Number of levels of agents below this one; 0 if it calls none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub depth: Option<u32>,
}

impl AgentLimits {
    /// Returns each limit with its name.
    fn values(&self) -> [(&'static str, Option<u64>); 5] {
        [
            ("steps", self.steps.map(u64::from)),
            ("calls", self.calls.map(u64::from)),
            ("tokens", self.tokens),
            ("ms", self.ms),
            ("depth", self.depth.map(u64::from)),
        ]
    }

    /// Returns the first invalid field and its valid range.
    pub fn invalid_field(&self) -> Option<(&'static str, String)> {
        let ranges = [
            (1, 10_000),
            (0, 100_000),
            (1, 1_000_000_000),
            (1, 604_800_000),
            (0, u64::from(MAX_DEPTH)),
        ];
        let mut all = self.values().into_iter().zip(ranges);
        let is_invalid = |value: Option<u64>, (min, max): (u64, u64)| {
            value.is_some_and(|value| !(min..=max).contains(&value))
        };
        let invalid = all.find(|((_, value), range)| is_invalid(*value, *range));
        invalid.map(|((field, _), (min, max))| (field, format!("must be from {min} to {max}")))
    }

    /// Returns the first limit that exceeds another agent's, with both values.
    pub fn first_excess(&self, other: &Self) -> Option<(&'static str, u64, u64)> {
        let pairs = self.values().into_iter().zip(other.values());
        let mut excesses = pairs.filter_map(|((name, own), (_, limit))| {
            let (own, limit) = (own?, limit?);
            (own > limit).then_some((name, own, limit))
        });
        excesses.next()
    }

    /// Returns the limits of an agent one level below.
    pub fn one_level_below(self) -> Self {
        Self { depth: self.depth.map(|depth| depth.saturating_sub(1)), ..self }
    }

    /// Returns the lower one of each limit; one that is not set bounds nothing.
    pub fn lowered_to(self, other: &Self) -> Self {
        fn lower<T: Ord>(own: Option<T>, other: Option<T>) -> Option<T> {
            [own, other].into_iter().flatten().min()
        }
        Self {
            steps: lower(self.steps, other.steps),
            calls: lower(self.calls, other.calls),
            tokens: lower(self.tokens, other.tokens),
            ms: lower(self.ms, other.ms),
            depth: lower(self.depth, other.depth),
        }
    }

    /// Returns the limits, with another agent's in place of those that are not set.
    pub fn or_inherited(self, other: &Self) -> Self {
        Self {
            steps: self.steps.or(other.steps),
            calls: self.calls.or(other.calls),
            tokens: self.tokens.or(other.tokens),
            ms: self.ms.or(other.ms),
            depth: self.depth.or(other.depth),
        }
    }
}

/// A field of an agent's result.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "ResultFieldForm")]
pub struct ResultField {
    /// Name of the field, unique in the result.
    pub name: String,
    /// JSON type of the value; any if `None`.
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    /// Description for the model.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub description: Option<String>,
    /// True if a result without it is refused.
    pub required: bool,
}

/// A result field as it is written: its name, or an object.
#[derive(Deserialize)]
#[serde(untagged)]
enum ResultFieldForm {
    Name(String),
    Object(ResultFieldObject),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ResultFieldObject {
    name: String,
    #[serde(rename = "type")]
    kind: Option<String>,
    description: Option<String>,
    #[serde(default = "is_required_by_default")]
    required: bool,
}

fn is_required_by_default() -> bool {
    true
}

impl From<ResultFieldForm> for ResultField {
    fn from(form: ResultFieldForm) -> Self {
        match form {
            ResultFieldForm::Name(name) => {
                Self { name, kind: None, description: None, required: true }
            }
            ResultFieldForm::Object(field) => Self {
                name: field.name,
                kind: field.kind,
                description: field.description,
                required: field.required,
            },
        }
    }
}

/// The JSON types that a result field can have.
pub const RESULT_FIELD_TYPES: [&str; 6] =
    ["string", "number", "integer", "boolean", "object", "array"];

/// Returns the JSON Schema of a result with these fields; `None` if there are none.
pub fn result_schema(fields: &[ResultField]) -> Option<Value> {
    if fields.is_empty() {
        return None;
    }
    let mut properties = Map::new();
    for field in fields {
        let mut schema = Map::new();
        if let Some(kind) = &field.kind {
            schema.insert("type".into(), kind.as_str().into());
        }
        if field.kind.as_deref() == Some("array") {
            schema.insert("items".into(), json!({}));
        }
        if let Some(description) = &field.description {
            schema.insert("description".into(), description.as_str().into());
        }
        properties.insert(field.name.clone(), Value::Object(schema));
    }
    let required: Vec<&str> =
        fields.iter().filter(|field| field.required).map(|field| field.name.as_str()).collect();
    Some(json!({ "type": "object", "properties": properties, "required": required }))
}

/// The profile of an agent.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AgentProfile {
    /// Description for callers and their models; the beginning of the instructions if `None`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub description: Option<String>,
    /// System prompt of the agent.
    pub instructions: String,
    /// Name of its model; that of its caller, or else the first one, if `None`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// Names and patterns of the tools it may use; `None` means all that its caller may call.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tools: Option<Vec<String>>,
    /// Selects the tool definitions that its model receives; the server's setting if `None`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tool_mode: Option<ToolMode>,
    /// Names and patterns of the tools that every request offers in the modes `search` and
    /// `pinned`; the server's setting if `None`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pinned_tools: Option<Vec<String>>,
    /// Limits of one call of the agent.
    pub limits: AgentLimits,
    /// Fields of its result; without any, the result is its answer.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub result_fields: Vec<ResultField>,
}

impl AgentProfile {
    /// Returns the first invalid field, as a pointer, and the problem.
    pub fn find_problem(&self) -> Option<(String, String)> {
        if self.instructions.len() > MAX_INSTRUCTIONS_BYTES {
            let problem = format!("must have at most {MAX_INSTRUCTIONS_BYTES} bytes");
            return Some(("instructions".into(), problem));
        }
        if self.model.as_ref().is_some_and(|model| !(1..=255).contains(&model.len())) {
            return Some(("model".into(), "must be 1 to 255 bytes".into()));
        }
        for (n, pattern) in self.tools.iter().flatten().enumerate() {
            if let Err(problem) = access_rules::check_pattern(pattern) {
                return Some((format!("tools/{n}"), problem));
            }
        }
        for (n, pattern) in self.pinned_tools.iter().flatten().enumerate() {
            if let Err(problem) = access_rules::check_pattern(pattern) {
                return Some((format!("pinned_tools/{n}"), problem));
            }
        }
        let has_no_pins = self.pinned_tools.as_ref().is_some_and(Vec::is_empty);
        if self.tool_mode == Some(ToolMode::Pinned) && has_no_pins {
            return Some(("pinned_tools".into(), "the mode pinned needs at least one tool".into()));
        }
        if let Some((field, problem)) = self.limits.invalid_field() {
            return Some((format!("limits/{field}"), problem));
        }
        self.find_field_problem()
    }

    fn find_field_problem(&self) -> Option<(String, String)> {
        if self.result_fields.len() > MAX_RESULT_FIELDS {
            let problem = format!("has more than {MAX_RESULT_FIELDS} fields");
            return Some(("result_fields".into(), problem));
        }
        for (n, field) in self.result_fields.iter().enumerate() {
            let pointer = format!("result_fields/{n}");
            let is_plain = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
            if !(1..=64).contains(&field.name.len()) || !field.name.chars().all(is_plain) {
                let problem = "must have a name of 1 to 64 letters, digits, '_' and '-'";
                return Some((pointer, problem.into()));
            }
            if self.result_fields[..n].iter().any(|other| other.name == field.name) {
                return Some((pointer, format!("repeats the name \"{}\"", field.name)));
            }
            let is_known = |kind: &String| RESULT_FIELD_TYPES.contains(&kind.as_str());
            if field.kind.as_ref().is_some_and(|kind| !is_known(kind)) {
                let problem =
                    format!("has a type that is none of {}", RESULT_FIELD_TYPES.join(", "));
                return Some((pointer, problem));
            }
        }
        None
    }

    /// Narrows the profile of a derived agent to that of its creator: what it does not set comes
    /// from the creator. Fails with the problem if it sets more than the creator has.
    pub fn narrowed_to(mut self, creator: &Self) -> Result<Self, String> {
        if let Some(allowed) = &creator.tools {
            let is_covered = |pattern: &String| {
                allowed.iter().any(|a| access_rules::pattern_matches(a, pattern))
            };
            if let Some(excess) = self.tools.iter().flatten().find(|pattern| !is_covered(pattern)) {
                return Err(format!(
                    "its creator may not use the tool \"{excess}\"; the creator's tools are: {}",
                    allowed.join(", ")
                ));
            }
            self.tools.get_or_insert_with(|| allowed.clone());
        }
        let below = creator.limits.one_level_below();
        if let Some((name, own, limit)) = self.limits.first_excess(&below) {
            return Err(format!("limits/{name} is {own}, and its creator has {limit}"));
        }
        self.limits = self.limits.or_inherited(&below);
        Ok(self)
    }
}

/// One version of an agent.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct AgentDefinition {
    /// Id of the agent; unique in the project.
    pub agent_id: String,
    /// Number of the version, from 1.
    pub version: u64,
    /// Instructions, model, tools, limits and result of the agent.
    #[serde(default)]
    pub profile: AgentProfile,
    /// The party that drives it.
    #[serde(default)]
    pub driver: AgentDriver,
    /// Target of its wakeups, if a worker drives it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub worker_target: Option<String>,
    /// URL that receives a signed webhook when an item waits in its inbox.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wakeup_url: Option<String>,
    /// Fate of its work when the run that called it ends.
    #[serde(default)]
    pub on_parent_end: OnParentEnd,
    /// Agent name of the caller that defined this version.
    #[serde(default)]
    pub created_by: String,
    /// Agent that defined it: its tools, budget and depth bound those of this agent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub derived_from: Option<String>,
}

impl AgentDefinition {
    /// Returns true if another definition differs at most in its version and its author.
    pub fn is_equivalent(&self, other: &Self) -> bool {
        let normalized =
            Self { version: self.version, created_by: self.created_by.clone(), ..other.clone() };
        *self == normalized
    }
}

/// An agent of a project's roster: Toolcrib can call it, wake it, or both.
#[derive(Debug, Clone, PartialEq)]
pub struct AgentEntry {
    /// Id of the agent's project.
    pub project: String,
    /// Id of the agent; unique in the project.
    pub agent_id: String,
    /// Target of its wakeups: `cmd.agent.<worker_target>.wakeup`; empty if it is not woken.
    pub worker_target: String,
    /// Free-form profile, as given; Toolcrib does not interpret it.
    pub profile: Option<Json>,
    /// The tools it may call in a turn; `None` for every tool that the rules allow.
    pub allowed_tools: Option<Vec<String>>,
    /// Time of the last change, in Unix milliseconds.
    pub updated_ms: u64,
    /// The agent itself, if it can be called as a tool; `None` if it can only be woken.
    pub definition: Option<Box<AgentDefinition>>,
}

impl AgentEntry {
    /// Returns true if an external worker can be woken for the agent.
    pub fn is_wakeable(&self) -> bool {
        !self.worker_target.is_empty()
    }
}

/// A stored version of an agent.
#[derive(Debug, Clone, PartialEq)]
pub struct AgentVersion {
    /// The agent in this version.
    pub definition: AgentDefinition,
    /// Time when it was defined, in Unix milliseconds.
    pub created_ms: u64,
}

/// An ordered set of cards that gives agents their context. It never changes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CardBox {
    /// Unique id, a UUID.
    pub box_id: String,
    /// Id of the project that the box belongs to.
    pub project: String,
    /// Ids of its cards, in order, without those of its parents.
    pub card_ids: Vec<String>,
    /// Boxes whose cards come before its own.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub parent_ids: Vec<String>,
    /// Agent name of the caller that created it.
    #[serde(default)]
    pub created_by: String,
    /// Time of creation, in Unix milliseconds.
    pub created_ms: u64,
}

/// Returns the part of the instructions that names the fields of the result.
pub(crate) fn result_guidance(fields: &[ResultField]) -> String {
    let lines = fields.iter().map(|field| {
        let kind = field.kind.as_deref().unwrap_or("any JSON value");
        let required = if field.required { "" } else { ", optional" };
        let about = field.description.as_deref().map(|text| format!(": {text}"));
        format!("- {} ({kind}{required}){}", field.name, about.unwrap_or_default())
    });
    let list: Vec<String> = lines.collect();
    format!(
        "\n\nYour final answer is one JSON object with these fields, and nothing else:\n{}",
        list.join("\n")
    )
}
