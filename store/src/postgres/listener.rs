//! Listens for reports that tool services write, on a dedicated connection that is reopened when it
//! is lost. A notification sent while no connection listens is lost; the periodic scan of the
//! tables finds its report.

use std::time::Duration;

use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::postgres::session::Connector;

/// Interval at which the listener checks its connection, and delay before it reconnects.
const HEALTH_CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// A task that listens until this value is dropped.
pub(super) struct ReportListener(JoinHandle<()>);

impl ReportListener {
    pub(super) fn spawn(address: Connector, signal: watch::Sender<u64>) -> Self {
        Self(tokio::spawn(listen(address, signal)))
    }
}

impl Drop for ReportListener {
    fn drop(&mut self) {
        self.0.abort();
    }
}

async fn listen(address: Connector, signal: watch::Sender<u64>) {
    loop {
        if let Ok(session) = address.connect(Some(signal.clone())).await
            && session.batch_execute("LISTEN toolcrib_reports").await.is_ok()
        {
            signal.send_modify(|count| *count += 1);
            while !session.is_closed() {
                tokio::time::sleep(HEALTH_CHECK_INTERVAL).await;
            }
        }
        tokio::time::sleep(HEALTH_CHECK_INTERVAL).await;
    }
}
