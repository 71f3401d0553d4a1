//! The crib as a tool service sees it: cards, reports and dead letters by request and reply.

use std::time::{Duration, Instant};

use async_nats::Request;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use toolcrib::fault::{Code, Fault};
use toolcrib::tool::hex;
use toolcrib::utp::card::error_of;
use toolcrib::utp::trace;

use super::Answer;
use super::command::{Command, Trouble};
use crate::utp::Link;
use crate::utp::wire;

/// How long a question is asked where nobody says when its command is of no more use.
const PATIENCE: Duration = Duration::from_secs(600);
/// How long it is asked at least: a result that is late is worth writing down.
const AT_LEAST: Duration = Duration::from_secs(60);
/// How long a dead letter is offered.
const OF_A_LETTER: Duration = Duration::from_secs(20);

fn patience(command: &Command) -> Duration {
    let Some(deadline_ms) = command.deadline_ms() else { return PATIENCE };
    let now_ms = u64::try_from(wire::now_ms()).unwrap_or_default();
    Duration::from_millis(deadline_ms.saturating_sub(now_ms)).max(AT_LEAST)
}

/// What became of a report.
pub(super) enum Told {
    Taken,
    Refused(String),
    /// Nobody answered.
    Nobody,
}

pub(super) struct Crib {
    link: Link,
    name: String,
}

impl Crib {
    pub(super) fn new(link: Link, name: &str) -> Self {
        Self { link, name: name.to_owned() }
    }

    /// Asks until there is an answer, or it is of no more use: the crib may be being restarted.
    async fn ask(&self, subject: String, body: &Value, command: Option<&Command>) -> Option<Value> {
        let until = Instant::now() + command.map_or(OF_A_LETTER, patience);
        let traceparent = command.map_or(String::new(), |c| trace::child(&c.traceparent, &subject));
        let mut headers = wire::headers(self.link.version(), "dict", &traceparent);
        headers.insert("CG-Sender", self.name.as_str());
        if let Some(depth) = command.and_then(|command| command.depth.as_deref()) {
            headers.insert("CG-Recursion-Depth", depth);
        }
        if let Some(state) = command.and_then(|command| command.tracestate.as_deref()) {
            headers.insert("tracestate", state);
        }
        let bytes = body.to_string().into_bytes();
        let mut wait = Duration::from_millis(50);
        while Instant::now() < until {
            let request = Request::new().payload(bytes.clone().into()).headers(headers.clone());
            match self.link.client().send_request(subject.clone(), request).await {
                Ok(reply) => return serde_json::from_slice(&reply.payload).ok(),
                Err(error) if error.kind() == async_nats::RequestErrorKind::MaxPayloadExceeded => {
                    return Some(json!({ "ok": false, "error": {
                        "code": "too_large",
                        "message": "the message is over NATS's limit",
                    }}));
                }
                Err(error) => tracing::debug!(%error, subject, "no answer; asked again"),
            }
            tokio::time::sleep(wait).await;
            wait = (wait * 2).min(Duration::from_secs(2));
        }
        None
    }

    fn subject(command: &Command, what: &str) -> String {
        let Command { version, project, channel, .. } = command;
        format!("cg.{version}.{project}.{channel}.rpc.sys.{what}")
    }

    /// The tool, the arguments and the metadata of a command's card.
    pub(super) async fn arguments(
        &self,
        command: &Command,
    ) -> Result<(String, Value, Value), Trouble> {
        let card_id = command.card_id.as_deref().unwrap_or_default();
        let body = json!({ "card_ids": [card_id] });
        let subject = Self::subject(command, "cards.get");
        let answer = self.ask(subject, &body, Some(command)).await.ok_or(Trouble::Away)?;
        if answer["ok"] != json!(true) {
            let message = answer["error"]["message"].as_str().unwrap_or("the card was refused");
            let code = answer["error"]["code"].as_str().and_then(Code::parse);
            return Err(Trouble::wrong(code.unwrap_or(Code::NotFound), message));
        }
        let card = &answer["cards"][0];
        let wrong = |message: String| Err(Trouble::wrong(Code::BadRequest, message));
        if card["type"] != "tool.call" {
            return wrong(format!("card \"{card_id}\" is a {}, not a tool.call", card["type"]));
        }
        if card["content"]["__type__"] != "ToolCallContent" {
            return wrong(format!("the content of card \"{card_id}\" is no ToolCallContent"));
        }
        let named = card["tool_call_id"].as_str().unwrap_or_default();
        if !named.is_empty() && named != command.tool_call_id {
            return wrong(format!("card \"{card_id}\" is of the call \"{named}\""));
        }
        let tool = card["content"]["tool_name"].as_str().unwrap_or_default().to_owned();
        Ok((tool, card["content"]["arguments"].clone(), card["metadata"].clone()))
    }

