//! Joins of agents under crashes: engines over one store stop at random, and each child is reported
//! to its parent exactly once.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use toolcrib::calls::{CallQuery, Until};
use toolcrib::domain::agent::{AgentDefinition, AgentDriver};
use toolcrib::ports::store::MemoryStore;
use toolcrib::utp::{TurnFinish, TurnLeaseRequest};
use toolcrib::{Call, CallRequest, Caller, Engine, Json, Status};

use crate::support::SeededRng;

const AGENTS: [&str; 3] = ["bob", "eve", "mia"];

fn caller() -> Caller {
    Caller::local("default")
}

async fn start(store: &Arc<MemoryStore>) -> Engine {
    let engine = Engine::builder().store(store.clone()).start().await.unwrap();
    while !engine.calls().is_recovered() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    engine
}

async fn define_agents(engine: &Engine) {
    for agent in AGENTS {
        let definition = AgentDefinition {
            agent_id: agent.to_owned(),
            driver: AgentDriver::Worker,
            worker_target: Some(format!("w_{agent}")),
            ..AgentDefinition::default()
        };
        engine.roster().define_agent(&caller(), definition, None).await.unwrap();
    }
}

fn fork(more: Value) -> CallRequest {
    let task = |agent: &&str| json!({ "target_strategy": "new", "target_ref": agent, "instruction": "Work." });
    let mut args = json!({ "tasks": AGENTS.iter().map(task).collect::<Vec<_>>() });
    for (name, value) in more.as_object().unwrap() {
        args[name] = value.clone();
    }
    CallRequest::of("fork_join", Json::from_value(&args))
}

/// Leases and finishes the turns that wait in an agent's inbox. Returns their number.
async fn work(engine: &Engine, agent: &str) -> usize {
    let mut count = 0;
    for item in engine.utp().inbox(&caller(), agent, 50, 0).await.unwrap() {
        if item.message_type != "turn" {
            continue;
        }
        let turn_id = Some(item.turn_id.clone());
        let request = TurnLeaseRequest { turn_id, ..TurnLeaseRequest::default() };
        let Ok(turn) = engine.utp().lease_turn(&caller(), agent, request).await else { continue };
        let reason = Some(format!("{agent} is ready"));
        let finish = TurnFinish { epoch: turn.epoch, reason, ..TurnFinish::default() };
        engine.utp().finish_turn(&caller(), agent, &turn.turn_id, finish).await.unwrap();
        count += 1;
    }
    count
}

async fn calls_of(engine: &Engine, tool: &str) -> Vec<Call> {
    let tool_name = Some(tool.to_owned());
    let query = CallQuery { tool_name, limit: 200, ..CallQuery::default() };
    engine.calls().calls(&caller(), query).await.unwrap().calls
}

