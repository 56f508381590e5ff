//! What holds for a module of a user's own that was made distributed: replicas are equal to the bit, density 1 is dense training, whatever
//! gradients a step has, and whether layers are watched or not.

mod local;
mod own;
mod state;

use burn::module::{Module, Param};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{GradientsParams, ModuleOptimizer, SgdConfig, momentum::MomentumConfig};
use burn::tensor::{DType, Device, Tensor};
use own::*;
use redsync_burn::Distributed;
use redsync_burn::flex::{served, values as flex_values};
use redsync_engine::{Adam, Config, Method, Momentum, WarmUp};

#[test]
fn layers_have_the_paths_of_the_module_and_replicas_begin_and_stay_equal() {
    for (ranks, method) in [(2, Method::RgcAsq), (4, Method::RgcTwoBit)] {
        let ended = run(ranks, move |_, comm| {
            let config = Config { momentum: Momentum::Nesterov(0.9), ..config(method, 0.05) };
            let (net, mut distributed) = Distributed::new(Net::new(), config, comm).expect("a module");
            distributed.check(&net).expect("the weights of rank 0");
            let names: Vec<_> =
                distributed.synchronizer().layers().iter().map(|layer| layer.name.as_str()).collect();
            let paths = ["conv.weight", "conv.bias", "norm.gamma", "norm.beta"];
            assert_eq!(names[..4], paths);
            assert_eq!(names[4..], ["hidden.0.weight", "hidden.0.bias", "out.weight", "out.bias"]);
            let before = bits(&net);
            let net = steps(0..12, net, &mut distributed).expect("steps");
            assert_ne!(before, bits(&net));
            (
                distributed.check(&net).expect("equal replicas"),
                bits(&distributed.valid(&net).expect("statistics")),
            )
        });
        assert!(ended.iter().all(|rank| *rank == ended[0]), "{ranks} ranks");
    }
}

/// Ordinary training by one process that has the data of all ranks.
fn alone(net: Net, ranks: usize, steps: u64, optimizer: &mut ModuleOptimizer) -> Net {
    (0..steps).fold(net, |net, step| {
        let losses = (0..ranks).map(|rank| net.loss(batch(rank, step), None));
        let loss = losses.reduce(|a, b| a + b).expect("a rank") / ranks as f32;
        let gradients = GradientsParams::from_grads(loss.backward(), &net);
        optimizer.step(RATE, net, gradients)
    })
}

fn sgd(momentum: Option<f64>, nesterov: bool) -> ModuleOptimizer {
    let with = |m| MomentumConfig::new().with_momentum(m).with_dampening(0.0).with_nesterov(nesterov);
    SgdConfig::new().with_momentum(momentum.map(with)).init()
}

/// Running statistics are the ranks' own, and follow another way.
fn trained(net: &Net) -> Vec<(String, Vec<f32>)> {
    values(net).into_iter().filter(|(path, _)| !path.contains("running")).collect()
}

fn is_dense_training(ranks: usize, config: Config, momentum: Option<f64>, nesterov: bool) {
    let ended = run(ranks, move |_, comm| {
        let (net, mut distributed) = Distributed::new(Net::new(), config.clone(), comm).expect("a module");
        // Statistics are shared by clones of a module.
        let begin = net.clone().valid().train();
        (begin, steps(0..8, net, &mut distributed).expect("steps"))
    });
    let (begin, end) = &ended[0];
    let expected = alone(begin.clone(), ranks, 8, &mut sgd(momentum, nesterov));
    assert_close(&trained(end), &trained(&expected));
}

#[test]
fn density_1_is_dense_training_and_so_is_no_compression() {
    for ranks in [2, 4] {
        is_dense_training(ranks, everything(Momentum::Plain(0.9), WarmUp::None), Some(0.9), false);
        is_dense_training(ranks, everything(Momentum::None, WarmUp::None), None, false);
    }
    let sgd = Config { momentum: Momentum::Nesterov(0.9), ..config(Method::Sgd, 0.001) };
    is_dense_training(2, sgd, Some(0.9), true);
}

