//! Runs of the agent loop, and their journals.

use serde_json::json;
use toolcrib::domain::caller::CallerAttributes;
use toolcrib::domain::model_reply::{ModelReply, TokenUsage, ToolCallRequest};
use toolcrib::domain::run::options::RunOptions;
use toolcrib::domain::run::progress::{
    FinalAnswer, PendingCall, RepeatCounter, RunProgress, TerminatingCall,
};
use toolcrib::domain::run::{
    JournalKind, JournalRecord, Run, RunError, RunEvent, RunOwner, RunStatus,
};
use toolcrib::ports::store::runs::{CreateRunResult, RunFilter};
use toolcrib::ports::store::{IdempotencyKey, SaveResult, Store};

use crate::support::{NOW, call_at, put};

pub fn run(project: &str, id: &str) -> Run {
    Run {
        id: id.into(),
        project: project.into(),
        owner: RunOwner {
            agent: "ada".into(),
            role: "agent".into(),
            local: false,
            keyed: true,
            attributes: CallerAttributes { user: Some("u".into()), ..Default::default() },
        },
        model: "m".into(),
        status: RunStatus::Running,
        options: RunOptions { tools: Some(vec!["calc.*".into()]), ..RunOptions::new("m", id) },
        progress: RunProgress::default(),
        answer: None,
        error: None,
        deliverable_card_id: None,
        queued_messages: Vec::new(),
        created_ms: NOW,
        updated_ms: NOW,
        ended_ms: None,
        version: 1,
        lineage: None,
        context_box_id: None,
    }
}

pub fn entry(kind: JournalKind, text: &str) -> JournalRecord {
    let message = json!({ "role": "user", "content": text });
    JournalRecord::new(kind, NOW, json!({ "text": text })).with_messages(vec![message])
}

async fn create(store: &dyn Store, run: &Run) {
    let entries = vec![entry(JournalKind::Created, "hello \u{1F980}")];
    let created = store.runs().create_run(run.clone(), None, entries, None).await.unwrap();
    assert_eq!(created, CreateRunResult::New);
}

async fn read_back(store: &dyn Store, project: &str, id: &str) -> Option<Run> {
    store.runs().run(project, id).await.unwrap()
}

pub async fn a_run_is_read_back_as_it_was_created(store: &dyn Store) {
    let call =
        ToolCallRequest { id: "c".into(), name: "n".into(), arguments: "{\"a\": 1.10".into() };
    let usage = TokenUsage { prompt_tokens: 3, completion_tokens: 4 };
    let reply =
        ModelReply { text: "\u{fc}".into(), calls: vec![call], usage, ..ModelReply::default() };
    let tool_call_id = call_at(NOW).id;
    let (call_id, name) = ("c".into(), "n".into());
    let pending = PendingCall { tool_call_id, call_id, name, suspends: true, is_detached: true };
    let mut full = run("p", "run_1");
    full.progress =
        RunProgress { pending_reply: Some(reply), pending_calls: vec![pending], ..full.progress };
    full.progress
        .repeat_counters
        .insert("f".into(), RepeatCounter { times: 2, content_hash: u64::MAX });
    full.queued_messages = vec![json!({ "role": "user", "content": "more" })];
    create(store, &full).await;
    assert_eq!(read_back(store, "p", "run_1").await, Some(full));
    assert_eq!(read_back(store, "q", "run_1").await, None);
    assert_eq!(read_back(store, "p", "run_2").await, None);
    let journal = store.runs().journal("p", "run_1").await.unwrap();
    assert_eq!(journal.len(), 1);
    assert_eq!(journal[0].record, entry(JournalKind::Created, "hello \u{1F980}"));
    assert!(store.runs().journal("q", "run_1").await.unwrap().is_empty());
}

