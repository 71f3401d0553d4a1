//! Requests to Jina's search and reader: `options.jina`, with the older `options.openapi` as a
//! fallback.

use reqwest::Url;
use serde_json::{Map, Value};
use toolcrib::domain::fault::Fault;

use super::request::{SecretLookup, append_query, reject_dot_segments};
use super::{OperationRequest, ResponseMapping, bad_request_fault, check_header, percent_encode};
use crate::secrets::redaction::SecretRedactor;

/// The variable of Jina's key, unless a definition names another.
pub const DEFAULT_KEY_VARIABLE: &str = "JINA_API_KEY";

/// The base URLs of Jina.
#[derive(Debug, Clone, PartialEq)]
pub struct JinaEndpoints {
    pub search: Url,
    pub reader: Url,
}

impl JinaEndpoints {
    /// Parses the URLs of the settings.
    pub fn parse(search: &str, reader: &str) -> Result<Self, String> {
        let url = |name: &str, text: &str| {
            Url::parse(text).map_err(|error| format!("jina.{name}: {error}"))
        };
        Ok(Self { search: url("search_url", search)?, reader: url("reader_url", reader)? })
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum JinaMode {
    Search,
    Reader,
}

impl JinaMode {
    fn as_str(self) -> &'static str {
        match self {
            Self::Search => "search",
            Self::Reader => "reader",
        }
    }
}

/// Both option tables. `jina` takes precedence over `openapi`.
struct JinaOptions<'a> {
    jina: &'a Value,
    openapi: &'a Value,
}

impl<'a> JinaOptions<'a> {
    fn from_options(options: &'a Value) -> Result<Self, String> {
        let (jina, openapi) = (&options["jina"], &options["openapi"]);
        for (name, table) in [("jina", jina), ("openapi", openapi)] {
            if !table.is_null() && !table.is_object() {
                return Err(format!("options.{name} must be a mapping"));
            }
        }
        if jina.is_null() && openapi.is_null() {
            return Err("missing options.jina/options.openapi config".to_owned());
        }
        Ok(Self { jina, openapi })
    }

    fn text(&self, name: &str) -> Option<&'a str> {
        let find =
            |table: &'a Value| table[name].as_str().map(str::trim).filter(|text| !text.is_empty());
        find(self.jina).or_else(|| find(self.openapi))
    }
}

/// Checks the parts of the options that do not depend on arguments.
pub(super) fn check(options: &Value) -> Result<(), String> {
    let read = JinaOptions::from_options(options)?;
    for table in [read.openapi, read.jina] {
        for (name, _) in table["headers"].as_object().into_iter().flatten() {
            check_header(name).map_err(|reason| format!("options.jina.{reason}"))?;
        }
    }
    match read.text("mode") {
        Some(mode) if parse_mode(mode).is_none() => {
            Err(format!("options.jina.mode must be search or reader, not \"{mode}\""))
        }
        _ => Ok(()),
    }
}

/// Checks that the options have a mode and that their base URL is on Jina's host for it.
pub fn check_endpoint(options: &Value, endpoints: &JinaEndpoints) -> Result<(), String> {
    let read = JinaOptions::from_options(options)?;
    resolve_mode_and_base(&read, endpoints).map(drop).map_err(|fault| fault.message)
}

fn parse_mode(mode: &str) -> Option<JinaMode> {
    match mode {
        "search" => Some(JinaMode::Search),
        "reader" | "read" | "crawl" => Some(JinaMode::Reader),
        _ => None,
    }
}

/// Returns the method in upper case.
pub(super) fn method(options: &Value) -> String {
    let read = JinaOptions::from_options(options);
    let method = read.ok().and_then(|read| read.text("method").map(str::to_ascii_uppercase));
    method.unwrap_or_else(|| "GET".to_owned())
}

/// Builds the request for these arguments. The caller has already added the arguments that come
/// from the environment, and their values to `secrets`.
pub fn build_request(
    options: &Value,
    endpoints: &JinaEndpoints,
    args: &Map<String, Value>,
    mut secrets: SecretRedactor,
    lookup_secret: SecretLookup<'_>,
) -> Result<OperationRequest, Fault> {
    let read = JinaOptions::from_options(options).map_err(bad_request_fault)?;
    let (mode, base) = resolve_mode_and_base(&read, endpoints)?;
    let mut params = read.jina["defaults"].as_object().cloned().unwrap_or_default();
    params.extend(args.clone());
    let path = match mode {
        JinaMode::Search => {
            let query = take_first_present(&mut params, ["q", "query"])
                .ok_or_else(|| bad_request_fault("q (or query) is needed: what to search for"))?;
            params.insert("q".into(), query);
            read.text("path").unwrap_or("/search").to_owned()
        }
        JinaMode::Reader => {
            let url = take_first_present(&mut params, ["url", "target_url"])
                .ok_or_else(|| bad_request_fault("url (or target_url) is needed: what to read"))?;
            let url = url.as_str().map(str::to_owned).unwrap_or_else(|| url.to_string());
            let template = read.text("endpoint_template").unwrap_or("/{url}");
            template.replace("{url}", &percent_encode(&url))
        }
    };
    let mut url = base;
    let joined = format!("{}/{}", url.path().trim_end_matches('/'), path.trim_start_matches('/'));
    reject_dot_segments(&joined)?;
    url.set_path(&joined);
    let method = method(options);
    let mut body = None;
    if method == "GET" {
        let mut query = Vec::new();
        append_query(&params, &mut query);
        if !query.is_empty() {
            url.query_pairs_mut().extend_pairs(query);
        }
    } else {
        let bytes = Value::Object(params).to_string().into_bytes();
        body = Some(("application/json".to_owned(), bytes));
    }
    let headers = build_headers(&read, &mut secrets, lookup_secret);
    let (timeout_s, mapping) = (timeout_s(options), ResponseMapping::default());
    Ok(OperationRequest {
        method,
        url,
        headers,
        body,
        basic_auth: None,
        secrets,
        timeout_s,
        mapping,
        jina: true,
    })
}

