//! An in-memory store: for embedding without durability, for tests and for the simulation.
//!
//! It is deliberately simple: one lock over plain maps. It keeps everything until it is purged.

mod agents;
mod approvals;
mod audit;
mod credentials;
mod directory;
mod rules;
mod runs;
mod undelivered;
mod upstreams;
mod usage;
mod utp;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use async_trait::async_trait;
use parking_lot::Mutex;

use super::{
    CallFilter, CreateCallResult, DeliveryFilter, EventScope, IdempotencyKey, NewCall, OpenCallRow,
    PurgeResult, RunToolDefinitions, SaveResult, Store, StoreError,
};
use crate::domain::call::Call;
use crate::domain::delivery::{Delivery, DeliveryAttempt, MAX_STORED_ATTEMPTS};
use crate::domain::directory::{AuditEntry, Directory, DirectoryChange};
use crate::domain::event::{CallEvent, EventKind, EventRecord};
use crate::domain::id::CallId;

#[derive(Default)]
struct MemoryState {
    last_position: u64,
    last_number: u64,
    calls: BTreeMap<u64, Call>,
    by_id: HashMap<CallId, u64>,
    events: BTreeMap<u64, CallEvent>,
    keys: HashMap<(String, String, String), (CallId, String)>,
    run_tool_definitions: BTreeMap<(String, String), RunToolDefinitions>,
    deliveries: BTreeMap<CallId, (Delivery, Vec<DeliveryAttempt>)>,
    directory: Directory,
    /// The tools of the projects themselves.
    project_tools: Vec<crate::domain::tool::ToolDefinition>,
    /// The tools of upstreams, each with its upstream's name.
    upstream_tools: Vec<(String, crate::domain::tool::ToolDefinition)>,
    audit: audit::MemoryAuditLog,
    runs: runs::MemoryRuns,
    credentials: credentials::Credentials,
    rules: rules::MemoryRules,
    undelivered: BTreeMap<String, super::undelivered::UndeliveredRequest>,
    /// Position of the last call before each change of the time of day, and the change.
    clock_steps: Vec<(u64, i64)>,
    approvals: approvals::MemoryApprovals,
    agents: agents::MemoryAgents,
}

/// Stores everything in memory.
#[derive(Default)]
pub struct MemoryStore {
    state: Mutex<MemoryState>,
    utp: utp::UtpMemoryStore,
}

impl MemoryState {
    fn call(&self, project: &str, id: &CallId) -> Option<&Call> {
        let call = self.by_id.get(id).and_then(|position| self.calls.get(position));
        call.filter(|call| call.project == project)
    }

    fn append_events(&mut self, call: &Call, records: Vec<EventRecord>) {
        for record in records {
            self.last_number += 1;
            let (call_id, run_id) = (call.id.clone(), call.run_id.clone());
            let (number, caller_call_id) = (self.last_number, call.origin.caller_call_id.clone());
            let event = CallEvent { number, call_id, run_id, caller_call_id, record };
            self.events.insert(self.last_number, event);
        }
    }

    fn find_by_idempotency_key(
        &self,
        project: &str,
        key: &IdempotencyKey,
    ) -> Option<CreateCallResult> {
        let scoped_key = (project.to_owned(), key.agent.clone(), key.key.clone());
        let (id, fingerprint) = self.keys.get(&scoped_key)?;
        if *fingerprint != key.fingerprint {
            return Some(CreateCallResult::Mismatch(id.clone()));
        }
        let call = self.by_id.get(id).and_then(|position| self.calls.get(position))?;
        Some(CreateCallResult::Replayed(Box::new(call.clone())))
    }

    /// Inserts a new call with everything that belongs to it.
    fn insert_call(&mut self, new: NewCall) {
        self.last_position += 1;
        let position = self.last_position;
        self.by_id.insert(new.call.id.clone(), position);
        self.append_events(&new.call, new.records);
        if let Some(delivery) = Delivery::for_call(&new.call) {
            self.deliveries.insert(new.call.id.clone(), (delivery, Vec::new()));
        }
        self.calls.insert(position, Arc::unwrap_or_clone(new.call));
        self.undelivered.extend(new.undelivered.map(|request| (request.id.clone(), request)));
        if let Some(new) = new.approval {
            self.approvals.by_id.insert(new.approval.id.clone(), new.approval);
            self.audit.append(new.audit);
        }
    }

