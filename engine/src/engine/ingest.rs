//! Reports of tool services: checked against the call they are about, decided by `step`, and put
//! into the agent's inbox. What cannot be taken is kept as a dead letter, so nothing is lost.

use std::sync::Arc;

use serde_json::{Map, Value, json};

use super::advance::Advanced;
use super::cards::{Found, take_after};
use super::inbox::inbox_id_of;
use super::{Engine, Inner, unavailable};
use crate::call::Call;
use crate::caller::Caller;
use crate::event::{Kind, Record};
use crate::fault::{Code, Error, Fault};
use crate::json::Json;
use crate::lifecycle::{Event, Refusal, Told};
use crate::store::utp::CardPut;
use crate::tool::Executor;
use crate::utp::card::{self, Card, TOOL_RESULT};
use crate::utp::{AfterExecution, DeadLetter, MAX_DEPTH, Route, ToolStatus};

/// A report, as far as it could be read.
#[derive(Debug, Clone, Default)]
pub struct ToolReport {
    pub tool_call_id: String,
    pub turn_id: String,
    pub epoch: u64,
    pub agent_id: String,
    pub after_execution: Option<String>,
    pub status: Option<String>,
    pub card_id: Option<String>,
    /// The card itself, for who wants to save a question.
    pub card: Option<Value>,
    /// It has its result in itself, which nobody may.
    pub inline_result: bool,
    pub depth: Option<u32>,
    pub traceparent: Option<String>,
    /// Who says so.
    pub source: Option<String>,
}

/// What a report came to.
#[derive(Debug, Clone)]
pub struct Ingested {
    pub call: Arc<Call>,
    /// Where it is in the agent's inbox; none when the agent has none.
    pub inbox_id: Option<String>,
    /// It was known already.
    pub duplicate: bool,
    /// The call had ended otherwise: it is written down, and changed nothing.
    pub late: bool,
}

/// Why a report was not taken.
#[derive(Debug)]
pub struct Rejected {
    /// One word for the dead letter; none when coming again can help.
    pub reason: Option<&'static str>,
    pub error: Error,
}

impl From<Error> for Rejected {
    fn from(error: Error) -> Self {
        let lasting = !matches!(error.code(), Code::Overloaded | Code::Internal);
        Self { reason: lasting.then_some("refused"), error }
    }
}

fn reject(reason: &'static str, code: Code, message: impl Into<String>) -> Rejected {
    Rejected { reason: Some(reason), error: Fault::new(code, message).not_happened().into() }
}

/// A message that could not be taken.
#[derive(Debug, Clone, Default)]
pub struct Unreadable {
    pub kind: &'static str,
    pub reason: String,
    pub message: String,
    pub subject: String,
    pub headers: Map<String, Value>,
    pub payload: String,
    /// Whoever sends it could not send all of it.
    pub cut: bool,
}

/// How much a dead letter keeps of a payload, and of everything else.
const KEPT_BYTES: usize = 262_144;
const KEPT_MESSAGE: usize = 4_096;
const KEPT_SUBJECT: usize = 1_024;
const KEPT_REASON: usize = 64;
const KEPT_HEADERS: usize = 16_384;

/// What dead letters are counted by. Whoever sends one may call it anything; that is "other".
const REASONS: [&str; 14] = [
    "after_execution_mismatch",
    "malformed",
    "no_card",
    "no_stream",
    "orphan",
    "refused",
    "too_large",
    "unpublishable",
    "wrong_agent",
    "wrong_attempt",
    "wrong_call",
    "wrong_card",
    "wrong_epoch",
    "wrong_turn",
];

/// The beginning of a text, and whether something was cut off.
fn cut_to(mut text: String, limit: usize) -> (String, bool) {
    let cut = text.len() > limit;
    if cut {
        let end = (0..=limit).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
        text.truncate(end);
    }
    (text, cut)
}

