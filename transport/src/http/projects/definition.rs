//! Reads and validates a tool definition that a user wrote, in the order that the protocol
//! prescribes.

use axum::body::Body;
use axum::extract::{FromRequest, Multipart, Request};
use axum::http::header;
use serde_json::{Map, Value};
use toolcrib::domain::fault::{Code, Error, Fault};
use toolcrib::domain::json::Json;
use toolcrib::domain::retry::{ExecutionPolicyPatch, TIMEOUT_MS_RANGE};
use toolcrib::domain::tool::args::ArgumentRules;
use toolcrib::domain::tool::{Effect, Executor, Risk, ToolDefinition};
use toolcrib::domain::utp::{AfterExecution, Binding, RESERVED_NAMES, subject};
use toolcrib::registry::{check_array_items, compile_definitions};
use toolcrib_protocol::http_operation::HttpToolSpec;
use toolcrib_protocol::http_operation::jina::{self, JinaEndpoints};

use crate::http::extract;
use crate::http::problem::ApiError;

/// The last path segment of the route that imports tools, which therefore cannot be a tool's name.
const IMPORT_SEGMENT: &str = "import";

fn bad_request(message: impl Into<String>) -> Error {
    Fault::new(Code::BadRequest, message).without_side_effect().into()
}

/// Reads the document from the form field `file`, or from the body itself.
pub(super) async fn read_document(
    request: Request,
    limit: usize,
    parse: fn(&str) -> Result<Value, String>,
) -> Result<Value, ApiError> {
    let kind = request.headers().get(header::CONTENT_TYPE).cloned();
    let kind = kind.as_ref().and_then(|kind| kind.to_str().ok()).unwrap_or_default().to_owned();
    let (parts, body) = request.into_parts();
    let bytes = extract::read_body(Request::from_parts(parts.clone(), body), limit).await?;
    if kind.starts_with("multipart/form-data") {
        let multipart = Request::from_parts(parts, Body::from(bytes));
        return parse_yaml(&read_form_file(multipart).await?, parse);
    }
    if bytes.is_empty() {
        let message = "there is no definition: send a form with the field file, or YAML or JSON";
        return Err(Error::refused(Code::ValidationError, message).into());
    }
    match kind.starts_with("application/json") {
        true => extract::parse_json_value(&bytes),
        false => parse_yaml(&bytes, parse),
    }
}

async fn read_form_file(multipart: Request) -> Result<Vec<u8>, ApiError> {
    let unreadable = |reason: String| bad_request(format!("the form cannot be read: {reason}"));
    let mut multipart = Multipart::from_request(multipart, &())
        .await
        .map_err(|error| unreadable(error.body_text()))?;
    while let Some(field) =
        multipart.next_field().await.map_err(|error| unreadable(error.body_text()))?
    {
        if field.name() == Some("file") {
            let bytes = field.bytes().await.map_err(|error| unreadable(error.body_text()))?;
            return Ok(bytes.to_vec());
        }
    }
    Err(Error::refused(Code::ValidationError, "the form has no field file").into())
}

fn parse_yaml(bytes: &[u8], parse: fn(&str) -> Result<Value, String>) -> Result<Value, ApiError> {
    let text =
        std::str::from_utf8(bytes).map_err(|_| bad_request("the definition is not UTF-8"))?;
    parse(text).map_err(|reason| bad_request(format!("the YAML cannot be read: {reason}")).into())
}

/// A definition that is valid by itself. [`ValidatedDefinition::bind_to_project`] checks that it
/// fits its project.
pub(super) struct ValidatedDefinition {
    name: String,
    description: String,
    parameters: Json,
    output_schema: Option<Json>,
    /// `None` if Toolcrib calls an HTTP API itself.
    target_subject: Option<String>,
    after_execution: String,
    options: Json,
    effect: Effect,
    risk: Risk,
    timeout_ms: Option<u64>,
    policy: ExecutionPolicyPatch,
    background: bool,
    rejoin: Option<bool>,
}

