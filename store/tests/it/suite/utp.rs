//! Cards, turns, inboxes, the outbox and dead letters.

use serde_json::{Map, json};
use toolcrib::domain::agent::AgentEntry;
use toolcrib::domain::call::Status;
use toolcrib::domain::directory::{AuditEntry, DirectoryChange, Project};
use toolcrib::domain::tool::{Executor, ToolDefinition};
use toolcrib::domain::utp::card::into_map;
use toolcrib::domain::utp::{
    AfterExecution, Binding, Card, DeadLetter, ExecutionEdge, InboxItem, OutboxMessage, StepCall,
    ToolStatus, Turn, TurnDelegation, TurnLineage, TurnStatus,
};
use toolcrib::ports::store::utp::{InboxPutResult, PutCardResult, TurnChange};
use toolcrib::ports::store::{SaveResult, Store};

use super::directory::tool;
use crate::support::{NOW, call_at, ended, json as text, put, save};

pub fn card(card_id: &str, kind: &str, turn_id: &str, call: &str) -> Card {
    Card {
        card_id: card_id.into(),
        project: "p".into(),
        kind: kind.into(),
        content: into_map(json!({ "__type__": "JsonContent", "data": { "n": 1.5 } })),
        created_ms: NOW,
        author_id: "ada".into(),
        metadata: into_map(json!({ "agent_turn_id": turn_id })),
        tool_calls: None,
        tool_call_id: Some(call.into()),
        ttl_seconds: None,
    }
}

pub fn turn(turn_id: &str, version: u64) -> Turn {
    Turn {
        project: "p".into(),
        agent_id: "ada".into(),
        turn_id: turn_id.into(),
        epoch: version,
        status: TurnStatus::Running,
        channel: "public".into(),
        step_id: Some("s1".into()),
        steps: vec!["s1".into()],
        parent_step_id: None,
        traceparent: None,
        tracestate: None,
        context_box_id: None,
        depth: 0,
        lease_until_ms: NOW + 1_000,
        lease_ms: 1_000,
        resume_deadline_ms: None,
        created_ms: NOW,
        updated_ms: NOW,
        reason: None,
        deliverable_card_id: None,
        delegation: None,
        last_request: None,
        version,
    }
}

pub fn new_step_call(call: &str) -> StepCall {
    StepCall {
        project: "p".into(),
        agent_id: "ada".into(),
        turn_id: "t1".into(),
        epoch: 1,
        step_id: "s1".into(),
        tool_call_id: call.into(),
        tool_name: "x".into(),
        call_id: Some("tc_1".into()),
        result_card_id: None,
        inbox_id: None,
    }
}

pub fn item(agent: &str, call: &str) -> InboxItem {
    InboxItem {
        inbox_id: format!("inbox_{agent}_{call}"),
        project: "p".into(),
        agent_id: agent.into(),
        message_type: "tool_result".into(),
        turn_id: "t1".into(),
        tool_call_id: call.into(),
        payload: Map::new(),
        traceparent: "00-1-1-01".into(),
        tracestate: None,
        parent_step_id: None,
        source_agent_id: None,
        depth: 0,
        created_ms: NOW,
    }
}

pub fn outbox_message(id: &str) -> OutboxMessage {
    OutboxMessage {
        id: id.into(),
        subject: "p.c.cmd.agent.w.wakeup".into(),
        headers: vec![("a".into(), "b".into())],
        payload: json!({ "agent_id": "ada" }),
        expires_ms: NOW + 1,
    }
}

