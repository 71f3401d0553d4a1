//! A tool whose client is away says so: in the list of tools, on the tool, and on its calls.

use serde_json::{Value, json};

use crate::support::api::offer_with;
use crate::support::ws::Ws;
use crate::support::{Api, Server, until};

async fn tool(api: &Api) -> Value {
    let list = api.get("/v1/tools").await.is(200);
    let listed = list["tools"].as_array().unwrap().iter().find(|tool| tool["name"] == "a.tool");
    let shown = api.get("/v1/tools/a.tool").await.is(200);
    let facts = |tool: &Value| (tool["available"].clone(), tool["unavailable_reason"].clone());
    assert_eq!(facts(listed.unwrap()), facts(&shown));
    shown
}

async fn until_available(api: &Api, available: bool) -> Value {
    until("the availability", || async {
        let tool = tool(api).await;
        (tool["available"] == available).then_some(tool)
    })
    .await
}

fn detail(call: &Value) -> &str {
    call["hold_details"]["message"].as_str().unwrap_or_else(|| panic!("{call}"))
}

async fn register(api: &Api) {
    api.register("c1", json!([offer_with("a.tool", json!({ "effect": "read" }))])).await;
}

#[tokio::test]
async fn a_tool_and_its_calls_say_that_the_client_is_away() {
    let server = Server::start().await;
    let api = server.api();
    register(&api).await;
    let away = tool(&api).await;
    let reason = "no client that offers a.tool is connected; c1 has not connected since the server \
                  started";
    assert_eq!((&away["available"], &away["unavailable_reason"]), (&json!(false), &json!(reason)));
    assert_eq!(away["providers"], json!([{ "client_id": "c1", "connected": false }]));
    let id = api.invoke("a.tool", json!({})).await;
    assert_eq!(detail(&api.call(&id).await), format!("waiting: {reason}"));
    let list = api.get("/v1/tool_calls?status=PENDING").await.is(200);
    assert_eq!(detail(&list["tool_calls"][0]), format!("waiting: {reason}"));

    let mut ws = Ws::hello(&api, "c1", json!({})).await;
    let there = until_available(&api, true).await;
    assert_eq!(there["providers"][0]["connected"], true, "{there}");
    assert_eq!(there.get("unavailable_reason"), None);
    let request = ws.receive().await;
    assert_eq!(request["tool_call_id"], json!(id));
    ws.send(json!({ "type": "tool_result", "tool_call_id": id, "status": "SUCCEEDED",
        "result": 1 }))
        .await;
    let ended = api.finished(&id).await;
    assert_eq!((&ended["status"], ended.get("hold")), (&json!("SUCCEEDED"), None));

    drop(ws);
    let away = until_available(&api, false).await;
    let reason = away["unavailable_reason"].as_str().unwrap();
    assert!(reason.contains("c1 was last seen ") && reason.ends_with(" s ago"), "{reason}");
    assert!(away["providers"][0]["last_seen_ms"].is_u64(), "{away}");
    let pinned = json!({ "run_id": "r", "client_id": "c1", "wait_ms": 1, "args": {} });
    let pinned = api.post("/v1/tools/a.tool/invoke", pinned).await.is(202);
    let detail = detail(&pinned);
    assert!(
        detail.starts_with("waiting for client c1, which is not connected; c1 was"),
        "{detail}"
    );

    let server = server.restart().await;
    let away = tool(&server.api()).await;
    let reason = away["unavailable_reason"].as_str().unwrap();
    assert!(reason.ends_with("c1 has not connected since the server started"), "{reason}");
}

#[tokio::test]
async fn a_polling_client_is_there_between_two_polls() {
    let server = Server::start().await;
    let api = server.api();
    register(&api).await;
    assert_eq!(tool(&api).await["available"], false);
    let path = "/internal/ingress/poll?client_id=c1&wait_ms=0";
    api.get(path).await.is(200);
    assert_eq!(tool(&api).await["available"], true);
}

#[tokio::test]
async fn the_tools_of_the_server_itself_are_available() {
    let server = Server::start().await;
    let list = server.api().get("/v1/tools").await.is(200);
    for tool in list["tools"].as_array().unwrap() {
        assert_eq!(tool["available"], true, "{tool}");
        assert_eq!(tool.get("providers"), None, "{tool}");
    }
}
