//! Calls that callers execute themselves, recorded the same way as all others.
//!
//! Such a call is a ticket like any other: it has events, is listed, can be waited for and
//! canceled, and has a deadline. It is running from the moment it is recorded. Toolcrib executes
//! nothing for it and therefore never retries it. Only the agent that recorded it, or an admin, can
//! report its result.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::calls::accept::BatchMembership;
use crate::calls::report::require_accepted;
use crate::calls::request::{
    CallRequest, build_idempotency_key, check_label, check_request, schema_fault,
};
use crate::domain::call::{Call, Status};
use crate::domain::caller::Caller;
use crate::domain::fault::{Code, Error, Fault};
use crate::domain::id::CallId;
use crate::domain::json::Json;
use crate::domain::retry::ExecutionPolicyPatch;
use crate::domain::tool::{Executor, ToolDefinition, check_tool_name};
use crate::lifecycle::Event;
use crate::ports::core::from_store_error;
use crate::ports::store::{CallFilter, IdempotencyKey};
use crate::registry::authorize::enforce_decision;
use crate::registry::catalog::CatalogEntry;
use crate::registry::model_tool_names;
use crate::runs::run_context::{RunContexts, caller_tool_definition, with_pointer};
use crate::schema::Schema;

/// Maximum number of calls or results in one request.
pub const MAX_RECORDED: usize = 128;

/// A call that the caller executes, or has executed, itself.
#[derive(Debug, Clone)]
pub struct ReportedCall {
    /// The tool, the arguments and the labels of the call.
    pub request: CallRequest,
    /// True if the result comes later. If `None`, the run's definition of the tool decides.
    pub background: Option<bool>,
    /// The result, if it is known already.
    pub result: Option<Result<Json, Fault>>,
}

/// The result of a call that the caller executed itself.
#[derive(Debug, Clone)]
pub struct ReportedResult {
    /// Id of the call. Takes precedence over `call_id`.
    pub tool_call_id: Option<CallId>,
    /// The caller's own id of the call. It names the newest unanswered call with this id.
    pub call_id: Option<String>,
    /// Result data of a success, or the fault of a failure.
    pub result: Result<Json, Fault>,
}

/// A call that passed every check and is not stored yet.
struct ValidatedCall {
    call: Call,
    key: Option<IdempotencyKey>,
    result: Option<Result<Json, Fault>>,
}

impl RunContexts {
    /// Records calls that the caller executes itself. All are validated before the first is stored.
    /// A call that comes with its result has ended when this returns.
    pub async fn record_calls(
        self: &Arc<Self>,
        caller: &Caller,
        run_id: &str,
        calls: Vec<ReportedCall>,
    ) -> Result<Vec<Arc<Call>>, Error> {
        if self.core.draining.load(Ordering::Acquire) {
            let message = "the server is shutting down; nothing was done, a retry is safe";
            return Err(Error::retry_later(Code::Overloaded, message, 1_000));
        }
        check_label("run_id", run_id)?;
        check_count("tool_calls", calls.len())?;
        let tools = self.run_tools(caller, run_id).await?;
        let mut ready = Vec::with_capacity(calls.len());
        for (n, call) in calls.into_iter().enumerate() {
            let checked = self.validate_reported_call(caller, run_id, &tools, call).await;
            ready.push(checked.map_err(|error| with_pointer(&format!("tool_calls/{n}"), error))?);
        }
        // Concurrently, so that they share a commit.
        let stored = ready
            .into_iter()
            .map(|ready| self.dispatcher.detach_on_drop(self.clone().store_reported_call(ready)));
        futures::future::join_all(stored).await.into_iter().collect()
    }

    /// Records the results of calls that the caller executed itself, in this order.
    pub async fn record_results(
        &self,
        caller: &Caller,
        run_id: &str,
        results: Vec<ReportedResult>,
    ) -> Result<Vec<Arc<Call>>, Error> {
        if !caller.may_invoke() {
            let message = "a provider's key reports on calls with POST /internal/tool_calls/…";
            return Err(Error::refused(Code::PermissionDenied, message));
        }
        check_label("run_id", run_id)?;
        check_count("tool_results", results.len())?;
        let tools = self.run_tools(caller, run_id).await?;
        let mut calls = Vec::with_capacity(results.len());
        for (n, result) in results.into_iter().enumerate() {
            let recorded = self.record_result(caller, run_id, &tools, result).await;
            calls
                .push(recorded.map_err(|error| with_pointer(&format!("tool_results/{n}"), error))?);
        }
        Ok(calls)
    }

