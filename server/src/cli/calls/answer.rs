//! `toolcrib calls answer`: answers an elicitation, a question that a tool asks before it
//! continues.

use clap::Args;
use serde_json::{Map, Value, json};

use crate::cli::client::{ApiClient, ApiRequest};
use crate::cli::failure::CommandFailure;
use crate::cli::output::sanitize_line;
use crate::cli::{CommandContext, input, outcome};

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  toolcrib calls get tc_01K…               hold_details.questions lists the requested input
  toolcrib calls answer tc_01K… name=Ada
  toolcrib calls answer tc_01K… --question who --args '{\"name\": \"Ada\"}'
  toolcrib calls answer tc_01K… --decline")]
pub struct AnswerArgs {
    /// The ticket, tc_…
    id: String,
    /// The fields of the answer: name=value
    #[arg(value_name = "FIELD=VALUE")]
    pairs: Vec<String>,
    /// The fields as a JSON object
    #[arg(long, value_name = "JSON")]
    args: Option<String>,
    /// Key of the question, if there are several
    #[arg(long, value_name = "KEY")]
    question: Option<String>,
    /// Decline: the tool continues without an answer
    #[arg(long, conflicts_with_all = ["pairs", "args", "cancel"])]
    decline: bool,
    /// Cancel: the tool receives a cancellation instead of an answer
    #[arg(long, conflicts_with_all = ["pairs", "args"])]
    cancel: bool,
}

pub async fn run(context: &CommandContext, args: AnswerArgs) -> Result<(), CommandFailure> {
    let client = context.client()?;
    let key = match &args.question {
        Some(key) => key.clone(),
        None => find_only_question(&client, &args.id).await?,
    };
    let answer = match (args.decline, args.cancel) {
        (true, _) => json!({ "action": "decline" }),
        (_, true) => json!({ "action": "cancel" }),
        _ => {
            let content = input::parse_arguments(args.args.as_deref(), &args.pairs)?;
            json!({ "action": "accept", "content": content })
        }
    };
    let answers = Map::from_iter([(key, answer)]);
    let path = ["v1", "tool_calls", args.id.as_str(), "answer"];
    let call = client.request_json(ApiRequest::post(&path, json!({ "answers": answers }))).await?;
    if context.output.json {
        return context.output.print_json(&call);
    }
    context.output.print_note(&outcome::summary_line(context, &call));
    Ok(())
}

/// Returns the key of the open question. Fails unless there is exactly one.
async fn find_only_question(client: &ApiClient, id: &str) -> Result<String, CommandFailure> {
    let call = client.request_json(ApiRequest::get(&["v1", "tool_calls", id])).await?;
    let open = match &call["hold_details"]["questions"] {
        Value::Object(open) => open.keys().cloned().collect(),
        _ => Vec::new(),
    };
    match open.as_slice() {
        [key] => Ok(key.clone()),
        [] => Err(CommandFailure::usage(format!("{} asks nothing now", sanitize_line(id)))),
        several => {
            let keys = several.join(", ");
            Err(CommandFailure::usage(format!(
                "it requests several answers; select one with --question: {keys}"
            )))
        }
    }
}
