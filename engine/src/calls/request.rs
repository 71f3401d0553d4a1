//! A request to run a tool, and its validation before anything is stored. `validate_request` checks
//! sizes, ranges and names; `prepare_arguments` applies the argument rules of the tool's definition
//! and the defaults of its schema, and checks the result against the schema.

use std::borrow::Cow;
use std::sync::Arc;

use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

use crate::calls::Dispatcher;
use crate::domain::call::{Call, elicitation};
use crate::domain::caller::Caller;
use crate::domain::fault::{Code, Error, Fault};
use crate::domain::id::hex;
use crate::domain::json::{DuplicateKey, Json, JsonError, find_lossy_integer};
use crate::domain::retry::{MAX_RETRIES_LIMIT, TIMEOUT_MS_RANGE};
use crate::domain::tool::args::{AppliedArguments, TemplateVars};
use crate::domain::tool::{Executor, SourceTraits};
use crate::domain::utp::Route;
use crate::ports::core::Core;
use crate::ports::store::IdempotencyKey;
use crate::registry::catalog::{Catalog, CatalogEntry, tool_not_found};
use crate::schema::SchemaProblem;

/// Maximum length of a callback URL, in bytes.
const MAX_URL_BYTES: usize = 2_048;

/// A request to run one tool.
#[derive(Debug, Clone)]
pub struct CallRequest {
    /// Name of the tool.
    pub tool: String,
    /// Arguments as sent by the caller, before the tool's argument rules are applied.
    pub args: Json,
    /// Id of the run that the call belongs to, 1 to 255 bytes. Default: `run_default`.
    pub run_id: String,
    /// The caller's own id for this call.
    pub call_id: Option<String>,
    /// Time limit in milliseconds for all attempts together, up to 24 h. Default: the tool's.
    pub timeout_ms: Option<u64>,
    /// Upper limit of the time limit, in milliseconds, whatever sets it. Not part of the request: a
    /// repeated one may have another.
    pub max_timeout_ms: Option<u64>,
    /// Time limit in milliseconds of each attempt. Default: the policy's, else an equal part of the
    /// remaining time for each attempt that may follow.
    pub attempt_timeout_ms: Option<u64>,
    /// Time in milliseconds that the call waits for answers to its tool's elicitation; it does not
    /// count against `timeout_ms`. Default: the policy's, one hour.
    pub input_timeout_ms: Option<u64>,
    /// Maximum number of attempts after the first. Default: the policy's.
    pub retry: Option<u32>,
    /// Key under which the same agent's repeated request returns the first call.
    pub idempotency_key: Option<String>,
    /// The only client that may execute the call.
    pub client_id: Option<String>,
    /// A label. Never used for decisions.
    pub user_id: Option<String>,
    /// Trace context of the request, a W3C `traceparent`.
    pub traceparent: Option<String>,
    /// Answers to the tool's elicitation, if the caller knows them in advance.
    pub answers: Option<Map<String, Value>>,
    /// The UTP turn that the call is made in.
    pub route: Option<Box<Route>>,
    /// Number of agents above the caller in a chain of agents. A route has its own.
    pub depth: u32,
    /// URL that receives a webhook when the call has ended.
    pub callback_url: Option<String>,
    /// True to join an earlier identical call whose answer was not delivered, and to let a later
    /// request join this call. The ticket then has a delivery ([`Ticket::delivery`]), which the
    /// requester must mark when it has the answer. Has no effect with an idempotency key, or if the
    /// tool only reads. Default: false.
    ///
    /// [`Ticket::delivery`]: crate::calls::Ticket::delivery
    pub rejoin: bool,
    /// False: the call never joins an equal one that waits for its approval. It does not either if
    /// the key or the tool turns rejoin off. Default: true.
    pub joins_waiting: bool,
    /// Metadata of the request for the tool's executor, an object: MCP's `_meta`. Never used for
    /// decisions.
    pub meta: Option<Json>,
}

impl CallRequest {
    /// Builds a request from arguments as JSON text.
    pub fn new(tool: impl Into<String>, args: &str) -> Result<Self, JsonError> {
        Ok(Self::of(tool, Json::parse(args)?))
    }

    /// Builds a request from parsed arguments.
    pub fn of(tool: impl Into<String>, args: Json) -> Self {
        Self {
            tool: tool.into(),
            args,
            run_id: "run_default".to_owned(),
            call_id: None,
            timeout_ms: None,
            max_timeout_ms: None,
            attempt_timeout_ms: None,
            input_timeout_ms: None,
            retry: None,
            idempotency_key: None,
            client_id: None,
            user_id: None,
            traceparent: None,
            route: None,
            depth: 0,
            callback_url: None,
            answers: None,
            rejoin: false,
            joins_waiting: true,
            meta: None,
        }
    }
}

