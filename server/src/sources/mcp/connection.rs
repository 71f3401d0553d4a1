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

use super::authorised::Authorised;
use super::child::{Complaints, Garbage, Program, Watched};
use super::direct::{self, Direct};
use super::ears::Ears;
use super::environment::Filled;
use super::oauth::Pass;
use super::settings::McpSettings;
use super::tape::Tape;
use crate::outbound::Outbound;

/// Maximum size of a message.
pub(super) const MAX_MESSAGE_BYTES: usize = 16 << 20;

/// Maximum number of requests in flight at one upstream.
const MAX_REQUESTS: usize = 1_024;

/// Limits of unsolicited messages: burst size, and sustained rate per second.
const UNASKED_AT_ONCE: f64 = 5_000.0;
const UNASKED_PER_SECOND: f64 = 500.0;

/// Maximum time for an orderly shutdown of a connection.
const CLOSING: Duration = Duration::from_secs(3);

/// Share of that time for closing the transport.
const LEAVING: Duration = Duration::from_secs(2);

/// Set when Toolcrib closes a connection because the upstream floods it.
#[derive(Clone, Default)]
pub struct Flooded(Arc<Mutex<bool>>);

/// A transport that stops reading when the upstream floods it.
struct Guarded<T> {
    inner: T,
    flooded: Flooded,
    /// Records which requests are answered, including those without a waiting caller.
    ears: Arc<Ears>,
    room: f64,
    looked: Instant,
}

impl<T> Guarded<T> {
    fn new(inner: T, flooded: Flooded, ears: Arc<Ears>) -> Self {
        Self { inner, flooded, ears, room: UNASKED_AT_ONCE, looked: Instant::now() }
    }

    fn has_room(&mut self) -> bool {
        let now = Instant::now();
        let passed = now.duration_since(self.looked).as_secs_f64();
        self.looked = now;
        self.room = (self.room + passed * UNASKED_PER_SECOND).min(UNASKED_AT_ONCE) - 1.0;
        self.room > 0.0
    }
}

impl<T: Transport<RoleClient>> Transport<RoleClient> for Guarded<T> {
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
        if unasked && !self.has_room() {
            *self.flooded.0.lock() = true;
            return None;
        }
        let answered = match &message {
            JsonRpcMessage::Response(answer) => Some(&answer.id),
            JsonRpcMessage::Error(error) => error.id.as_ref(),
            _ => None,
        };
        if let Some(id) = answered {
            self.ears.answered(id);
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
pub struct Connection {
    pub peer: Peer<RoleClient>,
    pub ears: Arc<Ears>,
    pub process: Option<u32>,
    /// Client for stateless calls, if available.
    direct: direct::Shared,
    tape: Tape,
    stop: RunningServiceCancellationToken,
    /// Aborted on drop, so that the service never outlives the connection.
    done: AbortOnDropHandle<()>,
    program: Option<Program>,
    watch: Watch,
}

/// Diagnostics that explain why a connection is unusable.
#[derive(Clone, Default)]
pub struct Watch {
    garbage: Garbage,
    flooded: Flooded,
}

impl Watch {
    /// Returns the problem that the upstream caused, if known.
    pub fn trouble(&self) -> Option<String> {
        if *self.flooded.0.lock() {
            let limit = UNASKED_PER_SECOND;
            return Some(format!("it floods: more than {limit} messages a second, unasked"));
        }
        self.garbage.seen()
    }
}

/// Everything that is needed to connect.
pub struct Dialing<'a> {
    pub settings: &'a McpSettings,
    pub filled: Arc<Filled>,
    pub complaints: &'a Complaints,
    pub ears: Arc<Ears>,
    /// Policy for the addresses of upstreams that were added with an API key.
    pub outbound: &'a Outbound,
    /// Source of access tokens.
    pub pass: Option<Arc<Pass>>,
    /// Uses only the legacy handshake, for servers that crash on the newer one.
    pub older: bool,
    pub limit: Duration,
}

impl Connection {
    /// Connects and performs the handshake.
    pub async fn dial(dialing: Dialing<'_>) -> Result<Self, String> {
        match dialing.settings.command {
            Some(_) => Self::to_program(dialing).await,
            None => Self::to_address(dialing).await,
        }
    }

    async fn to_program(dialing: Dialing<'_>) -> Result<Self, String> {
        let cwd = dialing.settings.cwd.as_deref();
        let (mut program, pipes) = Program::start(&dialing.filled, cwd, dialing.complaints)?;
        let watch = Watch::default();
        let tape = Tape::default();
        let output = Watched::new(pipes.output, watch.garbage.clone(), tape.clone());
        let transport = AsyncRwTransport::new_client(output, pipes.input)
            .with_max_line_length(MAX_MESSAGE_BYTES);
        let begun =
            begin(&dialing, Guarded::new(transport, watch.flooded.clone(), dialing.ears.clone()))
                .await;
        match begun {
            Ok(running) => Ok(Self::of(running, dialing.ears, Some(program), watch, tape)),
            Err(why) => {
                // The exit status of a process says more than that its pipes are closed.
                let said = tokio::time::timeout(Duration::from_millis(200), program.ended()).await;
                program.end().await;
                Err(watch.trouble().or(said.ok()).unwrap_or(why))
            }
        }
    }

    async fn to_address(dialing: Dialing<'_>) -> Result<Self, String> {
        let watch = Watch::default();
        let (client, config, headers) = http(&dialing)?;
        let tape = Tape::default();
        let client = Authorised {
            client,
            pass: dialing.pass.clone(),
            tape: tape.clone(),
            listens: CancellationToken::new(),
        };
        let direct = Direct::new(client.clone(), &dialing.filled.url, headers);
        let transport = StreamableHttpClientTransport::with_client(client, config);
        let running =
            begin(&dialing, Guarded::new(transport, watch.flooded.clone(), dialing.ears.clone()))
                .await;
        let running = running.map_err(|why| watch.trouble().unwrap_or(why))?;
        let connection = Self::of(running, dialing.ears, None, watch, tape);
        Ok(Self { direct: direct.map(Arc::new), ..connection })
    }

