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
use toolcrib::caller::{Role, Trust};
use toolcrib::engine::{Ingested, Judged, Unreadable, WrittenReport};
use toolcrib::fault::{Code, Error};
use toolcrib::{Caller, Engine};

use crate::utp::report::{self, Incoming};
use crate::utp::wire::Headers;

const BATCH: usize = 128;
const LOOK_AGAIN: Duration = Duration::from_secs(2);

/// A handle to the running listener, which stops when the handle is dropped.
pub struct Open(CancellationToken);

impl Drop for Open {
    fn drop(&mut self) {
        self.0.cancel();
    }
}

/// Starts the listener. Returns `None` when the store has no tables that other programs write to.
pub fn open(engine: Engine) -> Option<Open> {
    let news = engine.written_news()?;
    let stop = CancellationToken::new();
    let stopped = stop.clone();
    tokio::spawn(async move {
        tokio::select! {
            () = take_all(engine, news) => {}
            () = stopped.cancelled() => {}
        }
    });
    Some(Open(stop))
}

async fn take_all(engine: Engine, mut news: watch::Receiver<u64>) {
    loop {
        news.mark_unchanged();
        if let Err(error) = run_once(&engine).await {
            tracing::warn!(%error, "pending reports could not be read");
        }
        tokio::select! {
            changed = news.changed() => if changed.is_err() { return },
            () = tokio::time::sleep(LOOK_AGAIN) => {}
        }
    }
}

/// Ingests every pending report and records the result in its row.
pub async fn run_once(engine: &Engine) -> Result<(), Error> {
    let mut after = 0;
    loop {
        let page = engine.written_reports(after, BATCH).await?;
        let Some(last) = page.last() else { return Ok(()) };
        after = last.number;
        for written in &page {
            let taken = take(engine, written).await;
            let judged = match taken {
                Ok(ingested) if ingested.late => Judged::Late,
                Ok(_) => Judged::Taken,
                // The report stays pending and is read again in the next pass.
                Err(error) if matches!(error.code(), Code::Overloaded | Code::Internal) => continue,
                Err(error) => {
                    tracing::info!(inbox_id = written.inbox_id, %error, "a report was refused");
                    Judged::Refused
                }
            };
            engine.judged(written.number, judged).await?;
        }
    }
}

async fn take(engine: &Engine, written: &WrittenReport) -> Result<Ingested, Error> {
    let sender = written.source_agent_id.clone().unwrap_or_else(|| "database".to_owned());
    let caller = Caller {
        project: written.project.clone(),
        agent: sender.chars().take(128).collect(),
        role: Role::Provider,
        trust: Trust::Key,
    };
    let subject = format!("state.agent_inbox/{}", written.inbox_id);
    let mut headers = Map::new();
    for (name, value) in [
        ("traceparent", written.traceparent.clone()),
        ("cg-recursion-depth", written.depth.to_string()),
        ("cg-sender", sender),
    ] {
        headers.insert(name.to_owned(), value.into());
    }
    if let Some(message) = contradiction(written) {
        let (kind, reason) = ("report", "malformed".to_owned());
        let payload = written.payload.clone();
        let error = Error::refused(Code::BadRequest, message.clone());
        let cut = false;
        let letter = Unreadable { kind, reason, message, subject, headers, payload, cut };
        engine.bury(&caller.project, letter).await?;
        return Err(error);
    }
    let (headers, body) = (Headers::written(&headers), written.payload.as_bytes());
    let incoming = Incoming { subject: &subject, headers, body };
    report::take(engine, &caller, incoming).await
}

/// Describes a mismatch between the row and the report that it holds.
fn contradiction(written: &WrittenReport) -> Option<String> {
    let payload: Value = serde_json::from_str(&written.payload).ok()?;
    let says = |name: &str| payload.get(name).and_then(Value::as_str);
    if says("agent_id").is_some_and(|agent| agent != written.agent_id) {
        return Some("payload.agent_id is not the agent of the row".to_owned());
    }
    let (call, row) = (says("tool_call_id"), written.correlation_id.as_deref());
    if call.is_some() && row.is_some() && call != row {
        return Some("payload.tool_call_id is not the correlation_id of the row".to_owned());
    }
    None
}
