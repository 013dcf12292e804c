//! The plan of the device's memory, before steps take it.
//!
//! Uses `trace`, `layout`, `evaluation` and `mlx`.
//!
//! A plan takes a traced step: `PlanInputs` are its arrays, `Timeline` goes through the calls of a few updates, by the
//! schedule of `evaluation`, and `Simulator` through MLX's evaluation of each, without computing anything. `by_operation` is
//! what is in use while each operation runs, by what it is for.
mod inputs;
mod plan;
mod simulator;
mod timeline;

pub(crate) use inputs::{PlanInputs, PlannedPart};
pub use plan::Plan;
pub(crate) use plan::{by_operation, plan};