pub async fn cards_are_written_once(store: &dyn Store) {
    let utp = store.utp();
    let first = card("c1", "tool.result", "t1", "call_0");
    assert_eq!(utp.put_card(first.clone()).await.unwrap(), PutCardResult::New);
    assert_eq!(utp.card("p", "c1").await.unwrap(), Some(first.clone()));
    assert_eq!(utp.card("q", "c1").await.unwrap(), None, "a card of another project is not found");
    let later = Card { created_ms: NOW + 9, ..first.clone() };
    assert_eq!(utp.put_card(later).await.unwrap(), PutCardResult::Identical);
    let changed = Card { author_id: "eve".into(), ..first.clone() };
    assert_eq!(
        utp.put_card(changed).await.unwrap(),
        PutCardResult::Conflict(Box::new(first.clone()))
    );
    let second = card("c2", "tool.result", "t1", "call_0");
    assert_eq!(
        utp.put_card(second).await.unwrap(),
        PutCardResult::Conflict(Box::new(first.clone()))
    );
    let found = utp.result_card("p", "t1", "call_0").await.unwrap();
    assert_eq!(found, Some(first));
    for other in [
        card("c3", "tool.result", "t2", "call_0"),
        card("c4", "tool.call", "t1", "call_0"),
        card("c5", "tool.call", "t1", "call_0"),
        Card { project: "q".into(), ..card("c1", "tool.result", "t1", "call_0") },
    ] {
        assert_eq!(utp.put_card(other).await.unwrap(), PutCardResult::New);
    }
}

pub async fn one_of_many_concurrent_result_cards_of_a_call_is_stored(store: &dyn Store) {
    let utp = store.utp();
    let writing = (0..50).map(|n| utp.put_card(card(&format!("c{n}"), "tool.result", "t", "x")));
    let put = futures::future::join_all(writing).await;
    let new = put.iter().filter(|put| matches!(put, Ok(PutCardResult::New))).count();
    assert_eq!(new, 1);
}

pub async fn turns_are_saved_by_version(store: &dyn Store) {
    let utp = store.utp();
    let change = || TurnChange::default();
    assert_eq!(utp.save_turn(turn("t1", 2), change()).await.unwrap(), SaveResult::Conflict);
    assert_eq!(utp.save_turn(turn("t1", 1), change()).await.unwrap(), SaveResult::Saved);
    assert_eq!(utp.save_turn(turn("t1", 1), change()).await.unwrap(), SaveResult::Conflict);
    let full = TurnChange { step_calls: vec![new_step_call("a"), new_step_call("b")], ..change() };
    assert_eq!(utp.save_turn(turn("t1", 2), full).await.unwrap(), SaveResult::Saved);
    assert_eq!(utp.turn("p", "t1").await.unwrap(), Some(turn("t1", 2)));
    assert_eq!(utp.turn("q", "t1").await.unwrap(), None);
    let calls = utp.step_calls("p", "t1", "s1").await.unwrap();
    assert_eq!(calls, [new_step_call("a"), new_step_call("b")]);
    assert_eq!(utp.step_call("p", Some("t1"), "b").await.unwrap(), Some(new_step_call("b")));
    assert_eq!(utp.step_call("p", Some("t2"), "b").await.unwrap(), None);
    assert_eq!(utp.step_call("p", None, "b").await.unwrap(), Some(new_step_call("b")));
    assert_eq!(utp.expired_turns(NOW, 9).await.unwrap(), []);
    assert_eq!(utp.expired_turns(NOW + 1_000, 9).await.unwrap(), [turn("t1", 2)]);
}

pub async fn a_call_of_a_turn_kept_elsewhere_is_delivered(store: &dyn Store) {
    let utp = store.utp();
    let other = StepCall { tool_name: "y".into(), ..new_step_call("a") };
    for step_call in [new_step_call("a"), other, new_step_call("b")] {
        utp.add_step_call(step_call).await.unwrap();
    }
    assert_eq!(utp.step_call("p", Some("t1"), "a").await.unwrap(), Some(new_step_call("a")));
    let open = utp.undelivered_step_calls(0, 9).await.unwrap();
    assert_eq!(open.len(), 2, "{open:?}");
    utp.deliver_to_inbox(item("ada", "a"), "r1", None).await.unwrap();
    let open = utp.undelivered_step_calls(0, 9).await.unwrap();
    assert_eq!(open.iter().map(|(_, call)| call.clone()).collect::<Vec<_>>(), [new_step_call("b")]);
}

