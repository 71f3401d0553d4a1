//! Hears of reports that tool services write: a connection of its own that listens, made again when
//! it is lost. What is said while nobody listened is found by whoever looks now and then.

use std::time::Duration;

use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::link::Address;

/// How often to look whether the connection is still there.
const LOOK: Duration = Duration::from_secs(1);

/// Listens for as long as it is there.
pub(super) struct Ears(JoinHandle<()>);

impl Ears {
    pub(super) fn open(address: Address, news: watch::Sender<u64>) -> Self {
        Self(tokio::spawn(listen(address, news)))
    }
}

impl Drop for Ears {
    fn drop(&mut self) {
        self.0.abort();
    }
}

async fn listen(address: Address, news: watch::Sender<u64>) {
    loop {
        if let Ok(session) = address.connect(Some(news.clone())).await
            && session.run("LISTEN toolcrib_reports").await.is_ok()
        {
            news.send_modify(|count| *count += 1);
            while !session.is_closed() {
                tokio::time::sleep(LOOK).await;
            }
        }
        tokio::time::sleep(LOOK).await;
    }
}
