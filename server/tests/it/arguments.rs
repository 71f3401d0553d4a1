//! Arguments of a call: the defaults of the schema reach the executor, and repeated keys are
//! refused in every transport.

use serde_json::{Value, json};

use crate::support::api::{message, offer_with};
use crate::support::mcp::Mcp;
use crate::support::{Api, Server};

fn schema_with_defaults() -> Value {
    json!({
        "type": "object",
        "properties": {
            "place": { "type": "string" },
            "unit": { "enum": ["C", "F"], "default": "C" },
            "page": { "type": "object", "properties": { "size": { "default": 20 } } },
            "filters": {
                "type": "array",
                "items": { "type": "object", "properties": { "negate": { "default": false } } }
            },
        },
        "required": ["place", "unit"],
        "additionalProperties": false,
    })
}

/// Starts a server with a client tool of this schema.
async fn start_with_schema(schema: Value) -> (Server, Api) {
    let server = Server::start().await;
    let api = server.api();
    api.register("c1", json!([offer_with("a.tool", json!({ "schema": schema }))])).await;
    (server, api)
}

/// Sends a request body as it is written.
async fn invoke_raw(api: &Api, args: &str) -> crate::support::api::Reply {
    let body = format!(r#"{{"run_id":"run_1","args":{args}}}"#);
    api.post_raw("/v1/tools/a.tool/invoke", body).await
}

#[tokio::test]
async fn the_defaults_of_the_schema_reach_the_executor() {
    let (_server, api) = start_with_schema(schema_with_defaults()).await;
    let args = json!({ "place": "Oslo", "page": {}, "filters": [{}, { "negate": true }] });
    let id = api.invoke("a.tool", args.clone()).await;
    let request = api.poll("c1").await;
    let expected = json!({
        "place": "Oslo", "unit": "C", "page": { "size": 20 },
        "filters": [{ "negate": false }, { "negate": true }],
    });
    assert_eq!(request["args"], expected);
    assert_eq!(api.call(&id).await["args"], args, "the call has the arguments as sent");
    // A given value stays, and it must fit the schema.
    api.invoke("a.tool", json!({ "place": "Oslo", "unit": "F" })).await;
    assert_eq!(api.poll("c1").await["args"], json!({ "place": "Oslo", "unit": "F" }));
    let refused = invoke_raw(&api, r#"{"place":"Oslo","unit":null}"#).await;
    let error = refused.refused(422, "VALIDATION_ERROR");
    assert_eq!(error["detail"]["problems"][0]["pointer"], "/unit", "{error}");
}

#[tokio::test]
async fn defaults_leave_the_text_of_given_values_unchanged() {
    let schema = json!({ "properties": { "unit": { "default": "C" } } });
    let (_server, api) = start_with_schema(schema).await;
    invoke_raw(&api, r#"{ "z": 1.10, "a": 123456789012345678901 }"#).await.is(202);
    let polled = api.get("/internal/ingress/poll?client_id=c1&wait_ms=30000").await.text;
    let expected = r#""args":{"z":1.10,"a":123456789012345678901,"unit":"C"}"#;
    assert!(polled.contains(expected), "{polled}");
}

#[tokio::test]
async fn a_default_that_violates_the_schema_refuses_no_call() {
    let schema = json!({ "properties": {
        "days": { "type": "integer", "minimum": 1, "default": 0 },
        "name": { "type": "string", "default": null },
    } });
    let (_server, api) = start_with_schema(schema).await;
    api.invoke("a.tool", json!({})).await;
    assert_eq!(api.poll("c1").await["args"], json!({}));
}

#[tokio::test]
async fn defaults_survive_a_restart_of_the_server() {
    let (server, api) = start_with_schema(schema_with_defaults()).await;
    let id = api.invoke("a.tool", json!({ "place": "Oslo" })).await;
    let server = server.restart().await;
    let api = server.api();
    let request = api.poll("c1").await;
    assert_eq!((&request["tool_call_id"], &request["args"]["unit"]), (&json!(id), &json!("C")));
}

#[tokio::test]
async fn a_repeated_key_in_arguments_is_refused_with_its_location() {
    let (_server, api) = start_with_schema(json!({ "type": "object" })).await;
    for (args, key, pointer) in [
        (r#"{"path":"/srv","path":"/etc"}"#, "path", "/path"),
        (r#"{"a":[{"b":{"x":1,"y":2,"x":1}}]}"#, "x", "/a/0/b/x"),
        (r#"{"path":1,"\u0070ath":2}"#, "path", "/path"),
    ] {
        let error = invoke_raw(&api, args).await.refused(422, "VALIDATION_ERROR");
        assert_eq!(error["detail"]["problems"][0]["pointer"], pointer, "{error}");
        assert!(message(&error).contains(&format!("{pointer}: the key \"{key}\"")), "{error}");
    }
    assert_eq!(api.get("/v1/tool_calls").await.is(200)["tool_calls"], json!([]));
    invoke_raw(&api, r#"{"a":{"x":1},"b":{"x":1}}"#).await.is(202);
}

#[tokio::test]
async fn a_repeated_key_in_a_batch_is_an_error_that_the_model_can_read() {
    let server = Server::start().await;
    let api = server.api();
    let repeated = r#"{"expression":"1","expression":"2"}"#;
    let text = Value::from(repeated);
    let calls = format!(
        r#"[{{"id":"a","type":"function","function":{{"name":"calculation__eval","arguments":{text}}}}},
            {{"type":"function_call","call_id":"b","name":"calculation__eval","arguments":{text}}},
            {{"type":"tool_use","id":"c","name":"calculation__eval","input":{repeated}}},
            {{"call_id":"d","name":"calculation.eval","args":{repeated}}},
            {{"call_id":"e","name":"calculation.eval","args":{{"expression":"6*7"}}}}]"#
    );
    let body = format!(r#"{{"run_id":"run_1","wait_ms":20000,"tool_calls":{calls}}}"#);
    let answer = api.post_raw("/v1/tool_calls", body).await.is(200);
    for index in 0..4 {
        let result = &answer["results"][index];
        assert_eq!(result["error"]["code"], "VALIDATION_ERROR", "{result}");
        let tool_message = answer["messages"][index].to_string();
        assert!(tool_message.contains("given twice"), "{tool_message}");
    }
    assert_eq!(answer["results"][4]["data"]["result"], 42, "the others are not affected");
}

#[tokio::test]
async fn a_repeated_key_in_a_tool_call_of_an_mcp_client_is_refused() {
    let server = Server::start().await;
    let api = server.api();
    for client in [Mcp::modern(&api), Mcp::legacy(&api).await] {
        let params = json!({ "name": "calculation.eval", "arguments": { "expression": "1+1" } });
        let request = client.request("tools/call", params).build().unwrap();
        let body = String::from_utf8(request.body().unwrap().as_bytes().unwrap().to_vec()).unwrap();
        let repeated =
            body.replace(r#"{"expression":"1+1"}"#, r#"{"expression":"1","expression":"2"}"#);
        assert_ne!(body, repeated);
        let params = json!({ "name": "calculation.eval", "arguments": {} });
        let answer = client.send(client.request("tools/call", params).body(repeated)).await;
        let result = answer.result();
        assert_eq!(result["isError"], true, "{result}");
        let error = &result["_meta"]["toolcrib/error"];
        assert_eq!(error["code"], "VALIDATION_ERROR", "{result}");
        assert!(result["content"][0]["text"].as_str().unwrap().contains("given twice"), "{result}");
    }
    assert_eq!(api.get("/v1/tool_calls").await.is(200)["tool_calls"], json!([]));
}

#[tokio::test]
async fn a_repeated_key_in_a_step_of_a_turn_fails_its_call() {
    let server = Server::start().await;
    let api = server.api();
    api.put("/v1/agents/default", json!({ "worker_target": "w1" })).await.is(200);
    api.post("/v1/agents/default/turns", json!({ "agent_turn_id": "t1" })).await.is(201);
    let body = r#"{"turn_epoch":1,"calls":[
        {"tool_call_id":"a","tool_name":"calculation.eval",
         "arguments":{"expression":"1","expression":"2"}},
        {"tool_call_id":"b","tool_name":"calculation.eval","arguments":{"expression":"6*7"}}]}"#;
    api.post_raw("/v1/agents/default/turns/t1/dispatch", body).await.is(200);
    let resume = json!({ "turn_epoch": 1, "wait_ms": 30_000 });
    let resumed = api.post("/v1/agents/default/turns/t1/resume", resume).await.is(200);
    let results = resumed["results"].as_array().unwrap();
    let result = |id: &str| results.iter().find(|result| result["tool_call_id"] == id).unwrap();
    assert_eq!(result("a")["status"], "failed", "{resumed}");
    assert!(result("a")["error"]["message"].as_str().unwrap().contains("given twice"), "{resumed}");
    assert_eq!(result("b")["result"]["result"], 42, "{resumed}");
}