/// As many headers as there is room for, and whether some were left out.
fn kept_headers(headers: Map<String, Value>) -> (Map<String, Value>, bool) {
    let (count, mut room) = (headers.len(), KEPT_HEADERS);
    let fits = |(name, value): &(String, Value)| {
        let size = name.len() + value.as_str().map_or_else(|| value.to_string().len(), str::len);
        let fits = size <= room;
        room -= if fits { size } else { 0 };
        fits
    };
    let kept: Map<String, Value> = headers.into_iter().filter(fits).collect();
    let fewer = kept.len() < count;
    (kept, fewer)
}

impl Engine {
    /// Takes a report.
    pub async fn ingest(&self, caller: &Caller, report: ToolReport) -> Result<Ingested, Rejected> {
        if !caller.may_provide() {
            let message = format!("a key with the role {} cannot report", caller.role.as_str());
            return Err(Rejected {
                reason: None,
                error: Error::refused(Code::PermissionDenied, message),
            });
        }
        let inner = &self.inner;
        let call = inner.identified(&caller.project, &report).await?;
        let route = Route::of(&call);
        if report.inline_result {
            let message = "payload.result is forbidden: write a tool.result card and report it";
            let fault = Fault::new(Code::BadRequest, message);
            inner.settle_with(&call, &report, Err(fault.clone())).await?;
            return Err(Rejected { reason: None, error: fault.into() });
        }
        let (status, expected) = inner.checked_fields(&call, &report).await?;
        let card = match inner.implied_card(&call, &report)? {
            Some(card) => card,
            None => self.reported_card(caller, &call, &report, status).await?,
        };
        check_card(&card, &route, status)?;
        if let Some(traceparent) = report.traceparent.clone() {
            inner.inbound.lock().insert(call.id.clone(), traceparent);
        }
        let ingested = inner.settle_with(&call, &report, Ok((status, &card))).await;
        inner.inbound.lock().remove(&call.id);
        let ingested = ingested?;
        if ingested.late && report.card.is_some() {
            inner.keep_late_card(card).await?;
        }
        tracing::debug!(call = %call.id, status = status.as_str(), after = expected.as_str(), "reported");
        Ok(ingested)
    }

    /// The card of a report. One that comes with it is stored once it is known to fit: what is
    /// refused leaves nothing behind that could be taken for a result later.
    async fn reported_card(
        &self,
        caller: &Caller,
        call: &Call,
        report: &ToolReport,
        status: ToolStatus,
    ) -> Result<Card, Rejected> {
        if let Some(given) = &report.card {
            let named = given.get("card_id").and_then(Value::as_str);
            if report.card_id.is_some() && named != report.card_id.as_deref() {
                let message = "tool_result_card_id is not the id of the card that came with it";
                return Err(reject("wrong_card", Code::BadRequest, message));
            }
            let card = self.read_card(caller, given).await?;
            check_card(&card, &Route::of(call), status)?;
            let there = match self.inner.store.utp().put_card(card.clone()).await {
                Ok(CardPut::Other(there)) => there.card_id,
                stored => return stored.map(|_| card).map_err(|error| unavailable(error).into()),
            };
            let utp = self.inner.store.utp();
            let (turn, id) = (&report.turn_id, &report.tool_call_id);
            let known = utp.result_card(&caller.project, turn, id).await.map_err(unavailable)?;
            // The first result stands. Another one must not pass for it while the call is open.
            let now = self.inner.call_of(&call.project, &call.id).await?;
            let ended = now.is_none_or(|call| call.status.is_terminal());
            let stands = |known: &Card| ended || known.content == card.content;
            let message = format!("card \"{}\" contradicts \"{there}\"", card.card_id);
            let contradicts = || reject("wrong_card", Code::Conflict, message);
            return known.filter(stands).ok_or_else(contradicts);
        }
        let Some(card_id) = report.card_id.as_deref().filter(|id| !id.trim().is_empty()) else {
            let message = "tool_result_card_id is missing";
            return Err(reject("malformed", Code::BadRequest, message));
        };
        let found = self.inner.find_card(&caller.project, card_id).await?;
        found.ok_or_else(|| {
            let message = format!("there is no card \"{card_id}\"");
            reject("no_card", Code::NotFound, message)
        })
    }

