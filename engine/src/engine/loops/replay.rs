//! A recorded run once more: the model is asked again, its calls are answered with what was
//! recorded, and the world is not touched. What is told at the end is where it went another way.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::{Value, json};

use crate::caller::Caller;
use crate::engine::Engine;
use crate::fault::{Code, Error, Fault};
use crate::model::{Reply, Wanted};
use crate::run::{EntryKind, Noted};
use crate::turn::{self, Closing, Limits, Next, Talk, Terms, Watch};

/// Where the model went another way.
#[derive(Debug, Clone, PartialEq)]
pub struct Difference {
    pub step: u32,
    /// What it called and said when the run was recorded; none where there was no such step.
    pub recorded: Option<Reply>,
    pub now: Option<Reply>,
}

/// What a replay came to.
#[derive(Debug, Clone, PartialEq)]
pub struct Replayed {
    pub answer: String,
    pub recorded_answer: Option<String>,
    pub differences: Vec<Difference>,
    pub steps: u32,
    pub usage: crate::model::Usage,
    /// Calls that have no recorded result; the model was told so.
    pub unrecorded: u32,
}

impl Engine {
    /// Whether there is such a run that the caller may play again.
    pub async fn check_replay(&self, caller: &Caller, run_id: &str) -> Result<(), Error> {
        super::require_runs(caller)?;
        self.check_open()?;
        self.loop_run(caller, run_id).await.map(|_| ())
    }

    /// Plays a run again against what was recorded. Nothing of it is stored or executed.
    pub async fn replay_run(
        &self,
        caller: &Caller,
        run_id: &str,
        model: Option<&str>,
        watch: Watch<'_>,
    ) -> Result<Replayed, Error> {
        super::require_runs(caller)?;
        self.check_open()?;
        let _counted = Counted::new(&self.inner.loops.replays);
        let playing = self.played(caller, run_id, model, watch);
        tokio::select! {
            played = playing => played,
            () = self.inner.stopping.cancelled() => {
                let message = "the server is shutting down; nothing was done, a retry is safe";
                Err(Error::later(Code::Overloaded, message, 1_000))
            }
        }
    }

    async fn played(
        &self,
        caller: &Caller,
        run_id: &str,
        model: Option<&str>,
        watch: Watch<'_>,
    ) -> Result<Replayed, Error> {
        let run = self.loop_run(caller, run_id).await?;
        let mut tape = Tape::of(&self.journal(caller, run_id).await?, &run.terms.limits);
        let name = model.unwrap_or(&run.model);
        let chosen = self.models().find(name).ok_or_else(|| {
            let message = format!("there is no model \"{name}\"");
            Error::refused(Code::UpstreamUnavailable, message)
        })?;
        let terms = Terms { model: chosen.name, key: None, ..run.terms.clone() };
        let mut talk = Talk::new(std::mem::take(&mut tape.beginning));
        let mut differences = Vec::new();
        let mut turns = turn::Loop::lenient(self, caller, chosen.model.as_ref(), &terms, watch)?;
        // Where it waited for late results it may have said nothing.
        turns.may_be_silent = true;
        // The place on the tape; none once the model goes on where it had answered then.
        let (mut place, mut beyond) = (0, false);
        loop {
            if !beyond {
                tape.give(place, &mut talk);
            }
            turns.ask(&mut talk).await?;
            let steps = talk.progress.steps;
            let reply = talk.progress.reply.clone().unwrap_or_default();
            let recorded = tape.steps.get(place).filter(|_| !beyond);
            if !recorded.is_some_and(|recorded| same(&recorded.reply, &reply)) {
                let step = recorded.map_or(steps, |_| number(place));
                let recorded = recorded.map(|recorded| recorded.reply.clone());
                differences.push(Difference { step, recorded, now: Some(reply.clone()) });
            }
            let ended = recorded.is_none_or(|recorded| recorded.answers);
            if recorded.is_some_and(|recorded| recorded.anew) {
                talk.progress.count_anew();
            }
            let next = turns.act_with(&mut talk, |call| tape.result(call));
            place += usize::from(!beyond);
            let Next::Answered(answer) = next else {
                beyond |= ended;
                continue;
            };
            beyond |= ended;
            while let Some(missing) = tape.steps.get(place).filter(|_| !beyond) {
                let (step, recorded) = (number(place), Some(missing.reply.clone()));
                differences.push(Difference { step, recorded, now: None });
                beyond = missing.answers;
                tape.give(place, &mut talk);
                place += 1;
            }
            beyond = false;
            if place < tape.steps.len() {
                continue;
            }
            return Ok(Replayed {
                answer: answer.text,
                recorded_answer: run.answer.map(|answer| answer.text),
                differences,
                steps,
                usage: talk.progress.usage,
                unrecorded: tape.unrecorded,
            });
        }
    }
}

/// One more, for as long as it lives.
struct Counted<'a>(&'a AtomicUsize);

