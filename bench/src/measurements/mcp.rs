//! Measures MCP in both directions: the time an MCP client waits for its list of tools, and calls
//! through Toolcrib against the same MCP server called directly.

use std::time::{Duration, Instant};

use anyhow::ensure;
use serde_json::{Value, json};

use super::{Bench, CALLERS, median};
use crate::load::{self, http};
use crate::report::{Limit, Measurement};

/// Number of tools in the list, and number of lists.
const TOOLS: usize = 1_000;
const LISTS: usize = 50;

/// The revision of the protocol that all requests use.
const PROTOCOL_VERSION: &str = "2026-07-28";

impl Bench<'_> {
    /// Measures `tools/list` of a long list on one page, until the last byte.
    pub(super) async fn measure_tools_list(&mut self) -> anyhow::Result<()> {
        self.advance_progress(&format!("tools/list with {TOOLS} tools"));
        let dir = self.scratch.dir("listing")?;
        let (product, _) = self.launcher.start_toolcrib(&dir, &[]).await?;
        let http = reqwest::Client::builder().no_proxy().tcp_nodelay(true).build()?;
        let tools: Vec<Value> = (0..TOOLS - 10).map(sample_tool).collect();
        let body = json!({ "client_id": "bench", "tools": tools });
        let url = format!("http://{}/internal/tools/register", product.addr);
        http.post(url).json(&body).send().await?.error_for_status()?;
        let url = format!("http://{}/mcp?catalogue=full", product.addr);
        let mut times = Vec::new();
        for _ in 0..LISTS {
            let began = Instant::now();
            let request = http
                .post(&url)
                .header("accept", "application/json, text/event-stream")
                .header("mcp-protocol-version", PROTOCOL_VERSION)
                .header("mcp-method", "tools/list")
                .json(&tools_list_request());
            let answer = request.send().await?.error_for_status()?.bytes().await?;
            times.push(began.elapsed().as_secs_f64() * 1e3);
            let answer: Value = serde_json::from_slice(&answer)?;
            let listed = answer["result"]["tools"].as_array().map_or(0, Vec::len);
            ensure!(listed >= TOOLS - 10, "tools/list gave {listed} tools");
        }
        let name = format!("MCP tools/list, {TOOLS} tools, p50");
        self.push_measurement(Measurement::absolute(name, "ms", median(times), Limit::AtMost(5.0)));
        Ok(())
    }

    /// Measures calls through Toolcrib against the same calls without it.
    pub(super) async fn measure_mcp_calls(&mut self) -> anyhow::Result<()> {
        self.advance_progress("MCP through Toolcrib: start");
        let (_upstream, upstream_addr) = self.launcher.start_mcp_server().await?;
        let dir = self.scratch.dir("upstream")?;
        let settings = format!("[[mcp]]\nname = \"up\"\nurl = \"http://{}/mcp\"\n", upstream_addr);
        std::fs::write(dir.join("toolcrib.toml"), settings)?;
        let (product, _) = self.launcher.start_toolcrib(&dir, &[]).await?;
        wait_until_listed(&product.addr).await?;
        let warm = Duration::from_secs(1);
        self.measure_rate(&product.addr, "up.work", 8, warm).await?;
        let (mut measured, mut direct) = (Vec::new(), Vec::new());
        let (mut empty, mut bare) = (Vec::new(), Vec::new());
        let (mut one, mut alone) = (Vec::new(), Vec::new());
        let round = self.plan.round_length;
        for _ in 0..self.plan.rounds {
            direct.push(self.measure_rate(&upstream_addr, "work", CALLERS, round).await?.0);
            measured.push(self.measure_rate(&product.addr, "up.work", CALLERS, round).await?.0);
            bare.push(self.measure_rate(&upstream_addr, "noop", CALLERS, round).await?.0);
            empty.push(self.measure_rate(&product.addr, "up.noop", CALLERS, round).await?.0);
            alone.push(self.measure_rate(&upstream_addr, "noop", 1, round).await?.1);
            one.push(self.measure_rate(&product.addr, "up.noop", 1, round).await?.1);
        }
        let name = format!("MCP tools/call through Toolcrib, {CALLERS} at once, a tool of 0.5 ms");
        let (rate, baseline) = (median(measured), median(direct));
        self.push_measurement(Measurement::against_baseline(
            name,
            "calls/s",
            rate,
            baseline,
            Limit::AtLeast(0.6),
        ));
        let name = format!("MCP tools/call through Toolcrib, {CALLERS} at once, a tool of nothing");
        let (rate, baseline) = (median(empty), median(bare));
        self.push_measurement(Measurement::against_baseline(
            name,
            "calls/s",
            rate,
            baseline,
            Limit::None,
        ));
        let name = format!("MCP tools/call through Toolcrib, {CALLERS} at once, durable");
        self.push_measurement(Measurement::absolute(
            name,
            "calls/s",
            rate,
            Limit::AtLeast(4_000.0),
        ));
        let added = (median(one) - median(alone)) / 1e3;
        let name = "MCP tools/call through Toolcrib, one at a time, p50, added";
        self.push_measurement(Measurement::absolute(name, "ms", added, Limit::AtMost(1.2)));
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

/// Returns the metadata that every request carries.
fn request_meta() -> Value {
    json!({
        "io.modelcontextprotocol/protocolVersion": PROTOCOL_VERSION,
        "io.modelcontextprotocol/clientInfo": { "name": "bench", "version": "1" },
        "io.modelcontextprotocol/clientCapabilities": {},
    })
}

fn tools_list_request() -> Value {
    json!({ "jsonrpc": "2.0", "id": 1, "method": "tools/list",
        "params": { "_meta": request_meta() } })
}

/// Returns the `tools/call` request that is sent to the upstream and to Toolcrib.
fn tool_call_request(addr: &str, tool: &str) -> Vec<u8> {
    let body = json!({ "jsonrpc": "2.0", "id": 1, "method": "tools/call",
        "params": { "name": tool, "arguments": {}, "_meta": request_meta() } });
    let headers = [
        ("accept", "application/json, text/event-stream"),
        ("mcp-protocol-version", PROTOCOL_VERSION),
        ("mcp-method", "tools/call"),
        ("mcp-name", tool),
    ];
    http::post_with(addr, "/mcp", &headers, &body.to_string())
}

/// Returns a tool definition of typical size.
fn sample_tool(n: usize) -> Value {
    json!({
        "name": format!("bench.tool_{n:04}"),
        "description": "Does something with a thing of an account, and gives it with its state",
        "timeout_ms": 30_000,
        "schema": { "type": "object", "required": ["account_id"], "properties": {
            "account_id": { "type": "string", "description": "The account it belongs to" },
            "title": { "type": "string", "description": "What it is called" },
            "tags": { "type": "array", "items": { "type": "string" } },
            "due_at": { "type": "string", "format": "date-time" },
        } },
    })
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
        ensure!(Instant::now() < until, "Toolcrib does not find its upstream");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
