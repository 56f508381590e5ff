//! Files that are written whole or not at all.

use anyhow::{Context, Result};
use redsync_engine::file::replace;
use std::io::Write;
use std::path::Path;

/// Writes a file so that whoever reads it sees the old or the new content, never a part.
pub fn write(path: &Path, content: &[u8]) -> Result<()> {
    replace(path, |file| file.write_all(content)).with_context(|| format!("cannot write {}", path.display()))
}
