//! Measures this machine and the network among the ranks: in comes a communicator, out goes a [`Platform`].
//! What must hold: all ranks measure at the same time, so that what they share (cores, memory, links) is shared in the figures
//! too, and every figure is agreed on, the median of the ranks, so the platform is the same everywhere. A few seconds.

mod link;
mod rates;
mod whole;

use crate::config::Config;
use crate::cost::{Line, Link, Network, Platform};
use crate::error::SyncError;
use redsync_comm::{Communicator, Tag};
use std::sync::Arc;
use std::time::Instant;

/// Measures what [`Platform`] holds. All ranks of the communicator call this at the same time, with the same configuration.
///
/// `progress` is told how much is done, from 0 to 1.
///
/// ```no_run
/// use redsync_engine::{Config, measure};
/// use std::sync::Arc;
/// let comm = Arc::new(redsync_comm::mpi::world()?);
/// let platform = measure::platform(comm, &Config::default(), &mut |_| ())?;
/// println!("{} bytes per second", 1.0 / platform.network.sparse.beta);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn platform(
    comm: Arc<dyn Communicator>,
    config: &Config,
    progress: &mut dyn FnMut(f64),
) -> Result<Platform, SyncError> {
    let mut meter = Meter { comm: &*comm, config, op: 0 };
    let cores = meter.cores()?;
    let rates = rates::measure(&mut meter, &mut |done| progress(0.4 * done))?;
    let network = link::measure(&mut meter, &mut |done| progress(0.4 + 0.5 * done))?;
    let name = format!("{} ranks, measured through {}", comm.size(), comm.name());
    let mut platform = Platform {
        name,
        cores,
        contention: 1.0,
        start: 0.0,
        background: true,
        ranks_per_host: 1,
        network,
        rates,
    };
    let op = meter.op;
    if comm.size() > 1 {
        platform.start = whole::start(&comm, config, &platform, op)?;
        platform.contention = whole::contention(&comm, config, &platform, op + 1)?;
    }
    progress(1.0);
    Ok(platform)
}

/// Measures the rates of this machine alone, for a network that is only described.
pub fn machine(
    config: &Config,
    network: Network,
    progress: &mut dyn FnMut(f64),
) -> Result<Platform, SyncError> {
    let alone = redsync_comm::local::group(1).remove(0);
    let mut meter = Meter { comm: &alone, config, op: 0 };
    let cores = meter.cores()?;
    let mut rates = rates::measure(&mut meter, progress)?;
    // A described link carries bytes only.
    rates.gamma_2 = rates.update.per;
    Ok(Platform {
        name: "this machine".into(),
        cores,
        contention: 1.0,
        start: 0.0,
        background: true,
        ranks_per_host: 1,
        network,
        rates,
    })
}

/// A network of one rank: nothing is ever sent over it, but figures have to be there.
fn no_network() -> Network {
    Network { sparse: Link::new(0.0, 1e-12), dense: Link::new(0.0, 1e-12), ..Network::default() }
}

/// What a rank measures with.
struct Meter<'a> {
    comm: &'a dyn Communicator,
    config: &'a Config,
    /// Numbers the collectives.
    op: u32,
}

