//! Every MCP method, WebSocket message and NATS subject. The lists of what exists are read from the
//! source files that dispatch them.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};
use tokio_tungstenite::tungstenite::Error as WsError;

use super::{CALLERS, Fixture, assert_matrix, letter};
use crate::support::Api;
use crate::support::mcp::{MODERN, Mcp};
use crate::support::nats::Nats;
use crate::support::ws::Ws;

/// MCP methods: the handler, the method, and the cells. `E` is an error of the protocol, `D` a
/// result that is an error.
const MCP_METHODS: &[(&str, &str, &str)] = &[
    ("initialize", "initialize", "UAAAAAAA"),
    ("on_initialized", "notifications/initialized", "UAAAAAAA"),
    ("ping", "ping", "UAAAAAAA"),
    ("discover", "server/discover", "UAAAAAAA"),
    ("list_tools", "tools/list", "UAAAAAAA"),
    ("call_tool", "tools/call", "UADDDAAA"),
    ("get_task", "tasks/get", "UAEAAAAA"),
    // An update without answers only reads the task.
    ("update_task", "tasks/update", "UAEAAAAA"),
    ("cancel_task", "tasks/cancel", "UAEEEAAA"),
    ("list_resources", "resources/list", "UAAAAAAA"),
    ("list_resource_templates", "resources/templates/list", "UAAAAAAA"),
    ("read_resource", "resources/read", "UEEEEEEE"),
    ("list_prompts", "prompts/list", "UAAAAAAA"),
    ("get_prompt", "prompts/get", "UEEEEEEE"),
    ("complete", "completion/complete", "UAAAAAAA"),
    ("listen", "subscriptions/listen", "UAAAAAAA"),
    ("on_custom_request", "toolcrib/none", "UEEEEEEE"),
    ("on_custom_request", "events/list", "UAAAAAAA"),
    ("on_custom_request", "events/poll", "UAAAAAAA"),
    ("on_custom_request", "events/stream", "UAAAAAAA"),
    ("on_custom_request", "events/subscribe", "UEEEEEEE"),
    ("on_custom_request", "events/unsubscribe", "UEEEEEEE"),
    ("set_level", "logging/setLevel", "UAAAAAAA"),
    ("subscribe", "resources/subscribe", "UAAAAAAA"),
    ("unsubscribe", "resources/unsubscribe", "UAAAAAAA"),
];

/// WebSocket messages of clients.
const WS_MESSAGES: &[(&str, &str)] = &[
    ("approval_decide", "UFEFFAAF"),
    ("approvals_follow", "UFEFFAAF"),
    ("hello", "UFAFFAAF"),
    ("ping", "UFAFFAAF"),
    ("tool_ack", "UFEFFEEF"),
    ("tool_progress", "UFEFFEEF"),
    ("tool_result", "UFEFFEEF"),
];

/// NATS subjects after `rpc.`. The subject names the caller, so the columns are: without keys, with
/// keys, and in a project that does not exist. A cell is `ok` or the code of the error.
const NATS_SUBJECTS: &[(&str, &str)] = &[
    ("agent.ada.ack", "ok ok ok"),
    ("agent.ada.dispatch", "not_found conflict not_found"),
    ("agent.ada.finish", "not_found conflict not_found"),
    ("agent.ada.inbox", "ok ok ok"),
    ("agent.ada.lease", "ok conflict not_found"),
    ("agent.ada.renew", "ok conflict not_found"),
    ("agent.ada.resume", "conflict conflict not_found"),
    ("agent.ada.stop", "ok ok not_found"),
    ("agent.ada.suspend", "conflict conflict not_found"),
    ("agent.ada.turn", "ok ok not_found"),
    ("sys.cards.follow", "ok ok ok"),
    ("sys.cards.get", "not_found not_found not_found"),
    ("sys.cards.put", "bad_request bad_request not_found"),
    ("sys.l0.dead_letter", "bad_request bad_request not_found"),
    ("sys.l0.report", "bad_request bad_request bad_request"),
    ("sys.l0.reports", "bad_request bad_request bad_request"),
];

/// Returns the words that a line of the source has between these texts.
fn words_between<'s>(source: &'s str, before: &str, after: &str) -> BTreeSet<&'s str> {
    let lines = source.lines().filter_map(|line| line.strip_prefix(before));
    let words = lines.filter_map(|line| line.split_once(after).map(|(word, _)| word));
    words.filter(|word| word.chars().all(|c| c.is_ascii_lowercase() || c == '_')).collect()
}

