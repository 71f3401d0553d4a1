//! Importing OpenAPI documents over HTTP, and calling the imported tools.

use reqwest::Method;
use reqwest::header::CONTENT_TYPE;
use serde_json::{Value, json};

use super::upstream::{Upstream, call};
use crate::support::Server;

fn document(url: &str) -> Value {
    json!({
        "openapi": "3.1.0",
        "info": { "title": "Pets", "version": "1" },
        "servers": [{ "url": url }],
        "paths": {
            "/pets/{id}": {
                "get": {
                    "operationId": "getPet",
                    "parameters": [
                        { "name": "id", "in": "path", "required": true,
                          "schema": { "$ref": "#/components/schemas/Id" } },
                        { "name": "tags", "in": "query",
                          "schema": { "type": "array", "items": { "type": "string" } } },
                        { "name": "X-Lang", "in": "header", "schema": { "type": "string" } },
                    ],
                },
                "put": {
                    "parameters": [{ "name": "id", "in": "path", "required": true,
                        "schema": { "type": "integer" } }],
                    "requestBody": { "required": true, "content": { "application/json": {
                        "schema": { "type": "object", "required": ["name"],
                            "properties": { "name": { "type": "string" } } } } } },
                },
            },
            "/pets": {
                "post": {
                    "operationId": "createPet",
                    "requestBody": { "content": { "application/x-www-form-urlencoded": {
                        "schema": { "type": "object",
                            "properties": { "name": { "type": "string" } } } } } },
                },
            },
            "/elsewhere": { "get": { "parameters": [{ "$ref": "http://x.y/z.json" }] } },
        },
        "components": { "schemas": { "Id": { "type": "integer", "minimum": 1 } } },
    })
}

