//! The part of the store port that keeps runs: conversations with models, and their journals.
//! Each method is atomic. The entries of journals and the events of calls are numbered together.

use async_trait::async_trait;

use super::{IdempotencyKey, Saved, StoreError};
use crate::run::{Entry, Happened, Noted, Run, RunStatus};

/// What creating a run came to.
#[derive(Debug, Clone, PartialEq)]
pub enum RunCreated {
    New,
    /// The key was used before, for the same request: this is the run.
    Replayed(Box<Run>),
    /// The key was used before, for another request, which made this run.
    Mismatch(String),
}

/// Which runs to list: newest first.
#[derive(Debug, Clone, Default)]
pub struct RunFilter {
    pub project: String,
    pub status: Option<RunStatus>,
    pub model: Option<String>,
    /// Created at or after this.
    pub since_ms: Option<u64>,
    /// Older than this run (the last of the page before).
    pub before: Option<String>,
    pub limit: usize,
}

/// Where runs are kept.
#[async_trait]
pub trait LoopStore: Send + Sync {
    /// Stores a new run with the beginning of its journal, unless its key was used before.
    async fn create_loop(
        &self,
        run: Run,
        key: Option<IdempotencyKey>,
        entries: Vec<Entry>,
    ) -> Result<RunCreated, StoreError>;

    /// Replaces a run whose stored version is exactly one below, and appends to its journal.
    async fn save_loop(&self, run: Run, entries: Vec<Entry>) -> Result<Saved, StoreError>;

    /// One run of a project.
    async fn loop_run(&self, project: &str, run_id: &str) -> Result<Option<Run>, StoreError>;

    /// A page of runs, newest first.
    async fn loop_runs(&self, filter: RunFilter) -> Result<Vec<Run>, StoreError>;

    /// Runs that are not over, of all projects, after this one.
    async fn open_loops(
        &self,
        after: Option<(String, String)>,
        limit: usize,
    ) -> Result<Vec<Run>, StoreError>;

    /// A run's whole journal, in order.
    async fn journal(&self, project: &str, run_id: &str) -> Result<Vec<Noted>, StoreError>;

    /// What happened in a run and to its calls after this number, in order, as of one moment.
    async fn happened(
        &self,
        project: &str,
        run_id: &str,
        after: u64,
        limit: usize,
    ) -> Result<Vec<Happened>, StoreError>;
}
