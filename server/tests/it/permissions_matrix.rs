//! Every route, MCP method, NATS subject and WebSocket message against every kind of credentials.
//! A route, method, subject or message without an expectation fails the test, and so does an
//! expectation without one. `routes` expects exact statuses.
//!
//! In `messages` a cell is one letter: `A` is an answer, `U` is 401, `F` is 403 and `N` is 404.

mod messages;
mod routes;
use std::collections::BTreeMap;

use serde_json::json;

use crate::support::api::offer;
use crate::support::{Api, Server};

/// The columns of the matrix.
const CALLERS: [&str; 8] =
    ["none", "agent", "provider", "approver", "auditor", "admin", "operator", "session token"];

/// A server with a caller for every column, and something to ask for.
struct Fixture {
    _server: Server,
    callers: Vec<Api>,
    /// An ended call of the agent.
    call_id: String,
}

impl Fixture {
    async fn new() -> Self {
        let server = Server::start().await;
        let admin = server.keyed("default", "boss", "admin", &[]).await;
        let agent = server.keyed("default", "ada", "agent", &["*"]).await;
        let provider = server.keyed("default", "tools", "provider", &[]).await;
        let approver = server.keyed("default", "judge", "approver", &[]).await;
        let auditor = server.keyed("default", "eye", "auditor", &[]).await;
        let token = agent.post("/v1/session_tokens", json!({ "ttl_s": 3_600 })).await.is(201);
        let session = server.with_key(token["token"].as_str().unwrap());
        let operator = server.operator();
        provider.register("c1", json!([offer("a.tool")])).await;
        let call_id = agent.invoke("calculation.eval", json!({ "expression": "6*7" })).await;
        agent.finished(&call_id).await;
        let callers =
            vec![server.api(), agent, provider, approver, auditor, admin, operator, session];
        Self { _server: server, callers, call_id }
    }
}

/// Returns the letter of a status.
fn letter(status: u16) -> char {
    match status {
        401 => 'U',
        403 => 'F',
        404 => 'N',
        405 | 500..=599 => panic!("status {status}"),
        _ => 'A',
    }
}

/// Compares a matrix with its expectations, and reports every difference.
fn assert_matrix(found: &BTreeMap<String, String>, expected: &[(&str, &str)]) {
    let columns = CALLERS.join(", ");
    let expected: BTreeMap<String, String> =
        expected.iter().map(|(row, cells)| ((*row).to_owned(), (*cells).to_owned())).collect();
    let mut differences = Vec::new();
    for (row, cells) in found {
        match expected.get(row) {
            None => differences.push(format!("without an expectation: (\"{row}\", \"{cells}\"),")),
            Some(cells) if cells.len() != CALLERS.len() => {
                differences.push(format!("{row}: {cells} has not {} cells", CALLERS.len()));
            }
            Some(expected) if expected != cells => {
                differences.push(format!("{row}: found {cells}, expected {expected}"));
            }
            Some(_) => {}
        }
    }
    let unknown = expected.keys().filter(|row| !found.contains_key(*row));
    differences.extend(unknown.map(|row| format!("an expectation for nothing: {row}")));
    assert!(differences.is_empty(), "columns: {columns}\n{}", differences.join("\n"));
}
