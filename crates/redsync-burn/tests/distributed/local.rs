//! Local steps of a module, and what can be said before it is made distributed.

use super::own::*;
use burn::module::Module;
use burn::optim::{GradientsParams, SgdConfig, momentum::MomentumConfig};
use redsync_burn::{Distributed, DistributedError};
use redsync_engine::{Config, Kind, Layer, Method, Momentum};
use std::path::PathBuf;
use tempfile::TempDir;

fn momentum() -> Config {
    Config { momentum: Momentum::Plain(0.9), ..config(Method::RgcTwoBit, 0.1) }
}

/// A module whose ranks exchange weights every so many steps.
fn every(every: u64, config: Config, comm: Comm) -> (Net, Distributed) {
    let setup = Distributed::setup(config).local_steps(every, 1.0);
    setup.make(Net::new(), comm).expect("a module")
}

/// What is trained, without running statistics.
fn weights(net: &Net) -> Vec<(String, Vec<u32>)> {
    bits(net).into_iter().filter(|(path, _)| !path.contains("running")).collect()
}

#[test]
fn ranks_go_their_own_ways_and_agree_after_every_so_many_steps() {
    let ended = run(2, |_, comm| {
        let (net, mut distributed) = every(4, momentum(), comm);
        let net = steps(0..3, net, &mut distributed).expect("steps");
        let apart = weights(&net);
        assert_eq!(distributed.local().map(|local| local.since()), Some(3));
        let begin = distributed.check(&net).expect("the weights they began with");
        let net = steps(3..4, net, &mut distributed).expect("a step");
        assert_eq!(
            (distributed.local().map(|local| local.since()), distributed.synchronizer().step()),
            (Some(0), 1)
        );
        let agreed = weights(&net);
        assert_ne!(distributed.check(&net).expect("equal replicas"), begin);
        let net = steps(4..6, net, &mut distributed).expect("steps");
        let net = distributed.agree(net).expect("an exchange before its time");
        assert_eq!(distributed.synchronizer().step(), 2);
        let net = distributed.agree(net).expect("nothing to exchange");
        assert_eq!(distributed.synchronizer().step(), 2);
        (apart, agreed, weights(&net))
    });
    assert_ne!(ended[0].0, ended[1].0);
    assert_eq!(ended[0].1, ended[1].1);
    assert_eq!(ended[0].2, ended[1].2);
}

#[test]
fn one_rank_makes_the_steps_of_an_optimizer_of_burn_watched_or_not() {
    run(1, |_, comm| {
        // Differences of weights are sent as they are.
        let sgd = Config { method: Method::Sgd, ..momentum() };
        let (net, mut distributed) = every(3, sgd.clone(), comm.clone());
        let begin = net.clone().valid().train();
        let setup = Distributed::setup(sgd).local_steps(3, 1.0);
        let (mut watched, mut watching) = setup.make(net.clone().valid().train(), comm).expect("a module");
        let net = steps(0..7, net, &mut distributed).expect("steps");
        for step in 0..7 {
            watching.begin(RATE).expect("a step");
            let loss = watched.loss(batch(0, step), Some(&watching.watch()));
            let gradients = GradientsParams::from_grads(loss.backward(), &watched);
            watched = watching.step(RATE, watched, gradients).expect("a step");
        }
        assert_eq!(weights(&net), weights(&watched));
        let momentum = MomentumConfig::new().with_momentum(0.9).with_dampening(0.0).with_nesterov(false);
        let mut optimizer = SgdConfig::new().with_momentum(Some(momentum)).init();
        let expected = (0..7).fold(begin, |net, step| {
            let gradients = net.gradients(0, step);
            optimizer.step(RATE, net, gradients)
        });
        assert_close(&values(&net), &values(&expected));
    });
}

