//! What a framework may ask of a step beyond the plain one: layers without a gradient, scaled losses, steps that are taken back,
//! momentum of single layers, updates that are written where they are wanted, gradients that are not on the host.
#![allow(missing_docs, clippy::unwrap_used)]

mod common;

use common::{Replica, assert_close, bits, config, dense_sgd, everything, gradient, layers, run};
use redsync_core::{Adam, Compressor, Gradient, LayerError, Momentum, Sparse, Unfit, Workspace};
use redsync_engine::state::LayerState;
use redsync_engine::{
    Config, Device, Exchange, Finished, Handed, Host, Kind, Layer, LayerCompressor, Method, Source,
    SyncError, Synchronizer, Target, TargetError, Update, WarmUp,
};
use std::sync::{Arc, Mutex};

/// Everything that a replica's next step depends on, as bits.
fn state(replica: &Replica) -> String {
    let saved = replica.sync.capture(0, Vec::new()).unwrap();
    let each = |layer: &LayerState| {
        let LayerState { u, v, second, kept, memory, momentum, rate, .. } = layer.clone();
        let (own, given, steps) = second.map_or_else(Default::default, |all| (all.own, all.given, all.steps));
        let kept = kept.map(|kept| (bits(&[kept.v]), kept.memory, kept.rate));
        (bits(&[u, v, own, given]), steps, kept, memory, momentum, rate)
    };
    let layers: Vec<_> = saved.layers.iter().map(each).collect();
    format!("{layers:?} {:?}", bits(&replica.weights))
}

fn undoing(method: Method) -> Config {
    Config { undo: true, momentum: Momentum::Nesterov(0.9), ..config(method, 0.05) }
}

/// The same with Adam, of whose second moments a part is told at every step.
fn undoing_adam(method: Method) -> Config {
    let momentum = Momentum::Adam(Adam { beta1: 0.9, beta2: 0.99, eps: 1e-8 });
    Config { momentum, share_moments: Some(4), ..undoing(method) }
}

#[test]
fn a_layer_that_nobody_used_keeps_its_state_and_gets_an_empty_update() {
    for method in [Method::Rgc, Method::RgcAsq] {
        run(2, move |_, comm| {
            let mut replica = Replica::new(undoing(method), comm).unwrap();
            (0..3).for_each(|_| replica.step().unwrap());
            let before = replica.sync.capture(0, Vec::new()).unwrap();
            let gradients = replica.gradients();
            for layer in [0, 1, 3] {
                replica.sync.submit(layer, gradients[layer].clone()).unwrap();
            }
            replica.sync.skip(2).unwrap();
            assert_eq!(replica.sync.finish().unwrap(), Finished::Done);
            let Some(Update::Sparse(messages)) = replica.sync.update(2) else { panic!("no update") };
            assert!(messages.len() == 2 && messages.iter().all(Sparse::is_empty));
            replica.apply().unwrap();
            let after = replica.sync.capture(0, Vec::new()).unwrap();
            assert_eq!(after.layers[1], before.layers[1], "the layer that was skipped");
            assert_ne!(after.layers[0], before.layers[0], "a layer that was not");
            replica.check().unwrap();
            assert_eq!(replica.sync.skip(9).unwrap_err().to_string(), "there is no layer 9, only 4");
        });
    }
}

#[test]
fn a_layer_that_some_ranks_used_is_the_same_everywhere() {
    let hashes = run(3, |rank, comm| {
        let mut replica = Replica::new(undoing(Method::RgcAsq), comm).unwrap();
        for step in 0..12 {
            let gradients = replica.gradients();
            for (layer, gradient) in gradients.into_iter().enumerate() {
                // A dense layer, too: it adds zeros.
                match (step + rank + layer) % 3 {
                    0 => replica.sync.skip(layer).unwrap(),
                    _ => replica.sync.submit(layer, gradient).unwrap(),
                }
            }
            replica.sync.finish().unwrap();
            replica.apply().unwrap();
        }
        replica.check().unwrap()
    });
    assert!(hashes.iter().all(|hash| *hash == hashes[0]));
}

