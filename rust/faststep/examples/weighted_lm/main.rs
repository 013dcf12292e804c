//! Train a decoder language model on bytes of real text, each sequence weighted by where it comes from.
//!
//! The model is mlx-rs ([`model`]), the loss is weighted by authority and provenance entropy ([`loss`]), and the training step
//! is one call, [`faststep::Step::step`]. With the environment's libmlx in `LD_LIBRARY_PATH` (`make run-rust` sets it):
//!
//! ```sh
//! cargo run --release --example weighted_lm -- --steps 800 --checkpoints runs/weighted_lm
//! cargo run --release --example weighted_lm -- --steps 800 --checkpoints runs/weighted_lm --resume
//! cargo run --release --example weighted_lm -- --gradients-only
//! cargo run --release --example weighted_lm -- --naive --steps 200
//! ```
mod batches;
mod checkpoints;
mod failure;
mod gradients;
mod loss;
mod memory;
mod model;
mod naive;
mod options;
mod report;
mod text;
mod train;

use std::process::ExitCode;

use clap::Parser;

use batches::Batches;
use failure::Failure;
use options::Options;
use text::Text;

fn run(options: &Options) -> Result<(), Failure> {
    options.check()?;
    let text = Text::read(&options.text, options.run.seq.unsigned_abs() as usize)?;
    println!("{text}");
    let batches = Batches::new(text, &options.run);
    if options.naive {
        naive::train(options, &batches)
    } else if options.gradients_only {
        gradients::show(options, &batches)
    } else {
        train::train(options, &batches)
    }
}

fn main() -> ExitCode {
    match run(&Options::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("error: {failure}");
            failure.code()
        }
    }
}