pub async fn a_delegated_turn_is_stored_with_its_edges(store: &dyn Store) {
    let utp = store.utp();
    let delegation = TurnDelegation {
        call_id: "tc_1".into(),
        attempt: 1,
        parent_agent_id: "eve".into(),
        parent_turn_id: "t0".into(),
        instruction_card_id: "task_1".into(),
        deadline_ms: NOW,
        lost_leases: 1,
        status: Some(ToolStatus::Partial),
        lineage: TurnLineage {
            ancestors: vec!["ada".into()],
            max_depth: Some(3),
            parent_id: Some("run_1".into()),
            tokens: Some(500),
            ..TurnLineage::default()
        },
        used_calls: 3,
        used_tokens: 120,
    };
    let status = TurnStatus::Dispatched;
    let dispatched = Turn { status, delegation: Some(Box::new(delegation)), ..turn("t1", 1) };
    let edge = ExecutionEdge {
        edge_id: "edge_1".into(),
        primitive: "enqueue",
        phase: "request",
        source: ("eve".into(), "t0".into(), None),
        target: ("ada".into(), "t1".into()),
        correlation_id: "t1".into(),
    };
    let item = InboxItem { message_type: "turn".into(), ..item("ada", "turn:1") };
    let change = || TurnChange {
        inbox: vec![item.clone()],
        edges: vec![edge.clone()],
        ..TurnChange::default()
    };
    assert_eq!(utp.save_turn(dispatched.clone(), change()).await.unwrap(), SaveResult::Saved);
    assert_eq!(utp.turn("p", "t1").await.unwrap(), Some(dispatched.clone()));
    let again = Turn { version: 2, ..dispatched };
    assert_eq!(utp.save_turn(again, change()).await.unwrap(), SaveResult::Saved);
    assert_eq!(utp.inbox("p", "ada", 9).await.unwrap(), [item], "once");
}

pub async fn the_turns_of_a_tree_are_found_and_purged(store: &dyn Store) {
    let utp = store.utp();
    let delegated = |turn_id: &str, root_id: Option<&str>| {
        let root_id = root_id.map(str::to_owned);
        let lineage = TurnLineage { root_id, ..TurnLineage::default() };
        let delegation = TurnDelegation {
            call_id: "tc_1".into(),
            attempt: 1,
            parent_agent_id: "eve".into(),
            parent_turn_id: "run_1".into(),
            instruction_card_id: "task_1".into(),
            deadline_ms: NOW,
            lost_leases: 0,
            status: None,
            lineage,
            used_calls: 0,
            used_tokens: 0,
        };
        Turn { delegation: Some(Box::new(delegation)), ..turn(turn_id, 1) }
    };
    let elsewhere = Turn { project: "q".into(), ..delegated("turn_5", Some("run_1")) };
    let all = [
        delegated("turn_1", Some("run_1")),
        delegated("turn_2", Some("run_1")),
        delegated("turn_3", Some("run_9")),
        delegated("turn_4", None),
        elsewhere,
    ];
    for turn in &all {
        utp.save_turn(turn.clone(), TurnChange::default()).await.unwrap();
    }
    let tree = async |after: Option<&str>, limit| {
        let after = after.map(str::to_owned);
        utp.tree_turns("p", "run_1", after, limit).await.unwrap()
    };
    assert_eq!(tree(None, 10).await, all[..2]);
    assert_eq!(tree(None, 1).await, all[..1]);
    assert_eq!(tree(Some("turn_1"), 10).await, all[1..2]);
    let mut used = Turn { version: 2, updated_ms: NOW + 5, ..all[1].clone() };
    used.delegation.as_mut().unwrap().used_calls = 2;
    utp.save_turn(used.clone(), TurnChange::default()).await.unwrap();
    assert_eq!(tree(None, 10).await, [all[0].clone(), used.clone()], "the newest state");
    utp.purge_utp(NOW + 1, 10).await.unwrap();
    assert_eq!(tree(None, 10).await, [used]);
}

