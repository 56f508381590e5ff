//! What users of `redsync train` and `redsync compare` can rely on: output, exit status, one clear line on every error.

use serde_json::Value;
use std::path::Path;
use std::process::{Command, Output};

fn redsync(dir: &Path, args: &[&str]) -> Output {
    let program = env!("CARGO_BIN_EXE_redsync");
    // No cache of the user who runs the tests.
    let home = dir.join("home");
    Command::new(program)
        .args(args)
        .current_dir(dir)
        .env("XDG_CACHE_HOME", home)
        .output()
        .expect("the program runs")
}

/// A refusal: its status, and its one line.
fn refusal(dir: &Path, args: &[&str]) -> (i32, String) {
    let output = redsync(dir, args);
    let text = String::from_utf8(output.stderr).expect("text");
    assert!(output.stdout.is_empty(), "results beside an error");
    assert_eq!(text.trim_end().lines().count(), 1, "{text}");
    (
        output.status.code().expect("an exit status"),
        text.trim_end().trim_start_matches("redsync: ").to_string(),
    )
}

fn json(output: &Output) -> Value {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("one JSON document and nothing else")
}

#[test]
fn the_summary_is_one_json_document_with_all_that_was_promised() {
    let dir = tempfile::tempdir().expect("a directory");
    let summary =
        json(&redsync(dir.path(), &["train", "--epochs", "2", "--workers", "2", "--json", "--out", "run"]));
    for key in ["model", "data", "method", "workers", "seed", "bytes_sent", "dense_bytes", "replica_hash"] {
        assert!(!summary[key].is_null(), "{key}");
    }
    assert_eq!(summary["optimizer"], "nesterov");
    assert_eq!((&summary["momentum"], &summary["every"]), (&Value::from(0.9), &Value::from(1)));
    for key in ["forward", "backward", "select", "encode", "exchange", "decode", "apply", "update", "total"] {
        assert!(summary["seconds"][key].is_number(), "{key}");
    }
    let of = |key: &str| summary["traffic"][key].as_u64().expect(key);
    let parts: u64 = ["messages", "rest", "headers", "warm_up"].map(of).iter().sum();
    assert_eq!(
        (Some(parts), Some(of("dense"))),
        (summary["bytes_sent"].as_u64(), summary["dense_bytes"].as_u64())
    );
    assert!(of("warm_up") > 0 && of("dense") > 20 * parts, "{}", summary["traffic"]);
    assert_eq!(summary["epochs"].as_array().map(Vec::len), Some(2));
    assert!(summary["epochs"][1]["loss"].as_f64() < summary["epochs"][0]["loss"].as_f64());
    assert!(summary["final"]["metric"].as_f64() > Some(0.8));
    let lines = std::fs::read_to_string(dir.path().join("run/metrics.jsonl")).expect("metrics");
    let kind = |line| serde_json::from_str::<Value>(line).expect("JSON")["kind"].clone();
    let kinds: Vec<Value> = lines.lines().map(kind).collect();
    for kind in ["run", "step", "epoch", "layer", "final"] {
        assert!(kinds.contains(&Value::from(kind)), "{kind}");
    }
    let files = std::fs::read_dir(dir.path().join("run")).expect("a directory").flatten();
    assert_eq!(files.filter(|file| file.file_name().to_string_lossy().contains("tfevents")).count(), 1);
}

#[test]
fn without_options_the_same_training_runs_dense_and_compressed_and_one_table_compares_them() {
    let dir = tempfile::tempdir().expect("a directory");
    let output = redsync(dir.path(), &["train"]);
    let said = String::from_utf8(output.stdout).expect("text");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let cells = |what: &str| -> Vec<String> {
        let line = said.lines().find(|line| line.contains(what)).unwrap_or_else(|| panic!("{what}: {said}"));
        line.split(['│', '┆']).map(|cell| cell.trim().to_string()).filter(|cell| !cell.is_empty()).collect()
    };
    let percent = |cell: &str| cell.trim_end_matches('%').parse::<f64>().expect("percent");
    let [_, dense, compressed] = &cells("accuracy on the test data")[..] else { panic!("{said}") };
    assert!(percent(dense) > 95.0 && percent(compressed) > percent(dense) - 1.5, "{said}");
    let sent = cells("sent by each worker");
    let ratio: f64 = sent[3].trim_start_matches("1/").parse().expect("a ratio");
    assert!(sent[1] == "1.45 GB" && ratio > 400.0, "{sent:?}");
    let gain = |network: &str| cells(network)[3].trim_end_matches(" x").parse::<f64>().expect("a gain");
    let gains = ["100 Mbit/s", "1 Gbit/s", "10 Gbit/s"].map(gain);
    assert!(gains[0] > gains[1] && gains[1] > gains[2], "{gains:?}");
    let end = |method: &str| {
        let text = std::fs::read_to_string(
            dir.path().join("runs/digits-cnn-001").join(method).join("metrics.jsonl"),
        );
        serde_json::from_str::<Value>(text.expect("metrics").lines().last().expect("a line")).expect("JSON")
    };
    for method in ["sgd", "rgc+asq"] {
        let hash = end(method)["replica_hash"].as_str().expect("a hash").to_string();
        assert!(said.contains(&hash), "{method} {hash}: {said}");
    }
    assert!(said.contains("Next: `redsync report runs/digits-cnn-001`"), "{said}");
}

