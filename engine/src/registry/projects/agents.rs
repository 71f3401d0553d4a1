//! The agents of a project: the roster of those that can be woken, and those that can be called as
//! tools, in versions.

use serde::Deserialize;
use serde_json::{Value, json};

use crate::domain::agent::{
    AgentDefinition, AgentDriver, AgentEntry, AgentProfile, AgentVersion, OnParentEnd,
    agent_tool_name,
};
use crate::domain::caller::Caller;
use crate::domain::directory::DirectoryChange;
use crate::domain::fault::{Code, Error, Fault};
use crate::domain::json::Json;
use crate::domain::tool::Executor;
use crate::domain::utp::is_token;
use crate::ports::core::from_store_error;
use crate::registry::catalog::Catalog;
use crate::registry::{AgentRoster, Registry};
use crate::schema::{UnknownField, refuse_unknown_fields};

/// Maximum number of versions that a list shows.
const MAX_LISTED_VERSIONS: usize = 200;

/// Maximum number of agents of one project.
const MAX_AGENTS: usize = 10_000;

impl AgentRoster {
    /// Defines the agent of a document, or only puts it on the roster: see [`parse_agent`].
    /// `agent_id` is the id from elsewhere, such as a path.
    pub async fn put_agent(
        &self,
        caller: &Caller,
        agent_id: Option<&str>,
        document: &Value,
    ) -> Result<AgentEntry, Error> {
        let parsed = parse_agent(&caller.project, agent_id, document)?;
        self.put_parsed_agent(caller, parsed).await
    }

    /// Defines an agent, or only puts it on the roster.
    pub async fn put_parsed_agent(
        &self,
        caller: &Caller,
        agent: ParsedAgent,
    ) -> Result<AgentEntry, Error> {
        match agent {
            ParsedAgent::Callable(definition) => self.define_agent(caller, *definition, None).await,
            ParsedAgent::Wakeable(entry) => self.put_agent_entry(caller, *entry).await,
        }
    }

    /// Adds an agent to the roster, or replaces its entry. The agent can be woken, and not called
    /// as a tool. The same entry again changes nothing.
    pub async fn put_agent_entry(
        &self,
        caller: &Caller,
        mut entry: AgentEntry,
    ) -> Result<AgentEntry, Error> {
        self.registry.require_admin(caller, Some(&entry.project))?;
        for (field, word) in
            [("agent_id", &entry.agent_id), ("worker_target", &entry.worker_target)]
        {
            check_token(field, word)?;
        }
        let stored = self.registry.find_agent_entry(&entry.project, &entry.agent_id);
        entry.updated_ms = stored.as_ref().map_or(0, |stored| stored.updated_ms);
        if stored.as_ref() == Some(&entry) {
            return Ok(entry);
        }
        entry.updated_ms = self.core.clock.wall_ms();
        self.registry
            .change_directory(|_| Ok((DirectoryChange::PutAgent(entry.clone()), None)))
            .await?;
        Ok(entry)
    }

