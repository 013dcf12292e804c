//! MLX's and Python's own objects: arrays, classes, the random key, the GIL, errors.
//!
//! Uses no other room.
pub mod bridge;
pub mod classes;
pub mod collector;
pub mod errors;
pub mod gil;
pub mod glance;
pub mod random;
