//! Transport for tool services that write to the database themselves. A report is a row of
//! `state.agent_inbox`; it is handled like a report that arrives over NATS or HTTP.
//!
//! The database notifies Toolcrib of new rows, and this transport also polls at a fixed interval.
//! Every writer counts as a tool service of the project that the row names: the permissions of the
//! database are the credentials here.

use std::time::Duration;

use serde_json::{Map, Value};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use toolcrib::domain::caller::{AuthMethod, Role};
use toolcrib::domain::fault::{Code, Error};
use toolcrib::utp::{ReportDisposition, ReportReceipt, SharedTableReport, UnprocessableMessage};
use toolcrib::{Caller, Engine};
use toolcrib_protocol::utp::report::{self, IncomingReport};
use toolcrib_protocol::utp::wire::UtpHeaders;

const REPORT_PAGE_SIZE: usize = 128;
const REPORT_POLL_INTERVAL: Duration = Duration::from_secs(2);

/// A handle to the running listener, which stops when the handle is dropped.
pub struct PostgresReportsHandle(CancellationToken);

impl Drop for PostgresReportsHandle {
    fn drop(&mut self) {
        self.0.cancel();
    }
}

/// Starts the listener. Returns `None` when the store has no tables that other programs write to.
pub fn start(engine: Engine) -> Option<PostgresReportsHandle> {
    let changes = engine.utp().written_reports().subscribe()?;
    let stop = CancellationToken::new();
    let stopped = stop.clone();
    tokio::spawn(async move {
        tokio::select! {
            () = run_listener(engine, changes) => {}
            () = stopped.cancelled() => {}
        }
    });
    Some(PostgresReportsHandle(stop))
}

async fn run_listener(engine: Engine, mut changes: watch::Receiver<u64>) {
    loop {
        changes.mark_unchanged();
        if let Err(error) = ingest_pending_reports(&engine).await {
            tracing::warn!(%error, "pending reports could not be read");
        }
        tokio::select! {
            changed = changes.changed() => if changed.is_err() { return },
            () = tokio::time::sleep(REPORT_POLL_INTERVAL) => {}
        }
    }
}

/// Ingests every pending report and records the result in its row.
async fn ingest_pending_reports(engine: &Engine) -> Result<(), Error> {
    let mut after = 0;
    loop {
        let page = engine.utp().written_reports().pending(after, REPORT_PAGE_SIZE).await?;
        let Some(last) = page.last() else { return Ok(()) };
        after = last.number;
        for written in &page {
            let outcome = ingest_report(engine, written).await;
            let disposition = match outcome {
                Ok(ingested) if ingested.is_late => ReportDisposition::Late,
                Ok(_) => ReportDisposition::Applied,
                // The report stays pending and is read again in the next pass.
                Err(error) if matches!(error.code(), Code::Overloaded | Code::Internal) => continue,
                Err(error) => {
                    tracing::info!(inbox_id = written.inbox_id, %error, "a report was refused");
                    ReportDisposition::Rejected
                }
            };
            engine.utp().written_reports().record_disposition(written.number, disposition).await?;
        }
    }
}

async fn ingest_report(
    engine: &Engine,
    written: &SharedTableReport,
) -> Result<ReportReceipt, Error> {
    let sender = written.source_agent_id.as_deref();
    let agent: String = sender.unwrap_or("database").chars().take(128).collect();
    let caller = Caller::new(&written.project, agent, Role::Provider, AuthMethod::Key);
    let subject = format!("state.agent_inbox/{}", written.inbox_id);
    let headers = collect_headers(written);
    if let Some(message) = find_mismatch(written) {
        let (kind, reason) = ("report", "malformed".to_owned());
        let payload = written.payload.clone();
        let error = Error::refused(Code::BadRequest, message.clone());
        let cut = false;
        let unprocessable = UnprocessableMessage {
            kind,
            reason,
            message,
            subject,
            headers,
            payload,
            is_truncated: cut,
        };
        engine.utp().dead_letters().save(&caller.project, unprocessable).await?;
        return Err(error);
    }
    let (headers, body) = (UtpHeaders::from_json(&headers), written.payload.as_bytes());
    let incoming = IncomingReport { subject: &subject, headers, body };
    report::ingest_report(engine, &caller, incoming).await
}

/// Returns the headers of a report. Those of the row take precedence over its columns, which have
/// defaults that a service of v1r4 leaves as they are.
fn collect_headers(written: &SharedTableReport) -> Map<String, Value> {
    let columns = [
        ("traceparent", Some(written.traceparent.clone()).filter(|text| !text.is_empty())),
        ("cg-recursion-depth", Some(written.depth.to_string())),
        ("cg-sender", written.source_agent_id.clone()),
    ];
    let columns =
        columns.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?.into())));
    let own =
        written.headers.iter().map(|(name, value)| (name.to_lowercase(), value.as_str().into()));
    columns.chain(own).collect()
}

/// Describes a mismatch between the row and the report that it holds.
fn find_mismatch(written: &SharedTableReport) -> Option<String> {
    let payload: Value = serde_json::from_str(&written.payload).ok()?;
    let field = |name: &str| payload.get(name).and_then(Value::as_str);
    if field("agent_id").is_some_and(|agent| agent != written.agent_id) {
        return Some("payload.agent_id is not the agent of the row".to_owned());
    }
    let (call, row) = (field("tool_call_id"), written.correlation_id.as_deref());
    if call.is_some() && row.is_some() && call != row {
        return Some("payload.tool_call_id is not the correlation_id of the row".to_owned());
    }
    None
}
