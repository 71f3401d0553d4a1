//! Batches: each call format is answered in the same format, each entry succeeds or fails on its
//! own, and invalid fields are rejected by name.

mod refusals;

use std::collections::HashSet;

use serde_json::{Value, json};

use crate::support::api::{Reply, offer, offer_with};
use crate::support::{Api, Server};

fn chat(id: &str, name: &str, arguments: &str) -> Value {
    json!({ "id": id, "type": "function", "function": { "name": name, "arguments": arguments } })
}

fn eval(id: &str, expression: &str) -> Value {
    chat(id, "calculation__eval", &json!({ "expression": expression }).to_string())
}

fn body(mode: &str, tool_calls: Value) -> Value {
    json!({ "run_id": "run_1", "mode": mode, "tool_calls": tool_calls })
}

async fn send(api: &Api, body: Value) -> Reply {
    api.post("/v1/tool_calls", body).await
}

async fn send_with_key(api: &Api, key: &str, body: Value) -> Reply {
    let request = api.request(reqwest::Method::POST, "/v1/tool_calls");
    api.send(request.header("idempotency-key", key).json(&body)).await
}

fn content(message: &Value) -> Value {
    serde_json::from_str(message["content"].as_str().unwrap()).unwrap()
}

async fn count_calls(api: &Api) -> usize {
    let list = api.get("/v1/tool_calls?limit=200").await.is(200);
    list["tool_calls"].as_array().unwrap().len()
}

#[tokio::test]
async fn each_call_format_is_answered_in_the_same_format() {
    let server = Server::start().await;
    let api = server.api();
    let calls = json!([
        { "call_id": "mine", "name": "calculation.eval", "args": { "expression": "1+1" },
          "timeout_ms": 5000, "retry": 0 },
        eval("call_0", "2+2"),
        { "type": "function_call", "id": "fc_1", "call_id": "call_1", "status": "completed",
          "name": "calculation__eval", "arguments": "{\"expression\":\"3+3\"}" },
        { "type": "tool_use", "id": "toolu_2", "name": "calculation__eval",
          "input": { "expression": "1/0" } },
    ]);
    for mode in ["serial", "parallel"] {
        let answer = send(&api, body(mode, calls.clone())).await.is(200);
        let results = answer["results"].as_array().unwrap();
        let fields = ["call_id", "tool_call_id", "ok", "data", "error", "metrics"];
        assert!(results.iter().all(|result| fields.iter().all(|f| result.get(f).is_some())));
        let ids: Vec<&Value> = results.iter().map(|result| &result["call_id"]).collect();
        assert_eq!(ids, ["mine", "call_0", "call_1", "toolu_2"], "in the order of the request");
        assert_eq!(results[1]["data"]["result"], 4);
        assert_eq!((&results[3]["ok"], &results[3]["data"]), (&json!(false), &Value::Null));
        assert!(results[0]["metrics"]["latency_ms"].is_u64());
        let messages = answer["messages"].as_array().unwrap();
        assert_eq!((&messages[0]["ok"], &messages[0]["data"]["result"]), (&json!(true), &json!(2)));
        assert_eq!(
            (&messages[1]["role"], &messages[1]["tool_call_id"]),
            (&json!("tool"), &json!("call_0"))
        );
        assert_eq!(content(&messages[1])["result"], 4);
        assert_eq!(messages[2]["type"], "function_call_output");
        assert_eq!(messages[2]["call_id"], "call_1");
        let output: Value = serde_json::from_str(messages[2]["output"].as_str().unwrap()).unwrap();
        assert_eq!(output["result"], 6);
        assert_eq!(
            (&messages[3]["type"], &messages[3]["is_error"]),
            (&json!("tool_result"), &json!(true))
        );
        assert!(content(&messages[3])["error"]["message"].as_str().unwrap().contains("zero"));
        for result in results {
            let call = api.call(result["tool_call_id"].as_str().unwrap()).await;
            assert_eq!((&call["call_id"], &call["run_id"]), (&result["call_id"], &json!("run_1")));
        }
    }
    assert_eq!(count_calls(&api).await, 8, "every entry is a call of its own");
}

