//! Valid answers of both kinds of endpoints, with and without streaming, and the API key.

use serde_json::{Value, json};
use toolcrib::domain::model_reply::{FinishReason, TokenUsage, ToolCallRequest};
use toolcrib::ports::model::{Delta, Model, ModelRequest};
use toolcrib_bench::model::{
    ScriptedAnswer, ScriptedBehavior, ScriptedModel, text_reply, tool_call_reply,
};
use toolcrib_sources::models::{
    AnthropicModel, ApiKeySource, ModelApi, ModelEndpoint, OpenAiModel, ResponsesModel,
};

use super::*;

fn two_calls() -> ScriptedBehavior {
    let first = r#"{"expression": "6 * 7"}"#;
    let answer = ScriptedAnswer::text("Let me see: ä€😀.")
        .with_call("call_a", "calculation__eval", first)
        .with_call("call_b", "weather__query", r#"{"query": "Paris"}"#);
    ScriptedBehavior::Reply(answer)
}

fn expected_calls() -> Vec<ToolCallRequest> {
    let call = |id: &str, name: &str, arguments: &str| ToolCallRequest {
        id: id.into(),
        name: name.into(),
        arguments: arguments.into(),
    };
    vec![
        call("call_a", "calculation__eval", r#"{"expression": "6 * 7"}"#),
        call("call_b", "weather__query", r#"{"query": "Paris"}"#),
    ]
}

#[tokio::test]
async fn streamed_arguments_of_parallel_calls_are_assembled() {
    for kind in [ModelApi::OpenAi, ModelApi::Anthropic, ModelApi::Responses] {
        let scripted = ScriptedModel::start_with_replies([two_calls()]).await.unwrap();
        let endpoint = endpoint(&scripted, kind);
        let model: Box<dyn Model> = match kind {
            ModelApi::OpenAi => Box::new(OpenAiModel::new(endpoint)),
            ModelApi::Anthropic => Box::new(AnthropicModel::new(endpoint)),
            ModelApi::Responses => Box::new(ResponsesModel::new(endpoint)),
        };
        let (reply, deltas) = request_reply(&*model, &prompt()).await;
        let reply = reply.unwrap();
        assert_eq!(reply.text, "Let me see: ä€😀.");
        assert_eq!(reply.calls, expected_calls());
        assert_eq!(reply.finish_reason, FinishReason::ToolCalls);
        assert_eq!(reply.usage, TokenUsage { prompt_tokens: 10, completion_tokens: 5 });
        assert_eq!(reply.model.as_deref(), Some("large-1"));
        // The deltas add up to the same reply.
        assert_eq!(text_of(&deltas), reply.text);
        let mut built: Vec<ToolCallRequest> = Vec::new();
        for delta in deltas {
            let Delta::Call { index, id, name, arguments } = delta else { continue };
            if let (Some(id), Some(name)) = (id, name) {
                assert_eq!(index, built.len());
                built.push(ToolCallRequest { id, name, arguments: String::new() });
            }
            built[index].arguments.push_str(&arguments);
        }
        assert_eq!(built, reply.calls);
    }
}

#[tokio::test]
async fn a_response_without_streaming_is_parsed() {
    let calls = json!([
        { "id": "call_a", "type": "function",
          "function": { "name": "calculation__eval", "arguments": "{\"expression\": \"6 * 7\"}" } },
        { "id": "call_a", "type": "function",
          "function": { "name": "weather__query", "arguments": { "query": "Paris" } } },
    ]);
    let message = json!({ "role": "assistant", "content": "Hm.", "tool_calls": calls });
    let whole = json!({ "model": "m", "usage": { "prompt_tokens": 3, "completion_tokens": 4 },
        "choices": [{ "index": 0, "message": message, "finish_reason": "tool_calls" }] });
    let turn = ScriptedBehavior::Raw("application/json", whole.to_string().into_bytes());
    let scripted = ScriptedModel::start_with_replies([turn]).await.unwrap();
    let (reply, deltas) = request_reply(&openai(&scripted), &prompt()).await;
    let reply = reply.unwrap();
    assert_eq!((reply.text.as_str(), text_of(&deltas).as_str()), ("Hm.", "Hm."));
    let calls: Vec<(&str, &str)> =
        reply.calls.iter().map(|call| (call.id.as_str(), call.arguments.as_str())).collect();
    let two = [("call_a", r#"{"expression": "6 * 7"}"#), ("call_a", r#"{"query":"Paris"}"#)];
    assert_eq!(calls, two, "two calls with one id stay two");
    assert_eq!(reply.usage, TokenUsage { prompt_tokens: 3, completion_tokens: 4 });
}

#[tokio::test]
async fn the_request_has_the_fields_that_the_endpoint_expects() {
    let scripted =
        ScriptedModel::start_with_replies([text_reply("42"), text_reply("42")]).await.unwrap();
    let settings = json!({ "temperature": 0.5, "stream": false, "tool_choice": "auto" });
    let Value::Object(settings) = settings else { unreachable!() };
    let prompt = ModelRequest { settings, ..prompt() };
    let model = openai(&scripted);
    request_reply(&model, &prompt).await.0.unwrap();
    let bare = ModelRequest { tools: Vec::new(), ..prompt };
    request_reply(&model, &bare).await.0.unwrap();
    let requests = scripted.requests();
    let body = &requests[0].body;
    assert_eq!(body["model"], "large-1");
    assert_eq!(body["temperature"], 0.5);
    assert_eq!(body["stream"], true);
    assert_eq!(body["stream_options"], json!({ "include_usage": true }));
    assert_eq!(body["messages"][0]["content"], "What is 6 * 7?");
    assert_eq!(
        (requests[0].tool_names(), &body["tool_choice"]),
        (vec!["calculation__eval".to_owned()], &json!("auto"))
    );
    let body = &requests[1].body;
    assert!(body.get("tools").is_none() && body.get("tool_choice").is_none(), "{body}");
}

#[tokio::test]
async fn a_conversation_is_translated_for_anthropic() {
    let scripted =
        ScriptedModel::start_with_replies([text_reply("42"), text_reply("42")]).await.unwrap();
    let call = |id: &str, arguments: &str| {
        json!({ "id": id, "type": "function",
        "function": { "name": "calculation__eval", "arguments": arguments } })
    };
    let messages = vec![
        json!({ "role": "system", "content": "Be brief." }),
        json!({ "role": "user", "content": "6 * 7 and 1 / 0?" }),
        json!({ "role": "assistant", "content": null, "tool_calls": [
            call("call:1", "{\"expression\":\"6 * 7\"}"), call("call_2", "{\"expr")] }),
        json!({ "role": "tool", "tool_call_id": "call:1", "content": "42" }),
        json!({ "role": "tool", "tool_call_id": "call_2", "content": "not JSON" }),
        json!({ "role": "user", "content": [{ "type": "text", "text": "Well?" }] }),
    ];
    let settings = json!({ "max_tokens": 77, "stop": "END", "tool_choice": "required",
        "parallel_tool_calls": false, "seed": 5 });
    let Value::Object(settings) = settings else { unreachable!() };
    let prompt = ModelRequest { messages, settings, ..prompt() };
    let model = anthropic(&scripted);
    request_reply(&model, &prompt).await.0.unwrap();
    request_reply(&model, &ModelRequest { tools: Vec::new(), ..prompt }).await.0.unwrap();
    let requests = scripted.requests();
    assert_eq!(requests[0].path, "/v1/messages");
    assert_eq!(requests[0].headers["anthropic-version"], "2023-06-01");
    let use_ = |id: &str, input: Value| {
        json!({ "type": "tool_use", "id": id,
        "name": "calculation__eval", "input": input })
    };
    let result = |id: &str, content: &str| {
        json!({ "type": "tool_result", "tool_use_id": id,
        "content": content })
    };
    let messages = json!([
        { "role": "user", "content": [{ "type": "text", "text": "6 * 7 and 1 / 0?" }] },
        { "role": "assistant", "content": [
            use_("call_1", json!({ "expression": "6 * 7" })),
            use_("call_2", json!({ "not_json": "{\"expr" })) ] },
        { "role": "user", "content": [result("call_1", "42"), result("call_2", "not JSON"),
            { "type": "text", "text": "Well?" }] },
    ]);
    let tools = json!([{ "name": "calculation__eval", "description": "Calculates",
        "input_schema": { "type": "object" } }]);
    assert_eq!(
        requests[0].body,
        json!({
            "model": "large-1", "max_tokens": 77, "stream": true, "system": "Be brief.",
            "stop_sequences": ["END"], "messages": messages, "tools": tools,
            "tool_choice": { "type": "any", "disable_parallel_tool_use": true },
        })
    );
    // The API requires tool definitions if the conversation has calls, even if none are allowed.
    let schema = json!([{ "name": "calculation__eval", "input_schema": { "type": "object" } }]);
    assert_eq!(requests[1].body["tools"], schema);
    assert_eq!(requests[1].body["tool_choice"], json!({ "type": "none" }));
}

#[tokio::test]
async fn a_model_without_vision_gets_the_texts_of_results_with_images() {
    let refusal = json!({ "error": { "message": "this model takes no images" } });
    let refuse = || ScriptedBehavior::Refuse(400, None, refusal.clone());
    let scripted =
        ScriptedModel::start_with_replies([refuse(), text_reply("a cat"), refuse()]).await.unwrap();
    let image =
        json!({ "type": "image_url", "image_url": { "url": "data:image/png;base64,QUJD" } });
    let text = json!({ "type": "text", "text": "Returned by the tool call call_1 (files.read):" });
    let mut prompt = prompt();
    prompt.messages.push(json!({ "role": "user", "content": [text, image] }));
    let model = openai(&scripted);
    assert_eq!(request_reply(&model, &prompt).await.0.unwrap().text, "a cat");
    let requests = scripted.requests();
    assert!(requests[0].body.to_string().contains("image_url"));
    assert_eq!(requests[1].body["messages"].as_array().unwrap().len(), 1);
    // Other refused requests are not repeated.
    prompt.messages.pop();
    assert!(request_reply(&model, &prompt).await.0.is_err());
    assert_eq!(scripted.requests().len(), 3);
}

#[tokio::test]
async fn the_key_is_sent_and_redacted_from_errors() {
    let secret = "sk-very-secret-1234";
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), format!("{secret}\n")).unwrap();
    let echo = |status: u16| {
        let message = format!("Incorrect API key provided: {secret}, or sk-very***1234");
        ScriptedBehavior::Refuse(status, None, json!({ "error": { "message": message } }))
    };
    for (kind, header, value) in [
        (ModelApi::OpenAi, "authorization", format!("Bearer {secret}")),
        (ModelApi::Anthropic, "x-api-key", secret.to_owned()),
        (ModelApi::Responses, "authorization", format!("Bearer {secret}")),
    ] {
        let scripted = ScriptedModel::start_with_replies([text_reply("42"), echo(401), echo(400)])
            .await
            .unwrap();
        let key =
            ApiKeySource { variable: None, file: Some(file.path().to_owned()), is_required: true };
        let endpoint = ModelEndpoint { key, ..endpoint(&scripted, kind) };
        let model: Box<dyn Model> = match kind {
            ModelApi::OpenAi => Box::new(OpenAiModel::new(endpoint)),
            ModelApi::Anthropic => Box::new(AnthropicModel::new(endpoint)),
            ModelApi::Responses => Box::new(ResponsesModel::new(endpoint)),
        };
        assert_eq!(request_reply(&*model, &prompt()).await.0.unwrap().text, "42");
        assert_eq!(scripted.requests()[0].headers[header], value);
        for status in [401, 400] {
            let failure = request_reply(&*model, &prompt()).await.0.unwrap_err();
            let text = format!("{failure:?} {failure}");
            assert!(!failure.is_transient, "{text}");
            assert!(failure.fault.message.contains(&format!("answered {status}")), "{text}");
            assert!(!text.contains(secret), "{text}");
            assert!(status == 400 || !text.contains("1234"), "{text}");
        }
    }
}

#[tokio::test]
async fn a_missing_key_is_reported_with_its_variable() {
    let scripted =
        ScriptedModel::start_with_replies([tool_call_reply("c", "t", &json!({}))]).await.unwrap();
    let variable = Some("NO_SUCH_VARIABLE_HERE".to_owned());
    let key = ApiKeySource { variable, file: None, is_required: true };
    let model = OpenAiModel::new(ModelEndpoint { key, ..endpoint(&scripted, ModelApi::OpenAi) });
    let failure = request_reply(&model, &prompt()).await.0.unwrap_err();
    assert!(!failure.is_transient);
    assert!(failure.fault.message.contains("NO_SUCH_VARIABLE_HERE"), "{failure}");
    assert!(scripted.requests().is_empty(), "nothing was sent");
}