pub async fn an_outcome_is_delivered_once_and_in_order(store: &dyn Store) {
    let utp = store.utp();
    let change = TurnChange {
        step_calls: vec![new_step_call("a"), new_step_call("b")],
        ..TurnChange::default()
    };
    utp.save_turn(turn("t1", 1), change).await.unwrap();
    let first =
        utp.deliver_to_inbox(item("ada", "b"), "r1", Some(outbox_message("l1"))).await.unwrap();
    assert_eq!(first, InboxPutResult::New);
    let again =
        utp.deliver_to_inbox(item("ada", "b"), "r1", Some(outbox_message("l2"))).await.unwrap();
    assert_eq!(again, InboxPutResult::Duplicate("inbox_ada_b".into()));
    utp.deliver_to_inbox(item("ada", "a"), "r2", None).await.unwrap();
    utp.deliver_to_inbox(item("eve", "z"), "r3", None).await.unwrap();
    let messages = utp.outbox(0, 9).await.unwrap();
    assert_eq!(messages.len(), 1, "one wakeup");
    assert_eq!(messages[0].1, outbox_message("l1"));
    let open = utp.undelivered_step_calls(0, 9).await.unwrap();
    assert!(open.is_empty(), "{open:?}");
    let calls = utp.step_calls("p", "t1", "s1").await.unwrap();
    assert_eq!(calls[1].result_card_id.as_deref(), Some("r1"));
    let items = utp.inbox("p", "ada", 9).await.unwrap();
    assert_eq!(items, [item("ada", "b"), item("ada", "a")]);
    let found = utp.agents_with_unread_items(NOW + 1, 0, 9).await.unwrap();
    let items: Vec<InboxItem> = found.iter().map(|(_, item)| item.clone()).collect();
    assert_eq!(items, [item("ada", "b"), item("eve", "z")]);
    let rest = utp.agents_with_unread_items(NOW + 1, found[0].0, 9).await.unwrap();
    assert_eq!(rest, found[1..], "an agent is listed once, for its first item");
    assert_eq!(utp.agents_with_unread_items(NOW + 1, 0, 1).await.unwrap(), found[..1]);
    assert_eq!(utp.agents_with_unread_items(NOW, 0, 9).await.unwrap(), []);
    let ids = ["inbox_ada_b".to_owned(), "inbox_eve_z".to_owned()];
    assert_eq!(
        utp.acknowledge_inbox_items("p", "ada", &ids, NOW).await.unwrap(),
        1,
        "only items of the agent"
    );
    assert_eq!(utp.acknowledge_inbox_items("p", "ada", &ids, NOW).await.unwrap(), 0);
    assert_eq!(utp.inbox("p", "ada", 9).await.unwrap(), [item("ada", "a")]);
    let again = utp.deliver_to_inbox(item("ada", "b"), "r1", None).await.unwrap();
    assert_eq!(
        again,
        InboxPutResult::Duplicate("inbox_ada_b".into()),
        "a duplicate after it was acknowledged"
    );
    utp.deliver_to_inbox(item("ada", "c"), "r4", None).await.unwrap();
    let acknowledged = vec!["inbox_ada_a".to_owned(), "inbox_eve_z".to_owned()];
    let change = TurnChange { acknowledged_inbox_ids: acknowledged, ..TurnChange::default() };
    utp.save_turn(turn("t1", 2), change).await.unwrap();
    assert_eq!(
        utp.inbox("p", "ada", 9).await.unwrap(),
        [item("ada", "c")],
        "only the named items are acknowledged"
    );
    assert_eq!(
        utp.inbox("p", "eve", 9).await.unwrap(),
        [item("eve", "z")],
        "only items of the agent"
    );
}

pub async fn an_outcome_delivered_before_its_step_is_kept(store: &dyn Store) {
    let utp = store.utp();
    utp.deliver_to_inbox(item("ada", "a"), "r1", None).await.unwrap();
    let change = TurnChange { step_calls: vec![new_step_call("a")], ..TurnChange::default() };
    utp.save_turn(turn("t1", 1), change).await.unwrap();
    let open = utp.undelivered_step_calls(0, 9).await.unwrap();
    assert_eq!(open.len(), 1);
    assert!(utp.undelivered_step_calls(open[0].0, 9).await.unwrap().is_empty());
    let again = utp.deliver_to_inbox(item("ada", "a"), "r1", None).await.unwrap();
    assert_eq!(again, InboxPutResult::Duplicate("inbox_ada_a".into()));
    assert!(utp.undelivered_step_calls(0, 9).await.unwrap().is_empty());
    let calls = utp.step_calls("p", "t1", "s1").await.unwrap();
    assert_eq!(calls[0].inbox_id.as_deref(), Some("inbox_ada_a"));
}

