//! Facts about the machine on which a report was made, among them the rate at which it can flush a
//! block.
//!
//! The flush rate is the one figure that explains the absolute numbers: a durable call cannot be
//! acknowledged before its flush returns. The probe writes one small file in the given directory,
//! removes it again, and never touches another file.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::Context;
use serde::{Deserialize, Serialize};

const BLOCK: usize = 4096;
/// Number of blocks overwritten in turn: enough that no block is hot, few enough to write at once.
const BLOCKS: u64 = 256;
const PROBE_TIME: Duration = Duration::from_millis(500);

/// The facts about the machine that a reader of a report needs.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Machine {
    /// Number of cores this process may use.
    pub cores: usize,
    /// The kernel's release, or "unknown".
    pub kernel: String,
    /// Flushes per second of a file that grows by a block each time.
    pub fsync_append_per_s: f64,
    /// Flushes per second of a file whose blocks already exist.
    pub fsync_overwrite_per_s: f64,
}

impl Machine {
    /// Gathers the facts; takes about a second, most of it to flush a file in `dir`.
    ///
    /// `dir` should be on the disk that holds the data of the measured servers. This function
    /// blocks: call it while nothing is being measured.
    ///
    /// # Errors
    ///
    /// When the probe file cannot be written or flushed in `dir`.
    pub fn probe(dir: &Path) -> anyhow::Result<Self> {
        let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease")
            .map_or_else(|_| "unknown".to_owned(), |text| text.trim().to_owned());
        let path = dir.join(format!(".flush-probe-{}", std::process::id()));
        let rates = flush_rates(&path);
        // Only the rates matter; a file that cannot be removed does no harm.
        let _ = std::fs::remove_file(&path);
        let (append, overwrite) =
            rates.with_context(|| format!("the flush probe failed in {}", dir.display()))?;
        Ok(Self {
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            kernel,
            fsync_append_per_s: append,
            fsync_overwrite_per_s: overwrite,
        })
    }
}

/// Returns true if a directory is in memory, where a flush costs nothing and measures nothing.
#[must_use]
pub fn is_in_memory(dir: &Path) -> bool {
    let kind = Command::new("stat").args(["-f", "-c", "%T", "--"]).arg(dir).output();
    kind.is_ok_and(|kind| matches!(kind.stdout.trim_ascii(), b"tmpfs" | b"ramfs"))
}

fn flush_rates(path: &Path) -> io::Result<(f64, f64)> {
    let file = OpenOptions::new().write(true).create(true).truncate(true).open(path)?;
    let append = flush_rate(&file, |turn| turn)?;
    file.set_len(0)?;
    file.write_all_at(&vec![1; BLOCK * BLOCKS as usize], 0)?;
    file.sync_all()?;
    let overwrite = flush_rate(&file, |turn| turn % BLOCKS)?;
    Ok((append, overwrite))
}

/// Writes and flushes one block after the other for `PROBE_TIME`, at the positions that
/// `block_index` returns.
fn flush_rate(file: &File, block_index: impl Fn(u64) -> u64) -> io::Result<f64> {
    let block = [2; BLOCK];
    let started = Instant::now();
    let mut turns = 0;
    while started.elapsed() < PROBE_TIME {
        file.write_all_at(&block, block_index(turns) * BLOCK as u64)?;
        // fsync and not fdatasync, because that is what the bundled SQLite calls.
        file.sync_all()?;
        turns += 1;
    }
    Ok(turns as f64 / started.elapsed().as_secs_f64())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_probe_measures_and_removes_its_files() {
        let dir = tempfile::tempdir().unwrap();
        let machine = Machine::probe(dir.path()).unwrap();
        assert!(machine.cores >= 1);
        assert!(machine.fsync_append_per_s > 0.0);
        assert!(machine.fsync_overwrite_per_s > 0.0);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn an_in_memory_filesystem_is_recognized() {
        assert!(is_in_memory(Path::new("/dev/shm")));
        assert!(!is_in_memory(Path::new("/proc")));
        assert!(!is_in_memory(Path::new("/nonexistent")));
    }

    #[test]
    fn a_failed_probe_names_its_directory() {
        let error = Machine::probe(Path::new("/nonexistent")).unwrap_err();
        assert!(format!("{error:#}").contains("/nonexistent"));
    }
}
