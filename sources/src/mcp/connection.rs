//! A connection to an upstream, over a child process's pipes or streamable HTTP. `rmcp` implements
//! the protocol in both revisions; this module limits the harm that an upstream can do.

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::http::{HeaderName, HeaderValue};
use parking_lot::Mutex;
use rmcp::model::{JsonRpcMessage, ProtocolVersion};
use rmcp::service::{
    ClientInitializeError, ClientLifecycleMode, Peer, RunningService,
    RunningServiceCancellationToken, RxJsonRpcMessage, TxJsonRpcMessage,
    serve_client_with_lifecycle,
};
use rmcp::transport::async_rw::AsyncRwTransport;
use rmcp::transport::streamable_http_client::{
    StreamableHttpClientTransportConfig, StreamableHttpError,
};
use rmcp::transport::{StreamableHttpClientTransport, Transport};
use rmcp::{RoleClient, ServiceError};
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use super::oauth::Authorizer;
use super::settings::McpServerSettings;
use crate::mcp::authorized_client::AuthorizedClient;
use crate::mcp::child_process::{ChildProcess, InspectedOutput, InvalidOutput, StderrTail};
use crate::mcp::raw_tool_list::ToolListCapture;
use crate::mcp::resolved_settings::ResolvedSettings;
use crate::mcp::server_requests::McpClientHandler;
use crate::mcp::stateless_call::{self, StatelessCallClient};
use toolcrib_protocol::outbound::OutboundPolicy;

/// Maximum size of a message.
pub(super) const MAX_MESSAGE_BYTES: usize = 16 << 20;

/// Maximum number of requests in flight at one upstream.
const MAX_REQUESTS: usize = 1_024;

/// Limits of unsolicited messages: burst size, and sustained rate per second.
const UNSOLICITED_BURST: f64 = 5_000.0;
const UNSOLICITED_PER_SECOND: f64 = 500.0;

/// Maximum time for an orderly shutdown of a connection.
const CLOSING: Duration = Duration::from_secs(3);

/// Share of that time for closing the transport.
const LEAVING: Duration = Duration::from_secs(2);

/// Set when Toolcrib closes a connection because the upstream floods it.
#[derive(Clone, Default)]
pub struct FloodFlag(Arc<Mutex<bool>>);

/// A transport that stops reading when the upstream floods it.
struct FloodLimitedTransport<T> {
    inner: T,
    flood_flag: FloodFlag,
    /// Records which requests are answered, including those without a waiting caller.
    handler: Arc<McpClientHandler>,
    budget: f64,
    refilled_at: Instant,
}

impl<T> FloodLimitedTransport<T> {
    fn new(inner: T, flood_flag: FloodFlag, handler: Arc<McpClientHandler>) -> Self {
        Self { inner, flood_flag, handler, budget: UNSOLICITED_BURST, refilled_at: Instant::now() }
    }

    fn take_budget(&mut self) -> bool {
        let now = Instant::now();
        let passed = now.duration_since(self.refilled_at).as_secs_f64();
        self.refilled_at = now;
        self.budget = (self.budget + passed * UNSOLICITED_PER_SECOND).min(UNSOLICITED_BURST) - 1.0;
        self.budget > 0.0
    }
}

impl<T: Transport<RoleClient>> Transport<RoleClient> for FloodLimitedTransport<T> {
    type Error = T::Error;

