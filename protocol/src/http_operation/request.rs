//! Builds the HTTP request of an operation from the arguments of a call.

use std::collections::BTreeSet;

use reqwest::Url;
use serde_json::{Map, Value};
use toolcrib::domain::fault::{Code, Fault};

use super::{
    BodyEncoding, FormFieldStyle, HttpOperation, OperationAuth, Parameter, ParameterLocation,
    ParameterStyle, RequestBodySpec, ResponseMapping, bad_request_fault,
};
use crate::secrets::SecretReference;
use crate::secrets::redaction::SecretRedactor;

/// Looks up the value of an environment variable, or of a secret by its reference (`env:NAME`,
/// `file:/path`). Returns `None` if the tool may not use it, or if it is not set or empty.
pub(crate) type SecretLookup<'a> = &'a (dyn Fn(&str) -> Option<String> + Sync);

/// A request to send.
#[derive(Debug, Clone)]
pub struct OperationRequest {
    pub method: String,
    pub url: Url,
    pub headers: Vec<(String, String)>,
    /// The content type and the bytes.
    pub body: Option<(String, Vec<u8>)>,
    /// A user name and a password.
    pub basic_auth: Option<(String, String)>,
    /// Values to redact from everything that is stored.
    pub secrets: SecretRedactor,
    /// Timeout of the response in seconds, if the definition sets one.
    pub timeout_s: Option<f64>,
    pub mapping: ResponseMapping,
    /// True for a request to Jina. Its result has `latency_ms`, and a body with `error` fails the
    /// call even if the status is a success.
    pub jina: bool,
}

impl HttpOperation {
    /// Builds the request for these arguments. The caller has already added the arguments that come
    /// from the environment, and their values to `secrets`.
    pub fn build_request(
        &self,
        args: &Map<String, Value>,
        secrets: SecretRedactor,
        lookup_secret: SecretLookup<'_>,
    ) -> Result<OperationRequest, Fault> {
        let mut used_args = BTreeSet::new();
        let mut request = OperationRequest {
            method: self.method.to_ascii_uppercase(),
            url: self.build_url(args, &mut used_args)?,
            headers: self.headers.clone().into_iter().collect(),
            body: None,
            basic_auth: None,
            secrets,
            timeout_s: self.timeout_s,
            mapping: self.response.clone(),
            jina: false,
        };
        let (mut query, mut cookies) = (Vec::new(), Vec::new());
        for parameter in self.parameters.iter().filter(|p| p.location != ParameterLocation::Path) {
            let name = parameter.arg.as_ref().unwrap_or(&parameter.name);
            used_args.insert(name.clone());
            let Some(value) = args.get(name).filter(|value| !value.is_null()) else { continue };
            match parameter.location {
                ParameterLocation::Query => parameter.append_pairs(value, &mut query),
                ParameterLocation::Cookie => parameter.append_pairs(value, &mut cookies),
                _ => {
                    let text = parameter.to_simple_style(value, |text| text.to_owned());
                    request.headers.push((parameter.name.clone(), text));
                }
            }
        }
        request.body = self.build_body(args, &used_args, &mut query)?;
        resolve_header_references(&mut request, self.headers.len(), lookup_secret)?;
        self.apply_credentials(&mut request, &mut query, &mut cookies, lookup_secret)?;
        if !query.is_empty() {
            request.url.query_pairs_mut().extend_pairs(query);
        }
        if !cookies.is_empty() {
            let pairs =
                cookies.iter().map(|(name, value)| format!("{name}={}", percent_encode(value)));
            request.headers.push(("cookie".into(), pairs.collect::<Vec<_>>().join("; ")));
        }
        Ok(request)
    }

    /// Fills the path parameters into the URL of the definition, and records their arguments in
    /// `used_args`.
    fn build_url(
        &self,
        args: &Map<String, Value>,
        used_args: &mut BTreeSet<String>,
    ) -> Result<Url, Fault> {
        let (template, query) = match self.url.split_once('?') {
            Some((template, query)) => (template, Some(query)),
            None => (self.url.as_str(), None),
        };
        let mut text = String::new();
        let mut rest = template;
        while let Some((before, inside)) = rest.split_once('{') {
            let Some((name, after)) = inside.split_once('}') else {
                return Err(bad_request_fault(
                    "the definition's url has a brace that is not closed",
                ));
            };
            text.push_str(before);
            let parameter = self
                .parameters
                .iter()
                .find(|p| p.location == ParameterLocation::Path && p.name == name);
            let arg = parameter.and_then(|p| p.arg.as_deref()).unwrap_or(name);
            let value = args.get(arg).filter(|value| !value.is_null());
            let value =
                value.ok_or_else(|| bad_request_fault(format!("{arg} is needed for the path")))?;
            let plain = Parameter::with_default_style(name, ParameterLocation::Path);
            let encoded = parameter.unwrap_or(&plain).to_simple_style(value, percent_encode);
            if encoded.is_empty() {
                return Err(bad_request_fault(format!(
                    "{arg} is needed for the path and must not be empty"
                )));
            }
            text.push_str(&encoded);
            used_args.insert(arg.to_owned());
            rest = after;
        }
        text.push_str(rest);
        reject_dot_segments(&text)?;
        if let Some(query) = query {
            text.push('?');
            text.push_str(query);
        }
        Url::parse(&text)
            .map_err(|error| bad_request_fault(format!("the definition's url is invalid: {error}")))
    }