    /// Keeps a message that could not be taken.
    pub async fn bury(&self, project: &str, what: Unreadable) -> Result<DeadLetter, Error> {
        let inner = &self.inner;
        let now_ms = inner.clock.now_ms();
        let (payload, cut) = cut_to(what.payload, KEPT_BYTES);
        let (headers, fewer) = kept_headers(what.headers);
        let (subject, shorter) = cut_to(what.subject, KEPT_SUBJECT);
        let letter = DeadLetter {
            id: inner.minter.text("dl_", now_ms),
            project: project.to_owned(),
            kind: what.kind.to_owned(),
            reason: cut_to(what.reason, KEPT_REASON).0,
            message: cut_to(what.message, KEPT_MESSAGE).0,
            subject,
            headers,
            payload,
            cut: what.cut || cut || fewer || shorter,
            created_ms: now_ms,
            redriven_ms: None,
            last_try: None,
        };
        let counted = REASONS.iter().find(|known| **known == letter.reason).unwrap_or(&"other");
        metrics::counter!("toolcrib_dead_letters_total", "reason" => *counted).increment(1);
        inner.store.utp().bury(letter.clone()).await.map_err(unavailable)?;
        Ok(letter)
    }

    /// The project's dead letters, newest first.
    pub async fn dead_letters(
        &self,
        caller: &Caller,
        before: Option<&str>,
        limit: usize,
    ) -> Result<Vec<DeadLetter>, Error> {
        self.require_admin(caller, None)?;
        let found = self.inner.store.utp().dead_letters(&caller.project, before, limit).await;
        found.map_err(unavailable)
    }

    /// One of them.
    pub async fn dead_letter(&self, caller: &Caller, id: &str) -> Result<DeadLetter, Error> {
        self.require_admin(caller, None)?;
        let found = self.inner.store.utp().dead_letter(&caller.project, id).await;
        found.map_err(unavailable)?.ok_or_else(|| {
            let shown: String = id.chars().take(80).collect();
            Error::refused(Code::NotFound, format!("there is no dead letter \"{shown}\""))
        })
    }

    /// Writes down what trying one again came to.
    pub async fn redriven(&self, mut letter: DeadLetter, came_to: &str) -> Result<(), Error> {
        letter.redriven_ms = Some(self.inner.clock.now_ms());
        letter.last_try = Some(came_to.to_owned());
        self.inner.store.utp().bury(letter).await.map_err(unavailable)
    }
}

impl Inner {
    /// The call that a report is about: found, and the report's to report on.
    async fn identified(&self, project: &str, report: &ToolReport) -> Result<Arc<Call>, Rejected> {
        let (turn, id) = (&report.turn_id, &report.tool_call_id);
        let call = match self.find_by_route(project, turn, id).await? {
            Found::Call(call) => call,
            Found::WrongTurn(call) => {
                let message = format!("call \"{id}\" is not of turn \"{turn}\"");
                self.note_refused(&call, "reported for another turn", report).await?;
                return Err(reject("wrong_turn", Code::Conflict, message));
            }
            Found::Nothing => {
                let message = format!("there is no call \"{id}\" of turn \"{turn}\"");
                return Err(reject("orphan", Code::NotFound, message));
            }
        };
        let route = Route::of(&call);
        if call.target.executor != Executor::Utp {
            let message = format!("{} is not executed by a tool service", call.target.tool);
            return Err(reject("wrong_call", Code::Conflict, message));
        }
        if route.agent_id != report.agent_id {
            let message = format!("call \"{id}\" is not of agent \"{}\"", report.agent_id);
            self.note_refused(&call, "reported for another agent", report).await?;
            return Err(reject("wrong_agent", Code::Conflict, message));
        }
        if route.epoch != report.epoch {
            let (is, given) = (route.epoch, report.epoch);
            let message = format!("call \"{id}\" is of turn_epoch {is}, not {given}");
            self.note_refused(&call, "reported for another epoch", report).await?;
            return Err(reject("wrong_epoch", Code::Conflict, message));
        }
        self.refuse_left_behind(&call, report).await?;
        Ok(call)
    }

