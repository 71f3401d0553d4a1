//! Tool calls: results, failures, waiting, progress, disconnects.

use serde_json::{Value, json};

use crate::support::api::{offer, offer_with};
use crate::support::mcp::{Mcp, McpResponse};
use crate::support::{Api, Server, soon, until};

fn text(result: &Value) -> &str {
    result["content"][0]["text"].as_str().unwrap_or_else(|| panic!("no text: {result}"))
}

fn call_id_of(result: &Value) -> &str {
    result["_meta"]["toolcrib/tool_call_id"].as_str().unwrap_or_else(|| panic!("{result}"))
}

#[tokio::test]
async fn a_result_has_text_structured_content_and_a_call_id() {
    let server = Server::start().await;
    let api = server.api();
    for client in [Mcp::modern(&api), Mcp::legacy(&api).await] {
        let result =
            client.call("calculation.eval", json!({ "expression": "2*21" })).await.result();
        assert_eq!(result["isError"], false, "{result}");
        assert_eq!(result["structuredContent"]["result"], 42);
        let text: Value = serde_json::from_str(text(&result)).unwrap();
        assert_eq!(text, result["structuredContent"]);
        let call = api.call(call_id_of(&result)).await;
        assert_eq!(call["status"], "SUCCEEDED");
        assert_eq!(call["run_id"], "run_mcp");
    }
}

#[tokio::test]
async fn invalid_arguments_and_tool_failures_are_error_results() {
    let server = Server::start().await;
    let api = server.api();
    for client in [Mcp::modern(&api), Mcp::legacy(&api).await] {
        let misspelt = client.call("calculation.eval", json!({ "expresion": "1" })).await.result();
        assert_eq!(misspelt["isError"], true);
        assert!(text(&misspelt).contains("expression"), "{misspelt}");
        assert_eq!(misspelt["_meta"]["toolcrib/error"]["code"], "VALIDATION_ERROR");
        // A fault does not match the output schema that the client has seen.
        assert!(misspelt["structuredContent"].is_null(), "{misspelt}");
        let failed = client.call("calculation.eval", json!({ "expression": "1/0" })).await.result();
        assert_eq!(failed["isError"], true);
        assert!(text(&failed).contains("zero"), "{failed}");
    }
}

#[tokio::test]
async fn an_unknown_tool_is_a_protocol_error_with_a_suggestion() {
    let server = Server::start().await;
    for client in [Mcp::modern(&server.api()), Mcp::legacy(&server.api()).await] {
        let error = client.call("calculation.evil", json!({})).await.error(-32602);
        let message = error["message"].as_str().unwrap();
        assert!(message.contains("calculation.eval"), "{message}");
    }
}

#[tokio::test]
async fn call_options_and_trace_context_are_read_from_meta() {
    let server = Server::start().await;
    let api = server.api();
    api.register("pc_1", json!([offer("slow.one")])).await;
    let client = Mcp::modern(&api).with_tasks();
    let trace = "00-0af7651916cd43dd8448eb211c80319c-00f067aa0ba902b7-01";
    let meta = json!({
        "toolcrib/run_id": "run_7", "toolcrib/call_id": "mine", "toolcrib/timeout_ms": 5_000,
        "toolcrib/idempotency_key": "once", "traceparent": trace,
    });
    let params = json!({ "name": "calculation.eval", "arguments": { "expression": "1" },
        "_meta": meta });
    let first = client.ask("tools/call", params.clone()).await.result();
    let again = client.ask("tools/call", params).await.result();
    assert_eq!(call_id_of(&first), call_id_of(&again), "the same key is the same call");
    let call = api.call(call_id_of(&first)).await;
    assert_eq!((&call["run_id"], &call["call_id"]), (&json!("run_7"), &json!("mine")));
    let caller = toolcrib::Caller::local("default");
    let id = call_id_of(&first).parse().unwrap();
    let stored = server.engine.calls().call(&caller, &id).await.unwrap();
    assert_eq!(stored.origin.traceparent.as_deref(), Some(trace));
    let wrong = json!({ "name": "calculation.eval", "arguments": { "expression": "1" },
        "_meta": { "toolcrib/timeout_ms": "soon" } });
    client.ask("tools/call", wrong).await.error(-32602);
}

