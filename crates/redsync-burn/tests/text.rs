//! What holds for a training on text: it learns, it resumes to the same bits, and the state of the network goes along to another
//! number of workers. The text is made up, of few phrases.

use redsync_burn::net::{Architecture, Gpt, Lstm};
use redsync_burn::train::{Ended, Schedule, Settings, Summary, WarmUp, train_network};
use redsync_comm::local;
use redsync_data::{DataSet, TextSet};
use redsync_engine::{Method, Rest};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Within a phrase every word but the first follows from those before it, often from more than the last one.
const PHRASES: [[u32; 6]; 4] =
    [[0, 1, 2, 3, 4, 11], [5, 1, 2, 6, 4, 11], [7, 3, 1, 8, 0, 11], [9, 3, 1, 10, 5, 11]];

/// Phrases in an order without a rule.
fn words(phrases: u64, seed: u64) -> Vec<u32> {
    let phrase = |number: u64| {
        let mixed = (number ^ seed << 32).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        PHRASES[((mixed ^ mixed >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 62) as usize]
    };
    (0..phrases).flat_map(phrase).collect()
}

fn data() -> DataSet {
    let names = (0..12).map(|word| word.to_string()).collect();
    let (train, valid, test) = (words(400, 1), words(120, 2), words(120, 3));
    DataSet::Text(TextSet { name: "phrases".into(), vocabulary: 12, train, valid, test, words: names })
}

/// How the phrases are learned by a network that is trained like the model of a name.
fn phrases_by(model: &str) -> Settings {
    Settings {
        data: "phrases".into(),
        epochs: 3,
        batch_size: 2,
        bptt: 7,
        density: 0.05,
        dense_below: Some(1 << 10),
        ..Settings::for_model(model)
    }
}

fn phrases() -> Settings {
    Settings { lr: 4.0, warm_up: WarmUp::Dense(0.5), ..phrases_by("lstm-small") }
}

/// Rank 0's end of a training with so much dropout.
fn run(settings: &Settings, dropout: f32, ranks: usize) -> Ended {
    run_network(Architecture::Lstm(Lstm { units: 24, layers: 2, dropout, begin: 0.1 }), settings, ranks)
}

fn run_network(network: Architecture, settings: &Settings, ranks: usize) -> Ended {
    let data = Arc::new(data());
    let start = |comm| {
        let (settings, network, data) = (settings.clone(), network.clone(), data.clone());
        std::thread::spawn(move || {
            let never = AtomicBool::new(false);
            let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().expect("a thread");
            pool.install(|| train_network(&network, &settings, &data, Arc::new(comm), &mut (), &never))
        })
    };
    let threads: Vec<_> = local::group(ranks).into_iter().map(start).collect();
    let mut ends: Vec<Ended> = threads
        .into_iter()
        .map(|thread| thread.join().expect("no panic").expect("a training without an error"))
        .collect();
    ends.remove(0)
}

fn losses(summary: &Summary) -> Vec<f64> {
    summary.epochs.iter().map(|epoch| epoch.loss).collect()
}

#[test]
fn compressed_training_learns_the_phrases() {
    let ended = run(&Settings { epochs: 12, ..phrases() }, 0.0, 2).summary;
    // Who knows the phrases is uncertain of one word in six: about 4^(1/6) = 1.26. Who knows only how often words come is at 9.
    assert!(ended.end.metric < 1.6, "perplexity {}", ended.end.metric);
    assert!((ended.end.loss.exp() - ended.end.metric).abs() < 1e-9);
    assert!(ended.bytes_sent * 2 < ended.dense_bytes, "{} of {}", ended.bytes_sent, ended.dense_bytes);
}

fn with_checkpoint(dir: &Path) -> Settings {
    Settings { checkpoint_dir: Some(dir.to_path_buf()), ..phrases() }
}

#[test]
fn a_training_on_text_stopped_anywhere_resumes_to_the_same_bits() {
    let whole = run(&phrases(), 0.2, 2).summary;
    let per_epoch = whole.steps / 3;
    // In the dense warm-up, in the compressed part, at the very end of an epoch.
    for stop in [5, per_epoch + per_epoch / 2, 2 * per_epoch] {
        let dir = tempfile::tempdir().expect("a directory");
        let stopped = run(&Settings { stop_after: Some(stop), ..with_checkpoint(dir.path()) }, 0.2, 2);
        assert_eq!(stopped.interrupted.map(|(step, _)| step), Some(stop));
        assert!(stopped.summary.end.metric.is_nan(), "nobody has judged it by the test text");
        let resumed = run(&Settings { resume: true, ..with_checkpoint(dir.path()) }, 0.2, 2).summary;
        assert_eq!(resumed.replica_hash, whole.replica_hash, "stopped after {stop}");
        assert_eq!(resumed.bytes_sent, whole.bytes_sent, "stopped after {stop}");
        let bits = |summary| losses(summary).into_iter().map(f64::to_bits).collect::<Vec<_>>();
        assert_eq!(bits(&resumed), bits(&whole), "stopped after {stop}");
        assert_eq!(resumed.end.metric.to_bits(), whole.end.metric.to_bits(), "stopped after {stop}");
    }
}

/// Adam, an output layer that goes whole, and windows in another order in each epoch.
#[test]
fn a_transformer_stopped_anywhere_resumes_to_the_same_bits() {
    let network = Architecture::Gpt(Gpt { width: 32, layers: 1, heads: 2, context: 8, begin: 0.05 });
    let settings = Settings { lr: 0.01, warm_up: WarmUp::Ramp(0.5), ..phrases_by("gpt-tiny") };
    let whole = run_network(network.clone(), &settings, 2).summary;
    assert!(whole.end.metric < 2.0, "perplexity {}", whole.end.metric);
    let alone = Settings { batch_size: 4, ..settings.clone() };
    assert_eq!(run_network(network.clone(), &alone, 1).summary.steps, whole.steps);
    let per_epoch = whole.steps / 3;
    for stop in [5, per_epoch + per_epoch / 2, 2 * per_epoch] {
        let dir = tempfile::tempdir().expect("a directory");
        let kept = Settings { checkpoint_dir: Some(dir.path().to_path_buf()), ..settings.clone() };
        run_network(network.clone(), &Settings { stop_after: Some(stop), ..kept.clone() }, 2);
        let resumed = run_network(network.clone(), &Settings { resume: true, ..kept }, 2).summary;
        assert_eq!(resumed.replica_hash, whole.replica_hash, "stopped after {stop}");
        assert_eq!(resumed.bytes_sent, whole.bytes_sent, "stopped after {stop}");
    }
}

#[test]
fn the_state_of_the_network_goes_along_to_another_number_of_workers() {
    // Dense, without dropout and without a rate that follows the judgement, the number of workers changes nothing but the order
    // of sums. The last epoch, in the middle of which it stops, has learned to use the state.
    let dense = |settings: Settings| {
        let schedule = Schedule::Constant;
        Settings { method: Method::Sgd, schedule, epochs: 8, ..settings }
    };
    let whole = run(&dense(phrases()), 0.0, 4).summary;
    for (ranks, batch_size) in [(1, 8), (2, 4), (8, 1)] {
        let dir = tempfile::tempdir().expect("a directory");
        let stopped = Settings { stop_after: Some(whole.steps * 15 / 16), ..with_checkpoint(dir.path()) };
        run(&dense(stopped), 0.0, 4);
        let resumed = Settings { resume: true, batch_size, ..with_checkpoint(dir.path()) };
        let resumed = run(&dense(resumed), 0.0, ranks).summary;
        assert_eq!(resumed.steps, whole.steps);
        for (a, b) in losses(&resumed).iter().zip(losses(&whole)) {
            assert!((a - b).abs() < 1e-5 * b, "with {ranks} workers {a}, not {b}");
        }
    }
}

/// A network whose checkpoint is small enough to be kept for ever, and how it is trained.
const KEPT: Architecture = Architecture::Lstm(Lstm { units: 6, layers: 1, dropout: 0.2, begin: 0.1 });
const KEPT_STEP: u64 = 120;

fn kept() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/kept/phrases-2")
}

