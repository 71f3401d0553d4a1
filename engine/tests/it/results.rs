//! Tests of results as an embedding program reads them: slices, the result tool, and rejected
//! output.

use serde_json::{Value, json};
use toolcrib::calls::Until;
use toolcrib::domain::fault::Code;
use toolcrib::registry::RESULT_READ;
use toolcrib::results::slice::{SliceContent, SliceQuery};
use toolcrib::{
    CallId, CallRequest, Caller, Engine, Error, Fault, FnTool, Json, Role, Status, Tool,
    ToolContext, ToolDefinition,
};

#[derive(serde::Deserialize, schemars::JsonSchema)]
struct Nothing {}

fn lister() -> FnTool {
    FnTool::new("list.all", "Lists", |_: Nothing| async {
        Ok::<_, Fault>((0..1_000).map(|n| json!({ "n": n })).collect::<Vec<Value>>())
    })
}

/// A tool whose results do not match its output schema.
struct MismatchedTool;

#[async_trait::async_trait]
impl Tool for MismatchedTool {
    fn definition(&self) -> ToolDefinition {
        let honest = FnTool::new("t.lies", "Lies", |_: Nothing| async { Ok::<i64, Fault>(1) });
        honest.definition()
    }

    async fn call(&self, _args: Json, _context: ToolContext) -> Result<Json, Fault> {
        Ok(Json::from_value(&json!({ "not": "a number" })))
    }
}

async fn call_tool(engine: &Engine, tool: &str, args: Value) -> std::sync::Arc<toolcrib::Call> {
    let caller = Caller::local("default");
    let request = CallRequest::new(tool, &args.to_string()).unwrap();
    let ticket = engine.calls().invoke(&caller, request).await.unwrap();
    engine.calls().wait(&caller, &ticket.call.id, Until::Ended).await.unwrap()
}

fn code(error: &Error) -> Code {
    error.code()
}

#[tokio::test]
async fn a_program_and_a_model_read_the_same_slice_of_a_result() {
    let engine = Engine::builder().tool(lister()).with_result_read_tool().start().await.unwrap();
    let caller = Caller::local("default");
    let listed = call_tool(&engine, "list.all", json!({})).await;
    let query = SliceQuery { pointer: "/999/n".into(), ..SliceQuery::default() };
    let slice = engine.runs().results().read_result(&caller, &listed.id, query).await.unwrap();
    assert_eq!(slice.content, SliceContent::Value(Json::parse("999").unwrap()));
    let args = json!({ "tool_call_id": listed.id, "pointer": "/999/n" });
    let read = call_tool(&engine, RESULT_READ, args).await;
    let data = read.outcome.as_ref().unwrap().data.as_ref().unwrap().to_value();
    assert_eq!((&data["value"], &data["type"]), (&json!(999), &json!("number")));
    let other = Caller::local("other");
    let error = engine
        .runs()
        .results()
        .read_result(&other, &listed.id, SliceQuery::default())
        .await
        .unwrap_err();
    assert_eq!(code(&error), Code::NotFound);
}

#[tokio::test]
async fn a_result_that_violates_the_schema_is_readable_by_operators() {
    let engine = Engine::builder().tool(MismatchedTool).start().await.unwrap();
    let operator = Caller::local("default");
    let failed = call_tool(&engine, "t.lies", json!({})).await;
    assert_eq!(failed.status, Status::Failed);
    let fault = failed.outcome.as_ref().unwrap().error.as_ref().unwrap();
    assert_eq!(fault.code, Code::ValidationError);
    let slice = engine
        .runs()
        .results()
        .read_raw_result(&operator, &failed.id, SliceQuery::default())
        .await
        .unwrap();
    let raw = Json::from_value(&json!({ "not": "a number" }));
    assert_eq!(slice.content, SliceContent::Value(raw));
    let agent = Caller { roles: Role::Agent.into(), ..operator };
    let error = engine
        .runs()
        .results()
        .read_raw_result(&agent, &failed.id, SliceQuery::default())
        .await
        .unwrap_err();
    assert_eq!(code(&error), Code::PermissionDenied);
    let error = engine
        .runs()
        .results()
        .read_result(&agent, &failed.id, SliceQuery::default())
        .await
        .unwrap_err();
    assert_eq!(code(&error), Code::Conflict);
}

#[tokio::test]
async fn a_tool_name_can_be_registered_only_once() {
    let tool = || FnTool::new(RESULT_READ, "Mine", |_: Nothing| async { Ok::<i64, Fault>(1) });
    let error =
        Engine::builder().tool(tool()).with_result_read_tool().build_idle().await.err().unwrap();
    assert_eq!(code(&error), Code::Conflict);
    assert!(error.to_string().contains("with_result_read_tool()"), "{error}");
    let engine = Engine::builder().tool(tool()).start().await.unwrap();
    let call = call_tool(&engine, RESULT_READ, json!({})).await;
    assert_eq!(call.status, Status::Succeeded);
    let twice = Engine::builder().tool(lister()).tool(lister()).build_idle().await.err().unwrap();
    assert!(twice.to_string().contains("list.all"), "{twice}");
}

#[tokio::test]
async fn an_engine_with_the_result_tool_can_be_shut_down() {
    let engine = Engine::builder().with_result_read_tool().start().await.unwrap();
    engine.shut_down(std::time::Duration::from_secs(1)).await;
    let id: CallId = "tc_00000000000000000000000000".parse().unwrap();
    let caller = Caller::local("default");
    let error =
        engine.runs().results().read_result(&caller, &id, SliceQuery::default()).await.unwrap_err();
    assert_eq!(code(&error), Code::NotFound);
}