#[tokio::test]
async fn every_imported_operation_is_a_callable_tool() {
    let upstream = Upstream::start().await;
    let server = upstream.server().await;
    let api = server.api();
    let path = "/projects/default/tools/import?prefix=pets";
    let report = api.post(path, document(&upstream.url("/v1"))).await.is(201);
    let name_and_effect = |tool: &Value| {
        (
            tool["tool_name"].as_str().unwrap().to_owned(),
            tool["effect"].as_str().unwrap().to_owned(),
        )
    };
    let imported: Vec<_> =
        report["imported"].as_array().unwrap().iter().map(name_and_effect).collect();
    let expected = [
        ("pets.createPet", "irreversible"),
        ("pets.getPet", "read"),
        ("pets.put_pets_id", "idempotent"),
    ];
    assert_eq!(imported, expected.map(|(name, effect)| (name.to_owned(), effect.to_owned())));
    assert_eq!(report["skipped"][0]["operation"], "GET /elsewhere");
    let args = json!({ "id": 7, "tags": ["a", "b"], "X-Lang": "en" });
    let ended = call(&api, "pets.getPet", args).await;
    assert_eq!(ended["result"]["path"], "/v1/pets/7?tags=a&tags=b", "{ended}");
    assert_eq!(upstream.last().header("x-lang"), Some("en"));
    call(&api, "pets.put_pets_id", json!({ "id": 1, "name": "Rex" })).await;
    let request = upstream.last();
    assert_eq!((request.method.as_str(), request.body.as_str()), ("PUT", r#"{"name":"Rex"}"#));
    call(&api, "pets.createPet", json!({ "name": "R x" })).await;
    assert_eq!(upstream.last().body, "name=R%20x");
    let body = json!({ "run_id": "r", "args": { "id": 0 } });
    api.post("/v1/tools/pets.getPet/invoke", body).await.refused(422, "VALIDATION_ERROR");
    // A second import gives the same result, and an imported tool can be shown and deleted.
    let again = api.post(path, document(&upstream.url("/v1"))).await.is(201);
    assert_eq!(again, report);
    let described = api.get("/projects/default/tools/pets.getPet").await.is(200);
    assert_eq!(
        (&described["executor"], &described["target_subject"]),
        (&json!("http"), &Value::Null)
    );
    api.delete("/projects/default/tools/pets.getPet").await.is(204);
    let server = server.restart().await;
    server.api().get("/v1/tools/pets.put_pets_id").await.is(200);
}

#[tokio::test]
async fn yaml_multipart_server_override_and_dry_run_are_supported() {
    let upstream = Upstream::start().await;
    let server = upstream.server().await;
    let api = server.api();
    let yaml = "openapi: 3.0.0\npaths:\n  /a:\n    get:\n      responses:\n        200: {description: ok}\n";
    let send = |query: String, kind: &'static str, body: String| {
        let path = format!("/projects/default/tools/import{query}");
        let request = api.request(Method::POST, &path).header(CONTENT_TYPE, kind).body(body);
        api.send(request)
    };
    let relative = send(String::new(), "application/yaml", yaml.into()).await;
    let error = relative.refused(422, "VALIDATION_ERROR");
    assert!(error["message"].as_str().unwrap().contains("whole URL"), "{error}");
    let query = format!("?server={}&dry_run=true", upstream.url("/api"));
    let dry = send(query, "application/yaml", yaml.into()).await.is(200);
    assert_eq!(dry["imported"][0]["url"], upstream.url("/api/a"));
    assert_eq!(api.get("/projects/default/tools").await.is(200), json!([]));
    let multipart = format!(
        "--XX\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a.yaml\"\r\n\r\n{yaml}\r\n--XX--\r\n"
    );
    let query = format!("?server={}", upstream.url("/api"));
    send(query, "multipart/form-data; boundary=XX", multipart).await.is(201);
    call(&api, "get_a", json!({})).await;
    assert_eq!(upstream.last().path, "/api/a");
}

#[tokio::test]
async fn invalid_documents_are_refused_with_a_reason() {
    let server = Server::start().await;
    let api = server.api();
    let path = "/projects/default/tools/import";
    let url = "https://api.example.com";
    let mut no_operations = document(url);
    no_operations["paths"] = json!({});
    for (body, word) in [
        (json!({}), "openapi"),
        (json!({ "swagger": "2.0" }), "Swagger 2"),
        (json!({ "openapi": "3.1.0" }), "paths"),
        (no_operations, "no operations"),
        (json!([]), "mapping"),
    ] {
        let error = api.post(path, body).await.refused(422, "VALIDATION_ERROR");
        assert!(error["message"].as_str().unwrap().contains(word), "{word}: {error}");
    }
    let bad_prefix = format!("{path}?prefix=a%20b");
    api.post(&bad_prefix, document(url)).await.refused(422, "VALIDATION_ERROR");
    let bad_server = format!("{path}?server=ftp://x");
    api.post(&bad_server, document(url)).await.refused(422, "VALIDATION_ERROR");
    api.post("/projects/nowhere/tools/import", document(url)).await.refused(404, "NOT_FOUND");
    let request = api.request(Method::POST, path).header(CONTENT_TYPE, "application/yaml");
    api.send(request.body("a: [")).await.refused(400, "BAD_REQUEST");
    let large = json!({ "openapi": "3.1.0", "x": "y".repeat(3 << 20) });
    api.post(path, large).await.refused(413, "PAYLOAD_TOO_LARGE");
    // If one name is taken, nothing is imported.
    let mut conflicting = document(url);
    conflicting["paths"]["/calc"] = json!({ "get": { "operationId": "calculation.eval" } });
    api.post(path, conflicting).await.refused(409, "CONFLICT");
    assert_eq!(api.get("/projects/default/tools").await.is(200), json!([]));
}

/// The newcomer sees at import time, and not at the first call, that a setting is missing.
#[tokio::test]
async fn an_import_warns_of_hosts_that_calls_may_not_reach() {
    let upstream = Upstream::start().await;
    let server = Server::start().await;
    let api = server.api();
    let path = "/projects/default/tools/import?prefix=pets";
    let report = api.post(path, document(&upstream.url("/v1"))).await.is(201);
    let address = &upstream.address;
    let settings = format!(
        "set http.hosts = [\"s.jina.ai\", \"r.jina.ai\", \"http://{address}\"] and \
         http.allow_hosts = [\"127.0.0.1\"] in the server's configuration, and restart the server"
    );
    let warning = format!(
        "calls will be denied: http://{address} is not allowed: it is not in the setting \
         http.hosts; {settings}"
    );
    assert_eq!(report["warnings"], json!([warning]));
    assert_eq!(report["imported"].as_array().unwrap().len(), 3, "{report}");
    let denied = call(&api, "pets.getPet", json!({ "id": 1 })).await;
    assert_eq!(denied["error"]["code"], "PERMISSION_DENIED", "{denied}");
    assert_eq!(denied["error"]["detail"]["hint"], settings, "{denied}");

    // With exactly these settings the call works, and a second import does not warn.
    let mut config = server.config.clone();
    config.http.hosts = vec!["s.jina.ai".into(), "r.jina.ai".into(), format!("http://{address}")];
    config.http.allow_hosts = vec!["127.0.0.1".into()];
    let server = server.restart_with(config).await;
    let api = server.api();
    let done = call(&api, "pets.getPet", json!({ "id": 1 })).await;
    assert_eq!(done["status"], "SUCCEEDED", "{done}");
    let report = api.post(path, document(&upstream.url("/v1"))).await.is(201);
    assert_eq!(report["warnings"], json!([]));
}
