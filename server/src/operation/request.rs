//! Builds the HTTP request of an operation from arguments.

use std::collections::BTreeSet;

use reqwest::Url;
use serde_json::{Map, Value};
use toolcrib::fault::{Code, Fault};

use super::secrets::Secrets;
use super::{Auth, BodyPlan, Encoding, Field, Mapping, Operation, Parameter, Place, Style, bad};

/// Looks up an environment variable. Returns `None` if access is not allowed or the variable is
/// empty.
pub type Environment<'a> = &'a (dyn Fn(&str) -> Option<String> + Sync);

/// A request to send.
#[derive(Debug, Clone)]
pub struct Request {
    pub method: String,
    pub url: Url,
    pub headers: Vec<(String, String)>,
    /// The content type and the bytes.
    pub body: Option<(String, Vec<u8>)>,
    /// A user name and a password.
    pub basic: Option<(String, String)>,
    /// Values to redact from everything that is stored.
    pub secrets: Secrets,
    /// Timeout of the response in seconds, if the definition sets one.
    pub timeout_s: Option<f64>,
    pub mapping: Mapping,
    /// True if the response is parsed as Jina's: measured, wrapped, and with errors in its body.
    pub jina: bool,
}

impl Operation {
    /// Builds the request for these arguments. They include values from the environment, which are
    /// in `secrets` as well.
    pub fn request(
        &self,
        args: &Map<String, Value>,
        secrets: Secrets,
        environment: Environment<'_>,
    ) -> Result<Request, Fault> {
        let mut used = BTreeSet::new();
        let mut request = Request {
            method: self.method.to_ascii_uppercase(),
            url: self.filled(args, &mut used)?,
            headers: self.headers.clone().into_iter().collect(),
            body: None,
            basic: None,
            secrets,
            timeout_s: self.timeout_s,
            mapping: self.response.clone(),
            jina: false,
        };
        let (mut query, mut cookies) = (Vec::new(), Vec::new());
        for parameter in self.parameters.iter().filter(|p| p.place != Place::Path) {
            let name = parameter.arg.as_ref().unwrap_or(&parameter.name);
            used.insert(name.clone());
            let Some(value) = args.get(name).filter(|value| !value.is_null()) else { continue };
            match parameter.place {
                Place::Query => parameter.pairs(value, &mut query),
                Place::Cookie => parameter.pairs(value, &mut cookies),
                _ => {
                    let text = parameter.simple(value, |text| text.to_owned());
                    request.headers.push((parameter.name.clone(), text));
                }
            }
        }
        request.body = self.body(args, &used, &mut query)?;
        self.sign(&mut request, &mut query, &mut cookies, environment)?;
        if !query.is_empty() {
            request.url.query_pairs_mut().extend_pairs(query);
        }
        if !cookies.is_empty() {
            let pairs = cookies.iter().map(|(name, value)| format!("{name}={}", encoded(value)));
            request.headers.push(("cookie".into(), pairs.collect::<Vec<_>>().join("; ")));
        }
        Ok(request)
    }

    fn filled(&self, args: &Map<String, Value>, used: &mut BTreeSet<String>) -> Result<Url, Fault> {
        let (template, query) = match self.url.split_once('?') {
            Some((template, query)) => (template, Some(query)),
            None => (self.url.as_str(), None),
        };
        let mut text = String::new();
        let mut rest = template;
        while let Some((before, inside)) = rest.split_once('{') {
            let Some((name, after)) = inside.split_once('}') else {
                return Err(bad("the definition's url has a brace that is not closed"));
            };
            text.push_str(before);
            let known = self.parameters.iter().find(|p| p.place == Place::Path && p.name == name);
            let arg = known.and_then(|p| p.arg.as_deref()).unwrap_or(name);
            let value = args.get(arg).filter(|value| !value.is_null());
            let value = value.ok_or_else(|| bad(format!("{arg} is needed for the path")))?;
            let plain = Parameter::plain(name, Place::Path);
            let written = known.unwrap_or(&plain).simple(value, encoded);
            if written.is_empty() {
                return Err(bad(format!("{arg} is needed for the path and must not be empty")));
            }
            text.push_str(&written);
            used.insert(arg.to_owned());
            rest = after;
        }
        text.push_str(rest);
        refuse_dots(&text)?;
        if let Some(query) = query {
            text.push('?');
            text.push_str(query);
        }
        Url::parse(&text).map_err(|error| bad(format!("the definition's url is none: {error}")))
    }

