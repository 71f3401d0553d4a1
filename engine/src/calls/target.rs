//! Routes a call: resolves its tool and fallbacks, its client, and the concurrency limits that
//! apply.

use std::sync::Arc;

use serde_json::{Value, json};

use crate::calls::Dispatcher;
use crate::calls::limiter::{ConcurrencyCaps, QueueKey, SlotScope};
use crate::domain::call::{Call, Target};
use crate::domain::caller::Caller;
use crate::domain::fault::{Code, Error, Fault};
use crate::domain::json::Json;
use crate::domain::tool::{Executor, Fallback, SourceTraits, args};
use crate::registry::catalog::{Catalog, CatalogEntry as Compiled};

impl Dispatcher {
    /// Resolves the fallbacks that could execute this call: existing, allowed, with valid
    /// arguments, and offered by the client that the call is pinned to.
    pub(crate) fn resolve_fallbacks(
        &self,
        catalog: &Catalog,
        caller: &Caller,
        tool: &Compiled,
        args: &Value,
        call: &Call,
    ) -> Vec<Target> {
        let alternates = self.fallbacks_of(tool);
        let pinned = call.origin.client_id.as_deref();
        let mut targets = Vec::new();
        for alternate in alternates {
            let allowed = catalog.authorize(caller, &alternate.tool).is_allowed();
            let found = catalog.find(&caller.project, &alternate.tool).filter(|_| allowed);
            let Some(other) = found else { continue };
            let by_client = other.definition.executor == Executor::CLIENT;
            if by_client && !can_execute(catalog, &caller.project, &other, pinned) {
                continue;
            }
            let mut mapped = args::map_arguments(alternate.args.as_ref(), args);
            if let Some(rules) = &other.rules {
                mapped = rules.apply(&mapped, &args::TemplateVars::for_call(call)).args;
            }
            if other.input_schema.problems(&mapped).is_empty() {
                targets.push(self.build_target(&other, Json::from_value(&mapped)));
            }
        }
        targets
    }

    /// Returns the fallback tools of a tool: those that the operator set, or its definition's.
    pub(crate) fn fallbacks_of<'a>(&'a self, tool: &'a Compiled) -> &'a [Fallback] {
        let over = self.core.policies.tools.get(&tool.definition.name).map(|over| &over.fallback);
        over.filter(|list| !list.is_empty()).unwrap_or(&tool.definition.fallback)
    }

    /// Builds the target of a call to this tool.
    pub(crate) fn build_target(&self, tool: &Compiled, args: Json) -> Target {
        Target {
            tool: tool.definition.name.clone(),
            version: tool.version.clone(),
            executor: tool.definition.executor,
            traits: self.source_traits(tool.definition.executor),
            effect: tool.definition.effect,
            args,
        }
    }

    /// Returns the traits of the source that executes these tools.
    pub(crate) fn source_traits(&self, executor: Executor) -> SourceTraits {
        self.sources.get(&executor).map_or_else(|| executor.traits(), |source| source.traits())
    }

    /// Returns the scope that an attempt's slot counts against, and its limits.
    pub(crate) fn resolve_slot_scope(&self, call: &Call) -> (SlotScope, ConcurrencyCaps) {
        // Calls that the caller executes take no slot of any tool. No tool can have this name.
        let key_for = |tool: &str| {
            Arc::new(QueueKey { project: call.project.clone(), tool: tool.to_owned() })
        };
        if call.target.executor == Executor::CALLER {
            return (
                SlotScope { queue: key_for("(caller)"), is_local: false },
                ConcurrencyCaps::default(),
            );
        }
        let (queue, is_local) = (key_for(&call.target.tool), !call.target.traits.reports_later);
        let caps = self.resolve_caps(&queue).unwrap_or_else(|| self.project_caps(&call.project));
        (SlotScope { queue, is_local }, caps)
    }

    /// Returns the present concurrency limits of a queue; `None` if its tool no longer exists.
    pub(crate) fn resolve_caps(&self, queue: &QueueKey) -> Option<ConcurrencyCaps> {
        let entry = self.registry.catalog().find(&queue.project, &queue.tool)?;
        let over = self.core.policies.tools.get(&queue.tool).and_then(|o| o.policy.max_parallel);
        let tool = over.or(entry.definition.policy.max_parallel);
        Some(ConcurrencyCaps { tool, ..self.project_caps(&queue.project) })
    }

    fn project_caps(&self, project: &str) -> ConcurrencyCaps {
        let project_limit = self.core.policies.projects.get(project).and_then(|p| p.max_parallel);
        ConcurrencyCaps {
            global: self.core.policies.global.max_parallel,
            project: project_limit,
            tool: None,
        }
    }
}

/// Checks that the client that a call is pinned to offers the tool.
pub(crate) fn check_pinned_client(
    catalog: &Catalog,
    caller: &Caller,
    tool: &Compiled,
    client_id: Option<&str>,
) -> Result<(), Error> {
    let Some(client_id) = client_id else { return Ok(()) };
    if can_execute(catalog, &caller.project, tool, Some(client_id)) {
        return Ok(());
    }
    let message = format!("client \"{client_id}\" does not offer \"{}\"", tool.definition.name);
    let fault = Fault::new(Code::ValidationError, message).without_side_effect();
    Err(fault.with_detail(json!({ "pointer": "/client_id" })).into())
}

/// Returns true if the call is not pinned to a client, or that client offers this tool.
fn can_execute(catalog: &Catalog, project: &str, tool: &Compiled, client_id: Option<&str>) -> bool {
    let offered_by = || catalog.offered_by(project, &tool.definition.name);
    client_id.is_none_or(|client_id| offered_by().iter().any(|id| id == client_id))
}
