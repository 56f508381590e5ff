//! The loops, as every runtime of CubeCL compiles them. Comes in: buffers of a device. What must hold: every sum and product is rounded
//! on its own, and nothing depends on the order in which units run but the order of what is found.
//!
//! A compiler may join a product and a sum into one rounding. It cannot where the product's bits pass through an integer operation with a
//! number that it does not know: [`opaque`] is an exclusive or with `zero`, which is 0 at every launch. Comparisons are of integers, since a
//! device may flush subnormals and ignore NaN when it compares floats.
#![allow(missing_docs)] // The launchers that the macro makes beside each kernel cannot be documented.
#![allow(clippy::too_many_arguments)] // Buffers and scalars of a launch cannot be grouped.

use cubecl::prelude::*;

/// Bits of infinity: as large a magnitude is not finite.
const NOT_FINITE: u32 = 0x7f80_0000;
/// Bits of a magnitude.
const MAGNITUDE: u32 = 0x7fff_ffff;

/// The rules of the accumulating pass.
pub const NONE: u32 = 0;
pub const PLAIN: u32 = 1;
pub const NESTEROV: u32 = 2;

/// How a gradient's elements are stored.
pub const SINGLE: u32 = 0;
pub const HALF: u32 = 1;
pub const BRAIN: u32 = 2;

/// What was sent of an element that is taken out.
pub const WHOLE: u32 = 0;
pub const SAME: u32 = 1;
pub const ROUNDED: u32 = 2;
pub const LISTED: u32 = 3;

#[cube]
fn opaque<N: Size>(x: Vector<f32, N>, zero: u32) -> Vector<f32, N> {
    Vector::<f32, N>::reinterpret(Vector::<u32, N>::reinterpret(x) ^ Vector::<u32, N>::new(zero))
}

/// An element's bits as a phase shows them: positive if it competes.
#[cube]
fn seen<N: Size>(x: Vector<f32, N>, keep: u32, flip: u32) -> Vector<i32, N> {
    let bits = Vector::<u32, N>::reinterpret(x);
    Vector::<i32, N>::reinterpret((bits & Vector::<u32, N>::new(keep)) ^ Vector::<u32, N>::new(flip))
}

/// What an accumulating pass does and looks for, known when it is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Form {
    /// [`NONE`], [`PLAIN`] or [`NESTEROV`].
    pub rule: u32,
    /// [`SINGLE`], [`HALF`] or [`BRAIN`].
    pub kind: u32,
    /// Whether the gradient is multiplied.
    pub scales: bool,
    /// Whether v is.
    pub carries: bool,
    /// Whether elements above a floor are listed.
    pub seeks: bool,
    /// Whether both signs compete: then one maximum tells both what is not finite and what is above the floor.
    pub both: bool,
}

/// Half precision as f32, exactly: the bits of one value in the lower half of a word.
#[cube]
fn widened(half: u32, #[comptime] brain: bool) -> f32 {
    if comptime!(brain) {
        f32::reinterpret(half << 16u32)
    } else {
        let sign = (half & 0x8000u32) << 16u32;
        let body = half & 0x7fffu32;
        // A subnormal is a multiple of 2^-24; the product is exact.
        let small = u32::reinterpret(f32::cast_from(body) * f32::reinterpret(0x3380_0000u32));
        let normal = (body << 13u32) + 0x3800_0000u32;
        let special = (body << 13u32) | NOT_FINITE;
        let finite = select(body < 0x0400u32, small, normal);
        f32::reinterpret(sign | select(body >= 0x7c00u32, special, finite))
    }
}

/// A vector of the gradient, from words of as many bytes; by elements, two of them share a word.
#[cube]
fn gained<N: Size, W: Size>(words: &[Vector<u32, W>], i: usize, #[comptime] kind: u32) -> Vector<f32, N> {
    if comptime!(kind == SINGLE) {
        Vector::<f32, N>::reinterpret(words[i])
    } else {
        let brain = comptime!(kind == BRAIN);
        let width = N::value().comptime();
        let mut gain = Vector::<f32, N>::new(0.0f32);
        if comptime!(width == 1) {
            let half = words[i / 2].extract(0usize) >> (16u32 * (i as u32 & 1u32));
            gain.insert(0usize, widened(half & 0xffffu32, brain));
        } else {
            let packed = words[i];
            #[unroll]
            for lane in 0..width {
                let half = packed.extract(comptime!(lane / 2)) >> comptime!(16 * (lane as u32 & 1));
                gain.insert(lane, widened(half & 0xffffu32, brain));
            }
        }
        gain
    }
}

