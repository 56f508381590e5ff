//! The examples do what they say, and docs/burn.md shows the difference between the two programs with Burn as it is.

use std::path::Path;
use std::process::Command;

/// What an example prints. Cargo builds examples along with all tests of the package.
fn printed(name: &str) -> String {
    let program = Path::new(env!("CARGO_BIN_EXE_redsync")).with_file_name("examples").join(name);
    let output = Command::new(&program).output();
    let output =
        output.unwrap_or_else(|error| panic!("{}: {error} (cargo build --examples)", program.display()));
    assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("text")
}

/// The number behind a word.
fn number(text: &str, word: &str) -> f64 {
    let behind = text.split(word).nth(1).unwrap_or_else(|| panic!("no {word:?} in {text:?}"));
    let digits: String =
        behind.trim_start().chars().take_while(|c| c.is_ascii_digit() || *c == '.').collect();
    digits.parse().unwrap_or_else(|_| panic!("no number behind {word:?} in {text:?}"))
}

#[test]
fn a_loop_of_ones_own_learns_digits_with_a_tenth_of_the_bytes() {
    let text = printed("own_loop");
    assert!(number(&text, "accuracy") > 90.0, "{text}");
    assert!(number(&text, "%,") * 10.0 < number(&text, "instead of"), "{text}");
}

#[test]
fn a_burn_model_learns_digits_alone_and_on_four_ranks_with_a_fiftieth_of_the_bytes() {
    let (alone, together) = (printed("own_burn_model_alone"), printed("own_burn_model"));
    assert!(number(&alone, "accuracy") > 90.0, "{alone}");
    assert!(number(&together, "accuracy") > 90.0, "{together}");
    let ranks: Vec<&str> = together.lines().filter(|line| line.starts_with("sent")).collect();
    assert_eq!(ranks.len(), 4, "{together}");
    for rank in ranks {
        assert!(number(rank, "sent") * 50.0 < number(rank, "instead of"), "{rank}");
    }
}

fn source(path: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The lines that have to be taken from one text and put into it to get the other, removals first where both meet.
fn difference<'a>(from: &[&'a str], to: &[&'a str]) -> Vec<(char, &'a str)> {
    // How many lines both have in common from here on.
    let mut common = vec![vec![0; to.len() + 1]; from.len() + 1];
    for i in (0..from.len()).rev() {
        for j in (0..to.len()).rev() {
            common[i][j] = match from[i] == to[j] {
                true => common[i + 1][j + 1] + 1,
                false => common[i + 1][j].max(common[i][j + 1]),
            };
        }
    }
    let (mut i, mut j, mut changes) = (0, 0, Vec::new());
    while i < from.len() || j < to.len() {
        if i < from.len() && j < to.len() && from[i] == to[j] {
            (i, j) = (i + 1, j + 1);
        } else if i < from.len() && (j == to.len() || common[i + 1][j] >= common[i][j + 1]) {
            changes.push(('-', from[i]));
            i += 1;
        } else {
            changes.push(('+', to[j]));
            j += 1;
        }
    }
    changes
}

#[test]
fn the_difference_in_the_documentation_is_that_of_the_two_programs_and_at_most_ten_lines() {
    let [alone, together] =
        ["own_burn_model_alone", "own_burn_model"].map(|name| source(&format!("examples/{name}.rs")));
    let code = |text: &'static str| text.lines().filter(|line| !line.starts_with("//!")).collect::<Vec<_>>();
    let (alone, together) = (code(alone.leak()), code(together.leak()));
    let changes = difference(&alone, &together);
    let text = source("docs/burn.md");
    let shown =
        text.split("```diff\n").nth(1).and_then(|rest| rest.split("\n```").next()).expect("a difference");
    let real: Vec<String> = changes.iter().map(|(sign, line)| format!("{sign}{line}")).collect();
    assert_eq!(shown.lines().collect::<Vec<_>>(), real);
    for sign in ['-', '+'] {
        assert!(changes.iter().filter(|(own, _)| *own == sign).count() <= 10, "{changes:?}");
    }
}