#[test]
fn compare_runs_every_method_on_the_same_seed() {
    let dir = tempfile::tempdir().expect("a directory");
    let list = json(&redsync(
        dir.path(),
        &["compare", "--epochs", "1", "--workers", "2", "--warm-up", "none", "--json"],
    ));
    let all = list.as_array().expect("a list");
    let methods: Vec<&str> = all.iter().filter_map(|summary| summary["method"].as_str()).collect();
    assert_eq!(methods, ["sgd", "rgc", "rgc+asq"]);
    let sent: Vec<u64> = all.iter().filter_map(|summary| summary["bytes_sent"].as_u64()).collect();
    assert!(sent[0] > sent[1] && sent[1] > sent[2], "{sent:?}");
}

#[test]
fn wrong_names_are_refused_with_the_nearest_right_one() {
    let dir = tempfile::tempdir().expect("a directory");
    for (arg, expected) in [
        ("--model=vgg-smal", "unknown model vgg-smal: did you mean vgg-small?"),
        ("--data=cifar1", "unknown data set cifar1: did you mean cifar10?"),
        ("--method=rcg", "unknown method rcg: did you mean rgc?"),
        ("--optimizer=adam", "unknown optimizer adam: did you mean adamw?"),
        ("--beta2=0.9", "beta2 is an option of adamw: give --optimizer adamw, too"),
        ("--schedule=cosin", "unknown schedule cosin: did you mean cosine?"),
        ("--warm-up=rampe", "unknown warm-up rampe: did you mean ramp?"),
        ("--comm=mpo", "unknown communicator mpo for --comm: did you mean mpi?"),
        ("--lr=-1", "lr must be a positive number, got -1"),
        ("--workers=0", "workers must be at least 1, got 0"),
        ("--resume", "--resume needs --checkpoint-dir: the directory to continue from"),
        ("--threads=0", "threads must be at least 1, got 0"),
        ("--checkpoint-every=2", "--checkpoint-every needs --checkpoint-dir: the directory to write to"),
    ] {
        assert_eq!(refusal(dir.path(), &["train", arg]), (2, expected.to_string()));
    }
    let both = refusal(dir.path(), &["train", "--auto", "--paper"]);
    assert_eq!(
        both,
        (2, "--auto and --paper cannot be combined: both decide which layers are compressed".to_string())
    );
    assert!(!dir.path().join("runs").exists(), "a refused run leaves nothing behind");
}

#[test]
fn a_configuration_file_completes_the_command_line() {
    let dir = tempfile::tempdir().expect("a directory");
    let write = |text: &str| std::fs::write(dir.path().join("run.toml"), text).expect("a file");
    write("epochs = 1\nworkers = 2\nseed = 5\nmethod = \"rgc\"\nbatch-size = 8\n");
    let summary = json(&redsync(dir.path(), &["train", "--config", "run.toml", "--seed", "6", "--json"]));
    assert_eq!(
        (&summary["seed"], &summary["method"], &summary["workers"]),
        (&6.into(), &"rgc".into(), &2.into())
    );
    write("epoch = 1\n");
    let (status, line) = refusal(dir.path(), &["train", "--config", "run.toml"]);
    assert_eq!((status, &*line), (2, "run.toml: unknown key epoch: did you mean epochs?"));
    write("seed = 1\nepochs = \"many\"\n");
    let (status, line) = refusal(dir.path(), &["train", "--config", "run.toml"]);
    assert!(status == 2 && line.starts_with("run.toml line 2: invalid type: string"), "{line}");
    write("epochs = = 3\n");
    assert_eq!(refusal(dir.path(), &["train", "--config", "run.toml"]).0, 2);
    let (status, line) = refusal(dir.path(), &["train", "--config", "none.toml"]);
    assert!(status == 1 && line.starts_with("cannot read none.toml"), "{line}");
}

