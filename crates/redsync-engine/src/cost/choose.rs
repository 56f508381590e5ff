//! From which size on a layer is worth compressing: the cost model's answer, from figures of machines and network.
//! What must hold: the answer is a number of bytes that replaces [`Config::dense_below`], so the plan follows from it by the
//! same rules as ever; rank 0's answer is everybody's.

use super::platform::Platform;
use super::step::{Compute, Step, Times};
use crate::config::{Config, Exchange, Method, Stage};
use crate::error::SyncError;
use crate::layer::{Kind, Layer};
use crate::plan;
use std::collections::BTreeSet;

/// Of plans that are so close to the fastest, the one that compresses least is taken: what is not compressed can neither
/// hurt the training nor depend on a prediction.
const CLOSE: f64 = 1.02;

/// A plan that was considered.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Candidate {
    /// Layers of fewer bytes are dense; `usize::MAX` leaves all dense.
    pub dense_below: usize,
    /// What a step then costs.
    pub times: Times,
}

/// Every plan that differs, from the one that compresses most to the one that compresses nothing.
pub fn candidates(
    layers: &[Layer],
    config: &Config,
    platform: &Platform,
    ranks: usize,
    compute: Compute,
) -> Result<Vec<Candidate>, SyncError> {
    let mut limits: BTreeSet<usize> = BTreeSet::from([usize::MAX]);
    // One rank has nobody to send to: compression would only delay its updates.
    if config.method != Method::Sgd && ranks > 1 {
        // A layer of which the density would send less than one element is better off dense.
        let worth =
            |layer: &&Layer| layer.kind != Kind::BiasOrNorm && layer.size as f64 * config.density >= 1.0;
        limits.extend(layers.iter().filter(worth).map(|layer| 4 * layer.size));
    }
    let consider = |dense_below| {
        let config = Config { dense_below: Some(dense_below), ..config.clone() };
        let choices = plan::choices(layers, &config)?;
        let step = Step { layers, choices: &choices, config: &config, platform, ranks, compute };
        Ok(Candidate { dense_below, times: step.times_at(Stage::Sparse(config.density)) })
    };
    limits.into_iter().map(consider).collect()
}

/// The size in bytes below which layers should be dense: `usize::MAX` if all should.
pub fn dense_below(
    layers: &[Layer],
    config: &Config,
    platform: &Platform,
    ranks: usize,
    compute: Compute,
) -> Result<usize, SyncError> {
    let all = candidates(layers, config, platform, ranks, compute)?;
    let fastest = all.iter().map(|candidate| candidate.times.step).fold(f64::INFINITY, f64::min);
    let close = all.iter().rev().find(|candidate| candidate.times.step <= fastest * CLOSE);
    Ok(close.map_or(usize::MAX, |candidate| candidate.dense_below))
}

/// The exchange and the size below which layers should be dense. An exchange that was chosen stays; otherwise owners, who keep what
/// they do not send on, must be worth it.
pub fn decide(
    layers: &[Layer],
    config: &Config,
    platform: &Platform,
    ranks: usize,
    compute: Compute,
) -> Result<(Exchange, usize), SyncError> {
    let consider = |exchange: Exchange| -> Result<(Exchange, usize, f64), SyncError> {
        let config = Config { exchange: Some(exchange), ..config.clone() };
        let limit = dense_below(layers, &config, platform, ranks, compute)?;
        let config = Config { dense_below: Some(limit), ..config };
        let choices = plan::choices(layers, &config)?;
        let step = Step { layers, choices: &choices, config: &config, platform, ranks, compute };
        Ok((exchange, limit, step.times().step))
    };
    let mut open = vec![Exchange::Gather, Exchange::Owners];
    if platform.ranks_per_host > 1 {
        open.push(Exchange::Hosts);
    }
    let all = config.exchange.map_or(open, |exchange| vec![exchange]);
    let all = all.into_iter().map(consider).collect::<Result<Vec<_>, _>>()?;
    let fastest = all.iter().map(|(.., time)| *time).fold(f64::INFINITY, f64::min);
    let first = all.iter().find(|(.., time)| *time <= fastest * CLOSE);
    Ok(first.map_or((config.exchange(), usize::MAX), |(exchange, limit, _)| (*exchange, *limit)))
}

#[cfg(test)]
mod tests {
    use super::super::platform::tests::round;
    use super::super::platform::{Link, Network};
    use super::*;
    use crate::config::Choice;
    use crate::models::{Model, NAMES};