    /// The id of the call's own result: a plain success under it need not be stored.
    fn own_card_id(command: &Command) -> Option<String> {
        let asked = command.card_id.as_deref()?;
        let (id, _) = toolcrib::utp::card::made_from(asked)?;
        Some(toolcrib::utp::card::id_of(&id, toolcrib::utp::card::TOOL_RESULT))
    }

    /// The same call has the same card, however often it is executed.
    fn card_id(command: &Command) -> String {
        let (project, turn, call) = command.anchor();
        let named = json!([project, turn, call]).to_string();
        format!("res{}", hex(&Sha256::digest(named.as_bytes())[..16]))
    }

    /// Reports a result.
    pub(super) async fn report(&self, command: &Command, answer: Answer, meta: &Value) -> Told {
        let card = self.card(command, &answer, meta);
        let told = self.send(command, &answer, card).await;
        let Told::Refused(why) = &told else { return told };
        if !why.contains("limit") {
            return told;
        }
        let message = format!("the result of {} is too large: {why}", command.tool_name());
        let smaller = Answer::failed(Fault::new(Code::PayloadTooLarge, message));
        let card = self.card(command, &smaller, meta);
        self.send(command, &smaller, card).await
    }

    async fn send(&self, command: &Command, answer: &Answer, card: Value) -> Told {
        let body = json!({
            "tool_call_id": command.tool_call_id,
            "agent_turn_id": command.turn_id,
            "turn_epoch": command.epoch,
            "agent_id": command.agent_id,
            "after_execution": command.after_execution().as_str(),
            "status": answer.status.as_str(),
            "tool_result_card_id": card["card_id"],
            "step_id": command.step_id,
            "card": card,
        });
        self.told(command, &body).await
    }

    async fn told(&self, command: &Command, body: &Value) -> Told {
        let subject = Self::subject(command, "l0.report");
        match self.ask(subject, body, Some(command)).await {
            None => Told::Nobody,
            Some(answer) if answer["ok"] == json!(true) => Told::Taken,
            Some(answer) if answer["error"]["retryable"] == json!(true) => Told::Nobody,
            Some(answer) => {
                Told::Refused(answer["error"]["message"].as_str().unwrap_or_default().to_owned())
            }
        }
    }

    /// Reports the result that a command had when it was given before; none when it had none.
    pub(super) async fn report_known(&self, command: &Command) -> Option<Told> {
        let mut known = None;
        for card_id in Self::own_card_id(command).into_iter().chain([Self::card_id(command)]) {
            let subject = Self::subject(command, "cards.get");
            let body = json!({ "card_ids": [card_id] });
            let answer = self.ask(subject, &body, Some(command)).await?;
            let status = answer["cards"][0]["content"]["status"].as_str().map(str::to_owned);
            known = known.or(status.map(|status| (card_id, status)));
        }
        let (card_id, status) = known?;
        let body = json!({
            "tool_call_id": command.tool_call_id,
            "agent_turn_id": command.turn_id,
            "turn_epoch": command.epoch,
            "agent_id": command.agent_id,
            "after_execution": command.after_execution().as_str(),
            "status": status,
            "tool_result_card_id": card_id,
            "step_id": command.step_id,
        });
        Some(self.told(command, &body).await)
    }

    fn card(&self, command: &Command, answer: &Answer, meta: &Value) -> Value {
        let error = answer.error.as_ref().map(|fault| {
            let mut error = error_of(fault, "tool");
            let named = fault.detail.as_ref().and_then(|detail| detail.get("utp_code"));
            if let Some(code) = named {
                error["code"] = code.clone();
            }
            error
        });
        let mut metadata = json!({
            "agent_turn_id": command.turn_id,
            "tool_call_id": command.tool_call_id,
            "role": "tool",
            "function_name": command.tool_name(),
        });
        for name in ["step_id", "trace_id", "parent_step_id"] {
            if !meta[name].is_null() {
                metadata[name] = meta[name].clone();
            }
        }
        let plain = answer.status == toolcrib::utp::ToolStatus::Success && !meta.is_null();
        let own = Self::own_card_id(command).filter(|_| plain);
        json!({
            "card_id": own.unwrap_or_else(|| Self::card_id(command)),
            "project_id": command.project,
            "type": "tool.result",
            "author_id": self.name,
            "tool_call_id": command.tool_call_id,
            "content": {
                "__type__": "ToolResultContent",
                "status": answer.status.as_str(),
                "after_execution": command.after_execution().as_str(),
                "result": answer.result,
                "error": error,
            },
            "metadata": metadata,
        })
    }

    /// Whether a dead letter was taken.
    pub(super) async fn bury(&self, subject: &str, letter: Value) -> bool {
        let parts = toolcrib::utp::subject::parse(subject);
        let Some(parts) = parts else { return true };
        let to = format!("cg.{}.{}.{}", parts.version, parts.project, parts.channel);
        let answer = self.ask(format!("{to}.rpc.sys.l0.dead_letter"), &letter, None).await;
        answer.is_some_and(|answer| answer["ok"] == json!(true))
    }
}
