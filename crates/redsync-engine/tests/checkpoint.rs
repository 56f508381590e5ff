//! Rulings 22 and 23: a checkpoint resumes to the same bits; another number of ranks keeps the sums; what does not fit is
//! refused, and then nothing has changed.
#![allow(missing_docs, clippy::unwrap_used)]

mod common;

use common::{Comm, Replica, config, run};
use redsync_core::{Adam, Momentum};
use redsync_engine::state::Saved;
use redsync_engine::{Config, Kind, Layer, Method, Preset, SyncError};
use std::fs;
use std::path::{Path, PathBuf};

fn directory() -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().into();
    (dir, path)
}

/// Saves everything that the next step depends on.
fn save(replica: &Replica, dir: &Path) {
    let hash = replica.check().unwrap();
    let named = |kind: &str, all: &[Vec<f32>]| -> Vec<(String, Vec<f32>)> {
        let name = |(layer, values): (usize, &Vec<f32>)| (format!("{kind} {layer}"), values.clone());
        all.iter().enumerate().map(name).collect()
    };
    let extra = [named("weights", &replica.weights), named("buffer", &replica.buffers)].concat();
    replica.sync.save(dir, hash, extra).unwrap();
}

fn load(replica: &mut Replica, dir: &Path) -> Result<(), SyncError> {
    let mut extra = replica.sync.load(dir)?.into_iter().map(|(_, values)| values);
    replica.weights = extra.by_ref().take(replica.weights.len()).collect();
    replica.buffers = extra.collect();
    Ok(())
}

/// A new replica from a checkpoint.
fn resumed(config: &Config, comm: Comm, dir: &Path) -> Replica {
    let mut replica = Replica::new(config.clone(), comm).unwrap();
    replica.weights.iter_mut().for_each(|weights| weights.clear());
    load(&mut replica, dir).unwrap();
    replica
}

/// Runs a number of ranks for some steps, from a checkpoint if there is one, and saves at the end.
fn train(ranks: usize, config: &Config, steps: u64, from: Option<&Path>, to: &Path) {
    let (config, from, to) = (config.clone(), from.map(Path::to_path_buf), to.to_path_buf());
    run(ranks, move |_, comm| {
        let mut replica = match &from {
            Some(dir) => resumed(&config, comm, dir),
            None => Replica::new(config.clone(), comm).unwrap(),
        };
        for _ in 0..steps {
            let rate = common::LR / (1 + replica.sync.step()) as f32;
            (0..replica.weights.len()).for_each(|layer| replica.sync.set_rate(layer, rate).unwrap());
            replica.step().unwrap();
        }
        save(&replica, &to);
    });
}

fn assert_same_files(a: &Path, b: &Path, ranks: usize, what: &str) {
    for name in (0..ranks).map(Saved::file_name) {
        let (a, b) = (a.join(&name), b.join(&name));
        assert!(fs::read(&a).unwrap() == fs::read(&b).unwrap(), "{what}: {} differs", b.display());
    }
}

fn resumes_to_the_same_bits(config: Config) {
    const K: u64 = 7;
    let what = format!("{config:?}");
    let ((_a, straight), (_b, half), (_c, resumed)) = (directory(), directory(), directory());
    train(3, &config, 2 * K, None, &straight);
    train(3, &config, K, None, &half);
    train(3, &config, K, Some(&half), &resumed);
    assert_same_files(&straight, &resumed, 3, &what);
    let saved = Saved::read_all(&resumed).unwrap();
    assert!(saved.iter().all(|state| (state.step, state.ranks, state.extra.len()) == (2 * K, 3, 8)));
    assert!(saved[0].layers.is_empty() || saved[0].layers[0].v.iter().any(|v| *v != 0.0), "{what}");
}

#[test]
fn sampled_selection_resumes_to_the_same_bits_in_the_middle_of_its_cycle() {
    resumes_to_the_same_bits(Config {
        preset: Preset::Paper { recurrent: true },
        clip: Some(1.0),
        momentum: Momentum::Plain(0.9),
        ..config(Method::Rgc, 0.02)
    });
}

#[test]
fn asq_resumes_to_the_same_bits_in_the_middle_of_its_phases() {
    resumes_to_the_same_bits(Config { momentum: Momentum::Nesterov(0.9), ..config(Method::RgcAsq, 0.02) });
}

#[test]
fn adam_resumes_to_the_same_bits() {
    let momentum = Momentum::Adam(Adam { beta1: 0.9, beta2: 0.99, eps: 1e-8 });
    for method in [Method::Rgc, Method::RgcAsq] {
        resumes_to_the_same_bits(Config { momentum, ..config(method, 0.02) });
    }
}

