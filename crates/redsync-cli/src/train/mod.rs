//! `redsync train` and `redsync compare`: options go in, ranks train, rank 0 tells.

mod compare;
mod options;
mod progress;
mod tour;

pub use compare::Compare;

use crate::{complain, ranks, usage};
use anyhow::{Result, bail};
use clap::Args;
use options::Options;
use progress::Teller;
pub use progress::shares;
use redsync_burn::train::{Ended, Observer, Optimizer, Settings, Summary, train};
use redsync_comm::{Communicator, Tag};
use redsync_data::DataSet;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

#[derive(Args, Debug)]
pub struct Train {
    #[command(flatten)]
    options: Options,
    /// Read choices from a TOML file; those of the command line come first
    #[arg(long, value_name = "FILE", help_heading = "What")]
    config: Option<PathBuf>,
    /// Continue from the newest checkpoint in --checkpoint-dir
    #[arg(long, help_heading = "Results")]
    resume: bool,
    /// Print one JSON document at the end instead of tables
    #[arg(long, help_heading = "Results")]
    json: bool,
}

impl Train {
    pub fn run(self) -> Result<()> {
        if self.says_nothing() {
            return tour::run();
        }
        let mut job = Job::new(self.options.with_file(self.config.as_deref())?)?;
        job.settings.resume = self.resume;
        if self.resume && job.settings.checkpoint_dir.is_none() {
            return Err(usage("--resume needs --checkpoint-dir: the directory to continue from".into()));
        }
        let out = job.directory();
        let Some(ended) = job.run(&out)? else { return Ok(()) };
        match self.json {
            true => crate::bench::print_json(&ended.summary)?,
            false => progress::print(&ended.summary, &out),
        }
        interrupted(&ended)
    }

    /// Nothing was chosen: the user wants to see what this is for.
    fn says_nothing(&self) -> bool {
        self.options == Options::default() && self.config.is_none() && !self.resume && !self.json
    }
}

/// An interruption is told as what it is, with the way to go on.
fn interrupted(ended: &Ended) -> Result<()> {
    match &ended.interrupted {
        None => Ok(()),
        Some((step, Some(dir))) => bail!(
            "interrupted after {step} steps: continue with the same options, --checkpoint-dir {} and --resume",
            dir.display()
        ),
        Some((step, None)) => bail!("interrupted after {step} steps"),
    }
}

/// One training to be run.
struct Job {
    options: Options,
    settings: Settings,
    mpi: bool,
}

impl Job {
    fn new(options: Options) -> Result<Self> {
        let (settings, mpi) = (options.settings()?, options.mpi()?);
        if options.workers == Some(0) {
            return Err(usage("workers must be at least 1, got 0".into()));
        }
        if options.threads == Some(0) {
            return Err(usage("threads must be at least 1, got 0".into()));
        }
        if options.momentum.is_some() && settings.optimizer == Optimizer::Sgd {
            return Err(usage(
                "momentum is not used by --optimizer sgd: give --optimizer momentum or nesterov, too".into(),
            ));
        }
        if options.beta2.is_some() && settings.optimizer != Optimizer::AdamW {
            return Err(usage("beta2 is an option of adamw: give --optimizer adamw, too".into()));
        }
        let decided =
            [(options.dense_below.is_some(), "--dense-below"), (options.paper == Some(true), "--paper")];
        if let Some((_, other)) = decided.iter().find(|(given, _)| settings.auto && *given) {
            return Err(usage(format!(
                "--auto and {other} cannot be combined: both decide which layers are compressed"
            )));
        }
        if options.checkpoint_every.is_some() && settings.checkpoint_dir.is_none() {
            return Err(usage("--checkpoint-every needs --checkpoint-dir: the directory to write to".into()));
        }
        Ok(Job { options, settings, mpi })
    }

    /// Where metrics go: where the user says, or a new directory.
    fn directory(&self) -> PathBuf {
        let name = format!("{}-{}", self.settings.model, self.settings.method.name());
        self.options.out.clone().unwrap_or_else(|| fresh_directory(&name))
    }

    /// Trains. Under MPI only rank 0 gets what came out.
    fn run(&mut self, out: &Path) -> Result<Option<Ended>> {
        self.settings.rescue_dir = Some(out.join("checkpoint"));
        let stop = stopper();
        match self.mpi {
            true => self.run_mpi(out, stop),
            false => self.run_local(out, stop).map(Some),
        }
    }