pub async fn the_outbox_is_read_and_emptied_in_order(store: &dyn Store) {
    let utp = store.utp();
    utp.append_to_outbox(vec![outbox_message("l2"), outbox_message("l1")]).await.unwrap();
    let first = utp.outbox(0, 1).await.unwrap();
    assert_eq!(first.iter().map(|(_, l)| l).collect::<Vec<_>>(), [&outbox_message("l2")]);
    let rest = utp.outbox(first[0].0, 9).await.unwrap();
    assert_eq!(rest.iter().map(|(_, l)| l).collect::<Vec<_>>(), [&outbox_message("l1")]);
    assert_eq!(utp.outbox(rest[0].0, 9).await.unwrap(), []);
    utp.remove_from_outbox(&["l2".into()]).await.unwrap();
    assert_eq!(utp.outbox(0, 9).await.unwrap(), rest);
}

pub async fn dead_letters_are_listed_newest_first(store: &dyn Store) {
    let utp = store.utp();
    let dead = |id: &str, project: &str| DeadLetter {
        id: id.into(),
        project: project.into(),
        kind: "report".into(),
        reason: "orphan".into(),
        message: "…".into(),
        subject: "s".into(),
        headers: Map::new(),
        payload: "{".into(),
        truncated: false,
        created_ms: NOW,
        redriven_ms: None,
        last_redrive_result: None,
    };
    for (id, project) in [("dl_1", "p"), ("dl_2", "p"), ("dl_3", "q")] {
        utp.save_dead_letter(dead(id, project)).await.unwrap();
    }
    assert_eq!(
        utp.dead_letters("p", None, 9).await.unwrap(),
        [dead("dl_2", "p"), dead("dl_1", "p")]
    );
    assert_eq!(utp.dead_letters("p", Some("dl_2"), 9).await.unwrap(), [dead("dl_1", "p")]);
    assert_eq!(utp.dead_letter("p", "dl_3").await.unwrap(), None);
    let tried = DeadLetter { last_redrive_result: Some("taken".into()), ..dead("dl_1", "p") };
    utp.save_dead_letter(tried.clone()).await.unwrap();
    assert_eq!(utp.dead_letter("p", "dl_1").await.unwrap(), Some(tried));
}

pub async fn old_cards_turns_and_inbox_items_are_purged(store: &dyn Store) {
    let utp = store.utp();
    utp.put_card(card("c1", "tool.call", "t1", "a")).await.unwrap();
    let change = TurnChange { step_calls: vec![new_step_call("a")], ..TurnChange::default() };
    utp.save_turn(turn("t1", 1), change).await.unwrap();
    utp.deliver_to_inbox(item("ada", "a"), "r1", None).await.unwrap();
    utp.purge_utp(NOW, 100).await.unwrap();
    assert!(utp.card("p", "c1").await.unwrap().is_some(), "not older than the cutoff");
    assert_eq!(utp.inbox("p", "ada", 9).await.unwrap().len(), 1, "unread items are kept");
    for _ in 0..2 {
        utp.purge_utp(NOW + 1, 100).await.unwrap();
    }
    assert_eq!(utp.card("p", "c1").await.unwrap(), None);
    assert_eq!(utp.turn("p", "t1").await.unwrap(), None);
    assert!(utp.step_calls("p", "t1", "s1").await.unwrap().is_empty());
    assert!(
        utp.inbox("p", "ada", 9).await.unwrap().is_empty(),
        "items are deleted with their turn"
    );
}

