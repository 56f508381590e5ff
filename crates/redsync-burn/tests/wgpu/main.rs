//! Modules on a GPU, here Vulkan in software: what they send and what becomes of their weights has the bits of the CPU backend, where
//! gradients have; they learn what it learns; and few bytes cross between the device and the host.
#![cfg(feature = "wgpu")]

mod own;

use burn::module::{Module, Param};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::{DType, Device, Tensor};
use own::*;
use redsync_burn::{Communicator, Config, Copied, Distributed, Momentum};
use redsync_engine::{Exchange, Method, Rest, WarmUp};
use std::sync::Arc;
use std::time::{Duration, Instant};

const RATE: f64 = 0.05;

fn config(method: Method) -> Config {
    let momentum = Momentum::Nesterov(0.9);
    Config { method, momentum, deadline: Duration::from_secs(120), ..Config::default() }
}

/// What a rank had and did at a step.
#[derive(Clone, PartialEq)]
struct Step {
    gradients: Vec<Vec<f32>>,
    weights: Vec<Vec<u32>>,
}

/// Steps on a device: with gradients of its own, or with those that were noted on another one.
fn steps(device: &Device, comm: Arc<Recorder>, config: Config, noted: Option<&[Step]>) -> (Vec<Step>, Log) {
    let mut digits = Digits::new();
    let rank = comm.rank();
    let made = Distributed::new(Net::new(device), config, comm.clone()).expect("a module");
    let (mut net, mut distributed) = (made.0, made.1.with_weight_decay(1e-3));
    let mut done = Vec::new();
    for step in 0..8 {
        let gradients = match noted {
            Some(noted) => noted[step].gradients.clone(),
            None => taken(&net, &net.gradients(digits.batch(rank, step, device), None)),
        };
        let there = given(&net, device, &gradients);
        net = distributed.step(RATE / (1 + step) as f64, net, there).expect("a step");
        done.push(Step { gradients, weights: bits(&net) });
    }
    distributed.check(&net).expect("equal replicas");
    (done, comm.log())
}

/// Real gradients of the network, from the CPU backend, go into modules on both devices. Compared are, at each of eight steps: all bytes that
/// each rank sends, dense sums included, and all weights.
fn same_bits(config: Config) {
    let here = run(|comm| steps(&flex(), comm, config.clone(), None));
    let there = run(|comm| {
        let rank = comm.rank();
        steps(&wgpu(), comm, config.clone(), Some(&here[rank].0))
    });
    for (rank, ((here, sent), (there, theirs))) in here.iter().zip(&there).enumerate() {
        assert!(!sent.is_empty());
        for (ours, theirs) in sent.iter().zip(theirs) {
            let (step, op, bytes) = ours;
            assert!(ours == theirs, "rank {rank}, step {step}, exchange {op}: other {} bytes", bytes.len());
        }
        assert_eq!(sent.len(), theirs.len());
        for (step, (here, there)) in here.iter().zip(there).enumerate() {
            assert!(here.weights == there.weights, "rank {rank}: other weights after step {step}");
        }
    }
}

#[test]
fn the_same_gradients_give_the_same_messages_and_weights() {
    same_bits(config(Method::Rgc));
}

#[test]
fn so_they_do_with_everything_compressed_behind_a_dense_warm_up_by_owners() {
    let config = Config {
        warm_up: WarmUp::Dense(3),
        dense_below: Some(0),
        rest: Rest::F32,
        exchange: Some(Exchange::Owners),
        ..config(Method::RgcAsq)
    };
    same_bits(config);
}

#[test]
fn so_they_do_when_they_are_clipped_and_moments_are_adams() {
    let momentum = Momentum::Adam(Default::default());
    same_bits(Config { clip: Some(0.5), ..config(Method::RgcTwoBit) });
    same_bits(Config { momentum, ..config(Method::Rgc) });
}

