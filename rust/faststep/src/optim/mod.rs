//! Clipping, the update rules of `mlx.optimizers` and its schedules, as operations on arrays.
//!
//! Uses `error`, `layout` and `mlx`.
//!
//! The way of a batch: its gradients are clipped (`clip`), then `Rules` updates every buffer by its rule, with the
//! learning rate that a schedule gives; `codes` stores its moments in 8 bits. The rules are listed in `optimizer`, each in a file of its own there.
pub mod clip;
pub mod codes;
pub mod optimizer;
mod optimizers;
mod rules;
pub mod schedulers;
mod state;

pub use optimizer::{Attributes, Moment, Optimizer};
pub use optimizers::{LearningRate, Optimizers};
pub use rules::{Rules, UpdateOutput};
pub use state::StateLayout;
