//! Reads results in slices, including the parts that a digest omits.

use axum::Json as Body;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use serde_json::json;
use toolcrib::domain::fault::{Code, Error, Fault};
use toolcrib::results::slice::{RowQuery, Slice, SliceContent, SliceQuery};
use toolcrib::runs::ResultForModel;
use toolcrib::{CallId, Caller, Json};
use utoipa::{IntoParams, ToSchema};

use super::super::HttpState;
use crate::http::extract::{AuthenticatedCaller, CallPath, QueryParams};
use crate::http::problem::{ApiError, ProblemDetails};

/// Upper limit of `budget_tokens`: more tokens than any model accepts.
const MAX_BUDGET_TOKENS: u64 = 1_000_000;

/// The slice to read. Numbers arrive as text and are parsed here, so that an error names the
/// parameter.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct ResultQuery {
    /// JSON pointer (RFC 6901) to the part to read, such as `/rows/10` (default: the whole result).
    pointer: Option<String>,
    /// Index of the first array item, object entry or text line to return; with `grep`, of the
    /// first match. Starts at 0.
    #[param(value_type = Option<u64>)]
    offset: Option<String>,
    /// Maximum number to return, 1 to 1000 (default: 100).
    #[param(value_type = Option<u64>, minimum = 1, maximum = 1000)]
    limit: Option<String>,
    /// A regular expression: return only matches, each with its pointer.
    grep: Option<String>,
    /// Conditions on the rows of the table at the pointer, or of the largest table inside it, as
    /// JSON: `{"status":"open","sum":{"gt":10}}`. Comparisons: `eq`, `ne`, `gt`, `gte`, `lt`, `lte`,
    /// `contains`.
    #[serde(rename = "where")]
    #[param(rename = "where")]
    conditions: Option<String>,
    /// Columns of the rows to return, separated by commas or as a JSON array.
    select: Option<String>,
    /// Figures over the rows in place of the rows: `sum:amount,count` or
    /// `[{"op":"sum","column":"amount"}]`; `count`, `sum`, `min`, `max`, `avg`.
    aggregate: Option<String>,
    /// Columns that group the figures, separated by commas or as a JSON array. The group with the
    /// greatest first figure comes first.
    group_by: Option<String>,
    /// `true`: read the output that the tool returned although it does not match the output schema.
    /// For operators.
    #[param(value_type = Option<bool>)]
    raw: Option<String>,
    /// Instead of a slice: return the result as a model sees it, in at most this many tokens. It is
    /// complete if it fits, otherwise a digest.
    #[param(value_type = Option<u64>, minimum = 1, maximum = 1_000_000)]
    budget_tokens: Option<String>,
    /// With `budget_tokens`: what the reader looks for, so that a digest includes it (default: the
    /// call's arguments).
    query: Option<String>,
}

/// A result as a model sees it.
#[derive(Serialize, ToSchema)]
#[schema(as = GivenBody)]
pub(super) struct ResultForModelBody<'a> {
    tool_call_id: &'a str,
    budget_tokens: u64,
    /// Number of tokens of `text` (`o200k_base`); never more than the budget.
    tokens: usize,
    /// Size of the whole result in bytes, as JSON.
    bytes: usize,
    /// True if the text is a digest that omits parts of the result.
    digest: bool,
    text: String,
}

