//! UTP cards: presents any call as cards, and stores cards that others write.

use std::sync::Arc;

use serde_json::{Value, json};

use crate::calls::{Calls, Dispatcher};
use crate::domain::call::{Call, Status};
use crate::domain::caller::Caller;
use crate::domain::derived;
use crate::domain::fault::{Code, Error, Fault};
use crate::domain::id::CallId;
use crate::domain::utp::card::{self, Card, TASK_DELIVERABLE, TOOL_CALL, TOOL_RESULT, into_map};
use crate::domain::utp::{Route, ToolStatus, Turn, trace};
use crate::lifecycle::is_final_message;
use crate::ports::core::{Core, from_store_error};
use crate::ports::store::utp::PutCardResult;
use crate::registry::Registry;
use crate::utp::inbox::derive_inbox_id;

/// The call that a report or a card names.
pub(crate) enum RouteLookup {
    Call(Arc<Call>),
    /// The call exists, but in another turn.
    WrongTurn(Arc<Call>),
    NotFound,
}

/// The cards of UTP: those that calls are presented as, and those that others write.
pub struct Cards {
    pub(crate) core: Arc<Core>,
    pub(crate) registry: Arc<Registry>,
    pub(crate) dispatcher: Arc<Dispatcher>,
    pub(crate) calls: Arc<Calls>,
}

impl Cards {
    pub(crate) fn new(calls: &Arc<Calls>) -> Self {
        Self {
            core: calls.core.clone(),
            registry: calls.registry.clone(),
            dispatcher: calls.dispatcher.clone(),
            calls: calls.clone(),
        }
    }

    /// Returns one card.
    pub async fn card(&self, caller: &Caller, card_id: &str) -> Result<Card, Error> {
        let not_found = || {
            let excerpt: String = card_id.chars().take(80).collect();
            Error::refused(Code::NotFound, format!("there is no card \"{excerpt}\""))
        };
        // A provider may read the cards of every call of its project. Any other caller must be
        // allowed to read the call.
        if let (false, Some((id, _))) = (caller.may_provide(), card::parse_derived_id(card_id)) {
            self.calls.call(caller, &id).await.map_err(|error| match error.code() {
                Code::NotFound | Code::PermissionDenied => not_found(),
                _ => error,
            })?;
        }
        self.find_card(&caller.project, card_id).await?.ok_or_else(not_found)
    }

    /// Returns true if one of these callers may read a card. The card of a call that is no longer
    /// stored shows nothing, so it counts as readable.
    pub(crate) async fn is_readable(
        &self,
        readers: &[Caller],
        card_id: &str,
    ) -> Result<bool, Error> {
        let Some((id, _)) = card::parse_derived_id(card_id) else { return Ok(true) };
        let Some(project) = readers.first().map(|reader| &reader.project) else {
            return Ok(false);
        };
        if readers.iter().any(Caller::may_provide) {
            return Ok(true);
        }
        let Some(call) = self.find_call(project, &id).await? else { return Ok(true) };
        let catalog = self.registry.catalog();
        Ok(readers.iter().any(|reader| catalog.may_read_call(reader, &call)))
    }

    /// Returns the cards of a call: its call card and, once it has ended, its result card.
    pub async fn call_cards(&self, caller: &Caller, id: &CallId) -> Result<Vec<Card>, Error> {
        let call = self.calls.call(caller, id).await?;
        let binding = self.registry.load_binding(&call).await?;
        let mut cards = vec![derived::call_card(&call, binding.as_ref())];
        if call.status.is_terminal() {
            cards.extend(self.result_card(&call).await?);
        }
        Ok(cards)
    }

    /// Stores a card that the caller wrote. Returns it, and whether it is new. Storing an identical
    /// card again succeeds; a different card with the same id, or a second result of one call, is a
    /// conflict.
    pub async fn put_card(&self, caller: &Caller, value: &Value) -> Result<(Card, bool), Error> {
        let card = self.validate_card(caller, value).await?;
        match self.core.store.utp().put_card(card.clone()).await.map_err(from_store_error)? {
            PutCardResult::New => Ok((card, true)),
            PutCardResult::Identical => Ok((card, false)),
            PutCardResult::Conflict(existing) => {
                let message = match existing.card_id == card.card_id {
                    true => format!("there is another card \"{}\"", existing.card_id),
                    false => format!("the call has its result already: \"{}\"", existing.card_id),
                };
                let detail = json!({ "card_id": existing.card_id });
                Err(Fault::new(Code::Conflict, message).with_detail(detail).into())
            }
        }
    }

