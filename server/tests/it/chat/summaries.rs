//! Summaries of long results by the configured model, with the digest as the fallback.

use serde_json::json;
use toolcrib_bench::model::{
    RecordedRequest, ScriptedBehavior, ScriptedModel, text_reply, tool_call_reply,
};
use toolcrib_server::config::NamedModelSettings;

use super::*;
use crate::support::api::{offer, offer_with};

/// A long log with one relevant line.
fn long_log() -> Value {
    let line = |n: usize| match n {
        3_217 => "ERROR order 3217: the printer is out of paper\n".to_owned(),
        n => format!("INFO order {n} was packed\n"),
    };
    (0..5_000).map(line).collect::<String>().into()
}

/// Starts a server with a separate model for summaries.
async fn start_with_summary_model(scripted: &ScriptedModel) -> Server {
    Server::with(|config| {
        config.llm.base_url = Some(scripted.url.clone());
        config.llm.model = Some(MODEL.into());
        let small = NamedModelSettings { model: Some("small-1".into()), ..Default::default() };
        config.llm.models.insert("small".into(), small);
        config.llm.summary_model = Some("small".into());
    })
    .await
}

/// Completes a request that reads the log, with this summary model. Returns the tool message that
/// the main model got, the completion, and the bodies of all model requests.
async fn complete_with_summary(
    summary: impl Fn(&RecordedRequest) -> ScriptedBehavior + Send + Sync + 'static,
) -> (String, Value, Value) {
    let scripted = ScriptedModel::start_with_script(move |request| match request.messages() {
        _ if request.body["model"] == "small-1" => summary(request),
        [.., last] if last["role"] == "tool" => text_reply("Done."),
        _ => tool_call_reply("call_1", "log__read", &json!({ "order": 3_217 })),
    })
    .await
    .unwrap();
    let server = start_with_summary_model(&scripted).await;
    let api = server.api();
    api.register("c1", json!([offer("log.read")])).await;
    let mut body = question("What happened to order 3217?");
    body["toolcrib"] = json!({ "tools": ["log.read"], "policy": { "result_tokens": 320 } });
    let pending = {
        let api = api.clone();
        tokio::spawn(async move { api.post("/v1/chat/completions", body).await.is(200) })
    };
    let call = api.poll("c1").await;
    let id = call["tool_call_id"].as_str().unwrap();
    api.succeed(id, long_log()).await;
    let answer = crate::support::soon("the answer", pending).await.unwrap();
    let requests = scripted.requests();
    let content = requests.last().unwrap().last_content();
    // The stored result is always complete, and any slice of it can be read.
    assert_eq!(api.call(id).await["result"], long_log());
    let slice = api.get(&format!("/v1/tool_calls/{id}/result?grep=3217")).await.is(200);
    assert!(slice.to_string().contains("out of paper"), "{slice}");
    assert!(content.contains(&format!("result__read {{\"tool_call_id\":\"{id}\"")), "{content}");
    (content, answer, json!(requests.iter().map(|one| one.body.clone()).collect::<Vec<_>>()))
}

#[tokio::test]
async fn a_long_result_is_summarized_by_the_summary_model() {
    let (content, answer, requests) = complete_with_summary(|_| {
        text_reply("All orders were packed but 3217: the printer is out of paper.")
    })
    .await;
    assert!(content.starts_with("[summary of log__read by a model"), "{content}");
    assert!(content.ends_with("but 3217: the printer is out of paper."), "{content}");
    assert_eq!(answer["choices"][0]["message"]["content"], "Done.");
    assert_eq!(answer["usage"]["total_tokens"], 45, "the summary is counted: {answer}");
    let summary_request = &requests[1];
    let text = summary_request["messages"][1]["content"].as_str().unwrap();
    assert!(text.contains("log__read") && text.contains("3217"), "{text}");
    assert!(summary_request.get("tools").is_none(), "a summary calls nothing");
}

#[tokio::test]
async fn a_failed_summary_falls_back_to_the_digest() {
    for summary in [
        ScriptedBehavior::Refuse(500, None, json!({ "error": { "message": "down" } })),
        text_reply(""),
        ScriptedBehavior::Raw("text/event-stream", b"data: {".to_vec()),
    ] {
        let (content, answer, _) = complete_with_summary(move |_| summary.clone()).await;
        // The tokens of the call's id decide whether the header also names the tool.
        let headers = ["[digest of log__read", "[digest: a log"];
        assert!(headers.iter().any(|header| content.starts_with(header)), "{content}");
        assert!(content.contains("out of paper"), "{content}");
        assert_eq!(answer["choices"][0]["message"]["content"], "Done.");
    }
}

#[tokio::test]
async fn a_summary_respects_the_token_budget() {
    let (content, ..) = complete_with_summary(|_| text_reply("word ".repeat(10_000))).await;
    assert!(content.starts_with("[summary of log__read"), "{content}");
    let tokens = toolcrib::results::tokens::count(&content);
    assert!(tokens <= 320, "{tokens} tokens");
}

#[tokio::test]
async fn the_tokens_of_a_late_results_summary_are_counted() {
    // The guide to async tools and the state of pending calls are system messages.
    let scripted = ScriptedModel::start_with_script(|prompt| {
        let messages = prompt.messages().iter().filter(|message| message["role"] != "system");
        match messages.collect::<Vec<_>>().as_slice() {
            _ if prompt.body["model"] == "small-1" => {
                text_reply("One order met a printer without paper.")
            }
            [.., last] if last["role"] == "tool" => text_reply("I wait."),
            [_] => tool_call_reply("call_1", "log__read", &json!({})),
            _ => text_reply("Done."),
        }
    })
    .await
    .unwrap();
    let server = start_with_summary_model(&scripted).await;
    let api = server.api();
    api.register("c1", json!([offer_with("log.read", json!({ "async": true }))])).await;
    let mut body = question("What happened?");
    body["toolcrib"] = json!({ "tools": ["log.read"], "policy": { "result_tokens": 320 } });
    let pending = {
        let api = api.clone();
        tokio::spawn(async move { api.post("/v1/chat/completions", body).await.is(200) })
    };
    let request = api.poll("c1").await;
    api.succeed(request["tool_call_id"].as_str().unwrap(), long_log()).await;
    let answer = crate::support::soon("the answer", pending).await.unwrap();
    let requests = scripted.requests();
    assert!(
        requests.last().unwrap().last_content().contains("without paper"),
        "{:?}",
        requests.last()
    );
    assert_eq!(answer["usage"]["total_tokens"], 15 * requests.len(), "{answer}");
}
