//! Tests of agent wakeups and of the events that turns publish.

use std::sync::Arc;

use toolcrib::domain::agent::AgentEntry;
use toolcrib::maintenance::turn_watchdog::{self, WakeupThrottle};
use toolcrib::model_formats::ToolFormat;
use toolcrib::ports::clock::ManualClock;
use toolcrib::utp::TurnLeaseRequest;
use toolcrib::{Caller, Engine, Fault, FnTool, Json};

/// Returns the subjects of the messages in the outbox, and empties it.
async fn published(engine: &Engine) -> Vec<String> {
    let messages = engine.utp().outbox().messages(0, 100).await.unwrap();
    let ids: Vec<String> = messages.iter().map(|(_, message)| message.id.clone()).collect();
    engine.utp().outbox().remove(&ids).await.unwrap();
    messages.into_iter().map(|(_, message)| message.subject).collect()
}

/// Empty arguments: models call tools with objects.
#[derive(serde::Deserialize, schemars::JsonSchema)]
struct Nothing {}

#[tokio::test]
async fn an_agent_that_ignores_a_wakeup_is_woken_again_on_the_turns_channel() {
    let clock = Arc::new(ManualClock::at(1_700_000_000_000));
    let engine =
        Engine::builder().clock(clock.clone()).publishes_outbox(true).build_idle().await.unwrap();
    let caller = Caller::local("p");
    let entry = AgentEntry {
        project: "p".into(),
        agent_id: "ada".into(),
        worker_target: "w1".into(),
        profile: None,
        allowed_tools: None,
        updated_ms: 0,
        definition: None,
    };
    engine.roster().put_agent_entry(&caller, entry).await.unwrap();
    let request = TurnLeaseRequest { channel: Some("u_1".into()), ..TurnLeaseRequest::default() };
    let turn = engine.utp().lease_turn(&caller, "ada", request).await.unwrap();
    engine.utp().stop_turn(&caller, "ada", &turn.turn_id, None).await.unwrap();
    let wakeup = "p.u_1.cmd.agent.w1.wakeup";
    let events = ["p.u_1.evt.agent.ada.state", "p.u_1.evt.agent.ada.task"];
    let subjects = published(&engine).await;
    assert!(subjects.iter().any(|subject| subject == wakeup), "{subjects:?}");
    assert!(
        events.iter().all(|event| subjects.iter().any(|subject| subject == event)),
        "{subjects:?}"
    );
    let throttle = WakeupThrottle::default();
    turn_watchdog::run_once(engine.utp(), &throttle).await.unwrap();
    assert_eq!(published(&engine).await, [""; 0], "the agent still has time to react");
    clock.advance(6_000);
    turn_watchdog::run_once(engine.utp(), &throttle).await.unwrap();
    assert_eq!(published(&engine).await, [wakeup]);
    turn_watchdog::run_once(engine.utp(), &throttle).await.unwrap();
    assert_eq!(published(&engine).await, [""; 0], "wakeups are throttled");
    clock.advance(31_000);
    turn_watchdog::run_once(engine.utp(), &throttle).await.unwrap();
    assert_eq!(published(&engine).await, [wakeup]);
    let inbox = engine.utp().inbox(&caller, "ada", 10, 0).await.unwrap();
    let ids = [inbox[0].inbox_id.clone()];
    assert_eq!(engine.utp().take_from_inbox(&caller, "ada", &ids).await.unwrap(), 1);
    clock.advance(31_000);
    turn_watchdog::run_once(engine.utp(), &throttle).await.unwrap();
    assert_eq!(published(&engine).await, [""; 0], "the inbox is empty");
}

#[tokio::test]
async fn every_agent_with_unread_items_is_woken_again() {
    let clock = Arc::new(ManualClock::at(1_700_000_000_000));
    let engine =
        Engine::builder().clock(clock.clone()).publishes_outbox(true).build_idle().await.unwrap();
    let caller = Caller::local("p");
    for n in 0..2_100 {
        let entry = AgentEntry {
            project: "p".into(),
            agent_id: format!("a{n}"),
            worker_target: format!("w{n}"),
            profile: None,
            allowed_tools: None,
            updated_ms: 0,
            definition: None,
        };
        engine.roster().put_agent_entry(&caller, entry).await.unwrap();
        let turn = engine
            .utp()
            .lease_turn(&caller, &format!("a{n}"), TurnLeaseRequest::default())
            .await
            .unwrap();
        engine.utp().stop_turn(&caller, &format!("a{n}"), &turn.turn_id, None).await.unwrap();
    }
    while !published(&engine).await.is_empty() {}
    clock.advance(6_000);
    let throttle = WakeupThrottle::default();
    for _ in 0..2 {
        turn_watchdog::run_once(engine.utp(), &throttle).await.unwrap();
    }
    let mut wakeups = 0;
    loop {
        let subjects = published(&engine).await.len();
        if subjects == 0 {
            break;
        }
        wakeups += subjects;
    }
    assert_eq!(wakeups, 2_100);
}

#[tokio::test]
async fn a_model_sees_only_the_tools_that_the_roster_allows_its_agent() {
    let tool = |name: &str| FnTool::new(name, "Does it", async |_: Nothing| Ok::<_, Fault>(1));
    let engine = Engine::builder().tool(tool("a.one")).tool(tool("a.two")).tool(tool("b.one"));
    let engine = engine.build_idle().await.unwrap();
    let visible_tools = |caller: &Caller| -> Vec<String> {
        let all = engine.registry().model_tool_definitions(caller, ToolFormat::OpenAi);
        let name = |json: &Json| json.to_value()["function"]["name"].as_str().unwrap().to_owned();
        all.iter().map(name).collect()
    };
    let caller = Caller { agent: "ada".into(), ..Caller::local("p") };
    assert_eq!(
        visible_tools(&caller),
        ["a__one", "a__two", "b__one"],
        "an agent that is not on the roster sees every tool"
    );
    let expected: [(Option<Vec<String>>, &[&str]); 3] = [
        (None, &["a__one", "a__two", "b__one"]),
        (Some(vec!["a.*".into()]), &["a__one", "a__two"]),
        (Some(Vec::new()), &[]),
    ];
    for (allowed_tools, names) in expected {
        let entry = AgentEntry {
            project: "p".into(),
            agent_id: "ada".into(),
            worker_target: "w1".into(),
            profile: None,
            allowed_tools,
            updated_ms: 0,
            definition: None,
        };
        engine.roster().put_agent_entry(&caller, entry).await.unwrap();
        assert_eq!(visible_tools(&caller), names);
    }
}
