//! Reads slices of call results, for every caller that may read the call; and the tool
//! `result.read`, with which a model does the same.

use std::borrow::Cow;
use std::sync::{Arc, OnceLock, Weak};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::calls::Calls;
use crate::domain::call::{Call, Status};
use crate::domain::caller::{Caller, Role};
use crate::domain::fault::{Code, Error, Fault};
use crate::domain::id::CallId;
use crate::domain::json::{Json, decode_unicode_escapes};
use crate::domain::tool::{Effect, Risk};
use crate::ports::fn_tool::{FnTool, ToolContext};
use crate::registry::catalog::RESULT_READ;
use crate::registry::name_for_model;
use crate::results::slice::{
    self, Aggregate, AggregateOperation, RowQuery, Slice, SliceContent, SliceQuery,
};
use crate::results::{digest, mcp_content, tokens};
use crate::runs::Runs;

/// Maximum size of one slice.
const MAX_SLICE_BYTES: usize = 256 << 10;
/// Maximum size of a slice for [`RESULT_READ`], whose output goes to a model.
const MAX_TOOL_BYTES: usize = 16_000;
/// Maximum number of tokens in one output of [`RESULT_READ`].
const MAX_TOOL_TOKENS: usize = 4_000;
/// Results larger than this are read on a blocking thread.
const BLOCKING_READ_BYTES: usize = 64 << 10;

/// The results of calls, read in slices and rendered for models.
pub struct CallResults {
    pub(crate) calls: Arc<Calls>,
}

impl CallResults {
    /// Returns a slice of a call's result. Every caller that may read the call may read its result.
    pub async fn read_result(
        &self,
        caller: &Caller,
        id: &CallId,
        part: SliceQuery,
    ) -> Result<Slice, Error> {
        self.read_slice(caller, id, part, MAX_SLICE_BYTES).await
    }

    /// Returns a slice of a result that did not match the tool's output schema. For operators only:
    /// it was refused as a result, and an agent must not mistake it for one.
    pub async fn read_raw_result(
        &self,
        caller: &Caller,
        id: &CallId,
        part: SliceQuery,
    ) -> Result<Slice, Error> {
        if !caller.may_administer() {
            let role = caller.roles;
            let message = format!("raw values are for operators; this key has the role {role}");
            return Err(Error::refused(Code::PermissionDenied, message));
        }
        let call = self.calls.call(caller, id).await?;
        let outcome = require_outcome(&call)?;
        let raw = outcome.error.as_ref().and_then(|fault| fault.raw.clone());
        let Some(data) = raw.or_else(|| outcome.data.clone()) else {
            let message = format!("call \"{id}\" is {} and has no raw value", call.status.as_str());
            return Err(Error::refused(Code::NotFound, message));
        };
        Ok(read_slice(data, part, MAX_SLICE_BYTES).await?)
    }
}

impl CallResults {
    /// Renders a call's result for a model: the whole if it fits the budget, otherwise its digest.
    /// The `hint` tells the digest what is relevant; the default is the call's arguments.
    pub async fn render_result_for_model(
        &self,
        caller: &Caller,
        id: &CallId,
        budget_tokens: usize,
        hint: Option<String>,
    ) -> Result<ResultForModel, Error> {
        if budget_tokens == 0 {
            let message = "budget_tokens must be 1 or more";
            return Err(slice::invalid_field("budget_tokens", message.into()).into());
        }
        let call = self.calls.call(caller, id).await?;
        let data = require_data(&call)?;
        let large = data.text().len() > BLOCKING_READ_BYTES;
        let give = move || {
            let hint = hint.as_deref().unwrap_or(call.args.text());
            let (tool, reader) = (&name_for_model(&call.tool_name), &name_for_model(RESULT_READ));
            let source = digest::DigestSource { call_id: &call.id, tool, hint: Some(hint), reader };
            let whole = decode_escapes(&data);
            if !tokens::exceeds(whole.text(), budget_tokens) {
                return ResultForModel::Whole { tokens: tokens::count(whole.text()), data: whole };
            }
            let content = mcp_content::read_content(&data);
            if let Some(content) = content
                && !tokens::exceeds(&content.text, budget_tokens)
            {
                return ResultForModel::Text(content.text);
            }
            match digest::digest(&data, budget_tokens, &source) {
                Some(digest) => ResultForModel::Digest(digest),
                None => ResultForModel::Whole { tokens: tokens::count(whole.text()), data: whole },
            }
        };
        if !large {
            return Ok(give());
        }
        let giving = tokio::task::spawn_blocking(give).await;
        giving.map_err(|error| Error::Internal(Box::new(error)))
    }
}

