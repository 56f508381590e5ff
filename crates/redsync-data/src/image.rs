//! Images with labels: indices come in, normalized pixels and labels of a batch go out.
//! What must hold: an image depends on its index and the seed of the epoch alone, so it is the same whichever rank asks
//! and with whatever other images.

use std::ops::Range;
use std::sync::Arc;

use crate::random::{self, Purpose, Stream};
use crate::synthetic::Synthetic;

/// Under which [`ImageSet::limit`] permutes: fixed, so that a limit always means the same images.
const LIMIT_SEED: u64 = 0x6c69_6d69_7400;

/// What is done to an image each time it is trained on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Augment {
    /// Nothing.
    None,
    /// Mirrored left to right at random, and shifted at random by up to `pad` pixels each way. What is shifted in has the
    /// mean of its channel.
    FlipCrop {
        /// The largest shift.
        pad: usize,
    },
}

/// How the values of a channel are spread over the training images, in the units of the file: normalized values are
/// `(value - mean) / std`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Channel {
    /// The mean.
    pub mean: f32,
    /// The standard deviation, 1 if all values are equal.
    pub std: f32,
}

/// Images for training and testing. Clones share the pixels.
#[derive(Clone, Debug)]
pub struct ImageSet {
    /// The name of the data set.
    pub name: String,
    /// Channels, height and width.
    pub shape: [usize; 3],
    /// The number of classes: labels are smaller.
    pub classes: usize,
    /// What is done to training images. You may change it.
    pub augment: Augment,
    source: Source,
    train_picked: Option<Vec<u32>>,
    test_picked: Option<Vec<u32>>,
}

#[derive(Clone, Debug)]
enum Source {
    Held(Arc<Held>),
    Made(Synthetic),
}

/// Images in memory.
#[derive(Debug)]
struct Held {
    train: Split,
    test: Split,
    channels: Vec<Channel>,
    /// For each channel the normalized value of every byte.
    tables: Vec<[f32; 256]>,
}

/// Pixels, image after image in the order channel, row, column, and a label for each image.
#[derive(Debug, Default)]
pub(crate) struct Split {
    pub pixels: Vec<u8>,
    pub labels: Vec<u8>,
}

impl ImageSet {
    /// A set of images in memory. Each split has as many pixels as its labels and the shape say.
    pub(crate) fn held(
        name: &str,
        shape: [usize; 3],
        classes: usize,
        augment: Augment,
        train: Split,
        test: Split,
    ) -> Self {
        let channels = measure(&train.pixels, shape);
        let table =
            |channel: &Channel| std::array::from_fn(|byte| (byte as f32 - channel.mean) / channel.std);
        let tables = channels.iter().map(table).collect();
        let source = Source::Held(Arc::new(Held { train, test, channels, tables }));
        ImageSet { name: name.into(), shape, classes, augment, source, train_picked: None, test_picked: None }
    }

    /// A set of images that are made when they are asked for.
    pub(crate) fn made(name: &str, synthetic: Synthetic) -> Self {
        let (shape, classes, source) = (Synthetic::SHAPE, Synthetic::CLASSES, Source::Made(synthetic));
        let augment = Augment::None;
        ImageSet { name: name.into(), shape, classes, augment, source, train_picked: None, test_picked: None }
    }

    /// The number of training images.
    pub fn train_len(&self) -> usize {
        self.train_picked.as_ref().map_or(self.full_len().0, Vec::len)
    }

    /// The number of test images.
    pub fn test_len(&self) -> usize {
        self.test_picked.as_ref().map_or(self.full_len().1, Vec::len)
    }

    /// The channels as they were before normalization, measured on all training images whatever the limit.
    pub fn channels(&self) -> &[Channel] {
        match &self.source {
            Source::Held(held) => &held.channels,
            Source::Made(_) => &Synthetic::CHANNELS,
        }
    }

    /// Keeps only the first `train` training images and the first `test` test images of a fixed permutation; `None`
    /// leaves a split as it is. A limit counts from the whole set, also after another limit; one that is no smaller than
    /// the set lifts it.
    pub fn limit(&mut self, train: Option<usize>, test: Option<usize>) {
        let (train_len, test_len) = self.full_len();
        if let Some(count) = train {
            self.train_picked = pick(train_len, count, 0);
        }
        if let Some(count) = test {
            self.test_picked = pick(test_len, count, 1);
        }
    }

    /// Writes training images, normalized and augmented, one after the other in the order channel, row, column, and their
    /// labels. What the buffers held is gone.
    ///
    /// # Panics
    ///
    /// If an index is not below [`train_len`](Self::train_len).
    pub fn train_batch(
        &self,
        indices: &[u32],
        epoch_seed: u64,
        pixels: &mut Vec<f32>,
        labels: &mut Vec<u32>,
    ) {
        self.clear(indices.len(), pixels, labels);
        for (&index, out) in indices.iter().zip(pixels.chunks_exact_mut(self.image_len())) {
            let image = picked(&self.train_picked, index as usize);
            labels.push(match &self.source {
                Source::Held(held) => {
                    let stream = Stream::new(Purpose::Augment, epoch_seed, u64::from(index));
                    held.draw_train(image, self.shape, self.augment, stream, out)
                }
                Source::Made(synthetic) => synthetic.train_image(image, out),
            });
        }
    }