/// The next u and v of a vector of elements; returns v. Without momentum u is not touched.
#[cube]
fn accumulate_one<N: Size>(
    g: Vector<f32, N>,
    u: &mut [Vector<f32, N>],
    v: &mut [Vector<f32, N>],
    i: usize,
    scale: f32,
    carry: f32,
    m: f32,
    zero: u32,
    #[comptime] form: Form,
) -> Vector<f32, N> {
    let mut gain = g;
    if comptime!(form.scales) {
        gain = opaque::<N>(g * Vector::<f32, N>::new(scale), zero);
    }
    let mut old = v[i];
    if comptime!(form.carries) {
        old = opaque::<N>(old * Vector::<f32, N>::new(carry), zero);
    }
    if comptime!(form.rule == PLAIN) {
        let next = opaque::<N>(opaque::<N>(Vector::<f32, N>::new(m) * u[i], zero) + gain, zero);
        u[i] = next;
        gain = next;
    }
    if comptime!(form.rule == NESTEROV) {
        let next = opaque::<N>(Vector::<f32, N>::new(m) * opaque::<N>(u[i] + gain, zero), zero);
        u[i] = next;
        gain = opaque::<N>(next + gain, zero);
    }
    let new = old + gain;
    v[i] = new;
    new
}

/// The largest lane.
#[cube]
fn widest<N: Size>(x: Vector<i32, N>) -> i32 {
    let mut most = x.extract(0usize);
    #[unroll]
    for lane in 1..N::value() {
        most = max(most, x.extract(lane));
    }
    most
}

/// Appends what is greater than the floor among the vectors of a unit to the list, with one addition to the common counter. Beyond the
/// capacity only the counter runs on.
#[cube]
fn append<N: Size>(
    v: &mut [Vector<f32, N>],
    head: &[Atomic<u32>],
    list: &mut [u32],
    first: usize,
    length: u32,
    capacity: u32,
    floor: i32,
    keep: u32,
    flip: u32,
    #[comptime] per: u32,
) {
    let mut hits = 0u32;
    for j in 0..per {
        let i = first + (j * CUBE_DIM) as usize;
        if i < length as usize {
            let x = seen::<N>(v[i], keep, flip);
            #[unroll]
            for lane in 0..N::value() {
                hits += select(x.extract(lane) > floor, 1u32, 0u32);
            }
        }
    }
    let mut at = head[0].fetch_add(hits);
    for j in 0..per {
        let i = first + (j * CUBE_DIM) as usize;
        if i < length as usize && at < capacity {
            let value = v[i];
            let x = seen::<N>(value, keep, flip);
            #[unroll]
            for lane in 0..N::value() {
                if x.extract(lane) > floor {
                    if at < capacity {
                        list[2 * at as usize] = (i * N::value() + lane) as u32;
                        list[2 * at as usize + 1] = u32::reinterpret(value.extract(lane));
                    }
                    at += 1u32;
                }
            }
        }
    }
}

