//! An HTTP operation as a tool definition describes it (`options.http`), and the request that it
//! makes from arguments. Pure: this module sends nothing.

pub mod destination;
pub mod host_allowlist;
pub mod jina;
mod request;

#[cfg(test)]
mod tests;
use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use toolcrib::domain::fault::{Code, Fault};

use request::percent_encode;
pub use request::{OperationRequest, missing_secret_fault};

/// One operation of an HTTP API.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HttpOperation {
    /// The HTTP method. Default: `GET`.
    #[serde(default = "default_method")]
    pub method: String,
    /// The URL, with path parameters in braces: `https://api.example.com/pets/{id}`.
    pub url: String,
    /// The location of each argument. Without this and `body`, arguments that are not in the path
    /// go into the query of GET, HEAD and DELETE, and into a JSON body otherwise.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub parameters: Vec<Parameter>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub body: Option<RequestBodySpec>,
    /// Headers that are always sent. A value `env:NAME` or `file:/path` is a reference to a secret.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub headers: BTreeMap<String, String>,
    /// Credentials, by the names of environment variables or by references to secrets.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub auth: Vec<OperationAuth>,
    /// True if the request is sent without credentials when their variables are not set.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub auth_optional: bool,
    /// Timeout of the response in seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_s: Option<f64>,
    #[serde(default, skip_serializing_if = "ResponseMapping::is_whole_body")]
    pub response: ResponseMapping,
}

fn default_method() -> String {
    "GET".to_owned()
}

/// The location of one argument.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Parameter {
    /// The name in the request.
    pub name: String,
    #[serde(rename = "in")]
    pub location: ParameterLocation,
    /// The name of the argument, if it differs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub arg: Option<String>,
    /// The serialization of lists and objects, as OpenAPI defines it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub style: Option<ParameterStyle>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub explode: Option<bool>,
    /// True if the value is serialized as JSON.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub json: bool,
}

/// A location in a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ParameterLocation {
    Path,
    Query,
    Header,
    Cookie,
}

/// The serialization of a list or an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum ParameterStyle {
    Simple,
    Form,
    SpaceDelimited,
    PipeDelimited,
    DeepObject,
}

/// The content of the body.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RequestBodySpec {
    /// The argument that is the entire body.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub arg: Option<String>,
    /// The arguments that are the fields of the body.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub args: Vec<String>,
    #[serde(default)]
    pub encoding: BodyEncoding,
    /// The serialization of form fields, if it is not the default.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub fields: BTreeMap<String, FormFieldStyle>,
    /// Overrides the content type of the encoding.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub content_type: Option<String>,
}

/// The serialization of one form field, as OpenAPI defines it.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FormFieldStyle {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub style: Option<ParameterStyle>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub explode: Option<bool>,
    /// True if the value is serialized as JSON.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub json: bool,
}

/// The encoding of a body.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum BodyEncoding {
    #[default]
    Json,
    Form,
    Text,
}

/// A credential and its location in the request.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub enum OperationAuth {
    Bearer {
        env: String,
    },
    ApiKey {
        #[serde(rename = "in")]
        location: ParameterLocation,
        name: String,
        env: String,
    },
    Basic {
        username_env: String,
        password_env: String,
    },
}

impl OperationAuth {
    /// Returns the environment variables that the credential needs.
    pub fn envs(&self) -> Vec<&str> {
        match self {
            Self::Bearer { env } | Self::ApiKey { env, .. } => vec![env],
            Self::Basic { username_env, password_env } => vec![username_env, password_env],
        }
    }
}

/// The part of the response that becomes the result.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ResponseMapping {
    /// A JSON pointer into the body. Default: the full body.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pointer: Option<String>,
}

impl ResponseMapping {
    fn is_whole_body(&self) -> bool {
        self.pointer.is_none()
    }
}

/// The kind of request that a tool makes: an HTTP operation, or a Jina request.
#[derive(Debug, Clone, PartialEq)]
pub enum HttpToolSpec {
    Http(Box<HttpOperation>),
    Jina,
}

impl HttpToolSpec {
    /// Returns whether the options describe an HTTP request.
    pub fn is_present(options: &Value) -> bool {
        ["http", "jina", "openapi"].iter().any(|name| options.get(*name).is_some())
    }

