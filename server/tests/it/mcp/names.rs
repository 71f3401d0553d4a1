//! Names of tools: in the form that model APIs accept, or with dots; both can be called.

use serde_json::{Value, json};

use crate::support::Server;
use crate::support::api::{offer, offer_with};
use crate::support::mcp::Mcp;

fn is_model_name(name: &str) -> bool {
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
    (1..=64).contains(&name.len()) && name.chars().all(is_allowed)
}

#[tokio::test]
async fn listed_names_are_accepted_by_model_apis_and_both_forms_can_be_called() {
    let server = Server::start().await;
    let api = server.api();
    let long = format!("deep.{}", "x".repeat(90));
    api.register("pc_1", json!([offer("a.b"), offer("a__b"), offer("mcp/x.y"), offer(&long)]))
        .await;
    for client in [Mcp::modern(&api), Mcp::legacy(&api).await] {
        let names = client.names().await;
        assert!(names.iter().all(|name| is_model_name(name)), "{names:?}");
        let mut distinct = names.clone();
        distinct.sort();
        distinct.dedup();
        assert_eq!(distinct.len(), names.len(), "{names:?}");
        for name in ["calculation__eval", "calculation.eval"] {
            let result = client.call(name, json!({ "expression": "6*7" })).await.result();
            assert_eq!(result["structuredContent"]["result"], 42, "{result}");
            let id = result["_meta"]["toolcrib/tool_call_id"].as_str().unwrap();
            assert_eq!(api.call(id).await["tool_name"], "calculation.eval");
        }
        // Each listed name calls the tool that it was listed for.
        let tools = client.with_path("/mcp?wait_ms=0");
        for tool in tools.tools().await {
            let name = tool["name"].as_str().unwrap();
            let is_ours = ["a__b", "mcp--", "deep__"].iter().any(|ours| name.starts_with(ours));
            if !is_ours {
                continue;
            }
            let ticket = tools.call(name, json!({})).await.result();
            let id = ticket["structuredContent"]["tool_call_id"].as_str().unwrap();
            let called = api.call(id).await;
            let words = tool["title"].as_str().unwrap().to_lowercase().replace(' ', "");
            let letters = |text: &str| -> String {
                text.chars().filter(|c| c.is_ascii_alphanumeric()).collect()
            };
            let tool_name = called["tool_name"].as_str().unwrap();
            assert_eq!(letters(tool_name), letters(&words), "{name} called {tool_name}");
        }
    }
}

#[tokio::test]
async fn the_form_of_names_is_chosen_by_the_url_the_key_or_the_server() {
    let dotted = ["calculation.eval", "call.result", "result.read"];
    let server = Server::start().await;
    let api = server.api();
    let names = Mcp::modern(&api).with_path("/mcp?names=dotted").names().await;
    assert!(dotted.iter().all(|name| names.contains(&(*name).to_owned())), "{names:?}");
    let wrong = Mcp::modern(&api).with_path("/mcp?names=short").ask("tools/list", json!({})).await;
    assert_eq!(wrong.status, 422);
    let operator = server.operator();
    operator.post("/v1/keys", json!({ "agent": "root", "role": "admin" })).await.is(201);
    let body = json!({ "agent": "ada", "allow": ["calculation.*"], "mcp_names": "dotted" });
    let key = operator.post("/v1/keys", body.clone()).await.is(201);
    let ada = server.with_key(key["key"].as_str().unwrap());
    assert_eq!(Mcp::modern(&ada).names().await, dotted);
    assert_eq!(Mcp::legacy(&ada).await.names().await, dotted);
    let model = Mcp::modern(&ada).with_path("/mcp?names=model").names().await;
    let names = ["calculation__eval", "call__result", "result__read"];
    assert_eq!(model, names, "the URL takes precedence");
    let token = ada.post("/v1/session_tokens", json!({ "ttl_s": 60 })).await.is(201);
    let bearer = server.with_key(token["token"].as_str().unwrap());
    assert_eq!(Mcp::modern(&bearer).names().await, dotted, "a session token has its key's form");
    let bad = json!({ "agent": "bob", "mcp_names": "upper" });
    operator.post("/v1/keys", bad).await.refused(422, "VALIDATION_ERROR");
    let server =
        Server::with(|config| config.transports.mcp.names = "dotted".parse().unwrap()).await;
    assert!(Mcp::modern(&server.api()).names().await.contains(&"calculation.eval".to_owned()));
}

