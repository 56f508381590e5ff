//! The commands as a user runs them: what goes out on which stream, and with which status.
#![allow(missing_docs, clippy::unwrap_used)]

use std::path::Path;
use std::process::{Command, Output};

fn redsync(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_redsync")).args(arguments).output().expect("the program runs")
}

/// What a refusal says.
fn refusal(arguments: &[&str], status: i32) -> String {
    let output = redsync(arguments);
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(status), "{arguments:?}: {said}");
    assert!(output.stdout.is_empty(), "{arguments:?}");
    said
}

fn one_line(arguments: &[&str], status: i32) -> String {
    let said = refusal(arguments, status);
    assert_eq!(said.lines().count(), 1, "{said}");
    said
}

fn json(arguments: &[&str]) -> serde_json::Value {
    let output = redsync(arguments);
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("one JSON document and nothing else")
}

#[test]
fn bad_input_is_one_clear_line_and_status_2() {
    let dir = tempfile::tempdir().unwrap();
    let empty = dir.path().join("empty.txt");
    std::fs::write(&empty, "# no layers\n").unwrap();
    let empty = empty.to_str().unwrap();
    assert!(
        one_line(&["plan", "--network", "alpha=1e-5,beta=-8e-9"], 2).contains("beta of the sparse link is -")
    );
    assert!(one_line(&["plan", "--layers", empty], 2).contains("empty.txt: no layers"));
    assert!(one_line(&["plan", "--network", "11gbe"], 2).contains("unknown platform 11gbe"));
    assert!(one_line(&["plan", "--platform", "nowhere"], 2).contains("unknown platform nowhere"));
    assert!(one_line(&["simulate", "--platform", "11gbe"], 2).contains("unknown platform 11gbe"));
    assert!(one_line(&["simulate", "--layers", empty], 2).contains("no layers"));
    assert!(one_line(&["simulate", "--platform", "cpu-core"], 2).contains("give --backward-ms"));
    assert!(refusal(&["plan", "--model", "alexnt"], 2).contains("alexnet"));
    assert!(refusal(&["plan", "--ranks", "0"], 2).contains("--ranks"));
    assert!(refusal(&["plan", "--backward-ms=-1"], 2).contains("--backward-ms"));
    assert!(refusal(&["report"], 2).contains("RUNS"));
    assert!(refusal(&["report", "--gbit", "0", "x"], 2).contains("above 0"));
}

#[test]
fn a_plan_from_described_machines_has_the_documented_fields() {
    let arguments = [
        "plan",
        "--platform",
        "10gbe",
        "--model",
        "alexnet",
        "--ranks",
        "8",
        "--backward-ms",
        "20",
        "--json",
    ];
    let plan = json(&arguments);
    assert_eq!(plan["layers"].as_array().unwrap().len(), 16);
    for layer in plan["layers"].as_array().unwrap() {
        assert!(["dense", "sparse"].contains(&layer["choice"].as_str().unwrap()));
        assert!(layer["name"].is_string() && layer["size"].is_u64() && layer["why"].is_string());
    }
    for method in ["sgd", "rgc", "rgc+asq", "auto"] {
        assert!(plan["predicted_ms"][method].as_f64().unwrap() >= 20.0, "{method}");
    }
    assert!(plan["speedup"].as_f64().unwrap() > 1.0);
    assert!(plan["dense_wins_from_ranks"].as_u64().unwrap() > 8);
    assert!(plan["verdict"].as_str().unwrap().starts_with("It helps"));
}

#[test]
fn a_plan_measured_among_threads_can_be_saved_and_used_again() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("here.toml");
    let file = file.to_str().unwrap();
    let measured = json(&["plan", "--comm", "local", "--ranks", "2", "--save", file, "--json"]);
    let again = json(&["plan", "--platform", file, "--ranks", "2", "--json"]);
    assert_eq!(measured["predicted_ms"], again["predicted_ms"]);
    assert_eq!(measured["layers"], again["layers"]);
}

#[test]
fn a_simulation_has_every_method_and_number_of_ranks() {
    let simulation = json(&["simulate", "--model", "vgg16", "--platform", "piz-daint", "--json"]);
    let curves = simulation["curves"].as_array().unwrap();
    let names: Vec<&str> = curves.iter().map(|curve| curve["method"].as_str().unwrap()).collect();
    assert_eq!(names, ["sgd", "rgc", "rgc+asq", "rgc-naive", "rgc+asq, owners", "auto"]);
    for curve in curves {
        let rows = curve["rows"].as_array().unwrap();
        let ranks: Vec<u64> = rows.iter().map(|row| row["ranks"].as_u64().unwrap()).collect();
        assert_eq!(ranks, [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]);
    }
}

#[test]
fn a_simulation_of_adamw_has_its_methods_and_local_steps() {
    let arguments =
        ["--model", "gpt-small", "--platform", "10gbe", "--optimizer", "adamw", "--every", "8,30"];
    let rest = ["--backward-ms", "100", "--ranks", "4,16", "--json"];
    let simulation = json(&[&["simulate"], &arguments[..], &rest].concat());
    let curves = simulation["curves"].as_array().unwrap();
    let names: Vec<&str> = curves.iter().map(|curve| curve["method"].as_str().unwrap()).collect();
    assert_eq!(
        names,
        ["sgd", "rgc", "rgc+2bit", "rgc+asq", "every 8", "every 30", "rgc+2bit, owners", "auto"]
    );
    assert_eq!(simulation["density"], 0.01);
    let bytes = |at: usize| curves[at]["rows"][1]["bytes_on_link"].as_f64().unwrap();
    assert!((1..5).all(|at| bytes(at) > bytes(at + 1)));
}

fn save(dir: &Path, name: &str, arguments: &[&str]) -> String {
    let path = dir.join(name);
    std::fs::write(&path, json(arguments).to_string()).unwrap();
    path.to_str().unwrap().to_string()
}

#[test]
fn a_report_is_one_file_that_fetches_nothing_and_a_damaged_input_leaves_the_old_one() {
    let dir = tempfile::tempdir().unwrap();
    let simulation = save(dir.path(), "simulation.json", &["simulate", "--json"]);
    let selection =
        save(dir.path(), "select.json", &["bench", "select", "--n", "16K", "--steps", "2", "--json"]);
    let page = dir.path().join("report.html");
    let out = page.to_str().unwrap();
    let output = redsync(&["report", &simulation, &selection, "--out", out]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let html = std::fs::read_to_string(&page).unwrap();
    assert!(!html.contains("http") && !html.contains("<script") && !html.contains("<link"));
    assert!(html.contains("vgg16-cifar on 10gbe: scaling") && html.contains("Selection against size"));
    std::fs::write(dir.path().join("damaged.json"), "{\"curves\": [").unwrap();
    let said = one_line(&["report", dir.path().join("damaged.json").to_str().unwrap(), "--out", out], 1);
    assert!(said.contains("damaged.json") && said.contains("EOF"), "{said}");
    assert_eq!(std::fs::read_to_string(&page).unwrap(), html);
}
