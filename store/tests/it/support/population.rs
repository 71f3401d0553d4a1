//! A store with data of every kind, and a way to read all of it back.

use std::fmt::Debug;

use serde_json::json as value;
use toolcrib::domain::access_rules::RuleVerdict;
use toolcrib::domain::call::elicitation::Elicitation;
use toolcrib::domain::call::{Call, Hold, Origin, Status};
use toolcrib::domain::caller::Role;
use toolcrib::domain::delivery::DeliveryAttempt;
use toolcrib::domain::directory::{DirectoryChange, Project, UnlistedTools, Upstream};
use toolcrib::domain::event::EventKind;
use toolcrib::domain::run::JournalKind;
use toolcrib::domain::tool::{Executor, ToolDefinition};
use toolcrib::ports::store::utp::TurnChange;
use toolcrib::ports::store::{CallFilter, DeliveryFilter, RunToolDefinitions, SaveResult, Store};

use super::{
    NOW, append, call, ended, history, json, key, of_call, of_project, of_run, put, put_keyed,
    put_with_status, record, running, save, saving, target,
};
use crate::suite::{directory, runs, utp};

/// A store's answer to one question, and the first schema version that can answer it.
#[derive(Debug, Clone, PartialEq)]
pub struct Reading {
    pub since: i64,
    pub question: &'static str,
    pub answer: String,
}

