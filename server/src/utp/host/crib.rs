//! The server as a tool service sees it: cards, reports and dead letters by request and reply.

use std::time::{Duration, Instant};

use async_nats::jetstream::Message;
use async_nats::{HeaderMap, Request};
use axum::body::Bytes;
use serde::Serialize;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use toolcrib::fault::{Code, Fault};
use toolcrib::tool::hex;
use toolcrib::utp::card::error_of;
use toolcrib::utp::trace;

use super::Answer;
use super::bundle::Bundles;
use super::command::{Command, Trouble};
use super::together::{Asker, Cards, Got, Reported, Reports, Said, Wanted};
use crate::utp::wire;

/// Time for which a request is repeated if its command has no deadline.
const PATIENCE: Duration = Duration::from_secs(600);
/// Minimum time for which a request is repeated: a late result is still worth recording.
const AT_LEAST: Duration = Duration::from_secs(60);
/// Time for which storing a dead letter is retried.
const OF_A_LETTER: Duration = Duration::from_secs(20);

fn patience(command: &Command) -> Duration {
    let Some(deadline_ms) = command.deadline_ms() else { return PATIENCE };
    let now_ms = u64::try_from(wire::now_ms()).unwrap_or_default();
    Duration::from_millis(deadline_ms.saturating_sub(now_ms)).max(AT_LEAST)
}

/// The outcome of a report.
pub(super) enum Told {
    Taken,
    Refused(String),
    /// The server did not reply.
    Nobody,
}

/// The JSON body of a report.
#[derive(Serialize)]
struct ReportBody<'a> {
    tool_call_id: &'a str,
    agent_turn_id: &'a str,
    turn_epoch: i64,
    agent_id: &'a str,
    after_execution: &'a str,
    status: &'a str,
    tool_result_card_id: &'a str,
    step_id: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    card: Option<Value>,
}

/// The arguments and metadata in a card.
pub(super) struct Asked {
    pub(super) tool_name: String,
    pub(super) args: Value,
    pub(super) meta: Value,
    /// True if the call has already ended.
    pub(super) ended: bool,
    /// True if the server knows that this host has taken the call.
    pub(super) looked: bool,
}

pub(super) struct Crib {
    asker: Asker,
    cards: Bundles<Cards>,
    reports: Bundles<Reports>,
}

impl Crib {
    pub(super) fn new(asker: Asker) -> Self {
        let cards = Bundles::new(Cards(asker.clone()));
        let reports = Bundles::new(Reports::new(asker.clone()));
        Self { asker, cards, reports }
    }

    /// Repeats a request until there is a reply or the timeout passes: the server may be
    /// restarting.
    async fn ask(
        &self,
        subject: &str,
        headers: HeaderMap,
        body: Vec<u8>,
        patience: Duration,
    ) -> Option<Bytes> {
        let (until, bytes) = (Instant::now() + patience, Bytes::from(body));
        let mut wait = Duration::from_millis(50);
        while Instant::now() < until {
            let request = Request::new().payload(bytes.clone()).headers(headers.clone());
            match self.asker.link.client().send_request(subject.to_owned(), request).await {
                Ok(reply) => return Some(reply.payload),
                Err(error) if error.kind() == async_nats::RequestErrorKind::MaxPayloadExceeded => {
                    let refused = json!({ "ok": false, "error": {
                        "code": "too_large",
                        "message": "the message is over NATS's limit",
                    }});
                    return Some(refused.to_string().into());
                }
                Err(error) => tracing::debug!(%error, subject, "no reply; retrying"),
            }
            tokio::time::sleep(wait).await;
            wait = (wait * 2).min(Duration::from_secs(2));
        }
        None
    }

    /// Returns the subject prefix of requests about a command.
    pub(super) fn place(command: &Command) -> String {
        let Command { version, project, channel, .. } = command;
        format!("cg.{version}.{project}.{channel}")
    }

    /// Requests a single card.
    async fn card_alone(&self, command: &Command, card_id: &str) -> Option<Value> {
        let subject = format!("{}.rpc.sys.cards.get", Self::place(command));
        let headers = self.asker.headers(&trace::child(&command.traceparent, &subject));
        let body = json!({ "card_ids": [card_id] }).to_string().into_bytes();
        let answer = self.ask(&subject, headers, body, patience(command)).await?;
        serde_json::from_slice(&answer).ok()
    }

    fn wanted(command: &Command) -> Wanted {
        let card_id = command.card_id.clone().unwrap_or_default();
        Wanted { traceparent: trace::child(&command.traceparent, &card_id), card_id }
    }

    /// Fetches a command's card and returns its arguments.
    pub(super) async fn arguments(&self, command: &Command) -> Result<Asked, Trouble> {
        let wanted = Self::wanted(command);
        let Got { card, ended } = match self.cards.ask(Self::place(command), wanted).await {
            Some(got) => got,
            None => self.got_alone(command, command.card_id.as_deref().unwrap_or_default()).await?,
        };
        Ok(Asked { looked: true, ..Self::asked(command, card, ended)? })
    }

    /// Requests a card that is already known, so that the server learns that the call was taken.
    pub(super) async fn look(&self, command: &Command) {
        self.cards.ask(Self::place(command), Self::wanted(command)).await;
    }

    /// Validates a card and returns its arguments.
    pub(super) fn asked(command: &Command, mut card: Value, ended: bool) -> Result<Asked, Trouble> {
        let card_id = command.card_id.as_deref().unwrap_or_default();
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
        Ok(Asked {
            tool_name: card["content"]["tool_name"].as_str().unwrap_or_default().to_owned(),
            args: card["content"]["arguments"].take(),
            meta: card["metadata"].take(),
            ended,
            looked: false,
        })
    }