/// Sets the arguments to execute: those of the caller after the definition's argument rules, with
/// the defaults of the schema. An argument that the definition takes from the environment is
/// removed from the caller's arguments before they are stored.
///
/// # Errors
///
/// The arguments to execute do not match the schema, or are too large.
pub(crate) fn prepare_arguments(
    tool: &CatalogEntry,
    input: &Value,
    call: &mut Call,
    max_args_bytes: usize,
) -> Result<(), Error> {
    let Some(rules) = &tool.rules else {
        let given = ExecutedArguments { args: call.args.clone(), value: Cow::Borrowed(input) };
        call.target.args = fit_to_schema(tool, given, &[], max_args_bytes)?;
        return Ok(());
    };
    let applied = rules.apply(input, &TemplateVars::for_call(call));
    call.target.args = fit_applied_arguments(tool, &applied, max_args_bytes)?;
    if !applied.overridden_by_env.is_empty() {
        let names = applied.overridden_by_env.join(", ");
        tracing::warn!(tool = call.tool_name, args = names, "dropped: set from the environment");
        let mut recorded = input.clone();
        if let Value::Object(recorded) = &mut recorded {
            recorded.retain(|name, _| !applied.overridden_by_env.contains(name));
        }
        call.args = Json::from_value(&recorded);
    }
    Ok(())
}

/// Returns the arguments to execute from those to which a definition's rules were applied.
pub(crate) fn fit_applied_arguments(
    tool: &CatalogEntry,
    applied: &AppliedArguments,
    max_args_bytes: usize,
) -> Result<Json, Error> {
    let (args, value) = (Json::from_value(&applied.args), Cow::Borrowed(&applied.args));
    let from_rules: Vec<&str> =
        applied.fixed.iter().chain(&applied.defaults).map(String::as_str).collect();
    fit_to_schema(tool, ExecutedArguments { args, value }, &from_rules, max_args_bytes)
}

/// Arguments to execute, as JSON text and as a value.
pub(crate) struct ExecutedArguments<'a> {
    pub(crate) args: Json,
    pub(crate) value: Cow<'a, Value>,
}

/// Returns the arguments with the schema's defaults, if they match the schema. `from_rules` names
/// those that the definition's argument rules supplied: a schema that forbids unlisted properties
/// does not refuse them.
pub(crate) fn fit_to_schema(
    tool: &CatalogEntry,
    given: ExecutedArguments<'_>,
    from_rules: &[&str],
    max_args_bytes: usize,
) -> Result<Json, Error> {
    let name = &tool.definition.name;
    let filled = tool.input_schema.with_defaults(&given.args, max_args_bytes).map_err(|_| {
        let message = format!(
            "args of {name} with the defaults of its schema are over the limit of \
             {max_args_bytes} bytes"
        );
        Error::refused(Code::PayloadTooLarge, message)
    })?;
    let filled_value = filled.as_ref().map(Json::to_value);
    let value = filled_value.as_ref().unwrap_or(&given.value);
    let problems = find_problems(tool, value, from_rules);
    if problems.is_empty() {
        return Ok(filled.unwrap_or(given.args));
    }
    // A default that the schema itself refuses must not make every call of the tool fail.
    if filled.is_some() && find_problems(tool, &given.value, from_rules).is_empty() {
        tracing::warn!(tool = name, "defaults not applied: they do not match the tool's schema");
        return Ok(given.args);
    }
    let summary = format!("the arguments of {name} do not fit its schema");
    Err(schema_fault(&summary, &problems).without_side_effect().into())
}

/// Returns the problems of the arguments. If there are any, checks again without the arguments that
/// come from the definition's rules and that the schema does not list.
fn find_problems(tool: &CatalogEntry, args: &Value, from_rules: &[&str]) -> Vec<SchemaProblem> {
    let problems = tool.input_schema.problems(args);
    let is_extra =
        |name: &str| from_rules.contains(&name) && !tool.input_schema.lists_property(name);
    if problems.is_empty() || !from_rules.iter().any(|name| is_extra(name)) {
        return problems;
    }
    let mut without_extras = args.clone();
    if let Value::Object(members) = &mut without_extras {
        members.retain(|name, _| !is_extra(name));
    }
    tool.input_schema.problems(&without_extras)
}

