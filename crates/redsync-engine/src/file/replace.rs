//! A new file in the place of an old one, in one step that survives a crash.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

/// Puts a new file in the place of an old one, which stays until the new one is complete and on disk.
pub fn replace(path: &Path, write: impl FnOnce(&mut File) -> io::Result<()>) -> io::Result<()> {
    let temporary = temporary(path)?;
    let put = || {
        let mut file = File::create(&temporary)?;
        write(&mut file)?;
        file.sync_all()?;
        fs::rename(&temporary, path)
    };
    if let Err(error) = put() {
        // It may not even exist, and the first error says more than one of the clean-up.
        let _ = fs::remove_file(&temporary);
        return Err(error);
    }
    // The new name is only safe once the directory is on disk too.
    File::open(directory(path))?.sync_all()
}

fn directory(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Beside the target, as a rename does not cross file systems; hidden, and with a name that no other file has.
pub(super) fn temporary(path: &Path) -> io::Result<PathBuf> {
    let name =
        path.file_name().ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "not a file name"))?;
    let mut hidden = OsString::from(".");
    hidden.push(name);
    hidden.push(format!(".tmp-{}", std::process::id()));
    Ok(directory(path).join(hidden))
}
