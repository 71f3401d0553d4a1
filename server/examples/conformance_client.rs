//! Toolcrib as an MCP client, for the public MCP conformance suite: the real engine, store and
//! source, with the suite's server as an upstream. The program calls every tool of it.
//!
//! ```console
//! $ npx -y @modelcontextprotocol/conformance@0.2.0-alpha.12 client \
//!       --command target/debug/examples/conformance_client --requirements 2026-07-28
//! ```
//!
//! It answers elicitations with values that match their schemas, and reads resources and prompts.
//! When a sign-in is required, it opens the URL that Toolcrib shows, as a browser would.

use std::sync::OnceLock;
use std::time::Duration;
use toolcrib::calls::Until;

use anyhow::{Context, bail};
use serde_json::{Map, Value, json};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use toolcrib::{Call, CallRequest, Caller, Engine, Json};
use toolcrib_server::bootstrap::{self, ServerRuntime};
use toolcrib_server::config::Config;
use toolcrib_server::{operator_token, serve};
use toolcrib_sources::mcp::{McpOauthSettings, McpServerSettings};

const NAME: &str = "suite";

/// The token with which this program reads the state of its source.
static OPERATOR_TOKEN: OnceLock<String> = OnceLock::new();

/// The URL at which the suite expects the metadata of our OAuth client.
const CLIENT: &str = "https://conformance-test.local/client-metadata.json";

/// Maximum number of sign-ins.
const ENOUGH: usize = 5;

/// Maximum time until the suite's server is ready, and downtime after which it counts as gone.
const PATIENCE: Duration = Duration::from_secs(60);
const UNREACHABLE_LIMIT: Duration = Duration::from_secs(8);

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let url = std::env::args().next_back().context("the address of the suite's server")?;
    let directory = tempfile::tempdir()?;
    let revision = std::env::var("MCP_CONFORMANCE_PROTOCOL_VERSION").unwrap_or_default();
    let upstream = McpServerSettings {
        name: NAME.to_owned(),
        url: Some(url),
        oauth: Some(oauth(&context())?),
        older: !revision.is_empty() && revision.as_str() < "2026",
        ..McpServerSettings::default()
    };
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    let config = Config {
        listen: address.to_string(),
        data_dir: directory.path().to_owned(),
        mcp: vec![upstream],
        ..Config::default()
    };
    let served = bootstrap::start_server(&config).await?;
    let token = std::fs::read_to_string(operator_token::token_file(directory.path()))?;
    OPERATOR_TOKEN.get_or_init(|| token.trim().to_owned());
    let (router, stop) = (served.http_router(&config), CancellationToken::new());
    let serving = serve::serve_listener(listener, router, &config, stop.clone());
    let source_url = format!("http://{address}/v1/sources/mcp/{NAME}");
    let running = async {
        tokio::select! {
            done = run(&served, &source_url) => done,
            error = person(&source_url) => Err(error),
        }
    };
    let working = async {
        let done = tokio::time::timeout(Duration::from_secs(80), running).await;
        stop.cancel();
        done
    };
    let (done, ()) = tokio::join!(working, serving);
    served.engine.shut_down(Duration::ZERO).await;
    served.stop_mcp_servers().await;
    done.context("it took too long")?
}

/// Returns the suite's context for this run.
fn context() -> Value {
    let context = std::env::var("MCP_CONFORMANCE_CONTEXT").unwrap_or_default();
    serde_json::from_str(&context).unwrap_or_default()
}

/// Returns the OAuth settings, with the credentials that the suite provides.
fn oauth(context: &Value) -> anyhow::Result<McpOauthSettings> {
    let mut settings = json!({ "client_metadata_url": CLIENT });
    for (field, theirs) in [
        ("client_id", "client_id"),
        ("client_secret", "client_secret"),
        ("private_key", "private_key_pem"),
        ("algorithm", "signing_algorithm"),
    ] {
        if let Some(value) = context[theirs].as_str() {
            settings[field] = value.into();
        }
    }
    let scenario = std::env::var("MCP_CONFORMANCE_SCENARIO").unwrap_or_default();
    if scenario.starts_with("auth/client-credentials") {
        settings["grant"] = "client_credentials".into();
    }
    Ok(serde_json::from_value(settings)?)
}