impl<'a> Counted<'a> {
    fn new(count: &'a AtomicUsize) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self(count)
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Steps are counted from one.
fn number(place: usize) -> u32 {
    u32::try_from(place + 1).unwrap_or(u32::MAX)
}

fn not_recorded(call: &Wanted) -> String {
    let message = format!(
        "not done: this is a replay, and there is no recorded result of {} with these arguments",
        call.name
    );
    crate::dialect::fault_content(&Fault::new(Code::NotFound, message).not_happened())
}

/// What was recorded.
#[derive(Default)]
struct Tape {
    beginning: Vec<Value>,
    steps: Vec<Step>,
    /// What the model was told, by what it called.
    results: HashMap<String, VecDeque<Told>>,
    /// Which ids stand for these now.
    ids: HashMap<String, String>,
    unrecorded: u32,
}

/// What the model was told of a call.
#[derive(Clone)]
struct Told {
    /// The id that it used then.
    id: String,
    content: String,
    /// The call was made, and counted; others were only answered.
    made: bool,
}

/// One answer of the model, and what it was told since the one before, beside its results.
struct Step {
    given: Vec<Given>,
    reply: Reply,
    /// It was the end of a turn: an answer, or a pause until late results came.
    answers: bool,
    /// The run was taken up again before it was acted on.
    anew: bool,
}

enum Given {
    /// By the user.
    Said(Value),
    /// That a limit is reached.
    Closing(Closing, Value),
    /// That a result has come.
    Told(Value),
    /// Nothing: the run was taken up again.
    Anew,
}

impl Tape {
    fn of(journal: &[Noted], limits: &Limits) -> Self {
        let mut tape = Self::default();
        let mut given = Vec::new();
        let mut said: VecDeque<Value> = VecDeque::new();
        let mut acted = true;
        for Noted { entry, .. } in journal {
            match entry.kind {
                EntryKind::Created => {
                    tape.beginning.extend(entry.messages.iter().cloned());
                    continue;
                }
                EntryKind::Said => {
                    said.extend(entry.data["messages"].as_array().cloned().unwrap_or_default())
                }
                EntryKind::Results => {
                    tape.take_results(&entry.messages, &entry.data["calls"]);
                    acted = true;
                }
                EntryKind::Resumed => match tape.steps.last_mut().filter(|_| !acted) {
                    Some(step) => step.anew = true,
                    None => given.push(Given::Anew),
                },
                _ => {}
            }
            for message in entry.messages.iter().filter(|message| is_given(message)) {
                given.push(match turn::closing_of(message, limits) {
                    _ if said.front() == Some(message) => {
                        said.pop_front();
                        Given::Said(message.clone())
                    }
                    Some(closing) => Given::Closing(closing, message.clone()),
                    None => Given::Told(message.clone()),
                });
            }
            if entry.kind == EntryKind::Replied
                && let Ok(reply) = serde_json::from_value::<Reply>(entry.data.clone())
            {
                let closes = given.iter().any(|given| matches!(given, Given::Closing(..)));
                let answers = closes || reply.calls.is_empty();
                acted = answers;
                let given = std::mem::take(&mut given);
                tape.steps.push(Step { given, reply, answers, anew: false });
            }
        }
        tape
    }

    fn take_results(&mut self, messages: &[Value], made: &Value) {
        let Some(step) = self.steps.last() else { return };
        let made: HashSet<&str> = made
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(|call| call["call_id"].as_str())
            .collect();
        for call in &step.reply.calls {
            let told = messages.iter().find(|message| message["tool_call_id"] == call.id.as_str());
            let content = told.and_then(|message| message["content"].as_str());
            let place = self.results.entry(turn::same_call(call)).or_default();
            place.extend(content.map(|content| Told {
                id: call.id.clone(),
                content: content.to_owned(),
                made: made.contains(call.id.as_str()),
            }));
        }
    }

    /// Tells the model what it was told before it gave this answer.
    fn give(&self, place: usize, talk: &mut Talk) {
        for given in self.steps.get(place).into_iter().flat_map(|step| &step.given) {
            match given {
                Given::Said(message) => talk.say(vec![message.clone()]),
                Given::Closing(closing, message) => {
                    talk.progress.closing = Some(*closing);
                    talk.messages.push(message.clone());
                }
                Given::Told(message) => talk.messages.push(turn::readdressed(message, &self.ids)),
                Given::Anew => talk.progress.count_anew(),
            }
        }
    }

    /// The result of this call in the order they were recorded, and whether it was made; the last
    /// one stands for all that come after.
    fn result(&mut self, call: &Wanted) -> (String, bool) {
        let told = self.results.get_mut(&turn::same_call(call));
        let next = told.and_then(|told| match told.len() {
            0 | 1 => told.front().cloned(),
            _ => told.pop_front(),
        });
        let Some(Told { id, content, made }) = next else {
            self.unrecorded += 1;
            return (not_recorded(call), true);
        };
        self.ids.insert(id, call.id.clone());
        (content, made)
    }
}

/// Whether the model was told this, rather than said it or called for it.
fn is_given(message: &Value) -> bool {
    message["role"] != "assistant" && message["role"] != "tool"
}

/// Whether the model does the same: the same calls, in whatever words it says so.
fn same(recorded: &Reply, now: &Reply) -> bool {
    let calls = |reply: &Reply| -> Vec<String> {
        let mut calls: Vec<String> = reply.calls.iter().map(turn::same_call).collect();
        calls.sort();
        calls
    };
    let said = recorded.calls.is_empty() && recorded.text.trim() != now.text.trim();
    calls(recorded) == calls(now) && !said
}

/// For who watches a replay as JSON.
impl From<&Difference> for Value {
    fn from(difference: &Difference) -> Self {
        let Difference { step, recorded, now } = difference;
        json!({ "step": step, "recorded": recorded, "now": now })
    }
}