    /// Replaces a call whose stored version is exactly one lower.
    fn save_call(&mut self, call: Arc<Call>, records: Vec<EventRecord>) -> SaveResult {
        let Some(position) = self.by_id.get(&call.id).copied() else {
            return SaveResult::Conflict;
        };
        let follows =
            |stored: &Call| stored.project == call.project && stored.version + 1 == call.version;
        if !self.calls.get(&position).is_some_and(follows) {
            return SaveResult::Conflict;
        }
        self.append_events(&call, records);
        if let Some(ended_ms) = call.completed_ms
            && let Some((delivery, _)) = self.deliveries.get_mut(&call.id)
            && let Some(due) = delivery.after_call_ended(ended_ms)
        {
            *delivery = due;
        }
        self.calls.insert(position, Arc::unwrap_or_clone(call));
        SaveResult::Saved
    }

    fn purge_run_tool_definitions(&mut self, before_ms: u64, limit: usize) -> usize {
        let Self { run_tool_definitions: runs, calls, .. } = self;
        let mut left = limit;
        runs.retain(|(project, run_id), run| {
            let belongs_to_run = |call: &Call| call.project == *project && call.run_id == *run_id;
            let is_purged =
                left > 0 && run.updated_ms < before_ms && !calls.values().any(belongs_to_run);
            left -= usize::from(is_purged);
            !is_purged
        });
        limit - left
    }

    fn in_scope(&self, event: &CallEvent, scope: &EventScope) -> bool {
        let call = || self.by_id.get(&event.call_id).and_then(|position| self.calls.get(position));
        match scope {
            EventScope::Call { project, id } => {
                event.call_id == *id && call().is_some_and(|call| call.project == *project)
            }
            EventScope::Run { project, run_id } => {
                call().is_some_and(|call| call.project == *project && call.run_id == *run_id)
            }
            EventScope::Project(project) => call().is_some_and(|call| call.project == *project),
        }
    }
}

#[async_trait]
impl Store for MemoryStore {
    async fn create_call(&self, new: NewCall) -> Result<CreateCallResult, StoreError> {
        let mut state = self.state.lock();
        if let Some(key) = &new.key {
            if let Some(existing) = state.find_by_idempotency_key(&new.call.project, key) {
                return Ok(existing);
            }
            let scoped_key = (new.call.project.clone(), key.agent.clone(), key.key.clone());
            state.keys.insert(scoped_key, (new.call.id.clone(), key.fingerprint.clone()));
        }
        state.insert_call(new);
        Ok(CreateCallResult::New)
    }

    async fn find_by_idempotency_key(
        &self,
        project: &str,
        key: &IdempotencyKey,
    ) -> Result<Option<CreateCallResult>, StoreError> {
        Ok(self.state.lock().find_by_idempotency_key(project, key))
    }

    async fn save_call(
        &self,
        call: Arc<Call>,
        records: Vec<EventRecord>,
    ) -> Result<SaveResult, StoreError> {
        let mut state = self.state.lock();
        Ok(state.save_call(call, records))
    }

    async fn append_records(
        &self,
        project: &str,
        id: &CallId,
        records: Vec<EventRecord>,
    ) -> Result<(), StoreError> {
        let mut state = self.state.lock();
        if let Some(call) = state.call(project, id).cloned() {
            state.append_events(&call, records);
        }
        Ok(())
    }

    async fn call(&self, project: &str, id: &CallId) -> Result<Option<Call>, StoreError> {
        Ok(self.state.lock().call(project, id).cloned())
    }

    async fn calls(&self, filter: CallFilter) -> Result<Vec<Call>, StoreError> {
        let state = self.state.lock();
        let fits = |call: &Call| {
            call.project == filter.project
                && filter.run_id.as_ref().is_none_or(|run| *run == call.run_id)
                && filter.tool_name.as_ref().is_none_or(|tool| *tool == call.tool_name)
                && filter.status.is_none_or(|status| status == call.status)
                && (!filter.background || call.origin.background)
                && filter.since_ms.is_none_or(|since| call.created_ms >= since)
        };
        let older = |call: &Call| filter.before.as_ref().is_none_or(|before| call.id < *before);
        let mut all: Vec<&Call> =
            state.calls.values().filter(|call| older(call) && fits(call)).collect();
        all.sort_by(|a, b| b.id.cmp(&a.id));
        let mut bytes = 0;
        let page = all.into_iter().take(filter.limit).take_while(|call| {
            let has_capacity = !filter.is_page_full(bytes);
            bytes += call.estimated_bytes();
            has_capacity
        });
        Ok(page.cloned().collect())
    }

    async fn open_calls(&self, after: u64, limit: usize) -> Result<Vec<OpenCallRow>, StoreError> {
        let state = self.state.lock();
        let open = state.calls.range(after.saturating_add(1)..);
        let open = open.filter(|(_, call)| !call.status.is_terminal());
        Ok(open
            .take(limit)
            .map(|(position, call)| OpenCallRow { position: *position, call: call.clone() })
            .collect())
    }