    async fn validate_reported_call(
        &self,
        caller: &Caller,
        run_id: &str,
        tools: &[ToolDefinition],
        reported: ReportedCall,
    ) -> Result<ValidatedCall, Error> {
        let ReportedCall { mut request, background, result } = reported;
        request.run_id = run_id.to_owned();
        let definition = find_definition(tools, &request.tool);
        request.tool = definition.map_or(request.tool, |tool| tool.name.clone());
        check_tool_name(&request.tool)
            .map_err(|error| Error::refused(Code::ValidationError, format!("name: {error}")))?;
        let catalog = self.registry.catalog();
        let decision = catalog.authorize_reported_call(caller, &request.tool, Some(&request.args));
        enforce_decision(&self.registry, caller, &request.tool, decision).await?;
        if request.retry.is_some_and(|retry| retry > 0) {
            let message = "retry: Toolcrib does not retry calls that you execute";
            return Err(Error::refused(Code::ValidationError, message));
        }
        check_request(&request, self.core.limits.max_args_bytes)?;
        let default_ms = self.registry.default_timeout_ms(caller);
        let tool = caller_tool_entry(definition, &caller.project, &request.tool, default_ms);
        tool.prepare_input().await;
        let key = build_idempotency_key(caller, &request);
        let drafted = self.calls.build_call(&catalog, caller, &Arc::new(tool), request)?;
        // The caller executes the call once; only its deadline limits that.
        let mut call =
            Call { max_retries: 0, fallbacks: Vec::new(), attempt_timeout_ms: None, ..drafted };
        call.origin.background = background.unwrap_or(call.origin.background);
        let result = match result {
            Some(result) => Some(self.validate_reported_result(&call, definition, result).await),
            None => None,
        };
        Ok(ValidatedCall { call, key, result })
    }

    async fn record_result(
        &self,
        caller: &Caller,
        run_id: &str,
        tools: &[ToolDefinition],
        reported: ReportedResult,
    ) -> Result<Arc<Call>, Error> {
        let call = match (&reported.tool_call_id, &reported.call_id) {
            (Some(ticket), _) => {
                let call = self.calls.call(caller, ticket).await?;
                Some(call).filter(|call| call.run_id == run_id)
            }
            (None, Some(call_id)) => {
                match self.find_reported_call(caller, run_id, call_id).await? {
                    Some(call) => Some(call),
                    // A call without a caller's id is found by its ticket.
                    None => self.find_by_ticket(caller, run_id, call_id).await,
                }
            }
            (None, None) => {
                let message = "call_id: name the call that this is the result of";
                return Err(Error::refused(Code::ValidationError, message));
            }
        };
        let Some(call) = call else {
            let id = reported.tool_call_id.map(|ticket| ticket.to_string()).or(reported.call_id);
            let message = format!(
                "there is no call \"{}\" in run \"{run_id}\"; record it first with \
                 POST /v1/runs/{{run_id}}/context/tool_calls",
                id.unwrap_or_default()
            );
            return Err(Error::refused(Code::NotFound, message));
        };
        if call.target.executor != Executor::CALLER {
            let message = format!(
                "call \"{}\" of {} is executed by Toolcrib, which adds its result",
                call.id, call.tool_name
            );
            return Err(Error::refused(Code::Conflict, message));
        }
        if let (Some(call_id), Some(recorded)) = (&reported.call_id, &call.origin.caller_call_id)
            && call_id != recorded
        {
            let message = format!("call_id: call \"{}\" has the call_id \"{recorded}\"", call.id);
            return Err(Error::refused(Code::ValidationError, message));
        }
        if call.origin.agent != caller.agent && !caller.may_administer() {
            let message = format!("call \"{}\" was recorded by another agent", call.id);
            return Err(Error::refused(Code::PermissionDenied, message));
        }
        let definition = find_definition(tools, &call.tool_name);
        let result = self.validate_reported_result(&call, definition, reported.result).await;
        let event = Event::Report { attempt: None, by: None, result };
        require_accepted(self.dispatcher.apply_event(caller, &call.id, event).await?, None)
    }

    async fn find_by_ticket(&self, caller: &Caller, run_id: &str, id: &str) -> Option<Arc<Call>> {
        let call = self.calls.call(caller, &id.parse().ok()?).await.ok()?;
        Some(call).filter(|call| call.run_id == run_id && call.origin.caller_call_id.is_none())
    }

