//! One approval everywhere: MCP, event streams, webhooks and the command line show it.

use serde_json::{Value, json};

use super::Fixture;
use crate::support::Server;
use crate::support::mcp::Mcp;
use crate::support::process::operator_token;
use crate::support::receiver::{Answer, KEY, Receiver};
use crate::support::ws::Ws;

#[tokio::test]
async fn an_mcp_task_is_input_required_until_the_decision() {
    let fixture = Fixture::start().await;
    let client = Mcp::modern(&fixture.api).with_tasks();
    let task = client.call("mail.send", json!({ "to": "ada" })).await.result();
    assert_eq!((&task["resultType"], &task["status"]), (&json!("task"), &json!("input_required")));
    let text = task["statusMessage"].as_str().unwrap();
    assert!(text.contains("approval"), "{task}");
    let id = task["taskId"].as_str().unwrap().to_owned();
    let get = || async { client.ask("tasks/get", json!({ "taskId": id })).await.result() };
    assert_eq!(get().await["status"], "input_required");
    let approval = fixture.api.call(&id).await["approval_id"].as_str().unwrap().to_owned();
    fixture.approve(&approval).await;
    assert_eq!(get().await["status"], "working");
    fixture.execute(json!({ "sent": true })).await;
    let done = get().await;
    assert_eq!(done["status"], "completed", "{done}");
    assert_eq!(done["result"]["structuredContent"], json!({ "sent": true }));
}

#[tokio::test]
async fn an_mcp_client_that_asks_people_gets_a_message_with_the_link() {
    let server = Server::with(|config| config.transports.mcp.wait_ms = 30_000).await;
    let fixture = Fixture::on(server).await;
    for (capabilities, mode) in [
        (json!({ "elicitation": { "form": {}, "url": {} } }), "url"),
        (json!({ "elicitation": {} }), "form"),
    ] {
        let client = Mcp::modern(&fixture.api).able(capabilities);
        let asks = client.call("mail.send", json!({ "mode": mode })).await.result();
        assert_eq!(asks["resultType"], "input_required", "{asks}");
        let request = &asks["inputRequests"]["approval"]["params"];
        assert_eq!(request["mode"], mode, "{asks}");
        let list = fixture.operator.get("/v1/approvals?status=pending").await.is(200);
        let approval = list["approvals"][0]["approval_id"].as_str().unwrap().to_owned();
        let message = request["message"].as_str().unwrap();
        assert!(message.contains("mail.send") && message.contains(&approval), "{message}");
        if mode == "url" {
            let url = request["url"].as_str().unwrap();
            assert!(url.starts_with("http") && url.ends_with(&approval), "{url}");
        }
        // The client repeats its request and gets the result on it.
        let state = &asks["requestState"];
        let again = json!({
            "name": "mail.send", "arguments": { "mode": mode }, "requestState": state,
            "inputResponses": { "approval": { "action": "accept" } },
        });
        let resumed = client.ask("tools/call", again);
        let decided = async {
            fixture.approve(&approval).await;
            fixture.execute(json!("sent")).await;
        };
        let (resumed, ()) = tokio::join!(resumed, decided);
        assert_eq!(resumed.result()["structuredContent"], "sent");
    }
}

#[tokio::test]
async fn other_mcp_clients_get_the_ticket_at_once() {
    let server = Server::with(|config| config.transports.mcp.wait_ms = 60_000).await;
    let fixture = Fixture::on(server).await;
    for client in [Mcp::modern(&fixture.api), Mcp::legacy(&fixture.api).await] {
        let result = client.call("mail.send", json!({})).await.result();
        let ticket = &result["structuredContent"];
        assert_eq!(ticket["hold"], "approval", "{result}");
        let id = ticket["tool_call_id"].as_str().unwrap();
        let text = result["content"][0]["text"].as_str().unwrap();
        assert!(text.contains("toolcrib approvals approve"), "{text}");
        fixture.approve(ticket["approval_id"].as_str().unwrap()).await;
        fixture.execute(json!("sent")).await;
        let done = client.call("call.result", json!({ "tool_call_id": id })).await.result();
        assert!(done.to_string().contains("sent"), "{done}");
    }
}

#[tokio::test]
async fn the_event_stream_shows_who_asks_for_what_and_why() {
    let fixture = Fixture::start().await;
    let mut events = fixture.operator.follow("/v1/events", None).await;
    let (call_id, approval_id) = fixture.held(&fixture.api, json!({ "to": "ada" })).await;
    let requested = events.wait_for("approval.requested").await.data;
    for (field, value) in [
        ("approval_id", json!(approval_id)),
        ("tool_call_id", json!(call_id)),
        ("tool", json!("mail.send")),
        ("args", json!({ "to": "ada" })),
        ("rule_id", json!("mail")),
        ("difference", Value::Null),
    ] {
        assert_eq!(requested[field], value, "{field} of {requested}");
    }
    assert_eq!(requested["requested_by"]["agent"], "default");
    assert!(requested["reason"].as_str().is_some_and(|reason| !reason.is_empty()));
    fixture.approve(&approval_id).await;
    let decided = events.wait_for("approval.decided").await.data;
    assert_eq!((&decided["status"], &decided["by"]), (&json!("approved"), &json!("operator")));
}

