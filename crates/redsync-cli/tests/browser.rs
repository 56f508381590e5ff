//! The report in a real browser. Needs chromium, which `./test` installs; run by hand with `--ignored`.
//! What must hold: charts are drawn, in the light and in the dark, and on a phone nothing is wider than the screen.
#![allow(missing_docs, clippy::unwrap_used)]

use serde_json::json;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn output_of(dir: &Path, name: &str, arguments: &[&str]) -> PathBuf {
    let output =
        Command::new(env!("CARGO_BIN_EXE_redsync")).args(arguments).output().expect("the program runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let path = dir.join(name);
    std::fs::write(&path, output.stdout).unwrap();
    path
}

/// The metrics of a short run, as `redsync train` writes them.
fn metrics(runs: &Path, method: &str, seed: u64, bytes: u64) {
    let run = runs.join(format!("run-{seed}"));
    std::fs::create_dir_all(&run).unwrap();
    let ms = json!({"forward": 10, "backward": 20, "select": 3, "encode": 0.2, "exchange": 5, "decode": 0.3, "apply": 1, "update": 2,
                    "total": 40});
    let mut lines =
        vec![json!({"kind": "run", "model": "vgg-small", "data": "cifar10", "method": method, "workers": 4,
                                "seed": seed, "parameters": 3_000_000})];
    for epoch in 1..=8 {
        let loss = 2.0 / f64::from(epoch) + 0.1 * seed as f64;
        lines.push(json!({"kind": "step", "epoch": epoch, "step": 20 * epoch, "loss": loss, "ms": ms, "exposed_ms": 1.5,
                          "bytes_sent": bytes, "dense_bytes": 12_000_000}));
        for layer in 1..=3 {
            lines.push(json!({"kind": "layer", "epoch": epoch, "name": format!("features.{layer}.weight"),
                              "size": 100_000 * layer, "choice": "sparse", "density": 0.001,
                              "residual_norm": loss * f64::from(layer), "bytes_sent": 1500}));
        }
        lines.push(json!({"kind": "epoch", "epoch": epoch, "train_loss": loss, "test_loss": 1.1 * loss,
                          "metric": 1.0 - loss / 3.0, "metric_name": "accuracy", "seconds": 3}));
    }
    lines.push(json!({"kind": "final", "loss": 0.3, "metric": 0.9, "bytes_sent": 1e6, "dense_bytes": 9e8, "seconds": {"total": 24}}));
    let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
    std::fs::write(run.join("metrics.jsonl"), text).unwrap();
}

fn report(dir: &Path) -> PathBuf {
    let plan = ["plan", "--platform", "10gbe", "--model", "vgg16-cifar", "--ranks", "2", "--json"];
    let runs = dir.join("runs");
    metrics(&runs, "sgd", 1, 12_000_000);
    metrics(&runs, "rgc+asq", 2, 9_000);
    let inputs = [
        runs,
        output_of(
            dir,
            "simulate.json",
            &["simulate", "--model", "alexnet", "--platform", "piz-daint", "--json"],
        ),
        output_of(dir, "plan.json", &plan),
        output_of(dir, "sync.json", &["bench", "sync", "--ranks", "2", "--steps", "2", "--json"]),
        output_of(dir, "select-1.json", &["bench", "select", "--n", "16K", "--steps", "3", "--json"]),
        output_of(dir, "select-2.json", &["bench", "select", "--n", "256K", "--steps", "3", "--json"]),
    ];
    let page = dir.join("report.html");
    let mut command = Command::new(env!("CARGO_BIN_EXE_redsync"));
    let output = command.arg("report").args(&inputs).arg("--out").arg(&page).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    page
}

fn chromium(dir: &Path, arguments: &[&str], page: &Path) -> Output {
    let profile = tempfile::tempdir_in(dir).unwrap();
    let output = Command::new("timeout")
        .args(["180", "chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"])
        .args([
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--no-first-run",
        ])
        .arg("--allow-file-access-from-files")
        .arg(format!("--user-data-dir={}", profile.path().display()))
        .args(arguments)
        .arg(format!("file://{}", page.display()))
        .output()
        .expect("chromium runs: apt-get install chromium");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    output
}

/// The pixels of a screenshot.
fn screenshot(dir: &Path, page: &Path, name: &str, arguments: &[&str]) -> Vec<[u8; 3]> {
    // To look at them oneself: REDSYNC_SCREENSHOTS=DIRECTORY.
    let keep = std::env::var_os("REDSYNC_SCREENSHOTS").map(PathBuf::from);
    let shot = keep.unwrap_or_else(|| dir.to_path_buf()).join(name);
    let file = format!("--screenshot={}", shot.display());
    chromium(dir, &[arguments, &[file.as_str()]].concat(), page);
    let decoder = png::Decoder::new(std::io::BufReader::new(std::fs::File::open(&shot).unwrap()));
    let mut reader = decoder.read_info().unwrap();
    let mut bytes = vec![0; reader.output_buffer_size().unwrap()];
    let info = reader.next_frame(&mut bytes).unwrap();
    let channels = info.color_type.samples();
    bytes[..info.buffer_size()].chunks_exact(channels).map(|p| [p[0], p[1], p[2]]).collect()
}

fn count(pixels: &[[u8; 3]], colour: [u8; 3]) -> usize {
    pixels.iter().filter(|pixel| **pixel == colour).count()
}

const BLUE: [u8; 3] = [0x00, 0x72, 0xb2];
const ORANGE: [u8; 3] = [0xe6, 0x9f, 0x00];

#[test]
#[ignore = "needs chromium; ./test runs it"]
fn charts_are_drawn_in_the_light_and_in_the_dark() {
    let dir = tempfile::tempdir().unwrap();
    let page = report(dir.path());
    let html = std::fs::read_to_string(&page).unwrap();
    for title in ["training loss against bytes", "training loss against time", "rgc+asq, owners"] {
        assert!(html.contains(title), "{title}");
    }
    let window = "--window-size=1200,3200";
    let light =
        screenshot(dir.path(), &page, "light.png", &[window, "--blink-settings=preferredColorScheme=1"]);
    let dark =
        screenshot(dir.path(), &page, "dark.png", &[window, "--blink-settings=preferredColorScheme=0"]);
    for (pixels, background) in [(&light, [0xff, 0xff, 0xff]), (&dark, [0x14, 0x17, 0x1a])] {
        assert_eq!(pixels[0], background);
        assert!(
            count(pixels, BLUE) > 500 && count(pixels, ORANGE) > 500,
            "the lines of two methods are there"
        );
        // Text on either: many pixels far from the background.
        let far = |pixel: &&[u8; 3]| pixel.iter().zip(background).all(|(a, b)| a.abs_diff(b) > 120);
        assert!(pixels.iter().filter(far).count() > 5_000);
    }
}

#[test]
#[ignore = "needs chromium; ./test runs it"]
fn on_a_phone_nothing_is_wider_than_the_screen() {
    let dir = tempfile::tempdir().unwrap();
    report(dir.path());
    // Headless windows have a least width, frames have none.
    let around = "<title></title><iframe id=f src=report.html width=360 height=800></iframe><script>onload = () => {\
                  const d = document.getElementById('f').contentDocument.documentElement;\
                  document.title = ['widths', d.scrollWidth, d.clientWidth, d.querySelectorAll('svg').length].join(' ');\
                  }</script>";
    let phone = dir.path().join("phone.html");
    std::fs::write(&phone, around).unwrap();
    let output = chromium(dir.path(), &["--dump-dom", "--virtual-time-budget=10000"], &phone);
    let dom = String::from_utf8_lossy(&output.stdout).into_owned();
    let title = dom.split("<title>").nth(1).and_then(|rest| rest.split("</title>").next()).expect("a title");
    let words: Vec<&str> = title.split(' ').collect();
    assert!(words.len() == 4 && words[1] == words[2], "{title}");
    assert!(words[3].parse::<usize>().unwrap() >= 10, "{title}");
}
