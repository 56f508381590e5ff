//! The redsync program.
fn main() {}
