//! The command line.
use std::path::PathBuf;

use clap::{
    builder::{PossibleValuesParser, TypedValueParser},
    value_parser, Args, Parser,
};
use serde::Serialize;

use crate::failure::Failure;

/// Train a decoder language model on bytes of real text, each sequence weighted by where it comes from.
#[derive(Debug, Parser)]
#[command(args_override_self = true)]
#[allow(clippy::struct_excessive_bools)] // flags of a command line
pub struct Options {
    #[command(flatten)]
    pub run: Run,

    #[command(flatten)]
    pub lora: Adaptation,

    /// Text files, and directories of them; the standard library of `python3` unless told otherwise
    #[arg(long, value_name = "PATH", num_args = 1..)]
    pub text: Vec<PathBuf>,

    /// Write checkpoints into this directory
    #[arg(long, value_name = "DIR")]
    pub checkpoints: Option<PathBuf>,

    /// Steps between checkpoints; the last step writes one too
    #[arg(long, value_name = "STEPS", default_value_t = 100, value_parser = value_parser!(u32).range(1..))]
    pub save_every: u32,

    /// Number of checkpoints that are kept, the last ones
    #[arg(long, value_name = "COUNT", default_value_t = 3, value_parser = value_parser!(u32).range(1..))]
    pub keep: u32,

    /// Go on from the last checkpoint; all options of the run have to be the same
    #[arg(long, requires = "checkpoints")]
    pub resume: bool,

    /// Steps between lines of progress
    #[arg(long, value_name = "STEPS", default_value_t = 50, value_parser = value_parser!(u32).range(1..))]
    pub every: u32,

    /// Write a JSON line for each step into this file
    #[arg(long, value_name = "FILE")]
    pub log: Option<PathBuf>,

    /// Print the norms of the next batch's gradients, and change nothing
    #[arg(long, conflicts_with_all = ["naive", "log"])]
    pub gradients_only: bool,

    /// Try the parts of the training one by one, and name the first that hangs or fails; nothing is kept
    #[arg(long, conflicts_with_all = ["naive", "log", "gradients_only", "resume", "checkpoints"])]
    pub doctor: bool,

    /// Train in the broken order: a plain mlx-rs loop that evaluates nothing
    #[arg(long, conflicts_with_all = ["resume", "checkpoints"])]
    pub naive: bool,

    /// Stop the naive loop when so many operations have been put off
    #[arg(long, value_name = "OPERATIONS", default_value_t = 20_000, value_parser = value_parser!(u32).range(1..))]
    pub graph_limit: u32,
}

/// Options that the results depend on: a checkpoint is only resumed with the same ones.
#[derive(Clone, Copy, Debug, Args, Serialize)]
pub struct Run {
    /// Training steps
    #[arg(long, default_value_t = 400, value_parser = value_parser!(u32).range(1..))]
    pub steps: u32,

    /// Sequences in a batch
    #[arg(long, default_value_t = 16, value_parser = value_parser!(i32).range(1..))]
    pub batch: i32,

    /// Bytes in a sequence
    #[arg(long, default_value_t = 64, value_parser = value_parser!(i32).range(2..))]
    pub seq: i32,

    /// Blocks of the model
    #[arg(long, default_value_t = 4, value_parser = value_parser!(i32).range(1..))]
    pub layers: i32,

    /// Width of the residual stream
    #[arg(long, default_value_t = 128, value_parser = value_parser!(i32).range(1..))]
    pub width: i32,

    /// Heads of each attention
    #[arg(long, default_value_t = 4, value_parser = value_parser!(i32).range(1..))]
    pub heads: i32,

    /// Share of activations that a step drops, from 0 to below 1
    #[arg(long, default_value_t = 0.0)]
    pub dropout: f32,

    /// Learning rate after warm-up
    #[arg(long, default_value_t = 3e-3)]
    pub learning_rate: f64,

    /// Steps of warm-up; a cosine decay to a twentieth follows
    #[arg(long, value_name = "STEPS", default_value_t = 50, value_parser = value_parser!(u32).range(1..))]
    pub warm_up: u32,

    /// Seed of weights, batches and dropout
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
}

/// Adapters over a trained model in few bits.
#[derive(Clone, Debug, Args, Serialize)]
pub struct Adaptation {
    /// Train adapters (LoRA) over the model of this checkpoint, in few bits and of the sizes that it has
    #[arg(long, value_name = "DIR", conflicts_with_all = ["naive", "layers", "width", "heads", "seq"])]
    #[serde(skip)]
    pub base: Option<PathBuf>,

    /// Begin with the adapters of this file: adapters.safetensors of a checkpoint
    #[arg(
        long,
        value_name = "FILE",
        requires = "base",
        conflicts_with = "resume"
    )]
    #[serde(skip)]
    pub adapters: Option<PathBuf>,

    /// Bits of a weight of the base
    #[arg(long, default_value = "4", requires = "base", value_parser = one_of(["2", "3", "4", "5", "6", "8"]))]
    pub bits: i32,

    /// Weights of the base that share a scale
    #[arg(long, value_name = "WEIGHTS", default_value = "64", requires = "base", value_parser = one_of(["32", "64", "128"]))]
    pub group_size: i32,

    /// Rank of an adapter
    #[arg(long, default_value_t = 8, requires = "base", value_parser = value_parser!(i32).range(1..))]
    pub rank: i32,

    /// Factor of an adapter's output
    #[arg(long, value_name = "FACTOR", default_value_t = 20.0, requires = "base")]
    pub lora_scale: f32,
}

fn one_of<const N: usize>(values: [&'static str; N]) -> impl TypedValueParser<Value = i32> {
    PossibleValuesParser::new(values).try_map(|text| text.parse::<i32>())
}

impl Options {
    /// Check options that depend on each other, which the parser cannot.
    pub fn check(&self) -> Result<(), Failure> {
        let Run {
            width,
            heads,
            dropout,
            learning_rate,
            ..
        } = self.run;
        let refused = |message| Err(Failure::Input(message));
        if width % heads != 0 {
            return refused(format!(
                "--width: expected a multiple of --heads {heads}, got {width}"
            ));
        }
        if !(0.0..1.0).contains(&dropout) {
            return refused(format!(
                "--dropout: expected a number from 0 to below 1, got {dropout}"
            ));
        }
        if !learning_rate.is_finite() || learning_rate <= 0.0 {
            return refused(format!(
                "--learning-rate: expected a number above 0, got {learning_rate}"
            ));
        }
        let group = self.lora.group_size;
        if self.lora.base.is_some() && width % group != 0 {
            return refused(format!(
                "--group-size: expected a divisor of {width}, the width of the base, got {group}"
            ));
        }
        Ok(())
    }

    /// Return whether the run shows itself after that many steps.
    pub fn reports(&self, steps: u32) -> bool {
        steps.is_multiple_of(self.every) || steps == self.run.steps
    }

    /// Return whether a checkpoint is due after that many steps.
    pub fn saves(&self, steps: u32) -> bool {
        self.checkpoints.is_some()
            && (steps.is_multiple_of(self.save_every) || steps == self.run.steps)
    }
}
