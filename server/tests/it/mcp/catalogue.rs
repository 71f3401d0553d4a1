//! The catalogue: search, describe and call in place of a long tool list.

use serde_json::{Value, json};

use crate::support::Server;
use crate::support::api::{offer, offer_with};
use crate::support::mcp::Mcp;

const CATALOGUE_TOOLS: [&str; 4] =
    ["call__result", "tools__call", "tools__describe", "tools__search"];

fn found_names(result: &Value) -> Vec<&str> {
    let tools = result["structuredContent"]["tools"].as_array().unwrap();
    tools.iter().map(|tool| tool["name"].as_str().unwrap()).collect()
}

#[tokio::test]
async fn a_client_can_search_describe_and_call_by_catalogue() {
    let server = Server::start().await;
    let api = server.api();
    for client in [Mcp::modern(&api).with_path("/mcp?catalogue=search")] {
        assert_eq!(client.names().await, CATALOGUE_TOOLS);
        let query = json!({ "query": "calculate an expression" });
        let result = client.call("tools.search", query).await.result();
        assert_eq!(found_names(&result)[0], "calculation__eval");
        let text = result["content"][0]["text"].as_str().unwrap();
        assert!(text.starts_with("calculation__eval: "), "{text}");
        let names = json!({ "names": ["calculation.eval"] });
        let result = client.call("tools.describe", names).await.result();
        let tool = &result["structuredContent"]["tools"][0];
        assert_eq!(tool["inputSchema"]["required"], json!(["expression"]));
        let call = json!({ "name": "calculation.eval", "arguments": { "expression": "6*7" } });
        let result = client.call("tools.call", call).await.result();
        assert_eq!(result["structuredContent"]["result"], 42);
        let id = result["_meta"]["toolcrib/tool_call_id"].as_str().unwrap();
        assert_eq!(api.call(id).await["tool_name"], "calculation.eval");
    }
}

#[tokio::test]
async fn a_long_list_becomes_the_catalogue_unless_full_is_requested() {
    let server = Server::with(|config| config.transports.mcp.catalogue_over = 20).await;
    let api = server.api();
    let many: Vec<Value> = (0..30).map(|n| offer(&format!("many.tool_{n:02}"))).collect();
    api.register("pc_1", json!(many)).await;
    assert_eq!(Mcp::modern(&api).names().await, CATALOGUE_TOOLS);
    assert_eq!(Mcp::legacy(&api).await.names().await, CATALOGUE_TOOLS);
    let all = Mcp::modern(&api).with_path("/mcp?catalogue=full").names().await;
    assert!(all.len() > 30 && !all.contains(&"tools__search".to_owned()));
    let wrong =
        Mcp::modern(&api).with_path("/mcp?catalogue=some").ask("tools/list", json!({})).await;
    assert_eq!(wrong.status, 422);
}

#[tokio::test]
async fn tools_that_the_caller_may_not_call_are_not_found_or_described() {
    let server = Server::start().await;
    let admin = server.keyed("default", "root", "admin", &[]).await;
    let ada = server.keyed("default", "ada", "agent", &["mail.read"]).await;
    let tools = ["mail.read", "mail.send"]
        .map(|name| offer_with(name, json!({ "description": "Something about mail" })));
    admin.register("pc_1", json!(tools)).await;
    let client = Mcp::modern(&ada).with_path("/mcp?catalogue=search");
    let result = client.call("tools.search", json!({ "query": "mail" })).await.result();
    assert_eq!(found_names(&result), ["mail__read"]);
    let names = json!({ "names": ["mail.send"] });
    let result = client.call("tools.describe", names).await.result();
    assert_eq!(result["isError"], true);
    let call = json!({ "name": "mail.send", "arguments": {} });
    let result = client.call("tools.call", call).await.result();
    assert_eq!(result["isError"], true, "{result}");
    let answer = ada.get("/v1/tools?query=mail").await.is(200);
    assert_eq!(answer["tools"].as_array().unwrap().len(), 1);
    assert_eq!(answer["tools"][0]["name"], "mail.read");
}

#[tokio::test]
async fn invalid_catalogue_requests_are_errors() {
    let server = Server::start().await;
    let api = server.api();
    let client = Mcp::modern(&api).with_path("/mcp?catalogue=search");
    for (tool, args) in [
        ("tools.search", json!({})),
        ("tools.search", json!({ "query": "" })),
        ("tools.search", json!({ "query": "a", "limit": 0 })),
        ("tools.describe", json!({ "names": [] })),
        ("tools.describe", json!({ "names": ["no.such_tool"] })),
        ("tools.call", json!({ "arguments": {} })),
        ("tools.call", json!({ "name": "calculation.eval", "arguments": {} })),
    ] {
        let result = client.call(tool, args.clone()).await.result();
        assert_eq!(result["isError"], true, "{tool} {args}: {result}");
    }
    client.call("tools.call", json!({ "name": "no.such_tool" })).await.error(-32602);
    let nothing = client.call("tools.search", json!({ "query": "zebra" })).await.result();
    assert_eq!(nothing["isError"], false);
    for query in ["query=", "query=a&limit=0", "query=a&format=mcp"] {
        api.get(&format!("/v1/tools?{query}")).await.refused(422, "VALIDATION_ERROR");
    }
}

/// Checks the figures of docs/mcp.md: 500 tools of typical size, counted by a real tokenizer.
#[tokio::test]
async fn five_hundred_tools_cost_a_hundredth_of_their_tokens() {
    let server = Server::start().await;
    let api = server.api();
    let tools: Vec<Value> = (0..500).map(typical_tool).collect();
    api.register("pc_1", json!(tools)).await;
    let list = |path: &str| {
        let client = Mcp::modern(&api).with_path(path);
        async move { json!(client.tools().await).to_string() }
    };
    let all = toolcrib::results::tokens::count(&list("/mcp?catalogue=full").await);
    let few = toolcrib::results::tokens::count(&list("/mcp?catalogue=search").await);
    let client = Mcp::modern(&api).with_path("/mcp?catalogue=search");
    let query = json!({ "query": "create an invoice", "limit": 5 });
    let search = client.call("tools.search", query).await.result()["content"].to_string();
    let names = json!({ "names": ["billing.create_invoice_000"] });
    let describe = client.call("tools.describe", names).await.result()["content"].to_string();
    let used = few
        + toolcrib::results::tokens::count(&search)
        + toolcrib::results::tokens::count(&describe);
    println!("500 tools: {all} tokens; the catalogue: {few}; with one search and one look: {used}");
    assert!(few * 100 < all, "{few} of {all}");
    assert!(used * 30 < all, "{used} of {all}");
}

fn typical_tool(n: usize) -> Value {
    let (service, verb, thing) = (
        ["billing", "crm", "mail", "files", "calendar"][n % 5],
        ["create", "update", "list", "delete", "search"][n / 5 % 5],
        ["invoice", "customer", "message", "document", "meeting"][n % 5],
    );
    offer_with(
        &format!("{service}.{verb}_{thing}_{n:03}"),
        json!({
            "description": format!("{verb}s a {thing} in {service}. Needs the id of the account; \
                gives the {thing} with its id, its state and when it was last changed."),
            "schema": { "type": "object", "required": ["account_id"], "properties": {
                "account_id": { "type": "string", "description": "The account it belongs to" },
                "title": { "type": "string", "description": format!("What the {thing} is called") },
                "tags": { "type": "array", "items": { "type": "string" },
                    "description": "Words to find it by" },
                "due_at": { "type": "string", "format": "date-time",
                    "description": "When it is due, in RFC 3339" },
            } },
        }),
    )
}
