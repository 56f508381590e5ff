//! The `redsync` program: reads the command line, runs a command, and turns any error into one line and an exit status.
//! Standard output carries results only; bars and messages go to standard error.

/// A line of the result on standard output; a reader that has gone away (`| head`) is no error.
macro_rules! say {
    ($($text:tt)*) => {{
        use std::io::Write as _;
        let _ = writeln!(std::io::stdout(), $($text)*);
    }};
}
pub(crate) use say;

mod bench;
mod files;
mod memory;
mod plan;
mod platform;
mod ranks;
mod report;
mod simulate;
mod train;

use clap::{Parser, Subcommand};
use std::process::ExitCode;

/// Distributed deep-learning training over networks that are too slow for it.
///
/// Each rank sends the 0.1% largest entries of an accumulated gradient instead of all of it.
#[derive(Debug, Parser)]
#[command(name = "redsync", version, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Train a network; without any option, a small one dense and compressed, side by side
    ///
    /// Without any option it shows what compression is for, in about a minute and without a network: 4 workers, as threads of this
    /// process, train a small network on handwritten digits, first dense and then compressed. The table at the end has the accuracy
    /// and the bytes of both, and what a step would take on 100 Mbit/s, 1 Gbit/s and 10 Gbit/s. With any option it trains once, as
    /// the options say; `redsync train --seed 1` is the second of them.
    Train(train::Train),
    /// Train by several methods, the rest being equal, and show them side by side
    Compare(train::Compare),
    /// Measure a stage on this machine, against one pass over memory
    #[command(subcommand, arg_required_else_help = true)]
    Bench(bench::Bench),
    /// Predict whether compression helps here, and for which layers
    Plan(plan::Plan),
    /// Predict how a model scales on a platform, from 1 to 1,024 ranks
    Simulate(simulate::Simulate),
    /// Make one HTML page from training runs, benchmarks, plans and simulations
    Report(report::Report),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    memory::keep_what_is_freed();
    let done = match cli.command {
        Command::Train(train) => train.run(),
        Command::Compare(compare) => compare.run(),
        Command::Bench(bench) => bench.run(),
        Command::Plan(plan) => plan.run(),
        Command::Simulate(simulate) => simulate.run(),
        Command::Report(report) => report.run(),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            complain(&format!("{error:#}"));
            if error.is::<Usage>() { ExitCode::from(2) } else { ExitCode::FAILURE }
        }
    }
}

/// A wrong choice of the user, which ends with status 2 as clap's own refusals do.
#[derive(Debug)]
struct Usage(String);

impl std::fmt::Display for Usage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Usage {}

fn usage(what: String) -> anyhow::Error {
    anyhow::Error::new(Usage(what))
}

/// One line on standard error, in one write: the lines of several ranks share a terminal.
fn complain(what: &str) {
    use std::io::Write;
    // With standard error gone there is nobody left to tell.
    let _ = std::io::stderr().write_all(format!("redsync: {what}\n").as_bytes());
}
