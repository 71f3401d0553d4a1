//! The answer to a batch: the result of each entry, and a message for the model about each.

use std::sync::Arc;

use crate::calls::batch::execution::{EntryRenderer, EntryResolution, RenderedEntry};
use crate::calls::batch::shorten;
use crate::calls::rejoin::PendingDelivery;
use crate::domain::call::{Call, CallMetrics, Hold};
use crate::domain::fault::{Code, Error, Fault};
use crate::domain::json::Json;
use crate::domain::utp::AfterExecution;
use crate::model_formats::{
    self, CallFormat, CallParseError, EntryAnswer, ParsedToolCall, PendingNotice,
};
use crate::registry::{RESULT_READ, name_for_model};
use crate::results::digest::{self, DigestSource};
use crate::results::mcp_content::{self, MediaPart};
use crate::results::tokens;

/// State of an entry when the batch is answered.
#[derive(Debug, Clone)]
pub enum BatchEntryState {
    /// The entry's call has ended, successfully or not.
    Ended {
        /// The call with its outcome.
        call: Arc<Call>,
        /// Size of a result that is too large for this answer. The ticket gives access to it.
        omitted_bytes: Option<usize>,
    },
    /// The entry's call is still open; this is its ticket.
    Open(Arc<Call>),
    /// The entry was refused and no call was created.
    Refused(Fault),
}

/// The answer to one entry.
#[derive(Debug, Clone)]
pub struct BatchEntryResult {
    /// Format of the entry, and of its answer.
    pub format: CallFormat,
    /// The caller's own call id; derived from the entry's index if a model sent none.
    pub call_id: Option<String>,
    /// Tool name as written in the request.
    pub name: Option<String>,
    /// State of the entry's call, or the reason why there is none.
    pub state: BatchEntryState,
    /// True if the idempotency key was used before; `state` then shows the call created at that
    /// time.
    pub replayed: bool,
    /// True if the entry joined an earlier call: one whose answer was not delivered, or an equal
    /// one that waits for an approval.
    pub joined: bool,
    /// True if the message holds a shortened text to stay within the token budget.
    pub is_digested: bool,
}

/// The answer to a batch.
#[derive(Debug)]
pub struct BatchAnswer {
    /// The results, in the order of the entries.
    pub results: Vec<BatchEntryResult>,
    /// The same results as messages for the model, each in the format of its entry. In the chat
    /// format, messages with the media of the results follow after them.
    pub messages: Vec<Json>,
    /// Each result as the [`EntryRenderer`] wrote it; empty if the batch has no renderer.
    pub texts: Vec<String>,
    /// The deliveries of the entries that a repeated batch may join. The requester marks each when
    /// it has the answer.
    pub deliveries: Vec<PendingDelivery>,
}

const BACKGROUND_NOTICE: &str = "it runs in the background as this task; continue with other work. \
                                 Its result follows later, with the same call id; do not call it \
                                 again for it";
const STILL_RUNNING_NOTICE: &str = "it has not ended within the wait and is still running. Its \
                                    result follows later, with the same call id; do not call it \
                                    again for it";

const PREDECESSOR_NOTICE: &str = "it did not start within the wait; it starts when the call before \
                                  it has ended. Its result follows later, with the same call id; \
                                  do not call it again for it";

const INPUT_NOTICE: &str = "its tool requested the input below, which a person must give: POST \
                            /v1/tool_calls/{tool_call_id}/answer, or on the command line: toolcrib \
                            calls answer {tool_call_id}. Its result follows later, with the same \
                            call id; do not call it again for it";

const APPROVAL_NOTICE: &str = "a rule asks for a person's approval, and it waits for that: POST \
                               /v1/approvals/decide, or on the command line: toolcrib approvals \
                               approve {approval_id}. Its result comes later, with this same call \
                               id; do not call it again for it";