/// Steps with gradients of a loss that was multiplied.
fn scaled_step(replica: &mut Replica, scale: Option<f32>, poison: Option<(usize, f32)>) -> Finished {
    let mut gradients = replica.gradients();
    gradients.iter_mut().flatten().for_each(|g| *g *= scale.unwrap_or(1.0));
    if let Some((layer, value)) = poison {
        gradients[layer][3] = value;
    }
    replica.sync.set_loss_scale(scale).unwrap();
    for (layer, gradient) in gradients.into_iter().enumerate().rev() {
        replica.sync.submit(layer, gradient).unwrap();
    }
    replica.sync.finish().unwrap()
}

#[test]
fn a_scaled_loss_trains_like_an_unscaled_one() {
    for clip in [None, Some(0.5)] {
        for warm_up in [WarmUp::None, WarmUp::Dense(3)] {
            let weights = |scales: [Option<f32>; 3]| {
                let config = Config { clip, warm_up, ..undoing(Method::Rgc) };
                run(2, move |_, comm| {
                    let mut replica = Replica::new(config.clone(), comm).unwrap();
                    for step in 0..9 {
                        // Powers of two, so that not a bit may change.
                        let done = scaled_step(&mut replica, scales[step % 3], None);
                        assert_eq!(done, Finished::Done);
                        replica.apply().unwrap();
                    }
                    bits(&replica.weights)
                })
            };
            let plain = weights([None; 3]);
            assert_eq!(weights([Some(256.0), Some(0.5), Some(65536.0)]), plain, "{clip:?} {warm_up:?}");
        }
    }
}

#[test]
fn an_overflow_on_one_rank_is_taken_back_on_all() {
    for undoing in [undoing(Method::Rgc), undoing(Method::RgcAsq), undoing_adam(Method::RgcTwoBit)] {
        for clip in [None, Some(0.5)] {
            // A compressed layer, and a dense one.
            for layer in [0, 1, 2, 3] {
                for (value, exchange) in [
                    (f32::INFINITY, None),
                    (f32::NAN, Some(Exchange::Owners)),
                    (f32::NAN, Some(Exchange::Hosts)),
                ] {
                    let config = Config { clip, exchange, ..undoing.clone() };
                    let what = format!("{:?} {clip:?} layer {layer} {value}", config.method);
                    run(4, move |rank, comm| {
                        let mut replica = Replica::new(config.clone(), comm).unwrap();
                        (0..3).for_each(|_| {
                            scaled_step(&mut replica, Some(64.0), None);
                            replica.apply().unwrap();
                        });
                        let before = state(&replica);
                        let poison = (rank == 1).then_some((layer, value));
                        let done = scaled_step(&mut replica, Some(64.0), poison);
                        assert_eq!(done, Finished::Overflowed, "{what}");
                        assert!((0..4).all(|layer| replica.sync.update(layer).is_none()));
                        assert_eq!(state(&replica), before, "{what}");
                        assert_eq!(replica.sync.step(), 4, "the step counts on every rank");
                        assert_eq!(scaled_step(&mut replica, Some(32.0), None), Finished::Done);
                        replica.apply().unwrap();
                        replica.check().unwrap();
                    });
                }
            }
        }
    }
}

#[test]
fn a_loss_scale_needs_steps_that_can_be_taken_back_and_has_to_be_one() {
    run(1, |_, comm| {
        let replica = Replica::new(config(Method::Rgc, 0.1), comm).unwrap();
        let refused = replica.sync.set_loss_scale(Some(2.0)).unwrap_err().to_string();
        assert_eq!(refused, "a loss scale needs steps that can be taken back (undo)");
    });
    run(1, |_, comm| {
        let replica = Replica::new(undoing(Method::Rgc), comm).unwrap();
        for scale in [0.0, -1.0, f32::NAN, f32::INFINITY] {
            let refused = replica.sync.set_loss_scale(Some(scale)).unwrap_err().to_string();
            assert_eq!(refused, format!("the scale of the loss must be a positive number, got {scale}"));
        }
        replica.sync.submit(0, vec![0.0; 700]).unwrap();
        assert!(replica.sync.set_loss_scale(None).unwrap_err().to_string().contains("under way"));
    });
}

