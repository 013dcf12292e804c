//! The training step of MLX, native: gradients, clipping, update and evaluation in one call.
//!
//! Three things are kept apart: what a step computes ([`trace`]), how it is evaluated ([`step`]), and how the user's
//! objects see the result, which is the caller's matter ([`step::Owner`]).
#![deny(unsafe_code)]

pub mod adafactor;
pub mod array;
pub mod blas;
mod body;
pub mod clip;
mod course;
pub mod error;
pub mod extras;
pub mod guard;
pub mod kernels;
pub mod layout;
pub mod memory;
mod meter;
pub mod muon;
pub mod optimizer;
pub mod outputs;
pub mod pack;
pub mod plan;
pub mod precision;
pub mod rebind;
pub mod rules;
mod scene;
mod simulation;
pub mod step;
pub mod trace;

pub use error::{Error, Result};
