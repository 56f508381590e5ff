//! Fetching: the files of a set and a directory come in, the files are in the directory afterwards.
//! What must hold: a file appears under its name only complete and with the right checksum; names in an archive are only
//! compared with those we look for, never used as paths; every wait has a deadline and every length a limit.

#[cfg(test)]
mod tests;

use std::fs::{self, File};
use std::io::{self, Read, Seek, Write};
use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use flate2::read::MultiGzDecoder;
use sha2::{Digest, Sha256};
use ureq::Agent;

use crate::DataError;
use crate::catalogue::{self, Files, Packing};

/// The most that is fetched at a time, and the most that an archive is unpacked to. The largest we know, CIFAR-10, has
/// 170 MB, and 184 MB unpacked.
const LARGEST: u64 = 1 << 30;
const CHUNK: usize = 1 << 16;

/// Whom we fetch from, and how long we wait.
#[derive(Clone, Debug)]
pub(crate) struct Server {
    /// In place of the published address. It is then asked directly, without a proxy.
    base: Option<String>,
    /// For the connection, the first answer, and each piece of the rest.
    patience: Duration,
    /// For one file, from beginning to end.
    whole: Duration,
}

impl Server {
    /// The servers where the sets are published.
    pub(crate) fn official() -> Self {
        Server { base: None, patience: Duration::from_secs(30), whole: Duration::from_secs(3600) }
    }

    fn agent(&self) -> Agent {
        let patience = Some(self.patience);
        let config = Agent::config_builder()
            .timeout_global(Some(self.whole))
            .timeout_resolve(patience)
            .timeout_connect(patience)
            .timeout_recv_response(patience)
            .timeout_per_read(patience)
            .timeout_per_write(patience);
        match self.base {
            None => config.build().into(),
            Some(_) => config.proxy(None).build().into(),
        }
    }
}

/// Fetches all files of a set into a directory, and returns their paths in the order of the catalogue.
pub(crate) fn fetch(
    set: &Files,
    into: &Path,
    server: &Server,
    progress: &dyn Fn(u64, Option<u64>),
) -> Result<Vec<PathBuf>, DataError> {
    let here = |error| DataError::io(into, error);
    fs::create_dir_all(into).map_err(here)?;
    // In the same directory, so that renaming does not cross file systems; it goes away with all that is still in it.
    let staging = tempfile::Builder::new().prefix(".fetch-").tempdir_in(into).map_err(here)?;
    let job = Job {
        agent: server.agent(),
        base: server.base.as_deref().unwrap_or(set.base),
        staging: staging.path(),
    };
    match set.packing {
        Packing::Gzip => set.files.iter().try_for_each(|file| job.fetch_one(file, progress)),
        Packing::Tar { archive, dir } => {
            job.fetch_archive(archive, progress, |packed| job.untar(packed, dir, set.files))
        }
        Packing::Zip { archive, dir } => {
            job.fetch_archive(archive, progress, |packed| job.unzip(packed, dir, set.files))
        }
    }?;
    let put = |file: &catalogue::File| {
        let path = into.join(file.name);
        fs::rename(staging.path().join(file.name), &path).map_err(|error| DataError::io(&path, error))?;
        Ok(path)
    };
    set.files.iter().map(put).collect()
}

struct Job<'a> {
    agent: Agent,
    base: &'a str,
    staging: &'a Path,
}

