//! Projects, their tool definitions, and the roster of agents that can be woken.

use std::sync::Arc;

use serde_json::{Value, json};

use super::admin::check_word;
use super::catalog::{Catalog, Entry, require_provider};
use super::{Engine, Inner, unavailable};
use crate::call::Call;
use crate::caller::{Caller, Trust};
use crate::directory::{Change, Project};
use crate::fault::{Code, Error, Fault};
use crate::tool::{Definition, Executor, check_name};
use crate::utp::{Binding, Member, RESERVED_NAMES, is_token};

/// The project that always exists.
pub const DEFAULT_PROJECT: &str = "default";

impl Engine {
    /// Creates a project.
    pub async fn create_project(
        &self,
        caller: &Caller,
        id: &str,
        title: &str,
    ) -> Result<Project, Error> {
        let inner = &self.inner;
        self.require_admin(caller, Some(id))?;
        check_word("project_id", id)?;
        if !is_token(id) {
            let message = "project_id must be able to stand in a NATS subject: no dot, no *";
            return Err(Error::refused(Code::ValidationError, message));
        }
        let created_ms = inner.clock.now_ms();
        let project = Project { id: id.to_owned(), title: title.to_owned(), created_ms };
        inner
            .change(|catalog| {
                if catalog.directory().projects.iter().any(|known| known.id == id) {
                    let message = format!("there is a project \"{id}\" already");
                    return Err(Error::refused(Code::Conflict, message));
                }
                Ok((Change::AddProject(project.clone()), None))
            })
            .await?;
        Ok(project)
    }

    /// Returns the projects the caller may see: its own, or all of them for the local operator.
    pub fn projects(&self, caller: &Caller) -> Vec<Project> {
        let catalog = self.inner.catalog();
        let mut projects = catalog.directory().projects.clone();
        let keys = catalog.directory().keys.iter().map(|key| (&key.project, key.created_ms));
        let implied = std::iter::once((&caller.project, 0)).chain(keys);
        for (id, created_ms) in implied {
            if !projects.iter().any(|known| known.id == *id) {
                projects.push(Project { id: id.clone(), title: String::new(), created_ms });
            }
        }
        projects.retain(|project| caller.trust == Trust::Local || project.id == caller.project);
        projects.sort_by(|a, b| a.id.cmp(&b.id));
        projects
    }

    /// Returns the caller, switched to the named project. A key gives access to its own project
    /// only; any other project is answered exactly as one that does not exist.
    pub fn in_project(&self, caller: &Caller, project: &str) -> Result<Caller, Error> {
        let there = self.projects(caller).iter().any(|known| known.id == project);
        if there || project == DEFAULT_PROJECT && caller.trust == Trust::Local {
            return Ok(Caller { project: project.to_owned(), ..caller.clone() });
        }
        Err(no_project(project))
    }

    /// Requires that a project exists: created explicitly, or implied by a key, a tool or an agent.
    pub fn require_project(&self, project: &str) -> Result<(), Error> {
        let catalog = self.inner.catalog();
        let directory = catalog.directory();
        let there = project == DEFAULT_PROJECT
            || directory.projects.iter().any(|known| known.id == project)
            || directory.keys.iter().any(|key| key.project == project)
            || directory.roster.iter().any(|member| member.project == project)
            || directory.tools.iter().any(|tool| tool.project.as_deref() == Some(project));
        match there {
            true => Ok(()),
            false => Err(no_project(project)),
        }
    }

    /// Adds or replaces a tool of the project. The checks that need the project come first, in the
    /// order of the protocol.
    pub async fn put_tool(
        &self,
        caller: &Caller,
        definition: Definition,
    ) -> Result<Arc<Entry>, Error> {
        let name = definition.name.clone();
        self.put_tools(caller, vec![definition]).await?;
        self.project_tool(caller, &name)
    }

