//! The run of a conversation of OpenAI's API, stored when its response is complete: it is listed,
//! shown, followed and continued like any other run.
//!
//! A conversation exists only while its request does, so no task drives its run, and no process
//! adopts the run after a crash. While it is in progress, memory has its run (`OpenConversation`).
//! The record has the journal of a run: the messages of the request, each reply with the results of
//! its calls, and the end.

use serde_json::{Value, json};

use super::Conversations;
use crate::domain::caller::Caller;
use crate::domain::fault::{Code, Error, Fault};
use crate::domain::run::options::RunOptions;
use crate::domain::run::progress::{FinalAnswer, RunProgress};
use crate::domain::run::{JournalKind, JournalRecord, Run, RunError, RunStatus};
use crate::ports::core::from_store_error;
use crate::ports::engine_metrics;

/// Maximum size of the messages of a request in the journal. Of a longer request, only the newest
/// message is stored: the caller has the others.
const MAX_REQUEST_BYTES: usize = 256 << 10;

/// A conversation whose response is complete.
#[derive(Debug)]
pub struct EndedConversation<'a> {
    /// The model name from the request.
    pub model: &'a str,
    /// Model, tools, limits and settings of the agent loop.
    pub options: &'a RunOptions,
    /// Usage, pending calls and limit counters.
    pub progress: &'a RunProgress,
    /// All messages, in the chat format.
    pub messages: &'a [Value],
    /// Number of messages that came with the request.
    pub known_messages: usize,
    /// Time of the request, in Unix milliseconds.
    pub started_ms: u64,
    /// The answer, or the reason of the failure.
    pub outcome: Result<FinalAnswer, &'a Error>,
}

impl Conversations {
    /// Stores the run of a conversation. Later conversations under the same run id continue it. A
    /// run that was started with the run API keeps its own record.
    pub async fn record_run(
        &self,
        caller: &Caller,
        ended: EndedConversation<'_>,
    ) -> Result<(), Error> {
        let store = self.core.store.runs();
        let id = &ended.options.run_id;
        let found = store.run(&caller.project, id).await.map_err(from_store_error)?;
        let now_ms = self.core.wall_ms();
        let (status, answer, error) = match &ended.outcome {
            Err(error) if error.code() == Code::Canceled => (RunStatus::Canceled, None, None),
            Ok(answer) => {
                let error = failure_of(answer, ended.progress);
                let status = match &error {
                    Some(_) => RunStatus::Failed,
                    None => RunStatus::Succeeded,
                };
                (status, Some(answer.clone()), error)
            }
            Err(error) => (RunStatus::Failed, None, Some(to_run_error(error))),
        };
        let keyed = self.registry.credentials.has_active_key(caller);
        let mut progress = ended.progress.clone();
        // Calls that the last reply requested and that have not started must not start later.
        progress.canceled = status == RunStatus::Canceled && progress.pending_reply.is_some();
        let run = Run {
            status,
            progress,
            answer,
            error,
            created_ms: found.as_ref().map_or(ended.started_ms, |run| run.created_ms),
            ended_ms: Some(now_ms),
            version: found.as_ref().map_or(1, |run| run.version + 1),
            ..Run::for_conversation(caller, keyed, ended.model, ended.options, now_ms)
        };
        let stored = match &found {
            None => StoredMessages::default(),
            Some(before) if before.options.is_conversation => {
                self.stored_messages(before, &ended).await?
            }
            Some(_) => return Ok(()),
        };
        let entries = journal_of(&ended, &run, stored, now_ms);
        match found {
            None => store.create_run(run, None, entries, None).await.map(drop),
            // Another request of the same run may have been faster; its record stays.
            Some(_) => store.save_run(run, entries).await.map(drop),
        }
        .map_err(from_store_error)?;
        engine_metrics::count_run_end(status.as_str());
        Ok(())
    }

    /// Finds the messages of a conversation that the journal of its run has. Callers send the whole
    /// conversation with each request, without the steps that they do not see.
    async fn stored_messages(
        &self,
        before: &Run,
        ended: &EndedConversation<'_>,
    ) -> Result<StoredMessages, Error> {
        let journal = self.core.store.runs().journal(&before.project, &before.id).await;
        let journal = journal.map_err(from_store_error)?;
        let mut stored = journal.iter().flat_map(|entry| &entry.record.messages);
        let known = ended.known_messages.min(ended.messages.len());
        let in_journal = |message: &&Value| stored.any(|stored| stored == *message);
        // Only a conversation that continues from its checkpoint repeats the replies of a canceled
        // run.
        let (compared, most) = match before.status {
            RunStatus::Canceled => (ended.messages.len(), ended.messages.len()),
            _ => (known, known.saturating_sub(1)),
        };
        let count = ended.messages[..compared].iter().take_while(in_journal).count();
        Ok(StoredMessages { has_record: true, count: count.min(most) })
    }
}