#[tokio::test]
async fn instructions_and_tickets_name_the_listed_tool() {
    let server = Server::start().await;
    let api = server.api();
    api.register("pc_1", json!([offer_with("slow.one", json!({ "effect": "read" }))])).await;
    for (path, helper) in
        [("/mcp?wait_ms=0", "call__result"), ("/mcp?wait_ms=0&names=dotted", "call.result")]
    {
        let client = Mcp::modern(&api).with_path(path);
        let discovered = client.ask("server/discover", json!({})).await.result();
        let instructions = discovered["instructions"].as_str().unwrap();
        assert!(instructions.contains(helper), "{instructions}");
        let pending: Value = client.call("slow.one", json!({})).await.result();
        let text = pending["content"][0]["text"].as_str().unwrap();
        assert!(text.contains(&format!("\"{helper}\"")), "{text}");
        assert!(client.names().await.contains(&helper.to_owned()));
    }
}

#[tokio::test]
async fn a_client_that_is_named_like_this_server_sees_model_names() {
    let server = Server::start().await;
    let named = Mcp::modern(&server.api()).named("toolcrib");
    assert!(named.names().await.contains(&"calculation__eval".to_owned()));
    let declared = named.able(json!({ "experimental": { "toolcrib/dotted_names": {} } }));
    assert!(declared.names().await.contains(&"calculation.eval".to_owned()));
}

#[tokio::test]
async fn digests_name_the_listed_tool() {
    let server = Server::with(|config| config.transports.mcp.result_tokens = 200).await;
    let api = server.api();
    let rows = json!({ "type": "object", "properties": { "rows": { "type": "array" } } });
    let tools =
        json!([offer("many.plain"), offer_with("many.typed", json!({ "output_schema": rows }))]);
    api.register("pc_1", tools).await;
    let rows: Vec<Value> = (0..500).map(|n| json!({ "number": n, "name": "row" })).collect();
    for (path, reader) in [("/mcp", "result__read {"), ("/mcp?names=dotted", "result.read {")] {
        let client = Mcp::modern(&api).with_path(path);
        for tool in ["many.plain", "many.typed"] {
            let submit = async {
                let request = api.poll("pc_1").await;
                let id = request["tool_call_id"].as_str().unwrap();
                api.succeed(id, json!({ "rows": rows })).await;
            };
            let (response, ()) = tokio::join!(client.call(tool, json!({})), submit);
            let result = response.result();
            let text = result["content"][0]["text"].as_str().unwrap();
            assert!(text.contains(reader), "{tool}: {text}");
            let note = &result["structuredContent"]["toolcrib_digest"];
            assert_eq!(
                note.as_str().map(|note| note.contains(reader)),
                (tool == "many.typed").then_some(true),
                "{tool}: {note}"
            );
        }
    }
}

#[tokio::test]
async fn the_structure_of_a_ticket_says_how_to_get_the_result() {
    let server = Server::start().await;
    let api = server.api();
    api.register("pc_1", json!([offer_with("slow.one", json!({ "effect": "read" }))])).await;
    let client = Mcp::modern(&api).with_path("/mcp?wait_ms=0");
    let pending: Value = client.call("slow.one", json!({})).await.result();
    // pydantic-ai gives the model only the structure.
    assert_eq!(pending["structuredContent"]["message"], pending["content"][0]["text"]);
}
