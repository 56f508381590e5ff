//! What holds for a training: it learns, ranks agree, it does not depend on how the work is dealt out, and it survives anything.

use redsync_burn::train::{
    Ended, Observer, Optimizer, RunRecord, Settings, StepRecord, TrainError, WarmUp, train,
};
use redsync_comm::local;
use redsync_data::{DataSet, Places};
use redsync_engine::cost::{Compute, Decompression, Line, Network, Platform, Rates, Selection};
use redsync_engine::{Exchange, Figures, Method};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

fn digits() -> Settings {
    Settings { epochs: 3, ..Settings::for_model("digits-cnn") }
}

/// Keeps what the run was said to be.
#[derive(Default)]
struct Heard(Option<RunRecord>);

impl Observer for Heard {
    fn begin(&mut self, run: &RunRecord) -> Result<(), TrainError> {
        self.0 = Some(run.clone());
        Ok(())
    }
}

/// All ranks of a training, each in its thread; their outcomes, and what each run was said to be.
fn all_heard(settings: &Settings, ranks: usize) -> Vec<(Result<Ended, TrainError>, Option<RunRecord>)> {
    let data: Arc<DataSet> =
        Arc::new(settings.open(&Places::default(), &|_, _| ()).expect("digits are always there"));
    let start = |comm| {
        let (settings, data) = (settings.clone(), data.clone());
        std::thread::spawn(move || {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().expect("a thread");
            let (mut heard, never) = (Heard::default(), AtomicBool::new(false));
            let ended = pool.install(|| train(&settings, &data, Arc::new(comm), &mut heard, &never));
            (ended, heard.0)
        })
    };
    let threads: Vec<_> = local::group(ranks).into_iter().map(start).collect();
    threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
}

fn all(settings: &Settings, ranks: usize) -> Vec<Result<Ended, TrainError>> {
    all_heard(settings, ranks).into_iter().map(|(ended, _)| ended).collect()
}

fn run(settings: &Settings, ranks: usize) -> Ended {
    let mut outcomes = all(settings, ranks);
    outcomes.drain(..).map(|outcome| outcome.expect("a training without an error")).next().expect("a rank")
}

fn error(settings: &Settings) -> String {
    all(settings, 2).remove(0).expect_err("a refusal").to_string()
}

#[test]
fn compressed_training_learns_digits() {
    let ended = run(&Settings { epochs: 8, ..digits() }, 4);
    assert!(ended.summary.end.metric > 0.93, "accuracy {}", ended.summary.end.metric);
    assert!(ended.summary.bytes_sent * 5 < ended.summary.dense_bytes);
}

#[test]
fn compressed_adamw_learns_digits_and_one_worker_with_density_one_is_dense_adamw() {
    let adamw = digits().for_adamw();
    let ended = run(&Settings { epochs: 8, density: 0.01, ..adamw.clone() }, 4);
    assert!(ended.summary.end.metric > 0.93, "accuracy {}", ended.summary.end.metric);
    let dense = Settings { method: Method::Sgd, ..adamw.clone() };
    let all = Settings { method: Method::Rgc, density: 1.0, warm_up: WarmUp::None, ..adamw };
    for (a, b) in run(&dense, 1).summary.epochs.iter().zip(&run(&all, 1).summary.epochs) {
        assert!((a.loss - b.loss).abs() < 1e-2 * a.loss.max(0.1), "{} and {}", a.loss, b.loss);
    }
}

#[test]
fn one_worker_and_four_with_density_one_follow_the_same_loss_curve() {
    let one = Settings { method: Method::Sgd, batch_size: 64, ..digits() };
    let four = Settings {
        method: Method::Rgc,
        batch_size: 16,
        density: 1.0,
        masking: false,
        warm_up: WarmUp::None,
        ..digits()
    };
    for optimizer in [Optimizer::Sgd, Optimizer::Momentum, Optimizer::Nesterov] {
        // Local decay has the strength of dense decay only in the long run, so it is left out here. At a rate of 0.05 the
        // curves of Nesterov part by a percent in the second epoch, while dense ones agree; growing rounding errors are the
        // likely cause.
        let with =
            |settings: &Settings| Settings { optimizer, lr: 0.005, weight_decay: 0.0, ..settings.clone() };
        let (one, four) = (run(&with(&one), 1).summary, run(&with(&four), 4).summary);
        for (a, b) in one.epochs.iter().zip(&four.epochs) {
            assert!(
                (a.loss - b.loss).abs() < 1e-3 * a.loss.max(0.1),
                "{optimizer:?}: {} and {}",
                a.loss,
                b.loss
            );
        }
    }
}

