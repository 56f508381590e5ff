//! Checkpoints of a synchronizer: what every rank carries from step to step goes to a file or to the caller, and comes back.
//! What must hold: all ranks continue from the same step of the same run; after an error nothing has changed.

use crate::config::Choice;
use crate::error::SyncError;
use crate::hello;
use crate::pipeline::lock;
use crate::state::{self, LayerState, Saved, StateError};
use crate::synchronizer::Synchronizer;
use serde_json::json;
use std::path::Path;

/// Named vectors of the caller.
type Extra = Vec<(String, Vec<f32>)>;

impl Synchronizer {
    /// The state of this rank, with further vectors of the caller and the hash of the weights. To be called between `finish` and
    /// the next `submit`.
    pub fn capture(&self, replica_hash: u64, extra: Extra) -> Result<Saved, SyncError> {
        self.submitter.inbox().check_between()?;
        let (rank, ranks) = self.rank();
        let mut layers = lock(&self.shared.compressed).save()?;
        for (state, layer) in layers.iter_mut().zip(self.compressed_layers()) {
            state.kept = self.shared.exchange.save(layer);
        }
        let identity = self.identity.clone();
        let seat = self.seat();
        Ok(Saved { step: self.step(), rank, ranks, identity, replica_hash, seat, layers, extra })
    }

    /// Continues from a state of this rank, as [`Synchronizer::capture`] gave it or [`Saved::reshare`] made it. All ranks call
    /// this, also one whose state cannot be used: the others then hear why. Returns the caller's vectors.
    pub fn restore(&mut self, state: Result<Saved, String>) -> Result<Extra, SyncError> {
        self.continue_from(state, None)
    }

    /// Writes this rank's state, with further vectors of the caller, into a directory: atomic, so that a crash leaves the
    /// old file whole. To be called between `finish` and the next `submit`, with the hash of the weights.
    pub fn save(&self, dir: &Path, replica_hash: u64, extra: Extra) -> Result<(), SyncError> {
        let saved = self.capture(replica_hash, extra)?;
        Ok(saved.write(&dir.join(Saved::file_name(saved.rank)))?)
    }

    /// Continues from the files in a directory, bit by bit if the number of ranks is the same; another number keeps the
    /// sums over the ranks. Returns the caller's vectors. All ranks call this; after an error nothing has changed.
    pub fn load(&mut self, dir: &Path) -> Result<Extra, SyncError> {
        self.load_if(dir, None)
    }

    /// [`Synchronizer::load`], but only what was saved beside weights with this hash.
    pub fn load_for(&mut self, dir: &Path, replica_hash: u64) -> Result<Extra, SyncError> {
        self.load_if(dir, Some(replica_hash))
    }

    fn load_if(&mut self, dir: &Path, hash: Option<u64>) -> Result<Extra, SyncError> {
        self.submitter.inbox().check_between()?;
        let saved = self.find(dir)?;
        if hash.is_some_and(|hash| hash != saved.replica_hash) {
            let why = "it was saved beside other weights".into();
            return Err(SyncError::Checkpoint { dir: Some(dir.into()), why });
        }
        self.continue_from(Ok(saved), Some(dir))
    }

    fn continue_from(
        &mut self,
        state: Result<Saved, String>,
        dir: Option<&Path>,
    ) -> Result<Extra, SyncError> {
        self.submitter.inbox().check_between()?;
        let refuse = |why| SyncError::Checkpoint { dir: dir.map(Path::to_path_buf), why };
        let state = state.and_then(|saved| self.check_state(&saved).map(|()| saved));
        let said = match &state {
            Ok(saved) => [saved.step.to_string(), format!("{:016x}", saved.replica_hash)],
            Err(why) => [format!("none ({why})"), String::new()],
        };
        let names = ["the step of the checkpoint", "the replica hash of the checkpoint"];
        let agree = names.map(String::from).into_iter().zip(said).collect();
        let compared = hello::compare(&*self.shared.comm, &agree, &self.shared.config);
        // What is wrong here says more than that the others differ.
        let saved = state.map_err(refuse)?;
        compared?;
        lock(&self.shared.compressed).restore(&saved.layers)?;
        for (state, layer) in saved.layers.iter().zip(self.compressed_layers()) {
            let unfit = |why| SyncError::Unfit { layer: state.name.clone(), why };
            self.shared.exchange.restore(layer, state.kept.as_ref()).map_err(unfit)?;
        }
        self.recycle();
        self.submitter.inbox().turn_to(saved.step);
        Ok(saved.extra)
    }

    /// Whether a state is one of this rank in this run; a sentence if not.
    fn check_state(&self, saved: &Saved) -> Result<(), String> {
        let (rank, ranks) = self.rank();
        if saved.ranks != ranks {
            return Err(format!("it is of {} ranks, this job has {ranks}", saved.ranks));
        }
        if saved.rank != rank {
            return Err(format!(
                "it is of rank {}, this is rank {rank}: each rank loads its own",
                saved.rank
            ));
        }
        if saved.seat != self.seat() {
            return Err("it is of another place among hosts".into());
        }
        saved.check()?;
        if let Some(difference) = state::difference(&saved.identity, &self.identity) {
            return Err(difference);
        }
        lock(&self.shared.compressed).check(&saved.layers)?;
        for (state, layer) in saved.layers.iter().zip(self.compressed_layers()) {
            let checked = self.shared.exchange.check(layer, state);
            checked.map_err(|why| format!("layer {}: {why}", state.name))?;
        }
        Ok(())
    }

    /// The numbers of the compressed layers, in order.
    fn compressed_layers(&self) -> impl Iterator<Item = usize> + '_ {
        let choices = self.shared.choices.iter().enumerate();
        choices.filter(|(_, choice)| **choice != Choice::Dense).map(|(layer, _)| layer)
    }

    /// This rank's part of a checkpoint: its own file if every rank has one of the same run, else its share of all files.
    fn find(&self, dir: &Path) -> Result<Saved, SyncError> {
        let (rank, ranks) = self.rank();
        let own = Saved::read(&dir.join(Saved::file_name(rank))).ok();
        let own = own.filter(|saved| saved.rank == rank && saved.seat == self.seat());
        let what = own.as_ref().map(|saved| json!([saved.ranks, saved.step, saved.replica_hash]));
        let all = hello::gather(&*self.shared.comm, &json!([what]), &self.shared.config)?;
        let same = all.iter().all(|theirs| *theirs == all[0]) && all[0][0][0] == json!(ranks);
        match own {
            Some(own) if same => Ok(own),
            _ => Ok(self.share_of(Saved::read_all(dir)?)?),
        }
    }

    /// What this rank continues with, from the states of all ranks of a run with another number of them, or with other hosts.
    pub fn share_of(&self, all: Vec<Saved>) -> Result<Saved, StateError> {
        let (rank, ranks) = self.rank();
        let Some(seat) = self.seat() else { return Saved::reshare(all, rank, ranks) };
        let host = Saved::reshare(all, seat.host, seat.hosts)?;
        let number = |name: &str| self.shared.layers.iter().position(|layer| layer.name == name);
        let part = |state: &LayerState| seat.part(number(&state.name).unwrap_or_default(), state.size);
        let parts: Vec<_> = host.layers.iter().map(part).collect();
        Ok(host.seated(rank, seat, &parts))
    }
}
