//! The key that authenticates the ids of MCP sessions, in a file of the data directory: with the
//! same key, sessions survive a restart.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;

use sha2::{Digest, Sha256};
use toolcrib_transport::mcp::SessionKey;

const KEY_FILE: &str = "mcp-sessions.key";

/// Returns the key of this data directory, and creates it at the first start. `None` if the file
/// can neither be read nor written: then sessions end with the process.
pub fn load_or_create(data_dir: &Path) -> Option<SessionKey> {
    let path = data_dir.join(KEY_FILE);
    match read_key(&path).map_or_else(|| write_key(&path), Ok) {
        Ok(key) => Some(SessionKey::new(key)),
        Err(error) => {
            let file = path.display();
            tracing::warn!(%error, %file, "the key of MCP sessions cannot be stored: they end with this process");
            None
        }
    }
}

fn read_key(path: &Path) -> Option<[u8; 32]> {
    fs::read(path).ok()?.try_into().ok()
}

/// Writes a new key. The file gets its name when it is complete and on disk.
fn write_key(path: &Path) -> io::Result<[u8; 32]> {
    // A generated secret has more than 256 random bits; its digest is a key of 32 bytes.
    let key: [u8; 32] = Sha256::digest(toolcrib_transport::auth::generate_secret()).into();
    let unfinished = path.with_extension("new");
    toolcrib_store::file_permissions::create_owner_only(&unfinished)?;
    let mut file = OpenOptions::new().write(true).truncate(true).open(&unfinished)?;
    file.write_all(&key)?;
    file.sync_all()?;
    fs::rename(&unfinished, path)?;
    if let Some(directory) = path.parent() {
        File::open(directory)?.sync_all()?;
    }
    Ok(key)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_key_is_created_once_and_is_readable_by_its_owner_alone() {
        let directory = tempfile::tempdir().unwrap();
        let data_dir = directory.path().join("data");
        let key = load_or_create(&data_dir).unwrap();
        assert_eq!(load_or_create(&data_dir).unwrap(), key);
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            let file = fs::metadata(data_dir.join(KEY_FILE)).unwrap();
            assert_eq!(file.permissions().mode() & 0o777, 0o600);
        }
        // An incomplete key is replaced.
        fs::write(data_dir.join(KEY_FILE), "short").unwrap();
        let other = load_or_create(&data_dir).unwrap();
        assert_ne!(other, key);
        assert_eq!(load_or_create(&data_dir).unwrap(), other);
    }
}
