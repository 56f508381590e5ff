//! Equations 1 and 2 of the paper: what a collective costs on a network of single-ported hosts.
//! Comes in: ranks, bytes, a link, an algorithm. Goes out: seconds, divided into what keeps the link busy and what does not.

use super::platform::Link;
use serde::{Deserialize, Serialize};

/// How a dense gradient is summed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Allreduce {
    /// Recursive halving, then recursive doubling: the paper's.
    #[default]
    Rabenseifner,
    /// Around a ring: as many bytes, more messages.
    Ring,
    /// Each rank sums one segment, for which all send it their pieces directly: our MPI engine's.
    Direct,
}

/// How messages are gathered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Allgather {
    /// Recursive doubling: the paper's.
    RecursiveDoubling,
    /// Around a ring.
    Ring,
    /// As MPI libraries do: recursive doubling, around a ring if the messages together are long.
    #[default]
    ByLength,
    /// Every rank sends to every other directly, many exchanges at a time: our MPI engine's.
    Direct,
}

/// Bytes of all messages together from which [`Allgather::ByLength`] goes around a ring.
const LONG: f64 = 512.0 * 1024.0;

/// Seconds of one collective.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    /// Seconds in which the next collective may already use the link.
    pub latency: f64,
    /// Seconds in which it may not.
    pub occupancy: f64,
}

impl Cost {
    /// From the start to the end.
    pub fn total(self) -> f64 {
        self.latency + self.occupancy
    }
}

/// Rounds of an algorithm that doubles: the logarithm of `p`, rounded up.
pub fn lg(p: usize) -> f64 {
    f64::from(p.max(1).next_power_of_two().trailing_zeros())
}

/// Bytes that a rank sends to sum `bytes`: 2 (p-1)/p times as many.
pub fn dense_bytes(p: usize, bytes: f64) -> f64 {
    2.0 * (p as f64 - 1.0) / p as f64 * bytes
}

/// Bytes that a rank sends or receives to gather `bytes` from each: p-1 times as many.
pub fn sparse_bytes(p: usize, bytes: f64) -> f64 {
    (p as f64 - 1.0) * bytes
}

/// Equation 2: `2 lg(p) alpha + 2 (p-1)/p M beta + (p-1)/p gamma_2`, for a gradient of `bytes` whose full reduction takes
/// `gamma_2` seconds.
///
/// ```
/// use redsync_engine::cost::{Allreduce, Link, dense_allreduce};
/// let link = Link::new(10e-6, 1e-9);
/// let cost = dense_allreduce(4, 1e6, &link, Allreduce::Rabenseifner, 1e-3).total();
/// assert!((cost - (2.0 * 2.0 * 10e-6 + 1.5 * 1e-3 + 0.75 * 1e-3)).abs() < 1e-12);
/// ```
pub fn dense_allreduce(p: usize, bytes: f64, link: &Link, how: Allreduce, gamma_2: f64) -> Cost {
    if p < 2 {
        return Cost::default();
    }
    let others = p as f64 - 1.0;
    let reduction = others / p as f64 * gamma_2;
    let sent = dense_bytes(p, bytes);
    let mut cost = match how {
        Allreduce::Rabenseifner => link.one_at_a_time(2.0 * lg(p), sent),
        Allreduce::Ring => link.one_at_a_time(2.0 * others, sent),
        Allreduce::Direct => link.all_at_once(2.0, 2.0 * others, sent),
    };
    cost.occupancy += reduction;
    cost
}

/// The transfer of equation 1: `lg(p) alpha + (p-1) M D beta`, for messages of `bytes` = M D.
pub fn sparse_allgather(p: usize, bytes: f64, link: &Link, how: Allgather) -> Cost {
    if p < 2 {
        return Cost::default();
    }
    let others = p as f64 - 1.0;
    let sent = sparse_bytes(p, bytes);
    match how {
        Allgather::ByLength if p as f64 * bytes > LONG => link.one_at_a_time(others, sent),
        Allgather::ByLength | Allgather::RecursiveDoubling => link.one_at_a_time(lg(p), sent),
        Allgather::Ring => link.one_at_a_time(others, sent),
        Allgather::Direct => link.all_at_once(1.0, others, sent),
    }
}

