//! The tool definitions stored for a run.

use toolcrib::domain::call::{Call, Status};
use toolcrib::ports::store::{RunToolDefinitions, Store};

use crate::support::{NOW, call_at, ended, json, put, save};

fn run(project: &str, run_id: &str, tools: &str) -> RunToolDefinitions {
    RunToolDefinitions {
        project: project.into(),
        run_id: run_id.into(),
        tool_definitions: json(tools),
        updated_ms: NOW,
    }
}

async fn read_back(store: &dyn Store, project: &str, run_id: &str) -> Option<RunToolDefinitions> {
    store.run_tool_definitions(project, run_id).await.unwrap()
}

pub async fn reading_tool_definitions_that_were_not_set_returns_none(store: &dyn Store) {
    assert_eq!(read_back(store, "p", "run").await, None);
    put(store, &call_at(NOW)).await;
    assert_eq!(read_back(store, "p", "run").await, None, "calls alone store no tool definitions");
}

pub async fn tool_definitions_are_read_back_unchanged(store: &dyn Store) {
    let definitions = run("p", "run '\u{e9}\u{1F980}\"", r#"{"own": [1.10, "\u00fc"]}"#);
    store.put_run_tool_definitions(definitions.clone()).await.unwrap();
    let read = read_back(store, "p", &definitions.run_id).await.unwrap();
    assert_eq!(read, definitions);
    assert_eq!(
        read.tool_definitions.text(),
        definitions.tool_definitions.text(),
        "the text is unchanged"
    );
}

pub async fn putting_tool_definitions_again_replaces_them(store: &dyn Store) {
    store.put_run_tool_definitions(run("p", "run", "[1]")).await.unwrap();
    let next = RunToolDefinitions { updated_ms: NOW + 7, ..run("p", "run", "[2]") };
    store.put_run_tool_definitions(next.clone()).await.unwrap();
    assert_eq!(read_back(store, "p", "run").await, Some(next));
}

pub async fn tool_definitions_are_separate_per_project_and_run(store: &dyn Store) {
    for (project, run_id, tools) in [("a", "bc", "1"), ("ab", "c", "2"), ("a", "b", "3")] {
        store.put_run_tool_definitions(run(project, run_id, tools)).await.unwrap();
    }
    assert_eq!(read_back(store, "a", "bc").await, Some(run("a", "bc", "1")));
    assert_eq!(read_back(store, "ab", "c").await, Some(run("ab", "c", "2")));
    assert_eq!(read_back(store, "ab", "bc").await, None);
}

pub async fn tool_definitions_are_purged_after_the_last_call_of_their_run(store: &dyn Store) {
    for run_id in ["run", "empty", "young"] {
        let updated_ms = if run_id == "young" { NOW + 100 } else { NOW };
        store
            .put_run_tool_definitions(RunToolDefinitions { updated_ms, ..run("p", run_id, "[]") })
            .await
            .unwrap();
    }
    // The same id in another project is another run.
    store.put_run_tool_definitions(run("q", "run", "[]")).await.unwrap();
    let old = call_at(NOW);
    put(store, &old).await;
    let late = Call { run_id: "run".into(), ..call_at(NOW + 1) };
    put(store, &late).await;
    save(store, &ended(&old, Status::Succeeded, NOW + 5)).await;
    store.purge(NOW + 50, 100).await.unwrap();
    assert_eq!(read_back(store, "p", "empty").await, None);
    assert_eq!(read_back(store, "q", "run").await, None);
    assert!(read_back(store, "p", "young").await.is_some());
    assert!(read_back(store, "p", "run").await.is_some(), "a call of the run is still open");
    save(store, &ended(&late, Status::Canceled, NOW + 6)).await;
    store.purge(NOW + 50, 100).await.unwrap();
    assert_eq!(read_back(store, "p", "run").await, None);
}

pub async fn a_purge_deletes_tool_definitions_up_to_its_limit(store: &dyn Store) {
    for n in 0..5 {
        store.put_run_tool_definitions(run("p", &format!("run_{n}"), "[]")).await.unwrap();
    }
    let (mut remaining, mut more) = (vec![], vec![]);
    for _ in 0..3 {
        more.push(store.purge(NOW + 1, 2).await.unwrap().has_more);
        let mut count = 0;
        for n in 0..5 {
            count += usize::from(read_back(store, "p", &format!("run_{n}")).await.is_some());
        }
        remaining.push(count);
    }
    assert_eq!((remaining, more), (vec![3, 1, 0], vec![true, true, false]));
}
