//! `redsync compare`: the same training by several methods, one after the other, side by side at the end.

use super::options::Options;
use super::progress::size;
use super::{Job, metric};
use crate::bench::{print_json, table};
use crate::usage;
use anyhow::{Result, bail};
use clap::Args;
use redsync_burn::train::Summary;
use std::path::PathBuf;

#[derive(Args, Debug)]
pub struct Compare {
    /// Methods, by commas
    #[arg(long, value_delimiter = ',', default_value = "sgd,rgc,rgc+asq")]
    methods: Vec<String>,
    #[command(flatten)]
    options: Options,
    /// Read choices from a TOML file; those of the command line come first
    #[arg(long, value_name = "FILE", help_heading = "What")]
    config: Option<PathBuf>,
    /// Print one JSON document, a list of summaries, instead of a table
    #[arg(long, help_heading = "Results")]
    json: bool,
}

impl Compare {
    pub fn run(self) -> Result<()> {
        let options = self.options.clone().with_file(self.config.as_deref())?;
        if options.method.is_some() {
            return Err(usage("compare takes --methods with a list, not --method".into()));
        }
        if options.mpi()? {
            return Err(usage("compare runs local workers; under MPI run train once for each method".into()));
        }
        let summaries = run_all(jobs(&options, &self.methods)?, &|complete| self.show(complete))?;
        self.show(&summaries)
    }

    fn show(&self, summaries: &[Summary]) -> Result<()> {
        match self.json {
            true => print_json(&summaries),
            false => {
                print(summaries);
                Ok(())
            }
        }
    }
}

/// The same training by several methods, each with a directory of its name. All are checked before the first runs.
pub(super) fn jobs(options: &Options, methods: &[String]) -> Result<Vec<Job>> {
    let job = |method: &String| {
        let mut options = Options { method: Some(method.clone()), ..options.clone() };
        options.out = options.out.map(|out| out.join(method));
        options.checkpoint_dir = options.checkpoint_dir.map(|dir| dir.join(method));
        Job::new(options)
    };
    methods.iter().map(job).collect()
}

/// Runs them one after the other. If one is interrupted, those that are complete are shown, and the rest is left out.
pub(super) fn run_all(jobs: Vec<Job>, show: &dyn Fn(&[Summary]) -> Result<()>) -> Result<Vec<Summary>> {
    let mut summaries = Vec::new();
    for mut job in jobs {
        let out = job.directory();
        let Some(ended) = job.run(&out)? else { continue };
        if let Some((step, dir)) = &ended.interrupted {
            show(&summaries)?;
            let method = ended.summary.method;
            let rest = dir.as_ref().map_or(String::new(), |dir| {
                let dir = dir.display();
                format!("; its checkpoint is for train --method {method} --checkpoint-dir {dir} --resume")
            });
            bail!("interrupted after {step} steps by {method}, those shown are complete{rest}");
        }
        summaries.push(ended.summary);
    }
    Ok(summaries)
}

fn print(summaries: &[Summary]) {
    let Some(first) = summaries.first() else { return };
    crate::say!("{} on {}, {} workers, seed {}", first.model, first.data, first.workers, first.seed);
    let mut out = table(&[
        "method",
        first.metric_name,
        "loss",
        "sent",
        "of dense",
        "of that: warm-up",
        "messages",
        "rest",
        "headers",
        "moments",
        "forward",
        "backward",
        "wait",
        "apply + update",
        "step",
    ]);
    for s in summaries {
        let ms = |seconds: f64| format!("{:.1} ms", 1e3 * seconds / s.steps.max(1) as f64);
        let [warm_up, messages, rest, headers, moments] = s.traffic.parts().map(|(_, bytes)| size(bytes));
        out.add_row([
            s.method.to_string(),
            metric(s),
            format!("{:.4}", s.end.loss),
            size(s.bytes_sent),
            format!("1/{:.0}", s.traffic.ratio()),
            warm_up,
            messages,
            rest,
            headers,
            moments,
            ms(s.seconds.forward),
            ms(s.seconds.backward),
            ms(s.seconds.exchange),
            ms(s.seconds.apply + s.seconds.update),
            ms(s.seconds.total),
        ]);
    }
    crate::say!("{out}");
    crate::say!(
        "sent: by one worker in the whole run. rest: biases, norms and small or dense layers; moments: Adam's second."
    );
}
