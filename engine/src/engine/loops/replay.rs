//! Replays a recorded run: the model gets its requests again, its tool calls are answered with
//! recorded results, and nothing is executed. The report lists the steps at which the model acted
//! differently.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::{Value, json};

use crate::caller::Caller;
use crate::engine::Engine;
use crate::fault::{Code, Error, Fault};
use crate::model::{Reply, Wanted};
use crate::run::{EntryKind, Noted};
use crate::turn::{self, Closing, Limits, Next, Talk, Terms, Watch};

/// A step at which the model acted differently.
#[derive(Debug, Clone, PartialEq)]
pub struct Difference {
    pub step: u32,
    /// The recorded reply; `None` if the recording has no such step.
    pub recorded: Option<Reply>,
    pub now: Option<Reply>,
}

/// Result of a replay.
#[derive(Debug, Clone, PartialEq)]
pub struct Replayed {
    pub answer: String,
    pub recorded_answer: Option<String>,
    pub differences: Vec<Difference>,
    pub steps: u32,
    pub usage: crate::model::Usage,
    /// Number of calls without a recorded result. The model received an error for each.
    pub unrecorded: u32,
}

impl Engine {
    /// Checks that the run exists and that the caller may replay it.
    pub async fn check_replay(&self, caller: &Caller, run_id: &str) -> Result<(), Error> {
        super::require_runs(caller)?;
        self.check_open()?;
        self.loop_run(caller, run_id).await.map(|_| ())
    }

    /// Replays a run against its recording. Nothing is stored or executed.
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
        // Where the recorded run waited for late results, its reply may have been empty.
        turns.may_be_silent = true;
        // `place` is the position in the recording. `beyond` is true while the model continues past
        // a step that was final in the recording.
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

/// Increments a counter for as long as the guard lives.
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

/// Returns the number of the step at this index. Steps are numbered from 1.
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

/// The journal of a run, arranged for a replay.
#[derive(Default)]
struct Tape {
    beginning: Vec<Value>,
    steps: Vec<Step>,
    /// Recorded results, by call (name and arguments).
    results: HashMap<String, VecDeque<Told>>,
    /// Call ids of this replay by their recorded ids.
    ids: HashMap<String, String>,
    unrecorded: u32,
}

/// A recorded result of a call, as the model received it.
#[derive(Clone)]
struct Told {
    /// The call's id in the recording.
    id: String,
    content: String,
    /// True if the call was executed and counted; false if it was only answered.
    made: bool,
}

/// A recorded reply of the model, with the inputs it received since the previous reply, other than
/// tool results.
struct Step {
    given: Vec<Given>,
    reply: Reply,
    /// True if the reply ended the exchange: a final answer, or a pause until late results arrived.
    answers: bool,
    /// True if the run was resumed before the reply's calls were executed.
    anew: bool,
}

enum Given {
    /// A message of the user.
    Said(Value),
    /// The notice that a limit is reached.
    Closing(Closing, Value),
    /// The notice of a late result.
    Told(Value),
    /// No message: the run was resumed.
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

    /// Adds the inputs that preceded this recorded reply to the conversation.
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

    /// Returns the next recorded result of this call, in order, and whether the call was executed.
    /// The last result repeats for all further calls.
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

/// Returns true if the message is an input to the model, neither its reply nor a tool result.
fn is_given(message: &Value) -> bool {
    message["role"] != "assistant" && message["role"] != "tool"
}

/// Returns true if the model acts the same: equal calls, whatever the text beside them. Replies
/// without calls must have equal text.
fn same(recorded: &Reply, now: &Reply) -> bool {
    let calls = |reply: &Reply| -> Vec<String> {
        let mut calls: Vec<String> = reply.calls.iter().map(turn::same_call).collect();
        calls.sort();
        calls
    };
    let said = recorded.calls.is_empty() && recorded.text.trim() != now.text.trim();
    calls(recorded) == calls(now) && !said
}

/// JSON form, for clients that stream a replay.
impl From<&Difference> for Value {
    fn from(difference: &Difference) -> Self {
        let Difference { step, recorded, now } = difference;
        json!({ "step": step, "recorded": recorded, "now": now })
    }
}
