//! Some hidden units of an LSTM layer through all steps of a window: the hidden state of all units goes in, that of these comes
//! out, and the same backwards with gradients. What must hold: every slice here belongs to one panel, so panels run side by side.
//! A row of gates is i, f, g, o of these units, one after the other.

use super::activation::{sigmoid, tanh, wide};
use super::gemm::{Matrix, MatrixMut, Threads, gemm};
use std::ops::Range;

/// Units of a panel. Its four gates are a whole number of tiles of the matrix product, and its weights for a layer of usual size
/// fit in the second-level cache. It must not depend on the number of threads.
const UNITS: usize = 48;

/// The lengths of everything in a layer.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Steps of the window.
    pub steps: usize,
    /// Sequences side by side.
    pub batch: usize,
    /// Width of the input.
    pub input: usize,
    /// Units of the whole layer.
    pub hidden: usize,
}

/// What a panel owns.
#[derive(Clone, Debug)]
pub struct Panel {
    sizes: Sizes,
    units: Range<usize>,
    /// Recurrent weights: `[H,4U]` on the way forward, `[4H,U]` on the way back.
    weights: Vec<f32>,
    /// `[T,B,4U]`: the input's share, then the activations, and on the way back the gradients of what went in.
    gates: Vec<f32>,
    /// `[T+1,B,U]`: the cells before each step and after the last.
    cells: Vec<f32>,
    /// `[B,U]`: the hidden state of the last step, on the way back its gradient.
    hidden: Vec<f32>,
    /// `[B,U]`: the gradient of the cells, on the way back.
    cell_slopes: Vec<f32>,
}

impl Panel {
    /// The units of each panel of a layer.
    pub fn cut(hidden: usize) -> Vec<Range<usize>> {
        (0..hidden).step_by(UNITS).map(|first| first..hidden.min(first + UNITS)).collect()
    }

    /// A panel before the first step. `weights` are those of the input and of the recurrence, whole.
    pub fn new(
        sizes: Sizes,
        units: Range<usize>,
        x: &[f32],
        weights: (&[f32], &[f32]),
        bias: &[f32],
        c: &[f32],
    ) -> Panel {
        let Sizes { steps, batch, input, hidden } = sizes;
        let (rows, width) = (steps * batch, 4 * units.len());
        let bias: Vec<f32> = gate_rows(hidden, &units).map(|row| bias[row]).collect();
        let mut gates = Vec::with_capacity(rows * width);
        (0..rows).for_each(|_| gates.extend_from_slice(&bias));
        let weight_ih = across(weights.0, input, hidden, &units);
        let (x, weight_ih) = (Matrix::new(x, rows, input), Matrix::new(&weight_ih, input, width));
        gemm(1.0, x, weight_ih, 1.0, MatrixMut::new(&mut gates, rows, width), Threads::One);

        let mut cells = vec![0.0; (steps + 1) * batch * units.len()];
        for (row, c) in cells.chunks_exact_mut(units.len()).zip(c.chunks_exact(hidden)) {
            row.copy_from_slice(&c[units.clone()]);
        }
        let weights = across(weights.1, hidden, hidden, &units);
        let hidden = vec![0.0; batch * units.len()];
        Panel { sizes, units, weights, gates, cells, hidden, cell_slopes: Vec::new() }
    }

    /// Drops what the way back does not need.
    pub fn forget_weights(&mut self) {
        self.weights = Vec::new();
    }

    /// One step, from the hidden state `[B,H]` of all units before it.
    pub fn advance(&mut self, step: usize, h: &[f32]) {
        let Sizes { batch, hidden, .. } = self.sizes;
        let units = self.units.len();
        let gates = &mut self.gates[step * batch * 4 * units..][..batch * 4 * units];
        let (h, weights) = (Matrix::new(h, batch, hidden), Matrix::new(&self.weights, hidden, 4 * units));
        gemm(1.0, h, weights, 1.0, MatrixMut::new(gates, batch, 4 * units), Threads::One);
        let (before, after) = self.cells[step * batch * units..].split_at_mut(batch * units);
        let out = self.hidden.chunks_exact_mut(units);
        let cells = before.chunks_exact(units).zip(after.chunks_exact_mut(units));
        for ((gates, (before, after)), out) in gates.chunks_exact_mut(4 * units).zip(cells).zip(out) {
            activate(gates, before, after, out);
        }
    }

