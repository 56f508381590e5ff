//! The end of compression before the end of a training: an optimizer that goes on dense gets what residuals have gathered.
//! What must hold: it is the same on all ranks, bit by bit, so that replicas stay equal; together with what was applied it is all that
//! ever came in.

use crate::error::SyncError;
use crate::hello;
use crate::pipeline::lock;
use crate::state::LayerState;
use crate::synchronizer::Synchronizer;
use redsync_comm::Tag;
use redsync_core::Momentum;
use serde_json::{Value, json};

/// The number of this collective.
const OP: u32 = u32::MAX - 3;

/// What a layer has gathered on all ranks, as the usual libraries keep it.
#[derive(Clone, Debug, PartialEq)]
pub struct Gathered {
    /// The momentum buffer, or Adam's first moment; empty without momentum. What is still to come of it with the optimizer's momentum is
    /// what was to come with the residual's, which may be less.
    pub first: Vec<f32>,
    /// Adam's second moment, the mean over the ranks; empty but for Adam.
    pub second: Vec<f32>,
    /// Steps of Adam.
    pub steps: u64,
    /// What waits on all ranks and was not sent, or not sent on by owners: an update, to be applied at `rate`.
    pub waiting: Vec<f32>,
    /// The rate in whose units that is, if any was told.
    pub rate: Option<f32>,
}

impl Synchronizer {
    /// What a compressed layer has gathered on all ranks; None for one that is dense. All ranks call this, between two steps, for the
    /// same layers in the same order. The residual stays as it is.
    pub fn gathered(&self, layer: usize) -> Result<Option<Gathered>, SyncError> {
        self.submitter.inbox().check_between()?;
        let Some(state) = self.state_of(layer)? else { return Ok(None) };
        let LayerState { mut u, mut v, second, momentum, rate, .. } = state;
        let (size, ranks) = (self.shared.layers[layer].size, self.shared.among.size());
        // A rank that did not use the layer at some steps has made fewer, and may be in units of an older rate.
        let (mut own, steps) = second.map_or((Vec::new(), 0), |second| (second.own, second.steps));
        // Where a host has the layer whole on one rank, the others do not know of which momentum its u is.
        let coefficient = (!u.is_empty()).then(|| momentum.coefficient().to_bits());
        let about = json!([steps, rate.map(f32::to_bits), coefficient]);
        let all = hello::gather(&*self.shared.comm, &about, &self.shared.config)?;
        let most = all.iter().filter_map(|rank| rank[0].as_u64()).max().unwrap_or(steps);
        let first = |what: usize| {
            let bits = |rank: &Value| u32::try_from(rank[what].as_u64()?).ok();
            all.iter().find_map(bits).map(f32::from_bits)
        };
        let (common, coefficient) = (first(1), first(2));
        let rescaled = |rate: Option<f32>| rate.zip(common).map_or(1.0, |(own, common)| own / common);
        let factor = rescaled(rate);
        v.iter_mut().for_each(|v| *v *= factor);
        if let Some(seat) = self.seat() {
            // The parts of all ranks of a host add up to the layer.
            let part = seat.part(layer, size);
            let whole = |values: &mut Vec<f32>| {
                values.splice(0..0, std::iter::repeat_n(0.0, part.start));
                values.resize(size, 0.0);
            };
            whole(&mut v);
            if momentum.form() != Momentum::None.form() {
                whole(&mut u);
            }
            if matches!(momentum, Momentum::Adam(_)) {
                whole(&mut own);
            }
        }
        if let Some(kept) = self.shared.exchange.save(layer) {
            kept.add_to(&mut v, self.rank().0, rescaled(kept.rate));
        }
        let squares = match momentum {
            Momentum::Adam(adam) if steps > 0 => {
                let grown = |steps: u64| 1.0 - f64::from(adam.beta2).powf(steps as f64);
                (grown(most) / grown(steps) / ranks as f64) as f32
            }
            _ => 0.0,
        };
        let values = v.into_iter().chain(u.iter().copied()).chain(own.iter().map(|q| q * squares)).collect();
        let sum = self.shared.comm.allreduce(Tag { step: self.step(), op: OP }, values);
        let failed = |source| SyncError::exchange("what residuals have gathered".into(), source);
        let mut waiting = sum.wait(self.shared.config.deadline).map_err(failed)?;
        let mut first = waiting.split_off(size);
        let second = first.split_off(u.len());
        if let Some(m) = coefficient {
            let usual = lock(&self.shared.compressed).usual_momentum(layer).coefficient();
            let to_come = |m: f32| m / (1.0 - m);
            let share = if usual == m || usual == 0.0 { 1.0 } else { to_come(m) / to_come(usual) };
            // Nesterov's is kept times its coefficient.
            let times = if matches!(momentum, Momentum::Nesterov(_)) { usual } else { 1.0 };
            first.iter_mut().for_each(|u| *u = if times == 0.0 { 0.0 } else { *u * share / times });
        }
        Ok(Some(Gathered { first, second, steps: most, waiting, rate: common }))
    }
}
