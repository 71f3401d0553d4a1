//! Logs, metrics and traces of the process.

mod otlp;
mod prometheus;
mod sampling;
mod spans;
use std::io::IsTerminal;

use tracing_subscriber::EnvFilter;

use crate::config::LogFormat;

pub use otlp::OtlpExporter;
pub use prometheus::metrics_handle;

/// Starts logging to standard error. `TOOLCRIB_LOG` takes precedence over the configured level.
pub fn start_logging(level: &str, format: LogFormat) {
    let filter = std::env::var("TOOLCRIB_LOG").unwrap_or_else(|_| level.to_owned());
    let filter =
        EnvFilter::try_new(with_rmcp_filters(&filter)).unwrap_or_else(|_| EnvFilter::new("info"));
    let json = match format {
        LogFormat::Auto => !std::io::stderr().is_terminal(),
        LogFormat::Text => false,
        LogFormat::Json => true,
    };
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    // A second start in one process, as in tests, keeps the first subscriber.
    let _ = if json { builder.json().try_init() } else { builder.try_init() };
}

/// Adds filters for rmcp, the MCP library, which logs several lines per request. A level that names
/// it, such as `rmcp=info`, enables them. Its sign-in module stays at `warn` even then, because its
/// other lines contain an authorization code.
fn with_rmcp_filters(filter: &str) -> String {
    let filter = if filter.contains("rmcp") { filter } else { &format!("{filter},rmcp=error") };
    format!("{filter},rmcp::transport::auth=warn")
}
