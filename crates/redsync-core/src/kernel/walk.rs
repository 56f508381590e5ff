//! The loops for vector registers of any machine.
//! Comes in: slices of at most a chunk, and a token of [`Registers`], which exists only where the machine has them. Goes out:
//! what the loops in `portable` give, bit by bit. What must hold: callers are compiled for the machine of their token, and
//! everything here is inlined into them.
//!
//! The passes are bound by memory, and the fewer instructions they need per byte, the further ahead of memory they run.
//! So the loop has no branch that depends on data, and per vector only two operations besides the rule: a running maximum
//! of the magnitudes as integers, which shows both whether a block has a candidate and whether a value is not finite.
#![allow(unsafe_code)]

use super::portable::{self, StatLanes};
use super::{ADAM, ADAM_GIVEN, BLOCK, CHUNK, Key, MOMENTUM, NESTEROV, Outcome, PLAIN, Plan, Slices, squares};
use crate::phase::Lens;
use std::mem::MaybeUninit;

/// Blocks after which one of those that may have a candidate is looked at.
const STRIDE: usize = 8;

/// More than the blocks of a chunk, by a power of two: a place is found by a few bits of its number, and need not be checked.
const ROOM: usize = (CHUNK / BLOCK + 1).next_power_of_two();

/// Magnitudes from here on, as integers, are those of infinity and NaN.
const NOT_FINITE: u32 = 0x7f80_0000;

/// The vector registers of a machine, and what the loops do with them: the same operations on all lanes, none of them fused.
/// A value of this type is proof that the machine has them.
pub(super) trait Registers: Copy {
    /// Floats in a register; divides [`BLOCK`] and is at most 64.
    const LANES: usize;
    /// A register of floats.
    type Floats: Copy;
    /// A register of integers with sign, 32 bits each.
    type Bits: Copy;
    /// Statistics under way.
    type Stats: Copy;

    /// The same float in all lanes.
    fn floats(self, x: f32) -> Self::Floats;
    /// The same bits in all lanes.
    fn bits(self, x: u32) -> Self::Bits;
    /// The bits of floats.
    fn to_bits(self, x: Self::Floats) -> Self::Bits;
    /// # Safety
    /// All lanes must be readable.
    unsafe fn load(self, from: *const f32) -> Self::Floats;
    /// # Safety
    /// All lanes must be writable.
    unsafe fn store(self, to: *mut f32, x: Self::Floats);
    /// Writes around the cache, where the machine can; `super::fence` makes it visible to others.
    ///
    /// # Safety
    /// All lanes must be writable, and the place aligned to the size of a register.
    unsafe fn stream(self, to: *mut f32, x: Self::Floats);
    /// Sums.
    fn add(self, a: Self::Floats, b: Self::Floats) -> Self::Floats;
    /// Products.
    fn mul(self, a: Self::Floats, b: Self::Floats) -> Self::Floats;
    /// Quotients, rounded as IEEE 754 has it.
    fn div(self, a: Self::Floats, b: Self::Floats) -> Self::Floats;
    /// Square roots, rounded as IEEE 754 has it.
    fn sqrt(self, x: Self::Floats) -> Self::Floats;
    /// x & keep ^ flip, as bits.
    fn see(self, x: Self::Floats, keep: Self::Bits, flip: Self::Bits) -> Self::Floats;
    /// Magnitudes.
    fn abs(self, x: Self::Floats) -> Self::Floats;
    /// The larger ones, as integers with sign.
    fn larger(self, a: Self::Bits, b: Self::Bits) -> Self::Bits;
    /// Whether a lane of `x` is greater, as an integer with sign.
    fn any_above(self, x: Self::Bits, floor: Self::Bits) -> bool;
    /// A bit for each lane that is greater, as a float.
    fn above(self, x: Self::Floats, floor: Self::Floats) -> u64;
    /// Statistics of nothing.
    fn no_stats(self) -> Self::Stats;
    /// Adds elements as a lens shows them, in the order and the lanes of `portable`.
    fn add_stats(self, stats: Self::Stats, seen: Self::Floats) -> Self::Stats;
    /// Statistics as `portable` has them.
    fn stat_lanes(self, stats: Self::Stats) -> StatLanes;
}

