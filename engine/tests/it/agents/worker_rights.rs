//! The rights of workers: in a turn that a call handed over, an agent does nothing that the caller
//! may not do, and no caller above it approves its calls.

use toolcrib::approvals::{ApprovalQuery, DecisionRequest, DecisionVerdict};
use toolcrib::domain::agent::AgentDriver;
use toolcrib::domain::call::approval::{ApprovalScope, ApprovalStatus};
use toolcrib::domain::caller::{AuthMethod, CallerAttributes, Role, RoleSet};
use toolcrib::domain::utp::Turn;
use toolcrib::registry::rules::parse_rule;
use toolcrib::utp::{DispatchRequest, StepCallRequest, StepResult, TurnLeaseRequest, TurnResume};
use toolcrib::{Fault, FnTool};

use super::*;

#[derive(serde::Deserialize, schemars::JsonSchema)]
struct Nothing {}

fn tool(name: &str) -> FnTool {
    FnTool::new(name, "Acts", |_: Nothing| async { Ok::<i64, Fault>(1) })
}

/// A loop agent's model: it writes a note, and says what became of it.
fn writes_a_note(prompt: &ModelRequest) -> BoxFuture<'static, ModelReply> {
    let results = tool_results(prompt);
    ready(match results.is_empty() {
        true => calls(&["note__write"]),
        false => says(results.join(" | ")),
    })
}

pub(super) async fn start(store: &Arc<MemoryStore>) -> Engine {
    let model = SingleModel(Arc::new(AgentModel(Box::new(writes_a_note))));
    let builder = Engine::builder().store(store.clone()).models(Arc::new(model));
    let builder = builder.tool(tool("note.write")).tool(tool("pay.send"));
    let engine = builder.start().await.unwrap();
    let expert = AgentDefinition {
        driver: AgentDriver::Worker,
        worker_target: Some("experts".into()),
        ..agent("expert")
    };
    for agent in [expert, agent("writer")] {
        engine.roster().define_agent(&caller(), agent, None).await.unwrap();
    }
    for (id, rule) in [
        ("all", json!({ "verdict": "allow", "agents": ["gw", "expert", "ada", "eve"] })),
        ("agents", json!({ "verdict": "allow", "agents": ["lou"], "tools": ["agent.*"] })),
        ("kim", json!({ "verdict": "deny", "users": ["kim"], "tools": ["note.*"] })),
        ("pay", json!({ "verdict": "ask", "tools": ["pay.*"] })),
    ] {
        let rule = parse_rule("default", Some(id), &rule, "").unwrap();
        engine.admin().set_rule(&caller(), rule).await.unwrap();
    }
    engine
}

fn keyed(agent: &str, user: Option<&str>) -> Caller {
    let roles: RoleSet = [Role::Agent, Role::Approver].into_iter().collect();
    let attributes =
        CallerAttributes { user: user.map(str::to_owned), ..CallerAttributes::default() };
    let caller = Caller::new("default", agent, roles, AuthMethod::Key);
    Caller { attributes: Arc::new(attributes), ..caller }
}

/// A caller that reads its own calls only.
pub(super) fn plain(agent: &str) -> Caller {
    Caller::new("default", agent, Role::Agent, AuthMethod::Key)
}

fn worker() -> Caller {
    plain("expert")
}

/// Hands a turn to the worker, which leases it.
async fn take_turn_of(engine: &Engine, requester: &Caller) -> Turn {
    take_turn_with(engine, requester, json!({ "instruction": "x" })).await
}

pub(super) async fn take_turn_with(engine: &Engine, requester: &Caller, args: Value) -> Turn {
    let request = CallRequest::of("agent.expert", Json::from_value(&args));
    let ticket = engine.calls().invoke(requester, request).await.unwrap();
    let turn_id = until("the turn waits", async || {
        let items = engine.utp().inbox(&worker(), "expert", 50, 20_000).await.unwrap();
        let of_call = |item: &&toolcrib::domain::utp::InboxItem| {
            item.payload["call_id"] == ticket.call.id.as_str()
        };
        items.iter().find(of_call).map(|item| item.turn_id.clone())
    })
    .await;
    let request = TurnLeaseRequest { turn_id: Some(turn_id), ..TurnLeaseRequest::default() };
    engine.utp().lease_turn(&worker(), "expert", request).await.unwrap()
}

