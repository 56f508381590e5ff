//! Hashes of the weights: replicas must stay equal bit by bit.

use xxhash_rust::xxh3::xxh3_64;

/// One hash per layer.
pub(crate) fn layer_hashes(weights: &[&[f32]]) -> Vec<u64> {
    let bits = |layer: &&[f32]| {
        let mut hasher = xxhash_rust::xxh3::Xxh3::new();
        let mut bytes = [0u8; 4096];
        for chunk in layer.chunks(1024) {
            for (to, x) in bytes.chunks_exact_mut(4).zip(chunk) {
                to.copy_from_slice(&x.to_le_bytes());
            }
            hasher.update(&bytes[..4 * chunk.len()]);
        }
        hasher.digest()
    };
    weights.iter().map(bits).collect()
}

/// The hash of all layers together, the same on any machine.
///
/// ```
/// use redsync_engine::replica_hash;
/// assert_ne!(replica_hash(&[&[1.0], &[0.0]]), replica_hash(&[&[1.0], &[-0.0]]));
/// ```
pub fn replica_hash(weights: &[&[f32]]) -> u64 {
    combine(&layer_hashes(weights))
}

pub(crate) fn combine(hashes: &[u64]) -> u64 {
    let bytes: Vec<u8> = hashes.iter().flat_map(|hash| hash.to_le_bytes()).collect();
    xxh3_64(&bytes)
}