    /// Writes the hidden state of the last step into that of all units, `[B,H]`.
    pub fn put_hidden(&self, all: &mut [f32]) {
        self.put(&self.hidden, all);
    }

    /// Writes the cells after the last step into those of all units, `[B,H]`.
    pub fn put_cells(&self, all: &mut [f32]) {
        self.put(&self.cells[self.cells.len() - self.hidden.len()..], all);
    }

    fn put(&self, ours: &[f32], all: &mut [f32]) {
        for (row, all) in ours.chunks_exact(self.units.len()).zip(all.chunks_exact_mut(self.sizes.hidden)) {
            all[self.units.clone()].copy_from_slice(row);
        }
    }

    /// Prepares the way back: fetches these units' columns of the recurrent weights `[4H,H]`.
    pub fn turn_around(&mut self, weight_hh: &[f32]) {
        let rows = weight_hh.chunks_exact(self.sizes.hidden);
        self.weights = Vec::with_capacity(rows.len() * self.units.len());
        rows.for_each(|row| self.weights.extend_from_slice(&row[self.units.clone()]));
        self.cell_slopes = vec![0.0; self.hidden.len()];
    }

    /// One step back, from the gradient `[B,H]` of this step's hidden state and those `[B,4H]` of the next step's gates.
    pub fn retreat(&mut self, step: usize, incoming: &[f32], later: Option<&[f32]>) {
        let Sizes { batch, hidden, .. } = self.sizes;
        let units = self.units.len();
        for (row, all) in self.hidden.chunks_exact_mut(units).zip(incoming.chunks_exact(hidden)) {
            row.copy_from_slice(&all[self.units.clone()]);
        }
        if let Some(later) = later {
            let (later, weights) =
                (Matrix::new(later, batch, 4 * hidden), Matrix::new(&self.weights, 4 * hidden, units));
            gemm(1.0, later, weights, 1.0, MatrixMut::new(&mut self.hidden, batch, units), Threads::One);
        }
        let gates = self.gates[step * batch * 4 * units..].chunks_exact_mut(4 * units);
        let cells = self.cells[step * batch * units..].chunks_exact(units);
        let after = self.cells[(step + 1) * batch * units..].chunks_exact(units);
        let slopes = self.hidden.chunks_exact(units).zip(self.cell_slopes.chunks_exact_mut(units));
        for ((gates, (before, after)), (h_slopes, c_slopes)) in gates.zip(cells.zip(after)).zip(slopes) {
            differentiate(gates, before, after, h_slopes, c_slopes);
        }
    }

    /// Writes the gradients of a step's gates into those of all units, `[B,4H]`.
    pub fn put_slopes(&self, step: usize, all: &mut [f32]) {
        let Sizes { batch, hidden, .. } = self.sizes;
        let units = self.units.len();
        let ours = self.gates[step * batch * 4 * units..].chunks_exact(4 * units);
        for (row, all) in ours.zip(all.chunks_exact_mut(4 * hidden)) {
            for (gate, all) in row.chunks_exact(units).zip(all.chunks_exact_mut(hidden)) {
                all[self.units.clone()].copy_from_slice(gate);
            }
        }
    }
}

/// The rows of a weight `[4H,..]` that belong to these units, gate by gate.
fn gate_rows(hidden: usize, units: &Range<usize>) -> impl Iterator<Item = usize> + use<> {
    let units = units.clone();
    (0..4).flat_map(move |gate| units.clone().map(move |unit| gate * hidden + unit))
}