#[test]
fn momentum_goes_on_when_a_warm_up_ends() {
    for (momentum, nesterov) in [(Momentum::Plain(0.9), false), (Momentum::Nesterov(0.9), true)] {
        is_dense_training(2, everything(momentum, WarmUp::Dense(4)), Some(0.9), nesterov);
    }
}

#[test]
fn averaged_gradients_are_taken_by_an_optimizer_of_burn() {
    let ended = run(2, |rank, comm| {
        let config = everything(Momentum::None, WarmUp::None);
        let (mut net, mut distributed) = Distributed::new(Net::new(), config, comm).expect("a module");
        let (begin, mut optimizer) = (net.clone().valid().train(), sgd(Some(0.9), false));
        for step in 0..8 {
            let gradients = distributed.average(&net, net.gradients(rank, step)).expect("an average");
            net = optimizer.step(RATE, net, gradients);
        }
        (begin, distributed.check(&net).expect("equal replicas"), net)
    });
    let expected = alone(ended[0].0.clone(), 2, 8, &mut sgd(Some(0.9), false));
    assert_close(&trained(&ended[0].2), &trained(&expected));
    assert_eq!(ended[0].1, ended[1].1);
}

#[test]
fn watched_layers_give_the_same_bits() {
    for ranks in [2, 4] {
        let ended = run(ranks, |rank, comm| {
            let config = Config {
                momentum: Momentum::Adam(Adam::default()),
                warm_up: WarmUp::Dense(3),
                ..config(Method::RgcTwoBit, 0.05)
            };
            let (net, mut plain) =
                Distributed::new(Net::new(), config.clone(), comm.clone()).expect("a module");
            let begin = net.clone().valid().train();
            let net = steps(0..8, net, &mut plain).expect("steps");
            let (mut watched, mut distributed) = Distributed::new(begin, config, comm).expect("a module");
            for step in 0..8 {
                distributed.begin(RATE).expect("a step");
                let loss = watched.loss(batch(rank, step), Some(&distributed.watch()));
                let gradients = GradientsParams::from_grads(loss.backward(), &watched);
                assert_eq!(gradients.len(), 2, "only the norm is not watched");
                watched = distributed.step(RATE, watched, gradients).expect("a step");
            }
            (bits(&net), bits(&watched))
        });
        ended.iter().for_each(|(plain, watched)| assert_eq!(plain, watched));
    }
}

/// On a tape that recomputes activations, which hooks do not know.
#[test]
fn a_layer_that_cannot_be_watched_is_trained_all_the_same() {
    let ended = run(2, |rank, comm| {
        let train = |device: Device, begin: Option<Linear>| {
            let linear = begin.unwrap_or_else(|| LinearConfig::new(64, 8).init(&device));
            let made = Distributed::new(linear, config(Method::RgcAsq, 0.1), comm.clone()).expect("a module");
            let (mut linear, mut distributed) = made;
            let begin = linear.clone();
            for step in 0..4 {
                distributed.begin(RATE).expect("a step");
                let x = Tensor::<1>::from_floats(&noise(128, step * 2 + rank as u64)[..], &device)
                    .reshape([2, 64]);
                let x = distributed.watch().layer(&linear, &x).forward(x);
                let gradients = GradientsParams::from_grads(x.powf_scalar(2.0).mean().backward(), &linear);
                linear = distributed.step(RATE, linear, gradients).expect("a step");
            }
            (begin, linear)
        };
        let (begin, end) = train(device().gradient_checkpointing(), None);
        assert!(
            end.weight.val().device().gradient_checkpointing_strategy()
                == begin.weight.val().device().gradient_checkpointing_strategy()
        );
        let (_, watched) = train(device(), Some(begin.valid().train()));
        (bits(&end), bits(&watched))
    });
    ended.iter().for_each(|(recomputed, watched)| assert_eq!(recomputed, watched));
}