/// Returns the notice that tells a caller or a model about a call that is still open.
pub fn pending_notice(call: &Call) -> PendingNotice<'_> {
    let id = call.id.as_str();
    let (background, waits) = (call.origin.background, call.waits_for_input());
    PendingNotice {
        status: "pending",
        tool_call_id: id,
        task_id: background.then_some(id),
        approval_id: call.pending_approval(),
        questions: call
            .elicitation
            .as_ref()
            .filter(|_| waits)
            .map(|elicitation| &elicitation.unanswered),
        message: match call.hold {
            _ if waits => INPUT_NOTICE,
            Some(Hold::Approval { .. }) => APPROVAL_NOTICE,
            _ if background => BACKGROUND_NOTICE,
            Some(Hold::Predecessor { .. }) => PREDECESSOR_NOTICE,
            _ => STILL_RUNNING_NOTICE,
        },
    }
}

impl BatchEntryResult {
    pub(super) fn new(
        index: usize,
        parsed: &Result<ParsedToolCall, CallParseError>,
        resolution: Option<EntryResolution>,
    ) -> Self {
        let (format, id, name, refused) = match parsed {
            Ok(entry) => (entry.format, entry.id.clone(), Some(entry.name.clone()), None),
            Err(error) => {
                let CallParseError { format, id, name, fault } = error.clone();
                (format, id, name, Some(fault))
            }
        };
        // Only the envelope format allows an answer without an id.
        let derive_id = || (format != CallFormat::Envelope).then(|| format!("call_{index}"));
        let internal_error = || Fault::new(Code::Internal, "internal error; see the server's log");
        let EntryResolution { state, replayed, joined } = match (refused, resolution) {
            (Some(fault), _) => EntryResolution::from(BatchEntryState::Refused(*fault)),
            (None, Some(resolution)) => resolution,
            (None, None) => EntryResolution::from(BatchEntryState::Refused(internal_error())),
        };
        Self {
            format,
            call_id: id.or_else(derive_id),
            name,
            state,
            replayed,
            joined,
            is_digested: false,
        }
    }

    /// Returns the entry's call, if one was created.
    pub fn call(&self) -> Option<&Arc<Call>> {
        match &self.state {
            BatchEntryState::Ended { call, .. } | BatchEntryState::Open(call) => Some(call),
            BatchEntryState::Refused(_) => None,
        }
    }

    /// Returns whether the entry succeeded, or `None` while its call is open.
    pub fn ok(&self) -> Option<bool> {
        match &self.state {
            BatchEntryState::Ended { call, .. } => call.outcome.as_ref().map(|outcome| outcome.ok),
            BatchEntryState::Open(_) => None,
            BatchEntryState::Refused(_) => Some(false),
        }
    }

    /// Returns the result, if this answer contains it.
    pub fn data(&self) -> Option<&Json> {
        match &self.state {
            BatchEntryState::Ended { call, .. } => call.outcome.as_ref()?.data.as_ref(),
            _ => None,
        }
    }

    /// Returns the fault of an entry that failed or was refused.
    pub fn error(&self) -> Option<&Fault> {
        match &self.state {
            BatchEntryState::Ended { call, .. } => call.outcome.as_ref()?.error.as_ref(),
            BatchEntryState::Open(_) => None,
            BatchEntryState::Refused(fault) => Some(fault),
        }
    }

    /// Returns the metrics of an ended call.
    pub fn metrics(&self) -> Option<CallMetrics> {
        match &self.state {
            BatchEntryState::Ended { call, .. } => {
                call.outcome.as_ref().map(|outcome| outcome.metrics)
            }
            _ => None,
        }
    }

    /// Returns the effect of the entry's result on the run that made the call. A refused entry has
    /// none, and neither has an open one yet.
    pub fn after_execution(&self) -> Option<AfterExecution> {
        match &self.state {
            BatchEntryState::Ended { call, .. } => AfterExecution::from_call(call),
            BatchEntryState::Open(_) | BatchEntryState::Refused(_) => None,
        }
    }

