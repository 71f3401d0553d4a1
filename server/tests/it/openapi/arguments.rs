//! Argument rules of tool definitions: defaults, fixed values and secrets.

use serde_json::{Value, json};

use super::upstream::{Upstream, call, define};

fn definition(url: &str) -> Value {
    json!({
        "tool_name": "api.search",
        "parameters": {
            "type": "object",
            "properties": {
                "q": { "type": "string" },
                "limit": { "type": "integer" },
                "site": { "type": "string", "pattern": "^default$" },
                "api_key": { "type": "string" },
                "lang": { "type": "string" },
            },
            "required": ["q", "site", "api_key"],
            "additionalProperties": false,
        },
        "options": {
            "http": { "url": url },
            "args": {
                "defaults": { "limit": 5, "lang": "{project_id}" },
                "fixed": { "site": "{project_id}" },
            },
            "envs": { "api_key": "TOOLCRIB_ARGS_TEST_NOT_SET" },
        },
    })
}

#[tokio::test]
async fn fixed_and_secret_arguments_are_hidden_and_filled_in() {
    let upstream = Upstream::start().await;
    let server = upstream.server().await;
    let api = server.api();
    let defined = define(&api, definition(&upstream.url("/search"))).await;
    assert_eq!((&defined["executor"], &defined["effect"]), (&json!("http"), &json!("read")));
    assert_eq!(defined["target_subject"], Value::Null);
    let all = defined["parameters"]["properties"].as_object().unwrap();
    assert_eq!(all.len(), 5, "the owner sees all properties");
    let info = api.get("/v1/tools/api.search").await.is(200);
    let expected = json!({
        "type": "object",
        "properties": {
            "q": { "type": "string" },
            "limit": { "type": "integer", "default": 5 },
            "lang": { "type": "string", "default": "{project_id}" },
        },
        "required": ["q"],
        "additionalProperties": false,
    });
    assert_eq!(info["schema"], expected);
    let listed = api.get("/v1/tools").await.is(200);
    let listed = listed["tools"].as_array().unwrap();
    let listed = listed.iter().find(|tool| tool["name"] == "api.search").unwrap();
    assert_eq!(listed["schema"], expected);
    for format in ["openai", "openai_responses", "anthropic", "mcp"] {
        let text = api.get(&format!("/v1/tools?format={format}")).await.text;
        let described: Value = serde_json::from_str(&text).unwrap();
        let tools = described["tools"].as_array().unwrap().iter().map(Value::to_string);
        let definition = tools.into_iter().find(|tool| tool.contains("api__search")).unwrap();
        assert!(definition.contains("limit"), "{format}: {definition}");
        assert!(
            !definition.contains("site") && !definition.contains("api_key"),
            "{format}: {definition}"
        );
    }
    // Fixed and secret values replace the values of the caller.
    let args = json!({ "q": "x", "site": "mine", "api_key": "mine", "lang": "en" });
    let ended = call(&api, "api.search", args).await;
    assert_eq!(ended["status"], "SUCCEEDED", "{ended}");
    assert_eq!(upstream.last().path, "/search?lang=en&limit=5&q=x&site=default");
    assert_eq!(ended["args"], json!({ "q": "x", "site": "mine", "lang": "en" }));
    let id = ended["tool_call_id"].as_str().unwrap();
    let cards = api.get(&format!("/v1/tool_calls/{id}/cards")).await.is(200);
    let card = &cards["cards"][0];
    let executed = json!({ "q": "x", "site": "default", "lang": "en", "limit": 5 });
    assert_eq!(card["content"]["arguments"], executed);
    assert_eq!(card["metadata"]["tool_args_defaults_applied"], json!(["limit"]));
    assert_eq!(card["metadata"]["tool_args_fixed_applied"], json!(["site"]));
    let envs = json!({ "api_key": "TOOLCRIB_ARGS_TEST_NOT_SET" });
    assert_eq!(card["metadata"]["tool_args_envs"], envs);
}

