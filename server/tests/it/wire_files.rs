//! The committed API files match the server. `UPDATE=1` rewrites them.

use std::path::{Path, PathBuf};
use std::process::Command;

use clap::CommandFactory;
use serde_json::{Value, json};
use toolcrib_server::cli::Cli;
use toolcrib_transport::http::{errors_page, openapi_json};

use crate::support::{Api, Server};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Asserts that the committed file is exactly this text. With `UPDATE=1`, writes it first.
#[track_caller]
fn assert_committed(file: &str, text: &str) {
    let path = root().join(file);
    if std::env::var_os("UPDATE").is_some_and(|value| value == "1") {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, text).unwrap();
    }
    let committed = std::fs::read_to_string(&path).unwrap_or_default();
    let differs = committed.lines().zip(text.lines()).position(|(a, b)| a != b);
    let line_number = differs.unwrap_or(committed.lines().count().min(text.lines().count())) + 1;
    assert!(
        committed == text,
        "{file} differs from the server from line {line_number} on; \
         UPDATE=1 cargo test -p toolcrib-server --test it wire_files rewrites it"
    );
}

#[test]
fn the_committed_openapi_document_is_current() {
    assert_committed("api/openapi.json", &openapi_json());
}

#[test]
fn the_committed_error_page_is_current() {
    assert_committed("docs/errors.md", &errors_page());
}

#[test]
fn the_committed_command_help_is_current() {
    let mut text = String::new();
    for command in commands(&Cli::command(), &[]) {
        text.push_str(&format!(
            "$ toolcrib {}\n",
            [&command[..], &["--help".into()]].concat().join(" ")
        ));
        text.push_str(&help(&command));
        text.push('\n');
    }
    assert_committed("docs/cli-help.txt", &text);
}

/// Returns every visible command with its subcommands.
fn commands(command: &clap::Command, path: &[String]) -> Vec<Vec<String>> {
    let mut all = vec![path.to_vec()];
    let subcommand = command.get_subcommands().filter(|subcommand| !subcommand.is_hide_set());
    for subcommand in subcommand.filter(|subcommand| subcommand.get_name() != "help") {
        all.extend(commands(subcommand, &[path, &[subcommand.get_name().to_owned()]].concat()));
    }
    all
}

fn help(command: &[String]) -> String {
    let ran = Command::new(env!("CARGO_BIN_EXE_toolcrib"))
        .args(command)
        .arg("--help")
        .env_clear()
        .env("COLUMNS", "100")
        .output()
        .unwrap();
    assert!(ran.status.success(), "{command:?}: {ran:?}");
    assert!(ran.stderr.is_empty(), "{command:?}: {ran:?}");
    let text = String::from_utf8(ran.stdout).unwrap();
    text.lines().map(|line| format!("{}\n", line.trim_end())).collect()
}

#[tokio::test]
async fn the_server_serves_the_same_documents() {
    let server = Server::start().await;
    let answer = server.api().get("/openapi.json").await;
    assert_eq!(answer.header("content-type"), Some("application/json"));
    let document = answer.is(200);
    let committed: Value = serde_json::from_str(&openapi_json()).unwrap();
    assert_eq!(document, committed);
    assert!(document["openapi"].as_str().unwrap().starts_with("3.1"));
    let page = server.api().get("/docs/errors").await;
    assert_eq!(page.header("content-type"), Some("text/markdown; charset=utf-8"));
    assert_eq!(page.text, errors_page());
}

/// The `type` of a problem opens in a browser, at the code that it names.
#[tokio::test]
async fn the_errors_page_is_html_for_a_browser() {
    let server = Server::start().await;
    let api = server.api();
    let refused = api.get("/v1/tools/no.such").await;
    let link = refused.body["type"].as_str().unwrap().to_owned();
    let (path, anchor) = link.split_once('#').unwrap();
    let browser = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8";
    let with_accept = |accept: &'static str| {
        api.send(api.request(reqwest::Method::GET, path).header("accept", accept))
    };
    let page = with_accept(browser).await;
    assert_eq!(page.header("content-type"), Some("text/html; charset=utf-8"));
    assert_eq!(page.header("vary"), Some("accept"));
    assert!(page.text.contains(&format!("id=\"{anchor}\"")), "{}", page.text);
    for code in toolcrib::Code::all() {
        let anchor = format!("<section id=\"{}\">", code.as_str().to_lowercase());
        assert_eq!(page.text.matches(&anchor).count(), 1, "{anchor}");
    }
    assert_eq!(foreign_urls(&page.text), Vec::<&str>::new(), "it needs no network");
    for accept in ["text/markdown", "*/*"] {
        let page = with_accept(accept).await;
        assert_eq!(page.header("content-type"), Some("text/markdown; charset=utf-8"));
        assert_eq!(page.text, errors_page());
    }
    let document = api.get("/openapi.json").await.is(200);
    assert_eq!(document["externalDocs"]["url"], "/docs/errors", "the interactive page links to it");
}

