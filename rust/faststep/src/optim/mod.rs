//! Clipping, the update rules of `mlx.optimizers` and its schedules, as operations on arrays.
//!
//! Uses `layout` and `mlx`.
//!
//! The way of a batch: its gradients are clipped (`clip`), then `Rules` updates every buffer by its rule, with the
//! learning rate that a schedule gives.
mod adafactor;
pub mod clip;
mod given;
mod muon;
mod optimizer;
mod optimizers;
mod rules;
pub mod schedulers;

pub use adafactor::Adafactor;
pub use given::Moment;
pub use muon::Muon;
pub use optimizer::Optimizer;
pub use optimizers::{LearningRate, Optimizers};
pub use rules::{Rules, UpdateOutput};
