//! A whole step: the pipeline of the synchronizer, played with predicted times.
//! Comes in: layers, the choice for each, a platform, ranks, and how long the framework computes. Goes out: the time of a step
//! and of its phases. What must hold: the same groups in the same order as the engine's, from the same code.
//!
//! One thread compresses in the order of the backward pass, the link carries one exchange after the other, one thread
//! decodes, and when all is there the weights are updated. A rank has only so many cores: a step takes at least as long as
//! its work on them.

use super::collective::{all_to_all, dense_allreduce, dense_bytes, sparse_allgather, sparse_bytes};
use super::message::frame_bytes;
use super::platform::{Link, Platform};
use crate::config::{Choice, Config, Exchange, Stage};
use crate::layer::{Kind, Layer};
use crate::plan::{self, Group, Sent};
use crate::second;
use redsync_core::wire::FRAME_HEADER;
use redsync_core::{Momentum, Values};
use serde::{Deserialize, Serialize};

/// What the framework does in a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Compute {
    /// Seconds of the forward pass.
    pub forward: f64,
    /// Seconds of the backward pass. Each weight has an equal share of it.
    pub backward: f64,
    /// Whether it runs on the cores that compress, too.
    pub on_cores: bool,
}

/// Everything a prediction depends on.
#[derive(Clone, Copy, Debug)]
pub struct Step<'a> {
    /// The layers, in forward order.
    pub layers: &'a [Layer],
    /// What happens with each.
    pub choices: &'a [Choice],
    /// Density, mode, preset and value format are read from here.
    pub config: &'a Config,
    /// The machines.
    pub platform: &'a Platform,
    /// The number of ranks.
    pub ranks: usize,
    /// The framework's part.
    pub compute: Compute,
}

/// Predicted times of one step, in seconds, and bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Times {
    /// Forward and backward pass.
    pub compute: f64,
    /// Accumulating and choosing, copying of dense layers, clipping.
    pub select: f64,
    /// Encoding.
    pub encode: f64,
    /// What keeps the link busy, hidden or not, and the latency of the last exchange.
    pub exchange: f64,
    /// Decoding.
    pub decode: f64,
    /// Updating the weights.
    pub apply: f64,
    /// From the first gradient on until the weights are updated; the forward pass before that included.
    pub step: f64,
    /// Of one rank: its messages and its dense gradients, each counted once.
    pub bytes_sent: f64,
    /// What its link carries in one direction.
    pub bytes_on_link: f64,
}

impl Times {
    /// What is neither computing nor hidden behind it.
    pub fn exposed(&self) -> f64 {
        self.step - self.compute
    }
}

/// The state of the pipeline while a step is played.
#[derive(Default)]
struct Clock {
    /// When each of the three is free again.
    compress: f64,
    link: f64,
    decode: f64,
    /// When the last exchange will have arrived.
    arrived: f64,
    /// Core time, as if one thread did it all.
    work: f64,
    /// Core time of the exchanges, in seconds of one whole core.
    link_work: f64,
}