    fn name() -> Cow<'static, str> {
        "MCP".into()
    }

    fn send(
        &mut self,
        item: TxJsonRpcMessage<RoleClient>,
    ) -> impl Future<Output = Result<(), Self::Error>> + Send + 'static {
        self.inner.send(item)
    }

    async fn receive(&mut self) -> Option<RxJsonRpcMessage<RoleClient>> {
        let message = self.inner.receive().await?;
        let unasked =
            matches!(message, JsonRpcMessage::Notification(_) | JsonRpcMessage::Request(_));
        if unasked && !self.take_budget() {
            *self.flood_flag.0.lock() = true;
            return None;
        }
        let answered = match &message {
            JsonRpcMessage::Response(answer) => Some(&answer.id),
            JsonRpcMessage::Error(error) => error.id.as_ref(),
            _ => None,
        };
        if let Some(id) = answered {
            self.handler.record_response(id);
        }
        Some(message)
    }

    /// Closes the transport, with a timeout. An upstream that keeps sending while no reader is left
    /// prevents an orderly close; dropping the transport ends it then.
    async fn close(&mut self) -> Result<(), Self::Error> {
        let closed = tokio::time::timeout(LEAVING, self.inner.close()).await;
        closed.unwrap_or(Ok(()))
    }
}

/// An initialized connection to an upstream.
pub struct UpstreamConnection {
    pub peer: Peer<RoleClient>,
    pub handler: Arc<McpClientHandler>,
    pub process: Option<u32>,
    /// Client for stateless calls, if available.
    stateless: stateless_call::SharedStatelessClient,
    capture: ToolListCapture,
    stop: RunningServiceCancellationToken,
    /// Aborted on drop, so that the service never outlives the connection.
    done: AbortOnDropHandle<()>,
    program: Option<ChildProcess>,
    diagnostics: ConnectionDiagnostics,
}

/// Diagnostics that explain why a connection is unusable.
#[derive(Clone, Default)]
pub struct ConnectionDiagnostics {
    invalid_output: InvalidOutput,
    flood_flag: FloodFlag,
}

impl ConnectionDiagnostics {
    /// Returns the problem that the upstream caused, if known.
    pub fn problem(&self) -> Option<String> {
        if *self.flood_flag.0.lock() {
            let limit = UNSOLICITED_PER_SECOND;
            return Some(format!("it floods: more than {limit} messages a second, unasked"));
        }
        self.invalid_output.problem()
    }
}

/// Everything that is needed to connect.
pub struct UpstreamConnectOptions<'a> {
    pub settings: &'a McpServerSettings,
    pub resolved: Arc<ResolvedSettings>,
    pub stderr: &'a StderrTail,
    pub handler: Arc<McpClientHandler>,
    /// Policy for the addresses of upstreams that were added with an API key.
    pub outbound: &'a OutboundPolicy,
    /// Source of access tokens.
    pub authorizer: Option<Arc<Authorizer>>,
    /// Uses only the legacy handshake, for servers that crash on the newer one.
    pub legacy_handshake: bool,
    pub limit: Duration,
}

impl UpstreamConnection {
    /// Connects and performs the handshake.
    pub async fn connect(dialing: UpstreamConnectOptions<'_>) -> Result<Self, String> {
        match dialing.settings.command {
            Some(_) => Self::connect_stdio(dialing).await,
            None => Self::connect_http(dialing).await,
        }
    }

    async fn connect_stdio(dialing: UpstreamConnectOptions<'_>) -> Result<Self, String> {
        let cwd = dialing.settings.cwd.as_deref();
        let (mut program, pipes) = ChildProcess::start(&dialing.resolved, cwd, dialing.stderr)?;
        let watch = ConnectionDiagnostics::default();
        let tape = ToolListCapture::default();
        let output = InspectedOutput::new(pipes.output, watch.invalid_output.clone(), tape.clone());
        let transport = AsyncRwTransport::new_client(output, pipes.input)
            .with_max_line_length(MAX_MESSAGE_BYTES);
        let begun = initialize(
            &dialing,
            FloodLimitedTransport::new(
                transport,
                watch.flood_flag.clone(),
                dialing.handler.clone(),
            ),
        )
        .await;
        match begun {
            Ok(running) => {
                Ok(Self::from_service(running, dialing.handler, Some(program), watch, tape))
            }
            Err(why) => {
                // The exit status of a process says more than that its pipes are closed.
                let said =
                    tokio::time::timeout(Duration::from_millis(200), program.wait_exit()).await;
                program.shut_down().await;
                Err(watch.problem().or(said.ok()).unwrap_or(why))
            }
        }
    }

