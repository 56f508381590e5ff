//! Help with names that were mistyped.

/// The known names at most two edits from a wrong one, or all names when none is that near.
///
/// ```
/// assert_eq!(redsync_engine::nearest("sdg", &["sgd", "adam"]), "did you mean sgd?");
/// assert_eq!(redsync_engine::nearest("lion", &["sgd", "adam"]), "known are sgd, adam");
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