    /// Validates and completes a card that the caller wrote, without storing it.
    pub(crate) async fn validate_card(
        &self,
        caller: &Caller,
        value: &Value,
    ) -> Result<Card, Error> {
        let limit = self.core.limits.max_result_bytes;
        if value.to_string().len() > limit + 4_096 {
            let message = format!("the card is over the limit of {limit} bytes for a result");
            return Err(Error::refused(Code::PayloadTooLarge, message));
        }
        let now_ms = self.core.clock.wall_ms();
        let mint = || self.core.id_generator.next_id("", now_ms).to_lowercase();
        let mut card = Card::parse_external(value, &caller.project, now_ms, mint)?;
        if card.kind == TOOL_RESULT {
            if !caller.may_provide() {
                let message = "only a provider's key can write results";
                return Err(Error::refused(Code::PermissionDenied, message));
            }
            self.inherit_lineage(&mut card).await?;
        }
        Ok(card)
    }

    /// Handles a tool service's read of a call card as its acknowledgement of the call. The
    /// acknowledgement is committed after a short delay, unless the result arrives first. Returns
    /// false if, after recovery, no open call has this id: the service need not start it then.
    pub async fn acknowledge_card_read(
        self: &Arc<Self>,
        caller: &Caller,
        card_id: &str,
        by: &str,
    ) -> bool {
        let Some((id, TOOL_CALL)) = card::parse_derived_id(card_id) else { return true };
        let Some(entry) = self.dispatcher.open_calls.get(&id) else {
            return !self.calls.is_recovered();
        };
        let call = entry.call();
        let parked = call.hold.is_some() && call.has_attempt_in_flight();
        if !parked || call.project != caller.project || !call.target.traits.reports_later {
            return true;
        }
        let (cards, by, attempt) = (self.clone(), by.to_owned(), call.attempt);
        let project = caller.project.clone();
        self.core.tasks.spawn(async move {
            let soon = cards.core.clock.now_ms() + ACKNOWLEDGE_DELAY_MS;
            tokio::select! {
                () = cards.core.clock.sleep_until(soon) => {}
                () = cards.core.shutdown.cancelled() => return,
            }
            if cards.dispatcher.open_calls.get(&id).is_some_and(|entry| entry.call().hold.is_some())
            {
                let event = crate::lifecycle::Event::Acknowledged { attempt, by, instead_of: None };
                cards.dispatcher.advance_with_retry(&project, &id, event).await;
            }
        });
        true
    }
}

/// Delay before an acknowledgement is committed. A tool that answers faster goes straight to its
/// outcome.
const ACKNOWLEDGE_DELAY_MS: u64 = 100;

impl Cards {
    /// Stores the deliverable of a turn that ends without one: a card with the reason. Returns its
    /// id, which is the same for every attempt to end the turn.
    pub(crate) async fn put_fallback_deliverable(
        &self,
        turn: &Turn,
        reason: Option<&str>,
    ) -> Result<String, Error> {
        let hash = derive_inbox_id(&turn.project, &turn.turn_id, "deliverable");
        let card_id = format!("deliverable{}", hash.trim_start_matches("inbox"));
        let text = reason.unwrap_or("The turn ended without a deliverable.");
        let trace_id = turn.traceparent.as_deref().and_then(trace::parse).map(|(id, _)| id);
        let card = Card {
            card_id: card_id.clone(),
            project: turn.project.clone(),
            kind: TASK_DELIVERABLE.to_owned(),
            content: into_map(json!({ "__type__": "TextContent", "text": text })),
            created_ms: self.core.clock.wall_ms(),
            author_id: turn.agent_id.clone(),
            metadata: into_map(json!({
                "agent_turn_id": turn.turn_id,
                "trace_id": trace_id,
                "parent_step_id": turn.parent_step_id,
            })),
            tool_calls: None,
            tool_call_id: None,
            ttl_seconds: None,
        };
        // An earlier attempt may have stored it with another reason.
        self.core.store.utp().put_card(card).await.map_err(from_store_error)?;
        Ok(card_id)
    }

    pub(crate) async fn find_card(
        &self,
        project: &str,
        card_id: &str,
    ) -> Result<Option<Card>, Error> {
        let Some((id, kind)) = card::parse_derived_id(card_id) else {
            return self.core.store.utp().card(project, card_id).await.map_err(from_store_error);
        };
        let Some(call) = self.find_call(project, &id).await? else { return Ok(None) };
        let binding = self.registry.load_binding(&call).await?;
        Ok(match kind {
            TOOL_CALL => Some(derived::call_card(&call, binding.as_ref())),
            _ => derived::result_card(&call, binding.as_ref()),
        })
    }

    pub(crate) async fn find_call(
        &self,
        project: &str,
        id: &CallId,
    ) -> Result<Option<Arc<Call>>, Error> {
        if let Some(entry) = self.dispatcher.open_calls.get(id) {
            return Ok(Some(entry.call()).filter(|call| call.project == project));
        }
        let stored = self.core.store.call(project, id).await.map_err(from_store_error)?;
        Ok(stored.map(Arc::new))
    }

