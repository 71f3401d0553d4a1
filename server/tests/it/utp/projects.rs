//! Projects and their tools over HTTP: valid and invalid definitions, and the order of the checks.

use reqwest::Method;
use reqwest::header::CONTENT_TYPE;
use serde_json::{Value, json};

use crate::support::api::{Reply, offer};
use crate::support::{Api, Server};

/// A valid definition.
const VALID_DEFINITION: &str = "\
tool_name: text.count
description: Counts words
target_subject: cg.v1r3.{project_id}.{channel_id}.cmd.tool.count.run
after_execution: suspend
parameters:
  type: object
  properties:
    text: {type: string}
  required: [text]
options:
  timeout_seconds: 7
unknown: dropped
";

async fn post_yaml(api: &Api, project: &str, text: &str) -> Reply {
    let path = format!("/projects/{project}/tools");
    let request = api.request(Method::POST, &path).header(CONTENT_TYPE, "application/yaml");
    api.send(request.body(text.to_owned())).await
}

async fn post_form(api: &Api, field: &str, text: &str) -> Reply {
    let body = format!(
        "--XX\r\nContent-Disposition: form-data; name=\"{field}\"; filename=\"tool.yaml\"\r\n\
         Content-Type: application/yaml\r\n\r\n{text}\r\n--XX--\r\n"
    );
    let request = api.request(Method::POST, "/projects/default/tools");
    api.send(request.header(CONTENT_TYPE, "multipart/form-data; boundary=XX").body(body)).await
}

#[tokio::test]
async fn a_definition_is_accepted_as_form_yaml_and_json() {
    let server = Server::start().await;
    let api = server.api();
    let defined = post_form(&api, "file", VALID_DEFINITION).await.is(201);
    assert_eq!(defined["project_id"], "default");
    assert_eq!(defined["tool_name"], "text.count");
    assert_eq!(defined["after_execution"], "suspend");
    assert_eq!(defined["options"], json!({ "timeout_seconds": 7 }));
    assert_eq!(defined["timeout_ms"], 7_000);
    assert!(defined.get("unknown").is_none());
    let again = post_yaml(&api, "default", VALID_DEFINITION).await.is(201);
    assert_eq!(again, defined, "the same definition again is the same version");
    let other = json!({
        "name": " text.count ",
        "target_subject": "cmd.tool.count.run",
        "after_execution": "terminate",
    });
    let replaced = api.post("/projects/default/tools", other).await.is(201);
    let subject = "cg.v1r3.{project_id}.{channel_id}.cmd.tool.count.run";
    assert_eq!(replaced["target_subject"], subject, "the short form, written out");
    assert_eq!(replaced["description"], "", "an omitted field has its default again");
    assert_eq!(replaced["parameters"], json!({}));
    assert_ne!(replaced["version"], defined["version"]);
    let stored = api.get("/projects/default/tools/text.count").await.is(200);
    assert_eq!(stored, replaced);
    let listed = api.get("/v1/tools/text.count").await.is(200);
    assert_eq!((&listed["executor"], &listed["source"]), (&json!("utp"), &json!("server")));
    api.delete("/projects/default/tools/text.count").await.is(204);
    api.get("/v1/tools/text.count").await.refused(404, "TOOL_NOT_FOUND");
    api.get("/projects/default/tools/text.count").await.refused(404, "NOT_FOUND");
    api.delete("/projects/default/tools/text.count").await.refused(404, "NOT_FOUND");
}

#[tokio::test]
async fn a_form_without_the_file_is_rejected_with_422() {
    let server = Server::start().await;
    post_form(&server.api(), "definition", VALID_DEFINITION).await.refused(422, "VALIDATION_ERROR");
    let nothing = server.api().request(Method::POST, "/projects/default/tools");
    server.api().send(nothing).await.refused(422, "VALIDATION_ERROR");
}

fn with(change: &[(&str, Value)]) -> String {
    let mut good: Value = json!({
        "tool_name": "text.count",
        "target_subject": "cmd.tool.count.run",
        "after_execution": "suspend",
        "parameters": { "type": "object" },
    });
    for (name, value) in change {
        good[*name] = value.clone();
    }
    // JSON is valid YAML.
    good.to_string()
}