/// Accumulates a gradient, given as words, and lists what is greater than the floor in the new v. `head` holds the number found and whether
/// something was not finite. `length` counts vectors; buffers are whole vectors, zero beyond the layer.
#[cube(launch_unchecked)]
pub fn accumulate<N: Size, W: Size>(
    g: &[Vector<u32, W>],
    u: &mut [Vector<f32, N>],
    v: &mut [Vector<f32, N>],
    head: &[Atomic<u32>],
    list: &mut [u32],
    length: u32,
    capacity: u32,
    scale: f32,
    carry: f32,
    m: f32,
    floor: i32,
    keep: u32,
    flip: u32,
    zero: u32,
    #[comptime] form: Form,
    #[comptime] per: u32,
) {
    let first = CUBE_POS * (CUBE_DIM * per) as usize + UNIT_POS as usize;
    let mut most = Vector::<i32, N>::new(0i32);
    let mut best = Vector::<i32, N>::new(0i32);
    #[unroll]
    for j in 0..per {
        let i = first + (j * CUBE_DIM) as usize;
        if i < length as usize {
            let gain = gained::<N, W>(g, i, comptime!(form.kind));
            let new = accumulate_one::<N>(gain, u, v, i, scale, carry, m, zero, form);
            most = max(most, seen::<N>(new, MAGNITUDE, 0u32));
            if comptime!(form.seeks && !form.both) {
                best = max(best, seen::<N>(new, keep, flip));
            }
        }
    }
    let size = widest::<N>(most);
    if size >= NOT_FINITE as i32 {
        head[1].fetch_add(1u32);
    }
    if comptime!(form.seeks) {
        let mut largest = size;
        if comptime!(!form.both) {
            largest = widest::<N>(best);
        }
        if largest > floor {
            append::<N>(v, head, list, first, length, capacity, floor, keep, flip, per);
        }
    }
}

/// Lists what is greater than the floor in v as it is: the paper's stream compaction. v is not changed; `append` takes it as the
/// accumulating pass has it.
#[cube(launch_unchecked)]
pub fn compact<N: Size>(
    v: &mut [Vector<f32, N>],
    head: &[Atomic<u32>],
    list: &mut [u32],
    length: u32,
    capacity: u32,
    floor: i32,
    keep: u32,
    flip: u32,
    #[comptime] per: u32,
) {
    let first = CUBE_POS * (CUBE_DIM * per) as usize + UNIT_POS as usize;
    let mut best = Vector::<i32, N>::new(0i32);
    #[unroll]
    for j in 0..per {
        let i = first + (j * CUBE_DIM) as usize;
        if i < length as usize {
            best = max(best, seen::<N>(v[i], keep, flip));
        }
    }
    if widest::<N>(best) > floor {
        append::<N>(v, head, list, first, length, capacity, floor, keep, flip, per);
    }
}

/// Counts elements that compete by a digit, among those whose higher bits are `prefix`: in the memory of a cube first.
#[cube(launch_unchecked)]
pub fn histogram(
    v: &[f32],
    bins: &[Atomic<u32>],
    length: u32,
    prefix: u32,
    shift: u32,
    above: u32,
    keep: u32,
    flip: u32,
    #[comptime] size: u32,
    #[comptime] per: u32,
) {
    let shared = Shared::<[Atomic<u32>]>::new_slice(size as usize);
    let mut bin = UNIT_POS;
    while bin < size {
        shared[bin as usize].store(0u32);
        bin += CUBE_DIM;
    }
    sync_cube();
    let first = CUBE_POS * (CUBE_DIM * per) as usize + UNIT_POS as usize;
    for j in 0..per {
        let i = first + (j * CUBE_DIM) as usize;
        if i < length as usize {
            let x = (u32::reinterpret(v[i]) & keep) ^ flip;
            if i32::reinterpret(x) > 0i32 && x >> above == prefix {
                shared[((x >> shift) & (size - 1u32)) as usize].fetch_add(1u32);
            }
        }
    }
    sync_cube();
    let mut bin = UNIT_POS;
    while bin < size {
        let count = shared[bin as usize].load();
        if count > 0u32 {
            bins[bin as usize].fetch_add(count);
        }
        bin += CUBE_DIM;
    }
}

