//! Platform files: what is known of machines and their network, by name or by path.
//! Comes in: a name, a path or `alpha=..,beta=..`. Goes out: checked figures. What must hold: a wrong name, key or figure is
//! one line that says which, and what would be right.

use anyhow::{Context, Result, anyhow, bail};
use redsync_engine::cost::{Network, Platform, Rates};
use serde::{Deserialize, Serialize};
use std::path::Path;

/// The platforms that come with the program.
const KNOWN: [(&str, &str); 10] = [
    ("cpu-core", include_str!("../../../lab/platforms/cpu-core.toml")),
    ("piz-daint", include_str!("../../../lab/platforms/piz-daint.toml")),
    ("muradin", include_str!("../../../lab/platforms/muradin.toml")),
    ("1gbe", include_str!("../../../lab/platforms/1gbe.toml")),
    ("10gbe", include_str!("../../../lab/platforms/10gbe.toml")),
    ("25gbe", include_str!("../../../lab/platforms/25gbe.toml")),
    ("100gbe", include_str!("../../../lab/platforms/100gbe.toml")),
    ("100mbit", include_str!("../../../lab/platforms/100mbit.toml")),
    ("home-fibre", include_str!("../../../lab/platforms/home-fibre.toml")),
    ("home-cable", include_str!("../../../lab/platforms/home-cable.toml")),
];

/// A platform file.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct File {
    /// What it is, and where its figures are from.
    pub about: String,
    /// Whether layers are treated as in the paper, or as this program does.
    #[serde(default)]
    pub paper: bool,
    /// Floating-point operations per second that training sustains on one rank; 0 if not known.
    #[serde(default)]
    pub flops: f64,
    /// Whether the model is computed on what compresses.
    #[serde(default)]
    pub on_cores: bool,
    /// Cores of a rank, or the one device that does everything.
    pub cores: f64,
    #[serde(default = "one")]
    pub contention: f64,
    #[serde(default)]
    pub start: f64,
    #[serde(default = "yes")]
    pub background: bool,
    /// Ranks that share a host and its link.
    #[serde(default = "single")]
    pub ranks_per_host: usize,
    pub network: Network,
    /// The platform whose rates are used, instead of `rates`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rates_of: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rates: Option<Rates>,
}

fn one() -> f64 {
    1.0
}

fn single() -> usize {
    1
}

fn yes() -> bool {
    true
}

/// A platform, ready to predict on.
#[derive(Clone, Debug)]
pub struct Described {
    pub about: String,
    /// Whether layers are treated as in the paper.
    pub paper: bool,
    pub flops: f64,
    pub on_cores: bool,
    pub platform: Platform,
}

fn names() -> String {
    KNOWN.map(|(name, _)| name).join(", ")
}

/// The platform of a name or a path.
pub fn load(which: &str) -> Result<Described> {
    let file = read(which)?;
    let rates = match (&file.rates, &file.rates_of) {
        (Some(rates), None) => *rates,
        (None, Some(other)) => {
            let other = read(other).with_context(|| format!("{which}: rates_of"))?;
            other.rates.with_context(|| format!("{which}: the platform of rates_of has none of its own"))?
        }
        _ => bail!("{which}: give either rates or rates_of"),
    };
    let platform = Platform {
        name: which.to_string(),
        cores: file.cores,
        contention: file.contention,
        start: file.start,
        background: file.background,
        ranks_per_host: file.ranks_per_host,
        network: file.network,
        rates,
    };
    platform.check().with_context(|| which.to_string())?;
    if !(file.flops.is_finite() && file.flops >= 0.0) {
        bail!("{which}: flops is {}: expected a number from 0 on", file.flops);
    }
    let File { about, paper, flops, on_cores, .. } = file;
    Ok(Described { about, paper, flops, on_cores, platform })
}

fn read(which: &str) -> Result<File> {
    if let Some((_, text)) = KNOWN.iter().find(|(name, _)| *name == which) {
        return parse(text).with_context(|| which.to_string());
    }
    if !Path::new(which).exists() {
        bail!("unknown platform {which}: neither a file nor one of {}", names());
    }
    let text = std::fs::read_to_string(which).with_context(|| format!("cannot read {which}"))?;
    parse(&text).with_context(|| which.to_string())
}

