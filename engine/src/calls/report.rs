//! Reports from remote executors (acknowledgement, progress, outcome), answers to elicitations, and
//! cancellation.

use std::sync::Arc;

use serde_json::{Map, Value, json};

use crate::calls::commit::{AdvanceOutcome, call_not_found};
use crate::calls::request::schema_fault;
use crate::calls::wait::CallQuery;
use crate::calls::{Calls, Dispatcher};
use crate::domain::call::{Call, Hold, Status, elicitation};
use crate::domain::caller::Caller;
use crate::domain::event::EventKind;
use crate::domain::fault::{Code, Error, Fault};
use crate::domain::id::CallId;
use crate::domain::json::Json;
use crate::domain::tool::Executor;
use crate::lifecycle::{Event, Refusal};
use crate::ports::core::from_store_error;
use crate::ports::source::AttemptProgress;
use crate::registry::catalog::{
    Catalog, require_client_owner, require_provider, require_registered,
};
use crate::schema::Schema;

/// The result of an attempt, as its remote executor reports it.
#[derive(Debug, Clone)]
pub struct AttemptReport {
    /// Number of the attempt; `None` means the one in flight.
    pub attempt: Option<u32>,
    /// The reporting client, if it identifies itself.
    pub client_id: Option<String>,
    /// Result data of a success, or the fault of a failure.
    pub result: Result<Json, Fault>,
}

impl Calls {
    /// Records that a client acknowledged an attempt. The call is RUNNING from here on.
    pub async fn acknowledge_call(
        &self,
        caller: &Caller,
        id: &CallId,
        client_id: &str,
        attempt: Option<u32>,
    ) -> Result<Arc<Call>, Error> {
        let call = self.dispatcher.find_reportable_call(caller, id, Some(client_id)).await?;
        // Between the rule's change and this acknowledgement, the reconciler of revocations may not
        // have reached the call.
        self.dispatcher.stop_if_not_allowed(&call).await;
        let named = attempt;
        let attempt = attempt.unwrap_or(call.attempt);
        // The attempt may have moved from a client that acknowledged it to this one.
        let has_lease = self.dispatcher.client_queue.lease_holder(id).as_deref() == Some(client_id);
        let other = call.acknowledged_by.clone().filter(|other| has_lease && other != client_id);
        let event = Event::Acknowledged { attempt, by: client_id.to_owned(), instead_of: other };
        let advanced = self.dispatcher.apply_event(caller, id, event).await?;
        let call = require_accepted(advanced, named)?;
        self.dispatcher.client_queue.acknowledge(&call.project, client_id, id);
        Ok(call)
    }

    /// Records the result of a client's attempt.
    pub async fn report(
        &self,
        caller: &Caller,
        id: &CallId,
        report: AttemptReport,
    ) -> Result<Arc<Call>, Error> {
        let client_id = report.client_id.as_deref();
        let call = self.dispatcher.find_reportable_call(caller, id, client_id).await?;
        let by = report.client_id.or_else(|| self.dispatcher.client_queue.lease_holder(id));
        self.dispatcher.prepare_output_schema(&call).await;
        let result = self.dispatcher.validate_result(&call, report.result);
        let event = Event::Report { attempt: report.attempt, by, result };
        require_accepted(self.dispatcher.apply_event(caller, id, event).await?, report.attempt)
    }

    /// Records the progress of a client's attempt.
    pub async fn report_progress(
        &self,
        caller: &Caller,
        id: &CallId,
        client_id: Option<&str>,
        attempt: Option<u32>,
        progress: AttemptProgress,
    ) -> Result<(), Error> {
        let call = self.dispatcher.find_reportable_call(caller, id, client_id).await?;
        if progress.percent.is_some_and(|percent| !(0.0..=100.0).contains(&percent)) {
            let fault = Fault::new(Code::ValidationError, "percent must be from 0 to 100");
            return Err(fault.with_detail(json!({ "pointer": "/percent" })).into());
        }
        self.dispatcher.record_progress(id, attempt.unwrap_or(call.attempt), progress).await
    }

    /// Cancels a call and stops its executor.
    pub async fn cancel(
        &self,
        caller: &Caller,
        id: &CallId,
        reason: Option<String>,
    ) -> Result<Arc<Call>, Error> {
        if !caller.may_invoke() {
            let message = format!("a key with the role {} cannot cancel calls", caller.roles);
            return Err(Error::refused(Code::PermissionDenied, message));
        }
        let call = self.find_controllable_call(caller, id).await?;
        let event = Event::Cancel { by: caller.agent.clone(), reason };
        if let Some(replacement) = call.replaced_by().filter(|_| !call.status.is_terminal()) {
            // The replacement is executed in place of this call, so it is canceled too. If it has
            // ended, this call takes over its outcome.
            self.dispatcher.apply_event(caller, replacement, event.clone()).await?;
        }
        require_accepted(self.dispatcher.apply_event(caller, &call.id, event).await?, None)
    }