#[tokio::test]
async fn effective_arguments_are_validated_before_any_request() {
    let upstream = Upstream::start().await;
    let server = upstream.server().await;
    let api = server.api();
    define(&api, definition(&upstream.url("/search"))).await;
    let assert_refused = |args: Value| {
        let api = api.clone();
        async move {
            let body = json!({ "run_id": "r", "args": args });
            api.post("/v1/tools/api.search/invoke", body).await.refused(422, "VALIDATION_ERROR")
        }
    };
    assert_refused(json!({})).await;
    assert_refused(json!({ "q": "x", "limit": null })).await;
    assert_refused(json!({ "q": "x", "stray": 1 })).await;
    assert_refused(json!([])).await;
    // A fixed value that violates the schema is not sent either.
    let mut wrong = definition(&upstream.url("/search"));
    wrong["options"]["args"]["fixed"]["site"] = json!("{agent_turn_id}");
    define(&api, wrong).await;
    assert_refused(json!({ "q": "x" })).await;
    assert!(upstream.requests().is_empty());
}

#[tokio::test]
async fn argument_templates_do_not_affect_idempotency() {
    let upstream = Upstream::start().await;
    let server = upstream.server().await;
    let api = server.api();
    let options = json!({
        "http": { "url": upstream.url("/x") },
        "args": { "fixed": { "call": "{tool_call_id}", "turn": "{agent_turn_id}/{turn_epoch}" } },
    });
    define(&api, json!({ "tool_name": "api.ask", "options": options })).await;
    let body = json!({ "run_id": "run_9", "args": {}, "idempotency_key": "k" });
    let id = api.invoke_with("api.ask", body.clone()).await;
    let again = api.post("/v1/tools/api.ask/invoke", body).await.is(202);
    assert_eq!(again["tool_call_id"], json!(id), "in whatever state the call is");
    api.finished(&id).await;
    assert_eq!(upstream.requests().len(), 1);
    assert_eq!(upstream.last().path, format!("/x?call={id}&turn=run_9%2F1"));
}

#[tokio::test]
async fn a_fallback_tool_applies_its_own_argument_rules() {
    let upstream = Upstream::start().await;
    let server = upstream
        .server_with(|config| {
            let fallback = serde_json::from_value(json!([{ "tool": "api.second" }])).unwrap();
            let tool = toolcrib_server::config::ToolSettings { fallback, ..Default::default() };
            config.tools.insert("api.first".into(), tool);
            config.policy.max_retries = 0;
        })
        .await;
    let api = server.api();
    let first = json!({ "http": { "url": upstream.url("/status/404") } });
    define(&api, json!({ "tool_name": "api.first", "options": first })).await;
    let second = json!({
        "http": { "url": upstream.url("/second") }, "args": { "fixed": { "mode": "spare" } },
    });
    define(&api, json!({ "tool_name": "api.second", "options": second })).await;
    let ended = call(&api, "api.first", json!({ "q": "x" })).await;
    assert_eq!(ended["ran_tool"], "api.second", "{ended}");
    assert_eq!(upstream.last().path, "/second?mode=spare&q=x");
}

#[tokio::test]
async fn invalid_options_are_refused_and_named() {
    let server = crate::support::Server::start().await;
    for (options, word) in [
        (json!({ "http": { "url": "https://a.b" }, "args": [] }), "options.args"),
        (json!({ "http": { "url": "https://a.b" }, "envs": "X" }), "options.envs"),
        (json!({ "http": { "url": "a.b" } }), "options.http.url"),
        (json!({ "http": { "url": "https://a.b", "mehtod": "GET" } }), "mehtod"),
        (json!({ "jina": { "mode": "dance" } }), "options.jina.mode"),
        (json!({ "jina": "search" }), "options.jina"),
        (json!({ "other": {} }), "target_subject"),
    ] {
        let body = json!({ "tool_name": "api.ask", "options": options });
        let error = server.api().post("/projects/default/tools", body).await;
        let error = error.refused(400, "BAD_REQUEST");
        assert!(error["message"].as_str().unwrap().contains(word), "{word}: {error}");
    }
    let body = json!({ "tool_name": "import", "options": { "http": { "url": "https://a.b" } } });
    server.api().post("/projects/default/tools", body).await.refused(400, "BAD_REQUEST");
}