#[tokio::test]
async fn a_client_without_tasks_gets_a_call_id_for_call_result() {
    let server = Server::with(|config| config.transports.mcp.wait_ms = 50).await;
    let api = server.api();
    let with_schema = json!({ "output_schema": { "type": "object" } });
    api.register("pc_1", json!([offer("slow.one"), offer_with("slow.two", with_schema)])).await;
    for client in [Mcp::modern(&api), Mcp::legacy(&api).await] {
        let pending = client.call("slow.one", json!({})).await.result();
        assert_eq!(pending["isError"], false);
        let id = pending["structuredContent"]["tool_call_id"].as_str().unwrap().to_owned();
        assert!(
            text(&pending).contains("call__result") && text(&pending).contains(&id),
            "{pending}"
        );
        let query = json!({ "tool_call_id": id });
        let still = client.call("call.result", query.clone()).await.result();
        assert_eq!(still["structuredContent"]["tool_call_id"], id.as_str());
        api.poll("pc_1").await;
        api.succeed(&id, json!({ "done": true })).await;
        let result = client.call("call.result", query).await.result();
        assert_eq!(result["structuredContent"], json!({ "done": true }));
        assert_eq!(call_id_of(&result), id);
        // A client that knows an output schema would reject a call id in place of the result.
        let pending = client.call("slow.two", json!({})).await.result();
        assert_eq!(pending["isError"], true);
        assert!(text(&pending).contains("call__result"));
        let unknown = client.call("call.result", json!({ "tool_call_id": "tc_1" })).await.result();
        assert_eq!(unknown["isError"], true);
    }
}

/// Returns the messages of a stream that was read to its end.
fn parse_messages(all: &str) -> Vec<Value> {
    let data = all.lines().filter_map(|line| line.strip_prefix("data:"));
    data.filter_map(|data| serde_json::from_str(data.trim()).ok()).collect()
}

fn progress_in(messages: &[Value]) -> Vec<&Value> {
    let progress = |message: &&Value| message["method"] == "notifications/progress";
    messages.iter().filter(progress).map(|message| &message["params"]).collect()
}

#[tokio::test]
async fn progress_is_sent_to_a_client_that_gives_a_token() {
    let server = Server::start().await;
    let api = server.api();
    api.register("pc_1", json!([offer("slow.one")])).await;
    for client in [Mcp::modern(&api), Mcp::legacy(&api).await] {
        let params =
            json!({ "name": "slow.one", "arguments": {}, "_meta": { "progressToken": "t" } });
        let request = client.request("tools/call", params);
        let request_task =
            tokio::spawn(async move { request.send().await.unwrap().text().await.unwrap() });
        let id = api.poll("pc_1").await["tool_call_id"].as_str().unwrap().to_owned();
        for (percent, message) in [(30, "a third"), (60, "more"), (40, "less, it says")] {
            let progress = json!({ "percent": percent, "message": message });
            send_progress(&server, &id, progress).await;
        }
        api.succeed(&id, json!({})).await;
        let all = soon("the answer", request_task).await.unwrap();
        let messages = parse_messages(&all);
        let notifications = progress_in(&messages);
        assert_eq!(notifications.len(), 3, "{all}");
        assert!(notifications.iter().all(|one| one["progressToken"] == "t"));
        assert_eq!(
            (&notifications[0]["progress"], &notifications[0]["total"]),
            (&json!(30.0), &json!(100.0))
        );
        assert_eq!(notifications[1]["message"], "more");
        let numbers: Vec<f64> =
            notifications.iter().map(|t| t["progress"].as_f64().unwrap()).collect();
        assert!(numbers.is_sorted_by(|a, b| a < b), "not increasing: {numbers:?}");
        assert_eq!(messages.last().unwrap()["result"]["isError"], false);
    }
}