    /// Builds the body as the definition describes it. If the definition describes neither
    /// parameters nor a body, the arguments that are not in `used_args` go into the query or into a
    /// JSON body, as the method requires.
    fn build_body(
        &self,
        args: &Map<String, Value>,
        used_args: &BTreeSet<String>,
        query: &mut Vec<(String, String)>,
    ) -> Result<Option<(String, Vec<u8>)>, Fault> {
        if let Some(spec) = &self.body {
            return spec.encode_body(args);
        }
        if !self.parameters.is_empty() {
            return Ok(None);
        }
        let rest = args.iter().filter(|(name, _)| !used_args.contains(*name));
        let rest: Map<String, Value> = rest.map(|(n, v)| (n.clone(), v.clone())).collect();
        let method = self.method.to_ascii_uppercase();
        if matches!(method.as_str(), "GET" | "HEAD" | "DELETE") {
            append_query(&rest, query);
            return Ok(None);
        }
        if rest.is_empty() {
            return Ok(None);
        }
        let bytes = Value::Object(rest).to_string().into_bytes();
        Ok(Some(("application/json".into(), bytes)))
    }

    /// Adds the credentials to the request. Optional credentials are added only if all of them are
    /// set: an API would refuse some of them alone.
    fn apply_credentials(
        &self,
        request: &mut OperationRequest,
        query: &mut Vec<(String, String)>,
        cookies: &mut Vec<(String, String)>,
        lookup_secret: SecretLookup<'_>,
    ) -> Result<(), Fault> {
        let mut names = self.auth.iter().flat_map(|auth| auth.envs());
        let are_all_set = names.all(|name| lookup_secret(name).is_some());
        if self.auth_optional && !are_all_set {
            return Ok(());
        }
        for auth in &self.auth {
            let mut found = Vec::new();
            for name in auth.envs() {
                let value = lookup_secret(name).ok_or_else(|| missing_secret_fault(name))?;
                request.secrets.add(&value);
                found.push(value);
            }
            match (auth, found.as_slice()) {
                (OperationAuth::Bearer { .. }, [token]) => {
                    request.headers.push(("authorization".into(), format!("Bearer {token}")));
                }
                (OperationAuth::ApiKey { location, name, .. }, [key]) => match location {
                    ParameterLocation::Query => query.push((name.clone(), key.clone())),
                    ParameterLocation::Cookie => cookies.push((name.clone(), key.clone())),
                    _ => request.headers.push((name.clone(), key.clone())),
                },
                (OperationAuth::Basic { .. }, [name, password]) => {
                    request.basic_auth = Some((name.clone(), password.clone()));
                }
                // `found` has one value for each name of `envs`, so no other case exists.
                _ => {}
            }
        }
        Ok(())
    }
}

/// Returns the fault for a secret that is not set, or that the tool may not use.
pub fn missing_secret_fault(name: &str) -> Fault {
    let message = format!("the server's environment has no usable {name}");
    Fault::new(Code::Unauthenticated, message).without_side_effect().retryable(false)
}

/// Replaces references to secrets in the headers of the definition, which come before those of the
/// arguments. A header from an argument is never a reference, because callers must not name
/// secrets.
fn resolve_header_references(
    request: &mut OperationRequest,
    definition_header_count: usize,
    lookup_secret: SecretLookup<'_>,
) -> Result<(), Fault> {
    for (_, value) in request.headers.iter_mut().take(definition_header_count) {
        let Some(reference) = SecretReference::parse(value) else { continue };
        let name = reference.to_string();
        let secret = lookup_secret(&name).ok_or_else(|| missing_secret_fault(&name))?;
        request.secrets.add(&secret);
        *value = secret;
    }
    Ok(())
}

/// Refuses dot segments: they would make the path that of another operation than the definition's.
pub(super) fn reject_dot_segments(url: &str) -> Result<(), Fault> {
    let is_dots = |part: &str| {
        let part = part.to_ascii_lowercase().replace("%2e", ".");
        part == "." || part == ".."
    };
    match url.split(['/', '\\']).any(is_dots) {
        true => {
            Err(bad_request_fault("an argument would lead to another path than the definition's"))
        }
        false => Ok(()),
    }
}

/// Appends arguments to a query.
pub(super) fn append_query(args: &Map<String, Value>, query: &mut Vec<(String, String)>) {
    for (name, value) in args.iter().filter(|(_, value)| !value.is_null()) {
        Parameter::with_default_style(name, ParameterLocation::Query).append_pairs(value, query);
    }
}

