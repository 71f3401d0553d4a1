//! Reading results: any part of what a call gave, for whoever may read the call; and the tool
//! `result.read`, by which a model does the same.

use std::sync::{Arc, OnceLock, Weak};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::{Engine, Inner};
use crate::call::{Call, Status};
use crate::caller::{Caller, Role, Trust};
use crate::fault::{Code, Error, Fault};
use crate::function::{FnTool, ToolContext};
use crate::id::CallId;
use crate::json::Json;
use crate::piece::{self, Content, Part, Piece};
use crate::tool::{Effect, Risk};
use crate::{digest, tokens};

/// The name of the tool that reads results.
pub const RESULT_READ: &str = "result.read";

/// The most bytes of a result that are given at once.
const MOST_BYTES: usize = 256 << 10;
/// A tool's answer goes to a model, so it is shorter.
const TOOL_BYTES: usize = 16_000;
/// The most tokens of one answer of [`RESULT_READ`].
const TOOL_TOKENS: usize = 4_000;
/// Going through more than this is not done between other work.
const LARGE: usize = 64 << 10;

impl Engine {
    /// A part of a call's result. Whoever may read the call may read its result.
    pub async fn read_result(
        &self,
        caller: &Caller,
        id: &CallId,
        part: Part,
    ) -> Result<Piece, Error> {
        self.inner.read_result(caller, id, part, MOST_BYTES).await
    }

    /// A part of what a tool gave that did not fit its output schema. For who operates the crib:
    /// it was refused as a result, and an agent must not take it for one.
    pub async fn read_raw(&self, caller: &Caller, id: &CallId, part: Part) -> Result<Piece, Error> {
        if !caller.may_administer() {
            let role = caller.role.as_str();
            let message = format!("raw values are for operators; this key has the role {role}");
            return Err(Error::refused(Code::PermissionDenied, message));
        }
        let call = self.call(caller, id).await?;
        let outcome = ended(&call)?;
        let raw = outcome.error.as_ref().and_then(|fault| fault.raw.clone());
        let Some(data) = raw.or_else(|| outcome.data.clone()) else {
            let message = format!("call \"{id}\" is {} and has no raw value", call.status.as_str());
            return Err(Error::refused(Code::NotFound, message));
        };
        Ok(read(data, part, MOST_BYTES).await?)
    }
}

impl Engine {
    /// A call's result as a model is given it: whole where it is within the budget, else its
    /// digest. What the call was asked with says what is relevant, unless something better is
    /// given.
    pub async fn given_result(
        &self,
        caller: &Caller,
        id: &CallId,
        budget_tokens: usize,
        hint: Option<String>,
    ) -> Result<Given, Error> {
        if budget_tokens == 0 {
            let message = "budget_tokens must be 1 or more";
            return Err(piece::invalid("budget_tokens", message.into()).into());
        }
        let call = self.call(caller, id).await?;
        let data = data(&call)?;
        let large = data.text().len() > LARGE;
        let give = move || {
            let hint = hint.as_deref().unwrap_or(call.args.text());
            let (call_id, tool) = (&call.id, call.tool_name.as_str());
            let source = digest::Source { call_id, tool, hint: Some(hint) };
            match digest::digest(&data, budget_tokens, &source) {
                Some(digest) => Given::Digest(digest),
                None => Given::Whole { tokens: tokens::count(data.text()), data },
            }
        };
        if !large {
            return Ok(give());
        }
        let giving = tokio::task::spawn_blocking(give).await;
        giving.map_err(|error| Error::Internal(Box::new(error)))
    }
}

/// A result as a model is given it.
#[derive(Debug, Clone, PartialEq)]
pub enum Given {
    /// It is within the budget.
    Whole {
        data: Json,
        tokens: usize,
    },
    Digest(digest::Digest),
}

impl Inner {
    async fn read_result(
        &self,
        caller: &Caller,
        id: &CallId,
        part: Part,
        most_bytes: usize,
    ) -> Result<Piece, Error> {
        let call = self.own_call(caller, id).await?;
        let data = data(&call)?;
        Ok(read(data, part, most_bytes).await?)
    }
}

/// How a call ended; one that has not is a conflict.
fn ended(call: &Call) -> Result<&crate::call::Outcome, Fault> {
    call.outcome.as_ref().ok_or_else(|| {
        let status = call.status.as_str();
        let message =
            format!("call \"{}\" is {status} and has no result yet; wait for its end", call.id);
        Fault::new(Code::Conflict, message)
            .with_detail(json!({ "status": status }))
            .retryable(true)
            .not_happened()
    })
}

/// What a call gave; one that gave nothing says why.
fn data(call: &Call) -> Result<Json, Fault> {
    let outcome = ended(call)?;
    if call.status == Status::Succeeded {
        return Ok(outcome.data.clone().unwrap_or_else(Json::null));
    }
    let status = call.status.as_str();
    let why = outcome.error.as_ref().map(|fault| format!(": {fault}")).unwrap_or_default();
    let error = outcome.error.as_ref().map(|fault| {
        json!({
            "code": fault.code.as_str(),
            "message": fault.message,
            "detail": fault.detail,
            "retryable": fault.retryable,
        })
    });
    let message = format!("call \"{}\" is {status} and has no result{why}", call.id);
    let detail = json!({ "status": status, "error": error });
    Err(Fault::new(Code::Conflict, message).with_detail(detail).not_happened())
}

