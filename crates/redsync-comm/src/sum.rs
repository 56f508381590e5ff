//! The sum over ranks. Equally long slices in rank order come in, their sum goes out, always added in that order: this is
//! what makes replicas equal to the bit, whoever does the adding.

/// Values added at a time: small enough that the running sum stays in the first-level cache.
const BLOCK: usize = 2048;

/// Replaces `out` by the sum of `parts`, added in the order given. `None` stands for `out` itself.
///
/// An engine adds with this, one part per rank in rank order, whole vectors or segments, and has the bits of every other.
///
/// ```
/// let mut own = vec![1.0, 2.0];
/// redsync_comm::sum::in_order(&mut own, &[Some(&[10.0, 20.0]), None, Some(&[0.5, 0.5])]);
/// assert_eq!(own, [11.5, 22.5]);
/// ```
///
/// # Panics
/// When a part is shorter than `out`.
pub fn in_order(out: &mut [f32], parts: &[Option<&[f32]>]) {
    let mut sum = [0.0; BLOCK];
    for (block, start) in out.chunks_mut(BLOCK).zip((0..).step_by(BLOCK)) {
        let sum = &mut sum[..block.len()];
        for (position, part) in parts.iter().enumerate() {
            let values = part.map_or(&*block, |part| &part[start..start + sum.len()]);
            if position == 0 {
                sum.copy_from_slice(values);
            } else {
                sum.iter_mut().zip(values).for_each(|(sum, value)| *sum += value);
            }
        }
        block.copy_from_slice(sum);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_order_of_the_parts_is_the_order_of_the_additions() {
        let (big, small) = (vec![1e8; 5000], vec![3.0; 5000]);
        let mut out = vec![-1e8; 5000];
        in_order(&mut out, &[Some(&big), Some(&small), None]);
        assert!(out.iter().all(|&value| value == (1e8_f32 + 3.0) - 1e8));
        let mut out = vec![-1e8; 5000];
        in_order(&mut out, &[Some(&big), None, Some(&small)]);
        assert!(out.iter().all(|&value| value == 3.0));
    }
}