#[test]
fn a_finished_step_can_be_taken_back_once() {
    for config in Method::ALL.into_iter().flat_map(|method| [undoing(method), undoing_adam(method)]) {
        run(2, move |_, comm| {
            let mut replica = Replica::new(config.clone(), comm).unwrap();
            (0..3).for_each(|_| replica.step().unwrap());
            let before = state(&replica);
            scaled_step(&mut replica, None, None);
            replica.sync.take_back().unwrap();
            assert_eq!(state(&replica), before, "{config:?}");
            assert!(replica.sync.update(0).is_none());
            let again = replica.sync.take_back().unwrap_err().to_string();
            assert_eq!(again, "there is no step that could be taken back");
            replica.step().unwrap();
            replica.check().unwrap();
        });
    }
    run(1, |_, comm| {
        let mut replica = Replica::new(config(Method::Rgc, 0.1), comm).unwrap();
        replica.step().unwrap();
        assert!(matches!(replica.sync.take_back(), Err(SyncError::Order(_))), "without undo");
    });
}

/// What becomes of a step whose number is used up.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Lost {
    /// It never was.
    Never,
    TakenBack,
    Overflowed,
}

fn lose(replica: &mut Replica, lost: Lost, what: &str) {
    let before = state(replica);
    match lost {
        Lost::Never => {
            let mut saved = replica.sync.capture(0, Vec::new()).unwrap();
            saved.step += 1;
            replica.sync.restore(Ok(saved)).unwrap();
        }
        Lost::TakenBack => {
            assert_eq!(scaled_step(replica, None, None), Finished::Done);
            let tells = matches!(replica.sync.layers()[0].momentum, Some(Momentum::Adam(_)));
            assert_eq!(replica.sync.stats().total().moment_bytes > 0, tells, "{what}");
            assert_ne!(state(replica), before, "{what}");
            replica.sync.take_back().unwrap();
        }
        Lost::Overflowed => {
            let poison = (replica.sync.rank().0 == 1).then_some((2, f32::INFINITY));
            assert_eq!(scaled_step(replica, Some(64.0), poison), Finished::Overflowed);
            replica.sync.set_loss_scale(None).unwrap();
        }
    }
    assert_eq!(state(replica), before, "{what}");
}

/// Before the first step nothing of the others' second moments was told, and before the sixth some of it stands there.
#[test]
fn after_a_lost_step_training_goes_on_as_if_it_had_never_been() {
    for method in [Method::Rgc, Method::RgcTwoBit, Method::RgcAsq] {
        for undoing in [undoing(method), undoing_adam(method)] {
            for (exchange, done) in
                Exchange::ALL.into_iter().flat_map(|exchange| [(exchange, 0), (exchange, 5)])
            {
                let config = Config { exchange: Some(exchange), ..undoing.clone() };
                let states = |lost: Lost| {
                    let config = config.clone();
                    let what = format!("{lost:?} after {done} steps of {config:?}");
                    run(4, move |_, comm| {
                        let own = |layer: Layer| layer.with_momentum(config.momentum);
                        let layers = layers().into_iter().map(own).collect();
                        let mut replica = Replica::of(layers, config.clone(), comm).unwrap();
                        (0..done).for_each(|_| replica.step().unwrap());
                        lose(&mut replica, lost, &what);
                        let mut states = Vec::new();
                        for _ in 0..6 {
                            replica.step().unwrap();
                            states.push(state(&replica));
                        }
                        replica.check().unwrap();
                        states
                    })
                };
                let expected = states(Lost::Never);
                assert!(states(Lost::TakenBack) == expected, "taken back after {done} steps: {config:?}");
                assert!(states(Lost::Overflowed) == expected, "overflowed after {done} steps: {config:?}");
            }
        }
    }
}