fn bound(target: &str) -> ToolDefinition {
    ToolDefinition {
        executor: Executor::UTP,
        binding: Some(Binding {
            target_subject: Some(target.into()),
            after_execution: AfterExecution::Terminate,
            options: text(r#"{"args":{"fixed":{"a":1.10}}}"#),
            parameters: Some(text(r#"{"type":"object"}"#)),
        }),
        ..tool("p", "a.b", "")
    }
}

pub async fn every_version_of_a_projects_tool_is_kept(store: &dyn Store) {
    let (old, new) = (bound("x.old"), bound("x.new"));
    assert_ne!(old.version(), new.version());
    let project = Project { id: "p".into(), title: "P".into(), created_ms: NOW };
    let member = AgentEntry {
        project: "p".into(),
        agent_id: "ada".into(),
        worker_target: "w".into(),
        profile: Some(text(r#"{"x":1}"#)),
        allowed_tools: Some(vec!["a.*".into()]),
        updated_ms: NOW,
        definition: None,
    };
    let changes = [
        DirectoryChange::AddProject(project.clone()),
        DirectoryChange::PutTools(vec![old.clone()]),
        DirectoryChange::PutTools(vec![new.clone()]),
        DirectoryChange::PutAgent(AgentEntry { worker_target: "old".into(), ..member.clone() }),
        DirectoryChange::PutAgent(member.clone()),
    ];
    for change in changes {
        super::directory::change(store, change).await;
    }
    let directory = store.directory().await.unwrap();
    assert_eq!(directory.tools, std::slice::from_ref(&new));
    assert_eq!((directory.projects, directory.roster), (vec![project], vec![member]));
    let utp = store.utp();
    for tool in [&old, &new] {
        let found = utp.tool_version("p", "a.b", &tool.version()).await.unwrap();
        assert_eq!(found.as_ref(), Some(tool));
    }
    let (project, name, agent_id) = ("p".to_owned(), "a.b".to_owned(), "ada".to_owned());
    super::directory::change(store, DirectoryChange::DropTool { project: project.clone(), name })
        .await;
    super::directory::change(store, DirectoryChange::DropAgent { project, agent_id }).await;
    let directory = store.directory().await.unwrap();
    assert!(directory.tools.is_empty() && directory.roster.is_empty());
    assert!(utp.tool_version("p", "a.b", &old.version()).await.unwrap().is_some());
}

pub async fn an_old_tool_version_is_purged_after_its_last_possible_call(store: &dyn Store) {
    const HOUR: u64 = 3_600_000;
    let (old, new) = (bound("x.old"), bound("x.new"));
    let apply_change = async |change: DirectoryChange, at_ms: u64| {
        let version = store.directory_version().await.unwrap();
        let entry = AuditEntry {
            at_ms,
            project: "p".into(),
            agent: "ada".into(),
            action: "tool.set".into(),
            subject: "a.b".into(),
            reason: String::new(),
            ..AuditEntry::default()
        };
        assert_eq!(
            store.change_directory(change, version, Some(entry)).await.unwrap(),
            SaveResult::Saved
        );
    };
    let is_stored = async |tool: &ToolDefinition| {
        store.utp().tool_version("p", "a.b", &tool.version()).await.unwrap().is_some()
    };
    let purge_before = async |before_ms: u64| {
        store.purge(before_ms, 100).await.unwrap();
        store.utp().purge_utp(before_ms, 100).await.unwrap();
    };
    apply_change(DirectoryChange::PutTools(vec![old.clone()]), NOW).await;
    let first = call_at(NOW + HOUR);
    put(store, &first).await;
    apply_change(DirectoryChange::PutTools(vec![new.clone()]), NOW + 2 * HOUR).await;
    purge_before(NOW + 9 * HOUR).await;
    assert!(is_stored(&old).await, "an open call uses this version");
    save(store, &ended(&first, Status::Succeeded, NOW + 3 * HOUR)).await;
    purge_before(NOW + 2 * HOUR).await;
    assert!(is_stored(&old).await, "a stored call uses this version");
    purge_before(NOW + 9 * HOUR).await;
    assert!(!is_stored(&old).await && is_stored(&new).await, "no stored call can refer to it");
    // A definition that is put again is current again, however long ago it was replaced.
    apply_change(DirectoryChange::PutTools(vec![old.clone()]), NOW + 3 * HOUR).await;
    apply_change(DirectoryChange::PutTools(vec![new.clone()]), NOW + 4 * HOUR).await;
    apply_change(DirectoryChange::PutTools(vec![old.clone()]), NOW + 5 * HOUR).await;
    purge_before(NOW + 9 * HOUR).await;
    assert!(is_stored(&old).await && !is_stored(&new).await);
    let (project, name) = ("p".to_owned(), "a.b".to_owned());
    apply_change(DirectoryChange::DropTool { project, name }, NOW + 6 * HOUR).await;
    purge_before(NOW + 6 * HOUR).await;
    assert!(is_stored(&old).await, "a recent call may refer to it");
    purge_before(NOW + 9 * HOUR).await;
    assert!(!is_stored(&old).await);
}