    fn body(
        &self,
        args: &Map<String, Value>,
        used: &BTreeSet<String>,
        query: &mut Vec<(String, String)>,
    ) -> Result<Option<(String, Vec<u8>)>, Fault> {
        if let Some(plan) = &self.body {
            return plan.written(args);
        }
        if !self.parameters.is_empty() {
            return Ok(None);
        }
        let rest = args.iter().filter(|(name, _)| !used.contains(*name));
        let rest: Map<String, Value> = rest.map(|(n, v)| (n.clone(), v.clone())).collect();
        let method = self.method.to_ascii_uppercase();
        if matches!(method.as_str(), "GET" | "HEAD" | "DELETE") {
            into_query(&rest, query);
            return Ok(None);
        }
        if rest.is_empty() {
            return Ok(None);
        }
        let bytes = Value::Object(rest).to_string().into_bytes();
        Ok(Some(("application/json".into(), bytes)))
    }

    /// Adds the credentials to the request.
    fn sign(
        &self,
        request: &mut Request,
        query: &mut Vec<(String, String)>,
        cookies: &mut Vec<(String, String)>,
        environment: Environment<'_>,
    ) -> Result<(), Fault> {
        let there = |name: &&str| environment(name).is_some();
        let all = self.auth.iter().flat_map(|auth| auth.envs()).all(|name| there(&name));
        if self.auth_optional && !all {
            return Ok(());
        }
        for auth in &self.auth {
            let mut found = Vec::new();
            for name in auth.envs() {
                let Some(value) = environment(name) else {
                    let message = format!("the server's environment has no usable {name}");
                    let fault = Fault::new(Code::Unauthenticated, message).not_happened();
                    return Err(fault.retryable(false));
                };
                request.secrets.add(&value);
                found.push(value);
            }
            match (auth, found.as_slice()) {
                (Auth::Bearer { .. }, [token]) => {
                    request.headers.push(("authorization".into(), format!("Bearer {token}")));
                }
                (Auth::ApiKey { place, name, .. }, [key]) => match place {
                    Place::Query => query.push((name.clone(), key.clone())),
                    Place::Cookie => cookies.push((name.clone(), key.clone())),
                    _ => request.headers.push((name.clone(), key.clone())),
                },
                (Auth::Basic { .. }, [name, password]) => {
                    request.basic = Some((name.clone(), password.clone()));
                }
                _ => {}
            }
        }
        Ok(())
    }
}

/// Refuses dot segments: a path that goes up would be another operation than the definition's.
pub(super) fn refuse_dots(url: &str) -> Result<(), Fault> {
    let is_dots = |part: &str| {
        let part = part.to_ascii_lowercase().replace("%2e", ".");
        part == "." || part == ".."
    };
    match url.split(['/', '\\']).any(is_dots) {
        true => Err(bad("an argument would lead to another path than the definition's")),
        false => Ok(()),
    }
}

/// Appends arguments to a query.
pub(super) fn into_query(args: &Map<String, Value>, query: &mut Vec<(String, String)>) {
    for (name, value) in args.iter().filter(|(_, value)| !value.is_null()) {
        Parameter::plain(name, Place::Query).pairs(value, query);
    }
}

