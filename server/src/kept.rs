//! Opening the store that the settings name, for a server or for a look at it.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, bail};
use toolcrib::store::Store;
use toolcrib_store::{PostgresStore, SqliteStore, private};

use crate::config::Kept;

/// The store of a server, which is its alone, and what keeps a file its alone.
pub async fn serve(kept: &Kept) -> anyhow::Result<(Arc<dyn Store>, Option<File>)> {
    let cannot = || format!("cannot open {}", kept.shown());
    match kept {
        Kept::File(path) => {
            let lock = lock(path).await?;
            let opened = in_file(path, SqliteStore::open).await?;
            Ok((Arc::new(opened.with_context(cannot)?), Some(lock)))
        }
        Kept::Postgres(url) => {
            let opened = PostgresStore::open(url).await;
            Ok((Arc::new(opened.with_context(cannot)?), None))
        }
    }
}

/// The store for a look or a single change, maybe beside a server.
pub async fn look(kept: &Kept) -> anyhow::Result<Arc<dyn Store>> {
    let cannot = || format!("cannot open {}", kept.shown());
    match kept {
        Kept::File(path) => {
            let opened = in_file(path, SqliteStore::open_briefly).await?;
            Ok(Arc::new(opened.with_context(cannot)?))
        }
        Kept::Postgres(url) => {
            let opened = PostgresStore::open_briefly(url).await;
            Ok(Arc::new(opened.with_context(cannot)?))
        }
    }
}

async fn in_file<T: Send + 'static>(
    path: &Path,
    open: fn(&Path) -> T,
) -> Result<T, tokio::task::JoinError> {
    let path: PathBuf = path.to_owned();
    tokio::task::spawn_blocking(move || open(&path)).await
}

/// Two servers on one database would each believe to be the only writer: the first keeps this
/// file locked for as long as it lives, however it ends. One that has just stopped may be survived
/// by its lock for a moment, in a process that it was starting: so that is waited for.
async fn lock(store: &Path) -> anyhow::Result<File> {
    let path = store.with_extension("lock");
    private::make(&path).with_context(|| format!("cannot make {}", path.display()))?;
    let file = File::create(&path).with_context(|| format!("cannot make {}", path.display()))?;
    for _ in 0..LOCK_LOOKS {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(std::fs::TryLockError::WouldBlock) => tokio::time::sleep(LOCK_LOOK).await,
            Err(std::fs::TryLockError::Error(error)) => {
                return Err(error).with_context(|| format!("cannot lock {}", path.display()));
            }
        }
    }
    bail!(
        "another toolcrib serves {}: stop it, or choose another directory with --data-dir",
        store.display()
    )
}

/// Whether a server has this database now.
pub fn is_served(store: &Path) -> bool {
    let lock = File::open(store.with_extension("lock"));
    lock.is_ok_and(|file| matches!(file.try_lock(), Err(std::fs::TryLockError::WouldBlock)))
}

/// How often, and with which pause, a lock that is held is looked at again.
const LOCK_LOOKS: u32 = 40;
const LOCK_LOOK: std::time::Duration = std::time::Duration::from_millis(25);
