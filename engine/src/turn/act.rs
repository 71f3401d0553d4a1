//! Executes the calls of a reply and builds the messages that answer them.

use std::sync::Arc;

use serde_json::{Value, json};

use super::before::Before;
use super::offer::Offer;
use super::{Awaited, Happening, Progress, RESULT_TOKENS, Terms, Watch, rules, summary};
use crate::batch::{self, Batch, Settled, State};
use crate::call::Call;
use crate::caller::Caller;
use crate::dialect::Form;
use crate::engine::Engine;
use crate::fault::{Code, Error};
use crate::json::Json;
use crate::model::{Reply, Usage, Wanted};

/// The disposition of one call.
enum Fate {
    /// Execute it; holds its index in the batch.
    Made(usize),
    /// The caller executes it.
    Own,
    /// Do not execute it; answer the model with this content.
    Told { content: String, repeated: bool },
}

/// The calls of one reply with their dispositions.
pub(super) struct Plan<'a> {
    reply: &'a Reply,
    fates: Vec<Fate>,
    fingerprints: Vec<String>,
    entries: Vec<Json>,
    /// Index of each batch entry within the reply.
    places: Vec<usize>,
}

impl<'a> Plan<'a> {
    pub(super) fn of(
        reply: &'a Reply,
        offer: &Offer,
        terms: &Terms,
        (progress, before): (&Progress, &Before),
        max_entries: usize,
    ) -> Self {
        let (limits, mut entries, mut places) = (&terms.limits, Vec::new(), Vec::new());
        let left = rules::left_calls(limits, progress);
        let most = (limits.calls_per_step.min(left) as usize).min(max_entries);
        let fingerprints: Vec<String> = reply.calls.iter().map(rules::same_call).collect();
        let mut fates = Vec::with_capacity(reply.calls.len());
        for (place, (call, fingerprint)) in reply.calls.iter().zip(&fingerprints).enumerate() {
            let told = |content| Fate::Told { content, repeated: false };
            let has_room = entries.len() < most;
            let mut made = |tool: &str| {
                entries.push(entry(call, tool));
                places.push(place);
                Fate::Made(entries.len() - 1)
            };
            let fate = if offer.own.contains(&call.name) {
                Fate::Own
            } else if let Some(came_to) = before.made.get(&place) {
                // Its idempotency key leads to the call that was made; if its tool is gone, its
                // outcome is reported all the same.
                offer.tool(&call.name).map_or_else(|| told(came_to.clone()), &mut made)
            } else if progress.canceled {
                told(rules::canceled())
            } else if let Some(content) = rules::cut_off(reply, call) {
                told(content)
            } else if rules::is_repeated(progress, limits, fingerprint) {
                Fate::Told { content: rules::repeated(call, limits), repeated: true }
            } else if let Some(tool) = offer.tool(&call.name) {
                match has_room {
                    true => made(tool),
                    false => told(rules::too_many(limits, left)),
                }
            } else {
                // Searching for similar names is costly, so a reply may trigger only a bounded
                // number of searches.
                let compared = if place < limits.calls_per_step as usize { usize::MAX } else { 0 };
                told(rules::unknown(&call.name, offer.names().take(compared)))
            };
            fates.push(fate);
        }
        Self { reply, fates, fingerprints, entries, places }
    }

    /// Returns the calls that the caller executes itself.
    pub(super) fn own(&self) -> Vec<Wanted> {
        let calls = self.reply.calls.iter().zip(&self.fates);
        let own = calls.filter(|(_, fate)| matches!(fate, Fate::Own));
        own.map(|(call, _)| call.clone()).collect()
    }

    /// Executes the calls and returns the messages for the model.
    pub(super) async fn carried_out(
        self,
        engine: &Engine,
        caller: &Caller,
        terms: &Terms,
        progress: &mut Progress,
        watch: Watch<'_>,
    ) -> Result<Vec<Value>, Error> {
        let step = progress.steps;
        let (mut results, mut answers) = (Vec::new(), Vec::new());
        if !self.entries.is_empty() {
            let keys = self.places.iter().filter_map(|place| key(terms, progress, *place));
            let most_ms = engine.limits().max_wait_ms;
            let batch = batch(terms, progress, self.entries, most_ms);
            let batch = Batch { keys: keys.collect(), ..batch };
            let answer = engine.batch(caller, batch).await?;
            (results, answers) = (answer.results, answer.messages);
        }
        let (mut summaries, cost) = summary::of_messages(engine, &results, &answers).await;
        progress.usage += cost;
        let mut messages = Vec::with_capacity(self.fates.len());
        let (mut failed, mut repeated) = (0, 0);
        let told = self.reply.calls.iter().zip(self.fates).zip(self.fingerprints);
        for ((call, fate), fingerprint) in told {
            let message = match fate {
                Fate::Own => continue,
                Fate::Told { content, repeated: again } => {
                    failed += 1;
                    repeated += usize::from(again);
                    if !again {
                        rules::note(progress, fingerprint, rules::told_hash(&content));
                    }
                    rules::tool_message(&call.id, &content)
                }
                Fate::Made(place) => {
                    let (settled, message) = (&results[place], answers[place].value());
                    failed += usize::from(settled.ok() == Some(false));
                    take_in(progress, call, fingerprint, settled, &message);
                    let message = summaries.remove(&place).unwrap_or(message);
                    watch(Happening::Settled { step, settled, message: &message });
                    message
                }
            };
            messages.push(message);
        }
        let all = messages.len();
        progress.failures = if all > 0 && failed == all { progress.failures + 1 } else { 0 };
        progress.stubborn = if all > 0 && repeated == all { progress.stubborn + 1 } else { 0 };
        Ok(messages)
    }
}

