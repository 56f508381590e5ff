//! Convolution as one node: windows of some images are laid out as columns, small enough for the cache, and each product with the
//! filters is one large matrix product. Burn's own backward pass turns both gradients into convolutions again; `redsync bench conv`
//! compares the two.
//! What must hold: the bits of all results depend on the shapes alone, not on the number of threads.

use super::gemm::{Matrix, MatrixMut, Threads, gemm, sharing_pays};
use crate::flex::{Inner, Keep, beside, contiguous, given, shape, tape, tensor, values};
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::flex::FlexTensor;
use burn::tensor::Tensor;
use rayon::prelude::*;

/// Columns that a product should have at least; small images share one.
const COLUMNS: usize = 256;
/// Columns for which a part of the filter gradient of its own is worth adding up at the end, and the most such parts.
const PART: usize = 2048;
const PARTS: usize = 4;

/// `x [N,C,H,W]` under square filters `weight [O,C,K,K]`, plus `bias [O]`.
///
/// # Panics
/// If the shapes do not agree.
pub fn conv(
    x: Tensor<4>,
    weight: Tensor<4>,
    bias: Option<Tensor<1>>,
    stride: usize,
    padding: usize,
) -> Tensor<4> {
    let geometry = Geometry::new(x.dims(), weight.dims(), stride, padding);
    let bias = bias.unwrap_or_else(|| beside(&weight, vec![0.0; geometry.to], [geometry.to]));
    assert_eq!(bias.dims(), [geometry.to], "one bias for each filter");
    let taped = x.is_autodiff() || weight.is_autodiff() || bias.is_autodiff();
    let ((x, x_node), (weight, weight_node)) = (tape(x).into_parts(), tape(weight).into_parts());
    let (bias, bias_node) = tape(bias).into_parts();
    let (x, weight, bias) = (contiguous(x), contiguous(weight), contiguous(bias));
    let out = tensor(geometry.forward(values(&x), values(&weight), values(&bias)), &geometry.out_shape());
    let prepared = Conv.prepare::<Keep>([x_node, weight_node, bias_node]).compute_bound().stateful();
    let out = match prepared {
        OpsKind::Tracked(node) => node.finish(Convolved { x, weight, geometry }, out),
        OpsKind::UnTracked(node) => node.finish(out),
    };
    given(out, taped)
}

#[derive(Debug)]
struct Conv;

#[derive(Clone, Debug)]
struct Convolved {
    x: FlexTensor,
    weight: FlexTensor,
    geometry: Geometry,
}

impl Backward<Inner, 3> for Conv {
    type State = Convolved;

    fn backward(self, ops: Ops<Convolved, 3>, gradients: &mut Gradients, _: &mut Checkpointer) {
        let incoming = contiguous(gradients.consume::<Inner>(&ops.node));
        let Convolved { x, weight, geometry } = ops.state;
        let [x_node, weight_node, bias_node] = ops.parents;
        let slopes = values(&incoming);
        // The filters first: their gradient is what other ranks wait for.
        if let Some(node) = weight_node {
            let gradient = geometry.weight_gradient(values(&x), slopes);
            gradients.register::<Inner>(node.id, tensor(gradient, &shape(&weight)));
        }
        if let Some(node) = bias_node {
            gradients.register::<Inner>(node.id, tensor(geometry.bias_gradient(slopes), &[geometry.to]));
        }
        if let Some(node) = x_node {
            let gradient = geometry.input_gradient(values(&weight), slopes);
            gradients.register::<Inner>(node.id, tensor(gradient, &shape(&x)));
        }
    }
}

/// All lengths of a convolution.
#[derive(Clone, Copy, Debug)]
struct Geometry {
    batch: usize,
    from: usize,
    to: usize,
    kernel: usize,
    stride: usize,
    padding: usize,
    /// Height and width, before and after.
    input: [usize; 2],
    output: [usize; 2],
}

impl Geometry {
    fn new(
        [batch, from, height, width]: [usize; 4],
        weight: [usize; 4],
        stride: usize,
        padding: usize,
    ) -> Self {
        let [to, channels, kernel, other] = weight;
        assert_eq!(channels, from, "channels of the images and of the filters");
        assert_eq!(kernel, other, "filters are square");
        let after = |length: usize| {
            assert!(
                length + 2 * padding >= kernel,
                "an image of {length} is smaller than a filter of {kernel}"
            );
            (length + 2 * padding - kernel) / stride + 1
        };
        Geometry {
            batch,
            from,
            to,
            kernel,
            stride,
            padding,
            input: [height, width],
            output: [after(height), after(width)],
        }
    }

    fn out_shape(&self) -> [usize; 4] {
        [self.batch, self.to, self.output[0], self.output[1]]
    }

    /// Elements of a filter.
    fn depth(&self) -> usize {
        self.from * self.kernel * self.kernel
    }