#[test]
fn every_operation_documents_its_responses() {
    let document: Value = serde_json::from_str(&openapi_json()).unwrap();
    let mut ids = std::collections::HashSet::new();
    for (path, methods) in document["paths"].as_object().unwrap() {
        for (method, operation) in methods.as_object().unwrap() {
            let responses = operation["responses"].as_object().unwrap();
            assert!(!responses.is_empty(), "{method} {path}");
            let text_of_operation =
                operation["summary"].as_str().or(operation["description"].as_str());
            assert!(text_of_operation.is_some_and(|text| text.len() > 10), "{method} {path}");
            let id = operation["operationId"].as_str().unwrap().to_owned();
            assert!(ids.insert(id), "{method} {path}: another operation has the same id");
        }
    }
}

/// Clients are generated from the bodies.
#[test]
fn every_success_with_a_body_describes_it() {
    let document: Value = serde_json::from_str(&openapi_json()).unwrap();
    for (path, methods) in document["paths"].as_object().unwrap() {
        for (method, operation) in methods.as_object().unwrap() {
            for status in ["200", "201", "202"] {
                let response = &operation["responses"][status];
                assert!(
                    response.is_null() || response["content"].is_object(),
                    "{method} {path}: {status} has no body"
                );
            }
        }
    }
    let schemas = &document["components"]["schemas"];
    assert_eq!(schemas["CallAckBody"]["required"], serde_json::json!(["client_id"]));
    assert_eq!(schemas["RuleBody"]["required"], serde_json::json!(["verdict"]));
}

/// Returns the Rust files below a directory.
fn rust_files(directory: &std::path::Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    let files = entries.flat_map(|path| match path.is_dir() {
        true => rust_files(&path),
        false => vec![path],
    });
    files.filter(|path| path.extension().is_some_and(|ext| ext == "rs")).collect()
}

/// The generator keeps one of two schemas with the same name, without an error.
#[test]
fn no_two_schemas_share_a_name() {
    let mut seen = std::collections::HashMap::new();
    for file in ["transport/src", "protocol/src"].iter().flat_map(|at| rust_files(&root().join(at)))
    {
        let text = std::fs::read_to_string(&file).unwrap();
        for derived in text.split("#[derive(").skip(1) {
            let Some((traits, item)) = derived.split_once(")]") else { continue };
            if !traits.split(',').any(|name| name.trim() == "ToSchema") {
                continue;
            }
            let item = item.split_once('{').map_or(item, |(head, _)| head);
            let alias = item.split("schema(as = ").nth(1);
            let name = alias.or_else(|| item.split("struct ").nth(1));
            let name = name.or_else(|| item.split("enum ").nth(1)).unwrap();
            let name: String = name.chars().take_while(|c| c.is_alphanumeric()).collect();
            let other = seen.insert(name.clone(), file.clone());
            assert_eq!(other, None, "{name} is also in {}", file.display());
        }
    }
    assert!(seen.len() > 100, "{}", seen.len());
}

/// Generated clients depend on the location and the required flag of parameters.
#[test]
fn every_parameter_has_its_actual_location() {
    let document: Value = serde_json::from_str(&openapi_json()).unwrap();
    for (path, methods) in document["paths"].as_object().unwrap() {
        for (method, operation) in methods.as_object().unwrap() {
            let Some(parameters) = operation["parameters"].as_array() else { continue };
            for parameter in parameters {
                let name = parameter["name"].as_str().unwrap();
                let in_path = path.contains(&format!("{{{name}}}"));
                assert_eq!(parameter["in"] == "path", in_path, "{method} {path}: {parameter}");
                let or_null = parameter["schema"]["type"].to_string().contains("null");
                let required = parameter["required"] == true;
                assert!(!(or_null && required), "{method} {path}: {parameter}");
            }
        }
    }
}

