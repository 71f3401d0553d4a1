//! Projects, their tool definitions, and their agents.

mod agents;

pub use agents::{ParsedAgent, parse_agent, parse_agent_definition};

use std::sync::Arc;

use serde_json::Value;

use super::catalog::{Catalog, CatalogEntry, compile_definitions, require_provider};
use crate::domain::call::Call;
use crate::domain::caller::{Caller, DEFAULT_PROJECT};
use crate::domain::directory::{DirectoryChange, Project};
use crate::domain::fault::{Code, Error, Fault};
use crate::domain::tool::{Executor, ToolDefinition, check_tool_name, is_mcp_helper_name};
use crate::domain::utp::{Binding, RESERVED_NAMES, is_token};
use crate::ports::core::from_store_error;
use crate::registry::keys::check_identifier;
use crate::registry::{Projects, Registry};

impl Projects {
    /// Creates a project.
    pub async fn create(&self, caller: &Caller, id: &str, title: &str) -> Result<Project, Error> {
        self.registry.require_admin(caller, Some(id))?;
        check_identifier("project_id", id)?;
        if !is_token(id) {
            let message = "project_id must be a valid NATS token: no spaces, dots, * or >";
            return Err(Error::refused(Code::ValidationError, message));
        }
        let created_ms = self.core.clock.wall_ms();
        let project = Project { id: id.to_owned(), title: title.to_owned(), created_ms };
        self.registry
            .change_directory(|catalog| {
                if catalog.directory().projects.iter().any(|existing| existing.id == id) {
                    let message = format!("there is a project \"{id}\" already");
                    return Err(Error::refused(Code::Conflict, message));
                }
                Ok((DirectoryChange::AddProject(project.clone()), None))
            })
            .await?;
        Ok(project)
    }

    /// Returns the projects the caller may see: its own, or all of them for the local operator.
    pub fn list(&self, caller: &Caller) -> Vec<Project> {
        let catalog = self.registry.catalog();
        let mut projects = catalog.directory().projects.clone();
        let keys = catalog.directory().keys.iter().map(|key| (&key.project, key.created_ms));
        let implied = std::iter::once((&caller.project, 0)).chain(keys);
        for (id, created_ms) in implied {
            if !projects.iter().any(|existing| existing.id == *id) {
                projects.push(Project { id: id.clone(), title: String::new(), created_ms });
            }
        }
        projects.retain(|project| caller.spans_projects() || project.id == caller.project);
        projects.sort_by(|a, b| a.id.cmp(&b.id));
        projects
    }

    /// Returns the caller, switched to the named project. A key gives access to its own project
    /// only; any other project is answered exactly as one that does not exist.
    pub fn switch_project(&self, caller: &Caller, project: &str) -> Result<Caller, Error> {
        let exists = self.list(caller).iter().any(|existing| existing.id == project);
        if exists || project == DEFAULT_PROJECT && caller.spans_projects() {
            return Ok(Caller { project: project.to_owned(), ..caller.clone() });
        }
        Err(project_not_found(project))
    }

    /// Requires that a project exists: created explicitly, or implied by a key, a tool or an agent.
    pub fn require_project(&self, project: &str) -> Result<(), Error> {
        let catalog = self.registry.catalog();
        let directory = catalog.directory();
        let exists = project == DEFAULT_PROJECT
            || directory.projects.iter().any(|existing| existing.id == project)
            || directory.keys.iter().any(|key| key.project == project)
            || directory.roster.iter().any(|entry| entry.project == project)
            || directory.tools.iter().any(|tool| tool.project.as_deref() == Some(project));
        match exists {
            true => Ok(()),
            false => Err(project_not_found(project)),
        }
    }

    /// Adds or replaces a tool of the project, and returns it.
    pub async fn put_tool(
        &self,
        caller: &Caller,
        definition: ToolDefinition,
    ) -> Result<Arc<CatalogEntry>, Error> {
        let name = definition.name.clone();
        self.put_tools(caller, vec![definition]).await?;
        self.tool(caller, &name)
    }

    /// Adds or replaces several tools atomically.
    pub async fn put_tools(
        &self,
        caller: &Caller,
        tools: Vec<ToolDefinition>,
    ) -> Result<(), Error> {
        require_provider(caller)?;
        for tool in &tools {
            check_tool_name(&tool.name).map_err(|error| bad_request(error.to_string()))?;
            check_name_not_reserved(&tool.name, "define")?;
        }
        let compiled = compile_definitions(&caller.project, tools.clone()).await;
        let compiled = compiled.map_err(|(_, error)| into_bad_request(error))?;
        self.registry.check_registration_rules(caller, &compiled).await?;
        let limit = self.core.limits.max_tools_per_project;
        let names: Vec<&str> = tools.iter().map(|tool| tool.name.as_str()).collect();
        let listed: String = names.join(" ").chars().take(500).collect();
        let count_new = |catalog: &Catalog| {
            let is_new = |name: &&&str| catalog.find(&caller.project, name).is_none();
            names.iter().filter(is_new).count()
        };
        self.registry
            .change_directory_with(&compiled, |catalog| {
                for name in &names {
                    check_name_free(catalog, &caller.project, name)?;
                }
                if catalog.tools(&caller.project).len() + count_new(catalog) > limit {
                    let message = format!("the project would have more than {limit} tools");
                    return Err(Error::refused(Code::PayloadTooLarge, message));
                }
                let entry =
                    self.registry.audit_entry(caller, &caller.project, "tool.set", &listed, "");
                Ok((DirectoryChange::PutTools(tools.clone()), Some(entry)))
            })
            .await
    }