    /// Writes a range of the test images, normalized, and their labels. What the buffers held is gone.
    ///
    /// # Panics
    ///
    /// If the range goes beyond [`test_len`](Self::test_len).
    pub fn test_batch(&self, range: Range<usize>, pixels: &mut Vec<f32>, labels: &mut Vec<u32>) {
        self.clear(range.len(), pixels, labels);
        for (index, out) in range.zip(pixels.chunks_exact_mut(self.image_len())) {
            let image = picked(&self.test_picked, index);
            labels.push(match &self.source {
                Source::Held(held) => held.draw_test(image, self.shape, out),
                Source::Made(synthetic) => synthetic.test_image(image, out),
            });
        }
    }

    fn image_len(&self) -> usize {
        self.shape.iter().product()
    }

    fn full_len(&self) -> (usize, usize) {
        match &self.source {
            Source::Held(held) => (held.train.labels.len(), held.test.labels.len()),
            Source::Made(_) => Synthetic::LENGTHS,
        }
    }

    fn clear(&self, images: usize, pixels: &mut Vec<f32>, labels: &mut Vec<u32>) {
        pixels.clear();
        pixels.resize(images * self.image_len(), 0.0);
        labels.clear();
    }
}

impl Held {
    /// Draws a training image over zeros and returns its label.
    fn draw_train(
        &self,
        image: usize,
        shape: [usize; 3],
        augment: Augment,
        mut stream: Stream,
        out: &mut [f32],
    ) -> u32 {
        let pixels = &self.train.pixels[image * out.len()..][..out.len()];
        match augment {
            Augment::None => self.draw(pixels, shape, out),
            Augment::FlipCrop { pad } => {
                let flip = stream.below(2) == 1;
                let mut shift = || stream.below(2 * pad as u32 + 1) as isize - pad as isize;
                self.draw_moved(pixels, shape, flip, (shift(), shift()), out);
            }
        }
        u32::from(self.train.labels[image])
    }

    /// Draws a test image and returns its label.
    fn draw_test(&self, image: usize, shape: [usize; 3], out: &mut [f32]) -> u32 {
        self.draw(&self.test.pixels[image * out.len()..][..out.len()], shape, out);
        u32::from(self.test.labels[image])
    }

    fn draw(&self, pixels: &[u8], [_, height, width]: [usize; 3], out: &mut [f32]) {
        let planes = pixels.chunks_exact(height * width).zip(out.chunks_exact_mut(height * width));
        for ((from, to), table) in planes.zip(&self.tables) {
            to.iter_mut().zip(from).for_each(|(value, &byte)| *value = table[usize::from(byte)]);
        }
    }

    /// Draws an image that is mirrored or not, then moved by a number of rows and columns, over zeros.
    fn draw_moved(
        &self,
        pixels: &[u8],
        [_, height, width]: [usize; 3],
        flip: bool,
        (down, right): (isize, isize),
        out: &mut [f32],
    ) {
        let (rows, columns) = (overlap(height, down), overlap(width, right));
        let planes = pixels.chunks_exact(height * width).zip(out.chunks_exact_mut(height * width));
        for ((from, to), table) in planes.zip(&self.tables) {
            for row in rows.clone() {
                let from = &from[row.wrapping_add_signed(-down) * width..][..width];
                for column in columns.clone() {
                    let source = column.wrapping_add_signed(-right);
                    let source = if flip { width - 1 - source } else { source };
                    to[row * width + column] = table[usize::from(from[source])];
                }
            }
        }
    }
}

/// The positions of `0..len` that are still covered after a move by `by`.
fn overlap(len: usize, by: isize) -> Range<usize> {
    let start = by.clamp(0, len as isize) as usize;
    let end = (len as isize + by).clamp(start as isize, len as isize) as usize;
    start..end
}

/// Mean and standard deviation of each channel, from exact counts.
fn measure(pixels: &[u8], [channels, height, width]: [usize; 3]) -> Vec<Channel> {
    let mut counts = vec![[0u64; 256]; channels];
    for (plane, pixels) in pixels.chunks_exact(height * width).enumerate() {
        let counts = &mut counts[plane % channels];
        pixels.iter().for_each(|&byte| counts[usize::from(byte)] += 1);
    }
    counts.iter().map(Channel::of).collect()
}

impl Channel {
    fn of(counts: &[u64; 256]) -> Self {
        let total = counts.iter().sum::<u64>().max(1) as f64;
        let average = |of: &dyn Fn(f64) -> f64| {
            let terms = counts.iter().enumerate().map(|(byte, &count)| of(byte as f64) * count as f64);
            terms.sum::<f64>() / total
        };
        let mean = average(&|x| x);
        let variance = average(&|x| (x - mean).powi(2));
        Channel { mean: mean as f32, std: if variance > 0.0 { variance.sqrt() as f32 } else { 1.0 } }
    }
}

/// The first `count` of a permutation of `0..len`, or nothing if that would be all.
fn pick(len: usize, count: usize, split: u64) -> Option<Vec<u32>> {
    if count >= len {
        return None;
    }
    let mut all = Vec::new();
    random::permute(len as u32, &mut Stream::new(Purpose::Limit, LIMIT_SEED, split), &mut all);
    all.truncate(count);
    all.shrink_to_fit();
    Some(all)
}

/// The image behind an index.
fn picked(picked: &Option<Vec<u32>>, index: usize) -> usize {
    picked.as_ref().map_or(index, |picked| picked[index] as usize)
}
