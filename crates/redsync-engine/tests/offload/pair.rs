//! The host's layer and the same layer on a device, led through the same events: what every device is held to. The tests of other crates
//! take this file in.

use proptest::prelude::*;
use redsync_core::{
    Compressor, Config, Density, FrameWriter, Gradient, IndexCode, Momentum, Selector, Sending, Sparse,
    Unfit, Values, Workspace, bf16, f16,
};
use redsync_engine::offload::{Kernels, Offloaded};
use redsync_engine::{LayerCompressor, Source};

/// A device under test.
pub trait Bench {
    type Layer: Kernels;
    fn layer(&self, n: usize) -> Self::Layer;
    /// The gradient in the memory of the device.
    fn source(&self, gradient: &Far) -> Box<dyn Source>;
}

/// A gradient that is not in the memory of the host.
#[derive(Clone, Debug)]
pub enum Far {
    F32(Vec<f32>),
    F16(Vec<f16>),
    Bf16(Vec<bf16>),
}

impl Far {
    pub fn values(&self) -> Gradient<'_> {
        match self {
            Far::F32(g) => Gradient::F32(g),
            Far::F16(g) => Gradient::F16(g),
            Far::Bf16(g) => Gradient::Bf16(g),
        }
    }
}

impl Source for Far {
    fn len(&self) -> usize {
        self.values().len()
    }

    fn host(&self) -> Option<Gradient<'_>> {
        None
    }
}

/// The host's layer, the same layer on a device, and a layer that uses the workspace in between.
pub struct Pair<'a, B: Bench> {
    bench: &'a B,
    host: Compressor,
    device: Offloaded<B::Layer>,
    other: Compressor,
    workspaces: [Workspace; 2],
    messages: [Sparse; 2],
    step: u64,
    /// Every other gradient is announced.
    announces: bool,
}

impl<'a, B: Bench> Pair<'a, B> {
    pub fn new(bench: &'a B, n: usize, config: Config, room: Option<usize>) -> Self {
        let device = Offloaded::new(3, "layer", n, config, bench.layer(n)).unwrap();
        Pair {
            bench,
            host: Compressor::new(3, "layer", n, config).unwrap(),
            device: match room {
                Some(room) => device.with_room(room),
                None => device,
            },
            other: Compressor::new(4, "other", 10, config).unwrap(),
            workspaces: [Workspace::new(1), Workspace::new(1)],
            messages: [Sparse::new(), Sparse::new()],
            step: 0,
            announces: false,
        }
    }

    /// Whether the gradient was taken.
    pub fn accumulate(&mut self, gradient: &Far, scale: f32) -> bool {
        let [ours, theirs] = &mut self.workspaces;
        let host = self.host.accumulate(self.step, gradient.values(), scale, ours);
        let source = self.bench.source(gradient);
        if self.announces {
            self.device.announce(self.step, &*source, scale, theirs).unwrap();
        }
        self.announces = !self.announces;
        let device = self.device.accumulate(self.step, &*source, scale, theirs);
        let words = |e: &redsync_core::LayerError| e.to_string();
        assert_eq!(host.as_ref().map_err(words), device.as_ref().map_err(words));
        host.is_ok()
    }

    pub fn select(&mut self) {
        let ([ours, theirs], [host, device]) = (&mut self.workspaces, &mut self.messages);
        LayerCompressor::select(&mut self.host, self.step, host, ours).unwrap();
        self.device.select(self.step, device, theirs).unwrap();
        let bytes = |message: &Sparse| {
            let mut frame = FrameWriter::new();
            frame.begin(0, 0, self.step);
            self.host.encode(message, &mut frame);
            frame.finish().to_vec()
        };
        assert_eq!(bytes(host), bytes(device));
        self.step += 1;
    }

    /// The same change on both, with the same outcome.
    fn both(&mut self, change: impl Fn(&mut dyn LayerCompressor) -> Result<(), Unfit>) {
        assert_eq!(change(&mut self.host), change(&mut self.device));
    }