impl BodyPlan {
    fn written(&self, args: &Map<String, Value>) -> Result<Option<(String, Vec<u8>)>, Fault> {
        let value = match &self.arg {
            Some(name) => match args.get(name) {
                Some(value) => value.clone(),
                None => return Ok(None),
            },
            None => {
                let named = self.args.iter().filter_map(|name| Some((name, args.get(name)?)));
                let fields: Map<_, _> = named.map(|(n, v)| (n.clone(), v.clone())).collect();
                Value::Object(fields)
            }
        };
        let (usual, bytes) = match (self.encoding, &value) {
            (Encoding::Json, _) => ("application/json", value.to_string().into_bytes()),
            (Encoding::Form, Value::Object(fields)) => {
                let mut pairs = Vec::new();
                for (name, value) in fields.iter().filter(|(_, value)| !value.is_null()) {
                    self.field(name).pairs(value, &mut pairs);
                }
                let text: Vec<String> =
                    pairs.iter().map(|(n, v)| format!("{}={}", encoded(n), encoded(v))).collect();
                ("application/x-www-form-urlencoded", text.join("&").into_bytes())
            }
            (Encoding::Form, _) => return Err(bad("the body must be an object to be a form")),
            (Encoding::Text, _) => ("text/plain; charset=utf-8", scalar(&value).into_bytes()),
        };
        Ok(Some((self.content_type.clone().unwrap_or_else(|| usual.to_owned()), bytes)))
    }

    /// Returns the parameter for a form field, which is serialized like a query parameter.
    fn field(&self, name: &str) -> Parameter {
        let plain = Parameter::plain(name, Place::Query);
        match self.fields.get(name) {
            Some(Field { style, explode, json }) => {
                Parameter { style: *style, explode: *explode, json: *json, ..plain }
            }
            None => plain,
        }
    }
}

impl Parameter {
    fn plain(name: &str, place: Place) -> Self {
        let (arg, style, explode, json) = (None, None, None, false);
        Self { name: name.to_owned(), place, arg, style, explode, json }
    }

    /// Serializes a value as query pairs.
    fn pairs(&self, value: &Value, pairs: &mut Vec<(String, String)>) {
        let style = self.style.unwrap_or(Style::Form);
        let explode = self.explode.unwrap_or(matches!(style, Style::Form | Style::DeepObject));
        let between = match style {
            Style::SpaceDelimited => " ",
            Style::PipeDelimited => "|",
            _ => ",",
        };
        match value {
            value if self.json => pairs.push((self.name.clone(), value.to_string())),
            Value::Array(items) if explode => {
                pairs.extend(items.iter().map(|item| (self.name.clone(), scalar(item))));
            }
            Value::Array(items) => {
                let text: Vec<String> = items.iter().map(scalar).collect();
                pairs.push((self.name.clone(), text.join(between)));
            }
            Value::Object(fields) if style == Style::DeepObject => {
                let named = fields.iter().map(|(n, v)| (format!("{}[{n}]", self.name), scalar(v)));
                pairs.extend(named);
            }
            Value::Object(fields) if explode => {
                pairs.extend(fields.iter().map(|(name, value)| (name.clone(), scalar(value))));
            }
            Value::Object(fields) => {
                let text: Vec<String> =
                    fields.iter().flat_map(|(n, v)| [n.clone(), scalar(v)]).collect();
                pairs.push((self.name.clone(), text.join(between)));
            }
            value => pairs.push((self.name.clone(), scalar(value))),
        }
    }

    /// Serializes a value as one string, for a path or a header.
    fn simple(&self, value: &Value, write: impl Fn(&str) -> String) -> String {
        if self.json {
            return write(&value.to_string());
        }
        match value {
            Value::Array(items) => {
                items.iter().map(|item| write(&scalar(item))).collect::<Vec<_>>().join(",")
            }
            Value::Object(fields) => {
                let between = if self.explode.unwrap_or(false) { "=" } else { "," };
                let each = fields.iter().map(|(name, value)| {
                    format!("{}{between}{}", write(name), write(&scalar(value)))
                });
                each.collect::<Vec<_>>().join(",")
            }
            value => write(&scalar(value)),
        }
    }
}

fn scalar(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Null => String::new(),
        other => other.to_string(),
    }
}

/// Percent-encodes every character that has a meaning in a URL.
pub fn encoded(text: &str) -> String {
    let mut made = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_' | b'~') {
            made.push(char::from(byte));
        } else {
            made.push_str(&format!("%{byte:02X}"));
        }
    }
    made
}