    /// Returns the full content of the message for a model.
    pub(super) fn content(&self) -> String {
        match &self.state {
            BatchEntryState::Open(call) => model_formats::pending_content(&pending_notice(call)),
            BatchEntryState::Ended { call, omitted_bytes: Some(bytes) } => {
                let (tool, reader) =
                    (self.shown_name(&call.tool_name), self.shown_name(RESULT_READ));
                let id = &call.id;
                format!(
                    "[{tool}: {bytes} bytes, too large next to the other results. Read any part: \
                     {reader} {{\"tool_call_id\":\"{id}\"}}]"
                )
            }
            _ => match (self.error(), self.data()) {
                (Some(fault), _) => model_formats::fault_content(fault),
                (None, Some(data)) => model_formats::data_content(data),
                (None, None) => "null".to_owned(),
            },
        }
    }

    /// Returns the name of a tool as the model sees it.
    fn shown_name(&self, name: &str) -> String {
        match self.format {
            CallFormat::Envelope => name.to_owned(),
            _ => name_for_model(name),
        }
    }

    /// Returns the most useful text within `budget` tokens.
    fn shorten(&self, content: &str, budget: usize) -> String {
        if let (Some(call), Some(data), None) = (self.call(), self.data(), self.error()) {
            let (hint, reader) = (Some(call.args.text()), &self.shown_name(RESULT_READ));
            let tool = &self.shown_name(&call.tool_name);
            let source = DigestSource { call_id: &call.id, tool, hint, reader };
            if let Some(digest) = digest::digest(data, budget, &source) {
                return digest.text;
            }
        }
        match (&self.state, self.error()) {
            (BatchEntryState::Open(call), _) => {
                shorten::shorten_pending(&pending_notice(call), budget)
            }
            (_, Some(fault)) if self.format == CallFormat::Envelope => {
                self.shorten_fault_message(fault, budget)
            }
            (_, Some(fault)) => shorten::shorten_fault(fault, budget),
            (BatchEntryState::Ended { call, omitted_bytes: Some(bytes) }, None) => {
                let reader = self.shown_name(RESULT_READ);
                shorten::describe_omitted(*bytes, &reader, call.id.as_str(), budget)
            }
            _ => shorten::truncate_to_tokens(content, budget),
        }
    }

    /// Truncates a fault's message so that the whole envelope message stays within the budget.
    fn shorten_fault_message(&self, fault: &Fault, budget: usize) -> String {
        let mut remaining = budget;
        loop {
            let message = shorten::truncate_to_tokens(&fault.message, remaining);
            let whole =
                self.build_message("", Some(&fault_with_message_only(fault, message.clone())));
            let excess = tokens::count(whole.text()).saturating_sub(budget);
            // Escaping and token boundaries between the parts cost more than the parts alone.
            if excess == 0 || remaining == 0 {
                return message;
            }
            remaining = remaining.saturating_sub(excess);
        }
    }

    /// Returns the images, recordings and files of the result. The envelope format has them in its
    /// data, so the list is empty there.
    fn media(&self) -> Vec<MediaPart> {
        let data = self.data().filter(|_| self.format != CallFormat::Envelope);
        let content = data.and_then(mcp_content::read_content);
        content.map(|content| content.media).unwrap_or_default()
    }

    /// Returns the message with the media of the result, if the format needs one of its own.
    pub(crate) fn media_message(&self) -> Option<Json> {
        if self.format != CallFormat::OpenAi {
            return None;
        }
        let media = self.media();
        let (tool, id) = (self.name.as_deref(), self.call_id.as_deref());
        model_formats::media_message(tool.unwrap_or_default(), id.unwrap_or_default(), &media)
    }

    /// Returns the message for a model, with this content.
    pub(super) fn message(&self, content: &str) -> Json {
        let shortened = self.error().filter(|_| self.is_digested);
        let shortened = shortened.map(|fault| fault_with_message_only(fault, content.to_owned()));
        self.build_message(content, shortened.as_ref().or(self.error()))
    }

