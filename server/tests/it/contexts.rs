//! The context of a run: calls and results matched by id, the form for a model, and calls that the
//! caller executed itself.

use serde_json::{Value, json};
use toolcrib::results::tokens;

use crate::support::Server;
use crate::support::api::{Api, message, offer, offer_with};

const CONTEXT: &str = "/v1/runs/run_1/context";

async fn context(api: &Api) -> Value {
    api.get(CONTEXT).await.is(200)
}

async fn record(api: &Api, calls: Value) -> Vec<Value> {
    let answer = api.post(&format!("{CONTEXT}/tool_calls"), json!({ "tool_calls": calls })).await;
    answer.is(201)["tool_calls"].as_array().unwrap().clone()
}

async fn answer(api: &Api, results: Value) -> Vec<Value> {
    let body = json!({ "tool_results": results });
    let answer = api.post(&format!("{CONTEXT}/tool_results"), body).await;
    answer.is(200)["tool_calls"].as_array().unwrap().clone()
}

async fn set_tools(api: &Api, body: Value) -> Value {
    api.put(&format!("{CONTEXT}/tool_definitions"), body).await.is(200)
}

/// Returns one field of every entry of a list.
fn fields_of<'a>(list: &'a Value, field: &str) -> Vec<&'a str> {
    list.as_array().unwrap().iter().map(|entry| entry[field].as_str().unwrap()).collect()
}

#[tokio::test]
async fn calls_and_results_are_matched_even_with_a_repeated_call_id() {
    let server = Server::start().await;
    let api = server.api();
    let client = json!([offer_with("job.run", json!({ "async": true }))]);
    api.register("c1", client).await;
    let body = json!({ "run_id": "run_1", "call_id": "call_0", "args": {} });
    let job = api.invoke_with("job.run", body).await;
    for expression in ["1+1", "2+2"] {
        let args = json!({ "expression": expression });
        let body = json!({ "run_id": "run_1", "call_id": "call_0", "args": args });
        let id = api.invoke_with("calculation.eval", body).await;
        api.finished(&id).await;
    }
    let run_context = context(&api).await;
    assert_eq!(run_context["run_id"], "run_1");
    assert_eq!(fields_of(&run_context["tool_calls"], "call_id"), ["call_0"; 3]);
    let names = fields_of(&run_context["tool_calls"], "name");
    assert_eq!(names, ["job.run", "calculation.eval", "calculation.eval"]);
    assert_eq!(run_context["tool_calls"][0]["async"], true);
    assert_eq!(run_context["tool_calls"][0]["status"], "PENDING");
    let results = &run_context["tool_results"];
    assert_eq!(fields_of(results, "call_id"), ["call_0"; 2]);
    let tickets = fields_of(&run_context["tool_calls"], "tool_call_id");
    assert_eq!(
        fields_of(results, "tool_call_id"),
        tickets[1..],
        "each result has the ticket of its call"
    );
    assert_eq!(
        (&results[0]["data"]["result"], &results[1]["data"]["result"]),
        (&json!(2), &json!(4))
    );
    assert_eq!(results[0]["error"], Value::Null);
    assert!(fields_of(&run_context["tool_definitions"], "name").contains(&"job.run"));
    assert_eq!(run_context["truncated"], false);
    api.succeed(&job, json!("done")).await;
    let run_context = context(&api).await;
    assert_eq!(run_context["tool_results"][2]["tool_call_id"], job.as_str());
    let short = api.get(&format!("{CONTEXT}?limit=1")).await.is(200);
    assert_eq!(
        (short["tool_calls"].as_array().unwrap().len(), &short["truncated"]),
        (1, &json!(true))
    );
}

