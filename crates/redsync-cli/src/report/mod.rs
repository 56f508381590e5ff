//! placeholder
use clap::Args;
#[derive(Debug, Args)]
pub struct Report {}
impl Report {
    pub fn run(self) -> anyhow::Result<()> {
        Ok(())
    }
}
