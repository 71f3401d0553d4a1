//! Results that arrive after their calls were answered.

use std::sync::Arc;

use super::summary;
use crate::calls::batch::{self, BatchEntryResult, BatchEntryState};
use crate::domain::call::Call;
use crate::domain::caller::Caller;
use crate::domain::fault::{Code, Error};
use crate::domain::model_reply::TokenUsage;
use crate::domain::run::progress::PendingCall;
use crate::model_formats::CallFormat;
use crate::runs::Runs;

/// A result that arrived after its call was answered.
pub(super) struct LateResult {
    pub(super) pending: PendingCall,
    /// The result as the model receives it.
    pub(super) content: String,
    /// The ended call; `None` if it was purged.
    pub(super) call: Option<Arc<Call>>,
}

/// Converts a call that ended late to a batch entry result.
pub(super) fn late_entry_result(pending: &PendingCall, call: Arc<Call>) -> BatchEntryResult {
    BatchEntryResult {
        format: CallFormat::OpenAi,
        call_id: Some(pending.call_id.clone()),
        name: Some(pending.name.clone()),
        state: BatchEntryState::Ended { call, omitted_bytes: None },
        replayed: false,
        joined: false,
        is_digested: false,
    }
}

impl Runs {
    /// Returns the calls among these that have ended, each with its content for the model, together
    /// in at most `budget` tokens; and the token usage of their summaries.
    pub(super) async fn render_late_results(
        self: &Arc<Self>,
        caller: &Caller,
        pending: &[PendingCall],
        budget: usize,
    ) -> Result<(Vec<LateResult>, TokenUsage), Error> {
        let (mut ended, mut results, mut purged) = (Vec::new(), Vec::new(), Vec::new());
        for call in pending {
            match self.calls.call(caller, &call.tool_call_id).await {
                Ok(found) if found.outcome.is_none() => {}
                Ok(found) => {
                    results.push(late_entry_result(call, found.clone()));
                    ended.push((call.clone(), found));
                }
                Err(error) if error.code() == Code::NotFound => {
                    let content = "it was purged before its result was delivered".to_owned();
                    purged.push(LateResult { pending: call.clone(), content, call: None });
                }
                Err(error) => return Err(error),
            }
        }
        let (results, mut contents) = batch::render_within_budget(budget, results).await?;
        let (summaries, cost) = summary::summarize_digests(self, &results, &contents).await;
        for (index, summary) in summaries {
            contents[index] = summary;
        }
        let ended = ended.into_iter().zip(contents).map(|((pending, call), content)| LateResult {
            pending,
            content,
            call: Some(call),
        });
        Ok((ended.chain(purged).collect(), cost))
    }
}
