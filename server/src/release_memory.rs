//! Releases the memory that only the startup needed.
//!
//! Startup runs once through most of the program: relocations, settings, migrations, routes,
//! descriptions. Every page of the program that it touches, and the pages around it, then count as
//! resident memory of this process for as long as it runs. After startup the process releases those
//! pages; the few that calls need return from the page cache when they are touched.
//!
//! This module stays although it needs unsafe code: releasing the code took an idle server of a
//! release build from 43.7 to 33.5 MiB, and startup leaves another 4.2 MiB of read-only data.

#[cfg(target_os = "linux")]
mod linux {
    use std::path::Path;

    use rustix::mm::{Advice, madvise};

    /// Returns the mappings of this program that the process only reads: start address and length.
    /// A mapping with anonymous pages is omitted: the dynamic linker wrote relocated addresses into
    /// it, which the file does not have.
    pub(super) fn unchanged_ranges(smaps: &str, program: &Path) -> Vec<(usize, usize)> {
        let mut found = Vec::new();
        let mut range = None;
        for line in smaps.lines() {
            if let Some(size) = line.strip_prefix("Anonymous:") {
                let is_unchanged = size.trim() == "0 kB";
                found.extend(range.take().filter(|_| is_unchanged));
            } else if let Some(mapping) = parse_mapping(line) {
                let (mapped, rights, path) = mapping;
                let is_read_only = matches!(rights, "r-xp" | "r--p") && path == program;
                range = is_read_only.then_some(mapped);
            }
        }
        found
    }

    /// Parses the first line of a mapping: its start address and length, rights and file.
    fn parse_mapping(line: &str) -> Option<((usize, usize), &str, &Path)> {
        let mut words = line.split_ascii_whitespace();
        let (begin, end) = words.next()?.split_once('-')?;
        let begin = usize::from_str_radix(begin, 16).ok()?;
        let end = usize::from_str_radix(end, 16).ok()?;
        let rights = words.next()?;
        let path = words.nth(3).unwrap_or_default();
        Some(((begin, end.checked_sub(begin)?), rights, Path::new(path)))
    }

    pub(super) fn release_program_pages() -> std::io::Result<()> {
        let program = std::fs::read_link("/proc/self/exe")?;
        let smaps = std::fs::read_to_string("/proc/self/smaps")?;
        for (begin, length) in unchanged_ranges(&smaps, &program) {
            let begin = std::ptr::with_exposed_provenance_mut(begin);
            // SAFETY: these pages are private, read-only, file-backed and unchanged: a released
            // page is read from the file again when it is next touched.
            #[allow(unsafe_code, reason = "there is no safe way to advise the system on memory")]
            unsafe {
                madvise(begin, length, Advice::LinuxDontNeed)?;
            }
        }
        Ok(())
    }
}

/// Releases the pages of the program that startup touched.
pub(crate) fn release_startup_pages() {
    #[cfg(target_os = "linux")]
    if let Err(error) = linux::release_program_pages() {
        tracing::debug!(%error, "cannot release the program pages that startup used");
    }
}

#[cfg(test)]
#[cfg(target_os = "linux")]
mod tests {
    use std::path::Path;

    /// Returns the resident file-backed memory of this process in KiB.
    fn resident_kib() -> u64 {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find(|line| line.starts_with("RssFile:")).unwrap();
        line.split_ascii_whitespace().nth(1).unwrap().parse().unwrap()
    }

    #[test]
    fn only_unchanged_ranges_of_the_program_are_found() {
        let smaps = "\
55c000-55d000 r--p 00000000 fe:00 12 /opt/toolcrib
Rss:                   4 kB
Anonymous:             0 kB
55d000-56d000 rw-p 00000000 fe:00 12 /opt/toolcrib
Anonymous:             0 kB
56d000-57e000 r-xp 00010000 fe:00 12 /opt/toolcrib
Anonymous:             0 kB
57e000-58e000 r--p 00021000 fe:00 12 /opt/toolcrib
Anonymous:             8 kB
7f0000-7f1000 r-xp 00000000 fe:00 99 /lib/libc.so.6
Anonymous:             0 kB
7f2000-7f3000 r-xp 00000000 00:00 0 [vdso]
Anonymous:             0 kB
7f3000-7f4000 rw-p 00000000 00:00 0
Anonymous:             4 kB
";
        let found = super::linux::unchanged_ranges(smaps, Path::new("/opt/toolcrib"));
        assert_eq!(found, [(0x55c000, 0x1000), (0x56d000, 0x11000)]);
    }

    #[test]
    fn released_pages_are_loaded_again_when_needed() {
        let before = resident_kib();
        super::linux::release_program_pages().unwrap();
        let after = resident_kib();
        assert!(after < before, "{after} of {before} KiB");
    }
}