    /// A turn whose lease ran out is in another epoch, and whoever has it now has not asked for
    /// this: it is not taken while the call is open. A call that has ended says by itself what its
    /// report is: the same again, or late.
    async fn refuse_left_behind(&self, call: &Call, report: &ToolReport) -> Result<(), Rejected> {
        let Some(route) = call.asked.turn.as_ref().filter(|_| !call.status.is_terminal()) else {
            return Ok(());
        };
        let turn = self.store.utp().turn(&call.project, &route.turn_id).await;
        match turn.map_err(unavailable)? {
            Some(turn) if turn.epoch != route.epoch => {
                let (is, given) = (turn.epoch, route.epoch);
                let message = format!(
                    "turn \"{}\" is in turn_epoch {is}: nobody waits for what was asked in {given}",
                    route.turn_id
                );
                self.note_refused(call, "reported for an epoch that is over", report).await?;
                Err(reject("wrong_epoch", Code::Conflict, message))
            }
            Some(_) | None => Ok(()),
        }
    }

    async fn note_refused(
        &self,
        call: &Call,
        why: &str,
        report: &ToolReport,
    ) -> Result<(), Rejected> {
        let by = report.source.as_deref().unwrap_or("tool");
        let record = Record::new(Kind::Late, self.clock.now_ms(), call.attempt)
            .with("why", why)
            .with("by", by)
            .with("agent_turn_id", report.turn_id.as_str())
            .with("turn_epoch", report.epoch);
        Ok(self.append_late(call, record).await?)
    }

    /// A result under the id that the call's own result has: it says nothing that the call will
    /// not say once it has ended, so it need not be stored beside it.
    fn implied_card(&self, call: &Call, report: &ToolReport) -> Result<Option<Card>, Rejected> {
        let Some(given) = &report.card else { return Ok(None) };
        let own = card::id_of(&call.id, TOOL_RESULT);
        if given.get("card_id").and_then(Value::as_str) != Some(&own) {
            return Ok(None);
        }
        let now_ms = self.clock.now_ms();
        let mut card = Card::parse(given, &call.project, now_ms, String::new)
            .map_err(|fault| Rejected::from(Error::from(fault)))?;
        take_after(&mut card, call)?;
        const SAID: [&str; 7] = [
            "agent_turn_id",
            "step_id",
            "tool_call_id",
            "trace_id",
            "parent_step_id",
            "role",
            "function_name",
        ];
        let by = report.source.as_deref().unwrap_or("tool");
        let nothing_more = card.metadata.keys().all(|name| SAID.contains(&name.as_str()));
        if card.content_text("status") != Some("success") || !nothing_more || card.author_id != by {
            let message = "only a plain success, signed by who reports it, can have the call's own \
                           card id; give it another";
            return Err(reject("wrong_card", Code::BadRequest, message));
        }
        Ok(Some(card))
    }

    /// What came too late is kept under an id of its own: the call's own result is another.
    async fn keep_late_card(&self, card: Card) -> Result<(), Rejected> {
        let hash = inbox_id_of(&card.project, "late", &card.card_id);
        let card_id = format!("late{}", hash.trim_start_matches("inbox_"));
        let card = Card { card_id, ..card };
        self.store.utp().put_card(card).await.map_err(unavailable)?;
        Ok(())
    }

