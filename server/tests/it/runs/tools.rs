//! Many tools, few tokens: requests to the model's endpoint as it received them, in both APIs.

use serde_json::{Value, json};
use toolcrib::results::tokens;
use toolcrib_bench::model::{
    RecordedRequest, ScriptedAnswer, ScriptedBehavior, ScriptedModel, text_reply, tool_call_reply,
};
use toolcrib_sources::models::settings::ModelKind;

use super::{question, run_to_end};
use crate::support::Server;
use crate::support::api::Api;

/// Registers 504 tools of 12 systems, with schemas as APIs have them.
async fn register_many_tools(api: &Api) {
    let verbs = ["list", "read", "create", "update", "delete", "archive"];
    let nouns = ["invoice", "ticket", "contact", "project", "message", "event", "file"];
    for system in 0..12 {
        let names = nouns.iter().flat_map(|noun| verbs.iter().map(move |verb| (verb, noun)));
        let tools: Vec<Value> = names
            .map(|(verb, noun)| {
                json!({
                    "name": format!("system{system:02}.{verb}_{noun}"),
                    "description": format!("Use this to {verb} one {noun} in system {system}. \
                        Returns the {noun} with all of its fields, or an error that explains what \
                        was wrong with the request."),
                    "effect": "read",
                    "schema": { "type": "object", "required": ["record_id"], "properties": {
                        "record_id": { "type": "string",
                            "description": format!("Id of the {noun}, as the list returns it") },
                        "fields": { "type": "array", "items": { "type": "string" },
                            "description": "Fields to return; all of them by default" },
                        "dry_run": { "type": "boolean",
                            "description": "Checks the request and changes nothing" },
                        "limit": { "type": "integer", "minimum": 1, "maximum": 500 },
                    } },
                })
            })
            .collect();
        api.register(&format!("client_{system}"), json!(tools)).await;
    }
}

/// Starts a server with 504 tools whose model gives these replies.
async fn start_with_many_tools(
    kind: ModelKind,
    replies: impl IntoIterator<Item = ScriptedBehavior>,
) -> (Server, ScriptedModel) {
    let model = ScriptedModel::start_with_replies(replies).await.unwrap();
    let url = model.url.clone();
    let server = Server::with(|config| {
        config.llm.kind = kind;
        config.llm.base_url = Some(url);
        config.llm.model = Some("large-1".into());
        config.llm.max_retries = 0;
    })
    .await;
    register_many_tools(&server.api()).await;
    (server, model)
}

/// Returns the tokens of `tools` and of the system text in a request.
fn overhead(request: &RecordedRequest) -> usize {
    let system = request.messages().iter().filter(|message| message["role"] == "system");
    let mut system: String = system.map(|message| message["content"].to_string()).collect();
    system.push_str(request.body["system"].as_str().unwrap_or_default());
    tokens::count(&request.body["tools"].to_string()) + tokens::count(&system)
}

const SEARCH: &str = r#"{"query":"archive an invoice in system 7","limit":2}"#;

fn search() -> ScriptedBehavior {
    ScriptedBehavior::Reply(ScriptedAnswer::text("").with_call("c1", "tools__search", SEARCH))
}

fn archive() -> ScriptedBehavior {
    tool_call_reply("c2", "system07__archive_invoice", &json!({ "record_id": "r1" }))
}

/// Answers the next call of the client that provides the tools of system 7.
async fn answer_call(api: &Api) {
    let work = api.poll("client_7").await;
    let id = work["tool_call_id"].as_str().or(work["tool_calls"][0]["tool_call_id"].as_str());
    api.succeed(id.unwrap_or_else(|| panic!("{work}")), json!({ "archived": true })).await;
}