/// A slice of a result, or a result as a model sees it.
#[derive(Serialize, ToSchema)]
#[serde(untagged)]
#[schema(as = ReadBody)]
pub(super) enum ResultReadBody<'a> {
    Slice(SliceBody<'a>),
    ForModel(ResultForModelBody<'a>),
}

/// A slice of a result.
#[derive(Serialize, ToSchema)]
#[schema(as = PieceBody)]
pub(super) struct SliceBody<'a> {
    tool_call_id: &'a str,
    pointer: String,
    /// Type of the value at the pointer: `array`, `object`, `text`, `number`, `boolean` or `null`.
    #[serde(rename = "type")]
    kind: &'static str,
    /// Size of that value in bytes, as JSON.
    bytes: usize,
    /// Number of its items, entries or lines; null for a scalar.
    total: Option<usize>,
    offset: usize,
    /// Number of items, entries, lines or matches returned here.
    shown: usize,
    /// Offset of the next slice; null at the end.
    next_offset: Option<usize>,
    /// True if less was returned than requested, to limit the size of the response.
    truncated: bool,
    /// The items, entries or lines as an array, an object or a text; or the scalar.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<serde_json::Value>)]
    value: Option<Json>,
    /// With `grep`: the matches.
    #[serde(skip_serializing_if = "Option::is_none")]
    matches: Option<Vec<MatchBody>>,
    /// With `grep`: the total number of matches; with a query over rows: of rows that meet `where`.
    #[serde(skip_serializing_if = "Option::is_none")]
    matched: Option<usize>,
    /// With `where` or `select`: the number of each returned row within the table.
    #[serde(skip_serializing_if = "Option::is_none")]
    row_numbers: Option<Vec<usize>>,
    /// The start of a single item or entry that is too long by itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    beginning: Option<String>,
    /// Pointer at which that item or entry can be read in slices.
    #[serde(skip_serializing_if = "Option::is_none")]
    next_pointer: Option<String>,
}

/// An item, entry or line that matches `grep`.
#[derive(Serialize, ToSchema)]
pub(super) struct MatchBody {
    pointer: String,
    /// Number of the line, if the match is in a text.
    #[serde(skip_serializing_if = "Option::is_none")]
    line: Option<usize>,
    /// The value there; for a long one, its start as text.
    #[schema(value_type = serde_json::Value)]
    value: Json,
    /// True if only the start is returned.
    cut: bool,
}

impl<'a> SliceBody<'a> {
    fn new(tool_call_id: &'a str, slice: Slice) -> Self {
        let mut body = Self {
            tool_call_id,
            pointer: slice.pointer,
            kind: slice.kind.as_str(),
            bytes: slice.bytes,
            total: slice.total,
            offset: slice.offset,
            shown: slice.shown,
            next_offset: slice.next_offset,
            truncated: slice.truncated,
            value: None,
            matches: None,
            matched: None,
            row_numbers: None,
            beginning: None,
            next_pointer: None,
        };
        match slice.content {
            SliceContent::Value(value) => body.value = Some(value),
            SliceContent::Matches { matches, matched } => {
                let bodies = matches.into_iter().map(|found| MatchBody {
                    pointer: found.pointer,
                    line: found.line,
                    value: found.value,
                    cut: found.is_truncated,
                });
                body.matches = Some(bodies.collect());
                body.matched = Some(matched);
            }
            SliceContent::Prefix { text, pointer } => {
                body.beginning = Some(text);
                body.next_pointer = Some(pointer);
            }
            SliceContent::Rows { value, row_numbers, matched } => {
                body.value = Some(value);
                body.row_numbers = Some(row_numbers).filter(|numbers| !numbers.is_empty());
                body.matched = Some(matched);
            }
        }
        body
    }
}

/// Reads a slice of a call's result.
#[utoipa::path(get, path = "/v1/tool_calls/{tool_call_id}/result", tag = "agents",
    params(("tool_call_id" = String, Path, description = "The ticket"), ResultQuery),
    responses((status = 200, body = ResultReadBody),
        (status = 403, description = "raw is for operators", body = ProblemDetails),
        (status = 404, description = "No such call, or nothing at the pointer", body = ProblemDetails),
        (status = 409, description = "It has not ended, or has no result", body = ProblemDetails),
        (status = 422, body = ProblemDetails)))]
