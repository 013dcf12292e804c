"""The training step of MLX, native."""
