//! Files that are written whole or not at all.

use anyhow::{Context, Result};
use std::io::Write;
use std::path::Path;

/// Writes a file through a new one beside it, so that whoever reads it sees the old or the new content, never a part.
pub fn write(path: &Path, content: &[u8]) -> Result<()> {
    let name = path.file_name().with_context(|| format!("{} is not a file name", path.display()))?;
    let new = path.with_file_name(format!(".{}.new", name.to_string_lossy()));
    let put = || {
        let mut file = std::fs::File::create(&new)?;
        file.write_all(content)?;
        file.sync_all()?;
        std::fs::rename(&new, path)
    };
    put().with_context(|| format!("cannot write {}", path.display()))
}