#[tokio::test]
async fn progress_without_a_percentage_is_forwarded_and_increasing() {
    let server = Server::start().await;
    let api = server.api();
    api.register("pc_1", json!([offer("slow.one")])).await;
    let client = Mcp::modern(&api);
    for (reported, expected) in [
        // MCP servers that do not know the total count up.
        (
            vec![
                json!({ "data": { "progress": 0.0 } }),
                json!({ "data": { "progress": 3.0 } }),
                json!({ "data": { "progress": 500.0 } }),
            ],
            vec![0.0, 3.0, 500.0],
        ),
        // Missing and decreasing values are replaced by increasing ones.
        (
            vec![
                json!({ "message": "begun" }),
                json!({ "data": { "progress": -4.0 } }),
                json!({ "data": { "progress": 1e18 } }),
                json!({ "data": { "progress": 7.0 } }),
            ],
            vec![0.0, 0.01, 1e18, 1e18 + 128.0],
        ),
    ] {
        let params =
            json!({ "name": "slow.one", "arguments": {}, "_meta": { "progressToken": "t" } });
        let request = client.request("tools/call", params);
        let request_task =
            tokio::spawn(async move { request.send().await.unwrap().text().await.unwrap() });
        let id = poll_call_id(&api).await;
        for progress in reported {
            send_progress(&server, &id, progress).await;
        }
        api.succeed(&id, json!({})).await;
        let messages = parse_messages(&soon("the answer", request_task).await.unwrap());
        let notifications = progress_in(&messages);
        let numbers: Vec<f64> =
            notifications.iter().map(|t| t["progress"].as_f64().unwrap()).collect();
        assert_eq!(numbers, expected);
        assert!(notifications.iter().all(|one| one["total"].is_null()), "{notifications:?}");
    }
}

async fn send_progress(server: &Server, id: &str, progress: Value) {
    let caller = toolcrib::Caller::local("default");
    let progress = toolcrib::AttemptProgress {
        percent: progress["percent"].as_f64(),
        message: progress["message"].as_str().map(str::to_owned),
        data: progress.get("data").cloned(),
    };
    let id = id.parse().unwrap();
    server.engine.calls().report_progress(&caller, &id, None, None, progress).await.unwrap();
}

/// Polls for the next call of the client and skips cancellations.
pub(super) async fn poll_call_id(api: &Api) -> String {
    let path = "/internal/ingress/poll?client_id=pc_1&wait_ms=30000";
    until("work", || async {
        let answer = api.get(path).await.is(200);
        answer["requests"][0]["tool_call_id"].as_str().map(str::to_owned)
    })
    .await
}

#[tokio::test]
async fn closing_the_stream_cancels_only_in_the_modern_revision() {
    let server = Server::with(|config| config.policy.disconnect_grace_ms = 50).await;
    let api = server.api();
    api.register("pc_1", json!([offer("slow.one")])).await;
    let modern = Mcp::modern(&api);
    let request = modern.request("tools/call", json!({ "name": "slow.one", "arguments": {} }));
    let request_task =
        tokio::spawn(async move { McpResponse::read(request.send().await.unwrap()).await });
    let id = poll_call_id(&api).await;
    request_task.abort();
    let call = api.until_status(&id, "CANCELED").await;
    assert!(call["error"]["message"].as_str().unwrap().contains("client"), "{call}");
    // A legacy client may reconnect, so only its notification cancels the call.
    let legacy = Mcp::legacy(&api).await;
    // Other arguments each time: the same request would join the call of the lost stream.
    let params = json!({ "name": "slow.one", "arguments": { "n": 1 } });
    let request = legacy.request("tools/call", params);
    let request_task =
        tokio::spawn(async move { McpResponse::read(request.send().await.unwrap()).await });
    let id = poll_call_id(&api).await;
    request_task.abort();
    legacy.ask("ping", json!({})).await.result();
    assert_ne!(api.call(&id).await["status"], "CANCELED");
    let params = json!({ "name": "slow.one", "arguments": { "n": 2 } });
    let built = legacy.request("tools/call", params).build().unwrap();
    let body: Value = serde_json::from_slice(built.body().unwrap().as_bytes().unwrap()).unwrap();
    let request_task =
        tokio::spawn(reqwest::Client::builder().no_proxy().build().unwrap().execute(built));
    let second = poll_call_id(&api).await;
    legacy.notify("notifications/cancelled", json!({ "requestId": body["id"] })).await;
    api.until_status(&second, "CANCELED").await;
    request_task.abort();
    assert_ne!(api.call(&id).await["status"], "CANCELED");
}

