//! Versions of agents, trees of runs and boxes in memory.

use std::collections::BTreeMap;

use async_trait::async_trait;

use super::MemoryStore;
use crate::domain::agent::{AgentEntry, AgentVersion, CardBox};
use crate::domain::run::Run;
use crate::ports::store::StoreError;
use crate::ports::store::agents::AgentStore;

#[derive(Default)]
pub(super) struct MemoryAgents {
    /// Versions by project, agent and number.
    versions: BTreeMap<(String, String, u64), AgentVersion>,
    /// Boxes by project and id.
    boxes: BTreeMap<(String, String), CardBox>,
}

impl MemoryAgents {
    /// Deletes boxes that are older than this.
    pub(super) fn purge_boxes(&mut self, before_ms: u64) {
        self.boxes.retain(|_, stored| stored.created_ms >= before_ms);
    }

    /// Records the version of an agent that was put on the roster.
    pub(super) fn record_version(&mut self, entry: &AgentEntry) {
        let Some(definition) = &entry.definition else { return };
        let key = (entry.project.clone(), entry.agent_id.clone(), definition.version);
        let version =
            AgentVersion { definition: (**definition).clone(), created_ms: entry.updated_ms };
        self.versions.entry(key).or_insert(version);
    }
}

#[async_trait]
impl AgentStore for MemoryStore {
    async fn agent_versions(
        &self,
        project: &str,
        agent_id: &str,
        limit: usize,
    ) -> Result<Vec<AgentVersion>, StoreError> {
        let state = self.state.lock();
        let newest_first = state.agents.versions.iter().rev();
        let of_agent = newest_first.filter(|((owner, agent, _), _)| {
            (owner.as_str(), agent.as_str()) == (project, agent_id)
        });
        Ok(of_agent.take(limit).map(|(_, version)| version.clone()).collect())
    }

    async fn tree_runs(
        &self,
        project: &str,
        root_run_id: &str,
        after: Option<String>,
        limit: usize,
    ) -> Result<Vec<Run>, StoreError> {
        let state = self.state.lock();
        let in_tree = |run: &&Run| {
            let root = run.lineage.as_ref().map(|lineage| lineage.root_run_id.as_str());
            run.project == project
                && root == Some(root_run_id)
                && after.as_ref().is_none_or(|after| run.id > *after)
        };
        Ok(state.runs.all().filter(in_tree).take(limit).cloned().collect())
    }

    async fn put_box(&self, new: CardBox) -> Result<(), StoreError> {
        let key = (new.project.clone(), new.box_id.clone());
        self.state.lock().agents.boxes.insert(key, new);
        Ok(())
    }

    async fn count_boxes(&self, project: &str) -> Result<usize, StoreError> {
        let state = self.state.lock();
        Ok(state.agents.boxes.keys().filter(|(owner, _)| owner == project).count())
    }

    async fn card_box(&self, project: &str, box_id: &str) -> Result<Option<CardBox>, StoreError> {
        let key = (project.to_owned(), box_id.to_owned());
        Ok(self.state.lock().agents.boxes.get(&key).cloned())
    }
}
