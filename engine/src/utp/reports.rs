//! Reports of tool services: each is checked against its call, decided by `step`, and delivered to
//! the agent's inbox. A report that cannot be accepted becomes a dead letter, so nothing is lost.

use std::sync::Arc;

use serde_json::{Value, json};

use super::cards::{RouteLookup, copy_lineage};
use super::inbox::derive_inbox_id;
use crate::calls::commit::AdvanceOutcome;
use crate::domain::call::Call;
use crate::domain::caller::Caller;
use crate::domain::event::{EventKind, EventRecord};
use crate::domain::fault::{Code, Error, Fault};
use crate::domain::json::Json;
use crate::domain::tool::Executor;
use crate::domain::utp::card::{self, Card, TOOL_RESULT};
use crate::domain::utp::{AfterExecution, MAX_DEPTH, Route, ToolStatus};
use crate::lifecycle::{Event, Refusal, RemoteOutcome};
use crate::ports::core::from_store_error;
use crate::ports::store::utp::PutCardResult;
use crate::utp::Utp;

/// A tool service's report, as far as it could be parsed.
#[derive(Debug, Clone, Default)]
pub struct ToolServiceReport {
    /// Id of the reported call, unique within its turn.
    pub tool_call_id: String,
    /// Turn that the call belongs to.
    pub turn_id: String,
    /// Epoch of the turn in which the call was made.
    pub epoch: u64,
    /// Agent that made the call.
    pub agent_id: String,
    /// `suspend` or `terminate`, as received; must be that of the tool's binding.
    pub after_execution: Option<String>,
    /// One of the five UTP statuses, as received.
    pub status: Option<String>,
    /// Id of the result card.
    pub card_id: Option<String>,
    /// The result card itself, sent along to save a request.
    pub card: Option<Value>,
    /// True if the report contains its result inline, which the protocol forbids.
    pub has_inline_result: bool,
    /// Nesting depth of agents that call agents; must be that of the call.
    pub depth: Option<u32>,
    /// W3C `traceparent` of the report.
    pub traceparent: Option<String>,
    /// Id of the reporting service.
    pub reported_by: Option<String>,
}

/// Result of an accepted report.
#[derive(Debug, Clone)]
pub struct ReportReceipt {
    /// The call after the report.
    pub call: Arc<Call>,
    /// Id of the inbox item; `None` if the agent has no inbox.
    pub inbox_id: Option<String>,
    /// True if this report was received before.
    pub is_duplicate: bool,
    /// True if the call had already ended differently. The report is recorded and has no effect.
    pub is_late: bool,
}

/// The reason why a report was refused.
#[derive(Debug)]
pub struct ReportRejection {
    /// Reason code for the dead letter; `None` if no dead letter is due, for example because a
    /// retry can help.
    pub dead_letter_reason: Option<&'static str>,
    /// The error to answer the report with.
    pub error: Error,
}

impl From<Error> for ReportRejection {
    fn from(error: Error) -> Self {
        let is_permanent = !matches!(error.code(), Code::Overloaded | Code::Internal);
        Self { dead_letter_reason: is_permanent.then_some("refused"), error }
    }
}

fn reject_report(reason: &'static str, code: Code, message: impl Into<String>) -> ReportRejection {
    ReportRejection {
        dead_letter_reason: Some(reason),
        error: Fault::new(code, message).without_side_effect().into(),
    }
}