#[test]
fn every_method_preset_clipping_and_warm_up_resumes_to_the_same_bits() {
    // Each warm-up of these changes over around the checkpoint.
    common::all_configs().into_iter().for_each(resumes_to_the_same_bits);
}

/// Trains four steps, saves, trains on, goes back in the same synchronizer and trains four steps from there.
fn goes_back(layers: Vec<Layer>, method: Method, back: u64) {
    let ((_a, there), (_b, straight), (_c, again)) = (directory(), directory(), directory());
    let config = Config { momentum: Momentum::Plain(0.9), ..config(method, 0.02) };
    let to = (straight.clone(), again.clone());
    run(2, move |_, comm| {
        let mut replica = Replica::of(layers.clone(), config.clone(), comm).unwrap();
        (0..4).for_each(|_| replica.step().unwrap());
        save(&replica, &there);
        (0..back).for_each(|_| replica.step().unwrap());
        save(&replica, &to.0);
        load(&mut replica, &there).unwrap();
        assert_eq!(replica.sync.step(), 4);
        (0..back).for_each(|_| replica.step().unwrap());
        save(&replica, &to.1);
    });
    assert_same_files(&straight, &again, 2, &format!("{method:?}, back by {back}"));
}

#[test]
fn a_synchronizer_goes_back_to_its_own_checkpoint_by_several_steps() {
    Method::ALL.into_iter().for_each(|method| goes_back(common::layers(), method, 3));
}

#[test]
fn a_synchronizer_goes_back_to_its_own_checkpoint_by_one_step() {
    Method::ALL.into_iter().for_each(|method| goes_back(common::layers(), method, 1));
}

#[test]
fn a_synchronizer_without_dense_layers_goes_back_by_one_step() {
    goes_back(vec![Layer::new("only", 500, Kind::Weight)], Method::Rgc, 1);
}

/// The sums over the ranks of every u and v.
fn sums(states: &[Saved]) -> Vec<Vec<f64>> {
    let mut sums = Vec::new();
    for layer in 0..states[0].layers.len() {
        let first = &states[0].layers[layer];
        let (mut u, mut v) = (vec![0f64; first.u.len()], vec![0f64; first.v.len()]);
        for state in states {
            u.iter_mut().zip(&state.layers[layer].u).for_each(|(sum, x)| *sum += f64::from(*x));
            v.iter_mut().zip(&state.layers[layer].v).for_each(|(sum, x)| *sum += f64::from(*x));
        }
        sums.extend([u, v]);
    }
    sums
}

fn assert_same_sums(before: &Path, after: &Path, ranks: usize) {
    let (before, after) = (Saved::read_all(before).unwrap(), Saved::read_all(after).unwrap());
    assert_eq!((after.len(), after[0].step, &after[0].extra), (ranks, before[0].step, &before[0].extra));
    let (before, after) = (sums(&before), sums(&after));
    assert_eq!(before.len(), after.len());
    assert!(before.iter().all(|sum| sum.iter().any(|x| *x != 0.0)));
    for (before, after) in before.iter().zip(&after) {
        assert_eq!(before.len(), after.len());
        for (before, after) in before.iter().zip(after) {
            assert!((before - after).abs() <= 1e-6 * (1.0 + before.abs()), "{before} became {after}");
        }
    }
}

#[test]
fn another_number_of_ranks_keeps_the_sums_and_trains_on() {
    for method in [Method::Rgc, Method::RgcAsq] {
        let config = Config { momentum: Momentum::Nesterov(0.9), ..config(method, 0.02) };
        for (old, new) in [(2, 3), (4, 2), (1, 4), (3, 1), (3, 2)] {
            let ((_a, before), (_b, after), (_c, later)) = (directory(), directory(), directory());
            train(old, &config, 5, None, &before);
            train(new, &config, 0, Some(&before), &after);
            assert_same_sums(&before, &after, new);
            train(new, &config, 3, Some(&before), &later);
            assert_eq!(Saved::read_all(&later).unwrap()[0].step, 8);
        }
    }
}

#[test]
fn files_that_an_earlier_run_with_more_ranks_left_behind_are_left_alone() {
    let config = Config { momentum: Momentum::Plain(0.9), ..config(Method::Rgc, 0.02) };
    for steps in [0, 2] {
        let ((_a, shared), (_b, two), (_c, three)) = (directory(), directory(), directory());
        train(3, &config, 4, None, &shared);
        train(2, &config, steps, Some(&shared), &two);
        // The same checkpoint of two ranks, over that of three, whose third file stays.
        for name in (0..2).map(Saved::file_name) {
            fs::copy(two.join(&name), shared.join(&name)).unwrap();
        }
        assert!(shared.join(Saved::file_name(2)).exists());
        train(3, &config, 0, Some(&shared), &three);
        assert_same_sums(&two, &three, 3);
    }
}