    /// Defines an agent, or a new version of it, and offers it as a tool. The same definition again
    /// changes nothing.
    ///
    /// An operator defines any agent. An agent defines agents that the loop drives, and replaces
    /// only those that it defined; they never have more tools, budget or depth than their creator:
    /// `creator`, or else the agent with the caller's name.
    pub async fn define_agent(
        &self,
        caller: &Caller,
        definition: AgentDefinition,
        creator: Option<&AgentDefinition>,
    ) -> Result<AgentEntry, Error> {
        let is_admin = creator.is_none() && caller.may_administer();
        if is_admin {
            self.registry.require_admin(caller, None)?;
        } else if !caller.may_invoke() {
            let message = format!("a key with the role {} cannot define agents", caller.roles);
            return Err(Error::refused(Code::PermissionDenied, message));
        }
        check_definition(&definition)?;
        let definition = self.check_wakeup_url(caller, definition)?;
        let by_name = || self.registry.find_agent_definition(&caller.project, &caller.agent);
        let creator = creator.cloned().or_else(|| (!is_admin).then(by_name).flatten());
        let definition = match &creator {
            Some(creator) => narrow_to_creator(definition, creator)?,
            None => definition,
        };
        let author = creator.map_or_else(|| caller.agent.clone(), |creator| creator.agent_id);
        let known = self.agent_versions(caller, &definition.agent_id, 1).await?;
        let last_version = known.first().map_or(0, |known| known.definition.version);
        let updated_ms = self.core.clock.wall_ms();
        let definition = AgentDefinition { created_by: author.clone(), ..definition };
        let is_current = |entry: &AgentEntry| {
            entry.definition.as_ref().is_some_and(|current| current.is_equivalent(&definition))
        };
        let existing = self.registry.find_agent_entry(&caller.project, &definition.agent_id);
        if let Some(existing) = existing.filter(is_current) {
            return Ok(existing);
        }
        self.registry
            .change_directory(|catalog| {
                let existing = find_entry(catalog, &caller.project, &definition.agent_id);
                if !is_admin {
                    check_author(existing, &author, definition.driver)?;
                }
                check_tool_name_free(catalog, &caller.project, &definition.agent_id)?;
                check_agent_count(catalog, &caller.project, existing)?;
                let current = existing.and_then(|entry| entry.definition.as_deref());
                let version = current.map_or(last_version, |current| current.version) + 1;
                let next = AgentDefinition { version, ..definition.clone() };
                let entry = to_entry(&caller.project, next, updated_ms);
                let audit = self.registry.audit_entry(
                    caller,
                    &caller.project,
                    "agent.set",
                    &entry.agent_id,
                    "",
                );
                Ok((DirectoryChange::PutAgent(entry), Some(audit)))
            })
            .await?;
        self.agent_entry(caller, &definition.agent_id)
    }

    /// Checks the URL of an agent's wakeups, and returns the definition with the URL as stored.
    fn check_wakeup_url(
        &self,
        caller: &Caller,
        mut definition: AgentDefinition,
    ) -> Result<AgentDefinition, Error> {
        let Some(url) = &definition.wakeup_url else { return Ok(definition) };
        let checked = match &self.core.webhook_sender {
            _ if definition.driver != AgentDriver::Worker => {
                Err("is only for agents that a worker drives".to_owned())
            }
            Some(sender) => sender.check_url(&caller.project, url),
            None => Err("cannot be used: this server sends no webhooks".to_owned()),
        };
        let refused = |reason: String| invalid("wakeup_url", format!("wakeup_url {reason}"));
        definition.wakeup_url = Some(checked.map_err(refused)?);
        Ok(definition)
    }

    /// Removes an agent from the roster, and its tool. Its versions and its open runs stay.
    pub async fn remove_agent_entry(&self, caller: &Caller, agent_id: &str) -> Result<(), Error> {
        let entry = self.agent_entry(caller, agent_id)?;
        let is_author = entry.definition.as_ref().is_some_and(|agent| {
            agent.driver == AgentDriver::Loop
                && agent.created_by == caller.agent
                && caller.may_invoke()
        });
        if !is_author {
            self.registry.require_admin(caller, None)?;
        }
        let (project, agent_id) = (caller.project.clone(), agent_id.to_owned());
        self.registry
            .change_directory(|_| {
                let audit =
                    self.registry.audit_entry(caller, &project, "agent.removed", &agent_id, "");
                let (project, agent_id) = (project.clone(), agent_id.clone());
                Ok((DirectoryChange::DropAgent { project, agent_id }, Some(audit)))
            })
            .await
    }

    /// Returns the project's roster.
    pub fn list(&self, caller: &Caller) -> Vec<AgentEntry> {
        let catalog = self.registry.catalog();
        let entries = catalog.directory().roster.iter().filter(|m| m.project == caller.project);
        entries.cloned().collect()
    }

    /// Returns one agent of the roster.
    pub fn agent_entry(&self, caller: &Caller, agent_id: &str) -> Result<AgentEntry, Error> {
        self.registry.agent_entry(caller, agent_id)
    }

