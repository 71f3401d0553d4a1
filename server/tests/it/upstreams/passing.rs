//! Everything that an upstream says about its tools and results reaches MCP clients, and what they
//! say reaches the upstream.

use serde_json::{Value, json};
use toolcrib_sources::mcp::McpServerSettings;

use super::{call, server, wait_for_state};
use crate::support::mcp::Mcp;
use crate::support::{Server, until};

/// An MCP server on standard input and output. `discovers` makes it one of 2026-07-28 that cannot
/// ask in that revision; `slow` makes it start after twelve seconds.
const SCRIPT: &str = r#"
import json, sys, time
if "slow" in sys.argv:
    time.sleep(12)
def send(message):
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n"); sys.stdout.flush()
modern, asks, level = True, {}, None
tools = [{"name": "show", "inputSchema": {"type": "object"},
          "annotations": {"readOnlyHint": True, "openWorldHint": True},
          "_meta": {"ui": {"resourceUri": "ui://show/view"}, "toolcrib/risk": "none"}},
         {"name": "ask", "inputSchema": {"type": "object"}, "annotations": {"readOnlyHint": True}}]
for line in sys.stdin:
    message = json.loads(line)
    method, id, params = message.get("method"), message.get("id"), message.get("params", {})
    meta = {k: v for k, v in params.get("_meta", {}).items() if k.startswith("example.com/")}
    if method == "server/discover" and "discovers" in sys.argv:
        send({"id": id, "result": {"resultType": "complete", "ttlMs": 0, "cacheScope": "private",
            "supportedVersions": ["2026-07-28", "2025-11-25"], "capabilities": {"tools": {}}}})
    elif method == "initialize":
        modern = False
        send({"id": id, "result": {"protocolVersion": params["protocolVersion"],
            "capabilities": {"tools": {}, "logging": {}, "completions": {}, "prompts": {},
                             "resources": {"subscribe": True}},
            "serverInfo": {"name": "script", "version": "1"},
            "instructions": "Call show before anything else."}})
    elif method == "tools/list":
        send({"id": id, "result": {"resultType": "complete", "ttlMs": 0, "cacheScope": "private",
            "tools": tools}})
    elif method == "tools/call" and params["name"] == "ask" and modern:
        send({"id": id, "error": {"code": -32600, "message": "no channel for questions"}})
    elif method == "tools/call" and params["name"] == "ask":
        asks["q1"] = id
        send({"id": "q1", "method": "elicitation/create", "params": {"message": "Who?",
            "requestedSchema": {"type": "object", "properties": {"name": {"type": "string"}}}}})
    elif message.get("id") in asks and "result" in message:
        name = message["result"]["content"]["name"]
        send({"id": asks.pop(message["id"]), "result": {"content": [{"type": "text", "text": name}]}})
    elif method == "tools/call":
        if level is not None:
            send({"method": "notifications/message", "params": {
                "level": "debug", "data": "too much"}})
            send({"method": "notifications/message", "params": {
                "level": "warning", "logger": "disk", "data": {"left": 3}}})
        send({"id": id, "result": {"content": [{"type": "text", "text": json.dumps(meta)}],
            "_meta": {"ui": {"state": "open"}}}})
    elif method == "logging/setLevel":
        level = params["level"]
        send({"id": id, "result": {}})
    elif method == "resources/list":
        send({"id": id, "result": {"resources": [{"uri": "note://one", "name": "one"}]}})
    elif method == "resources/templates/list":
        send({"id": id, "result": {"resourceTemplates": []}})
    elif method == "resources/read":
        send({"id": id, "result": {"contents": [{"uri": params["uri"], "text": json.dumps(meta)}]}})
    elif method == "resources/subscribe":
        send({"id": id, "result": {}})
        send({"method": "notifications/resources/updated", "params": {"uri": params["uri"]}})
    elif method == "prompts/list":
        send({"id": id, "result": {"prompts": [{"name": "greet"}]}})
    elif method == "prompts/get":
        send({"id": id, "result": {"messages": [{"role": "user",
            "content": {"type": "text", "text": "Hello"}}]}})
    elif method == "completion/complete":
        send({"id": id, "result": {"completion": {"values": ["Ada"]}}})
    elif id is not None:
        send({"id": id, "error": {"code": -32601, "message": "unknown"}})
"#;

fn script(options: &[&str]) -> McpServerSettings {
    let mut args = vec!["-c".to_owned(), SCRIPT.to_owned()];
    args.extend(options.iter().map(|option| (*option).to_owned()));
    McpServerSettings {
        name: "script".into(),
        command: Some("python3".into()),
        args,
        ..McpServerSettings::default()
    }
}

