//! Tables that tool services share with Toolcrib: commands that services find there, and reports
//! that they write there.

use std::sync::Arc;

use tokio::sync::watch;

use crate::domain::fault::Error;
use crate::ports::core::{Core, from_store_error};
use crate::ports::store::utp::{ReportDisposition, SharedTableReport};

/// Reports that tool services write to the shared tables.
pub struct WrittenReports {
    pub(crate) core: Arc<Core>,
}

impl WrittenReports {
    /// Subscribes to reports that may have been written. Returns `None` for a store that only this
    /// process writes to.
    pub fn subscribe(&self) -> Option<watch::Receiver<u64>> {
        Some(self.core.store.utp().shared_tables()?.watch_reports())
    }

    /// Returns unprocessed reports, in order, after this number.
    pub async fn pending(&self, after: u64, limit: usize) -> Result<Vec<SharedTableReport>, Error> {
        let Some(shared) = self.core.store.utp().shared_tables() else { return Ok(Vec::new()) };
        shared.pending_reports(after, limit).await.map_err(from_store_error)
    }

    /// Records the disposition of a report.
    pub async fn record_disposition(
        &self,
        number: u64,
        disposition: ReportDisposition,
    ) -> Result<(), Error> {
        let Some(shared) = self.core.store.utp().shared_tables() else { return Ok(()) };
        shared.record_disposition(number, disposition).await.map_err(from_store_error)
    }
}
