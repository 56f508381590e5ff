//! Some ranks of a group as a group of their own: a communicator and the members come in, a communicator of the members goes out.
//! What must hold: the groups that are made of one communicator share all its ranks out among themselves, and start the same collectives
//! in the same order, since each is one all-to-all of them all, in which members of other groups send each other nothing. So errors,
//! order and deadlines are those of the communicator below, and errors name its ranks.

use crate::{CommError, Communicator, Gathered, Pending, Tag, sum};
use std::sync::Arc;

/// See the module.
///
/// ```
/// use redsync_comm::{Among, CommError, Communicator, Tag, local};
/// use std::{sync::Arc, time::Duration};
///
/// // Two hosts of two ranks each: which rank has the other's message?
/// let rank = |world: local::Local| {
///     let first = world.rank() / 2 * 2;
///     let host = Among::new(Arc::new(world), vec![first, first + 1]);
///     let messages = host.allgather(Tag { step: 0, op: 0 }, vec![host.rank() as u8 + 10 * first as u8]);
///     messages.wait(Duration::from_secs(60)).map(|all| all.iter().collect::<Vec<_>>().concat())
/// };
/// let ranks: Vec<_> = local::group(4).into_iter().map(|world| std::thread::spawn(move || rank(world))).collect();
/// let all: Result<Vec<_>, CommError> = ranks.into_iter().map(|rank| rank.join().expect("no panic")).collect();
/// assert_eq!(all?, [vec![0, 1], vec![0, 1], vec![20, 21], vec![20, 21]]);
/// # Ok::<(), CommError>(())
/// ```
pub struct Among {
    world: Arc<dyn Communicator>,
    members: Arc<[usize]>,
    rank: usize,
}

impl Among {
    /// The group of these ranks, in this order.
    ///
    /// # Panics
    /// If this rank is not one of them, or one of them is none of the communicator's.
    pub fn new(world: Arc<dyn Communicator>, members: Vec<usize>) -> Among {
        let rank = members.iter().position(|rank| *rank == world.rank());
        let rank = rank.expect("a group is made by its members");
        assert!(members.iter().all(|rank| *rank < world.size()), "a member that there is not");
        Among { world, members: members.into(), rank }
    }

    /// What the members are called by the communicator below.
    pub fn members(&self) -> &[usize] {
        &self.members
    }

    /// Each member gets its message, and nobody else anything.
    fn deal(&self, tag: Tag, messages: impl IntoIterator<Item = Vec<u8>>) -> Pending<Gathered> {
        let mut all = vec![Vec::new(); self.world.size()];
        for (member, message) in self.members.iter().zip(messages) {
            all[*member] = message;
        }
        let members = Arc::clone(&self.members);
        self.world.alltoall_few(tag, all).map(move |gathered| gathered.of(&members))
    }
}

impl Communicator for Among {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.members.len()
    }

    fn name(&self) -> &'static str {
        self.world.name()
    }

    fn allgather(&self, tag: Tag, message: Vec<u8>) -> Pending<Gathered> {
        self.deal(tag, std::iter::repeat_n(message, self.size()))
    }

    fn allreduce(&self, tag: Tag, mut values: Vec<f32>) -> Pending<Vec<f32>> {
        let all = self.allgather(tag, bytemuck::cast_slice(&values).to_vec());
        let (engine, members) = (self.name(), Arc::clone(&self.members));
        all.and_then(move |all| {
            let parts: Vec<Vec<f32>> = all.iter().map(bytemuck::pod_collect_to_vec).collect();
            if let Some(at) = parts.iter().position(|part| part.len() != values.len()) {
                let (rank, theirs, ours) = (members[at], parts[at].len(), values.len());
                let reason = format!("rank {rank} gives {theirs} values to a sum of {ours} at {tag}");
                return Err(CommError::Engine { engine, reason });
            }
            let parts: Vec<Option<&[f32]>> = parts.iter().map(|part| Some(&part[..])).collect();
            sum::in_order(&mut values, &parts);
            Ok(values)
        })
    }

    fn alltoall(&self, tag: Tag, messages: Vec<Vec<u8>>) -> Pending<Gathered> {
        if messages.len() != self.size() {
            return Pending::ready(Err(CommError::miscounted(self.name(), messages.len(), self.size())));
        }
        self.deal(tag, messages)
    }

    fn barrier(&self, tag: Tag) -> Pending<()> {
        self.deal(tag, Vec::new()).map(drop)
    }

    fn give_up(&self, reason: &str) {
        self.world.give_up(reason);
    }
}