/// An all-to-all in which a rank sends `bytes` to all others together, and receives as many: in p-1 messages at once where the engine sends
/// directly; elsewhere one after the other, or in lg(p) rounds that carry each byte lg(p)/2 times, whichever is faster.
pub fn all_to_all(p: usize, bytes: f64, link: &Link, how: Allgather) -> Cost {
    if p < 2 {
        return Cost::default();
    }
    let others = p as f64 - 1.0;
    if how == Allgather::Direct {
        return link.all_at_once(1.0, others, bytes);
    }
    let (pairs, rounds) =
        (link.one_at_a_time(others, bytes), link.one_at_a_time(lg(p), 0.5 * lg(p).max(2.0) * bytes));
    if pairs.total() <= rounds.total() { pairs } else { rounds }
}

/// Equation 1 of the paper for one layer by itself: `T_select + lg(p) alpha + (p-1) M D beta + p gamma_1`, where `gamma_1` are
/// the seconds to decompress one rank's message.
pub fn sparse_allreduce(
    t_select: f64,
    p: usize,
    bytes: f64,
    link: &Link,
    how: Allgather,
    gamma_1: f64,
) -> f64 {
    t_select + sparse_allgather(p, bytes, link, how).total() + p as f64 * gamma_1
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINK: Link = Link::new(25e-6, 0.8e-9);

    fn near(a: f64, b: f64) -> bool {
        (a - b).abs() <= 1e-12 * a.abs().max(b.abs())
    }

    #[test]
    fn one_rank_exchanges_nothing() {
        assert_eq!(dense_allreduce(1, 1e9, &LINK, Allreduce::Ring, 1.0), Cost::default());
        assert_eq!(sparse_allgather(1, 1e9, &LINK, Allgather::Direct), Cost::default());
    }

    #[test]
    fn equation_2_is_the_papers() {
        for (p, rounds) in [(2, 1.0), (8, 3.0), (128, 7.0)] {
            let p_ = p as f64;
            let expected =
                2.0 * rounds * 25e-6 + 2.0 * (p_ - 1.0) / p_ * 4e6 * 0.8e-9 + (p_ - 1.0) / p_ * 3e-3;
            assert!(near(dense_allreduce(p, 4e6, &LINK, Allreduce::Rabenseifner, 3e-3).total(), expected));
        }
    }

    #[test]
    fn equation_1_is_the_papers() {
        for (p, rounds) in [(2, 1.0), (8, 3.0), (128, 7.0)] {
            let p_ = p as f64;
            let expected = 2e-3 + rounds * 25e-6 + (p_ - 1.0) * 4e3 * 0.8e-9 + p_ * 1e-5;
            let how = Allgather::RecursiveDoubling;
            assert!(near(sparse_allreduce(2e-3, p, 4e3, &LINK, how, 1e-5), expected));
        }
    }

    #[test]
    fn a_ring_sends_the_same_bytes_in_more_messages() {
        let long = 1e6;
        let ring = dense_allreduce(16, long, &LINK, Allreduce::Ring, 0.0).total();
        let halving = dense_allreduce(16, long, &LINK, Allreduce::Rabenseifner, 0.0).total();
        assert!(near(ring - halving, 2.0 * (15.0 - 4.0) * 25e-6));
        let by_length = |bytes| sparse_allgather(16, bytes, &LINK, Allgather::ByLength);
        assert_eq!(by_length(1e3), sparse_allgather(16, 1e3, &LINK, Allgather::RecursiveDoubling));
        assert_eq!(by_length(long), sparse_allgather(16, long, &LINK, Allgather::Ring));
    }

    #[test]
    fn ranks_that_are_no_power_of_two_take_a_round_more() {
        assert_eq!([1, 2, 3, 4, 5, 1024].map(lg), [0.0, 1.0, 2.0, 2.0, 3.0, 10.0]);
    }

    /// The paper: at 0.1% on 128 ranks the bandwidth is 12.8% of that of dense synchronization. Equations 1 and 2 give that
    /// for messages of 64 bits per element; for the 32 bits of quantized ones they give half.
    #[test]
    fn at_128_ranks_the_bandwidth_is_an_eighth_of_dense() {
        let share = |bits: f64| sparse_bytes(128, 1e6 * 0.001 * bits / 8.0) / dense_bytes(128, 4e6);
        assert!(near(share(64.0), 0.128));
        assert!(near(share(32.0), 0.064));
    }
}