    pub fn check(&self) {
        let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        let (host, device) = (self.host.save().unwrap(), self.device.save().unwrap());
        assert_eq!(bits(&host.v), bits(&device.v));
        assert_eq!(bits(&host.u), bits(&device.u));
        assert_eq!(host, device);
        assert_eq!(LayerCompressor::norm(&self.host), self.device.norm());
    }
}

#[derive(Clone, Debug)]
pub enum Event {
    /// Accumulate, and select unless another gradient follows.
    Gradient {
        gradient: Far,
        scale: f32,
        select: bool,
    },
    /// Another layer uses the workspace.
    Interrupt,
    GiveBack,
    TakeBack,
    Rate(f32),
    Momentum(f32),
    Sending(Sending),
    Adopt,
    /// Each goes on from what the other saved.
    Swap,
}

fn values() -> impl Strategy<Value = Values> {
    use Values::{Asq, AsqDropError, Bf16, EightBit, F32, TwoBit};
    prop_oneof![Just(F32), Just(Asq), Just(AsqDropError), Just(Bf16), Just(TwoBit), Just(EightBit)]
}

fn density() -> impl Strategy<Value = Density> {
    prop_oneof![Just(0.001), Just(0.01), Just(0.25), Just(1.0)].prop_map(|d| Density::new(d).unwrap())
}

/// Everyday gradients, ties, constants, zeros, subnormals, huge ones, and now and then something that is no number.
fn floats(n: usize) -> BoxedStrategy<Vec<f32>> {
    let each = |x: BoxedStrategy<f32>| proptest::collection::vec(x, n);
    let ordinary = each((-1f32..1.0).boxed());
    let ties = each((-3i8..4).prop_map(f32::from).boxed());
    let constant = prop_oneof![Just(0f32), Just(-0.0), Just(1.5), Just(-1e-42)];
    let tiny = each((0u32..3000).prop_map(|x| f32::from_bits(x | (x & 1) << 31)).boxed());
    let spread = each((-60i32..60, -1f32..1.0).prop_map(|(e, x)| x * (e as f32).exp2()).boxed());
    let bad = prop_oneof![Just(f32::NAN), Just(f32::INFINITY), Just(f32::MAX)];
    let spoilt =
        (each((-1f32..1.0).boxed()), bad, any::<prop::sample::Index>()).prop_map(|(mut g, x, at)| {
            if !g.is_empty() {
                let at = at.index(g.len());
                g[at] = x;
            }
            g
        });
    prop_oneof![
        6 => ordinary,
        2 => ties,
        2 => constant.prop_map(move |x| vec![x; n]),
        1 => tiny,
        2 => spread,
        1 => spoilt,
    ]
    .boxed()
}

fn gradient(n: usize) -> impl Strategy<Value = Far> {
    (floats(n), 0..4).prop_map(|(g, kind)| match kind {
        0 => Far::F16(g.into_iter().map(f16::from_f32).collect()),
        1 => Far::Bf16(g.into_iter().map(bf16::from_f32).collect()),
        _ => Far::F32(g),
    })
}

pub fn event(n: usize) -> impl Strategy<Value = Event> {
    let scale = prop_oneof![Just(1f32), Just(0.25), Just(1.0 / 3.0)];
    let sending = (density(), any::<bool>());
    prop_oneof![
        12 => (gradient(n), scale, prop::bool::weighted(0.8)).prop_map(|(gradient, scale, select)| {
            Event::Gradient { gradient, scale, select }
        }),
        1 => Just(Event::Interrupt),
        1 => Just(Event::GiveBack),
        1 => Just(Event::TakeBack),
        1 => (0.01f32..1.0).prop_map(Event::Rate),
        1 => prop_oneof![Just(0f32), 0f32..0.99].prop_map(Event::Momentum),
        1 => sending.prop_map(|(density, masking)| Event::Sending(Sending { density, values: Values::F32, masking })),
        1 => Just(Event::Adopt),
        2 => Just(Event::Swap),
    ]
}