#[test]
fn layers_have_momentum_of_their_own_and_schedules_of_it() {
    let momentum = |layer: usize, step: u64| match (layer, step) {
        (0, 0..4) => Momentum::Plain(0.9),
        (0, _) => Momentum::Plain(0.5),
        (2, _) => Momentum::Nesterov(0.8),
        _ => Momentum::None,
    };
    let with_own = |layers: Vec<Layer>| -> Vec<Layer> {
        layers.into_iter().enumerate().map(|(i, layer)| layer.with_momentum(momentum(i, 0))).collect()
    };
    let layers = with_own(layers());
    let expected: Vec<Vec<f64>> = {
        // The same in f64, layer by layer, with the coefficient of each step.
        let mut weights: Vec<Vec<f64>> = common::initial_weights(&layers)
            .iter()
            .map(|w| w.iter().map(|x| f64::from(*x)).collect())
            .collect();
        for (i, layer) in layers.iter().enumerate() {
            let mut b = vec![0f64; layer.size];
            for step in 0..8 {
                let m = f64::from(momentum(i, step).coefficient());
                let nesterov = matches!(momentum(i, step), Momentum::Nesterov(_));
                let all: Vec<_> = (0..2).map(|rank| gradient(rank, step, i, layer.size)).collect();
                for at in 0..layer.size {
                    let g = (f64::from(all[0][at]) + f64::from(all[1][at])) / 2.0;
                    b[at] = m * b[at] + g;
                    weights[i][at] -= f64::from(common::LR) * if nesterov { g + m * b[at] } else { b[at] };
                }
            }
        }
        weights
    };
    run(2, move |_, comm| {
        let config = everything(Method::Rgc, Momentum::None);
        let mut replica = Replica::of(layers.clone(), config, comm).unwrap();
        for step in 0..8 {
            for layer in [0, 2] {
                replica.sync.set_momentum(layer, momentum(layer, step)).unwrap();
            }
            replica.step().unwrap();
        }
        assert_close(&replica.weights, &expected, "momentum of each layer");
        let refused = replica.sync.set_momentum(0, Momentum::Nesterov(0.5)).unwrap_err();
        assert!(matches!(refused, SyncError::Unfit { why: Unfit::Form { .. }, .. }), "{refused}");
        assert!(replica.sync.set_momentum(1, Momentum::Plain(0.5)).is_err(), "a dense layer");
        let short = replica.sync.adopt_momentum(0, &[1.0; 3]).unwrap_err().to_string();
        assert_eq!(short, "layer first: the momentum buffer has 3 elements instead of 700");
    });
}

/// A buffer that a test can look at while the synchronizer writes to it.
#[derive(Clone)]
struct Shelf(Arc<Mutex<Vec<f32>>>);

impl Target for Shelf {
    fn add(&mut self, update: Update<'_>, scale: f32, w: &mut Workspace) -> Result<(), TargetError> {
        Target::add(&mut &mut self.0.lock().unwrap()[..], update, scale, w)
    }

    fn fill(&mut self, update: Update<'_>, scale: f32, w: &mut Workspace) -> Result<(), TargetError> {
        Target::fill(&mut &mut self.0.lock().unwrap()[..], update, scale, w)
    }
}

#[test]
fn updates_replace_their_targets_in_the_units_of_the_gradients() {
    for (clip, warm_up) in [(None, WarmUp::None), (None, WarmUp::Dense(9)), (Some(0.1), WarmUp::Dense(9))] {
        run(2, move |_, comm| {
            let config = Config { clip, warm_up, ..undoing(Method::Rgc) };
            let mut replica = Replica::new(config, comm).unwrap();
            let shelves: Vec<Shelf> = replica
                .sizes()
                .into_iter()
                .map(|size| Shelf(Arc::new(Mutex::new(vec![7.0; size]))))
                .collect();
            for scale in [None, Some(8.0)] {
                replica.sync.set_loss_scale(scale).unwrap();
                let submitter = replica.sync.submitter();
                for (layer, mut gradient) in replica.gradients().into_iter().enumerate() {
                    gradient.iter_mut().for_each(|g| *g *= scale.unwrap_or(1.0));
                    submitter.submit_into(layer, gradient, shelves[layer].clone()).unwrap();
                }
                replica.sync.finish().unwrap();
                for (layer, update) in replica.updates().into_iter().enumerate() {
                    let expected: Vec<f64> =
                        update.iter().map(|x| x * f64::from(scale.unwrap_or(1.0))).collect();
                    assert_close(&[shelves[layer].0.lock().unwrap().clone()], &[expected], "target");
                }
            }
        });
    }
}

