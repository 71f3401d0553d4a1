//! Chat completions without streaming.

use serde_json::json;
use toolcrib_bench::model::{
    ScriptedAnswer, ScriptedBehavior, ScriptedModel, text_reply, tool_call_reply,
};
use toolcrib_server::config::{ModelKind, NamedModelSettings};

use super::*;
use crate::support::api::{offer, offer_with};

#[tokio::test]
async fn server_tool_calls_are_executed_before_the_answer() {
    let two = ScriptedAnswer::text("I will see.")
        .with_call("call_a", "calculation__eval", eval("6 * 7").to_string())
        .with_call("call_b", "calculation__eval", eval("2 ^ 10").to_string());
    let (server, scripted) =
        start_with_replies([ScriptedBehavior::Reply(two), text_reply("42 and 1024.")]).await;
    let api = server.api();
    let reply = api.post("/v1/chat/completions", question("What is 6 * 7, and 2 ^ 10?")).await;
    let run_id = reply.header("toolcrib-run-id").unwrap().to_owned();
    let body = reply.is(200);
    assert_eq!(body["object"], "chat.completion");
    assert_eq!(body["model"], MODEL);
    let choice = &body["choices"][0];
    assert_eq!(choice["message"]["content"], "42 and 1024.");
    assert_eq!(choice["message"]["role"], "assistant");
    assert!(choice["message"].get("tool_calls").is_none(), "{body}");
    assert_eq!(choice["finish_reason"], "stop");
    let usage = json!({ "prompt_tokens": 20, "completion_tokens": 10, "total_tokens": 30 });
    assert_eq!(body["usage"], usage, "of both requests");
    assert_eq!(body["toolcrib"]["run_id"], run_id.as_str());
    assert_eq!(body["toolcrib"]["steps"], 2);
    // The calls are stored as calls of the run.
    let listed = api.get(&format!("/v1/tool_calls?run_id={run_id}")).await.is(200);
    let listed: Vec<&str> = listed["tool_calls"]
        .as_array()
        .unwrap()
        .iter()
        .map(|call| call["status"].as_str().unwrap())
        .collect();
    assert_eq!(listed, ["SUCCEEDED", "SUCCEEDED"]);
    let calls = body["toolcrib"]["tool_calls"].as_array().unwrap();
    assert_eq!(calls.len(), 2);
    assert_eq!((&calls[0]["name"], &calls[0]["ok"]), (&json!("calculation.eval"), &json!(true)));
    let ticket = api.call(calls[0]["tool_call_id"].as_str().unwrap()).await;
    assert_eq!(ticket["result"]["text"], "42");
    // The second model request has both results.
    let requests = scripted.requests();
    assert_eq!(
        message_shape(&requests[1]),
        ["user", "assistant call_a call_b", "tool call_a", "tool call_b"]
    );
    assert!(requests[1].last_content().contains("1024"), "{}", requests[1].last_content());
    assert_eq!(requests[0].tool_names(), ["calculation__eval", "result__read", "run__finish"]);
}

#[tokio::test]
async fn offered_tools_are_limited_by_rules_and_by_the_request() {
    let script = || [text_reply("a"), text_reply("b"), text_reply("c"), text_reply("d")];
    let (server, scripted) = start_with_replies(script()).await;
    let ada = server.keyed("p", "ada", "agent", &["calculation.*", "crm.*"]).await;
    let admin = server.keyed("p", "boss", "admin", &[]).await;
    admin.register("c1", json!([offer("crm.find"), offer("mail.send")])).await;
    let ask = async |extra: Value| {
        let mut body = question("Hello");
        body["toolcrib"] = extra;
        ada.post("/v1/chat/completions", body).await.is(200);
        scripted.requests().last().unwrap().tool_names()
    };
    let all = ask(json!(null)).await;
    assert!(all.contains(&"crm__find".to_owned()) && all.contains(&"calculation__eval".to_owned()));
    assert!(!all.contains(&"mail__send".to_owned()), "{all:?}");
    let mut some = ask(json!({ "tools": ["crm.*", "mail.*"] })).await;
    some.retain(|name| name != "result__read" && name != "run__finish");
    assert_eq!(some, ["crm__find"]);
    assert_eq!(ask(json!({ "tools": [] })).await, Vec::<String>::new());
    // An unknown tool name is refused.
    let mut body = question("Hello");
    body["toolcrib"] = json!({ "tools": ["crm.fnd"] });
    let refused = ada.post("/v1/chat/completions", body).await.is(400);
    assert_eq!(refused["error"]["param"], "toolcrib.tools.0");
    assert!(refused["error"]["message"].as_str().unwrap().contains("crm.fnd"), "{refused}");
}

