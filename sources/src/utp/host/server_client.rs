//! The server as a tool service sees it: cards, reports and dead letters by request and reply.

use std::time::{Duration, Instant};

use async_nats::jetstream::Message;
use async_nats::{HeaderMap, Request};
use axum::body::Bytes;
use serde::Serialize;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use toolcrib::domain::fault::{Code, Fault};
use toolcrib::domain::id::hex;
use toolcrib::domain::utp::card::error_json;
use toolcrib::domain::utp::trace;
use toolcrib_protocol::utp::wire;

use super::ToolJobResult;
use super::command::{CommandError, ReceivedCommand};
use crate::utp::host::batched_rpc::{
    CardRequest, CardsRpc, FetchedCard, HostRpcClient, ReportReply, ReportRequest, ReportsRpc,
    is_unanswered,
};
use crate::utp::host::coalescer::Coalescer;

/// Time for which a request is repeated if its command has no deadline.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(600);
/// Minimum time for which a request is repeated: a late result is still worth recording.
const MIN_TIMEOUT: Duration = Duration::from_secs(60);
/// Time for which storing a dead letter is retried.
const DEAD_LETTER_TIMEOUT: Duration = Duration::from_secs(20);

fn request_timeout(command: &ReceivedCommand) -> Duration {
    let Some(deadline_ms) = command.deadline_ms() else { return DEFAULT_TIMEOUT };
    let now_ms = u64::try_from(wire::now_ms()).unwrap_or_default();
    Duration::from_millis(deadline_ms.saturating_sub(now_ms)).max(MIN_TIMEOUT)
}

/// The outcome of a report.
pub(super) enum ReportOutcome {
    Accepted,
    Rejected(String),
    /// The server did not reply.
    NoReply,
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
pub(super) struct CardArguments {
    pub(super) tool_name: String,
    pub(super) args: Value,
    pub(super) meta: Value,
    /// True if the call has already ended.
    pub(super) is_call_ended: bool,
    /// True if this host has acknowledged the call to the server.
    pub(super) is_announced: bool,
}

pub(super) struct ServerClient {
    rpc: HostRpcClient,
    cards: Coalescer<CardsRpc>,
    reports: Coalescer<ReportsRpc>,
}

impl ServerClient {
    pub(super) fn new(rpc: HostRpcClient) -> Self {
        let cards = Coalescer::new(CardsRpc(rpc.clone()));
        let reports = Coalescer::new(ReportsRpc::new(rpc.clone()));
        Self { rpc, cards, reports }
    }

    /// Repeats a request until there is a reply or the timeout passes: the server may be
    /// restarting.
    async fn request_until_reply(
        &self,
        subject: &str,
        headers: HeaderMap,
        body: Vec<u8>,
        timeout: Duration,
    ) -> Option<Bytes> {
        let (until, bytes) = (Instant::now() + timeout, Bytes::from(body));
        let mut wait = Duration::from_millis(50);
        while Instant::now() < until {
            let request = Request::new().payload(bytes.clone()).headers(headers.clone());
            match self.rpc.connection.client().send_request(subject.to_owned(), request).await {
                Ok(reply) => {
                    self.rpc.reachability.record_reply(subject);
                    return Some(reply.payload);
                }
                Err(error) if error.kind() == async_nats::RequestErrorKind::MaxPayloadExceeded => {
                    let refused = json!({ "ok": false, "error": {
                        "code": "too_large",
                        "message": "the message is over NATS's limit",
                    }});
                    return Some(refused.to_string().into());
                }
                Err(error) => {
                    if is_unanswered(&error) {
                        self.rpc.reachability.record_no_reply(subject);
                    }
                    tracing::debug!(%error, subject, "no reply; retrying");
                }
            }
            tokio::time::sleep(wait).await;
            wait = (wait * 2).min(Duration::from_secs(2));
        }
        None
    }

    /// Returns the subject prefix of requests about a command.
    pub(super) fn subject_prefix(command: &ReceivedCommand) -> String {
        let ReceivedCommand { version, project, channel, .. } = command;
        format!("cg.{version}.{project}.{channel}")
    }

    /// Requests a single card.
    async fn fetch_card(&self, command: &ReceivedCommand, card_id: &str) -> Option<Value> {
        let subject = format!("{}.rpc.sys.cards.get", Self::subject_prefix(command));
        let headers = self.rpc.headers(&trace::child_traceparent(&command.traceparent, &subject));
        let body = json!({ "card_ids": [card_id] }).to_string().into_bytes();
        let answer =
            self.request_until_reply(&subject, headers, body, request_timeout(command)).await?;
        serde_json::from_slice(&answer).ok()
    }

