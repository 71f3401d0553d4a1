//! `toolcrib utp dead-letters` and `redrive`: lists dead letters and redrives one.

use clap::Args;
use serde_json::{Value, json};

use crate::cli::Context;
use crate::cli::client::Ask;
use crate::cli::failure::Failure;
use crate::cli::output::{plain, text};

#[derive(Debug, Args)]
pub(super) struct ListArgs {
    /// Maximum number of dead letters, up to 200 [default: 50]
    #[arg(long, value_name = "N")]
    limit: Option<u32>,
    /// Continue after a page: only those older than this one
    #[arg(long, value_name = "ID")]
    before: Option<String>,
}

pub(super) async fn list(context: &Context, args: ListArgs) -> Result<(), Failure> {
    let ask =
        Ask::get(&["v1", "dead_letters"]).query("limit", args.limit).query("before", args.before);
    let answer = context.client()?.ask(ask).await?;
    let output = context.output;
    if output.json {
        return output.value(&answer);
    }
    let row = |letter: &Value| {
        vec![
            text(letter, "created_at").to_owned(),
            text(letter, "kind").to_owned(),
            text(letter, "reason").to_owned(),
            text(letter, "message").to_owned(),
            text(letter, "last_try").to_owned(),
            text(letter, "id").to_owned(),
        ]
    };
    let letters = answer["dead_letters"].as_array().map(Vec::as_slice).unwrap_or_default();
    let heads = ["TIME", "KIND", "REASON", "MESSAGE", "LAST TRY", "ID"];
    output.table(&heads, letters.iter().map(row).collect(), "none")?;
    if let Some(before) = answer["next_before"].as_str() {
        output.note(&format!("there may be more: --before {}", plain(before)));
    }
    Ok(())
}

pub(super) async fn redrive(context: &Context, id: &str) -> Result<(), Failure> {
    let ask = Ask::post(&["v1", "dead_letters", id, "redrive"], json!({}));
    let answer = context.client()?.ask(ask).await?;
    if context.output.json {
        return context.output.value(&answer);
    }
    let came_to = if answer["published"] == json!(true) { "published again" } else { "taken" };
    context.output.note(&format!("{} was {came_to}", plain(id)));
    Ok(())
}