#[test]
fn averages_have_the_bits_of_the_cpu_too_and_optimizers_of_burn_take_them() {
    let config = Config { momentum: Momentum::None, dense_below: Some(0), ..config(Method::RgcAsq) };
    let average = |device: &Device, comm: Arc<Recorder>| {
        let mut digits = Digits::new();
        let rank = comm.rank();
        let (mut net, mut distributed) =
            Distributed::new(Net::new(device), config.clone(), comm).expect("a module");
        // All from the CPU backend, and from the weights of the beginning.
        let model = Net::new(&flex());
        let mut sgd = SgdConfig::new().init();
        let mut averages = Vec::new();
        for step in 0..4 {
            let gradients = taken(&model, &model.gradients(digits.batch(rank, step, &flex()), None));
            let gradients = given(&net, device, &gradients);
            let averaged = distributed.average(&net, gradients).expect("an average");
            averages.push(taken(&net, &averaged));
            net = sgd.step(RATE, net, averaged);
        }
        assert_ne!(bits(&net), bits(&model));
        distributed.check(&net).expect("equal replicas");
        averages
    };
    let (here, there) = (run(|comm| average(&flex(), comm)), run(|comm| average(&wgpu(), comm)));
    assert!(here == there);
}

#[test]
fn watched_layers_hand_over_the_same_gradients() {
    let train = |watched: bool| {
        run(move |comm| {
            let (mut digits, device) = (Digits::new(), wgpu());
            let rank = comm.rank();
            let config = Config { warm_up: WarmUp::Dense(2), ..config(Method::Rgc) };
            let (mut net, mut distributed) =
                Distributed::new(Net::new(&device), config, comm.clone()).expect("a module");
            for step in 0..5 {
                let watch = watched.then(|| distributed.watch());
                distributed.begin(RATE).expect("a beginning");
                let gradients = net.gradients(digits.batch(rank, step, &device), watch.as_ref());
                assert_eq!(gradients.is_empty(), watched, "what was handed over is not left");
                net = distributed.step(RATE, net, gradients).expect("a step");
            }
            (bits(&net), comm.log())
        })
    };
    assert!(train(true) == train(false));
}

#[test]
fn a_run_goes_on_to_the_same_bits_on_the_device_and_elsewhere_with_the_same_weights() {
    let dir = tempfile::TempDir::new().expect("a directory");
    run(|comm| {
        let (mut digits, device) = (Digits::new(), wgpu());
        let rank = comm.rank();
        let mut on = |steps: std::ops::Range<usize>, net: Net, distributed: &mut Distributed| {
            steps.fold(net, |net, step| {
                let gradients = net.gradients(digits.batch(rank, step, &device), None);
                distributed.step(RATE, net, gradients).expect("a step")
            })
        };
        let new = |device: &Device| {
            Distributed::new(Net::new(device), config(Method::Rgc), comm.clone()).expect("a module")
        };
        let (net, mut distributed) = new(&device);
        let net = on(0..3, net, &mut distributed);
        distributed.save(dir.path(), &net).expect("a checkpoint");
        let kept = net.clone();
        let saved = bits(&net);
        let net = on(3..6, net, &mut distributed);
        assert_eq!(bits(&kept), saved, "whoever has a clone keeps its values");

        let (other, mut again) = new(&device);
        let loaded = again.load(dir.path(), other).expect("the checkpoint");
        assert_eq!(bits(&loaded), saved);
        let resumed = on(3..6, loaded, &mut again);
        assert!(bits(&resumed) == bits(&net), "other weights");

        let (other, mut elsewhere) = new(&flex());
        assert_eq!(bits(&elsewhere.load(dir.path(), other).expect("the checkpoint")), saved);
    });
}

/// What a rank has after some epochs.
struct Learned {
    accuracy: f64,
    hash: u64,
    seconds: f64,
    /// At each step: elements of the compressed layers that this rank sent, and bytes that crossed.
    crossed: Vec<(u64, Copied)>,
}

fn learn(device: &Device, comm: Arc<Recorder>, steps: usize) -> Learned {
    let config = config(Method::Rgc);
    let mut digits = Digits::new();
    let rank = comm.rank();
    let begin = Instant::now();
    let (mut net, mut distributed) = Distributed::new(Net::new(device), config, comm).expect("a module");
    let mut crossed = Vec::new();
    distributed.take_copied();
    for step in 0..steps {
        let gradients = net.gradients(digits.batch(rank, step, device), None);
        net = distributed.step(RATE, net, gradients).expect("a step");
        let choices = distributed.synchronizer().choices().iter();
        let layers = choices.zip(&distributed.synchronizer().stats().layers);
        let sent = layers.filter(|(choice, _)| choice.is_sparse()).map(|(_, layer)| layer.elements).sum();
        crossed.push((sent, distributed.take_copied().unwrap_or_default()));
    }
    let seconds = begin.elapsed().as_secs_f64();
    let hash = distributed.check(&net).expect("equal replicas");
    Learned { accuracy: digits.accuracy(&net, device), hash, seconds, crossed }
}

