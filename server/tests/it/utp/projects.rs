//! Projects and their tools over HTTP: what is taken, what is refused, and in which order.

use reqwest::Method;
use reqwest::header::CONTENT_TYPE;
use serde_json::{Value, json};

use crate::support::api::{Reply, offer};
use crate::support::{Api, Server};

/// A definition in which nothing is wrong.
const GOOD: &str = "\
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

async fn yaml(api: &Api, project: &str, text: &str) -> Reply {
    let path = format!("/projects/{project}/tools");
    let request = api.request(Method::POST, &path).header(CONTENT_TYPE, "application/yaml");
    api.send(request.body(text.to_owned())).await
}

async fn form(api: &Api, field: &str, text: &str) -> Reply {
    let body = format!(
        "--XX\r\nContent-Disposition: form-data; name=\"{field}\"; filename=\"tool.yaml\"\r\n\
         Content-Type: application/yaml\r\n\r\n{text}\r\n--XX--\r\n"
    );
    let request = api.request(Method::POST, "/projects/default/tools");
    api.send(request.header(CONTENT_TYPE, "multipart/form-data; boundary=XX").body(body)).await
}

#[tokio::test]
async fn a_definition_is_taken_as_a_form_as_yaml_and_as_json() {
    let server = Server::start().await;
    let api = server.api();
    let made = form(&api, "file", GOOD).await.is(201);
    assert_eq!(made["project_id"], "default");
    assert_eq!(made["tool_name"], "text.count");
    assert_eq!(made["after_execution"], "suspend");
    assert_eq!(made["options"], json!({ "timeout_seconds": 7 }));
    assert_eq!(made["timeout_ms"], 7_000);
    assert!(made.get("unknown").is_none());
    let again = yaml(&api, "default", GOOD).await.is(201);
    assert_eq!(again, made, "the same definition again is the same version");
    let other = json!({
        "name": " text.count ",
        "target_subject": "cmd.tool.count.run",
        "after_execution": "terminate",
    });
    let replaced = api.post("/projects/default/tools", other).await.is(201);
    let subject = "cg.v1r3.{project_id}.{channel_id}.cmd.tool.count.run";
    assert_eq!(replaced["target_subject"], subject, "the short form, written out");
    assert_eq!(replaced["description"], "", "what is left out has its default again");
    assert_eq!(replaced["parameters"], json!({}));
    assert_ne!(replaced["version"], made["version"]);
    let shown = api.get("/projects/default/tools/text.count").await.is(200);
    assert_eq!(shown, replaced);
    let listed = api.get("/v1/tools/text.count").await.is(200);
    assert_eq!((&listed["executor"], &listed["source"]), (&json!("utp"), &json!("server")));
    api.delete("/projects/default/tools/text.count").await.is(204);
    api.get("/v1/tools/text.count").await.refused(404, "TOOL_NOT_FOUND");
    api.get("/projects/default/tools/text.count").await.refused(404, "NOT_FOUND");
    api.delete("/projects/default/tools/text.count").await.refused(404, "NOT_FOUND");
}

#[tokio::test]
async fn a_form_without_the_file_is_422() {
    let server = Server::start().await;
    form(&server.api(), "definition", GOOD).await.refused(422, "VALIDATION_ERROR");
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
    // JSON is YAML.
    good.to_string()
}