/// By the defaults of the version that made it.
fn as_kept(dir: &Path) -> Settings {
    let settings = with_checkpoint(dir);
    Settings {
        dense_below: Some(256),
        rest: Rest::F32,
        bf16: false,
        at_least: 0,
        clip_power: 0.5,
        ..settings
    }
}

#[test]
fn a_checkpoint_of_an_earlier_version_resumes() {
    let dir = tempfile::tempdir().expect("a directory");
    let step = format!("step-{KEPT_STEP:08}");
    std::fs::create_dir(dir.path().join(&step)).expect("a directory");
    std::fs::copy(kept().join("latest"), dir.path().join("latest")).expect("a copy");
    for file in std::fs::read_dir(kept().join(&step)).expect("what is kept").flatten() {
        std::fs::copy(file.path(), dir.path().join(&step).join(file.file_name())).expect("a copy");
    }
    let resumed = run_network(KEPT, &Settings { resume: true, ..as_kept(dir.path()) }, 2).summary;
    let whole =
        run_network(KEPT, &Settings { checkpoint_dir: None, ..as_kept(Path::new("unused")) }, 2).summary;
    assert_eq!(resumed.steps, whole.steps);
    // Another machine may round matrix products otherwise; what is read wrongly shows in the first digits.
    for (a, b) in losses(&resumed).iter().zip(losses(&whole)) {
        assert!((a - b).abs() < 1e-3 * b, "{a}, not {b}");
    }
}

/// How the files were made: once for every version of the format.
#[test]
#[ignore = "writes the files that are kept"]
fn write_what_is_kept() {
    run_network(KEPT, &Settings { stop_after: Some(KEPT_STEP), ..as_kept(&kept()) }, 2);
    // Only the newest checkpoint is kept.
    for entry in std::fs::read_dir(kept()).expect("a directory").flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.starts_with("step-") && name != format!("step-{KEPT_STEP:08}") {
            std::fs::remove_dir_all(entry.path()).expect("an old checkpoint");
        }
    }
}