#[test]
fn local_steps_go_on_to_the_same_bits() {
    let dir = TempDir::new().expect("a directory");
    let kept: PathBuf = dir.path().join("kept");
    let ended = run(2, move |_, comm| {
        let (net, mut distributed) = every(4, momentum(), comm.clone());
        let net = steps(0..5, net, &mut distributed).expect("steps");
        let net = distributed.agree(net).expect("an exchange");
        distributed.save(&kept, &net).expect("a checkpoint");
        let net = steps(5..12, net, &mut distributed).expect("steps");
        let (other, mut again) = every(4, momentum(), comm);
        let other = steps(0..2, other, &mut again).expect("steps");
        let other = again.agree(other).expect("an exchange");
        let loaded = again.load(&kept, other).expect("the checkpoint");
        assert_eq!(again.steps_alone(), Some(5));
        let resumed = steps(5..12, loaded, &mut again).expect("steps");
        (bits(&net), bits(&resumed))
    });
    ended.iter().for_each(|(never_stopped, resumed)| assert_eq!(never_stopped, resumed));
}

#[test]
fn a_checkpoint_of_other_local_steps_or_of_none_is_refused_before_anything_changes() {
    let dir = TempDir::new().expect("a directory");
    let kept: PathBuf = dir.path().join("kept");
    let said = run(1, move |_, comm| {
        // Without momentum, nothing else tells them apart.
        let config = || config(Method::RgcTwoBit, 0.1);
        let (net, mut distributed) = every(2, config(), comm.clone());
        let net = steps(0..2, net, &mut distributed).expect("steps");
        distributed.save(&kept, &net).expect("a checkpoint");
        let refused =
            |mut other: Distributed, net: Net| other.load(&kept, net).expect_err("a refusal").to_string();
        let (net, plain) = Distributed::new(Net::new(), config(), comm.clone()).expect("a module");
        let (other, rarer) = every(3, config(), local());
        (refused(plain, net), refused(rarer, other))
    });
    let (plain, rarer) = &said[0];
    assert!(
        plain.ends_with(
            "local steps were exchanged every 2 at 1, with no momentum, clipped at None, are none"
        ),
        "{plain}"
    );
    assert!(rarer.contains("are exchanged every 3 at 1"), "{rarer}");
}

fn local() -> Comm {
    std::sync::Arc::new(redsync_comm::local::group(1).remove(0))
}

#[test]
fn what_makes_no_sense_with_local_steps_is_refused() {
    let refused = |wrong: fn(Net, Distributed) -> String| {
        run(1, move |_, comm| {
            let (net, distributed) = every(4, config(Method::RgcTwoBit, 0.1), comm);
            wrong(net, distributed)
        })
        .remove(0)
    };
    let average = refused(|net, mut distributed| {
        distributed.average(&net, net.gradients(0, 0)).expect_err("a refusal").to_string()
    });
    assert_eq!(average, "with local steps, step updates the weights: ranks exchange no gradients");
    let between = refused(|net, mut distributed| {
        let net = steps(0..1, net, &mut distributed).expect("a step");
        let dir = TempDir::new().expect("a directory");
        distributed.save(dir.path(), &net).expect_err("a refusal").to_string()
    });
    assert_eq!(between, "local steps are saved right behind an exchange: agree comes before save");
    let never = run(1, |_, comm| {
        let setup = Distributed::setup(momentum()).local_steps(0, 1.0);
        setup.make(Net::new(), comm).err().expect("a refusal").to_string()
    });
    assert_eq!(never[0], "every must be a whole number of steps from 1 on, got 0");
    let made = |config: fn() -> Config, layer: fn(Layer) -> Layer| {
        run(1, move |_, comm| {
            let setup = Distributed::setup(config()).layers(layer).local_steps(2, 1.0);
            setup.make(Net::new(), comm).err().expect("a refusal").to_string()
        })
        .remove(0)
    };
    let clipped = made(|| Config { clip: Some(-1.0), ..momentum() }, |layer| layer);
    assert_eq!(clipped, "clip must be a positive norm, got -1");
    let own = made(momentum, |layer| Layer { momentum: Some(Momentum::Plain(0.5)), ..layer });
    assert_eq!(own, "layer conv.weight has a momentum of its own, and with local steps all have one");
    let again = refused(|net, mut distributed| {
        distributed.begin(RATE).expect("a step");
        for step in 0..2 {
            drop(net.loss(batch(0, step), Some(&distributed.watch())).backward());
        }
        distributed.step(RATE, net, GradientsParams::new()).expect_err("a refusal").to_string()
    });
    assert!(again.starts_with("a watched parameter got a second gradient before a step"), "{again}");
    let not_finite = refused(|net, mut distributed| {
        let loss = net.loss(batch(0, 0), None) * f32::INFINITY;
        let gradients = GradientsParams::from_grads(loss.backward(), &net);
        distributed.step(RATE, net, gradients).expect_err("a refusal").to_string()
    });
    assert_eq!(not_finite, "the gradient of layer conv.weight is not finite");
    let unlike = run(2, |rank, comm| {
        let setup = Distributed::setup(momentum()).local_steps(2 + rank as u64, 1.0);
        setup.make(Net::new(), comm).err().expect("a refusal").to_string()
    });
    assert!(
        unlike[0].starts_with("rank 1 runs something else: local steps is exchanged every 3"),
        "{unlike:?}"
    );
}

