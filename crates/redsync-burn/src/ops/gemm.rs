//! Products of matrices that lie in slices, by row and column strides: `c = alpha * a * b + beta * c`.
//! What must hold: every element of a, b and c is inside its slice, and no two elements of c share a place; both are checked, so
//! this room is safe to enter. The bits of c do not depend on the number of threads: each element is summed by one of them.
#![allow(unsafe_code)]

/// Multiplications from which a second thread is worth waking.
const PARALLEL_FROM: usize = 1 << 20;

/// Where the elements of a matrix lie: (i, j) at `i * row_stride + j * column_stride`.
#[derive(Clone, Copy, Debug)]
struct Places {
    rows: usize,
    columns: usize,
    row_stride: usize,
    column_stride: usize,
}

impl Places {
    fn new([rows, columns]: [usize; 2], [row_stride, column_stride]: [usize; 2], size: usize) -> Places {
        let places = Places { rows, columns, row_stride, column_stride };
        let needed = places.end();
        // Strides travel as isize; a slice is never longer than that.
        assert!(needed.is_some_and(|end| end <= size), "a matrix {places:?} does not fit in {size} elements");
        let signed = |stride: usize| isize::try_from(stride).is_ok();
        assert!(signed(row_stride) && signed(column_stride), "strides of {places:?} are too large");
        places
    }

    /// One past the last element; None if that is no number.
    fn end(&self) -> Option<usize> {
        if self.rows == 0 || self.columns == 0 {
            return Some(0);
        }
        let row = (self.rows - 1).checked_mul(self.row_stride)?;
        let column = (self.columns - 1).checked_mul(self.column_stride)?;
        row.checked_add(column)?.checked_add(1)
    }

    /// Whether every element has its own place: one axis must step over all of the other.
    fn distinct(&self) -> bool {
        let over = |outer: usize, stride: usize, inner: usize, step: usize| {
            outer <= 1 || inner == 0 || stride > (inner - 1) * step
        };
        let by_rows = over(self.rows, self.row_stride, self.columns, self.column_stride);
        let by_columns = over(self.columns, self.column_stride, self.rows, self.row_stride);
        (by_rows && (self.columns <= 1 || self.column_stride > 0))
            || (by_columns && (self.rows <= 1 || self.row_stride > 0))
    }
}

/// A matrix to read.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a> {
    values: &'a [f32],
    places: Places,
}

impl<'a> Matrix<'a> {
    /// A matrix row by row without gaps.
    ///
    /// # Panics
    /// If the slice is too short.
    pub fn new(values: &'a [f32], rows: usize, columns: usize) -> Self {
        Matrix::strided(values, [rows, columns], [columns, 1])
    }

    /// A matrix of `[rows, columns]` with `[row, column]` strides.
    ///
    /// # Panics
    /// If an element would lie outside the slice.
    pub fn strided(values: &'a [f32], shape: [usize; 2], strides: [usize; 2]) -> Self {
        Matrix { values, places: Places::new(shape, strides, values.len()) }
    }

    /// Rows become columns; nothing moves.
    pub fn transposed(self) -> Self {
        let Places { rows, columns, row_stride, column_stride } = self.places;
        let places =
            Places { rows: columns, columns: rows, row_stride: column_stride, column_stride: row_stride };
        Matrix { places, ..self }
    }
}

/// A matrix to write.
#[derive(Debug)]
pub struct MatrixMut<'a> {
    values: &'a mut [f32],
    places: Places,
}

impl<'a> MatrixMut<'a> {
    /// A matrix row by row without gaps.
    ///
    /// # Panics
    /// If the slice is too short.
    pub fn new(values: &'a mut [f32], rows: usize, columns: usize) -> Self {
        MatrixMut::strided(values, [rows, columns], [columns, 1])
    }

    /// A matrix of `[rows, columns]` with `[row, column]` strides.
    ///
    /// # Panics
    /// If an element would lie outside the slice, or two in one place.
    pub fn strided(values: &'a mut [f32], shape: [usize; 2], strides: [usize; 2]) -> Self {
        let places = Places::new(shape, strides, values.len());
        assert!(places.distinct(), "elements of {places:?} share places");
        MatrixMut { values, places }
    }
}

/// Who computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Threads {
    /// The calling thread alone.
    One,
    /// The rayon pool of the caller, where that pays.
    Pool,
}

/// Whether work of so many multiplications is worth sharing in the pool of the caller.
pub(crate) fn sharing_pays(multiplications: usize) -> bool {
    multiplications >= PARALLEL_FROM && rayon::current_num_threads() > 1
}

