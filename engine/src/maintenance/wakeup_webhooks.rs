//! Wakes agents by webhook. A failed attempt is repeated soon, and then by the turn watchdog for as
//! long as an item waits.

use std::sync::Arc;
use std::time::Duration;

use crate::utp::Utp;
use crate::utp::wakeups::WakeReason;

/// Delays before the second and the third attempt.
const RETRY_DELAYS: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(5)];

pub(crate) async fn run(utp: Arc<Utp>) {
    loop {
        let due = tokio::select! {
            due = utp.wakeups.take_due() => due,
            () = utp.core.shutdown.cancelled() => return,
        };
        for ((project, agent_id), reason) in due {
            let (tasks, utp) = (utp.core.tasks.clone(), utp.clone());
            tasks.spawn(async move { wake(&utp, &project, &agent_id, reason).await });
        }
    }
}

async fn wake(utp: &Utp, project: &str, agent_id: &str, reason: WakeReason) {
    for delay in RETRY_DELAYS.into_iter().map(Some).chain([None]) {
        match utp.wakeups.send(project, agent_id, reason).await {
            Ok(true) => return,
            Ok(false) => {}
            Err(error) => tracing::warn!(%error, agent = agent_id, "inbox not read for a wakeup"),
        }
        let Some(delay) = delay else { return };
        tokio::select! {
            () = tokio::time::sleep(delay) => {}
            () = utp.core.shutdown.cancelled() => return,
        }
    }
}
