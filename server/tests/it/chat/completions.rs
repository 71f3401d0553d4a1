//! Chat completions that come at once.

use serde_json::json;
use toolcrib_bench::model::{
    ScriptedAnswer, ScriptedBehavior, ScriptedModel, text_reply, tool_call_reply,
};
use toolcrib_server::config::{ModelKind, NamedModelSettings};

use super::*;
use crate::support::api::{offer, offer_with};

#[tokio::test]
async fn calls_of_the_crib_are_done_here_and_the_answer_comes_back() {
    let two = ScriptedAnswer::text("I will see.")
        .with_call("call_a", "calculation__eval", eval("6 * 7").to_string())
        .with_call("call_b", "calculation__eval", eval("2 ^ 10").to_string());
    let (server, scripted) =
        serving([ScriptedBehavior::Reply(two), text_reply("42 and 1024.")]).await;
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
    // The calls are tickets of a run, as any others.
    let listed = api.get(&format!("/v1/tool_calls?run_id={run_id}")).await.is(200);
    let listed: Vec<&str> = listed["tool_calls"]
        .as_array()
        .unwrap()
        .iter()
        .map(|call| call["status"].as_str().unwrap())
        .collect();
    assert_eq!(listed, ["SUCCEEDED", "SUCCEEDED"]);
    let made = body["toolcrib"]["tool_calls"].as_array().unwrap();
    assert_eq!(made.len(), 2);
    assert_eq!((&made[0]["name"], &made[0]["ok"]), (&json!("calculation.eval"), &json!(true)));
    let ticket = api.call(made[0]["tool_call_id"].as_str().unwrap()).await;
    assert_eq!(ticket["result"]["text"], "42");
    // What the model was told.
    let asked = scripted.requests();
    assert_eq!(shape(&asked[1]), ["user", "assistant call_a call_b", "tool call_a", "tool call_b"]);
    assert!(asked[1].last_content().contains("1024"), "{}", asked[1].last_content());
    assert_eq!(asked[0].tool_names(), ["calculation__eval", "result__read"]);
}

#[tokio::test]
async fn the_tools_that_are_offered_are_those_the_caller_may_use_and_names() {
    let script = || [text_reply("a"), text_reply("b"), text_reply("c"), text_reply("d")];
    let (server, scripted) = serving(script()).await;
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
    some.retain(|name| name != "result__read");
    assert_eq!(some, ["crm__find"]);
    assert_eq!(ask(json!({ "tools": [] })).await, Vec::<String>::new());
    // A name that is none is said so.
    let mut body = question("Hello");
    body["toolcrib"] = json!({ "tools": ["crm.fnd"] });
    let refused = ada.post("/v1/chat/completions", body).await.is(400);
    assert_eq!(refused["error"]["param"], "toolcrib.tools.0");
    assert!(refused["error"]["message"].as_str().unwrap().contains("crm.fnd"), "{refused}");
}