    /// Parses the options of a definition. The error says what is wrong with them.
    pub fn from_options(options: &Value) -> Result<Self, String> {
        if let Some(http) = options.get("http") {
            let read: HttpOperation = serde_json::from_value(http.clone())
                .map_err(|error| format!("options.http: {error}"))?;
            read.check().map_err(|reason| format!("options.http.{reason}"))?;
            return Ok(Self::Http(Box::new(read)));
        }
        jina::check(options).map(|()| Self::Jina)
    }

    /// Returns the timeout of the response, if the definition sets one.
    pub fn timeout_ms(&self, options: &Value) -> Option<u64> {
        let seconds = match self {
            Self::Http(operation) => operation.timeout_s,
            Self::Jina => jina::timeout_s(options),
        };
        seconds.map(seconds_to_ms)
    }

    /// Returns whether the method is GET, which only reads.
    pub fn is_get(&self, options: &Value) -> bool {
        match self {
            Self::Http(operation) => operation.method.eq_ignore_ascii_case("get"),
            Self::Jina => jina::method(options) == "GET",
        }
    }
}

/// Converts seconds to milliseconds, at least one.
pub fn seconds_to_ms(seconds: f64) -> u64 {
    (seconds * 1_000.0).max(1.0) as u64
}

/// All HTTP methods. An operation may have any of them except TRACE.
pub(crate) const METHODS: [&str; 8] =
    ["GET", "PUT", "POST", "DELETE", "OPTIONS", "HEAD", "PATCH", "TRACE"];

/// Headers of the connection itself, which a definition must not set.
const RESERVED_HEADERS: [&str; 6] =
    ["host", "content-length", "transfer-encoding", "connection", "upgrade", "te"];

impl HttpOperation {
    fn check(&self) -> Result<(), String> {
        if !METHODS[..7].contains(&self.method.to_ascii_uppercase().as_str()) {
            return Err(format!("method: \"{}\" is not one of HTTP's", self.method));
        }
        if !self.url.starts_with("https://") && !self.url.starts_with("http://") {
            return Err("url must begin with https:// or http://".to_owned());
        }
        let authority = self.url.split("://").nth(1).unwrap_or_default();
        let authority = authority.split(['/', '?', '#']).next().unwrap_or_default();
        if authority.is_empty() || authority.contains(['{', '}', '@']) {
            return Err("url must name its host, and have nothing in braces there".to_owned());
        }
        let in_headers = self.parameters.iter().filter(|p| p.location == ParameterLocation::Header);
        let names = in_headers.map(|p| &p.name).chain(self.headers.keys());
        let keys = self.auth.iter().filter_map(|auth| match auth {
            OperationAuth::ApiKey { location: ParameterLocation::Header, name, .. } => Some(name),
            OperationAuth::ApiKey { .. }
            | OperationAuth::Bearer { .. }
            | OperationAuth::Basic { .. } => None,
        });
        for name in names.chain(keys) {
            check_header(name)?;
        }
        if let Some(RequestBodySpec { arg: Some(_), args, .. }) = &self.body
            && !args.is_empty()
        {
            return Err("body: give arg or args, not both".to_owned());
        }
        let timeout = 0.001..=86_400.0;
        if self.timeout_s.is_some_and(|seconds| !timeout.contains(&seconds)) {
            return Err("timeout_s must be a number of seconds from 0.001 to 86400".to_owned());
        }
        if self.response.pointer.as_ref().is_some_and(|p| !p.is_empty() && !p.starts_with('/')) {
            return Err("response.pointer must be a JSON pointer such as /data".to_owned());
        }
        Ok(())
    }
}

fn check_header(name: &str) -> Result<(), String> {
    if reqwest::header::HeaderName::from_bytes(name.as_bytes()).is_err() {
        return Err(format!("headers: \"{name}\" is not a header's name"));
    }
    match RESERVED_HEADERS.contains(&name.to_ascii_lowercase().as_str()) {
        true => Err(format!("headers: {name} cannot be set")),
        false => Ok(()),
    }
}

/// Returns the fault for a definition or arguments that cannot make a request.
pub fn bad_request_fault(message: impl Into<String>) -> Fault {
    Fault::new(Code::BadRequest, message).without_side_effect()
}
