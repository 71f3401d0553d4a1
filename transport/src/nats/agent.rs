//! `rpc.agent.<agent_id>.…`: an agent's turns and inbox, with the same operations as over HTTP.

use async_nats::Message;
use serde_json::{Value, json};
use toolcrib::domain::fault::{Code, Error};
use toolcrib::domain::utp::subject::Subject;
use toolcrib::domain::utp::trace;
use toolcrib::utp::TurnResume;
use toolcrib::{Caller, Engine};
use toolcrib_protocol::utp::turn::{self, DispatchBody, FinishBody, LeaseBody, turn_body};
use toolcrib_protocol::utp::wire;

use super::{parse_body, unknown_subject};
use crate::nats::request_limiter::RequestPermit;

/// Maximum wait of one request, so that the reply arrives before a typical NATS client times out.
const MAX_WAIT_MS: u64 = 30_000;

/// Deserializes the payload from its text, so that an error names its line and column.
fn parse_payload<T: serde::de::DeserializeOwned>(request: &Message) -> Result<T, Error> {
    let text = if request.payload.is_empty() { &b"{}"[..] } else { &request.payload[..] };
    serde_json::from_slice(text).map_err(|error| {
        Error::refused(Code::ValidationError, format!("the request cannot be read: {error}"))
    })
}

/// Returns the named number, or `None` when the field is missing or null.
fn optional_u64(body: &Value, name: &str) -> Result<Option<u64>, Error> {
    match &body[name] {
        Value::Null => Ok(None),
        value => value.as_u64().map(Some).ok_or_else(|| {
            let message = format!("{name} must be a whole number from 0");
            Error::refused(Code::ValidationError, message)
        }),
    }
}

pub(super) async fn handle_request(
    engine: &Engine,
    caller: &Caller,
    parts: &Subject<'_>,
    request: &Message,
    permit: &mut RequestPermit,
) -> Result<Value, Error> {
    let (agent, body) = (parts.target, parse_body(request)?);
    let headers = wire::header_map(request.headers.as_ref());
    let header = |name: &str| headers.get(name).and_then(Value::as_str).map(str::to_owned);
    let turn_id = body["agent_turn_id"].as_str().unwrap_or_default().to_owned();
    let reason = body["reason"].as_str().map(turn::truncate_reason);
    let wait_ms = optional_u64(&body, "wait_ms")?.unwrap_or(0).min(MAX_WAIT_MS);
    let waits = wait_ms > 0 && matches!(parts.suffix, "inbox" | "resume");
    let _waits = waits.then(|| permit.start_waiting(parts.project)).transpose()?;
    let epoch = || {
        let missing = || Error::refused(Code::ValidationError, "turn_epoch is missing");
        optional_u64(&body, "turn_epoch")?.ok_or_else(missing)
    };
    let mut answer = match parts.suffix {
        "lease" => {
            let mut lease = parse_payload::<LeaseBody>(request)?.into_lease();
            lease.channel.get_or_insert_with(|| parts.channel.to_owned());
            lease.traceparent = lease.traceparent.or_else(|| header("traceparent"));
            // Any intermediary may have set this header, so an invalid value is ignored rather than
            // refused.
            let state = || header("tracestate").filter(|state| trace::is_valid_tracestate(state));
            lease.tracestate = lease.tracestate.or_else(state);
            let turn = engine.utp().lease_turn(caller, agent, lease).await?;
            turn_body(&turn, &[])
        }
        "dispatch" => {
            let dispatch = parse_payload::<DispatchBody>(request)?.into_dispatch();
            let sent = engine.utp().dispatch_step(caller, agent, &turn_id, dispatch).await?;
            turn_body(&sent.turn, &sent.calls)
        }
        "turn" => {
            let turn = engine.utp().turn(caller, agent, &turn_id).await?;
            turn_body(&turn, &engine.utp().step_calls(&turn).await?)
        }
        "renew" => {
            turn_body(&engine.utp().renew_lease(caller, agent, &turn_id, epoch()?).await?, &[])
        }
        "suspend" => {
            turn_body(&engine.utp().suspend_turn(caller, agent, &turn_id, epoch()?).await?, &[])
        }
        "resume" => {
            let request_id = body["request_id"].as_str().map(str::to_owned);
            let resume = TurnResume { epoch: epoch()?, wait_ms, request_id };
            let resumed = engine.utp().resume_turn(caller, agent, &turn_id, resume).await?;
            toolcrib_protocol::utp::turn::resumed_body(&resumed)
        }
        "finish" => {
            let mut fields = body.clone();
            fields.as_object_mut().and_then(|fields| fields.remove("agent_turn_id"));
            let finish: FinishBody = serde_json::from_value(fields).map_err(|error| {
                let message = format!("the request cannot be read: {error}");
                Error::refused(Code::ValidationError, message)
            })?;
            let finish = finish.into_finish()?;
            turn_body(&engine.utp().finish_turn(caller, agent, &turn_id, finish).await?, &[])
        }
        "stop" => turn_body(&engine.utp().stop_turn(caller, agent, &turn_id, reason).await?, &[]),
        "inbox" => {
            let limit = optional_u64(&body, "limit")?.unwrap_or(20).clamp(1, 200) as usize;
            let items = engine.utp().inbox(caller, agent, limit, wait_ms).await?;
            json!({ "items": items.iter().map(wire::inbox_item_json).collect::<Vec<_>>() })
        }
        "ack" => {
            let ids: Vec<String> =
                serde_json::from_value(body["inbox_ids"].clone()).map_err(|_| {
                    Error::refused(Code::ValidationError, "inbox_ids must be a list of texts")
                })?;
            json!({ "acked": engine.utp().take_from_inbox(caller, agent, &ids).await? })
        }
        _ => return Err(unknown_subject(parts)),
    };
    answer["ok"] = json!(true);
    Ok(answer)
}
