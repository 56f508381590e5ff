//! Which directories count, in directories made here: nothing depends on what this machine has.

use std::fs;

use tempfile::TempDir;

use super::*;
use crate::catalogue::Kind;

/// A set of the catalogue.
fn set(name: &str) -> (&'static str, &'static Files<'static>) {
    let entry = catalogue::find(name).unwrap();
    match &entry.kind {
        Kind::Files(files) => (entry.name, files),
        _ => panic!("{name} has no files"),
    }
}

/// Empty files with the names of a set: looking does not open them.
fn put(dir: &Path, name: &str) {
    fs::create_dir_all(dir).unwrap();
    set(name).1.files.iter().for_each(|file| fs::write(dir.join(file.name), b"").unwrap());
}

/// A machine with nothing on it: the user's directory, the system's, and a cache.
struct Machine {
    root: TempDir,
}

impl Machine {
    fn bare() -> Self {
        let machine = Machine { root: TempDir::new().unwrap() };
        ["own", "system", "cache"].iter().for_each(|dir| fs::create_dir(machine.dir(dir)).unwrap());
        machine
    }

    fn dir(&self, name: &str) -> PathBuf {
        self.root.path().join(name)
    }

    fn places(&self) -> Places {
        Places { data_dir: Some(self.dir("own")), download: false, cache_dir: Some(self.dir("cache")) }
    }

    fn find(&self, name: &str) -> Result<Vec<PathBuf>, DataError> {
        let (name, files) = set(name);
        self.places().find(name, files, &[&self.dir("system")])
    }

    /// Expects that a set is found in a directory, all of it.
    fn finds(&self, name: &str, dir: &str) {
        let expected: Vec<_> = set(name).1.files.iter().map(|file| self.dir(dir).join(file.name)).collect();
        assert_eq!(self.find(name).unwrap(), expected);
    }

    /// Expects that a set is nowhere. `own` is what is said of the directory of the user itself.
    fn lacks(&self, name: &str, own: &str, advice: &str) {
        let root = self.root.path().display();
        let expected = format!(
            "{name} was not found in {root}/own/{name}, {root}/own{own}, {root}/system/{name}, {root}/cache/redsync/{name}: {advice}"
        );
        assert_eq!(self.find(name).unwrap_err().to_string(), expected);
    }
}

#[test]
fn the_usual_places_are_those_of_the_readme() {
    let places = Places { data_dir: Some("own".into()), download: false, cache_dir: Some("cache".into()) };
    let expected = [
        "own/ptb",
        "own",
        "/usr/share/datasets/ptb",
        "/usr/local/share/datasets/ptb",
        "data/ptb",
        "cache/redsync/ptb",
    ];
    assert_eq!(places.directories("ptb", &shared()), expected.map(PathBuf::from));
}

#[test]
fn a_set_that_is_nowhere_is_answered_with_where_and_what_to_do() {
    let fetch = "give --data-dir, or let it be fetched with --download";
    let install = format!("install the Debian package dataset-fashion-mnist, {fetch}");
    for (name, present, first, advice) in [
        ("cifar10", "test_batch.bin", "data_batch_1.bin", fetch),
        ("fashion-mnist", "t10k-labels-idx1-ubyte.gz", "train-images-idx3-ubyte", &install),
    ] {
        let machine = Machine::bare();
        machine.lacks(name, "", advice);
        fs::write(machine.dir("own").join(present), b"").unwrap();
        machine.lacks(name, &format!(" (which lacks {first})"), advice);
    }
}

#[test]
fn the_directory_of_the_user_comes_first_then_the_system_then_the_cache() {
    let machine = Machine::bare();
    for dir in ["cache/redsync/mnist", "system/mnist", "own", "own/mnist"] {
        put(&machine.dir(dir), "mnist");
        machine.finds("mnist", dir);
    }
}

#[test]
fn files_of_one_set_are_never_taken_from_two_directories() {
    let machine = Machine::bare();
    for dir in ["own/ptb", "system/ptb"] {
        put(&machine.dir(dir), "ptb");
    }
    fs::remove_file(machine.dir("own/ptb").join("ptb.test.txt")).unwrap();
    machine.finds("ptb", "system/ptb");
    fs::remove_file(machine.dir("system/ptb").join("ptb.train.txt")).unwrap();
    let error = machine.find("ptb").unwrap_err().to_string();
    assert!(error.contains("own/ptb (which lacks ptb.test.txt), "), "{error}");
    assert!(error.contains("system/ptb (which lacks ptb.train.txt), "), "{error}");
}

#[test]
fn a_directory_named_after_another_set_is_not_taken_for_this_one() {
    let machine = Machine::bare();
    let dir = machine.dir("own/fashion-mnist");
    put(&dir, "mnist");
    let places = Places { data_dir: Some(dir.clone()), ..machine.places() };
    let find = |name| places.find(set(name).0, set(name).1, &[]);
    assert_eq!(find("fashion-mnist").unwrap()[0], dir.join("train-images-idx3-ubyte"));
    let error = find("mnist").unwrap_err();
    assert!(matches!(error, DataError::NotFound { name: "mnist", .. }), "{error}");
}

#[test]
fn the_cache_of_the_user_is_named_by_the_environment_with_absolute_paths_only() {
    let cache = |xdg: Option<&str>, home: Option<&str>| {
        user_cache(|name| match name {
            "XDG_CACHE_HOME" => xdg.map(OsString::from),
            "HOME" => home.map(OsString::from),
            other => panic!("{other} does not matter"),
        })
    };
    assert_eq!(cache(Some("/xdg"), Some("/home/me")), Some("/xdg".into()));
    assert_eq!(cache(None, Some("/home/me")), Some("/home/me/.cache".into()));
    assert_eq!(cache(Some("xdg"), Some("/home/me")), Some("/home/me/.cache".into()));
    assert_eq!(cache(Some(""), Some("me")), None);
    assert_eq!(cache(None, None), None);
}
