//! Who owns which elements of a layer: sums of an element are taken, kept and sent on by its owner.
//! What must hold: it follows from the plan and the number of ranks alone; every element has one owner, and the elements of an owner
//! keep their order.
//!
//! A layer is dealt out in small blocks, one owner after the other, so that no owner gets all of a busy region (the rows of frequent
//! words, say) and nothing has to be dealt out anew. A layer that sends few elements has only so many owners that a message to each has
//! some: dealt out among all it would be as many messages with next to nothing in each. Owners of such layers are those that
//! have least to do.

/// The longest block.
const LARGEST_BLOCK: usize = 256;
/// An owner has at least so many blocks of a layer that has several.
const BLOCKS_EACH: usize = 8;
/// A rank sends an owner about so many elements of a layer at least, if it has as many.
const ELEMENTS_EACH: f64 = 24.0;

/// How the elements of a layer are dealt out: in blocks, one owner after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Cut {
    /// Elements of the layer.
    pub n: usize,
    /// Elements of a block: a power of two, unless one owner has all.
    pub block: usize,
    /// The number of ranks.
    pub ranks: usize,
    /// How many of them own something.
    pub owners: usize,
    /// The owner of the first block; the next ranks are the others.
    pub first: usize,
}

/// The cuts of layers with so many elements that send so many of them, each in so many bits, at a step; None sends nothing.
pub(crate) fn cuts(layers: &[Option<(usize, f64, f64)>], ranks: usize) -> Vec<Option<Cut>> {
    let mut burden = vec![0.0; ranks];
    let mut cut = |(n, elements, bits): (usize, f64, f64)| {
        let owners = ((elements / ELEMENTS_EACH) as usize).min(n / BLOCKS_EACH).clamp(1, ranks);
        let block = match owners {
            1 => n.max(1),
            _ => 1 << (n / (BLOCKS_EACH * owners)).clamp(1, LARGEST_BLOCK).ilog2(),
        };
        let lightest = |a: &usize, b: &usize| f64::total_cmp(&burden[*a], &burden[*b]);
        let first = (0..ranks).min_by(lightest).unwrap_or(0);
        (0..owners).for_each(|more| burden[(first + more) % ranks] += elements * bits / owners as f64);
        Cut { n, block, ranks, owners, first }
    };
    layers.iter().map(|layer| layer.map(&mut cut)).collect()
}

impl Cut {
    /// Whether it is a cut at all, as one that was read may not be.
    pub fn is_sound(&self) -> bool {
        let owners = self.owners > 0 && self.owners <= self.ranks && self.first < self.ranks;
        let numbers = [self.n, self.block, self.ranks].iter().all(|number| u32::try_from(*number).is_ok());
        owners && self.block > 0 && numbers && (self.owners == 1 || self.block.is_power_of_two())
    }

    /// Elements of an owner.
    pub fn len(&self, owner: usize) -> usize {
        let (blocks, turn) = (self.n.div_ceil(self.block), self.turn(owner));
        if turn >= self.owners {
            return 0;
        }
        let own = (blocks + self.owners - 1 - turn) / self.owners;
        let last = blocks > 0 && (blocks - 1) % self.owners == turn;
        own * self.block - if last { blocks * self.block - self.n } else { 0 }
    }

    /// Whose turn an owner is.
    fn turn(&self, owner: usize) -> usize {
        if owner >= self.first { owner - self.first } else { owner + self.ranks - self.first }
    }

    /// The block of an element, or of a place among those of an owner, and where it is in that. This and what follows is done for every
    /// element that is sent, so there is one division at most, of 32 bits.
    fn block_of(&self, index: u32) -> (u32, u32) {
        let shift = self.block.trailing_zeros();
        (index >> shift, index & ((1 << shift) - 1))
    }

    /// The owner of an element, and its place among the elements of that.
    pub fn place(&self, index: u32) -> (usize, u32) {
        if self.owners == 1 {
            return (self.first, index);
        }
        let (number, within) = self.block_of(index);
        let (round, turn) = (number / self.owners as u32, number % self.owners as u32);
        let owner = self.first + turn as usize;
        let owner = if owner < self.ranks { owner } else { owner - self.ranks };
        (owner, round * self.block as u32 + within)
    }

    /// The element at a place among those of an owner.
    pub fn index(&self, owner: usize, place: u32) -> u32 {
        if self.owners == 1 {
            return place;
        }
        let (round, within) = self.block_of(place);
        (round * self.owners as u32 + self.turn(owner) as u32) * self.block as u32 + within
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_element_has_one_owner_and_order_is_kept(
            n in 1usize..5000, ranks in 1usize..40, share in 0f64..1.0, number in 0usize..50,
        ) {
            let mut layers = vec![None; number];
            layers.push(Some((n, n as f64 * share, 12.0)));
            let cut = cuts(&layers, ranks)[number].unwrap();
            let mut seen = vec![0u32; ranks];
            for index in 0..n as u32 {
                let (owner, place) = cut.place(index);
                prop_assert_eq!(place, seen[owner], "in order, without gaps");
                prop_assert_eq!(cut.index(owner, place), index);
                seen[owner] += 1;
            }
            let lengths: Vec<u32> = (0..ranks).map(|owner| cut.len(owner) as u32).collect();
            prop_assert_eq!(&lengths, &seen);
            let (least, most) = (lengths.iter().filter(|l| **l > 0).min(), lengths.iter().max());
            prop_assert!(cut.is_sound() && most.unwrap() - least.unwrap() <= cut.block as u32);
        }
    }

    #[test]
    fn small_layers_are_spread_over_the_owners() {
        let layers = vec![Some((100, 10.0, 8.0)); 64];
        let small = cuts(&layers, 16);
        let of = |owner: usize| small.iter().flatten().filter(|cut| cut.len(owner) > 0).count();
        assert!((0..16).all(|owner| of(owner) == 4));
        let middle = cuts(&[Some((10_000, 100.0, 8.0)); 8], 16);
        assert!(middle.iter().flatten().all(|cut| cut.owners == 4));
        let of = |owner: usize| middle.iter().flatten().map(|cut| cut.len(owner)).sum::<usize>();
        assert!((0..16).all(|owner| of(owner).abs_diff(5_000) < 400));
    }
}