#[test]
fn a_small_network_learns_the_digits_as_well_as_on_the_cpu_and_gradients_stay_where_they_are() {
    const EPOCHS: usize = 8;
    const SETTLED: usize = 40;
    let steps = EPOCHS * Digits::new().steps_per_epoch();
    let here = run(|comm| learn(&flex(), comm, steps));
    let there = run(|comm| learn(&wgpu(), comm, steps));
    assert_eq!(there[0].hash, there[1].hash);

    let settled = || there.iter().map(|rank| &rank.crossed[SETTLED..]);
    let sent: u64 = settled().flatten().map(|(sent, _)| sent).sum();
    let selected: u64 = settled().flatten().map(|(_, copied)| copied.selected).sum();
    let applied: u64 = settled().flatten().map(|(_, copied)| copied.applied).sum();
    let per = |bytes: u64, elements: u64| bytes as f64 / elements as f64;
    let received = sent * RANKS as u64;
    println!(
        "{steps} steps of {RANKS} ranks, batch {BATCH}: accuracy {:.2}% in {:.1} s on {:?}, {:.2}% in {:.1} s on flex; \
         {:.2} bytes per element sent to select, {:.2} per element received to apply, {} elements sent by a rank at a step",
        there[0].accuracy,
        there[0].seconds,
        wgpu().inner(),
        here[0].accuracy,
        here[0].seconds,
        per(selected, sent),
        per(applied, received),
        sent / (settled().flatten().count() as u64).max(1),
    );
    assert!(sent > 0);
    // Steps in which too few were found are among them. Whole gradients would be 4 bytes per element of the layer.
    assert!(selected <= 12 * sent, "{selected} bytes to select {sent} elements");
    assert!(applied <= 12 * received, "{applied} bytes to apply {received} elements");
    assert!(here.iter().flat_map(|rank| &rank.crossed).all(|(_, copied)| *copied == Copied::default()));
    assert!(here[0].accuracy >= 90.0, "{}% on flex", here[0].accuracy);
    assert!(
        there[0].accuracy >= here[0].accuracy - 2.0,
        "{}%, {}% on flex",
        there[0].accuracy,
        here[0].accuracy
    );
}

#[derive(Module, Debug)]
struct Two {
    first: Linear,
    second: Param<Tensor<2>>,
}

#[test]
fn what_is_not_served_is_said_in_a_sentence_that_names_the_parameter() {
    let refused = |second: Tensor<2>, first: &Device| {
        let second = Param::from_tensor(second);
        let two = Two { first: LinearConfig::new(2, 2).init(first), second };
        let comm = redsync_comm::local::group(1).remove(0);
        Distributed::new(two, Config::default(), Arc::new(comm)).err().expect("a refusal").to_string()
    };
    let there = format!("{:?}", wgpu().inner());
    let there = there.trim_start_matches("Device<").trim_end_matches('>');
    assert_eq!(
        refused(Tensor::ones([2, 2], &flex()), &wgpu()),
        format!(
            "parameter second is on Flex(Cpu), and first.weight on {there}: a module is trained on one device"
        )
    );
    assert_eq!(
        refused(Tensor::ones([2, 2], (&flex(), DType::F64)), &flex()),
        "parameter second: it is of f64 on Flex(Cpu), and only f32 on Burn's CPU backend (Device::flex().autodiff()) or on a GPU \
         (Device::wgpu(kind).autodiff()) is served"
    );
}

#[test]
fn a_module_that_was_moved_is_refused() {
    let (device, comm) = (wgpu(), redsync_comm::local::group(1).remove(0));
    let (net, mut distributed) =
        Distributed::new(Net::new(&device), config(Method::Rgc), Arc::new(comm)).expect("a module");
    let moved = net.fork(&flex());
    let gradients: GradientsParams = moved.gradients(Digits::new().batch(0, 0, &flex()), None);
    let refused = distributed.step(RATE, moved, gradients).expect_err("a refusal").to_string();
    assert!(refused.starts_with("a parameter was moved: it is on Flex(Cpu), and was on "), "{refused}");
}