    /// Status and after_execution of a report, and its depth.
    async fn checked_fields(
        &self,
        call: &Call,
        report: &ToolReport,
    ) -> Result<(ToolStatus, AfterExecution), Rejected> {
        let malformed = |message: String| reject("malformed", Code::BadRequest, message);
        let given = report.status.as_deref().unwrap_or_default();
        let status: ToolStatus = given.parse().map_err(|()| {
            let known = ToolStatus::ALL.map(ToolStatus::as_str).join(", ");
            malformed(format!("status \"{given}\" is not one of {known}"))
        })?;
        let given = report.after_execution.as_deref().unwrap_or_default();
        let after: AfterExecution = given.parse().map_err(|()| {
            malformed(format!("after_execution \"{given}\" is neither suspend nor terminate"))
        })?;
        let binding = self.binding_of(call).await?;
        let expected = binding.map_or(after, |binding| binding.after_execution);
        if after != expected {
            let (is, given) = (expected.as_str(), after.as_str());
            let message = format!(
                "after_execution of the call is {is}, not {given}; a result changes it with \
                 __cg_control"
            );
            return Err(reject("after_execution_mismatch", Code::BadRequest, message));
        }
        let depth = Route::of(call).depth;
        if report.depth.is_some_and(|given| given >= MAX_DEPTH) {
            let message = format!("recursion_depth_exceeded: at most {}", MAX_DEPTH - 1);
            return Err(malformed(message));
        }
        if report.depth.is_some_and(|given| given != depth) {
            return Err(malformed(format!("CG-Recursion-Depth of the call is {depth}")));
        }
        Ok((status, after))
    }

    /// Lets `step` decide what the report says.
    async fn settle_with(
        self: &Arc<Self>,
        call: &Arc<Call>,
        report: &ToolReport,
        said: Result<(ToolStatus, &Card), Fault>,
    ) -> Result<Ingested, Rejected> {
        let by = report.source.clone().unwrap_or_else(|| "tool".to_owned());
        let event = match said {
            Err(fault) => Event::Report {
                attempt: Some(call.attempt),
                by: Some(by),
                result: Err(fault.retryable(false)),
            },
            Ok((status, card)) => self.event(call, by, status, card),
        };
        let (project, id) = (call.project.clone(), call.id.clone());
        let inner = self.clone();
        let advancing = async move { inner.advance(&project, &id, event).await };
        let advanced = self.surely(advancing).await?;
        let (call, duplicate, late) = match advanced {
            Advanced::Done(call) => (call, false, false),
            Advanced::Repeated(call) => (call, true, false),
            Advanced::Refused(call, Refusal::Ended(_)) => (call, false, true),
            Advanced::Refused(call, _) => {
                let message = format!("this attempt of call \"{}\" is not out", call.id);
                return Err(reject("wrong_attempt", Code::Conflict, message));
            }
        };
        let inbox_id = self.has_inbox(&call).then(|| super::inbox::inbox_id(&call));
        Ok(Ingested { call, inbox_id, duplicate, late })
    }

    fn event(&self, call: &Call, by: String, status: ToolStatus, card: &Card) -> Event {
        let (result, fault) = card.outcome();
        let data = self.checked(call, Ok(Json::of_value(&result)));
        let attempt = call.attempt;
        let told = match (status, data) {
            (ToolStatus::Failed, _) => {
                return Event::Report { attempt: Some(attempt), by: Some(by), result: Err(fault) };
            }
            (ToolStatus::Timeout, _) => Told::TimedOut(Fault { code: Code::Timeout, ..fault }),
            (ToolStatus::Canceled, _) => Told::Canceled(Fault { code: Code::Canceled, ..fault }),
            (ToolStatus::Partial, Ok(data)) => Told::Partial(data),
            (_, result) => {
                return Event::Report { attempt: Some(attempt), by: Some(by), result };
            }
        };
        Event::Told { attempt, by, told }
    }
}

fn check_card(card: &Card, route: &Route, status: ToolStatus) -> Result<(), Rejected> {
    let wrong = |message: String| reject("wrong_card", Code::BadRequest, message);
    let id = &card.card_id;
    if card.kind != TOOL_RESULT {
        return Err(wrong(format!("card \"{id}\" is a {}, not a tool.result", card.kind)));
    }
    let same_call = card.tool_call_id.as_deref() == Some(&route.tool_call_id);
    if !same_call || card.turn_id() != Some(&route.turn_id) {
        let named = json!([card.turn_id(), card.tool_call_id]);
        return Err(wrong(format!("card \"{id}\" is of another call: {named}")));
    }
    if card.content_text("status") != Some(status.as_str()) {
        let is = card.content_text("status").unwrap_or_default();
        return Err(wrong(format!("card \"{id}\" says {is}, the report {}", status.as_str())));
    }
    Ok(())
}