#[test]
fn the_same_seed_gives_the_same_weights_and_another_one_others() {
    let short = Settings { epochs: 1, ..digits() };
    let hash = |seed| run(&Settings { seed, ..short.clone() }, 2).summary.replica_hash;
    assert_eq!(hash(1), hash(1));
    assert_ne!(hash(1), hash(2));
}

fn with_checkpoint(dir: &Path) -> Settings {
    // 0.98 in f32 is a number that loses its last bit in JSON.
    Settings {
        checkpoint_dir: Some(dir.to_path_buf()),
        warm_up: WarmUp::Dense(0.5),
        momentum: 0.98,
        lr: 0.005,
        ..digits()
    }
}

#[test]
fn a_training_stopped_anywhere_resumes_to_the_same_bits() {
    // In the dense warm-up, in the compressed part, at the very end of an epoch.
    resumes_to_the_same_bits(with_checkpoint, &[5, 37, 62]);
}

#[test]
fn a_training_by_owners_learns_digits_and_resumes_to_the_same_bits() {
    let owners = |settings: Settings| Settings { exchange: Some(Exchange::Owners), ..settings };
    resumes_to_the_same_bits(|dir| owners(with_checkpoint(dir)), &[37]);
    let ended = run(&owners(Settings { epochs: 8, ..digits() }), 4);
    assert!(ended.summary.end.metric > 0.93, "accuracy {}", ended.summary.end.metric);
    let dir = tempfile::tempdir().expect("a directory");
    run(&owners(Settings { stop_after: Some(40), batch_size: 16, ..with_checkpoint(dir.path()) }), 4);
    let other = Settings { resume: true, batch_size: 32, ..with_checkpoint(dir.path()) };
    assert!(run(&owners(other.clone()), 2).summary.end.metric > 0.8);
}

#[test]
fn a_training_with_adamw_resumes_to_the_same_bits() {
    let adamw = |dir: &Path| Settings { beta2: 0.97, ..with_checkpoint(dir).for_adamw() };
    resumes_to_the_same_bits(adamw, &[5, 37]);
}

/// Local steps of seven, which no epoch of 23 is a multiple of.
fn with_local_steps(dir: &Path) -> Settings {
    let adamw = Settings { momentum: 0.9, lr: 0.002, ..with_checkpoint(dir) };
    Settings { optimizer: Optimizer::AdamW, warm_up: WarmUp::Ramp(1.0), ..adamw.for_local_steps(7) }
}

#[test]
fn local_steps_resume_to_the_same_bits_also_between_two_exchanges() {
    // Behind an exchange, between two, and at the end of an epoch, where there is one in any case.
    resumes_to_the_same_bits(with_local_steps, &[7, 26, 46]);
}

#[test]
fn local_steps_learn_digits_by_any_optimizer() {
    for optimizer in [Optimizer::AdamW, Optimizer::Nesterov] {
        let rate = if optimizer == Optimizer::AdamW { 0.002 } else { digits().lr };
        let settings = Settings { epochs: 8, optimizer, lr: rate, ..digits() };
        let ended = run(&settings.for_local_steps(8), 4);
        assert!(ended.summary.end.metric > 0.93, "{optimizer:?}: accuracy {}", ended.summary.end.metric);
        assert!(ended.summary.bytes_sent * 300 < ended.summary.dense_bytes, "{optimizer:?}");
    }
}

#[test]
fn one_worker_that_averages_its_weights_with_nobody_trains_as_without_local_steps() {
    let plain = Settings { epochs: 2, method: Method::Sgd, ..digits() };
    let local = Settings { every: Some(5), ..plain.clone() };
    let (plain, local) = (run(&plain, 1).summary, run(&local, 1).summary);
    for (a, b) in plain.epochs.iter().zip(&local.epochs) {
        assert!((a.loss - b.loss).abs() < 1e-3 * a.loss.max(0.1), "{} and {}", a.loss, b.loss);
    }
}

