//! The part of the store port that holds the versions of agents, the trees of their runs, and boxes
//! of cards. Each method is atomic.

use async_trait::async_trait;

use super::StoreError;
use crate::domain::agent::{AgentVersion, CardBox};
use crate::domain::run::Run;

/// Stores versions of agents, trees of runs and boxes.
#[async_trait]
pub trait AgentStore: Send + Sync {
    /// Returns the versions of an agent, newest first. They stay after the agent is removed.
    async fn agent_versions(
        &self,
        project: &str,
        agent_id: &str,
        limit: usize,
    ) -> Result<Vec<AgentVersion>, StoreError>;

    /// Returns the runs whose lineage names this first run, ordered by id, after this one. The
    /// first run is among them only if it has a lineage itself.
    async fn tree_runs(
        &self,
        project: &str,
        root_run_id: &str,
        after: Option<String>,
        limit: usize,
    ) -> Result<Vec<Run>, StoreError>;

    /// Stores a new box.
    async fn put_box(&self, new: CardBox) -> Result<(), StoreError>;

    /// Returns the number of stored boxes of a project.
    async fn count_boxes(&self, project: &str) -> Result<usize, StoreError>;

    /// Returns one box of a project.
    async fn card_box(&self, project: &str, box_id: &str) -> Result<Option<CardBox>, StoreError>;
}
