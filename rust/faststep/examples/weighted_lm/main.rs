//! Train a decoder language model on bytes of real text, each sequence weighted by where it comes from.
//!
//! The model is mlx-rs (`model.rs`), the loss is weighted by authority and provenance entropy (`loss.rs`), which follow from the
//! text's files by a rule (`text.rs`), and the training step is one call, [`faststep::Step::step`]. `make run-rust` sets
//! `LD_LIBRARY_PATH` to the environment's libmlx and runs it:
//!
//! ```sh
//! make run-rust ARGS="--steps 800 --checkpoints runs/weighted_lm --log runs/weighted_lm.json"
//! make run-rust ARGS="--steps 800 --checkpoints runs/weighted_lm --log runs/weighted_lm.json --resume"
//! make run-rust ARGS=--gradients-only
//! make run-rust ARGS=--doctor
//! make run-rust ARGS=--naive
//! ```
//!
//! The model that has been trained goes on in 4 bits, with adapters that train on texts of yours (`lora.rs`): QLoRA. Each
//! checkpoint has them in a file of their own, too.
//!
//! ```sh
//! make run-rust ARGS="--base runs/weighted_lm/step-000800 --text docs README.md --checkpoints runs/adapters"
//! make run-rust ARGS="--base runs/weighted_lm/step-000800 --text docs README.md --adapters runs/adapters/step-000400/adapters.safetensors"
//! ```
//!
//! Memory is that of the first steps after thousands of them. Two cores of a CPU, `--layers 2 --width 32 --seq 32 --batch 4
//! --steps 5000 --every 500`; the losses of single batches, whose mean goes from 3.11 in the first 250 steps to 1.94 in the last:
//!
//! ```text
//! step    500: loss 2.0423, gradient norm 1.100; active 0.4 MiB, cache 3.4 MiB, process 52.4 MiB
//! step   1000: loss 1.6524, gradient norm 0.784; active 0.4 MiB, cache 3.4 MiB, process 52.5 MiB
//! ...
//! step   4500: loss 2.1774, gradient norm 1.593; active 0.4 MiB, cache 3.4 MiB, process 52.6 MiB
//! step   5000: loss 1.7618, gradient norm 1.924; active 0.4 MiB, cache 3.4 MiB, process 52.6 MiB
//! ```
//!
//! The same model with `--naive --steps 400 --every 200 --graph-limit 1000000` (`naive.rs`) grows by half a MiB and 940 operations
//! with each step, and has computed nothing before a value is read (on a machine with other work):
//!
//! ```text
//! naive step    200: 187856 operations put off; active 0.2 MiB, cache 0.0 MiB, process 150.7 MiB
//! naive step    400: 376256 operations put off; active 0.4 MiB, cache 0.0 MiB, process 259.6 MiB
//! reading the last loss, which waits for all steps
//! loss 2.8097 after 15.61 s; active 1.6 MiB, cache 1.6 MiB, process 277.2 MiB
//! ```
//!
//! With its defaults `--naive` stops after 15 steps, in which 24,564 operations have been put off, before anybody waits for them.
mod batches;
mod checkpoints;
mod failure;
mod gradients;
mod lora;
mod loss;
mod memory;
mod model;
mod naive;
mod options;
mod report;
mod text;
mod train;

use std::{process::ExitCode, time::Duration};

use clap::Parser;
use faststep::Step;
use mlx_rs::random;

use batches::Batches;
use failure::Failure;
use model::{Decoder, Projection};
use options::Options;
use text::Text;

/// Batches of `--doctor`.
const BATCHES: u32 = 8;
/// Time after which one of its parts hangs.
const PATIENCE: Duration = Duration::from_secs(90);

fn run(mut options: Options) -> Result<(), Failure> {
    if let Some(base) = &options.lora.base {
        options.run = lora::with_sizes_of(base, options.run)?;
    }
    let options = &options;
    options.check()?;
    let text = Text::read(&options.text, options.run.seq.unsigned_abs() as usize)?;
    println!("{text}");
    let batches = Batches::new(text, &options.run);
    if options.naive {
        return naive::train(options, &batches);
    }
    random::seed(options.run.seed)?;
    match &options.lora.base {
        Some(base) => with(
            options,
            &batches,
            lora::over(base, &options.run, &options.lora)?,
        ),
        None => with(options, &batches, Decoder::new(&options.run)?),
    }
}

fn with<P: Projection>(
    options: &Options,
    batches: &Batches,
    model: Decoder<P>,
) -> Result<(), Failure> {
    let step = train::new_step(&options.run, model)?;
    if options.doctor {
        doctor(batches, step)
    } else if options.gradients_only {
        gradients::show(options, batches, step)
    } else {
        train::train(options, batches, step)
    }
}

fn doctor<P: Projection>(batches: &Batches, step: Step<Decoder<P>>) -> Result<(), Failure> {
    let batches: Vec<_> = (0..BATCHES)
        .map(|number| batches.batch(number).to_vec())
        .collect();
    let found = step.diagnose(&batches, PATIENCE);
    print!("{found}");
    if found.is_healthy() {
        Ok(())
    } else {
        Err(Failure::Fault)
    }
}

fn main() -> ExitCode {
    match run(Options::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("error: {failure}");
            failure.code()
        }
    }
}