#[test]
fn a_checkpoint_of_another_configuration_is_refused_and_nothing_changes() {
    let ((_a, other), (_b, before), (_c, after)) = (directory(), directory(), directory());
    train(2, &config(Method::Rgc, 0.02), 5, None, &other);
    let (from, to) = ((other.clone(), before.clone()), after.clone());
    run(2, move |_, comm| {
        let mut replica = Replica::new(config(Method::Rgc, 0.03), comm).unwrap();
        (0..3).for_each(|_| replica.step().unwrap());
        save(&replica, &from.1);
        let text = load(&mut replica, &from.0).unwrap_err().to_string();
        let expected = format!("the checkpoint in {}: density was 0.02, is 0.03", from.0.display());
        assert_eq!(text, expected);
        assert_eq!(replica.sync.step(), 3);
        save(&replica, &to);
        replica.step().unwrap();
        replica.check().unwrap();
    });
    assert_same_files(&before, &after, 2, "after a refused load");
}

#[test]
fn the_file_of_another_rank_is_refused() {
    let (_dir, dir) = directory();
    train(2, &config(Method::Rgc, 0.02), 3, None, &dir);
    fs::copy(dir.join(Saved::file_name(0)), dir.join(Saved::file_name(1))).unwrap();
    let errors = run(2, move |_, comm| {
        let mut replica = Replica::new(config(Method::Rgc, 0.02), comm).unwrap();
        load(&mut replica, &dir).err().map(|error| error.to_string())
    });
    assert!(errors.iter().all(Option::is_some), "{errors:?}");
}

#[test]
fn a_missing_rank_file_is_refused_by_every_rank() {
    for ranks in [2, 3] {
        let (_dir, dir) = directory();
        train(2, &config(Method::Rgc, 0.02), 3, None, &dir);
        fs::remove_file(dir.join(Saved::file_name(1))).unwrap();
        let errors = run(ranks, move |_, comm| {
            let mut replica = Replica::new(config(Method::Rgc, 0.02), comm).unwrap();
            load(&mut replica, &dir).unwrap_err().to_string()
        });
        for (rank, error) in errors.iter().enumerate() {
            let missing = error.ends_with("rank-0001.safetensors is missing");
            assert!(missing, "{ranks} ranks, rank {rank}: {error}");
        }
    }
}

#[test]
fn a_damaged_file_is_refused() {
    let (_dir, dir) = directory();
    train(2, &config(Method::Rgc, 0.02), 3, None, &dir);
    let path = dir.join(Saved::file_name(1));
    let mut bytes = fs::read(&path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&path, bytes).unwrap();
    let errors = run(2, move |_, comm| {
        let mut replica = Replica::new(config(Method::Rgc, 0.02), comm).unwrap();
        load(&mut replica, &dir).unwrap_err().to_string()
    });
    assert!(errors[1].contains("rank-0001.safetensors: the file is damaged"), "{}", errors[1]);
}

#[test]
fn files_of_different_steps_are_refused_and_nothing_changes() {
    let ((_a, three), (_b, five)) = (directory(), directory());
    train(2, &config(Method::Rgc, 0.02), 3, None, &three);
    train(2, &config(Method::Rgc, 0.02), 5, None, &five);
    fs::copy(five.join(Saved::file_name(1)), three.join(Saved::file_name(1))).unwrap();
    let ends = run(2, move |_, comm| {
        let mut replica = Replica::new(config(Method::Rgc, 0.02), comm).unwrap();
        let error = load(&mut replica, &three).unwrap_err().to_string();
        (error, replica.sync.step(), replica.sync.residual_norm(0))
    });
    for (error, step, residual) in ends {
        assert!(error.contains("step"), "{error}");
        assert_eq!((step, residual), (0, Some(0.0)), "after: {error}");
    }
}

#[test]
fn files_of_different_replicas_are_refused() {
    // The same configuration and step, other weights: what a mix of two runs' checkpoints looks like.
    let ((_a, ours), (_b, theirs)) = (directory(), directory());
    train(2, &config(Method::Rgc, 0.02), 3, None, &ours);
    let to = theirs.clone();
    run(2, move |_, comm| {
        let mut replica = Replica::new(config(Method::Rgc, 0.02), comm).unwrap();
        replica.weights[0][0] += 1.0;
        (0..3).for_each(|_| replica.step().unwrap());
        save(&replica, &to);
    });
    fs::copy(theirs.join(Saved::file_name(1)), ours.join(Saved::file_name(1))).unwrap();
    assert!(Saved::read_all(&ours).unwrap_err().to_string().contains("replica hash"));
    let refused = run(2, move |_, comm| {
        let mut replica = Replica::new(config(Method::Rgc, 0.02), comm).unwrap();
        load(&mut replica, &ours).is_err()
    });
    assert_eq!(refused, [true, true]);
}
