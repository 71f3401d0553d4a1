//! UTP over HTTP: cards, boxes, reports of tool services, and dead letters.

pub(super) mod boxes;
use axum::Json;
use axum::body::Bytes;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use serde_json::{Value, json};
use toolcrib::domain::fault::{Code, Error};
use toolcrib::domain::utp::{DeadLetter, OutboxMessage, subject};
use toolcrib_protocol::utp::report::{self, IncomingReport};
use toolcrib_protocol::utp::wire;
use utoipa::{IntoParams, ToSchema};

use super::super::HttpState;
use super::calls::{DEFAULT_PAGE_SIZE, parse_page_limit};
use crate::http::extract::{
    self, AuthenticatedCaller, CallPath, NamePath, QueryParams, ResultJsonBody,
};
use crate::http::problem::{ApiError, ProblemDetails};

/// A card: an immutable record. Toolcrib derives the cards of a call from the call.
#[derive(ToSchema)]
#[allow(dead_code, reason = "only its schema is used")]
#[schema(as = CardBody)]
pub(super) struct CardSchema {
    card_id: String,
    project_id: String,
    /// `tool.call`, `tool.result`, …
    #[schema(rename = "type")]
    kind: String,
    /// Content with its discriminator `__type__`: `ToolCallContent`, `ToolResultContent`, …
    #[schema(value_type = Object)]
    content: Value,
    /// RFC 3339.
    created_at: String,
    author_id: String,
    #[schema(value_type = Object)]
    metadata: Value,
    tool_call_id: Option<String>,
}

/// Returns one card.
#[utoipa::path(get, path = "/v1/cards/{card_id}", tag = "providers",
    params(("card_id" = String, Path, description = "The card")),
    responses((status = 200, body = CardSchema), (status = 404, body = ProblemDetails)))]
pub(super) async fn show(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    NamePath(id): NamePath,
) -> Result<Json<Value>, ApiError> {
    Ok(Json(wire::card_json(&state.engine.utp().cards().card(&caller, &id).await?)))
}

/// The cards of a call.
#[derive(ToSchema)]
#[allow(dead_code, reason = "only its schema is used")]
pub(super) struct CallCardsBody {
    cards: Vec<CardSchema>,
}

/// Returns the cards of a call: the request and, once the call has ended, its result.
#[utoipa::path(get, path = "/v1/tool_calls/{tool_call_id}/cards", tag = "agents",
    params(("tool_call_id" = String, Path, description = "The ticket")),
    responses((status = 200, body = CallCardsBody), (status = 404, body = ProblemDetails)))]
pub(super) async fn call_cards(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    CallPath(id): CallPath,
) -> Result<Json<Value>, ApiError> {
    let cards = state.engine.utp().cards().call_cards(&caller, &id).await?;
    Ok(Json(json!({ "cards": cards.iter().map(wire::card_json).collect::<Vec<_>>() })))
}

/// Writes a card.
///
/// Writing the same card again returns 200. Another card with the same id, or a second result of a
/// call, returns 409.
#[utoipa::path(post, path = "/v1/cards", tag = "providers", request_body = CardSchema,
    responses((status = 201, body = CardSchema), (status = 200, body = CardSchema),
        (status = 400, body = ProblemDetails), (status = 409, body = ProblemDetails),
        (status = 413, body = ProblemDetails)))]
pub(super) async fn put(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    ResultJsonBody(body): ResultJsonBody<Value>,
) -> Result<Response, ApiError> {
    let card_json = body.get("card").unwrap_or(&body);
    let (card, created) = state.engine.utp().cards().put_card(&caller, card_json).await?;
    let status = if created { StatusCode::CREATED } else { StatusCode::OK };
    Ok((status, Json(wire::card_json(&card))).into_response())
}

/// A report in UTP's format.
#[derive(ToSchema)]
#[allow(dead_code, reason = "only its schema is used")]
pub(super) struct ToolResultBody {
    tool_call_id: String,
    agent_turn_id: String,
    turn_epoch: u64,
    agent_id: String,
    /// The value from the command.
    after_execution: String,
    /// `success`, `failed`, `canceled`, `timeout` or `partial`.
    status: String,
    tool_result_card_id: String,
    step_id: Option<String>,
    /// The card itself, as an alternative to writing it first.
    #[schema(value_type = Option<Object>)]
    card: Option<Value>,
}

/// The receipt of a report.
#[derive(ToSchema)]
#[allow(dead_code, reason = "only its schema is used")]
pub(super) struct ReportReceiptBody {
    ok: bool,
    /// The item that the report put into the agent's inbox.
    inbox_id: Option<String>,
    /// True if the same report arrived before.
    duplicate: bool,
    /// True if the call had ended before, so that the report changed nothing.
    late: bool,
    /// The ticket of the call.
    call_id: String,
    call_status: String,
}

/// Reports the result of a command.
#[utoipa::path(post, path = "/v1/tool_results", tag = "providers", request_body = ToolResultBody,
    responses((status = 200, body = ReportReceiptBody),
        (status = 400, body = ProblemDetails), (status = 403, body = ProblemDetails),
        (status = 404, body = ProblemDetails), (status = 409, body = ProblemDetails),
        (status = 413, body = ProblemDetails)))]