/// Returns a document in which characters are written as themselves.
fn decode_escapes(data: &Json) -> Json {
    match decode_unicode_escapes(data.text()) {
        Cow::Owned(decoded) => Json::from_stored(&decoded).unwrap_or_else(|_| data.clone()),
        Cow::Borrowed(_) => data.clone(),
    }
}

/// A result as rendered for a model.
#[derive(Debug, Clone, PartialEq)]
pub enum ResultForModel {
    /// The result fits the budget.
    Whole {
        /// The complete result.
        data: Json,
        /// Number of tokens of the result.
        tokens: usize,
    },
    /// The texts of an MCP result, which fit the budget without its envelope and its media.
    Text(String),
    /// A shortened form: the whole result exceeds the budget.
    Digest(digest::Digest),
}

impl CallResults {
    async fn read_slice(
        &self,
        caller: &Caller,
        id: &CallId,
        part: SliceQuery,
        max_bytes: usize,
    ) -> Result<Slice, Error> {
        let call = self.calls.dispatcher.find_readable_call(caller, id).await?;
        let data = require_data(&call)?;
        Ok(read_slice(data, part, max_bytes).await?)
    }
}

/// Returns the outcome of a call, or a conflict if the call has not ended.
fn require_outcome(call: &Call) -> Result<&crate::domain::call::Outcome, Fault> {
    call.outcome.as_ref().ok_or_else(|| {
        let status = call.status.as_str();
        let message =
            format!("call \"{}\" is {status} and has no result yet; wait for its end", call.id);
        Fault::new(Code::Conflict, message)
            .with_detail(json!({ "status": status }))
            .retryable(true)
            .without_side_effect()
    })
}

/// Returns the result data of a call. If it has none, the fault states why.
fn require_data(call: &Call) -> Result<Json, Fault> {
    let outcome = require_outcome(call)?;
    if call.status == Status::Succeeded {
        return Ok(outcome.data.clone().unwrap_or_else(Json::null));
    }
    let status = call.status.as_str();
    let reason = outcome.error.as_ref().map(|fault| format!(": {fault}")).unwrap_or_default();
    let error = outcome.error.as_ref().map(|fault| {
        json!({
            "code": fault.code.as_str(),
            "message": fault.message,
            "detail": fault.detail,
            "retryable": fault.retryable,
        })
    });
    let message = format!("call \"{}\" is {status} and has no result{reason}", call.id);
    let detail = json!({ "status": status, "error": error });
    Err(Fault::new(Code::Conflict, message).with_detail(detail).without_side_effect())
}

/// Reads a slice: small results inline, large ones on a blocking thread.
async fn read_slice(data: Json, part: SliceQuery, max_bytes: usize) -> Result<Slice, Fault> {
    if data.text().len() <= BLOCKING_READ_BYTES {
        return slice::read_slice(&data, &part, max_bytes);
    }
    let reading = tokio::task::spawn_blocking(move || slice::read_slice(&data, &part, max_bytes));
    reading.await.unwrap_or_else(|_| Err(Fault::new(Code::Internal, "the result was not read")))
}

/// Reference to the engine for a tool that the engine owns. Weak, because a strong one would form a
/// cycle and leak both.
pub(crate) type RunsHandle = Arc<OnceLock<Weak<Runs>>>;

