//! What holds for networks: their gradients are those of their loss, hooks change nothing, sizes are those the engine knows.

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::module::conv2d;
use burn::tensor::ops::ConvOptions;
use burn::tensor::{Device, Tensor, TensorData};
use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;
use redsync_burn::flex::{Inner, untape, values};
use redsync_burn::hook::{OnGradient, watch};
use redsync_burn::net::{Architecture, Input, NAMES, Net, Pass};
use redsync_burn::ops::loss::cross_entropy;
use redsync_burn::{Config, Distributed, Momentum, on_threads};
use redsync_comm::local;
use redsync_engine::models::Model;
use redsync_engine::{Kind, Layer, Method, Rest, WarmUp};
use std::sync::{Arc, Mutex};

fn noise(count: usize, seed: u64) -> Vec<f32> {
    let mut random = Xoshiro256PlusPlus::seed_from_u64(seed);
    (0..count).map(|_| random.random_range(-1.0..1.0)).collect()
}

fn images(name: &str, shape: [usize; 3]) -> Net {
    let input = Input::Images { shape, classes: 5 };
    Architecture::named(name).expect("a known name").build(name, input, 5).expect("images that fit")
}

fn lstm(dropout: f32) -> Net {
    Net::Words(redsync_burn::net::Lstm { units: 8, layers: 2, dropout, begin: 0.5 }.build(11, 5))
}

fn gpt() -> Net {
    Net::Words(redsync_burn::net::Gpt { width: 8, layers: 2, heads: 2, context: 5, begin: 0.5 }.build(11, 5))
}

/// The loss of a batch; images are of this shape.
fn loss(net: &Net, [c, h, w]: [usize; 3], mut pass: Pass) -> Tensor<1> {
    match net {
        Net::Images(net) => {
            let batch = TensorData::new(noise(4 * c * h * w, 1), [4, c, h, w]);
            let batch = Tensor::from_data(batch, &Device::flex().autodiff());
            cross_entropy(net.forward(&mut pass, batch), &[0, 3, 1, 4]).0
        }
        Net::Words(net) => {
            let words: Vec<u32> = (0..12u32).map(|i| i * 7 % 11).collect();
            let next: Vec<u32> = (0..12u32).map(|i| (i * 7 + 3) % 11).collect();
            cross_entropy(net.forward(&mut pass, &words, 3, &mut net.blank(3)), &next).0
        }
    }
}

/// The layers of a network as the engine would know them.
fn layers(net: &Net) -> Vec<Layer> {
    struct Layers(Vec<String>, Vec<Layer>);
    impl ModuleVisitor for Layers {
        fn enter_module(&mut self, name: &str, _: &str) {
            self.0.push(name.into());
        }

        fn exit_module(&mut self, _: &str, _: &str) {
            self.0.pop();
        }

        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if !self.0.last().is_some_and(|field| field.starts_with("running_")) {
                let kind = if D < 2 { Kind::BiasOrNorm } else { Kind::Weight };
                self.1.push(Net::layer(Layer::new(
                    self.0.join("."),
                    param.lazy_shape().num_elements(),
                    kind,
                )));
            }
        }
    }
    let mut layers = Layers(Vec::new(), Vec::new());
    net.visit(&mut layers);
    let mut layers = layers.1;
    if layers.iter().all(|layer| layer.kind != Kind::Output) {
        layers.iter_mut().rfind(|layer| layer.kind == Kind::Weight).expect("a weight").kind = Kind::Output;
    }
    layers
}

/// The gradient of each parameter, in the order of the module.
fn gradients(net: &Net, shape: [usize; 3]) -> Vec<Vec<f32>> {
    struct Take(GradientsParams, Vec<Vec<f32>>);
    impl ModuleVisitor for Take {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if param.is_require_grad() {
                let gradient = self.0.remove::<D>(param.id).expect("a gradient of every parameter");
                let gradient = gradient.inner().try_into_primitive::<Inner>().expect("on the host");
                assert!(gradient.is_contiguous(), "it would have to be copied");
                self.1.push(values(&gradient).to_vec());
            }
        }
    }
    let loss = loss(net, shape, Pass::training(3));
    let mut take = Take(GradientsParams::from_grads(loss.backward(), net), Vec::new());
    net.visit(&mut take);
    take.1
}