#[test]
fn local_steps_go_on_with_another_number_of_workers_behind_an_exchange_only() {
    let ends = |stop: u64| {
        let dir = tempfile::tempdir().expect("a directory");
        run(&Settings { stop_after: Some(stop), batch_size: 16, ..with_local_steps(dir.path()) }, 4);
        let other = Settings { resume: true, batch_size: 32, ..with_local_steps(dir.path()) };
        all(&other, 2).remove(0).map(|ended| ended.summary.end.metric).map_err(|error| error.to_string())
    };
    assert!(ends(30).expect("23 steps of an epoch and seven") > 0.6);
    assert!(ends(28).expect_err("a refusal").contains("between two exchanges"));
}

fn resumes_to_the_same_bits(settings: impl Fn(&Path) -> Settings, stops: &[u64]) {
    let plain = run(&Settings { checkpoint_dir: None, ..settings(Path::new("unused")) }, 3).summary;
    for &stop in stops {
        let dir = tempfile::tempdir().expect("a directory");
        let stopped = run(&Settings { stop_after: Some(stop), ..settings(dir.path()) }, 3);
        assert_eq!(stopped.interrupted.map(|(step, _)| step), Some(stop));
        let resumed = run(&Settings { resume: true, ..settings(dir.path()) }, 3).summary;
        assert_eq!(resumed.replica_hash, plain.replica_hash, "stopped after {stop}");
        assert_eq!(resumed.bytes_sent, plain.bytes_sent, "stopped after {stop}");
        let losses = |summary: &redsync_burn::train::Summary| {
            summary.epochs.iter().map(|e| e.loss.to_bits()).collect::<Vec<_>>()
        };
        assert_eq!(losses(&resumed), losses(&plain), "stopped after {stop}");
    }
}

/// Machines with a network that takes so many seconds for a byte. Choosing elements costs more than copying, so that a fast
/// network has no use for it.
fn figures(beta: f64) -> Option<Figures> {
    let (line, slow) = (Line::new(1e-6, 1e-9), Line::new(1e-6, 5e-9));
    let rates = Rates {
        select: Selection { exact: slow, trimmed: slow, threshold: slow, sampled: slow, carried: slow },
        encode: line,
        decode: line,
        apply: Decompression { fixed: 0.0, gamma_1: 1e-8, pass: 1e-9, near: 1e-9 },
        copy: line,
        update: line,
        ..Rates::default()
    };
    let network = Network::new(1e-5, beta);
    let platform = Platform { cores: 2.0, contention: 1.0, network, rates, ..Platform::default() };
    Some(Figures { platform, compute: Compute::default() })
}

#[test]
fn what_auto_decided_stays_when_a_training_is_resumed() {
    let dir = tempfile::tempdir().expect("a directory");
    let auto = |beta| Settings { auto: true, figures: figures(beta), ..with_checkpoint(dir.path()) };
    // The rank's end, and how many parameters are compressed.
    let heard = |settings: &Settings| {
        let (ended, run) = all_heard(settings, 2).remove(0);
        (ended.expect("a training without an error").summary, run.expect("a run").compressed)
    };
    let new = |settings: Settings| Settings { checkpoint_dir: None, stop_after: Some(1), ..settings };
    let (slow, fast) = (auto(1e-6), auto(1e-12));
    let limited = Settings { auto: false, dense_below: Some(128 << 10), ..auto(1e-6) };
    let limited = heard(&new(limited)).1;
    assert_eq!(heard(&new(fast.clone())).1, 0, "a fast network has no use for compression");
    let (_, decided) = heard(&Settings { stop_after: Some(40), ..slow.clone() });
    assert!(decided > limited && limited > 0, "{decided} parameters, {limited} with a limit of 128 KB");
    // Resumed where auto would decide otherwise.
    let (resumed, still) = heard(&Settings { resume: true, ..fast.clone() });
    assert_eq!(still, decided);
    let (whole, _) = heard(&Settings { checkpoint_dir: None, ..slow });
    assert_eq!(resumed.replica_hash, whole.replica_hash);
    let refused = error(&Settings { resume: true, ..with_checkpoint(dir.path()) });
    assert!(refused.contains("auto was true, is false"), "{refused}");
}

#[test]
fn auto_measures_where_nothing_is_known() {
    let auto = Settings { auto: true, stop_after: Some(2), ..digits() };
    assert_eq!(run(&auto, 2).interrupted.map(|(step, _)| step), Some(2));
}

