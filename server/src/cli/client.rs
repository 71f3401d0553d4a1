//! HTTP client of the commands: sends one request, reads one JSON response and explains every
//! failure in plain words.

use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use reqwest::header::{self, HeaderMap, HeaderValue};
use reqwest::{Method, Response, StatusCode, Url};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use toolcrib::domain::id::hex;

use super::failure::{CommandFailure, exit, failure_for_code};
use super::output::sanitize_line;
use crate::operator_token;

/// The server that commands use if neither `--server` nor the settings name one.
pub const DEFAULT_SERVER: &str = "http://127.0.0.1:8080";

/// The header that identifies a Toolcrib server in every response.
const VERSION_HEADER: &str = "toolcrib-version";

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum time for a response, in addition to the wait that the request specifies.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum silence of a stream; the server sends heartbeats more often.
const STREAM_IDLE_TIMEOUT: Duration = Duration::from_secs(90);
/// Maximum size of a response: larger than any response under the usual limits of a server.
const MAX_RESPONSE_BYTES: usize = 256 << 20;

/// A server with the credentials to use there.
#[derive(Clone)]
pub struct ApiClient {
    http: reqwest::Client,
    base: Url,
    scope: String,
    has_key: bool,
    /// The file with the operator token of a server on this machine, if the settings name it.
    operator_token_file: Option<PathBuf>,
    /// The operator token, once a server has required it.
    operator_token: Arc<OnceLock<HeaderValue>>,
}

/// A request before it is sent.
pub struct ApiRequest<'a> {
    method: Method,
    path: Vec<&'a str>,
    query: Vec<(&'static str, String)>,
    body: Option<Value>,
    wait: Duration,
    /// True if a permission error means that a policy denied the call of a tool.
    is_tool_call: bool,
}

