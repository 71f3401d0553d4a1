//! What a batch is answered with: each entry by itself, and a message for the model about each.

use std::sync::Arc;

use super::run::{Answered, Write};
use super::{shares, short};
use crate::call::{Call, Hold, Metrics};
use crate::dialect::{self, Answer, Entry, Form, Misfit, Pending};
use crate::digest::{self, Source};
use crate::fault::{Code, Error, Fault};
use crate::json::Json;
use crate::tokens;

/// How an entry stands.
#[derive(Debug, Clone)]
pub enum State {
    /// Its call has ended, well or not.
    Ended {
        call: Arc<Call>,
        /// The result is so large, and not in this answer: the ticket leads to it.
        left_out_bytes: Option<usize>,
    },
    /// Its call goes on: this is the ticket.
    Open(Arc<Call>),
    /// It became no call.
    Refused(Fault),
}

/// One entry, answered.
#[derive(Debug, Clone)]
pub struct Settled {
    pub form: Form,
    /// The asker's own id; for a model that gave none, its place.
    pub call_id: Option<String>,
    /// The tool's name, as asked.
    pub name: Option<String>,
    pub state: State,
    /// Its idempotency key was used before: this is the call it made then.
    pub replayed: bool,
    /// Its message has a digest of the result, to keep to the budget.
    pub digested: bool,
}

/// What a batch came to.
#[derive(Debug)]
pub struct BatchAnswer {
    /// In the order asked.
    pub results: Vec<Settled>,
    /// The same for the model, each in the form of its question.
    pub messages: Vec<Json>,
    /// Each result as it was asked to be written, if it was.
    pub texts: Vec<String>,
}

const IN_BACKGROUND: &str = "it runs in the background as this task: go on with the rest. Its \
                             result comes later, with this same call id; do not call it again for it";
const NOT_YET: &str = "it has not ended within the wait and goes on. Its result comes later, with \
                       this same call id; do not call it again for it";

const NOT_ITS_TURN: &str = "its turn has not come within the wait: it begins by itself when the \
                            call before it has ended. Its result comes later, with this same call \
                            id; do not call it again for it";

/// What to say of a call that goes on.
pub fn pending(call: &Call) -> Pending<'_> {
    let id = call.id.as_str();
    let background = call.asked.background;
    Pending {
        status: "pending",
        tool_call_id: id,
        task_id: background.then_some(id),
        message: match call.hold {
            _ if background => IN_BACKGROUND,
            Some(Hold::After { .. }) => NOT_ITS_TURN,
            _ => NOT_YET,
        },
    }
}

impl Settled {
    pub(super) fn of(
        index: usize,
        read: &Result<Entry, Misfit>,
        state: Option<(State, bool)>,
    ) -> Self {
        let (form, id, name, refused) = match read {
            Ok(entry) => (entry.form, entry.id.clone(), Some(entry.name.clone()), None),
            Err(misfit) => {
                let Misfit { form, id, name, fault } = misfit.clone();
                (form, id, name, Some(fault))
            }
        };
        // Only the envelope can be answered without an id.
        let stand_in = || (form != Form::Envelope).then(|| format!("call_{index}"));
        let lost = || Fault::new(Code::Internal, "internal error; see the server's log");
        let (state, replayed) = match (refused, state) {
            (Some(fault), _) => (State::Refused(*fault), false),
            (None, Some(known)) => known,
            (None, None) => (State::Refused(lost()), false),
        };
        Self { form, call_id: id.or_else(stand_in), name, state, replayed, digested: false }
    }

    /// Its call, if it became one.
    pub fn call(&self) -> Option<&Arc<Call>> {
        match &self.state {
            State::Ended { call, .. } | State::Open(call) => Some(call),
            State::Refused(_) => None,
        }
    }

    /// Whether it went well; none while nobody knows.
    pub fn ok(&self) -> Option<bool> {
        match &self.state {
            State::Ended { call, .. } => call.outcome.as_ref().map(|outcome| outcome.ok),
            State::Open(_) => None,
            State::Refused(_) => Some(false),
        }
    }

    /// The result, if it is here.
    pub fn data(&self) -> Option<&Json> {
        match &self.state {
            State::Ended { call, .. } => call.outcome.as_ref()?.data.as_ref(),
            _ => None,
        }
    }

    /// What went wrong.
    pub fn error(&self) -> Option<&Fault> {
        match &self.state {
            State::Ended { call, .. } => call.outcome.as_ref()?.error.as_ref(),
            State::Open(_) => None,
            State::Refused(fault) => Some(fault),
        }
    }

    /// What it took.
    pub fn metrics(&self) -> Option<Metrics> {
        match &self.state {
            State::Ended { call, .. } => call.outcome.as_ref().map(|outcome| outcome.metrics),
            _ => None,
        }
    }

    /// The whole of it, as a text for a model.
    pub(super) fn content(&self) -> String {
        match &self.state {
            State::Open(call) => dialect::pending_content(&pending(call)),
            State::Ended { call, left_out_bytes: Some(bytes) } => {
                let (tool, id) = (&call.tool_name, &call.id);
                format!(
                    "[{tool}: {bytes} bytes, too large beside the other results. Read any part: \
                     result.read {{\"tool_call_id\":\"{id}\"}}]"
                )
            }
            _ => match (self.error(), self.data()) {
                (Some(fault), _) => dialect::fault_content(fault),
                (None, Some(data)) => dialect::data_content(data),
                (None, None) => "null".to_owned(),
            },
        }
    }