/// The messages at the start of a conversation that the journal of its run has.
#[derive(Default)]
struct StoredMessages {
    /// True if an earlier conversation created the run.
    has_record: bool,
    /// Number of messages.
    count: usize,
}

/// Returns the error of an answered conversation: that of the result which ended it, or that all
/// its calls failed.
fn failure_of(answer: &FinalAnswer, progress: &RunProgress) -> Option<RunError> {
    if let Some(call) = &answer.terminated_by {
        return call.error.clone();
    }
    let message = progress.describe_total_failure()?;
    let fault = Fault::new(Code::RuntimeError, message).retryable(progress.is_harmless());
    Some(RunError::from(&fault))
}

fn to_run_error(error: &Error) -> RunError {
    match error {
        Error::Refused { fault, .. } => RunError::from(fault),
        Error::Internal(_) => RunError::from(&Fault::new(Code::Internal, error.to_string())),
    }
}

/// Returns the journal records of one request.
fn journal_of(
    ended: &EndedConversation<'_>,
    run: &Run,
    stored: StoredMessages,
    now_ms: u64,
) -> Vec<JournalRecord> {
    let known = ended.known_messages.min(ended.messages.len());
    let mut requested = &ended.messages[stored.count.min(known)..known];
    if requested.iter().map(|message| message.to_string().len()).sum::<usize>() > MAX_REQUEST_BYTES
    {
        requested = &requested[requested.len() - 1..];
    }
    let kind = match (stored.has_record, requested.is_empty()) {
        (false, _) => JournalKind::Created,
        (true, false) => JournalKind::UserMessage,
        (true, true) => JournalKind::Resumed,
    };
    let data = json!({ "model": run.model });
    let mut entries =
        vec![JournalRecord::new(kind, ended.started_ms, data).with_messages(requested.to_vec())];
    let (repeated, made) = ended.messages[known..].split_at(stored.count.saturating_sub(known));
    let is_reply = |message: &&Value| message["role"] == "assistant";
    let mut step = repeated.iter().filter(is_reply).count() as u64;
    for message in made {
        if message["role"] == "assistant" {
            step += 1;
            let data = json!({ "step": step, "text": message["content"].as_str().unwrap_or(""),
                "calls": requested_calls(message), "stopped": "stop" });
            let entry = JournalRecord::new(JournalKind::Replied, now_ms, data);
            entries.push(entry.with_messages(vec![message.clone()]));
            continue;
        }
        match entries.last_mut() {
            Some(last) if last.kind == JournalKind::ToolResults => {
                last.messages.push(message.clone());
            }
            _ => {
                let data = json!({ "step": step, "calls": [] });
                let entry = JournalRecord::new(JournalKind::ToolResults, now_ms, data);
                entries.push(entry.with_messages(vec![message.clone()]));
            }
        }
    }
    if let Err(Error::Refused { fault, .. }) = &ended.outcome
        && run.status == RunStatus::Canceled
    {
        let reason = || json!({ "reason": fault.message });
        let data = fault.detail.clone().unwrap_or_else(reason);
        entries.push(JournalRecord::new(JournalKind::Canceled, now_ms, data));
        return entries;
    }
    let text = run.answer.as_ref().map(|answer| answer.text.as_str());
    let mut data = json!({ "answer": text, "usage": run.progress.usage,
        "steps": run.progress.steps, "calls": run.progress.calls });
    let kind = match &run.error {
        Some(error) => {
            data["error"] = json!(error);
            JournalKind::Failed
        }
        None => JournalKind::Finished,
    };
    entries.push(JournalRecord::new(kind, now_ms, data));
    entries
}

/// Returns the calls of an assistant's message, as the reply of a model has them.
fn requested_calls(message: &Value) -> Vec<Value> {
    let calls = message["tool_calls"].as_array().into_iter().flatten();
    let call = |call: &Value| {
        let function = &call["function"];
        json!({ "id": call["id"], "name": function["name"], "arguments": function["arguments"] })
    };
    calls.map(call).collect()
}
