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
    /// Measure a stage on this machine, against one pass over memory
    #[command(subcommand, arg_required_else_help = true)]
    Bench(bench::Bench),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let done = match cli.command {
        Command::Bench(bench) => bench.run(),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            complain(&format!("{error:#}"));
            ExitCode::FAILURE
        }
    }
}

/// One line on standard error, in one write: the lines of several ranks share a terminal.
fn complain(what: &str) {
    use std::io::Write;
    // With standard error gone there is nobody left to tell.
    let _ = std::io::stderr().write_all(format!("redsync: {what}\n").as_bytes());
}