#[tokio::test]
async fn an_invalid_entry_does_not_affect_the_other_entries() {
    let server = Server::start().await;
    let api = server.api();
    let calls = json!([
        eval("a", "6*7"),
        chat("b", "calculation__evil", "{}"),
        chat("c", "calculation__eval", "{\"expression\": 5}"),
        chat("d", "calculation__eval", "{\"expression\": \"1+1\", }"),
        "nonsense",
        { "type": "custom", "id": "f", "custom": { "name": "x", "input": "y" } },
        { "name": "calculation.eval", "args": { "expression": "1" }, "timeout_ms": -5 },
        eval("h", "6*8"),
    ]);
    let answer = send(&api, body("parallel", calls)).await.is(200);
    let results = answer["results"].as_array().unwrap();
    let codes: Vec<&str> =
        results.iter().map(|result| result["error"]["code"].as_str().unwrap_or("-")).collect();
    let invalid = "VALIDATION_ERROR";
    let expected = ["-", "TOOL_NOT_FOUND", invalid, invalid, invalid, invalid, invalid, "-"];
    assert_eq!(codes, expected);
    assert_eq!(
        (&results[0]["data"]["result"], &results[7]["data"]["result"]),
        (&json!(42), &json!(48))
    );
    assert!(results[1]["error"]["message"].as_str().unwrap().contains("calculation.eval"));
    let detail = &results[3]["error"]["detail"];
    assert_eq!((&detail["line"], &detail["pointer"]), (&json!(1), &json!("/function/arguments")));
    assert_eq!((&detail["column"], &detail["offset"]), (&json!(23), &json!(22)), "{detail}");
    assert!(detail["near"].as_str().unwrap().contains("1+1"), "{detail}");
    assert_eq!(
        answer["messages"][3]["tool_call_id"], "d",
        "the message for the model has the error, too"
    );
    assert!(answer["messages"][3]["content"].as_str().unwrap().contains("line 1 column 23"));
    assert!(results[6]["error"]["message"].as_str().unwrap().contains("timeout_ms"));
    assert_eq!(count_calls(&api).await, 2, "rejected entries are not stored as calls");
}

#[tokio::test]
async fn a_denied_entry_is_a_result_and_is_audited() {
    let server = Server::start().await;
    let admin = server.keyed("p", "boss", "admin", &[]).await;
    let agent = server.keyed("p", "ada", "agent", &["calculation.*"]).await;
    let calls = json!([eval("a", "1+1"), chat("b", "database__query", "{\"sql\":\"SELECT 1\"}")]);
    let answer = send(&agent, body("parallel", calls)).await.is(200);
    assert_eq!(answer["results"][0]["ok"], true);
    let error = &answer["results"][1]["error"];
    assert_eq!(error["code"], "PERMISSION_DENIED");
    assert!(content(&answer["messages"][1])["error"]["message"].as_str().unwrap().contains("ada"));
    assert_eq!(admin.audit_entries().await[0]["action"], "call.denied");
    // The name for models does not reveal a tool that the agent may not call.
    let error = |reply: Reply| reply.body["error"]["message"].as_str().unwrap().to_owned();
    let denied = error(agent.get("/v1/tools/database__query").await);
    let unknown = error(agent.get("/v1/tools/database__quern").await);
    assert_eq!(denied.replace("query", "quern"), unknown);
}

#[tokio::test]
async fn entries_with_the_same_call_id_are_answered_separately() {
    let server = Server::start().await;
    let api = server.api();
    let calls = json!([eval("call_0", "1+1"), eval("call_0", "2+2"), eval("call_0", "1+1")]);
    let mut ids = HashSet::new();
    for _ in 0..2 {
        let answer = send(&api, body("parallel", calls.clone())).await.is(200);
        let results = answer["results"].as_array().unwrap();
        let data: Vec<&Value> = results.iter().map(|result| &result["data"]["result"]).collect();
        assert_eq!(data, [2, 4, 2]);
        assert!(results.iter().all(|result| result["call_id"] == "call_0"));
        ids.extend(results.iter().map(|result| result["tool_call_id"].to_string()));
        let messages = answer["messages"].as_array().unwrap();
        assert_eq!(content(&messages[1])["result"], 4);
    }
    assert_eq!(ids.len(), 6);
}