pub fn config() -> impl Strategy<Value = Config> {
    let momentum = prop_oneof![
        Just(Momentum::None),
        (0f32..0.99).prop_map(Momentum::Plain),
        (0f32..0.99).prop_map(Momentum::Nesterov),
        Just(Momentum::Nesterov(0.0)),
    ];
    let switches = (any::<bool>(), any::<bool>(), prop::bool::weighted(0.1));
    let keep = prop_oneof![4 => Just(1f32), 1 => Just(0.75)];
    (density(), prop::sample::select(&Selector::ALL), values(), momentum, switches, keep).prop_map(
        |(density, selector, values, momentum, (masking, undo, every), keep)| {
            let every = every && !values.is_quantized();
            let sampled = selector == Selector::Sampled && values.is_quantized();
            Config {
                density,
                selector: if sampled { Selector::Carried } else { selector },
                values,
                indices: if every { IndexCode::Every } else { IndexCode::default() },
                momentum,
                ranks: 2,
                masking,
                keep,
                undo,
            }
        },
    )
}

pub fn run(bench: &impl Bench, n: usize, config: Config, room: Option<usize>, events: Vec<Event>) {
    let mut pair = Pair::new(bench, n, config, room);
    let mut sent = false;
    for event in events {
        let was_sent = std::mem::take(&mut sent);
        match event {
            Event::Gradient { gradient, scale, select } => {
                if pair.accumulate(&gradient, scale) && select {
                    pair.check();
                    pair.select();
                    sent = true;
                }
            }
            Event::Interrupt => {
                for workspace in &mut pair.workspaces {
                    pair.other.accumulate(0, [1f32; 10][..].into(), 1.0, workspace).unwrap();
                }
            }
            Event::GiveBack if was_sent => {
                let sparse = pair.messages[0].clone();
                pair.both(|layer| layer.give_back(&sparse));
            }
            Event::GiveBack => {}
            Event::TakeBack => pair.both(|layer| layer.take_back()),
            Event::Rate(rate) => pair.both(|layer| layer.set_rate(rate)),
            Event::Momentum(m) => {
                let momentum = match config.momentum {
                    Momentum::Plain(_) => Momentum::Plain(m),
                    _ => Momentum::Nesterov(m),
                };
                pair.both(|layer| layer.set_momentum(momentum));
            }
            Event::Sending(sending) => {
                let sending = Sending { values: config.values, ..sending };
                pair.host.set_sending(sending);
                pair.device.set_sending(sending);
            }
            Event::Adopt => {
                let buffer: Vec<f32> = (0..n).map(|i| i as f32 - 7.0).collect();
                pair.both(|layer| layer.adopt_momentum(&buffer, 2));
            }
            Event::Swap => {
                let (host, device) = (pair.host.save().unwrap(), pair.device.save().unwrap());
                LayerCompressor::restore(&mut pair.host, &device).unwrap();
                pair.device.restore(&host).unwrap();
            }
        }
        pair.check();
    }
}

/// Reproducible values between -1 and 1, cubed: a few are large.
pub fn noise(n: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let next = |_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let x = (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0;
        x * x * x
    };
    (0..n).map(next).collect()
}

/// A layer too large to be copied before a pass, with every selector; it refuses a gradient on the way.
pub fn run_large(bench: &impl Bench) {
    let n = (1 << 16) + 77;
    let plain = Config { momentum: Momentum::Plain(0.9), ..Config::default() };
    let nesterov = Config { momentum: Momentum::Nesterov(0.9), values: Values::Asq, ..Config::default() };
    let configs = [Config::default(), plain, nesterov, Config { undo: true, ..nesterov }];
    for config in
        Selector::ALL.iter().flat_map(|selector| configs.map(|c| Config { selector: *selector, ..c }))
    {
        if config.selector == Selector::Sampled && config.values.is_quantized() {
            continue;
        }
        let mut pair = Pair::new(bench, n, config, None);
        for seed in 0..8 {
            let mut gradient = noise(n, seed);
            if seed == 5 {
                gradient[70_000 % n] = f32::NAN;
            }
            if pair.accumulate(&Far::F32(gradient), 0.5) {
                pair.select();
            }
            pair.check();
        }
    }
}