    /// Finds the newest unanswered call with this id that the caller may answer; failing that, the
    /// newest call with this id.
    async fn find_reported_call(
        &self,
        caller: &Caller,
        run_id: &str,
        call_id: &str,
    ) -> Result<Option<Arc<Call>>, Error> {
        let mine = |call: &Call| {
            let is_id = call.origin.caller_call_id.as_deref() == Some(call_id);
            is_id && (call.origin.agent == caller.agent || caller.may_administer())
        };
        let own = |call: &Call| call.target.executor == Executor::CALLER && mine(call);
        let mut filter = CallFilter {
            project: caller.project.clone(),
            run_id: Some(run_id.to_owned()),
            status: Some(Status::Running),
            limit: 200,
            ..CallFilter::default()
        };
        loop {
            let page = self.core.store.calls(filter.clone()).await.map_err(from_store_error)?;
            let (count, last) = (page.len(), page.last().map(|call| call.id.clone()));
            if let Some(call) = page.into_iter().find(own) {
                return Ok(Some(Arc::new(call)));
            }
            if count < filter.limit {
                break;
            }
            filter.before = last;
        }
        let filter = CallFilter { status: None, before: None, ..filter };
        let page = self.core.store.calls(filter).await.map_err(from_store_error)?;
        let found = page.iter().find(|call| own(call)).or_else(|| page.iter().find(|c| mine(c)));
        Ok(found.map(|call| Arc::new(call.clone())))
    }
}

impl RunContexts {
    async fn store_reported_call(
        self: Arc<Self>,
        ready: ValidatedCall,
    ) -> Result<Arc<Call>, Error> {
        let call = self
            .calls
            .clone()
            .commit_call(ready.call, ready.key, None, None, BatchMembership::default())
            .await?
            .call;
        let Some(result) = ready.result else { return Ok(call) };
        let event = Event::Report { attempt: None, by: None, result };
        require_accepted(self.dispatcher.advance(&call.project, &call.id, event).await?, None)
    }

    /// Checks a result against the size limit and, if the run's definition has one, the output
    /// schema.
    async fn validate_reported_result(
        &self,
        call: &Call,
        definition: Option<&ToolDefinition>,
        result: Result<Json, Fault>,
    ) -> Result<Json, Fault> {
        let data = self.dispatcher.validate_result(call, result)?;
        let Some(schema) = definition.and_then(|tool| tool.output_schema.clone()) else {
            return Ok(data);
        };
        // Setting the tools of the run has checked the schema.
        let schema = Schema::deferred(&call.project, schema);
        schema.prepare().await;
        let problems = schema.problems_redacted(&data.to_value());
        if problems.is_empty() {
            return Ok(data);
        }
        let summary = format!("the result of {} does not fit its output schema", call.tool_name);
        Err(schema_fault(&summary, &problems).with_raw(data))
    }
}

/// Finds a tool by its exact name, or by the name that models use.
fn find_definition<'a>(tools: &'a [ToolDefinition], name: &str) -> Option<&'a ToolDefinition> {
    if let Some(tool) = tools.iter().find(|tool| tool.name == name) {
        return Some(tool);
    }
    let model_names =
        model_tool_names::names_for_model(tools.iter().map(|tool| tool.name.as_str()));
    model_names.iter().position(|model_name| model_name == name).map(|at| &tools[at])
}

/// Returns a tool as one that the caller executes, regardless of its usual executor.
fn caller_tool_entry(
    declared: Option<&ToolDefinition>,
    project: &str,
    name: &str,
    default_ms: u64,
) -> CatalogEntry {
    let unknown = caller_tool_definition(project, name, default_ms);
    let definition = declared.map_or(unknown, |tool| ToolDefinition {
        executor: Executor::CALLER,
        policy: ExecutionPolicyPatch::default(),
        fallback: Vec::new(),
        ..tool.clone()
    });
    CatalogEntry::deferred(definition)
}

fn check_count(field: &str, count: usize) -> Result<(), Error> {
    if (1..=MAX_RECORDED).contains(&count) {
        return Ok(());
    }
    let message = format!("{field} must have 1 to {MAX_RECORDED} entries, not {count}");
    Err(Fault::new(Code::ValidationError, message).without_side_effect().into())
}
