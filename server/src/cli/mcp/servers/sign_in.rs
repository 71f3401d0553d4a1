//! `toolcrib mcp sign-in` and `sign-out`: manage the tokens of upstream MCP servers.

use std::time::Duration;

use reqwest::Method;
use serde_json::{Value, json};

use super::{McpServersTarget, describe_source, require_server};
use crate::cli::CommandContext;
use crate::cli::client::ApiRequest;
use crate::cli::failure::{CommandFailure, exit};
use crate::cli::output::{now_ms, sanitize_line, str_member, u64_member};

/// Interval between checks for a completed sign-in.
const POLL_INTERVAL: Duration = Duration::from_millis(500);

/// Prints the sign-in URL and waits until the sign-in is over.
pub(super) async fn sign_in(
    context: &CommandContext,
    target: &McpServersTarget,
    name: &str,
    no_wait: bool,
) -> Result<(), CommandFailure> {
    let (client, output) = (require_server(target)?, context.output);
    let path = ["v1", "sources", "mcp", name];
    let started = client
        .request_json(ApiRequest::post(&[path[0], path[1], path[2], name, "sign-in"], json!({})))
        .await?;
    let Some(address) = started["oauth"]["sign_in_url"].as_str() else {
        return output.print_line(&describe_source(&started));
    };
    if output.json && no_wait {
        return output.print_json(&started);
    }
    if no_wait {
        return output.print_line(&sanitize_line(address));
    }
    output.print_note("open this in a browser:");
    output.print_note(&format!("  {}", sanitize_line(address)));
    let until = u64_member(&started["oauth"], "sign_in_expires_at_ms").unwrap_or_default();
    let spinner = output.start_spinner("waiting for the sign-in");
    let ended = loop {
        let source = client.request_json(ApiRequest::get(&path)).await?;
        if is_sign_in_over(&source, address) {
            break source;
        }
        if now_ms() > until {
            spinner.finish_and_clear();
            let message = "the sign-in was not completed in time";
            return Err(CommandFailure::new(exit::FAILURE, "SIGN_IN", message)
                .hint("start again: the link is valid for ten minutes"));
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    };
    spinner.finish_and_clear();
    if output.json {
        return output.print_json(&ended);
    }
    if ended["oauth"]["signed_in"] != true {
        let problem = ended["problem"].as_str().unwrap_or("the sign-in failed");
        return Err(CommandFailure::new(exit::FAILURE, "SIGN_IN", sanitize_line(problem)));
    }
    output.print_line(&describe_source(&ended))
}

/// Returns true if the sign-in that was started is over, successfully or not.
fn is_sign_in_over(source: &Value, address: &str) -> bool {
    let oauth = &source["oauth"];
    match oauth["sign_in_url"].as_str() {
        // A failed sign-in replaces its URL with a new one.
        Some(other) => other != address,
        None => oauth["signed_in"] == true && str_member(source, "state") != "starting",
    }
}

/// Deletes the tokens.
pub(super) async fn sign_out(
    context: &CommandContext,
    target: &McpServersTarget,
    name: &str,
) -> Result<(), CommandFailure> {
    match target {
        McpServersTarget::Server(client) => {
            let path = ["v1", "sources", "mcp", name, "sign-in"];
            client.request_json(ApiRequest::new(Method::DELETE, &path)).await?;
        }
        McpServersTarget::Directory { engine, caller } => {
            engine.upstreams().set_credential(&caller.project, name, None).await?;
        }
    }
    context.output.print_note(&format!("the tokens of {} are deleted", sanitize_line(name)));
    Ok(())
}
