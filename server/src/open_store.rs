//! Opens the store that the settings name: exclusively for a server, or shared for an
//! administrative command.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, bail};
use toolcrib::ports::store::Store;
use toolcrib_store::{PostgresStore, SqliteStore, file_permissions};

use crate::config::StoreLocation;

/// Opens the store exclusively for a server. Returns the lock that must be held while a SQLite file
/// is in use; PostgreSQL needs none here. `utp_version` is the version of UTP that tool services on
/// the shared tables speak.
pub async fn open_exclusive(
    location: &StoreLocation,
    utp_version: &str,
) -> anyhow::Result<(Arc<dyn Store>, Option<File>)> {
    let cannot = || format!("cannot open {}", location.redacted());
    match location {
        StoreLocation::Sqlite(path) => {
            let lock = acquire_lock(path).await?;
            let opened = open_blocking(path, SqliteStore::open).await?;
            Ok((Arc::new(opened.with_context(cannot)?), Some(lock)))
        }
        StoreLocation::Postgres(url) => {
            let opened = PostgresStore::open(url).await.with_context(cannot)?;
            Ok((Arc::new(opened.with_utp_version(utp_version)), None))
        }
    }
}

/// Opens the store for a read or a single change, possibly while a server is using it.
pub async fn open_shared(location: &StoreLocation) -> anyhow::Result<Arc<dyn Store>> {
    let cannot = || format!("cannot open {}", location.redacted());
    match location {
        StoreLocation::Sqlite(path) => {
            let opened = open_blocking(path, SqliteStore::open_for_admin).await?;
            Ok(Arc::new(opened.with_context(cannot)?))
        }
        StoreLocation::Postgres(url) => {
            let opened = PostgresStore::open_for_admin(url).await;
            Ok(Arc::new(opened.with_context(cannot)?))
        }
    }
}

async fn open_blocking<T: Send + 'static>(
    path: &Path,
    open: fn(&Path) -> T,
) -> Result<T, tokio::task::JoinError> {
    let path: PathBuf = path.to_owned();
    tokio::task::spawn_blocking(move || open(&path)).await
}

/// Locks the SQLite database for this process.
///
/// Two servers on one database would each assume that it is the only writer. The first holds this
/// lock until its process ends, however it ends. A child process that a stopped server was just
/// starting may hold the lock a moment longer, so this function retries briefly.
async fn acquire_lock(store: &Path) -> anyhow::Result<File> {
    let path = store.with_extension("lock");
    file_permissions::create_owner_only(&path)
        .with_context(|| format!("cannot make {}", path.display()))?;
    let file = File::create(&path).with_context(|| format!("cannot make {}", path.display()))?;
    for _ in 0..LOCK_ATTEMPTS {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(std::fs::TryLockError::WouldBlock) => tokio::time::sleep(LOCK_RETRY_INTERVAL).await,
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

/// Returns true if a server holds the lock of this database.
pub fn is_locked_by_server(store: &Path) -> bool {
    let lock = File::open(store.with_extension("lock"));
    lock.is_ok_and(|file| matches!(file.try_lock(), Err(std::fs::TryLockError::WouldBlock)))
}

/// Number of attempts to acquire the lock, and the pause between them.
const LOCK_ATTEMPTS: u32 = 40;
const LOCK_RETRY_INTERVAL: std::time::Duration = std::time::Duration::from_millis(25);