    /// Places of a filter on an image.
    fn places(&self) -> usize {
        self.output[0] * self.output[1]
    }

    /// Elements of an image, before and after.
    fn image(&self) -> [usize; 2] {
        [self.from * self.input[0] * self.input[1], self.to * self.places()]
    }

    /// Images that share a product.
    fn tile(&self) -> usize {
        (COLUMNS / self.places().max(1)).clamp(1, self.batch.max(1))
    }

    fn shares(&self) -> bool {
        sharing_pays(self.batch * self.image()[1] * self.depth())
    }

    fn forward(&self, x: &[f32], weight: &[f32], bias: &[f32]) -> Vec<f32> {
        let [before, after] = self.image();
        let mut out = vec![0.0; self.batch * after];
        let run = |(x, out): (&[f32], &mut [f32])| {
            let images = x.len() / before;
            let mut room = vec![0.0; self.depth() * images * self.places()];
            self.columns(x, &mut room);
            self.product(weight, &room, images, out);
            for (image, bias) in out.chunks_exact_mut(self.places()).zip(bias.iter().cycle()) {
                if *bias != 0.0 {
                    image.iter_mut().for_each(|value| *value += bias);
                }
            }
        };
        let tile = self.tile();
        match self.shares() {
            true => x.par_chunks(tile * before).zip(out.par_chunks_mut(tile * after)).for_each(run),
            false => x.chunks(tile * before).zip(out.chunks_mut(tile * after)).for_each(run),
        }
        out
    }

    /// `out [images, O, P] = weight [O, depth] * columns [depth, images * P]`.
    fn product(&self, weight: &[f32], columns: &[f32], images: usize, out: &mut [f32]) {
        let (depth, places) = (self.depth(), self.places());
        let filters = Matrix::new(weight, self.to, depth);
        let columns = Matrix::new(columns, depth, images * places);
        if images == 1 {
            return gemm(1.0, filters, columns, 0.0, MatrixMut::new(out, self.to, places), Threads::One);
        }
        let mut together = vec![0.0; self.to * images * places];
        gemm(
            1.0,
            filters,
            columns,
            0.0,
            MatrixMut::new(&mut together, self.to, images * places),
            Threads::One,
        );
        for (filter, row) in together.chunks_exact(images * places).enumerate() {
            for (image, values) in row.chunks_exact(places).enumerate() {
                out[(image * self.to + filter) * places..][..places].copy_from_slice(values);
            }
        }
    }

    /// The slopes of some images side by side, `[O, images * P]`.
    fn gather<'a>(&self, slopes: &'a [f32], room: &'a mut Vec<f32>) -> &'a [f32] {
        let (places, images) = (self.places(), slopes.len() / self.image()[1]);
        if images == 1 {
            return slopes;
        }
        room.resize(slopes.len(), 0.0);
        for (image, slopes) in slopes.chunks_exact(self.to * places).enumerate() {
            for (filter, values) in slopes.chunks_exact(places).enumerate() {
                room[(filter * images + image) * places..][..places].copy_from_slice(values);
            }
        }
        room
    }

    fn weight_gradient(&self, x: &[f32], slopes: &[f32]) -> Vec<f32> {
        let ([before, after], depth, places, tile) = (self.image(), self.depth(), self.places(), self.tile());
        let parts = (self.batch * places / PART).clamp(1, PARTS);
        let per_part = self.batch.div_ceil(parts).next_multiple_of(tile);
        // With one part the pool works inside the products instead.
        let threads = if parts == 1 { Threads::Pool } else { Threads::One };
        let run = |(x, slopes): (&[f32], &[f32])| {
            let mut sum = vec![0.0; self.to * depth];
            let (mut room, mut side) = (Vec::new(), Vec::new());
            for (at, (x, slopes)) in x.chunks(tile * before).zip(slopes.chunks(tile * after)).enumerate() {
                let columns = x.len() / before * places;
                room.resize(depth * columns, 0.0);
                self.columns(x, &mut room[..depth * columns]);
                let columns_t = Matrix::new(&room, depth, columns).transposed();
                let slopes = Matrix::new(self.gather(slopes, &mut side), self.to, columns);
                let beta = if at == 0 { 0.0 } else { 1.0 };
                gemm(1.0, slopes, columns_t, beta, MatrixMut::new(&mut sum, self.to, depth), threads);
            }
            sum
        };
        let sums: Vec<Vec<f32>> = match parts > 1 && self.shares() {
            true => {
                x.par_chunks(per_part * before).zip(slopes.par_chunks(per_part * after)).map(run).collect()
            }
            false => x.chunks(per_part * before).zip(slopes.chunks(per_part * after)).map(run).collect(),
        };
        let add = |mut sum: Vec<f32>, part: Vec<f32>| {
            sum.iter_mut().zip(part).for_each(|(sum, part)| *sum += part);
            sum
        };
        sums.into_iter().reduce(add).unwrap_or_else(|| vec![0.0; self.to * depth])
    }

