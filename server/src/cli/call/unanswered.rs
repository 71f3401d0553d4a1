//! Requests of this user that got no answer: a repeated command finds the idempotency key of the
//! earlier one, so that both are one call.
//!
//! A record is an empty file whose name holds the digest of the request and its key. It is written
//! when an answer is missing and removed when one arrives. The command that waits for the answer
//! holds a lock on the file, which the operating system releases when the command ends, however it
//! ends: a command that runs at the same time is a call of its own.

use std::ffi::OsString;
use std::fs::{File, Metadata, OpenOptions};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use serde_json::Value;
use sha2::{Digest, Sha256};

/// Maximum time since the last attempt of a request that a repeated command joins, as
/// `policy.rejoin_window_ms` has it.
const MAX_AGE: Duration = Duration::from_secs(600);

/// A request without an answer so far.
pub struct UnansweredRequest {
    pub idempotency_key: String,
    /// `None` if this user has no directory for records.
    file: Option<PathBuf>,
    /// Open as long as this command waits for the answer.
    lock: Option<File>,
}

impl UnansweredRequest {
    /// Returns the request of an earlier command that got no answer, or a new one. `scope` is the
    /// scope of the idempotency key: the same request in another one is another call.
    pub fn find_or_new(directory: Option<&Path>, scope: &str, path: &[&str], body: &Value) -> Self {
        let mut digest = Sha256::new();
        digest.update(serde_json::json!([scope, path, body]).to_string());
        let digest: String =
            digest.finalize()[..16].iter().map(|byte| format!("{byte:02x}")).collect();
        directory.and_then(|directory| Self::find(directory, &digest)).unwrap_or_else(|| {
            let idempotency_key = format!("cli-{}", ulid::Ulid::generate());
            let file = directory.map(|path| path.join(format!("{digest}.{idempotency_key}")));
            Self { idempotency_key, file, lock: None }
        })
    }

    fn find(directory: &Path, digest: &str) -> Option<Self> {
        for entry in std::fs::read_dir(directory).ok()?.flatten() {
            let name = entry.file_name();
            let Some((of, key)) = name.to_str().and_then(|name| name.split_once('.')) else {
                continue;
            };
            let (file, key) = (entry.path(), key.to_owned());
            // The record of another request is locked only to remove it: its own command may look
            // for it at the same time.
            if of != digest && !is_old(&entry.metadata()) {
                continue;
            }
            let Some(lock) = File::open(&file).ok().filter(|lock| lock.try_lock().is_ok()) else {
                continue;
            };
            if is_old(&lock.metadata()) {
                let _ = std::fs::remove_file(&file);
            } else if of == digest && file.exists() {
                // It exists: its owner removes a file before it releases the lock.
                return Some(Self { idempotency_key: key, file: Some(file), lock: Some(lock) });
            }
        }
        None
    }

    /// Records that the request may have arrived, now. Returns false if that is not possible, so
    /// that no later command can find it.
    pub fn record(&mut self) -> bool {
        if let Some(lock) = &self.lock {
            return lock.set_modified(SystemTime::now()).is_ok();
        }
        let Some(path) = &self.file else { return false };
        if path.parent().is_none_or(|directory| std::fs::create_dir_all(directory).is_err()) {
            return false;
        }
        let file = OpenOptions::new().write(true).create_new(true).open(path);
        self.lock = file.ok().filter(|file| file.try_lock().is_ok());
        self.lock.is_some()
    }

    /// Removes the record: the call has its ticket. A refusal is no such answer, because the
    /// earlier request may have been accepted nevertheless.
    pub fn remove(self) {
        if let (Some(file), Some(_)) = (&self.file, &self.lock) {
            let _ = std::fs::remove_file(file);
        }
    }
}

/// Returns true for a file whose request was sent too long ago to be joined.
fn is_old(metadata: &std::io::Result<Metadata>) -> bool {
    let modified = metadata.as_ref().ok().and_then(|metadata| metadata.modified().ok());
    modified.and_then(|time| time.elapsed().ok()).is_some_and(|age| age > MAX_AGE)
}

