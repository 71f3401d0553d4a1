//! The part of the store port that holds runs and their journals. Each method is atomic. Journal
//! entries and call events share one sequence of numbers.

use async_trait::async_trait;

use super::undelivered::UndeliveredRequest;
use super::{IdempotencyKey, SaveResult, StoreError};
use crate::domain::run::{JournalEntry, JournalRecord, Run, RunEvent, RunStatus};

/// Result of creating a run.
#[derive(Debug, Clone, PartialEq)]
pub enum CreateRunResult {
    /// The run was stored.
    New,
    /// The key was used before for the same request; this is the stored run.
    Replayed(Box<Run>),
    /// The key was used before for another request, which created the run with this id.
    Mismatch(String),
}

/// Selects the runs to list, newest first.
#[derive(Debug, Clone, Default)]
pub struct RunFilter {
    /// Project that the runs belong to.
    pub project: String,
    /// Current status of the runs; `None` selects all statuses.
    pub status: Option<RunStatus>,
    /// Model name from the request; `None` selects all models.
    pub model: Option<String>,
    /// Created at or after this time.
    pub since_ms: Option<u64>,
    /// Older than this run (the last of the previous page).
    pub before: Option<String>,
    /// Maximum number of runs to return.
    pub limit: usize,
}

/// Stores runs.
#[async_trait]
pub trait RunStore: Send + Sync {
    /// Stores a new run with the start of its journal and its undelivered request. Stores nothing
    /// if the idempotency key was used before.
    async fn create_run(
        &self,
        run: Run,
        key: Option<IdempotencyKey>,
        entries: Vec<JournalRecord>,
        undelivered: Option<UndeliveredRequest>,
    ) -> Result<CreateRunResult, StoreError>;

    /// Replaces a run whose stored version is exactly one lower, and appends to its journal.
    async fn save_run(
        &self,
        run: Run,
        entries: Vec<JournalRecord>,
    ) -> Result<SaveResult, StoreError>;

    /// Returns one run of a project.
    async fn run(&self, project: &str, run_id: &str) -> Result<Option<Run>, StoreError>;

    /// Returns a page of runs, newest first.
    async fn list_runs(&self, filter: RunFilter) -> Result<Vec<Run>, StoreError>;

    /// Returns runs of all projects that have not ended, after this one.
    async fn list_open_runs(
        &self,
        after: Option<(String, String)>,
        limit: usize,
    ) -> Result<Vec<Run>, StoreError>;

    /// Returns a run's whole journal, in order.
    async fn journal(&self, project: &str, run_id: &str) -> Result<Vec<JournalEntry>, StoreError>;

    /// Returns the events of a run and of its calls after this number, in order, as one snapshot.
    async fn run_events(
        &self,
        project: &str,
        run_id: &str,
        after: u64,
        limit: usize,
    ) -> Result<Vec<RunEvent>, StoreError>;
}
