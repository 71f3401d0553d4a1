//! `rpc.sys.cards.get|put`, `rpc.sys.l0.report`, `rpc.sys.l0.dead_letter`: for tool services.

use async_nats::Message;
use serde_json::{Value, json};
use toolcrib::engine::Unreadable;
use toolcrib::fault::{Code, Error};
use toolcrib::utp::subject::Subject;
use toolcrib::{Caller, Engine};

use super::{body, unknown};
use crate::utp::report::{self, Incoming};
use crate::utp::wire;

/// Most cards in one answer.
const MAX_CARDS: usize = 100;

pub(super) async fn answer(
    engine: &Engine,
    caller: &Caller,
    parts: &Subject<'_>,
    request: &Message,
    sender: &str,
) -> Result<Value, Error> {
    match (parts.target, parts.suffix) {
        ("cards", "get") => get(engine, caller, &body(request)?, sender).await,
        ("cards", "put") => put(engine, caller, &body(request)?).await,
        ("l0", "report") => {
            let headers = wire::header_map(request.headers.as_ref());
            let subject = request.subject.as_str();
            let incoming = Incoming { subject, headers, body: &request.payload };
            let taken = report::take(engine, caller, incoming).await?;
            Ok(wire::ingested(&taken))
        }
        ("l0", "dead_letter") => bury(engine, caller, &body(request)?).await,
        _ => Err(unknown(parts)),
    }
}

async fn get(engine: &Engine, caller: &Caller, body: &Value, sender: &str) -> Result<Value, Error> {
    let ids: Option<Vec<&str>> = body["card_ids"]
        .as_array()
        .map(|ids| ids.iter().filter_map(Value::as_str).collect::<Vec<_>>());
    let invalid = || {
        let message = format!("card_ids must be a list of 1 to {MAX_CARDS} texts");
        Error::refused(Code::BadRequest, message)
    };
    let ids = ids.filter(|ids| (1..=MAX_CARDS).contains(&ids.len())).ok_or_else(invalid)?;
    let mut cards = Vec::with_capacity(ids.len());
    for id in ids {
        cards.push(wire::card(&engine.card(caller, id).await?));
        engine.looked_at(caller, id, sender).await;
    }
    Ok(json!({ "ok": true, "cards": cards }))
}

async fn put(engine: &Engine, caller: &Caller, body: &Value) -> Result<Value, Error> {
    let (card, created) = engine.put_card(caller, &body["card"]).await?;
    Ok(json!({ "ok": true, "card_id": card.card_id, "created": created }))
}

/// A tool service was sent something that it can neither execute nor answer.
async fn bury(engine: &Engine, caller: &Caller, body: &Value) -> Result<Value, Error> {
    let text = |name: &str| body[name].as_str().unwrap_or_default().to_owned();
    let letter = Unreadable {
        kind: "command",
        reason: Some(text("reason")).filter(|r| !r.is_empty()).unwrap_or("malformed".into()),
        message: text("message"),
        subject: text("subject"),
        headers: body["headers"].as_object().cloned().unwrap_or_default(),
        payload: text("payload"),
    };
    let letter = engine.bury(&caller.project, letter).await?;
    Ok(json!({ "ok": true, "dead_letter_id": letter.id }))
}
