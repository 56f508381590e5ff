//! What the ranks of a training say to each other besides gradients: sums, barriers, the question whether to stop.
//! What must hold: these are started only between `finish` and the next backward pass, so that all ranks start them in the same
//! order as those of the synchronizer.

use super::TrainError;
use super::task::Seat;
use redsync_comm::{Communicator, Pending, Tag};
use redsync_core::wire::{Frame, Shape};
use redsync_core::{FrameWriter, IndexCode, Phase, Sparse, Values};
use std::sync::Arc;
use std::time::Duration;

/// The numbers of the trainer's collectives; the synchronizer's own are above and at the bottom.
#[derive(Clone, Copy, Debug)]
#[repr(u32)]
pub(super) enum Op {
    Loss = u32::MAX - 105,
    Clear,
    Saved,
    Statistics,
    Score,
    Stop,
}

/// This rank's ear and voice.
pub(super) struct Ranks {
    pub comm: Arc<dyn Communicator>,
    pub deadline: Duration,
}

impl Ranks {
    pub fn seat(&self) -> Seat {
        Seat { rank: self.comm.rank(), ranks: self.comm.size() }
    }

    /// The sum over all ranks; `what` is for the error.
    pub fn sum(
        &self,
        step: u64,
        op: Op,
        what: &'static str,
        values: Vec<f32>,
    ) -> Result<Vec<f32>, TrainError> {
        let pending = self.comm.allreduce(Tag { step, op: op as u32 }, values);
        pending.wait(self.deadline).map_err(|source| TrainError::Comm { what, source })
    }

    /// The sum over all ranks, in rank order, of values that travel as bf16, and the bytes of this rank's.
    pub fn sum_as_bf16(
        &self,
        step: u64,
        op: Op,
        what: &'static str,
        values: Vec<f32>,
    ) -> Result<(Vec<f32>, u64), TrainError> {
        let bad = |rank: usize, why: String| TrainError::Values { what, rank, why };
        let (own, mut sum) = (self.comm.rank(), vec![0.0; values.len()]);
        let n = u32::try_from(values.len()).map_err(|error| bad(own, error.to_string()))?;
        let all = Sparse::from_parts(n, (0..n).collect(), values);
        let all = all.map_err(|error| bad(own, error.to_string()))?;
        let mut writer = FrameWriter::new();
        writer.begin(step, own as u32, u64::from(op as u32));
        writer.push(&all, IndexCode::Every, Values::Bf16);
        let (bytes, tag) = (writer.finish().len() as u64, Tag { step, op: op as u32 });
        let gathered = self.comm.allgather(tag, writer.take()).wait(self.deadline);
        let gathered = gathered.map_err(|source| TrainError::Comm { what, source })?;
        let shape = Shape { n, phase: Phase::Both, indices: IndexCode::Every, values: Values::Bf16 };
        let mut one = Sparse::new();
        for (rank, frame) in gathered.iter().enumerate() {
            let frame = Frame::parse(frame).map_err(|why| bad(rank, why.to_string()))?;
            frame
                .expect(step, rank as u32, 1, u64::from(op as u32))
                .map_err(|why| bad(rank, why.to_string()))?;
            for message in frame.messages() {
                let message = message.map_err(|why| bad(rank, why.to_string()))?;
                message.decode(&shape, &mut one).map_err(|why| bad(rank, why.to_string()))?;
            }
            one.iter().for_each(|(index, value)| sum[index as usize] += value);
        }
        Ok((sum, bytes))
    }

    /// Waits until all ranks have come as far with a checkpoint.
    pub fn barrier(&self, step: u64, op: Op) -> Result<(), TrainError> {
        let pending = self.comm.barrier(Tag { step, op: op as u32 });
        pending.wait(self.deadline).map_err(|source| TrainError::Comm { what: "a checkpoint", source })
    }

    /// Asks whether some rank is to stop. The answer comes while the next step computes.
    pub fn ask(&self, step: u64, stop: bool) -> Pending<Vec<f32>> {
        self.comm.allreduce(Tag { step, op: Op::Stop as u32 }, vec![f32::from(u8::from(stop))])
    }

    /// Whether some rank is to stop.
    pub fn answer(&self, question: Pending<Vec<f32>>) -> Result<bool, TrainError> {
        let answer = question.wait(self.deadline);
        let answer = answer.map_err(|source| TrainError::Comm { what: "asking whether to stop", source })?;
        Ok(answer.first().is_some_and(|stop| *stop > 0.0))
    }
}
