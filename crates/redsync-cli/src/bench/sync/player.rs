//! One rank of `bench sync` at work: made-up gradients go in, layer by layer as in a backward pass, measured steps come out.
//! What must hold: a gradient follows from seed, step, layer and rank alone, so that a resumed run meets the same ones.

use super::Sync;
use anyhow::{Context, Result, bail};
use redsync_engine::{Kind, StepStats, Synchronizer, Window, replica_hash};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Gradients are windows of one buffer of noise, at offsets up to this: fresh at every step, for free.
pub const OFFSETS: u64 = 1 << 20;
const LEARNING_RATE: f32 = 0.01;

/// One measured step.
pub struct Measured {
    pub ms: f64,
    pub stats: StepStats,
}

/// One rank at work.
pub struct Player<'a> {
    pub bench: &'a Sync,
    pub sync: Synchronizer,
    pub weights: Vec<Vec<f32>>,
    pub noise: Arc<Vec<f32>>,
    pub rank: usize,
}

impl Player<'_> {
    /// Steps until so many were made since the beginning; the measured ones.
    pub fn steps(
        &mut self,
        until: u64,
        compute: Duration,
        bar: &indicatif::ProgressBar,
    ) -> Result<Vec<Measured>> {
        let mut measured = Vec::new();
        let begin = self.sync.step();
        while self.sync.step() < until {
            let step = self.sync.step();
            let start = Instant::now();
            self.step(step, compute)?;
            let ms = start.elapsed().as_secs_f64() * 1e3;
            if step >= begin + self.bench.settle {
                measured.push(Measured { ms, stats: self.sync.stats().clone() });
            }
            self.between(step + 1)?;
            bar.inc(1);
        }
        Ok(measured)
    }

    fn step(&mut self, step: u64, compute: Duration) -> Result<()> {
        let layers = self.sync.layers().to_vec();
        let computing = layers.iter().filter(|layer| layer.kind != Kind::BiasOrNorm).count();
        let share = compute.div_f64(computing.max(1) as f64);
        let start = Instant::now();
        let mut due = Duration::ZERO;
        for (number, layer) in layers.iter().enumerate().rev() {
            if layer.kind != Kind::BiasOrNorm {
                due += share;
                std::thread::sleep(due.saturating_sub(start.elapsed()));
            }
            let place = [step, number as u64, self.rank as u64].iter().fold(self.bench.seed, |hash, x| {
                (hash ^ x).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(31)
            });
            let offset = (place % OFFSETS) as usize;
            let range = offset..offset + layer.size;
            self.sync.submit(number, Window { buffer: self.noise.clone(), range })?;
        }
        self.sync.finish()?;
        for (number, weights) in self.weights.iter_mut().enumerate() {
            self.sync.apply(number, weights, LEARNING_RATE)?;
        }
        Ok(())
    }

    /// What is due between two steps, outside the measured time.
    fn between(&mut self, step: u64) -> Result<()> {
        if step.is_multiple_of(self.bench.check_every) {
            self.check()?;
        }
        match &self.bench.checkpoint_dir {
            Some(dir) if step.is_multiple_of(self.bench.checkpoint_every) => self.checkpoint(dir, step),
            _ => Ok(()),
        }
    }

    pub fn check(&self) -> Result<u64> {
        let weights: Vec<&[f32]> = self.weights.iter().map(Vec::as_slice).collect();
        Ok(self.sync.check_replicas(&weights)?)
    }

    /// A directory per step; `latest` names the last complete one.
    fn checkpoint(&self, dir: &Path, step: u64) -> Result<()> {
        let name = format!("step-{step:08}");
        let here = dir.join(&name);
        std::fs::create_dir_all(&here).with_context(|| format!("cannot create {}", here.display()))?;
        let weights: Vec<&[f32]> = self.weights.iter().map(Vec::as_slice).collect();
        let names = self.sync.layers().iter().map(|layer| layer.name.clone());
        self.sync.save(&here, replica_hash(&weights), names.zip(self.weights.iter().cloned()).collect())?;
        // When the replicas were compared, every rank has written its file.
        self.check()?;
        if self.rank == 0 {
            let latest = dir.join("latest");
            let old = std::fs::read_to_string(&latest).ok();
            // The new name has to be on the disk before the old checkpoint goes.
            crate::files::write(&latest, name.as_bytes())?;
            if let Some(old) = old.filter(|old| *old != name && old.starts_with("step-")) {
                // An old checkpoint that cannot be removed costs space, nothing else.
                let _ = std::fs::remove_dir_all(dir.join(old));
            }
        }
        Ok(())
    }

    pub fn resume(&mut self) -> Result<()> {
        let dir = self.bench.checkpoint_dir.as_deref().context("--resume needs --checkpoint-dir")?;
        let latest = dir.join("latest");
        let name =
            std::fs::read_to_string(&latest).with_context(|| format!("cannot read {}", latest.display()))?;
        let extra = self.sync.load(&dir.join(name.trim()))?;
        for ((name, values), (layer, weights)) in
            extra.into_iter().zip(self.sync.layers().iter().zip(&mut self.weights))
        {
            if name != layer.name || values.len() != weights.len() {
                bail!("layer {name} of the checkpoint does not fit layer {}", layer.name);
            }
            *weights = values;
        }
        Ok(())
    }
}