/// Reads here what is short, and elsewhere what would hold up others.
async fn read(data: Json, part: Part, most_bytes: usize) -> Result<Piece, Fault> {
    if data.text().len() <= LARGE {
        return piece::read(&data, &part, most_bytes);
    }
    let reading = tokio::task::spawn_blocking(move || piece::read(&data, &part, most_bytes));
    reading.await.unwrap_or_else(|_| Err(Fault::new(Code::Internal, "the result was not read")))
}

/// The engine, for a tool that is a part of it. Weak, or neither could ever be let go.
pub(super) type Handle = Arc<OnceLock<Weak<Inner>>>;

/// What to read.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Args {
    /// The call whose result to read: tc_…
    tool_call_id: String,
    /// Which part, as a JSON pointer such as /rows/10; the whole unless given
    #[serde(default)]
    pointer: Option<String>,
    /// The first item, entry or line (with grep: match) to give, from 0
    #[serde(default)]
    #[schemars(range(min = 0))]
    offset: Option<u64>,
    /// How many items, entries or lines to give; 100 unless given
    #[serde(default)]
    #[schemars(range(min = 1, max = 1000))]
    limit: Option<u64>,
    /// A regular expression: gives only what fits it, with pointers
    #[serde(default)]
    #[schemars(length(max = 1000))]
    grep: Option<String>,
}

/// What was read.
#[derive(Debug, Serialize, JsonSchema)]
struct Answer {
    pointer: String,
    /// What is there: array, object, text, number, boolean or null
    #[serde(rename = "type")]
    kind: &'static str,
    bytes: usize,
    /// How many items, entries or lines there are
    total: Option<usize>,
    offset: usize,
    shown: usize,
    /// Where to go on, if there is more
    next_offset: Option<usize>,
    /// Less was given than asked for, because it would have been too much at once
    truncated: bool,
    /// The items, entries or lines
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<Value>")]
    value: Option<Json>,
    /// With grep: what fits
    #[serde(skip_serializing_if = "Option::is_none")]
    matches: Option<Vec<MatchAnswer>>,
    /// With grep: how many fit altogether
    #[serde(skip_serializing_if = "Option::is_none")]
    matched: Option<usize>,
    /// The beginning of one that is too long by itself; read it at next_pointer
    #[serde(skip_serializing_if = "Option::is_none")]
    beginning: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    next_pointer: Option<String>,
}

#[derive(Debug, Serialize, JsonSchema)]
struct MatchAnswer {
    pointer: String,
    /// Which line of the text there
    #[serde(skip_serializing_if = "Option::is_none")]
    line: Option<usize>,
    #[schemars(with = "Value")]
    value: Json,
    /// Only the beginning is given here
    #[serde(skip_serializing_if = "Option::is_none")]
    cut: Option<bool>,
}

impl From<Piece> for Answer {
    fn from(piece: Piece) -> Self {
        let mut answer = Self {
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
            Content::Value(value) => answer.value = Some(value),
            Content::Matches { matches, matched } => {
                let given = matches.into_iter().map(|found| MatchAnswer {
                    pointer: found.pointer,
                    line: found.line,
                    value: found.value,
                    cut: found.cut.then_some(true),
                });
                answer.matches = Some(given.collect());
                answer.matched = Some(matched);
            }
            Content::Beginning { text, pointer } => {
                answer.beginning = Some(text);
                answer.next_pointer = Some(pointer);
            }
        }
        answer
    }
}

/// The tool `result.read` of the engine that the handle will name.
pub(super) fn tool(handle: Handle) -> FnTool {
    let description = "Reads a part of the result of an earlier tool call: what a digest left \
         out. Name the part with pointer (/rows/10), page with offset and limit, or search with \
         grep (a regular expression).";
    let function = move |args: Args, context: ToolContext| {
        let engine = handle.get().and_then(Weak::upgrade);
        async move {
            let stopped = || Fault::new(Code::Overloaded, "the engine is being shut down");
            answer(&*engine.ok_or_else(stopped)?, args, &context).await
        }
    };
    FnTool::with_context(RESULT_READ, description, function)
        .effect(Effect::Read)
        .risk(Risk::Low)
        .timeout_ms(10_000)
}

async fn answer(engine: &Inner, args: Args, context: &ToolContext) -> Result<Answer, Fault> {
    let no_such = || {
        let given: String = args.tool_call_id.chars().take(80).collect();
        Fault::new(Code::NotFound, format!("tool_call_id: there is no call \"{given}\""))
    };
    let id: CallId = args.tool_call_id.parse().map_err(|_| no_such())?;
    // It may read what whoever made this call may read; never more than an agent.
    let caller = Caller {
        project: context.project.clone(),
        agent: context.agent.clone(),
        role: Role::Agent,
        trust: Trust::Key,
    };
    let mut most_bytes = TOOL_BYTES;
    loop {
        let part = Part {
            pointer: args.pointer.clone().unwrap_or_default(),
            offset: args.offset.unwrap_or_default(),
            limit: args.limit,
            grep: args.grep.clone().filter(|grep| !grep.is_empty()),
        };
        let piece = engine.read_result(&caller, &id, part, most_bytes).await;
        let piece = piece.map_err(|error| match error {
            Error::Refused { fault, .. } => fault,
            Error::Internal(_) => Fault::new(Code::Internal, "the result cannot be read"),
        })?;
        let answer = Answer::from(piece);
        let text = serde_json::to_string(&answer).unwrap_or_default();
        if most_bytes < 500 || !tokens::exceeds(&text, TOOL_TOKENS) {
            return Ok(answer);
        }
        most_bytes /= 2;
    }
}