    /// Returns the newest versions of an agent, newest first; also of one that was removed.
    pub async fn agent_versions(
        &self,
        caller: &Caller,
        agent_id: &str,
        limit: usize,
    ) -> Result<Vec<AgentVersion>, Error> {
        let limit = limit.clamp(1, MAX_LISTED_VERSIONS);
        let versions = self.core.store.agents().agent_versions(&caller.project, agent_id, limit);
        versions.await.map_err(from_store_error)
    }
}

impl Registry {
    /// Returns one agent of the roster.
    pub(crate) fn agent_entry(&self, caller: &Caller, agent_id: &str) -> Result<AgentEntry, Error> {
        let found = self.find_agent_entry(&caller.project, agent_id);
        found.ok_or_else(|| {
            let excerpt: String = agent_id.chars().take(80).collect();
            let message = format!("agent \"{excerpt}\" is not on the roster");
            Error::refused(Code::NotFound, message)
        })
    }

    /// Returns the definition of an agent that can be called.
    pub fn find_agent_definition(&self, project: &str, agent_id: &str) -> Option<AgentDefinition> {
        let catalog = self.catalog();
        let entry = find_entry(&catalog, project, agent_id)?;
        entry.definition.as_deref().cloned()
    }

    pub(crate) fn find_agent_entry(&self, project: &str, agent_id: &str) -> Option<AgentEntry> {
        find_entry(&self.catalog(), project, agent_id).cloned()
    }
}

/// The fields of a document that defines an agent.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct AgentDocument {
    agent_id: Option<String>,
    #[serde(default)]
    profile: AgentProfile,
    #[serde(default)]
    driver: AgentDriver,
    worker_target: Option<String>,
    wakeup_url: Option<String>,
    #[serde(default)]
    on_parent_end: OnParentEnd,
}

/// Fields of a document about an agent that can only be woken.
const ROSTER_FIELDS: &[&str] = &["agent_id", "worker_target", "allowed_tools", "profile"];

/// Fields of an agent that can be called; null stands for their absence.
const CALLABLE_FIELDS: [&str; 3] = ["driver", "on_parent_end", "wakeup_url"];

/// Fields that responses add to an agent. A document that was read from one is accepted as it is.
const RESPONSE_FIELDS: [&str; 6] =
    ["version", "created_by", "derived_from", "updated_at_ms", "tool", "allowed_tools"];

/// An agent as a document describes it.
#[derive(Debug, Clone)]
pub enum ParsedAgent {
    /// An agent that can be called as a tool.
    Callable(Box<AgentDefinition>),
    /// An agent that can only be woken.
    Wakeable(Box<AgentEntry>),
}

impl ParsedAgent {
    /// Returns the id of the agent.
    pub fn agent_id(&self) -> &str {
        match self {
            Self::Callable(definition) => &definition.agent_id,
            Self::Wakeable(entry) => &entry.agent_id,
        }
    }
}

/// Reads an agent from a document. A document with `worker_target` and without `driver` and
/// `on_parent_end` is about an agent that can only be woken.
///
/// # Errors
///
/// Refuses a document with unknown fields, wrong types, or another id.
pub fn parse_agent(
    project: &str,
    agent_id: Option<&str>,
    document: &Value,
) -> Result<ParsedAgent, Error> {
    let has = |name: &str| document.get(name).is_some_and(|value| !value.is_null());
    if has("worker_target") && !has("driver") && !has("on_parent_end") {
        let entry = parse_roster_entry(project, agent_id, document)?;
        return Ok(ParsedAgent::Wakeable(Box::new(entry)));
    }
    let definition = parse_agent_definition(agent_id, document)?;
    Ok(ParsedAgent::Callable(Box::new(definition)))
}

