//! Help with mistyped names: a wrong name and the known ones come in, the end of a sentence goes out.
//! What must hold: a name is suggested only where it is near, and otherwise all are listed.

/// The known names at most two edits from a wrong one, or all names when none is that near.
///
/// Capitals do not count: known names are expected in small letters.
///
/// ```
/// use redsync_names::nearest;
///
/// assert_eq!(nearest("sdg", &["sgd", "adam"]), "did you mean sgd?");
/// assert_eq!(nearest("lion", &["sgd", "adam"]), "known are sgd, adam");
/// ```
pub fn nearest(wrong: &str, known: &[&str]) -> String {
    let wrong = wrong.to_lowercase();
    let near: Vec<&str> =
        known.iter().copied().filter(|name| strsim::damerau_levenshtein(&wrong, name) <= 2).collect();
    match near.is_empty() {
        true => format!("known are {}", known.join(", ")),
        false => format!("did you mean {}?", near.join(" or ")),
    }
}