/// The slice to read.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Args")]
struct ResultReadArgs {
    /// The call whose result to read: tc_…
    tool_call_id: String,
    /// The part to read, as a JSON pointer such as /rows/10; default: the whole result
    #[serde(default)]
    pointer: Option<String>,
    /// The first item, entry or line (with grep: match) to return, from 0
    #[serde(default)]
    #[schemars(range(min = 0))]
    offset: Option<u64>,
    /// Maximum number of items, entries or lines to return; default 100
    #[serde(default)]
    #[schemars(range(min = 1, max = 1000))]
    limit: Option<u64>,
    /// A regular expression: returns only what matches it, with pointers
    #[serde(default)]
    #[schemars(length(max = 1000))]
    grep: Option<String>,
    /// Conditions on the rows of a table, array of objects or CSV: {"status": "open", "sum":
    /// {"gt": 10}}; comparisons: gt, gte, lt, lte, ne, contains
    #[serde(default, rename = "where")]
    conditions: Option<Map<String, Value>>,
    /// Columns of the rows to return
    #[serde(default)]
    select: Option<Vec<String>>,
    /// Figures over the rows in place of the rows
    #[serde(default)]
    aggregate: Option<Vec<AggregateArgs>>,
    /// Columns that group the figures; the group with the greatest first figure comes first
    #[serde(default)]
    group_by: Option<Vec<String>>,
}

/// One figure.
#[derive(Debug, Clone, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct AggregateArgs {
    op: AggregateWord,
    /// The column; count works without one
    #[serde(default)]
    column: Option<String>,
}

/// The operation of a figure.
#[derive(Debug, Clone, Copy, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
enum AggregateWord {
    Count,
    Sum,
    Min,
    Max,
    Avg,
}

impl From<AggregateWord> for AggregateOperation {
    fn from(word: AggregateWord) -> Self {
        match word {
            AggregateWord::Count => Self::Count,
            AggregateWord::Sum => Self::Sum,
            AggregateWord::Min => Self::Min,
            AggregateWord::Max => Self::Max,
            AggregateWord::Avg => Self::Avg,
        }
    }
}

impl ResultReadArgs {
    fn to_slice_query(&self) -> Result<SliceQuery, Fault> {
        let mut rows = RowQuery {
            select: self.select.clone().unwrap_or_default(),
            group_by: self.group_by.clone().unwrap_or_default(),
            ..RowQuery::default()
        };
        for AggregateArgs { op, column } in self.aggregate.iter().flatten().cloned() {
            rows.aggregates.push(Aggregate::new(op.into(), column)?);
        }
        if let Some(conditions) = &self.conditions {
            rows.add_conditions(conditions)?;
        }
        Ok(SliceQuery {
            pointer: self.pointer.clone().unwrap_or_default(),
            offset: self.offset.unwrap_or_default(),
            limit: self.limit,
            grep: self.grep.clone().filter(|grep| !grep.is_empty()),
            rows,
        })
    }
}

/// The slice that was read.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "Answer")]
struct ResultReadOutput {
    pointer: String,
    /// Type of the value at the pointer: array, object, text, number, boolean or null
    #[serde(rename = "type")]
    kind: &'static str,
    bytes: usize,
    /// Total number of items, entries or lines
    total: Option<usize>,
    offset: usize,
    shown: usize,
    /// The offset to continue from, if there is more
    next_offset: Option<usize>,
    /// True if less was returned than requested, because of the size limit
    truncated: bool,
    /// The items, entries or lines
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<Value>")]
    value: Option<Json>,
    /// With grep: the matches
    #[serde(skip_serializing_if = "Option::is_none")]
    matches: Option<Vec<ResultReadMatch>>,
    /// With grep or where: total number of matches
    #[serde(skip_serializing_if = "Option::is_none")]
    matched: Option<usize>,
    /// With where or select: the number of each row, for a pointer such as /rows/10
    #[serde(skip_serializing_if = "Option::is_none")]
    row_numbers: Option<Vec<usize>>,
    /// The first part of a value that is too long by itself; read it at next_pointer
    #[serde(skip_serializing_if = "Option::is_none")]
    beginning: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    next_pointer: Option<String>,
}

