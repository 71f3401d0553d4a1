//! A TCP proxy that breaks its first connection on demand, after the request was sent.

use std::sync::Arc;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;

pub struct CuttingProxy {
    pub address: String,
    cut: Arc<Notify>,
}

impl CuttingProxy {
    /// Starts a proxy in front of a server.
    pub async fn start(target: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let (cut, target) = (Arc::new(Notify::new()), target.to_owned());
        let signal = cut.clone();
        tokio::spawn(async move {
            let mut is_first = true;
            while let Ok((client, _)) = listener.accept().await {
                let signal = std::mem::take(&mut is_first).then(|| signal.clone());
                tokio::spawn(forward(client, target.clone(), signal));
            }
        });
        Self { address, cut }
    }

    /// Breaks the first connection on both sides.
    pub fn cut_first_connection(&self) {
        self.cut.notify_one();
    }
}

async fn forward(mut client: TcpStream, target: String, cut: Option<Arc<Notify>>) {
    let mut server = TcpStream::connect(target).await.unwrap();
    let copying = tokio::io::copy_bidirectional(&mut client, &mut server);
    match cut {
        None => drop(copying.await),
        Some(cut) => {
            tokio::select! {
                _ = copying => {}
                () = cut.notified() => {}
            }
        }
    }
}
