//! Validates the arguments of a call before it is stored: applies the argument rules of the tool's
//! definition, then checks the schema.

use std::sync::Arc;

use serde_json::Value;

use super::catalog::{Catalog, Entry as Compiled, not_found};
use super::envelope::{check_envelope, misfit};
use super::target::check_client;
use super::{Inner, Invocation};
use crate::args::{Rules, Vars};
use crate::call::Call;
use crate::caller::Caller;
use crate::fault::{Code, Error, Fault};
use crate::json::{Json, rounded};
use crate::tool::Executor;

/// Applies the definition's argument rules, and returns the arguments to execute. Those are the
/// ones that must match the schema. An argument that the definition takes from the environment is
/// removed from the caller's arguments before they are stored.
pub(super) fn ruled(
    tool: &Compiled,
    rules: &Rules,
    given: &Value,
    call: &mut Call,
) -> Result<Json, Error> {
    let applied = rules.applied(given, &Vars::of(call));
    fits(tool, &applied.args)?;
    if !applied.dropped.is_empty() {
        let names = applied.dropped.join(", ");
        tracing::warn!(tool = call.tool_name, args = names, "dropped: set from the environment");
        let mut kept = given.clone();
        if let Value::Object(kept) = &mut kept {
            kept.retain(|name, _| !applied.dropped.contains(name));
        }
        call.args = Json::of_value(&kept);
    }
    Ok(Json::of_value(&applied.args))
}

/// Checks the arguments before anything is stored or started. If the definition has argument rules,
/// the check happens after they are applied, in [`apply_argument_rules`].
pub(super) fn check_args(tool: &Compiled, args: &Value) -> Result<(), Error> {
    if tool.rules.is_some() { Ok(()) } else { fits(tool, args) }
}

/// Rejects numbers that lose precision. HTTP requests and UTP cards are written from parsed JSON,
/// so a number of more than 64 bits would arrive as a different one.
fn check_numbers(tool: &Compiled, given: &Json) -> Result<(), Error> {
    if !matches!(tool.definition.executor, Executor::Http | Executor::Utp) {
        return Ok(());
    }
    let Some(number) = rounded(given.text()) else { return Ok(()) };
    let shown: String = number.chars().take(80).collect();
    let name = &tool.definition.name;
    let message = format!(
        "{shown} has more than 64 bits: {name} would get another number; give it as a text"
    );
    Err(Fault::new(Code::ValidationError, message).not_happened().into())
}

fn fits(tool: &Compiled, args: &Value) -> Result<(), Error> {
    let problems = tool.input.problems(args);
    if problems.is_empty() {
        return Ok(());
    }
    let what = format!("the arguments of {} do not fit its schema", tool.definition.name);
    Err(misfit(&what, &problems).not_happened().into())
}

impl Inner {
    /// Returns the tool if it exists and the request is valid for it.
    pub(super) fn fitting(
        &self,
        catalog: &Catalog,
        caller: &Caller,
        found: Option<Arc<Compiled>>,
        asked: &mut Invocation,
        args: &Value,
    ) -> Result<Arc<Compiled>, Error> {
        let tool = found.ok_or_else(|| not_found(catalog, caller, &asked.tool))?;
        check_envelope(asked, self.limits.max_args_bytes)?;
        check_args(&tool, args)?;
        check_numbers(&tool, &asked.args)?;
        check_client(catalog, caller, &tool, asked.client_id.as_deref())?;
        if let Some(url) = &asked.callback_url {
            asked.callback_url = Some(self.check_callback(caller, url)?);
        }
        Ok(tool)
    }
}
