//! Calls a background tool: the call is accepted at once, the program continues, and a listener
//! receives the result when the call has ended. Until then, the prompt lists the call as pending.
//!
//! `cargo run -p toolcrib --example background`

use std::sync::Arc;
use toolcrib::calls::Until;

use tokio::sync::{Notify, mpsc};
use toolcrib::{CallRequest, Caller, Effect, Engine, FnTool};

#[derive(serde::Deserialize, schemars::JsonSchema)]
struct Month {
    /// From 1 to 12.
    month: u8,
}

/// Starts a report, continues, receives its result, and returns the output.
pub async fn show() -> Result<String, Box<dyn std::error::Error>> {
    // Stands for slow work: the report is finished when `notify_one` is called.
    let finished = Arc::new(Notify::new());
    let signal = finished.clone();
    let report = FnTool::new("report.build", "Builds a monthly report", move |args: Month| {
        let finished = signal.clone();
        async move {
            finished.notified().await;
            Ok::<_, String>(format!("report of month {}: no problems", args.month))
        }
    });
    let report = report.background().effect(Effect::Idempotent).timeout_ms(600_000);
    let days = FnTool::new("calendar.days", "Days of a month", |args: Month| async move {
        let days = [31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
        let day = days.get(usize::from(args.month).wrapping_sub(1));
        day.copied().ok_or("there is no such month")
    });
    let engine = Engine::builder().tool(report).tool(days.effect(Effect::Read)).start().await?;
    let caller = Caller::local("default");

    // Two calls of one step: the program waits for the foreground tool only.
    for (call_id, tool) in [("call_0", "report.build"), ("call_1", "calendar.days")] {
        let mut request = CallRequest::new(tool, r#"{"month": 5}"#)?;
        (request.run_id, request.call_id) = ("run_1".to_owned(), Some(call_id.to_owned()));
        let ticket = engine.calls().invoke(&caller, request).await?;
        if !ticket.call.origin.background {
            engine.calls().wait(&caller, &ticket.call.id, Until::Ended).await?;
        }
    }
    let mut output = engine.runs().contexts().prompt(&caller, "run_1", 50, 400).await?.text;

    let mut context = engine.runs().contexts().context(&caller, "run_1", 50).await?;
    let (sender, mut receiver) = mpsc::unbounded_channel();
    context.on_tool_call(move |call, result| {
        // A listener must return quickly. An error is logged and does not affect other listeners.
        let text =
            result.outcome.as_ref().map_or_else(ToString::to_string, |d| d.text().to_owned());
        sender.send(format!("{} ({}): {text}", call.name, call.call_id))?;
        Ok(())
    });
    context.on_tool_call(|_, _| Err("this listener always fails".into()));

    finished.notify_one();
    while context.pending_calls().next().is_some() {
        engine.runs().contexts().refresh_context(&caller, &mut context, 10_000).await?;
    }
    let received = receiver.recv().await.ok_or("the listener was not called")?;
    output.push_str(&format!("\nreceived: {received}\n"));
    Ok(output)
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    print!("{}", show().await?);
    Ok(())
}