    /// Returns the result card of a call that has ended: the card that the tool service wrote if
    /// that card ended the call, otherwise one derived from the call.
    pub(crate) async fn result_card(&self, call: &Call) -> Result<Option<Card>, Error> {
        let route = Route::for_call(call);
        if call.target.executor == crate::domain::tool::Executor::UTP
            && call.status != Status::Pending
        {
            let (turn, id) = (&route.turn_id, &route.tool_call_id);
            let written = self.core.store.utp().result_card(&call.project, turn, id).await;
            let status = ToolStatus::from_call(call);
            // A tool service may also report `failed` with the code of a cancellation.
            let same_status = |card: &Card| {
                let written = card.content_text("status").and_then(|text| text.parse().ok());
                written == status
                    || call.status == Status::Failed && written == Some(ToolStatus::Failed)
            };
            let by_tool = call.acknowledged_by.is_some();
            // A late card may have the same status but a different reason, so the messages are
            // compared too.
            let error = call.outcome.as_ref().and_then(|outcome| outcome.error.as_ref());
            let card_fault = |card: &Card| card::fault_from_error(card.content.get("error"));
            let same_error =
                |card: &Card| error.is_none_or(|e| is_final_message(call, e, &card_fault(card)));
            let is_same = |card: &Card| by_tool && same_status(card) && same_error(card);
            if let Some(card) = written.map_err(from_store_error)?.filter(is_same) {
                return Ok(Some(card));
            }
        }
        let binding = self.registry.load_binding(call).await?;
        Ok(derived::result_card(call, binding.as_ref()))
    }

    /// Finds the call that has this turn id and tool call id in a project.
    pub(crate) async fn find_by_route(
        &self,
        project: &str,
        turn_id: &str,
        tool_call_id: &str,
    ) -> Result<RouteLookup, Error> {
        // An agent may choose an id that looks like a fallback's id (`ID-aN`). The exact id
        // therefore takes precedence over the reading as a fallback of another call.
        let numbered = tool_call_id.rsplit_once("-a").filter(|(_, n)| n.parse::<u32>().is_ok());
        let mut elsewhere = None;
        for base in [Some(tool_call_id), numbered.map(|(base, _)| base)].into_iter().flatten() {
            let Some(call) = self.find_call_in_turn(project, turn_id, base).await? else {
                continue;
            };
            let route = Route::for_call(&call);
            if route.tool_call_id != tool_call_id {
                continue;
            }
            if route.turn_id == turn_id {
                return Ok(RouteLookup::Call(call));
            }
            elsewhere = elsewhere.or(Some(call));
        }
        Ok(elsewhere.map_or(RouteLookup::NotFound, RouteLookup::WrongTurn))
    }

    /// Finds a call by its id in a turn. A call id is looked up as it is; any other id is looked up
    /// in the turn and, if the turn has no such call, is that of the newest one in any turn.
    async fn find_call_in_turn(
        &self,
        project: &str,
        turn_id: &str,
        id: &str,
    ) -> Result<Option<Arc<Call>>, Error> {
        if let Ok(id) = id.parse::<CallId>() {
            return self.find_call(project, &id).await;
        }
        let utp = self.core.store.utp();
        let found = utp.step_call(project, Some(turn_id), id).await;
        let row = match found.map_err(from_store_error)? {
            Some(row) => Some(row),
            None => utp.step_call(project, None, id).await.map_err(from_store_error)?,
        };
        match row.and_then(|row| row.call_id).and_then(|id| id.parse().ok()) {
            Some(id) => self.find_call(project, &id).await,
            None => Ok(None),
        }
    }

    /// Completes a result card with the lineage of its call, which must be identical.
    async fn inherit_lineage(&self, card: &mut Card) -> Result<(), Error> {
        let turn_id = card.turn_id().unwrap_or_default().to_owned();
        let tool_call_id = card.tool_call_id.clone().unwrap_or_default();
        let found = self.find_by_route(&card.project, &turn_id, &tool_call_id).await?;
        let RouteLookup::Call(call) = found else { return Ok(()) };
        copy_lineage(card, &call)
    }
}

/// Copies the lineage of the call into its result card; refuses a card that states another one.
pub(crate) fn copy_lineage(card: &mut Card, call: &Call) -> Result<(), Error> {
    let Route { step_id, parent_step_id, .. } = Route::for_call(call);
    let lineage = [
        ("step_id", Some(step_id)),
        ("trace_id", Some(derived::trace_id_of(call))),
        ("parent_step_id", parent_step_id),
    ];
    for (name, value) in lineage {
        match (card.metadata.get(name).filter(|current| !current.is_null()), value) {
            (Some(current), value) if current.as_str() == value.as_deref() => {}
            (Some(_), _) => {
                let message = format!("metadata.{name} is not the one of the tool.call card");
                return Err(Error::refused(Code::BadRequest, message));
            }
            (None, Some(value)) => {
                card.metadata.insert(name.to_owned(), value.into());
            }
            (None, None) => {}
        }
    }
    card.metadata.entry("role").or_insert_with(|| "tool".into());
    card.metadata.entry("function_name").or_insert_with(|| call.target.tool.as_str().into());
    Ok(())
}