async fn dispatch(engine: &Engine, turn: &Turn, tool: &str, args: Value) {
    let call = StepCallRequest {
        tool_call_id: "c1".to_owned(),
        tool_name: tool.to_owned(),
        arguments: Json::from_value(&args),
        timeout_ms: None,
        attempt_timeout_ms: None,
        input_timeout_ms: None,
    };
    let request = DispatchRequest {
        epoch: turn.epoch,
        step_id: None,
        calls: vec![call],
        suspends_turn: true,
        tokens: None,
    };
    engine.utp().dispatch_step(&worker(), "expert", &turn.turn_id, request).await.unwrap();
}

async fn result_of(engine: &Engine, turn: &Turn) -> StepResult {
    let request = TurnResume { epoch: turn.epoch, wait_ms: 20_000, request_id: None };
    let resumed = engine.utp().resume_turn(&worker(), "expert", &turn.turn_id, request).await;
    resumed.unwrap().results.into_iter().next().unwrap()
}

#[tokio::test]
async fn a_worker_does_nothing_that_its_caller_may_not_do() {
    let engine = start(&Arc::default()).await;
    for (requester, expected) in
        [(keyed("gw", Some("kim")), "kim"), (keyed("lou", None), "to agent \\\"lou\\\"")]
    {
        let turn = take_turn_of(&engine, &requester).await;
        dispatch(&engine, &turn, "note.write", json!({})).await;
        let error = result_of(&engine, &turn).await.error.to_string();
        assert!(error.contains("may not call") && error.contains(expected), "{error}");
        // An agent of the loop, called by the worker, is bound in the same way.
        let turn = take_turn_of(&engine, &requester).await;
        dispatch(&engine, &turn, "agent.writer", json!({ "instruction": "x" })).await;
        let through = result_of(&engine, &turn).await;
        let text = format!("{through:?}");
        assert!(!text.contains("\"note.write\": 1") && text.contains("no tool"), "{text}");
    }
    let turn = take_turn_of(&engine, &keyed("gw", Some("ann"))).await;
    dispatch(&engine, &turn, "note.write", json!({})).await;
    assert_eq!(result_of(&engine, &turn).await.error, Value::Null);
}

#[tokio::test]
async fn nobody_above_a_worker_approves_its_call_even_after_a_restart() {
    let store = Arc::default();
    let engine = start(&store).await;
    let gw = keyed("gw", Some("kim"));
    let turn = take_turn_of(&engine, &gw).await;
    dispatch(&engine, &turn, "pay.send", json!({})).await;
    drop(engine);
    let engine = start(&store).await;
    let query = ApprovalQuery {
        status: Some(ApprovalStatus::Pending),
        limit: 10,
        ..ApprovalQuery::default()
    };
    let page = engine.approvals().list(&caller(), query).await.unwrap();
    let approval = &page.approvals[0];
    let requester = &approval.request.requester;
    assert_eq!(
        (requester.agent.as_str(), requester.attributes.user.as_deref()),
        ("expert", Some("kim"))
    );
    let decision = || DecisionRequest {
        approval_id: approval.id.clone(),
        verdict: DecisionVerdict::Approve,
        reason: None,
        scope: ApprovalScope::Once,
        until_ms: None,
        args: None,
    };
    for own in [gw, keyed("gw", None), keyed("other", Some("kim"))] {
        let results = engine.approvals().decide(&own, vec![decision()]).await.unwrap();
        let refused = results[0].as_ref().unwrap_err().to_string();
        assert!(refused.contains("no caller decides about its own"), "{refused}");
    }
    let other = keyed("other", Some("ann"));
    let results = engine.approvals().decide(&other, vec![decision()]).await.unwrap();
    assert!(results[0].is_ok(), "{results:?}");
    assert_eq!(result_of(&engine, &turn).await.error, Value::Null);
}