#[test]
fn missing_and_damaged_data_say_what_to_do() {
    let dir = tempfile::tempdir().expect("a directory");
    let (status, line) = refusal(dir.path(), &["train", "--model", "lstm-small", "--data-dir", "here"]);
    assert!(status == 1 && line.starts_with("ptb was not found in") && line.contains("--data-dir"), "{line}");
    let cifar = dir.path().join("cifar10");
    std::fs::create_dir(&cifar).expect("a directory");
    for file in ["data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch"]
    {
        std::fs::write(cifar.join(format!("{file}.bin")), b"no images").expect("a file");
    }
    let (status, line) = refusal(dir.path(), &["train", "--model", "vgg-small", "--data-dir", "."]);
    assert!(status == 1 && line.contains("data_batch_1.bin"), "{line}");
    let (status, line) = refusal(dir.path(), &["train", "--model", "lstm-small", "--data", "digits"]);
    assert_eq!((status, &*line), (1, "the model lstm-small takes words, but the data are images"));
}

#[test]
fn a_run_that_was_stopped_is_told_and_resumed_to_the_same_weights() {
    let dir = tempfile::tempdir().expect("a directory");
    let base = ["train", "--epochs", "2", "--workers", "2", "--json"];
    let with = |more: &[&str]| redsync(dir.path(), &[&base[..], more].concat());
    let plain = json(&with(&["--out", "plain"]));
    let stopped = with(&["--out", "a", "--checkpoint-dir", "kept", "--stop-after", "50"]);
    assert_eq!(stopped.status.code(), Some(1));
    let line = String::from_utf8_lossy(&stopped.stderr).lines().last().unwrap_or_default().to_string();
    assert!(line.contains("interrupted after 50 steps") && line.contains("--resume"), "{line}");
    let resumed = json(&with(&["--out", "a", "--checkpoint-dir", "kept", "--resume"]));
    assert_eq!(resumed["replica_hash"], plain["replica_hash"]);
    // The file of the resumed run tells every epoch once, and nobody else's run writes over it.
    let metrics = || std::fs::read_to_string(dir.path().join("a/metrics.jsonl")).expect("metrics");
    assert_eq!(metrics().lines().filter(|line| line.starts_with("{\"kind\":\"epoch\"")).count(), 2);
    let before = metrics();
    let (status, line) = refusal(dir.path(), &[&base[..], &["--out", "a"]].concat());
    assert!(
        status == 1
            && line.contains("metrics.jsonl belongs to another run: choose another directory with --out"),
        "{line}"
    );
    assert_eq!(metrics(), before);
    let (status, line) = refusal(dir.path(), &[&base[..], &["--checkpoint-dir", "kept"]].concat());
    assert!(status == 1 && line.contains("is there already"), "{line}");
    let other = ["--model", "resnet20", "--data", "digits", "--checkpoint-dir", "kept", "--resume"];
    let (status, line) = refusal(dir.path(), &[&base[..], &other].concat());
    assert!(status == 1 && line.contains("of another run: model was digits-cnn, is resnet20"), "{line}");
}

#[test]
#[cfg(unix)]
fn ctrl_c_ends_with_a_checkpoint() {
    use std::io::{BufRead, BufReader};
    use std::process::Stdio;
    let dir = tempfile::tempdir().expect("a directory");
    let mut child = Command::new(env!("CARGO_BIN_EXE_redsync"))
        .args(["train", "--epochs", "1000", "--workers", "2", "--out", "run"])
        .current_dir(dir.path())
        .stderr(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .expect("the program runs");
    let mut lines = BufReader::new(child.stderr.take().expect("a pipe")).lines().map_while(Result::ok);
    assert!(lines.any(|line| line.starts_with("epoch ")), "an epoch passes");
    let told = Command::new("kill").args(["-INT", &child.id().to_string()]).status().expect("kill runs");
    assert!(told.success());
    let rest: Vec<String> = lines.collect();
    assert_eq!(child.wait().expect("an end").code(), Some(1));
    let last = rest.last().cloned().unwrap_or_default();
    assert!(last.contains("interrupted after") && last.contains("run/checkpoint"), "{rest:?}");
    assert!(dir.path().join("run/checkpoint/latest").exists());
}
