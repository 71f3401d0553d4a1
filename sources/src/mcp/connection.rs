//! A connection to an upstream, over a child process's pipes or streamable HTTP. `rmcp` implements
//! the protocol in both revisions; this module limits the harm that an upstream can do.

mod authorized_client;
pub(super) mod child_process;
mod flood_limit;
pub(super) mod followed_resources;
pub(super) mod http_error;
mod http_post;
mod late_discovery;
pub(super) mod log_messages;
pub(super) mod log_owner;
mod message_limit;
pub(super) mod server_requests;
pub(super) mod stateless_call;
pub(super) mod subscriptions;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use authorized_client::AuthorizedClient;
use axum::http::{HeaderName, HeaderValue};
use child_process::{ChildProcess, InspectedOutput, InvalidOutput, StderrTail};
use flood_limit::{FloodFlag, FloodLimitedTransport};
use message_limit::MAX_MESSAGE_BYTES;
use rmcp::RoleClient;
use rmcp::model::ProtocolVersion;
use rmcp::service::{
    ClientInitializeError, ClientLifecycleMode, Peer, RunningService,
    RunningServiceCancellationToken, serve_client_with_lifecycle,
};
use rmcp::transport::async_rw::AsyncRwTransport;
use rmcp::transport::streamable_http_client::StreamableHttpClientTransportConfig;
use rmcp::transport::{StreamableHttpClientTransport, Transport};
use server_requests::McpClientHandler;
use stateless_call::{SharedStatelessClient, StatelessCallClient};
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;
use toolcrib_protocol::outbound::OutboundPolicy;

use super::oauth::Authorizer;
use super::raw_tool_list::ToolListCapture;
use super::settings::McpServerSettings;
use super::settings::resolved::ResolvedSettings;

/// Maximum number of requests in flight at one upstream.
const MAX_REQUESTS: usize = 1_024;

/// Time an idle HTTP connection stays in the pool.
const POOL_IDLE_TIMEOUT: Duration = Duration::from_secs(30);

/// Maximum time for an orderly shutdown of a connection.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(3);

/// An initialized connection to an upstream.
pub struct UpstreamConnection {
    pub peer: Peer<RoleClient>,
    pub handler: Arc<McpClientHandler>,
    pub process: Option<u32>,
    /// Client for stateless calls, if available.
    stateless: SharedStatelessClient,
    capture: ToolListCapture,
    stop: RunningServiceCancellationToken,
    /// Aborted on drop, so that the service never outlives the connection.
    done: AbortOnDropHandle<()>,
    program: Option<ChildProcess>,
    diagnostics: ConnectionDiagnostics,
}

/// The parts of a connection that calls use.
pub(super) struct LiveConnection {
    pub(super) peer: Peer<RoleClient>,
    pub(super) handler: Arc<McpClientHandler>,
    pub(super) diagnostics: ConnectionDiagnostics,
    pub(super) stateless: SharedStatelessClient,
    /// `true` if the upstream may send elicitations in the middle of a call over stdio, where
    /// nothing identifies the call.
    pub(super) may_elicit_mid_call: bool,
    /// `true` if Toolcrib uses revision 2026-07-28 with the upstream.
    pub(super) is_modern: bool,
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
        self.flood_flag.problem().or_else(|| self.invalid_output.problem())
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
    pub async fn connect(options: UpstreamConnectOptions<'_>) -> Result<Self, String> {
        match options.settings.command {
            Some(_) => Self::connect_stdio(options).await,
            None => Self::connect_http(options).await,
        }
    }

    async fn connect_stdio(options: UpstreamConnectOptions<'_>) -> Result<Self, String> {
        let cwd = options.settings.cwd.as_deref();
        let (mut program, pipes) = ChildProcess::start(&options.resolved, cwd, options.stderr)?;
        let diagnostics = ConnectionDiagnostics::default();
        let capture = ToolListCapture::default();
        let output =
            InspectedOutput::new(pipes.output, diagnostics.invalid_output.clone(), capture.clone());
        let transport = AsyncRwTransport::new_client(output, pipes.input)
            .with_max_line_length(MAX_MESSAGE_BYTES);
        let initialized = initialize(
            &options,
            FloodLimitedTransport::new(
                transport,
                diagnostics.flood_flag.clone(),
                options.handler.clone(),
            ),
        )
        .await;
        match initialized {
            Ok(running) => Ok(Self::from_service(
                running,
                options.handler,
                Some(program),
                diagnostics,
                capture,
            )),
            Err(reason) => {
                // The exit status of a process says more than that its pipes are closed.
                let exit =
                    tokio::time::timeout(Duration::from_millis(200), program.wait_exit()).await;
                program.shut_down().await;
                Err(diagnostics.problem().or(exit.ok()).unwrap_or(reason))
            }
        }
    }

