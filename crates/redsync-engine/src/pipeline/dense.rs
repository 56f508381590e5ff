//! Gradients of layers that are not compressed: copied into the bucket in which they are summed, and measured for clipping.

use redsync_core::{Bad, Gradient};

/// `to = scale * gradient`, if it has the right length and is finite. Even if it is not finite, it is copied.
pub(crate) fn copy_scaled(gradient: Gradient<'_>, scale: f32, to: &mut [f32]) -> Result<(), Bad> {
    if gradient.len() != to.len() {
        return Err(Bad::Length { expected: to.len(), got: gradient.len() });
    }
    let mut finite = true;
    let mut put = |to: &mut f32, x: f32| {
        *to = x * scale;
        finite &= x.is_finite();
    };
    match gradient {
        Gradient::F32(g) => to.iter_mut().zip(g).for_each(|(to, x)| put(to, *x)),
        Gradient::F16(g) => to.iter_mut().zip(g).for_each(|(to, x)| put(to, x.to_f32())),
        Gradient::Bf16(g) => to.iter_mut().zip(g).for_each(|(to, x)| put(to, x.to_f32())),
    }
    if finite { Ok(()) } else { Err(refusal(gradient)) }
}

/// What is wrong with a gradient that is not finite.
pub(crate) fn refusal(gradient: Gradient<'_>) -> Bad {
    let (index, value) = gradient.first_not_finite().unwrap_or((0, f32::NAN));
    Bad::NotFinite { index, value }
}

/// In eight partial sums, which the compiler can take side by side, always in the same order.
pub(crate) fn sum_of_squares(gradient: Gradient<'_>) -> f64 {
    fn sum<T: Copy>(g: &[T], to_f32: impl Fn(T) -> f32) -> f64 {
        let mut lanes = [0f64; 8];
        for chunk in g.chunks(8) {
            for (lane, x) in lanes.iter_mut().zip(chunk) {
                let x = f64::from(to_f32(*x));
                *lane += x * x;
            }
        }
        lanes.iter().sum()
    }
    match gradient {
        Gradient::F32(g) => sum(g, |x| x),
        Gradient::F16(g) => sum(g, |x| x.to_f32()),
        Gradient::Bf16(g) => sum(g, |x| x.to_f32()),
    }
}

/// The norm of all buffers together, summed in their order.
pub(crate) fn norm<'a>(buffers: impl IntoIterator<Item = &'a [f32]>) -> f64 {
    buffers.into_iter().flatten().map(|x| f64::from(*x) * f64::from(*x)).sum::<f64>().sqrt()
}
