//! Validation: schemas at registration, arguments before execution, results afterwards.

use serde_json::{Value, json};

use crate::support::api::{message, offer_with};
use crate::support::{Api, Server};

async fn register_rejected(api: &Api, field: &str, schema: Value) -> Value {
    let good = json!({ "name": "good.tool", "schema": {} });
    let bad = json!({ "name": "bad.tool", field: schema });
    let body = json!({ "client_id": "c1", "tools": [good, bad] });
    let answer = api.post("/internal/tools/register", body).await;
    let error = answer.refused(422, "VALIDATION_ERROR");
    assert_eq!(error["detail"]["tool"], "bad.tool", "{error}");
    assert!(message(&error).contains("bad.tool"), "{error}");
    for tool in ["good.tool", "bad.tool"] {
        let path = format!("/v1/tools/{tool}");
        api.get(&path).await.refused(404, "TOOL_NOT_FOUND");
    }
    error
}

#[tokio::test]
async fn an_invalid_schema_is_rejected_with_its_location() {
    let server = Server::start().await;
    let api = server.api();
    for (schema, pointer) in [
        (json!({ "type": "strange" }), "/schema/type"),
        (json!({ "properties": { "a": { "minimum": "one" } } }), "/schema/properties/a/minimum"),
        (json!({ "properties": { "a": { "pattern": "(" } } }), "/schema/properties/a/pattern"),
        (json!({ "required": "a" }), "/schema/required"),
        (json!({ "properties": { "a": { "$ref": "#/$defs/none" } } }), "/schema/properties/a"),
        (json!("text"), "/schema"),
        (json!(7), "/schema"),
    ] {
        let error = register_rejected(&api, "schema", schema.clone()).await;
        let location = error["detail"]["pointer"].as_str().unwrap();
        assert!(location.starts_with(pointer), "{schema}: {error}");
        assert!(
            error["detail"]["reason"].as_str().is_some_and(|reason| reason.len() > 5),
            "{error}"
        );
    }
    let error = register_rejected(&api, "output_schema", json!({ "type": 7 })).await;
    assert_eq!(error["detail"]["pointer"], "/output_schema/type");
}

#[tokio::test]
async fn a_schema_with_external_references_is_rejected() {
    let server = Server::start().await;
    let api = server.api();
    for reference in
        ["http://127.0.0.1:1/schema.json", "https://json.schemastore.org/x", "file:///etc/passwd"]
    {
        let schema = json!({ "properties": { "a": { "$ref": reference } } });
        let error = register_rejected(&api, "schema", schema).await;
        assert_eq!(error["detail"]["pointer"], "/schema/properties/a/$ref", "{error}");
    }
    let self_contained = json!({
        "$defs": { "word": { "type": "string" } },
        "properties": { "a": { "$ref": "#/$defs/word" } }
    });
    api.register("c1", json!([offer_with("fine.tool", json!({ "schema": self_contained }))])).await;
}

#[tokio::test]
async fn a_schema_that_is_too_expensive_is_rejected() {
    let server = Server::start().await;
    let api = server.api();
    let mut defs = serde_json::Map::new();
    for n in 0..40 {
        let next = json!({ "$ref": format!("#/$defs/d{}", n + 1) });
        defs.insert(format!("d{n}"), json!({ "allOf": [next, next] }));
    }
    defs.insert("d40".into(), json!({}));
    let fan = json!({ "$defs": defs, "$ref": "#/$defs/d0" });
    let looping = json!({ "$defs": { "a": { "$ref": "#/$defs/a" } }, "$ref": "#/$defs/a" });
    let large = json!({ "enum": ["x".repeat(300_000)] });
    for bomb in [fan, looping, large] {
        let error = register_rejected(&api, "schema", bomb).await;
        assert!(error["detail"]["pointer"].as_str().unwrap().starts_with("/schema"), "{error}");
    }
}