/// The first line of what the parser says is enough; the rest draws the place.
fn parse(text: &str) -> Result<File> {
    toml::from_str(text).map_err(|error| {
        let line =
            error.span().map_or(0, |span| text[..span.start.min(text.len())].matches('\n').count() + 1);
        anyhow!("line {line}: {}", error.message().lines().next().unwrap_or("not a platform file"))
    })
}

/// A network: the name or the path of a platform, or `alpha=SECONDS,beta=SECONDS_PER_BYTE`.
pub fn network(text: &str) -> Result<Network> {
    if !text.contains('=') {
        return Ok(load(text)?.platform.network);
    }
    let (mut alpha, mut beta) = (None, None);
    for part in text.split(',') {
        let (name, value) = part.split_once('=').context("expected alpha=..,beta=..")?;
        let value: f64 = value.trim().parse().map_err(|_| anyhow!("{name} is {value}: expected a number"))?;
        match name.trim() {
            "alpha" => alpha = Some(value),
            "beta" => beta = Some(value),
            other => bail!("unknown figure {other}: expected alpha (seconds) and beta (seconds per byte)"),
        }
    }
    let network = Network::new(alpha.context("alpha is missing")?, beta.context("beta is missing")?);
    // The rest of the platform is sound, so what is wrong is the network.
    Platform { cores: 1.0, contention: 1.0, network: network.clone(), ..Platform::default() }.check()?;
    Ok(network)
}

/// Writes measured figures to a file, atomically.
pub fn save(path: &Path, platform: &Platform) -> Result<()> {
    let file = File {
        about: platform.name.clone(),
        paper: false,
        flops: 0.0,
        on_cores: false,
        cores: platform.cores,
        contention: platform.contention,
        start: platform.start,
        background: platform.background,
        ranks_per_host: platform.ranks_per_host,
        network: platform.network.clone(),
        rates_of: None,
        rates: Some(platform.rates),
    };
    let text = toml::to_string(&file).context("cannot write TOML")?;
    crate::files::write(path, text.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_known_platform_is_sound() {
        for (name, _) in KNOWN {
            let described = load(name).unwrap_or_else(|error| panic!("{name}: {error:#}"));
            assert!(!described.about.is_empty());
        }
    }

    #[test]
    fn networks_are_named_or_given() {
        assert_eq!(network("alpha=25e-6,beta=8e-9").unwrap(), Network::new(25e-6, 8e-9));
        let message = |text| format!("{:#}", network(text).unwrap_err());
        assert_eq!(message("alpha=1e-5,beta=-1"), "beta of the sparse link is -1: expected a number above 0");
        assert_eq!(message("alpha=1e-5"), "beta is missing");
        assert_eq!(message("alpha=x,beta=1"), "alpha is x: expected a number");
        assert!(message("gamma=1").contains("unknown figure gamma"));
        assert!(message("11gbe").starts_with("unknown platform 11gbe: neither a file nor one of cpu-core, "));
    }

    #[test]
    fn a_measured_platform_comes_back_from_its_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("here.toml");
        let mut platform = load("10gbe").unwrap().platform;
        platform.network.dense.alone = vec![(100.0, 1e-3), (1e6, 2e-3)];
        save(&path, &platform).unwrap();
        let back = load(path.to_str().unwrap()).unwrap().platform;
        assert_eq!(back, Platform { name: path.to_str().unwrap().into(), ..platform });
    }

    #[test]
    fn a_wrong_key_is_one_line_that_names_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("wrong.toml");
        std::fs::write(&path, "about = 'x'\ncores = 1\nspeed = 3\n").unwrap();
        let message = format!("{:#}", load(path.to_str().unwrap()).unwrap_err());
        assert!(
            message.contains("line 3") && message.contains("speed") && !message.contains('\n'),
            "{message}"
        );
    }
}
