//! The part of the store port for rate limits: their counters are not stored, because the calls
//! themselves are. After a start the engine counts the calls of the last minute.

use async_trait::async_trait;

use super::StoreError;

/// An accepted call, as rate limits count it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AcceptedCall {
    /// Project of the call.
    pub project: String,
    /// Agent of the call.
    pub agent: String,
    /// User that the agent acted for.
    pub user: Option<String>,
    /// Requested tool.
    pub tool: String,
    /// Time of acceptance by the present time of day, in Unix milliseconds.
    pub accepted_ms: u64,
}

/// Reads the usage that rate limits count.
#[async_trait]
pub trait UsageStore: Send + Sync {
    /// Returns the calls that were accepted at or after this time, newest first, at most `limit`.
    /// Calls that their callers execute are not among them. Times before a recorded change of the
    /// time of day are corrected by it.
    async fn accepted_calls(
        &self,
        since_ms: u64,
        limit: usize,
    ) -> Result<Vec<AcceptedCall>, StoreError>;

    /// Records that the time of day was changed by this much after the last stored call.
    async fn record_clock_step(&self, by_ms: i64) -> Result<(), StoreError>;
}

/// Collects accepted calls from rows in descending commit order, and corrects their times by the
/// recorded changes of the time of day.
#[derive(Debug)]
pub struct AcceptedCallScan {
    since_ms: u64,
    limit: usize,
    /// Changes not yet passed: position of the last call before each, and the change.
    steps: Vec<(u64, i64)>,
    shift_ms: i64,
    found: Vec<AcceptedCall>,
}

/// Maximum time between the creation and the commit of a call. Commit order differs from the order
/// of creation by at most this time, so a scan looks that much further back.
const COMMIT_DELAY_MS: u64 = 10_000;

impl AcceptedCallScan {
    /// Begins a scan. `steps` has the position of the last call before each change of the time of
    /// day, and the change, in ascending order.
    pub fn new(since_ms: u64, limit: usize, steps: Vec<(u64, i64)>) -> Self {
        Self { since_ms, limit, steps, shift_ms: 0, found: Vec::new() }
    }

    /// Takes the next call, with the creation time as stored. Returns false once no further call
    /// can be in the result.
    pub fn push(&mut self, position: u64, mut call: AcceptedCall) -> bool {
        while let Some((_, by_ms)) = self.steps.pop_if(|(last, _)| *last >= position) {
            self.shift_ms = self.shift_ms.saturating_add(by_ms);
        }
        call.accepted_ms = call.accepted_ms.saturating_add_signed(self.shift_ms);
        let is_near = call.accepted_ms.saturating_add(COMMIT_DELAY_MS) >= self.since_ms;
        if call.accepted_ms >= self.since_ms {
            self.found.push(call);
        }
        is_near && self.found.len() < self.limit
    }

    /// Returns the calls.
    pub fn into_calls(self) -> Vec<AcceptedCall> {
        self.found
    }
}