/// Validates the root, the name, the fields and the arrays, in this order. [`check_schemas`]
/// follows.
pub(super) fn validate(
    document: &Value,
    jina: Option<&JinaEndpoints>,
) -> Result<ValidatedDefinition, Error> {
    let Value::Object(fields) = document else {
        return Err(bad_request("the definition must be a mapping"));
    };
    let name_field = fields.get("tool_name").or_else(|| fields.get("name"));
    let name = name_field.and_then(Value::as_str).map(str::trim).unwrap_or_default().to_owned();
    if name.is_empty() {
        return Err(bad_request("tool_name must be a non-empty text"));
    }
    let parameters = object_field(fields, "parameters")?;
    let options = object_field(fields, "options")?;
    let description = match fields.get("description") {
        None | Some(Value::Null) => String::new(),
        Some(Value::String(text)) => text.clone(),
        Some(_) => return Err(bad_request("description must be a text")),
    };
    let timeout_ms = timeout_field(fields, "timeout_ms")?;
    let policy = ExecutionPolicyPatch {
        attempt_timeout_ms: timeout_field(fields, "attempt_timeout_ms")?,
        input_timeout_ms: timeout_field(fields, "input_timeout_ms")?,
        ..ExecutionPolicyPatch::default()
    };
    let plan = match HttpToolSpec::is_present(&options) {
        true => Some(HttpToolSpec::from_options(&options).map_err(bad_request)?),
        false => None,
    };
    // A tool that Toolcrib can execute itself needs no subject to send commands to.
    let local_spec =
        plan.as_ref().filter(|_| fields.get("target_subject").is_none_or(Value::is_null));
    if let (Some(HttpToolSpec::Jina), Some(endpoints)) = (local_spec, jina) {
        jina::check_endpoint(&options, endpoints).map_err(bad_request)?;
    }
    let usual = match local_spec {
        Some(plan) if plan.is_get(&options) => Effect::Read,
        _ => Effect::default(),
    };
    let checked = ValidatedDefinition {
        target_subject: match local_spec {
            Some(_) => None,
            None => Some(text_field(fields, "target_subject")?),
        },
        after_execution: match (local_spec, fields.get("after_execution")) {
            (Some(_), None | Some(Value::Null)) => AfterExecution::Suspend.as_str().to_owned(),
            _ => text_field(fields, "after_execution")?,
        },
        effect: typed_field(fields, "effect")?.unwrap_or(usual),
        risk: match typed_field(fields, "risk")? {
            Some(risk) => risk,
            None => typed_field(fields, "risk_level")?.unwrap_or_default(),
        },
        background: typed_field(fields, "async")?.unwrap_or(false),
        rejoin: typed_field(fields, "rejoin")?,
        output_schema: fields.get("output_schema").filter(|s| !s.is_null()).map(Json::from_value),
        parameters: Json::from_value(&parameters),
        options: Json::from_value(&options),
        name,
        description,
        timeout_ms,
        policy,
    };
    for name in ["suspend_timeout_seconds", "timeout_seconds"] {
        let value = options.get(name).filter(|value| !value.is_null());
        if value.is_some_and(|value| value.as_f64().is_none_or(|seconds| seconds <= 0.0)) {
            return Err(bad_request(format!("options.{name} must be a number of seconds over 0")));
        }
    }
    if let Some(problem) = ArgumentRules::find_problem(&options) {
        return Err(bad_request(problem));
    }
    check_array_items(&parameters, "").map_err(bad_request)?;
    Ok(checked)
}

/// Checks the schemas of a definition, within the budget of one request.
pub(super) async fn check_schemas(
    project: &str,
    checked: &ValidatedDefinition,
) -> Result<(), Error> {
    let draft = checked.build_definition("", 1, None);
    match compile_definitions(project, vec![draft]).await {
        Ok(_) => Ok(()),
        Err((_, Error::Refused { fault, .. })) => Err(bad_request(fault.message)),
        Err((_, error)) => Err(error),
    }
}

fn object_field(fields: &Map<String, Value>, name: &str) -> Result<Value, Error> {
    match fields.get(name) {
        None => Ok(Value::Object(Map::new())),
        Some(value @ Value::Object(_)) => Ok(value.clone()),
        Some(_) => Err(bad_request(format!("{name} must be a mapping"))),
    }
}