#[tokio::test]
async fn every_wrong_definition_is_refused_with_400_and_says_why() {
    let server = Server::start().await;
    let array = |inner: Value| {
        with(&[("parameters", json!({ "type": "object", "properties": { "list": inner } }))])
    };
    let asks = |options: Value| with(&[("target_subject", Value::Null), ("options", options)]);
    let wrong = [
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
        (array(json!({ "type": "array" })), "parameters/properties/list"),
        (array(json!({ "type": "array", "items": {} })), "items"),
        (array(json!({ "anyOf": [{ "type": "array" }] })), "anyOf/0"),
        (array(json!({ "type": "array", "items": { "type": "array" } })), "items"),
        (with(&[("target_subject", json!("zzz.cmd.tool."))]), "target_subject"),
        (with(&[("target_subject", json!("cmd.sys.pmo.internal.x"))]), "cmd.tool"),
        (with(&[("target_subject", json!("cmd.tool.*.run"))]), "wildcard"),
        (with(&[("target_subject", json!("cmd.tool.count.run.fast"))]), "more than one part"),
        (
            with(&[("target_subject", json!("cg.v1r4.{project_id}.{channel_id}.cmd.tool.a.b"))]),
            "version \"v1r4\"",
        ),
        (
            with(&[("target_subject", json!("cg.v1r3.other.{channel_id}.cmd.tool.a.b"))]),
            "project \"other\"",
        ),
        (asks(json!({ "jina": {} })), "options.jina.mode"),
        (
            asks(json!({ "jina": { "mode": "search", "base_url": "https://evil.example" } })),
            "s.jina.ai",
        ),
        (asks(json!({ "http": { "url": "https://a.b", "timeout_s": -1 } })), "timeout_s"),
        (with(&[("timeout_ms", json!(0))]), "timeout_ms"),
        (with(&[("effect", json!("harmless"))]), "effect"),
        (with(&[("async", json!("yes"))]), "async"),
        (array(json!({ "type": ["array", "null"] })), "items"),
        (array(json!({ "type": "array", "items": true })), "items"),
        (with(&[("options", json!({ "timeout_seconds": 0 }))]), "options.timeout_seconds"),
        (with(&[("options", json!({ "timeout_seconds": "soon" }))]), "options.timeout_seconds"),
        (with(&[("options", Value::Null)]), "options"),
        (with(&[("description", json!(7))]), "description"),
        (with(&[("target_subject", Value::Null)]), "target_subject"),
        (with(&[("after_execution", Value::Null)]), "after_execution"),
        (array(json!({ "oneOf": [{ "type": "array" }] })), "oneOf/0"),
        (array(json!({ "allOf": [{ "type": "array" }] })), "allOf/0"),
        (with(&[("parameters", json!({ "$defs": { "x": { "type": "array" } } }))]), "$defs/x"),
        (
            with(&[("parameters", json!({ "definitions": { "x": { "type": "array" } } }))]),
            "definitions/x",
        ),
    ];
    for (text, word) in wrong {
        let error = yaml(&server.api(), "default", &text).await.refused(400, "BAD_REQUEST");
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
        yaml(&server.api(), "default", &text).await.refused(400, "BAD_REQUEST");
        let path = format!("/projects/default/tools/{name}");
        let error = server.api().delete(&path).await.refused(400, "BAD_REQUEST");
        assert!(error["message"].as_str().unwrap().contains("internal tool"), "{error}");
        server.api().get(&path).await.refused(404, "NOT_FOUND");
    }
    // Only those five: this one is the worker's own, and is not reserved here.
    yaml(&server.api(), "default", &with(&[("tool_name", json!("submit_result"))])).await.is(201);
}

#[tokio::test]
async fn what_is_wrong_first_is_said_first() {
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
        let error = yaml(&api, "nowhere", &with(&all[n..])).await.refused(400, "BAD_REQUEST");
        assert!(error["message"].as_str().unwrap().contains(word), "{word}: {error}");
    }
    // The schema is looked at before the project, the project before the reserved name, that
    // before after_execution, that before the subject.
    let all = [
        ("parameters", json!({ "type": "wrong" })),
        ("tool_name", json!("fork_join")),
        ("after_execution", json!("explode")),
        ("target_subject", json!("zzz")),
    ];
    let expected = [(400, "schema"), (404, "project"), (400, "reserved"), (400, "after_execution")];
    for (n, (status, word)) in expected.into_iter().enumerate() {
        let project = if n < 2 { "nowhere" } else { "default" };
        let left = match n {
            0 => &all[..],
            1 | 2 => &all[1..],
            _ => &all[2..],
        };
        let reply = yaml(&api, project, &with(left)).await;
        let code = if status == 404 { "NOT_FOUND" } else { "BAD_REQUEST" };
        let error = reply.refused(status, code);
        assert!(error["message"].as_str().unwrap().contains(word), "{word}: {error}");
    }
}

#[tokio::test]
async fn projects_are_made_listed_and_kept_apart() {
    let server = Server::start().await;
    let api = server.api();
    let made = api.post("/projects", json!({ "project_id": "p1", "title": "One" })).await.is(201);
    assert_eq!((&made["project_id"], &made["title"]), (&json!("p1"), &json!("One")));
    api.post("/projects", json!({ "project_id": "p1" })).await.refused(409, "CONFLICT");
    api.post("/projects", json!({ "project_id": "a.b" })).await.refused(422, "VALIDATION_ERROR");
    let fresh = api.post("/projects", json!({})).await.is(201);
    assert!(fresh["project_id"].as_str().unwrap().starts_with("proj_"), "{fresh}");
    yaml(&api, "p1", GOOD).await.is(201);
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
async fn a_projects_tool_and_a_clients_tool_do_not_take_each_others_name() {
    let server = Server::start().await;
    let api = server.api();
    yaml(&api, "default", GOOD).await.is(201);
    let body = json!({ "client_id": "c1", "tools": [offer("text.count")] });
    api.post("/internal/tools/register", body).await.refused(409, "CONFLICT");
    api.register("c1", json!([offer("other.tool")])).await;
    // A client that comes and goes takes nothing of the project's along.
    api.delete("/internal/tools/other.tool?client_id=c1").await.is(204);
    api.get("/projects/default/tools/text.count").await.is(200);
    api.register("c1", json!([offer("other.tool")])).await;
    let text = with(&[("tool_name", json!("other.tool"))]);
    yaml(&api, "default", &text).await.refused(409, "CONFLICT");
    let text = with(&[("tool_name", json!("calculation.eval"))]);
    yaml(&api, "default", &text).await.refused(409, "CONFLICT");
    api.get("/projects/default/tools/calculation.eval").await.refused(404, "NOT_FOUND");
}