#[tokio::test]
async fn every_invalid_argument_is_listed_with_pointer_and_expectation() {
    let server = Server::start().await;
    let api = server.api();
    let schema = json!({
        "type": "object",
        "properties": {
            "url": { "type": "string", "minLength": 5 },
            "width": { "type": "integer", "minimum": 1 },
            "mode": { "enum": ["full", "part"] },
            "tags": { "type": "array", "items": { "type": "string" } }
        },
        "required": ["url", "depth"],
        "additionalProperties": false
    });
    api.register("c1", json!([offer_with("a.tool", json!({ "schema": schema }))])).await;
    let args = json!({ "url": "x", "width": "wide", "mode": "some", "tags": ["a", 7], "hight": 3 });
    let body = json!({ "run_id": "run_1", "args": args });
    let answer = api.post("/v1/tools/a.tool/invoke", body).await;
    let error = answer.refused(422, "VALIDATION_ERROR");
    let problems = error["detail"]["problems"].as_array().unwrap();
    let mut pointers: Vec<&str> = Vec::new();
    for problem in problems {
        for field in ["expected", "given", "message"] {
            assert!(problem[field].as_str().is_some_and(|text| !text.is_empty()), "{problem}");
        }
        pointers.push(problem["pointer"].as_str().unwrap());
        assert!(message(&error).contains(problem["message"].as_str().unwrap()), "{error}");
    }
    pointers.sort_unstable();
    assert_eq!(pointers, ["/depth", "/hight", "/mode", "/tags/1", "/url", "/width"]);
    let problem_at = |pointer: &str| problems.iter().find(|p| p["pointer"] == pointer).unwrap();
    assert!(problem_at("/width")["expected"].as_str().unwrap().contains("integer"));
    assert!(problem_at("/width")["given"].as_str().unwrap().contains("wide"));
    assert!(problem_at("/mode")["expected"].as_str().unwrap().contains("\"full\""));
    assert_eq!(error["retryable"], false);
    let list = api.get("/v1/tool_calls").await.is(200);
    assert_eq!(list["tool_calls"], json!([]), "nothing was stored as a call");
    let nothing = api.get("/internal/ingress/poll?client_id=c1").await.is(200);
    assert_eq!(nothing, json!({ "requests": [] }), "no call was delivered");
}

#[tokio::test]
async fn arguments_of_builtin_tools_are_validated() {
    let server = Server::start().await;
    let api = server.api();
    for (tool, args) in [
        ("calculation.eval", json!({})),
        ("calculation.eval", json!({ "expression": 7 })),
        ("calculation.eval", json!({ "expression": "" })),
        ("weather.query", json!([])),
        ("database.query", json!({ "sql": "SELECT 1", "extra": true })),
        ("database.query", Value::Null),
    ] {
        let path = format!("/v1/tools/{tool}/invoke");
        let answer = api.post(&path, json!({ "run_id": "run_1", "args": args })).await;
        let error = answer.refused(422, "VALIDATION_ERROR");
        assert!(!error["detail"]["problems"].as_array().unwrap().is_empty(), "{tool} {args}");
    }
    assert_eq!(api.get("/v1/tool_calls").await.is(200)["tool_calls"], json!([]));
}

#[tokio::test]
async fn draft_07_and_2020_12_schemas_are_supported() {
    let server = Server::start().await;
    let api = server.api();
    let old = json!({
        "$schema": "http://json-schema.org/draft-07/schema#",
        "definitions": { "n": { "type": "integer" } },
        "properties": { "pair": { "items": [{ "$ref": "#/definitions/n" }, { "type": "string" }] } }
    });
    let new = json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$defs": { "n": { "type": "integer" } },
        "properties": {
            "pair": { "prefixItems": [{ "$ref": "#/$defs/n" }, { "type": "string" }] }
        }
    });
    for (name, schema) in [("old.tool", old), ("new.tool", new)] {
        api.register("c1", json!([offer_with(name, json!({ "schema": schema }))])).await;
        api.invoke(name, json!({ "pair": [1, "one"] })).await;
        let body = json!({ "run_id": "run_1", "args": { "pair": ["one", 1] } });
        let answer = api.post(&format!("/v1/tools/{name}/invoke"), body).await;
        let error = answer.refused(422, "VALIDATION_ERROR");
        assert_eq!(error["detail"]["problems"].as_array().unwrap().len(), 2, "{name}");
    }
    let unknown = json!({ "$schema": "http://json-schema.org/draft-03/schema#" });
    assert_schema_is_rejected(&api, unknown).await;
}

