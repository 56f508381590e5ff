//! What a step says it cost is what the wire needs.
#![allow(missing_docs, clippy::unwrap_used)]

mod common;

use common::{Replica, config, run};
use redsync_core::wire::FRAME_HEADER;
use redsync_core::{FrameWriter, IndexCode, Values};
use redsync_engine::{
    Config, Kind, Layer, LayerStats, Method, Preset, Rest, StepStats, Traffic, Update, WarmUp,
};

const SIZE: usize = 300_000;
const K: u64 = 300;

fn model() -> Vec<Layer> {
    vec![
        Layer::new("weight", SIZE, Kind::Weight),
        Layer::new("bias", 50, Kind::BiasOrNorm),
        Layer::new("out", SIZE, Kind::Output),
    ]
}

/// The statistics of every rank after some steps, and the bytes that each of its messages has when it is encoded again.
fn measured(config: Config, values: Values, indices: IndexCode) -> Vec<(StepStats, Vec<u64>)> {
    run(3, move |rank, comm| {
        let mut replica = Replica::of(model(), config.clone(), comm).unwrap();
        (0..4).for_each(|_| replica.step().unwrap());
        let encoded = [(0, values), (2, Values::F32)].map(|(layer, values)| {
            let Some(Update::Sparse(messages)) = replica.sync.update(layer) else { panic!("not sparse") };
            let mut frame = FrameWriter::new();
            frame.begin(3, rank as u32, 0);
            let before = frame.len();
            frame.push(&messages[rank], indices, values);
            (frame.len() - before) as u64
        });
        (replica.sync.stats().clone(), encoded.to_vec())
    })
}

#[test]
fn bytes_are_those_of_the_messages() {
    for (method, preset, values, indices) in [
        (Method::Rgc, Preset::Carried, Values::F32, IndexCode::Rice),
        (Method::RgcAsq, Preset::Carried, Values::Asq, IndexCode::Rice),
        (Method::RgcAsq, Preset::Paper { recurrent: false }, Values::Asq, IndexCode::Plain),
        (Method::RgcNaive, Preset::Carried, Values::F32, IndexCode::Plain),
    ] {
        let all = measured(Config { preset, ..config(method, 0.001) }, values, indices);
        for (rank, (stats, encoded)) in all.iter().enumerate() {
            let sent: Vec<u64> = stats.layers.iter().map(|layer| layer.bytes_sent).collect();
            // The last layer is the first of the frame, and answers for its header.
            assert_eq!(sent, [encoded[0], 200, encoded[1] + FRAME_HEADER as u64], "{method:?}");
            let headers = |layer: usize| stats.layers[layer].header_bytes;
            assert!((2..=4).contains(&headers(0)), "{method:?}: {}", headers(0));
            assert_eq!((headers(1), headers(2)), (0, headers(0) + FRAME_HEADER as u64), "{method:?}");
            for layer in [0, 2] {
                let others = all.iter().enumerate().filter(|(other, _)| *other != rank);
                let received: u64 = others.map(|(_, (other, _))| other.layers[layer].bytes_sent).sum();
                assert_eq!(stats.layers[layer].bytes_received, received);
            }
            assert_eq!(stats.layers.iter().map(|layer| layer.elements).collect::<Vec<_>>(), [K, 50, K]);
        }
    }
}

#[test]
fn an_element_needs_about_eleven_and_a_half_bits_and_its_value() {
    for (method, value_bits) in [(Method::Rgc, 32.0), (Method::RgcAsq, 0.0)] {
        for (stats, _) in measured(
            config(method, 0.001),
            if method == Method::Rgc { Values::F32 } else { Values::Asq },
            IndexCode::Rice,
        ) {
            let bytes = stats.layers[0].bytes_sent as f64;
            let expected = 4.0 + K as f64 * (11.5 + value_bits) / 8.0;
            assert!((bytes - expected).abs() < 0.05 * expected, "{bytes} bytes, expected {expected}");
        }
    }
}

#[test]
fn the_total_is_the_sum_and_times_are_finite() {
    for method in Method::ALL {
        run(2, move |_, comm| {
            let mut replica = Replica::new(config(method, 0.1), comm).unwrap();
            for step in 0..3 {
                replica.step().unwrap();
                let stats = replica.sync.stats();
                assert_eq!(stats.step, step);
                assert!(stats.exposed_ms.is_finite() && stats.exposed_ms >= 0.0);
                let total = stats.total();
                let sum = |of: fn(&LayerStats) -> u64| stats.layers.iter().map(of).sum::<u64>();
                assert_eq!(total.bytes_sent, sum(|layer| layer.bytes_sent));
                assert_eq!(total.bytes_received, sum(|layer| layer.bytes_received));
                assert_eq!(total.elements, sum(|layer| layer.elements));
                for layer in stats.layers.iter().chain([&total]) {
                    let LayerStats { select_ms, encode_ms, exchange_ms, decode_ms, apply_ms, .. } = *layer;
                    let times = [select_ms, encode_ms, exchange_ms, decode_ms, apply_ms];
                    assert!(times.iter().all(|ms| ms.is_finite() && *ms >= 0.0), "{times:?}");
                    assert!(select_ms > 0.0 && exchange_ms > 0.0);
                }
            }
        });
    }
}

#[test]
fn the_traffic_of_a_run_is_that_of_its_steps_and_says_where_bytes_go() {
    for (method, warm_up) in
        [(Method::RgcAsq, WarmUp::Ramp(3)), (Method::Rgc, WarmUp::Dense(3)), (Method::Sgd, WarmUp::Dense(3))]
    {
        run(2, move |_, comm| {
            let config = Config { warm_up, rest: Rest::TwoBit, ..config(method, 0.1) };
            let mut replica = Replica::new(config, comm).unwrap();
            let mut sum = Traffic::default();
            for step in 0..6 {
                replica.step().unwrap();
                let stats = replica.sync.stats();
                let (total, now) = (stats.total(), stats.traffic);
                assert_eq!(now.sent(), total.bytes_sent);
                assert_eq!(now.dense, 4 * (700 + 9 + 300 + 200));
                let warm = step < 3 && method != Method::Sgd;
                assert_eq!(now.warm_up, if warm { total.bytes_sent } else { 0 }, "step {step}");
                match (warm, method) {
                    (true, _) => assert_eq!((now.messages, now.rest, now.headers), (0, 0, 0)),
                    (false, Method::Sgd) => {
                        assert_eq!((now.messages, now.rest, now.headers), (0, now.dense, 0))
                    }
                    // Nine elements at two bits, with four levels.
                    (false, _) => assert_eq!((now.rest, now.headers), (8 + 3, total.header_bytes)),
                }
                sum.add(&now);
            }
            assert_eq!(replica.sync.traffic(), sum);
        });
    }
}

#[test]
fn what_is_not_sent_stays_in_the_residual() {
    run(2, |_, comm| {
        let mut replica = Replica::new(config(Method::Rgc, 0.1), comm).unwrap();
        replica.step().unwrap();
        assert!(replica.sync.residual_norm(0).unwrap() > 0.0);
        assert_eq!((replica.sync.residual_norm(1), replica.sync.residual_norm(99)), (None, None));
    });
    run(2, |_, comm| {
        let mut replica = Replica::new(config(Method::Rgc, 1.0), comm).unwrap();
        replica.step().unwrap();
        assert_eq!(replica.sync.residual_norm(0), Some(0.0));
    });
}