impl Utp {
    /// Ingests a report.
    pub async fn ingest_report(
        self: &Arc<Self>,
        caller: &Caller,
        report: ToolServiceReport,
    ) -> Result<ReportReceipt, ReportRejection> {
        if !caller.may_provide() {
            let message = format!("a key with the role {} cannot report", caller.roles);
            return Err(ReportRejection {
                dead_letter_reason: None,
                error: Error::refused(Code::PermissionDenied, message),
            });
        }
        let call = self.identify_call(&caller.project, &report).await?;
        let route = Route::for_call(&call);
        if report.has_inline_result {
            let message = "payload.result is forbidden: write a tool.result card and report it";
            let fault = Fault::new(Code::BadRequest, message);
            self.apply_report(&call, &report, Err(fault.clone())).await?;
            return Err(ReportRejection { dead_letter_reason: None, error: fault.into() });
        }
        let checked = self.check_report(caller, &call, &route, &report).await;
        if let Err(rejection) = &checked
            && !matches!(rejection.error.code(), Code::Overloaded | Code::Internal)
        {
            // Until its deadline, the call can still get a report that is right.
            let reason = rejection.error.to_string();
            self.record_refused_report(&call, &reason, &report).await?;
        }
        let (status, expected, card) = checked?;
        if let Some(traceparent) = report.traceparent.clone() {
            self.report_traceparents.lock().insert(call.id.clone(), traceparent);
        }
        let ingested = self.apply_report(&call, &report, Ok((status, &card))).await;
        self.report_traceparents.lock().remove(&call.id);
        let ingested = ingested?;
        if ingested.is_late && report.card.is_some() {
            self.store_late_card(card).await?;
        }
        tracing::debug!(call = %call.id, status = status.as_str(), after = expected.as_str(), "reported");
        Ok(ingested)
    }

    /// Checks a report and its card. Returns the status, `after_execution` and the card.
    async fn check_report(
        &self,
        caller: &Caller,
        call: &Arc<Call>,
        route: &Route,
        report: &ToolServiceReport,
    ) -> Result<(ToolStatus, AfterExecution, Card), ReportRejection> {
        let card_id = check_card_id(report)?;
        let (status, expected) = self.validate_report_fields(call, report).await?;
        let card = match self.derive_result_card(call, report)? {
            Some(card) => card,
            None => self.load_reported_card(caller, call, report, (card_id, status)).await?,
        };
        check_card(&card, route, status)?;
        Ok((status, expected, card))
    }

    /// Loads the card of a report. A card that comes with the report is stored only after it passed
    /// the checks: a refused report leaves nothing behind that could later pass for a result.
    async fn load_reported_card(
        &self,
        caller: &Caller,
        call: &Call,
        report: &ToolServiceReport,
        (card_id, status): (&str, ToolStatus),
    ) -> Result<Card, ReportRejection> {
        if let Some(document) = &report.card {
            let card = self.cards.validate_card(caller, document).await?;
            check_card(&card, &Route::for_call(call), status)?;
            let stored_id = match self.core.store.utp().put_card(card.clone()).await {
                Ok(PutCardResult::Conflict(stored)) => stored.card_id,
                stored => {
                    return stored.map(|_| card).map_err(|error| from_store_error(error).into());
                }
            };
            let utp = self.core.store.utp();
            let (turn, id) = (&report.turn_id, &report.tool_call_id);
            let existing =
                utp.result_card(&caller.project, turn, id).await.map_err(from_store_error)?;
            // The first result stands. While the call is open, a different one must not replace it.
            let now = self.cards.find_call(&call.project, &call.id).await?;
            let ended = now.is_none_or(|call| call.status.is_terminal());
            let stands = |existing: &Card| ended || existing.content == card.content;
            let message = format!("card \"{}\" contradicts \"{stored_id}\"", card.card_id);
            let contradicts = || reject_report("wrong_card", Code::Conflict, message);
            return existing.filter(stands).ok_or_else(contradicts);
        }
        let found = self.cards.find_card(&caller.project, card_id).await?;
        let mut card = found.ok_or_else(|| {
            let message = format!("there is no card \"{card_id}\"");
            reject_report("no_card", Code::NotFound, message)
        })?;
        check_card(&card, &Route::for_call(call), status)?;
        // Toolcrib checks the lineage of the cards that it stores. A tool service that writes to
        // the database stores its cards itself.
        copy_lineage(&mut card, call)
            .map_err(|error| ReportRejection { dead_letter_reason: Some("wrong_card"), error })?;
        Ok(card)
    }
}

