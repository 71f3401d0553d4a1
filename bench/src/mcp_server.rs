//! An MCP server with two tools, one that does nothing and one that takes half a millisecond: the
//! upstream whose calls are measured directly and through Toolcrib.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use rmcp::model::{
    CallToolRequestParams, CallToolResponse, CallToolResult, ContentBlock, Implementation,
    JsonObject, ListToolsResult, PaginatedRequestParams, ServerCapabilities, ServerConfig, Tool,
};
use rmcp::service::RequestContext;
use rmcp::transport::streamable_http_server::session::local::LocalSessionManager;
use rmcp::transport::{StreamableHttpServerConfig, StreamableHttpService};
use rmcp::{ErrorData, RoleServer, ServerHandler};

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
        _request: Option<PaginatedRequestParams>,
        _context: RequestContext<RoleServer>,
    ) -> Result<ListToolsResult, ErrorData> {
        Ok(ListToolsResult::with_all_items(Self::tools()))
    }

    fn get_tool(&self, name: &str) -> Option<Tool> {
        Self::tools().into_iter().find(|tool| tool.name == name)
    }

    async fn call_tool(
        &self,
        request: CallToolRequestParams,
        _context: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        if request.name == "work" {
            let started = Instant::now();
            while started.elapsed() < WORK_TIME {
                std::hint::spin_loop();
            }
        }
        Ok(CallToolResult::success(vec![ContentBlock::text(SUCCESS_MARKER)]).into())
    }
}

/// Serves the two tools until the process is killed.
///
/// # Errors
///
/// When the address cannot be bound.
pub async fn serve(listen: &str) -> anyhow::Result<()> {
    let config = StreamableHttpServerConfig::default().with_json_response(true);
    let sessions = Arc::new(LocalSessionManager::default());
    let service = StreamableHttpService::new(|| Ok(BenchMcpHandler), sessions, config);
    let listener = tokio::net::TcpListener::bind(listen).await?;
    let router = axum::Router::new().nest_service("/mcp", service);
    axum::serve(listener, router).await.context("the upstream of the benchmark")
}
