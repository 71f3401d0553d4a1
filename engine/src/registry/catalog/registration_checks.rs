//! Checks a client's registration against the tools that already exist.

use serde_json::json;

use super::{Catalog, ClientRegistration, RESULT_READ, RUN_FINISH, require_client_owner};
use crate::domain::caller::Caller;
use crate::domain::fault::{Code, Error, Fault};
use crate::domain::tool::{Executor, ToolDefinition, helper_name_conflict, is_mcp_helper_name};
use crate::ports::core::EngineLimits;
use crate::registry::model_tool_names;

pub(super) fn check_registration(
    catalog: &Catalog,
    caller: &Caller,
    registration: &ClientRegistration,
    limits: &EngineLimits,
) -> Result<(), Error> {
    require_client_owner(catalog, caller, &registration.client_id)?;
    if catalog.client(&caller.project, &registration.client_id).is_none() {
        let clients = catalog.directory.clients.iter();
        let limit = limits.max_clients_per_project;
        if clients.filter(|client| client.project == caller.project).count() >= limit {
            let message = format!(
                "the project would have more than {limit} clients, which stay registered: use the \
                 same client_id at every start, and unregister unused clients (DELETE \
                 /internal/clients/CLIENT_ID)"
            );
            return Err(Error::refused(Code::PayloadTooLarge, message));
        }
    }
    let limit = limits.max_tools_per_project;
    for tool in &registration.tools {
        if let Some(message) = registration_conflict(catalog, caller, &registration.client_id, tool)
        {
            let fault = Fault::new(Code::Conflict, message);
            return Err(fault.with_detail(json!({ "tool": tool.name })).into());
        }
    }
    let owned = catalog.project_tools.count(&caller.project);
    // A tool that the project already has does not count as another one.
    let is_new =
        |tool: &&ToolDefinition| catalog.project_tools.get(&caller.project, &tool.name).is_none();
    let new = registration.tools.iter().filter(is_new).count();
    if new > 0 && owned + new > limit {
        let message = format!("the project would have more than {limit} tools");
        return Err(Error::refused(Code::PayloadTooLarge, message));
    }
    Ok(())
}

/// Returns the reason why this client cannot offer a tool, if there is one.
fn registration_conflict(
    catalog: &Catalog,
    caller: &Caller,
    client_id: &str,
    tool: &ToolDefinition,
) -> Option<String> {
    let name = &tool.name;
    if is_mcp_helper_name(name) {
        return Some(helper_name_conflict(name));
    }
    if catalog.shared_tools.contains_key(name) || matches!(name.as_str(), RESULT_READ | RUN_FINISH)
    {
        return Some(format!("\"{name}\" is a built-in tool; choose another name"));
    }
    // Models call a built-in tool by this name. A tool that has it as its exact name would be
    // called instead.
    if let Some(shadowed) =
        catalog.shared_tools.keys().find(|shared| model_tool_names::name_for_model(shared) == *name)
    {
        let message =
            format!("\"{name}\" is the model-facing name of \"{shadowed}\"; choose another name");
        return Some(message);
    }
    let existing = &catalog.project_tools.get(&caller.project, name)?.definition;
    if existing.executor != Executor::CLIENT {
        return Some(format!("\"{name}\" is not a tool of clients"));
    }
    let other_clients =
        catalog.offered_by(&caller.project, name).iter().filter(|id| *id != client_id);
    let other_clients: Vec<&String> = other_clients.collect();
    if other_clients.is_empty() {
        return None;
    }
    if !have_same_schemas(existing, tool) {
        return Some(format!(
            "\"{name}\" is offered by another client with a different schema; offer it with the \
             same schema, or under another name"
        ));
    }
    let client = |id: &String| catalog.client(&caller.project, id);
    let foreign =
        other_clients.iter().any(|id| client(id).is_some_and(|c| c.owner != caller.agent));
    if !foreign || caller.may_administer() {
        return None;
    }
    let field = first_difference(existing, tool)?;
    Some(format!(
        "\"{name}\" is offered by a client of another key with a different {field}; offer it as it \
         is, or under another name"
    ))
}

fn have_same_schemas(left: &ToolDefinition, right: &ToolDefinition) -> bool {
    left.input_schema == right.input_schema && left.output_schema == right.output_schema
}

/// Returns the first field, other than the schemas, in which two definitions of one tool differ.
/// The fields compared decide how the tool is executed and how models see it.
fn first_difference(left: &ToolDefinition, right: &ToolDefinition) -> Option<&'static str> {
    let same = [
        ("effect", left.effect == right.effect),
        ("risk", left.risk == right.risk),
        ("timeout_ms", left.timeout_ms == right.timeout_ms),
        ("async", left.background == right.background),
        ("policy", left.policy == right.policy),
        ("fallback", left.fallback == right.fallback),
        ("description", left.description == right.description),
    ];
    same.into_iter().find(|(_, same)| !same).map(|(field, _)| field)
}