    fn card_request(command: &ReceivedCommand) -> CardRequest {
        let card_id = command.card_id.clone().unwrap_or_default();
        CardRequest {
            traceparent: trace::child_traceparent(&command.traceparent, &card_id),
            card_id,
        }
    }

    /// Fetches a command's card and returns its arguments.
    pub(super) async fn load_arguments(
        &self,
        command: &ReceivedCommand,
    ) -> Result<CardArguments, CommandError> {
        let request = Self::card_request(command);
        let FetchedCard { card, is_call_ended: ended } =
            match self.cards.request(Self::subject_prefix(command), request).await {
                Some(got) => got,
                None => {
                    self.fetch_card_or_fail(command, command.card_id.as_deref().unwrap_or_default())
                        .await?
                }
            };
        Ok(CardArguments { is_announced: true, ..Self::parse_card(command, card, ended)? })
    }

    /// Requests a card that is already known: the request acknowledges the call to the server.
    pub(super) async fn announce_start(&self, command: &ReceivedCommand) {
        self.cards.request(Self::subject_prefix(command), Self::card_request(command)).await;
    }

    /// Validates a card and returns its arguments.
    pub(super) fn parse_card(
        command: &ReceivedCommand,
        mut card: Value,
        ended: bool,
    ) -> Result<CardArguments, CommandError> {
        let card_id = command.card_id.as_deref().unwrap_or_default();
        let rejected = |message: String| Err(CommandError::rejected(Code::BadRequest, message));
        if card["type"] != "tool.call" {
            return rejected(format!("card \"{card_id}\" is a {}, not a tool.call", card["type"]));
        }
        if card["content"]["__type__"] != "ToolCallContent" {
            return rejected(format!("the content of card \"{card_id}\" is not a ToolCallContent"));
        }
        let id = card["tool_call_id"].as_str().unwrap_or_default();
        if !id.is_empty() && id != command.tool_call_id {
            return rejected(format!("card \"{card_id}\" is of the call \"{id}\""));
        }
        Ok(CardArguments {
            tool_name: card["content"]["tool_name"].as_str().unwrap_or_default().to_owned(),
            args: card["content"]["arguments"].take(),
            meta: card["metadata"].take(),
            is_call_ended: ended,
            is_announced: false,
        })
    }

    async fn fetch_card_or_fail(
        &self,
        command: &ReceivedCommand,
        card_id: &str,
    ) -> Result<FetchedCard, CommandError> {
        let mut answer =
            self.fetch_card(command, card_id).await.ok_or(CommandError::ServerUnavailable)?;
        if answer["ok"] != json!(true) {
            let message = answer["error"]["message"].as_str().unwrap_or("the card was refused");
            let code = answer["error"]["code"].as_str().and_then(Code::parse);
            return Err(CommandError::rejected(code.unwrap_or(Code::NotFound), message));
        }
        let ended = answer["ended"].as_array().is_some_and(|ended| !ended.is_empty());
        Ok(FetchedCard { card: answer["cards"][0].take(), is_call_ended: ended })
    }

    /// Returns the id under which the server itself stores the call's result: a plain success under
    /// this id need not be stored again as a card.
    fn server_result_card_id(command: &ReceivedCommand) -> Option<String> {
        let command_card_id = command.card_id.as_deref()?;
        let (id, _) = toolcrib::domain::utp::card::parse_derived_id(command_card_id)?;
        Some(toolcrib::domain::utp::card::derived_id(&id, toolcrib::domain::utp::card::TOOL_RESULT))
    }

    /// Returns the id of the result card. It depends only on the call, so a second execution has
    /// the same card.
    fn result_card_id(command: &ReceivedCommand) -> String {
        let (project, turn, call) = command.call_key();
        let id = json!([project, turn, call]).to_string();
        format!("res{}", hex(&Sha256::digest(id.as_bytes())[..16]))
    }

    /// Reports a result. A result over a size limit is replaced by a fault.
    pub(super) async fn report(
        &self,
        command: &ReceivedCommand,
        answer: ToolJobResult,
        meta: &Value,
    ) -> ReportOutcome {
        let card = self.result_card(command, &answer, meta);
        let outcome = self.send_report(command, &answer, card).await;
        let ReportOutcome::Rejected(reason) = &outcome else { return outcome };
        if !reason.contains("limit") {
            return outcome;
        }
        let message = format!("the result of {} is too large: {reason}", command.tool_name());
        let smaller = ToolJobResult::failed(Fault::new(Code::PayloadTooLarge, message));
        let card = self.result_card(command, &smaller, meta);
        self.send_report(command, &smaller, card).await
    }

    async fn send_report(
        &self,
        command: &ReceivedCommand,
        answer: &ToolJobResult,
        card: Value,
    ) -> ReportOutcome {
        let card_id = card["card_id"].as_str().unwrap_or_default().to_owned();
        self.submit_report(command, answer.status.as_str(), &card_id, Some(card)).await
    }