/// A gradient that is somewhere else than on the host.
struct Remote {
    values: Vec<f32>,
    fetched: bool,
}

impl Source for Remote {
    fn len(&self) -> usize {
        self.values.len()
    }

    fn fetch(&mut self) -> Result<(), String> {
        self.fetched = true;
        if self.values[0] == 666.0 { Err("the device is gone".into()) } else { Ok(()) }
    }

    fn host(&self) -> Option<Gradient<'_>> {
        None
    }
}

/// Compresses gradients that only it can read, with the host's own compressor behind it.
#[derive(Default)]
struct Elsewhere(Arc<Mutex<Vec<Call>>>);

/// What a layer, by its number, was asked to do.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Call {
    Announce(u32),
    Accumulate(u32),
}

/// Such a layer, what became of a gradient that was announced, and where calls are noted.
struct Far(Compressor, Option<Result<(), LayerError>>, Arc<Mutex<Vec<Call>>>);

impl Device for Elsewhere {
    fn compressor(
        &self,
        number: u32,
        layer: &Layer,
        config: redsync_core::Config,
    ) -> Result<Box<dyn LayerCompressor>, redsync_core::ConfigError> {
        Ok(Box::new(Far(Compressor::new(number, &layer.name, layer.size, config)?, None, self.0.clone())))
    }
}

fn remote(source: &dyn Source) -> &Remote {
    let any: &dyn std::any::Any = source;
    any.downcast_ref().unwrap()
}

impl LayerCompressor for Far {
    fn announce(
        &mut self,
        step: u64,
        source: &dyn Source,
        scale: f32,
        workspace: &mut Workspace,
    ) -> Result<(), LayerError> {
        assert!(!remote(source).fetched);
        self.2.lock().unwrap().push(Call::Announce(self.0.layer()));
        let gradient = Gradient::F32(&remote(source).values);
        self.1 = Some(self.0.accumulate(step, gradient, scale, workspace));
        Ok(())
    }

    fn accumulate(
        &mut self,
        step: u64,
        source: &dyn Source,
        scale: f32,
        workspace: &mut Workspace,
    ) -> Result<(), LayerError> {
        let remote = remote(source);
        assert!(remote.fetched);
        self.2.lock().unwrap().push(Call::Accumulate(self.0.layer()));
        match self.1.take() {
            Some(done) => done,
            None => self.0.accumulate(step, Gradient::F32(&remote.values), scale, workspace),
        }
    }

    fn select(
        &mut self,
        step: u64,
        message: &mut Sparse,
        workspace: &mut Workspace,
    ) -> Result<(), LayerError> {
        LayerCompressor::select(&mut self.0, step, message, workspace)
    }

    fn give_back(&mut self, elements: &Sparse) -> Result<(), Unfit> {
        self.0.give_back(elements)
    }

    fn take_back(&mut self) -> Result<(), Unfit> {
        LayerCompressor::take_back(&mut self.0)
    }

    fn set_sending(&mut self, sending: redsync_core::Sending) {
        self.0.set_sending(sending);
    }

    fn set_momentum(&mut self, momentum: Momentum) -> Result<(), Unfit> {
        self.0.set_momentum(momentum)
    }

    fn set_rate(&mut self, rate: f32) -> Result<(), Unfit> {
        self.0.set_rate(rate)
    }

    fn adopt_momentum(&mut self, buffer: &[f32], ranks: usize) -> Result<(), Unfit> {
        self.0.adopt_momentum(buffer, ranks)
    }

    fn adopt_adam(&mut self, m: &[f32], q: &[f32], steps: u64) -> Result<(), Unfit> {
        self.0.adopt_adam(m, q, steps)
    }

    fn second(&self, range: std::ops::Range<usize>) -> Vec<f32> {
        self.0.second(range)
    }

    fn give_second(&mut self, begin: usize, values: &[f32]) -> Result<Option<Vec<f32>>, Unfit> {
        self.0.give_second(begin, values)
    }