    /// Adds or replaces several tools atomically.
    pub async fn put_tools(&self, caller: &Caller, tools: Vec<Definition>) -> Result<(), Error> {
        require_provider(caller)?;
        for tool in &tools {
            check_name(&tool.name).map_err(|error| bad(error.to_string()))?;
            refuse_reserved(&tool.name, "define")?;
            Entry::compile(tool.clone()).map_err(|fault| bad(fault.message))?;
        }
        let inner = &self.inner;
        let limit = inner.limits.max_tools_per_project;
        let names: Vec<&str> = tools.iter().map(|tool| tool.name.as_str()).collect();
        let listed: String = names.join(" ").chars().take(500).collect();
        let more = |catalog: &Catalog| {
            let own = |name: &&&str| catalog.find(&caller.project, name).is_none();
            names.iter().filter(own).count()
        };
        inner
            .change(|catalog| {
                for name in &names {
                    refuse_taken(catalog, &caller.project, name)?;
                }
                if catalog.tools(&caller.project).len() + more(catalog) > limit {
                    let message = format!("the project would have more than {limit} tools");
                    return Err(Error::refused(Code::PayloadTooLarge, message));
                }
                let entry = inner.entry(caller, &caller.project, "tool.set", &listed, "");
                Ok((Change::PutTools(tools.clone()), Some(entry)))
            })
            .await
    }

    /// Returns a tool defined by the project, with its full definition.
    pub fn project_tool(&self, caller: &Caller, name: &str) -> Result<Arc<Entry>, Error> {
        require_owner(caller)?;
        let found = self.inner.catalog().find(&caller.project, name).filter(is_projects_own);
        found.ok_or_else(|| Error::refused(Code::NotFound, format!("tool not found: \"{name}\"")))
    }

    /// Returns the tools defined by the project, sorted by name, with their full definitions.
    pub fn project_tools(&self, caller: &Caller) -> Result<Vec<Arc<Entry>>, Error> {
        require_owner(caller)?;
        let mut tools = self.inner.catalog().tools(&caller.project);
        tools.retain(is_projects_own);
        Ok(tools)
    }

    /// Removes a tool of the project. Calls already made with it continue.
    pub async fn drop_tool(&self, caller: &Caller, name: &str) -> Result<(), Error> {
        require_provider(caller)?;
        refuse_reserved(name, "delete")?;
        let inner = &self.inner;
        inner
            .change(|_| {
                self.project_tool(caller, name)?;
                let change =
                    Change::DropTool { project: caller.project.clone(), name: name.to_owned() };
                let entry = inner.entry(caller, &caller.project, "tool.removed", name, "");
                Ok((change, Some(entry)))
            })
            .await
    }

    /// Adds an agent to the roster, or replaces its entry.
    pub async fn put_member(&self, caller: &Caller, mut member: Member) -> Result<Member, Error> {
        self.require_admin(caller, Some(&member.project))?;
        for (field, word) in
            [("agent_id", &member.agent_id), ("worker_target", &member.worker_target)]
        {
            if !is_token(word) {
                let message =
                    format!("{field} must be able to stand in a NATS subject: no blank, no dot");
                let fault = Fault::new(Code::ValidationError, message);
                return Err(fault.with_detail(json!({ "pointer": format!("/{field}") })).into());
            }
        }
        member.updated_ms = self.inner.clock.now_ms();
        self.inner.change(|_| Ok((Change::PutMember(member.clone()), None))).await?;
        Ok(member)
    }

    /// Removes an agent from the roster.
    pub async fn drop_member(&self, caller: &Caller, agent_id: &str) -> Result<(), Error> {
        self.require_admin(caller, None)?;
        self.member(caller, agent_id)?;
        let (project, agent_id) = (caller.project.clone(), agent_id.to_owned());
        self.inner
            .change(|_| {
                let (project, agent_id) = (project.clone(), agent_id.clone());
                Ok((Change::DropMember { project, agent_id }, None))
            })
            .await
    }

    /// Returns the project's roster.
    pub fn roster(&self, caller: &Caller) -> Vec<Member> {
        let catalog = self.inner.catalog();
        let mine = catalog.directory().roster.iter().filter(|m| m.project == caller.project);
        mine.cloned().collect()
    }

    /// Returns one agent of the roster.
    pub fn member(&self, caller: &Caller, agent_id: &str) -> Result<Member, Error> {
        let found = self.inner.member(&caller.project, agent_id);
        found.ok_or_else(|| {
            let message = format!("agent \"{agent_id}\" is not on the roster");
            Error::refused(Code::NotFound, message)
        })
    }
}