#[tokio::test]
async fn the_same_batch_with_the_same_key_returns_the_same_tickets() {
    let server = Server::start().await;
    let api = server.api();
    let batch = body("serial", json!([eval("call_0", "1+1"), eval("call_0", "2+2")]));
    let first = send_with_key(&api, "turn-1", batch.clone()).await;
    assert_eq!(first.header("idempotent-replayed"), None);
    let first = first.is(200);
    let mut within = batch.clone();
    within["idempotency_key"] = json!("turn-1");
    for again in
        [send_with_key(&api, "turn-1", batch.clone()).await, send(&api, within.clone()).await]
    {
        assert_eq!(again.header("idempotent-replayed"), Some("true"));
        let again = again.is(200);
        assert_eq!(again["messages"], first["messages"]);
        for (old, new) in [0, 1].map(|n| (&first["results"][n], &again["results"][n])) {
            assert_eq!((&old["tool_call_id"], &old["data"]), (&new["tool_call_id"], &new["data"]));
            assert_eq!(new["replayed"], true);
        }
    }
    let other = body("serial", json!([eval("call_0", "1+1"), eval("call_0", "3+3")]));
    let other = send_with_key(&api, "turn-1", other).await;
    assert_eq!(other.header("idempotent-replayed"), Some("true"), "no new call was made");
    let other = other.is(200);
    assert_eq!(other["results"][0]["ok"], true);
    assert_eq!(other["results"][1]["error"]["code"], "IDEMPOTENCY_MISMATCH");
    assert_eq!(count_calls(&api).await, 2);
    send_with_key(&api, "turn-2", within).await.refused(400, "BAD_REQUEST");
}

#[tokio::test]
async fn an_unfinished_entry_is_returned_as_a_ticket() {
    let server = Server::start().await;
    let api = server.api();
    let read = offer_with("slow.read", json!({ "effect": "read" }));
    let background = offer_with("slow.task", json!({ "async": true }));
    api.register("c1", json!([read, background, offer("slow.write")])).await;
    let calls = json!([
        chat("a", "slow__read", ""),
        chat("b", "slow__task", ""),
        eval("c", "1+1"),
        { "call_id": "d", "name": "slow.write" },
        { "call_id": "e", "name": "slow.write" },
    ]);
    let mut batch = body("parallel", calls);
    batch["wait_ms"] = json!(300);
    let answer = send(&api, batch).await.is(202);
    let results = answer["results"].as_array().unwrap();
    for open in [0, 1, 3, 4] {
        assert_eq!(
            (&results[open]["ok"], &results[open]["status"]),
            (&Value::Null, &json!("pending"))
        );
        let call = api.call(results[open]["tool_call_id"].as_str().unwrap()).await;
        assert_eq!(call["status"], "PENDING");
    }
    assert_eq!(results[1]["task_id"], results[1]["tool_call_id"]);
    assert!(results[0].get("task_id").is_none());
    let message = content(&answer["messages"][1]);
    assert_eq!(message["task_id"], results[1]["task_id"]);
    assert!(message["message"].as_str().unwrap().contains("in the background"), "{message}");
    // The second write waits for the first one.
    let id = |n: usize| results[n]["tool_call_id"].as_str().unwrap();
    let waiting = api.call(id(4)).await;
    assert_eq!(waiting["hold"], "after");
    assert_eq!(waiting["hold_details"], json!({ "after": id(3) }));
    assert_eq!(answer["messages"][3]["status"], "pending");
    assert!(
        results[4]["message"].as_str().unwrap().contains("did not start within the wait"),
        "{answer}"
    );
    api.succeed(id(3), json!(1)).await;
    while api.call(id(4)).await["hold"] != "parked" {}
    api.succeed(id(4), json!(2)).await;
    assert_eq!(api.finished(id(4)).await["result"], 2);
    // A ticket leads to its result.
    let id = results[0]["tool_call_id"].as_str().unwrap();
    api.succeed(id, json!("late")).await;
    assert_eq!(api.finished(id).await["result"], "late");
}

#[tokio::test]
async fn messages_stay_within_the_token_budget() {
    let server = Server::start().await;
    let api = server.api();
    let sql = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i+1 FROM n WHERE i < 900) \
               SELECT i, 'a row of many' FROM n";
    let query = chat("rows", "database__query", &json!({ "sql": sql }).to_string());
    let mut batch = body("parallel", json!([query, eval("sum", "1+1")]));
    batch["budget_tokens"] = json!(400);
    let answer = send(&api, batch).await.is(200);
    assert_eq!(answer["results"][0]["digested"], true);
    assert_eq!(answer["results"][0]["data"]["row_count"], 900, "the result is whole");
    let text = answer["messages"][0]["content"].as_str().unwrap();
    assert!(toolcrib::results::tokens::count(text) < 400, "{text}");
    assert!(text.contains(answer["results"][0]["tool_call_id"].as_str().unwrap()), "{text}");
    assert!(answer["results"][1].get("digested").is_none());
    assert_eq!(content(&answer["messages"][1])["result"], 2);
}