/// Returns the user's directory of these records. `lookup_env` returns an environment variable.
pub fn state_directory(lookup_env: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let absolute_path =
        |name: &str| lookup_env(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let default_state_home = || Some(absolute_path("HOME")?.join(".local/state"));
    let state_home = absolute_path("XDG_STATE_HOME").or_else(default_state_home)?;
    Some(state_home.join("toolcrib/unanswered"))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::cli::client::ApiClient;
    use serde_json::json;

    fn request(directory: &Path, n: u32) -> UnansweredRequest {
        UnansweredRequest::find_or_new(Some(directory), "s", &["v1"], &json!({ "n": n }))
    }

    #[test]
    fn a_repeated_command_gets_the_key_of_the_one_without_an_answer() {
        let home = tempfile::tempdir().unwrap();
        let directory = home.path().join("unanswered");
        let mut first = request(&directory, 1);
        let key = first.idempotency_key.clone();
        assert!(first.record() && first.record());
        assert_ne!(request(&directory, 1).idempotency_key, key, "the first command still waits");
        drop(first);
        assert_ne!(request(&directory, 2).idempotency_key, key, "another request");
        let repeated = request(&directory, 1);
        assert_eq!(repeated.idempotency_key, key);
        repeated.remove();
        assert_ne!(request(&directory, 1).idempotency_key, key, "it was answered");
        assert_eq!(std::fs::read_dir(&directory).unwrap().count(), 0);
    }

    #[test]
    fn a_command_joins_no_request_of_another_project_or_key() {
        let home = tempfile::tempdir().unwrap();
        let request = |key: Option<&str>, project: Option<&str>| {
            let client = ApiClient::new("http://127.0.0.1:1", key, project).unwrap();
            UnansweredRequest::find_or_new(Some(home.path()), client.scope(), &["v1"], &json!({}))
        };
        let mut first = request(Some("k"), Some("a"));
        assert!(first.record());
        let idempotency_key = first.idempotency_key.clone();
        drop(first);
        for (key, project) in [(Some("k"), Some("b")), (Some("x"), Some("a")), (None, Some("a"))] {
            let other = request(key, project);
            assert_ne!(other.idempotency_key, idempotency_key, "{key:?} {project:?}");
            other.remove();
        }
        assert_eq!(request(Some("k"), Some("a")).idempotency_key, idempotency_key);
    }

    #[test]
    fn old_requests_are_forgotten() {
        let home = tempfile::tempdir().unwrap();
        let mut first = request(home.path(), 1);
        assert!(first.record());
        let key = first.idempotency_key.clone();
        let age = |request: &UnansweredRequest| {
            let long_ago = SystemTime::now() - MAX_AGE - Duration::from_secs(1);
            request.lock.as_ref().unwrap().set_modified(long_ago).unwrap();
        };
        age(&first);
        // Another command does not remove the record of a command that still waits.
        request(home.path(), 2);
        assert!(first.record(), "a further attempt");
        drop(first);
        let again = request(home.path(), 1);
        assert_eq!(again.idempotency_key, key, "the last attempt counts");
        age(&again);
        drop(again);
        assert_ne!(request(home.path(), 1).idempotency_key, key);
        assert_eq!(std::fs::read_dir(home.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_directory_that_cannot_be_written_records_nothing() {
        let file = tempfile::NamedTempFile::new().unwrap();
        assert!(!request(&file.path().join("x"), 1).record());
        assert!(!UnansweredRequest::find_or_new(None, "s", &[], &json!({})).record());
    }

    #[test]
    fn the_directory_follows_the_environment() {
        let of = |variables: &'static [(&str, &str)]| {
            state_directory(|name| {
                variables.iter().find(|(key, _)| *key == name).map(|(_, value)| value.into())
            })
        };
        assert_eq!(of(&[]), None);
        assert_eq!(of(&[("HOME", "/h")]), Some("/h/.local/state/toolcrib/unanswered".into()));
        let both = of(&[("HOME", "/h"), ("XDG_STATE_HOME", "/s")]);
        assert_eq!(both, Some("/s/toolcrib/unanswered".into()));
    }
}
