//! Help with names that were mistyped.

/// The known names at most two edits from a wrong one, or all names when none is that near.
///
/// ```
/// assert_eq!(redsync_engine::nearest("sdg", &["sgd", "adam"]), "did you mean sgd?");
/// assert_eq!(redsync_engine::nearest("lion", &["sgd", "adam"]), "known are sgd, adam");
/// ```
pub fn nearest(wrong: &str, known: &[&str]) -> String {
    let wrong = wrong.to_lowercase();
    let near: Vec<&str> = known.iter().copied().filter(|name| edits(&wrong, name) <= 2).collect();
    match near.is_empty() {
        true => format!("known are {}", known.join(", ")),
        false => format!("did you mean {}?", near.join(" or ")),
    }
}

/// Levenshtein distance: `row[j]` is the distance of the part of `a` seen so far to the first `j` of `b`.
fn edits(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.chars().count()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, y) in b.chars().enumerate() {
            let replaced = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.chars().count()]
}

#[cfg(test)]
mod tests {
    use super::edits;

    #[test]
    fn edits_counts_insertions_deletions_and_replacements() {
        assert_eq!([edits("", "abc"), edits("abc", ""), edits("kitten", "sitting")], [3, 3, 3]);
        assert_eq!(edits("vgg16", "vgg16"), 0);
    }
}
