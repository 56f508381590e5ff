//! Our convolution against Burn's own: the same values and gradients for every shape, the same bits for any number of threads.

use burn::tensor::module::conv2d;
use burn::tensor::ops::ConvOptions;
use burn::tensor::{Device, Tensor, TensorData};
use proptest::prelude::*;
use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;
use redsync_burn::ops::conv::conv;

struct Case {
    x: [usize; 4],
    weight: [usize; 4],
    stride: usize,
    padding: usize,
}

fn leaf<const D: usize>(shape: [usize; D], seed: u64) -> Tensor<D> {
    let mut random = Xoshiro256PlusPlus::seed_from_u64(seed);
    let values: Vec<f32> =
        (0..shape.iter().product::<usize>()).map(|_| random.random_range(-1.0..1.0)).collect();
    Tensor::from_data(TensorData::new(values, shape), &Device::flex().autodiff()).require_grad()
}

fn numbers<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().try_to_vec().expect("numbers")
}

/// The result, and the gradients of x, weight and bias, for a loss that weighs every element differently.
fn results(case: &Case, ours: bool) -> Vec<Vec<f32>> {
    let (x, weight, bias) = (leaf(case.x, 1), leaf(case.weight, 2), leaf([case.weight[0]], 3));
    let out = match ours {
        true => conv(x.clone(), weight.clone(), Some(bias.clone()), case.stride, case.padding),
        false => {
            let options = ConvOptions::new([case.stride; 2], [case.padding; 2], [1, 1], 1);
            conv2d(x.clone(), weight.clone(), Some(bias.clone()), options)
        }
    };
    let weights = leaf(out.dims(), 4).detach();
    let gradients = (out.clone() * weights).sum().backward();
    let gradient = "every input has one";
    vec![
        numbers(out),
        numbers(x.grad(&gradients).expect(gradient)),
        numbers(weight.grad(&gradients).expect(gradient)),
        numbers(bias.grad(&gradients).expect(gradient)),
    ]
}

fn check(case: &Case) {
    for (ours, theirs) in results(case, true).iter().zip(results(case, false)) {
        assert_eq!(ours.len(), theirs.len());
        let scale = theirs.iter().fold(1f32, |most, value| most.max(value.abs()));
        for (a, b) in ours.iter().zip(&theirs) {
            assert!((a - b).abs() <= 2e-5 * scale, "{a} is not {b}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn any_shape_gives_what_burn_gives(
        batch in 1usize..6, from in 1usize..5, to in 1usize..6, height in 1usize..12, width in 1usize..12,
        kernel in 1usize..5, stride in 1usize..4, padding in 0usize..3,
    ) {
        prop_assume!(height.min(width) + 2 * padding >= kernel);
        check(&Case { x: [batch, from, height, width], weight: [to, from, kernel, kernel], stride, padding });
    }
}

#[test]
fn the_shapes_of_real_networks_give_what_burn_gives() {
    for (x, to, kernel, stride, padding) in [
        ([3, 3, 32, 32], 16, 3, 1, 1),
        ([8, 64, 2, 2], 64, 3, 1, 1),
        ([40, 8, 16, 16], 8, 3, 1, 1), // several parts of the filter gradient
        ([1, 3, 64, 64], 8, 11, 4, 2),
        ([2, 16, 8, 8], 32, 1, 2, 0),
        ([2, 3, 30, 30], 8, 7, 2, 3),
    ] {
        check(&Case { x, weight: [to, x[1], kernel, kernel], stride, padding });
    }
}

#[test]
fn one_and_two_threads_give_the_same_bits() {
    let case = Case { x: [40, 16, 16, 16], weight: [32, 16, 3, 3], stride: 1, padding: 1 };
    let run = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool");
        let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect::<Vec<_>>();
        pool.install(|| results(&case, true).into_iter().map(bits).collect::<Vec<_>>())
    };
    assert_eq!(run(1), run(2));
}