#[tokio::test]
async fn a_reported_call_is_stored_and_listed_like_any_call() {
    let server = Server::start().await;
    let api = server.api();
    let recorded = record(
        &api,
        json!([
            { "call_id": "a", "name": "my.search", "args": { "q": "rain" },
              "result": { "data": { "hits": 3 } } },
            { "call_id": "b", "name": "my.mail", "async": true, "timeout_ms": 60_000 },
            { "call_id": "c", "name": "my.shell", "result": { "ok": false, "error": "no shell" } },
        ]),
    )
    .await;
    let recorded = Value::Array(recorded);
    assert_eq!(fields_of(&recorded, "status"), ["SUCCEEDED", "RUNNING", "FAILED"]);
    assert_eq!(fields_of(&recorded, "executor"), ["caller"; 3]);
    assert_eq!(recorded[0]["result"], json!({ "hits": 3 }));
    assert_eq!(recorded[2]["error"]["message"], "no shell");
    let ids = fields_of(&recorded, "tool_call_id");
    let history = api.history(ids[0]).await;
    assert_eq!(history, ["tool.call.requested", "tool.call.started", "tool.call.finished"]);
    let listed = api.get("/v1/tool_calls?run_id=run_1&status=running").await.is(200);
    assert_eq!(fields_of(&listed["tool_calls"], "tool_call_id"), [ids[1]]);
    let path = format!("/v1/tool_calls/{}?wait_ms=60000", ids[1]);
    let waiting = api.get(&path);
    let (waited, ended) =
        tokio::join!(waiting, answer(&api, json!([{ "call_id": "b", "data": "sent" }])));
    assert_eq!(ended[0]["status"], "SUCCEEDED");
    assert_eq!(waited.is(200)["result"], "sent", "a waiting request receives the result");
    let run_context = context(&api).await;
    assert_eq!(fields_of(&run_context["tool_calls"], "call_id"), ["a", "b", "c"]);
    assert_eq!(run_context["tool_results"].as_array().unwrap().len(), 3);
}

#[tokio::test]
async fn calls_and_results_are_accepted_in_model_formats() {
    let server = Server::start().await;
    let api = server.api();
    let recorded = record(
        &api,
        json!([
            { "id": "call_x", "type": "function",
              "function": { "name": "my_tool", "arguments": "{\"n\": 1}" } },
            { "type": "tool_use", "id": "toolu_y", "name": "my_tool", "input": { "n": 2 } },
        ]),
    )
    .await;
    assert_eq!(
        (&recorded[0]["args"], &recorded[1]["args"]),
        (&json!({ "n": 1 }), &json!({ "n": 2 }))
    );
    let ended = answer(
        &api,
        json!([
            { "role": "tool", "tool_call_id": "call_x", "content": "fine" },
            { "type": "tool_result", "tool_use_id": "toolu_y", "content": "bad", "is_error": true },
        ]),
    )
    .await;
    assert_eq!((&ended[0]["result"], &ended[0]["call_id"]), (&json!("fine"), &json!("call_x")));
    assert_eq!(
        (&ended[1]["status"], &ended[1]["error"]["message"]),
        (&json!("FAILED"), &json!("bad"))
    );
}

#[tokio::test]
async fn a_result_ends_the_newest_open_call_with_its_id_once() {
    let server = Server::start().await;
    let api = server.api();
    let first = record(&api, json!([{ "call_id": "call_0", "name": "my.a" }])).await;
    let second = record(&api, json!([{ "call_id": "call_0", "name": "my.b" }])).await;
    let results = json!([{ "call_id": "call_0", "data": 2 }, { "call_id": "call_0", "data": 1 }]);
    let ended = answer(&api, results).await;
    assert_eq!(ended[0]["tool_call_id"], second[0]["tool_call_id"]);
    assert_eq!(ended[1]["tool_call_id"], first[0]["tool_call_id"]);
    // The same result again gets the same answer; a different one is rejected.
    let ticket = &first[0]["tool_call_id"];
    let again = answer(&api, json!([{ "tool_call_id": ticket, "data": 1 }])).await;
    assert_eq!(again[0], ended[1]);
    let other = json!({ "tool_results": [{ "tool_call_id": ticket, "data": 7 }] });
    let error = api.post(&format!("{CONTEXT}/tool_results"), other).await.refused(409, "CONFLICT");
    assert!(message(&error).contains("SUCCEEDED already"), "{error}");
    // The context shows the ticket as the call id of a call without one.
    record(&api, json!([{ "name": "my.nameless" }])).await;
    let call = context(&api).await["tool_calls"][2].clone();
    assert_eq!(call["call_id"], call["tool_call_id"]);
    let without_id = answer(&api, json!([{ "call_id": call["call_id"], "data": 3 }])).await;
    assert_eq!(
        (&without_id[0]["tool_name"], &without_id[0]["result"]),
        (&json!("my.nameless"), &json!(3))
    );
    let mixed = json!({ "tool_results": [{ "tool_call_id": ticket, "call_id": "call_9" }] });
    let refused = api.post(&format!("{CONTEXT}/tool_results"), mixed).await;
    let error = refused.refused(422, "VALIDATION_ERROR");
    assert!(message(&error).starts_with("tool_results/0: call_id"), "{error}");
    let keyed = json!([{ "name": "my.a", "idempotency_key": "k", "result": { "data": 5 } }]);
    let one = record(&api, keyed.clone()).await;
    assert_eq!(record(&api, keyed).await, one, "the same key, the same ticket");
}