pub async fn a_run_is_saved_by_version_together_with_its_journal(store: &dyn Store) {
    let first = run("p", "run_1");
    create(store, &first).await;
    let terminated_by = TerminatingCall {
        tool_call_id: "tc_01ARZ3NDEKTSV4RRFFQ69G5FAV".parse().unwrap(),
        name: "desk.close".into(),
        card_id: "card_1".into(),
        result_fields: Some(serde_json::json!({ "n": 42 })),
        error: None,
    };
    let terminated_by = Some(terminated_by);
    let answer = FinalAnswer { text: "42".into(), terminated_by, ..FinalAnswer::default() };
    let next = Run {
        status: RunStatus::Succeeded,
        ended_ms: Some(NOW + 5),
        answer: Some(answer),
        deliverable_card_id: Some("card_1".into()),
        version: 2,
        ..first.clone()
    };
    let entries = vec![entry(JournalKind::Replied, "a"), entry(JournalKind::Finished, "b")];
    let run_store = store.runs();
    assert_eq!(run_store.save_run(next.clone(), entries.clone()).await.unwrap(), SaveResult::Saved);
    assert_eq!(run_store.save_run(next.clone(), entries).await.unwrap(), SaveResult::Conflict);
    let unknown = Run { version: 2, ..run("p", "run_9") };
    assert_eq!(run_store.save_run(unknown, Vec::new()).await.unwrap(), SaveResult::Conflict);
    assert_eq!(read_back(store, "p", "run_1").await, Some(next.clone()));
    let journal = run_store.journal("p", "run_1").await.unwrap();
    let kinds: Vec<JournalKind> = journal.iter().map(|journaled| journaled.record.kind).collect();
    assert_eq!(kinds, [JournalKind::Created, JournalKind::Replied, JournalKind::Finished]);
    // An ended run can continue, and fail.
    let error = RunError {
        code: "UPSTREAM_UNAVAILABLE".into(),
        message: "away".into(),
        detail: None,
        retryable: true,
    };
    let failed = Run { status: RunStatus::Failed, error: Some(error), version: 3, ..next };
    assert_eq!(run_store.save_run(failed.clone(), Vec::new()).await.unwrap(), SaveResult::Saved);
    assert_eq!(read_back(store, "p", "run_1").await, Some(failed));
}

pub async fn an_idempotency_key_makes_one_run(store: &dyn Store) {
    let key = |agent: &str, fingerprint: &str| {
        let (agent, key, fingerprint) = (agent.into(), "k".into(), fingerprint.into());
        Some(IdempotencyKey { agent, key, fingerprint })
    };
    let run_store = store.runs();
    let create_with_key = |id, key| run_store.create_run(run("p", id), key, Vec::new(), None);
    assert_eq!(create_with_key("run_1", key("ada", "f")).await.unwrap(), CreateRunResult::New);
    let again = create_with_key("run_2", key("ada", "f")).await.unwrap();
    assert_eq!(again, CreateRunResult::Replayed(Box::new(run("p", "run_1"))));
    let other = create_with_key("run_3", key("ada", "g")).await.unwrap();
    assert_eq!(other, CreateRunResult::Mismatch("run_1".into()));
    assert_eq!(create_with_key("run_4", key("bob", "f")).await.unwrap(), CreateRunResult::New);
    let elsewhere = run_store.create_run(run("q", "run_5"), key("ada", "f"), Vec::new(), None);
    assert_eq!(elsewhere.await.unwrap(), CreateRunResult::New);
    assert_eq!(read_back(store, "p", "run_2").await, None);
}

pub async fn runs_are_listed_newest_first_by_project_status_model_and_time(store: &dyn Store) {
    for n in 0..5_u64 {
        let has_ended = n % 2 == 1;
        let listed = Run {
            status: if has_ended { RunStatus::Canceled } else { RunStatus::Waiting },
            ended_ms: has_ended.then_some(NOW),
            model: if n < 3 { "small".into() } else { "large".into() },
            created_ms: NOW + n,
            ..run("p", &format!("run_{n}"))
        };
        create(store, &listed).await;
    }
    create(store, &run("q", "run_7")).await;
    let ids = async |filter: RunFilter| -> Vec<String> {
        let filter = RunFilter { project: "p".into(), limit: filter.limit.max(2), ..filter };
        let listed = store.runs().list_runs(filter).await.unwrap();
        listed.into_iter().map(|run| run.id).collect()
    };
    let all = || RunFilter { limit: 100, ..RunFilter::default() };
    assert_eq!(ids(all()).await, ["run_4", "run_3", "run_2", "run_1", "run_0"]);
    assert_eq!(ids(RunFilter::default()).await, ["run_4", "run_3"]);
    let before = Some("run_3".into());
    assert_eq!(ids(RunFilter { before, ..RunFilter::default() }).await, ["run_2", "run_1"]);
    let status = Some(RunStatus::Canceled);
    assert_eq!(ids(RunFilter { status, ..all() }).await, ["run_3", "run_1"]);
    let model = Some("large".into());
    assert_eq!(ids(RunFilter { model, ..all() }).await, ["run_4", "run_3"]);
    let since_ms = Some(NOW + 4);
    assert_eq!(ids(RunFilter { since_ms, ..all() }).await, ["run_4"]);
    // Callers name the runs of their conversations.
    create(store, &run("p", "session-1")).await;
    create(store, &run("p", "Ärger")).await;
    assert_eq!(ids(RunFilter::default()).await, ["Ärger", "session-1"]);
}

