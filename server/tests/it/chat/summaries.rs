//! Long results in the words of a model that is configured for it, and in a digest where it fails.

use serde_json::json;
use toolcrib_bench::model::{
    RecordedRequest, ScriptedBehavior, ScriptedModel, text_reply, tool_call_reply,
};
use toolcrib_server::config::NamedModelSettings;

use super::*;
use crate::support::api::{offer, offer_with};

/// A log of which one line matters.
fn log() -> Value {
    let line = |n: usize| match n {
        3_217 => "ERROR order 3217: the printer is out of paper\n".to_owned(),
        n => format!("INFO order {n} was packed\n"),
    };
    (0..5_000).map(line).collect::<String>().into()
}

/// A server with a model of its own for summaries.
async fn summarising(scripted: &ScriptedModel) -> Server {
    Server::with(|config| {
        config.llm.base_url = Some(scripted.url.clone());
        config.llm.model = Some(MODEL.into());
        let small = NamedModelSettings { model: Some("small-1".into()), ..Default::default() };
        config.llm.models.insert("small".into(), small);
        config.llm.summary_model = Some("small".into());
    })
    .await
}

/// Asks for the log with this model for summaries, and gives what the model was told of it, the
/// answer, and the ticket.
async fn told(
    summary: impl Fn(&RecordedRequest) -> ScriptedBehavior + Send + Sync + 'static,
) -> (String, Value, Value) {
    let scripted = ScriptedModel::start_with_script(move |asked| match asked.messages() {
        _ if asked.body["model"] == "small-1" => summary(asked),
        [.., last] if last["role"] == "tool" => text_reply("Done."),
        _ => tool_call_reply("call_1", "log__read", &json!({ "order": 3_217 })),
    })
    .await
    .unwrap();
    let server = summarising(&scripted).await;
    let api = server.api();
    api.register("c1", json!([offer("log.read")])).await;
    let mut body = question("What happened to order 3217?");
    body["toolcrib"] = json!({ "tools": ["log.read"], "policy": { "result_tokens": 320 } });
    let asking = {
        let api = api.clone();
        tokio::spawn(async move { api.post("/v1/chat/completions", body).await.is(200) })
    };
    let request = api.poll("c1").await;
    let id = request["tool_call_id"].as_str().unwrap();
    api.succeed(id, log()).await;
    let answer = crate::support::soon("the answer", asking).await.unwrap();
    let asked = scripted.requests();
    let content = asked.last().unwrap().last_content();
    // Whatever the model was told, the result is whole, and any part of it can be read.
    assert_eq!(api.call(id).await["result"], log());
    let part = api.get(&format!("/v1/tool_calls/{id}/result?grep=3217")).await.is(200);
    assert!(part.to_string().contains("out of paper"), "{part}");
    assert!(content.contains(&format!("result.read {{\"tool_call_id\":\"{id}\"")), "{content}");
    (content, answer, json!(asked.iter().map(|asked| asked.body.clone()).collect::<Vec<_>>()))
}

#[tokio::test]
async fn a_long_result_is_told_in_the_words_of_the_summary_model() {
    let (content, answer, asked) =
        told(|_| text_reply("All orders were packed but 3217: the printer is out of paper.")).await;
    assert!(content.starts_with("[summary of log.read by a model"), "{content}");
    assert!(content.ends_with("but 3217: the printer is out of paper."), "{content}");
    assert_eq!(answer["choices"][0]["message"]["content"], "Done.");
    assert_eq!(answer["usage"]["total_tokens"], 45, "the summary is counted: {answer}");
    let summarising = &asked[1];
    let text = summarising["messages"][1]["content"].as_str().unwrap();
    assert!(text.contains("log.read") && text.contains("3217"), "{text}");
    assert!(summarising.get("tools").is_none(), "a summary calls nothing");
}

#[tokio::test]
async fn a_summary_that_fails_leaves_the_digest() {
    for summary in [
        ScriptedBehavior::Refuse(500, None, json!({ "error": { "message": "down" } })),
        text_reply(""),
        ScriptedBehavior::Raw("text/event-stream", b"data: {".to_vec()),
    ] {
        let (content, answer, _) = told(move |_| summary.clone()).await;
        assert!(content.starts_with("[digest of log.read"), "{content}");
        assert!(content.contains("out of paper"), "{content}");
        assert_eq!(answer["choices"][0]["message"]["content"], "Done.");
    }
}

#[tokio::test]
async fn a_summary_is_held_to_the_budget() {
    let (content, ..) = told(|_| text_reply("word ".repeat(10_000))).await;
    assert!(content.starts_with("[summary of log.read"), "{content}");
    let tokens = toolcrib::results::tokens::count(&content);
    assert!(tokens <= 320, "{tokens} tokens");
}

#[tokio::test]
async fn what_a_summary_of_a_late_result_costs_is_counted() {
    let scripted = ScriptedModel::start_with_script(|asked| match asked.messages() {
        _ if asked.body["model"] == "small-1" => {
            text_reply("One order met a printer without paper.")
        }
        [.., last] if last["role"] == "tool" => text_reply("I wait."),
        [_] => tool_call_reply("call_1", "log__read", &json!({})),
        _ => text_reply("Done."),
    })
    .await
    .unwrap();
    let server = summarising(&scripted).await;
    let api = server.api();
    api.register("c1", json!([offer_with("log.read", json!({ "async": true }))])).await;
    let mut body = question("What happened?");
    body["toolcrib"] = json!({ "tools": ["log.read"], "policy": { "result_tokens": 320 } });
    let asking = {
        let api = api.clone();
        tokio::spawn(async move { api.post("/v1/chat/completions", body).await.is(200) })
    };
    let request = api.poll("c1").await;
    api.succeed(request["tool_call_id"].as_str().unwrap(), log()).await;
    let answer = crate::support::soon("the answer", asking).await.unwrap();
    let asked = scripted.requests();
    assert!(asked.last().unwrap().last_content().contains("without paper"), "{:?}", asked.last());
    assert_eq!(answer["usage"]["total_tokens"], 15 * asked.len(), "{answer}");
}