#[test]
fn a_training_goes_on_with_another_number_of_workers() {
    let dir = tempfile::tempdir().expect("a directory");
    run(&Settings { stop_after: Some(40), batch_size: 16, ..with_checkpoint(dir.path()) }, 4);
    let resumed =
        run(&Settings { resume: true, batch_size: 32, epochs: 3, ..with_checkpoint(dir.path()) }, 2);
    assert!(resumed.summary.end.metric > 0.8, "accuracy {}", resumed.summary.end.metric);
}

#[test]
fn only_old_checkpoints_are_cleared_away() {
    let dir = tempfile::tempdir().expect("a directory");
    for foreign in ["step-by-step", "step-00000001"] {
        std::fs::create_dir(dir.path().join(foreign)).expect("a directory");
    }
    run(&with_checkpoint(dir.path()), 2); // a checkpoint after each of three epochs
    let entries = std::fs::read_dir(dir.path()).expect("a directory").flatten();
    let mut names: Vec<String> =
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    assert_eq!(names, ["latest", "step-00000001", "step-00000092", "step-00000138", "step-by-step"]);
}

#[test]
fn residuals_of_another_run_are_refused() {
    let (one, other) = (tempfile::tempdir().expect("a directory"), tempfile::tempdir().expect("a directory"));
    for (dir, seed) in [(&one, 1), (&other, 2)] {
        run(&Settings { seed, stop_after: Some(40), ..with_checkpoint(dir.path()) }, 2);
    }
    let resume = Settings { resume: true, ..with_checkpoint(one.path()) };
    for (kind, why) in [
        ("rank", "it was saved beside other weights"),
        ("worker", "does not belong to the weights beside it"),
    ] {
        let kept = tempfile::tempdir().expect("a directory");
        for rank in 0..2 {
            let file = format!("step-00000040/{kind}-{rank:04}.safetensors");
            std::fs::copy(one.path().join(&file), kept.path().join(rank.to_string())).expect("a copy");
            std::fs::copy(other.path().join(&file), one.path().join(&file)).expect("a copy");
        }
        assert!(error(&resume).contains(why), "{}", error(&resume));
        for rank in 0..2 {
            let file = format!("step-00000040/{kind}-{rank:04}.safetensors");
            std::fs::copy(kept.path().join(rank.to_string()), one.path().join(file)).expect("a copy");
        }
    }
}

#[test]
fn a_checkpoint_is_never_overwritten_by_a_new_run() {
    let dir = tempfile::tempdir().expect("a directory");
    run(&Settings { stop_after: Some(3), ..with_checkpoint(dir.path()) }, 2);
    let before = std::fs::read(dir.path().join("latest")).expect("a checkpoint");
    assert!(error(&with_checkpoint(dir.path())).contains("is there already: continue it with --resume"));
    assert_eq!(std::fs::read(dir.path().join("latest")).expect("a checkpoint"), before);
}

#[test]
fn foreign_and_damaged_checkpoints_are_refused_in_one_line() {
    let dir = tempfile::tempdir().expect("a directory");
    let resume = Settings { resume: true, ..with_checkpoint(dir.path()) };
    assert!(error(&resume).contains("there is none to resume from"));
    run(&Settings { stop_after: Some(3), ..with_checkpoint(dir.path()) }, 2);
    let other = Settings { seed: 7, ..resume.clone() };
    assert!(error(&other).contains("is of another run: seed was 1, is 7"), "{}", error(&other));
    let other = Settings { model: "resnet20".into(), ..resume.clone() };
    assert!(
        error(&other).contains("is of another run: model was digits-cnn, is resnet20"),
        "{}",
        error(&other)
    );
    let place = dir.path().join("step-00000003");
    for file in ["model.safetensors", "worker-0000.safetensors", "rank-0000.safetensors"] {
        let path = place.join(file);
        let good = std::fs::read(&path).expect("a file of the checkpoint");
        let mut damages =
            vec![good[..good.len() / 2].to_vec(), flipped(&good, good.len() - 3), Vec::new(), vec![0xff; 64]];
        // Anywhere in header and values.
        damages.extend((0..50).map(|part| flipped(&good, part * (good.len() - 1) / 49)));
        if file == "model.safetensors" {
            // The last letter of a name: the values are whole, but nobody would ask for them.
            let name = b"\"momentum/";
            let at =
                good.windows(name.len()).position(|bytes| bytes == name).expect("a dense layer's momentum");
            let end = at + 1 + good[at + 1..].iter().position(|byte| *byte == b'"').expect("its end");
            damages.push(flipped(&good, end - 1));
        }
        for damage in damages {
            std::fs::write(&path, &damage).expect("a file to damage");
            let message = error(&resume);
            assert!(!message.contains('\n') && !message.is_empty(), "{file}: {message}");
        }
        std::fs::write(&path, good).expect("a file to mend");
    }
    std::fs::write(dir.path().join("latest"), "../../etc").expect("a file to damage");
    assert!(error(&resume).contains("does not name a checkpoint"));
}

