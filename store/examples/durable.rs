//! Tickets in SQLite: a call is accepted, the program ends, and the next one finds it, finishes
//! what was not done, and has the answer.
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

/// A tool that never ends in a program that is about to end, and at once in the next.
fn greet(last_program: bool) -> FnTool {
    FnTool::new("demo.greet", "Greets a person", move |args: Name| async move {
        if last_program {
            std::future::pending::<()>().await;
        }
        Ok::<_, String>(format!("Hello, {}!", args.name))
    })
    // Twice is as good as once: so what was under way when a program ended is tried again.
    .effect(Effect::Read)
}

async fn engine(file: &Path, last_program: bool) -> Result<Engine, Box<dyn std::error::Error>> {
    let store = Arc::new(SqliteStore::open(file)?);
    Ok(Engine::builder().store(store).tool(greet(last_program)).start().await?)
}

/// Two programs, one after the other, on the same file; answers with what there is to show.
pub async fn show(file: &Path) -> Result<String, Box<dyn std::error::Error>> {
    let caller = Caller::local("default");
    let mut output = String::new();

    let first = engine(file, true).await?;
    let mut asked = CallRequest::new("demo.greet", r#"{"name": "Ada"}"#)?;
    asked.idempotency_key = Some("greet-ada".to_owned());
    let ticket = first.calls().invoke(&caller, asked.clone()).await?;
    writeln!(output, "before the restart: {}", ticket.call.status.as_str())?;
    // Nothing is waited for: this is as good as a crash.
    first.shut_down(Duration::ZERO).await;
    drop((first, ticket.clone()));

    let second = engine(file, false).await?;
    let call = second.calls().wait(&caller, &ticket.call.id, Until::Ended).await?;
    let answer = call.outcome.as_ref().and_then(|outcome| outcome.data.as_ref());
    writeln!(output, "after the restart: {}", call.status.as_str())?;
    writeln!(output, "answer: {}", answer.ok_or("there is an answer")?.text())?;
    writeln!(output, "attempts: {}", call.attempt)?;
    let again = second.calls().invoke(&caller, asked).await?;
    let same = again.call.id == call.id && again.replayed;
    writeln!(output, "the same key gives the same ticket: {same}")?;
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