impl RequestBodySpec {
    fn encode_body(&self, args: &Map<String, Value>) -> Result<Option<(String, Vec<u8>)>, Fault> {
        let value = match &self.arg {
            Some(name) => match args.get(name) {
                Some(value) => value.clone(),
                None => return Ok(None),
            },
            None => {
                let provided = self.args.iter().filter_map(|name| Some((name, args.get(name)?)));
                let fields: Map<_, _> = provided.map(|(n, v)| (n.clone(), v.clone())).collect();
                Value::Object(fields)
            }
        };
        let (content_type, bytes) = match (self.encoding, &value) {
            (BodyEncoding::Json, _) => ("application/json", value.to_string().into_bytes()),
            (BodyEncoding::Form, Value::Object(fields)) => {
                let mut pairs = Vec::new();
                for (name, value) in fields.iter().filter(|(_, value)| !value.is_null()) {
                    self.field_parameter(name).append_pairs(value, &mut pairs);
                }
                let text: Vec<String> = pairs
                    .iter()
                    .map(|(n, v)| format!("{}={}", percent_encode(n), percent_encode(v)))
                    .collect();
                ("application/x-www-form-urlencoded", text.join("&").into_bytes())
            }
            (BodyEncoding::Form, _) => {
                return Err(bad_request_fault("the body must be an object to be a form"));
            }
            (BodyEncoding::Text, _) => {
                ("text/plain; charset=utf-8", scalar_to_string(&value).into_bytes())
            }
        };
        Ok(Some((self.content_type.clone().unwrap_or_else(|| content_type.to_owned()), bytes)))
    }

    /// Returns the parameter for a form field, which is serialized like a query parameter.
    fn field_parameter(&self, name: &str) -> Parameter {
        let plain = Parameter::with_default_style(name, ParameterLocation::Query);
        match self.fields.get(name) {
            Some(FormFieldStyle { style, explode, json }) => {
                Parameter { style: *style, explode: *explode, json: *json, ..plain }
            }
            None => plain,
        }
    }
}

impl Parameter {
    fn with_default_style(name: &str, location: ParameterLocation) -> Self {
        let (arg, style, explode, json) = (None, None, None, false);
        Self { name: name.to_owned(), location, arg, style, explode, json }
    }

    /// Serializes a value as pairs for a query, a cookie or a form.
    fn append_pairs(&self, value: &Value, pairs: &mut Vec<(String, String)>) {
        let style = self.style.unwrap_or(ParameterStyle::Form);
        let explode = self
            .explode
            .unwrap_or(matches!(style, ParameterStyle::Form | ParameterStyle::DeepObject));
        let delimiter = match style {
            ParameterStyle::SpaceDelimited => " ",
            ParameterStyle::PipeDelimited => "|",
            _ => ",",
        };
        match value {
            value if self.json => pairs.push((self.name.clone(), value.to_string())),
            Value::Array(items) if explode => {
                pairs.extend(items.iter().map(|item| (self.name.clone(), scalar_to_string(item))));
            }
            Value::Array(items) => {
                let text: Vec<String> = items.iter().map(scalar_to_string).collect();
                pairs.push((self.name.clone(), text.join(delimiter)));
            }
            Value::Object(fields) if style == ParameterStyle::DeepObject => {
                let nested = fields
                    .iter()
                    .map(|(n, v)| (format!("{}[{n}]", self.name), scalar_to_string(v)));
                pairs.extend(nested);
            }
            Value::Object(fields) if explode => {
                pairs.extend(
                    fields.iter().map(|(name, value)| (name.clone(), scalar_to_string(value))),
                );
            }
            Value::Object(fields) => {
                let text: Vec<String> =
                    fields.iter().flat_map(|(n, v)| [n.clone(), scalar_to_string(v)]).collect();
                pairs.push((self.name.clone(), text.join(delimiter)));
            }
            value => pairs.push((self.name.clone(), scalar_to_string(value))),
        }
    }

    /// Serializes a value as one string in OpenAPI's style `simple`, for a path or a header.
    /// `encode` escapes each part.
    fn to_simple_style(&self, value: &Value, encode: impl Fn(&str) -> String) -> String {
        if self.json {
            return encode(&value.to_string());
        }
        match value {
            Value::Array(items) => items
                .iter()
                .map(|item| encode(&scalar_to_string(item)))
                .collect::<Vec<_>>()
                .join(","),
            Value::Object(fields) => {
                let separator = if self.explode.unwrap_or(false) { "=" } else { "," };
                let members = fields.iter().map(|(name, value)| {
                    format!("{}{separator}{}", encode(name), encode(&scalar_to_string(value)))
                });
                members.collect::<Vec<_>>().join(",")
            }
            value => encode(&scalar_to_string(value)),
        }
    }
}

fn scalar_to_string(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Null => String::new(),
        other => other.to_string(),
    }
}

/// Percent-encodes every character that has a meaning in a URL.
pub(crate) fn percent_encode(text: &str) -> String {
    let mut output = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_' | b'~') {
            output.push(char::from(byte));
        } else {
            output.push_str(&format!("%{byte:02X}"));
        }
    }
    output
}
