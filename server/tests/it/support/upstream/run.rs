//! Runs the MCP server of the tests: over HTTP in this process, or as a separate process.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rmcp::transport::streamable_http_server::session::local::LocalSessionManager;
use rmcp::transport::{StreamableHttpServerConfig, StreamableHttpService};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use toolcrib_sources::mcp::McpServerSettings;

use super::Fixture;

/// Environment variable that turns a test process into an MCP server.
const CHILD: &str = "TOOLCRIB_TEST_UPSTREAM";

/// A fixture that is served over HTTP. Dropping the value stops it.
pub struct Http {
    pub fixture: Fixture,
    pub address: String,
    /// The legacy sessions of MCP clients.
    pub sessions: Arc<LocalSessionManager>,
    stop: CancellationToken,
}

impl Http {
    pub async fn start() -> Self {
        Self::start_at("127.0.0.1:0", Fixture::new()).await
    }

    pub async fn start_at(address: &str, fixture: Fixture) -> Self {
        let listener = TcpListener::bind(address).await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let making = fixture.clone();
        let sessions = Arc::new(LocalSessionManager::default());
        let service = StreamableHttpService::new(
            move || Ok(making.clone()),
            sessions.clone(),
            StreamableHttpServerConfig::default(),
        );
        let router = axum::Router::new().nest_service("/mcp", service);
        let stop = CancellationToken::new();
        let stopped = stop.clone();
        tokio::spawn(async move {
            let serving = axum::serve(listener, router);
            tokio::select! { _ = serving => {}, () = stopped.cancelled() => {} }
        });
        Self { fixture, address, sessions, stop }
    }

    pub fn url(&self) -> String {
        format!("http://{}/mcp", self.address)
    }

    /// Stops the server and its sessions.
    pub fn stop(self) -> (String, Fixture) {
        self.stop.cancel();
        (self.address.clone(), self.fixture.clone())
    }
}

impl Drop for Http {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

/// Returns settings that start this test binary as an MCP server over stdio.
pub fn program(mode: &str) -> McpServerSettings {
    let mut settings = McpServerSettings {
        name: "fixture".to_owned(),
        command: Some(std::env::current_exe().unwrap().to_str().unwrap().to_owned()),
        args: vec!["--exact".into(), "support::upstream::run::child".into(), "--nocapture".into()],
        ..Default::default()
    };
    settings.env.insert(CHILD.to_owned(), mode.to_owned());
    settings
}

/// The entry point of the separate process. Without the variable, it does nothing.
#[test]
fn child() {
    let Ok(mode) = std::env::var(CHILD) else { return };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(serve(&mode));
    std::process::exit(0);
}

async fn serve(mode: &str) {
    let fixture = Fixture::new();
    match mode {
        "mute" => {
            eprintln!("not a word");
            std::future::pending::<()>().await;
        }
        "broken" => {
            eprintln!("cannot find my configuration");
            std::process::exit(7);
        }
        "noise" => loop {
            println!("this is no protocol");
            tokio::time::sleep(Duration::from_millis(1)).await;
        },
        // After its first exit, the process has changed tools.
        "reborn" => {
            let died = std::fs::exists(std::env::var("ONCE").unwrap()).unwrap();
            fixture.shared.changed.store(died, Ordering::SeqCst);
        }
        "odd" => return crate::upstreams::odd::on_pipes(),
        "stubborn" => {
            #[allow(clippy::zombie_processes, reason = "the test needs an orphaned process")]
            let started = std::process::Command::new("sleep").arg("600").spawn().unwrap();
            eprintln!("started {}", started.id());
        }
        "many" => fixture.shared.many.store(5_000, Ordering::SeqCst),
        _ => {}
    }
    let (input, output) = (tokio::io::stdin(), tokio::io::stdout());
    let running = rmcp::serve_server(fixture, (input, output)).await.unwrap();
    let _ = running.waiting().await;
    if mode == "stubborn" {
        // Neither this process nor its child ends when standard input is closed.
        std::future::pending::<()>().await;
    }
}