/// `c = alpha * a * b + beta * c`. With `beta` zero, c is only written: what was in it, be it NaN, does not matter.
///
/// ```
/// use redsync_burn::ops::gemm::{Matrix, MatrixMut, Threads, gemm};
/// let (a, b, mut c) = ([1.0, 2.0], [3.0, 4.0], [10.0]);
/// gemm(1.0, Matrix::new(&a, 1, 2), Matrix::new(&b, 2, 1), 2.0, MatrixMut::new(&mut c, 1, 1), Threads::One);
/// assert_eq!(c, [31.0]);
/// ```
///
/// # Panics
/// If the shapes do not agree.
pub fn gemm(alpha: f32, a: Matrix<'_>, b: Matrix<'_>, beta: f32, c: MatrixMut<'_>, threads: Threads) {
    let (rows, depth, columns) = (a.places.rows, a.places.columns, b.places.columns);
    assert_eq!(depth, b.places.rows, "columns of a and rows of b");
    assert_eq!([rows, columns], [c.places.rows, c.places.columns], "shape of c");
    let pool = threads == Threads::Pool && sharing_pays(rows.saturating_mul(columns).saturating_mul(depth));
    let parallelism = if pool { ::gemm::Parallelism::Rayon(0) } else { ::gemm::Parallelism::None };
    let stride = |places: Places| (places.column_stride as isize, places.row_stride as isize);
    let ((a_column, a_row), (b_column, b_row)) = (stride(a.places), stride(b.places));
    let (c_column, c_row) = stride(c.places);
    // SAFETY: the constructors have checked that all elements of the three shapes are inside their slices, under these strides,
    // and that those of c are distinct; c is borrowed exclusively, so it overlaps neither a nor b. The shapes agree, see above.
    // The strides are not negative and fit isize. f32 is a type that the library knows, so it does not panic.
    unsafe {
        ::gemm::gemm(
            rows,
            columns,
            depth,
            c.values.as_mut_ptr(),
            c_column,
            c_row,
            beta != 0.0,
            a.values.as_ptr(),
            a_column,
            a_row,
            b.values.as_ptr(),
            b_column,
            b_row,
            beta, // the library calls alpha what we call beta
            alpha,
            false,
            false,
            false,
            parallelism,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Values that are exact in f32 when multiplied and added a few thousand times, so that any order gives the same sum.
    fn whole(size: usize, seed: usize) -> Vec<f32> {
        (0..size).map(|i| ((i * 7919 + seed * 104_729) % 17) as f32 - 8.0).collect()
    }

    fn strides([rows, columns]: [usize; 2], gap: usize, by_rows: bool) -> [usize; 2] {
        if by_rows { [columns + gap, 1] } else { [1, rows + gap] }
    }

    fn room([rows, columns]: [usize; 2], [row, column]: [usize; 2]) -> usize {
        if rows == 0 || columns == 0 { 0 } else { (rows - 1) * row + (columns - 1) * column + 1 }
    }

    proptest! {
        #[test]
        fn any_shape_and_layout_gives_the_plain_sum(
            m in 0usize..70, n in 0usize..70, k in 0usize..70, gap in 0usize..3,
            layouts: [bool; 3], alpha in prop::sample::select(vec![0.0f32, 1.0, -2.0]),
            beta in prop::sample::select(vec![0.0f32, 1.0, -1.0, 2.0]),
        ) {
            let shapes = [[m, k], [k, n], [m, n]];
            let strides: Vec<_> = (0..3).map(|i| strides(shapes[i], gap, layouts[i])).collect();
            let a = whole(room(shapes[0], strides[0]), 1);
            let b = whole(room(shapes[1], strides[1]), 2);
            // With beta zero what is in c must not matter.
            let before = if beta == 0.0 { vec![f32::NAN; room(shapes[2], strides[2])] } else { whole(room(shapes[2], strides[2]), 3) };
            let mut c = before.clone();
            let (left, right) = (Matrix::strided(&a, shapes[0], strides[0]), Matrix::strided(&b, shapes[1], strides[1]));
            gemm(alpha, left, right, beta, MatrixMut::strided(&mut c, shapes[2], strides[2]), Threads::Pool);
            let mut expected = before.clone();
            for i in 0..m {
                for j in 0..n {
                    let sum: f32 = (0..k)
                        .map(|l| a[i * strides[0][0] + l * strides[0][1]] * b[l * strides[1][0] + j * strides[1][1]])
                        .sum();
                    let place = i * strides[2][0] + j * strides[2][1];
                    let kept = if beta == 0.0 { 0.0 } else { beta * before[place] };
                    expected[place] = alpha * sum + kept;
                }
            }
            // Gaps keep what they had, NaN included; zeros of either sign are zero.
            for (got, wanted) in c.iter().zip(&expected) {
                prop_assert!(got == wanted || (got.is_nan() && wanted.is_nan()), "{got} is not {wanted}");
            }
        }
    }

    #[test]
    fn one_and_two_threads_give_the_same_bits() {
        let (m, n, k) = (123, 211, 307);
        let values =
            |size, seed: usize| -> Vec<f32> { whole(size, seed).iter().map(|v| (v * 0.37).sin()).collect() };
        let (a, b) = (values(m * k, 1), values(k * n, 2));
        let run = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool");
            let mut c = vec![0.0; m * n];
            pool.install(|| {
                let c = MatrixMut::new(&mut c, m, n);
                gemm(1.0, Matrix::new(&a, m, k), Matrix::new(&b, k, n), 0.0, c, Threads::Pool);
            });
            c.into_iter().map(f32::to_bits).collect::<Vec<_>>()
        };
        assert_eq!(run(1), run(2));
    }

    #[test]
    #[should_panic(expected = "does not fit")]
    fn a_matrix_larger_than_its_slice_is_refused() {
        Matrix::strided(&[0.0; 10], [3, 3], [4, 1]);
    }

    #[test]
    #[should_panic(expected = "does not fit")]
    fn a_shape_that_overflows_is_refused() {
        Matrix::new(&[0.0; 10], usize::MAX, usize::MAX);
    }

    #[test]
    #[should_panic(expected = "share places")]
    fn a_target_whose_rows_overlap_is_refused() {
        MatrixMut::strided(&mut [0.0; 10], [3, 3], [2, 1]);
    }

    #[test]
    #[should_panic(expected = "share places")]
    fn a_target_whose_columns_are_one_is_refused() {
        MatrixMut::strided(&mut [0.0; 10], [3, 3], [3, 0]);
    }

    #[test]
    #[should_panic(expected = "columns of a")]
    fn shapes_that_do_not_agree_are_refused() {
        let mut c = [0.0; 4];
        let (a, b) = (Matrix::new(&[0.0; 6], 2, 3), Matrix::new(&[0.0; 4], 2, 2));
        gemm(1.0, a, b, 0.0, MatrixMut::new(&mut c, 2, 2), Threads::One);
    }
}