    /// The most useful text that is not more than this.
    fn shortened(&self, content: &str, budget: usize) -> String {
        if let (Some(call), Some(data), None) = (self.call(), self.data(), self.error()) {
            let hint = Some(call.args.text());
            let source = Source { call_id: &call.id, tool: &call.tool_name, hint };
            if let Some(digest) = digest::digest(data, budget, &source) {
                return digest.text;
            }
        }
        match (&self.state, self.error()) {
            (State::Open(call), _) => short::pending(&pending(call), budget),
            (_, Some(fault)) if self.form == Form::Envelope => self.within(fault, budget),
            (_, Some(fault)) => short::fault(fault, budget),
            (State::Ended { call, left_out_bytes: Some(bytes) }, None) => {
                short::left_out(*bytes, call.id.as_str(), budget)
            }
            _ => short::cut(content, budget),
        }
    }

    /// A fault's message, cut so that the envelope around it keeps to the budget.
    fn within(&self, fault: &Fault, budget: usize) -> String {
        let mut room = budget;
        loop {
            let said = short::cut(&fault.message, room);
            let whole = self.written("", Some(&unexplained(fault, said.clone())));
            let over = tokens::count(whole.text()).saturating_sub(budget);
            // What is escaped, and where parts meet, costs more than each alone.
            if over == 0 || room == 0 {
                return said;
            }
            room = room.saturating_sub(over);
        }
    }

    pub(super) fn message(&self, content: &str) -> Json {
        let brief = self.error().filter(|_| self.digested);
        let brief = brief.map(|fault| unexplained(fault, content.to_owned()));
        self.written(content, brief.as_ref().or(self.error()))
    }

    fn written(&self, content: &str, error: Option<&Fault>) -> Json {
        let pending = match &self.state {
            State::Open(call) if self.digested => {
                Some(Pending { message: short::LATER, ..pending(call) })
            }
            State::Open(call) => Some(pending(call)),
            _ => None,
        };
        let answer = Answer {
            ok: self.ok(),
            content,
            data: self.data().filter(|_| !self.digested),
            error,
            metrics: self.metrics(),
            pending,
        };
        dialect::message(self.form, self.call_id.as_deref(), &answer)
    }
}

/// A fault with another message, and no more than that.
fn unexplained(fault: &Fault, message: String) -> Fault {
    Fault { message, detail: None, raw: None, ..fault.clone() }
}

impl BatchAnswer {
    pub(super) async fn of(
        answered: Vec<Answered>,
        budget: Option<usize>,
        write: Option<Write>,
    ) -> Result<Self, Error> {
        let (mut results, mut messages, mut texts) = (Vec::new(), Vec::new(), Vec::new());
        for Answered { settled, message, text } in answered {
            results.push(settled);
            messages.extend(message);
            texts.extend(text);
        }
        let Some(budget) = budget else { return Ok(Self { results, messages, texts }) };
        let (results, contents) = within(budget, results).await?;
        let told = results.iter().zip(&contents);
        let messages = told.map(|(settled, content)| settled.message(content)).collect();
        let texts = write.map_or_else(Vec::new, |write| results.iter().map(write).collect());
        Ok(Self { results, messages, texts })
    }

    /// Whether some calls go on.
    pub fn is_open(&self) -> bool {
        self.results.iter().any(|settled| matches!(settled.state, State::Open(_)))
    }

    /// Whether it made no call that had not been made before, with the same idempotency key.
    pub fn is_replayed(&self) -> bool {
        let mut calls = self.results.iter().filter(|settled| settled.call().is_some()).peekable();
        calls.peek().is_some() && calls.all(|settled| settled.replayed)
    }
}

/// What a model is told of each, together in at most so many tokens.
pub(crate) async fn within(
    budget: usize,
    mut results: Vec<Settled>,
) -> Result<(Vec<Settled>, Vec<String>), Error> {
    let mut contents: Vec<String> = results.iter().map(Settled::content).collect();
    let bytes: usize = contents.iter().map(String::len).sum();
    // Every token has at least one byte.
    if bytes <= budget {
        return Ok((results, contents));
    }
    // Counting tokens of large results is work, and others want this thread.
    let kept = tokio::task::spawn_blocking(move || {
        keep_to(budget, &mut results, &mut contents);
        (results, contents)
    });
    kept.await.map_err(|error| Error::Internal(Box::new(error)))
}

/// Shortens what is over its share of the budget.
fn keep_to(budget: usize, results: &mut [Settled], contents: &mut [String]) {
    let need = |content: &String| {
        if tokens::exceeds(content, budget) { budget + 1 } else { tokens::count(content) }
    };
    let needs: Vec<usize> = contents.iter().map(need).collect();
    let shares = shares::divided(budget, &needs);
    for (index, settled) in results.iter_mut().enumerate() {
        if needs[index] > shares[index] {
            contents[index] = settled.shortened(&contents[index], shares[index]);
            settled.digested = true;
        }
    }
}
