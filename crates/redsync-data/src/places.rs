//! Where files may be: a name and its files come in, the paths of all files go out, or an error that says where we looked.
//! What must hold: the files of a set come from one directory, never mixed from two.

#[cfg(test)]
mod tests;

use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use crate::DataError;
use crate::catalogue::{self, Files, Format};

/// The usual places of the system, and the one of this directory.
pub(crate) fn shared() -> [&'static Path; 3] {
    ["/usr/share/datasets", "/usr/local/share/datasets", "data"].map(Path::new)
}

/// Where to look for data, and whether to fetch what is nowhere.
///
/// The order is: `data_dir`, the usual places of the system, `./data/NAME`, the cache. In `data_dir` both `NAME/FILE` and
/// `FILE` are looked at.
#[derive(Clone, Debug, Default)]
pub struct Places {
    /// A directory of the user's.
    pub data_dir: Option<PathBuf>,
    /// Fetch what was not found, from where it was published, into the cache.
    pub download: bool,
    /// The directory of caches, in place of `$XDG_CACHE_HOME` or `~/.cache`. What we fetch goes to `redsync/NAME` in it.
    pub cache_dir: Option<PathBuf>,
}

impl Places {
    /// The files of a set, in the order of the catalogue. `shared` are the directories of the system, outside of tests [`shared`].
    pub(crate) fn find(
        &self,
        name: &'static str,
        files: &Files,
        shared: &[&Path],
    ) -> Result<Vec<PathBuf>, DataError> {
        let mut looked = Vec::new();
        for dir in self.directories(name, shared) {
            match look(&dir, files) {
                Look::Complete(found) => return Ok(found),
                Look::Nothing => looked.push(dir.display().to_string()),
                Look::Lacks(file) => looked.push(format!("{} (which lacks {file})", dir.display())),
            }
        }
        Err(DataError::NotFound { name, looked: looked.join(", "), advice: advice(files) })
    }

    /// Where fetched files of a set go.
    pub(crate) fn cache(&self, name: &str) -> Result<PathBuf, DataError> {
        let base = self.cache_dir.clone().or_else(|| user_cache(|name| env::var_os(name)));
        base.map(|dir| dir.join("redsync").join(name)).ok_or_else(|| DataError::NoCache { name: name.into() })
    }

    fn directories(&self, name: &str, shared: &[&Path]) -> Vec<PathBuf> {
        let mut all = Vec::new();
        if let Some(dir) = &self.data_dir {
            all.push(dir.join(name));
            // The files of mnist and fashion-mnist have the same names: a directory that is named after one is not
            // taken for the other.
            if !catalogue::ALL.iter().any(|entry| entry.name != name && dir.ends_with(entry.name)) {
                all.push(dir.clone());
            }
        }
        all.extend(shared.iter().map(|dir| dir.join(name)));
        all.extend(self.cache(name).ok());
        all
    }
}

/// What a directory has of a set.
enum Look {
    Complete(Vec<PathBuf>),
    Lacks(String),
    Nothing,
}

fn look(dir: &Path, files: &Files) -> Look {
    let mut found = Vec::new();
    let mut lacks = None;
    for file in files.files {
        let plain = dir.join(file.name);
        let packed = dir.join(format!("{}.gz", file.name));
        if plain.is_file() {
            found.push(plain);
        } else if files.format == Format::Idx && packed.is_file() {
            found.push(packed);
        } else {
            lacks.get_or_insert(file.name);
        }
    }
    match lacks {
        None => Look::Complete(found),
        Some(_) if found.is_empty() => Look::Nothing,
        Some(file) => Look::Lacks(file.into()),
    }
}

fn advice(files: &Files) -> String {
    let package =
        files.package.map(|package| format!("install the Debian package {package}, ")).unwrap_or_default();
    format!("{package}give --data-dir, or let it be fetched with --download")
}

/// The cache directory of the user, by variables of the environment. A relative `$XDG_CACHE_HOME` does not count, as its
/// specification says.
fn user_cache(variable: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let absolute = |name| variable(name).map(PathBuf::from).filter(|path| path.is_absolute());
    absolute("XDG_CACHE_HOME").or_else(|| absolute("HOME").map(|home| home.join(".cache")))
}
