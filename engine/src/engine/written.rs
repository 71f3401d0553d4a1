//! Tables that tool services share with Toolcrib: commands that services find there, and reports
//! that they write there.

use tokio::sync::watch;

use super::{Engine, Inner, unavailable};
use crate::call::Call;
use crate::fault::{Code, Error, Fault};
use crate::source::Command;
use crate::store::utp::{Judged, WrittenReport};
use crate::tool::Executor;
use crate::utp::card;

impl Engine {
    /// Subscribes to reports that may have been written to the shared tables. Returns `None` for a
    /// store that only this process writes to.
    pub fn written_news(&self) -> Option<watch::Receiver<u64>> {
        Some(self.inner.store.utp().shared()?.news())
    }

    /// Returns unprocessed reports from the shared tables, in order, after this number.
    pub async fn written_reports(
        &self,
        after: u64,
        limit: usize,
    ) -> Result<Vec<WrittenReport>, Error> {
        let Some(shared) = self.inner.store.utp().shared() else { return Ok(Vec::new()) };
        shared.written_reports(after, limit).await.map_err(unavailable)
    }

    /// Records the disposition of a report.
    pub async fn judged(&self, number: u64, judged: Judged) -> Result<(), Error> {
        let Some(shared) = self.inner.store.utp().shared() else { return Ok(()) };
        shared.judged(number, judged).await.map_err(unavailable)
    }
}

impl Inner {
    /// Writes the command's card to the shared tables, where the tool service may read it, before
    /// the command is sent.
    pub(super) async fn shown(&self, call: &Call, command: Command) -> Result<Command, Fault> {
        let shared = self.store.utp().shared().filter(|_| call.target.executor == Executor::Utp);
        let Some(shared) = shared else { return Ok(command) };
        let card = card::of_call(call, Some(&command.binding));
        match shared.show_command(card, &command.route, &command.traceparent).await {
            Ok(()) => Ok(command),
            Err(error) => {
                let message = format!("the command's card is not stored: {error}");
                Err(Fault::new(Code::UpstreamUnavailable, message).not_happened())
            }
        }
    }
}
