//! Routes a call: resolves its tool and fallbacks, its client, and the concurrency limits that
//! apply; ends it if the access rules no longer allow its tool.

use std::borrow::Cow;
use std::sync::{Arc, Weak};

use serde_json::Value;

use crate::calls::Dispatcher;
use crate::calls::limiter::{ConcurrencyCaps, QueueKey, SlotScope};
use crate::calls::request::{ExecutedArguments, can_execute, fit_applied_arguments, fit_to_schema};
use crate::clients::queue::{DeliveryLimiter, DeliveryPermit};
use crate::domain::access_rules::AccessDecision;
use crate::domain::call::{Call, Status, Target};
use crate::domain::caller::{AuthMethod, Caller, Role};
use crate::domain::json::Json;
use crate::domain::tool::{Executor, Fallback, SourceTraits, args};
use crate::lifecycle::Event;
use crate::registry::authorize::denial_fault;
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
        let fallbacks = self.fallbacks_of(tool);
        let pinned = call.origin.client_id.as_deref();
        let mut targets = Vec::new();
        for fallback in fallbacks {
            let allowed = catalog.authorize(caller, &fallback.tool).is_allowed();
            let found = catalog.find(&caller.project, &fallback.tool).filter(|_| allowed);
            let Some(fallback_tool) = found else { continue };
            let by_client = fallback_tool.definition.executor == Executor::CLIENT;
            if by_client && !can_execute(catalog, &caller.project, &fallback_tool, pinned) {
                continue;
            }
            let mapped = args::map_arguments(fallback.args.as_ref(), args);
            let max_bytes = self.core.limits.max_args_bytes;
            let fitted_args = match &fallback_tool.rules {
                Some(rules) => {
                    let applied = rules.apply(&mapped, &args::TemplateVars::for_call(call));
                    fit_applied_arguments(&fallback_tool, &applied, max_bytes)
                }
                None => {
                    let args = Json::from_value(&mapped);
                    let mapped_args = ExecutedArguments { args, value: Cow::Owned(mapped) };
                    fit_to_schema(&fallback_tool, mapped_args, &[], max_bytes)
                }
            };
            if let Ok(args) = fitted_args {
                targets.push(self.build_target(&fallback_tool, args));
            }
        }
        targets
    }

    /// Returns the fallback tools of a tool: those that the operator set, or its definition's.
    pub(crate) fn fallbacks_of<'a>(&'a self, tool: &'a Compiled) -> &'a [Fallback] {
        let override_fallback =
            self.core.policies.tools.get(&tool.definition.name).map(|tool| &tool.fallback);
        override_fallback.filter(|list| !list.is_empty()).unwrap_or(&tool.definition.fallback)
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
                SlotScope { queue: key_for("(caller)"), is_shared: false },
                ConcurrencyCaps::default(),
            );
        }
        // The client queue takes the shared slot of its work when it hands it to a client.
        let (queue, is_shared) =
            (key_for(&call.target.tool), call.target.executor != Executor::CLIENT);
        let caps = self.resolve_caps(&queue).unwrap_or_else(|| self.project_caps(&call.project));
        (SlotScope { queue, is_shared }, caps)
    }

    /// Returns the present concurrency limits of a queue; `None` if its tool no longer exists.
    pub(crate) fn resolve_caps(&self, queue: &QueueKey) -> Option<ConcurrencyCaps> {
        let entry = self.registry.catalog().find(&queue.project, &queue.tool)?;
        let tool_override = self.core.policies.tools.get(&queue.tool);
        let override_max_parallel = tool_override.and_then(|tool| tool.policy.max_parallel);
        let tool = override_max_parallel.or(entry.definition.policy.max_parallel);
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

/// Counts the work of clients against the limits of the engine and of its project.
pub(crate) struct ClientWorkLimiter {
    pub(crate) dispatcher: Weak<Dispatcher>,
}

impl ClientWorkLimiter {
    fn scope_of(project: &str) -> SlotScope {
        // No tool can have this name.
        let queue = QueueKey { project: project.to_owned(), tool: "(clients)".to_owned() };
        SlotScope { queue: Arc::new(queue), is_shared: true }
    }
}

impl DeliveryLimiter for ClientWorkLimiter {
    fn try_acquire(&self, project: &str) -> Option<DeliveryPermit> {
        let dispatcher = self.dispatcher.upgrade()?;
        let caps = dispatcher.project_caps(project);
        let slot = dispatcher.limiter.try_acquire_delivery(&Self::scope_of(project), &caps)?;
        Some(Box::new(slot))
    }

    fn force_acquire(&self, project: &str) -> Option<DeliveryPermit> {
        let dispatcher = self.dispatcher.upgrade()?;
        Some(Box::new(dispatcher.limiter.force_acquire(Self::scope_of(project))))
    }
}

impl Dispatcher {
    /// Ends a call that has not started to run if its caller may no longer make it: the caller's
    /// key was revoked, or the rules do not allow the tool any more. Returns true if so.
    pub(crate) async fn end_if_denied(self: &Arc<Self>, call: &Call) -> bool {
        let origin = &call.origin;
        let is_checked = (origin.subject_to_rules || origin.key_id.is_some())
            && call.status == Status::Pending
            && call.target.executor != Executor::CALLER;
        if !is_checked {
            return false;
        }
        let caller = Caller::new(&call.project, &origin.agent, Role::Agent, AuthMethod::Key)
            .with_credential(origin.key_id.clone());
        let catalog = self.registry.catalog();
        // The target is another tool if the call has fallen back to one.
        let denied = [&call.tool_name, &call.target.tool].into_iter().find_map(|tool| {
            let decision = match origin.key_id.as_deref() {
                Some(id) if catalog.is_revoked_key(id) => {
                    AccessDecision::Denied(format!("the key {id} was revoked"))
                }
                _ if origin.subject_to_rules => catalog.authorize(&caller, tool),
                _ => AccessDecision::Allowed,
            };
            match decision {
                AccessDecision::Denied(reason) => Some((tool, reason)),
                AccessDecision::Allowed => None,
            }
        });
        let Some((tool, reason)) = denied else { return false };
        let event = Event::PermissionRevoked { fault: denial_fault(&caller, tool, &reason) };
        // The call may have started to run, or have ended, in the meantime: then nothing is denied.
        if self.advance_with_retry(&call.project, &call.id, event).await
            && let Err(error) = self.registry.audit_denial(&caller, tool, &reason).await
        {
            tracing::warn!(%error, "a denial was not audited");
        }
        true
    }
}