/// The network with something added to one of its parameters.
fn moved(net: &Net, number: usize, by: Vec<f32>) -> Net {
    struct Move(usize, Vec<f32>);
    impl ModuleMapper for Move {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            if !param.is_require_grad() {
                return param;
            }
            let here = self.0 == 0;
            self.0 = self.0.wrapping_sub(1);
            match here {
                false => param,
                true => param.map(|tensor| {
                    let by = TensorData::new(std::mem::take(&mut self.1), tensor.dims());
                    (tensor.inner() + Tensor::from_data(by, &Device::flex())).autodiff().require_grad()
                }),
            }
        }
    }
    net.clone().map(&mut Move(number, by))
}

/// Along its own gradient, each parameter changes the loss by the gradient's length.
fn check_by_differences(net: &Net, shape: [usize; 3], step: f32, tolerance: f64) {
    let (layers, gradients) = (layers(net), gradients(net, shape));
    assert_eq!(layers.len(), gradients.len());
    for (number, (gradient, layer)) in gradients.into_iter().zip(layers).enumerate() {
        assert_eq!(gradient.len(), layer.size, "{}", layer.name);
        let norm = gradient.iter().map(|g| f64::from(*g) * f64::from(*g)).sum::<f64>().sqrt();
        assert!(norm > 0.0, "{} has no gradient", layer.name);
        let at = |factor: f32| {
            let by = gradient.iter().map(|g| factor * step * g / norm as f32).collect();
            let loss = loss(&moved(net, number, by), shape, Pass::training(3));
            f64::from(values(&untape(loss))[0])
        };
        let slope = (at(1.0) - at(-1.0)) / (2.0 * f64::from(step));
        let error = (slope - norm).abs() / norm;
        assert!(error < tolerance, "{}: gradient {norm}, difference {slope}", layer.name);
    }
}

#[test]
fn gradients_of_convolutions_poolings_and_full_layers_are_those_of_the_loss() {
    check_by_differences(&images("digits-cnn", [1, 8, 8]), [1, 8, 8], 2e-3, 0.02);
}

#[test]
fn gradients_of_batch_norms_are_those_of_the_loss() {
    check_by_differences(&images("vgg-small", [3, 16, 16]), [3, 16, 16], 2e-3, 0.03);
}

#[test]
fn gradients_of_residual_blocks_are_those_of_the_loss() {
    check_by_differences(&images("resnet20", [3, 16, 16]), [3, 16, 16], 2e-3, 0.03);
}

#[test]
fn gradients_of_a_language_model_are_those_of_the_loss() {
    check_by_differences(&lstm(0.0), [0; 3], 1e-2, 0.01);
}

#[test]
fn gradients_of_a_transformer_are_those_of_the_loss() {
    check_by_differences(&gpt(), [0; 3], 1e-2, 0.01);
}