async fn assert_schema_is_rejected(api: &Api, schema: Value) {
    let tool = json!({ "name": "odd.tool", "schema": schema });
    let body = json!({ "client_id": "c1", "tools": [tool] });
    let answer = api.post("/internal/tools/register", body).await;
    answer.refused(422, "VALIDATION_ERROR");
}

#[tokio::test]
async fn a_result_that_violates_the_output_schema_fails_the_call() {
    let server = Server::start().await;
    let api = server.api();
    let output = json!({
        "type": "object", "required": ["n"], "properties": { "n": { "type": "integer" } }
    });
    let more = json!({ "output_schema": output, "effect": "read" });
    api.register("c1", json!([offer_with("a.tool", more)])).await;
    let id = api.invoke("a.tool", json!({})).await;
    let body = json!({ "status": "SUCCEEDED", "result": { "n": "one" } });
    let answer = api.submit(&id, body.clone()).await.is(200);
    assert_eq!(answer["status"], "FAILED", "the submit returns the failure");
    let call = api.call(&id).await;
    assert_eq!((&call["status"], &call["result"]), (&json!("FAILED"), &Value::Null));
    assert_eq!(call["error"]["code"], "VALIDATION_ERROR");
    assert!(message(&call["error"]).contains("output schema"), "{call}");
    assert_eq!(call["error"]["detail"]["problems"][0]["pointer"], "/n");
    assert_eq!(
        api.submit(&id, body).await.is(200),
        answer,
        "a repeated submit has the same answer"
    );
    let id = api.invoke("a.tool", json!({})).await;
    api.succeed(&id, json!({ "n": 1, "more": true })).await;
    assert_eq!(api.call(&id).await["status"], "SUCCEEDED");
}

#[tokio::test]
async fn values_of_an_invalid_result_are_hidden_from_callers() {
    let server = Server::start().await;
    let api = server.api();
    let output = json!({
        "type": "object",
        "properties": { "n": { "type": "integer" }, "mode": { "enum": ["a", "b"] } },
        "required": ["n", "m"],
        "additionalProperties": { "type": "boolean" }
    });
    api.register("c1", json!([offer_with("a.tool", json!({ "output_schema": output }))])).await;
    let id = api.invoke("a.tool", json!({})).await;
    let secret = "hunter2";
    let result = json!({ "n": secret, "mode": secret, "other": [secret], "more": { "x": secret } });
    api.succeed(&id, result).await;
    let reply = api.get(&format!("/v1/tool_calls/{id}")).await;
    assert!(!reply.text.contains(secret), "{}", reply.text);
    let problems = &reply.body["error"]["detail"]["problems"];
    let problem = |pointer: &str| {
        let mut all = problems.as_array().unwrap().iter();
        all.find(|problem| problem["pointer"] == pointer).unwrap().clone()
    };
    let expected = "/n: expected an integer, but a string was given";
    assert_eq!(
        (&problem("/n")["given"], &problem("/n")["message"]),
        (&json!("a string"), &json!(expected))
    );
    assert_eq!(problem("/mode")["expected"], "one of \"a\", \"b\"");
    assert_eq!(problem("/m")["given"], "nothing");
    assert_eq!(problem("/other")["given"], "an array");
    let raw = api.get(&format!("/v1/tool_calls/{id}/result?raw=true")).await;
    assert!(raw.text.contains(secret), "{}", raw.text);
}

#[tokio::test]
async fn a_result_over_the_limit_fails_the_call() {
    let server = Server::with(|config| config.limits.max_result_bytes = 100).await;
    let api = server.api();
    api.register("c1", json!([offer_with("a.tool", json!({}))])).await;
    let id = api.invoke("a.tool", json!({})).await;
    let answer = api.succeed(&id, json!("x".repeat(200))).await;
    assert_eq!(answer["status"], "FAILED");
    let call = api.call(&id).await;
    assert_eq!(call["error"]["code"], "PAYLOAD_TOO_LARGE");
    assert!(message(&call["error"]).contains("100"), "{call}");
}
