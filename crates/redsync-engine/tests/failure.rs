//! Rulings 16, 20 and 22: whatever goes wrong on one rank, every rank ends within its deadline, and the text says who, where
//! and why.
#![allow(missing_docs, clippy::unwrap_used)]

mod common;

use common::{Comm, Damaging, Random, Replica, config, damaged_at, layers, run};
use redsync_comm::Tag;
use redsync_core::Selector;
use redsync_engine::{Choice, Config, Kind, Layer, Method, SyncError, Synchronizer, WarmUp, Window};
use std::sync::{Arc, Barrier};
use std::time::Duration;

const BAD_RANK: usize = 1;
const BAD_STEP: u64 = 2;

/// Trains until the step fails at which one rank has a value that is not finite in one layer.
fn poisoned(config: Config, comm: Comm, layer: usize, value: f32, order: Vec<usize>) -> (Replica, SyncError) {
    let rank = comm.rank();
    let mut replica = Replica::new(config, comm).unwrap();
    (0..BAD_STEP).for_each(|_| replica.step().unwrap());
    let mut gradients = replica.gradients();
    if rank == BAD_RANK {
        gradients[layer][5] = value;
    }
    for layer in order {
        replica.sync.submit(layer, std::mem::take(&mut gradients[layer])).unwrap();
    }
    let error = replica.sync.finish().unwrap_err();
    (replica, error)
}

#[test]
fn a_gradient_that_is_not_finite_is_named_on_its_rank_and_the_rank_on_all_others() {
    let clips = [None, Some(1.0)];
    for (method, clip) in Method::ALL.into_iter().flat_map(|method| clips.map(|clip| (method, clip))) {
        for warm_up in [WarmUp::None, WarmUp::Dense(10)] {
            for (layer, Layer { name, .. }) in layers().into_iter().enumerate() {
                let config = Config { clip, warm_up, ..config(method, 0.1) };
                let what = format!("{method:?} {clip:?} {warm_up:?} layer {name}");
                let value = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY][layer % 3];
                let barrier = Barrier::new(3);
                let errors = run(3, move |rank, comm| {
                    // The order decides which collective is the next when the bad gradient is met.
                    let order = Random((4 * rank + layer) as u64).order(4);
                    let (mut replica, error) = poisoned(config.clone(), comm, layer, value, order);
                    // Nobody leaves before all have their error: it must not come from a rank that left.
                    barrier.wait();
                    let again = replica.sync.finish().unwrap_err();
                    assert_eq!(again.to_string(), error.to_string());
                    assert!(matches!(again, SyncError::Failed(_)));
                    assert!(replica.sync.submit(0, vec![0.0; 700]).is_err());
                    error
                });
                for (rank, error) in errors.into_iter().enumerate() {
                    let text = error.to_string();
                    let reason = format!("layer {name}, step 2: the gradient is {value} at element 5");
                    if rank == BAD_RANK {
                        assert!(matches!(error, SyncError::Layer(_)), "{what}: {text}");
                        assert_eq!(text, reason, "{what}");
                    } else {
                        // Also where the others wait for a dense sum.
                        assert_eq!(text, format!("rank 1 gave up: {reason}"), "{what}");
                        assert_eq!(error.ranks(), [1]);
                    }
                    assert!(error.is_gradient(), "{what}: {text}");
                }
            }
        }
    }
}

#[test]
fn where_a_frame_is_expected_the_others_learn_the_reason() {
    // Without a dense layer the next collective is a frame.
    let errors = run(3, |rank, comm| {
        let layers = vec![Layer::new("only", 100, Kind::Weight)];
        let mut sync = Synchronizer::new(layers, config(Method::RgcAsq, 0.1), comm).unwrap();
        sync.submit(0, vec![if rank == BAD_RANK { f32::NAN } else { 1.0 }; 100]).unwrap();
        sync.finish().unwrap_err().to_string()
    });
    let reason = "layer only, step 0: the gradient is NaN at element 0";
    assert_eq!(errors[BAD_RANK], reason);
    assert_eq!(errors[0], format!("rank 1 gave up: {reason}"));
    assert_eq!(errors[2], errors[0]);
}