#[tokio::test]
async fn a_run_lists_the_tools_that_were_set_for_it() {
    let server = Server::start().await;
    let api = server.api();
    let all = api.get("/v1/tools").await.is(200);
    let names = |body: &Value| -> Vec<String> {
        fields_of(&body["tool_definitions"], "name").into_iter().map(str::to_owned).collect()
    };
    assert_eq!(
        names(&context(&api).await),
        fields_of(&all["tools"], "name"),
        "all tools by default"
    );
    let schema = json!({ "type": "object", "required": ["q"] });
    let definitions = json!([
        { "name": "my.search", "description": "Searches", "schema": schema, "async": true },
        { "type": "function", "function": { "name": "my_open", "parameters": schema } },
        { "name": "my-anthropic", "input_schema": schema },
    ]);
    let server_tools = json!(["calculation__eval"]);
    let body = json!({ "tool_definitions": definitions, "crib_tools": server_tools });
    let expected = ["calculation.eval", "my-anthropic", "my.search", "my_open"];
    assert_eq!(names(&set_tools(&api, body).await), expected);
    let run_context = context(&api).await;
    assert_eq!(names(&run_context), expected);
    let definition = &run_context["tool_definitions"][2];
    assert_eq!((&definition["executor"], &definition["async"]), (&json!("caller"), &json!(true)));
    // Arguments are validated against the definition, by either of its names.
    for name in ["my.search", "my__search"] {
        let body = json!({ "tool_calls": [{ "call_id": "x", "name": name, "args": {} }] });
        let refused = api.post(&format!("{CONTEXT}/tool_calls"), body).await;
        let error = refused.refused(422, "VALIDATION_ERROR");
        assert!(message(&error).starts_with("tool_calls/0: the arguments of my.search"), "{error}");
    }
    let recorded = record(&api, json!([{ "name": "my.search", "args": { "q": 1 } }])).await;
    assert_eq!(recorded[0]["status"], "RUNNING");
    let run_context = context(&api).await;
    assert_eq!(run_context["tool_calls"][0]["async"], true, "as its definition says");
    assert_eq!(names(&set_tools(&api, json!({ "crib_tools": [] })).await), [""; 0]);
    assert_eq!(names(&set_tools(&api, json!({})).await), fields_of(&all["tools"], "name"));
    let server = server.restart().await;
    set_tools(&server.api(), json!({ "crib_tools": ["weather.query"] })).await;
    let server = server.restart().await;
    assert_eq!(names(&context(&server.api()).await), ["weather.query"], "the setting is stored");
}

#[tokio::test]
async fn runs_with_the_same_id_in_two_projects_are_separate() {
    let server = Server::start().await;
    let ada = server.keyed("one", "ada", "agent", &["*"]).await;
    let eve = server.keyed("two", "eve", "agent", &["*"]).await;
    let recorded = record(&ada, json!([{ "call_id": "call_0", "name": "my.tool" }])).await;
    set_tools(&ada, json!({ "crib_tools": [] })).await;
    let run_context = context(&eve).await;
    assert_eq!(
        (&run_context["tool_calls"], &run_context["tool_results"]),
        (&json!([]), &json!([]))
    );
    assert!(!run_context["tool_definitions"].as_array().unwrap().is_empty());
    for id in
        [json!({ "call_id": "call_0" }), json!({ "tool_call_id": recorded[0]["tool_call_id"] })]
    {
        let body = json!({ "tool_results": [id] });
        let path = format!("{CONTEXT}/tool_results");
        eve.post(&path, body).await.refused(404, "NOT_FOUND");
    }
    // Another agent of the project neither sees the call nor submits its result.
    let bob = server.keyed("one", "bob", "agent", &["*"]).await;
    assert_eq!(context(&bob).await["tool_calls"], json!([]));
    let body = json!({ "tool_results": [{ "tool_call_id": recorded[0]["tool_call_id"] }] });
    let path = format!("{CONTEXT}/tool_results");
    bob.post(&path, body.clone()).await.refused(404, "NOT_FOUND");
    ada.post(&path, body).await.is(200);
}

