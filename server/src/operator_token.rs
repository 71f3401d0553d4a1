//! The operator token: a secret in the data directory whose bearer administers the server. The
//! server writes it at startup; commands on the same machine read it.
//!
//! A server without keys lets every local user call tools. Reading this file is what distinguishes
//! its operator from the others, so the file is readable by its owner alone.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use toolcrib::registry::OperatorCredential;
use toolcrib_transport::auth::{generate_operator_token, is_operator_token};

/// Name of the file in the data directory.
const FILE_NAME: &str = "operator.token";

/// Maximum size in bytes of a file that can hold a token.
const MAX_FILE_BYTES: u64 = 128;

/// Permissions of the group and of others, none of which the file may grant.
const SHARED_PERMISSIONS: u32 = 0o077;

/// Returns the file of a data directory, as an absolute path.
pub fn token_file(data_dir: &Path) -> PathBuf {
    let file = data_dir.join(FILE_NAME);
    std::path::absolute(&file).unwrap_or(file)
}

/// Returns the credential of this server's operator. Keeps the token of an earlier start if its
/// file is private, and otherwise writes a new one. Returns `None` if the directory cannot be
/// written: the server then runs without an operator token.
pub fn prepare_credential(data_dir: &Path) -> Option<OperatorCredential> {
    match load_or_create(data_dir) {
        Ok(token) => {
            let file = token_file(data_dir).display().to_string();
            Some(OperatorCredential::new(&token, file))
        }
        Err(error) => {
            tracing::warn!(error = format!("{error:#}"), "there is no operator token");
            None
        }
    }
}

fn load_or_create(data_dir: &Path) -> anyhow::Result<String> {
    let path = token_file(data_dir);
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(data_dir)
        .with_context(|| format!("cannot make {}", data_dir.display()))?;
    // Servers that share a PostgreSQL database can share a directory: the first to start writes the
    // token, the others keep it.
    let directory = File::open(data_dir)?;
    directory.lock()?;
    match read_token(&path) {
        Ok(token) if token.owner == rustix::process::geteuid().as_raw() => return Ok(token.text),
        Ok(_) => tracing::warn!(file = %path.display(), "of another user: replaced by a new token"),
        Err(error) if is_missing(&error) => {}
        Err(error) => {
            tracing::warn!(error = format!("{error:#}"), "replaced by a new operator token");
        }
    }
    let token = generate_operator_token();
    write_private(&path, &token).with_context(|| format!("cannot write {}", path.display()))?;
    directory.sync_all()?;
    Ok(token)
}

fn is_missing(error: &anyhow::Error) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::NotFound)
}

/// Writes the token. Until it is complete the file has another name, so that no reader and no crash
/// sees a part of it; it is private from its creation.
fn write_private(path: &Path, token: &str) -> io::Result<()> {
    let unfinished = path.with_extension("token.new");
    match std::fs::remove_file(&unfinished) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&unfinished)?;
    writeln!(file, "{token}")?;
    file.sync_all()?;
    std::fs::rename(&unfinished, path)
}

/// A token with the user that owns its file.
struct StoredToken {
    text: String,
    owner: u32,
}

/// Reads a token. Refuses a file that others can read: they may have the token, too.
fn read_token(path: &Path) -> anyhow::Result<StoredToken> {
    if !std::fs::symlink_metadata(path)?.is_file() {
        bail!("{} is not a regular file", path.display());
    }
    let mut file = File::open(path)?;
    let metadata = file.metadata()?;
    if metadata.mode() & SHARED_PERMISSIONS != 0 {
        bail!("{} can be read by others; chmod 600 it", path.display());
    }
    let mut text = String::new();
    Read::by_ref(&mut file).take(MAX_FILE_BYTES).read_to_string(&mut text)?;
    let text = text.trim_end().to_owned();
    if !is_operator_token(&text) {
        bail!("{} does not have an operator token", path.display());
    }
    Ok(StoredToken { text, owner: metadata.uid() })
}