#[tokio::test]
async fn the_clients_own_tools_are_returned_to_it() {
    let own = ScriptedAnswer::text("").with_call("call_1", "open_door", r#"{"n": 1}"#);
    let (server, scripted) =
        serving([ScriptedBehavior::Reply(own), text_reply("It is open.")]).await;
    let api = server.api();
    let mut body = question("Open the door");
    body["tools"] = json!([own_tool("open_door")]);
    body["temperature"] = 0.25.into();
    let answer = api.post("/v1/chat/completions", body.clone()).await.is(200);
    let choice = &answer["choices"][0];
    assert_eq!(choice["finish_reason"], "tool_calls");
    assert_eq!(choice["message"]["content"], json!(null));
    let function = json!({ "name": "open_door", "arguments": "{\"n\": 1}" });
    let calls = json!([{ "id": "call_1", "type": "function", "function": function }]);
    assert_eq!(choice["message"]["tool_calls"], calls, "as the model wrote it");
    let messages = body["messages"].as_array_mut().unwrap();
    messages.push(choice["message"].clone());
    messages.push(json!({ "role": "tool", "tool_call_id": "call_1", "content": "done" }));
    let answer = api.post("/v1/chat/completions", body).await.is(200);
    assert_eq!(answer["choices"][0]["message"]["content"], "It is open.");
    let asked = scripted.requests();
    assert_eq!(asked[0].tool_names(), ["open_door", "calculation__eval", "result__read"]);
    assert_eq!(asked[0].body["temperature"], 0.25);
    assert!(asked[0].body.get("toolcrib").is_none(), "the endpoint knows no such field");
    assert_eq!(shape(&asked[1]), ["user", "assistant call_1", "tool call_1"]);
}

#[tokio::test]
async fn the_demo_answers_without_any_endpoint() {
    let server = Server::start().await;
    let body = json!({ "model": "demo",
        "messages": [{ "role": "user", "content": "What is 12 * 7?" }] });
    let answer = server.api().post("/v1/chat/completions", body).await.is(200);
    assert_eq!(answer["choices"][0]["message"]["content"], "12 * 7 = 84");
    assert_eq!(answer["toolcrib"]["tool_calls"][0]["name"], "calculation.eval");
}

#[tokio::test]
async fn the_models_there_are() {
    let (server, _) = serving([]).await;
    let api = server.api();
    let listed = api.get("/v1/models").await.is(200);
    assert_eq!(listed["object"], "list");
    let names: Vec<&str> =
        listed["data"].as_array().unwrap().iter().map(|m| m["id"].as_str().unwrap()).collect();
    assert_eq!(names, ["large", "demo"], "the usual one first");
    assert_eq!(api.get("/v1/models/demo").await.is(200), listed["data"][1]);
    let refused = api.get("/v1/models/none").await.is(404);
    assert_eq!(refused["error"]["code"], "model_not_found");
}

#[tokio::test]
async fn a_late_result_is_waited_for_and_told() {
    let (server, scripted) = serving([
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
    let asking = {
        let api = api.clone();
        tokio::spawn(async move { api.post("/v1/chat/completions", body).await.is(200) })
    };
    let request = api.poll("c1").await;
    // The model has been told that it goes on, and said something.
    crate::support::until("the second request", || async {
        (scripted.requests().len() == 2).then_some(())
    })
    .await;
    api.succeed(request["tool_call_id"].as_str().unwrap(), json!({ "pages": 7 })).await;
    let answer = crate::support::soon("the answer", asking).await.unwrap();
    assert_eq!(answer["choices"][0]["message"]["content"], "The report has 7 pages.");
    assert!(
        scripted.requests()[2].last_content().contains("\"pages\":7"),
        "{}",
        scripted.requests()[2].last_content()
    );
}

#[tokio::test]
async fn who_does_not_want_to_wait_is_told_what_was_said_meanwhile() {
    let (server, _) = serving([
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
async fn a_model_of_anthropics_kind_is_asked_in_its_own_words() {
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
    body["tools"] = json!([own_tool("open_door")]);
    let answer = api.post("/v1/chat/completions", body.clone()).await.is(200);
    let message = &answer["choices"][0]["message"];
    assert_eq!(message["tool_calls"][0]["function"]["name"], "open_door");
    let id = &message["tool_calls"][0]["id"];
    let messages = body["messages"].as_array_mut().unwrap();
    messages.push(message.clone());
    messages.push(json!({ "role": "tool", "tool_call_id": id, "content": "done" }));
    let answer = api.post("/v1/chat/completions", body).await.is(200);
    assert_eq!(answer["choices"][0]["message"]["content"], "42, and it is open.");
    let asked = scripted.requests();
    assert_eq!(
        (asked[0].path.as_str(), &asked[0].body["model"]),
        ("/v1/messages", &json!("claude-9"))
    );
    let blocks: Vec<(&str, &str)> =
        asked[1]
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
async fn an_answer_that_was_cut_says_so_also_where_it_calls() {
    let mut cut = ScriptedAnswer::text("").with_call("a", "open_door", r#"{"which":"#);
    cut.finish = Some("length");
    let (server, _) = serving([ScriptedBehavior::Reply(cut)]).await;
    let mut body = question("Open the door");
    body["tools"] = json!([own_tool("open_door")]);
    let answer = server.api().post("/v1/chat/completions", body).await.is(200);
    assert_eq!(answer["choices"][0]["finish_reason"], "length", "{answer}");
}
