//! Resident memory of a process, now and at its peak.

use anyhow::Context;

/// Returns the resident memory of a process in bytes (`VmRSS` of `/proc/<pid>/status`).
///
/// # Errors
///
/// When the process does not exist or is not visible to this user, or the system has no such
/// `/proc`.
pub fn resident_bytes(pid: u32) -> anyhow::Result<u64> {
    read_status_field(pid, "VmRSS:")
}

/// Returns the peak resident memory of a process in bytes (`VmHWM`).
///
/// # Errors
///
/// Like [`resident_bytes`].
pub fn peak_resident_bytes(pid: u32) -> anyhow::Result<u64> {
    read_status_field(pid, "VmHWM:")
}

fn read_status_field(pid: u32, name: &str) -> anyhow::Result<u64> {
    let path = format!("/proc/{pid}/status");
    let status = std::fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
    parse_status_line(&status, name).with_context(|| format!("no {name} in {path}"))
}

/// Parses `VmRSS:  12345 kB`, where the kernel's "kB" is 1024 bytes.
fn parse_status_line(status: &str, name: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix(name))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn status_lines_are_parsed() {
        let status = "Name:\tx\nVmHWM:\t  900 kB\nVmRSS:\t   512 kB\nThreads:\t1\n";
        assert_eq!(parse_status_line(status, "VmRSS:"), Some(512 * 1024));
        assert_eq!(parse_status_line(status, "VmHWM:"), Some(900 * 1024));
        assert_eq!(parse_status_line("Name:\tkthread\n", "VmRSS:"), None);
        assert_eq!(parse_status_line("VmRSS:\t many kB\n", "VmRSS:"), None);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn the_memory_of_a_missing_process_is_an_error() {
        assert!(resident_bytes(std::process::id()).unwrap() > 100_000);
        assert!(resident_bytes(u32::MAX).is_err());
    }
}