/// A failed replica of two ranks, with the failure's text; the other rank stays until the check is done.
fn after_a_failure(check: impl Fn(&mut Replica, &str) + Send + Sync + 'static) {
    let barrier = Barrier::new(2);
    run(2, move |rank, comm| {
        // The dense layer of the step arrives, the frame with the others does not.
        let order = vec![3, 2, 1, 0];
        let (mut replica, error) = poisoned(config(Method::RgcAsq, 0.1), comm, 0, f32::NAN, order);
        if rank == 0 {
            check(&mut replica, &error.to_string());
        }
        barrier.wait();
    });
}

#[test]
fn after_a_failure_no_update_is_handed_out() {
    // Replicas that applied the part of a step that arrived would differ.
    after_a_failure(|replica, _| {
        for layer in 0..4 {
            assert!(replica.sync.update(layer).is_none(), "layer {layer}");
            assert!(replica.sync.apply(layer, &mut replica.weights[layer], 0.1).is_err());
        }
    });
}

#[test]
fn after_a_failure_submit_says_what_failed() {
    after_a_failure(|replica, first| {
        assert_eq!(replica.sync.submit(0, vec![0.0; 700]).unwrap_err().to_string(), first);
    });
}

#[test]
fn after_a_failure_replicas_are_not_compared() {
    after_a_failure(|replica, first| assert_eq!(replica.check().unwrap_err().to_string(), first));
}

#[test]
fn after_a_failure_nothing_is_saved_over_the_last_checkpoint() {
    // The residuals hold gradients of the step that failed, or lack what was sent in vain: no state to resume from.
    after_a_failure(|replica, first| {
        let dir = tempfile::tempdir().unwrap();
        let error = replica.sync.save(dir.path(), 0, vec![]).unwrap_err();
        assert_eq!(error.to_string(), first);
    });
}

/// The errors of three ranks of which one is set up differently.
fn strange(odd: Config, layers_of_odd: Vec<Layer>) -> Vec<SyncError> {
    run(3, move |rank, comm| {
        let (layers, config) = if rank == BAD_RANK {
            (layers_of_odd.clone(), odd.clone())
        } else {
            (layers(), config(Method::Rgc, 0.1))
        };
        Synchronizer::new(layers, config, comm).err().unwrap()
    })
}

#[test]
fn a_rank_that_runs_something_else_is_refused_by_all_and_the_difference_is_named() {
    let same = || config(Method::Rgc, 0.1);
    let mut larger = layers();
    larger[2].size = 301;
    let mut renamed = layers();
    let mut quick = layers();
    quick[3].momentum = Some(redsync_core::Momentum::Plain(0.25));
    renamed[3].name = "exit".into();
    let mut chosen = same();
    let choice = Choice::Sparse { selector: Selector::Exact, quantized: false };
    chosen.layers.insert("middle".into(), choice);
    for (config, layers, what, theirs) in [
        (config(Method::Rgc, 0.2), layers(), "density", "0.2"),
        (config(Method::RgcAsq, 0.1), layers(), "method", "rgc+asq"),
        (config(Method::Sgd, 0.1), layers(), "method", "sgd"),
        (Config { masking: false, ..same() }, layers(), "masking", "false"),
        (Config { bf16: true, ..same() }, layers(), "bf16", "true"),
        (Config { warm_up: WarmUp::Dense(3), ..same() }, layers(), "warm-up", "3 dense steps"),
        (Config { clip: Some(0.5), ..same() }, layers(), "clip", "0.5"),
        (Config { agree: vec![("shape".into(), "3 x 4".into())], ..same() }, layers(), "shape", "3 x 4"),
        (
            Config { momentum: redsync_core::Momentum::Plain(0.5), ..same() },
            layers(),
            "momentum",
            "plain momentum",
        ),
        (Config { lower_momentum: false, ..same() }, layers(), "lower_momentum", "false"),
        (Config { dense_below: Some(2000), ..same() }, layers(), "the choice for middle", "dense"),
        (chosen, layers(), "the choice for middle", "exact"),
        (same(), quick, "the momentum of out", "plain momentum 0.25"),
        (same(), larger, "the size of middle", "301"),
        (same(), renamed, "layer 3", "exit"),
        (same(), layers()[..3].to_vec(), "the number of layers", "3"),
    ] {
        for (rank, error) in strange(config, layers).into_iter().enumerate() {
            let text = error.to_string();
            let SyncError::Hello { rank: other, what: named, theirs: there, ours: here } = error else {
                panic!("rank {rank}, {what}: {text}");
            };
            assert_eq!(
                (other, named.as_str()),
                (if rank == BAD_RANK { 0 } else { BAD_RANK }, what),
                "{text}"
            );
            let odd = if rank == BAD_RANK { here } else { there };
            assert!(odd.contains(theirs), "rank {rank}, {what}: {text}");
            assert!(text.starts_with(&format!("rank {other} runs something else: {what} is ")), "{text}");
        }
    }
}