fn mcp_params(fixture: &Fixture, method: &str) -> Value {
    let task = || json!({ "taskId": fixture.call_id });
    match method {
        "tools/call" => {
            json!({ "name": "calculation.eval", "arguments": { "expression": "1" } })
        }
        "tasks/get" | "tasks/cancel" => task(),
        "tasks/update" => json!({ "taskId": fixture.call_id, "inputResponses": {} }),
        "resources/read" | "resources/subscribe" | "resources/unsubscribe" => {
            json!({ "uri": "none://x" })
        }
        "prompts/get" => json!({ "name": "none" }),
        "completion/complete" => json!({
            "ref": { "type": "ref/prompt", "name": "none" },
            "argument": { "name": "a", "value": "b" },
        }),
        "logging/setLevel" => json!({ "level": "info" }),
        "subscriptions/listen" => json!({ "notifications": { "toolsListChanged": true } }),
        "events/poll" => json!({ "name": "tool_call.ended", "maxEvents": 1 }),
        "events/stream" => json!({ "name": "tool_call.ended" }),
        "events/unsubscribe" => json!({ "id": "sub_none" }),
        "toolcrib/none" => json!({}),
        _ => json!({}),
    }
}

/// Returns the cell of one method: the status over HTTP, or the kind of response.
async fn mcp_cell(fixture: &Fixture, api: &Api, method: &str) -> char {
    let is_legacy = matches!(
        method,
        "initialize"
            | "ping"
            | "logging/setLevel"
            | "resources/subscribe"
            | "resources/unsubscribe"
            | "notifications/initialized"
            | "toolcrib/none"
    );
    let tools = Mcp::modern(api).request("tools/list", json!({})).send().await.unwrap();
    if tools.status() != 200 {
        return letter(tools.status().as_u16());
    }
    let client = match is_legacy {
        true => Mcp::legacy(api).await,
        false => Mcp::modern(api).with_tasks(),
    };
    if matches!(method, "initialize" | "notifications/initialized") {
        return 'A';
    }
    let mut params = mcp_params(fixture, method);
    if method == "tasks/cancel" {
        params["taskId"] = fixture.callers[1].invoke("a.tool", json!({})).await.into();
    }
    if matches!(method, "subscriptions/listen" | "events/stream") {
        assert_eq!(client.revision, MODERN);
        return letter(client.request(method, params).send().await.unwrap().status().as_u16());
    }
    let response = client.ask(method, params).await;
    let Some(last) = response.messages.last() else { return letter(response.status) };
    match () {
        () if !last["error"].is_null() => 'E',
        () if last["result"]["isError"] == true => 'D',
        () => 'A',
    }
}

#[tokio::test]
async fn every_mcp_method_answers_every_role_as_expected() {
    let source = include_str!("../../../../transport/src/mcp/server.rs");
    let source = source.split("impl ServerHandler for").nth(1).unwrap();
    let handlers = words_between(source, "    async fn ", "(");
    let known: BTreeSet<&str> = MCP_METHODS.iter().map(|(handler, ..)| *handler).collect();
    let of_library = BTreeSet::from(["initialize", "ping", "discover"]);
    let missing: Vec<_> = handlers.difference(&known).collect();
    assert!(missing.is_empty(), "handlers without an expectation: {missing:?}");
    let extra: Vec<_> = known.difference(&handlers).filter(|h| !of_library.contains(*h)).collect();
    assert!(extra.is_empty(), "expectations for nothing: {extra:?}");
    // Methods that the MCP library does not know.
    let source = include_str!("../../../../transport/src/mcp/operations/events.rs");
    let lines = source.lines().filter_map(|line| line.trim_start().strip_prefix('"'));
    let mut methods: BTreeSet<&str> =
        lines.filter_map(|line| Some(line.split_once("\" => ")?.0)).collect();
    let source = include_str!("../../../../transport/src/mcp/operations/event_stream.rs");
    let named = source.split("EVENT_STREAM: &str = \"").nth(1);
    methods.extend(named.and_then(|rest| rest.split('"').next()));
    let expected = MCP_METHODS.iter().map(|(_, method, _)| *method);
    let expected: BTreeSet<&str> = expected.filter(|m| m.starts_with("events/")).collect();
    assert_eq!(methods, expected, "methods without an expectation, or the other way round");
    let fixture = Fixture::new().await;
    let mut found = BTreeMap::new();
    for (_, method, _) in MCP_METHODS {
        let mut cells = String::new();
        for api in &fixture.callers {
            cells.push(mcp_cell(&fixture, api, method).await);
        }
        found.insert((*method).to_owned(), cells);
    }
    let expected: Vec<(&str, &str)> =
        MCP_METHODS.iter().map(|(_, m, cells)| (*m, *cells)).collect();
    assert_matrix(&found, &expected);
}