impl Utp {
    /// Finds the call that a report names, and checks that the report may concern it.
    async fn identify_call(
        &self,
        project: &str,
        report: &ToolServiceReport,
    ) -> Result<Arc<Call>, ReportRejection> {
        let (turn, id) = (&report.turn_id, &report.tool_call_id);
        let call = match self.cards.find_by_route(project, turn, id).await? {
            RouteLookup::Call(call) => call,
            RouteLookup::WrongTurn(call) => {
                let message = format!("call \"{id}\" is not of turn \"{turn}\"");
                self.record_refused_report(&call, "reported for another turn", report).await?;
                return Err(reject_report("wrong_turn", Code::Conflict, message));
            }
            RouteLookup::NotFound => {
                let message = format!("there is no call \"{id}\" of turn \"{turn}\"");
                return Err(reject_report("orphan", Code::NotFound, message));
            }
        };
        let route = Route::for_call(&call);
        if call.target.executor != Executor::UTP {
            let message = format!("{} is not executed by a tool service", call.target.tool);
            return Err(reject_report("wrong_call", Code::Conflict, message));
        }
        if route.agent_id != report.agent_id {
            let message = format!("call \"{id}\" is not of agent \"{}\"", report.agent_id);
            self.record_refused_report(&call, "reported for another agent", report).await?;
            return Err(reject_report("wrong_agent", Code::Conflict, message));
        }
        if route.epoch != report.epoch {
            let (is, reported) = (route.epoch, report.epoch);
            let message = format!("call \"{id}\" is of turn_epoch {is}, not {reported}");
            self.record_refused_report(&call, "reported for another epoch", report).await?;
            return Err(reject_report("wrong_epoch", Code::Conflict, message));
        }
        self.check_current_epoch(&call, report).await?;
        Ok(call)
    }

    /// Refuses a report for an epoch that is over. A turn whose lease has expired is in another
    /// epoch, and its present holder did not request this call; so while the call is open, the
    /// report is not accepted. For a call that has ended, `step` decides whether the report is a
    /// duplicate or late.
    async fn check_current_epoch(
        &self,
        call: &Call,
        report: &ToolServiceReport,
    ) -> Result<(), ReportRejection> {
        let Some(route) = call.origin.route.as_ref().filter(|_| !call.status.is_terminal()) else {
            return Ok(());
        };
        let turn = self.core.store.utp().turn(&call.project, &route.turn_id).await;
        match turn.map_err(from_store_error)? {
            Some(turn) if turn.epoch != route.epoch => {
                let (is, requested) = (turn.epoch, route.epoch);
                let message = format!(
                    "turn \"{}\" is in turn_epoch {is}: the agent no longer waits for calls of {requested}",
                    route.turn_id
                );
                self.record_refused_report(call, "reported for an epoch that is over", report)
                    .await?;
                Err(reject_report("wrong_epoch", Code::Conflict, message))
            }
            Some(_) | None => Ok(()),
        }
    }

    async fn record_refused_report(
        &self,
        call: &Call,
        reason: &str,
        report: &ToolServiceReport,
    ) -> Result<(), ReportRejection> {
        let by = report.reported_by.as_deref().unwrap_or("tool");
        let record =
            EventRecord::new(EventKind::ReportIgnored, self.core.clock.wall_ms(), call.attempt)
                .with("why", reason)
                .with("by", by)
                .with("agent_turn_id", report.turn_id.as_str())
                .with("turn_epoch", report.epoch);
        Ok(self.dispatcher.append_late_event(call, record).await?)
    }