    /// Ends a call that Toolcrib itself stops: it is FAILED with this fault, and its executor is
    /// stopped. A call that its own caller no longer wants is canceled ([`Calls::cancel`]).
    pub async fn abort(
        &self,
        caller: &Caller,
        id: &CallId,
        fault: Fault,
    ) -> Result<Arc<Call>, Error> {
        let call = self.find_controllable_call(caller, id).await?;
        let event = Event::Abort { fault };
        require_accepted(self.dispatcher.apply_event(caller, &call.id, event).await?, None)
    }
}

impl Calls {
    /// Answers the elicitation of a call's tool, completely or in part. The call continues with the
    /// last answer.
    pub async fn answer_elicitation(
        &self,
        caller: &Caller,
        id: &CallId,
        answers: Map<String, Value>,
    ) -> Result<Arc<Call>, Error> {
        if !caller.may_invoke() {
            let message =
                format!("a key with the role {} cannot answer elicitations", caller.roles);
            return Err(Error::refused(Code::PermissionDenied, message));
        }
        elicitation::check_answers_size(&answers)?;
        let call = self.find_controllable_call(caller, id).await?;
        let event = Event::InputProvided { by: caller.agent.clone(), answers };
        require_accepted(self.dispatcher.apply_event(caller, &call.id, event).await?, None)
    }
}

impl Calls {
    /// Returns a call that the caller may stop or answer. To a caller that may only read it, the
    /// refusal says so; to others, the call does not exist.
    async fn find_controllable_call(
        &self,
        caller: &Caller,
        id: &CallId,
    ) -> Result<Arc<Call>, Error> {
        let call = self.dispatcher.find_project_call(caller, id).await?;
        let catalog = self.registry.catalog();
        if catalog.may_cancel_call(caller, &call) {
            return Ok(call);
        }
        if catalog.may_read_call(caller, &call) {
            let message = format!("call \"{id}\" belongs to another caller");
            return Err(Error::refused(Code::PermissionDenied, message));
        }
        Err(call_not_found(id))
    }
}

impl Dispatcher {
    /// Applies an event to completion, even if the reporter disconnects.
    pub(crate) async fn apply_event(
        self: &Arc<Self>,
        caller: &Caller,
        id: &CallId,
        event: Event,
    ) -> Result<AdvanceOutcome, Error> {
        let (dispatcher, project, id) = (self.clone(), caller.project.clone(), id.clone());
        self.detach_on_drop(async move { dispatcher.advance(&project, &id, event).await }).await
    }

    /// Returns the call if this caller may report on it.
    async fn find_reportable_call(
        &self,
        caller: &Caller,
        id: &CallId,
        client_id: Option<&str>,
    ) -> Result<Arc<Call>, Error> {
        require_provider(caller)?;
        let call = self.find_project_call(caller, id).await?;
        let elsewhere = match call.target.executor {
            Executor::CALLER => Some("its caller"),
            Executor::AGENT => Some("an agent"),
            _ => (!call.target.traits.reports_later).then_some("the server itself"),
        };
        if let Some(executor) = elsewhere {
            let message = format!("{} is executed by {executor}", call.target.tool);
            return Err(Error::refused(Code::PermissionDenied, message));
        }
        if let Some(client_id) = client_id {
            self.registry.adopt_client(caller, client_id).await?;
        }
        let catalog = self.registry.catalog();
        // The client queue may have redelivered the work of an absent client, so its lease holder
        // comes first. A call without a holder may be pinned to one client.
        let holder = self.client_queue.lease_holder(id).or_else(|| call.acknowledged_by.clone());
        let holder = holder.or_else(|| call.origin.client_id.clone());
        if let Some(client_id) = client_id {
            require_client_owner(&catalog, caller, client_id)?;
            let other = holder.as_deref().filter(|holder| *holder != client_id);
            if let Some(other) = other.filter(|_| !call.status.is_terminal()) {
                let message = format!("call \"{id}\" is for client \"{other}\"");
                let hint = "only that client acknowledges the call and reports its result";
                return Err(Fault::new(Code::PermissionDenied, message).with_hint(hint).into());
            }
            // A client that has the call may have withdrawn the tool in the meantime.
            let has_lease = self.client_queue.lease_holder(id).as_deref() == Some(client_id);
            if !has_lease && call.acknowledged_by.as_deref() != Some(client_id) {
                match call.status.is_terminal() {
                    true => require_registered(&catalog, &call.project, client_id)?,
                    false => require_offer(&catalog, &call, client_id)?,
                }
            }
        }
        if caller.is_exempt_from_rules() || caller.may_administer() {
            return Ok(call);
        }
        let offered = catalog.offered_by(&call.project, &call.target.tool);
        let entitled = match holder {
            Some(holder) => require_client_owner(&catalog, caller, &holder).is_ok(),
            None => offered.iter().any(|id| {
                catalog.client(&call.project, id).is_some_and(|c| c.owner == caller.agent)
            }),
        };
        if entitled {
            return Ok(call);
        }
        let message = format!("call \"{id}\" is with a client of another key");
        Err(Error::refused(Code::PermissionDenied, message))
    }