/// The pass of [`super::pass`].
///
/// # Panics
/// If the slices that KIND and saving use are not of one length, at most a chunk, or saved ones not aligned to a register.
#[inline(always)]
pub(super) fn pass<R: Registers, const KIND: u8, const STATS: bool>(
    registers: R,
    plan: &Plan,
    floor: f32,
    slices: Slices<'_>,
    found: &mut Vec<Key>,
) -> Outcome {
    let (n, save) = (slices.v.len(), !slices.saved_v.is_empty());
    assert!(n <= CHUNK && slices.gradient.len() == n, "slices of one pass differ");
    assert!(KIND == PLAIN || slices.u.len() == n, "slices of one pass differ");
    assert!(!squares(KIND) || slices.q.len() == n, "slices of one pass differ");
    assert!(KIND != ADAM_GIVEN || slices.given.len() == n, "slices of one pass differ");
    // SAFETY: the lengths agree, and saved slices are aligned, all checked here.
    unsafe {
        if save {
            let fits = |s: &[f32]| s.len() == n && s.as_ptr().addr().is_multiple_of(4 * R::LANES);
            assert!(
                fits(slices.saved_v)
                    && (KIND == PLAIN || fits(slices.saved_u))
                    && (!squares(KIND) || fits(slices.saved_q)),
                "saved slices do not fit"
            );
            pass_lanes::<R, KIND, STATS, true>(registers, plan, floor, slices, found)
        } else {
            pass_lanes::<R, KIND, STATS, false>(registers, plan, floor, slices, found)
        }
    }
}

/// # Safety
/// All slices that KIND uses must be as long as `slices.v`, at most a chunk; with SAVE also the saved ones, which must be
/// aligned to the size of a register.
#[inline(always)]
unsafe fn pass_lanes<R: Registers, const KIND: u8, const STATS: bool, const SAVE: bool>(
    registers: R,
    plan: &Plan,
    floor: f32,
    slices: Slices<'_>,
    found: &mut Vec<Key>,
) -> Outcome {
    let n = slices.v.len();
    let blocks = n / BLOCK;
    let v = slices.v.as_mut_ptr();
    let adam = plan.rule.adam();
    let mut walk = Walk {
        registers,
        gradient: slices.gradient.as_ptr(),
        u: slices.u.as_mut_ptr(),
        v,
        q: slices.q.as_mut_ptr(),
        given: slices.given.as_ptr(),
        saved_u: slices.saved_u.as_mut_ptr(),
        saved_v: slices.saved_v.as_mut_ptr(),
        saved_q: slices.saved_q.as_mut_ptr(),
        keep: registers.bits(plan.lens.keep),
        flip: registers.bits(plan.lens.flip),
        scale: registers.floats(plan.scale),
        carry: registers.floats(plan.carry),
        coefficient: registers.floats(plan.rule.coefficient()),
        enter: registers.floats(adam.enter),
        keep_square: registers.floats(adam.keep_square),
        enter_square: registers.floats(adam.enter_square),
        unbias: registers.floats(adam.unbias),
        unbias_square: registers.floats(adam.unbias_square),
        root_floor: registers.floats(adam.floor),
        floor: registers.bits(floor.to_bits()),
        largest: registers.bits(0),
        stats: registers.no_stats(),
    };
    let mut hits = Hits::new(registers, plan.lens, floor, slices.base, n, found);
    let mut first = 0;
    while first < blocks {
        let last = blocks.min(first + STRIDE);
        for block in first..last {
            // SAFETY: the block is among `blocks`, which lie within every slice that KIND and SAVE use; alignment as promised.
            let hit = unsafe { walk.block::<KIND, STATS, SAVE>(block) };
            hits.note(block, hit);
        }
        first = last;
        // SAFETY: v has n elements, and nobody writes while these are read. From the pointer, since a new borrow of the slice would
        // end its right to write on.
        hits.look(unsafe { std::slice::from_raw_parts(v.cast_const(), n) });
    }
    // SAFETY: as above.
    let count = hits.finish(unsafe { std::slice::from_raw_parts(v.cast_const(), n) });
    // SAFETY: there was room for them, and they were written.
    unsafe { found.set_len(found.len() + count) };
    let finite = !registers.any_above(walk.largest, registers.bits(NOT_FINITE - 1));
    let lanes = registers.stat_lanes(walk.stats);
    let mut outcome = portable::pass_from::<KIND, STATS>(blocks * BLOCK, lanes, plan, floor, slices, found);
    outcome.finite &= finite;
    outcome
}

