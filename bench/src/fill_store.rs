//! Fills a store with finished calls through the engine's own port, so that the benchmark can
//! measure a server that has been in use for a while.

use std::path::Path;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use futures::{StreamExt, TryStreamExt};
use toolcrib::domain::call::{Call, Hold, Origin, Status, Target};
use toolcrib::domain::event::{EventKind, EventRecord};
use toolcrib::domain::fault::Fault;
use toolcrib::domain::id::IdGenerator;
use toolcrib::domain::retry::Backoff;
use toolcrib::lifecycle::{Event, step};
use toolcrib::ports::store::{NewCall, Store};
use toolcrib::{Effect, Executor, Json};
use toolcrib_store::SqliteStore;

/// Number of calls written concurrently; they share commits.
const WRITE_CONCURRENCY: usize = 512;

/// Writes `count` finished calls: of 20 tools, one run per 100 calls, one call in 50 failed.
///
/// # Errors
///
/// When the store cannot be opened or written.
pub async fn fill_store(data_dir: &Path, count: u64) -> anyhow::Result<()> {
    let store = SqliteStore::open(&data_dir.join("toolcrib.db"))?;
    let ids = IdGenerator::default();
    let now = SystemTime::now().duration_since(UNIX_EPOCH)?;
    let first_ms = (now.as_millis() as u64).saturating_sub(count * 10);
    let writes = futures::stream::iter(0..count).map(|n| {
        let call = build_finished_call(&ids, n, first_ms + n * 10);
        async { store.create_call(call).await.map(|_| ()) }
    });
    writes.buffered(WRITE_CONCURRENCY).try_collect::<()>().await?;
    Ok(())
}

/// Builds a finished call with the event history it would have.
fn build_finished_call(ids: &IdGenerator, n: u64, at_ms: u64) -> NewCall {
    let args = Json::from_value(&serde_json::json!({ "query": format!("call number {n}") }));
    let tool = format!("bench.tool_{}", n % 20);
    let call = Call {
        id: ids.next_call_id(at_ms),
        project: "default".into(),
        run_id: format!("run_{}", n / 100),
        tool_name: tool.clone(),
        args: args.clone(),
        origin: Origin { agent: "default".into(), ..Origin::default() },
        target: Target {
            tool,
            version: "0".into(),
            executor: Executor::BUILTIN,
            traits: Executor::BUILTIN.traits(),
            effect: Effect::Read,
            after_execution: None,
            args,
        },
        fallbacks: Vec::new(),
        max_retries: 0,
        attempt_timeout_ms: None,
        input_timeout_ms: 3_600_000,
        attempt_deadline_ms: None,
        backoff: Backoff::default(),
        status: Status::Pending,
        hold: Some(Hold::Queue),
        attempt: 0,
        target_attempts: 0,
        acknowledged_by: None,
        elicitation: None,
        approval: None,
        failed_attempt: None,
        lost_attempts: 0,
        node: None,
        created_ms: at_ms,
        deadline_ms: at_ms + 30_000,
        started_ms: None,
        attempt_dispatched_ms: None,
        completed_ms: None,
        outcome: None,
        version: 1,
    };
    let result = match n % 50 {
        0 => Err(Fault::runtime("the tool failed, as one in fifty does").retryable(false)),
        _ => Ok(Json::from_value(&serde_json::json!({ "answer": n }))),
    };
    let mut records = vec![EventRecord::new(EventKind::Requested, at_ms, 0)];
    let mut call = call;
    let claim = Event::Claim { node: "node_bench".into() };
    let report = Event::Report { attempt: None, by: None, result };
    for event in [claim, report] {
        if let Ok(next) = step(&call, &event, at_ms + 5) {
            records.extend(next.records);
            call = Call { version: 1, ..next.call };
        }
    }
    NewCall {
        call: Arc::new(call),
        records,
        key: None,
        undelivered: None,
        approval: None,
        group_member: None,
    }
}
