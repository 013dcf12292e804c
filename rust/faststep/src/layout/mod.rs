//! The places of parameters, gradients and state: tensors in shared buffers, and the arrays that a step keeps beside them.
//!
//! Uses `mlx`.
//!
//! The way of a batch: its gradients come by tensor and are joined into the buffers of a `Layout` (`pack`); the update
//! goes over buffers; views into them are shown to the user. `aux_state` says where masters, average, window and loss
//! scale stand behind the optimizer's arrays, `named` keeps them by the names of their parameters, `precision` when they are needed.
pub mod aux_state;
#[allow(clippy::module_inception)] // the concept that the room is named after
mod layout;
mod named;
pub mod pack;
pub mod precision;

pub use layout::{Layout, Tensor};
pub use named::NamedAuxState;