    /// Returns a tool defined by the project, with its full definition.
    pub fn tool(&self, caller: &Caller, name: &str) -> Result<Arc<CatalogEntry>, Error> {
        require_definition_access(caller)?;
        let found = self.registry.catalog().find(&caller.project, name).filter(is_project_defined);
        found.ok_or_else(|| Error::refused(Code::NotFound, format!("tool not found: \"{name}\"")))
    }

    /// Returns the tools defined by the project, sorted by name, with their full definitions.
    pub fn tools(&self, caller: &Caller) -> Result<Vec<Arc<CatalogEntry>>, Error> {
        require_definition_access(caller)?;
        let mut tools = self.registry.catalog().tools(&caller.project);
        tools.retain(is_project_defined);
        Ok(tools)
    }

    /// Removes a tool of the project. Calls already made with it continue.
    pub async fn remove_tool(&self, caller: &Caller, name: &str) -> Result<(), Error> {
        require_provider(caller)?;
        check_name_not_reserved(name, "delete")?;
        self.registry
            .change_directory(|_| {
                self.tool(caller, name)?;
                let change = DirectoryChange::DropTool {
                    project: caller.project.clone(),
                    name: name.to_owned(),
                };
                let entry =
                    self.registry.audit_entry(caller, &caller.project, "tool.removed", name, "");
                Ok((change, Some(entry)))
            })
            .await
    }
}

impl Registry {
    /// Loads the binding of a call's tool, in the version that the call was made with.
    pub(crate) async fn load_binding(&self, call: &Call) -> Result<Option<Binding>, Error> {
        let target = &call.target;
        if !target.traits.needs_command {
            return Ok(None);
        }
        if let Some(entry) = self.catalog().find(&call.project, &target.tool)
            && entry.version == target.version
        {
            return Ok(entry.definition.binding.clone());
        }
        let utp = self.core.store.utp();
        let old = utp.tool_version(&call.project, &target.tool, &target.version).await;
        Ok(old.map_err(from_store_error)?.and_then(|definition| definition.binding))
    }
}

/// Requires the right to read definitions. They contain what no model sees: preset arguments, names
/// of secrets, addresses.
fn require_definition_access(caller: &Caller) -> Result<(), Error> {
    if caller.may_provide() {
        return Ok(());
    }
    let message = format!(
        "a key with the role {} cannot read definitions; the tools it may call are at /v1/tools",
        caller.roles
    );
    Err(Error::refused(Code::PermissionDenied, message))
}

fn project_not_found(project: &str) -> Error {
    let excerpt: String = project.chars().take(80).collect();
    let hint = "GET /projects lists the projects that you may use";
    Error::not_found(format!("project not found: \"{excerpt}\""), hint)
}

fn is_project_defined(entry: &Arc<CatalogEntry>) -> bool {
    let is_executed_elsewhere = matches!(
        entry.definition.executor,
        Executor::CLIENT | Executor::MCP | Executor::AGENT | Executor::HANDOFF
    );
    entry.definition.project.is_some() && !is_executed_elsewhere
}

fn check_name_free(catalog: &Catalog, project: &str, name: &str) -> Result<(), Error> {
    let is_taken = catalog.find(project, name).is_some_and(|existing| {
        existing.definition.project.is_none()
            || matches!(
                existing.definition.executor,
                Executor::CLIENT | Executor::MCP | Executor::AGENT | Executor::HANDOFF
            )
    });
    if is_taken {
        let message = format!(
            "\"{name}\" is the name of a built-in, an agent, a client's or an upstream's tool"
        );
        return Err(Error::refused(Code::Conflict, message));
    }
    Ok(())
}

fn check_name_not_reserved(name: &str, verb: &str) -> Result<(), Error> {
    if RESERVED_NAMES.contains(&name) || verb == "define" && is_mcp_helper_name(name) {
        return Err(bad_request(format!(
            "cannot {verb} internal tool \"{name}\": the name is reserved"
        )));
    }
    Ok(())
}

fn into_bad_request(error: Error) -> Error {
    match error {
        Error::Refused { fault, .. } => bad_request(fault.message),
        other => other,
    }
}

fn bad_request(message: String) -> Error {
    Fault::new(Code::BadRequest, message).without_side_effect().into()
}

/// Checks that every array in a schema has `items`. Without them models invent elements.
pub fn check_array_items(schema: &Value, pointer: &str) -> Result<(), String> {
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
        check_array_items(items, &format!("{pointer}/items"))?;
    }
    for name in ["properties", "$defs", "definitions"] {
        for (key, subschema) in map.get(name).and_then(Value::as_object).into_iter().flatten() {
            check_array_items(subschema, &format!("{pointer}/{name}/{key}"))?;
        }
    }
    for name in ["anyOf", "oneOf", "allOf"] {
        let all = map.get(name).and_then(Value::as_array).into_iter().flatten();
        for (n, subschema) in all.enumerate() {
            check_array_items(subschema, &format!("{pointer}/{name}/{n}"))?;
        }
    }
    Ok(())
}