    async fn submit_report(
        &self,
        command: &ReceivedCommand,
        status: &str,
        card_id: &str,
        card: Option<Value>,
    ) -> ReportOutcome {
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
        let Ok(report) = serde_json::value::to_raw_value(&report) else {
            return ReportOutcome::NoReply;
        };
        let subject = format!("{}.rpc.sys.l0.report", Self::subject_prefix(command));
        let reported = || ReportRequest {
            report: report.clone(),
            traceparent: trace::child_traceparent(&command.traceparent, &subject),
            tracestate: command.tracestate.clone(),
            depth: command.recursion_depth.clone(),
        };
        let reply = match self.reports.request(Self::subject_prefix(command), reported()).await {
            Some(reply) => reply,
            None => {
                let (headers, body) = (reported().headers(&self.rpc), report.get().as_bytes());
                let answer = self
                    .request_until_reply(&subject, headers, body.to_vec(), request_timeout(command))
                    .await;
                let reply = answer.and_then(|answer| serde_json::from_slice(&answer).ok());
                let Some(reply) = reply else { return ReportOutcome::NoReply };
                reply
            }
        };
        match reply {
            ReportReply { ok: true, .. } => ReportOutcome::Accepted,
            ReportReply { error: Some(error), .. } if error.retryable => ReportOutcome::NoReply,
            ReportReply { error, .. } => {
                ReportOutcome::Rejected(error.map(|e| e.message).unwrap_or_default())
            }
        }
    }

    /// Reports the result that an earlier delivery of the command stored. Returns `None` if there
    /// is none.
    pub(super) async fn report_stored_result(
        &self,
        command: &ReceivedCommand,
    ) -> Option<ReportOutcome> {
        let mut stored = None;
        for card_id in
            Self::server_result_card_id(command).into_iter().chain([Self::result_card_id(command)])
        {
            let answer = self.fetch_card(command, &card_id).await?;
            let status = answer["cards"][0]["content"]["status"].as_str().map(str::to_owned);
            stored = stored.or(status.map(|status| (card_id, status)));
        }
        let (card_id, status) = stored?;
        Some(self.submit_report(command, &status, &card_id, None).await)
    }

    fn result_card(
        &self,
        command: &ReceivedCommand,
        answer: &ToolJobResult,
        meta: &Value,
    ) -> Value {
        let error = answer.error.as_ref().map(|fault| {
            let mut error = error_json(fault, "tool");
            let utp_code = fault.detail.as_ref().and_then(|detail| detail.get("utp_code"));
            if let Some(code) = utp_code {
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
        let is_plain_success =
            answer.status == toolcrib::domain::utp::ToolStatus::Success && !meta.is_null();
        let server_card_id = Self::server_result_card_id(command).filter(|_| is_plain_success);
        json!({
            "card_id": server_card_id.unwrap_or_else(|| Self::result_card_id(command)),
            "project_id": command.project,
            "type": "tool.result",
            "author_id": self.rpc.sender,
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
    pub(super) async fn dead_letter(&self, message: &Message, reason: &str) -> ReportOutcome {
        let Some(parts) = toolcrib::domain::utp::subject::parse(&message.subject) else {
            return ReportOutcome::Rejected("its subject is not one of this server".to_owned());
        };
        let mut dead_letter = json!({
            "reason": "malformed",
            "message": reason,
            "subject": message.subject.as_str(),
            "headers": wire::header_map(message.headers.as_ref()),
            "payload": String::from_utf8_lossy(&message.payload),
        });
        let limit = self.rpc.connection.client().max_payload();
        if limit > 0 && dead_letter.to_string().len() > limit {
            // A byte can become six in JSON, so the payload may not fit into one message again.
            let begins = &message.payload[..message.payload.len().min(limit / 8)];
            dead_letter["payload"] = String::from_utf8_lossy(begins).into();
            dead_letter["headers"] = json!({});
            dead_letter["cut"] = json!(true);
        }
        let to = format!("cg.{}.{}.{}", parts.version, parts.project, parts.channel);
        let (subject, headers) = (format!("{to}.rpc.sys.l0.dead_letter"), self.rpc.headers(""));
        let body = dead_letter.to_string().into_bytes();
        let answer = self.request_until_reply(&subject, headers, body, DEAD_LETTER_TIMEOUT).await;
        match answer.and_then(|answer| serde_json::from_slice(&answer).ok()) {
            Some(ReportReply { ok: true, .. }) => ReportOutcome::Accepted,
            Some(ReportReply { error: Some(error), .. }) if !error.retryable => {
                ReportOutcome::Rejected(error.message)
            }
            Some(_) | None => ReportOutcome::NoReply,
        }
    }
}