    fn build_message(&self, content: &str, error: Option<&Fault>) -> Json {
        let pending = match &self.state {
            BatchEntryState::Open(call) if self.is_digested => Some(PendingNotice {
                message: shorten::SHORT_PENDING_NOTICE,
                questions: None,
                ..pending_notice(call)
            }),
            BatchEntryState::Open(call) => Some(pending_notice(call)),
            _ => None,
        };
        let answer = EntryAnswer {
            ok: self.ok(),
            content,
            data: self.data().filter(|_| !self.is_digested),
            error,
            metrics: self.metrics(),
            pending,
            media: &self.media(),
        };
        model_formats::answer_message(self.format, self.call_id.as_deref(), &answer)
    }
}

/// Returns the fault with another message and without its detail and raw data.
fn fault_with_message_only(fault: &Fault, message: String) -> Fault {
    Fault { message, detail: None, raw: None, ..fault.clone() }
}

impl BatchAnswer {
    /// Builds the answer from its entries, without deliveries. With a budget, the messages and
    /// texts are written here, when the share of each entry is known.
    pub(super) async fn assemble(
        entries: Vec<RenderedEntry>,
        budget: Option<usize>,
        renderer: Option<EntryRenderer>,
    ) -> Result<Self, Error> {
        let (mut results, mut messages, mut texts) = (Vec::new(), Vec::new(), Vec::new());
        for RenderedEntry { result, message, text } in entries {
            results.push(result);
            messages.extend(message);
            texts.extend(text);
        }
        let media: Vec<Json> = results.iter().filter_map(BatchEntryResult::media_message).collect();
        let Some(budget) = budget else {
            messages.extend(media);
            return Ok(Self { results, messages, texts, deliveries: Vec::new() });
        };
        let (results, contents) = render_within_budget(budget, results).await?;
        let pairs = results.iter().zip(&contents);
        let messages = pairs.map(|(entry, content)| entry.message(content)).chain(media).collect();
        let texts = renderer.map_or_else(Vec::new, |render| results.iter().map(render).collect());
        Ok(Self { results, messages, texts, deliveries: Vec::new() })
    }

    /// Returns whether some calls are still open.
    pub fn has_open_calls(&self) -> bool {
        self.results.iter().any(|entry| matches!(entry.state, BatchEntryState::Open(_)))
    }

    /// Returns whether every call of the batch replays an earlier call with the same idempotency
    /// key.
    pub fn is_replayed(&self) -> bool {
        let mut calls = self.results.iter().filter(|entry| entry.call().is_some()).peekable();
        calls.peek().is_some() && calls.all(|entry| entry.replayed)
    }
}

/// Renders the content of each message, together in at most `budget` tokens.
pub(crate) async fn render_within_budget(
    budget: usize,
    mut results: Vec<BatchEntryResult>,
) -> Result<(Vec<BatchEntryResult>, Vec<String>), Error> {
    let mut contents: Vec<String> = results.iter().map(BatchEntryResult::content).collect();
    let bytes: usize = contents.iter().map(String::len).sum();
    // Every token has at least one byte.
    if bytes <= budget {
        return Ok((results, contents));
    }
    // Counting the tokens of large results is CPU-bound and would block this worker thread.
    let shortening = tokio::task::spawn_blocking(move || {
        shorten_to_budget(budget, &mut results, &mut contents);
        (results, contents)
    });
    shortening.await.map_err(|error| Error::Internal(Box::new(error)))
}

/// Shortens each content that exceeds its share of the budget.
fn shorten_to_budget(budget: usize, results: &mut [BatchEntryResult], contents: &mut [String]) {
    let need = |content: &String| {
        if tokens::exceeds(content, budget) { budget + 1 } else { tokens::count(content) }
    };
    let needs: Vec<usize> = contents.iter().map(need).collect();
    let shares = tokens::divide_budget(budget, &needs);
    for (index, entry) in results.iter_mut().enumerate() {
        if needs[index] > shares[index] {
            contents[index] = entry.shorten(&contents[index], shares[index]);
            entry.is_digested = true;
        }
    }
}
