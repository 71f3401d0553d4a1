//! Usage of rate limits in memory.

use async_trait::async_trait;

use super::MemoryStore;
use crate::domain::tool::Executor;
use crate::ports::store::StoreError;
use crate::ports::store::usage::{AcceptedCall, AcceptedCallScan, UsageStore};

#[async_trait]
impl UsageStore for MemoryStore {
    async fn accepted_calls(
        &self,
        since_ms: u64,
        limit: usize,
    ) -> Result<Vec<AcceptedCall>, StoreError> {
        let state = self.state.lock();
        let mut scan = AcceptedCallScan::new(since_ms, limit, state.clock_steps.clone());
        for (position, call) in state.calls.iter().rev() {
            let accepted = AcceptedCall {
                project: call.project.clone(),
                agent: call.origin.agent.clone(),
                user: call.origin.attributes.user.clone(),
                tool: call.tool_name.clone(),
                accepted_ms: call.created_ms,
            };
            if call.target.executor != Executor::CALLER && !scan.push(*position, accepted) {
                break;
            }
        }
        Ok(scan.into_calls())
    }

    async fn record_clock_step(&self, by_ms: i64) -> Result<(), StoreError> {
        let mut state = self.state.lock();
        let position = state.last_position;
        state.clock_steps.push((position, by_ms));
        Ok(())
    }
}