impl Step<'_> {
    /// The times of a step after the warm-up.
    pub fn times(&self) -> Times {
        self.times_at(Stage::Sparse(self.config.density))
    }

    /// The times of a step at a stage of the warm-up.
    pub fn times_at(&self, stage: Stage) -> Times {
        let groups = plan::groups(self.layers, self.choices, self.config, stage, self.ranks);
        let mut times = Times { compute: self.compute.forward + self.compute.backward, ..Times::default() };
        let mut clock = Clock::default();
        let together = self.config.clip.is_some() && groups.iter().any(|group| group.sparse);
        let ready = self.ready(together);
        if together {
            let clip = self.clipping(self.platform.rates.clip);
            (clock.compress, times.select) = (self.compute.backward + clip, clip);
            clock.work += clip;
        }
        if !self.platform.background {
            clock.link = self.compute.backward;
        }
        let group_of = self.group_of(&groups);
        let mut missing: Vec<usize> = groups.iter().map(|group| group.layers.len()).collect();
        let mut next = 0;
        for i in (0..self.layers.len()).rev() {
            let select = self.select(i, groups[group_of[i]].sparse);
            clock.compress = clock.compress.max(ready[i]) + select;
            (times.select, clock.work) = (times.select + select, clock.work + select);
            missing[group_of[i]] -= 1;
            while next < groups.len() && missing[next] == 0 {
                self.exchange(&groups[next], stage, &mut clock, &mut times);
                next += 1;
            }
        }
        self.tell(stage, &mut clock, &mut times);
        self.finish(&groups, stage, clock, &mut times);
        times
    }

    /// An average step where ranks exchange the differences of their weights once in so many: nothing is hidden behind the backward pass
    /// then. Differences have no momentum and are not clipped.
    pub fn local_times(&self, every: u64) -> Times {
        let config = Config { momentum: Momentum::None, clip: None, ..self.config.clone() };
        let layers: Vec<Layer> =
            self.layers.iter().map(|layer| Layer { momentum: None, ..layer.clone() }).collect();
        // Without an optimizer of its own the exchange may treat layers differently; these configurations were taken once already.
        let choices = plan::choices(&layers, &config).unwrap_or_else(|_| self.choices.to_vec());
        let compute = Compute::default();
        let round = Step { layers: &layers, choices: &choices, config: &config, compute, ..*self }.times();
        let share = 1.0 / every.max(1) as f64;
        let compute = self.compute.forward + self.compute.backward;
        Times {
            compute,
            select: round.select * share,
            encode: round.encode * share,
            exchange: round.exchange * share,
            decode: round.decode * share,
            apply: round.apply * share,
            step: compute + round.step * share,
            bytes_sent: round.bytes_sent * share,
            bytes_on_link: round.bytes_on_link * share,
        }
    }

    /// Hosts, and ranks on each; every rank is a host of its own where the number of ranks cannot be divided.
    fn hosts(&self) -> (usize, usize) {
        let each = self.platform.ranks_per_host.clamp(1, self.ranks.max(1));
        if self.ranks.is_multiple_of(each) { (self.ranks / each, each) } else { (self.ranks, 1) }
    }

    fn by_hosts(&self) -> bool {
        self.config.exchange() == Exchange::Hosts && self.hosts().1 > 1
    }

    /// The link under messages as one rank has it. Where ranks share a host, its link carries what all of them receive from other hosts,
    /// and only that.
    fn link(&self) -> Link {
        let (link, (hosts, each)) = (&self.platform.network.sparse, self.hosts());
        if each == 1 || self.ranks < 2 {
            return link.clone();
        }
        let others = (self.ranks - each) as f64 / (self.ranks - 1) as f64;
        let share = if self.by_hosts() { 1.0 } else { each as f64 * others };
        let alone = if hosts == 1 { 0.0 } else { 1.0 };
        Link { alpha: alone * link.alpha, beta: share * link.beta, ..link.clone() }
    }

    /// Adam's second moments, of which a part is told behind all messages.
    fn tell(&self, stage: Stage, clock: &mut Clock, times: &mut Times) {
        let Step { layers, choices, config, ranks, .. } = *self;
        let told = |(layer, choice): (&Layer, &Choice)| {
            (*choice != Choice::Dense && second::has(layer, config)).then_some(layer.size)
        };
        let elements: usize = layers.iter().zip(choices).filter_map(told).sum();
        let period = plan::moment_period(layers, choices, config);
        if stage == Stage::Dense || ranks < 2 || elements == 0 || period == 0 {
            return;
        }
        let (hosts, each) = if self.by_hosts() { self.hosts() } else { (ranks, 1) };
        let bytes = FRAME_HEADER as f64 + 0.5 * elements as f64 / period as f64 / each as f64;
        let network = &self.platform.network;
        let cost = sparse_allgather(hosts, each as f64 * bytes, &self.link(), network.allgather);
        let on_link = sparse_bytes(hosts, each as f64 * bytes);
        clock.link = clock.link.max(clock.compress) + cost.occupancy;
        clock.arrived = clock.arrived.max(clock.link + cost.latency);
        clock.link_work += on_link * network.sparse.work;
        times.exchange += cost.occupancy;
        times.bytes_sent += bytes;
        times.bytes_on_link += on_link;
    }

    /// The end of a step: what waits, the clipping of dense sums, the update, and the limit that the cores set.
    fn finish(&self, groups: &[Group], stage: Stage, clock: Clock, times: &mut Times) {
        let mut apply: f64 =
            groups.iter().flat_map(|g| g.layers.iter().map(|i| self.apply(*i, g.sparse, stage))).sum();
        if groups.iter().all(|group| !group.sparse) {
            apply += self.clipping(self.platform.rates.clip_dense);
        }
        times.apply = apply;
        let played = clock.decode.max(clock.arrived).max(clock.compress).max(self.compute.backward) + apply;
        let Platform { cores, contention, .. } = *self.platform;
        let computing = if self.compute.on_cores { self.compute.backward } else { 0.0 };
        // Rates were measured with every rank at work: a rank with less than a core has its share of one in them.
        let own = (clock.work + apply + computing) * cores.min(1.0) / cores;
        let (contention, start) = if self.ranks > 1 { (contention, self.platform.start) } else { (1.0, 0.0) };
        times.step = self.compute.forward + start + played.max(own * contention + clock.link_work / cores);
    }

    /// The contention that would make the prediction what was measured.
    pub(crate) fn contention_of(&self, measured: f64) -> f64 {
        let times = self.times();
        let cores = self.platform.cores;
        let own = (times.select + times.encode + times.decode + times.apply) * cores.min(1.0) / cores;
        let exchanging = times.bytes_on_link * self.platform.network.sparse.work / cores;
        (measured - self.platform.start - exchanging) / own
    }

    /// When the gradient of each layer is there.
    fn ready(&self, together: bool) -> Vec<f64> {
        let counts = |layer: &Layer| layer.kind != Kind::BiasOrNorm;
        let share = self.compute.backward / self.layers.iter().filter(|l| counts(l)).count().max(1) as f64;
        let mut ready = vec![self.compute.backward; self.layers.len()];
        let mut now = 0.0;
        for (i, layer) in self.layers.iter().enumerate().rev() {
            now += if counts(layer) { share } else { 0.0 };
            if !together {
                ready[i] = now;
            }
        }
        ready
    }

    fn group_of(&self, groups: &[Group]) -> Vec<usize> {
        let mut of = vec![0; self.layers.len()];
        for (number, group) in groups.iter().enumerate() {
            group.layers.iter().for_each(|layer| of[*layer] = number);
        }
        of
    }

    fn clipping(&self, per_element: f64) -> f64 {
        let elements: usize = self.layers.iter().map(|layer| layer.size).sum();
        self.config.clip.map_or(0.0, |_| per_element * elements as f64)
    }

    /// T_select of a layer, or the copying of a dense one.
    pub(super) fn select(&self, layer: usize, sparse: bool) -> f64 {
        let (rates, m) = (&self.platform.rates, self.layers[layer].size);
        match self.choices[layer] {
            // Of all gradients of a host a rank reads its part, and of its own writes all; then it has a part to choose from.
            Choice::Sparse { selector, .. } if sparse && self.by_hosts() => {
                rates.select.t_select(m / self.hosts().1, selector) + 2.0 * rates.copy.at(m as f64)
            }
            Choice::Sparse { selector, .. } if sparse => rates.select.t_select(m, selector),
            _ => rates.copy.at(m as f64),
        }
    }

    /// Elements and bits of a layer's message, and how its values travel; of nothing if it is dense. With hosts, of a rank's part.
    fn message(&self, layer: usize, stage: Stage) -> (f64, f64, Values) {
        let n = self.layers[layer].size;
        let n = if self.by_hosts() { n.div_ceil(self.hosts().1) } else { n };
        let sent = Sent::at(self.choices[layer], n, self.config, stage);
        sent.map_or((0.0, 0.0, Values::F32), |sent| sent.size())
    }

    /// Encodes, exchanges and decodes a group.
    fn exchange(&self, group: &Group, stage: Stage, clock: &mut Clock, times: &mut Times) {
        if group.sparse && self.by_owners() {
            return self.exchange_by_owners(group, stage, clock, times);
        }
        let Platform { network, rates, .. } = self.platform;
        let (hosts, each) = self.hosts();
        // A dense sum is taken inside hosts first, as the libraries do; so is that of messages if it is asked for.
        let dense = if each > 1 { hosts } else { self.ranks };
        let (p, each) = if self.by_hosts() { (hosts, each as f64) } else { (self.ranks, 1.0) };
        let (cost, bytes, on_link, work, decode) = if group.sparse {
            let messages: Vec<_> = group.layers.iter().map(|layer| self.message(*layer, stage)).collect();
            let encode: f64 = messages.iter().map(|message| rates.encode.at(message.0)).sum();
            (times.encode, clock.compress) = (times.encode + encode, clock.compress + encode);
            clock.work += encode;
            let decode = p as f64 * messages.iter().map(|message| rates.decode.at(message.0)).sum::<f64>();
            let bytes = frame_bytes(messages);
            let cost = sparse_allgather(p, each * bytes, &self.link(), network.allgather);
            (cost, bytes, sparse_bytes(p, each * bytes), network.sparse.work, decode)
        } else {
            let elements: usize = group.layers.iter().map(|layer| self.layers[*layer].size).sum();
            let bytes = 4.0 * elements as f64;
            let gamma_2 = rates.gamma_2 * elements as f64;
            let cost = dense_allreduce(dense, bytes, &network.dense, network.allreduce, gamma_2);
            (cost, bytes, dense_bytes(dense, bytes), network.dense.work, 0.0)
        };
        clock.link = clock.link.max(clock.compress) + cost.occupancy;
        let arrived = clock.link + cost.latency;
        clock.arrived = clock.arrived.max(arrived);
        clock.decode = clock.decode.max(arrived) + decode;
        clock.work += decode;
        clock.link_work += on_link * work;
        times.exchange += cost.occupancy;
        times.decode += decode;
        times.bytes_sent += bytes;
        times.bytes_on_link += on_link;
    }

    fn by_owners(&self) -> bool {
        self.config.exchange() == Exchange::Owners && self.ranks > 1
    }

    /// Elements and bits of what all owners of a layer send on together.
    fn sent_on(&self, layer: usize, stage: Stage) -> (f64, f64, Values) {
        let sent = Sent::at(self.choices[layer], self.layers[layer].size, self.config, stage);
        sent.map_or((0.0, 0.0, Values::F32), |sent| sent.sent_on(self.ranks).size())
    }

    /// The same through owners: two collectives and the owner's work between them, one behind the other.
    fn exchange_by_owners(&self, group: &Group, stage: Stage, clock: &mut Clock, times: &mut Times) {
        let Platform { network, rates, .. } = self.platform;
        let (p, ranks) = (self.ranks, self.ranks as f64);
        let messages: Vec<_> = group.layers.iter().map(|layer| self.message(*layer, stage)).collect();
        let encode: f64 = messages.iter().map(|message| rates.encode.at(message.0)).sum();
        (times.encode, clock.compress) = (times.encode + encode, clock.compress + encode);
        clock.work += encode;
        // Each rank's message is dealt out, and each part has a header.
        let header = FRAME_HEADER as f64 + 2.0 * messages.len() as f64;
        let away = frame_bytes(messages.clone()) * (ranks - 1.0) / ranks + (ranks - 1.0) * header;
        let link = self.link();
        let first = all_to_all(p, away, &link, network.allgather);
        // An owner reads p parts, passes over its share of the layer, and writes what it sends on.
        let elements: f64 = messages.iter().map(|message| message.0).sum();
        let on: Vec<_> = group.layers.iter().map(|layer| self.sent_on(*layer, stage)).collect();
        let elements_on: f64 = on.iter().map(|message| message.0).sum();
        let over: f64 = group.layers.iter().map(|layer| self.select(*layer, true)).sum::<f64>() / ranks;
        let read = ranks * rates.decode.at(elements / ranks);
        let merge = read + over + rates.encode.at(elements_on / ranks);
        let part = frame_bytes(on) / ranks + FRAME_HEADER as f64;
        let second = sparse_allgather(p, part, &link, network.allgather);
        let decode = ranks * rates.decode.at(elements_on / ranks);
        let begin = clock.link.max(clock.compress).max(clock.decode);
        clock.decode = begin + first.total() + merge + second.total() + decode;
        (clock.link, clock.arrived) = (clock.decode, clock.decode);
        clock.work += merge + decode;
        let on_link = away + sparse_bytes(p, part);
        clock.link_work += on_link * network.sparse.work;
        times.exchange += first.occupancy + second.occupancy;
        times.decode += merge + decode;
        times.bytes_sent += away + part;
        times.bytes_on_link += on_link;
    }

    pub(super) fn apply(&self, layer: usize, sparse: bool, stage: Stage) -> f64 {
        let (rates, m) = (&self.platform.rates, self.layers[layer].size);
        match sparse {
            true if self.by_owners() => rates.apply.time(m, self.sent_on(layer, stage).0),
            true => rates.apply.time(m, self.ranks as f64 * self.message(layer, stage).0),
            false => rates.update.at(m as f64),
        }
    }

    /// A layer by itself, dense and compressed: what the plan tells of it.
    pub fn layer_alone(&self, layer: usize, sparse: bool) -> f64 {
        let stage = Stage::Sparse(self.config.density);
        let group = Group { sparse, layers: vec![layer] };
        let (mut clock, mut times) = (Clock::default(), Times::default());
        clock.compress = self.select(layer, sparse);
        self.exchange(&group, stage, &mut clock, &mut times);
        clock.decode.max(clock.arrived) + self.apply(layer, sparse, stage)
    }
}