pub(super) async fn report(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    headers: HeaderMap,
    request: Request,
) -> Result<Json<Value>, ApiError> {
    if !caller.may_provide() {
        let message = format!("a key with the role {} cannot report", caller.roles);
        return Err(Error::refused(Code::PermissionDenied, message).into());
    }
    // A body over the limit is stored as a dead letter, which needs the start of the body.
    let limit = state.max_result_body_bytes() + 32_768;
    let body: Bytes = extract::read_body_prefix(request, limit, state.max_report_bytes()).await?;
    let headers = utp_headers(&headers);
    let incoming = IncomingReport { subject: "/v1/tool_results", headers, body: &body };
    let ingested = report::ingest_report(&state.engine, &caller, incoming).await?;
    Ok(Json(wire::ingested_json(&ingested)))
}

/// Returns the headers that UTP uses. A dead letter must not contain the caller's key.
fn utp_headers(headers: &HeaderMap) -> wire::UtpHeaders<'_> {
    let is_utp_header = |name: &str| name.starts_with("cg-") || name.starts_with("trace");
    let texts = headers.iter().filter(|(name, _)| is_utp_header(name.as_str()));
    texts.filter_map(|(name, value)| Some((name.as_str(), value.to_str().ok()?))).collect()
}

/// The page of dead letters to return.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct DeadLetterQuery {
    /// Maximum number of dead letters, 1 to 200 (default: 50).
    limit: Option<usize>,
    /// Id of the last dead letter of the previous page.
    before: Option<String>,
}

/// A message that could not be processed.
#[derive(ToSchema)]
#[allow(dead_code, reason = "only its schema is used")]
pub(super) struct DeadLetterBody {
    id: String,
    /// `report`, `command` or `letter` (a wakeup or an event).
    kind: String,
    /// `malformed`, `orphan`, `wrong_turn`, `wrong_epoch`, …
    reason: String,
    message: String,
    subject: String,
    payload: String,
    created_at: String,
    redriven_at: Option<String>,
    last_try: Option<String>,
}

/// A page of dead letters.
#[derive(ToSchema)]
#[allow(dead_code, reason = "only its schema is used")]
pub(super) struct DeadLetterList {
    dead_letters: Vec<DeadLetterBody>,
    /// The value of `before` for the next page; null on the last one.
    next_before: Option<String>,
}

fn dead_letter_json(dead_letter: &DeadLetter) -> Value {
    json!({
        "id": dead_letter.id,
        "project_id": dead_letter.project,
        "kind": dead_letter.kind,
        "reason": dead_letter.reason,
        "message": dead_letter.message,
        "subject": dead_letter.subject,
        "headers": dead_letter.headers,
        "payload": dead_letter.payload,
        "cut": dead_letter.truncated,
        "created_at": wire::format_rfc3339(dead_letter.created_ms),
        "redriven_at": dead_letter.redriven_ms.map(wire::format_rfc3339),
        "last_try": dead_letter.last_redrive_result,
    })
}

/// Lists the dead letters, newest first.
#[utoipa::path(get, path = "/v1/dead_letters", tag = "operators", params(DeadLetterQuery),
    responses((status = 200, body = DeadLetterList), (status = 403, body = ProblemDetails)))]
pub(super) async fn dead_letters(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    QueryParams(page): QueryParams<DeadLetterQuery>,
) -> Result<Json<Value>, ApiError> {
    let limit = parse_page_limit(page.limit.map(|limit| limit as u64), DEFAULT_PAGE_SIZE)?;
    let dead_letters =
        state.engine.utp().dead_letters().list(&caller, page.before.as_deref(), limit).await?;
    let next = dead_letters
        .last()
        .filter(|_| dead_letters.len() == limit)
        .map(|dead_letter| dead_letter.id.clone());
    let dead_letters: Vec<Value> = dead_letters.iter().map(dead_letter_json).collect();
    Ok(Json(json!({ "dead_letters": dead_letters, "next_before": next })))
}

/// The result of a redrive: of a report its receipt, of another message `published`.
#[derive(ToSchema)]
#[allow(dead_code, reason = "only its schema is used")]
pub(super) struct RedriveBody {
    ok: bool,
    /// True if the message was published again.
    #[schema(nullable = false)]
    published: Option<bool>,
    /// The item that the report put into the agent's inbox.
    inbox_id: Option<String>,
    /// True if the same report arrived before.
    #[schema(nullable = false)]
    duplicate: Option<bool>,
    /// True if the call had ended before, so that the report changed nothing.
    #[schema(nullable = false)]
    late: Option<bool>,
    /// The ticket of the call.
    #[schema(nullable = false)]
    call_id: Option<String>,
    #[schema(nullable = false)]
    call_status: Option<String>,
}