/// Returns the URLs of other hosts in a page.
fn foreign_urls(page: &str) -> Vec<&str> {
    let mut found = Vec::new();
    for scheme in ["http://", "https://", "src=\"//", "href=\"//", "url(//"] {
        found.extend(page.match_indices(scheme).map(|(start, _)| {
            let end = page[start..].find(['"', '\'', '<', ' ', ')']).unwrap_or(page.len() - start);
            &page[start..start + end.max(scheme.len())]
        }));
    }
    found
}

#[tokio::test]
async fn the_docs_page_needs_no_network() {
    let server = Server::start().await;
    let api = server.api();
    let page = api.get("/docs/").await;
    assert_eq!(page.status, 200);
    assert!(page.header("content-type").unwrap().starts_with("text/html"));
    assert_eq!(foreign_urls(&page.text), Vec::<&str>::new(), "{}", page.text);
    assert_eq!(api.get("/docs").await.text, page.text, "with and without the slash");
    let mut loaded = 0;
    for attribute in ["src=\"", "href=\""] {
        for part in page.text.split(attribute).skip(1) {
            let name = part.split('"').next().unwrap().trim_start_matches("./");
            let path =
                if name.starts_with('/') { name.to_owned() } else { format!("/docs/{name}") };
            assert_eq!(api.get(&path).await.status, 200, "{path}");
            loaded += 1;
        }
    }
    assert!(loaded >= 3, "the server provides its scripts and styles: {}", page.text);
    let start = api.get("/docs/swagger-initializer.js").await;
    assert!(start.text.contains("/openapi.json"), "{}", start.text);
    assert_eq!(foreign_urls(&start.text), Vec::<&str>::new(), "{}", start.text);
}

#[tokio::test]
async fn the_docs_page_is_compressed_only_for_clients_that_accept_it() {
    let server = Server::start().await;
    let request = || server.api().request(reqwest::Method::GET, "/docs/swagger-ui.css");
    let plain = request().send().await.unwrap();
    assert_eq!(plain.headers().get("content-encoding"), None);
    let plain = plain.text().await.unwrap();
    assert!(plain.contains(".swagger-ui"), "a style sheet: {}", &plain[..80]);
    let compressed = request().header("accept-encoding", "br;q=0.9, gzip;q=0.8");
    let compressed = compressed.send().await.unwrap();
    assert_eq!(compressed.headers()["content-encoding"], "gzip");
    assert_eq!(compressed.headers()["vary"], "accept-encoding");
    let compressed = compressed.bytes().await.unwrap();
    assert!(compressed.len() < plain.len() / 4, "{} bytes", compressed.len());
}

#[tokio::test]
async fn health_readiness_and_metrics_are_served() {
    let server = Server::start().await;
    let api = server.api();
    for path in ["/healthz", "/livez"] {
        assert_eq!(api.get(path).await.text, "ok");
    }
    crate::support::until("readiness", || async {
        (api.get("/readyz").await.status == 200).then_some(())
    })
    .await;
    assert_eq!(api.get("/readyz").await.text, "ready");
    let verbose = api.get("/readyz?verbose").await.text;
    for line in ["[+]store ok", "[+]recovery ok", "ready"] {
        assert!(verbose.lines().any(|actual| actual == line), "{verbose}");
    }
    assert!(!verbose.contains("[-]"), "{verbose}");
    let id = api.invoke("calculation.eval", serde_json::json!({ "expression": "1" })).await;
    api.finished(&id).await;
    let metrics = api.get("/metrics").await;
    assert!(metrics.header("content-type").unwrap().starts_with("text/plain; version=0.0.4"));
    for name in [
        "toolcrib_build_info",
        "toolcrib_tool_calls_total",
        "toolcrib_tool_calls_open",
        "toolcrib_clients_connected",
        "toolcrib_store_size_bytes",
        "toolcrib_store_commit_duration_seconds",
        "toolcrib_tool_call_duration_seconds",
    ] {
        assert!(metrics.text.contains(name), "{name} in\n{}", metrics.text);
    }
    assert!(!metrics.text.contains(&id), "no ids in labels");
}

/// An operation of the served document, with the values of its examples.
struct DocumentedExample {
    method: String,
    path: String,
    body: Option<Value>,
    /// True if the document permits the request without credentials.
    is_open: bool,
}

/// Returns true if the document permits an operation without credentials.
fn needs_no_credentials(document: &Value, operation: &Value) -> bool {
    let requirements = operation.get("security").unwrap_or(&document["security"]);
    requirements.as_array().unwrap().iter().any(|one| one.as_object().unwrap().is_empty())
}