#[test]
fn a_rank_of_another_version_is_named() {
    let errors = run(2, |rank, comm| {
        let newer = |_: Tag, message: &mut Vec<u8>| {
            let text = String::from_utf8(message.clone()).unwrap();
            *message = text.replace(r#"["the wire format","2"]"#, r#"["the wire format","7"]"#).into_bytes();
        };
        let comm: Comm = if rank == 1 { Arc::new(Damaging { comm, damage: newer }) } else { comm };
        Synchronizer::new(layers(), config(Method::Rgc, 0.1), comm).err().unwrap().to_string()
    });
    assert_eq!(errors[0], "rank 1 runs something else: the wire format is 7 there, 2 here");
}

#[test]
fn ranks_may_differ_in_threads_and_deadline() {
    run(2, |rank, comm| {
        let deadline = Duration::from_secs(5 + rank as u64);
        let config = Config { threads: 1 + rank, deadline, ..config(Method::RgcAsq, 0.1) };
        let mut replica = Replica::new(config, comm).unwrap();
        replica.step().unwrap();
        replica.check().unwrap();
    });
}

#[test]
fn a_damaged_frame_names_rank_and_layer() {
    for (method, clip) in [(Method::Rgc, None), (Method::RgcAsq, Some(1.0))] {
        let barrier = Barrier::new(3);
        let errors = run(3, move |rank, comm| {
            let layers = vec![Layer::new("only", 500, Kind::Weight), Layer::new("bias", 5, Kind::BiasOrNorm)];
            let comm = if rank == BAD_RANK { damaged_at(BAD_STEP, comm) } else { comm };
            let config = Config { clip, ..config(method, 0.1) };
            let mut replica = Replica::of(layers, config, comm).unwrap();
            (0..BAD_STEP).for_each(|_| replica.step().unwrap());
            let error = replica.step().unwrap_err();
            barrier.wait();
            assert!(matches!(replica.sync.finish(), Err(SyncError::Failed(_))));
            error
        });
        for rank in [0, 2] {
            let text = errors[rank].to_string();
            assert!(matches!(errors[rank], SyncError::Frame { rank: BAD_RANK, .. }), "{text}");
            assert!(text.starts_with("frame of rank 1 with layer only: "), "{text}");
        }
    }
}

#[test]
fn a_damaged_frame_of_several_layers_names_rank_and_layers() {
    let errors = run(3, move |rank, comm| {
        let comm = if rank == BAD_RANK { damaged_at(BAD_STEP, comm) } else { comm };
        let mut replica = Replica::new(config(Method::Rgc, 0.1), comm).unwrap();
        (0..BAD_STEP).for_each(|_| replica.step().unwrap());
        replica.step().unwrap_err().to_string()
    });
    for rank in [0, 2] {
        assert!(errors[rank].starts_with("frame of rank 1 with layers out and 2 more: "), "{}", errors[rank]);
    }
}

#[test]
fn a_rank_that_leaves_is_named_by_the_others() {
    for method in Method::ALL {
        // Between two steps, and in the middle of one.
        for submitted in [0, 1, 3] {
            let errors = run(3, move |rank, comm| {
                let mut replica = Replica::new(config(method, 0.1), comm).unwrap();
                (0..BAD_STEP).for_each(|_| replica.step().unwrap());
                if rank == BAD_RANK {
                    for (layer, gradient) in replica.gradients().into_iter().enumerate().take(submitted) {
                        replica.sync.submit(layer, gradient).unwrap();
                    }
                    return None;
                }
                Some(replica.step().unwrap_err())
            });
            for error in errors.into_iter().flatten() {
                assert!(matches!(error, SyncError::Exchange { .. }), "{error}");
                assert!(error.to_string().contains("rank 1"), "{method:?}: {error}");
                assert!(error.to_string().starts_with("layer"), "{method:?}: {error}");
            }
        }
    }
}

#[test]
fn a_rank_that_is_silent_is_named_when_the_deadline_is_over() {
    for method in [Method::Sgd, Method::RgcAsq] {
        let barrier = Barrier::new(3);
        let errors = run(3, move |rank, comm| {
            let config = Config { deadline: Duration::from_secs(2), ..config(method, 0.1) };
            let mut replica = Replica::new(config, comm).unwrap();
            replica.step().unwrap();
            let error = (rank != BAD_RANK).then(|| replica.step().unwrap_err().to_string());
            barrier.wait();
            error
        });
        for error in errors.into_iter().flatten() {
            assert!(error.contains("no answer from rank 1 within 2s in step 1"), "{method:?}: {error}");
            assert!(error.starts_with("layer"), "{method:?}: {error}");
        }
    }
}

#[test]
fn a_rank_that_cannot_be_set_up_does_not_hold_up_the_others() {
    let errors = run(3, |rank, comm| {
        let density = if rank == BAD_RANK { 1.5 } else { 0.1 };
        Synchronizer::new(layers(), config(Method::Rgc, density), comm).err().unwrap().to_string()
    });
    assert_eq!(errors[1], "layer first: density must be above 0 and at most 1, got 1.5");
    assert_eq!(errors[0], format!("rank 1 gave up: {}", errors[1]));
    assert_eq!(errors[2], errors[0]);
}

#[test]
fn calls_out_of_order_are_refused_with_exact_texts_and_the_step_can_still_be_finished() {
    run(2, |_, comm| {
        let mut replica = Replica::new(config(Method::RgcAsq, 0.1), comm).unwrap();
        let sync = &mut replica.sync;
        let text = |result: Result<(), SyncError>| result.unwrap_err().to_string();
        assert!(sync.update(0).is_none());
        assert_eq!(text(sync.apply(0, &mut [0.0; 700], 0.1)), "layer 0 has no update: finish comes first");
        assert_eq!(text(sync.submit(4, vec![])), "there is no layer 4, only 4");
        let wrong = "layer first, step 0: the gradient has 3 elements, the layer has 700";
        assert_eq!(text(sync.submit(0, vec![0.0; 3])), wrong);
        assert_eq!(text(sync.finish().map(drop)), "layer first was not submitted at step 0");
        sync.submit(0, vec![1.0; 700]).unwrap();
        assert_eq!(text(sync.submit(0, vec![1.0; 700])), "layer first was submitted twice at step 0");
        sync.submit(3, Arc::new(vec![1.0; 200])).unwrap();
        sync.submit(2, vec![1.0; 300]).unwrap();
        assert_eq!(text(sync.finish().map(drop)), "layer norm was not submitted at step 0");
        sync.submit(1, vec![1.0; 9]).unwrap();
        sync.finish().unwrap();
        assert_eq!(text(sync.finish().map(drop)), "layer first was not submitted at step 1");
        for (layer, name, size) in [(0, "first", 700), (1, "norm", 9)] {
            let refused = text(sync.apply(layer, &mut [0.0; 4], 0.1));
            assert!(refused.starts_with(&format!("layer {name}: ")), "{refused}");
            assert!(refused.contains(&size.to_string()) && refused.contains('4'), "{refused}");
        }
        assert_eq!(text(sync.apply(9, &mut [0.0; 4], 0.1)), "layer 9 has no update: finish comes first");
        replica.apply().unwrap();
        replica.step().unwrap();
        replica.check().unwrap();
    });
}

#[test]
fn layers_and_plans_that_make_no_sense_are_refused() {
    let refused = |layers: Vec<Layer>, config: Config| {
        let new = move |_, comm| {
            Synchronizer::new(layers.clone(), config.clone(), comm).err().map(|error| error.to_string())
        };
        run(1, new).swap_remove(0).unwrap()
    };
    let mut twins = layers();
    twins[2].name = "first".into();
    assert_eq!(refused(twins, config(Method::Rgc, 0.1)), "two layers have the same name");
    let mut plan = config(Method::Rgc, 0.1);
    plan.layers.insert("nowhere".into(), Choice::Dense);
    assert_eq!(refused(layers(), plan), "the plan names layer nowhere, which the model does not have");
    let mut plan = config(Method::RgcAsq, 0.1);
    let choice = Choice::Sparse { selector: Selector::Sampled, quantized: true };
    plan.layers.insert("middle".into(), choice);
    let why = "sampled selection cannot be combined with quantization";
    assert!(refused(layers(), plan).starts_with(&format!("layer middle: {why}")));
}

/// Densities travel as text: a parser may be off by one unit in the last place.
#[test]
fn any_density_is_equal_to_itself() {
    for density in [1.0 / 11.0, 0.013000000000000001, 0.001 * 26.0, f64::from(0.0007f32)] {
        let steps = run(2, move |_, comm| {
            let mut replica = Replica::new(config(Method::Rgc, density), comm).unwrap();
            replica.step().unwrap();
            replica.sync.step()
        });
        assert_eq!(steps, [1, 1]);
    }
}

#[test]
fn nonsense_in_the_configuration_is_refused() {
    let refused =
        |config: Config| run(1, move |_, comm| Replica::new(config.clone(), comm).err().unwrap().to_string());
    for clip in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        let texts = refused(Config { clip: Some(clip), ..config(Method::Rgc, 0.1) });
        assert!(texts[0].contains("clip must be a positive norm"), "{texts:?}");
    }
    let mut quantized_output = config(Method::RgcAsq, 0.1);
    let choice = Choice::Sparse { selector: Selector::Carried, quantized: true };
    quantized_output.layers.insert("out".into(), choice);
    assert!(refused(quantized_output)[0].contains("never quantized"));
    assert!(refused(config(Method::Rgc, 0.0))[0].contains("density must be above 0 and at most 1, got 0"));
}

/// A window that does not lie within its buffer has the wrong length; afterwards the right one can still be submitted.
#[test]
fn a_window_out_of_range_is_refused_and_can_be_mended() {
    run(1, |_, comm| {
        let mut replica = Replica::new(config(Method::Rgc, 0.1), comm).unwrap();
        let buffer = Arc::new(vec![0.5f32; 10]);
        let outside = Window { buffer, range: 5..705 };
        let error = replica.sync.submit(0, outside).unwrap_err().to_string();
        assert_eq!(error, "layer first, step 0: the gradient has 0 elements, the layer has 700");
        replica.step().unwrap();
    });
}

#[test]
fn a_step_under_way_can_neither_be_saved_nor_replaced() {
    run(1, |_, comm| {
        let mut replica = Replica::new(config(Method::Rgc, 0.1), comm).unwrap();
        replica.step().unwrap();
        replica.sync.submit(1, vec![0.5; 9]).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let under_way = "step 1 is under way: finish comes first";
        assert_eq!(replica.sync.save(dir.path(), 0, Vec::new()).unwrap_err().to_string(), under_way);
        assert_eq!(replica.sync.load(dir.path()).unwrap_err().to_string(), under_way);
    });
}