impl<'a> ApiRequest<'a> {
    pub fn new(method: Method, path: &[&'a str]) -> Self {
        let (query, wait) = (Vec::new(), Duration::ZERO);
        Self { method, path: path.to_vec(), query, body: None, wait, is_tool_call: false }
    }

    pub fn get(path: &[&'a str]) -> Self {
        Self::new(Method::GET, path)
    }

    pub fn post(path: &[&'a str], body: Value) -> Self {
        Self::new(Method::POST, path).body(body)
    }

    pub fn body(self, body: Value) -> Self {
        Self { body: Some(body), ..self }
    }

    /// Adds a query parameter if there is a value.
    pub fn query(mut self, name: &'static str, value: Option<impl ToString>) -> Self {
        self.query.extend(value.map(|value| (name, value.to_string())));
        self
    }

    /// Lets the server wait this long for an outcome before it responds.
    pub fn wait(self, wait: Duration) -> Self {
        Self { wait, ..self }.query("wait_ms", Some(wait.as_millis()))
    }

    pub fn for_tool_call(self) -> Self {
        Self { is_tool_call: true, ..self }
    }

    /// Returns true if the route administers the server. Only there may a command act as the
    /// operator by itself: with other routes, a missing key must not grant more than a key would.
    fn is_administrative(&self) -> bool {
        matches!(
            self.path[..],
            [
                "v1",
                "keys"
                    | "session_tokens"
                    | "rules"
                    | "limits"
                    | "switches"
                    | "audit"
                    | "sources"
                    | "agents"
                    | "approvals",
                ..
            ]
        )
    }
}

impl ApiClient {
    pub fn new(
        server: &str,
        key: Option<&str>,
        project: Option<&str>,
    ) -> Result<Self, CommandFailure> {
        let base = base_url(server)?;
        let mut headers = HeaderMap::new();
        if let Some(key) = key {
            let mut value = header::HeaderValue::from_str(&format!("Bearer {key}"))
                .map_err(|_| CommandFailure::usage("the key has invalid characters"))?;
            value.set_sensitive(true);
            headers.insert(header::AUTHORIZATION, value);
        }
        if let Some(project) = project {
            let value = header::HeaderValue::from_str(project)
                .map_err(|_| CommandFailure::usage("the project name has invalid characters"))?;
            headers.insert("x-toolcrib-project", value);
        }
        let key_digest = key.map(|key| hex(&Sha256::digest(key)));
        Ok(Self {
            http: build_http_client(&base, headers)?,
            scope: json!([base.as_str(), project, key_digest]).to_string(),
            base,
            has_key: key.is_some(),
            operator_token_file: None,
            operator_token: Arc::default(),
        })
    }

    /// Sets the file with the operator token, for a server that does not say where it is.
    pub fn operator_token_file(self, file: Option<PathBuf>) -> Self {
        Self { operator_token_file: file, ..self }
    }

    /// Returns the HTTP client that sends the key and the project with every request.
    pub fn http_client(&self) -> reqwest::Client {
        self.http.clone()
    }

    /// Returns the server as it was given.
    pub fn server(&self) -> &str {
        self.base.as_str().trim_end_matches('/')
    }

    /// Returns the server, the project and a digest of the key: equal requests of clients with
    /// different scopes are different requests.
    pub fn scope(&self) -> &str {
        &self.scope
    }

    /// Sends a request and reads the response as JSON.
    pub async fn request_json(&self, request: ApiRequest<'_>) -> Result<Value, CommandFailure> {
        let calls_tool = request.is_tool_call;
        let (status, kind, bytes) = self.exchange(&request).await?;
        if status == StatusCode::NO_CONTENT {
            return Ok(Value::Null);
        }
        match serde_json::from_slice(&bytes) {
            Ok(value) if status.is_success() => Ok(value),
            Ok(value) => Err(failure_from_problem(status, &value, calls_tool)),
            Err(_) => Err(self.unexpected_response(status, &kind, &bytes)),
        }
    }

    /// Sends a request and reads the response as text.
    pub async fn request_text(&self, ask: ApiRequest<'_>) -> Result<String, CommandFailure> {
        let (status, kind, bytes) = self.exchange(&ask).await?;
        if !status.is_success() {
            return match serde_json::from_slice(&bytes) {
                Ok(problem) => Err(failure_from_problem(status, &problem, false)),
                Err(_) => Err(self.unexpected_response(status, &kind, &bytes)),
            };
        }
        String::from_utf8(bytes)
            .map_err(|error| self.unexpected_response(status, &kind, error.as_bytes()))
    }

    /// Sends a request, as the operator if the server requires that and its token is readable here.
    /// Returns the status, the content type and the body of the response.
    async fn exchange(
        &self,
        ask: &ApiRequest<'_>,
    ) -> Result<(StatusCode, String, Vec<u8>), CommandFailure> {
        let limit = ask.wait + RESPONSE_TIMEOUT;
        let mut response = self.execute(ask, Some(limit)).await?;
        let mut status = response.status();
        let mut kind = content_type(&response);
        let mut bytes = self.body(response).await?;
        if status == StatusCode::UNAUTHORIZED && self.adopt_operator_token(ask, &bytes) {
            response = self.execute(ask, Some(limit)).await?;
            (status, kind) = (response.status(), content_type(&response));
            bytes = self.body(response).await?;
        }
        Ok((status, kind, bytes))
    }

    /// Returns true if a healthy Toolcrib server responds. Any program may own the port, so this
    /// request does not carry the key.
    pub async fn is_toolcrib_alive(&self) -> bool {
        let (Ok(stranger), Ok(url)) =
            (build_http_client(&self.base, HeaderMap::new()), self.url(&["healthz"]))
        else {
            return false;
        };
        match stranger.get(url).timeout(CONNECT_TIMEOUT).send().await {
            Ok(response) => {
                response.status().is_success() && response.headers().contains_key(VERSION_HEADER)
            }
            Err(_) => false,
        }
    }

    /// Opens a stream of the events after the one with this id.
    pub async fn open_event_stream(
        &self,
        path: &[&str],
        last_event_id: Option<&str>,
    ) -> Result<Response, CommandFailure> {
        let mut request = self.request(Method::GET, path)?;
        if let Some(id) = last_event_id {
            request = request.header("last-event-id", id);
        }
        self.send_stream_request(request).await
    }

    /// Opens the stream of a run's events. That of a run id that only groups calls ends when the
    /// run is idle.
    pub async fn open_run_stream(
        &self,
        run: &str,
        last_event_id: Option<&str>,
    ) -> Result<Response, CommandFailure> {
        let mut request =
            self.request(Method::GET, &["v1", "runs", run, "events"])?.query(&[("until", "idle")]);
        if let Some(id) = last_event_id {
            request = request.header("last-event-id", id);
        }
        self.send_stream_request(request).await
    }

    /// Sends a request that responds with a stream of events.
    pub async fn post_event_stream(
        &self,
        path: &[&str],
        body: Value,
    ) -> Result<Response, CommandFailure> {
        self.send_stream_request(self.request(Method::POST, path)?.json(&body)).await
    }

    async fn send_stream_request(
        &self,
        request: reqwest::RequestBuilder,
    ) -> Result<Response, CommandFailure> {
        let request = request.header(header::ACCEPT, "text/event-stream");
        let response = request.send().await.map_err(|error| self.transport_failure(&error))?;
        let status = response.status();
        let kind = content_type(&response);
        if status.is_success() && kind.starts_with("text/event-stream") {
            return Ok(response);
        }
        let bytes = self.body(response).await?;
        match serde_json::from_slice(&bytes) {
            Ok(value) if !status.is_success() => Err(failure_from_problem(status, &value, false)),
            _ => Err(self.unexpected_response(status, &kind, &bytes)),
        }
    }

    fn request(
        &self,
        method: Method,
        path: &[&str],
    ) -> Result<reqwest::RequestBuilder, CommandFailure> {
        Ok(self.http.request(method, self.url(path)?))
    }

    /// Reads the operator token of a server on this machine after the server has refused an
    /// administrative request. Returns false if the request has a key, or there is no token that
    /// this server may receive.
    fn adopt_operator_token(&self, request: &ApiRequest<'_>, refusal: &[u8]) -> bool {
        if self.has_key || !request.is_administrative() || !is_loopback(&self.base) {
            return false;
        }
        let refusal: Value = serde_json::from_slice(refusal).unwrap_or_default();
        let named = refusal["error"]["detail"]["operator_token_file"].as_str().map(PathBuf::from);
        let Some(file) = named.or_else(|| self.operator_token_file.clone()) else { return false };
        let port = self.base.port_or_known_default().unwrap_or(0);
        let token = operator_token::token_for_local_server(&file, port).ok();
        let header = token.and_then(|token| HeaderValue::from_str(&format!("Bearer {token}")).ok());
        let Some(mut header) = header else { return false };
        header.set_sensitive(true);
        self.operator_token.set(header).is_ok()
    }

    async fn execute(
        &self,
        api_request: &ApiRequest<'_>,
        limit: Option<Duration>,
    ) -> Result<Response, CommandFailure> {
        let mut request =
            self.request(api_request.method.clone(), &api_request.path)?.query(&api_request.query);
        if let Some(token) = self.operator_token.get().filter(|_| api_request.is_administrative()) {
            request = request.header(header::AUTHORIZATION, token.clone());
        }
        if let Some(body) = &api_request.body {
            request = request.json(body);
        }
        if let Some(limit) = limit {
            request = request.timeout(limit);
        }
        request.send().await.map_err(|error| self.transport_failure(&error))
    }

    /// Returns the URL of a path. The parts may contain any characters.
    fn url(&self, path: &[&str]) -> Result<Url, CommandFailure> {
        let mut url = self.base.clone();
        for part in path {
            // A URL resolves these parts as another path, so they cannot name a resource.
            if matches!(*part, "" | "." | "..") {
                return Err(CommandFailure::usage(format!("\"{part}\" is not a name")));
            }
        }
        match url.path_segments_mut() {
            Ok(mut segments) => segments.pop_if_empty().extend(path),
            Err(()) => {
                return Err(CommandFailure::usage(format!("\"{}\" is not a server", self.base)));
            }
        };
        Ok(url)
    }

    async fn body(&self, mut response: Response) -> Result<Vec<u8>, CommandFailure> {
        let mut bytes = Vec::new();
        while let Some(chunk) =
            response.chunk().await.map_err(|error| self.transport_failure(&error))?
        {
            bytes.extend_from_slice(&chunk);
            if bytes.len() > MAX_RESPONSE_BYTES {
                let message = format!("the response of {} exceeds the size limit", self.server());
                return Err(CommandFailure::new(exit::FAILURE, "NOT_JSON", message));
            }
        }
        Ok(bytes)
    }

    fn transport_failure(&self, error: &reqwest::Error) -> CommandFailure {
        let server = self.server();
        if error.is_timeout() && !error.is_connect() {
            let message = format!("{server} did not answer in time");
            let failure =
                CommandFailure { may_have_been_sent: true, ..CommandFailure::unreachable(message) };
            return failure.hint("is it overloaded? toolcrib doctor checks it");
        }
        let message = format!("cannot reach {server}: {}", root_cause(error));
        CommandFailure {
            may_have_been_sent: !error.is_connect(),
            ..CommandFailure::unreachable(message)
        }
        .hint("start one with: toolcrib serve   or name another with --server URL")
    }

    fn unexpected_response(&self, status: StatusCode, kind: &str, bytes: &[u8]) -> CommandFailure {
        let start: String = String::from_utf8_lossy(bytes).chars().take(100).collect();
        let kind = if kind.is_empty() { "no content type" } else { kind };
        let message = format!(
            "{} returned an unexpected response: status {}, {kind}: {}",
            self.server(),
            status.as_u16(),
            sanitize_line(start.trim()),
        );
        let exit = match status {
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => exit::AUTH,
            _ => exit::FAILURE,
        };
        CommandFailure::new(exit, "NOT_JSON", message)
            .hint("is this a Toolcrib server, with no proxy in between? check --server")
    }
}

/// Builds an HTTP client that sends these headers with every request.
fn build_http_client(base: &Url, headers: HeaderMap) -> Result<reqwest::Client, CommandFailure> {
    let mut builder = reqwest::Client::builder()
        .default_headers(headers)
        .connect_timeout(CONNECT_TIMEOUT)
        .read_timeout(STREAM_IDLE_TIMEOUT)
        // The key is for this server, not for a server it redirects to.
        .redirect(reqwest::redirect::Policy::none())
        .user_agent(concat!("toolcrib/", env!("CARGO_PKG_VERSION")));
    if is_loopback(base) {
        // A proxy would resolve 127.0.0.1 on its own machine.
        builder = builder.no_proxy();
    }
    builder.build().map_err(|error| {
        CommandFailure::new(
            exit::FAILURE,
            "FAILED",
            format!("no HTTP client: {}", root_cause(&error)),
        )
    })
}

/// Parses a server URL. `host:port` means `http://host:port`.
fn base_url(server: &str) -> Result<Url, CommandFailure> {
    let full = if server.contains("://") { server.to_owned() } else { format!("http://{server}") };
    let refused = || {
        let message = format!("\"{}\" is not the address of a server", sanitize_line(server));
        CommandFailure::usage(message).hint("write it as http://127.0.0.1:8080")
    };
    let mut url = Url::parse(&full).map_err(|_| refused())?;
    if !matches!(url.scheme(), "http" | "https") || !url.has_host() {
        return Err(refused());
    }
    url.set_query(None);
    url.set_fragment(None);
    Ok(url)
}

/// Returns the URL at which this machine reaches a server that listens on this address, or `None`
/// if the address does not say: port 0 stands for any free port.
pub fn url_of_listen_address(listen: &str) -> Option<String> {
    let (host, port) = listen.rsplit_once(':')?;
    if port.parse() == Ok(0_u16) {
        return None;
    }
    // A server that listens on all addresses is reached on loopback.
    let host = match host {
        "0.0.0.0" | "" => "127.0.0.1",
        "[::]" => "[::1]",
        host => host,
    };
    Some(format!("http://{host}:{port}"))
}

fn is_loopback(url: &Url) -> bool {
    let host = url.host_str().unwrap_or_default().trim_matches(['[', ']']);
    host == "localhost" || host.parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

fn content_type(response: &Response) -> String {
    let value = response.headers().get(header::CONTENT_TYPE);
    value.and_then(|value| value.to_str().ok()).unwrap_or_default().to_owned()
}

/// Returns the innermost cause: "connection refused" is more helpful than "error sending request".
fn root_cause(error: &dyn std::error::Error) -> String {
    let mut cause = error;
    while let Some(next) = cause.source() {
        cause = next;
    }
    cause.to_string()
}

/// Converts a problem+json response to a failure.
fn failure_from_problem(status: StatusCode, body: &Value, calls_tool: bool) -> CommandFailure {
    let error = &body["error"];
    let code = error["code"].as_str().unwrap_or("HTTP");
    let message = error["message"]
        .as_str()
        .or_else(|| body["detail"].as_str())
        .or_else(|| body["title"].as_str())
        .map_or_else(
            || format!("the server answered with status {}", status.as_u16()),
            sanitize_line,
        );
    let exit = match status {
        StatusCode::FORBIDDEN if calls_tool && code == "PERMISSION_DENIED" => exit::DENIED,
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => exit::AUTH,
        // Problems with a tool's arguments come as a list; any other validation error concerns an
        // option.
        _ if code == "VALIDATION_ERROR" && error["detail"]["problems"].is_null() => exit::USAGE,
        _ => exit::FAILURE,
    };
    let mut failure = failure_for_code(code, message, exit);
    if exit == exit::USAGE {
        failure.hint = Some("--help lists the options".to_owned());
    }
    // The server knows the cause. It also has the only advice on a code that is newer than this
    // command.
    let cause = error["detail"]["hint"].as_str();
    let newer = body["hint"].as_str().filter(|_| failure.hint.is_none());
    if let Some(hint) = cause.or(newer) {
        failure.hint = Some(sanitize_line(hint));
    }
    let problems = format_problems(&failure.message, &error["detail"]);
    failure.message.push_str(&problems);
    failure.retryable = error["retryable"].as_bool().unwrap_or(false);
    failure.detail = error.get("detail").filter(|detail| !detail.is_null()).cloned();
    failure
}

/// Lists the problems with the arguments, one per line, unless the message already contains them.
fn format_problems(message: &str, detail: &Value) -> String {
    let mut text = String::new();
    for problem in detail["problems"].as_array().into_iter().flatten().take(20) {
        let pointer = problem["pointer"].as_str().unwrap_or_default();
        let reason = problem["message"].as_str().unwrap_or_default();
        if reason.is_empty() || message.contains(reason) {
            continue;
        }
        let prefix = if reason.contains(pointer) { String::new() } else { format!("{pointer}: ") };
        text.push_str(&format!("\n  {}", sanitize_line(&format!("{prefix}{reason}"))));
    }
    text
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use serde_json::json;

    fn client(server: &str) -> ApiClient {
        ApiClient::new(server, Some("tck_x"), None).unwrap()
    }

    #[test]
    fn path_segments_are_escaped() {
        let client = client("127.0.0.1:8080");
        let url = |part| client.url(&["v1", "tools", part]).map(|url| url.to_string());
        assert_eq!(url("mcp/git.x").unwrap(), "http://127.0.0.1:8080/v1/tools/mcp%2Fgit.x");
        assert_eq!(url("a?b#c%d").unwrap(), "http://127.0.0.1:8080/v1/tools/a%3Fb%23c%25d");
        for odd in ["", ".", ".."] {
            assert_eq!(url(odd).unwrap_err().exit, exit::USAGE, "{odd:?}");
        }
        assert!(url("\u{0}\n\u{10ffff}").is_ok());
    }

    #[test]
    fn a_server_url_may_have_a_path_prefix_and_no_scheme() {
        let url = |server| client(server).url(&["healthz"]).unwrap().to_string();
        assert_eq!(url("https://example.com/crib/"), "https://example.com/crib/healthz");
        assert_eq!(url("localhost:1"), "http://localhost:1/healthz");
        for odd in ["", "ftp://x", "http://", "mailto:a", "http://[::"] {
            assert!(ApiClient::new(odd, None, None).is_err(), "{odd}");
        }
        assert!(ApiClient::new("http://x", Some("a\nb"), None).is_err(), "no header injection");
    }

    #[test]
    fn a_listen_address_becomes_the_url_that_reaches_it() {
        let url = |listen| url_of_listen_address(listen);
        assert_eq!(url("127.0.0.1:9000").as_deref(), Some("http://127.0.0.1:9000"));
        assert_eq!(url("0.0.0.0:9000").as_deref(), Some("http://127.0.0.1:9000"));
        assert_eq!(url("[::]:9000").as_deref(), Some("http://[::1]:9000"));
        assert_eq!(url("localhost:9000").as_deref(), Some("http://localhost:9000"));
        assert_eq!(url("127.0.0.1:0"), None);
    }

    #[tokio::test]
    async fn the_health_probe_recognizes_toolcrib_without_sending_the_key() {
        for (name, is_toolcrib) in [("toolcrib-version", true), ("server", false)] {
            let healthz = move |headers: HeaderMap| async move {
                assert!(!headers.contains_key(header::AUTHORIZATION));
                ([(name, "1")], "ok")
            };
            let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
            let address = listener.local_addr().unwrap().to_string();
            let router = axum::Router::new().route("/healthz", axum::routing::get(healthz));
            tokio::spawn(async move { axum::serve(listener, router).await });
            assert_eq!(client(&address).is_toolcrib_alive().await, is_toolcrib, "{name}");
        }
    }

    #[test]
    fn error_responses_become_exit_codes() {
        let body = |code: &str| json!({"error": {"code": code, "message": "m\u{1b}"}});
        let exit = |status, code, calls| failure_from_problem(status, &body(code), calls).exit;
        assert_eq!(exit(StatusCode::UNAUTHORIZED, "UNAUTHENTICATED", true), exit::AUTH);
        assert_eq!(exit(StatusCode::FORBIDDEN, "PERMISSION_DENIED", true), exit::DENIED);
        assert_eq!(exit(StatusCode::FORBIDDEN, "PERMISSION_DENIED", false), exit::AUTH);
        assert_eq!(exit(StatusCode::NOT_FOUND, "TOOL_NOT_FOUND", true), exit::FAILURE);
        let unusable = StatusCode::UNPROCESSABLE_ENTITY;
        assert_eq!(exit(unusable, "VALIDATION_ERROR", true), exit::USAGE);
        let odd = failure_from_problem(StatusCode::BAD_GATEWAY, &json!([1]), false);
        assert_eq!(odd.message, "the server answered with status 502");
    }

    #[test]
    fn problems_with_arguments_are_listed() {
        let body = json!({"error": {"code": "VALIDATION_ERROR", "message": "args do not fit",
            "detail": {"problems": [{"pointer": "/q", "message": "is missing"},
                {"pointer": "/n", "message": "/n must be a number"}, {"message": "not fit"}, 5]}}});
        let failure = failure_from_problem(StatusCode::UNPROCESSABLE_ENTITY, &body, true);
        assert_eq!(failure.message, "args do not fit\n  /q: is missing\n  /n must be a number");
        assert_eq!(failure.exit, exit::FAILURE);
    }
}