impl Inner {
    pub(super) fn member(&self, project: &str, agent_id: &str) -> Option<Member> {
        let catalog = self.catalog();
        let roster = &catalog.directory().roster;
        roster.iter().find(|m| m.project == project && m.agent_id == agent_id).cloned()
    }

    /// Loads the binding of a call's tool, in the version that the call was made with.
    pub(super) async fn binding_of(&self, call: &Call) -> Result<Option<Binding>, Error> {
        let target = &call.target;
        if !matches!(target.executor, Executor::Utp | Executor::Http) {
            return Ok(None);
        }
        if let Some(entry) = self.catalog().find(&call.project, &target.tool)
            && entry.version == target.version
        {
            return Ok(entry.definition.utp.clone());
        }
        let utp = self.store.utp();
        let old = utp.tool_version(&call.project, &target.tool, &target.version).await;
        Ok(old.map_err(unavailable)?.and_then(|definition| definition.utp))
    }
}

/// Requires the right to read definitions. They contain what no model sees: preset arguments, names
/// of secrets, addresses.
fn require_owner(caller: &Caller) -> Result<(), Error> {
    if caller.may_provide() {
        return Ok(());
    }
    let message = format!(
        "a key with the role {} cannot read definitions; the tools it may call are at /v1/tools",
        caller.role.as_str()
    );
    Err(Error::refused(Code::PermissionDenied, message))
}

fn no_project(project: &str) -> Error {
    let shown: String = project.chars().take(80).collect();
    Error::refused(Code::NotFound, format!("project not found: \"{shown}\""))
}

fn is_projects_own(entry: &Arc<Entry>) -> bool {
    let by_others = matches!(entry.definition.executor, Executor::Client | Executor::Mcp);
    entry.definition.project.is_some() && !by_others
}

fn refuse_taken(catalog: &Catalog, project: &str, name: &str) -> Result<(), Error> {
    let taken = catalog.find(project, name).is_some_and(|known| {
        known.definition.project.is_none()
            || matches!(known.definition.executor, Executor::Client | Executor::Mcp)
    });
    if taken {
        let message =
            format!("\"{name}\" is the name of a built-in, of a client's or an upstream's tool");
        return Err(Error::refused(Code::Conflict, message));
    }
    Ok(())
}

fn refuse_reserved(name: &str, verb: &str) -> Result<(), Error> {
    if RESERVED_NAMES.contains(&name) {
        return Err(bad(format!("cannot {verb} internal tool \"{name}\": the name is reserved")));
    }
    Ok(())
}

fn bad(message: String) -> Error {
    Fault::new(Code::BadRequest, message).not_happened().into()
}

/// Checks that every array in a schema has `items`. Without them models invent elements.
pub fn check_arrays(schema: &Value, pointer: &str) -> Result<(), String> {
    let Value::Object(map) = schema else { return Ok(()) };
    let is_array = match map.get("type") {
        Some(Value::String(kind)) => kind == "array",
        Some(Value::Array(kinds)) => kinds.iter().any(|kind| kind == "array"),
        _ => false,
    };
    let has_items =
        map.get("items").and_then(Value::as_object).is_some_and(|items| !items.is_empty());
    if is_array && !has_items {
        return Err(format!("parameters{pointer} is an array and needs a non-empty object items"));
    }
    if let Some(items) = map.get("items") {
        check_arrays(items, &format!("{pointer}/items"))?;
    }
    for name in ["properties", "$defs", "definitions"] {
        for (key, inner) in map.get(name).and_then(Value::as_object).into_iter().flatten() {
            check_arrays(inner, &format!("{pointer}/{name}/{key}"))?;
        }
    }
    for name in ["anyOf", "oneOf", "allOf"] {
        let all = map.get(name).and_then(Value::as_array).into_iter().flatten();
        for (n, inner) in all.enumerate() {
            check_arrays(inner, &format!("{pointer}/{name}/{n}"))?;
        }
    }
    Ok(())
}
