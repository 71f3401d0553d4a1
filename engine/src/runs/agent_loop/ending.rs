//! The end of a conversation by a result: the answer that a terminating result makes.

use std::sync::Arc;

use serde_json::Value;

use crate::domain::call::Call;
use crate::domain::caller::Caller;
use crate::domain::fault::Error;
use crate::domain::json::Json;
use crate::domain::run::RunError;
use crate::domain::run::progress::{FinalAnswer, TerminatingCall};
use crate::domain::utp::card::{self, TOOL_RESULT};
use crate::domain::utp::{AfterExecution, CONTROL_FIELD};
use crate::model_formats::data_content;
use crate::registry::catalog::RUN_FINISH;
use crate::registry::name_for_model;
use crate::runs::Runs;

/// Maximum size of an answer that becomes a message of the conversation. A longer one is in its
/// card, and the model has its digest.
const MAX_MESSAGE_BYTES: usize = 32_768;

/// Returns true if the result of this call ends the run that made it.
pub(super) fn is_terminating(call: &Call) -> bool {
    AfterExecution::from_call(call) == Some(AfterExecution::Terminate)
}

/// Selects the call whose result is the answer, if several end the run: the first that failed
/// decides, as it does in a turn.
pub(super) fn select_terminating(calls: &[Arc<Call>]) -> Option<&Arc<Call>> {
    let has_failed = |call: &&Arc<Call>| call.outcome.as_ref().is_some_and(|outcome| !outcome.ok);
    calls.iter().find(has_failed).or_else(|| calls.first())
}

impl Runs {
    /// Builds the answer of a run that the result of this call ends.
    pub(super) async fn terminating_answer(
        &self,
        caller: &Caller,
        call: &Arc<Call>,
    ) -> Result<FinalAnswer, Error> {
        let mut call = call.clone();
        let is_omitted = |call: &Call| {
            call.outcome.as_ref().is_some_and(|outcome| outcome.ok && outcome.data.is_none())
        };
        if is_omitted(&call) {
            // A batch omits the data of results that are too large to be returned with the others.
            call = self.calls.call(caller, &call.id).await?;
        }
        let card = self.utp.cards.result_card(&call).await?;
        let derived_id = || card::derived_id(&call.id, TOOL_RESULT);
        let card_id = card.map_or_else(derived_id, |card| card.card_id);
        let (name, tool_call_id) = (call.target.tool.clone(), call.id.clone());
        let outcome = call.outcome.as_ref();
        let error = outcome.and_then(|outcome| outcome.error.as_ref());
        let data = outcome.and_then(|outcome| outcome.data.as_ref());
        let text = match (error, data) {
            (Some(fault), _) => format!("{name} failed: {}", fault.message),
            (None, Some(data)) => answer_text(&name, data, call.target.traits.mcp_results),
            (None, None) => String::new(),
        };
        let finish = data.filter(|_| name == RUN_FINISH).map(Json::to_value);
        let result_fields = finish.and_then(|value| value.get("result_fields").cloned());
        let error = error.map(RunError::from);
        let terminated_by =
            Some(TerminatingCall { tool_call_id, name, card_id, result_fields, error });
        Ok(FinalAnswer { text, terminated_by, ..FinalAnswer::default() })
    }
}

/// Returns a result as the text of an answer, without its control field.
pub(super) fn answer_text(tool: &str, data: &Json, mcp_result: bool) -> String {
    let is_plain = tool != RUN_FINISH && !mcp_result && !data.text().contains(CONTROL_FIELD);
    if is_plain {
        return data_content(data);
    }
    let mut value = data.to_value();
    if tool == RUN_FINISH
        && let Some(answer) = value.get("answer").and_then(Value::as_str)
    {
        return answer.to_owned();
    }
    if let Some(text) = mcp_text(&value).filter(|_| mcp_result) {
        return text;
    }
    if let Some(fields) = value.as_object_mut() {
        fields.remove(CONTROL_FIELD);
    }
    data_content(&Json::from_value(&value))
}

/// Returns the text blocks of an MCP result.
fn mcp_text(result: &Value) -> Option<String> {
    let blocks = result.get("content")?.as_array()?;
    let texts: Vec<&str> = blocks.iter().filter_map(|block| block.get("text")?.as_str()).collect();
    (!texts.is_empty()).then(|| texts.join("\n"))
}

/// Returns the text of the message that ends the conversation.
pub(super) fn message_text(answer: &FinalAnswer) -> String {
    match &answer.terminated_by {
        Some(call) if answer.text.len() > MAX_MESSAGE_BYTES => {
            let (name, bytes) = (name_for_model(&call.name), answer.text.len());
            format!("[the result of {name}, of {bytes} bytes: card {}]", call.card_id)
        }
        _ => answer.text.clone(),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_the_result_without_its_control_field() {
        let text =
            |tool: &str, data: &str, mcp: bool| answer_text(tool, &Json::parse(data).unwrap(), mcp);
        assert_eq!(text("t", r#""done""#, false), "done");
        assert_eq!(text("t", r#"{"a":1.50}"#, false), r#"{"a":1.50}"#, "digit by digit");
        let controlled = r#"{"a":1,"__cg_control":{"after_execution":"terminate"}}"#;
        assert_eq!(text("t", controlled, false), r#"{"a":1}"#);
        assert_eq!(text(RUN_FINISH, r#"{"answer":"42","result_fields":{"n":42}}"#, false), "42");
        let blocks = r#"{"content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]}"#;
        assert_eq!(text("up.t", blocks, true), "a\nb");
    }
}