#[tokio::test]
async fn runs_and_chat_send_few_tokens_with_504_tools() {
    let replies = [search(), archive(), text_reply("Archived.")];
    let (server, model) =
        start_with_many_tools(ModelKind::Openai, replies.into_iter().chain([text_reply("Hi.")]))
            .await;
    let api = server.api();
    let (run, ()) = tokio::join!(run_to_end(&api, question("Archive r1")), answer_call(&api));
    assert_eq!((&run["status"], &run["answer"]), (&json!("SUCCEEDED"), &json!("Archived.")));
    let requests = model.requests();
    assert!(overhead(&requests[0]) <= 1_500, "{}", overhead(&requests[0]));
    assert!(requests[1].tool_names().contains(&"system07__archive_invoice".to_owned()));
    for (earlier, later) in requests.iter().zip(&requests[1..]) {
        let tools = |request: &RecordedRequest| request.body["tools"].as_array().unwrap().clone();
        assert_eq!(
            tools(later)[..tools(earlier).len()],
            tools(earlier)[..],
            "the prefix is stable"
        );
        assert_eq!(later.messages()[..earlier.messages().len()], earlier.messages()[..]);
    }
    assert_eq!(run["steps"][0]["results"][0]["tools"][0], "system07__archive_invoice", "{run}");
    // The same in a chat completion.
    let chat = json!({ "model": "large-1", "messages": [{ "role": "user", "content": "Hi" }] });
    api.post("/v1/chat/completions", chat).await.is(200);
    let request = model.requests().pop().unwrap();
    assert!(overhead(&request) <= 1_500, "{}", overhead(&request));
}

#[tokio::test]
async fn modes_of_runs_and_requests_select_the_tools() {
    let replies = (0..4).map(|_| text_reply("Hi."));
    let (server, model) = start_with_many_tools(ModelKind::Openai, replies).await;
    let api = server.api();
    let mut body = question("Hi");
    body["tool_mode"] = "pinned".into();
    body["pinned_tools"] = json!(["system00.*_file"]);
    let run = run_to_end(&api, body.clone()).await;
    assert_eq!(
        (&run["tool_mode"], &run["pinned_tools"]),
        (&body["tool_mode"], &body["pinned_tools"])
    );
    assert_eq!(model.requests()[0].tool_names().len(), 7, "six files and run.finish");
    body["tool_mode"] = "all".into();
    run_to_end(&api, body.clone()).await;
    assert!(model.requests()[1].tool_names().len() > 504);
    let mut chat = json!({ "model": "large-1", "messages": [{ "role": "user", "content": "Hi" }],
        "toolcrib": { "tool_mode": "search", "pinned_tools": ["system00.read_file"],
            "tools": ["system00.*"] } });
    api.post("/v1/chat/completions", chat.clone()).await.is(200);
    let names = model.requests()[2].tool_names();
    assert_eq!(names, ["tools__search", "system00__read_file", "run__finish"]);
    body["tool_mode"] = "some".into();
    let refused = api.post("/v1/runs", body).await.refused(422, "VALIDATION_ERROR");
    assert!(refused.to_string().contains("auto, all, search or pinned"), "{refused}");
    chat["toolcrib"] = json!({ "tool_mode": "pinned", "pinned_tools": [] });
    let refused = api.post("/v1/chat/completions", chat).await.is(400);
    assert_eq!(refused["error"]["param"], "toolcrib.pinned_tools", "{refused}");
}