/// Reads the entry of an agent that can only be woken.
fn parse_roster_entry(
    project: &str,
    agent_id: Option<&str>,
    document: &Value,
) -> Result<AgentEntry, Error> {
    refuse_unknown_roster_fields(document)?;
    let wrong_type =
        |field: &str, expected: &str| invalid(field, format!("{field} must be {expected}"));
    let in_document = document.get("agent_id").and_then(Value::as_str).map(str::to_owned);
    let agent_id = resolve_agent_id(agent_id, in_document)?;
    let worker_target = document["worker_target"].as_str();
    let worker_target = worker_target.ok_or_else(|| wrong_type("worker_target", "a text"))?;
    let allowed_tools = match document.get("allowed_tools") {
        None | Some(Value::Null) => None,
        Some(list) => Some(
            serde_json::from_value(list.clone())
                .map_err(|_| wrong_type("allowed_tools", "a list of names and patterns"))?,
        ),
    };
    let profile = document.get("profile").filter(|profile| !profile.is_null());
    Ok(AgentEntry {
        project: project.to_owned(),
        agent_id,
        worker_target: worker_target.to_owned(),
        profile: profile.map(Json::from_value),
        allowed_tools,
        updated_ms: 0,
        definition: None,
    })
}

/// Refuses unknown fields of an entry of the roster: a misspelt restriction would not restrict.
fn refuse_unknown_roster_fields(document: &Value) -> Result<(), Error> {
    let given = document.as_object().into_iter().flatten();
    let unknown: Vec<UnknownField> = given
        .filter(|(name, value)| !value.is_null() || !CALLABLE_FIELDS.contains(&name.as_str()))
        .map(|(name, _)| name.as_str())
        .filter(|name| !ROSTER_FIELDS.contains(name) && !RESPONSE_FIELDS.contains(name))
        .map(|name| UnknownField::new("", name, ROSTER_FIELDS))
        .collect();
    refuse_unknown_fields(&unknown)
}

/// Returns the id of an agent: the one from elsewhere, or that of its document.
fn resolve_agent_id(expected: Option<&str>, in_document: Option<String>) -> Result<String, Error> {
    match (expected, in_document) {
        (Some(expected), Some(id)) if !id.is_empty() && id != expected => {
            let message = format!("agent_id is \"{id}\", and the request is about \"{expected}\"");
            Err(invalid("agent_id", message))
        }
        (Some(expected), _) => Ok(expected.to_owned()),
        (None, Some(id)) => Ok(id),
        (None, None) => Err(invalid("agent_id", "agent_id is missing".to_owned())),
    }
}

/// Reads an agent from a document: the body of `PUT /v1/agents/{agent_id}`, an entry of the
/// configuration, or a file. `agent_id` is the id from elsewhere, such as a path.
///
/// # Errors
///
/// Refuses a document with unknown fields, wrong types, or another id.
pub fn parse_agent_definition(
    agent_id: Option<&str>,
    document: &Value,
) -> Result<AgentDefinition, Error> {
    let mut document = document.clone();
    if let Some(fields) = document.as_object_mut() {
        fields.retain(|name, value| !value.is_null() && !RESPONSE_FIELDS.contains(&name.as_str()));
    }
    let read = serde_json::from_value::<AgentDocument>(document);
    let document = read.map_err(|error| {
        let fault = Fault::new(Code::ValidationError, format!("the agent cannot be read: {error}"));
        Error::from(fault.without_side_effect())
    })?;
    Ok(AgentDefinition {
        agent_id: resolve_agent_id(agent_id, document.agent_id)?,
        profile: document.profile,
        driver: document.driver,
        worker_target: document.worker_target,
        wakeup_url: document.wakeup_url,
        on_parent_end: document.on_parent_end,
        ..AgentDefinition::default()
    })
}

fn find_entry<'a>(catalog: &'a Catalog, project: &str, agent_id: &str) -> Option<&'a AgentEntry> {
    let roster = &catalog.directory().roster;
    roster.iter().find(|entry| entry.project == project && entry.agent_id == agent_id)
}

