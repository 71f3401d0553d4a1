//! The MCP server of the tests as it runs: over HTTP in this process, or as a process of its own.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rmcp::transport::streamable_http_server::session::local::LocalSessionManager;
use rmcp::transport::{StreamableHttpServerConfig, StreamableHttpService};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use toolcrib_sources::mcp::McpServerSettings;

use super::Fixture;

/// The variable that makes a process of the tests an MCP server.
const CHILD: &str = "TOOLCRIB_TEST_UPSTREAM";

/// A fixture that is reached over HTTP; it goes away with the value.
pub struct Http {
    pub fixture: Fixture,
    pub address: String,
    /// The sessions of clients of the older revision.
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

    /// Ends it, with its sessions.
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

/// A program: this very test, started as an MCP server on its standard input and output.
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

/// Not a test, unless the variable is set: then it is the program.
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
        // Its tools are others after its first death.
        "reborn" => {
            let died = std::fs::exists(std::env::var("ONCE").unwrap()).unwrap();
            fixture.shared.changed.store(died, Ordering::SeqCst);
        }
        "odd" => return crate::upstreams::odd::on_pipes(),
        "stubborn" => {
            #[allow(clippy::zombie_processes, reason = "nobody waits for it: that is the case")]
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
        // It does not mind that nobody listens any more, nor does what it has started.
        std::future::pending::<()>().await;
    }
}
