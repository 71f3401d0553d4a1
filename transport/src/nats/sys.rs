//! `rpc.sys.cards.get|follow|put` and `rpc.sys.l0.report|reports|dead_letter`: requests of tool
//! services.

use async_nats::Message;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use serde_json::{Map, Value, json};
use toolcrib::domain::fault::{Code, Error};
use toolcrib::domain::utp::subject::{Subject, is_command_of};
use toolcrib::utp::UnprocessableMessage;
use toolcrib::{Caller, Engine};
use toolcrib_protocol::utp::NatsConnection;
use toolcrib_protocol::utp::card_followers::FOLLOW_TTL;
use toolcrib_protocol::utp::report::{self, IncomingReport};
use toolcrib_protocol::utp::wire::{self, UtpHeaders};

use super::{parse_body, reply_too_large, unknown_subject};

/// Maximum number of cards in one reply.
const MAX_CARDS: usize = 100;
/// Maximum number of reports in one request.
const MAX_REPORTS: usize = 100;

pub(super) async fn handle_request(
    engine: &Engine,
    nats: &NatsConnection,
    caller: &Caller,
    parts: &Subject<'_>,
    request: &Message,
    sender: &str,
) -> Result<Vec<u8>, Error> {
    let answer = match (parts.target, parts.suffix) {
        ("cards", "get") => {
            return get_cards(engine, nats, caller, &parse_body(request)?, sender).await;
        }
        ("cards", "follow") => follow_cards(nats, parts, &parse_body(request)?),
        ("cards", "put") => put_card(engine, caller, &parse_body(request)?).await,
        ("l0", "report") => {
            let headers = UtpHeaders::from_message(request.headers.as_ref());
            let subject = request.subject.as_str();
            let incoming = IncomingReport { subject, headers, body: &request.payload };
            let ingested = report::ingest_report(engine, caller, incoming).await?;
            return to_json_bytes(&wire::IngestedBody::new(&ingested));
        }
        ("l0", "reports") => return ingest_reports(engine, caller, parts, request).await,
        ("l0", "dead_letter") => dead_letter_command(engine, caller, &parse_body(request)?).await,
        _ => Err(unknown_subject(parts)),
    };
    answer.map(|answer| answer.to_string().into_bytes())
}

fn to_json_bytes(answer: &impl Serialize) -> Result<Vec<u8>, Error> {
    serde_json::to_vec(answer).map_err(|error| Error::Internal(Box::new(error)))
}

#[derive(Serialize)]
struct NatsCardsReply<'a> {
    ok: bool,
    cards: Vec<Box<RawValue>>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    ended: Vec<&'a str>,
}

async fn get_cards(
    engine: &Engine,
    nats: &NatsConnection,
    caller: &Caller,
    body: &Value,
    sender: &str,
) -> Result<Vec<u8>, Error> {
    let ids: Option<Vec<&str>> = body["card_ids"]
        .as_array()
        .map(|ids| ids.iter().filter_map(Value::as_str).collect::<Vec<_>>());
    let invalid = || {
        let message = format!("card_ids must be a list of 1 to {MAX_CARDS} texts");
        Error::refused(Code::BadRequest, message)
    };
    let ids = ids.filter(|ids| (1..=MAX_CARDS).contains(&ids.len())).ok_or_else(invalid)?;
    let (mut cards, mut ended) = (Vec::with_capacity(ids.len()), Vec::new());
    let (limit, mut bytes) = (nats.client().max_payload(), 0);
    for id in ids {
        let card = engine.utp().cards().card(caller, id).await?;
        let card = serde_json::value::to_raw_value(&wire::WireCard::new(&card));
        let card = card.map_err(|error| Error::Internal(Box::new(error)))?;
        bytes += card.get().len();
        // Many cards together can exceed the payload limit of the broker, which would drop the
        // reply.
        if limit > 0 && bytes > limit {
            return Err(reply_too_large(limit));
        }
        cards.push(card);
        if !engine.utp().cards().acknowledge_card_read(caller, id, sender).await {
            ended.push(id);
        }
    }
    to_json_bytes(&NatsCardsReply { ok: true, cards, ended })
}

async fn put_card(engine: &Engine, caller: &Caller, body: &Value) -> Result<Value, Error> {
    engine.projects().require_project(&caller.project)?;
    let (card, created) = engine.utp().cards().put_card(caller, &body["card"]).await?;
    Ok(json!({ "ok": true, "card_id": card.card_id, "created": created }))
}

