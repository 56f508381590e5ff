//! The exact top-k of a few candidates.
//! Comes in: keys, in any order. Goes out: the k largest of them, in the order they had, and the smallest of those k. What
//! must hold: the result is that of a full sort, whatever the keys; only the time depends on luck.

use crate::kernel::Key;

/// With fewer keys than this a sample costs more than it saves.
const SAMPLED_FROM: usize = 2048;
/// Keys looked at to guess a bound. Their ranks are off by about `len / (2 * sqrt(SAMPLE))` at worst.
const SAMPLE: usize = 256;
/// How far above its rank the guess is taken, in keys of the sample: three deviations at worst.
const SLACK: usize = 3 * SAMPLE.isqrt() / 2;

/// Keeps the `k` largest keys, in the order they have, and returns the smallest of them. There must be at least `k`,
/// and `k` must not be zero. Afterwards `scratch` holds the others, smaller, in its first places.
pub(crate) fn largest(keys: &mut Vec<Key>, k: usize, scratch: &mut Vec<Key>) -> Key {
    if scratch.len() < keys.len() {
        scratch.resize(keys.len(), keys[0]);
    }
    let others = keys.len() - k;
    let least = *smallest(keys, others, scratch).select_nth_unstable(others).1;
    retain_from(keys, least);
    least
}

/// Copies the smallest keys, more than `count` of them, to the beginning of `scratch` and returns them there: all keys below
/// a bound that a sample suggests, or, where the sample misleads, simply all.
fn smallest<'a>(keys: &[Key], count: usize, scratch: &'a mut [Key]) -> &'a mut [Key] {
    if keys.len() >= SAMPLED_FROM {
        let bound = guess(keys, count, scratch);
        // Every key is written, and the end moves on only if it is below: a branch would be mispredicted too often.
        let mut end = 0;
        for key in keys {
            scratch[end] = *key;
            end += usize::from(*key < bound);
        }
        if end > count {
            return &mut scratch[..end];
        }
    }
    let all = &mut scratch[..keys.len()];
    all.copy_from_slice(keys);
    all
}

/// A key that most likely has more than `count` keys below it, and not many more.
fn guess(keys: &[Key], count: usize, scratch: &mut [Key]) -> Key {
    let sample = &mut scratch[..SAMPLE];
    for (place, key) in sample.iter_mut().zip(keys.iter().step_by(keys.len() / SAMPLE)) {
        *place = *key;
    }
    let rank = count * SAMPLE / keys.len() + SLACK;
    *sample.select_nth_unstable(rank.min(SAMPLE - 1)).1
}

/// Keeps the keys that are not below `least`, without a branch on them.
fn retain_from(keys: &mut Vec<Key>, least: Key) {
    let mut end = 0;
    for i in 0..keys.len() {
        let key = keys[i];
        keys[end] = key;
        end += usize::from(key >= least);
    }
    keys.truncate(end);
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Few distinct magnitudes, many, or sorted ones: a sample may say much or little about the rest.
    fn magnitudes() -> impl Strategy<Value = Vec<u32>> {
        let len = prop_oneof![1usize..300, SAMPLED_FROM - 5..3 * SAMPLED_FROM];
        let some = (len, 1u32..1000, any::<bool>());
        some.prop_flat_map(|(len, distinct, sorted)| {
            proptest::collection::vec(0..distinct * distinct, len).prop_map(move |mut magnitudes| {
                if sorted {
                    magnitudes.sort_unstable();
                }
                magnitudes
            })
        })
    }

    fn check(magnitudes: &[u32], k: usize) {
        let keys: Vec<Key> = (0u32..).zip(magnitudes).map(|(i, m)| Key::new(*m as f32, i)).collect();
        let mut sorted = keys.clone();
        sorted.sort_unstable();
        let (others, chosen) = sorted.split_at(keys.len() - k);
        let (mut kept, mut scratch) = (keys.clone(), Vec::new());
        assert_eq!(largest(&mut kept, k, &mut scratch), chosen[0]);
        let expected: Vec<Key> = keys.into_iter().filter(|key| *key >= chosen[0]).collect();
        assert_eq!(kept, expected);
        scratch[..others.len()].sort_unstable();
        assert_eq!(&scratch[..others.len()], others);
    }

    proptest! {
        #[test]
        fn the_largest_are_those_of_a_full_sort(magnitudes in magnitudes(), at in 0f64..1.0) {
            check(&magnitudes, 1 + (at * (magnitudes.len() - 1) as f64) as usize);
            check(&magnitudes, 1);
            check(&magnitudes, magnitudes.len());
        }
    }

    #[test]
    fn a_sample_that_misleads_changes_nothing() {
        let (len, step) = (4 * SAMPLED_FROM, 4 * SAMPLED_FROM / SAMPLE);
        let seen = |i: usize| i.is_multiple_of(step);
        let low: Vec<u32> = (0..len).map(|i| if seen(i) { 1 } else { 1000 + i as u32 }).collect();
        let high: Vec<u32> = (0..len).map(|i| if seen(i) { 100_000 } else { 1000 + i as u32 }).collect();
        for magnitudes in [low, high] {
            for k in [1, len / 8, len / 2, len - SAMPLE, len - 1] {
                check(&magnitudes, k);
            }
        }
    }
}