#[tokio::test]
async fn a_request_without_toolcrib_tools_reaches_the_model_as_it_is() {
    let (server, scripted) = start_with_replies([text_reply("a"), text_reply("b")]).await;
    let api = server.api();
    let format = json!({ "type": "json_object" });
    let mut body = question("Hello");
    body["toolcrib"] = json!({ "tools": [] });
    body["response_format"] = format.clone();
    api.post("/v1/chat/completions", body.clone()).await.is(200);
    let plain = scripted.requests()[0].body.clone();
    assert!(plain.get("tools").is_none(), "no tool is added: {plain}");
    assert_eq!(plain["response_format"], format);
    body["tools"] = json!([caller_tool("open_door")]);
    body["tool_choice"] = "required".into();
    api.post("/v1/chat/completions", body).await.is(200);
    let own = &scripted.requests()[1];
    assert_eq!(own.tool_names(), ["open_door"], "a required call can only be one of the caller's");
    assert_eq!(own.body["tool_choice"], "required");
}

#[tokio::test]
async fn calls_of_caller_tools_are_returned_to_the_caller() {
    let call_reply = ScriptedAnswer::text("").with_call("call_1", "open_door", r#"{"n": 1}"#);
    let (server, scripted) =
        start_with_replies([ScriptedBehavior::Reply(call_reply), text_reply("It is open.")]).await;
    let api = server.api();
    let mut body = question("Open the door");
    body["tools"] = json!([caller_tool("open_door")]);
    body["temperature"] = 0.25.into();
    let answer = api.post("/v1/chat/completions", body.clone()).await.is(200);
    let choice = &answer["choices"][0];
    assert_eq!(choice["finish_reason"], "tool_calls");
    assert_eq!(choice["message"]["content"], json!(null));
    let function = json!({ "name": "open_door", "arguments": "{\"n\": 1}" });
    let calls = json!([{ "id": "call_1", "type": "function", "function": function }]);
    assert_eq!(choice["message"]["tool_calls"], calls, "the call must be unchanged");
    let messages = body["messages"].as_array_mut().unwrap();
    messages.push(choice["message"].clone());
    messages.push(json!({ "role": "tool", "tool_call_id": "call_1", "content": "done" }));
    let answer = api.post("/v1/chat/completions", body).await.is(200);
    assert_eq!(answer["choices"][0]["message"]["content"], "It is open.");
    let requests = scripted.requests();
    assert_eq!(
        requests[0].tool_names(),
        ["open_door", "calculation__eval", "result__read", "run__finish"]
    );
    assert_eq!(requests[0].body["temperature"], 0.25);
    assert!(requests[0].body.get("toolcrib").is_none(), "the endpoint knows no such field");
    assert_eq!(message_shape(&requests[1]), ["user", "assistant call_1", "tool call_1"]);
}

#[tokio::test]
async fn the_demo_model_needs_no_endpoint() {
    let server = Server::start().await;
    let body = json!({ "model": "demo",
        "messages": [{ "role": "user", "content": "What is 12 * 7?" }] });
    let answer = server.api().post("/v1/chat/completions", body).await.is(200);
    assert_eq!(answer["choices"][0]["message"]["content"], "12 * 7 = 84");
    assert_eq!(answer["toolcrib"]["tool_calls"][0]["name"], "calculation.eval");
}

#[tokio::test]
async fn models_are_listed_with_the_default_first() {
    let (server, _) = start_with_replies([]).await;
    let api = server.api();
    let listed = api.get("/v1/models").await.is(200);
    assert_eq!(listed["object"], "list");
    let names: Vec<&str> =
        listed["data"].as_array().unwrap().iter().map(|m| m["id"].as_str().unwrap()).collect();
    assert_eq!(names, ["large", "demo"], "the default comes first");
    assert_eq!(api.get("/v1/models/demo").await.is(200), listed["data"][1]);
    let refused = api.get("/v1/models/none").await.is(404);
    assert_eq!(refused["error"]["code"], "model_not_found");
}

#[tokio::test]
async fn a_late_result_is_awaited_and_sent_to_the_model() {
    let (server, scripted) = start_with_replies([
        tool_call_reply("call_1", "report__make", &json!({})),
        text_reply("It is being made."),
        text_reply("The report has 7 pages."),
    ])
    .await;
    let api = server.api();
    let report = offer_with("report.make", json!({ "async": true }));
    api.register("c1", json!([report])).await;
    let mut body = question("Make a report");
    body["toolcrib"] = json!({ "tools": ["report.make"] });
    let pending = {
        let api = api.clone();
        tokio::spawn(async move { api.post("/v1/chat/completions", body).await.is(200) })
    };
    let request = api.poll("c1").await;
    // The model has received the pending result and given an interim answer.
    crate::support::until("the second request", || async {
        (scripted.requests().len() == 2).then_some(())
    })
    .await;
    api.succeed(request["tool_call_id"].as_str().unwrap(), json!({ "pages": 7 })).await;
    let answer = crate::support::soon("the answer", pending).await.unwrap();
    assert_eq!(answer["choices"][0]["message"]["content"], "The report has 7 pages.");
    assert!(
        scripted.requests()[2].last_content().contains("\"pages\":7"),
        "{}",
        scripted.requests()[2].last_content()
    );
}

#[tokio::test]
async fn a_short_wait_returns_the_interim_answer() {
    let (server, _) = start_with_replies([
        tool_call_reply("call_1", "report__make", &json!({})),
        text_reply("It is being made."),
    ])
    .await;
    let api = server.api();
    let report = offer_with("report.make", json!({ "async": true }));
    api.register("c1", json!([report])).await;
    let mut body = question("Make a report");
    body["toolcrib"] = json!({ "tools": ["report.make"], "wait_ms": 1 });
    let answer = api.post("/v1/chat/completions", body).await.is(200);
    assert_eq!(answer["choices"][0]["message"]["content"], "It is being made.");
}

#[tokio::test]
async fn an_anthropic_model_is_requested_in_its_own_format() {
    let both = ScriptedAnswer::text("Hm.").with_call("toolu_1", "open_door", "{}").with_call(
        "toolu_2",
        "calculation__eval",
        eval("6 * 7").to_string(),
    );
    let scripted = ScriptedModel::start_with_replies([
        ScriptedBehavior::Reply(both),
        text_reply("42, and it is open."),
    ])
    .await
    .unwrap();
    let server = Server::with(|config| {
        let claude = NamedModelSettings {
            kind: Some(ModelKind::Anthropic),
            base_url: Some(scripted.url.clone()),
            model: Some("claude-9".into()),
            ..Default::default()
        };
        config.llm.models.insert("claude".into(), claude);
    })
    .await;
    let api = server.api();
    let mut body = question("6 * 7, and open the door");
    body["model"] = "claude".into();
    body["tools"] = json!([caller_tool("open_door")]);
    let answer = api.post("/v1/chat/completions", body.clone()).await.is(200);
    let message = &answer["choices"][0]["message"];
    assert_eq!(message["tool_calls"][0]["function"]["name"], "open_door");
    let id = &message["tool_calls"][0]["id"];
    let messages = body["messages"].as_array_mut().unwrap();
    messages.push(message.clone());
    messages.push(json!({ "role": "tool", "tool_call_id": id, "content": "done" }));
    let answer = api.post("/v1/chat/completions", body).await.is(200);
    assert_eq!(answer["choices"][0]["message"]["content"], "42, and it is open.");
    let requests = scripted.requests();
    assert_eq!(
        (requests[0].path.as_str(), &requests[0].body["model"]),
        ("/v1/messages", &json!("claude-9"))
    );
    let blocks: Vec<(&str, &str)> =
        requests[1]
            .messages()
            .iter()
            .flat_map(|message| {
                message["content"].as_array().unwrap().iter().map(|block| {
                    (message["role"].as_str().unwrap(), block["type"].as_str().unwrap())
                })
            })
            .collect();
    assert_eq!(
        blocks,
        [
            ("user", "text"),
            ("assistant", "text"),
            ("assistant", "tool_use"),
            ("assistant", "tool_use"),
            ("user", "tool_result"),
            ("user", "tool_result"),
        ]
    );
}

#[tokio::test]
async fn a_truncated_tool_call_has_finish_reason_length() {
    let mut truncated = ScriptedAnswer::text("").with_call("a", "open_door", r#"{"which":"#);
    truncated.finish = Some("length");
    let (server, _) = start_with_replies([ScriptedBehavior::Reply(truncated)]).await;
    let mut body = question("Open the door");
    body["tools"] = json!([caller_tool("open_door")]);
    let answer = server.api().post("/v1/chat/completions", body).await.is(200);
    assert_eq!(answer["choices"][0]["finish_reason"], "length", "{answer}");
}