#[tokio::test]
async fn the_context_is_a_valid_conversation_for_a_model() {
    let server = Server::start().await;
    let api = server.api();
    let calls = json!([
        { "call_id": "call_0", "name": "my.report", "args": { "month": 5 }, "async": true },
    ]);
    record(&api, calls).await;
    let long = "many words of a result ".repeat(300);
    let calls = json!([
        { "call_id": "call_0", "name": "my.search", "args": {}, "result": { "data": long } },
        { "call_id": "call_1", "name": "my.search", "args": {}, "result": { "error": "broken" } },
    ]);
    record(&api, calls).await;
    let openai = api.get(&format!("{CONTEXT}?format=openai")).await.is(200);
    let messages = openai["messages"].as_array().unwrap();
    let (mut open, mut used) = (Vec::new(), Vec::new());
    for message in messages {
        if message["role"] == "assistant" {
            assert!(
                open.is_empty(),
                "all calls of a step are answered before the next: {messages:#?}"
            );
            open = fields_of(&message["tool_calls"], "id");
            used.extend(open.clone());
            continue;
        }
        assert_eq!(message["role"], "tool");
        open.retain(|id| message["tool_call_id"] != **id);
    }
    assert!(open.is_empty());
    assert_eq!(used.len(), 3);
    used.sort_unstable();
    used.dedup();
    assert_eq!(used.len(), 3, "ids are unique");
    let text = openai["messages"].to_string();
    assert!(text.contains("still running in the background for"), "{text}");
    assert!(text.contains("my__search") && text.contains("broken"), "{text}");
    assert_eq!(openai["tools"][0]["function"]["name"], "calculation__eval");

    let path = format!("{CONTEXT}?format=anthropic&budget_tokens=200");
    let anthropic = api.get(&path).await.is(200);
    let mut total = 0;
    for pair in anthropic["messages"].as_array().unwrap().chunks(2) {
        assert_eq!((&pair[0]["role"], &pair[1]["role"]), (&json!("assistant"), &json!("user")));
        let (calls_content, results_content) = (&pair[0]["content"], &pair[1]["content"]);
        assert_eq!(fields_of(calls_content, "id"), fields_of(results_content, "tool_use_id"));
        total += fields_of(results_content, "content")
            .iter()
            .map(|text| tokens::count(text))
            .sum::<usize>();
    }
    assert!(total <= 200, "{total}");
    assert!(anthropic["messages"].to_string().contains("result__read"));
    assert!(anthropic["tools"][0]["input_schema"].is_object());
}

#[tokio::test]
async fn the_prompt_stays_within_any_token_budget() {
    let server = Server::start().await;
    let api = server.api();
    let tools: Vec<Value> = (0..60).map(|n| offer(&format!("tool.number_{n}"))).collect();
    api.register("c1", Value::Array(tools)).await;
    record(&api, json!([{ "call_id": "call_7", "name": "my.report", "async": true }])).await;
    let result = json!({ "data": "words ".repeat(2_000) });
    record(&api, json!([{ "call_id": "call_8", "name": "my.read", "result": result }])).await;
    for budget in [1, 7, 20, 40, 60, 100, 150, 200, 400, 1_000, 5_000] {
        let path = format!("{CONTEXT}?format=prompt&budget_tokens={budget}");
        let reply = api.get(&path).await;
        assert_eq!(reply.status, 200);
        assert!(reply.header("content-type").unwrap().starts_with("text/plain"));
        let counted = tokens::count(&reply.text);
        assert!(counted <= budget, "{budget}: {counted}\n{}", reply.text);
        assert_eq!(reply.header("toolcrib-prompt-tokens"), Some(counted.to_string().as_str()));
    }
    let reply = api.get(&format!("{CONTEXT}?format=prompt&budget_tokens=400")).await;
    let text = reply.text;
    let tools = api.get("/v1/tools").await.is(200)["tools"].as_array().unwrap().len();
    for part in [
        "A tool marked async runs in the background",
        &format!("## Available ({tools})"),
        "- calculation__eval (sync)",
        "more tools that are not shown here",
        "## Pending (1)\n- my__report (async, in the background), call_id call_7, pending for",
        "## Just finished (1)\n- my__read, call_id call_8,",
        "result__read",
    ] {
        assert!(text.contains(part), "{part}\n{text}");
    }
    assert!(!text.contains("result.read"), "names are those that model APIs accept:\n{text}");
    let request = api.request(reqwest::Method::GET, &format!("{CONTEXT}?format=prompt"));
    let body = api.send(request.header("accept", "application/json")).await.is(200);
    assert_eq!(body["budget_tokens"], 1_000);
    assert_eq!(body["tokens"], tokens::count(body["text"].as_str().unwrap()));
    assert!(body["left_out"]["tools"].is_u64());
}