    /// Returns the client for stateless calls, if the upstream's revision allows them.
    pub fn direct(&self) -> direct::Shared {
        self.direct.clone().filter(|_| self.is_modern())
    }

    fn of(
        running: RunningService<RoleClient, Arc<Ears>>,
        ears: Arc<Ears>,
        program: Option<Program>,
        watch: Watch,
        tape: Tape,
    ) -> Self {
        let (peer, stop) = (running.peer().clone(), running.cancellation_token());
        let process = program.as_ref().and_then(Program::id);
        let done = AbortOnDropHandle::new(tokio::spawn(async move {
            drop(running.waiting().await);
        }));
        Self { peer, ears, process, direct: None, tape, stop, done, program, watch }
    }

    /// Returns the capture of raw tool lists.
    pub fn tape(&self) -> Tape {
        self.tape.clone()
    }

    /// Returns the diagnostics, which stay available after the connection has ended.
    pub fn watch(&self) -> Watch {
        self.watch.clone()
    }

    /// Returns `true` if requests are stateless, without a session.
    pub fn is_modern(&self) -> bool {
        let info = self.peer.peer_info();
        info.is_some_and(|info| !info.protocol_version.has_initialize())
    }

    /// Waits until the connection is closed, and returns the reason.
    pub async fn over(&mut self) -> String {
        let ended = match &mut self.program {
            Some(program) => tokio::select! {
                said = program.ended() => said,
                _ = &mut self.done => {
                    let waited = Duration::from_millis(500);
                    let said = tokio::time::timeout(waited, program.ended()).await;
                    said.unwrap_or_else(|_| "it has closed its output".to_owned())
                }
            },
            None => {
                let _ = (&mut self.done).await;
                "the connection is closed".to_owned()
            }
        };
        self.watch.trouble().unwrap_or(ended)
    }

    /// Shuts down the connection and its child process.
    pub async fn end(self) {
        let Self { stop, mut done, program, peer, watch, .. } = self;
        drop(peer);
        if let Some(program) = program.as_ref().filter(|_| watch.trouble().is_some()) {
            // A process with a broken protocol stream is killed without a grace period.
            program.kill();
        }
        stop.cancel();
        if !done.is_finished() && tokio::time::timeout(CLOSING, &mut done).await.is_err() {
            done.abort();
        }
        if let Some(program) = program {
            program.end().await;
        }
    }
}

async fn begin<T>(
    dialing: &Dialing<'_>,
    transport: T,
) -> Result<RunningService<RoleClient, Arc<Ears>>, String>
where
    T: Transport<RoleClient> + 'static,
{
    let mode = match dialing.older {
        true => ClientLifecycleMode::Initialize,
        false => ClientLifecycleMode::Auto {
            preferred_versions: vec![ProtocolVersion::V_2026_07_28],
            legacy_version: Some(ProtocolVersion::LATEST_WITH_INITIALIZE),
        },
    };
    let serving = serve_client_with_lifecycle(dialing.ears.clone(), transport, mode);
    match tokio::time::timeout(dialing.limit, serving).await {
        Ok(Ok(running)) => Ok(running),
        Ok(Err(error)) => Err(dialing.filled.clean(&refusal(&error))),
        Err(_) => Err(format!("it did not answer within {} ms", dialing.limit.as_millis())),
    }
}

/// Describes why the handshake failed, with the underlying causes.
fn refusal(error: &ClientInitializeError) -> String {
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
type Dialled = (reqwest::Client, StreamableHttpClientTransportConfig, Headers);

fn http(dialing: &Dialing<'_>) -> Result<Dialled, String> {
    let mut headers = HashMap::new();
    for (name, value) in &dialing.filled.headers {
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
            rules.check(&dialing.filled.url).map_err(|why| format!("url {why}"))?;
            rules.client()
        }
        false => reqwest::Client::builder()
            .redirect(reqwest::redirect::Policy::none())
            .user_agent(concat!("toolcrib/", env!("CARGO_PKG_VERSION"))),
    };
    let client = builder
        .tcp_nodelay(true)
        .connect_timeout(Duration::from_secs(10))
        .pool_max_idle_per_host(256)
        .pool_idle_timeout(direct::KEPT)
        .build()
        .map_err(|error| error.to_string())?;
    let config = StreamableHttpClientTransportConfig::with_uri(dialing.filled.url.as_str())
        .custom_headers(headers.clone())
        .max_sse_event_size(MAX_MESSAGE_BYTES)
        .max_concurrent_requests(MAX_REQUESTS)
        .reinit_on_expired_session(true);
    Ok((client, config, headers))
}

/// Returns `true` if a request cannot have reached the upstream.
pub fn never_sent(error: &ServiceError) -> bool {
    matches!(http_failure(error), Some(Failed::Client(error)) if error.is_connect())
}

/// Error of a request over HTTP.
pub(super) type Failed = StreamableHttpError<reqwest::Error>;

/// Returns the HTTP error that caused a failed request, if there is one.
pub(super) fn http_failure(error: &ServiceError) -> Option<&Failed> {
    let ServiceError::TransportSend(error) = error else { return None };
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error.error.as_ref());
    while let Some(inner) = cause {
        if let Some(failed) = inner.downcast_ref::<Failed>() {
            return Some(failed);
        }
        cause = inner.source();
    }
    None
}
