//! What holds for networks: their gradients are those of their loss, hooks change nothing, sizes are those the engine knows.

use burn::backend::flex::FlexTensor;
use burn::tensor::module::conv2d;
use burn::tensor::ops::ConvOptions;
use burn::tensor::{Device, Tensor};
use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;
use redsync_burn::flex::{tensor, untape, untracked, values};
use redsync_burn::hook::{OnGradient, watch};
use redsync_burn::net::{Architecture, Input, NAMES, Net, Pass, Purpose, Weights};
use redsync_burn::ops::loss::cross_entropy;
use redsync_engine::models::Model;
use std::sync::{Arc, Mutex};

fn noise(count: usize, seed: u64) -> Vec<f32> {
    let mut random = Xoshiro256PlusPlus::seed_from_u64(seed);
    (0..count).map(|_| random.random_range(-1.0..1.0)).collect()
}

fn images(name: &str, shape: [usize; 3]) -> Net {
    let input = Input::Images { shape, classes: 5 };
    Architecture::named(name).expect("a known name").build(name, input).expect("images that fit")
}

/// A batch for a network, and its loss with these weights; gradients go to the function.
fn loss(net: &Net, weights: &Weights, on_gradient: OnGradient) -> Tensor<1> {
    let mut buffers = net.buffers();
    let mut pass = Pass::new(weights, &mut buffers, Purpose::Train { on_gradient, random: 3 });
    match net {
        Net::Images(net) => {
            let [c, h, w] = net.shape;
            let batch = untracked(tensor(noise(4 * c * h * w, 1), &[4, c, h, w]));
            cross_entropy(net.run(&mut pass, batch), &[0, 3, 1, 4]).0
        }
        Net::Words(net) => {
            let words: Vec<u32> = (0..12u32).map(|i| i * 7 % 11).collect();
            let next: Vec<u32> = (0..12u32).map(|i| (i * 7 + 3) % 11).collect();
            cross_entropy(net.run(&mut pass, &words, 3, &mut net.blank(3)), &next).0
        }
    }
}

fn gradients(net: &Net, weights: &Weights) -> Vec<Vec<f32>> {
    let seen = Arc::new(Mutex::new(vec![Vec::new(); net.specs().len()]));
    let keep = seen.clone();
    let on_gradient: OnGradient = Arc::new(move |layer, gradient: FlexTensor| {
        let mut seen = keep.lock().expect("no panic");
        assert!(seen[layer].is_empty(), "layer {layer} came twice");
        assert!(gradient.is_contiguous(), "layer {layer} would have to be copied");
        seen[layer] = values(&gradient).to_vec();
    });
    drop(loss(net, weights, on_gradient).backward());
    let seen = seen.lock().expect("no panic");
    seen.clone()
}

/// Along its own gradient, each parameter changes the loss by the gradient's length.
fn check_by_differences(net: &Net, step: f32, tolerance: f64) {
    let mut weights = Weights::new(net.specs(), 5);
    for (number, gradient) in gradients(net, &weights).into_iter().enumerate() {
        let spec = &net.specs()[number];
        assert_eq!(gradient.len(), spec.layer.size, "{}", spec.layer.name);
        let norm = gradient.iter().map(|g| f64::from(*g) * f64::from(*g)).sum::<f64>().sqrt();
        assert!(norm > 0.0, "{} has no gradient", spec.layer.name);
        let begin = weights.values(number).to_vec();
        let mut at = |factor: f32| {
            let moved = begin.iter().zip(&gradient).map(|(w, g)| w + factor * step * g / norm as f32);
            weights.values_mut(number).iter_mut().zip(moved).for_each(|(place, value)| *place = value);
            f64::from(values(&untape(loss(net, &weights, Arc::new(|_, _| ()))))[0])
        };
        let slope = (at(1.0) - at(-1.0)) / (2.0 * f64::from(step));
        at(0.0);
        let error = (slope - norm).abs() / norm;
        assert!(error < tolerance, "{}: gradient {norm}, difference {slope}", spec.layer.name);
    }
}

#[test]
fn gradients_of_convolutions_poolings_and_full_layers_are_those_of_the_loss() {
    check_by_differences(&images("digits-cnn", [1, 8, 8]), 2e-3, 0.02);
}

#[test]
fn gradients_of_batch_norms_are_those_of_the_loss() {
    check_by_differences(&images("vgg-small", [3, 16, 16]), 2e-3, 0.03);
}

#[test]
fn gradients_of_residual_blocks_are_those_of_the_loss() {
    check_by_differences(&images("resnet20", [3, 16, 16]), 2e-3, 0.03);
}

#[test]
fn gradients_of_a_language_model_are_those_of_the_loss() {
    let lstm = redsync_burn::net::Lstm { units: 8, layers: 2, dropout: 0.0, begin: 0.5 };
    check_by_differences(&Net::Words(lstm.build(11)), 1e-2, 0.01);
}