    fn limit(model: &str, beta: f64, ranks: usize) -> usize {
        let model = Model::named(model).unwrap();
        let mut platform = Platform { network: Network::new(20e-6, beta), ..round() };
        // Above copying and updating, or compressing would pay without any network.
        platform.rates.select.carried.per = 4e-9;
        let config = Config { clip: model.recurrent.then_some(0.25), ..Config::default() };
        dense_below(&model.layers, &config, &platform, ranks, Compute::default()).unwrap()
    }

    #[test]
    fn slow_networks_compress_nearly_everything_and_fast_ones_nothing() {
        for name in NAMES {
            let limit_here = limit(name, 80e-9, 4);
            let layers = Model::named(name).unwrap().layers;
            let weights = || layers.iter().filter(|layer| layer.kind != Kind::BiasOrNorm);
            let dense: usize = weights().map(|layer| layer.size).filter(|size| 4 * size < limit_here).sum();
            assert!(20 * dense < weights().map(|layer| layer.size).sum(), "{name}: {dense}");
            assert_eq!(limit(name, 1e-13, 4), usize::MAX, "{name}");
        }
    }

    #[test]
    fn with_very_many_ranks_dense_wins_again() {
        assert!(limit("alexnet", 0.8e-9, 8) < usize::MAX);
        let model = Model::named("vgg16").unwrap();
        let platform = Platform { network: Network::new(20e-6, 0.8e-9), ..round() };
        let decided =
            |ranks| decide(&model.layers, &Config::default(), &platform, ranks, Compute::default()).unwrap();
        assert_eq!(decided(2).0, Exchange::Gather);
        assert!(decided(512).0 == Exchange::Owners && decided(512).1 < usize::MAX, "{:?}", decided(512));
        assert_eq!(limit("alexnet", 0.8e-9, 1 << 16), usize::MAX);
    }

    #[test]
    fn ranks_that_share_the_link_of_their_host_sum_there_first() {
        let model = Model::named("vgg16-cifar").unwrap();
        let decided = |beta, ranks_per_host, ranks| {
            let platform = Platform { network: Network::new(20e-6, beta), ranks_per_host, ..round() };
            decide(&model.layers, &Config::default(), &platform, ranks, Compute::default()).unwrap().0
        };
        assert_eq!(decided(80e-9, 8, 64), Exchange::Hosts);
        assert_ne!(decided(80e-9, 1, 64), Exchange::Hosts);
        // Not worth a pass over all gradients where bytes cost nothing.
        assert_ne!(decided(1e-13, 8, 16), Exchange::Hosts);
    }

    #[test]
    fn one_rank_has_nothing_to_gain() {
        assert_eq!(limit("vgg16-cifar", 80e-9, 1), usize::MAX);
    }

    #[test]
    fn the_choice_is_never_predicted_to_be_slower_than_dense_or_the_size_limit() {
        for name in NAMES {
            let model = Model::named(name).unwrap();
            for beta in [80e-9, 8e-9, 0.8e-9, 0.08e-9] {
                for ranks in [2, 4, 64] {
                    let platform = Platform { network: Network::new(20e-6, beta), ..round() };
                    let time = |method, dense_below| {
                        let config = Config { method, dense_below: Some(dense_below), ..Config::default() };
                        let choices = plan::choices(&model.layers, &config).unwrap();
                        let compute = Compute::default();
                        let (layers, choices) = (&model.layers[..], &choices[..]);
                        Step { layers, choices, config: &config, platform: &platform, ranks, compute }
                            .times()
                            .step
                    };
                    let config = Config::default();
                    let auto =
                        dense_below(&model.layers, &config, &platform, ranks, Compute::default()).unwrap();
                    let best = time(Method::Sgd, 0).min(time(Method::RgcAsq, 128 << 10));
                    assert!(time(Method::RgcAsq, auto) <= best * CLOSE * 1.0001, "{name} {beta} {ranks}");
                }
            }
        }
    }

    #[test]
    fn choices_of_the_user_are_kept() {
        let model = Model::named("alexnet").unwrap();
        let mut config = Config::default();
        config.layers.insert("classifier.1.weight".into(), Choice::Dense);
        let platform = Platform {
            network: Network { sparse: Link::new(1e-5, 1e-7), ..Network::new(1e-5, 1e-7) },
            ..round()
        };
        let limit = dense_below(&model.layers, &config, &platform, 4, Compute::default()).unwrap();
        let config = Config { dense_below: Some(limit), ..config };
        let choices = plan::choices(&model.layers, &config).unwrap();
        let at = model.layers.iter().position(|layer| layer.name == "classifier.1.weight").unwrap();
        assert_eq!(choices[at], Choice::Dense);
        assert!(choices.iter().any(|choice| *choice != Choice::Dense));
    }
}