/// Returns the idempotency key of a call, which is the same however often the step is repeated.
pub(super) fn key(terms: &Terms, progress: &Progress, place: usize) -> Option<String> {
    terms.key.as_ref().map(|key| format!("{key}/{}/{place}", progress.steps))
}

/// Builds the batch entry of a call, under the tool's own name.
fn entry(call: &Wanted, tool: &str) -> Json {
    // Some models send nothing if there are no arguments.
    let arguments = if call.arguments.trim().is_empty() { "{}" } else { &call.arguments };
    let function = json!({ "name": tool, "arguments": arguments });
    Json::of_value(&json!({ "id": call.id, "type": "function", "function": function }))
}

fn batch(terms: &Terms, progress: &Progress, entries: Vec<Json>, most_ms: u64) -> Batch {
    let acting = &terms.acting;
    let left_ms = rules::left_ms(&terms.limits, progress);
    let wait_ms = acting.wait_ms.unwrap_or(most_ms).min(most_ms);
    Batch {
        mode: acting.mode.into(),
        max_parallel: acting.max_parallel,
        budget_tokens: Some(acting.result_tokens.unwrap_or(RESULT_TOKENS)),
        wait_ms: Some(wait_ms.min(left_ms)),
        // If the time limit ends with the wait, no further call starts.
        later: wait_ms < left_ms,
        timeout_ms: acting.timeout_ms,
        retry: acting.max_retries,
        user_id: terms.user_id.clone(),
        traceparent: terms.traceparent.clone(),
        ..Batch::new(terms.run_id.clone(), entries)
    }
}

/// Records a call that was made.
fn take_in(
    progress: &mut Progress,
    call: &Wanted,
    fingerprint: String,
    settled: &Settled,
    message: &Value,
) {
    progress.calls += 1;
    progress.failed_calls += u32::from(settled.ok() == Some(false));
    let told = match &settled.state {
        // The ticket differs each time and carries no new information.
        State::Open(open) => {
            progress.awaited.push(Awaited {
                tool_call_id: open.id.clone(),
                call_id: call.id.clone(),
                name: call.name.clone(),
            });
            rules::told_hash("")
        }
        _ => rules::told_hash(message["content"].as_str().unwrap_or_default()),
    };
    rules::note(progress, fingerprint, told);
}

/// Converts a call that ended late to a batch entry result.
fn ended_late(awaited: &Awaited, call: Arc<Call>) -> Settled {
    Settled {
        form: Form::OpenAi,
        call_id: Some(awaited.call_id.clone()),
        name: Some(awaited.name.clone()),
        state: State::Ended { call, left_out_bytes: None },
        replayed: false,
        digested: false,
    }
}

impl Engine {
    /// Returns the calls among these that have ended, each with its content for the model, together
    /// in at most `budget` tokens; and the token usage of their summaries.
    pub(super) async fn late_contents(
        &self,
        caller: &Caller,
        awaited: &[Awaited],
        budget: usize,
    ) -> Result<(Vec<(Awaited, String)>, Usage), Error> {
        let (mut ended, mut results, mut purged) = (Vec::new(), Vec::new(), Vec::new());
        for call in awaited {
            match self.call(caller, &call.tool_call_id).await {
                Ok(found) if found.outcome.is_none() => {}
                Ok(found) => {
                    results.push(ended_late(call, found));
                    ended.push(call.clone());
                }
                Err(error) if error.code() == Code::NotFound => {
                    let told = "it was purged before it could be told";
                    purged.push((call.clone(), told.to_owned()));
                }
                Err(error) => return Err(error),
            }
        }
        let (results, mut contents) = batch::within(budget, results).await?;
        let (summaries, cost) = summary::of_digests(self, &results, &contents).await;
        for (place, summary) in summaries {
            contents[place] = summary;
        }
        Ok((ended.into_iter().zip(contents).chain(purged).collect(), cost))
    }
}