#[tokio::test]
async fn a_repeated_request_joins_the_call_of_a_lost_stream_unless_the_tool_only_reads() {
    let server = Server::start().await;
    let api = server.api();
    let read = offer_with("slow.read", json!({ "effect": "read" }));
    api.register("pc_1", json!([offer("slow.pay"), read])).await;
    let client = Mcp::modern(&api);
    let ask = |tool: &str| {
        let request = client.request("tools/call", json!({ "name": tool, "arguments": {} }));
        tokio::spawn(async move { McpResponse::read(request.send().await.unwrap()).await })
    };
    let lost = ask("slow.read");
    let id = poll_call_id(&api).await;
    lost.abort();
    api.until_status(&id, "CANCELED").await;
    let lost = ask("slow.pay");
    let id = poll_call_id(&api).await;
    lost.abort();
    let _ = lost.await;
    let again = ask("slow.pay");
    api.succeed(&id, json!({ "paid": true })).await;
    let result = soon("the answer", again).await.unwrap().result();
    assert_eq!(result["structuredContent"], json!({ "paid": true }), "{result}");
    assert_eq!(result["_meta"]["toolcrib/joined"], true, "{result}");
    assert_eq!(call_id_of(&result), id);
    // It was delivered, so the same request is a new call.
    let third = ask("slow.pay");
    let other = poll_call_id(&api).await;
    assert_ne!(other, id);
    api.succeed(&other, json!({})).await;
    let result = soon("the answer", third).await.unwrap().result();
    assert_eq!(result["_meta"].get("toolcrib/joined"), None, "{result}");
}

#[tokio::test]
async fn a_call_with_an_idempotency_key_outlives_its_stream() {
    let server = Server::with(|config| config.policy.disconnect_grace_ms = 50).await;
    let api = server.api();
    api.register("pc_1", json!([offer("slow.one")])).await;
    let client = Mcp::modern(&api);
    let ask = |meta: Value| {
        let params = json!({ "name": "slow.one", "arguments": {}, "_meta": meta });
        let request = client.request("tools/call", params);
        tokio::spawn(async move { McpResponse::read(request.send().await.unwrap()).await })
    };
    let once = json!({ "toolcrib/idempotency_key": "once" });
    let with_key = ask(once.clone());
    let id = poll_call_id(&api).await;
    with_key.abort();
    // Without a key the disconnect cancels the call, after the grace period.
    let plain = ask(json!({}));
    let other = poll_call_id(&api).await;
    plain.abort();
    api.until_status(&other, "CANCELED").await;
    let again = ask(once);
    api.succeed(&id, json!({ "done": true })).await;
    let result = soon("the answer", again).await.unwrap().result();
    assert_eq!(result["structuredContent"], json!({ "done": true }), "{result}");
    assert_eq!(call_id_of(&result), id);
}

