//! Test support: a server in this process on a free port, and clients for it.
//!
//! No helper sleeps for a fixed time. Each waits for its condition for at most [`PATIENCE`] and
//! then fails with a message that names the condition.

pub mod api;
pub mod database;
pub mod faults;
pub mod issuer;
pub mod mcp;
pub mod nats;
pub mod otlp;
pub mod process;
pub mod receiver;
pub mod sse;
pub mod upstream;
pub mod weather;
pub mod ws;

use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use toolcrib::Engine;
use toolcrib::registry::NewKey;
use toolcrib_server::bootstrap::ServerRuntime;
use toolcrib_server::config::Config;
use toolcrib_server::{bootstrap, serve};

pub use api::Api;

/// Maximum duration of any wait, sufficient for a slow and busy machine.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// A running server. Dropping the value stops it.
pub struct Server {
    pub address: String,
    pub engine: Engine,
    pub config: Config,
    stop: CancellationToken,
    dir: Arc<TempDir>,
    /// Holds the lock on the data directory.
    served: Option<ServerRuntime>,
}

impl Server {
    /// Starts a server with the default settings.
    pub async fn start() -> Self {
        Self::with(|_| {}).await
    }

    /// Starts a server with changed settings.
    pub async fn with(change: impl FnOnce(&mut Config)) -> Self {
        let dir = Arc::new(tempfile::tempdir().unwrap());
        let mut config = Config { data_dir: dir.path().join("data"), ..Config::default() };
        change(&mut config);
        Self::on(dir, config).await
    }

    async fn on(dir: Arc<TempDir>, config: Config) -> Self {
        std::fs::create_dir_all(&config.data_dir).unwrap();
        let served = bootstrap::start_server(&config).await.unwrap();
        let (router, engine) = (served.http_router(&config), served.engine.clone());
        let mut server = Self::open(dir, config, engine, router).await;
        server.served = Some(served);
        server
    }

    /// Starts a server around an engine that the test has built.
    pub async fn with_engine(engine: Engine) -> Self {
        Self::with_engine_and(engine, |_| {}).await
    }

    /// Starts a server around an engine that the test has built, with other settings.
    pub async fn with_engine_and(engine: Engine, change: impl FnOnce(&mut Config)) -> Self {
        let dir = Arc::new(tempfile::tempdir().unwrap());
        let mut config = Config::default();
        change(&mut config);
        let router = bootstrap::router_without_mcp_servers(&config, engine.clone());
        Self::open(dir, config, engine, router).await
    }

    async fn open(dir: Arc<TempDir>, config: Config, engine: Engine, router: Router) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let stop = CancellationToken::new();
        let serving = (router, config.clone(), stop.clone());
        tokio::spawn(async move {
            let (router, config, stop) = serving;
            serve::serve_listener(listener, router, &config, stop).await;
        });
        Self { address, engine, config, stop, dir, served: None }
    }

    /// Stops the server and starts another one on the same data.
    pub async fn restart(self) -> Self {
        let config = self.config.clone();
        self.restart_with(config).await
    }

    /// Restarts the server with other settings.
    pub async fn restart_with(self, config: Config) -> Self {
        let dir = self.dir.clone();
        self.engine.shut_down(Duration::from_millis(100)).await;
        drop(self);
        Self::on(dir, config).await
    }

    /// Returns a caller without a key.
    pub fn api(&self) -> Api {
        Api::new(&self.address)
    }

    /// Returns the operator of this machine, who presents the operator token.
    pub fn operator(&self) -> Api {
        self.with_key(&process::operator_token(&self.config.data_dir))
    }

    /// Returns a caller with this key.
    pub fn with_key(&self, key: &str) -> Api {
        self.api().key(key)
    }

    /// Creates a key as the local operator, after an admin key if it is the first. Returns a caller
    /// with this key.
    pub async fn keyed(&self, project: &str, agent: &str, role: &str, allow: &[&str]) -> Api {
        let roles: toolcrib::RoleSet = role.parse().unwrap();
        let operator = toolcrib::Caller::local("default");
        if !self.engine.registry().credentials().has_keys()
            && !roles.contains(toolcrib::Role::Admin)
        {
            let first = NewKey::new(project, "first-admin", toolcrib::Role::Admin);
            let secret = toolcrib_transport::auth::generate_secret();
            self.engine.admin().create_key(&operator, first, secret).await.unwrap();
        }
        let new = NewKey {
            allow: allow.iter().map(|pattern| (*pattern).to_owned()).collect(),
            ..NewKey::new(project, agent, roles)
        };
        let secret = toolcrib_transport::auth::generate_secret();
        let created = self.engine.admin().create_key(&operator, new, secret).await.unwrap();
        self.with_key(&created.secret)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.cancel();
        let engine = self.engine.clone();
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(async move { engine.shut_down(Duration::ZERO).await });
        }
    }
}

/// Waits for a future for at most [`PATIENCE`].
pub async fn soon<T>(description: &str, future: impl Future<Output = T>) -> T {
    match tokio::time::timeout(PATIENCE, future).await {
        Ok(value) => value,
        Err(_) => panic!("waited {PATIENCE:?} for {description}"),
    }
}

/// Repeats `look` until it returns a value, for at most [`PATIENCE`].
pub async fn until<T, F, Fut>(description: &str, mut look: F) -> T
where
    F: FnMut() -> Fut,
    Fut: Future<Output = Option<T>>,
{
    let began = Instant::now();
    loop {
        if let Some(found) = look().await {
            return found;
        }
        assert!(began.elapsed() < PATIENCE, "waited {PATIENCE:?} for {description}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}