#[tokio::test]
async fn an_invalid_definition_is_rejected_with_400_and_a_reason() {
    let server = Server::start().await;
    let with_property = |property: Value| {
        with(&[("parameters", json!({ "type": "object", "properties": { "list": property } }))])
    };
    let with_options =
        |options: Value| with(&[("target_subject", Value::Null), ("options", options)]);
    let cases = [
        ("a: [1, 2".to_owned(), "YAML"),
        ("a: 1\na: 2".to_owned(), "YAML"),
        ("- one\n- two".to_owned(), "mapping"),
        ("just a text".to_owned(), "mapping"),
        (with(&[("tool_name", json!(""))]), "tool_name"),
        (with(&[("tool_name", json!("  "))]), "tool_name"),
        (with(&[("tool_name", json!(7))]), "tool_name"),
        (with(&[("tool_name", json!("two words"))]), "not a tool name"),
        (with(&[("target_subject", json!(""))]), "target_subject"),
        (with(&[("after_execution", json!(""))]), "after_execution"),
        (with(&[("after_execution", json!("explode"))]), "after_execution"),
        (with(&[("parameters", Value::Null)]), "parameters"),
        (with(&[("parameters", json!([]))]), "parameters"),
        (with(&[("options", json!("x"))]), "options"),
        (with(&[("parameters", json!({ "type": "wrong" }))]), "schema"),
        (with_property(json!({ "type": "array" })), "parameters/properties/list"),
        (with_property(json!({ "type": "array", "items": {} })), "items"),
        (with_property(json!({ "anyOf": [{ "type": "array" }] })), "anyOf/0"),
        (with_property(json!({ "type": "array", "items": { "type": "array" } })), "items"),
        (with(&[("target_subject", json!("zzz.cmd.tool."))]), "target_subject"),
        (with(&[("target_subject", json!("cmd.sys.pmo.internal.x"))]), "cmd.tool"),
        (with(&[("target_subject", json!("cmd.tool.*.run"))]), "wildcard"),
        (with(&[("target_subject", json!("cmd.tool.count.run..fast"))]), "empty part"),
        (with(&[("target_subject", json!("cmd.tool.count.run.>"))]), "wildcard"),
        (
            with(&[("target_subject", json!("cg.v1r4.{project_id}.{channel_id}.cmd.tool.a.b"))]),
            "version \"v1r4\"",
        ),
        (
            with(&[("target_subject", json!("cg.v1r3.other.{channel_id}.cmd.tool.a.b"))]),
            "project \"other\"",
        ),
        (with_options(json!({ "jina": {} })), "options.jina.mode"),
        (
            with_options(
                json!({ "jina": { "mode": "search", "base_url": "https://evil.example" } }),
            ),
            "s.jina.ai",
        ),
        (with_options(json!({ "http": { "url": "https://a.b", "timeout_s": -1 } })), "timeout_s"),
        (with(&[("timeout_ms", json!(0))]), "timeout_ms"),
        (with(&[("effect", json!("harmless"))]), "effect"),
        (with(&[("async", json!("yes"))]), "async"),
        (with_property(json!({ "type": ["array", "null"] })), "items"),
        (with_property(json!({ "type": "array", "items": true })), "items"),
        (with(&[("options", json!({ "timeout_seconds": 0 }))]), "options.timeout_seconds"),
        (with(&[("options", json!({ "timeout_seconds": "soon" }))]), "options.timeout_seconds"),
        (with(&[("options", Value::Null)]), "options"),
        (with(&[("description", json!(7))]), "description"),
        (with(&[("target_subject", Value::Null)]), "target_subject"),
        (with(&[("after_execution", Value::Null)]), "after_execution"),
        (with_property(json!({ "oneOf": [{ "type": "array" }] })), "oneOf/0"),
        (with_property(json!({ "allOf": [{ "type": "array" }] })), "allOf/0"),
        (with(&[("parameters", json!({ "$defs": { "x": { "type": "array" } } }))]), "$defs/x"),
        (
            with(&[("parameters", json!({ "definitions": { "x": { "type": "array" } } }))]),
            "definitions/x",
        ),
    ];
    for (text, word) in cases {
        let error = post_yaml(&server.api(), "default", &text).await.refused(400, "BAD_REQUEST");
        assert!(error["message"].as_str().unwrap().contains(word), "{word}: {error}");
    }
    assert_eq!(server.api().get("/projects/default/tools").await.is(200), json!([]));
}

#[tokio::test]
async fn reserved_names_can_be_neither_defined_nor_deleted() {
    let server = Server::start().await;
    let reserved =
        ["delegate_async", "launch_principal", "ask_expert", "fork_join", "provision_agent"];
    for name in reserved {
        let text = with(&[("tool_name", json!(name))]);
        post_yaml(&server.api(), "default", &text).await.refused(400, "BAD_REQUEST");
        let path = format!("/projects/default/tools/{name}");
        let error = server.api().delete(&path).await.refused(400, "BAD_REQUEST");
        assert!(error["message"].as_str().unwrap().contains("internal tool"), "{error}");
        server.api().get(&path).await.refused(404, "NOT_FOUND");
    }
    // Only those five are reserved: `submit_result` is a tool of the worker.
    post_yaml(&server.api(), "default", &with(&[("tool_name", json!("submit_result"))]))
        .await
        .is(201);
}

