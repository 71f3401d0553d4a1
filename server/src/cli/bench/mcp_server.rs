//! Measures MCP calls through Toolcrib against the same MCP server called directly: one upstream in
//! another process, the same messages to both.

use std::process::{Child, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use rmcp::model::{
    CallToolRequestParams, CallToolResponse, CallToolResult, ContentBlock, Implementation,
    JsonObject, ListToolsResult, PaginatedRequestParams, ServerCapabilities, ServerConfig, Tool,
};
use rmcp::service::RequestContext;
use rmcp::transport::streamable_http_server::session::local::LocalSessionManager;
use rmcp::transport::{StreamableHttpServerConfig, StreamableHttpService};
use rmcp::{ErrorData, RoleServer, ServerHandler};
use serde_json::json;
use toolcrib_bench::report::{Limit, Measurement};
use toolcrib_bench::{http, load, process};

use crate::cli::bench::measurements::{Bench, CALLERS, median};
use crate::cli::bench::processes::{BenchServer, BenchServerKind, self_command};

/// CPU time of the tool `work`: little for a tool with a real task.
const WORK_TIME: Duration = Duration::from_micros(500);

/// The word that the load generator expects in a response.
const SUCCESS_MARKER: &str = "SUCCEEDED";

#[derive(Clone)]
struct BenchMcpHandler;

impl BenchMcpHandler {
    fn tools() -> Vec<Tool> {
        let schema = || {
            let mut schema = JsonObject::new();
            schema.insert("type".to_owned(), "object".into());
            Arc::new(schema)
        };
        vec![
            Tool::new("noop", "Does nothing", schema()),
            Tool::new("work", "Works half a millisecond", schema()),
        ]
    }
}

impl ServerHandler for BenchMcpHandler {
    fn get_info(&self) -> ServerConfig {
        let mut config = ServerConfig::new(ServerCapabilities::builder().enable_tools().build());
        config.server_info = Implementation::new("bench", "1");
        config
    }

    async fn list_tools(
        &self,
        _asked: Option<PaginatedRequestParams>,
        _context: RequestContext<RoleServer>,
    ) -> Result<ListToolsResult, ErrorData> {
        Ok(ListToolsResult::with_all_items(Self::tools()))
    }

    fn get_tool(&self, name: &str) -> Option<Tool> {
        Self::tools().into_iter().find(|tool| tool.name == name)
    }

    async fn call_tool(
        &self,
        asked: CallToolRequestParams,
        _context: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        if asked.name == "work" {
            let begun = Instant::now();
            while begun.elapsed() < WORK_TIME {
                std::hint::spin_loop();
            }
        }
        Ok(CallToolResult::success(vec![ContentBlock::text(SUCCESS_MARKER)]).into())
    }
}

/// Runs the upstream of the benchmark until it is killed.
pub async fn serve_mcp(listen: &str) -> anyhow::Result<()> {
    let config = StreamableHttpServerConfig::default().with_json_response(true);
    let sessions = Arc::new(LocalSessionManager::default());
    let service = StreamableHttpService::new(|| Ok(BenchMcpHandler), sessions, config);
    let listener = tokio::net::TcpListener::bind(listen).await?;
    let router = axum::Router::new().nest_service("/mcp", service);
    axum::serve(listener, router).await.context("the upstream of the benchmark")
}

/// An upstream process that is killed on drop.
struct BenchMcpServer {
    child: Child,
    addr: String,
}

impl BenchMcpServer {
    async fn start() -> anyhow::Result<Self> {
        let addr = format!("127.0.0.1:{}", process::free_port()?);
        let mut command = self_command()?;
        command.args(["bench-upstream", "--listen", &addr]);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let child = command.spawn().context("cannot start this program a second time")?;
        let upstream = Self { child, addr };
        let until = Instant::now() + Duration::from_secs(30);
        while tokio::net::TcpStream::connect(&upstream.addr).await.is_err() {
            ensure!(Instant::now() < until, "the upstream does not answer");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        Ok(upstream)
    }
}

impl Drop for BenchMcpServer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns the `tools/call` request that is sent to the upstream and to Toolcrib.
fn tool_call_request(addr: &str, tool: &str) -> Vec<u8> {
    let body = json!({ "jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {
        "name": tool, "arguments": {}, "_meta": {
            "io.modelcontextprotocol/protocolVersion": "2026-07-28",
            "io.modelcontextprotocol/clientInfo": { "name": "bench", "version": "1" },
            "io.modelcontextprotocol/clientCapabilities": {},
        } } });
    let headers = [
        ("accept", "application/json, text/event-stream"),
        ("mcp-protocol-version", "2026-07-28"),
        ("mcp-method", "tools/call"),
        ("mcp-name", tool),
    ];
    http::post_with(addr, "/mcp", &headers, &body.to_string())
}

impl Bench<'_> {
    /// Measures calls through Toolcrib against the same calls without it.
    pub(super) async fn measure_mcp_calls(&mut self) -> anyhow::Result<()> {
        self.advance_progress("MCP through the crib: start");
        let upstream = BenchMcpServer::start().await?;
        let dir = self.scratch.dir("upstream")?;
        let settings = format!("[[mcp]]\nname = \"up\"\nurl = \"http://{}/mcp\"\n", upstream.addr);
        std::fs::write(dir.join("toolcrib.toml"), settings)?;
        let (product, _) = BenchServer::start(BenchServerKind::Product, &dir).await?;
        wait_until_listed(&product.addr).await?;
        let warm = Duration::from_secs(1);
        self.measure_rate(&product.addr, "up.work", 8, warm).await?;
        let (mut ours, mut direct) = (Vec::new(), Vec::new());
        let (mut empty, mut bare) = (Vec::new(), Vec::new());
        let (mut one, mut alone) = (Vec::new(), Vec::new());
        let round = self.plan.round_length;
        for _ in 0..self.plan.rounds {
            direct.push(self.measure_rate(&upstream.addr, "work", CALLERS, round).await?.0);
            ours.push(self.measure_rate(&product.addr, "up.work", CALLERS, round).await?.0);
            bare.push(self.measure_rate(&upstream.addr, "noop", CALLERS, round).await?.0);
            empty.push(self.measure_rate(&product.addr, "up.noop", CALLERS, round).await?.0);
            alone.push(self.measure_rate(&upstream.addr, "noop", 1, round).await?.1);
            one.push(self.measure_rate(&product.addr, "up.noop", 1, round).await?.1);
        }
        let name = format!("MCP tools/call through the crib, {CALLERS} at once, a tool of 0.5 ms");
        let (rate, floor) = (median(ours), median(direct));
        self.push_measurement(Measurement::against_baseline(
            name,
            "calls/s",
            rate,
            floor,
            Limit::AtLeast(0.6),
        ));
        let name = format!("MCP tools/call through the crib, {CALLERS} at once, a tool of nothing");
        let (rate, floor) = (median(empty), median(bare));
        self.push_measurement(Measurement::against_baseline(
            name,
            "calls/s",
            rate,
            floor,
            Limit::None,
        ));
        let added = (median(one) - median(alone)) / 1e3;
        let name = "MCP tools/call through the crib, one at a time, p50, added";
        self.push_measurement(Measurement::absolute(name, "ms", added, Limit::AtMost(2.0)));
        Ok(())
    }

    /// Returns the calls per second, and the median time of one call in microseconds.
    async fn measure_rate(
        &mut self,
        addr: &str,
        tool: &str,
        callers: usize,
        time: Duration,
    ) -> anyhow::Result<(f64, f64)> {
        self.advance_progress(&format!("MCP, {callers} at once: {tool}"));
        let sample =
            load::closed_loop_with_request(addr, callers, time, tool_call_request(addr, tool))
                .await?;
        ensure!(sample.errors == 0, "{} calls of {tool} failed", sample.errors);
        Ok((sample.calls_per_s, sample.p50_us as f64))
    }
}

/// Waits until Toolcrib lists the tools of the upstream.
async fn wait_until_listed(addr: &str) -> anyhow::Result<()> {
    let client = reqwest::Client::builder().no_proxy().build()?;
    let until = Instant::now() + Duration::from_secs(30);
    loop {
        let answer = client.get(format!("http://{addr}/v1/tools/up.work")).send().await?;
        if answer.status().is_success() {
            return Ok(());
        }
        ensure!(Instant::now() < until, "the crib does not find its upstream");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
