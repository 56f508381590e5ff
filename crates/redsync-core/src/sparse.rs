//! The chosen elements of one layer: sorted indices with their values, or with one value for all.
//! Made by a compressor or by the decoder, both of which guarantee: indices strictly increasing and below n, values
//! finite, as many values as indices or one mean.

use crate::phase::Phase;
use thiserror::Error;

/// Why parts do not make a sparse vector.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum SparseError {
    /// Not as many values as indices.
    #[error("{indices} indices but {values} values")]
    Lengths {
        /// Number of indices.
        indices: usize,
        /// Number of values.
        values: usize,
    },
    /// An index does not follow the one before it, or is outside the vector.
    #[error("the index at position {position} is not between its predecessor and {n}")]
    Index {
        /// Position of the index.
        position: usize,
        /// Elements of the dense vector.
        n: u32,
    },
    /// A value is NaN or infinite.
    #[error("the value at position {position} is not finite")]
    Value {
        /// Position of the value.
        position: usize,
    },
}

/// The first position whose index does not follow the one before it or is not below `n`.
pub(crate) fn first_bad_index(indices: &[u32], n: u32) -> Option<usize> {
    (0..indices.len()).find(|i| indices[*i] >= n || (*i > 0 && indices[*i - 1] >= indices[*i]))
}

/// The first position whose value is not finite.
pub(crate) fn first_bad_value<'a>(values: impl IntoIterator<Item = &'a f32>) -> Option<usize> {
    values.into_iter().position(|value| !value.is_finite())
}

/// A sparse vector of `n` elements. Its buffers are reused when it is filled again.
#[derive(Clone, Debug, Default)]
pub struct Sparse {
    pub(crate) n: u32,
    pub(crate) indices: Vec<u32>,
    pub(crate) values: Vec<f32>,
    pub(crate) mean: Option<f32>,
    /// If the values were quantized to four levels, these: each value has the bits of one of them.
    pub(crate) levels: Option<[f32; 4]>,
    /// If they were rounded to multiples of a scale, that.
    pub(crate) scale: Option<f32>,
    pub(crate) phase: Option<Phase>,
}

impl Sparse {
    /// An empty vector of no elements, to be filled by a decoder.
    pub fn new() -> Self {
        Self::default()
    }

    /// A sparse vector of `n` elements from sorted indices and their values.
    ///
    /// ```
    /// use redsync_core::Sparse;
    /// let sparse = Sparse::from_parts(10, vec![2, 7], vec![1.0, -1.0])?;
    /// assert_eq!(sparse.value(1), Some(-1.0));
    /// assert!(Sparse::from_parts(10, vec![7, 2], vec![1.0, -1.0]).is_err());
    /// # Ok::<(), redsync_core::SparseError>(())
    /// ```
    pub fn from_parts(n: u32, indices: Vec<u32>, values: Vec<f32>) -> Result<Self, SparseError> {
        if indices.len() != values.len() {
            return Err(SparseError::Lengths { indices: indices.len(), values: values.len() });
        }
        if let Some(position) = first_bad_index(&indices, n) {
            return Err(SparseError::Index { position, n });
        }
        match first_bad_value(&values) {
            Some(position) => Err(SparseError::Value { position }),
            None => Ok(Sparse { n, indices, values, mean: None, levels: None, scale: None, phase: None }),
        }
    }

    /// Elements of the dense vector that this is a part of.
    pub fn dense_len(&self) -> usize {
        self.n as usize
    }

    /// Number of elements held.
    pub fn len(&self) -> usize {
        self.indices.len()
    }

    /// Whether no element is held: a legal message.
    pub fn is_empty(&self) -> bool {
        self.indices.is_empty()
    }

    /// The indices, strictly increasing.
    pub fn indices(&self) -> &[u32] {
        &self.indices
    }

    /// The value at a position of [`Sparse::indices`].
    pub fn value(&self, position: usize) -> Option<f32> {
        match self.mean {
            Some(mean) => (position < self.len()).then_some(mean),
            None => self.values.get(position).copied(),
        }
    }

    /// The value that all elements share, if they were quantized.
    pub fn mean(&self) -> Option<f32> {
        self.mean
    }

    /// The four levels to which all values were quantized, if they were.
    pub fn levels(&self) -> Option<[f32; 4]> {
        self.levels
    }

    /// The scale of which all values are whole multiples, if they were rounded to eight bits.
    pub fn scale(&self) -> Option<f32> {
        self.scale
    }

    /// Which signs competed.
    pub fn phase(&self) -> Phase {
        self.phase.unwrap_or(Phase::Both)
    }

    /// Index and value of every element, in index order.
    pub fn iter(&self) -> impl Iterator<Item = (u32, f32)> + '_ {
        let mean = self.mean;
        self.indices
            .iter()
            .enumerate()
            .map(move |(i, index)| (*index, mean.unwrap_or_else(|| self.values[i])))
    }

    /// Makes it an empty vector of `n` elements, seen in a phase; its buffers stay.
    pub fn reset(&mut self, n: u32, phase: Phase) {
        self.indices.clear();
        self.values.clear();
        (self.n, self.mean, self.phase) = (n, None, Some(phase));
        (self.levels, self.scale) = (None, None);
    }

    /// Its elements dealt out to vectors of so many elements each: which one an index goes to, and what it is there. Indices that go to
    /// one vector must keep their order.
    ///
    /// ```
    /// use redsync_core::Sparse;
    /// let sparse = Sparse::from_parts(10, vec![2, 7], vec![1.0, -1.0])?;
    /// let halves = sparse.deal_out(&[5, 5], |index| (index as usize / 5, index % 5));
    /// assert_eq!(halves[1].iter().collect::<Vec<_>>(), [(2, -1.0)]);
    /// # Ok::<(), redsync_core::SparseError>(())
    /// ```
    ///
    /// # Panics
    /// If an index goes to a vector that there is not.
    pub fn deal_out(&self, lengths: &[u32], place: impl Fn(u32) -> (usize, u32)) -> Vec<Sparse> {
        let empty = |n: &u32| Sparse {
            n: *n,
            indices: Vec::with_capacity(2 * self.len() / lengths.len().max(1)),
            values: Vec::new(),
            mean: self.mean,
            levels: self.levels,
            scale: self.scale,
            phase: self.phase,
        };
        let mut dealt: Vec<Sparse> = lengths.iter().map(empty).collect();
        for (i, index) in self.indices.iter().enumerate() {
            let (which, index) = place(*index);
            dealt[which].indices.push(index);
            if let Some(value) = self.values.get(i) {
                dealt[which].values.push(*value);
            }
        }
        for part in &mut dealt {
            debug_assert!(first_bad_index(&part.indices, part.n).is_none(), "order was not kept");
            if part.is_empty() {
                (part.mean, part.levels, part.scale) = (None, None, None);
            }
        }
        dealt
    }

    /// Makes it a part of a vector of `n` elements: what each of its indices is there. They must keep their order.
    pub fn spread(&mut self, n: u32, index: impl Fn(u32) -> u32) {
        self.indices.iter_mut().for_each(|i| *i = index(*i));
        debug_assert!(first_bad_index(&self.indices, n).is_none(), "order was not kept");
        self.n = n;
    }
}