    async fn events(
        &self,
        scope: EventScope,
        after: u64,
        limit: usize,
    ) -> Result<Vec<CallEvent>, StoreError> {
        let state = self.state.lock();
        let later = state.events.range(after.saturating_add(1)..).map(|(_, event)| event);
        Ok(later.filter(|event| state.in_scope(event, &scope)).take(limit).cloned().collect())
    }

    async fn last_event_number(&self, scope: EventScope) -> Result<u64, StoreError> {
        let state = self.state.lock();
        let newest = state.events.values().rev().find(|event| state.in_scope(event, &scope));
        Ok(newest.map_or(0, |event| event.number))
    }

    async fn run_tool_definitions(
        &self,
        project: &str,
        run_id: &str,
    ) -> Result<Option<RunToolDefinitions>, StoreError> {
        let key = (project.to_owned(), run_id.to_owned());
        Ok(self.state.lock().run_tool_definitions.get(&key).cloned())
    }

    async fn put_run_tool_definitions(&self, run: RunToolDefinitions) -> Result<(), StoreError> {
        let key = (run.project.clone(), run.run_id.clone());
        self.state.lock().run_tool_definitions.insert(key, run);
        Ok(())
    }

    async fn last_record(
        &self,
        project: &str,
        id: &CallId,
        kind: EventKind,
    ) -> Result<Option<EventRecord>, StoreError> {
        let state = self.state.lock();
        let scope = EventScope::Call { project: project.to_owned(), id: id.clone() };
        let mut newest_first = state.events.values().rev();
        let found =
            newest_first.find(|event| event.record.kind == kind && state.in_scope(event, &scope));
        Ok(found.map(|event| event.record.clone()))
    }

    async fn pending_deliveries(
        &self,
        after: Option<(u64, CallId)>,
        limit: usize,
    ) -> Result<Vec<Delivery>, StoreError> {
        let state = self.state.lock();
        let sort_key = |delivery: &Delivery| Some((delivery.due_ms?, delivery.call_id.clone()));
        let mut pending: Vec<&Delivery> = state.deliveries.values().map(|(one, _)| one).collect();
        pending.retain(|delivery| sort_key(delivery).is_some_and(|at| Some(at) > after));
        pending.sort_by_key(|delivery| sort_key(delivery));
        Ok(pending.into_iter().take(limit).cloned().collect())
    }

    async fn deliveries(&self, filter: DeliveryFilter) -> Result<Vec<Delivery>, StoreError> {
        let state = self.state.lock();
        let fits = |delivery: &&Delivery| {
            delivery.project == filter.project
                && filter.status.is_none_or(|status| status == delivery.status)
                && filter.before.as_ref().is_none_or(|before| delivery.call_id < *before)
        };
        let newest_first = state.deliveries.values().rev().map(|(delivery, _)| delivery);
        Ok(newest_first.filter(fits).take(filter.limit).cloned().collect())
    }

    async fn delivery(
        &self,
        project: &str,
        id: &CallId,
    ) -> Result<Option<(Delivery, Vec<DeliveryAttempt>)>, StoreError> {
        let state = self.state.lock();
        let found = state.deliveries.get(id);
        Ok(found.filter(|(delivery, _)| delivery.project == project).cloned())
    }

    async fn save_delivery(
        &self,
        delivery: Delivery,
        tried: Option<DeliveryAttempt>,
    ) -> Result<SaveResult, StoreError> {
        let mut state = self.state.lock();
        let existing = state.deliveries.get_mut(&delivery.call_id);
        let Some((stored, attempts)) = existing.filter(|(stored, _)| {
            stored.project == delivery.project && stored.version + 1 == delivery.version
        }) else {
            return Ok(SaveResult::Conflict);
        };
        *stored = delivery;
        attempts.extend(tried);
        let excess = attempts.len().saturating_sub(MAX_STORED_ATTEMPTS as usize);
        attempts.drain(..excess);
        Ok(SaveResult::Saved)
    }

    async fn purge(&self, ended_before_ms: u64, limit: usize) -> Result<PurgeResult, StoreError> {
        let mut state = self.state.lock();
        let old: Vec<(u64, CallId)> = state
            .calls
            .iter()
            .filter(|(_, call)| call.completed_ms.is_some_and(|at| at < ended_before_ms))
            .take(limit)
            .map(|(position, call)| (*position, call.id.clone()))
            .collect();
        for (position, id) in &old {
            state.calls.remove(position);
            state.by_id.remove(id);
            state.events.retain(|_, event| event.call_id != *id);
            state.keys.retain(|_, (call, _)| call != id);
            state.deliveries.remove(id);
            state.approvals.by_id.retain(|_, approval| approval.call_id != *id);
        }
        let oldest = state.calls.values().map(|call| call.created_ms).min();
        self.utp.purge_replaced(oldest.unwrap_or(u64::MAX).min(ended_before_ms));
        state.approvals.purge_standing(ended_before_ms);
        state.agents.purge_boxes(ended_before_ms);
        let runs = state.purge_run_tool_definitions(ended_before_ms, limit);
        let loops = state.purge_ended_runs(ended_before_ms, limit);
        let calls = old.len();
        let max_count = calls.max(runs).max(loops);
        Ok(PurgeResult { calls, has_more: max_count == limit })
    }

