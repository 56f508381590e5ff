//! The task of telling classes of images. A set of images comes in, and a network; losses and the share of right answers go out.

use super::task::{Score, Seat, Task};
use super::{Settings, TrainError};
use crate::flex::{device, untape, values};
use crate::net::{Classifier, Pass};
use crate::ops::loss::cross_entropy;
use burn::tensor::{Device, Tensor, TensorData};
use redsync_data::ImageSet;
use redsync_data::order::Epochs;

/// Images in a batch when judging.
const JUDGE_BATCH: usize = 100;

pub(super) struct Images<'a> {
    set: &'a ImageSet,
    epochs: Epochs,
    batch: usize,
    seat: Seat,
}

impl<'a> Images<'a> {
    pub fn new(set: &'a ImageSet, settings: &Settings, seat: Seat) -> Result<Self, TrainError> {
        let epochs = Epochs::new(set.train_len(), seat.ranks, settings.batch_size, settings.seed)?;
        Ok(Images { set, epochs, batch: settings.batch_size, seat })
    }

    fn tensor(&self, pixels: Vec<f32>, images: usize, device: &Device) -> Tensor<4> {
        let [channels, height, width] = self.set.shape;
        Tensor::from_data(TensorData::new(pixels, [images, channels, height, width]), device)
    }
}

impl Task for Images<'_> {
    type Net = Classifier;

    const METRIC: &'static str = "accuracy";
    const WORDS: bool = false;
    const HELD_BACK: bool = false;

    fn steps_per_epoch(&self) -> u64 {
        self.epochs.steps_per_epoch() as u64
    }

    fn samples(&self) -> usize {
        self.batch
    }

    fn loss(&mut self, net: &Classifier, pass: &mut Pass, epoch: u32, at: usize) -> Tensor<1> {
        let (mut pixels, mut labels) = (Vec::new(), Vec::new());
        let seed = self.epochs.epoch_seed(u64::from(epoch));
        let indices = self.epochs.indices(u64::from(epoch), at, self.seat.rank);
        self.set.train_batch(indices, seed, &mut pixels, &mut labels);
        let images = self.tensor(pixels, labels.len(), &device());
        cross_entropy(net.forward(pass, images), &labels).0
    }

    fn judge(&self, net: &Classifier, _last: bool) -> Score {
        let (count, Seat { rank, ranks }) = (self.set.test_len(), self.seat);
        let (begin, end) = (count * rank / ranks, count * (rank + 1) / ranks);
        let mut score = Score::default();
        for from in (begin..end).step_by(JUDGE_BATCH) {
            let (mut pixels, mut labels) = (Vec::new(), Vec::new());
            self.set.test_batch(from..end.min(from + JUDGE_BATCH), &mut pixels, &mut labels);
            let images = self.tensor(pixels, labels.len(), &Device::flex());
            let scores = net.forward(&mut Pass::judging(), images);
            let (mean, right) = cross_entropy(scores, &labels);
            score.add(values(&untape(mean))[0], right, labels.len());
        }
        score
    }

    fn metric(score: &Score) -> f64 {
        score.correct / score.count.max(1.0)
    }
}