#[tokio::test]
async fn a_signed_webhook_announces_the_approval_with_a_link() {
    let receiver = Receiver::answering([Answer::Code(500)]).await;
    let keys = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(keys.path(), KEY).unwrap();
    let (url, file) = (receiver.url.clone(), keys.path().to_owned());
    let server = Server::with(|config| {
        config.webhooks.signing_key_file = Some(file);
        config.webhooks.allow_private = true;
        config.approvals.webhook_url = Some(url);
    })
    .await;
    let fixture = Fixture::on(server).await;
    let (_, approval_id) = fixture.held(&fixture.api, json!({ "to": "ada" })).await;
    // The first try is refused, the second one delivered.
    let got = receiver.received(2).await.remove(1);
    assert!(got.is_signed_with(KEY), "{got:?}");
    let body = got.json();
    assert_eq!(body["type"], "approval.requested");
    let shown = fixture.approval(&approval_id).await;
    assert_eq!(body["data"], shown, "the same object");
    assert!(shown["link"].as_str().unwrap().ends_with(&approval_id));
}

#[tokio::test]
async fn the_command_line_lists_shows_and_decides() {
    let fixture = Fixture::start().await;
    let token = operator_token(&fixture.server.config.data_dir);
    let server = format!("http://{}", fixture.server.address);
    let run = |words: Vec<String>| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_toolcrib"));
        command.args(["--server", &server]).args(words).env("TOOLCRIB_KEY", &token);
        async move {
            let ran = tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap();
            let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
            (ran.status.code(), text(ran.stdout), text(ran.stderr))
        }
    };
    let words = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<String>>();
    for (command, text) in [
        ("approvals", "no call waits for an approval"),
        ("approvals ls --status approved", "no approval is approved"),
        (
            "approvals ls --status Rejected --tool mail.send",
            "no approval is rejected (of mail.send)",
        ),
        ("approvals ls --all", "no approvals"),
    ] {
        let (code, out, note) = run(words(command)).await;
        assert_eq!((code, format!("{out}{note}").trim()), (Some(0), text), "{command}");
    }
    let (call_id, id) = fixture.held(&fixture.api, json!({ "to": "ada" })).await;
    let (code, listed, error) = run(words("approvals")).await;
    assert_eq!(code, Some(0), "{error}");
    assert!(listed.contains(&id) && listed.contains("mail.send"), "{listed}");
    let (_, shown, _) = run(words(&format!("approvals show {id}"))).await;
    assert!(shown.contains("\"to\": \"ada\"") && shown.contains("rule mail"), "{shown}");
    let (_, json_text, _) = run(words(&format!("--json approvals show {id}"))).await;
    let body: Value = serde_json::from_str(&json_text).unwrap();
    assert_eq!(body["approval_id"], json!(id));
    let mut reject = words(&format!("approvals reject {id} --reason"));
    reject.push("not to ada".to_owned());
    let (code, done, error) = run(reject).await;
    assert_eq!(code, Some(0), "{error}");
    assert!(done.contains("rejected"), "{done}");
    let call = fixture.api.finished(&call_id).await;
    assert!(call["error"]["message"].as_str().unwrap().contains("not to ada"));
    let (first, _) = fixture.held(&fixture.api, json!({ "n": 1 })).await;
    let (second, _) = fixture.held(&fixture.api, json!({ "n": 2 })).await;
    let (code, done, error) = run(words("approvals approve --all --scope until --until 8h")).await;
    assert_eq!(code, Some(0), "{error}");
    assert_eq!(done.matches("standing approval").count(), 2, "{done}");
    for id in [first, second] {
        assert_ne!(fixture.api.call(&id).await["hold"], "approval");
    }
    let (_, standing, _) = run(words("--json approvals standing")).await;
    let standing: Value = serde_json::from_str(&standing).unwrap();
    let id = standing["standing"][0]["standing_id"].as_str().unwrap().to_owned();
    let (code, _, error) = run(words(&format!("approvals revoke {id}"))).await;
    assert_eq!(code, Some(0), "{error}");
    let (code, _, error) = run(words("approvals approve apr_none")).await;
    assert_ne!(code, Some(0));
    assert!(error.contains("no approval"), "{error}");
}

#[tokio::test]
async fn a_websocket_shows_approvals_and_decides() {
    let fixture = Fixture::start().await;
    let (_, first) = fixture.held(&fixture.api, json!({ "n": 1 })).await;
    let mut socket = Ws::offering(&fixture.operator, "console", json!([])).await;
    socket.send(json!({ "type": "approvals_follow" })).await;
    let listed = socket.receive().await;
    assert_eq!(listed["pending"][0]["approval_id"], json!(first), "{listed}");
    let (_, second) = fixture.held(&fixture.api, json!({ "n": 2 })).await;
    let requested = socket.receive().await;
    assert_eq!(
        (&requested["approval_id"], &requested["args"]),
        (&json!(second), &json!({ "n": 2 }))
    );
    let decisions = json!([{ "approval_id": second, "verdict": "reject", "reason": "no" }]);
    socket.send(json!({ "type": "approval_decide", "decisions": decisions })).await;
    let mut seen = Vec::new();
    while seen.len() < 2 {
        let message = socket.receive().await;
        match message["type"].as_str() {
            Some("approval_results") => {
                assert_eq!(message["decided"], 1, "{message}");
                seen.push("results");
            }
            Some("approval_decided") => {
                assert_eq!(message["status"], "rejected", "{message}");
                seen.push("decided");
            }
            _ => {}
        }
    }
}