fn flipped(bytes: &[u8], at: usize) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    bytes[at] ^= 1;
    bytes
}

#[test]
fn settings_that_make_no_sense_are_refused() {
    for (wrong, why) in [
        (Settings { lr: -1.0, ..digits() }, "lr must be a positive number, got -1"),
        (Settings { density: 1.5, ..digits() }, "density must be at most 1, got 1.5"),
        (Settings { batch_size: 0, ..digits() }, "batch-size must be at least 1, got 0"),
        (Settings { momentum: 1.0, ..digits() }, "momentum must be at least 0 and below 1, got 1"),
        (digits().for_local_steps(0), "every must be at least 1, got 0"),
        (Settings { keep: 0.0, ..digits().for_local_steps(4) }, "keep must be above 0 and at most 1, got 0"),
        (
            Settings { keep: 0.5, ..digits() },
            "keep and outer-rate are options of local steps: give every, too",
        ),
    ] {
        assert_eq!(error(&wrong), why);
    }
}

#[test]
fn a_learning_rate_that_is_too_high_is_named_as_the_cause() {
    let wild = Settings { lr: 1e6, lr_warm_up_epochs: 0.0, method: Method::Sgd, ..digits() };
    let messages: Vec<String> =
        all(&wild, 2).into_iter().filter_map(|o| o.err()).map(|e| e.to_string()).collect();
    assert_eq!(messages.len(), 2, "nobody goes on alone");
    for message in &messages {
        assert!(message.contains("learning rate") || message.contains("not finite"), "{messages:?}");
    }
}

/// Cannot write what it is told at a step.
struct Full;

impl Observer for Full {
    fn step(&mut self, _: &StepRecord) -> Result<(), TrainError> {
        let source = std::io::Error::other("no space left");
        Err(TrainError::Write { path: "metrics.jsonl".into(), source })
    }
}

/// What each rank says of its end; each has its own settings, and those that are `full` cannot write.
fn ends(settings: Vec<Settings>, full: impl Fn(usize) -> bool) -> Vec<String> {
    let ranks = local::group(settings.len()).into_iter().zip(settings).enumerate();
    let start = |(rank, (comm, settings)): (usize, (local::Local, Settings))| {
        let full = full(rank);
        std::thread::spawn(move || {
            let data = settings.open(&Places::default(), &|_, _| ()).expect("digits are always there");
            let never = AtomicBool::new(false);
            let observer: &mut dyn Observer = if full { &mut Full } else { &mut () };
            train(&settings, &data, Arc::new(comm), observer, &never).expect_err("a failure").to_string()
        })
    };
    let threads: Vec<_> = ranks.map(start).collect();
    threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
}

#[test]
fn a_rank_that_cannot_go_on_is_named_by_all_others_with_its_reason() {
    let settings = Settings { log_every: 3, ..digits() };
    let said = ends(vec![settings; 3], |rank| rank == 1);
    let reason = "cannot write metrics.jsonl: no space left";
    assert_eq!(said[1], reason);
    for other in [&said[0], &said[2]] {
        assert!(other.contains("rank 1 gave up") && other.contains(reason), "{said:?}");
    }
}

#[test]
fn a_rank_with_other_settings_is_named_before_the_first_step() {
    let other = Settings { lr: 0.3, ..digits() };
    let said = ends(vec![digits(), digits(), other], |_| false);
    assert_eq!(said[0], "rank 2 runs something else: lr is 0.3 there, 0.02 here");
    assert_eq!(said[1], said[0]);
    assert_eq!(said[2], "rank 0 runs something else: lr is 0.02 there, 0.3 here");
}
