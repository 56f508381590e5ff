//! Fetching from a real server on this machine: sets made up here, and, when asked for with `--ignored`, the published ones.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Cursor};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::{cell::RefCell, env};

use flate2::Compression;
use flate2::write::GzEncoder;
use tar::EntryType;
use zip::write::SimpleFileOptions;

use super::*;
use crate::catalogue::{Format, Kind};
use crate::{DataSet, Outside, Places, open, open_files, open_from};

/// An HTTP server that gives fixed answers and ends with the test.
struct Host {
    address: SocketAddr,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

/// A whole answer, head and body. One without bytes stands for a server that never answers.
type Answer = Vec<u8>;

impl Host {
    fn new(answers: impl IntoIterator<Item = (String, Answer)>) -> Self {
        let answers: HashMap<_, _> =
            answers.into_iter().map(|(name, answer)| (format!("/dir/{name}"), answer)).collect();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (address, stop) = (listener.local_addr().unwrap(), Arc::new(AtomicBool::new(false)));
        let stopped = stop.clone();
        let thread = thread::spawn(move || {
            for client in listener.incoming() {
                if stopped.load(Ordering::SeqCst) {
                    return;
                }
                // A client may leave in the middle; that is what some tests are about.
                let _ = answer(client.unwrap(), &answers);
            }
        });
        Host { address, stop, thread: Some(thread) }
    }

    fn server(&self) -> Server {
        let base = Some(format!("http://{}/dir/", self.address));
        Server { base, patience: Duration::from_secs(20), whole: Duration::from_secs(300) }
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        let _ = TcpStream::connect(self.address);
        self.thread.take().unwrap().join().unwrap();
    }
}

fn answer(mut client: TcpStream, answers: &HashMap<String, Answer>) -> io::Result<()> {
    client.set_read_timeout(Some(Duration::from_secs(20)))?;
    client.set_write_timeout(Some(Duration::from_secs(20)))?;
    let mut lines = BufReader::new(client.try_clone()?).lines();
    let request = lines.next().unwrap_or_else(|| Ok(String::new()))?;
    while lines.next().transpose()?.is_some_and(|line| !line.is_empty()) {}
    match request.split(' ').nth(1).and_then(|path| answers.get(path)) {
        None => client.write_all(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"),
        // Until the client gives up.
        Some(silence) if silence.is_empty() => io::copy(&mut client, &mut io::sink()).map(|_| ()),
        Some(answer) => client.write_all(answer),
    }
}

fn head(length: usize) -> Vec<u8> {
    format!("HTTP/1.1 200 OK\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n").into_bytes()
}

fn whole(body: &[u8]) -> Answer {
    [&head(body.len()), body].concat()
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

/// A gzipped tar archive. Names are written as they are, hostile or not.
fn tarball(members: &[(&str, EntryType, &[u8])]) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    for (name, kind, bytes) in members {
        let mut header = tar::Header::new_gnu();
        header.as_gnu_mut().unwrap().name[..name.len()].copy_from_slice(name.as_bytes());
        header.set_entry_type(*kind);
        header.set_size(bytes.len() as u64);
        if *kind == EntryType::Symlink {
            header.set_link_name("/etc/hostname").unwrap();
        }
        header.set_cksum();
        builder.append(&header, *bytes).unwrap();
    }
    gzip(&builder.into_inner().unwrap())
}

fn zipped(members: &[(&str, &[u8])]) -> Vec<u8> {
    let mut writer = zip::ZipWriter::new(Cursor::new(Vec::new()));
    for (name, bytes) in members {
        writer.start_file(*name, SimpleFileOptions::default()).unwrap();
        writer.write_all(bytes).unwrap();
    }
    writer.finish().unwrap().into_inner()
}

const ONE: &[u8] = b"the first file";
const TWO: &[u8] = &[7; 200_000];

fn file<'a>(name: &'a str, bytes: &[u8]) -> catalogue::File<'a> {
    catalogue::File { name, bytes: bytes.len() as u64, sha256: Sha256::digest(bytes).into() }
}

