//! Tables that tool services share with Toolcrib: commands that services find there, and reports
//! that they write there.

use tokio::sync::watch;

use crate::domain::call::Call;
use crate::domain::fault::{Code, Error, Fault};
use crate::domain::tool::Executor;
use crate::domain::utp::card;
use crate::engine::{Core, Engine, from_store_error};
use crate::ports::source::ToolCommand;
use crate::ports::store::utp::{ReportDisposition, SharedTableReport};

impl Engine {
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
        judged: ReportDisposition,
    ) -> Result<(), Error> {
        let Some(shared) = self.core.store.utp().shared_tables() else { return Ok(()) };
        shared.record_disposition(number, judged).await.map_err(from_store_error)
    }
}

impl Core {
    /// Writes the command's card to the shared tables, where the tool service may read it, before
    /// the command is sent.
    pub(crate) async fn publish_command_card(
        &self,
        call: &Call,
        command: ToolCommand,
    ) -> Result<ToolCommand, Fault> {
        let shared =
            self.store.utp().shared_tables().filter(|_| call.target.executor == Executor::Utp);
        let Some(shared) = shared else { return Ok(command) };
        let card = card::call_card(call, Some(&command.binding));
        match shared.write_command(card, &command.route, &command.traceparent).await {
            Ok(()) => Ok(command),
            Err(error) => {
                let message = format!("the command's card is not stored: {error}");
                Err(Fault::new(Code::UpstreamUnavailable, message).without_side_effect())
            }
        }
    }
}
