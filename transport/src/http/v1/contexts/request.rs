//! Request bodies of a run's context: tool definitions, calls and results, in Toolcrib's format or
//! in that of a model API. An entry that cannot be parsed is refused with the name of its field.

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use toolcrib::domain::fault::{Code, Error, Fault};
use toolcrib::domain::retry::ExecutionPolicyPatch;
use toolcrib::domain::tool::{Effect, Risk, ToolDefinition};
use toolcrib::runs::{ReportedCall, ReportedResult, RunToolSelection};
use toolcrib::{CallRequest, Executor, Json, model_formats};
use utoipa::ToSchema;

use super::super::super::wire::{parse_reported_fault, timeout_ms};

/// The tools that a run lists.
#[derive(Deserialize, ToSchema)]
pub(crate) struct DefinitionsBody {
    /// Tools that the caller executes itself: `{name, description?, schema?, output_schema?,
    /// async?, timeout_ms?, effect?, risk?}`, or in the format of OpenAI or Anthropic.
    #[serde(default)]
    #[schema(value_type = Vec<Object>)]
    tool_definitions: Vec<Json>,
    /// Names of Toolcrib's tools (default: all that the caller may call; `[]` = none).
    crib_tools: Option<Vec<String>>,
}

/// A tool that the caller executes, in any of the formats.
#[derive(Deserialize)]
struct CallerTool {
    name: String,
    #[serde(default)]
    description: Option<String>,
    #[serde(default, alias = "parameters", alias = "input_schema")]
    schema: Option<Json>,
    #[serde(default)]
    output_schema: Option<Json>,
    #[serde(default, rename = "async")]
    background: bool,
    #[serde(default, deserialize_with = "timeout_ms")]
    timeout_ms: Option<u64>,
    #[serde(default)]
    effect: Effect,
    #[serde(default, alias = "risk_level")]
    risk: Risk,
}

/// OpenAI's chat format, which nests the definition one level deeper.
#[derive(Deserialize)]
struct OpenAiToolWrapper {
    function: Option<Json>,
}

impl DefinitionsBody {
    pub(super) fn into_run_tools(
        self,
        project: &str,
        default_ms: u64,
    ) -> Result<RunToolSelection, Error> {
        let mut caller_tools = Vec::with_capacity(self.tool_definitions.len());
        for (n, entry) in self.tool_definitions.iter().enumerate() {
            let path = format!("tool_definitions/{n}");
            let wrapped: OpenAiToolWrapper = parse_entry(&path, entry)?;
            let tool: CallerTool = match wrapped.function {
                Some(function) => parse_entry(&format!("{path}/function"), &function)?,
                None => parse_entry(&path, entry)?,
            };
            caller_tools.push(tool.into_definition(project, default_ms));
        }
        Ok(RunToolSelection { caller_tools, toolcrib_tools: self.crib_tools })
    }
}

impl CallerTool {
    fn into_definition(self, project: &str, default_ms: u64) -> ToolDefinition {
        ToolDefinition {
            project: Some(project.to_owned()),
            name: self.name,
            description: self.description.unwrap_or_default(),
            executor: Executor::CALLER,
            input_schema: self.schema.unwrap_or_else(Json::empty_object),
            output_schema: self.output_schema,
            timeout_ms: self.timeout_ms.unwrap_or(default_ms),
            background: self.background,
            effect: self.effect,
            risk: self.risk,
            policy: ExecutionPolicyPatch::default(),
            fallback: Vec::new(),
            metadata: None,
            binding: None,
        }
    }
}

/// Calls that the caller executes itself.
#[derive(Deserialize, ToSchema)]
pub(crate) struct CallsBody {
    /// 1 to 128 calls: `{call_id?, name, args?, timeout_ms?, idempotency_key?, async?, result?}`,
    /// or in the format of OpenAI or Anthropic. `result` is `{ok?, data?, error?}`.
    #[schema(value_type = Vec<Object>)]
    tool_calls: Option<Json>,
}