#[test]
fn weights_are_updated_where_they_are() {
    run(2, |_, comm| {
        let config = Config { momentum: Momentum::Plain(0.9), ..config(Method::RgcAsq, 0.1) };
        let (net, mut distributed) = Distributed::new(Net::new(), config, comm).expect("a module");
        let place = |net: &Net| {
            let weight = served(net.hidden[0].weight.val()).expect("f32 on the host");
            flex_values(&weight).as_ptr() as usize
        };
        let net = steps(0..1, net, &mut distributed).expect("a step");
        let before = place(&net);
        let net = steps(1..4, net, &mut distributed).expect("steps");
        assert_eq!(place(&net), before);
    });
}

#[derive(Module, Debug)]
struct Parts {
    frozen: Linear,
    used: Linear,
    sometimes: Linear,
    never: Linear,
}

impl Parts {
    fn new() -> Self {
        let part = || LinearConfig::new(4, 4).init(&device());
        Parts { frozen: part().no_grad(), used: part(), sometimes: part(), never: part() }
    }

    fn gradients(&self, sometimes: bool) -> GradientsParams {
        let x = self.used.forward(self.frozen.forward(Tensor::<2>::ones([3, 4], &device())));
        let x = if sometimes { self.sometimes.forward(x) } else { x };
        GradientsParams::from_grads(x.powf_scalar(2.0).mean().backward(), self)
    }
}

#[test]
fn parameters_without_gradients_stay_and_those_that_some_ranks_use_are_the_same_everywhere() {
    for momentum in [Momentum::None, Momentum::Plain(0.9)] {
        for warm_up in [WarmUp::None, WarmUp::Dense(2)] {
            let ended = run(2, move |rank, comm| {
                let config = everything(momentum, warm_up);
                let (parts, mut distributed) =
                    Distributed::new(Parts::new(), config, comm).expect("a module");
                assert_eq!(distributed.synchronizer().layers().len(), 6, "the frozen ones are no layers");
                let begin = values(&parts);
                let step = |parts: Parts, at| {
                    let gradients = parts.gradients(rank == 0 && at % 2 == 0);
                    distributed.step(RATE, parts, gradients)
                };
                let parts = (0..5).try_fold(parts, step).expect("steps");
                distributed.check(&parts).expect("equal replicas");
                let changed: Vec<bool> =
                    begin.iter().zip(values(&parts)).map(|(begin, end)| begin.1 != end.1).collect();
                assert_eq!(changed, [false, false, true, true, true, true, false, false]);
                bits(&parts)
            });
            assert_eq!(ended[0], ended[1]);
        }
    }
}

#[test]
fn a_parameter_that_is_frozen_later_stays_and_one_that_was_frozen_cannot_come_back() {
    let ended = run(2, |_, comm| {
        let config = everything(Momentum::Plain(0.9), WarmUp::Dense(9));
        let (mut parts, mut distributed) = Distributed::new(Parts::new(), config, comm).expect("a module");
        let gradients = parts.gradients(true);
        parts = distributed.step(RATE, parts, gradients).expect("a step");
        parts.used = parts.used.no_grad();
        let before = bits(&parts.used);
        let gradients = parts.gradients(true);
        parts = distributed.step(RATE, parts, gradients).expect("a step");
        assert_eq!(before, bits(&parts.used));
        parts.frozen = parts.frozen.set_require_grad(true);
        let gradients = parts.gradients(true);
        distributed.step(RATE, parts, gradients).expect_err("a refusal").to_string()
    });
    let why = "there is a gradient of a parameter that was frozen or not there when the module was made distributed";
    assert!(ended.iter().any(|said| said == why), "{ended:?}");
}