    /// Returns the card of a report that uses the call's own result card id. Such a card adds
    /// nothing to the card derived from the ended call, so it need not be stored.
    fn derive_result_card(
        &self,
        call: &Call,
        report: &ToolServiceReport,
    ) -> Result<Option<Card>, ReportRejection> {
        let Some(document) = &report.card else { return Ok(None) };
        let expected_id = card::derived_id(&call.id, TOOL_RESULT);
        if document.get("card_id").and_then(Value::as_str) != Some(&expected_id) {
            return Ok(None);
        }
        let now_ms = self.core.clock.wall_ms();
        let mut card = Card::parse(document, &call.project, now_ms, String::new)
            .map_err(|fault| ReportRejection::from(Error::from(fault)))?;
        copy_lineage(&mut card, call)?;
        const CALL_METADATA: [&str; 7] = [
            "agent_turn_id",
            "step_id",
            "tool_call_id",
            "trace_id",
            "parent_step_id",
            "role",
            "function_name",
        ];
        let by = report.reported_by.as_deref().unwrap_or("tool");
        let nothing_more = card.metadata.keys().all(|name| CALL_METADATA.contains(&name.as_str()));
        if card.content_text("status") != Some("success") || !nothing_more || card.author_id != by {
            let message = "only a plain success signed by its reporter can have the call's own \
                           card id; use another one";
            return Err(reject_report("wrong_card", Code::BadRequest, message));
        }
        Ok(Some(card))
    }

    /// Stores a late card under a separate id: the call's own result card is a different one.
    async fn store_late_card(&self, card: Card) -> Result<(), ReportRejection> {
        let hash = derive_inbox_id(&card.project, "late", &card.card_id);
        let card_id = format!("late{}", hash.trim_start_matches("inbox_"));
        let card = Card { card_id, ..card };
        self.core.store.utp().put_card(card).await.map_err(from_store_error)?;
        Ok(())
    }

    /// Validates the status, `after_execution` and depth of a report.
    async fn validate_report_fields(
        &self,
        call: &Call,
        report: &ToolServiceReport,
    ) -> Result<(ToolStatus, AfterExecution), ReportRejection> {
        let malformed = |message: String| reject_report("malformed", Code::BadRequest, message);
        let text = report.status.as_deref().unwrap_or_default();
        let status: ToolStatus = text.parse().map_err(|()| {
            let statuses = ToolStatus::ALL.map(ToolStatus::as_str).join(", ");
            malformed(format!("status \"{text}\" is not one of {statuses}"))
        })?;
        let text = report.after_execution.as_deref().unwrap_or_default();
        let after: AfterExecution = text.parse().map_err(|()| {
            malformed(format!("after_execution \"{text}\" is neither suspend nor terminate"))
        })?;
        let binding = self.registry.load_binding(call).await?;
        let expected = binding.map_or(after, |binding| binding.after_execution);
        if after != expected {
            let (is, reported) = (expected.as_str(), after.as_str());
            let message = format!(
                "after_execution of the call is {is}, not {reported}; a result changes it with \
                 __cg_control"
            );
            return Err(reject_report("after_execution_mismatch", Code::BadRequest, message));
        }
        let depth = Route::for_call(call).depth;
        if report.depth.is_some_and(|reported| reported >= MAX_DEPTH) {
            let message = format!("recursion_depth_exceeded: at most {}", MAX_DEPTH - 1);
            return Err(malformed(message));
        }
        if report.depth.is_some_and(|reported| reported != depth) {
            return Err(malformed(format!("CG-Recursion-Depth of the call is {depth}")));
        }
        Ok((status, after))
    }