#[test]
fn hooked_and_plain_gradients_are_the_same_bits() {
    let device = Device::flex().autodiff();
    let filter = || Tensor::<4>::from_data(TensorData::new(noise(4 * 3 * 9, 2), [4, 3, 3, 3]), &device);
    let full = || Tensor::<2>::from_data(TensorData::new(noise(4 * 64 * 5, 3), [256, 5]), &device);
    let batch = || Tensor::<4>::from_data(TensorData::new(noise(2 * 3 * 64, 4), [2, 3, 8, 8]), &device);
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

/// Each kind of network with the shape of its images.
fn all_kinds() -> [(Net, [usize; 3]); 5] {
    let images = |name, shape| (images(name, shape), shape);
    [
        images("digits-cnn", [1, 8, 8]),
        images("vgg-small", [3, 16, 16]),
        images("resnet20", [3, 16, 16]),
        (lstm(0.2), [0; 3]),
        (gpt(), [0; 3]),
    ]
}

/// Everything that can be compressed is.
fn config() -> Config {
    Config {
        method: Method::RgcAsq,
        density: 0.05,
        at_least: 0,
        dense_below: Some(0),
        rest: Rest::F32,
        momentum: Momentum::Nesterov(0.9),
        warm_up: WarmUp::Dense(1),
        ..Config::default()
    }
}

/// The trained parameters, as bits, behind some steps, and where they are in memory after the first step and the last.
fn trained(net: Net, shape: [usize; 3], watched: bool) -> (Vec<Vec<u32>>, Vec<usize>, Vec<usize>) {
    let comm = Arc::new(local::group(1).remove(0));
    let setup = Distributed::setup(config()).layers(Net::layer).alike();
    let (mut net, mut distributed) = setup.make(net, comm).expect("a network");
    let places = |distributed: &Distributed, net: &Net| {
        let places = |layers: &[&[f32]]| layers.iter().map(|layer| layer.as_ptr() as usize).collect();
        distributed.read(net, places).expect("the network")
    };
    let mut first = Vec::new();
    for step in 0..3 {
        distributed.begin(0.05).expect("a step");
        let (watch, pass) = (distributed.watch(), Pass::training(step));
        let loss = loss(&net, shape, if watched { pass.watched(&watch) } else { pass });
        let gradients = GradientsParams::from_grads(loss.backward(), &net);
        drop(loss);
        assert_eq!(gradients.len(), if watched { 0 } else { distributed.synchronizer().layers().len() });
        net = distributed.step(0.05, net, gradients).expect("a step");
        if step == 0 {
            first = places(&distributed, &net);
        }
    }
    let bits = |layers: &[&[f32]]| layers.iter().map(|x| x.iter().map(|x| x.to_bits()).collect()).collect();
    let last = places(&distributed, &net);
    (distributed.read(&net, bits).expect("the network"), first, last)
}

#[test]
fn networks_are_trained_to_the_same_bits_whether_they_are_watched_or_not() {
    for (net, shape) in all_kinds() {
        // Statistics are shared by clones of a module.
        let begin = net.clone().valid().train();
        let (watched, ..) = trained(net, shape, true);
        assert_eq!(trained(begin, shape, false).0, watched);
    }
}

#[test]
fn weights_of_watched_networks_are_updated_where_they_are() {
    for (net, shape) in all_kinds() {
        let name = layers(&net)[0].name.clone();
        let (_, first, last) = trained(net, shape, true);
        assert_eq!(first, last, "the network that begins with {name}");
    }
}

#[test]
fn what_is_judged_off_the_tape_has_the_same_scores() {
    for (net, shape) in all_kinds() {
        drop(loss(&net, shape, Pass::training(1))); // moves running statistics
        let bits = |loss: Tensor<1>| (loss.is_autodiff(), values(&untape(loss))[0].to_bits());
        let on = bits(loss(&net, shape, Pass::judging()));
        let judged = net.valid();
        let off = match &judged {
            Net::Images(net) => {
                let [c, h, w] = shape;
                let batch = TensorData::new(noise(4 * c * h * w, 1), [4, c, h, w]);
                let batch = Tensor::from_data(batch, &Device::flex());
                bits(cross_entropy(net.forward(&mut Pass::judging(), batch), &[0, 3, 1, 4]).0)
            }
            Net::Words(_) => bits(loss(&judged, shape, Pass::judging())),
        };
        assert_eq!((on, off), ((true, on.1), (false, on.1)), "{}", layers(&net)[0].name);
    }
}

#[test]
fn a_seed_gives_the_same_network_on_all_ranks_and_another_one_another() {
    let hashes = on_threads(2, |comm| {
        let shape = [1, 8, 8];
        let setup = Distributed::setup(config()).layers(Net::layer).alike();
        let (net, distributed) = setup.make(images("digits-cnn", shape), comm.clone())?;
        let hash = distributed.check(&net)?;
        let input = Input::Images { shape, classes: 5 };
        let unlike = Architecture::named("digits-cnn").expect("known");
        let unlike = unlike.build("digits-cnn", input, comm.rank() as u64).expect("fits");
        let refused = Distributed::setup(config()).layers(Net::layer).alike().make(unlike, comm);
        Ok::<_, redsync_burn::DistributedError>((hash, refused.err().map(|error| error.to_string())))
    })
    .expect("a network");
    assert_eq!(hashes[0].0, hashes[1].0);
    let differ =
        |refused: &Option<String>| refused.as_ref().is_some_and(|why| why.contains("replicas differ"));
    assert!(hashes.iter().all(|(_, refused)| differ(refused)), "{hashes:?}");
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
        let net = Architecture::named(known)
            .expect("known here, too")
            .build(known, input, 1)
            .expect("data that fit");
        assert_eq!(layers(&net), model.layers, "{known}");
    }
}

#[test]
fn sizes_are_as_promised() {
    let count = |name: &str, shape, classes| {
        let input = Input::Images { shape, classes };
        let net = Architecture::named(name).expect("known").build(name, input, 1).expect("fits");
        layers(&net).iter().map(|layer| layer.size).sum::<usize>()
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
        Architecture::named(name).expect("known").build(name, input, 1).expect_err("no fit").to_string()
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