/// Removes both arguments and returns the first that is not empty.
fn take_first_present(args: &mut Map<String, Value>, names: [&str; 2]) -> Option<Value> {
    let found = names.map(|name| args.remove(name));
    found.into_iter().flatten().find(|value| match value {
        Value::String(text) => !text.trim().is_empty(),
        Value::Number(number) => number.as_f64() != Some(0.0),
        _ => false,
    })
}

fn resolve_mode_and_base(
    read: &JinaOptions<'_>,
    endpoints: &JinaEndpoints,
) -> Result<(JinaMode, Url), Fault> {
    let base = match read.text("base_url") {
        Some(text) => {
            let unreadable =
                |error| bad_request_fault(format!("options.jina.base_url is not a URL: {error}"));
            Some(Url::parse(text).map_err(unreadable)?)
        }
        None => None,
    };
    let host = base.as_ref().and_then(Url::host_str);
    let by_host = || {
        let is = |endpoint: &Url| host.is_some() && endpoint.host_str() == host;
        match (is(&endpoints.search), is(&endpoints.reader)) {
            (true, _) => Some(JinaMode::Search),
            (_, true) => Some(JinaMode::Reader),
            _ => None,
        }
    };
    let by_path = || {
        (read.openapi["path"].as_str().map(str::trim) == Some("/search"))
            .then_some(JinaMode::Search)
    };
    let mode = match read.text("mode") {
        Some(mode) => parse_mode(mode),
        None => by_host().or_else(by_path),
    };
    let mode =
        mode.ok_or_else(|| bad_request_fault("options.jina.mode must be search or reader"))?;
    let endpoint = match mode {
        JinaMode::Search => &endpoints.search,
        JinaMode::Reader => &endpoints.reader,
    };
    let base = base.unwrap_or_else(|| endpoint.clone());
    if base.host_str() != endpoint.host_str() {
        let (mode, host) = (mode.as_str(), endpoint.host_str().unwrap_or_default());
        return Err(bad_request_fault(format!(
            "options.jina.base_url must be on {host} for the mode {mode}"
        )));
    }
    Ok((mode, base))
}

fn build_headers(
    read: &JinaOptions<'_>,
    secrets: &mut SecretRedactor,
    lookup_secret: SecretLookup<'_>,
) -> Vec<(String, String)> {
    let mut headers: Vec<(String, String)> = Vec::new();
    let mut set = |name: &str, value: String| {
        headers.retain(|(existing, _)| !existing.eq_ignore_ascii_case(name));
        headers.push((name.to_owned(), value));
    };
    for table in [read.openapi, read.jina] {
        for (name, value) in table["headers"].as_object().into_iter().flatten() {
            let value = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            set(name, value);
        }
    }
    let accept = read.text("accept").unwrap_or("text/plain").to_owned();
    let sets_accept = |table: &Value| {
        let mut names = table["headers"].as_object().into_iter().flatten().map(|(name, _)| name);
        names.any(|name| name.eq_ignore_ascii_case("accept"))
    };
    if !sets_accept(read.jina) && !sets_accept(read.openapi) || read.text("accept").is_some() {
        set("accept", accept);
    }
    let configured = read.jina["auth_env"].as_str().map(str::trim).filter(|name| !name.is_empty());
    let name =
        configured.or_else(|| read.openapi["auth"]["env"].as_str()).unwrap_or(DEFAULT_KEY_VARIABLE);
    match lookup_secret(name) {
        Some(key) => {
            secrets.add(&key);
            set("authorization", format!("Bearer {key}"));
        }
        None => tracing::warn!(variable = name, "is not set: Jina is called without a key"),
    }
    headers
}

/// Returns the first positive timeout.
pub(super) fn timeout_s(options: &Value) -> Option<f64> {
    let tables = [&options["jina"], &options["openapi"], options];
    let values = tables.into_iter().flat_map(|table| [&table["timeout_s"], &table["timeout"]]);
    values.filter_map(Value::as_f64).find(|seconds| *seconds > 0.0)
}