impl Meter<'_> {
    fn tag(&mut self) -> Tag {
        self.op += 1;
        Tag { step: u64::MAX, op: self.op }
    }

    fn failed(source: redsync_comm::CommError) -> SyncError {
        SyncError::Exchange { layers: "measuring".into(), source }
    }

    /// What every rank says.
    fn gather(&mut self, ours: Vec<u8>) -> Result<Vec<Vec<u8>>, SyncError> {
        let tag = self.tag();
        let all = self.comm.allgather(tag, ours).wait(self.config.deadline).map_err(Self::failed)?;
        Ok(all.iter().map(<[u8]>::to_vec).collect())
    }

    /// The median over all ranks.
    fn agree(&mut self, ours: f64) -> Result<f64, SyncError> {
        let all = self.gather(ours.to_le_bytes().to_vec())?;
        let number = |bytes: &Vec<u8>| bytes.as_slice().try_into().map_or(f64::NAN, f64::from_le_bytes);
        let mut all: Vec<f64> = all.iter().map(number).collect();
        Ok(median(&mut all))
    }

    /// Waits for all ranks, so that they begin together.
    fn together(&mut self) -> Result<(), SyncError> {
        let tag = self.tag();
        self.comm.barrier(tag).wait(self.config.deadline).map_err(Self::failed)
    }

    /// The median time of some calls, begun together and agreed on. The first call of each rank does not count.
    fn time(
        &mut self,
        calls: usize,
        mut call: impl FnMut() -> Result<(), SyncError>,
    ) -> Result<f64, SyncError> {
        self.together()?;
        let mut times = Vec::with_capacity(calls);
        for i in 0..=calls {
            let begin = Instant::now();
            call()?;
            if i > 0 {
                times.push(begin.elapsed().as_secs_f64());
            }
        }
        let ours = median(&mut times);
        self.agree(ours)
    }

    /// The line of a cost, from a small and a large size.
    fn line(
        &mut self,
        sizes: [usize; 2],
        calls: usize,
        mut call: impl FnMut(usize) -> Result<(), SyncError>,
    ) -> Result<Line, SyncError> {
        let [small, large] = sizes;
        // A call on something small is timed in many at once, or the clock would be measured.
        const MANY: usize = 16;
        let few = self.time(calls, || (0..MANY).try_for_each(|_| call(small)))? / MANY as f64;
        let many = self.time(calls, || call(large))?;
        Ok(Line::through((small as f64, few), (large as f64, many)))
    }

    /// Cores that a rank has, when all ranks of its machine work: its share of each that it may run on.
    fn cores(&mut self) -> Result<f64, SyncError> {
        // Containers and network namespaces on one machine have one kernel, which has one boot id.
        let machine = std::fs::read_to_string("/proc/sys/kernel/random/boot_id");
        let machine = machine.unwrap_or_else(|_| self.comm.rank().to_string());
        let all = self.gather(serde_json::json!([machine, allowed_cores()]).to_string().into_bytes())?;
        let said =
            |bytes: &Vec<u8>| serde_json::from_slice::<(String, Vec<usize>)>(bytes).unwrap_or_default();
        let all: Vec<(String, Vec<usize>)> = all.iter().map(said).collect();
        let here = || all.iter().filter(|(theirs, _)| *theirs == machine);
        let sharing = |core: &usize| here().filter(|(_, cores)| cores.contains(core)).count();
        let ours = allowed_cores().iter().map(|core| 1.0 / sharing(core).max(1) as f64).sum();
        self.agree(ours)
    }
}

/// The numbers of the cores that this process may run on.
fn allowed_cores() -> Vec<usize> {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    let range = |part: &str| {
        let (first, last) = part.trim().split_once('-').unwrap_or((part.trim(), part.trim()));
        Some(first.parse::<usize>().ok()?..=last.parse::<usize>().ok()?)
    };
    let cores: Vec<usize> = list.unwrap_or_default().split(',').filter_map(range).flatten().collect();
    if !cores.is_empty() {
        return cores;
    }
    (0..std::thread::available_parallelism().map_or(1, usize::from)).collect()
}

/// The middle of some numbers, which get sorted; 0 of none.
pub fn median(of: &mut [f64]) -> f64 {
    of.sort_by(f64::total_cmp);
    match of.len() {
        0 => 0.0,
        len if len % 2 == 1 => of[len / 2],
        len => (of[len / 2 - 1] + of[len / 2]) / 2.0,
    }
}

/// Something like a normal distribution, the same everywhere.
fn noise(len: usize, seed: u64) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    };
    // The sum of four uniform numbers.
    let normal = |bits: u64| (0..4).map(|i| (bits >> (16 * i) & 0xffff) as f32 / 65536.0 - 0.5).sum();
    (0..len).map(|_| normal(next())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use redsync_comm::local;

    #[test]
    fn all_ranks_measure_the_same_sound_platform() {
        let run = |comm: local::Local| {
            std::thread::spawn(move || platform(Arc::new(comm), &Config::default(), &mut |_| ()))
        };
        let ranks: Vec<_> = local::group(2).into_iter().map(run).collect();
        let all: Vec<Platform> = ranks.into_iter().map(|rank| rank.join().unwrap().unwrap()).collect();
        assert_eq!(all[0], all[1]);
        all[0].check().unwrap();
        let cores = std::thread::available_parallelism().unwrap().get() as f64;
        assert_eq!(all[0].cores, cores / 2.0);
        assert!(!all[0].network.dense.alone.is_empty());
    }

    #[test]
    fn a_machine_alone_has_rates_and_the_network_it_was_told() {
        let network = Network::new(25e-6, 0.8e-9);
        let mut seen = Vec::new();
        let platform = machine(&Config::default(), network.clone(), &mut |done| seen.push(done)).unwrap();
        platform.check().unwrap();
        assert_eq!(platform.network, network);
        assert!(platform.rates.select.carried.per > 0.0 && platform.rates.apply.gamma_1 > 0.0);
        assert!(seen.is_sorted() && seen.last() == Some(&1.0));
    }
}