/// Reads the arguments. A key that an object has twice is refused: the schema would see one of its
/// values, and the executor might see the other.
pub(crate) fn parse_unique_args(tool: &str, args: &Json) -> Result<Value, Error> {
    args.to_value_with_unique_keys().map_err(|duplicate| duplicate_key_error(tool, duplicate))
}

/// Returns the error for arguments that repeat a key.
pub fn duplicate_key_error(tool: &str, duplicate: DuplicateKey) -> Error {
    let DuplicateKey { key, pointer } = duplicate;
    let problem = SchemaProblem {
        expected: "each key once".to_owned(),
        given: format!("the key \"{key}\" twice"),
        message: format!("{pointer}: the key \"{key}\" is given twice; give each key once"),
        pointer,
    };
    let summary = format!("the arguments of {tool} are ambiguous");
    schema_fault(&summary, &[problem]).without_side_effect().into()
}

/// Rejects numbers that lose precision. HTTP requests and UTP cards are written from parsed JSON,
/// so a number of more than 64 bits would arrive as a different one.
fn check_number_precision(
    tool: &CatalogEntry,
    traits: SourceTraits,
    args: &Json,
) -> Result<(), Error> {
    if traits.exact_numbers {
        return Ok(());
    }
    let Some(number) = find_lossy_integer(args.text()) else { return Ok(()) };
    let excerpt: String = number.chars().take(80).collect();
    let name = &tool.definition.name;
    let message = format!(
        "{excerpt} has more than 64 bits: {name} would get another number; give it as a text"
    );
    Err(Fault::new(Code::ValidationError, message).without_side_effect().into())
}

/// Refuses retries of a tool whose source does not retry ([`SourceTraits::retries`]).
fn check_retry(tool: &CatalogEntry, traits: SourceTraits, retry: Option<u32>) -> Result<(), Error> {
    if traits.retries || retry.is_none_or(|retry| retry == 0) {
        return Ok(());
    }
    let name = &tool.definition.name;
    let reason = match tool.definition.executor {
        Executor::UTP => "a tool service answers a repeated command with its first result",
        _ => "an agent may have done a part of its work when it fails",
    };
    let message = format!(
        "retry must be 0 for {name}: {reason}, so Toolcrib does not retry it; omit retry, or make a \
         new call"
    );
    let fault = Fault::new(Code::ValidationError, message).without_side_effect();
    Err(fault.with_detail(json!({ "pointer": "/retry" })).into())
}

/// Checks that the client that a call is pinned to offers the tool.
fn check_pinned_client(
    catalog: &Catalog,
    caller: &Caller,
    tool: &CatalogEntry,
    client_id: Option<&str>,
) -> Result<(), Error> {
    let Some(client_id) = client_id else { return Ok(()) };
    if can_execute(catalog, &caller.project, tool, Some(client_id)) {
        return Ok(());
    }
    let message = format!("client \"{client_id}\" does not offer \"{}\"", tool.definition.name);
    let fault = Fault::new(Code::ValidationError, message).without_side_effect();
    Err(fault.with_detail(json!({ "pointer": "/client_id" })).into())
}

/// Returns true if the call is not pinned to a client, or that client offers this tool.
pub(crate) fn can_execute(
    catalog: &Catalog,
    project: &str,
    tool: &CatalogEntry,
    client_id: Option<&str>,
) -> bool {
    let offered_by = || catalog.offered_by(project, &tool.definition.name);
    client_id.is_none_or(|client_id| offered_by().iter().any(|id| id == client_id))
}

/// Returns the tool if it exists and the request is valid for it. `prepare_arguments` checks
/// the arguments against the schema.
pub(crate) fn validate_request(
    dispatcher: &Dispatcher,
    catalog: &Catalog,
    caller: &Caller,
    found: Option<Arc<CatalogEntry>>,
    request: &mut CallRequest,
) -> Result<Arc<CatalogEntry>, Error> {
    let tool = found.ok_or_else(|| tool_not_found(catalog, caller, &request.tool))?;
    check_request(request, dispatcher.core.limits.max_args_bytes)?;
    let traits = dispatcher.targets.source_traits(tool.definition.executor);
    check_number_precision(&tool, traits, &request.args)?;
    check_retry(&tool, traits, request.retry)?;
    check_pinned_client(catalog, caller, &tool, request.client_id.as_deref())?;
    if let Some(url) = &request.callback_url {
        request.callback_url = Some(check_callback_url(&dispatcher.core, caller, url)?);
    }
    Ok(tool)
}