#[tokio::test]
async fn an_invalid_callback_url_rejects_the_batch() {
    let server = Server::start().await;
    let api = server.api();
    for url in ["", "ftp://example.com/", "https://hooks.example/x"] {
        let batch = json!({
            "run_id": "run_1", "callback_url": url,
            "tool_calls": [{ "name": "calculation.eval", "args": { "expression": "1" } }],
        });
        let error = send(&api, batch).await.refused(422, "VALIDATION_ERROR");
        assert_eq!(error["detail"]["pointer"], "/callback_url", "{error}");
    }
}

#[tokio::test]
async fn tool_lists_are_valid_in_every_model_format() {
    let server = Server::start().await;
    let api = server.api();
    api.register("c1", json!([offer("mcp/files.read")])).await;
    let plain = |name: &str| {
        let fits = |b: u8| b.is_ascii_alphanumeric() || b == b'_' || b == b'-';
        (1..=64).contains(&name.len()) && name.bytes().all(fits)
    };
    for (format, name, schema) in [
        ("openai", "/function/name", "/function/parameters/type"),
        ("openai_responses", "/name", "/parameters/type"),
        ("anthropic", "/name", "/input_schema/type"),
        ("mcp", "/name", "/inputSchema/type"),
    ] {
        let answer = api.get(&format!("/v1/tools?format={format}")).await.is(200);
        let tools = answer["tools"].as_array().unwrap();
        assert_eq!(tools.len(), 5, "{format}");
        for tool in tools {
            assert_eq!(tool.pointer(schema), Some(&json!("object")), "{format}: {tool}");
            let name = tool.pointer(name).unwrap().as_str().unwrap();
            assert!(plain(name), "{format}: {name}");
            // The name resolves to the tool and can be called.
            assert_eq!(api.get(&format!("/v1/tools/{name}")).await.status, 200);
        }
    }
    let ticket = api.invoke("mcp--files__read", json!({})).await;
    assert_eq!(api.call(&ticket).await["tool_name"], "mcp/files.read");
    let plain = api.get("/v1/tools").await.is(200);
    assert_eq!(plain["tools"][0]["name"], "calculation.eval");
    for format in ["gemini", "", "OpenAI"] {
        let answer = api.get(&format!("/v1/tools?format={format}")).await;
        let error = answer.refused(422, "VALIDATION_ERROR");
        let message = error["message"].as_str().unwrap();
        assert!(message.contains("format") && message.contains("openai_responses"), "{message}");
    }
}

#[tokio::test]
async fn an_empty_call_id_is_none_and_the_response_has_a_traceparent() {
    let server = Server::start().await;
    let api = server.api();
    let calls = json!([
        eval("", "1+1"),
        { "type": "tool_use", "id": "", "name": "calculation__eval", "input": {} },
        { "call_id": "", "name": "calculation.eval", "args": { "expression": "1" } },
        { "name": "calculation.eval", "args": { "expression": "1" } },
    ]);
    let trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    let request = api.request(reqwest::Method::POST, "/v1/tool_calls").header("traceparent", trace);
    let answer = api.send(request.json(&body("serial", calls))).await;
    let traceparent = answer.header("traceparent").unwrap().to_owned();
    assert!(traceparent.starts_with("00-4bf92f3577b34da6a3ce929d0e0e4736-"), "{traceparent}");
    let answer = answer.is(200);
    assert_eq!(answer["messages"][0]["tool_call_id"], "call_0");
    assert_eq!(answer["messages"][1]["tool_use_id"], "call_1");
    let error = answer["results"][2]["error"]["message"].as_str().unwrap();
    assert!(
        error.contains("call_id"),
        "an empty call_id is an error in Toolcrib's own format: {error}"
    );
    assert_eq!(answer["messages"][3]["call_id"], json!(null));
}

#[tokio::test]
async fn only_tools_that_take_an_object_are_listed_for_models() {
    let server = Server::start().await;
    let api = server.api();
    let typed = |name: &str, kind: Value| offer_with(name, json!({ "schema": { "type": kind } }));
    let tools =
        json!([typed("a.text", json!("string")), typed("a.maybe", json!(["object", "null"]))]);
    api.register("c1", tools).await;
    let answer = api.get("/v1/tools?format=anthropic").await.is(200);
    let listed_tools = answer["tools"].as_array().unwrap();
    assert!(listed_tools.iter().all(|tool| tool["input_schema"]["type"] == "object"), "{answer}");
    assert!(listed_tools.iter().any(|tool| tool["name"] == "a__maybe"), "{answer}");
    assert!(!answer.to_string().contains("a__text"), "{answer}");
}
