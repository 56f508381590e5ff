//! Text with words between blanks: three files come in, for training, validation and testing; numbers of words go out.
//! What must hold: the vocabulary is that of the training text, in the order of first appearance, and every number is in
//! it. The end of each line, empty ones too, is a word of its own.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use crate::DataError;

/// Stands at the end of each line.
const END: &str = "<eos>";
/// Stands for words that are not in the vocabulary.
const UNKNOWN: &str = "<unk>";

/// Running text, as numbers of words.
#[derive(Clone, Debug)]
pub struct TextSet {
    /// The name of the data set.
    pub name: String,
    /// The number of different words: all numbers are smaller.
    pub vocabulary: usize,
    /// The training text.
    pub train: Vec<u32>,
    /// The validation text.
    pub valid: Vec<u32>,
    /// The test text.
    pub test: Vec<u32>,
    /// The words, by their numbers.
    pub words: Vec<String>,
}

impl TextSet {
    /// The same text as bytes, 256 different ones: words with blanks between them, and line ends.
    ///
    /// ```
    /// use redsync_data::TextSet;
    /// let words = ["a", "bc", "<eos>"].map(String::from).to_vec();
    /// let text = TextSet { name: "example".into(), vocabulary: 3, train: vec![1, 0, 2, 0], valid: vec![0], test: vec![], words };
    /// let bytes = text.into_bytes();
    /// assert_eq!(bytes.train, b"bc a\na ".map(u32::from));
    /// assert_eq!((bytes.vocabulary, bytes.words.len()), (256, 256));
    /// ```
    pub fn into_bytes(self) -> Self {
        let TextSet { name, train, valid, test, words, .. } = self;
        let bytes = |text: Vec<u32>| {
            let mut bytes: Vec<u32> = Vec::new();
            for word in text.into_iter().map(|number| &words[number as usize][..]) {
                if word == END {
                    // The blank behind the last word of a line gives way to the end of the line.
                    bytes.pop_if(|last| *last == u32::from(b' '));
                    bytes.push(u32::from(b'\n'));
                } else {
                    bytes.extend(word.bytes().chain([b' ']).map(u32::from));
                }
            }
            bytes
        };
        let (train, valid, test) = (bytes(train), bytes(valid), bytes(test));
        let words = (0..=u8::MAX).map(|byte| byte.escape_ascii().to_string()).collect();
        TextSet { name, vocabulary: 256, train, valid, test, words }
    }
}

/// Loads the three files: training, validation, test.
pub(crate) fn load(name: &str, files: &[PathBuf]) -> Result<TextSet, DataError> {
    let [train, valid, test] = files else { unreachable!("the catalogue has three files for each text") };
    let text = read(train)?;
    let mut numbers = HashMap::new();
    let mut words = Vec::new();
    let mut number = |word| {
        *numbers.entry(word).or_insert_with(|| {
            words.push(String::from(word));
            words.len() as u32 - 1
        })
    };
    let train = words_of(&text).map(|(_, word)| number(word)).collect();
    let (valid, test) = (translate(valid, &numbers)?, translate(test, &numbers)?);
    Ok(TextSet { name: name.into(), vocabulary: words.len(), train, valid, test, words })
}

fn read(path: &Path) -> Result<String, DataError> {
    let bytes = fs::read(path).map_err(|error| DataError::io(path, error))?;
    let text = String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        DataError::damaged(path, format!("the file is not UTF-8 at byte {at}"))
    })?;
    match text.trim_ascii().is_empty() {
        true => Err(DataError::damaged(path, "the file has no words")),
        false => Ok(text),
    }
}

/// The words of a text with the numbers of their lines. Only ASCII blanks part words, whatever else Unicode calls white
/// space, so that a word does not depend on the version of Unicode.
fn words_of(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let lines = text.lines().enumerate();
    lines.flat_map(|(at, line)| line.split_ascii_whitespace().chain([END]).map(move |word| (at + 1, word)))
}

fn translate(path: &Path, numbers: &HashMap<&str, u32>) -> Result<Vec<u32>, DataError> {
    let unknown = numbers.get(UNKNOWN);
    let number = |(line, word)| {
        numbers.get(word).or(unknown).copied().ok_or_else(|| {
            let why = format!(
                "line {line}: the word {word:?} is not in the training text, which has no {UNKNOWN} either"
            );
            DataError::damaged(path, why)
        })
    };
    words_of(&read(path)?).map(number).collect()
}