    async fn connect_http(options: UpstreamConnectOptions<'_>) -> Result<Self, String> {
        let diagnostics = ConnectionDiagnostics::default();
        let (client, config, headers) = build_http_client(&options)?;
        let capture = ToolListCapture::default();
        let client = AuthorizedClient {
            client,
            authorizer: options.authorizer.clone(),
            capture: capture.clone(),
            stream_settled: CancellationToken::new(),
        };
        let direct = StatelessCallClient::new(client.clone(), &options.resolved.url, headers);
        let transport = StreamableHttpClientTransport::with_client(client, config);
        let running = initialize(
            &options,
            FloodLimitedTransport::new(
                transport,
                diagnostics.flood_flag.clone(),
                options.handler.clone(),
            ),
        )
        .await;
        let running = running.map_err(|reason| diagnostics.problem().unwrap_or(reason))?;
        let connection = Self::from_service(running, options.handler, None, diagnostics, capture);
        Ok(Self { stateless: direct.map(Arc::new), ..connection })
    }

    /// Returns the parts that calls use.
    pub(super) fn live(&self) -> LiveConnection {
        let modern = self.is_stateless();
        LiveConnection {
            peer: self.peer.clone(),
            handler: self.handler.clone(),
            diagnostics: self.diagnostics.clone(),
            stateless: self.stateless.clone().filter(|_| modern),
            may_elicit_mid_call: !modern && self.process.is_some(),
            is_modern: modern,
        }
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

    /// Returns the problem that the upstream caused, if known.
    pub(super) fn problem(&self) -> Option<String> {
        self.diagnostics.problem()
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
                exit = program.wait_exit() => exit,
                _ = &mut self.done => {
                    let waited = Duration::from_millis(500);
                    let exit = tokio::time::timeout(waited, program.wait_exit()).await;
                    exit.unwrap_or_else(|_| "it has closed its output".to_owned())
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
        let Self { stop, mut done, program, peer, diagnostics, .. } = self;
        drop(peer);
        if let Some(program) = program.as_ref().filter(|_| diagnostics.problem().is_some()) {
            // A process with a broken protocol stream is killed without a grace period.
            program.kill();
        }
        stop.cancel();
        if !done.is_finished() && tokio::time::timeout(SHUTDOWN_TIMEOUT, &mut done).await.is_err() {
            done.abort();
        }
        if let Some(program) = program {
            program.shut_down().await;
        }
    }
}

async fn initialize<T>(
    options: &UpstreamConnectOptions<'_>,
    transport: T,
) -> Result<RunningService<RoleClient, Arc<McpClientHandler>>, String>
where
    T: Transport<RoleClient> + 'static,
{
    let mode = match options.legacy_handshake {
        true => ClientLifecycleMode::Initialize,
        false => ClientLifecycleMode::Auto {
            preferred_versions: vec![ProtocolVersion::V_2026_07_28],
            legacy_version: Some(ProtocolVersion::LATEST_WITH_INITIALIZE),
        },
    };
    let serving = serve_client_with_lifecycle(options.handler.clone(), transport, mode);
    match tokio::time::timeout(options.limit, serving).await {
        Ok(Ok(running)) => Ok(running),
        // Redacted before it is truncated: a part of a secret would not be recognized.
        Ok(Err(error)) => {
            let reason = options.resolved.redact(&describe_initialize_error(&error));
            let reason = match &options.authorizer {
                Some(authorizer) => authorizer.redact(&reason),
                None => reason,
            };
            Err(reason.chars().take(500).collect())
        }
        Err(_) => Err(format!("it did not answer within {} ms", options.limit.as_millis())),
    }
}

/// Describes why the handshake failed, with the underlying causes.
fn describe_initialize_error(error: &ClientInitializeError) -> String {
    let mut words = vec![error.to_string()];
    let mut cause = std::error::Error::source(error);
    while let Some(inner) = cause {
        let text = inner.to_string();
        if !words.iter().any(|described| described.contains(&text)) {
            words.push(text);
        }
        cause = inner.source();
    }
    words.join(": ")
}

type Headers = HashMap<HeaderName, HeaderValue>;
type HttpClientParts = (reqwest::Client, StreamableHttpClientTransportConfig, Headers);

fn build_http_client(options: &UpstreamConnectOptions<'_>) -> Result<HttpClientParts, String> {
    let mut headers = HashMap::new();
    for (name, value) in &options.resolved.headers {
        let invalid = |_| format!("the header {name} cannot be sent");
        let name: HeaderName = name.to_ascii_lowercase().parse().map_err(|_| invalid(()))?;
        let mut value =
            HeaderValue::from_str(value).map_err(|_| format!("{name}: not sendable"))?;
        value.set_sensitive(true);
        headers.insert(name, value);
    }
    // An upstream that was added with an API key must not give access to the server's own network.
    let builder = match options.settings.guarded {
        true => {
            let rules = options.outbound;
            rules.check(&options.resolved.url).map_err(|reason| format!("url {reason}"))?;
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
        .pool_idle_timeout(POOL_IDLE_TIMEOUT)
        .build()
        .map_err(|error| error.to_string())?;
    let config = StreamableHttpClientTransportConfig::with_uri(options.resolved.url.as_str())
        .custom_headers(headers.clone())
        .max_sse_event_size(MAX_MESSAGE_BYTES)
        .max_concurrent_requests(MAX_REQUESTS)
        .reinit_on_expired_session(true);
    Ok((client, config, headers))
}
