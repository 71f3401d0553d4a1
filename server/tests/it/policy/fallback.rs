//! Fallbacks: used only if the first tool is known to have had no side effect.

use serde_json::{Value, json};

use crate::support::api::{message, offer_with};
use crate::support::ws::Ws;
use crate::support::{Api, Server};

/// A tool with a fallback that takes other arguments.
fn tools(effect: &str, spare: &str) -> Value {
    let query = json!({
        "type": "object", "properties": { "query": { "type": "string" } }, "required": ["query"]
    });
    let other = json!({
        "type": "object", "additionalProperties": false,
        "properties": { "q": { "type": "string" }, "limit": { "type": "integer" } },
        "required": ["q"]
    });
    let mapping = json!({ "q": { "from": "/query" }, "limit": { "value": 5 } });
    let fallback = json!([{ "tool": "spare.tool", "args": mapping }]);
    let policy = json!({ "max_retries": 0 });
    json!([
        offer_with(
            "first.tool",
            json!({
                "schema": query, "effect": effect, "fallback": fallback, "policy": policy
            })
        ),
        offer_with("spare.tool", json!({ "schema": other, "effect": spare, "policy": policy })),
    ])
}

async fn start_call(effect: &str) -> (Server, Api, Ws, String, Value) {
    let server = Server::start().await;
    let api = server.api();
    let mut client = Ws::offering(&api, "c1", tools(effect, "irreversible")).await;
    let id = api.invoke("first.tool", json!({ "query": "rain" })).await;
    let request = client.take().await;
    assert_eq!(request["tool_name"], "first.tool");
    (server, api, client, id, request)
}

#[tokio::test]
async fn the_fallback_runs_with_mapped_arguments_and_is_reported() {
    let (_server, api, mut client, id, request) = start_call("read").await;
    let original_args = request["args"].clone();
    assert_eq!(client.fail(&request, json!("down")).await["status"], "PENDING");
    let request = client.take().await;
    assert_eq!(request["tool_call_id"], json!(id), "the same ticket");
    assert_eq!(request["tool_name"], "spare.tool");
    assert_eq!(request["args"], json!({ "q": "rain", "limit": 5 }));
    client.succeed(&request, json!("from the spare")).await;
    let call = api.call(&id).await;
    assert_eq!(call["tool_name"], "first.tool", "the requested tool");
    assert_eq!(call["args"], original_args, "the requested arguments");
    assert_eq!(call["ran_tool"], "spare.tool", "the executed tool");
    assert_eq!((&call["status"], &call["result"]), (&json!("SUCCEEDED"), &json!("from the spare")));
    let mut events = api.follow(&format!("/v1/tool_calls/{id}/events"), None).await;
    let fallback = events.wait_for("tool.call.fallback").await;
    assert_eq!(
        (&fallback.data["from"], &fallback.data["to"]),
        (&json!("first.tool"), &json!("spare.tool"))
    );
    assert_eq!(fallback.data["message"], "down");
    let list = api.get("/v1/tool_calls?tool_name=first.tool").await.is(200);
    assert_eq!(list["tool_calls"].as_array().unwrap().len(), 1);
}

#[tokio::test]
async fn an_irreversible_call_falls_back_if_it_had_no_side_effect() {
    let (_server, api, mut client, id, request) = start_call("irreversible").await;
    let error = json!({ "message": "refused at the door", "happened": false, "retryable": false });
    assert_eq!(client.fail(&request, error).await["status"], "PENDING");
    let request = client.take().await;
    assert_eq!(request["tool_name"], "spare.tool");
    client.succeed(&request, json!(1)).await;
    assert_eq!(api.call(&id).await["ran_tool"], "spare.tool");
}

#[tokio::test]
async fn a_call_that_may_have_taken_effect_does_not_fall_back() {
    let (_server, api, mut client, id, request) = start_call("irreversible").await;
    assert_eq!(client.fail(&request, json!("half way")).await["status"], "FAILED");
    client.expect_no_message().await;
    let call = api.call(&id).await;
    assert_eq!(
        (&call["ran_tool"], &call["error"]["code"]),
        (&json!("first.tool"), &json!("RUNTIME_ERROR"))
    );
}

#[tokio::test]
async fn a_successful_call_does_not_fall_back() {
    let (_server, api, mut client, id, request) = start_call("read").await;
    client.succeed(&request, json!("first")).await;
    client.expect_no_message().await;
    assert_eq!(api.call(&id).await["ran_tool"], "first.tool");
}

#[tokio::test]
async fn if_the_fallback_fails_too_the_call_has_its_error() {
    let (_server, api, mut client, id, request) = start_call("read").await;
    client.fail(&request, json!("down")).await;
    let request = client.take().await;
    assert_eq!(client.fail(&request, json!("down as well")).await["status"], "FAILED");
    let call = api.call(&id).await;
    assert!(message(&call["error"]).starts_with("down as well"), "{call}");
    assert_eq!(call["outcome"]["metrics"]["attempts"], 2);
}

#[tokio::test]
async fn a_fallback_with_invalid_arguments_is_skipped() {
    let server = Server::start().await;
    let api = server.api();
    let picky = json!({ "type": "object", "required": ["n"] });
    let first = offer_with(
        "first.tool",
        json!({
            "effect": "read", "policy": { "max_retries": 0 },
            "fallback": [{ "tool": "no.such" }, { "tool": "picky.tool" }, { "tool": "spare.tool" }]
        }),
    );
    let tools = json!([
        first,
        offer_with("picky.tool", json!({ "schema": picky })),
        offer_with("spare.tool", json!({}))
    ]);
    let mut client = Ws::offering(&api, "c1", tools).await;
    api.invoke("first.tool", json!({ "x": 1 })).await;
    let request = client.take().await;
    client.fail(&request, json!("down")).await;
    let request = client.take().await;
    assert_eq!(request["tool_name"], "spare.tool");
    assert_eq!(request["args"], json!({ "x": 1 }), "without a mapping, the same arguments");
}

#[tokio::test]
async fn a_builtin_tool_can_be_the_fallback_of_a_client_tool() {
    let server = Server::start().await;
    let api = server.api();
    let mapping = json!({ "expression": { "from": "/sum" } });
    let first = offer_with(
        "sum.tool",
        json!({
            "effect": "read", "policy": { "max_retries": 0 },
            "fallback": [{ "tool": "calculation.eval", "args": mapping }]
        }),
    );
    api.register("c1", json!([first])).await;
    let id = api.invoke("sum.tool", json!({ "sum": "40+2" })).await;
    api.fail(&id, json!("away")).await;
    let call = api.finished(&id).await;
    assert_eq!(
        (&call["ran_tool"], &call["result"]["result"]),
        (&json!("calculation.eval"), &json!(42))
    );
}
