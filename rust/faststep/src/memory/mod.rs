//! The device's memory: planned before steps take it, and kept within bounds while they overlap.
//!
//! Uses `trace`, `layout` and `mlx`.
//!
//! The way of a batch: before one is handed to the device, `MemoryBudget` gives the limit under which it may overlap with
//! those before it. A plan takes a traced step instead: `PlanInputs` are its arrays, `Timeline` the order in which they are
//! evaluated, and `Simulator` goes through MLX's evaluation without computing anything.
mod budget;
mod inputs;
mod plan;
mod simulator;
mod timeline;

pub(crate) use budget::{MemoryBudget, MemoryLimit};
pub(crate) use inputs::{PlanInputs, PlannedPart};
pub(crate) use plan::plan;
pub use plan::Plan;
