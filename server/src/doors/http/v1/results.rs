//! Results, in parts: what a digest left out is read here.

use axum::Json as Body;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use serde_json::json;
use toolcrib::engine::Given;
use toolcrib::fault::{Code, Error, Fault};
use toolcrib::piece::{Content, Part, Piece};
use toolcrib::{CallId, Caller, Json};
use utoipa::{IntoParams, ToSchema};

use super::super::Door;
use super::super::answer::{Problem, Refused};
use super::super::question::{Asked, CallPath, Who};

/// More tokens than any model takes.
const MAX_BUDGET: u64 = 1_000_000;

/// Which part. Numbers are read here, so that a wrong one is refused by its name.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct Reading {
    /// Which part, as a JSON pointer (RFC 6901) such as `/rows/10`; the whole unless given.
    pointer: Option<String>,
    /// The first item of an array, entry of an object or line of a text to give; with `grep`, the
    /// first match. From 0.
    #[param(value_type = Option<u64>)]
    offset: Option<String>,
    /// How many to give: 1 to 1000, 100 unless given.
    #[param(value_type = Option<u64>, minimum = 1, maximum = 1000)]
    limit: Option<String>,
    /// A regular expression: only what fits it is given, with its pointer.
    grep: Option<String>,
    /// `true`: what the tool gave although it did not fit its output schema. For operators.
    #[param(value_type = Option<bool>)]
    raw: Option<String>,
    /// Instead of a part: the result as a model is given it, in at most this many tokens. Whole
    /// where it fits, else its digest.
    #[param(value_type = Option<u64>, minimum = 1, maximum = 1_000_000)]
    budget_tokens: Option<String>,
    /// With `budget_tokens`: what is looked for, so that a digest shows it. The call's arguments
    /// unless given.
    query: Option<String>,
}

/// A result as a model is given it.
#[derive(Serialize, ToSchema)]
pub(super) struct GivenBody<'a> {
    tool_call_id: &'a str,
    budget_tokens: u64,
    /// How many tokens the text is (`o200k_base`); never more than the budget.
    tokens: usize,
    /// How many bytes the whole result is, as JSON.
    bytes: usize,
    /// Whether the text is a digest, and parts of the result are left out.
    digest: bool,
    text: String,
}

/// A part of a result, or a result as a model is given it.
#[derive(Serialize, ToSchema)]
#[serde(untagged)]
pub(super) enum ReadBody<'a> {
    Piece(PieceBody<'a>),
    Given(GivenBody<'a>),
}

/// A part of a result.
#[derive(Serialize, ToSchema)]
pub(super) struct PieceBody<'a> {
    tool_call_id: &'a str,
    pointer: String,
    /// What is there: `array`, `object`, `text`, `number`, `boolean` or `null`.
    #[serde(rename = "type")]
    kind: &'static str,
    /// How many bytes that is, as JSON.
    bytes: usize,
    /// How many items, entries or lines there are; none for a plain value.
    total: Option<usize>,
    offset: usize,
    /// How many of them, or matches, are given here.
    shown: usize,
    /// Where to go on; none at the end.
    next_offset: Option<usize>,
    /// Less was given than asked for, because it would have been too much at once.
    truncated: bool,
    /// The items, entries or lines: an array, an object or a text; or the plain value.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Object>)]
    value: Option<Json>,
    /// With `grep`: what fits.
    #[serde(skip_serializing_if = "Option::is_none")]
    matches: Option<Vec<MatchBody>>,
    /// With `grep`: how many fit altogether.
    #[serde(skip_serializing_if = "Option::is_none")]
    matched: Option<usize>,
    /// The beginning of one item or entry that is too long by itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    beginning: Option<String>,
    /// Where that one can be read in parts.
    #[serde(skip_serializing_if = "Option::is_none")]
    next_pointer: Option<String>,
}

/// One item, entry or line that fits.
#[derive(Serialize, ToSchema)]
pub(super) struct MatchBody {
    pointer: String,
    /// Which line of the text there.
    #[serde(skip_serializing_if = "Option::is_none")]
    line: Option<usize>,
    /// What is there; of something long, its beginning as text.
    #[schema(value_type = Object)]
    value: Json,
    /// Only the beginning is given.
    cut: bool,
}

impl<'a> PieceBody<'a> {
    fn new(tool_call_id: &'a str, piece: Piece) -> Self {
        let mut body = Self {
            tool_call_id,
            pointer: piece.pointer,
            kind: piece.kind.as_str(),
            bytes: piece.bytes,
            total: piece.total,
            offset: piece.offset,
            shown: piece.shown,
            next_offset: piece.next_offset,
            truncated: piece.truncated,
            value: None,
            matches: None,
            matched: None,
            beginning: None,
            next_pointer: None,
        };
        match piece.content {
            Content::Value(value) => body.value = Some(value),
            Content::Matches { matches, matched } => {
                let given = matches.into_iter().map(|found| MatchBody {
                    pointer: found.pointer,
                    line: found.line,
                    value: found.value,
                    cut: found.cut,
                });
                body.matches = Some(given.collect());
                body.matched = Some(matched);
            }
            Content::Beginning { text, pointer } => {
                body.beginning = Some(text);
                body.next_pointer = Some(pointer);
            }
        }
        body
    }
}