    async fn connect_http(dialing: UpstreamConnectOptions<'_>) -> Result<Self, String> {
        let watch = ConnectionDiagnostics::default();
        let (client, config, headers) = build_http_client(&dialing)?;
        let tape = ToolListCapture::default();
        let client = AuthorizedClient {
            client,
            authorizer: dialing.authorizer.clone(),
            capture: tape.clone(),
            stream_settled: CancellationToken::new(),
        };
        let direct = StatelessCallClient::new(client.clone(), &dialing.resolved.url, headers);
        let transport = StreamableHttpClientTransport::with_client(client, config);
        let running = initialize(
            &dialing,
            FloodLimitedTransport::new(
                transport,
                watch.flood_flag.clone(),
                dialing.handler.clone(),
            ),
        )
        .await;
        let running = running.map_err(|why| watch.problem().unwrap_or(why))?;
        let connection = Self::from_service(running, dialing.handler, None, watch, tape);
        Ok(Self { stateless: direct.map(Arc::new), ..connection })
    }

    /// Returns the client for stateless calls, if the upstream's revision allows them.
    pub fn stateless(&self) -> stateless_call::SharedStatelessClient {
        self.stateless.clone().filter(|_| self.is_stateless())
    }

    fn from_service(
        running: RunningService<RoleClient, Arc<McpClientHandler>>,
        handler: Arc<McpClientHandler>,
        program: Option<ChildProcess>,
        diagnostics: ConnectionDiagnostics,
        capture: ToolListCapture,
    ) -> Self {
        let (peer, stop) = (running.peer().clone(), running.cancellation_token());
        let process = program.as_ref().and_then(ChildProcess::id);
        let done = AbortOnDropHandle::new(tokio::spawn(async move {
            drop(running.waiting().await);
        }));
        Self { peer, handler, process, stateless: None, capture, stop, done, program, diagnostics }
    }

    /// Returns the capture of raw tool lists.
    pub fn capture(&self) -> ToolListCapture {
        self.capture.clone()
    }

    /// Returns the diagnostics, which stay available after the connection has ended.
    pub fn diagnostics(&self) -> ConnectionDiagnostics {
        self.diagnostics.clone()
    }

    /// Returns `true` if requests are stateless, without a session.
    pub fn is_stateless(&self) -> bool {
        let info = self.peer.peer_info();
        info.is_some_and(|info| !info.protocol_version.has_initialize())
    }

    /// Waits until the connection is closed, and returns the reason.
    pub async fn wait_closed(&mut self) -> String {
        let ended = match &mut self.program {
            Some(program) => tokio::select! {
                said = program.wait_exit() => said,
                _ = &mut self.done => {
                    let waited = Duration::from_millis(500);
                    let said = tokio::time::timeout(waited, program.wait_exit()).await;
                    said.unwrap_or_else(|_| "it has closed its output".to_owned())
                }
            },
            None => {
                let _ = (&mut self.done).await;
                "the connection is closed".to_owned()
            }
        };
        self.diagnostics.problem().unwrap_or(ended)
    }

    /// Shuts down the connection and its child process.
    pub async fn shut_down(self) {
        let Self { stop, mut done, program, peer, diagnostics: watch, .. } = self;
        drop(peer);
        if let Some(program) = program.as_ref().filter(|_| watch.problem().is_some()) {
            // A process with a broken protocol stream is killed without a grace period.
            program.kill();
        }
        stop.cancel();
        if !done.is_finished() && tokio::time::timeout(CLOSING, &mut done).await.is_err() {
            done.abort();
        }
        if let Some(program) = program {
            program.shut_down().await;
        }
    }
}