    /// Returns a call that the caller may read.
    pub(crate) async fn find_readable_call(
        &self,
        caller: &Caller,
        id: &CallId,
    ) -> Result<Arc<Call>, Error> {
        let call = self.find_project_call(caller, id).await?;
        // A call that the caller may not read is answered exactly as one that does not exist.
        let may_read = self.registry.catalog().may_read_call(caller, &call);
        may_read.then_some(call).ok_or_else(|| call_not_found(id))
    }

    /// Returns a call of the caller's project, from memory or from the store.
    pub(crate) async fn find_project_call(
        &self,
        caller: &Caller,
        id: &CallId,
    ) -> Result<Arc<Call>, Error> {
        let call = match self.open_calls.get(id) {
            Some(entry) => entry.call(),
            None => {
                match self.core.store.call(&caller.project, id).await.map_err(from_store_error)? {
                    Some(call) => Arc::new(call),
                    None => return Err(call_not_found(id)),
                }
            }
        };
        // A call of another project is answered exactly as one that does not exist.
        if call.project == caller.project { Ok(call) } else { Err(call_not_found(id)) }
    }

    /// Returns the output schema of the tool version that a call executes.
    fn output_schema(&self, call: &Call) -> Option<Schema> {
        let tool = self.registry.catalog().find(&call.project, &call.target.tool);
        tool.filter(|tool| tool.version == call.target.version)?.output_schema.clone()
    }

    /// Compiles the output schema of a call's tool, if it has one that is not compiled.
    pub(crate) async fn prepare_output_schema(&self, call: &Call) {
        if let Some(schema) = self.output_schema(call)
            && !schema.is_ready()
        {
            Box::pin(schema.prepare()).await;
        }
    }

    /// Checks a result against the size limit and the tool's output schema, which
    /// [`Self::prepare_output_schema`] compiles.
    pub(crate) fn validate_result(
        &self,
        call: &Call,
        result: Result<Json, Fault>,
    ) -> Result<Json, Fault> {
        let data = result?;
        let limit = self.core.limits.max_result_bytes;
        if data.text().len() > limit {
            let message = format!(
                "the result of {} is {} bytes, over the limit of {limit}",
                call.target.tool,
                data.text().len()
            );
            return Err(Fault::new(Code::PayloadTooLarge, message));
        }
        let Some(output) = self.output_schema(call) else { return Ok(data) };
        let mut value = data.to_value();
        if call.target.traits.mcp_results {
            // The schema describes only `structuredContent` of an MCP result, and error results
            // need none.
            if value.get("isError").is_some_and(|is| is == true) {
                return Ok(data);
            }
            value = value.get_mut("structuredContent").map_or(Value::Null, Value::take);
        }
        // The caller learns what is wrong without seeing the tool's data.
        let problems = output.problems_redacted(&value);
        if problems.is_empty() {
            return Ok(data);
        }
        let summary = format!("the result of {} does not fit its output schema", call.target.tool);
        // The raw data is attached for diagnosis.
        Err(schema_fault(&summary, &problems).with_raw(data))
    }

    pub(crate) async fn record_progress(
        &self,
        id: &CallId,
        attempt: u32,
        progress: AttemptProgress,
    ) -> Result<(), Error> {
        let entry = self.open_calls.get(id).ok_or_else(|| {
            let message = format!("call \"{id}\" has ended; its progress is not stored");
            Error::refused(Code::Conflict, message)
        })?;
        let call = entry.call();
        if !call.has_attempt_in_flight() || call.attempt != attempt {
            let message = format!("attempt {attempt} of call \"{id}\" is not in flight");
            return Err(Error::refused(Code::Conflict, message));
        }
        // Excess progress is not an error; events beyond the limit are not stored.
        let stored = async || {
            let count = self.count_stored_events(&call, EventKind::Progress).await?;
            Ok::<_, Error>(u32::try_from(count).unwrap_or(u32::MAX))
        };
        if entry.next_progress_number(stored).await? > self.core.limits.max_progress_events {
            return Ok(());
        }
        let record = progress.into_record(self.core.clock.wall_ms(), attempt).with_task_ids(&call);
        self.core
            .store
            .append_records(&call.project, id, vec![record])
            .await
            .map_err(from_store_error)?;
        self.wake_call_listeners(&call);
        Ok(())
    }
}