/// Returns the operations of a document that have examples, in its order.
fn documented_examples(text: &str) -> Vec<DocumentedExample> {
    let document: Value = serde_json::from_str(text).unwrap();
    let paths = document["paths"].as_object().unwrap();
    let mut order: Vec<&String> = paths.keys().collect();
    order.sort_by_key(|path| text.find(&format!("\n    \"{path}\": {{")).unwrap());
    let mut found = Vec::new();
    for path in order {
        for (method, operation) in paths[path].as_object().unwrap() {
            let mut filled = path.clone();
            for parameter in operation["parameters"].as_array().into_iter().flatten() {
                if let Some(value) = parameter["schema"]["example"].as_str() {
                    let name = parameter["name"].as_str().unwrap();
                    filled = filled.replace(&format!("{{{name}}}"), value);
                }
            }
            let content = &operation["requestBody"]["content"]["application/json"];
            let body = content.get("example").cloned();
            let is_complete = !filled.contains('{');
            let needs_body = !operation["requestBody"].is_null();
            if is_complete && (filled != *path || needs_body) && needs_body == body.is_some() {
                let is_open = needs_no_credentials(&document, operation);
                let method = method.to_uppercase();
                found.push(DocumentedExample { method, path: filled, body, is_open });
            }
        }
    }
    found
}

#[tokio::test]
async fn every_example_of_the_docs_succeeds_as_it_is() {
    let server = Server::start().await;
    let (anonymous, operator) = (server.api(), server.operator());
    let served = anonymous.get("/openapi.json").await.text;
    let mut examples = documented_examples(&served);
    let first = &examples[0];
    assert_eq!(first.path, "/v1/tools/calculation.eval/invoke", "the first one calls a tool");
    assert!(first.is_open, "it needs no credentials");
    assert!(examples.iter().filter(|example| example.is_open).count() >= 13);
    // The first key ends the time in which requests need none.
    examples.sort_by_key(|example| example.path == "/v1/keys");
    let send = async |api: &Api, example: &DocumentedExample| {
        let request = api.request(example.method.parse().unwrap(), &example.path);
        match &example.body {
            Some(body) => api.send(request.json(body)).await,
            None => api.send(request).await,
        }
    };
    for example in &examples {
        let DocumentedExample { method, path, is_open, .. } = example;
        let reply = send(&anonymous, example).await;
        assert_eq!(reply.status.is_success(), *is_open, "{method} {path}: {}", reply.text);
        if !is_open {
            assert_eq!(reply.status, 401, "{method} {path}: {}", reply.text);
            let reply = send(&operator, example).await;
            assert!(reply.status.is_success(), "{method} {path}: {}", reply.text);
        }
    }
}

#[tokio::test]
async fn the_document_says_which_operations_need_the_operator() {
    let server = Server::start().await;
    let api = server.api();
    let document = api.get("/openapi.json").await.is(200);
    for scheme in ["key", "operator"] {
        let declared = &document["components"]["securitySchemes"][scheme];
        assert_eq!((&declared["type"], &declared["scheme"]), (&json!("http"), &json!("bearer")));
        assert!(declared["description"].is_string(), "the dialog explains it: {declared}");
    }
    let mut refused = 0;
    for (path, operations) in document["paths"].as_object().unwrap() {
        for (method, operation) in operations.as_object().unwrap() {
            // Requests without a body or required parameters that answer at once.
            let streams = ["/events", "/sse", "/poll"].iter().any(|end| path.ends_with(end));
            let parameters = operation["parameters"].as_array().into_iter().flatten();
            let mut queries = parameters.filter(|parameter| parameter["in"] == "query");
            let needs_more = queries.any(|parameter| parameter["required"] == true)
                || !operation["requestBody"].is_null();
            if needs_more || streams || path.starts_with("/oauth") {
                continue;
            }
            let filled = path.replace("{kind}", "tool").replace(['{', '}'], "");
            let reply =
                api.send(api.request(method.to_uppercase().parse().unwrap(), &filled)).await;
            let is_open = needs_no_credentials(&document, operation);
            assert_eq!(reply.status != 401, is_open, "{method} {path}: {}", reply.text);
            let description = operation["description"].as_str().unwrap_or_default();
            assert_eq!(description.contains("operator token"), !is_open, "{method} {path}");
            refused += usize::from(!is_open);
        }
    }
    assert!(refused >= 20, "{refused}");
}
