//! The first messages of an agent's run: its instructions, the task, and the context.

use serde_json::{Value, json};

use crate::domain::agent::{AgentDefinition, result_guidance};
use crate::domain::call::Call;
use crate::domain::caller::Caller;
use crate::domain::fault::{Code, Error};
use crate::utp::Utp;
use crate::utp::lineage::CallLineage;

/// Maximum size of the text that shows the cards of a box; cards beyond it are listed by id.
const MAX_CARD_BYTES: usize = 48 << 10;

/// Returns the box of an agent's run: the one that the call names, or that of the parent run.
pub(super) async fn resolve_box(
    utp: &Utp,
    call: &Call,
    above: &CallLineage,
) -> Result<Option<String>, Error> {
    let args = call.target.args.to_value();
    if let Some(box_id) = args.get("context_box_id").and_then(Value::as_str) {
        return Ok(Some(utp.boxes.card_box(&call.caller(), box_id).await?.0.box_id));
    }
    // A turn passes its `context_box_id` on unchecked, so there may be no box with this id.
    let Some(box_id) = above.context_box_id() else { return Ok(None) };
    match utp.boxes.card_box(&call.caller(), box_id).await {
        Ok((found, _)) => Ok(Some(found.box_id)),
        Err(error) if error.code() == Code::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Returns the message that shows a model the cards of a box.
pub(crate) async fn box_message(utp: &Utp, caller: &Caller, box_id: &str) -> Result<Value, Error> {
    let text = describe_box(utp, caller, box_id).await?;
    Ok(json!({ "role": "system", "content": text.trim_start() }))
}

/// Returns the first messages of an agent's run.
pub(super) async fn agent_messages(
    utp: &Utp,
    agent: &AgentDefinition,
    call: &Call,
    context_box_id: Option<&str>,
) -> Result<Vec<Value>, Error> {
    let mut system = agent.profile.instructions.clone();
    if !agent.profile.result_fields.is_empty() {
        system.push_str(&result_guidance(&agent.profile.result_fields));
    }
    let args = call.target.args.to_value();
    let mut task = args["instruction"].as_str().unwrap_or_default().to_owned();
    match args.get("context") {
        None | Some(Value::Null) => {}
        Some(Value::String(text)) => task.push_str(&format!("\n\nContext:\n{text}")),
        Some(other) => task.push_str(&format!("\n\nContext:\n{other}")),
    }
    if let Some(box_id) = context_box_id {
        task.push_str(&describe_box(utp, &call.caller(), box_id).await?);
    }
    let mut messages = Vec::with_capacity(2);
    if !system.trim().is_empty() {
        messages.push(json!({ "role": "system", "content": system }));
    }
    messages.push(json!({ "role": "user", "content": task }));
    Ok(messages)
}

/// Returns the cards of a box that the caller may read, as text.
async fn describe_box(utp: &Utp, caller: &Caller, box_id: &str) -> Result<String, Error> {
    let mut text = format!("\n\nCards of the box {box_id}:");
    let mut omitted = Vec::new();
    for card_id in utp.boxes.card_box(caller, box_id).await?.1 {
        let Some(card) = utp.cards.find_card(&caller.project, &card_id).await? else { continue };
        let content = Value::Object(card.content);
        let line = format!("\n[{card_id}, {} of {}] {content}", card.kind, card.author_id);
        match text.len() + line.len() <= MAX_CARD_BYTES {
            true => text.push_str(&line),
            false => omitted.push(card_id),
        }
    }
    if !omitted.is_empty() {
        text.push_str(&format!("\nNot shown, too long: {}", omitted.join(", ")));
    }
    Ok(text)
}