    fn withdraw_second(&mut self, begin: usize, old: Option<&[f32]>) -> Result<(), Unfit> {
        self.0.withdraw_second(begin, old)
    }

    fn save(&self) -> Result<LayerState, Unfit> {
        self.0.save()
    }

    fn check(&self, state: &LayerState) -> Result<(), Unfit> {
        LayerCompressor::check(&self.0, state)
    }

    fn restore(&mut self, state: &LayerState) -> Result<(), Unfit> {
        LayerCompressor::restore(&mut self.0, state)
    }

    fn norm(&self) -> Result<f64, Unfit> {
        self.0.norm()
    }
}

#[test]
fn a_rate_is_told_between_steps_and_makes_sense() {
    run(1, |_, comm| {
        let mut replica = Replica::new(config(Method::RgcAsq, 0.02), comm).unwrap();
        let refused = |rate: f32, sync: &Synchronizer| sync.set_rate(0, rate).unwrap_err().to_string();
        assert_eq!(
            refused(-0.5, &replica.sync),
            "layer first: the learning rate must be a positive number, got -0.5"
        );
        assert!(
            refused(f32::NAN, &replica.sync)
                .ends_with("the learning rate must be a positive number, got NaN")
        );
        replica.sync.set_rate(1, 0.5).unwrap(); // dense: nothing waits there
        assert!(replica.sync.set_rate(9, 0.5).unwrap_err().to_string().contains("no compressed layer 9"));
        replica.sync.submit(3, vec![1f32; 200]).unwrap();
        assert!(refused(0.5, &replica.sync).contains("step 0 is under way"));
        (0..3).for_each(|layer| replica.sync.skip(layer).unwrap());
        replica.sync.finish().unwrap();
        replica.sync.set_rate(0, 0.5).unwrap();
    });
}

fn one_layer() -> Vec<Layer> {
    vec![Layer::new("only", 500, Kind::Weight)]
}

#[test]
fn a_device_of_its_own_gives_the_same_updates() {
    let weights = |far: bool| {
        run(2, move |rank, comm| {
            let config = undoing(Method::RgcAsq);
            let mut weights = vec![1f32; 500];
            let elsewhere = Elsewhere::default();
            let device: &dyn Device = if far { &elsewhere } else { &Host };
            let mut sync = Synchronizer::on(device, one_layer(), config, comm).unwrap();
            for step in 0..6 {
                let values = gradient(rank, step, 0, 500);
                match far {
                    true => sync.submit(0, Remote { values, fetched: false }).unwrap(),
                    false => sync.submit(0, values).unwrap(),
                }
                sync.finish().unwrap();
                sync.apply(0, &mut weights, 0.1).unwrap();
            }
            bits(&[weights])
        })
    };
    assert_eq!(weights(true), weights(false));
}

/// Three layers whose gradients are remote; one of them, if wanted, is not finite at its first element.
fn together(rank: usize, step: u64, spoilt: Option<usize>) -> Vec<Handed> {
    let gradient = |layer: usize| {
        let mut values = gradient(rank, step, layer, 500);
        if spoilt == Some(layer) {
            values[0] = f32::INFINITY;
        }
        Box::new(Remote { values, fetched: false })
    };
    (0..3).map(|layer| Handed { layer, source: Some(gradient(layer)), target: None }).collect()
}

fn three_layers() -> Vec<Layer> {
    ["one", "two", "three"].map(|name| Layer::new(name, 500, Kind::Weight)).to_vec()
}