/// Redrives a dead letter: processes a report as if it had just arrived, and republishes any other
/// message.
#[utoipa::path(post, path = "/v1/dead_letters/{id}/redrive", tag = "operators",
    params(("id" = String, Path, description = "The dead letter")),
    responses((status = 200, body = RedriveBody), (status = 403, body = ProblemDetails),
        (status = 404, body = ProblemDetails), (status = 409, body = ProblemDetails)))]
pub(super) async fn redrive(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    NamePath(id): NamePath,
) -> Result<Json<Value>, ApiError> {
    let engine = &state.engine;
    let dead_letter = engine.utp().dead_letters().find(&caller, &id).await?;
    if dead_letter.truncated {
        let message = "it was too large to be stored completely, so it cannot be redriven";
        return Err(Error::refused(Code::Conflict, message).into());
    }
    if dead_letter.kind != "report" {
        let again = to_outbox_message(&dead_letter, engine.now_ms())?;
        engine.utp().outbox().enqueue(&caller, again).await?;
        engine.utp().dead_letters().record_redrive(dead_letter, "published again").await?;
        return Ok(Json(json!({ "ok": true, "published": true })));
    }
    let incoming = IncomingReport {
        subject: &dead_letter.subject,
        headers: wire::UtpHeaders::from_json(&dead_letter.headers),
        body: dead_letter.payload.as_bytes(),
    };
    match report::reingest_report(engine, &caller, &incoming).await {
        Ok(ingested) => {
            engine.utp().dead_letters().record_redrive(dead_letter.clone(), "taken").await?;
            Ok(Json(wire::ingested_json(&ingested)))
        }
        Err(error) => {
            engine
                .utp()
                .dead_letters()
                .record_redrive(dead_letter.clone(), &error.to_string())
                .await?;
            Err(error.into())
        }
    }
}

/// Builds the outbox message that republishes a dead letter. A command may only go to a tool of its
/// own project. Messages that Toolcrib itself could not publish need no such check.
fn to_outbox_message(dead_letter: &DeadLetter, now_ms: u64) -> Result<OutboxMessage, Error> {
    let unusable = |reason: &str| {
        let message = format!("it cannot be published again: {reason}");
        Error::refused(Code::Conflict, message)
    };
    let (kind, project) = (dead_letter.kind.as_str(), dead_letter.project.as_str());
    if subject::parse_prefix(&dead_letter.subject).is_some_and(|parts| parts.component == "sys") {
        return Err(unusable("this server executes no cmd.sys commands"));
    }
    if kind == "command" && !subject::is_command_of(&dead_letter.subject, project) {
        return Err(unusable("its subject is not that of a command for a tool of this project"));
    }
    let subject =
        dead_letter.subject.splitn(3, '.').nth(2).ok_or_else(|| unusable("its subject"))?;
    let payload =
        serde_json::from_str(&dead_letter.payload).map_err(|_| unusable("it is not JSON"))?;
    // Other headers are dropped, so that a message of another program cannot control the NATS
    // server.
    let is_utp_header = |name: &str| {
        let name = name.to_ascii_lowercase();
        ["cg-", "trace", "toolcrib-"].iter().any(|begin| name.starts_with(begin))
    };
    let text = |(name, value): (&String, &Value)| Some((name.clone(), value.as_str()?.to_owned()));
    let headers = dead_letter
        .headers
        .iter()
        .filter(|(name, _)| is_utp_header(name))
        .filter_map(text)
        .collect();
    Ok(OutboxMessage {
        id: format!("redrive-{}-{now_ms}", dead_letter.id),
        subject: subject.to_owned(),
        headers,
        payload,
        expires_ms: now_ms + 86_400_000,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_tool_commands_of_the_own_project_are_republished() {
        let dead = |kind: &str, subject: &str| DeadLetter {
            id: "dl_1".to_owned(),
            project: "shop".to_owned(),
            kind: kind.to_owned(),
            reason: "malformed".to_owned(),
            message: String::new(),
            subject: subject.to_owned(),
            headers: serde_json::Map::from_iter([
                ("CG-Sender".to_owned(), json!("x")),
                ("Nats-Rollup".to_owned(), json!("all")),
            ]),
            payload: "{}".to_owned(),
            truncated: false,
            created_ms: 0,
            redriven_ms: None,
            last_redrive_result: None,
        };
        let own_subject = "cg.v1r3.shop.public.cmd.tool.hand.run";
        let outbox_message = to_outbox_message(&dead("command", own_subject), 7).unwrap();
        assert_eq!(outbox_message.subject, "shop.public.cmd.tool.hand.run");
        assert_eq!(outbox_message.headers, [("CG-Sender".to_owned(), "x".to_owned())]);
        for other in [
            "cg.v1r3.default.public.cmd.tool.hand.run",
            "cg.v1r3.shop.public.cmd.agent.w1.wakeup",
            "nonsense",
        ] {
            let error = to_outbox_message(&dead("command", other), 7).unwrap_err();
            assert_eq!(error.code(), Code::Conflict, "{other}");
        }
        let event = "cg.v1r3.shop.public.evt.agent.ada.state";
        assert!(to_outbox_message(&dead("letter", event), 7).is_ok(), "Toolcrib's own message");
    }
}