/// Fetches a set of the files `one` and `two` from a server with these answers, and checks that nothing but complete
/// files is left.
fn fetch_two(
    packing: Packing,
    answers: impl IntoIterator<Item = (String, Answer)>,
    progress: &dyn Fn(u64, Option<u64>),
) -> Result<Vec<PathBuf>, String> {
    let cache = tempfile::tempdir().unwrap();
    let into = cache.path().join("redsync/made-up");
    let host = Host::new(answers);
    let files = [file("one", ONE), file("two", TWO)];
    let set = Files { format: Format::Text, files: &files, base: "", packing, package: None };
    let fetched = fetch(&set, &into, &host.server(), progress);
    let left = everything_in(cache.path());
    match &fetched {
        Ok(paths) => {
            assert_eq!(paths.iter().map(|path| fs::read(path).unwrap()).collect::<Vec<_>>(), [ONE, TWO]);
            assert_eq!(&left, paths);
        }
        Err(_) => assert!(left.is_empty(), "{left:?}"),
    }
    fetched.map_err(|error| error.to_string().replace(&host.address.to_string(), "HOST"))
}

/// All that is not a directory, at any depth, hidden or not.
fn everything_in(dir: &Path) -> Vec<PathBuf> {
    let paths = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let mut all: Vec<_> =
        paths.flat_map(|path| if path.is_dir() { everything_in(&path) } else { vec![path] }).collect();
    all.sort();
    all
}

fn quietly(packing: Packing, answers: &[(&str, Answer)]) -> Result<Vec<PathBuf>, String> {
    let answers = answers.iter().map(|(name, answer)| (name.to_string(), answer.clone()));
    fetch_two(packing, answers, &|_, _| ())
}

const TAR: Packing = Packing::Tar { archive: "all.tgz", dir: "a/dir" };
const ZIP: Packing = Packing::Zip { archive: "all.zip", dir: "dir" };
const REGULAR: EntryType = EntryType::Regular;

#[test]
fn gzipped_files_are_fetched_and_progress_counts_their_bytes() {
    let (one, two) = (gzip(ONE), gzip(TWO));
    let seen = RefCell::new(Vec::new());
    let answers = [("one.gz".to_string(), whole(&one)), ("two.gz".to_string(), whole(&two))];
    fetch_two(Packing::Gzip, answers, &|done, total| seen.borrow_mut().push((done, total))).unwrap();
    let seen = seen.into_inner();
    for body in [&one, &two] {
        let total = Some(body.len() as u64);
        assert!(seen.contains(&(0, total)) && seen.contains(&(body.len() as u64, total)), "{seen:?}");
    }
}

#[test]
fn members_of_archives_are_fetched() {
    let packed = tarball(&[
        ("./a/dir/other", REGULAR, b"not asked for"),
        ("./a/dir/two", REGULAR, TWO),
        ("./a/dir/one", REGULAR, ONE),
    ]);
    quietly(TAR, &[("all.tgz", whole(&packed))]).unwrap();
    let packed = zipped(&[("other", b"not asked for"), ("dir/one", ONE), ("dir/two", TWO)]);
    quietly(ZIP, &[("all.zip", whole(&packed))]).unwrap();
}

#[test]
fn a_wrong_checksum_leaves_nothing_in_place() {
    let mut wrong = TWO.to_vec();
    wrong[100_000] ^= 1;
    let why = "two has a wrong checksum: it is not the published file";
    let gzipped = [("one.gz", whole(&gzip(ONE))), ("two.gz", whole(&gzip(&wrong)))];
    assert_eq!(
        quietly(Packing::Gzip, &gzipped).unwrap_err(),
        format!("fetching http://HOST/dir/two.gz: {why}")
    );
    let packed = tarball(&[("a/dir/one", REGULAR, ONE), ("a/dir/two", REGULAR, &wrong)]);
    let error = quietly(TAR, &[("all.tgz", whole(&packed))]).unwrap_err();
    assert_eq!(error, format!("fetching http://HOST/dir/all.tgz: {why}"));
    let packed = zipped(&[("dir/one", ONE), ("dir/two", &wrong)]);
    let error = quietly(ZIP, &[("all.zip", whole(&packed))]).unwrap_err();
    assert_eq!(error, format!("fetching http://HOST/dir/all.zip: {why}"));
}

