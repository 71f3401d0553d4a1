//! The API key of a model is sent to the endpoint and stays out of everything else.

use serde_json::json;
use toolcrib_bench::model::{
    ScriptedAnswer, ScriptedBehavior, ScriptedModel, text_reply, tool_call_reply,
};

use super::*;
use crate::support::process::{Server as Process, operator_token};

#[tokio::test]
async fn the_model_key_is_in_no_log_error_or_answer() {
    let secret = "sk-test-51-do-not-tell";
    let echo = json!({ "error": { "message": format!("bad key {secret}"), "code": secret } });
    let scripted = ScriptedModel::start_with_replies([
        tool_call_reply("call_1", "calculation__eval", &eval("6 * 7")),
        text_reply("It is 42."),
        ScriptedBehavior::Refuse(401, None, echo.clone()),
        ScriptedBehavior::Refuse(400, None, echo),
    ])
    .await
    .unwrap();
    let mut server = Process::new()
        .with("LLM__BASE_URL", &scripted.url)
        .with("LLM__MODEL", MODEL)
        .with("LOG__LEVEL", "trace")
        .variable("OPENAI_API_KEY", secret);
    server.start().await;
    let mut seen = String::new();
    for status in [200, 503, 400] {
        let url = server.url("/v1/chat/completions");
        let answer = server.http.post(url).json(&question("6 * 7?")).send().await.unwrap();
        assert_eq!(answer.status(), status);
        seen.push_str(&format!("{:?}", answer.headers()));
        seen.push_str(&answer.text().await.unwrap());
    }
    let sent = &scripted.requests()[0].headers["authorization"];
    assert_eq!(sent, &format!("Bearer {secret}"));
    for path in ["/v1/tool_calls", "/v1/models", "/v1/audit", "/metrics"] {
        let request = server.http.get(server.url(path));
        let answer = request.bearer_auth(operator_token(&server.data_dir())).send().await.unwrap();
        assert_eq!(answer.status(), 200, "{path}");
        seen.push_str(&answer.text().await.unwrap());
    }
    server.stop().await;
    let log = std::fs::read_to_string(server.directory.path().join("server.log")).unwrap();
    assert!(log.contains("DEBUG") || log.contains("TRACE"), "the log has everything");
    for (origin, text) in [("answers", &seen), ("the log", &log)] {
        assert!(!text.contains(secret), "the key is in {origin}");
    }
    let stored = std::fs::read(server.database()).unwrap();
    let found = stored.windows(secret.len()).any(|part| part == secret.as_bytes());
    assert!(!found, "the key is in the database");
}

#[tokio::test]
async fn a_key_echoed_by_the_endpoint_is_redacted_everywhere() {
    let secret = "sk-test-52-do-not-tell";
    let leaking_text = || ScriptedAnswer::text(format!("The key is {secret}, I think."));
    let leaking_call = leaking_text().with_call(
        "call_1",
        "calculation__eval",
        eval(&format!("'{secret}'")).to_string(),
    );
    let replies = [
        ScriptedBehavior::Reply(leaking_call.clone()),
        ScriptedBehavior::Reply(leaking_text()),
        ScriptedBehavior::Reply(leaking_call),
        ScriptedBehavior::Reply(leaking_text()),
    ];
    let scripted = ScriptedModel::start_with_replies(
        replies.into_iter().chain([ScriptedBehavior::Reply(leaking_text())]),
    )
    .await
    .unwrap();
    let mut server = Process::new()
        .with("LLM__BASE_URL", &scripted.url)
        .with("LLM__MODEL", MODEL)
        .variable("OPENAI_API_KEY", secret);
    server.start().await;
    let url = server.url("/v1/runs?wait_ms=20000");
    let answer = server.http.post(url).json(&run_question("?")).send().await.unwrap();
    let run: Value = answer.json().await.unwrap();
    // The only call of the run fails, which the answer says at its end.
    assert!(run["answer"].as_str().unwrap().starts_with("The key is …, I think.\n\n["), "{run}");
    assert!(!run.to_string().contains(secret), "{run}");
    // Streams redact it too, although the answer arrives in deltas of a few letters.
    for (path, marker) in [("/v1/runs", "run.text"), ("/v1/chat/completions", "delta")] {
        let mut body = if path == "/v1/runs" { run_question("?") } else { question("?") };
        body["stream"] = true.into();
        let answer = server.http.post(server.url(path)).json(&body).send().await.unwrap();
        let streamed = answer.text().await.unwrap();
        assert!(streamed.contains(marker), "{streamed}");
        for part in [secret, "52-do", "-not-"] {
            assert!(!streamed.contains(part), "{streamed}");
        }
    }
    server.stop().await;
    let stored = std::fs::read(server.database()).unwrap();
    let found = stored.windows(secret.len()).any(|part| part == secret.as_bytes());
    assert!(!found, "the key is in the database");
}