#[tokio::test]
async fn a_number_that_would_lose_precision_is_refused() {
    let upstream = Upstream::start().await;
    let server = upstream.server().await;
    let api = server.api();
    let http = json!({ "url": upstream.url("/pay"), "method": "POST" });
    define(&api, json!({ "tool_name": "api.pay", "options": { "http": http } })).await;
    let target = "cmd.tool.hand.run";
    let sent =
        json!({ "tool_name": "hand.pay", "target_subject": target, "after_execution": "suspend" });
    define(&api, sent).await;
    for tool in ["api.pay", "hand.pay"] {
        let body = r#"{"run_id":"r1","args":{"to":[{"wei":123456789012345678901234567890}]}}"#;
        let path = format!("/v1/tools/{tool}/invoke");
        let error = api.post_raw(&path, body).await.refused(422, "VALIDATION_ERROR");
        let message = error["message"].as_str().unwrap();
        assert!(message.contains("123456789012345678901234567890"), "{message}");
    }
    assert!(upstream.requests().is_empty());
    let args = json!({ "wei": "123456789012345678901234567890", "n": u64::MAX });
    let paid = call(&api, "api.pay", args.clone()).await;
    assert_eq!(serde_json::from_str::<Value>(&upstream.last().body).unwrap(), args, "{paid}");
}

#[tokio::test]
async fn the_call_timeout_is_at_least_the_http_timeout() {
    let upstream = Upstream::start().await;
    let server = upstream.server().await;
    let api = server.api();
    let options =
        |seconds: f64| json!({ "http": { "url": upstream.url("/x"), "timeout_s": seconds } });
    for (more, expected) in [
        (json!({ "options": options(75.0) }), 75_000),
        (json!({ "options": options(2.0) }), 30_000),
        (json!({ "options": options(75.0), "timeout_ms": 5_000 }), 5_000),
        (json!({ "options": { "jina": { "mode": "search", "timeout_s": 60 } } }), 60_000),
    ] {
        let mut tool = json!({ "tool_name": "api.slow" });
        tool.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        assert_eq!(define(&api, tool).await["timeout_ms"], expected, "{more}");
    }
}

/// The schema closes the object to callers. What the definition itself adds does not count.
#[tokio::test]
async fn arguments_of_the_definition_fit_a_closed_schema() {
    let upstream = Upstream::start().await;
    let server = upstream.server().await;
    let api = server.api();
    let definition = json!({
        "tool_name": "api.closed",
        "parameters": {
            "type": "object",
            "properties": { "q": { "type": "string" }, "limit": { "default": 5 } },
            "required": ["q"],
            "additionalProperties": false,
        },
        "options": {
            "http": { "url": upstream.url("/search") },
            "args": { "defaults": { "lang": "en" }, "fixed": { "version": 2 } },
        },
    });
    define(&api, definition).await;
    let id = api.invoke("api.closed", json!({ "q": "a" })).await;
    let call = api.finished(&id).await;
    assert_eq!(call["status"], "SUCCEEDED", "{call}");
    assert_eq!(call["args"], json!({ "q": "a" }));
    let sent = upstream.last();
    for argument in ["q=a", "lang=en", "version=2", "limit=5"] {
        assert!(sent.path.contains(argument), "{argument} in {}", sent.path);
    }
    // A caller cannot add what the schema does not list, not even under a name of the rules.
    for args in [json!({ "q": "a", "other": 1 }), json!({ "q": "a", "lang": "de" })] {
        let body = json!({ "run_id": "run_1", "args": args });
        let answer = api.post("/v1/tools/api.closed/invoke", body).await;
        answer.refused(422, "VALIDATION_ERROR");
    }
}
