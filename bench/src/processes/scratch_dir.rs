//! The directory that holds the stores of a benchmark while it runs.

use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use anyhow::Context;

/// A directory for the measured stores, removed on drop.
pub struct ScratchDir {
    path: PathBuf,
}

impl ScratchDir {
    /// Creates a directory within `parent` that only this user can read.
    ///
    /// # Errors
    ///
    /// When it cannot be created.
    pub fn new(parent: &Path) -> anyhow::Result<Self> {
        let path = parent.join(format!("toolcrib-bench-{}", ulid::Ulid::generate()));
        let path = std::path::absolute(path)?;
        let mut builder = std::fs::DirBuilder::new();
        builder.recursive(true).mode(0o700);
        builder.create(&path).with_context(|| format!("cannot make {}", path.display()))?;
        Ok(Self { path })
    }

    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Creates a subdirectory.
    ///
    /// # Errors
    ///
    /// When it cannot be created.
    pub fn dir(&self, name: &str) -> anyhow::Result<PathBuf> {
        let dir = self.path.join(name);
        std::fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
        Ok(dir)
    }
}

impl Drop for ScratchDir {
    fn drop(&mut self) {
        // Files that cannot be removed are left to the system's cleanup.
        let _ = std::fs::remove_dir_all(&self.path);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_scratch_directory_is_deleted_with_its_contents() {
        let parent = tempfile::tempdir().unwrap();
        let scratch = ScratchDir::new(parent.path()).unwrap();
        std::fs::write(scratch.dir("a").unwrap().join("x"), "x").unwrap();
        assert_ne!(ScratchDir::new(parent.path()).unwrap().path(), scratch.path());
        drop(scratch);
        assert_eq!(std::fs::read_dir(parent.path()).unwrap().count(), 0);
    }
}