/// Where the largest elements end in a histogram: from the highest bin down to the one with which there are `wanted`, or to the last. Into
/// `edge` go that bin, the elements above it, and those with it. One cube: every unit adds up some bins that stand side by side, then
/// the one in whose part the edge is finds it.
#[cube(launch_unchecked)]
pub fn edge(
    bins: &[u32],
    edge: &mut [u32],
    above: u32,
    wanted: u32,
    #[comptime] size: u32,
    #[comptime] units: u32,
) {
    let mut sums = Shared::<[u32]>::new_slice(units as usize);
    let part = comptime!(size.div_ceil(units));
    // The first unit has the highest bins.
    let begin = UNIT_POS * part;
    let mut sum = 0u32;
    for j in 0..part {
        if begin + j < size {
            sum += bins[(size - 1u32 - begin - j) as usize];
        }
    }
    sums[UNIT_POS as usize] = sum;
    sync_cube();
    let mut before = above;
    for unit in 0..UNIT_POS {
        before += sums[unit as usize];
    }
    let last = begin < size && begin + part >= size;
    if before < wanted && begin < size && (before + sum >= wanted || last) {
        let mut count = before;
        let mut j = 0u32;
        while count < wanted && j < part && begin + j < size {
            before = count;
            count += bins[(size - 1u32 - begin - j) as usize];
            j += 1u32;
        }
        edge[0] = size - begin - j;
        edge[1] = before;
        edge[2] = count;
    }
}

/// Counts the elements that are greater than each of `many` thresholds, given as the bits of floats that are not negative, in one pass.
#[cube(launch_unchecked)]
pub fn count_above<N: Size>(
    v: &[Vector<f32, N>],
    thresholds: &[i32],
    counts: &[Atomic<u32>],
    length: u32,
    keep: u32,
    flip: u32,
    #[comptime] many: u32,
    #[comptime] per: u32,
) {
    let shared = Shared::<[Atomic<u32>]>::new_slice(many as usize);
    if UNIT_POS < many {
        shared[UNIT_POS as usize].store(0u32);
    }
    sync_cube();
    let first = CUBE_POS * (CUBE_DIM * per) as usize + UNIT_POS as usize;
    #[unroll]
    for t in 0..many {
        let threshold = thresholds[t as usize];
        let mut count = 0u32;
        #[unroll]
        for j in 0..per {
            let i = first + (j * CUBE_DIM) as usize;
            if i < length as usize {
                let x = seen::<N>(v[i], keep, flip);
                #[unroll]
                for lane in 0..N::value() {
                    count += select(x.extract(lane) > threshold, 1u32, 0u32);
                }
            }
        }
        if count > 0u32 {
            shared[t as usize].fetch_add(count);
        }
    }
    sync_cube();
    if UNIT_POS < many {
        counts[UNIT_POS as usize].fetch_add(shared[UNIT_POS as usize].load());
    }
}

/// Sum, largest and number of the elements that compete, for each lane of each chunk: the paper's mean and maximum of magnitudes. A unit
/// takes the elements of its lane in order, so that the sum has the host's bits.
#[cube(launch_unchecked)]
pub fn stats(
    v: &[f32],
    sums: &mut [f32],
    others: &mut [u32],
    length: u32,
    units: u32,
    keep: u32,
    flip: u32,
    #[comptime] chunk: u32,
    #[comptime] lanes: u32,
) {
    let unit = ABSOLUTE_POS as u32;
    if unit < units {
        let begin = unit / lanes * chunk;
        let end = min(begin + chunk, length);
        let mut sum = 0.0f32;
        let mut most = 0i32;
        let mut count = 0u32;
        let mut i = begin + unit % lanes;
        while i < end {
            let x = i32::reinterpret((u32::reinterpret(v[i as usize]) & keep) ^ flip);
            if x > 0i32 {
                sum += f32::reinterpret(x);
                most = max(most, x);
                count += 1u32;
            }
            i += lanes;
        }
        sums[unit as usize] = sum;
        others[2 * unit as usize] = u32::reinterpret(most);
        others[2 * unit as usize + 1] = count;
    }
}

/// The nearest bf16, ties to even; the largest one instead of an infinity.
#[cube]
fn rounded(bits: u32) -> u32 {
    let up = bits + 0x7fffu32 + ((bits >> 16u32) & 1u32);
    let size = min(up & 0x7fff_0000u32, 0x7f7f_0000u32);
    size | (bits & 0x8000_0000u32)
}