/// Returns the roster's entry of an agent that can be called.
fn to_entry(project: &str, definition: AgentDefinition, updated_ms: u64) -> AgentEntry {
    AgentEntry {
        project: project.to_owned(),
        agent_id: definition.agent_id.clone(),
        worker_target: definition.worker_target.clone().unwrap_or_default(),
        profile: None,
        allowed_tools: definition.profile.tools.clone(),
        updated_ms,
        definition: Some(Box::new(definition)),
    }
}

fn check_token(field: &str, word: &str) -> Result<(), Error> {
    if is_token(word) {
        return Ok(());
    }
    let message = format!("{field} must be a valid NATS token: no spaces, dots, * or >");
    Err(invalid(field, message))
}

fn invalid(pointer: &str, message: String) -> Error {
    let fault = Fault::new(Code::ValidationError, message).without_side_effect();
    fault.with_detail(json!({ "pointer": format!("/{pointer}") })).into()
}

fn check_definition(definition: &AgentDefinition) -> Result<(), Error> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
    let agent_id = &definition.agent_id;
    if !(1..=64).contains(&agent_id.len())
        || !agent_id.chars().all(is_plain)
        || !agent_id.starts_with(|c: char| c.is_ascii_alphanumeric())
    {
        let message = "agent_id must have 1 to 64 letters, digits, '_' and '-', and begin with a \
                       letter or digit";
        return Err(invalid("agent_id", message.to_owned()));
    }
    match (&definition.worker_target, definition.driver) {
        (Some(target), _) => check_token("worker_target", target)?,
        (None, AgentDriver::Worker) if definition.wakeup_url.is_none() => {
            let message = "worker_target or wakeup_url is missing: a worker drives this agent";
            return Err(invalid("worker_target", message.to_owned()));
        }
        (None, _) => {}
    }
    if let Some((field, problem)) = definition.profile.find_problem() {
        return Err(invalid(&format!("profile/{field}"), format!("profile/{field} {problem}")));
    }
    Ok(())
}

/// Bounds an agent by its creator.
fn narrow_to_creator(
    mut definition: AgentDefinition,
    creator: &AgentDefinition,
) -> Result<AgentDefinition, Error> {
    let narrowed = definition.profile.narrowed_to(&creator.profile).map_err(|problem| {
        let message = format!(
            "agent \"{}\" would exceed its creator \"{}\": {problem}",
            definition.agent_id, creator.agent_id
        );
        invalid("profile", message)
    });
    definition.profile = narrowed?;
    definition.derived_from = Some(creator.agent_id.clone());
    Ok(definition)
}

/// Checks that an agent may define or replace this entry.
fn check_author(
    existing: Option<&AgentEntry>,
    author: &str,
    driver: AgentDriver,
) -> Result<(), Error> {
    if driver == AgentDriver::Worker {
        let message = "only an operator defines agents that a worker drives";
        return Err(Error::refused(Code::PermissionDenied, message));
    }
    let is_own = |entry: &AgentEntry| {
        entry.definition.as_ref().is_some_and(|agent| agent.created_by == author)
    };
    match existing {
        Some(entry) if !is_own(entry) => {
            let message = format!("agent \"{}\" was defined by someone else", entry.agent_id);
            Err(Error::refused(Code::PermissionDenied, message))
        }
        _ => Ok(()),
    }
}

fn check_agent_count(
    catalog: &Catalog,
    project: &str,
    existing: Option<&AgentEntry>,
) -> Result<(), Error> {
    let agents = catalog.directory().roster.iter().filter(|entry| entry.project == project);
    if existing.is_some() || agents.count() < MAX_AGENTS {
        return Ok(());
    }
    let message = format!("the project would have more than {MAX_AGENTS} agents");
    Err(Error::refused(Code::PayloadTooLarge, message))
}

fn check_tool_name_free(catalog: &Catalog, project: &str, agent_id: &str) -> Result<(), Error> {
    let name = agent_tool_name(agent_id);
    let existing = catalog.find(project, &name);
    if existing.is_none_or(|existing| existing.definition.executor == Executor::AGENT) {
        return Ok(());
    }
    let message = format!("there is a tool \"{name}\" already; choose another agent_id");
    Err(Error::refused(Code::Conflict, message))
}
