//! Files that are nobody else's to read: what is stored holds arguments, results and tokens.

use std::fs::{DirBuilder, OpenOptions};
use std::io;
use std::path::Path;

/// Makes the file, and the directory it is in, readable by their owner alone. Where they are there
/// already, whoever made them decided that. The log beside the file gets the rights of the file.
pub fn make(path: &Path) -> io::Result<()> {
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
