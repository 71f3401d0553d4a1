//! `rpc.sys.cards.get|follow|put` and `rpc.sys.l0.report|reports|dead_letter`: requests of tool
//! services.

use async_nats::Message;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use serde_json::{Map, Value, json};
use toolcrib::engine::Unreadable;
use toolcrib::fault::{Code, Error};
use toolcrib::utp::subject::{Subject, is_command_of};
use toolcrib::{Caller, Engine};

use super::{body, too_large, unknown};
use crate::utp::Link;
use crate::utp::follow::FOLLOWS;
use crate::utp::report::{self, Incoming};
use crate::utp::wire::{self, Headers};

/// Maximum number of cards in one reply.
const MAX_CARDS: usize = 100;
/// Maximum number of reports in one request.
const MAX_REPORTS: usize = 100;

pub(super) async fn answer(
    engine: &Engine,
    link: &Link,
    caller: &Caller,
    parts: &Subject<'_>,
    request: &Message,
    sender: &str,
) -> Result<Vec<u8>, Error> {
    let answer = match (parts.target, parts.suffix) {
        ("cards", "get") => return get(engine, link, caller, &body(request)?, sender).await,
        ("cards", "follow") => follow(link, parts, &body(request)?),
        ("cards", "put") => put(engine, caller, &body(request)?).await,
        ("l0", "report") => {
            let headers = Headers::of(request.headers.as_ref());
            let subject = request.subject.as_str();
            let incoming = Incoming { subject, headers, body: &request.payload };
            let taken = report::take(engine, caller, incoming).await?;
            return written(&wire::IngestedBody::of(&taken));
        }
        ("l0", "reports") => return reports(engine, caller, parts, request).await,
        ("l0", "dead_letter") => bury(engine, caller, &body(request)?).await,
        _ => Err(unknown(parts)),
    };
    answer.map(|answer| answer.to_string().into_bytes())
}

fn written(answer: &impl Serialize) -> Result<Vec<u8>, Error> {
    serde_json::to_vec(answer).map_err(|error| Error::Internal(Box::new(error)))
}

#[derive(Serialize)]
struct CardsBody<'a> {
    ok: bool,
    cards: Vec<Box<RawValue>>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    ended: Vec<&'a str>,
}

async fn get(
    engine: &Engine,
    link: &Link,
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
    let (limit, mut bytes) = (link.client().max_payload(), 0);
    for id in ids {
        let card = engine.card(caller, id).await?;
        let card = serde_json::value::to_raw_value(&wire::CardBody::of(&card));
        let card = card.map_err(|error| Error::Internal(Box::new(error)))?;
        bytes += card.get().len();
        // Many cards together can exceed the payload limit of the broker, which would drop the
        // reply.
        if limit > 0 && bytes > limit {
            return Err(too_large(limit));
        }
        cards.push(card);
        if !engine.looked_at(caller, id, sender).await {
            ended.push(id);
        }
    }
    written(&CardsBody { ok: true, cards, ended })
}

async fn put(engine: &Engine, caller: &Caller, body: &Value) -> Result<Value, Error> {
    engine.require_project(&caller.project)?;
    let (card, created) = engine.put_card(caller, &body["card"]).await?;
    Ok(json!({ "ok": true, "card_id": card.card_id, "created": created }))
}

/// Registers an inbox that receives the cards for a target before the commands that name them.
fn follow(link: &Link, parts: &Subject<'_>, body: &Value) -> Result<Value, Error> {
    let text = |name: &str| body[name].as_str().unwrap_or_default();
    let (target, inbox) = (text("target"), text("inbox"));
    let refused = |message: &str| Err(Error::refused(Code::BadRequest, message));
    if !toolcrib::utp::is_token(target) {
        return refused("target must be that of cmd.tool.<target>");
    }
    // Only an inbox subject is allowed, so that a client cannot make this server publish messages
    // that others take for commands or events.
    if !inbox.starts_with("_INBOX") || !inbox.split('.').all(toolcrib::utp::is_token) {
        return refused("inbox must be a subject that begins with _INBOX");
    }
    link.followers().follow(parts.project, target, inbox);
    Ok(json!({ "ok": true, "for_ms": FOLLOWS.as_millis() as u64 }))
}

/// A request that carries several reports.
#[derive(Deserialize)]
struct Reports<'a> {
    #[serde(borrow)]
    reports: Vec<OneOfMany<'a>>,
}

#[derive(Deserialize)]
struct OneOfMany<'a> {
    /// Headers of this report; a missing one falls back to the header of the request.
    #[serde(default)]
    headers: Map<String, Value>,
    #[serde(borrow)]
    report: &'a RawValue,
}

#[derive(Serialize)]
struct AnswersBody<'a> {
    ok: bool,
    answers: Vec<AnswerBody<'a>>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum AnswerBody<'a> {
    Taken(wire::IngestedBody<'a>),
    Refused(Value),
}

/// Ingests each report as if it had arrived alone, and returns one reply per report. The reports
/// are committed together.
async fn reports(
    engine: &Engine,
    caller: &Caller,
    parts: &Subject<'_>,
    request: &Message,
) -> Result<Vec<u8>, Error> {
    let given: Reports<'_> = serde_json::from_slice(&request.payload).map_err(|error| {
        let message = format!("a request has a list \"reports\" of {{headers, report}}: {error}");
        Error::refused(Code::BadRequest, message)
    })?;
    if !(1..=MAX_REPORTS).contains(&given.reports.len()) {
        let message = format!("reports must be a list of 1 to {MAX_REPORTS}");
        return Err(Error::refused(Code::BadRequest, message));
    }
    let Subject { version, project, channel, .. } = parts;
    // The subject of a single report, so that a dead letter of it can be redriven.
    let subject = format!("cg.{version}.{project}.{channel}.rpc.sys.l0.report");
    let common = Headers::of(request.headers.as_ref());
    let taking = given.reports.iter().map(|one| {
        let headers = Headers::written(&one.headers).or(&common);
        let body = one.report.get().as_bytes();
        let incoming = Incoming { subject: &subject, headers, body };
        report::take(engine, caller, incoming)
    });
    let taken = futures::future::join_all(taking).await;
    let answers = taken.iter().map(|taken| match taken {
        Ok(taken) => AnswerBody::Taken(wire::IngestedBody::of(taken)),
        Err(error) => AnswerBody::Refused(wire::refusal(error)),
    });
    written(&AnswersBody { ok: true, answers: answers.collect() })
}

/// Stores a command that a tool service can neither execute nor answer as a dead letter.
async fn bury(engine: &Engine, caller: &Caller, body: &Value) -> Result<Value, Error> {
    engine.require_project(&caller.project)?;
    if !is_command_of(body["subject"].as_str().unwrap_or_default(), &caller.project) {
        let message = "subject must be that of a command for a tool of this project: \
                       cg.<version>.<project>.<channel>.cmd.tool.<target>.<suffix>";
        return Err(Error::refused(Code::BadRequest, message));
    }
    let text = |name: &str| body[name].as_str().unwrap_or_default().to_owned();
    let letter = Unreadable {
        kind: "command",
        reason: Some(text("reason")).filter(|r| !r.is_empty()).unwrap_or("malformed".into()),
        message: text("message"),
        subject: text("subject"),
        headers: body["headers"].as_object().cloned().unwrap_or_default(),
        payload: text("payload"),
        cut: body["cut"] == json!(true),
    };
    let letter = engine.bury(&caller.project, letter).await?;
    Ok(json!({ "ok": true, "dead_letter_id": letter.id }))
}
