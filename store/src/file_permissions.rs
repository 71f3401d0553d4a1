//! Creates files that only their owner can read: the stored data contains arguments, results and
//! tokens.

use std::fs::{DirBuilder, OpenOptions};
use std::io;
use std::path::Path;

/// Creates the file and its directory, readable by their owner alone. Existing files and
/// directories keep their permissions, which were set by the user who created them. The WAL next to
/// the file inherits the permissions of the file.
pub fn create_owner_only(path: &Path) -> io::Result<()> {
    let (mut directories, mut files) = (DirBuilder::new(), OpenOptions::new());
    directories.recursive(true);
    files.append(true).create(true);
    #[cfg(unix)]
    {
        use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
        directories.mode(0o700);
        files.mode(0o600);
    }
    if let Some(directory) = path.parent().filter(|directory| !directory.as_os_str().is_empty()) {
        directories.create(directory)?;
    }
    files.open(path).map(drop)
}
