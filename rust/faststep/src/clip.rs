//! Clipping by the global norm of the gradients.
use mlx_rs::{error::Result, ops, Array, Dtype};



/// The Euclidean norm of all gradients together: a float32 scalar. Half precision is squared and summed in float32.
///
/// # Errors
/// When MLX refuses an operation.
pub fn global_norm(gradients: &[Array]) -> Result<Array> {
    let mut total: Option<Array> = None;
    for gradient in gradients {
        let gradient = match gradient.dtype() {
            Dtype::Float16 | Dtype::Bfloat16 => gradient.as_dtype(Dtype::Float32)?,
            _ => gradient.clone(),
        };
        let squares = gradient.square()?.sum(None)?;
        total = Some(match total {
            None => squares,
            Some(total) => total.add(squares)?,
        });
    }
    Ok(total.unwrap_or_else(|| Array::from_f32(0.0)).sqrt()?)
}

/// Scale gradients so that their norm is at most `max_norm`: `min(max_norm / (norm + 1e-6), 1)` times each, the formula
/// of `mlx.optimizers.clip_grad_norm`.
///
/// # Errors
/// When MLX refuses an operation.
pub fn by_global_norm(gradients: &[Array], norm: &Array, max_norm: f64) -> Result<Vec<Array>> {
    #[allow(clippy::cast_possible_truncation)] // MLX keeps Python's floats as float32
    let max_norm = Array::from_f32(max_norm as f32);
    let scale = max_norm.divide(norm.add(Array::from_f32(1e-6))?)?;
    let scale = ops::minimum(scale, Array::from_f32(1.0))?;
    let clip = |gradient: &Array| Ok(gradient.multiply(&scale)?.as_dtype(gradient.dtype())?);
    gradients.iter().map(clip).collect()
}