#[test]
fn layers_are_what_they_are_said_to_be_and_the_last_weight_is_the_output_of_itself() {
    run(1, |_, comm| {
        let kinds = |setup: redsync_burn::Setup| {
            let (_, distributed) = setup.make(Net::new(), comm.clone()).expect("a module");
            let layers = distributed.synchronizer().layers();
            layers.iter().map(|layer| (layer.name.clone(), layer.kind)).collect::<Vec<_>>()
        };
        let usual = kinds(Distributed::setup(momentum()));
        assert_eq!(usual[6], ("out.weight".into(), Kind::Output));
        assert_eq!(usual.iter().filter(|(_, kind)| *kind == Kind::Output).count(), 1);
        let said = kinds(Distributed::setup(momentum()).layers(|layer| {
            let kind = if layer.name == "conv.weight" { Kind::Output } else { layer.kind };
            Layer { name: format!("net.{}", layer.name), kind, ..layer }
        }));
        assert_eq!(said[0], ("net.conv.weight".into(), Kind::Output));
        assert_eq!(said[6], ("net.out.weight".into(), Kind::Weight));
    });
}

#[test]
fn a_module_that_is_not_alike_is_refused_where_it_was_said_to_be() {
    let said = run(2, |_, comm| {
        let refused = Distributed::setup(momentum()).alike().make(Net::new(), comm);
        refused.err().expect("weights that differ").to_string()
    });
    assert!(said.iter().all(|said| said.contains("replicas differ")), "{said:?}");
}

#[test]
fn values_and_statistics_are_read_and_written() {
    run(1, |_, comm| {
        let (net, mut distributed) = Distributed::new(Net::new(), momentum(), comm).expect("a module");
        let before = bits(&net);
        let copy = |layers: &[&[f32]]| layers.iter().map(|layer| layer.to_vec()).collect::<Vec<_>>();
        let weights = distributed.read(&net, copy).expect("weights");
        let statistics = distributed.statistics(&net).expect("statistics");
        assert_eq!((weights.len(), statistics.len()), (8, 2));
        let net = steps(0..3, net, &mut distributed).expect("steps");
        assert_ne!(bits(&net), before);
        let net = distributed.write(net, &weights).expect("as many");
        let net = distributed.with_statistics(net, statistics).expect("as many");
        assert_eq!(bits(&net), before);
        let wrong = |result: Result<Net, DistributedError>| result.expect_err("a refusal").to_string();
        let few = wrong(distributed.write(net.clone(), &weights[1..]));
        assert_eq!(few, "there are values for 7 of 8 layers");
        let few = wrong(distributed.with_statistics(net.clone(), vec![vec![0.0; 6]]));
        assert_eq!(few, "there are values for 1 of 2 statistics");
        let short = wrong(distributed.with_statistics(net, vec![vec![0.0; 6], vec![0.0; 5]]));
        assert_eq!(short, "a statistic has 5 elements instead of 6");
    });
}
