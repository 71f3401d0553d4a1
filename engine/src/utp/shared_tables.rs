//! Tables that tool services share with Toolcrib: commands that services find there, and reports
//! that they write there.

use tokio::sync::watch;

use crate::domain::fault::Error;
use crate::ports::core::from_store_error;
use crate::ports::store::utp::{ReportDisposition, SharedTableReport};
use crate::utp::Utp;

impl Utp {
    /// Subscribes to reports that may have been written to the shared tables. Returns `None` for a
    /// store that only this process writes to.
    pub fn subscribe_written_reports(&self) -> Option<watch::Receiver<u64>> {
        Some(self.core.store.utp().shared_tables()?.watch_reports())
    }

    /// Returns unprocessed reports from the shared tables, in order, after this number.
    pub async fn written_reports(
        &self,
        after: u64,
        limit: usize,
    ) -> Result<Vec<SharedTableReport>, Error> {
        let Some(shared) = self.core.store.utp().shared_tables() else { return Ok(Vec::new()) };
        shared.pending_reports(after, limit).await.map_err(from_store_error)
    }

    /// Records the disposition of a report.
    pub async fn record_report_disposition(
        &self,
        number: u64,
        disposition: ReportDisposition,
    ) -> Result<(), Error> {
        let Some(shared) = self.core.store.utp().shared_tables() else { return Ok(()) };
        shared.record_disposition(number, disposition).await.map_err(from_store_error)
    }
}
