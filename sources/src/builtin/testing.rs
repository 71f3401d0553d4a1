//! Helpers for the tests of the built-in tools: they run a tool the way the engine does.

use std::sync::Arc;

use serde_json::Value;
use toolcrib::ports::fn_tool::BuiltinSource;
use toolcrib::ports::source::{Attempt, Source, StartResult};
use toolcrib::{Effect, Fault, Json, Tool};

/// Creates an attempt to run a tool.
pub fn attempt(tool: &str, args: &Value) -> Attempt {
    Attempt {
        call_id: "tc_01JZ0000000000000000000000".parse().unwrap(),
        project: "default".into(),
        run_id: "run".into(),
        agent: "agent".into(),
        auth_method: Default::default(),
        attributes: Default::default(),
        number: 1,
        tool: tool.into(),
        effect: Effect::Read,
        args: Json::from_value(args),
        deadline_ms: u64::MAX,
        connect_deadline_ms: u64::MAX,
        input_timeout_ms: u64::MAX,
        traceparent: None,
        command: None,
        client_id: None,
        acknowledged_by: None,
        redelivered: false,
        elicitation: None,
        meta: None,
    }
}

/// Creates a source with one tool.
pub fn source(tool: impl Tool) -> Arc<BuiltinSource> {
    Arc::new(BuiltinSource::new([Arc::new(tool) as Arc<dyn Tool>]))
}

/// Runs the only tool of a source.
pub async fn run(source: &BuiltinSource, args: &Value) -> Result<Value, Fault> {
    let name = source.list()[0].name.clone();
    match source.start(attempt(&name, args), Arc::new(|_| {})).await {
        StartResult::Finished(result) => result.map(|json| json.to_value()),
        _ => panic!("a built-in tool did not answer"),
    }
}