    fn bias_gradient(&self, slopes: &[f32]) -> Vec<f32> {
        let mut sums = vec![0.0; self.to];
        for image in slopes.chunks_exact(self.image()[1]) {
            for (sum, plane) in sums.iter_mut().zip(image.chunks_exact(self.places())) {
                *sum += plane.iter().sum::<f32>();
            }
        }
        sums
    }

    fn input_gradient(&self, weight: &[f32], slopes: &[f32]) -> Vec<f32> {
        let ([before, after], depth, places) = (self.image(), self.depth(), self.places());
        let mut gradient = vec![0.0; self.batch * before];
        let run = |(gradient, slopes): (&mut [f32], &[f32])| {
            let columns = gradient.len() / before * places;
            let (mut room, mut side) = (vec![0.0; depth * columns], Vec::new());
            let filters = Matrix::new(weight, self.to, depth).transposed();
            let slopes = Matrix::new(self.gather(slopes, &mut side), self.to, columns);
            gemm(1.0, filters, slopes, 0.0, MatrixMut::new(&mut room, depth, columns), Threads::One);
            self.add_columns(&room, gradient);
        };
        let tile = self.tile();
        match self.shares() {
            true => gradient.par_chunks_mut(tile * before).zip(slopes.par_chunks(tile * after)).for_each(run),
            false => gradient.chunks_mut(tile * before).zip(slopes.chunks(tile * after)).for_each(run),
        }
        gradient
    }

    /// Lays the windows of images out: row (c, ky, kx) has, for each image and place, the pixel under that element of a filter.
    fn columns(&self, x: &[f32], columns: &mut [f32]) {
        let ([height, width], places) = (self.input, self.places());
        let images = x.len() / self.image()[0];
        for (row, columns) in columns.chunks_exact_mut(images * places).enumerate() {
            let (channel, ky, kx) = self.element(row);
            for (image, columns) in columns.chunks_exact_mut(places).enumerate() {
                let plane = &x[(image * self.from + channel) * height * width..][..height * width];
                for (oy, line) in columns.chunks_exact_mut(self.output[1]).enumerate() {
                    match self.source(oy, ky, height) {
                        None => line.fill(0.0),
                        Some(y) => self.line(&plane[y * width..][..width], kx, line),
                    }
                }
            }
        }
    }

    /// One line of a window's column: every `stride`-th pixel from `kx - padding` on, zero outside.
    fn line(&self, pixels: &[f32], kx: usize, line: &mut [f32]) {
        let inside = self.inside(kx, pixels.len(), line.len());
        line[..inside.start].fill(0.0);
        line[inside.end..].fill(0.0);
        if inside.is_empty() {
            return;
        }
        let first = inside.start * self.stride + kx - self.padding;
        let line = &mut line[inside];
        match self.stride {
            1 => line.copy_from_slice(&pixels[first..first + line.len()]),
            stride => {
                line.iter_mut().zip(pixels[first..].iter().step_by(stride)).for_each(|(to, from)| *to = *from)
            }
        }
    }

    /// The inverse walk of [`Geometry::columns`]: adds instead of copying.
    fn add_columns(&self, columns: &[f32], gradient: &mut [f32]) {
        let ([height, width], places) = (self.input, self.places());
        let images = gradient.len() / self.image()[0];
        for (row, columns) in columns.chunks_exact(images * places).enumerate() {
            let (channel, ky, kx) = self.element(row);
            for (image, columns) in columns.chunks_exact(places).enumerate() {
                let plane = &mut gradient[(image * self.from + channel) * height * width..][..height * width];
                for (oy, line) in columns.chunks_exact(self.output[1]).enumerate() {
                    let Some(y) = self.source(oy, ky, height) else { continue };
                    let inside = self.inside(kx, width, line.len());
                    if inside.is_empty() {
                        continue;
                    }
                    let first = inside.start * self.stride + kx - self.padding;
                    let pixels = plane[y * width..][first..width].iter_mut().step_by(self.stride);
                    pixels.zip(&line[inside]).for_each(|(to, from)| *to += from);
                }
            }
        }
    }

    fn element(&self, row: usize) -> (usize, usize, usize) {
        let square = self.kernel * self.kernel;
        (row / square, row % square / self.kernel, row % self.kernel)
    }

    /// The line of the image under line `k` of a filter at place `out`.
    fn source(&self, out: usize, k: usize, length: usize) -> Option<usize> {
        (out * self.stride + k).checked_sub(self.padding).filter(|at| *at < length)
    }

    /// The places at which element `k` of a filter's line is over the image.
    fn inside(&self, k: usize, length: usize, places: usize) -> std::ops::Range<usize> {
        let begin = self.padding.saturating_sub(k).div_ceil(self.stride).min(places);
        let end = (length + self.padding).saturating_sub(k).div_ceil(self.stride).clamp(begin, places);
        begin..end
    }
}