fn result_of(call: &Call) -> Value {
    call.outcome.as_ref().unwrap().data.as_ref().unwrap().to_value()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_join_survives_engines_that_stop_at_random() {
    let (store, rng) = (Arc::<MemoryStore>::default(), SeededRng::new(20));
    let mut engine = start(&store).await;
    define_agents(&engine).await;
    let mut joins = Vec::new();
    for _ in 0..20 {
        let ticket = engine.calls().invoke(&caller(), fork(json!({}))).await.unwrap();
        joins.push(ticket.call.id.clone());
        for agent in AGENTS {
            if rng.percent(40) {
                work(&engine, agent).await;
            }
        }
        if rng.percent(50) {
            engine.shut_down(Duration::ZERO).await;
            engine = start(&store).await;
        }
    }
    for id in &joins {
        let ended = loop {
            for agent in AGENTS {
                work(&engine, agent).await;
            }
            let call = engine.calls().wait(&caller(), id, Until::EndedWithin(20)).await.unwrap();
            if call.status.is_terminal() {
                break call;
            }
        };
        assert_eq!(ended.status, Status::Succeeded, "{:?}", ended.outcome);
        let result = result_of(&ended);
        assert_eq!(result["status"], "success", "{result}");
        assert_eq!(result["results"].as_array().unwrap().len(), AGENTS.len());
    }
    for agent in AGENTS {
        let children = calls_of(&engine, &format!("agent.{agent}")).await;
        assert_eq!(children.len(), joins.len(), "one call per task, however often it is delivered");
        assert!(children.iter().all(|call| call.status == Status::Succeeded));
        let left = engine.utp().inbox(&caller(), agent, 50, 0).await.unwrap();
        assert!(left.is_empty(), "{left:?}");
    }
    let events = engine.calls().open_call_count();
    assert_eq!(events, 0, "nothing is open");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_canceled_join_cancels_its_tasks_and_stops_their_turns() {
    let store = Arc::<MemoryStore>::default();
    let engine = start(&store).await;
    define_agents(&engine).await;
    let ticket = engine.calls().invoke(&caller(), fork(json!({}))).await.unwrap();
    let mut turns = Vec::new();
    for agent in AGENTS {
        let items = engine.utp().inbox(&caller(), agent, 1, 10_000).await.unwrap();
        turns.push((agent, items[0].turn_id.clone()));
    }
    engine.calls().cancel(&caller(), &ticket.call.id, None).await.unwrap();
    for (agent, turn_id) in turns {
        let stopped = async {
            while !engine.utp().turn(&caller(), agent, &turn_id).await.unwrap().status.is_terminal()
            {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(1), stopped).await.expect("within a second");
        let children = calls_of(&engine, &format!("agent.{agent}")).await;
        assert_eq!(children[0].status, Status::Canceled);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_timeout_of_a_join_is_not_shorter_than_its_deadline() {
    let store = Arc::<MemoryStore>::default();
    let engine = start(&store).await;
    define_agents(&engine).await;
    let mut request = fork(json!({ "deadline_seconds": 2_000 }));
    request.timeout_ms = Some(10);
    let call = engine.calls().invoke(&caller(), request).await.unwrap().call;
    assert!(call.deadline_ms >= call.created_ms + 2_000_000, "{}", call.deadline_ms);
    let mut request = fork(json!({ "deadline_seconds": 0.05 }));
    request.timeout_ms = Some(10);
    let ticket = engine.calls().invoke(&caller(), request).await.unwrap();
    let ended = engine.calls().wait(&caller(), &ticket, Until::Ended).await.unwrap();
    assert_eq!(ended.status, Status::Timeout);
    let fault = ended.outcome.as_ref().unwrap().error.clone().unwrap();
    assert_eq!(fault.detail.unwrap()["results"][0]["status"], "timeout");
}

#[tokio::test]
async fn the_time_limit_of_an_agent_holds_for_its_task_in_a_join() {
    let store = Arc::default();
    let engine = start(&store).await;
    define_agents(&engine).await;
    let definition = engine.roster().agent_entry(&caller(), "bob").unwrap().definition.unwrap();
    let mut definition = AgentDefinition { version: 0, ..*definition };
    definition.profile.limits.ms = Some(100);
    engine.roster().define_agent(&caller(), definition, None).await.unwrap();
    let tasks = json!([{ "target_strategy": "new", "target_ref": "bob", "instruction": "x" }]);
    let fork = engine.calls().invoke(&caller(), fork(json!({ "tasks": tasks }))).await.unwrap();
    let args = json!({ "expert_profile": "bob", "question": "Why?" });
    let question = CallRequest::of("ask_expert", Json::from_value(&args));
    let question = engine.calls().invoke(&caller(), question).await.unwrap();
    for join in [fork, question] {
        let ended =
            engine.calls().wait(&caller(), &join, Until::EndedWithin(20_000)).await.unwrap();
        assert!(ended.status.is_terminal(), "{ended:?}");
        let text = format!("{:?}", ended.outcome);
        assert!(text.to_uppercase().contains("TIMEOUT"), "{text}");
    }
    for task in calls_of(&engine, "agent.bob").await {
        let limit_ms = task.deadline_ms - task.created_ms;
        assert_eq!((task.status, limit_ms), (Status::Timeout, 100), "{task:?}");
    }
}
