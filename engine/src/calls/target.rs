//! Routes a call: resolves its tool and fallbacks, its client, and the concurrency limits that
//! apply; ends it if a kill switch covers it.

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::{Arc, Weak};

use serde_json::Value;

use crate::calls::Dispatcher;
use crate::calls::limiter::{ConcurrencyCaps, QueueKey, SlotMembers, SlotScope};
use crate::calls::open_calls::OpenCall;
use crate::calls::request::{ExecutedArguments, can_execute, fit_applied_arguments, fit_to_schema};
use crate::clients::queue::{DeliveryLimiter, DeliveryPermit};
use crate::domain::access_rules::RuleAction;
use crate::domain::call::{Call, Target};
use crate::domain::caller::Caller;
use crate::domain::directory::usage_limits::{LimitKind, LimitMember, UsageLimitSet, stricter};
use crate::domain::json::Json;
use crate::domain::tool::{Executor, Fallback, SourceTraits, args};
use crate::lifecycle::Event;
use crate::ports::core::Core;
use crate::ports::source::Source;
use crate::registry::catalog::{Catalog, CatalogEntry};
use crate::registry::{AccessRequest, Registry};

/// Builds the targets of calls: the tools that can execute them, with the traits of their sources.
pub(crate) struct TargetBuilder {
    pub(super) core: Arc<Core>,
    pub(super) sources: Arc<HashMap<Executor, Arc<dyn Source>>>,
}

/// Resolves the concurrency limits that an attempt's slot counts against.
pub(crate) struct SlotLimits {
    pub(super) core: Arc<Core>,
    pub(super) registry: Arc<Registry>,
}

impl TargetBuilder {
    /// Resolves the fallbacks that could execute this call: existing, allowed, with valid
    /// arguments, and offered by the client that the call is pinned to.
    pub(crate) fn resolve_fallbacks(
        &self,
        catalog: &Catalog,
        caller: &Caller,
        tool: &CatalogEntry,
        args: &Value,
        call: &Call,
    ) -> Vec<Target> {
        let fallbacks = self.fallbacks_of(tool);
        let pinned = call.origin.client_id.as_deref();
        let mut targets = Vec::new();
        for fallback in fallbacks {
            // A fallback that needs an approval waits for it when the call falls back to it.
            let allowed = catalog.may_call(caller, &fallback.tool);
            let found = catalog.find(&caller.project, &fallback.tool).filter(|_| allowed);
            let Some(fallback_tool) = found else { continue };
            if is_switched_off(catalog, &caller.project, &fallback_tool) {
                continue;
            }
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
            let Ok(args) = fitted_args else { continue };
            let (args_known, run_id) = (Some(&args), Some(call.run_id.as_str()));
            let request =
                AccessRequest { args: args_known, run_id, ..AccessRequest::of(&fallback_tool) };
            if !catalog.authorize(caller, RuleAction::Invoke, &request).is_denied() {
                targets.push(self.build_target(&fallback_tool, args));
            }
        }
        targets
    }

    /// Returns the fallback tools of a tool: those that the operator set, or its definition's.
    pub(crate) fn fallbacks_of<'a>(&'a self, tool: &'a CatalogEntry) -> &'a [Fallback] {
        let override_fallback =
            self.core.policies.tools.get(&tool.definition.name).map(|tool| &tool.fallback);
        override_fallback.filter(|list| !list.is_empty()).unwrap_or(&tool.definition.fallback)
    }

    /// Builds the target of a call to this tool.
    pub(crate) fn build_target(&self, tool: &CatalogEntry, args: Json) -> Target {
        Target {
            tool: tool.definition.name.clone(),
            version: tool.version.clone(),
            executor: tool.definition.executor,
            traits: self.source_traits(tool.definition.executor),
            effect: tool.definition.effect,
            after_execution: tool.definition.after_execution(),
            args,
        }
    }

    /// Returns the traits of the source that executes these tools.
    pub(crate) fn source_traits(&self, executor: Executor) -> SourceTraits {
        self.sources.get(&executor).map_or_else(|| executor.traits(), |source| source.traits())
    }
}

impl SlotLimits {
    /// Returns the scope that an attempt's slot counts against, and its limits.
    pub(crate) fn resolve_slot_scope(&self, call: &Call) -> (SlotScope, ConcurrencyCaps) {
        let key_for = |tool: &str| {
            Arc::new(QueueKey { project: call.project.clone(), tool: tool.to_owned() })
        };
        if takes_no_slot(call) {
            return (
                // No tool can have this name.
                SlotScope { queue: key_for("(caller)"), members: None, is_shared: false },
                ConcurrencyCaps::default(),
            );
        }
        // The client queue takes the shared slot of its work when it hands it to a client.
        let (queue, is_shared) =
            (key_for(&call.target.tool), call.target.executor != Executor::CLIENT);
        let catalog = self.registry.catalog();
        let members = slot_members(catalog.limits(), call);
        let scope = SlotScope { queue, members, is_shared };
        let caps = self.tool_caps(&catalog, &scope);
        let caps = caps.unwrap_or_else(|| self.project_caps(&catalog, &call.project));
        (scope, caps)
    }

    /// Returns the present concurrency limits of a queue; `None` if its tool no longer exists.
    pub(crate) fn resolve_caps(&self, scope: &SlotScope) -> Option<ConcurrencyCaps> {
        self.tool_caps(&self.registry.catalog(), scope)
    }

