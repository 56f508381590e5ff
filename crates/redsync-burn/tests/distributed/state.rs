//! A module that is saved goes on to the bits of one that never stopped; what is of another module is refused.

use super::own::*;
use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamConfig, ModuleOptimizer};
use redsync_burn::Distributed;
use redsync_engine::{Adam, Config, Exchange, Method, Momentum, WarmUp};
use std::path::{Path, PathBuf};
use tempfile::TempDir;

const STEPS: u64 = 9;

fn place(dir: &TempDir) -> PathBuf {
    dir.path().join("kept")
}

#[test]
fn a_run_goes_on_to_the_same_bits() {
    let momenta = [Momentum::None, Momentum::Nesterov(0.9), Momentum::Adam(Adam::default())];
    for (momentum, exchange) in
        momenta.into_iter().zip([Exchange::Gather, Exchange::Owners, Exchange::Gather])
    {
        // In the middle of a warm-up, when moments are the optimizer's, and behind it, when they are in residuals.
        for stop in [2, 6] {
            let dir = TempDir::new().expect("a directory");
            let kept = place(&dir);
            let ended = run(2, move |_, comm| {
                let config = || Config {
                    momentum,
                    exchange: Some(exchange),
                    warm_up: WarmUp::Dense(4),
                    ..config(Method::RgcTwoBit, 0.1)
                };
                let made = Distributed::new(Net::new(), config(), comm.clone()).expect("a module");
                let (net, mut distributed) = (made.0, made.1.with_weight_decay(0.01));
                let net = steps(0..stop, net, &mut distributed).expect("steps");
                distributed.save(&kept, &net).expect("a checkpoint");
                let net = steps(stop..STEPS, net, &mut distributed).expect("steps");

                let made = Distributed::new(Net::new(), config(), comm).expect("a module");
                let (other, mut again) = (made.0, made.1.with_weight_decay(0.01));
                // What a module gathered before it was loaded is gone.
                drop(other.loss(batch(7, 7), None));
                let loaded = again.load(&kept, other).expect("the checkpoint");
                assert_eq!(again.synchronizer().step(), stop);
                let resumed = steps(stop..STEPS, loaded, &mut again).expect("steps");
                (bits(&net), bits(&resumed))
            });
            ended.iter().for_each(|(never_stopped, resumed)| assert_eq!(never_stopped, resumed));
        }
    }
}

#[test]
fn a_run_with_an_optimizer_of_burn_goes_on_to_the_same_bits() {
    let dir = TempDir::new().expect("a directory");
    let kept = place(&dir);
    let ended = run(2, move |rank, comm| {
        let on =
            |steps: std::ops::Range<u64>, net, distributed: &mut Distributed, adam: &mut ModuleOptimizer| {
                steps.fold(net, |net: Net, step| {
                    let gradients = distributed.average(&net, net.gradients(rank, step)).expect("an average");
                    adam.step(0.01, net, gradients)
                })
            };
        let config = || config(Method::RgcAsq, 0.1);
        let (net, mut distributed) = Distributed::new(Net::new(), config(), comm.clone()).expect("a module");
        let mut adam = AdamConfig::new().init();
        let net = on(0..4, net, &mut distributed, &mut adam);
        distributed.save(&kept, &net).expect("a checkpoint");
        let mine = kept.join(format!("adam-{rank}"));
        adam.save(&mine).expect("a record");
        let begin = net.clone();
        let net = on(4..STEPS, net, &mut distributed, &mut adam);

        // An optimizer of Burn knows parameters by their ids: the module is the same one, with other values.
        let (other, mut again) = Distributed::new(begin.valid().train(), config(), comm).expect("a module");
        let gradients = again.average(&other, other.gradients(rank, 99)).expect("an average");
        let other = AdamConfig::new().init().step(0.5, other, gradients);
        assert_ne!(bits(&other), bits(&begin));
        let loaded = again.load(&kept, other).expect("the checkpoint");
        let mut adam = AdamConfig::new().init().load(&mine).expect("the record");
        (bits(&net), bits(&on(4..STEPS, loaded, &mut again, &mut adam)))
    });
    ended.iter().for_each(|(never_stopped, resumed)| assert_eq!(never_stopped, resumed));
}

#[test]
fn another_number_of_ranks_goes_on_with_the_same_weights() {
    let dir = TempDir::new().expect("a directory");
    let config = || Config { momentum: Momentum::Plain(0.9), ..config(Method::Rgc, 0.1) };
    let kept = place(&dir);
    let saved = run(2, move |_, comm| {
        let (net, mut distributed) = Distributed::new(Net::new(), config(), comm).expect("a module");
        let net = steps(0..5, net, &mut distributed).expect("steps");
        distributed.save(&kept, &net).expect("a checkpoint");
        distributed.check(&net).expect("equal replicas")
    });
    let kept = place(&dir);
    let resumed = run(4, move |_, comm| {
        let (net, mut distributed) = Distributed::new(Net::new(), config(), comm).expect("a module");
        let net = distributed.load(&kept, net).expect("the checkpoint");
        let hash = distributed.check(&net).expect("equal replicas");
        steps(5..7, net, &mut distributed).expect("steps");
        hash
    });
    assert!(resumed.iter().all(|hash| *hash == saved[0]));
}

fn refused<M: Module + 'static>(kept: &Path, model: fn() -> M) -> String {
    let dir = kept.to_path_buf();
    let said = run(1, move |_, comm| {
        let (model, mut distributed) =
            Distributed::new(model(), config(Method::Sgd, 0.1), comm).expect("a module");
        distributed.load(&dir, model).expect_err("a refusal").to_string()
    });
    said[0].replace(&*kept.to_string_lossy(), "DIR")
}

#[test]
fn what_is_not_of_this_module_is_refused() {
    let dir = TempDir::new().expect("a directory");
    let kept = place(&dir);
    let linear = || -> Linear { LinearConfig::new(4, 3).init(&device()) };
    let missing = refused(&kept, linear);
    assert!(missing.starts_with("DIR/model.safetensors: "), "{missing}");
    let writes = kept.clone();
    run(1, move |_, comm| {
        let (net, distributed) =
            Distributed::new(linear(), config(Method::Sgd, 0.1), comm).expect("a module");
        distributed.save(&writes, &net).expect("a checkpoint");
    });
    let other = refused(&kept, Net::new);
    assert_eq!(other, "the checkpoint in DIR: the number of layers was 2, is 8");
    std::fs::write(kept.join("model.safetensors"), "not a checkpoint").expect("a file");
    let damaged = refused(&kept, linear);
    assert!(damaged.starts_with("DIR/model.safetensors: "), "{damaged}");
}