#[test]
fn gradients_of_a_transformer_are_those_of_the_loss() {
    let gpt = redsync_burn::net::Gpt { width: 8, layers: 2, heads: 2, context: 5, begin: 0.5 };
    check_by_differences(&Net::Words(gpt.build(11)), 1e-2, 0.01);
}

#[test]
fn hooked_and_plain_gradients_are_the_same_bits() {
    let device = Device::flex().autodiff();
    let filter =
        || Tensor::<4>::from_data(burn::tensor::TensorData::new(noise(4 * 3 * 9, 2), [4, 3, 3, 3]), &device);
    let full =
        || Tensor::<2>::from_data(burn::tensor::TensorData::new(noise(4 * 64 * 5, 3), [256, 5]), &device);
    let batch =
        || Tensor::<4>::from_data(burn::tensor::TensorData::new(noise(2 * 3 * 64, 4), [2, 3, 8, 8]), &device);
    let options = || ConvOptions::new([1, 1], [1, 1], [1, 1], 1);
    let (filter_plain, full_plain) = (filter().require_grad(), full().require_grad());
    let hidden = conv2d(batch(), filter_plain.clone(), None, options());
    let plain = hidden.flatten::<2>(1, 3).matmul(full_plain.clone()).powi_scalar(2).sum().backward();
    let expected = [
        filter_plain.grad(&plain).expect("a gradient").into_data().try_to_vec::<f32>().expect("numbers"),
        full_plain.grad(&plain).expect("a gradient").into_data().try_to_vec::<f32>().expect("numbers"),
    ];

    let order = Arc::new(Mutex::new(Vec::new()));
    let keep = order.clone();
    let on_gradient: OnGradient = Arc::new(move |layer, gradient| {
        keep.lock().expect("no panic").push((layer, values(&gradient).to_vec()))
    });
    let x = batch();
    let hidden = conv2d(
        x.clone(),
        watch(filter().require_grad(), &x, 0, on_gradient.clone()).expect("the device"),
        None,
        options(),
    );
    let flat = hidden.flatten::<2>(1, 3);
    let watched = watch(full().require_grad(), &flat, 1, on_gradient).expect("the device");
    drop(flat.matmul(watched).powi_scalar(2).sum().backward());
    let seen = order.lock().expect("no panic");
    assert_eq!(
        seen.iter().map(|(layer, _)| *layer).collect::<Vec<_>>(),
        [1, 0],
        "the last layer's comes first"
    );
    assert_eq!(seen[0].1, expected[1]);
    assert_eq!(seen[1].1, expected[0]);
}

#[test]
fn parameters_are_those_that_the_engine_knows_by_the_same_name() {
    for known in redsync_engine::models::NAMES {
        let model = Model::named(known).expect("a known name");
        let input = match known {
            "lstm-ptb" => Input::Words { vocabulary: 10_000 },
            "lstm-wiki2" => Input::Words { vocabulary: 33_278 },
            "gpt-tiny" | "gpt-small" => Input::Words { vocabulary: 256 },
            "digits-cnn" => Input::Images { shape: [1, 8, 8], classes: 10 },
            "vgg16-cifar" | "resnet44" => Input::Images { shape: [3, 32, 32], classes: 10 },
            _ => Input::Images { shape: [3, 224, 224], classes: 1000 },
        };
        let net =
            Architecture::named(known).expect("known here, too").build(known, input).expect("data that fit");
        let ours: Vec<_> = net.specs().iter().map(|spec| spec.layer.clone()).collect();
        assert_eq!(ours, model.layers, "{known}");
    }
}

#[test]
fn sizes_are_as_promised() {
    let count = |name: &str, shape, classes| {
        let input = Input::Images { shape, classes };
        Architecture::named(name).expect("known").build(name, input).expect("fits").parameters()
    };
    assert!((900_000..1_200_000).contains(&count("digits-cnn", [1, 8, 8], 10)));
    assert!((2_700_000..3_300_000).contains(&count("vgg-small", [3, 32, 32], 10)));
    assert!((2_700_000..3_300_000).contains(&count("vgg-small", [1, 28, 28], 10)));
    assert_eq!(count("resnet20", [3, 32, 32], 10), 269_722);
    assert_eq!(NAMES.len(), 13);
}

#[test]
fn names_and_data_that_do_not_fit_are_refused_in_one_line() {
    let named = |name| Architecture::named(name).expect_err("a wrong name").to_string();
    assert_eq!(named("resnet4"), "unknown model resnet4: did you mean resnet20 or resnet44 or resnet50?");
    let build = |name: &str, input| {
        Architecture::named(name).expect("known").build(name, input).expect_err("no fit").to_string()
    };
    let words = Input::Words { vocabulary: 10 };
    assert_eq!(build("vgg-small", words), "the model vgg-small takes images, but the data are words");
    let tiny = Input::Images { shape: [1, 8, 8], classes: 10 };
    assert_eq!(build("lstm-small", tiny), "the model lstm-small takes words, but the data are images");
    assert_eq!(
        build("vgg16-cifar", tiny),
        "the model vgg16-cifar needs images of at least 32 x 32, but the data have 8 x 8"
    );
}