/// What an accumulating pass reads and writes, and what it knows so far.
struct Walk<R: Registers> {
    registers: R,
    gradient: *const f32,
    u: *mut f32,
    v: *mut f32,
    q: *mut f32,
    given: *const f32,
    saved_u: *mut f32,
    saved_v: *mut f32,
    saved_q: *mut f32,
    keep: R::Bits,
    flip: R::Bits,
    scale: R::Floats,
    carry: R::Floats,
    coefficient: R::Floats,
    enter: R::Floats,
    keep_square: R::Floats,
    enter_square: R::Floats,
    unbias: R::Floats,
    unbias_square: R::Floats,
    root_floor: R::Floats,
    floor: R::Bits,
    largest: R::Bits,
    stats: R::Stats,
}

impl<R: Registers> Walk<R> {
    /// The next second moment, and the root of it by which the momentum is divided.
    ///
    /// # Safety
    /// As for `block`, for the lanes from `at` on.
    #[inline(always)]
    unsafe fn root<const KIND: u8, const SAVE: bool>(&mut self, at: usize, g: R::Floats) -> R::Floats {
        let r = self.registers;
        // SAFETY: as promised.
        unsafe {
            let old = r.load(self.q.add(at));
            if SAVE {
                r.stream(self.saved_q.add(at), old);
            }
            let next = r.add(r.mul(self.keep_square, old), r.mul(self.enter_square, r.mul(g, g)));
            r.store(self.q.add(at), next);
            // It is never negative, so that its bits order as it does, NaN above all.
            self.largest = r.larger(self.largest, r.to_bits(r.abs(next)));
            let own = r.mul(next, self.unbias_square);
            let second = match KIND {
                ADAM => own,
                _ => r.add(own, r.load(self.given.add(at))),
            };
            r.add(r.sqrt(second), self.root_floor)
        }
    }

    /// Runs the rule over one block. Returns whether it may have a candidate.
    ///
    /// # Safety
    /// The block must lie within every slice that KIND and SAVE use; the saved ones must be aligned to the size of a register.
    #[inline(always)]
    unsafe fn block<const KIND: u8, const STATS: bool, const SAVE: bool>(&mut self, block: usize) -> bool {
        let r = self.registers;
        let mut largest = r.bits(0);
        for j in 0..BLOCK / R::LANES {
            let at = block * BLOCK + R::LANES * j;
            // SAFETY: at + LANES is not beyond the end of the block.
            let value = unsafe {
                // v before the gradient: with v asked for second, a pass that no cache helps took a tenth longer.
                let old = r.load(self.v.add(at));
                let kept = r.mul(old, self.carry);
                if SAVE {
                    r.stream(self.saved_v.add(at), old);
                }
                let g = r.mul(r.load(self.gradient.add(at)), self.scale);
                let step = if KIND == PLAIN {
                    g
                } else {
                    let old = r.load(self.u.add(at));
                    if SAVE {
                        r.stream(self.saved_u.add(at), old);
                    }
                    let next = match KIND {
                        MOMENTUM => r.add(r.mul(self.coefficient, old), g),
                        NESTEROV => r.mul(self.coefficient, r.add(old, g)),
                        _ => r.add(r.mul(self.coefficient, old), r.mul(self.enter, g)),
                    };
                    r.store(self.u.add(at), next);
                    match KIND {
                        MOMENTUM => next,
                        NESTEROV => r.add(next, g),
                        _ => r.div(r.mul(next, self.unbias), self.root::<KIND, SAVE>(at, g)),
                    }
                };
                let next = r.add(kept, step);
                r.store(self.v.add(at), next);
                next
            };
            largest = r.larger(largest, r.to_bits(r.abs(value)));
            if STATS {
                self.stats = r.add_stats(self.stats, r.see(value, self.keep, self.flip));
            }
        }
        self.largest = r.larger(self.largest, largest);
        r.any_above(largest, self.floor)
    }
}