/// Takes listed elements out of v, from the least on, and leaves what was not sent; `which` has four places to a word.
#[cube(launch_unchecked)]
pub fn take_out(
    u: &mut [f32],
    v: &mut [f32],
    list: &[u32],
    values: &[f32],
    which: &[u32],
    count: u32,
    least_bits: u32,
    least_index: u32,
    same: f32,
    #[comptime] sent: u32,
    #[comptime] clear_u: bool,
) {
    let place = ABSOLUTE_POS;
    if place < count as usize {
        let index = list[2 * place];
        let bits = list[2 * place + 1];
        let size = bits & MAGNITUDE;
        if size > least_bits || (size == least_bits && index <= least_index) {
            let value = f32::reinterpret(bits);
            let mut rest = 0.0f32;
            if comptime!(sent == SAME) {
                rest = value - same;
            }
            if comptime!(sent == ROUNDED) {
                rest = value - f32::reinterpret(rounded(bits));
            }
            if comptime!(sent == LISTED) {
                let shift = 8u32 * (place as u32 & 3u32);
                rest = value - values[((which[place / 4] >> shift) & 0xffu32) as usize];
            }
            v[index as usize] = rest;
            if comptime!(clear_u) {
                u[index as usize] = 0.0f32;
            }
        }
    }
}

/// Replaces elements of v, or adds to them.
#[cube(launch_unchecked)]
pub fn scatter(
    u: &mut [f32],
    v: &mut [f32],
    indices: &[u32],
    values: &[f32],
    count: u32,
    #[comptime] adds: bool,
    #[comptime] clear_u: bool,
) {
    let place = ABSOLUTE_POS;
    if place < count as usize {
        let index = indices[place] as usize;
        if comptime!(adds) {
            v[index] += values[place];
        } else {
            v[index] = values[place];
        }
        if comptime!(clear_u) {
            u[index] = 0.0f32;
        }
    }
}

/// Adds values to elements of weights. What an element gets stands side by side, in the order in which it is added; the unit of the first
/// adds all of it.
#[cube(launch_unchecked)]
pub fn add_merged(weights: &mut [f32], indices: &[u32], values: &[f32], count: u32) {
    let place = ABSOLUTE_POS as u32;
    if place < count {
        let index = indices[place as usize];
        let before = indices[select(place > 0u32, place - 1u32, 0u32) as usize];
        if place == 0u32 || before != index {
            let mut weight = weights[index as usize] + values[place as usize];
            let mut next = place + 1u32;
            // Both sides are evaluated.
            while next < count && indices[min(next, count - 1u32) as usize] == index {
                weight += values[next as usize];
                next += 1u32;
            }
            weights[index as usize] = weight;
        }
    }
}

/// Multiplies in place, or clears.
#[cube(launch_unchecked)]
pub fn scale<N: Size>(x: &mut [Vector<f32, N>], length: u32, factor: f32, #[comptime] clears: bool) {
    let i = ABSOLUTE_POS;
    if i < length as usize {
        if comptime!(clears) {
            x[i] = Vector::<f32, N>::new(0.0f32);
        } else {
            x[i] *= Vector::<f32, N>::new(factor);
        }
    }
}

/// A copy, or a multiple.
#[cube(launch_unchecked)]
pub fn copy<N: Size>(
    from: &[Vector<f32, N>],
    to: &mut [Vector<f32, N>],
    length: u32,
    factor: f32,
    #[comptime] scales: bool,
) {
    let i = ABSOLUTE_POS;
    if i < length as usize {
        if comptime!(scales) {
            to[i] = from[i] * Vector::<f32, N>::new(factor);
        } else {
            to[i] = from[i];
        }
    }
}

/// Plain `v += g`: what every pass is compared with.
#[cube(launch_unchecked)]
pub fn add<N: Size>(g: &[Vector<f32, N>], v: &mut [Vector<f32, N>], length: u32, #[comptime] per: u32) {
    let first = CUBE_POS * (CUBE_DIM * per) as usize + UNIT_POS as usize;
    #[unroll]
    for j in 0..per {
        let i = first + (j * CUBE_DIM) as usize;
        if i < length as usize {
            v[i] += g[i];
        }
    }
}
