//! The training step of MLX, native: gradients, clipping, update and evaluation in one call.