/// Registers an inbox that receives the cards for a target before the commands that name them.
fn follow_cards(nats: &NatsConnection, parts: &Subject<'_>, body: &Value) -> Result<Value, Error> {
    let text = |name: &str| body[name].as_str().unwrap_or_default();
    let (target, inbox) = (text("target"), text("inbox"));
    let refused = |message: &str| Err(Error::refused(Code::BadRequest, message));
    if !toolcrib::domain::utp::is_token(target) {
        return refused("target must be that of cmd.tool.<target>");
    }
    // Only an inbox subject is allowed, so that a client cannot make this server publish messages
    // that others take for commands or events.
    if !inbox.starts_with("_INBOX") || !inbox.split('.').all(toolcrib::domain::utp::is_token) {
        return refused("inbox must be a subject that begins with _INBOX");
    }
    nats.followers().register(parts.project, target, inbox);
    Ok(json!({ "ok": true, "for_ms": FOLLOW_TTL.as_millis() as u64 }))
}

/// A request that carries several reports.
#[derive(Deserialize)]
struct NatsReportsRequest<'a> {
    #[serde(borrow)]
    reports: Vec<NatsReportsItem<'a>>,
}

#[derive(Deserialize)]
struct NatsReportsItem<'a> {
    /// Headers of this report; a missing one falls back to the header of the request.
    #[serde(default)]
    headers: Map<String, Value>,
    #[serde(borrow)]
    report: &'a RawValue,
}

#[derive(Serialize)]
struct NatsReportsReply<'a> {
    ok: bool,
    answers: Vec<NatsReportReply<'a>>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum NatsReportReply<'a> {
    Accepted(wire::IngestedBody<'a>),
    Refused(Value),
}

/// Ingests each report as if it had arrived alone, and returns one reply per report. The reports
/// are committed together.
async fn ingest_reports(
    engine: &Engine,
    caller: &Caller,
    parts: &Subject<'_>,
    request: &Message,
) -> Result<Vec<u8>, Error> {
    let batch: NatsReportsRequest<'_> =
        serde_json::from_slice(&request.payload).map_err(|error| {
            let message =
                format!("a request has a list \"reports\" of {{headers, report}}: {error}");
            Error::refused(Code::BadRequest, message)
        })?;
    if !(1..=MAX_REPORTS).contains(&batch.reports.len()) {
        let message = format!("reports must be a list of 1 to {MAX_REPORTS}");
        return Err(Error::refused(Code::BadRequest, message));
    }
    let Subject { version, project, channel, .. } = parts;
    // The subject of a single report, so that a dead letter of it can be redriven.
    let subject = format!("cg.{version}.{project}.{channel}.rpc.sys.l0.report");
    let common = UtpHeaders::from_message(request.headers.as_ref());
    let ingesting = batch.reports.iter().map(|report| {
        let headers = UtpHeaders::from_json(&report.headers).or_fallback(&common);
        let body = report.report.get().as_bytes();
        let incoming = IncomingReport { subject: &subject, headers, body };
        report::ingest_report(engine, caller, incoming)
    });
    let outcomes = futures::future::join_all(ingesting).await;
    let answers = outcomes.iter().map(|outcome| match outcome {
        Ok(ingested) => NatsReportReply::Accepted(wire::IngestedBody::new(ingested)),
        Err(error) => NatsReportReply::Refused(wire::error_json(error)),
    });
    to_json_bytes(&NatsReportsReply { ok: true, answers: answers.collect() })
}

/// Stores a command that a tool service can neither execute nor answer as a dead letter.
async fn dead_letter_command(
    engine: &Engine,
    caller: &Caller,
    body: &Value,
) -> Result<Value, Error> {
    engine.projects().require_project(&caller.project)?;
    if !is_command_of(body["subject"].as_str().unwrap_or_default(), &caller.project) {
        let message = "subject must be that of a command for a tool of this project: \
                       cg.<version>.<project>.<channel>.cmd.tool.<target>.<suffix>";
        return Err(Error::refused(Code::BadRequest, message));
    }
    let text = |name: &str| body[name].as_str().unwrap_or_default().to_owned();
    let unprocessable = UnprocessableMessage {
        kind: "command",
        reason: Some(text("reason")).filter(|r| !r.is_empty()).unwrap_or("malformed".into()),
        message: text("message"),
        subject: text("subject"),
        headers: body["headers"].as_object().cloned().unwrap_or_default(),
        payload: text("payload"),
        is_truncated: body["cut"] == json!(true),
    };
    let unprocessable = engine.utp().dead_letters().save(&caller.project, unprocessable).await?;
    Ok(json!({ "ok": true, "dead_letter_id": unprocessable.id }))
}
