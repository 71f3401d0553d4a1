//! `toolcrib utp dead-letters` and `redrive`: lists dead letters and redrives one.

use clap::Args;
use serde_json::{Value, json};

use crate::cli::CommandContext;
use crate::cli::client::ApiRequest;
use crate::cli::failure::CommandFailure;
use crate::cli::output::{Column, sanitize_line, str_member};

#[derive(Debug, Args)]
pub(super) struct DeadLetterListArgs {
    /// Maximum number of dead letters, up to 200 [default: 50]
    #[arg(long, value_name = "N")]
    limit: Option<u32>,
    /// Continue after a page: only those older than this one
    #[arg(long, value_name = "ID")]
    before: Option<String>,
}

pub(super) async fn list(
    context: &CommandContext,
    args: DeadLetterListArgs,
) -> Result<(), CommandFailure> {
    let request = ApiRequest::get(&["v1", "dead_letters"])
        .query("limit", args.limit)
        .query("before", args.before);
    let answer = context.client()?.request_json(request).await?;
    let output = context.output;
    if output.json {
        return output.print_json(&answer);
    }
    let row = |dead_letter: &Value| {
        vec![
            str_member(dead_letter, "created_at").to_owned(),
            str_member(dead_letter, "kind").to_owned(),
            str_member(dead_letter, "reason").to_owned(),
            str_member(dead_letter, "message").to_owned(),
            str_member(dead_letter, "last_try").to_owned(),
            str_member(dead_letter, "id").to_owned(),
        ]
    };
    let dead_letters = answer["dead_letters"].as_array().map(Vec::as_slice).unwrap_or_default();
    let columns = [
        Column::detail("TIME", 3),
        Column::detail("KIND", 2),
        Column::text("REASON"),
        Column::text("MESSAGE"),
        Column::detail("LAST TRY", 1),
        Column::id("ID"),
    ];
    output.print_table(&columns, dead_letters.iter().map(row).collect(), "none")?;
    if let Some(before) = answer["next_before"].as_str() {
        output.print_note(&format!("there may be more: --before {}", sanitize_line(before)));
    }
    Ok(())
}

pub(super) async fn redrive(context: &CommandContext, id: &str) -> Result<(), CommandFailure> {
    let request = ApiRequest::post(&["v1", "dead_letters", id, "redrive"], json!({}));
    let answer = context.client()?.request_json(request).await?;
    if context.output.json {
        return context.output.print_json(&answer);
    }
    let outcome = if answer["published"] == json!(true) { "published again" } else { "taken" };
    context.output.print_note(&format!("{} was {outcome}", sanitize_line(id)));
    Ok(())
}
