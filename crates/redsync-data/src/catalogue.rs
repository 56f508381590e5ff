//! The data sets we know: a name comes in, an entry goes out that says where the set is and how it is read.
//! What must hold: lengths and checksums are those of the published files, unpacked.

use crate::DataError;

/// One data set.
#[derive(Clone, Debug)]
pub(crate) struct Entry<'a> {
    pub name: &'a str,
    pub kind: Kind<'a>,
}

/// Where a data set comes from.
#[derive(Clone, Debug)]
pub(crate) enum Kind<'a> {
    /// Inside the program.
    Digits,
    /// Made on the fly.
    SyntheticImagenet,
    /// Files that have to be found or fetched.
    Files(Files<'a>),
}

/// The files of a data set, and where they are published.
#[derive(Clone, Debug)]
pub(crate) struct Files<'a> {
    pub format: Format,
    pub files: &'a [File<'a>],
    /// The directory of the server, with a slash at its end.
    pub base: &'a str,
    pub packing: Packing<'a>,
    /// A Debian package that brings the files.
    pub package: Option<&'a str>,
}

/// How files are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    Idx,
    Cifar,
    Text,
}

/// How the files lie on the server.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Packing<'a> {
    /// Each file by itself, with `.gz` at the end of its name.
    Gzip,
    /// All in a directory of one gzipped tar archive.
    Tar { archive: &'a str, dir: &'a str },
    /// All in a directory of one zip archive.
    Zip { archive: &'a str, dir: &'a str },
}

/// One file, unpacked.
#[derive(Clone, Copy, Debug)]
pub(crate) struct File<'a> {
    pub name: &'a str,
    pub bytes: u64,
    pub sha256: [u8; 32],
}

/// Looks a data set up.
pub(crate) fn find(name: &str) -> Result<&'static Entry<'static>, DataError> {
    ALL.iter().find(|entry| entry.name == name).ok_or_else(|| DataError::UnknownName {
        name: name.into(),
        known: ALL.iter().map(|entry| entry.name).collect(),
    })
}

/// All data sets. In each the files come in the order in which its reader wants them: training first.
pub(crate) static ALL: [Entry<'static>; 7] = [
    Entry { name: "digits", kind: Kind::Digits },
    Entry {
        name: "fashion-mnist",
        kind: Kind::Files(Files {
            format: Format::Idx,
            files: &FASHION_MNIST,
            base: "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
            packing: Packing::Gzip,
            package: Some("dataset-fashion-mnist"),
        }),
    },
    Entry {
        name: "mnist",
        kind: Kind::Files(Files {
            format: Format::Idx,
            files: &MNIST,
            base: "https://ossci-datasets.s3.amazonaws.com/mnist/",
            packing: Packing::Gzip,
            package: None,
        }),
    },
    Entry {
        name: "cifar10",
        kind: Kind::Files(Files {
            format: Format::Cifar,
            files: &CIFAR10,
            base: "https://www.cs.toronto.edu/~kriz/",
            packing: Packing::Tar { archive: "cifar-10-binary.tar.gz", dir: "cifar-10-batches-bin" },
            package: None,
        }),
    },
    Entry {
        name: "ptb",
        kind: Kind::Files(Files {
            format: Format::Text,
            files: &PTB,
            base: "http://www.fit.vutbr.cz/~imikolov/rnnlm/",
            packing: Packing::Tar { archive: "simple-examples.tgz", dir: "simple-examples/data" },
            package: None,
        }),
    },
    Entry {
        name: "wikitext-2",
        kind: Kind::Files(Files {
            format: Format::Text,
            files: &WIKITEXT_2,
            base: "https://wikitext.smerity.com/",
            packing: Packing::Zip { archive: "wikitext-2-v1.zip", dir: "wikitext-2" },
            package: None,
        }),
    },
    Entry { name: "synthetic-imagenet", kind: Kind::SyntheticImagenet },
];

static FASHION_MNIST: [File<'static>; 4] = [
    file(
        "train-images-idx3-ubyte",
        47_040_016,
        "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    ),
    file(
        "train-labels-idx1-ubyte",
        60_008,
        "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    ),
    file(
        "t10k-images-idx3-ubyte",
        7_840_016,
        "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    ),
    file(
        "t10k-labels-idx1-ubyte",
        10_008,
        "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    ),
];

static MNIST: [File<'static>; 4] = [
    file(
        "train-images-idx3-ubyte",
        47_040_016,
        "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    ),
    file(
        "train-labels-idx1-ubyte",
        60_008,
        "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    ),
    file(
        "t10k-images-idx3-ubyte",
        7_840_016,
        "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    ),
    file(
        "t10k-labels-idx1-ubyte",
        10_008,
        "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    ),
];

static CIFAR10: [File<'static>; 6] = [
    file("data_batch_1.bin", 30_730_000, "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5"),
    file("data_batch_2.bin", 30_730_000, "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed"),
    file("data_batch_3.bin", 30_730_000, "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67"),
    file("data_batch_4.bin", 30_730_000, "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48"),
    file("data_batch_5.bin", 30_730_000, "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add"),
    file("test_batch.bin", 30_730_000, "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b"),
];

static PTB: [File<'static>; 3] = [
    file("ptb.train.txt", 5_101_618, "fcea919f6cf83f35d4d00c6cbf08040d13d4155226340912e2fef9c9c4102cbf"),
    file("ptb.valid.txt", 399_782, "c9fe6985fe0d4ccb578183407d7668fc6066c20700cb4cf87d8ff1cc34df1bf2"),
    file("ptb.test.txt", 449_945, "dd65dff31e70846b2a6030a87482edcd5d199130cdcfa1f3dccbb033728deee0"),
];

static WIKITEXT_2: [File<'static>; 3] = [
    file("wiki.train.tokens", 10_797_148, "9e9fa1ad55b1c2c95b08e37dd8e653f638fac2c6de904b79e813611eefbc985f"),
    file("wiki.valid.tokens", 1_121_681, "f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8"),
    file("wiki.test.tokens", 1_256_449, "d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0"),
];

const fn file(name: &'static str, bytes: u64, sha256: &str) -> File<'static> {
    File { name, bytes, sha256: digest(sha256) }
}

/// A checksum from its hexadecimal form; a wrong one does not compile.
const fn digest(hex: &str) -> [u8; 32] {
    let hex = hex.as_bytes();
    assert!(hex.len() == 64);
    let mut digest = [0; 32];
    let mut at = 0;
    while at < 64 {
        let value = match hex[at] {
            digit @ b'0'..=b'9' => digit - b'0',
            letter @ b'a'..=b'f' => letter - b'a' + 10,
            _ => panic!("not a hexadecimal digit"),
        };
        digest[at / 2] = digest[at / 2] << 4 | value;
        at += 1;
    }
    digest
}