fn timeout_field(fields: &Map<String, Value>, name: &str) -> Result<Option<u64>, Error> {
    let Some(value) = fields.get(name).filter(|value| !value.is_null()) else { return Ok(None) };
    let timeout_ms = value.as_u64().filter(|ms| TIMEOUT_MS_RANGE.contains(ms));
    let message = || format!("{name} must be a whole number from 1 to 86400000 (24 h)");
    timeout_ms.map(Some).ok_or_else(|| bad_request(message()))
}

fn text_field(fields: &Map<String, Value>, name: &str) -> Result<String, Error> {
    let text = fields.get(name).and_then(Value::as_str).unwrap_or_default();
    if text.is_empty() {
        return Err(bad_request(format!("{name} must be a non-empty text")));
    }
    Ok(text.to_owned())
}

fn typed_field<T: serde::de::DeserializeOwned>(
    fields: &Map<String, Value>,
    name: &str,
) -> Result<Option<T>, Error> {
    let value = fields.get(name).filter(|value| !value.is_null()).cloned();
    let read = value.map(serde_json::from_value).transpose();
    read.map_err(|error| bad_request(format!("{name}: {error}")))
}

impl ValidatedDefinition {
    fn build_definition(
        &self,
        project: &str,
        default_timeout_ms: u64,
        utp: Option<Binding>,
    ) -> ToolDefinition {
        let binding_timeout_ms = utp.as_ref().and_then(Binding::timeout_ms);
        let options = self.options.to_value();
        // The call must not end before the longest time that its HTTP response may take.
        let answer_ms =
            HttpToolSpec::from_options(&options).ok().and_then(|plan| plan.timeout_ms(&options));
        let answer_ms = answer_ms.map(|ms| ms.min(*TIMEOUT_MS_RANGE.end()));
        let policy = ExecutionPolicyPatch {
            attempt_timeout_ms: self.policy.attempt_timeout_ms.or(answer_ms.filter(|ms| *ms > 0)),
            ..self.policy.clone()
        };
        let answer_ms = answer_ms.unwrap_or_default();
        ToolDefinition {
            project: Some(project.to_owned()),
            name: self.name.clone(),
            description: self.description.clone(),
            executor: match self.target_subject {
                Some(_) => Executor::UTP,
                None => Executor::HTTP,
            },
            input_schema: self.parameters.clone(),
            output_schema: self.output_schema.clone(),
            timeout_ms: self
                .timeout_ms
                .or(binding_timeout_ms)
                .unwrap_or(default_timeout_ms.max(answer_ms)),
            background: self.background,
            effect: self.effect,
            risk: self.risk,
            policy: ExecutionPolicyPatch { rejoin: self.rejoin, ..policy },
            fallback: Vec::new(),
            metadata: None,
            binding: utp,
        }
    }

    /// Builds the definition for an existing project. Checks the reserved names, `after_execution`
    /// and the subject.
    pub(super) fn bind_to_project(
        &self,
        project: &str,
        version: &str,
        default_ms: u64,
    ) -> Result<ToolDefinition, Error> {
        if RESERVED_NAMES.contains(&self.name.as_str()) {
            let message = format!("\"{}\" is the reserved name of an internal tool", self.name);
            return Err(bad_request(message));
        }
        if self.name == IMPORT_SEGMENT {
            return Err(bad_request("import cannot be a tool's name: it is the way to import"));
        }
        let after_execution: AfterExecution = self
            .after_execution
            .parse()
            .map_err(|()| bad_request("after_execution must be suspend or terminate"))?;
        let checked =
            |target| subject::expand_target(target, version, project).map_err(bad_request);
        let target_subject = self.target_subject.as_deref().map(checked).transpose()?;
        let (options, parameters) = (self.options.clone(), None);
        let binding = Binding { target_subject, after_execution, options, parameters };
        let mut definition = self.build_definition(project, default_ms, Some(binding));
        definition.hide_preset_arguments();
        if !TIMEOUT_MS_RANGE.contains(&definition.timeout_ms) {
            return Err(bad_request("options.timeout_seconds must be from 0.001 to 86400 (24 h)"));
        }
        Ok(definition)
    }
}