/// Fields of an entry next to the call itself.
#[derive(Deserialize)]
struct CallEntryExtras {
    #[serde(default, rename = "async")]
    background: Option<bool>,
    #[serde(default)]
    result: Option<ReportedOutcome>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ReportedOutcome {
    ok: Option<bool>,
    data: Option<Json>,
    error: Option<Value>,
}

impl ReportedOutcome {
    fn into_result(self, path: &str) -> Result<Result<Json, Fault>, Error> {
        let error = self.error.filter(|error| !error.is_null());
        let field = match (self.ok, &self.data, &error) {
            (_, Some(_), Some(_)) => Some(("error", "is for a failure, and there is data")),
            (Some(true), _, Some(_)) => Some(("error", "is for a failure, and ok is true")),
            (Some(false), Some(_), _) => Some(("data", "is for a success, and ok is false")),
            _ => None,
        };
        if let Some((field, message)) = field {
            return Err(invalid_entry(&format!("{path}/{field}"), message));
        }
        let ok = self.ok.unwrap_or(error.is_none());
        Ok(match ok {
            true => Ok(self.data.unwrap_or_else(Json::null)),
            false => Err(parse_reported_fault(error.as_ref())),
        })
    }
}

impl CallsBody {
    pub(super) fn into_calls(
        self,
        run_id: &str,
        traceparent: Option<&str>,
    ) -> Result<Vec<ReportedCall>, Error> {
        let entries = required_list("tool_calls", self.tool_calls.as_ref())?;
        let mut calls = Vec::with_capacity(entries.len());
        for (n, entry) in entries.iter().enumerate() {
            let path = format!("tool_calls/{n}");
            let entry_call = model_formats::parse(entry).map_err(|misfit| {
                let message = format!("{path}: {}", misfit.fault.message);
                Error::from(Fault { message, ..*misfit.fault })
            })?;
            let extras: CallEntryExtras = parse_entry(&path, entry)?;
            let result =
                extras.result.map(|outcome| outcome.into_result(&format!("{path}/result")));
            let request = CallRequest {
                run_id: run_id.to_owned(),
                call_id: entry_call.id,
                timeout_ms: entry_call.timeout_ms,
                retry: entry_call.retry,
                idempotency_key: entry_call.idempotency_key,
                traceparent: traceparent.map(str::to_owned),
                ..CallRequest::of(entry_call.name, entry_call.args)
            };
            let result = result.transpose()?;
            calls.push(ReportedCall { request, background: extras.background, result });
        }
        Ok(calls)
    }
}

/// Results of calls that the caller executed itself.
#[derive(Deserialize, ToSchema)]
pub(crate) struct ResultsBody {
    /// 1 to 128 results: `{call_id or tool_call_id, ok?, data?, error?}`, or messages in the format
    /// of OpenAI (`role: "tool"`) or Anthropic (`type: "tool_result"`).
    #[schema(value_type = Vec<Object>)]
    tool_results: Option<Json>,
}

/// One result, in any of the formats.
#[derive(Deserialize)]
struct ResultEntry {
    call_id: Option<String>,
    /// Toolcrib's ticket; in OpenAI's messages, the model's id of the call.
    tool_call_id: Option<String>,
    /// Anthropic's id of the call.
    tool_use_id: Option<String>,
    ok: Option<bool>,
    data: Option<Json>,
    error: Option<Value>,
    /// The result in the formats of OpenAI's chat API and of Anthropic.
    content: Option<Json>,
    /// The result in the format of OpenAI's Responses API.
    output: Option<Json>,
    is_error: Option<bool>,
}

impl ResultsBody {
    pub(super) fn into_results(self) -> Result<Vec<ReportedResult>, Error> {
        let entries = required_list("tool_results", self.tool_results.as_ref())?;
        let entries = entries.iter().enumerate();
        entries
            .map(|(n, entry)| {
                let path = format!("tool_results/{n}");
                parse_entry::<ResultEntry>(&path, entry)?.into_result(&path)
            })
            .collect()
    }
}

impl ResultEntry {
    fn into_result(self, path: &str) -> Result<ReportedResult, Error> {
        let (tool_call_id, models) = match self.tool_call_id {
            Some(text) if text.starts_with(toolcrib::CallId::PREFIX) => {
                let message = "is not a ticket";
                let ticket = text.parse();
                let ticket =
                    ticket.map_err(|_| invalid_entry(&format!("{path}/tool_call_id"), message))?;
                (Some(ticket), None)
            }
            other => (None, other),
        };
        let call_id = self.call_id.or(models).or(self.tool_use_id);
        if tool_call_id.is_none() && call_id.is_none() {
            return Err(invalid_entry(&format!("{path}/call_id"), "is missing"));
        }
        let texts = [self.content, self.output].into_iter().flatten().collect::<Vec<_>>();
        if texts.len() + usize::from(self.data.is_some()) > 1 {
            return Err(invalid_entry(
                &format!("{path}/content"),
                "is given in addition to another result",
            ));
        }
        let text = texts.into_iter().next();
        let outcome = match (self.is_error, text) {
            (Some(true), text) => ReportedOutcome {
                ok: Some(false),
                data: self.data,
                error: text.map(|text| text.to_value()),
            },
            (_, text) => {
                ReportedOutcome { ok: self.ok, data: self.data.or(text), error: self.error }
            }
        };
        Ok(ReportedResult { tool_call_id, call_id, result: outcome.into_result(path)? })
    }
}

/// Returns the entries of a required list.
fn required_list(field: &str, list: Option<&Json>) -> Result<Vec<Json>, Error> {
    let list = list.ok_or_else(|| invalid_entry(field, "is missing"))?;
    list.items().ok_or_else(|| invalid_entry(field, "must be a list"))
}

/// Parses an entry as `T`; an error names the field that does not fit.
fn parse_entry<T: DeserializeOwned>(entry_path: &str, entry: &Json) -> Result<T, Error> {
    let mut text = serde_json::Deserializer::from_str(entry.text());
    serde_path_to_error::deserialize(&mut text).map_err(|error| {
        let path = error.path().to_string();
        let field = match path.as_str() {
            "." => entry_path.to_owned(),
            path => format!("{entry_path}/{}", path.replace('.', "/")),
        };
        let reason = toolcrib::domain::json::JsonError::from(error.into_inner()).reason;
        invalid_entry(&field, &reason)
    })
}

fn invalid_entry(field: &str, message: &str) -> Error {
    let fault =
        Fault::new(Code::ValidationError, format!("{field}: {message}")).without_side_effect();
    fault.with_detail(serde_json::json!({ "pointer": format!("/{field}") })).into()
}