#[tokio::test]
async fn a_long_result_is_a_digest_with_a_resource_link() {
    let server = Server::with(|config| config.transports.mcp.result_tokens = 200).await;
    let api = server.api();
    let with_schema = json!({ "output_schema": { "type": "object" } });
    api.register("pc_1", json!([offer("log.read"), offer_with("log.parsed", with_schema)])).await;
    let client = Mcp::modern(&api);
    let lines: Vec<Value> = (0..500).map(|n| json!({ "line": n, "said": "all is well" })).collect();
    let whole = json!({ "lines": lines });
    for (tool, structured) in [("log.read", false), ("log.parsed", true)] {
        let request = client.request("tools/call", json!({ "name": tool, "arguments": {} }));
        let request_task =
            tokio::spawn(async move { McpResponse::read(request.send().await.unwrap()).await });
        let id = poll_call_id(&api).await;
        api.succeed(&id, whole.clone()).await;
        let result = &soon("the answer", request_task).await.unwrap().result();
        let tokens = toolcrib::results::tokens::count(text(result));
        assert!(tokens <= 200 && text(result).contains(&id), "{tokens}: {}", text(result));
        let link = &result["content"][1];
        assert_eq!(link["type"], "resource_link", "{result}");
        let read = client.ask("resources/read", json!({ "uri": link["uri"] })).await.result();
        let read: Value =
            serde_json::from_str(read["contents"][0]["text"].as_str().unwrap()).unwrap();
        assert_eq!(read, whole);
        // The structured content is omitted too, unless the tool has an output schema.
        assert_eq!(result["structuredContent"].is_null(), !structured);
    }
}

#[tokio::test]
async fn a_result_can_be_read_as_a_resource() {
    let server = Server::start().await;
    let api = server.api();
    let client = Mcp::modern(&api);
    let result = client.call("calculation.eval", json!({ "expression": "6*7" })).await.result();
    let uri = format!("toolcrib://tool_calls/{}/result", call_id_of(&result));
    let read = client.ask("resources/read", json!({ "uri": uri })).await.result();
    let text = read["contents"][0]["text"].as_str().unwrap();
    assert_eq!(serde_json::from_str::<Value>(text).unwrap()["result"], 42);
    let other = Mcp::modern(&api.clone().project("other"));
    other.ask("resources/read", json!({ "uri": uri })).await.error(-32602);
}

#[tokio::test]
async fn json_that_is_no_json_rpc_message_is_answered_with_an_error() {
    let server = Server::start().await;
    let api = server.api();
    for (body, code, id) in [
        ("{", -32700, Value::Null),
        ("{}", -32600, Value::Null),
        ("[]", -32600, Value::Null),
        ("7", -32600, Value::Null),
        (r#"{"a":1}"#, -32600, Value::Null),
        (r#"{"jsonrpc":"2.0","id":5}"#, -32600, json!(5)),
        (r#"{"jsonrpc":"2.0","id":6,"method":7}"#, -32600, Value::Null),
        (r#"{"jsonrpc":"1.0","id":7,"method":"ping"}"#, -32600, json!(7)),
    ] {
        let request = api.request(reqwest::Method::POST, "/mcp");
        let request = request
            .header("accept", "application/json, text/event-stream")
            .header("content-type", "application/json")
            .body(body);
        let answer = api.send(request).await;
        assert_eq!(answer.status, 400, "{body}: {}", answer.text);
        assert_eq!(answer.body["jsonrpc"], "2.0", "{body}: {}", answer.text);
        assert_eq!(answer.body["error"]["code"], code, "{body}: {}", answer.text);
        assert_eq!(answer.body["id"], id, "{body}: {}", answer.text);
    }
    let request = api.request(reqwest::Method::POST, "/mcp");
    let request = request.header("accept", "application/json, text/event-stream");
    let answer = api.send(request.header("content-type", "text/plain").body("{}")).await;
    assert_eq!(answer.status, 415, "a body of another type: {}", answer.text);
}