#[tokio::test]
async fn definition_checks_have_a_fixed_order() {
    let server = Server::start().await;
    let api = server.api();
    // First the mapping, then the name, then the fields, then the arrays, then the schema.
    let both = json!({ "type": "wrong", "properties": { "x": { "type": "array" } } });
    let all = [
        ("tool_name", json!("")),
        ("options", json!("x")),
        ("parameters", both),
        ("after_execution", json!("explode")),
    ];
    for (n, word) in ["tool_name", "options", "items"].into_iter().enumerate() {
        let error = post_yaml(&api, "nowhere", &with(&all[n..])).await.refused(400, "BAD_REQUEST");
        assert!(error["message"].as_str().unwrap().contains(word), "{word}: {error}");
    }
    // The schema is checked before the project, then the reserved name, then after_execution, then
    // the subject.
    let all = [
        ("parameters", json!({ "type": "wrong" })),
        ("tool_name", json!("fork_join")),
        ("after_execution", json!("explode")),
        ("target_subject", json!("zzz")),
    ];
    let expected = [(400, "schema"), (404, "project"), (400, "reserved"), (400, "after_execution")];
    for (n, (status, word)) in expected.into_iter().enumerate() {
        let project = if n < 2 { "nowhere" } else { "default" };
        let remaining = match n {
            0 => &all[..],
            1 | 2 => &all[1..],
            _ => &all[2..],
        };
        let reply = post_yaml(&api, project, &with(remaining)).await;
        let code = if status == 404 { "NOT_FOUND" } else { "BAD_REQUEST" };
        let error = reply.refused(status, code);
        assert!(error["message"].as_str().unwrap().contains(word), "{word}: {error}");
    }
}

#[tokio::test]
async fn projects_are_created_listed_and_isolated() {
    let server = Server::start().await;
    let api = server.api();
    let created =
        api.post("/projects", json!({ "project_id": "p1", "title": "One" })).await.is(201);
    assert_eq!((&created["project_id"], &created["title"]), (&json!("p1"), &json!("One")));
    api.post("/projects", json!({ "project_id": "p1" })).await.refused(409, "CONFLICT");
    api.post("/projects", json!({ "project_id": "a.b" })).await.refused(422, "VALIDATION_ERROR");
    let fresh = api.post("/projects", json!({})).await.is(201);
    assert!(fresh["project_id"].as_str().unwrap().starts_with("proj_"), "{fresh}");
    post_yaml(&api, "p1", VALID_DEFINITION).await.is(201);
    api.get("/projects/nowhere/tools").await.refused(404, "NOT_FOUND");
    for wrong in ["limit=many", "limit=-1", "offset=x", "offset=1.5"] {
        let path = format!("/projects/p1/tools?{wrong}");
        api.get(&path).await.refused(422, "VALIDATION_ERROR");
    }
    api.get("/projects/nowhere/tools/x").await.refused(404, "NOT_FOUND");
    api.delete("/projects/nowhere/tools/x").await.refused(404, "NOT_FOUND");
    assert_eq!(api.get("/projects/p1/tools?offset=1").await.is(200), json!([]));
    assert_eq!(api.get("/projects/default/tools").await.is(200), json!([]));
    assert!(api.get("/v1/tools/text.count").await.status == 404, "another project's tool");
    api.clone().project("p1").get("/v1/tools/text.count").await.is(200);
    let server = server.restart().await;
    let projects = server.api().get("/projects").await.is(200);
    let ids: Vec<&str> =
        projects.as_array().unwrap().iter().map(|p| p["project_id"].as_str().unwrap()).collect();
    assert!(ids.contains(&"p1") && ids.contains(&"default"), "{ids:?}");
    server.api().get("/projects/p1/tools/text.count").await.is(200);
}

#[tokio::test]
async fn project_tools_and_client_tools_cannot_share_a_name() {
    let server = Server::start().await;
    let api = server.api();
    post_yaml(&api, "default", VALID_DEFINITION).await.is(201);
    let body = json!({ "client_id": "c1", "tools": [offer("text.count")] });
    api.post("/internal/tools/register", body).await.refused(409, "CONFLICT");
    api.register("c1", json!([offer("other.tool")])).await;
    // The removal of a client's tool does not affect the project's tools.
    api.delete("/internal/tools/other.tool?client_id=c1").await.is(204);
    api.get("/projects/default/tools/text.count").await.is(200);
    api.register("c1", json!([offer("other.tool")])).await;
    let text = with(&[("tool_name", json!("other.tool"))]);
    post_yaml(&api, "default", &text).await.refused(409, "CONFLICT");
    let text = with(&[("tool_name", json!("calculation.eval"))]);
    post_yaml(&api, "default", &text).await.refused(409, "CONFLICT");
    api.get("/projects/default/tools/calculation.eval").await.refused(404, "NOT_FOUND");
}