/// Requires that a client offers the tool of a call that it was not given.
fn require_offer(catalog: &Catalog, call: &Call, client_id: &str) -> Result<(), Error> {
    require_registered(catalog, &call.project, client_id)?;
    let tool = &call.target.tool;
    if catalog.offered_by(&call.project, tool).iter().any(|id| id == client_id) {
        return Ok(());
    }
    let message = format!("client \"{client_id}\" does not offer \"{tool}\"");
    let hint = "register the tool for this client, or name the client that has the call";
    Err(Fault::new(Code::PermissionDenied, message).with_hint(hint).into())
}

/// Converts a refused event into an error that names its reason. `attempt` is the attempt that the
/// reporter named.
pub(crate) fn require_accepted(
    advanced: AdvanceOutcome,
    attempt: Option<u32>,
) -> Result<Arc<Call>, Error> {
    let (call, refusal) = match advanced {
        AdvanceOutcome::Committed(call) | AdvanceOutcome::Duplicate(call) => return Ok(call),
        AdvanceOutcome::Refused(call, refusal) => (call, refusal),
    };
    let (id, status) = (&call.id, call.status.as_str());
    let end = call.outcome.as_ref().and_then(|outcome| outcome.error.as_ref());
    let other = attempt.filter(|attempt| *attempt != call.attempt);
    let (reason, message) = match (refusal, other) {
        (Refusal::NotApplicable | Refusal::Duplicate, _) => {
            let waits = describe_state(&call);
            ("not_expected", format!("call \"{id}\" does not expect this: it {waits}"))
        }
        (Refusal::AlreadyEnded(_), _) => {
            let why = end.map_or_else(String::new, |fault| format!(": {}", fault.message));
            ("already_ended", format!("call \"{id}\" is {status} already{why}"))
        }
        (Refusal::WrongAttempt(_), _) if !call.has_attempt_in_flight() => {
            let waits = describe_state(&call);
            ("no_attempt_in_flight", format!("call \"{id}\" has no attempt in flight: it {waits}"))
        }
        (Refusal::WrongAttempt(_), Some(named)) => {
            let current = call.attempt;
            let message = format!(
                "attempt {named} of call \"{id}\" is not in flight, but attempt {current} is"
            );
            ("other_attempt", message)
        }
        (Refusal::WrongAttempt(_), None) => {
            let by = call.acknowledged_by.as_deref().unwrap_or_default();
            ("already_taken", format!("call \"{id}\" was already acknowledged by client \"{by}\""))
        }
    };
    let detail = json!({
        "reason": reason,
        "status": status,
        "attempt": call.attempt,
        "completed_at_ms": call.completed_ms,
        "error": end.map(|fault| json!({ "code": fault.code.as_str(), "message": fault.message })),
    });
    let message = format!("{message}; nothing changed");
    Err(Fault::new(Code::Conflict, message).with_detail(detail).into())
}

/// Describes the state of an open call, as the end of a sentence.
fn describe_state(call: &Call) -> &'static str {
    match call.hold {
        Some(Hold::Queue) => "waits for a free slot",
        Some(Hold::Retry { .. }) => "waits for its next attempt",
        Some(Hold::Unacknowledged) => "waits for an executor to take it",
        Some(Hold::Input { .. }) => "waits for answers",
        Some(Hold::Predecessor { .. }) => "waits for the call before it",
        Some(Hold::Approval { .. }) => "waits for an approval",
        None if call.status.is_terminal() => "has ended",
        None => "is running",
    }
}

impl Calls {
    /// Cancels the open calls of a run that `is_selected` accepts. Other callers may have used the
    /// same run id; their calls are not the run's.
    pub(crate) async fn cancel_open_calls(
        &self,
        caller: &Caller,
        run_id: &str,
        reason: &str,
        is_selected: impl Fn(&Call) -> bool,
    ) {
        for status in [Status::Pending, Status::Running] {
            let (run_id, status) = (Some(run_id.to_owned()), Some(status));
            let mut query = CallQuery { run_id, status, limit: 200, ..CallQuery::default() };
            loop {
                let Ok(page) = self.calls(caller, query.clone()).await else { break };
                for call in page.calls.iter().filter(|call| is_selected(call)) {
                    let reason = Some(reason.to_owned());
                    if let Err(error) = self.cancel(caller, &call.id, reason).await {
                        tracing::debug!(%error, call = %call.id, "call not canceled");
                    }
                }
                query.before = page.next_before;
                if query.before.is_none() {
                    break;
                }
            }
        }
    }
}