    async fn directory_version(&self) -> Result<u64, StoreError> {
        Ok(self.state.lock().directory.version)
    }

    async fn directory(&self) -> Result<Directory, StoreError> {
        let state = self.state.lock();
        let mut directory = state.directory.clone();
        directory.tools.extend(state.project_tools.iter().cloned());
        directory.tools.extend(state.upstream_tools.iter().map(|(_, tool)| tool.clone()));
        Ok(directory)
    }

    async fn change_directory(
        &self,
        change: DirectoryChange,
        decided_on: u64,
        audit: Option<AuditEntry>,
    ) -> Result<SaveResult, StoreError> {
        let mut state = self.state.lock();
        if state.directory.version != decided_on {
            return Ok(SaveResult::Conflict);
        }
        state.directory.version += 1;
        let at_ms = audit.as_ref().map(|entry| entry.at_ms);
        match &change {
            DirectoryChange::PutTools(tools) => {
                tools.iter().for_each(|tool| self.utp.put_definition(tool, at_ms));
            }
            DirectoryChange::DropTool { project, name } => {
                self.utp.mark_replaced(project, name, at_ms)
            }
            _ => {}
        }
        state.apply(change);
        if let Some(entry) = audit {
            state.audit.append(entry);
        }
        Ok(SaveResult::Saved)
    }

    async fn record_time(&self, at_ms: u64) -> Result<(), StoreError> {
        let latest_ms = &mut self.state.lock().directory.latest_time_ms;
        *latest_ms = at_ms.max(*latest_ms);
        Ok(())
    }

    async fn append_audit_entry(&self, entry: AuditEntry) -> Result<(), StoreError> {
        self.state.lock().audit.append(entry);
        Ok(())
    }

    fn audit(&self) -> &dyn super::audit::AuditStore {
        self
    }

    async fn check_health(&self) -> Result<(), StoreError> {
        Ok(())
    }

    async fn wait_for_failure(&self) -> String {
        std::future::pending().await
    }

    fn utp(&self) -> &dyn super::utp::UtpStore {
        &self.utp
    }

    fn runs(&self) -> &dyn crate::ports::store::runs::RunStore {
        self
    }

    fn usage(&self) -> &dyn super::usage::UsageStore {
        self
    }

    fn undelivered(&self) -> &dyn super::undelivered::UndeliveredRequestStore {
        self
    }

    fn agents(&self) -> &dyn super::agents::AgentStore {
        self
    }

    fn approvals(&self) -> &dyn super::approvals::ApprovalStore {
        self
    }

    fn rule_history(&self) -> &dyn crate::ports::store::rule_history::RuleHistoryStore {
        self
    }

    fn credentials(&self) -> &dyn crate::ports::store::credentials::UpstreamCredentialStore {
        self
    }

    async fn size_bytes(&self) -> Result<u64, StoreError> {
        Ok(0)
    }
}

impl MemoryState {
    fn apply(&mut self, change: DirectoryChange) {
        let is_tool =
            |existing: &crate::domain::tool::ToolDefinition, project: Option<&str>, name: &str| {
                existing.project.as_deref() == project && existing.name == name
            };
        match change {
            DirectoryChange::PutTools(tools) => {
                for tool in tools {
                    self.project_tools
                        .retain(|existing| !is_tool(existing, tool.project.as_deref(), &tool.name));
                    self.project_tools.push(tool);
                }
            }
            DirectoryChange::DropTool { project, name } => {
                self.project_tools.retain(|existing| !is_tool(existing, Some(&project), &name));
            }
            DirectoryChange::PutUpstream(_)
            | DirectoryChange::DropUpstream { .. }
            | DirectoryChange::SetUpstreamTools { .. } => self.change_upstream(change),
            DirectoryChange::ChangeRules(change) => {
                self.rules.apply(*change);
                self.directory.rules = self.rules.in_force();
                self.directory.rule_versions = self.rules.present_versions();
            }
            other => {
                if let DirectoryChange::PutAgent(entry) = &other {
                    self.agents.record_version(entry);
                }
                directory::apply(&mut self.directory, other);
            }
        }
    }
}