impl Job<'_> {
    fn fetch_one(
        &self,
        file: &catalogue::File,
        progress: &dyn Fn(u64, Option<u64>),
    ) -> Result<(), DataError> {
        let unpack = |packed| self.store(MultiGzDecoder::new(packed), file);
        self.fetch_archive(&format!("{}.gz", file.name), progress, unpack)
    }

    /// Fetches what is at an address and hands it over.
    fn fetch_archive(
        &self,
        name: &str,
        progress: &dyn Fn(u64, Option<u64>),
        unpack: impl FnOnce(File) -> Result<(), String>,
    ) -> Result<(), DataError> {
        let address = format!("{}{name}", self.base);
        let fetched = self.download(&address, progress).and_then(unpack);
        fetched.map_err(|why| DataError::Fetch { address, why })
    }

    /// The bytes at an address, in a nameless file.
    fn download(&self, address: &str, progress: &dyn Fn(u64, Option<u64>)) -> Result<File, String> {
        let mut response = self.agent.get(address).call().map_err(|error| error.to_string())?;
        let total = response.body().content_length();
        let mut packed = tempfile::tempfile_in(self.staging).map_err(written)?;
        let mut body = response.body_mut().as_reader();
        let (mut done, mut chunk) = (0, vec![0; CHUNK]);
        progress(done, total);
        loop {
            let length =
                read_some(&mut body, &mut chunk).map_err(|error| format!("after {done} bytes: {error}"))?;
            if length == 0 {
                break;
            }
            done += length as u64;
            if done > LARGEST {
                return Err(format!("more than {LARGEST} bytes came"));
            }
            packed.write_all(&chunk[..length]).map_err(written)?;
            progress(done, total);
        }
        // A body shorter than announced ended with an error above.
        packed.rewind().map_err(written)?;
        Ok(packed)
    }

    /// Takes the wanted files out of a directory of a gzipped tar archive.
    fn untar(&self, packed: File, dir: &str, files: &[catalogue::File]) -> Result<(), String> {
        let broken = |error: io::Error| format!("unpacking: {error}");
        let mut archive = tar::Archive::new(MultiGzDecoder::new(packed).take(LARGEST));
        let mut missing: Vec<_> = files.iter().collect();
        for member in archive.entries().map_err(broken)? {
            let member = member.map_err(broken)?;
            let path = member.path().map_err(broken)?;
            let Some(at) = missing.iter().position(|file| same_path(&path, &Path::new(dir).join(file.name)))
            else {
                continue;
            };
            let file = missing.swap_remove(at);
            if !member.header().entry_type().is_file() {
                return Err(format!("{} in the archive is not a regular file", file.name));
            }
            self.store(member, file)?;
            if missing.is_empty() {
                break;
            }
        }
        match missing.first() {
            Some(file) => Err(format!("the archive has no {dir}/{}", file.name)),
            None => Ok(()),
        }
    }

    /// Takes the wanted files out of a directory of a zip archive.
    fn unzip(&self, packed: File, dir: &str, files: &[catalogue::File]) -> Result<(), String> {
        let mut archive = zip::ZipArchive::new(packed).map_err(|error| format!("unpacking: {error}"))?;
        for file in files {
            let name = format!("{dir}/{}", file.name);
            let member = archive.by_name(&name).map_err(|error| format!("{name} in the archive: {error}"))?;
            if !member.is_file() {
                return Err(format!("{name} in the archive is not a regular file"));
            }
            self.store(member, file)?;
        }
        Ok(())
    }

    /// Writes an unpacked file and checks it.
    fn store(&self, mut unpacked: impl Read, file: &catalogue::File) -> Result<(), String> {
        let name = file.name;
        let mut out = File::create_new(self.staging.join(name)).map_err(written)?;
        let (mut hash, mut left, mut chunk) = (Sha256::new(), file.bytes, vec![0; CHUNK]);
        loop {
            let length =
                read_some(&mut unpacked, &mut chunk).map_err(|error| format!("unpacking {name}: {error}"))?;
            if length == 0 {
                break;
            }
            left = left
                .checked_sub(length as u64)
                .ok_or_else(|| format!("{name} has more than the expected {} bytes", file.bytes))?;
            hash.update(&chunk[..length]);
            out.write_all(&chunk[..length]).map_err(written)?;
        }
        if left > 0 {
            return Err(format!("{name} has {} bytes, expected {}", file.bytes - left, file.bytes));
        }
        if hash.finalize()[..] != file.sha256 {
            return Err(format!("{name} has a wrong checksum: it is not the published file"));
        }
        out.sync_all().map_err(written)
    }
}

/// One read, again if a signal came between.
fn read_some(input: &mut impl Read, into: &mut [u8]) -> io::Result<usize> {
    loop {
        match input.read(into) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            done => return done,
        }
    }
}

fn written(error: io::Error) -> String {
    format!("writing to the cache: {error}")
}

/// Whether a path in an archive is the wanted one, perhaps with `./` in front of it.
fn same_path(path: &Path, wanted: &Path) -> bool {
    path.components().filter(|part| *part != Component::CurDir).eq(wanted.components())
}
