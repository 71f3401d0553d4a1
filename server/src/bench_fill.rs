//! Fills a store with finished calls through the engine's own port, so that the benchmark can
//! measure a server that has been in use for a while.

use std::path::Path;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use futures::{StreamExt, TryStreamExt};
use toolcrib::call::{Asked, Call, Hold, Status, Target};
use toolcrib::event::{Kind, Record};
use toolcrib::fault::Fault;
use toolcrib::id::Minter;
use toolcrib::lifecycle::{Event, step};
use toolcrib::retry::Backoff;
use toolcrib::store::{NewCall, Store};
use toolcrib::{Effect, Executor, Json};
use toolcrib_store::SqliteStore;

/// Number of calls written concurrently; they share commits.
const AT_ONCE: usize = 512;

/// Writes `count` finished calls: of 20 tools, one run per 100 calls, one call in 50 failed.
pub async fn run(data_dir: &Path, count: u64) -> anyhow::Result<()> {
    let store = SqliteStore::open(&data_dir.join("toolcrib.db"))?;
    let minter = Minter::default();
    let now = SystemTime::now().duration_since(UNIX_EPOCH)?;
    let first_ms = (now.as_millis() as u64).saturating_sub(count * 10);
    let writes = futures::stream::iter(0..count).map(|n| {
        let call = finished(&minter, n, first_ms + n * 10);
        async { store.create(call).await.map(|_| ()) }
    });
    writes.buffered(AT_ONCE).try_collect::<()>().await?;
    Ok(())
}

/// Builds a finished call with the event history it would have.
fn finished(minter: &Minter, n: u64, at_ms: u64) -> NewCall {
    let args = Json::of_value(&serde_json::json!({ "query": format!("call number {n}") }));
    let tool = format!("bench.tool_{}", n % 20);
    let call = Call {
        id: minter.call(at_ms),
        project: "default".into(),
        run_id: format!("run_{}", n / 100),
        tool_name: tool.clone(),
        args: args.clone(),
        asked: Asked { agent: "default".into(), ..Asked::default() },
        target: Target {
            tool,
            version: "0".into(),
            executor: Executor::Builtin,
            effect: Effect::Read,
            args,
        },
        alternates: Vec::new(),
        max_retries: 0,
        backoff: Backoff::default(),
        status: Status::Pending,
        hold: Some(Hold::Queue),
        attempt: 0,
        target_attempts: 0,
        taken_by: None,
        dialogue: None,
        failed: None,
        node: None,
        created_ms: at_ms,
        deadline_ms: at_ms + 30_000,
        started_ms: None,
        attempt_ms: None,
        completed_ms: None,
        outcome: None,
        version: 1,
    };
    let result = match n % 50 {
        0 => Err(Fault::runtime("the tool failed, as one in fifty does").retryable(false)),
        _ => Ok(Json::of_value(&serde_json::json!({ "answer": n }))),
    };
    let mut records = vec![Record::new(Kind::Requested, at_ms, 0)];
    let mut call = call;
    let claim = Event::Claim { node: "node_bench".into() };
    let report = Event::Report { attempt: None, by: None, result };
    for event in [claim, report] {
        if let Ok(next) = step(&call, &event, at_ms + 5) {
            records.extend(next.records);
            call = Call { version: 1, ..next.call };
        }
    }
    NewCall { call: Arc::new(call), records, key: None, coming: None }
}