    /// Applies the report to its call through `step`.
    async fn apply_report(
        self: &Arc<Self>,
        call: &Arc<Call>,
        report: &ToolServiceReport,
        reported: Result<(ToolStatus, &Card), Fault>,
    ) -> Result<ReportReceipt, ReportRejection> {
        let author = || reported.as_ref().ok().map(|(_, card)| card.author_id.clone());
        let by = report.reported_by.clone().or_else(author).unwrap_or_else(|| "tool".to_owned());
        let event = match reported {
            Err(fault) => Event::Report {
                attempt: Some(call.attempt),
                by: Some(by),
                result: Err(fault.retryable(false)),
            },
            Ok((status, card)) => {
                self.dispatcher.prepare_output_schema(call).await;
                self.build_event(call, by, status, card)
            }
        };
        let (project, id) = (call.project.clone(), call.id.clone());
        let utp = self.clone();
        let advancing = async move { utp.dispatcher.advance(&project, &id, event).await };
        let advanced = self.dispatcher.detach_on_drop(advancing).await?;
        let (call, duplicate, late) = match advanced {
            AdvanceOutcome::Committed(call) => (call, false, false),
            AdvanceOutcome::Duplicate(call) => (call, true, false),
            AdvanceOutcome::Refused(call, Refusal::AlreadyEnded(_)) => (call, false, true),
            AdvanceOutcome::Refused(call, _) => {
                let message = format!("this attempt of call \"{}\" is not in flight", call.id);
                return Err(reject_report("wrong_attempt", Code::Conflict, message));
            }
        };
        let inbox_id = self.uses_inbox(&call).then(|| super::inbox::inbox_id(&call));
        Ok(ReportReceipt { call, inbox_id, is_duplicate: duplicate, is_late: late })
    }

    fn build_event(&self, call: &Call, by: String, status: ToolStatus, card: &Card) -> Event {
        let (result, fault) = card.outcome();
        let data = self.dispatcher.validate_result(call, Ok(Json::from_value(&result)));
        let attempt = call.attempt;
        let outcome = match (status, data) {
            (ToolStatus::Failed, _) => {
                return Event::Report { attempt: Some(attempt), by: Some(by), result: Err(fault) };
            }
            (ToolStatus::Timeout, _) => {
                RemoteOutcome::TimedOut(Fault { code: Code::Timeout, ..fault })
            }
            (ToolStatus::Canceled, _) => {
                RemoteOutcome::Canceled(Fault { code: Code::Canceled, ..fault })
            }
            (ToolStatus::Partial, Ok(data)) => RemoteOutcome::Partial(data),
            (_, result) => {
                return Event::Report { attempt: Some(attempt), by: Some(by), result };
            }
        };
        Event::RemoteOutcome { attempt, by, outcome }
    }
}

/// Returns the id of the reported card. A report must name its card, also if the card comes with
/// it: the inbox item refers to the result by this id.
fn check_card_id(report: &ToolServiceReport) -> Result<&str, ReportRejection> {
    let Some(card_id) = report.card_id.as_deref().filter(|id| !id.trim().is_empty()) else {
        let message = "tool_result_card_id is missing";
        return Err(reject_report("malformed", Code::BadRequest, message));
    };
    let document = report.card.as_ref();
    if document.is_some_and(|card| card.get("card_id").and_then(Value::as_str) != Some(card_id)) {
        let message = "tool_result_card_id is not the id of the card that came with it";
        return Err(reject_report("wrong_card", Code::BadRequest, message));
    }
    Ok(card_id)
}

fn check_card(card: &Card, route: &Route, status: ToolStatus) -> Result<(), ReportRejection> {
    let reject = |message: String| reject_report("wrong_card", Code::BadRequest, message);
    let id = &card.card_id;
    if card.kind != TOOL_RESULT {
        return Err(reject(format!("card \"{id}\" is a {}, not a tool.result", card.kind)));
    }
    let same_call = card.tool_call_id.as_deref() == Some(&route.tool_call_id);
    if !same_call || card.turn_id() != Some(&route.turn_id) {
        let found = json!([card.turn_id(), card.tool_call_id]);
        return Err(reject(format!("card \"{id}\" is of another call: {found}")));
    }
    if card.content_text("status") != Some(status.as_str()) {
        let is = card.content_text("status").unwrap_or_default();
        return Err(reject(format!("card \"{id}\" says {is}, the report {}", status.as_str())));
    }
    Ok(())
}