    async fn got_alone(&self, command: &Command, card_id: &str) -> Result<Got, Trouble> {
        let mut answer = self.card_alone(command, card_id).await.ok_or(Trouble::Away)?;
        if answer["ok"] != json!(true) {
            let message = answer["error"]["message"].as_str().unwrap_or("the card was refused");
            let code = answer["error"]["code"].as_str().and_then(Code::parse);
            return Err(Trouble::wrong(code.unwrap_or(Code::NotFound), message));
        }
        let ended = answer["ended"].as_array().is_some_and(|ended| !ended.is_empty());
        Ok(Got { card: answer["cards"][0].take(), ended })
    }

    /// Returns the id under which the server itself stores the call's result: a plain success under
    /// this id need not be stored again as a card.
    fn own_card_id(command: &Command) -> Option<String> {
        let asked = command.card_id.as_deref()?;
        let (id, _) = toolcrib::utp::card::made_from(asked)?;
        Some(toolcrib::utp::card::id_of(&id, toolcrib::utp::card::TOOL_RESULT))
    }

    /// Returns the id of the result card. It depends only on the call, so a second execution has
    /// the same card.
    fn card_id(command: &Command) -> String {
        let (project, turn, call) = command.anchor();
        let named = json!([project, turn, call]).to_string();
        format!("res{}", hex(&Sha256::digest(named.as_bytes())[..16]))
    }

    /// Reports a result. A result over a size limit is replaced by a fault.
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
        let card_id = card["card_id"].as_str().unwrap_or_default().to_owned();
        self.told(command, answer.status.as_str(), &card_id, Some(card)).await
    }

    async fn told(
        &self,
        command: &Command,
        status: &str,
        card_id: &str,
        card: Option<Value>,
    ) -> Told {
        let report = ReportBody {
            tool_call_id: &command.tool_call_id,
            agent_turn_id: &command.turn_id,
            turn_epoch: command.epoch,
            agent_id: &command.agent_id,
            after_execution: command.after_execution().as_str(),
            status,
            tool_result_card_id: card_id,
            step_id: command.step_id.as_deref(),
            card,
        };
        let Ok(report) = serde_json::value::to_raw_value(&report) else { return Told::Nobody };
        let subject = format!("{}.rpc.sys.l0.report", Self::place(command));
        let reported = || Reported {
            report: report.clone(),
            traceparent: trace::child(&command.traceparent, &subject),
            tracestate: command.tracestate.clone(),
            depth: command.depth.clone(),
        };
        let said = match self.reports.ask(Self::place(command), reported()).await {
            Some(said) => said,
            None => {
                let (headers, body) = (reported().headers(&self.asker), report.get().as_bytes());
                let answer = self.ask(&subject, headers, body.to_vec(), patience(command)).await;
                let said = answer.and_then(|answer| serde_json::from_slice(&answer).ok());
                let Some(said) = said else { return Told::Nobody };
                said
            }
        };
        match said {
            Said { ok: true, .. } => Told::Taken,
            Said { error: Some(error), .. } if error.retryable => Told::Nobody,
            Said { error, .. } => Told::Refused(error.map(|e| e.message).unwrap_or_default()),
        }
    }

    /// Reports the result that an earlier delivery of the command stored. Returns `None` if there
    /// is none.
    pub(super) async fn report_known(&self, command: &Command) -> Option<Told> {
        let mut known = None;
        for card_id in Self::own_card_id(command).into_iter().chain([Self::card_id(command)]) {
            let answer = self.card_alone(command, &card_id).await?;
            let status = answer["cards"][0]["content"]["status"].as_str().map(str::to_owned);
            known = known.or(status.map(|status| (card_id, status)));
        }
        let (card_id, status) = known?;
        Some(self.told(command, &status, &card_id, None).await)
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
            "author_id": self.asker.name,
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

    /// Stores a command that can be neither executed nor answered as a dead letter.
    pub(super) async fn bury(&self, message: &Message, why: &str) -> Told {
        let Some(parts) = toolcrib::utp::subject::parse(&message.subject) else {
            return Told::Refused("its subject is not one of ours".to_owned());
        };
        let mut letter = json!({
            "reason": "malformed",
            "message": why,
            "subject": message.subject.as_str(),
            "headers": wire::header_map(message.headers.as_ref()),
            "payload": String::from_utf8_lossy(&message.payload),
        });
        let limit = self.asker.link.client().max_payload();
        if limit > 0 && letter.to_string().len() > limit {
            // A byte can become six in JSON, so the payload may not fit into one message again.
            let begins = &message.payload[..message.payload.len().min(limit / 8)];
            letter["payload"] = String::from_utf8_lossy(begins).into();
            letter["headers"] = json!({});
            letter["cut"] = json!(true);
        }
        let to = format!("cg.{}.{}.{}", parts.version, parts.project, parts.channel);
        let (subject, headers) = (format!("{to}.rpc.sys.l0.dead_letter"), self.asker.headers(""));
        let body = letter.to_string().into_bytes();
        let answer = self.ask(&subject, headers, body, OF_A_LETTER).await;
        match answer.and_then(|answer| serde_json::from_slice(&answer).ok()) {
            Some(Said { ok: true, .. }) => Told::Taken,
            Some(Said { error: Some(error), .. }) if !error.retryable => {
                Told::Refused(error.message)
            }
            Some(_) | None => Told::Nobody,
        }
    }
}