/// Seconds of a whole training of so many steps, warm-up included.
pub fn training_time(step: &Step<'_>, steps: u64) -> f64 {
    let config = step.config;
    let mut total = 0.0;
    let mut at = 0;
    while at < steps {
        let stage = config.warm_up.stage(at, config.density);
        // Stages change at multiples of the length of one, so the next change is found by halving.
        let (mut last, mut beyond) = (at, steps);
        while beyond - last > 1 {
            let middle = last + (beyond - last) / 2;
            match config.warm_up.stage(middle, config.density) == stage {
                true => last = middle,
                false => beyond = middle,
            }
        }
        total += (beyond - at) as f64 * step.times_at(stage).step;
        at = beyond;
    }
    total
}

#[cfg(test)]
mod tests {
    use super::super::platform::tests::round;
    use super::*;
    use crate::config::{Method, WarmUp};
    use crate::models::{Model, NAMES};

    fn with<T>(model: &str, config: &Config, f: impl FnOnce(Step<'_>) -> T) -> T {
        let layers = Model::named(model).unwrap().layers;
        let choices = plan::choices(&layers, config).unwrap();
        let platform = round();
        let compute = Compute::default();
        f(Step { layers: &layers, choices: &choices, config, platform: &platform, ranks: 4, compute })
    }

    fn method(method: Method) -> Config {
        Config { method, ..Config::default() }
    }

    #[test]
    fn second_moments_cost_bytes_and_local_steps_save_them() {
        let adam = |share_moments| Config {
            momentum: Momentum::Adam(redsync_core::Adam::default()),
            density: 0.01,
            share_moments,
            ..method(Method::RgcTwoBit)
        };
        let bytes = |config: &Config| with("gpt-small", config, |step| step.times().bytes_sent);
        let (alone, told) = (bytes(&adam(Some(0))), bytes(&adam(Some(64))));
        assert_eq!(bytes(&adam(None)), alone, "the output goes whole");
        let elements: usize = Model::named("gpt-small").unwrap().layers.iter().map(|layer| layer.size).sum();
        assert!((told - alone - 40.0 - elements as f64 / 128.0).abs() < 1.0, "{alone} {told}");
        with("gpt-small", &adam(None), |step| {
            let dense = 4.0 * elements as f64;
            assert!(dense / step.times().bytes_sent > 220.0, "1/{}", dense / step.times().bytes_sent);
            let compute = Compute { forward: 0.1, backward: 0.2, on_cores: false };
            let step = Step { compute, ..step };
            let [one, eight] = [1, 8].map(|every| step.local_times(every));
            assert!((one.step - 0.3 - 8.0 * (eight.step - 0.3)).abs() < 1e-9);
            assert!(eight.bytes_sent < told / 8.0, "no second moments");
        });
    }

    #[test]
    fn without_a_network_there_is_only_work() {
        with("vgg16-cifar", &method(Method::Sgd), |step| {
            let times = Step { ranks: 1, ..step }.times();
            let elements = 14_724_042.0;
            let layers = step.layers.len() as f64;
            let expected = 2.0 * (layers * 5e-6 + elements * 1e-9);
            assert!((times.step / expected - 1.0).abs() < 1e-9, "{times:?} {expected}");
            assert_eq!(times.bytes_on_link, 0.0);
        });
    }

    #[test]
    fn a_step_is_never_shorter_than_any_of_its_parts_nor_longer_than_all() {
        for name in NAMES {
            for config in Method::ALL.map(method) {
                with(name, &config, |step| {
                    for backward in [0.0, 0.01, 1.0] {
                        let compute = Compute { forward: 0.0, backward, on_cores: false };
                        let t = Step { compute, ..step }.times();
                        let parts = [backward, t.select + t.encode, t.exchange, t.decode, t.apply];
                        let longest = parts.into_iter().fold(0.0, f64::max);
                        assert!(
                            t.step >= longest && t.step <= parts.iter().sum::<f64>() * 1.0001,
                            "{name} {t:?}"
                        );
                    }
                });
            }
        }
    }

    #[test]
    fn a_long_backward_pass_hides_all_but_the_end_and_nothing_with_clipping() {
        let hidden = |model: &str, clip| {
            let config = Config { clip, ..method(Method::RgcAsq) };
            with(model, &config, |step| {
                let alone = step.times().step;
                let compute = Compute { backward: 20.0, ..Compute::default() };
                1.0 - Step { compute, ..step }.times().exposed() / alone
            })
        };
        assert!(hidden("vgg16", None) > 0.5);
        assert!(hidden("lstm-ptb", Some(0.25)).abs() < 1e-6);
    }

    #[test]
    fn compute_on_the_same_cores_hides_nothing_where_there_is_only_one() {
        with("vgg16-cifar", &method(Method::Rgc), |step| {
            let compute = Compute { forward: 0.0, backward: 0.5, on_cores: true };
            let mut platform = step.platform.clone();
            platform.cores = 1.0;
            let t = Step { compute, platform: &platform, ..step }.times();
            assert!((t.step - (0.5 + t.select + t.encode + t.decode + t.apply)).abs() < 1e-9);
        });
    }

    #[test]
    fn without_progress_in_the_background_the_backward_pass_hides_no_exchange() {
        with("vgg16-cifar", &method(Method::Sgd), |step| {
            let compute = Compute { forward: 0.0, backward: 5.0, on_cores: false };
            let platform = Platform { background: false, ..step.platform.clone() };
            let t = Step { compute, platform: &platform, ..step }.times();
            assert!((t.exposed() - (t.exchange + t.apply)).abs() < 1e-9, "{t:?}");
        });
    }

    #[test]
    fn a_training_is_the_sum_of_its_stages() {
        let dense = Config { warm_up: WarmUp::Dense(100), ..method(Method::RgcAsq) };
        with("alexnet", &dense, |step| {
            let (slow, fast) = (step.times_at(Stage::Dense).step, step.times().step);
            let expected = 100.0 * slow + 900.0 * fast;
            assert!((training_time(&step, 1000) / expected - 1.0).abs() < 1e-9);
            assert!((training_time(&step, 60) / (60.0 * slow) - 1.0).abs() < 1e-9);
        });
        let ramp = Config { warm_up: WarmUp::Ramp(400), ..method(Method::RgcAsq) };
        with("alexnet", &ramp, |step| {
            let at = |d, steps| f64::from(steps) * step.times_at(Stage::Sparse(d)).step;
            let stages = [(0.25, 10), (0.0625, 30), (0.015625, 90), (0.004, 270), (0.001, 50)];
            let expected: f64 = stages.into_iter().map(|(d, steps)| at(d, steps)).sum();
            assert!((training_time(&step, 450) / expected - 1.0).abs() < 1e-9);
        });
    }

    #[test]
    fn decompression_overtakes_communication_with_many_ranks() {
        with("vgg16", &method(Method::RgcAsq), |step| {
            let at = |ranks| Step { ranks, ..step }.times();
            assert!(at(2).decode + at(2).apply < at(2).select);
            let many = at(1024);
            assert!(many.decode + many.apply > many.exchange, "{many:?}");
            assert!(many.bytes_on_link / at(2).bytes_on_link > 500.0);
        });
    }
}