#[tokio::test]
async fn anthropic_gets_deferred_tools_and_references_to_them() {
    let replies = [search(), archive(), text_reply("Archived.")];
    let (server, model) = start_with_many_tools(ModelKind::Anthropic, replies).await;
    let api = server.api();
    let (run, ()) = tokio::join!(run_to_end(&api, question("Archive r1")), answer_call(&api));
    assert_eq!(run["answer"], "Archived.", "{run}");
    let requests = model.requests();
    assert!(overhead(&requests[0]) <= 1_500, "{}", overhead(&requests[0]));
    let tools = requests[1].body["tools"].as_array().unwrap();
    let deferred: Vec<&Value> = tools.iter().filter(|tool| tool["defer_loading"] == true).collect();
    assert_eq!(deferred.len(), 2, "{tools:?}");
    assert_eq!(deferred[0]["name"], "system07__archive_invoice");
    assert!(tools[0].get("defer_loading").is_none(), "one tool must not be deferred");
    let result = &requests[1].messages()[2]["content"][0];
    assert_eq!(result["type"], "tool_result");
    assert_eq!(
        result["content"][0],
        json!({ "type": "tool_reference", "tool_name": "system07__archive_invoice" })
    );
    assert!(requests[0].headers.get("anthropic-beta").is_none());
    assert_eq!(requests[1].headers["anthropic-beta"], "advanced-tool-use-2025-11-20");
    // What the API puts into the prompt's prefix stays the same.
    let prefix = |request: &RecordedRequest| {
        let tools = request.body["tools"].as_array().unwrap().iter();
        tools.filter(|tool| tool["defer_loading"] != true).cloned().collect::<Vec<_>>()
    };
    for (earlier, later) in requests.iter().zip(&requests[1..]) {
        assert_eq!(prefix(later), prefix(earlier));
        assert_eq!(later.body["system"], earlier.body["system"]);
        assert_eq!(later.messages()[..earlier.messages().len()], earlier.messages()[..]);
    }
}

#[tokio::test]
async fn the_native_search_can_be_switched_off() {
    let model = ScriptedModel::start_with_replies([search(), text_reply("Found.")]).await.unwrap();
    let url = model.url.clone();
    let server = Server::with(|config| {
        config.llm.kind = ModelKind::Anthropic;
        config.llm.base_url = Some(url);
        config.llm.model = Some("large-1".into());
        config.llm.native_tool_search = false;
    })
    .await;
    register_many_tools(&server.api()).await;
    run_to_end(&server.api(), question("Archive r1")).await;
    let request = &model.requests()[1];
    assert!(!request.body.to_string().contains("defer_loading"));
    let result = request.messages()[2]["content"][0]["content"].to_string();
    assert!(result.contains("system07__archive_invoice"), "{result}");
}

#[tokio::test]
async fn the_responses_api_gets_its_own_tool_search() {
    let replies = [search(), archive(), text_reply("Archived.")];
    let (server, model) = start_with_many_tools(ModelKind::Responses, replies).await;
    let api = server.api();
    let (run, ()) = tokio::join!(run_to_end(&api, question("Archive r1")), answer_call(&api));
    assert_eq!(run["answer"], "Archived.", "{run}");
    assert_eq!(run["usage"]["prompt_tokens"], 30, "{run}");
    let requests = model.requests();
    let tools = &requests[0].body["tools"];
    assert_eq!(
        (&tools[0]["type"], &tools[0]["execution"]),
        (&json!("tool_search"), &json!("client"))
    );
    assert!(tokens::count(&tools.to_string()) <= 1_500);
    let input = |n: usize| requests[n].body["input"].as_array().unwrap().clone();
    assert_eq!(input(1)[1]["type"], "tool_search_call");
    assert_eq!(input(1)[1]["arguments"]["limit"], 2);
    let output = &input(1)[2];
    assert_eq!((&output["type"], &output["call_id"]), (&json!("tool_search_output"), &json!("c1")));
    let found = &output["tools"][0];
    assert_eq!(
        (&found["name"], &found["type"]),
        (&json!("system07__archive_invoice"), &json!("function"))
    );
    assert_eq!((&found["defer_loading"], &found["strict"]), (&json!(true), &json!(false)));
    assert_eq!(input(2)[3]["type"], "function_call");
    assert_eq!(input(2)[4]["type"], "function_call_output");
    for n in [1, 2] {
        assert_eq!(&requests[n].body["tools"], tools, "the tools stay the same");
        assert_eq!(input(n)[..input(n - 1).len()], input(n - 1)[..]);
    }
}

fn failing_call(id: &str) -> ScriptedBehavior {
    tool_call_reply(id, "calculation__eval", &json!({ "expression": format!("{id} / 0") }))
}