#[tokio::test]
async fn an_invalid_context_parameter_is_rejected_by_name() {
    let server = Server::start().await;
    let api = server.api();
    for (query, field) in [
        ("format=xml", "format"),
        ("format=openai,prompt", "format"),
        ("format=prompt&budget_tokens=0", "budget_tokens"),
        ("format=prompt&budget_tokens=-5", "budget_tokens"),
        ("format=prompt&budget_tokens=many", "budget_tokens"),
        ("format=prompt&budget_tokens=99999999999999999999", "budget_tokens"),
        ("budget_tokens=100", "budget_tokens"),
        ("limit=0", "limit"),
        ("limit=-1", "limit"),
        ("limit=201", "limit"),
        ("limit=1.5", "limit"),
    ] {
        let error = api.get(&format!("{CONTEXT}?{query}")).await.refused(422, "VALIDATION_ERROR");
        assert!(message(&error).starts_with(field), "{query}: {error}");
    }
    let long = format!("/v1/runs/{}/context", "r".repeat(256));
    let error = api.get(&long).await.refused(422, "VALIDATION_ERROR");
    assert!(message(&error).starts_with("run_id"), "{error}");
}

#[tokio::test]
async fn an_invalid_reported_call_or_result_is_rejected_by_name() {
    let server = Server::start().await;
    let api = server.api();
    let many: Vec<Value> = (0..129).map(|_| json!({ "name": "a" })).collect();
    for (body, field) in [
        (json!([]), "tool_calls"),
        (json!(many), "tool_calls"),
        (json!([5]), "tool_calls/0"),
        (json!([{ "name": "ok" }, { "call_id": "x" }]), "tool_calls/1: name"),
        (json!([{ "name": "no name" }]), "tool_calls/0: name"),
        (json!([{ "name": "a", "async": "yes" }]), "tool_calls/0/async"),
        (json!([{ "name": "a", "timeout_ms": 0 }]), "tool_calls/0: timeout_ms"),
        (json!([{ "name": "a", "retry": 1 }]), "tool_calls/0: retry"),
        (json!([{ "name": "a", "call_id": "" }]), "tool_calls/0: call_id"),
        (json!([{ "name": "a", "result": 5 }]), "tool_calls/0/result"),
        (json!([{ "name": "a", "result": { "answer": 5 } }]), "tool_calls/0/result"),
        (
            json!([{ "name": "a", "result": { "data": 1, "error": "x" } }]),
            "tool_calls/0/result/error",
        ),
        (
            json!([{ "name": "a", "result": { "ok": true, "error": "x" } }]),
            "tool_calls/0/result/error",
        ),
    ] {
        let body = json!({ "tool_calls": body });
        let answer = api.post(&format!("{CONTEXT}/tool_calls"), body.clone()).await;
        let error = answer.refused(422, "VALIDATION_ERROR");
        assert!(message(&error).starts_with(field), "{body}: {error}");
    }
    for (body, field) in [
        (json!([]), "tool_results"),
        (json!([{ "data": 1 }]), "tool_results/0/call_id"),
        (json!([{ "tool_call_id": "tc_?", "data": 1 }]), "tool_results/0/tool_call_id"),
        (json!([{ "call_id": 5 }]), "tool_results/0/call_id"),
        (json!([{ "call_id": "a", "data": 1, "content": "x" }]), "tool_results/0/content"),
        (json!([{ "call_id": "a", "ok": false, "data": 1 }]), "tool_results/0/data"),
    ] {
        let body = json!({ "tool_results": body });
        let answer = api.post(&format!("{CONTEXT}/tool_results"), body.clone()).await;
        let error = answer.refused(422, "VALIDATION_ERROR");
        assert!(message(&error).starts_with(field), "{body}: {error}");
    }
    assert_eq!(context(&api).await["tool_calls"], json!([]), "no call was stored");
}