    fn open(&self, teller: bool) -> Result<DataSet> {
        let bar = progress::download_bar(teller);
        Ok(self
            .settings
            .open(&self.options.places(), &|done, total| progress::downloaded(&bar, done, total))?)
    }

    fn run_local(&mut self, out: &Path, stop: &'static AtomicBool) -> Result<Ended> {
        let workers = self.options.workers.unwrap_or(4);
        let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
        self.settings.threads = self.options.threads.unwrap_or((cores / workers).max(1));
        let (settings, data, out) = (self.settings.clone(), Arc::new(self.open(true)?), out.to_path_buf());
        ranks::on_threads(workers, move |comm| work(&settings, &data, comm, &out, stop))
    }

    fn run_mpi(&mut self, out: &Path, stop: &'static AtomicBool) -> Result<Option<Ended>> {
        ranks::on_mpi("workers", self.options.workers, |comm| self.rank_of_mpi(out, stop, comm))
    }

    fn rank_of_mpi(
        &mut self,
        out: &Path,
        stop: &'static AtomicBool,
        comm: Arc<dyn Communicator>,
    ) -> Result<Ended> {
        self.settings.threads = self.options.threads.unwrap_or_else(threads_under_mpi);
        let out = self.directory_of_first(out, &*comm)?;
        self.settings.rescue_dir = Some(out.join("checkpoint"));
        let data = self.open(comm.rank() == 0)?;
        work(&self.settings, &data, comm, &out, stop)
    }

    /// A new directory is chosen by rank 0 for all: the others may look when it exists already, and would take the next.
    fn directory_of_first(&self, own: &Path, comm: &dyn Communicator) -> Result<PathBuf> {
        if self.options.out.is_some() {
            return Ok(own.to_path_buf());
        }
        let name = own.to_string_lossy().into_owned().into_bytes();
        let all = comm.allgather(Tag { step: 0, op: 0 }, name).wait(self.settings.deadline)?;
        Ok(PathBuf::from(String::from_utf8_lossy(all.from_rank(0)).into_owned()))
    }
}

/// A directory under `runs/` that is not there yet.
fn fresh_directory(name: &str) -> PathBuf {
    let numbered = |n: u32| Path::new("runs").join(format!("{name}-{n:03}"));
    (1..).map(numbered).find(|dir| !dir.exists()).unwrap_or_default()
}

/// The cores of this host, divided among the ranks that MPI's launcher put on it.
fn threads_under_mpi() -> usize {
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
    let here = ["OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"]
        .iter()
        .find_map(|name| std::env::var(name).ok()?.parse().ok());
    (cores / here.unwrap_or(1usize).max(1)).max(1)
}

/// What one rank does, in a pool of its own, so that ranks of one process do not wait for each other's threads.
fn work(
    settings: &Settings,
    data: &DataSet,
    comm: Arc<dyn Communicator>,
    out: &Path,
    stop: &AtomicBool,
) -> Result<Ended> {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(settings.threads).build()?;
    let first = comm.rank() == 0;
    pool.install(|| {
        let mut teller = first.then(|| Teller::new(out, settings.resume));
        let mut nobody = ();
        let observer: &mut dyn Observer = teller.as_mut().map_or(&mut nobody, |teller| teller);
        Ok(train(settings, data, comm, observer, stop)?)
    })
}

/// Set by Ctrl-C; a second Ctrl-C ends the program at once.
fn stopper() -> &'static AtomicBool {
    static STOP: AtomicBool = AtomicBool::new(false);
    static ONCE: OnceLock<()> = OnceLock::new();
    ONCE.get_or_init(|| {
        let handler = || {
            if STOP.swap(true, Ordering::Relaxed) {
                std::process::exit(130);
            }
            complain("stopping after the next steps, with a checkpoint; once more to stop at once");
        };
        // Without a handler Ctrl-C still ends the program, only less gently.
        let _ = ctrlc::set_handler(handler);
    });
    &STOP
}

/// What a summary says of its metric.
fn metric(summary: &Summary) -> String {
    match summary.metric_name {
        _ if summary.end.metric.is_nan() => "not measured".into(),
        "accuracy" => format!("{:.2}%", 100.0 * summary.end.metric),
        _ => format!("{:.2}", summary.end.metric),
    }
}