#[tokio::test]
async fn runs_and_chat_whose_calls_all_failed_say_so() {
    let (server, _model) = super::start_with_model([
        failing_call("1"),
        text_reply("I could not."),
        failing_call("2"),
        text_reply("I could not."),
        failing_call("3"),
        text_reply("{}"),
    ])
    .await;
    let api = server.api();
    let run = run_to_end(&api, question("Divide")).await;
    assert_eq!(run["status"], "FAILED", "{run}");
    let answer = run["answer"].as_str().unwrap();
    assert!(
        answer.starts_with("I could not.\n\n[The only tool call failed: calculation.eval: "),
        "{answer}"
    );
    let error = run["error"]["message"].as_str().unwrap();
    assert!(error.starts_with("The only tool call failed: calculation.eval: "), "{error}");
    let mut chat =
        json!({ "model": "large-1", "messages": [{ "role": "user", "content": "Divide" }] });
    let reply = api.post("/v1/chat/completions", chat.clone()).await.is(200);
    let content = reply["choices"][0]["message"]["content"].as_str().unwrap();
    assert!(content.contains("[The only tool call failed"), "{content}");
    assert!(reply["toolcrib"]["failure"].is_string(), "{reply}");
    // A JSON answer stays one.
    chat["response_format"] = json!({ "type": "json_object" });
    let reply = api.post("/v1/chat/completions", chat).await.is(200);
    assert_eq!(reply["choices"][0]["message"]["content"], "{}");
    assert!(reply["toolcrib"]["failure"].is_string(), "{reply}");
}

fn definition_names(context: &Value) -> Vec<&str> {
    let tools = context["tool_definitions"].as_array().unwrap().iter();
    tools.map(|tool| tool["name"].as_str().unwrap()).collect()
}

#[tokio::test]
async fn the_context_of_a_chat_has_the_tools_of_its_request_and_the_other_way_round() {
    let (server, model) = super::start_with_model([
        super::eval("c1", "6*7"),
        text_reply("It is 42."),
        text_reply("Hello."),
    ])
    .await;
    let api = server.api();
    let chat = |toolcrib: Value| {
        json!({ "model": "large-1", "messages": [{ "role": "user", "content": "?" }],
            "toolcrib": toolcrib })
    };
    let narrowed = json!({ "run_id": "run_a", "tools": ["calculation.eval"] });
    api.post("/v1/chat/completions", chat(narrowed)).await.is(200);
    let context = api.get("/v1/runs/run_a/context").await.is(200);
    let names = ["calculation.eval", "result.read", "run.finish"];
    assert_eq!(definition_names(&context), names);
    let tools = json!({ "tool_definitions": [{ "name": "my.tool", "async": true }],
        "crib_tools": ["weather.query"] });
    api.put("/v1/runs/run_b/context/tool_definitions", tools).await.is(200);
    api.post("/v1/chat/completions", chat(json!({ "run_id": "run_b" }))).await.is(200);
    let request = model.requests().pop().unwrap();
    let names = ["my__tool", "weather__query", "result__read", "run__finish"];
    assert_eq!(request.tool_names(), names);
    assert_eq!(request.messages()[0]["role"], "system", "the guide to async tools");
}

#[tokio::test]
async fn only_its_owner_sets_the_tools_of_a_run() {
    let (server, _model) = super::start_with_model([text_reply("Hello.")]).await;
    let ada = server.keyed("default", "ada", "agent", &["*"]).await;
    let bob = server.keyed("default", "bob", "agent", &["*"]).await;
    let run = run_to_end(&ada, question("Hi")).await;
    let path = format!("/v1/runs/{}/context/tool_definitions", run["run_id"].as_str().unwrap());
    let tools = json!({ "crib_tools": ["calculation.eval"] });
    bob.put(&path, tools.clone()).await.refused(403, "PERMISSION_DENIED");
    ada.put(&path, tools).await.is(200);
}