async fn ws_cell(fixture: &Fixture, api: &Api, kind: &str) -> char {
    let mut socket = match Ws::open(api).await {
        Ok(socket) => socket,
        Err(WsError::Http(response)) => return letter(response.status().as_u16()),
        Err(error) => panic!("{error}"),
    };
    let own = json!({ "type": "hello", "client_id": "c1" });
    socket.send(own).await;
    let answer = socket.receive().await;
    if kind == "hello" || answer["type"] != "hello_ack" {
        return if answer["type"] == "hello_ack" { 'A' } else { 'E' };
    }
    socket
        .send(json!({ "type": kind, "tool_call_id": fixture.call_id, "attempt": 1,
            "status": "SUCCEEDED", "result": 1, "message": "x", "confirm": true,
            "decisions": [{ "approval_id": "apr_none", "verdict": "approve" }] }))
        .await;
    let answer = socket.receive().await;
    if answer["type"] == "error" { 'E' } else { 'A' }
}

#[tokio::test]
async fn every_websocket_message_answers_every_role_as_expected() {
    let source = include_str!("../../../../transport/src/http/internal/ingress/ws.rs");
    let mut kinds = words_between(source, "            \"", "\" =>");
    kinds.extend(["hello", "ping"]);
    let known: BTreeSet<&str> = WS_MESSAGES.iter().map(|(kind, _)| *kind).collect();
    assert_eq!(kinds, known, "every message has an expectation");
    let fixture = Fixture::new().await;
    let mut found = BTreeMap::new();
    for kind in kinds {
        let mut cells = String::new();
        for api in &fixture.callers {
            cells.push(ws_cell(&fixture, api, kind).await);
        }
        assert_eq!(cells.len(), CALLERS.len());
        found.insert(kind.to_owned(), cells);
    }
    assert_matrix(&found, WS_MESSAGES);
}

fn nats_subjects() -> BTreeSet<String> {
    let sys = include_str!("../../../../transport/src/nats/sys.rs");
    let sys = sys.lines().filter_map(|line| line.trim().strip_prefix("(\""));
    let sys = sys.filter_map(|line| line.split_once("\") =>").map(|(names, _)| names));
    let sys = sys.map(|names| format!("sys.{}", names.replace("\", \"", ".")));
    let agent = include_str!("../../../../transport/src/nats/agent.rs");
    let agent = words_between(agent, "        \"", "\" =>");
    let agent: Vec<String> = agent.into_iter().map(|name| format!("agent.ada.{name}")).collect();
    sys.chain(agent).collect()
}

#[tokio::test]
async fn every_nats_subject_answers_every_caller_as_expected() {
    let subjects = nats_subjects();
    let known: BTreeSet<String> = NATS_SUBJECTS.iter().map(|(row, _)| (*row).to_owned()).collect();
    assert_eq!(subjects, known, "every subject has an expectation");
    let Some(nats) = Nats::start().await else { return };
    let server = nats.server().await;
    let peer = nats.peer().await;
    let body = json!({ "agent_turn_id": "turn_none", "turn_epoch": 1, "card_ids": ["card_none"],
        "target": "t", "inbox": "_INBOX.x", "reports": [], "card": {}, "inbox_ids": [],
        "calls": [{ "tool_call_id": "c", "tool_name": "calculation.eval", "arguments": {} }] });
    let entry = json!({ "worker_target": "w" });
    server.operator().put("/v1/agents/ada", entry).await.is(200);
    let ask = async |project: &str, subject: &str| {
        // `finish` refuses fields that it does not know.
        let body = match subject.ends_with(".finish") {
            true => json!({ "agent_turn_id": "turn_none", "turn_epoch": 1 }),
            false => body.clone(),
        };
        let answer = peer.request_in(project, subject, body, &[]).await;
        match answer["ok"] == true {
            true => "ok".to_owned(),
            false => answer["error"]["code"].as_str().unwrap_or("none").to_owned(),
        }
    };
    let mut rows: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for subject in &subjects {
        rows.entry(subject).or_default().push(ask("default", subject).await);
    }
    server.keyed("default", "boss", "admin", &[]).await;
    for project in ["default", "unknown"] {
        for subject in &subjects {
            rows.entry(subject).or_default().push(ask(project, subject).await);
        }
    }
    let found: Vec<(String, String)> =
        rows.into_iter().map(|(row, cells)| (row.to_owned(), cells.join(" "))).collect();
    let expected: Vec<(String, String)> =
        NATS_SUBJECTS.iter().map(|(row, cells)| ((*row).into(), (*cells).into())).collect();
    assert_eq!(found, expected);
}