#[test]
fn devices_begin_with_all_that_comes_together() {
    use Call::{Accumulate, Announce};
    let trained = |at_once: bool| {
        run(2, move |rank, comm| {
            let elsewhere = Elsewhere::default();
            let config = undoing(Method::RgcAsq);
            let mut sync = Synchronizer::on(&elsewhere, three_layers(), config, comm).unwrap();
            let mut weights = vec![vec![1f32; 500]; 3];
            for step in 0..6 {
                let mut handed = together(rank, step, None);
                match at_once {
                    true => sync.submitter().submit_together(handed).unwrap(),
                    false => handed
                        .drain(..)
                        .for_each(|layer| sync.submitter().submit_together(vec![layer]).unwrap()),
                }
                sync.finish().unwrap();
                (0..3).for_each(|layer| sync.apply(layer, &mut weights[layer], 0.1).unwrap());
            }
            let calls = std::mem::take(&mut *elsewhere.0.lock().unwrap());
            let (one, all) = ([0, 1, 2].map(Accumulate), [0, 1, 2].map(Announce));
            let expected = if at_once { [all, one].concat() } else { one.to_vec() };
            assert!(calls.chunks(expected.len()).all(|step| step == expected), "{calls:?}");
            bits(&weights)
        })
    };
    assert_eq!(trained(true), trained(false));
}

#[test]
fn what_was_begun_is_taken_back_with_the_step() {
    for spoilt in 0..3 {
        run(2, move |rank, comm| {
            let elsewhere = Elsewhere::default();
            let mut sync = Synchronizer::on(&elsewhere, three_layers(), undoing(Method::Rgc), comm).unwrap();
            let mut step = |step: u64, spoilt: Option<usize>| {
                sync.set_loss_scale(Some(64.0)).unwrap();
                sync.submitter().submit_together(together(rank, step, spoilt)).unwrap();
                let finished = sync.finish().unwrap();
                (finished, sync.capture(0, Vec::new()).unwrap().layers)
            };
            step(0, None);
            let (_, before) = step(1, None);
            let (finished, after) = step(2, (rank == 1).then_some(spoilt));
            assert_eq!((finished, &after), (Finished::Overflowed, &before));
            assert_eq!(step(3, None).0, Finished::Done);
        });
    }
}

#[test]
fn of_what_comes_together_all_is_taken_or_nothing() {
    run(1, |_, comm| {
        let mut sync =
            Synchronizer::on(&Elsewhere::default(), three_layers(), undoing(Method::Rgc), comm).unwrap();
        let twice =
            || together(0, 0, None).into_iter().chain(together(0, 0, None).into_iter().take(1)).collect();
        let refused = sync.submitter().submit_together(twice()).unwrap_err();
        assert_eq!(refused.to_string(), "layer one was submitted twice at step 0");
        sync.submitter().submit_together(together(0, 0, None)).unwrap();
        sync.finish().unwrap();
    });
}

#[test]
fn a_gradient_that_is_not_where_it_is_compressed_is_refused() {
    for (first, expected) in [
        (666.0, "layer only: the device is gone"),
        (1.0, "layer only, step 0: the gradient is not in the memory of the host"),
    ] {
        run(1, move |_, comm| {
            let mut sync = Synchronizer::new(one_layer(), undoing(Method::Rgc), comm).unwrap();
            sync.submit(0, Remote { values: vec![first; 500], fetched: false }).unwrap();
            assert_eq!(sync.finish().unwrap_err().to_string(), expected);
        });
    }
}

#[test]
fn a_rank_that_gives_up_says_why_to_all() {
    let errors = run(3, |rank, comm| {
        let mut replica = Replica::new(config(Method::Rgc, 0.1), comm).unwrap();
        replica.step().unwrap();
        if rank == 1 {
            replica.sync.give_up("the disk is full");
        }
        let error = replica.step().unwrap_err().to_string();
        (error, replica.sync.finish().unwrap_err().to_string())
    });
    assert_eq!(errors[1].0, "the disk is full");
    for rank in [0, 2] {
        assert_eq!(errors[rank].0, "rank 1 gave up: the disk is full");
        assert_eq!(errors[rank].1, errors[rank].0);
    }
}

#[test]
fn skipping_and_undoing_change_nothing_of_plain_training() {
    let expected = dense_sgd(&layers(), 2, 6, Momentum::Plain(0.9));
    run(2, move |_, comm| {
        let config = Config { undo: true, ..everything(Method::Rgc, Momentum::Plain(0.9)) };
        let mut replica = Replica::new(config, comm).unwrap();
        for expected in &expected {
            replica.step().unwrap();
            assert_close(&replica.weights, expected, "undo");
        }
    });
}
