//! The task of telling the next word. A text and a language model come in, losses and perplexities go out.
//! What must hold: the state of a recurrent network goes on from window to window of an epoch, and each epoch begins with a blank one; a
//! transformer has none, and sees windows in random order.

use super::task::{Score, Seat, Task};
use super::{Settings, TrainError};
use crate::flex::{untape, values};
use crate::net::{Language, Pass, State};
use crate::ops::loss::cross_entropy;
use burn::tensor::Tensor;
use redsync_data::TextSet;
use redsync_data::order::{Streams, Windows};

/// Streams of a rank when judging.
const JUDGE_STREAMS: usize = 10;

/// How the text is read in training.
enum Reading<'a> {
    Streams(Streams<'a>),
    Windows(Windows<'a>),
}

pub(super) struct Words<'a> {
    reading: Reading<'a>,
    /// By which epochs are judged, and the end.
    valid: Streams<'a>,
    test: Streams<'a>,
    state: State,
    batch: usize,
    bptt: usize,
    seat: Seat,
}

impl<'a> Words<'a> {
    pub fn new(
        text: &'a TextSet,
        net: &Language,
        settings: &Settings,
        seat: Seat,
    ) -> Result<Self, TrainError> {
        let Settings { batch_size: batch, bptt, .. } = *settings;
        if let Some(most) = net.longest_window().filter(|most| bptt > *most) {
            return Err(TrainError::Setting(format!(
                "bptt is {bptt}, but {} takes at most {most}",
                settings.model
            )));
        }
        let streams = |text: &'a [u32], batch| Streams::new(text, seat.ranks, batch, bptt);
        let reading = match net {
            Language::Lstm(_) => Reading::Streams(streams(&text.train, batch)?),
            Language::Gpt(_) => {
                Reading::Windows(Windows::new(&text.train, seat.ranks, batch, bptt, settings.seed)?)
            }
        };
        Ok(Words {
            reading,
            valid: streams(&text.valid, JUDGE_STREAMS)?,
            test: streams(&text.test, JUDGE_STREAMS)?,
            state: net.blank(batch),
            batch,
            bptt,
            seat,
        })
    }
}

impl Task for Words<'_> {
    type Net = Language;

    const METRIC: &'static str = "perplexity";
    const WORDS: bool = true;
    const HELD_BACK: bool = true;

    fn steps_per_epoch(&self) -> u64 {
        let steps = match &self.reading {
            Reading::Streams(streams) => streams.steps_per_epoch(),
            Reading::Windows(windows) => windows.steps_per_epoch(),
        };
        steps as u64
    }

    fn samples(&self) -> usize {
        self.batch * self.bptt
    }

    fn loss(&mut self, net: &Language, pass: &mut Pass, epoch: u32, at: usize) -> Tensor<1> {
        if at == 0 {
            self.state = net.blank(self.batch);
        }
        let (words, next) = match &mut self.reading {
            Reading::Streams(streams) => streams.window(at, self.seat.rank),
            Reading::Windows(windows) => windows.window(u64::from(epoch), at, self.seat.rank),
        };
        cross_entropy(net.forward(pass, &words, self.batch, &mut self.state), &next).0
    }

    fn judge(&self, net: &Language, last: bool) -> Score {
        let streams = if last { &self.test } else { &self.valid };
        let (mut state, mut score) = (net.blank(JUDGE_STREAMS), Score::default());
        for at in 0..streams.steps_per_epoch() {
            let (words, next) = streams.window(at, self.seat.rank);
            let scores = net.forward(&mut Pass::judging(), &words, JUDGE_STREAMS, &mut state);
            let (mean, right) = cross_entropy(scores, &next);
            score.add(values(&untape(mean))[0], right, next.len());
        }
        score
    }

    fn metric(score: &Score) -> f64 {
        score.mean_loss().exp()
    }

    fn rows(&mut self) -> Vec<(String, &mut [f32])> {
        let depths = self.state.iter_mut().enumerate();
        depths
            .flat_map(|(depth, (h, c))| {
                [(format!("h/{depth}"), &mut h[..]), (format!("c/{depth}"), &mut c[..])]
            })
            .collect()
    }
}
