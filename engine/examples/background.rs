//! A background tool: its call is accepted at once, the rest goes on, and a listener hears of the
//! result when it has come. In between, the model is told what is pending.
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

/// Starts a report, goes on, and hears of its end; answers with what there is to show.
pub async fn show() -> Result<String, Box<dyn std::error::Error>> {
    // Stands for whatever takes long: the report is ready when somebody says so.
    let paper = Arc::new(Notify::new());
    let printer = paper.clone();
    let report = FnTool::new("report.build", "Builds a monthly report", move |args: Month| {
        let paper = printer.clone();
        async move {
            paper.notified().await;
            Ok::<_, String>(format!("report of month {}: all is well", args.month))
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

    // The turn of a model: one call that is waited for, one that is not.
    for (call_id, tool) in [("call_0", "report.build"), ("call_1", "calendar.days")] {
        let mut asked = CallRequest::new(tool, r#"{"month": 5}"#)?;
        (asked.run_id, asked.call_id) = ("run_1".to_owned(), Some(call_id.to_owned()));
        let ticket = engine.calls().invoke(&caller, asked).await?;
        if !ticket.call.origin.background {
            engine.calls().wait(&caller, &ticket.call.id, Until::Ended).await?;
        }
    }
    let mut output = engine.runs().prompt(&caller, "run_1", 50, 400).await?.text;

    let mut context = engine.runs().context(&caller, "run_1", 50).await?;
    let (sender, mut receiver) = mpsc::unbounded_channel();
    context.on_tool_call(move |call, result| {
        // Long work belongs elsewhere; what fails here is logged and stops nobody.
        let text =
            result.outcome.as_ref().map_or_else(ToString::to_string, |d| d.text().to_owned());
        sender.send(format!("{} ({}): {text}", call.name, call.call_id))?;
        Ok(())
    });
    context.on_tool_call(|_, _| Err("this listener is always out of luck".into()));

    paper.notify_one();
    while context.pending_calls().next().is_some() {
        engine.runs().refresh_context(&caller, &mut context, 10_000).await?;
    }
    let heard = receiver.recv().await.ok_or("the listener was told")?;
    output.push_str(&format!("\nheard: {heard}\n"));
    Ok(output)
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    print!("{}", show().await?);
    Ok(())
}