/// These units' rows of a weight `[4H,width]`, as columns: `[width,4U]`.
fn across(weight: &[f32], width: usize, hidden: usize, units: &Range<usize>) -> Vec<f32> {
    /// Columns written side by side: their lines are still in the cache when the next row comes.
    const STRIP: usize = 64;
    let rows: Vec<&[f32]> = gate_rows(hidden, units).map(|row| &weight[row * width..][..width]).collect();
    let mut columns = vec![0.0; width * rows.len()];
    for (strip, columns) in columns.chunks_mut(STRIP * rows.len()).enumerate() {
        for (place, row) in rows.iter().enumerate() {
            let row = &row[strip * STRIP..];
            columns[place..].iter_mut().step_by(rows.len()).zip(row).for_each(|(to, from)| *to = *from);
        }
    }
    columns
}

/// The four gates of a row.
#[inline(always)]
fn four(gates: &mut [f32], units: usize) -> [&mut [f32]; 4] {
    let (i, rest) = gates.split_at_mut(units);
    let (f, rest) = rest.split_at_mut(units);
    let (g, o) = rest.split_at_mut(units);
    [i, f, g, &mut o[..units]]
}

/// Gates and cells of one sequence and one step. `before` and `after` are the cells.
fn activate(gates: &mut [f32], before: &[f32], after: &mut [f32], out: &mut [f32]) {
    wide(
        #[inline(always)]
        || {
            let [i, f, g, o] = four(gates, out.len());
            [&mut *i, &mut *f, &mut *o]
                .into_iter()
                .for_each(|gate| gate.iter_mut().for_each(|x| *x = sigmoid(*x)));
            g.iter_mut().for_each(|x| *x = tanh(*x));
            fill_cells(i, f, g, before, after);
            out.iter_mut().zip(o).zip(after).for_each(|((out, o), cell)| *out = *o * tanh(*cell));
        },
    );
}

// Loops over many slices are functions of their own: only for arguments does the compiler know that they do not overlap, and
// without that it makes no vector instructions of them.

#[inline(always)]
fn fill_cells(i: &[f32], f: &[f32], g: &[f32], before: &[f32], after: &mut [f32]) {
    let units = after.len();
    let (i, f, g, before) = (&i[..units], &f[..units], &g[..units], &before[..units]);
    for u in 0..units {
        after[u] = f[u] * before[u] + i[u] * g[u];
    }
}

/// Makes of the activations the gradients of what went into them; of the cells' gradients those of the step before.
fn differentiate(gates: &mut [f32], before: &[f32], after: &[f32], h_slopes: &[f32], c_slopes: &mut [f32]) {
    wide(
        #[inline(always)]
        || {
            let [i, f, g, o] = four(gates, h_slopes.len());
            through_output(o, after, h_slopes, c_slopes);
            through_cells(i, f, g, before, c_slopes);
        },
    );
}

/// The gradient of the hidden state goes to the output gate and to the cells.
#[inline(always)]
fn through_output(o: &mut [f32], after: &[f32], h_slopes: &[f32], c_slopes: &mut [f32]) {
    let units = o.len();
    let (after, h_slopes, c_slopes) = (&after[..units], &h_slopes[..units], &mut c_slopes[..units]);
    for u in 0..units {
        let cell = tanh(after[u]);
        c_slopes[u] += h_slopes[u] * o[u] * (1.0 - cell * cell);
        o[u] = h_slopes[u] * cell * o[u] * (1.0 - o[u]);
    }
}

/// The gradient of the cells goes to the other gates and to the cells before.
#[inline(always)]
fn through_cells(i: &mut [f32], f: &mut [f32], g: &mut [f32], before: &[f32], c_slopes: &mut [f32]) {
    let units = i.len();
    let (f, g, before, c_slopes) =
        (&mut f[..units], &mut g[..units], &before[..units], &mut c_slopes[..units]);
    for u in 0..units {
        let slope = c_slopes[u];
        let (to_i, to_f, to_g) = (slope * g[u], slope * before[u], slope * i[u]);
        c_slopes[u] = slope * f[u];
        i[u] = to_i * i[u] * (1.0 - i[u]);
        f[u] = to_f * f[u] * (1.0 - f[u]);
        g[u] = to_g * (1.0 - g[u] * g[u]);
    }
}