/// A call in every hold. The arguments of a fallback contain what JSON allows and PostgreSQL does
/// not.
pub fn calls_in_every_hold() -> Vec<Call> {
    let questions = [("name".to_owned(), value!({ "n": 1 }))].into_iter().collect();
    let elicitation = Elicitation { unanswered: questions, ..Elicitation::default() };
    let first = call();
    let origin = Origin { predecessor: Some(first.id.clone()), ..first.origin.clone() };
    let fallback = target("weather.backup", r#"{"nul":"\u0000","after_timeout_ms":1}"#);
    vec![
        Call { fallbacks: vec![fallback], hold: Some(Hold::Queue), ..first },
        Call { hold: Some(Hold::Retry { at_ms: NOW + 5 }), ..call() },
        Call { hold: Some(Hold::Unacknowledged), ..call() },
        Call {
            hold: Some(Hold::Input { remaining_ms: 400 }),
            elicitation: Some(Box::new(elicitation)),
            attempt_timeout_ms: Some(7_000),
            input_timeout_ms: 60_000,
            deadline_ms: NOW + 60_000,
            ..call()
        },
        Call { hold: Some(Hold::Predecessor { timeout_ms: 70 }), origin, ..call() },
    ]
}

/// Puts something into every table.
pub async fn populate(store: &dyn Store) {
    populate_directory(store).await;
    populate_utp(store).await;
    let new = runs::run("p", "run_1");
    let entries = vec![runs::entry(JournalKind::Created, "hello")];
    store.runs().create_run(new, Some(key("ada", "r", "f")), entries, None).await.unwrap();
    let tool_definitions = json(r#"[{"own":1.10}]"#);
    let run = RunToolDefinitions {
        project: "p".into(),
        run_id: "run".into(),
        tool_definitions,
        updated_ms: NOW,
    };
    store.put_run_tool_definitions(run).await.unwrap();
    // The numbers of the events continue after those of the journal.
    populate_calls(store).await;
}

async fn populate_calls(store: &dyn Store) {
    for held_call in calls_in_every_hold() {
        put(store, &held_call).await;
    }
    for status in Status::ALL {
        let call = put_with_status(store, &call(), status).await;
        append(store, &call, record(EventKind::Progress).with("at", "half")).await;
    }
    put_keyed(store, &call(), &key("ada", "k", "f")).await;
    let origin = Origin { background: true, ..call().origin };
    put(store, &Call { origin, ..call() }).await;
    let callback_url = Some("https://hooks.example/done".to_owned());
    let origin = Origin { callback_url, ..call().origin };
    put(store, &Call { origin: origin.clone(), ..call() }).await;
    let with_callback = Call { origin, ..call() };
    put(store, &with_callback).await;
    let started = running(&with_callback);
    let starting = saving(store, &started, vec![record(EventKind::Started)]).await;
    assert_eq!(starting.unwrap(), SaveResult::Saved);
    save(store, &ended(&started, Status::Succeeded, NOW + 9)).await;
    let (mut due, _) = store.delivery("p", &with_callback.id).await.unwrap().unwrap();
    (due.version, due.attempts, due.failures) = (due.version + 1, 1, 1);
    let (at_ms, duration_ms) = (NOW + 10, 7);
    let attempt =
        DeliveryAttempt { number: 1, at_ms, duration_ms, status_code: Some(503), error: None };
    assert_eq!(store.save_delivery(due, Some(attempt)).await.unwrap(), SaveResult::Saved);
}

/// A tool that the server executes.
fn server_tool(name: &str) -> ToolDefinition {
    ToolDefinition { executor: Executor::MCP, ..directory::tool("p", name, "does it") }
}

async fn populate_directory(store: &dyn Store) {
    let upstream = Upstream {
        project: "p".into(),
        name: "u".into(),
        kind: "mcp".into(),
        settings: json("{}"),
        added_ms: NOW,
    };
    let changes = [
        DirectoryChange::Register {
            client: directory::client("p", "laptop"),
            tools: vec![directory::tool("p", "client.open", "does it")],
            unlisted_tools: UnlistedTools::Keep,
        },
        DirectoryChange::AddKey(directory::key("key_1", Role::Agent)),
        directory::change_of_rules(vec![directory::rule("ada", "*", RuleVerdict::Allow)], &[]),
        DirectoryChange::AddProject(Project { id: "p".into(), title: "P".into(), created_ms: NOW }),
        DirectoryChange::PutTools(vec![server_tool("project.sum")]),
        DirectoryChange::PutUpstream(Box::new(upstream)),
        DirectoryChange::SetUpstreamTools {
            project: "p".into(),
            upstream: "u".into(),
            tools: vec![server_tool("u.find")],
        },
    ];
    for change in changes {
        directory::change(store, change).await;
    }
    store.append_audit_entry(directory::entry("p", "key_1")).await.unwrap();
    store.credentials().set_credential("p", "u", Some("granted".into())).await.unwrap();
}

async fn populate_utp(store: &dyn Store) {
    let store = store.utp();
    store.put_card(utp::card("c1", "tool.result", "t1", "call_0")).await.unwrap();
    let change =
        TurnChange { step_calls: vec![utp::new_step_call("call_0")], ..TurnChange::default() };
    assert_eq!(store.save_turn(utp::turn("t1", 1), change).await.unwrap(), SaveResult::Saved);
    store.deliver_to_inbox(utp::item("ada", "call_0"), "c1", None).await.unwrap();
    store.append_to_outbox(vec![utp::outbox_message("l1")]).await.unwrap();
}

/// Reads everything that [`populate`] stored.
pub async fn read_everything(store: &dyn Store) -> Vec<Reading> {
    let mut all = read_calls(store).await;
    let mut reading = |since, question, answer: &dyn Debug| {
        all.push(Reading { since, question, answer: format!("{answer:#?}") });
    };
    let directory = store.directory().await.unwrap();
    let tools = |from: &str| -> Vec<_> {
        directory.tools.iter().filter(|tool| tool.name.starts_with(from)).cloned().collect()
    };
    reading(1, "directory version", &directory.version);
    reading(1, "client tools", &tools("client."));
    reading(1, "clients", &directory.clients);
    reading(1, "offers", &directory.offers);
    reading(1, "keys", &directory.keys);
    reading(1, "rules", &directory.rules);
    reading(1, "audit log", &store.audit_log(None, 100).await.unwrap());
    let filter = DeliveryFilter { project: "p".into(), limit: 100, ..DeliveryFilter::default() };
    let deliveries = store.deliveries(filter).await.unwrap();
    reading(2, "pending deliveries", &store.pending_deliveries(None, 100).await.unwrap());
    for delivery in &deliveries {
        let found = store.delivery("p", &delivery.call_id).await.unwrap().unwrap();
        reading(2, "delivery and attempts", &found);
    }
    reading(2, "deliveries", &deliveries);
    reading(3, "run tools", &store.run_tool_definitions("p", "run").await.unwrap());
    reading(4, "projects", &directory.projects);
    reading(4, "project tools", &tools("project."));
    let utp = store.utp();
    let version = server_tool("project.sum").version();
    reading(4, "version", &utp.tool_version("p", "project.sum", &version).await.unwrap());
    reading(4, "card", &utp.card("p", "c1").await.unwrap());
    reading(4, "turn", &utp.turn("p", "t1").await.unwrap());
    reading(4, "step calls", &utp.step_calls("p", "t1", "s1").await.unwrap());
    reading(4, "inbox", &utp.inbox("p", "ada", 100).await.unwrap());
    reading(4, "outbox", &utp.outbox(0, 100).await.unwrap());
    let runs = store.runs();
    reading(5, "run", &runs.run("p", "run_1").await.unwrap());
    reading(5, "journal", &runs.journal("p", "run_1").await.unwrap());
    reading(6, "upstreams", &directory.upstreams);
    reading(6, "upstream tools", &tools("u."));
    reading(8, "credential", &store.credentials().credential("p", "u").await.unwrap());
    all
}

async fn read_calls(store: &dyn Store) -> Vec<Reading> {
    let mut all = Vec::new();
    let mut reading = |question, answer: &dyn Debug| {
        all.push(Reading { since: 1, question, answer: format!("{answer:#?}") });
    };
    let list = CallFilter { project: "p".into(), limit: 1_000, ..CallFilter::default() };
    let calls = store.calls(list.clone()).await.unwrap();
    assert!(calls.len() > 10, "{}", calls.len());
    for call in &calls {
        assert_eq!(store.call("p", &call.id).await.unwrap().as_ref(), Some(call));
        reading("events of a call", &history(store, of_call(call)).await);
    }
    reading("calls", &calls);
    for status in Status::ALL {
        let filter = CallFilter { status: Some(status), ..list.clone() };
        reading("calls of a status", &store.calls(filter).await.unwrap());
    }
    let filter = CallFilter { background: true, ..list.clone() };
    reading("background calls", &store.calls(filter).await.unwrap());
    let filter = CallFilter { run_id: Some("run".into()), ..list };
    reading("calls of a run", &store.calls(filter).await.unwrap());
    reading("open calls", &store.open_calls(0, 1_000).await.unwrap());
    reading("events of a run", &history(store, of_run("p", "run")).await);
    reading("events of a project", &history(store, of_project("p")).await);
    reading("last event", &store.last_event_number(of_project("p")).await.unwrap());
    let keyed = store.find_by_idempotency_key("p", &key("ada", "k", "f")).await.unwrap();
    reading("call of a key", &keyed);
    all
}

/// Writes to a store that was migrated: every open call ends, and a new one follows.
pub async fn write_on(store: &dyn Store) {
    let last = store.last_event_number(of_project("p")).await.unwrap();
    for open in store.open_calls(0, 1_000).await.unwrap() {
        let next = ended(&open.call, Status::Canceled, NOW + 99);
        let saved = saving(store, &next, vec![record(EventKind::Canceled)]).await.unwrap();
        assert_eq!(saved, SaveResult::Saved);
    }
    assert!(store.open_calls(0, 1).await.unwrap().is_empty());
    put(store, &call()).await;
    assert!(store.last_event_number(of_project("p")).await.unwrap() > last);
    directory::change(store, DirectoryChange::PutTools(vec![server_tool("project.next")])).await;
    assert!(store.purge(u64::MAX, 1_000).await.unwrap().calls > 10);
    assert_eq!(store.open_calls(0, 10).await.unwrap().len(), 1);
}
