//! Tests of agent wakeups and of the events that turns publish.

use std::sync::Arc;

use toolcrib::domain::utp::AgentEntry;
use toolcrib::engine::TurnLeaseRequest;
use toolcrib::maintenance::turn_watchdog::{self, WakeupThrottle};
use toolcrib::model_formats::ToolFormat;
use toolcrib::ports::clock::ManualClock;
use toolcrib::{Caller, Engine, Fault, FnTool, Json};

/// Returns the subjects of the messages in the outbox, and empties it.
async fn published(engine: &Engine) -> Vec<String> {
    let letters = engine.outbox(0, 100).await.unwrap();
    let ids: Vec<String> = letters.iter().map(|(_, letter)| letter.id.clone()).collect();
    engine.remove_from_outbox(&ids).await.unwrap();
    letters.into_iter().map(|(_, letter)| letter.subject).collect()
}

/// Empty arguments: models call tools with objects.
#[derive(serde::Deserialize, schemars::JsonSchema)]
struct Nothing {}

#[tokio::test]
async fn who_does_not_come_is_rung_for_again_on_the_turns_own_channel() {
    let clock = Arc::new(ManualClock::at(1_700_000_000_000));
    let engine =
        Engine::builder().clock(clock.clone()).publishes_outbox(true).build_idle().await.unwrap();
    let caller = Caller::local("p");
    let member = AgentEntry {
        project: "p".into(),
        agent_id: "ada".into(),
        worker_target: "w1".into(),
        profile: None,
        allowed_tools: None,
        updated_ms: 0,
    };
    engine.put_agent_entry(&caller, member).await.unwrap();
    let wanted = TurnLeaseRequest { channel: Some("u_1".into()), ..TurnLeaseRequest::default() };
    let turn = engine.lease_turn(&caller, "ada", wanted).await.unwrap();
    engine.stop_turn(&caller, "ada", &turn.turn_id, None).await.unwrap();
    let wakeup = "p.u_1.cmd.agent.w1.wakeup";
    let news = ["p.u_1.evt.agent.ada.state", "p.u_1.evt.agent.ada.task"];
    let said = published(&engine).await;
    assert!(said.iter().any(|subject| subject == wakeup), "{said:?}");
    assert!(news.iter().all(|news| said.iter().any(|subject| subject == news)), "{said:?}");
    let rung = WakeupThrottle::default();
    turn_watchdog::run_once(&engine, &rung).await.unwrap();
    assert_eq!(published(&engine).await, [""; 0], "there was time enough to come");
    clock.advance(6_000);
    turn_watchdog::run_once(&engine, &rung).await.unwrap();
    assert_eq!(published(&engine).await, [wakeup]);
    turn_watchdog::run_once(&engine, &rung).await.unwrap();
    assert_eq!(published(&engine).await, [""; 0], "not without end");
    clock.advance(31_000);
    turn_watchdog::run_once(&engine, &rung).await.unwrap();
    assert_eq!(published(&engine).await, [wakeup]);
    let inbox = engine.inbox(&caller, "ada", 10, 0).await.unwrap();
    let ids = [inbox[0].inbox_id.clone()];
    assert_eq!(engine.take_from_inbox(&caller, "ada", &ids).await.unwrap(), 1);
    clock.advance(31_000);
    turn_watchdog::run_once(&engine, &rung).await.unwrap();
    assert_eq!(published(&engine).await, [""; 0], "it came");
}

#[tokio::test]
async fn however_many_wait_each_is_rung_for_again() {
    let clock = Arc::new(ManualClock::at(1_700_000_000_000));
    let engine =
        Engine::builder().clock(clock.clone()).publishes_outbox(true).build_idle().await.unwrap();
    let caller = Caller::local("p");
    for n in 0..2_100 {
        let member = AgentEntry {
            project: "p".into(),
            agent_id: format!("a{n}"),
            worker_target: format!("w{n}"),
            profile: None,
            allowed_tools: None,
            updated_ms: 0,
        };
        engine.put_agent_entry(&caller, member).await.unwrap();
        let turn = engine
            .lease_turn(&caller, &format!("a{n}"), TurnLeaseRequest::default())
            .await
            .unwrap();
        engine.stop_turn(&caller, &format!("a{n}"), &turn.turn_id, None).await.unwrap();
    }
    while !published(&engine).await.is_empty() {}
    clock.advance(6_000);
    let state = WakeupThrottle::default();
    for _ in 0..2 {
        turn_watchdog::run_once(&engine, &state).await.unwrap();
    }
    let mut rung = 0;
    loop {
        let said = published(&engine).await.len();
        if said == 0 {
            break;
        }
        rung += said;
    }
    assert_eq!(rung, 2_100);
}

#[tokio::test]
async fn a_model_is_shown_what_the_roster_allows_its_agent() {
    let tool = |name: &str| FnTool::new(name, "Does it", async |_: Nothing| Ok::<_, Fault>(1));
    let engine = Engine::builder().tool(tool("a.one")).tool(tool("a.two")).tool(tool("b.one"));
    let engine = engine.build_idle().await.unwrap();
    let shown = |caller: &Caller| -> Vec<String> {
        let all = engine.model_tool_definitions(caller, ToolFormat::OpenAi);
        let name = |json: &Json| json.to_value()["function"]["name"].as_str().unwrap().to_owned();
        all.iter().map(name).collect()
    };
    let caller = Caller { agent: "ada".into(), ..Caller::local("p") };
    assert_eq!(shown(&caller), ["a__one", "a__two", "b__one"], "not on the roster: everything");
    let expected: [(Option<Vec<String>>, &[&str]); 3] = [
        (None, &["a__one", "a__two", "b__one"]),
        (Some(vec!["a.*".into()]), &["a__one", "a__two"]),
        (Some(Vec::new()), &[]),
    ];
    for (allowed_tools, names) in expected {
        let member = AgentEntry {
            project: "p".into(),
            agent_id: "ada".into(),
            worker_target: "w1".into(),
            profile: None,
            allowed_tools,
            updated_ms: 0,
        };
        engine.put_agent_entry(&caller, member).await.unwrap();
        assert_eq!(shown(&caller), names);
    }
}
