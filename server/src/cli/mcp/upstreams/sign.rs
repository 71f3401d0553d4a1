//! `toolcrib mcp sign-in` and `sign-out`: manage the tokens of upstream MCP servers.

use std::time::Duration;

use reqwest::Method;
use serde_json::{Value, json};

use super::{Crib, in_words, running};
use crate::cli::Context;
use crate::cli::client::Ask;
use crate::cli::failure::{Failure, exit};
use crate::cli::output::{now_ms, number, plain, text};

/// Interval between checks for a completed sign-in.
const LOOK: Duration = Duration::from_millis(500);

/// Prints the sign-in URL and waits until the sign-in is over.
pub(super) async fn sign_in(
    context: &Context,
    crib: &Crib,
    name: &str,
    no_wait: bool,
) -> Result<(), Failure> {
    let (client, output) = (running(crib)?, context.output);
    let path = ["v1", "sources", "mcp", name];
    let begun =
        client.ask(Ask::post(&[path[0], path[1], path[2], name, "sign-in"], json!({}))).await?;
    let Some(address) = begun["oauth"]["sign_in_url"].as_str() else {
        return output.line(&in_words(&begun));
    };
    if output.json && no_wait {
        return output.value(&begun);
    }
    if no_wait {
        return output.line(&plain(address));
    }
    output.note("open this in a browser:");
    output.note(&format!("  {}", plain(address)));
    let until = number(&begun["oauth"], "sign_in_expires_at_ms").unwrap_or_default();
    let spinner = output.spinner("waiting for the sign-in");
    let ended = loop {
        let shown = client.ask(Ask::get(&path)).await?;
        if is_done(&shown, address) {
            break shown;
        }
        if now_ms() > until {
            spinner.finish_and_clear();
            let message = "nobody has signed in in time";
            return Err(Failure::new(exit::FAILURE, "SIGN_IN", message)
                .hint("begin again: the address is good for ten minutes"));
        }
        tokio::time::sleep(LOOK).await;
    };
    spinner.finish_and_clear();
    if output.json {
        return output.value(&ended);
    }
    if ended["oauth"]["signed_in"] != true {
        let problem = ended["problem"].as_str().unwrap_or("the sign-in failed");
        return Err(Failure::new(exit::FAILURE, "SIGN_IN", plain(problem)));
    }
    output.line(&in_words(&ended))
}

/// Returns true if the sign-in that was started is over, successfully or not.
fn is_done(shown: &Value, address: &str) -> bool {
    let oauth = &shown["oauth"];
    match oauth["sign_in_url"].as_str() {
        // A failed sign-in replaces its URL with a new one.
        Some(other) => other != address,
        None => oauth["signed_in"] == true && text(shown, "state") != "starting",
    }
}

/// Deletes the tokens.
pub(super) async fn sign_out(context: &Context, crib: &Crib, name: &str) -> Result<(), Failure> {
    match crib {
        Crib::Server(client) => {
            let path = ["v1", "sources", "mcp", name, "sign-in"];
            client.ask(Ask::new(Method::DELETE, &path)).await?;
        }
        Crib::Directory { engine, caller } => {
            engine.keep_upstream_grant(&caller.project, name, None).await?;
        }
    }
    context.output.note(&format!("the tokens of {} are forgotten", plain(name)));
    Ok(())
}