/// Checks the sizes, ranges and labels of a request.
pub(crate) fn check_request(request: &CallRequest, max_args_bytes: usize) -> Result<(), Error> {
    let invalid = |message: String| {
        let fault = Fault::new(Code::ValidationError, message).without_side_effect();
        Err(Error::from(fault))
    };
    if request.args.text().len() > max_args_bytes {
        let message = format!("args are over the limit of {max_args_bytes} bytes");
        return Err(Error::refused(Code::PayloadTooLarge, message));
    }
    request.answers.as_ref().map_or(Ok(()), elicitation::check_answers_size)?;
    let timeouts = [
        ("timeout_ms", request.timeout_ms),
        ("attempt_timeout_ms", request.attempt_timeout_ms),
        ("input_timeout_ms", request.input_timeout_ms),
    ];
    for (field, timeout_ms) in timeouts {
        if timeout_ms.is_some_and(|timeout_ms| !TIMEOUT_MS_RANGE.contains(&timeout_ms)) {
            return invalid(format!("{field} must be from 1 to 86400000 (24 h)"));
        }
    }
    if request.retry.is_some_and(|retry| retry > MAX_RETRIES_LIMIT) {
        return invalid(format!("retry must be from 0 to {MAX_RETRIES_LIMIT}"));
    }
    let labels = [
        ("run_id", Some(&request.run_id)),
        ("call_id", request.call_id.as_ref()),
        ("client_id", request.client_id.as_ref()),
        ("user_id", request.user_id.as_ref()),
        ("idempotency_key", request.idempotency_key.as_ref()),
    ];
    for (field, label) in labels {
        let Some(label) = label else { continue };
        check_label(field, label)?;
    }
    Ok(())
}

/// Checks an id or a label that the caller chose.
pub(crate) fn check_label(field: &str, label: &str) -> Result<(), Error> {
    if label.is_empty() || label.len() > 255 || label.chars().any(char::is_control) {
        let message = format!("{field} must be 1 to 255 bytes without control characters");
        return Err(Fault::new(Code::ValidationError, message).without_side_effect().into());
    }
    Ok(())
}

/// Builds a fault that lists every problem.
pub(crate) fn schema_fault(summary: &str, problems: &[SchemaProblem]) -> Fault {
    let listed: Vec<&str> = problems.iter().map(|problem| problem.message.as_str()).collect();
    let message = format!("{summary}: {}", listed.join("; "));
    Fault::new(Code::ValidationError, message).with_detail(json!({ "problems": problems }))
}

/// Builds the idempotency key with a fingerprint of the request, so that the same key cannot be
/// used for a different one.
pub(crate) fn build_idempotency_key(
    caller: &Caller,
    request: &CallRequest,
) -> Option<IdempotencyKey> {
    let key = request.idempotency_key.clone()?;
    let mut hash = Sha256::new();
    let fields = json!([
        request.tool,
        request.run_id,
        request.call_id,
        request.timeout_ms,
        request.retry,
        request.client_id
    ]);
    hash.update(fields.to_string().as_bytes());
    // Added only if they are set, so that stored fingerprints of requests without them stay valid.
    if request.attempt_timeout_ms.is_some() || request.input_timeout_ms.is_some() {
        let timeouts = json!([request.attempt_timeout_ms, request.input_timeout_ms]);
        hash.update(timeouts.to_string().as_bytes());
    }
    if let Some(url) = &request.callback_url {
        hash.update(Value::from(url.as_str()).to_string().as_bytes());
    }
    hash.update(request.args.canonical_text().as_bytes());
    let fingerprint = hex(&hash.finalize());
    Some(IdempotencyKey { agent: caller.owner_name(), key, fingerprint })
}

/// Validates a callback URL and returns it in the form to store.
pub(crate) fn check_callback_url(core: &Core, caller: &Caller, url: &str) -> Result<String, Error> {
    let checked = if url.is_empty() || url.len() > MAX_URL_BYTES {
        Err(format!("must be a URL of 1 to {MAX_URL_BYTES} bytes"))
    } else if let Some(sender) = &core.webhook_sender {
        sender.check_url(&caller.project, url)
    } else {
        Err("cannot be used here: delivery of callbacks is not set up".to_owned())
    };
    checked.map_err(|reason| {
        let fault = Fault::new(Code::ValidationError, format!("callback_url {reason}"));
        fault.without_side_effect().with_detail(json!({ "pointer": "/callback_url" })).into()
    })
}
