//! Clipping by the global norm of the gradients, and by value.
use mlx_rs::{error::Result, ops, Array};

use crate::{optimizer::scalar, pack, precision};

/// How many values are added one after the other.
const ROW: i32 = 512;

/// Gradients up to so many bytes are joined for their sum, so many at least, and up to so many bytes in all.
const SMALL_BYTES: usize = 128 << 10;
const MANY: usize = 8;
const JOINED_BYTES: usize = 16 << 20;

/// The Euclidean norm of all gradients together: a float32 scalar. Half precision is squared and summed in float32.
///
/// `squares`: for each gradient, sums of its squares that are there already.
///
/// # Errors
/// When MLX refuses an operation.
pub fn global_norm(gradients: &[Array], squares: &[Option<Array>]) -> Result<Array> {
    let mut parts = Vec::new();
    let mut small: Vec<&Array> = Vec::new();
    for (index, gradient) in gradients.iter().enumerate() {
        match squares.get(index) {
            Some(Some(squares)) => parts.push(squares.sum(None)?),
            _ if gradient.nbytes() <= SMALL_BYTES => small.push(gradient),
            _ => parts.push(sum_of_squares(gradient)?),
        }
    }
    while let Some(first) = small.first() {
        let dtype = first.dtype();
        let (same, others) = small.into_iter().partition(|each| each.dtype() == dtype);
        parts.extend(sums_of_small(same)?);
        small = others;
    }
    let total = parts
        .into_iter()
        .map(Ok)
        .reduce(|total, part| total?.add(part?));
    total.unwrap_or_else(|| Ok(Array::from_f32(0.0)))?.sqrt()
}

fn sum_of_squares(gradient: &Array) -> Result<Array> {
    let wide = gradient.as_dtype(precision::wide(gradient.dtype()))?;
    sum(wide.square()?)
}

// gradients of one dtype; where they are many, joining them costs less than a few tasks for each
fn sums_of_small(gradients: Vec<&Array>) -> Result<Vec<Array>> {
    if gradients.len() < MANY {
        return gradients.into_iter().map(sum_of_squares).collect();
    }
    let most = (JOINED_BYTES / SMALL_BYTES).min(pack::MAX_PARTS);
    let sums = gradients.chunks(most).map(|chunk| {
        let flat = chunk.iter().map(|each| each.reshape(&[-1]));
        let flat: Vec<Array> = flat.collect::<Result<_>>()?;
        let parts: Vec<&Array> = flat.iter().collect();
        match pack::squares(&parts)? {
            Some(squares) => squares.sum(None),
            None => sum_of_squares(&pack::join(&parts)?),
        }
    });
    sums.collect()
}

// MLX's CPU adds one element after the other: over a million of them a float32 sum is off by a thousandth. Sums of rows,
// and sums of those, keep it within rounding. CUDA sums by blocks itself.
fn sum(values: Array) -> Result<Array> {
    if pack::is_cuda() {
        return values.sum(None);
    }
    // whole rows first: joining the rows of a transposed gradient would copy it
    let row = values
        .shape()
        .last()
        .is_some_and(|n| (16..=16 * ROW).contains(n));
    let values = if values.ndim() > 1 && row {
        values.sum_axis(-1, None)?
    } else {
        values
    };
    let mut values = values.reshape(&[-1])?;
    let mut rest: Option<Array> = None;
    loop {
        let size = i32::try_from(values.size()).unwrap_or(i32::MAX);
        let rows = size / ROW;
        if rows < 2 {
            let total = values.sum(None)?;
            return rest.map_or(Ok(total.clone()), |rest| total.add(rest));
        }
        let even = rows * ROW;
        let mut parts = if even < size {
            values.split_at_indices(&[even], 0)?
        } else {
            vec![values]
        };
        if let Some(tail) = parts.get(1) {
            let tail = tail.sum(None)?;
            rest = Some(match rest {
                None => tail,
                Some(rest) => rest.add(tail)?,
            });
        }
        values = parts
            .swap_remove(0)
            .reshape(&[rows, ROW])?
            .sum_axis(1, None)?;
    }
}

/// What gradients of this norm have to be multiplied by for their norm to be at most `max_norm`, a float32 scalar:
/// `min(max_norm / (norm + 1e-6), 1)`, the formula of `mlx.optimizers.clip_grad_norm`.
///
/// # Errors
/// When MLX refuses an operation.
pub fn scale(norm: &Array, max_norm: f64) -> Result<Array> {
    #[allow(clippy::cast_possible_truncation)] // MLX keeps Python's floats as float32
    let max_norm = Array::from_f32(max_norm as f32);
    let scale = max_norm.divide(norm.add(Array::from_f32(1e-6))?)?;
    ops::minimum(scale, Array::from_f32(1.0))
}

/// Multiply gradients by a scalar, in their own dtypes.
///
/// # Errors
/// When MLX refuses an operation.
pub fn by(gradients: &[Array], scale: &Array) -> Result<Vec<Array>> {
    // a barrier: fused into the update, the scalar would be computed again for every element
    let scale = scale.contiguous()?;
    let multiply = |gradient: &Array| gradient.multiply(&scale)?.as_dtype(gradient.dtype());
    gradients.iter().map(multiply).collect()
}

/// Bring every element of the gradients into `[-max_value, max_value]`.
///
/// # Errors
/// When MLX refuses an operation.
pub fn by_value(gradients: &[Array], max_value: f64) -> Result<Vec<Array>> {
    let clip = |gradient: &Array| {
        let limit = scalar(max_value, gradient.dtype());
        ops::maximum(ops::minimum(gradient, &limit)?, limit.negative()?)
    };
    gradients.iter().map(clip).collect()
}
