//! The cost of schemas does not delay the start of an engine or the calls of others.

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::json;
use toolcrib::calls::Until;
use toolcrib::domain::directory::{DirectoryChange, UnlistedTools};
use toolcrib::domain::fault::Code;
use toolcrib::ports::store::{MemoryStore, Store};
use toolcrib::registry::ClientRegistration;
use toolcrib::{CallRequest, Caller, Effect, Engine, Fault, FnTool, Json, ToolDefinition};

use crate::support::client_tool;

/// Returns a tool whose input schema takes about 9 MiB and a tenth of a second to compile.
fn costly_tool(n: usize) -> ToolDefinition {
    let pattern = |field: &str| json!({ "pattern": format!("{field}{n}\\PL{{60}}") });
    let schema =
        json!({ "properties": { "a": pattern("a"), "b": pattern("b"), "c": pattern("c") }});
    ToolDefinition {
        input_schema: Json::from_value(&schema),
        ..client_tool(&format!("costly.t{n}"), Effect::Read)
    }
}

#[derive(serde::Deserialize, schemars::JsonSchema)]
struct Nothing {}

fn ping() -> FnTool {
    FnTool::new("ping", "Answers", |_: Nothing| async { Ok::<_, Fault>("pong".to_owned()) })
}

#[tokio::test]
async fn the_start_does_not_compile_the_stored_tools() {
    let store = Arc::new(MemoryStore::default());
    let tools = (0..500).map(costly_tool).collect();
    let version = store.directory_version().await.unwrap();
    store.change_directory(DirectoryChange::PutTools(tools), version, None).await.unwrap();
    let began = Instant::now();
    let engine = Engine::builder().store(store).start().await.unwrap();
    let took = began.elapsed();
    assert!(took < Duration::from_secs(2), "the start took {took:?}; compiling takes a minute");
    let caller = Caller::local("default");
    assert!(engine.registry().tools(&caller).len() >= 500);
    let refused = CallRequest::new("costly.t7", r#"{ "a": "x" }"#).unwrap();
    let refused = engine.calls().invoke(&caller, refused).await.map(|_| ()).unwrap_err();
    assert_eq!(refused.code(), Code::ValidationError, "the schema applies to the first call");
    let accepted = CallRequest::new("costly.t7", r#"{ "b": 1 }"#).unwrap();
    engine.calls().invoke(&caller, accepted).await.unwrap();
}

#[tokio::test(flavor = "current_thread")]
async fn compiling_a_registration_does_not_delay_calls() {
    let engine = Engine::builder().tool(ping()).start().await.unwrap();
    let caller = Caller::local("default");
    let registration = ClientRegistration {
        client_id: "c1".to_owned(),
        tools: (0..3).map(costly_tool).collect(),
        unlisted_tools: UnlistedTools::Keep,
    };
    let registering = {
        let (engine, caller) = (engine.clone(), caller.clone());
        tokio::spawn(async move { engine.registry().register(&caller, registration).await })
    };
    tokio::task::yield_now().await;
    // The one thread of this runtime answers calls while another one compiles.
    let mut answered = 0;
    while !registering.is_finished() {
        let request = CallRequest::new("ping", "{}").unwrap();
        let ticket = engine.calls().invoke(&caller, request).await.unwrap();
        engine.calls().wait(&caller, &ticket.call.id, Until::Ended).await.unwrap();
        answered += 1;
    }
    assert_eq!(registering.await.unwrap().unwrap(), 3);
    assert!(answered > 10, "{answered} calls were answered meanwhile");
}
