//! Facts about a directory: filesystem, free space and write access.

use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Returns the directory itself or its nearest existing ancestor.
pub fn nearest_existing(dir: &Path) -> PathBuf {
    let absolute = std::path::absolute(dir).unwrap_or_else(|_| dir.to_owned());
    absolute.ancestors().find(|path| path.exists()).unwrap_or(Path::new("/")).to_owned()
}

/// Writes a small file in the directory and removes it.
pub fn probe_write(dir: &Path) -> io::Result<()> {
    let path = dir.join(format!(".toolcrib-doctor-{}", std::process::id()));
    let written = std::fs::OpenOptions::new().write(true).create_new(true).open(&path);
    written.and_then(|_| std::fs::remove_file(&path))
}

/// Returns the filesystem type of the mount that holds the directory; `None` where there is no
/// `/proc`.
pub fn filesystem_type(dir: &Path) -> Option<String> {
    let dir = dir.canonicalize().ok()?;
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").ok()?;
    parse_mountinfo(&mounts, &dir)
}

/// Parses mountinfo lines: `36 35 98:0 /root /mnt rw,noatime master:1 - ext4 /dev/root rw`.
fn parse_mountinfo(mounts: &str, dir: &Path) -> Option<String> {
    let mut best: Option<(usize, &str)> = None;
    for line in mounts.lines() {
        let Some((before, after)) = line.split_once(" - ") else { continue };
        let Some(point) = before.split(' ').nth(4) else { continue };
        let Some(kind) = after.split(' ').next() else { continue };
        // Later mounts hide earlier ones at the same mount point.
        let deeper = best.is_none_or(|(length, _)| point.len() >= length);
        if deeper && dir.starts_with(unescape_mount_path(point)) {
            best = Some((point.len(), kind));
        }
    }
    best.map(|(_, kind)| kind.to_owned())
}

/// Unescapes a path of mountinfo, in which the kernel writes a space as `\040`.
fn unescape_mount_path(point: &str) -> String {
    point.replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")
}

/// Returns true for a network or host-shared filesystem.
pub fn is_network_filesystem(kind: &str) -> bool {
    kind.starts_with("nfs")
        || ["cifs", "smb3", "smbfs", "9p", "fuse.sshfs", "ceph", "glusterfs", "virtiofs"]
            .contains(&kind)
}

/// Returns true for an in-memory filesystem, where a flush costs nothing and nothing is durable.
pub fn is_memory_filesystem(kind: &str) -> bool {
    matches!(kind, "tmpfs" | "ramfs")
}

/// Returns the space available to an ordinary user. The standard library cannot report it. `df` is
/// part of POSIX; `None` if it is missing.
pub fn free_bytes(dir: &Path) -> Option<u64> {
    let output = Command::new("df").arg("-Pk").arg("--").arg(dir).output().ok()?;
    parse_df_output(&String::from_utf8_lossy(&output.stdout))
}

fn parse_df_output(text: &str) -> Option<u64> {
    let line = text.lines().nth(1)?;
    // The device name may contain spaces, so the columns are counted from the percentage.
    let words: Vec<&str> = line.split_whitespace().collect();
    let used = words.iter().position(|word| word.ends_with('%'))?;
    let kib: u64 = words.get(used.checked_sub(1)?)?.parse().ok()?;
    kib.checked_mul(1_024)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const MOUNTS: &str = "\
22 1 254:0 / / rw shared:1 - ext4 /dev/vda rw
30 22 0:25 / /tmp rw - tmpfs tmpfs rw
31 22 0:26 / /mnt/my\\040disk rw - nfs4 server:/x rw
nonsense
32 22 0:27 / /data rw - xfs /dev/vdb rw
";

    #[test]
    fn the_deepest_mount_point_wins() {
        let kind = |dir: &str| parse_mountinfo(MOUNTS, Path::new(dir)).unwrap();
        assert_eq!(kind("/home/x"), "ext4");
        assert_eq!(kind("/tmp/x"), "tmpfs");
        assert_eq!(kind("/tmpx"), "ext4");
        assert_eq!(kind("/mnt/my disk/a"), "nfs4");
        assert!(
            is_network_filesystem(&kind("/mnt/my disk")) && is_memory_filesystem(&kind("/tmp"))
        );
        assert_eq!(parse_mountinfo("", Path::new("/")), None);
    }

    #[test]
    fn free_space_is_parsed_from_df() {
        let text = "Filesystem 1024-blocks Used Available Capacity Mounted on\n\
                    /dev/my disk 100 40 60 40% /data\n";
        assert_eq!(parse_df_output(text), Some(60 * 1024));
        for odd in ["", "x\n", "x\n%\n", "x\na b%\n"] {
            assert_eq!(parse_df_output(odd), None, "{odd:?}");
        }
        assert!(free_bytes(Path::new("/")).unwrap() > 0);
    }

    #[test]
    fn the_write_probe_leaves_no_file() {
        let dir = tempfile::tempdir().unwrap();
        let missing = dir.path().join("a/b");
        assert_eq!(nearest_existing(&missing), dir.path());
        probe_write(dir.path()).unwrap();
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
        assert!(probe_write(&missing).is_err());
    }
}