/// Returns the token to send to a server on this machine. The process that listens on the port
/// must belong to the owner of the file: any user can listen on a port that the server has left,
/// and must not receive its token.
pub fn token_for_local_server(path: &Path, port: u16) -> anyhow::Result<String> {
    let token = read_token(path)?;
    let owners: Vec<u32> = ["/proc/net/tcp", "/proc/net/tcp6"]
        .iter()
        .filter_map(|table| std::fs::read_to_string(table).ok())
        .flat_map(|table| listener_owners(&table, port))
        .collect();
    if owners.is_empty() || owners.iter().any(|owner| *owner != token.owner) {
        bail!("the owner of {} is not the user whose program has port {port}", path.display());
    }
    Ok(token.text)
}

/// Returns the users that listen on a port, from the kernel's table of sockets.
fn listener_owners(table: &str, port: u16) -> Vec<u32> {
    const LISTENING: &str = "0A";
    let suffix = format!(":{port:04X}");
    let owner = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let listens = words.get(3) == Some(&LISTENING) && words.get(1)?.ends_with(&suffix);
        words.get(7).filter(|_| listens)?.parse().ok()
    };
    table.lines().skip(1).filter_map(owner).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn mode(path: &Path) -> u32 {
        std::fs::metadata(path).unwrap().permissions().mode() & 0o777
    }

    #[test]
    fn the_token_is_private_and_kept_across_starts() {
        let directory = tempfile::tempdir().unwrap();
        let data_dir = directory.path().join("data");
        let first = load_or_create(&data_dir).unwrap();
        let path = token_file(&data_dir);
        assert_eq!((mode(&path), mode(&data_dir)), (0o600, 0o700));
        assert_eq!(std::fs::read_to_string(&path).unwrap(), format!("{first}\n"));
        assert_eq!(load_or_create(&data_dir).unwrap(), first);
    }

    #[test]
    fn a_file_that_others_can_read_or_that_has_no_token_is_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let path = token_file(directory.path());
        let first = load_or_create(directory.path()).unwrap();
        for shared in [0o640, 0o604, 0o660] {
            std::fs::set_permissions(&path, PermissionsExt::from_mode(shared)).unwrap();
            assert!(read_token(&path).is_err());
            let next = load_or_create(directory.path()).unwrap();
            assert_ne!(next, first);
            assert_eq!(mode(&path), 0o600);
        }
        // A crash during the write left a part under the other name.
        std::fs::write(path.with_extension("token.new"), "tc_op").unwrap();
        for odd in ["", "tc_operator_", "tck_0123", "\u{0}\u{1}"] {
            std::fs::write(&path, odd).unwrap();
            let next = load_or_create(directory.path()).unwrap();
            assert!(is_operator_token(&next), "{next}");
        }
        let elsewhere = directory.path().join("elsewhere");
        std::fs::rename(&path, &elsewhere).unwrap();
        std::os::unix::fs::symlink(&elsewhere, &path).unwrap();
        let linked = std::fs::read_to_string(&elsewhere).unwrap();
        assert_ne!(load_or_create(directory.path()).unwrap(), linked.trim());
        assert!(std::fs::symlink_metadata(&path).unwrap().is_file());
    }

    #[test]
    fn a_token_is_sent_only_to_a_listener_of_its_owner() {
        let directory = tempfile::tempdir().unwrap();
        let token = load_or_create(directory.path()).unwrap();
        let path = token_file(directory.path());
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        assert_eq!(token_for_local_server(&path, port).unwrap(), token);
        drop(listener);
        assert!(token_for_local_server(&path, port).is_err());
        let line = "head\n 0: 0100007F:1F90 00000000:0000 0A 0:0 0:0 0 1001 0 4242 1\n";
        assert_eq!(listener_owners(line, 8080), [1001]);
        assert_eq!(listener_owners(line, 8081), [0; 0]);
        assert_eq!(listener_owners("head\nx\n 0: :1F90\n", 8080), [0; 0]);
    }
}
