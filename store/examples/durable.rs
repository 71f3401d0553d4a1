//! Stores calls in SQLite: a first engine accepts a call and stops, a second one on the same file
//! finds the call, executes it and has the result.
//!
//! `cargo run -p toolcrib-store --example durable`

use std::fmt::Write;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use toolcrib::calls::Until;

use toolcrib::{CallRequest, Caller, Effect, Engine, FnTool};
use toolcrib_store::SqliteStore;

#[derive(serde::Deserialize, schemars::JsonSchema)]
struct Name {
    name: String,
}

/// Returns a tool that hangs if `hangs` is true, and otherwise ends at once.
fn greet(hangs: bool) -> FnTool {
    FnTool::new("demo.greet", "Greets a person", move |args: Name| async move {
        if hangs {
            std::future::pending::<()>().await;
        }
        Ok::<_, String>(format!("Hello, {}!", args.name))
    })
    // A read can be repeated, so an attempt that was in flight at a crash is retried.
    .effect(Effect::Read)
}

async fn engine(file: &Path, hangs: bool) -> Result<Engine, Box<dyn std::error::Error>> {
    let store = Arc::new(SqliteStore::open(file)?);
    Ok(Engine::builder().store(store).tool(greet(hangs)).start().await?)
}

/// Starts two engines on the same file, one after the other, and returns the output.
pub async fn show(file: &Path) -> Result<String, Box<dyn std::error::Error>> {
    let caller = Caller::local("default");
    let mut output = String::new();

    let first = engine(file, true).await?;
    let mut request = CallRequest::new("demo.greet", r#"{"name": "Ada"}"#)?;
    request.idempotency_key = Some("greet-ada".to_owned());
    let ticket = first.calls().invoke(&caller, request.clone()).await?;
    writeln!(output, "before the restart: {}", ticket.call.status.as_str())?;
    // Stops without waiting for the attempt in flight, as a crash would.
    first.shut_down(Duration::ZERO).await;
    drop((first, ticket.clone()));

    let second = engine(file, false).await?;
    let call = second.calls().wait(&caller, &ticket.call.id, Until::Ended).await?;
    let answer = call.outcome.as_ref().and_then(|outcome| outcome.data.as_ref());
    writeln!(output, "after the restart: {}", call.status.as_str())?;
    writeln!(output, "answer: {}", answer.ok_or("the call has no result")?.text())?;
    writeln!(output, "attempts: {}", call.attempt)?;
    let again = second.calls().invoke(&caller, request).await?;
    let is_same = again.call.id == call.id && again.replayed;
    writeln!(output, "the same key gives the same ticket: {is_same}")?;
    second.shut_down(Duration::from_secs(1)).await;
    Ok(output)
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let directory = std::env::temp_dir().join(format!("toolcrib-durable-{}", std::process::id()));
    let output = show(&directory.join("toolcrib.db")).await;
    let _ = std::fs::remove_dir_all(&directory);
    print!("{}", output?);
    Ok(())
}