#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "MatchAnswer")]
struct ResultReadMatch {
    pointer: String,
    /// Line number of the match within the text at the pointer
    #[serde(skip_serializing_if = "Option::is_none")]
    line: Option<usize>,
    #[schemars(with = "Value")]
    value: Json,
    /// True if only the first part of the value is returned
    #[serde(skip_serializing_if = "Option::is_none")]
    cut: Option<bool>,
}

impl From<Slice> for ResultReadOutput {
    fn from(slice: Slice) -> Self {
        let mut answer = Self {
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
            SliceContent::Value(value) => answer.value = Some(value),
            SliceContent::Matches { matches, matched } => {
                let outputs = matches.into_iter().map(|found| ResultReadMatch {
                    pointer: found.pointer,
                    line: found.line,
                    value: found.value,
                    cut: found.is_truncated.then_some(true),
                });
                answer.matches = Some(outputs.collect());
                answer.matched = Some(matched);
            }
            SliceContent::Prefix { text, pointer } => {
                answer.beginning = Some(text);
                answer.next_pointer = Some(pointer);
            }
            SliceContent::Rows { value, row_numbers, matched } => {
                answer.value = Some(value);
                answer.row_numbers = Some(row_numbers).filter(|numbers| !numbers.is_empty());
                answer.matched = Some(matched);
            }
        }
        answer
    }
}

/// Builds the tool `result.read` of the engine that the handle will refer to.
pub(crate) fn result_read_tool(handle: RunsHandle) -> FnTool {
    let description = "Reads a part of the result of an earlier tool call that a digest omits. \
                       Name the part with pointer (/rows/10), page with offset and limit, or \
                       search with grep (a regular expression). For tables, arrays of objects \
                       and CSV: filter rows with where, choose columns with select, compute \
                       with aggregate and group_by instead of reading all rows.";
    let function = move |args: ResultReadArgs, context: ToolContext| {
        let runs = handle.get().and_then(Weak::upgrade);
        async move {
            let stopped = || Fault::new(Code::Overloaded, "the engine is being shut down");
            execute_result_read(&runs.ok_or_else(stopped)?, args, &context).await
        }
    };
    FnTool::with_context(RESULT_READ, description, function)
        .effect(Effect::Read)
        .risk(Risk::Low)
        .timeout_ms(10_000)
}

async fn execute_result_read(
    runs: &Arc<Runs>,
    args: ResultReadArgs,
    context: &ToolContext,
) -> Result<ResultReadOutput, Fault> {
    let no_such = || {
        let excerpt: String = args.tool_call_id.chars().take(80).collect();
        Fault::new(Code::NotFound, format!("tool_call_id: there is no call \"{excerpt}\""))
    };
    let id: CallId = args.tool_call_id.parse().map_err(|_| no_such())?;
    // The tool has the rights of the agent that made the call, and never more than an agent's.
    let (project, agent) = (&context.project, &context.agent);
    let caller = Caller {
        attributes: context.attributes.clone(),
        ..Caller::new(project, agent, Role::Agent, context.auth_method)
    };
    let part = args.to_slice_query()?;
    let mut max_bytes = MAX_TOOL_BYTES;
    loop {
        let slice = runs.results.read_slice(&caller, &id, part.clone(), max_bytes).await;
        let slice = slice.map_err(|error| match error {
            Error::Refused { fault, .. } => fault,
            Error::Internal(_) => Fault::new(Code::Internal, "the result cannot be read"),
        })?;
        let answer = ResultReadOutput::from(slice);
        let text = serde_json::to_string(&answer).unwrap_or_default();
        if max_bytes < 500 || !tokens::exceeds(&text, MAX_TOOL_TOKENS) {
            return Ok(answer);
        }
        max_bytes /= 2;
    }
}