async fn initialize<T>(
    dialing: &UpstreamConnectOptions<'_>,
    transport: T,
) -> Result<RunningService<RoleClient, Arc<McpClientHandler>>, String>
where
    T: Transport<RoleClient> + 'static,
{
    let mode = match dialing.legacy_handshake {
        true => ClientLifecycleMode::Initialize,
        false => ClientLifecycleMode::Auto {
            preferred_versions: vec![ProtocolVersion::V_2026_07_28],
            legacy_version: Some(ProtocolVersion::LATEST_WITH_INITIALIZE),
        },
    };
    let serving = serve_client_with_lifecycle(dialing.handler.clone(), transport, mode);
    match tokio::time::timeout(dialing.limit, serving).await {
        Ok(Ok(running)) => Ok(running),
        Ok(Err(error)) => Err(dialing.resolved.redact(&describe_initialize_error(&error))),
        Err(_) => Err(format!("it did not answer within {} ms", dialing.limit.as_millis())),
    }
}

/// Describes why the handshake failed, with the underlying causes.
fn describe_initialize_error(error: &ClientInitializeError) -> String {
    let mut words = vec![error.to_string()];
    let mut cause = std::error::Error::source(error);
    while let Some(inner) = cause {
        let text = inner.to_string();
        if !words.iter().any(|known| known.contains(&text)) {
            words.push(text);
        }
        cause = inner.source();
    }
    let text: String = words.join(": ").chars().take(500).collect();
    text
}

type Headers = HashMap<HeaderName, HeaderValue>;
type HttpClientParts = (reqwest::Client, StreamableHttpClientTransportConfig, Headers);

fn build_http_client(dialing: &UpstreamConnectOptions<'_>) -> Result<HttpClientParts, String> {
    let mut headers = HashMap::new();
    for (name, value) in &dialing.resolved.headers {
        let wrong = |_| format!("the header {name} cannot be sent");
        let name: HeaderName = name.to_ascii_lowercase().parse().map_err(|_| wrong(()))?;
        let mut value =
            HeaderValue::from_str(value).map_err(|_| format!("{name}: not sendable"))?;
        value.set_sensitive(true);
        headers.insert(name, value);
    }
    // An upstream that was added with an API key must not give access to the server's own network.
    let builder = match dialing.settings.guarded {
        true => {
            let rules = dialing.outbound;
            rules.check(&dialing.resolved.url).map_err(|why| format!("url {why}"))?;
            rules.client_builder()
        }
        false => reqwest::Client::builder()
            .redirect(reqwest::redirect::Policy::none())
            .user_agent(concat!("toolcrib/", env!("CARGO_PKG_VERSION"))),
    };
    let client = builder
        .tcp_nodelay(true)
        .connect_timeout(Duration::from_secs(10))
        .pool_max_idle_per_host(256)
        .pool_idle_timeout(stateless_call::POOL_IDLE_TIMEOUT)
        .build()
        .map_err(|error| error.to_string())?;
    let config = StreamableHttpClientTransportConfig::with_uri(dialing.resolved.url.as_str())
        .custom_headers(headers.clone())
        .max_sse_event_size(MAX_MESSAGE_BYTES)
        .max_concurrent_requests(MAX_REQUESTS)
        .reinit_on_expired_session(true);
    Ok((client, config, headers))
}

/// Returns `true` if a request cannot have reached the upstream.
pub fn was_never_sent(error: &ServiceError) -> bool {
    matches!(http_failure(error), Some(HttpTransportError::Client(error)) if error.is_connect())
}

/// Error of a request over HTTP.
pub(super) type HttpTransportError = StreamableHttpError<reqwest::Error>;

/// Returns the HTTP error that caused a failed request, if there is one.
pub(super) fn http_failure(error: &ServiceError) -> Option<&HttpTransportError> {
    let ServiceError::TransportSend(error) = error else { return None };
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error.error.as_ref());
    while let Some(inner) = cause {
        if let Some(failed) = inner.downcast_ref::<HttpTransportError>() {
            return Some(failed);
        }
        cause = inner.source();
    }
    None
}