#[test]
fn a_module_that_is_not_trained_any_more_is_refused() {
    let ended = run(2, |_, comm| {
        let config = everything(Momentum::None, WarmUp::None);
        let (parts, mut distributed) = Distributed::new(Parts::new(), config, comm).expect("a module");
        let refused = distributed.step(RATE, parts.no_grad(), GradientsParams::new());
        refused.expect_err("a refusal").to_string()
    });
    let why = "no parameter of the module is trained any more: all were frozen, or the module was moved to another device";
    assert!(ended.iter().any(|said| said == why), "{ended:?}");
}

/// One parameter at two places.
#[derive(Module, Debug)]
struct Tied {
    first: Param<Tensor<2>>,
    other: Linear,
    again: Param<Tensor<2>>,
}

#[test]
fn a_parameter_at_two_places_is_one_layer_and_stays_one() {
    let ended = run(2, |rank, comm| {
        let first =
            Param::from_tensor(Tensor::random([3, 3], burn::tensor::Distribution::Default, &device()));
        let other = LinearConfig::new(3, 3).init(&device());
        let tied = Tied { again: first.clone(), other, first };
        let config = everything(Momentum::Plain(0.9), WarmUp::None);
        let (mut tied, mut distributed) = Distributed::new(tied, config, comm).expect("a module");
        let names: Vec<_> =
            distributed.synchronizer().layers().iter().map(|layer| layer.name.clone()).collect();
        assert_eq!(names, ["first", "other.weight", "other.bias"]);
        let (mut weight, mut velocity) =
            (tied.first.val().inner(), Tensor::<2>::zeros([3, 3], &Device::flex()));
        for step in 0..5 {
            let x =
                Tensor::<1>::from_floats(&noise(9, step * 2 + rank as u64)[..], &device()).reshape([3, 3]);
            // Linear in each use: both gradients are x or twice x, whatever the weights, and their sum three times x.
            let loss = (x.clone() * tied.first.val()).sum() + (x.clone() * tied.again.val()).sum() * 2.0;
            let gradients = GradientsParams::from_grads(loss.backward(), &tied);
            tied = distributed.step(RATE, tied, gradients).expect("a step");
            let both =
                [0, 1].map(|rank| Tensor::<1>::from_floats(&noise(9, step * 2 + rank)[..], &Device::flex()));
            let [a, b] = both.map(|x| x.reshape([3, 3]));
            velocity = velocity * 0.9 + (a + b) * 1.5;
            weight = weight - velocity.clone() * RATE;
        }
        assert_eq!(bits(&tied.first), bits(&tied.again));
        let expected = weight.into_data().try_to_vec().expect("f32");
        assert_close(&values(&tied)[..1], &[("first".into(), expected)]);
        distributed.check(&tied).expect("equal replicas")
    });
    assert_eq!(ended[0], ended[1]);
}

#[test]
fn what_is_judged_has_the_mean_of_all_statistics_and_the_frozen_values_as_they_were() {
    let ended = run(3, |_, comm| {
        let mut net = Net::new();
        net.conv = net.conv.no_grad();
        let (net, mut distributed) = Distributed::new(net, config(Method::Rgc, 0.1), comm).expect("a module");
        let net = steps(0..4, net, &mut distributed).expect("steps");
        let judged = distributed.valid(&net).expect("statistics");
        assert!(!judged.conv.weight.is_require_grad());
        assert_eq!(bits(&judged.conv), bits(&net.conv));
        (values(&net.norm), values(&judged.norm), bits(&judged))
    });
    for at in [2, 3] {
        assert!(ended[0].0[at].0.starts_with("running"), "{}", ended[0].0[at].0);
        assert_ne!(ended[0].0[at], ended[1].0[at], "each rank has its own");
        let mean = (0..6).map(|i| (0..3).map(|rank| ended[rank].0[at].1[i]).sum::<f32>() / 3.0).collect();
        assert_close(&ended[0].1[at..=at], &[(String::new(), mean)]);
    }
    assert!(ended.iter().all(|rank| rank.2 == ended[0].2));
}