#[tokio::test]
async fn an_invalid_tool_definition_is_rejected_by_name() {
    let server = Server::start().await;
    let api = server.api();
    for (body, field) in [
        (json!({ "tool_definitions": [{}] }), "tool_definitions/0: missing field `name`"),
        (json!({ "tool_definitions": [{ "name": "a b" }] }), "tool_definitions/0"),
        (json!({ "tool_definitions": [{ "name": "a", "async": 1 }] }), "tool_definitions/0/async"),
        (
            json!({ "tool_definitions": [{ "name": "a", "schema": { "type": 5 } }] }),
            "tool_definitions/0",
        ),
        (json!({ "tool_definitions": [{ "name": "a", "timeout_ms": -1 }] }), "tool_definitions/0"),
        (
            json!({ "tool_definitions": [{ "name": "a" }, { "name": "a" }] }),
            "tool_definitions/1/name",
        ),
        (
            json!({ "tool_definitions": [{ "type": "function", "function": { "name": 5 } }] }),
            "tool_definitions/0/function/name",
        ),
        (json!({ "crib_tools": ["calculation.evil"] }), "crib_tools/0"),
    ] {
        let answer = api.put(&format!("{CONTEXT}/tool_definitions"), body.clone()).await;
        let error = answer.refused(422, "VALIDATION_ERROR");
        assert!(message(&error).starts_with(field), "{body}: {error}");
    }
}

#[tokio::test]
async fn a_reported_call_survives_a_restart() {
    let server = Server::start().await;
    let recorded = record(&server.api(), json!([{ "call_id": "call_0", "name": "my.tool" }])).await;
    let server = server.restart().await;
    let api = server.api();
    let run_context = context(&api).await;
    assert_eq!(run_context["tool_calls"][0]["tool_call_id"], recorded[0]["tool_call_id"]);
    assert_eq!(run_context["tool_calls"][0]["status"], "RUNNING");
    let ended = answer(&api, json!([{ "call_id": "call_0", "data": "later" }])).await;
    assert_eq!((&ended[0]["status"], &ended[0]["attempt"]), (&json!("SUCCEEDED"), &json!(1)));
}

/// Only the caller reports the result of a call that it executes itself, and such a call needs no
/// allow rule. Deny rules apply.
#[tokio::test]
async fn rules_and_roles_apply_to_reported_calls() {
    let server = Server::start().await;
    let admin = server.keyed("p", "boss", "admin", &[]).await;
    let ada = server.keyed("p", "ada", "agent", &["weather.*"]).await;
    let provider = server.keyed("p", "tools", "provider", &[]).await;
    let recorded = record(&ada, json!([{ "name": "my.own" }, { "name": "database.query" }])).await;
    let recorded = Value::Array(recorded);
    assert_eq!(
        fields_of(&recorded, "executor"),
        ["caller"; 2],
        "the same for an unknown and a forbidden tool"
    );
    let id = recorded[0]["tool_call_id"].as_str().unwrap();
    let submitted = json!({ "status": "SUCCEEDED", "result": 1 });
    let error = provider.submit(id, submitted).await.refused(403, "PERMISSION_DENIED");
    assert!(message(&error).contains("is executed by its caller"), "{error}");
    let rule = json!({ "agent": "*", "pattern": "my.*", "verdict": "deny" });
    admin.put("/v1/rules", rule).await.is(200);
    let body = json!({ "tool_calls": [{ "name": "my.own" }] });
    let refused = ada.post(&format!("{CONTEXT}/tool_calls"), body).await;
    let error = refused.refused(403, "PERMISSION_DENIED");
    assert!(message(&error).contains("deny my.*"), "{error}");
    let body = json!({ "tool_definitions": [{ "name": "my.own" }] });
    ada.put(&format!("{CONTEXT}/tool_definitions"), body).await.refused(403, "PERMISSION_DENIED");
    let canceled = ada.post(&format!("/v1/tool_calls/{id}/cancel"), json!({})).await.is(200);
    assert_eq!(canceled["status"], "CANCELED");
}
