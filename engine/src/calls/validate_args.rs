//! Validates the arguments of a call before it is stored: applies the argument rules of the tool's
//! definition, then checks the schema.

use std::sync::Arc;

use serde_json::Value;

use crate::calls::route::check_pinned_client;
use crate::calls::validate_request::{check_request, schema_fault};
use crate::domain::args::{ArgumentRules, TemplateVars};
use crate::domain::call::Call;
use crate::domain::caller::Caller;
use crate::domain::fault::{Code, Error, Fault};
use crate::domain::json::{Json, find_lossy_integer};
use crate::domain::tool::Executor;
use crate::engine::{CallRequest, Core};
use crate::registry::catalog::{Catalog, CatalogEntry as Compiled, tool_not_found};

/// Applies the definition's argument rules, and returns the arguments to execute. Those are the
/// ones that must match the schema. An argument that the definition takes from the environment is
/// removed from the caller's arguments before they are stored.
pub(crate) fn apply_argument_rules(
    tool: &Compiled,
    rules: &ArgumentRules,
    given: &Value,
    call: &mut Call,
) -> Result<Json, Error> {
    let applied = rules.apply(given, &TemplateVars::for_call(call));
    check_schema(tool, &applied.args)?;
    if !applied.overridden_by_env.is_empty() {
        let names = applied.overridden_by_env.join(", ");
        tracing::warn!(tool = call.tool_name, args = names, "dropped: set from the environment");
        let mut kept = given.clone();
        if let Value::Object(kept) = &mut kept {
            kept.retain(|name, _| !applied.overridden_by_env.contains(name));
        }
        call.args = Json::from_value(&kept);
    }
    Ok(Json::from_value(&applied.args))
}

/// Checks the arguments before anything is stored or started. If the definition has argument rules,
/// the check happens after they are applied, in [`apply_argument_rules`].
pub(crate) fn check_args(tool: &Compiled, args: &Value) -> Result<(), Error> {
    if tool.rules.is_some() { Ok(()) } else { check_schema(tool, args) }
}

/// Rejects numbers that lose precision. HTTP requests and UTP cards are written from parsed JSON,
/// so a number of more than 64 bits would arrive as a different one.
fn check_number_precision(tool: &Compiled, given: &Json) -> Result<(), Error> {
    if !matches!(tool.definition.executor, Executor::Http | Executor::Utp) {
        return Ok(());
    }
    let Some(number) = find_lossy_integer(given.text()) else { return Ok(()) };
    let shown: String = number.chars().take(80).collect();
    let name = &tool.definition.name;
    let message = format!(
        "{shown} has more than 64 bits: {name} would get another number; give it as a text"
    );
    Err(Fault::new(Code::ValidationError, message).without_side_effect().into())
}

fn check_schema(tool: &Compiled, args: &Value) -> Result<(), Error> {
    let problems = tool.input_schema.problems(args);
    if problems.is_empty() {
        return Ok(());
    }
    let what = format!("the arguments of {} do not fit its schema", tool.definition.name);
    Err(schema_fault(&what, &problems).without_side_effect().into())
}

impl Core {
    /// Returns the tool if it exists and the request is valid for it.
    pub(crate) fn validate_request(
        &self,
        catalog: &Catalog,
        caller: &Caller,
        found: Option<Arc<Compiled>>,
        asked: &mut CallRequest,
        args: &Value,
    ) -> Result<Arc<Compiled>, Error> {
        let tool = found.ok_or_else(|| tool_not_found(catalog, caller, &asked.tool))?;
        check_request(asked, self.limits.max_args_bytes)?;
        check_args(&tool, args)?;
        check_number_precision(&tool, &asked.args)?;
        check_pinned_client(catalog, caller, &tool, asked.client_id.as_deref())?;
        if let Some(url) = &asked.callback_url {
            asked.callback_url = Some(self.check_callback_url(caller, url)?);
        }
        Ok(tool)
    }
}
