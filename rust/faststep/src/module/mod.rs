//! The training step of an mlx-rs module: the front for Rust programs.
//!
//! Uses `engine`, `trace`, `optim`, `layout`, `mlx` and `error`.
//!
//! The way of a batch: [`Step::step`] takes in what the user has changed (`sync`), finds or makes the traces of the call
//! (`run`, `key`), whose loss is computed by the module with tracers in its `slots` (`host`), lets the engine run them, and
//! gives out a [`StepOutput`]. `optimizer` and `state` name the step's arrays as Python does, `checkpoint` writes them. `diagnosis` tries the
//! parts of a training one by one.
mod checkpoint;
mod diagnosis;
mod host;
mod key;
mod loss;
mod optimizer;
mod output;
mod run;
mod slots;
mod state;
mod step;
mod sync;

pub use diagnosis::{Diagnosis, Finding, Rung};
pub use loss::Loss;
pub use output::{Stats, StepOutput};
pub use step::Step;