pub async fn open_runs_of_all_projects_are_read_in_pages(store: &dyn Store) {
    for (project, id) in [("a", "run_2"), ("b", "run_1"), ("a", "run_1"), ("c", "run_1")] {
        create(store, &run(project, id)).await;
    }
    let ended_run = Run { status: RunStatus::Failed, ended_ms: Some(NOW), ..run("b", "run_0") };
    create(store, &ended_run).await;
    let (mut after, mut all) = (None, Vec::new());
    loop {
        let page = store.runs().list_open_runs(after, 3).await.unwrap();
        let Some(last) = page.last() else { break };
        after = Some((last.project.clone(), last.id.clone()));
        all.extend(page.iter().map(|run| format!("{}/{}", run.project, run.id)));
    }
    assert_eq!(all, ["a/run_1", "a/run_2", "b/run_1", "c/run_1"]);
}

pub async fn journal_entries_and_call_events_share_one_numbering(store: &dyn Store) {
    let first = run("p", "run");
    create(store, &first).await;
    let call = call_at(NOW);
    put(store, &call).await;
    let next = Run { version: 2, ..first };
    let entries = vec![entry(JournalKind::ToolResults, "x")];
    store.runs().save_run(next, entries).await.unwrap();
    // Neither another run nor another project is included.
    create(store, &run("p", "run_2")).await;
    create(store, &run("q", "run")).await;
    let all = store.runs().run_events("p", "run", 0, 100).await.unwrap();
    let numbers: Vec<u64> = all.iter().map(RunEvent::number).collect();
    assert!(numbers.windows(2).all(|pair| pair[0] < pair[1]), "{numbers:?}");
    let entries: Vec<usize> = (0..all.len())
        .filter(|n| matches!(&all[*n], RunEvent::Run(journaled) if journaled.run_id == "run"))
        .collect();
    assert_eq!(entries, [0, 2], "the call's event is between them");
    let (mut after, mut paged) = (0, Vec::new());
    loop {
        let page = store.runs().run_events("p", "run", after, 1).await.unwrap();
        let Some(one) = page.first() else { break };
        after = one.number();
        paged.push(one.clone());
    }
    assert_eq!(paged, all);
}

pub async fn old_runs_are_purged_with_their_journals(store: &dyn Store) {
    let ended_run = |id: &str, ended_ms| Run {
        status: RunStatus::Succeeded,
        ended_ms: Some(ended_ms),
        ..run("p", id)
    };
    create(store, &ended_run("run_1", NOW)).await;
    create(store, &ended_run("run_2", NOW + 1)).await;
    create(store, &ended_run("run_3", NOW + 100)).await;
    create(store, &run("p", "run_4")).await;
    assert!(store.purge(NOW + 50, 1).await.unwrap().has_more);
    assert_eq!(read_back(store, "p", "run_1").await, None);
    assert!(read_back(store, "p", "run_2").await.is_some(), "at most one run per pass");
    assert!(!store.purge(NOW + 50, 10).await.unwrap().has_more);
    assert_eq!(read_back(store, "p", "run_2").await, None);
    assert!(store.runs().journal("p", "run_2").await.unwrap().is_empty());
    assert!(read_back(store, "p", "run_3").await.is_some());
    assert!(read_back(store, "p", "run_4").await.is_some(), "an open run is kept");
    let before = store.runs().journal("p", "run_4").await.unwrap()[0].number;
    create(store, &run("p", "run_5")).await;
    let after = store.runs().journal("p", "run_5").await.unwrap()[0].number;
    assert!(after > before, "numbers are not reused");
}
