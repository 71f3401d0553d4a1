//! Usage limits, kill switches, and the calls that rate limits count after a start.

use std::sync::Arc;

use toolcrib::domain::call::Call;
use toolcrib::domain::caller::CallerAttributes;
use toolcrib::domain::directory::DirectoryChange;
use toolcrib::domain::directory::kill_switches::{KillSwitch, SwitchKind};
use toolcrib::domain::directory::usage_limits::{LimitKind, LimitValues, UsageLimit};
use toolcrib::domain::tool::Executor;
use toolcrib::ports::store::{NewCall, Store};

use crate::support::{NOW, call};

fn limit(kind: LimitKind, name: &str, per_minute: u32) -> UsageLimit {
    let values =
        LimitValues { per_minute: Some(per_minute), max_open: None, max_parallel: Some(2) };
    UsageLimit { project: "p".into(), kind, name: name.into(), values, updated_ms: NOW }
}

fn switch(kind: SwitchKind, name: &str, reason: &str) -> KillSwitch {
    KillSwitch {
        project: "p".into(),
        kind,
        name: name.into(),
        reason: reason.into(),
        set_by: "ops".into(),
        set_ms: NOW,
    }
}

async fn change(store: &dyn Store, change: DirectoryChange) {
    let version = store.directory_version().await.unwrap();
    store.change_directory(change, version, None).await.unwrap();
}

pub async fn limits_and_switches_are_stored_replaced_and_removed(store: &dyn Store) {
    for kind in LimitKind::ALL {
        change(store, DirectoryChange::PutLimit(limit(kind, "a", 1))).await;
    }
    change(store, DirectoryChange::PutLimit(limit(LimitKind::User, "*", 9))).await;
    change(store, DirectoryChange::PutLimit(limit(LimitKind::Agent, "a", u32::MAX))).await;
    let (project, kind, name) = ("p".to_owned(), LimitKind::Tool, "a".to_owned());
    change(store, DirectoryChange::DropLimit { project, kind, name }).await;
    for kind in SwitchKind::ALL {
        change(store, DirectoryChange::PutSwitch(switch(kind, "mail.*", "first"))).await;
    }
    change(store, DirectoryChange::PutSwitch(switch(SwitchKind::Tool, "mail.*", "zwöi 🦀"))).await;
    let (project, kind, name) = ("p".to_owned(), SwitchKind::Agent, "mail.*".to_owned());
    change(store, DirectoryChange::DropSwitch { project, kind, name }).await;
    let directory = store.directory().await.unwrap();
    let mut limits = directory.limits;
    limits.sort_by(|a, b| (a.kind, &a.name).cmp(&(b.kind, &b.name)));
    let expected = [
        limit(LimitKind::Agent, "a", u32::MAX),
        limit(LimitKind::User, "*", 9),
        limit(LimitKind::User, "a", 1),
        limit(LimitKind::Project, "a", 1),
    ];
    assert_eq!(limits, expected);
    let mut switches = directory.switches;
    switches.sort_by_key(|switch| switch.kind);
    let expected = [
        switch(SwitchKind::Tool, "mail.*", "zwöi 🦀"),
        switch(SwitchKind::Source, "mail.*", "first"),
        switch(SwitchKind::Project, "mail.*", "first"),
    ];
    assert_eq!(switches, expected);
}

async fn accept(store: &dyn Store, tool: &str, created_ms: u64, user: Option<&str>) {
    let mut new = Call { tool_name: tool.into(), created_ms, ..call() };
    new.target.tool = tool.into();
    let user = user.map(str::to_owned);
    new.origin.attributes = Arc::new(CallerAttributes { user, ..CallerAttributes::default() });
    store_call(store, new).await;
}

async fn store_call(store: &dyn Store, call: Call) {
    let (call, records) = (Arc::new(call), vec![]);
    let new =
        NewCall { call, records, key: None, undelivered: None, approval: None, group_member: None };
    store.create_call(new).await.unwrap();
}

async fn accepted(store: &dyn Store, since_ms: u64) -> Vec<(String, u64)> {
    let calls = store.usage().accepted_calls(since_ms, 100).await.unwrap();
    calls.into_iter().map(|call| (call.tool, call.accepted_ms)).collect()
}

pub async fn accepted_calls_are_listed_newest_first_since_a_time(store: &dyn Store) {
    accept(store, "old", NOW - 60_001, None).await;
    accept(store, "a", NOW - 60_000, Some("uma")).await;
    let mut reported = call();
    reported.target.executor = Executor::CALLER;
    store_call(store, reported).await;
    accept(store, "b", NOW, None).await;
    let calls = store.usage().accepted_calls(NOW - 60_000, 100).await.unwrap();
    let tools: Vec<_> = calls.iter().map(|call| call.tool.as_str()).collect();
    assert_eq!(tools, ["b", "a"], "neither older calls nor those that their callers execute");
    assert_eq!((calls[1].user.as_deref(), calls[0].user.as_deref()), (Some("uma"), None));
    assert_eq!((calls[1].project.as_str(), calls[1].agent.as_str()), ("p", "ada"));
    assert_eq!(store.usage().accepted_calls(NOW - 60_000, 1).await.unwrap().len(), 1);
}

pub async fn a_recorded_clock_step_corrects_the_calls_before_it(store: &dyn Store) {
    let hour_ms = 3_600_000;
    store.usage().record_clock_step(5).await.unwrap();
    accept(store, "long ago", NOW - 2 * hour_ms, None).await;
    accept(store, "before", NOW - hour_ms - 30_000, None).await;
    // An hour forward, in two parts.
    store.usage().record_clock_step(hour_ms as i64 - 1_000).await.unwrap();
    store.usage().record_clock_step(1_000).await.unwrap();
    accept(store, "after", NOW - 10_000, None).await;
    let expected = [("after".to_owned(), NOW - 10_000), ("before".to_owned(), NOW - 30_000)];
    assert_eq!(accepted(store, NOW - 60_000).await, expected);
    // An hour back: the calls before would otherwise be in the future.
    store.usage().record_clock_step(-(hour_ms as i64)).await.unwrap();
    let now_ms = NOW - hour_ms;
    let expected = [("after".to_owned(), now_ms - 10_000), ("before".to_owned(), now_ms - 30_000)];
    assert_eq!(accepted(store, now_ms - 60_000).await, expected);
}