#[test]
fn a_wrong_length_is_refused_as_soon_as_it_shows() {
    let longer = [TWO, b"!"].concat();
    let error = quietly(Packing::Gzip, &[("one.gz", whole(&gzip(ONE))), ("two.gz", whole(&gzip(&longer)))]);
    assert!(error.unwrap_err().ends_with("two has more than the expected 200000 bytes"));
    let packed = tarball(&[("a/dir/one", REGULAR, &ONE[1..]), ("a/dir/two", REGULAR, TWO)]);
    let error = quietly(TAR, &[("all.tgz", whole(&packed))]);
    assert!(error.unwrap_err().ends_with("one has 13 bytes, expected 14"));
}

#[test]
fn what_ends_too_early_is_refused() {
    let packed = tarball(&[("a/dir/one", REGULAR, ONE), ("a/dir/two", REGULAR, TWO)]);
    // The connection ends before the length that was announced ...
    let short = [&head(packed.len()), &packed[..packed.len() / 2]].concat();
    let error = quietly(TAR, &[("all.tgz", short)]).unwrap_err();
    let expected = format!("fetching http://HOST/dir/all.tgz: after {} bytes: ", packed.len() / 2);
    assert!(error.starts_with(&expected), "{error}");
    // ... or no length was announced, and only the packed bytes can tell.
    let open_end = [b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n", &packed[..packed.len() / 2]].concat();
    let error = quietly(TAR, &[("all.tgz", open_end)]).unwrap_err();
    assert!(error.starts_with("fetching http://HOST/dir/all.tgz: unpacking"), "{error}");
    let zip = zipped(&[("dir/one", ONE), ("dir/two", TWO)]);
    let error = quietly(ZIP, &[("all.zip", whole(&zip[..zip.len() - 30]))]).unwrap_err();
    assert!(error.starts_with("fetching http://HOST/dir/all.zip: unpacking"), "{error}");
}

#[test]
fn an_address_that_is_not_there_is_named() {
    let error = quietly(TAR, &[]).unwrap_err();
    assert_eq!(error, "fetching http://HOST/dir/all.tgz: http status: 404");
    let error = quietly(Packing::Gzip, &[("one.gz", whole(&gzip(ONE)))]).unwrap_err();
    assert_eq!(error, "fetching http://HOST/dir/two.gz: http status: 404");
}

#[test]
fn a_server_that_never_answers_is_given_up() {
    let host = Host::new([("all.tgz".to_string(), Vec::new())]);
    let cache = tempfile::tempdir().unwrap();
    let set = Files { format: Format::Text, files: &[], base: "", packing: TAR, package: None };
    let server = Server { patience: Duration::from_millis(200), ..host.server() };
    let error = fetch(&set, cache.path(), &server, &|_, _| ()).unwrap_err().to_string();
    assert!(error.contains("timeout"), "{error}");
}

#[test]
fn hostile_names_in_an_archive_are_never_written() {
    let evil: [(&str, EntryType, &[u8]); 3] = [
        ("../../evil", REGULAR, b"evil"),
        ("a/dir/../../../../evil", REGULAR, b"evil"),
        ("../../a/dir/one", REGULAR, ONE),
    ];
    let good: [(&str, EntryType, &[u8]); 2] = [("a/dir/one", REGULAR, ONE), ("a/dir/two", REGULAR, TWO)];
    let packed = tarball(&[&evil[..], &good[..]].concat());
    quietly(TAR, &[("all.tgz", whole(&packed))]).unwrap();
    let packed = tarball(&[&evil[..], &good[1..]].concat());
    let error = quietly(TAR, &[("all.tgz", whole(&packed))]).unwrap_err();
    assert_eq!(error, "fetching http://HOST/dir/all.tgz: the archive has no a/dir/one");
    let packed = zipped(&[("../dir/one", ONE), ("dir/two", TWO)]);
    let error = quietly(ZIP, &[("all.zip", whole(&packed))]).unwrap_err();
    assert!(error.starts_with("fetching http://HOST/dir/all.zip: dir/one in the archive: "), "{error}");
}

#[test]
fn a_link_in_an_archive_is_not_followed() {
    let packed = tarball(&[("a/dir/one", EntryType::Symlink, b""), ("a/dir/two", REGULAR, TWO)]);
    let error = quietly(TAR, &[("all.tgz", whole(&packed))]).unwrap_err();
    assert_eq!(error, "fetching http://HOST/dir/all.tgz: one in the archive is not a regular file");
}

#[test]
fn opening_fetches_only_if_told_to_and_fails_with_the_address() {
    let host = Host::new([("train-images-idx3-ubyte.gz".to_string(), whole(&gzip(b"not the images")))]);
    let cache = tempfile::tempdir().unwrap();
    let cached = |download| Places { download, cache_dir: Some(cache.path().into()), ..Places::default() };
    let outside = Outside { shared: Vec::new(), server: host.server() };
    let error = open_from("mnist", &cached(false), &|_, _| (), &outside).unwrap_err();
    assert!(matches!(error, DataError::NotFound { name: "mnist", .. }), "{error}");
    let error = open_from("mnist", &cached(true), &|_, _| (), &outside).unwrap_err().to_string();
    assert!(error.ends_with("train-images-idx3-ubyte has 14 bytes, expected 47040016"), "{error}");
    assert_eq!(fs::read_dir(cache.path().join("redsync/mnist")).unwrap().count(), 0);
}

/// Two images of 28x28 with their labels, as the four idx files.
fn idx_files() -> [(&'static str, Vec<u8>); 4] {
    let images = [&[0, 0, 8, 3, 0, 0, 0, 2, 0, 0, 0, 28, 0, 0, 0, 28], &[5; 2 * 784][..]].concat();
    let labels = vec![0, 0, 8, 1, 0, 0, 0, 2, 3, 4];
    [("a", images.clone()), ("b", labels.clone()), ("c", images), ("d", labels)]
}

fn text_files() -> [(&'static str, Vec<u8>); 3] {
    [("a", b"one two\n".to_vec()), ("b", b"two\n".to_vec()), ("c", b"one\n".to_vec())]
}

/// Fetches and opens a made-up set, and opens it again when the server is gone.
fn open_twice(format: Format, packing: Packing, contents: &[(&'static str, Vec<u8>)]) -> DataSet {
    let source = tempfile::tempdir().unwrap();
    let paths: Vec<_> = contents.iter().map(|(name, _)| source.path().join(name)).collect();
    contents.iter().zip(&paths).for_each(|((_, bytes), path)| fs::write(path, bytes).unwrap());
    let files: Vec<_> = contents.iter().map(|(name, bytes)| file(name, bytes)).collect();
    let set = Files { format, files: &files, base: "", packing, package: None };
    let host = Host::new(publish(&set, &paths));
    let outside = Outside { shared: Vec::new(), server: host.server() };
    let cache = tempfile::tempdir().unwrap();
    let places = Places { data_dir: None, download: true, cache_dir: Some(cache.path().into()) };
    open_files("made-up", &set, &places, &|_, _| (), &outside).unwrap();
    drop(host);
    let counted = |_, _| panic!("what is in the cache is not fetched");
    open_files("made-up", &set, &places, &counted, &outside).unwrap()
}

#[test]
fn what_was_fetched_is_opened_and_found_again_without_a_server() {
    match open_twice(Format::Idx, Packing::Gzip, &idx_files()) {
        DataSet::Images(images) => assert_eq!((images.train_len(), images.test_len()), (2, 2)),
        DataSet::Text(_) => panic!("text"),
    }
    for packing in [TAR, ZIP] {
        match open_twice(Format::Text, packing, &text_files()) {
            DataSet::Text(text) => assert_eq!(text.words, ["one", "two", "<eos>"]),
            DataSet::Images(_) => panic!("images"),
        }
    }
}

/// The published checksums, against real files. Where these are can be said with `REDSYNC_DATA_DIR`.
fn check_published(name: &str) {
    let entry = catalogue::find(name).unwrap();
    let Kind::Files(set) = &entry.kind else { panic!("{name} has no files") };
    let places = Places { data_dir: env::var_os("REDSYNC_DATA_DIR").map(PathBuf::from), ..Places::default() };
    let found =
        places.find(entry.name, set, &Outside::real().shared).unwrap_or_else(|error| panic!("{error}"));
    let host = Host::new(publish(set, &found));
    let cache = tempfile::tempdir().unwrap();
    let into = cache.path().join(name);
    let fetched = fetch(set, &into, &host.server(), &|_, _| ()).unwrap();
    let again = Places { data_dir: Some(cache.path().into()), ..Places::default() };
    assert_eq!(again.find(entry.name, set, &[]).unwrap(), fetched);
    match open(name, &again).unwrap() {
        DataSet::Images(images) => assert!(images.train_len() >= 50_000 && images.test_len() == 10_000),
        DataSet::Text(text) => assert!(text.vocabulary >= 10_000),
    }
}

#[test]
#[ignore = "needs the files of fashion-mnist"]
fn published_fashion_mnist_can_be_fetched() {
    check_published("fashion-mnist");
}

#[test]
#[ignore = "needs the files of mnist"]
fn published_mnist_can_be_fetched() {
    check_published("mnist");
}

#[test]
#[ignore = "needs the files of cifar10"]
fn published_cifar10_can_be_fetched() {
    check_published("cifar10");
}

#[test]
#[ignore = "needs the files of ptb"]
fn published_ptb_can_be_fetched() {
    check_published("ptb");
}

#[test]
#[ignore = "needs the files of wikitext-2"]
fn published_wikitext_2_can_be_fetched() {
    check_published("wikitext-2");
}

/// The answers of a server that holds these files.
fn publish(set: &Files, found: &[PathBuf]) -> Vec<(String, Answer)> {
    let plain = |path: &PathBuf| {
        let bytes = fs::read(path).unwrap();
        if path.extension().is_none_or(|extension| extension != "gz") {
            return bytes;
        }
        let mut unpacked = Vec::new();
        MultiGzDecoder::new(&bytes[..]).read_to_end(&mut unpacked).unwrap();
        unpacked
    };
    let files: Vec<(&str, Vec<u8>)> =
        set.files.iter().map(|file| file.name).zip(found.iter().map(plain)).collect();
    let within = |dir| files.iter().map(move |(name, bytes)| (format!("{dir}/{name}"), bytes));
    match set.packing {
        Packing::Gzip => {
            files.iter().map(|(name, bytes)| (format!("{name}.gz"), whole(&gzip(bytes)))).collect()
        }
        Packing::Tar { archive, dir } => {
            let members: Vec<_> = within(dir).collect();
            let members: Vec<_> =
                members.iter().map(|(name, bytes)| (&name[..], REGULAR, &bytes[..])).collect();
            vec![(archive.into(), whole(&tarball(&members)))]
        }
        Packing::Zip { archive, dir } => {
            let members: Vec<_> = within(dir).collect();
            let members: Vec<_> = members.iter().map(|(name, bytes)| (&name[..], &bytes[..])).collect();
            vec![(archive.into(), whole(&zipped(&members)))]
        }
    }
}