#[tokio::test]
async fn metadata_annotations_and_instructions_of_an_upstream_are_passed_on() {
    let server = server(vec![script(&[])]).await;
    let api = server.operator();
    for client in [Mcp::modern(&api), Mcp::legacy(&api).await] {
        let tools = client.tools().await;
        let tool = tools.iter().find(|tool| tool["name"] == "script__show").unwrap();
        assert_eq!(tool["_meta"]["ui"]["resourceUri"], "ui://show/view", "{tool}");
        assert_eq!(tool["_meta"]["toolcrib/risk"], "low", "an upstream cannot set Toolcrib's own");
        assert_eq!(tool["annotations"]["openWorldHint"], true, "{tool}");
        let other = tools.iter().find(|tool| tool["name"] == "script__ask").unwrap();
        assert!(other["annotations"]["openWorldHint"].is_null(), "{other}");
        let params = json!({ "name": "script__show", "arguments": {},
            "_meta": { "example.com/color": "red", "toolcrib/run_id": "run_7" } });
        let result = client.ask("tools/call", params).await.result();
        assert_eq!(result["_meta"]["ui"]["state"], "open", "{result}");
        assert_eq!(result["content"][0]["text"], r#"{"example.com/color": "red"}"#, "{result}");
        let read = json!({ "uri": "note://one", "_meta": { "example.com/a": 1 } });
        let read = client.ask("resources/read", read).await.result();
        assert_eq!(read["contents"][0]["text"], r#"{"example.com/a": 1}"#, "{read}");
        let params = json!({ "ref": { "type": "ref/prompt", "name": "script.greet" },
            "argument": { "name": "who", "value": "A" } });
        let completed = client.ask("completion/complete", params).await.result();
        assert_eq!(completed["completion"]["values"], json!(["Ada"]), "{completed}");
        let is_modern = client.session.is_none();
        let expected = if is_modern { json!("complete") } else { Value::Null };
        assert_eq!(completed["resultType"], expected, "{completed}");
    }
    let instructions = |path: &str| {
        let client = Mcp::modern(&api).with_path(path);
        async move {
            let discovered = client.ask("server/discover", json!({})).await.result();
            discovered["instructions"].as_str().unwrap().to_owned()
        }
    };
    assert!(instructions("/mcp").await.contains("script: Call show before anything else."));
    assert!(instructions("/mcp/script").await.contains("Call show before anything else."));
}

#[tokio::test]
async fn rules_on_a_source_or_with_ask_hold_for_prompts_and_resources_too() {
    let server = server(vec![script(&[])]).await;
    let (operator, client) = (server.operator(), Mcp::modern(&server.api()));
    let prompt = || client.ask("prompts/get", json!({ "name": "script.greet" }));
    let resource = || client.ask("resources/read", json!({ "uri": "note://one" }));
    let listed = async || {
        let prompts = client.ask("prompts/list", json!({})).await.result();
        let resources = client.ask("resources/list", json!({})).await.result();
        let count = |list: &Value| list.as_array().unwrap().len();
        (count(&prompts["prompts"]), count(&resources["resources"]))
    };
    prompt().await.result();
    resource().await.result();
    assert_eq!(listed().await, (1, 1));
    for rule in [
        json!({ "verdict": "deny", "sources": ["script"] }),
        json!({ "verdict": "deny", "sources": ["mcp"] }),
        json!({ "verdict": "deny", "effects": ["read"], "tools": ["script.*"] }),
        json!({ "verdict": "ask", "tools": ["script.*"] }),
        json!({ "verdict": "ask", "sources": ["script"] }),
        json!({ "verdict": "deny", "tools": ["script.*"], "when": "args.size > 10" }),
    ] {
        operator.put("/v1/rules/restrict", rule.clone()).await;
        for refused in [prompt().await, resource().await] {
            assert!(refused.messages.last().unwrap()["error"].is_object(), "{rule}: {refused:?}");
        }
        assert_eq!(listed().await, (0, 0), "{rule}");
    }
    let audited = operator.audit_entries().await;
    for subject in ["script.greet", "script.resources"] {
        let is_denial =
            |entry: &&Value| entry["action"] == "call.denied" && entry["subject"] == subject;
        assert!(audited.iter().any(|entry| is_denial(&entry)), "{subject}: {audited:?}");
    }
    // A rule that only hides from lists, and rules about other things.
    let hide = json!({ "verdict": "deny", "tools": ["script.*"], "actions": ["list"] });
    operator.put("/v1/rules/restrict", hide).await;
    assert_eq!(listed().await, (0, 0));
    prompt().await.result();
    resource().await.result();
    for rule in [
        json!({ "verdict": "deny", "sources": ["other"] }),
        json!({ "verdict": "ask", "effects": ["idempotent", "irreversible"] }),
        json!({ "verdict": "deny", "risk_min": "critical" }),
    ] {
        operator.put("/v1/rules/restrict", rule.clone()).await;
        prompt().await.result();
        resource().await.result();
        assert_eq!(listed().await, (1, 1), "{rule}");
    }
}

#[tokio::test]
async fn resource_updates_and_logs_of_an_upstream_reach_the_session_that_asked_for_them() {
    let server = server(vec![script(&[])]).await;
    let api = server.operator();
    let (client, other) = (Mcp::legacy(&api).await, Mcp::legacy(&api).await);
    let (mut stream, mut quiet) = (client.session_stream().await, other.session_stream().await);
    client.ask("resources/subscribe", json!({ "uri": "note://one" })).await.result();
    let updated = stream.until("notifications/resources/updated").await;
    assert_eq!(updated["params"]["uri"], "note://one");
    client.ask("logging/setLevel", json!({ "level": "warning" })).await.result();
    client.call("script__show", json!({})).await.result();
    let log = stream.until("notifications/message").await;
    assert_eq!(log["params"]["level"], "warning", "the debug message is below the level: {log}");
    assert_eq!(log["params"]["logger"], "script.disk");
    assert_eq!(log["params"]["data"], json!({ "left": 3 }));
    // The other session hears of neither; a change of the tools is the first it hears of.
    api.register("pc_1", json!([crate::support::api::offer("new.tool")])).await;
    let first = quiet.next().await.unwrap();
    assert_eq!(first["method"], "notifications/tools/list_changed", "{first}");
}

#[tokio::test]
async fn logs_of_an_older_upstream_reach_the_request_that_asks_for_them() {
    let server = server(vec![script(&[])]).await;
    let api = server.operator();
    let client = Mcp::modern(&api);
    // The upstream logs only after `logging/setLevel`, which the first request causes.
    for (level, count) in [(None, 0), (Some("warning"), 1), (Some("error"), 0), (None, 0)] {
        let mut params = json!({ "name": "script__show", "arguments": {} });
        if let Some(level) = level {
            params["_meta"] = json!({ "io.modelcontextprotocol/logLevel": level });
        }
        let response = client.ask("tools/call", params).await;
        response.result();
        let is_log = |message: &&Value| message["method"] == "notifications/message";
        let logs: Vec<&Value> = response.messages.iter().filter(is_log).collect();
        assert_eq!(logs.len(), count, "{level:?}: {}", response.text);
        for log in logs {
            assert_eq!(log["params"]["logger"], "script.disk", "{log}");
            assert_eq!(log["params"]["data"], json!({ "left": 3 }), "{log}");
        }
        let last = response.messages.last().unwrap();
        assert!(last["result"].is_object(), "logs precede the result: {}", response.text);
    }
    // A more verbose request lowers the level of the upstream, and gets every message.
    let params = json!({ "name": "script__show", "arguments": {},
        "_meta": { "io.modelcontextprotocol/logLevel": "debug" } });
    let response = client.ask("tools/call", params).await;
    assert_eq!(response.text.matches("notifications/message").count(), 2, "{}", response.text);
}

#[tokio::test]
async fn an_upstream_that_starts_slowly_connects_the_first_time() {
    let server = Server::with(|config| config.mcp = vec![script(&["slow"])]).await;
    let source = wait_for_state(&server.operator(), "script", "ready").await;
    assert_eq!(source["restarts"], 0, "{source}");
    let done = call(&server.operator(), "script.show", json!({})).await;
    assert_eq!(done["status"], "SUCCEEDED", "{done}");
}

#[tokio::test]
async fn an_upstream_that_asks_in_the_older_revision_only_is_spoken_to_in_that_one() {
    let server = server(vec![script(&["discovers"])]).await;
    let api = server.operator();
    let source = wait_for_state(&api, "script", "ready").await;
    assert_eq!(source["protocol_version"], "2026-07-28", "{source}");
    // The tool only reads, so its call is repeated in the other revision.
    let id = api.invoke("script.ask", json!({})).await;
    let held = until("the question", || async {
        let call = api.call(&id).await;
        (call["hold"] == "input").then_some(call)
    })
    .await;
    let answers = json!({ "answers": { "question_1": {
        "action": "accept", "content": { "name": "Ada" } } } });
    let reply = api.post(&format!("/v1/tool_calls/{id}/answer"), answers).await;
    assert!(reply.status.is_success(), "{held}: {}", reply.text);
    let done = api.finished(&id).await;
    assert_eq!(done["result"]["content"][0]["text"], "Ada", "{done}");
    let server = server.restart().await;
    let source = wait_for_state(&server.operator(), "script", "ready").await;
    assert_eq!(source["protocol_version"], "2025-11-25", "it is known after a restart: {source}");
}