#[derive(Module, Debug)]
struct Double {
    first: Linear,
    second: Param<Tensor<2>>,
}

#[test]
fn what_is_not_served_is_said_in_a_sentence_on_all_ranks() {
    let ended = run(2, |rank, comm| {
        let dtype = if rank == 0 { DType::F32 } else { DType::F64 };
        let second = Param::from_tensor(Tensor::ones([2, 2], (&device(), dtype)));
        let double = Double { first: LinearConfig::new(2, 2).init(&device()), second };
        Distributed::new(double, Config::default(), comm).err().expect("a refusal").to_string()
    });
    let served = match cfg!(feature = "wgpu") {
        false => "is served (Device::flex().autodiff())",
        true => "(Device::flex().autodiff()) or on a GPU (Device::wgpu(kind).autodiff()) is served",
    };
    let why =
        format!("parameter second: it is of f64 on Flex(Cpu), and only f32 on Burn's CPU backend {served}");
    assert_eq!(ended[1], why);
    assert_eq!(ended[0], format!("rank 1 gave up: {why}"));

    let plain = run(1, |_, comm| {
        let plain: Linear = LinearConfig::new(2, 2).init(&Device::flex());
        Distributed::new(plain, Config::default(), comm).err().expect("a refusal").to_string()
    });
    let why = "the module has no parameter that is trained: make it on a device with gradients (Device::flex().autodiff())";
    assert_eq!(plain, [why]);
}

#[test]
fn calls_that_make_no_sense_are_refused_and_end_the_other_ranks() {
    type Wrong = fn(Net, Distributed) -> String;
    let refused = |wrong: Wrong, momentum| {
        let said = run(2, move |rank, comm| {
            let config = Config { momentum, ..config(Method::Rgc, 0.1) };
            let (net, mut distributed) = Distributed::new(Net::new(), config, comm).expect("a module");
            match rank {
                0 => steps(0..1, net, &mut distributed).expect_err("the other gave up").to_string(),
                _ => wrong(net, distributed),
            }
        });
        assert_eq!(said[0], format!("rank 1 gave up: {}", said[1]));
        said[1].clone()
    };
    let twice: Wrong = |net, mut distributed| {
        distributed.average(&net, net.gradients(1, 0)).expect_err("a refusal").to_string()
    };
    let late: Wrong = |net, mut distributed| {
        let loss = net.loss(batch(1, 0), Some(&distributed.watch()));
        let gradients = GradientsParams::from_grads(loss.backward(), &net);
        distributed.step(RATE, net, gradients).expect_err("a refusal").to_string()
    };
    let both: Wrong = |net, mut distributed| {
        distributed.begin(RATE).expect("a step");
        let watched = net.loss(batch(1, 0), Some(&distributed.watch()));
        let loss = watched + net.loss(batch(1, 0), None);
        let gradients = GradientsParams::from_grads(loss.backward(), &net);
        distributed.step(RATE, net, gradients).expect_err("a refusal").to_string()
    };
    let other_rate: Wrong = |net, mut distributed| {
        distributed.begin(0.5).expect("a step");
        let gradients = net.gradients(1, 0);
        distributed.step(0.25, net, gradients).expect_err("a refusal").to_string()
    };
    let why = "the configuration has momentum: let step update the weights, or choose Momentum::None and an optimizer with its own";
    assert_eq!(refused(twice, Momentum::Plain(0.9)), why);
    let why = "layers are watched: begin(rate) comes before the forward pass";
    assert_eq!(refused(late, Momentum::None), why);
    let why = "parameter out.bias is watched and used unwatched at the same step";
    assert_eq!(refused(both, Momentum::None), why);
    let why = "the step began at the rate 0.5 and cannot be made at 0.25";
    assert_eq!(refused(other_rate, Momentum::None), why);
}
