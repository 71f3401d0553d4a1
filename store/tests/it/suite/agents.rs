//! Versions of agents, trees of runs, and boxes.

use toolcrib::domain::agent::{AgentDefinition, AgentEntry, AgentProfile, CardBox};
use toolcrib::domain::directory::DirectoryChange;
use toolcrib::domain::run::{JournalKind, Run, RunBudget, RunLineage, RunStatus};
use toolcrib::ports::store::Store;

use super::directory::change;
use super::runs::{entry, run};
use crate::support::NOW;

fn agent(version: u64, instructions: &str) -> AgentEntry {
    let profile = AgentProfile {
        instructions: instructions.into(),
        tools: Some(vec!["calc.*".into()]),
        ..AgentProfile::default()
    };
    let definition =
        AgentDefinition { agent_id: "ada".into(), version, profile, ..AgentDefinition::default() };
    AgentEntry {
        project: "p".into(),
        agent_id: "ada".into(),
        worker_target: String::new(),
        profile: None,
        allowed_tools: Some(vec!["calc.*".into()]),
        updated_ms: NOW + version,
        definition: Some(Box::new(definition)),
    }
}

pub async fn every_version_of_an_agent_is_kept(store: &dyn Store) {
    for (version, text) in [(1, "first"), (2, "second \u{1F980}")] {
        change(store, DirectoryChange::PutAgent(agent(version, text))).await;
    }
    let directory = store.directory().await.unwrap();
    assert_eq!(directory.roster, [agent(2, "second \u{1F980}")]);
    let (project, agent_id) = ("p".to_owned(), "ada".to_owned());
    change(store, DirectoryChange::DropAgent { project, agent_id }).await;
    assert!(store.directory().await.unwrap().roster.is_empty());
    let versions = store.agents().agent_versions("p", "ada", 10).await.unwrap();
    let read: Vec<(u64, u64)> =
        versions.iter().map(|version| (version.definition.version, version.created_ms)).collect();
    assert_eq!(read, [(2, NOW + 2), (1, NOW + 1)]);
    assert_eq!(versions[1].definition, *agent(1, "first").definition.unwrap());
    assert_eq!(store.agents().agent_versions("p", "ada", 1).await.unwrap().len(), 1);
    assert!(store.agents().agent_versions("q", "ada", 1).await.unwrap().is_empty());
}

fn child(project: &str, id: &str, parent: &str, root: &str) -> Run {
    let lineage = RunLineage {
        agent_id: "ada".into(),
        agent_version: 3,
        call_id: "tc_1".parse().unwrap(),
        attempt: 1,
        parent_run_id: Some(parent.into()),
        parent_turn_id: Some("turn_1".into()),
        root_run_id: root.into(),
        depth: 2,
        max_depth: 20,
        ancestors: vec!["bob".into()],
        on_parent_end: Default::default(),
        budget: RunBudget { calls: None, tokens: Some(700) },
        result_fields: Vec::new(),
    };
    Run { lineage: Some(Box::new(lineage)), context_box_id: Some("b".into()), ..run(project, id) }
}

pub async fn the_runs_of_a_tree_are_found_and_purged(store: &dyn Store) {
    let all = [
        run("p", "run_1"),
        child("p", "run_2", "run_1", "run_1"),
        child("p", "run_3", "run_2", "run_1"),
        child("p", "run_4", "run_9", "run_9"),
        child("q", "run_5", "run_1", "run_1"),
    ];
    for run in &all {
        let entries = vec![entry(JournalKind::Created, "x")];
        store.runs().create_run(run.clone(), None, entries, None).await.unwrap();
    }
    let tree = async |after: Option<&str>, limit| {
        let after = after.map(str::to_owned);
        store.agents().tree_runs("p", "run_1", after, limit).await.unwrap()
    };
    assert_eq!(tree(None, 10).await, all[1..3]);
    assert_eq!(tree(None, 1).await, all[1..2]);
    assert_eq!(tree(Some("run_2"), 10).await, all[2..3]);
    let ended =
        Run { status: RunStatus::Canceled, ended_ms: Some(NOW), version: 2, ..all[1].clone() };
    store.runs().save_run(ended, Vec::new()).await.unwrap();
    store.purge(NOW + 1, 10).await.unwrap();
    assert_eq!(tree(None, 10).await, all[2..3]);
}

pub async fn a_box_is_read_back_and_purged(store: &dyn Store) {
    let new = CardBox {
        box_id: "b1".into(),
        project: "p".into(),
        card_ids: vec!["c2".into(), "c1".into()],
        parent_ids: vec!["b0".into()],
        created_by: "ada".into(),
        created_ms: NOW,
    };
    store.agents().put_box(new.clone()).await.unwrap();
    assert_eq!(store.agents().card_box("p", "b1").await.unwrap(), Some(new));
    assert_eq!(store.agents().card_box("q", "b1").await.unwrap(), None);
    let count = async || {
        let agents = store.agents();
        (agents.count_boxes("p").await.unwrap(), agents.count_boxes("q").await.unwrap())
    };
    assert_eq!(count().await, (1, 0));
    store.purge(NOW + 1, 10).await.unwrap();
    assert_eq!(store.agents().card_box("p", "b1").await.unwrap(), None);
    assert_eq!(count().await, (0, 0));
}