/// Reads a part of a call's result.
#[utoipa::path(get, path = "/v1/tool_calls/{tool_call_id}/result", tag = "agents",
    params(("tool_call_id" = String, Path, description = "The ticket"), Reading),
    responses((status = 200, body = ReadBody),
        (status = 403, description = "raw is for operators", body = Problem),
        (status = 404, description = "No such call, or nothing at the pointer", body = Problem),
        (status = 409, description = "It has not ended, or has no result", body = Problem),
        (status = 422, body = Problem)))]
pub(super) async fn read(
    State(door): State<Door>,
    Who(caller): Who,
    CallPath(id): CallPath,
    Asked(reading): Asked<Reading>,
) -> Result<Response, Refused> {
    if let Some(budget) = number("budget_tokens", reading.budget_tokens.as_deref())? {
        let given = given(&door, &caller, &id, &reading, budget).await?;
        return Ok(Body(ReadBody::Given(given)).into_response());
    }
    if reading.query.as_ref().is_some_and(|query| !query.is_empty()) {
        let message = "query goes with budget_tokens; to search a part, use grep";
        return Err(invalid("query", message).into());
    }
    let raw = match reading.raw.as_deref() {
        None | Some("" | "false" | "0") => false,
        Some("true" | "1") => true,
        Some(_) => return Err(invalid("raw", "raw must be true or false").into()),
    };
    let part = Part {
        pointer: reading.pointer.unwrap_or_default(),
        offset: number("offset", reading.offset.as_deref())?.unwrap_or(0),
        limit: number("limit", reading.limit.as_deref())?,
        grep: reading.grep.filter(|grep| !grep.is_empty()),
    };
    let piece = if raw {
        door.engine.read_raw(&caller, &id, part).await?
    } else {
        door.engine.read_result(&caller, &id, part).await?
    };
    Ok(Body(ReadBody::Piece(PieceBody::new(id.as_str(), piece))).into_response())
}

/// The result as a model is given it.
async fn given<'a>(
    door: &Door,
    caller: &Caller,
    id: &'a CallId,
    reading: &Reading,
    budget: u64,
) -> Result<GivenBody<'a>, Error> {
    let Reading { pointer, offset, limit, grep, raw, query, .. } = reading;
    let others =
        [("pointer", pointer), ("offset", offset), ("limit", limit), ("grep", grep), ("raw", raw)];
    let said = |value: &Option<String>| value.as_ref().is_some_and(|value| !value.is_empty());
    if let Some((field, _)) = others.into_iter().find(|(_, value)| said(value)) {
        let message = format!("{field} reads a part, budget_tokens the whole: give one of them");
        return Err(invalid(field, &message));
    }
    if !(1..=MAX_BUDGET).contains(&budget) {
        let message = format!("budget_tokens must be from 1 to {MAX_BUDGET}");
        return Err(invalid("budget_tokens", &message));
    }
    let hint = query.clone().filter(|query| !query.is_empty());
    let given = door.engine.given_result(caller, id, budget as usize, hint).await?;
    let tool_call_id = id.as_str();
    Ok(match given {
        Given::Whole { data, tokens } => GivenBody {
            tool_call_id,
            budget_tokens: budget,
            tokens,
            bytes: data.text().len(),
            digest: false,
            text: data.text().to_owned(),
        },
        Given::Digest(digest) => GivenBody {
            tool_call_id,
            budget_tokens: budget,
            tokens: digest.tokens,
            bytes: digest.whole_bytes,
            digest: true,
            text: digest.text,
        },
    })
}

/// A count as somebody wrote it; nothing written is nothing said.
fn number(field: &str, text: Option<&str>) -> Result<Option<u64>, Error> {
    let Some(text) = text.filter(|text| !text.is_empty()) else { return Ok(None) };
    let number = text.parse().map_err(|_| {
        let least = if field == "offset" { 0 } else { 1 };
        invalid(field, &format!("{field} must be a whole number from {least} up"))
    })?;
    Ok(Some(number))
}

fn invalid(field: &str, message: &str) -> Error {
    let problem = json!({ "pointer": format!("/{field}"), "message": message });
    Fault::new(Code::ValidationError, message)
        .with_detail(json!({ "field": field, "problems": [problem] }))
        .into()
}