pub(super) async fn read_result(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    CallPath(id): CallPath,
    QueryParams(reading): QueryParams<ResultQuery>,
) -> Result<Response, ApiError> {
    if let Some(budget) = parse_count("budget_tokens", reading.budget_tokens.as_deref())? {
        let rendered = result_for_model(&state, &caller, &id, &reading, budget).await?;
        return Ok(Body(ResultReadBody::ForModel(rendered)).into_response());
    }
    if reading.query.as_ref().is_some_and(|query| !query.is_empty()) {
        let message = "query goes with budget_tokens; to search a part, use grep";
        return Err(param_error("query", message).into());
    }
    let raw = match reading.raw.as_deref() {
        None | Some("" | "false" | "0") => false,
        Some("true" | "1") => true,
        Some(_) => return Err(param_error("raw", "raw must be true or false").into()),
    };
    let rows = RowQuery::parse_texts(
        reading.conditions.as_deref(),
        reading.select.as_deref(),
        reading.aggregate.as_deref(),
        reading.group_by.as_deref(),
    );
    let part = SliceQuery {
        rows: rows.map_err(Error::from)?,
        pointer: reading.pointer.unwrap_or_default(),
        offset: parse_count("offset", reading.offset.as_deref())?.unwrap_or(0),
        limit: parse_count("limit", reading.limit.as_deref())?,
        grep: reading.grep.filter(|grep| !grep.is_empty()),
    };
    let slice = if raw {
        state.engine.runs().results().read_raw_result(&caller, &id, part).await?
    } else {
        state.engine.runs().results().read_result(&caller, &id, part).await?
    };
    Ok(Body(ResultReadBody::Slice(SliceBody::new(id.as_str(), slice))).into_response())
}

/// Returns the result as a model sees it.
async fn result_for_model<'a>(
    state: &HttpState,
    caller: &Caller,
    id: &'a CallId,
    reading: &ResultQuery,
    budget: u64,
) -> Result<ResultForModelBody<'a>, Error> {
    let ResultQuery { pointer, offset, limit, grep, raw, query, .. } = reading;
    let slice_fields = [
        ("pointer", pointer),
        ("offset", offset),
        ("limit", limit),
        ("grep", grep),
        ("where", &reading.conditions),
        ("select", &reading.select),
        ("aggregate", &reading.aggregate),
        ("group_by", &reading.group_by),
        ("raw", raw),
    ];
    let is_set = |value: &Option<String>| value.as_ref().is_some_and(|value| !value.is_empty());
    if let Some((field, _)) = slice_fields.into_iter().find(|(_, value)| is_set(value)) {
        let message = format!("{field} reads a part, budget_tokens the whole: give one of them");
        return Err(param_error(field, &message));
    }
    if !(1..=MAX_BUDGET_TOKENS).contains(&budget) {
        let message = format!("budget_tokens must be from 1 to {MAX_BUDGET_TOKENS}");
        return Err(param_error("budget_tokens", &message));
    }
    let hint = query.clone().filter(|query| !query.is_empty());
    let rendered = state
        .engine
        .runs()
        .results()
        .render_result_for_model(caller, id, budget as usize, hint)
        .await?;
    let tool_call_id = id.as_str();
    Ok(match rendered {
        ResultForModel::Whole { data, tokens } => ResultForModelBody {
            tool_call_id,
            budget_tokens: budget,
            tokens,
            bytes: data.text().len(),
            digest: false,
            text: data.text().to_owned(),
        },
        ResultForModel::Text(text) => ResultForModelBody {
            tool_call_id,
            budget_tokens: budget,
            tokens: toolcrib::results::tokens::count(&text),
            bytes: text.len(),
            digest: false,
            text,
        },
        ResultForModel::Digest(digest) => ResultForModelBody {
            tool_call_id,
            budget_tokens: budget,
            tokens: digest.tokens,
            bytes: digest.whole_bytes,
            digest: true,
            text: digest.text,
        },
    })
}

/// Parses a count; an empty text counts as absent.
fn parse_count(field: &str, text: Option<&str>) -> Result<Option<u64>, Error> {
    let Some(text) = text.filter(|text| !text.is_empty()) else { return Ok(None) };
    let number = text.parse().map_err(|_| {
        let min = if field == "offset" { 0 } else { 1 };
        param_error(field, &format!("{field} must be a whole number from {min} up"))
    })?;
    Ok(Some(number))
}

fn param_error(field: &str, message: &str) -> Error {
    let problem = json!({ "pointer": format!("/{field}"), "message": message });
    Fault::new(Code::ValidationError, message)
        .with_detail(json!({ "field": field, "problems": [problem] }))
        .into()
}