/// The scan of [`super::scan`].
///
/// # Panics
/// If there is more than a chunk.
#[inline(always)]
pub(super) fn scan<R: Registers>(r: R, lens: Lens, floor: f32, v: &[f32], base: u32, found: &mut Vec<Key>) {
    assert!(v.len() <= CHUNK, "a pass takes at most a chunk");
    let (rows, tail) = v.as_chunks::<BLOCK>();
    let (keep, flip, floor_bits) = (r.bits(lens.keep), r.bits(lens.flip), r.bits(floor.to_bits()));
    let mut hits = Hits::new(r, lens, floor, base, v.len(), found);
    for (stride, some) in rows.chunks(STRIDE).enumerate() {
        for (block, row) in some.iter().enumerate() {
            let mut largest = r.bits(0);
            for part in row.chunks_exact(R::LANES) {
                // SAFETY: a part has LANES elements.
                let value = unsafe { r.load(part.as_ptr()) };
                largest = r.larger(largest, r.to_bits(r.see(value, keep, flip)));
            }
            hits.note(stride * STRIDE + block, r.any_above(largest, floor_bits));
        }
        hits.look(v);
    }
    let count = hits.finish(v);
    // SAFETY: there was room for them, and they were written.
    unsafe { found.set_len(found.len() + count) };
    portable::scan(lens, floor, tail, base + (v.len() - tail.len()) as u32, found);
}

/// Blocks that may have a candidate, in order, and the candidates of those that were looked at.
///
/// They are looked at behind the pass, one after every few blocks and without a branch that depends on how many there are: whether
/// there is one is anybody's guess, and a processor that guessed wrong has to begin anew with all it had begun, loads from memory among it.
/// Looked at as soon as they were found, candidates took a seventh of a pass over 64M elements; looked at like this, nothing that could be
/// measured.
struct Hits<'a, R: Registers> {
    registers: R,
    keep: R::Bits,
    flip: R::Bits,
    floor: R::Floats,
    /// The index of the first element of the first block.
    base: u32,
    /// Their numbers.
    blocks: [u16; ROOM],
    noted: usize,
    looked: usize,
    room: &'a mut [MaybeUninit<Key>],
    found: usize,
}

impl<'a, R: Registers> Hits<'a, R> {
    /// For candidates of up to `n` elements, which are appended to `found` once its length is set.
    #[inline(always)]
    fn new(registers: R, lens: Lens, floor: f32, base: u32, n: usize, found: &'a mut Vec<Key>) -> Self {
        // One more: a key is written before it is known whether it is one.
        found.reserve(n + 1);
        Hits {
            registers,
            keep: registers.bits(lens.keep),
            flip: registers.bits(lens.flip),
            floor: registers.floats(floor),
            base,
            blocks: [0; ROOM],
            noted: 0,
            looked: 0,
            room: found.spare_capacity_mut(),
            found: 0,
        }
    }

    /// A block is done, and may have a candidate or not.
    #[inline(always)]
    fn note(&mut self, block: usize, hit: bool) {
        self.blocks[self.noted % ROOM] = block as u16;
        self.noted += usize::from(hit);
    }

    /// Looks at the next block of v that may have a candidate, if there is one.
    #[inline(always)]
    fn look(&mut self, v: &[f32]) {
        let (rows, _) = v.as_chunks::<BLOCK>();
        let waits = self.looked < self.noted;
        let block = usize::from(self.blocks[self.looked % ROOM]);
        let row = &rows[block];
        let above = self.above(row) & u64::from(waits).wrapping_neg();
        self.write(row, block, above.trailing_zeros() as usize % BLOCK);
        self.found += usize::from(above != 0);
        self.looked += usize::from(waits);
        // More than one is rare, where few are wanted.
        let mut more = above & above.wrapping_sub(1);
        while more != 0 {
            self.write(row, block, more.trailing_zeros() as usize);
            self.found += 1;
            more &= more - 1;
        }
    }

    /// Looks at all that were noted. Returns how many candidates were written.
    #[inline(always)]
    fn finish(mut self, v: &[f32]) -> usize {
        while self.looked < self.noted {
            self.look(v);
        }
        self.found
    }

    /// A bit for each element of a block that is a candidate.
    #[inline(always)]
    fn above(&self, row: &[f32; BLOCK]) -> u64 {
        let (r, mut above) = (self.registers, 0);
        for (j, part) in row.chunks_exact(R::LANES).enumerate() {
            // SAFETY: a part has LANES elements.
            let value = unsafe { r.load(part.as_ptr()) };
            above |= r.above(r.see(value, self.keep, self.flip), self.floor) << (R::LANES * j);
        }
        above
    }

    /// Writes the next key, which counts if `found` is raised.
    #[inline(always)]
    fn write(&mut self, row: &[f32; BLOCK], block: usize, i: usize) {
        self.room[self.found].write(Key::new(row[i], self.base + (block * BLOCK + i) as u32));
    }
}
