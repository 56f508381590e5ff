//! The momentum of layers whose elements wait. What waits in a residual moves the weights later than its gradient came, and momentum does
//! that too: with both, gradients of long ago count for more than in dense training, and it learns more slowly.
//! Comes in: the momentum of the optimizer, and how much of a layer is sent. Goes out: the momentum that its residual has meanwhile, and
//! what gradients are multiplied with. What must hold: the sum of all that a gradient adds to the residual stays what it was. Factors are
//! powers of two, so that it makes no difference at which place they are applied.

use redsync_core::{Adam, Density, Momentum};

/// From this density on elements hardly wait, and momentum is as it is.
const WAITS_BELOW: f64 = 1.0 / 16.0;

/// For how many steps Adam's momentum lasts at least where elements wait.
const ADAM_LASTS: f64 = 2.4;

/// The momentum of a residual of which so much is sent, and what gradients are multiplied with.
pub(crate) fn lowered(momentum: Momentum, density: Density) -> (Momentum, f32) {
    let m = f64::from(momentum.coefficient());
    // In all, momentum makes 1/(1-m) gradients of one.
    let lasts = 1.0 / (1.0 - m);
    let most = match momentum {
        // u is not masked, so that it goes on after what was sent, too.
        Momentum::Adam(_) if density.fraction() < 1.0 => lasts / ADAM_LASTS,
        Momentum::Adam(_) => 1.0,
        // With every half of this density it lasts half as long, as far as there is any.
        _ => (WAITS_BELOW / density.fraction()).min(lasts),
    };
    let mut factor = 1.0;
    while 2.0 * factor <= most {
        factor *= 2.0;
    }
    if factor == 1.0 {
        return (momentum, 1.0);
    }
    let less = (1.0 - factor * (1.0 - m)) as f32;
    match momentum {
        Momentum::None => (momentum, 1.0),
        Momentum::Plain(_) => (Momentum::Plain(less), factor as f32),
        Momentum::Nesterov(_) => (Momentum::Nesterov(less), factor as f32),
        // Its momentum is a mean, in which the weights of all gradients add up to 1 anyway.
        Momentum::Adam(adam) => (Momentum::Adam(Adam { beta1: less, ..adam }), 1.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn at(momentum: Momentum, density: f64) -> (Momentum, f32) {
        lowered(momentum, Density::new(density).unwrap())
    }

    #[test]
    fn momentum_lasts_as_much_shorter_as_less_is_sent() {
        let adam = |beta1: f32| Momentum::Adam(Adam { beta1, ..Adam::default() });
        for (momentum, density, less, factor) in [
            (Momentum::Nesterov(0.9), 0.25, 0.9, 1.0),
            (Momentum::Nesterov(0.9), 0.0625, 0.9, 1.0),
            (Momentum::Nesterov(0.9), 0.0313, 0.9, 1.0),
            (Momentum::Nesterov(0.9), 0.03125, 0.8, 2.0),
            (Momentum::Nesterov(0.9), 0.015625, 0.6, 4.0),
            (Momentum::Plain(0.9), 0.001, 0.2, 8.0),
            (Momentum::Plain(0.99), 0.001, 0.68, 32.0),
            (Momentum::Plain(0.5), 0.001, 0.0, 2.0),
            (Momentum::Plain(0.4), 0.001, 0.4, 1.0),
            (Momentum::None, 0.001, 0.0, 1.0),
            (adam(0.9), 1.0, 0.9, 1.0),
            (adam(0.9), 0.25, 0.6, 1.0),
            (adam(0.9), 0.001, 0.6, 1.0),
            (adam(0.95), 0.001, 0.6, 1.0),
            (adam(0.8), 0.01, 0.6, 1.0),
            (adam(0.7), 0.01, 0.7, 1.0),
            (adam(0.5), 0.01, 0.5, 1.0),
            (adam(0.0), 0.01, 0.0, 1.0),
        ] {
            let (is, times) = at(momentum, density);
            let near = |a: f32, b: f32| (a - b).abs() < 1e-5;
            assert!(
                near(is.coefficient(), less) && near(times, factor),
                "{momentum} at {density}: {is}, {times}"
            );
            assert_eq!(is.form(), momentum.form());
        }
    }

    proptest! {
        #[test]
        fn all_that_a_gradient_adds_stays_what_it_was(m in 0f32..0.999, density in 1e-6f64..1.0) {
            let (less, factor) = at(Momentum::Plain(m), density);
            prop_assert!((0.0..=m).contains(&less.coefficient()));
            let sum = |m: f32| 1.0 / (1.0 - f64::from(m));
            let (was, is) = (sum(m), f64::from(factor) * sum(less.coefficient()));
            prop_assert!((is / was - 1.0).abs() < 1e-3, "{was} and {is}");
            prop_assert_eq!(factor.log2().fract(), 0.0);
        }
    }
}