    fn tool_caps(&self, catalog: &Catalog, scope: &SlotScope) -> Option<ConcurrencyCaps> {
        let QueueKey { project, tool } = &*scope.queue;
        let entry = catalog.find(project, tool)?;
        let over = self.core.policies.tools.get(tool).and_then(|o| o.policy.max_parallel);
        let policy_limit = over.or(entry.definition.policy.max_parallel);
        let limits = catalog.limits();
        let mut caps =
            ConcurrencyCaps { tool: policy_limit, ..self.project_caps(catalog, project) };
        if limits.is_empty() {
            return Some(caps);
        }
        let max_parallel = |kind, name: &str| limits.find(kind, project, name).max_parallel;
        caps.tool = stricter(policy_limit, max_parallel(LimitKind::Tool, tool));
        let members = scope.members.as_deref();
        let cap_of = |member: Option<&LimitMember>| {
            member.and_then(|member| max_parallel(member.kind, &member.name))
        };
        caps.agent = cap_of(members.and_then(|members| members.agent.as_ref()));
        caps.user = cap_of(members.and_then(|members| members.user.as_ref()));
        Some(caps)
    }

    fn project_caps(&self, catalog: &Catalog, project: &str) -> ConcurrencyCaps {
        let policy_limit = self.core.policies.projects.get(project).and_then(|p| p.max_parallel);
        let limits = catalog.limits();
        let stored = match limits.is_empty() {
            true => None,
            false => limits.find(LimitKind::Project, project, project).max_parallel,
        };
        ConcurrencyCaps {
            global: self.core.policies.global.max_parallel,
            project: stricter(policy_limit, stored),
            ..ConcurrencyCaps::default()
        }
    }
}

impl Dispatcher {
    /// Applies changed usage limits to the open calls: they are counted, and their slots and queues
    /// follow.
    pub(crate) fn apply_limit_changes(&self) {
        let catalog = self.registry.catalog();
        let limits = catalog.limits();
        if !self.open_calls.set_limits(limits) {
            return;
        }
        for entry in self.open_calls.all() {
            let call = entry.call();
            let members = slot_members(limits, &call);
            self.limiter.set_queued_members(&call.id, members.clone());
            entry.set_slot_members(members);
        }
    }
}

/// Returns true if an attempt of the call counts against no limit on parallel calls: the caller
/// executes it, or it waits for calls of agents, which would never get a slot that it holds.
fn takes_no_slot(call: &Call) -> bool {
    matches!(call.target.executor, Executor::CALLER | Executor::AGENT | Executor::INTERNAL)
}

/// Returns the members of a call whose attempts in flight are limited.
fn slot_members(limits: &UsageLimitSet, call: &Call) -> Option<Arc<SlotMembers>> {
    if !limits.limits_caller_concurrency() || takes_no_slot(call) {
        return None;
    }
    let limited = |kind: LimitKind, name: &str| {
        limits.find(kind, &call.project, name).max_parallel?;
        Some(LimitMember { kind, project: call.project.clone(), name: name.to_owned() })
    };
    let user = call.origin.attributes.user.as_deref();
    let members = SlotMembers {
        agent: limited(LimitKind::Agent, &call.origin.agent),
        user: user.and_then(|user| limited(LimitKind::User, user)),
    };
    (members != SlotMembers::default()).then(|| Arc::new(members))
}

/// Counts the work of clients against the limits of the engine and of its project.
pub(crate) struct ClientWorkLimiter {
    pub(crate) dispatcher: Weak<Dispatcher>,
}

impl ClientWorkLimiter {
    fn scope_of(project: &str) -> SlotScope {
        // No tool can have this name.
        let queue = QueueKey { project: project.to_owned(), tool: "(clients)".to_owned() };
        SlotScope { queue: Arc::new(queue), members: None, is_shared: true }
    }
}

impl DeliveryLimiter for ClientWorkLimiter {
    fn try_acquire(&self, project: &str) -> Option<DeliveryPermit> {
        let dispatcher = self.dispatcher.upgrade()?;
        let caps = dispatcher.slot_limits.project_caps(&dispatcher.registry.catalog(), project);
        let slot = dispatcher.limiter.try_acquire_delivery(&Self::scope_of(project), &caps)?;
        Some(Box::new(slot))
    }

    fn force_acquire(&self, project: &str) -> Option<DeliveryPermit> {
        let dispatcher = self.dispatcher.upgrade()?;
        Some(Box::new(dispatcher.limiter.force_acquire(Self::scope_of(project))))
    }
}

fn is_switched_off(catalog: &Catalog, project: &str, tool: &CatalogEntry) -> bool {
    let definition = &tool.definition;
    let switches = catalog.switches();
    switches.find_for_tool(project, &definition.name, definition.executor).is_some()
}

impl Dispatcher {
    /// Ends a call that a kill switch covers, also while it runs. Returns true if one does.
    pub(crate) async fn end_if_switched_off(self: &Arc<Self>, entry: &OpenCall) -> bool {
        let catalog = self.registry.catalog();
        if catalog.switches().is_empty() {
            return false;
        }
        let call = entry.call();
        let Some(switch) = catalog.switches().find_for_call(&call) else { return false };
        if call.status.is_terminal() {
            return true;
        }
        let event = Event::SwitchedOff { fault: switch.to_fault() };
        self.advance_with_retry(&call.project, &call.id, event).await;
        metrics::counter!("toolcrib_switched_off_calls_total", "kind" => switch.kind.as_str())
            .increment(1);
        true
    }
}