/// Opens every sign-in URL that Toolcrib shows, once each, up to a maximum.
async fn person(source_url: &str) -> anyhow::Error {
    let browser = reqwest::Client::new();
    let mut opened = std::collections::HashSet::new();
    loop {
        let body = source(&browser, source_url).await.unwrap_or_default();
        let address = body["oauth"]["sign_in_url"].as_str().unwrap_or_default().to_owned();
        if !address.is_empty() && opened.len() < ENOUGH && opened.insert(address.clone()) {
            match browser.get(&address).send().await {
                Ok(page) => println!("signed in: {}", page.text().await.unwrap_or_default()),
                Err(error) => return error.into(),
            }
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// Reads the state of the suite's server from Toolcrib.
async fn source(browser: &reqwest::Client, source_url: &str) -> anyhow::Result<Value> {
    let token = OPERATOR_TOKEN.get().context("the operator token")?;
    Ok(browser.get(source_url).bearer_auth(token).send().await?.json().await?)
}

/// Waits until the suite's server is ready. Fails when it stays away.
async fn wait_until_ready(source_url: &str) -> anyhow::Result<()> {
    let (browser, began) = (reqwest::Client::new(), std::time::Instant::now());
    let mut seen = std::time::Instant::now();
    loop {
        let body = source(&browser, source_url).await?;
        if body["state"] == "ready" {
            return Ok(());
        }
        if body["state"] == "starting" {
            seen = std::time::Instant::now();
        }
        if seen.elapsed() > UNREACHABLE_LIMIT || began.elapsed() > PATIENCE {
            bail!("the suite's server is not there: {}", body["problem"]);
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

async fn run(served: &ServerRuntime, source_url: &str) -> anyhow::Result<()> {
    let (engine, caller) = (&served.engine, Caller::local("default"));
    wait_until_ready(source_url).await?;
    for (tool, args) in calls(engine, &caller) {
        let invocation = || CallRequest::of(format!("{NAME}.{tool}"), Json::from_value(&args));
        let mut called = call(engine, &caller, invocation()).await;
        if more_rights(source_url).await? {
            called = call(engine, &caller, invocation()).await;
        }
        match called {
            Ok(call) => println!("{tool} {args}: {}", call.status.as_str()),
            Err(error) => println!("{tool} {args}: {error}"),
        }
    }
    let passthrough = served.mcp_passthrough();
    use toolcrib_transport::mcp::PassthroughProvider;
    for resource in passthrough.resources(&caller, None).await.unwrap_or_default() {
        let params = rmcp::model::ReadResourceRequestParams::new(resource.uri);
        let _ = passthrough.read_resource(&caller, None, params).await;
    }
    for prompt in passthrough.prompts(&caller).await.unwrap_or_default() {
        let params = rmcp::model::GetPromptRequestParams::new(prompt.name);
        let _ = passthrough.get_prompt(&caller, params).await;
    }
    Ok(())
}

/// Returns true if a call required more scopes than granted, and a sign-in has granted them.
async fn more_rights(source_url: &str) -> anyhow::Result<bool> {
    let (browser, began) = (reqwest::Client::new(), std::time::Instant::now());
    let mut was_requested = false;
    while began.elapsed() < UNREACHABLE_LIMIT {
        if source(&browser, source_url).await?["oauth"]["sign_in_url"].is_null() {
            return Ok(was_requested);
        }
        was_requested = true;
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    Ok(false)
}

/// Returns the calls to make: those that the suite names, and every other tool with the arguments
/// its schema requires.
fn calls(engine: &Engine, caller: &Caller) -> Vec<(String, Value)> {
    let context = context();
    let requested = context["toolCalls"].as_array().into_iter().flatten();
    let mut calls: Vec<(String, Value)> = requested
        .filter_map(|call| {
            Some((call["name"].as_str()?.to_owned(), to_arguments(&call["arguments"])))
        })
        .collect();
    let tools = engine.upstreams().tools(&caller.project, NAME);
    let schema_of = |name: &str| {
        let has_name = |tool: &&std::sync::Arc<toolcrib::registry::CatalogEntry>| {
            tool.definition.name.strip_prefix("suite.") == Some(name)
        };
        tools.iter().find(has_name).map(|tool| tool.definition.input_schema.to_value())
    };
    for tool in &tools {
        let Some(theirs) = tool.definition.name.strip_prefix("suite.") else { continue };
        if calls.iter().any(|(called, _)| called == theirs) {
            continue;
        }
        let args = match theirs {
            // This tool expects the schema of another tool.
            "json_schema_echo" => json!({ "schema": schema_of("json_schema_2020_12_tool") }),
            _ => fitting(&tool.definition.input_schema.to_value()),
        };
        calls.push((theirs.to_owned(), args));
    }
    calls
}

/// Removes null arguments: null does not match the schemas, and means that no value is given.
fn to_arguments(args: &Value) -> Value {
    let each = args.as_object().into_iter().flatten().filter(|(_, value)| !value.is_null());
    Value::Object(each.map(|(name, value)| (name.clone(), value.clone())).collect())
}

/// Returns a value that matches a simple schema.
fn fitting(schema: &Value) -> Value {
    if let Some(first) = schema["enum"].as_array().and_then(|words| words.first()) {
        return first.clone();
    }
    match schema["type"].as_str() {
        Some("integer" | "number") => json!(5),
        Some("boolean") => json!(true),
        Some("string") => json!("test"),
        Some("array") => json!([]),
        _ => {
            let required = schema["required"].as_array().into_iter().flatten();
            let names = required.filter_map(Value::as_str);
            let fields = names.map(|name| (name.to_owned(), fitting(&schema["properties"][name])));
            Value::Object(fields.collect())
        }
    }
}

/// Runs a call to its end and answers its elicitations.
async fn call(engine: &Engine, caller: &Caller, request: CallRequest) -> anyhow::Result<Call> {
    let ticket = engine.calls().invoke(caller, request).await?;
    let mut call = ticket.call.clone();
    while !call.status.is_terminal() {
        if call.waits_for_input() {
            let open = call.elicitation.as_ref().map(|elicitation| elicitation.unanswered.clone());
            let answers = open.unwrap_or_default().into_iter().map(answered).collect();
            call = engine.calls().answer_elicitation(caller, &call.id, answers).await?;
            continue;
        }
        call = engine
            .calls()
            .wait(caller, &ticket, Until::ChangedSince { version: call.version, within_ms: 10_000 })
            .await?;
    }
    Ok((*call).clone())
}

/// Answers an elicitation. Omits fields that have a default.
fn answered((key, question): (String, Value)) -> (String, Value) {
    let schema = &question["params"]["requestedSchema"]["properties"];
    let fields = schema.as_object().into_iter().flatten();
    let open = fields.filter(|(_, schema)| schema.get("default").is_none());
    let content: Map<String, Value> =
        open.map(|(name, schema)| (name.clone(), fitting(schema))).collect();
    (key, json!({ "action": "accept", "content": content }))
}
