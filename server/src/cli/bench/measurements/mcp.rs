//! Measures the time an MCP client waits for its list of tools.

use std::time::Instant;

use anyhow::ensure;
use serde_json::{Value, json};
use toolcrib_bench::report::{Limit, Measurement};

use super::{Bench, median};
use crate::cli::bench::processes::{BenchServer, BenchServerKind};

/// Number of tools in the list, and number of lists.
const TOOLS: usize = 1_000;
const LISTS: usize = 50;

impl Bench<'_> {
    /// Measures `tools/list` of a long list on one page, until the last byte.
    pub(super) async fn measure_tools_list(&mut self) -> anyhow::Result<()> {
        self.advance_progress(&format!("tools/list with {TOOLS} tools"));
        let dir = self.scratch.dir("listing")?;
        let (product, _) = BenchServer::start(BenchServerKind::Product, &dir).await?;
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
                .header("mcp-protocol-version", "2026-07-28")
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
}

fn tools_list_request() -> Value {
    json!({ "jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": { "_meta": {
        "io.modelcontextprotocol/protocolVersion": "2026-07-28",
        "io.modelcontextprotocol/clientInfo": { "name": "bench", "version": "1" },
        "io.modelcontextprotocol/clientCapabilities": {},
    } } })
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
