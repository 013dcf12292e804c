//! Operations that several rooms need and mlx-rs does not have.
use half::{bf16, f16};
use mlx_rs::{error::Result, ops, Array, Dtype};

/// A scalar in the dtype in which MLX puts a Python number beside an array.
#[allow(clippy::cast_possible_truncation)]
pub(crate) fn scalar(value: f64, dtype: Dtype) -> Array {
    match dtype {
        Dtype::Float16 => Array::from_slice(&[f16::from_f32(value as f32)], &[]),
        Dtype::Bfloat16 => Array::from_slice(&[bf16::from_f32(value as f32)], &[]),
        _ => Array::from_f32(value as f32),
    }
}

/// `new` where `take` is true or not asked for, `old` where it is false.
pub(crate) fn choose(take: Option<&Array>, new: Array, old: &Array) -> Result<Array> {
    match take {
        Some(take) => ops::select(take, new, old),
        None => Ok(new),
    }
}
