//! Clipping by the global norm of the gradients, and by value.
use mlx_rs::{error::Result, ops, Array, Dtype};

use crate::{
    layout::precision,
    mlx::{join, ops::scalar},
};

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
    sum_of_squares(gradients, squares)?.sqrt()
}

/// The square of [`global_norm`].
///
/// # Errors
/// When MLX refuses an operation.
pub fn sum_of_squares(gradients: &[Array], squares: &[Option<Array>]) -> Result<Array> {
    let mut parts = Vec::new();
    let mut rest = Vec::new();
    for (index, gradient) in gradients.iter().enumerate() {
        match squares.get(index) {
            Some(Some(squares)) => parts.push(squares.sum(None)?),
            _ => rest.push(gradient.as_dtype(precision::wide(gradient.dtype()))?),
        }
    }
    while let Some(first) = rest.first() {
        let dtype = first.dtype();
        let (same, others) = rest.into_iter().partition(|each| each.dtype() == dtype);
        parts.extend(sums_of_squares(same)?);
        rest = others;
    }
    let total = parts
        .into_iter()
        .map(Ok)
        .reduce(|total, part| total?.add(part?));
    total.unwrap_or_else(|| Ok(Array::from_f32(0.0)))
}

/// What gradients and a loss give, where one kernel or task gives all of it.
#[derive(Debug)]
pub struct Checked {
    /// The norm of the gradients.
    pub norm: Array,
    /// The factor that clips them.
    pub factor: Array,
    /// Whether norm and loss are finite and the loss is at most its limit.
    pub good: Array,
    /// Whether not, where that is given too.
    pub bad: Option<Array>,
}

/// The norm of gradients, the factor that clips them, and whether norm and loss are finite and the loss at most `max_loss`,
/// where one kernel or task gives all three: on CUDA from sums of squares that are there, on a CPU from gradients that become
/// float32. As [`global_norm`] and [`scale`] give them, but for the order of the norm's summation on CUDA.
///
/// # Errors
/// When MLX refuses an operation.
pub fn checked(
    gradients: &[Array],
    squares: &[Option<Array>],
    loss: &Array,
    max_norm: Option<f64>,
    max_loss: f32,
) -> Result<Option<Checked>> {
    #[allow(clippy::cast_possible_truncation)] // MLX keeps Python's floats as float32
    let max_norm = max_norm.map_or(f32::INFINITY, |max_norm| max_norm as f32);
    let limits = [max_norm, max_loss];
    let loss = loss.as_dtype(Dtype::Float32)?;
    if !join::is_cuda() {
        let wide = gradients
            .iter()
            .map(|each| each.as_dtype(precision::wide(each.dtype())));
        let wide: Vec<Array> = wide.collect::<Result<_>>()?;
        let made = join::checked(&wide, &loss, limits)?;
        return Ok(made.map(|[norm, factor, good, bad]| Checked {
            norm,
            factor,
            good,
            bad: Some(bad),
        }));
    }
    let squares: Option<Vec<&Array>> = squares.iter().map(Option::as_ref).collect();
    let made = match squares {
        Some(squares) => join::norm(&squares, &loss, limits)?,
        None => None,
    };
    Ok(made.map(|[norm, factor, good]| Checked {
        norm,
        factor,
        good,
        bad: None,
    }))
}

// sums of squares of gradients that share a dtype
fn sums_of_squares(gradients: Vec<Array>) -> Result<Vec<Array>> {
    if let Some(sum) = join::sum_of_squares(&gradients)? {
        return Ok(vec![sum]);
    }
    let (small, large): (Vec<_>, Vec<_>) = gradients
        .into_iter()
        .partition(|gradient| gradient.nbytes() <= SMALL_BYTES);
    let mut sums = sums_of_small(&small)?;
    for gradient in &large {
        let squares = join::squares_of(gradient)?;
        sums.push(squares.map_or_else(|| gradient.square(), Ok)?.sum(None)?);
    }
    Ok(sums)
}

// join many small gradients: one join costs less than a few kernels per gradient
fn sums_of_small(gradients: &[Array]) -> Result<Vec<Array>> {
    if gradients.len() < MANY {
        let sums = gradients.iter().map(|each| each.square()?.sum(None));
        return sums.collect();
    }
    let most = (JOINED_BYTES / SMALL_BYTES).min(join::MAX_PARTS);
    let sums = gradients.chunks(most).map(|chunk| {
        let flat = chunk.iter().map(|each| each.reshape(&[-1]));
        let flat: Vec<Array> = flat.collect::<Result<_>>()?;
        let parts: Vec<&Array> = flat.iter().collect();
        match join::squares(&parts)? {
            Some(squares) => squares.sum(None),
            None => join::join(&parts)?.square()?.sum(None),
        }
    });
    sums.collect()
}

/// The factor that brings gradients of this norm to a norm of at most `max_norm`, a float32 scalar:
/// `min(max_norm / (norm + 1e-6), 1)`, the formula of `mlx.optimizers.clip_grad_norm`. Both are float32 scalars.
///
/// # Errors
/// When MLX refuses an operation.
pub fn scale(norm: &Array, max_norm: &Array) -> Result<Array> {
    let scale = max_norm.divide(norm.add(Array::from_f32(1e-6))?)?;
    ops::minimum(scale, Array::from_f32(1.0))
}

/// Multiply gradients by a scalar, in their own dtypes.
///
/// # Errors
/// When MLX refuses an operation.
pub fn by(gradients: &[Array], scale: &Array) -> Result<Vec<Array>> {
    // a barrier: fused into the update, the scalar would be computed again for every element
    let scale = join::contiguous(scale)?;
    let multiply = |gradient: &Array| {
        let clipped = gradient.multiply(&scale)?;
        if gradient.dtype().is_float() {
            clipped.as_dtype(gradient.dtype())
        } else {
            Ok(clipped) // a parameter of integers has float32 gradients then, as in MLX
        }
    };
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

#[cfg(test)]
mod tests {
    use mlx_rs::error::Exception;

    use super::*;
    use crate::trace::Guard;

    const MAX_NORM: f64 = 0.5;

    fn array(values: &[f32]) -> Array {
        let len = i32::try_from(values.len()).unwrap_or(0);
        Array::from_slice(values, &[len])
    }

    // the bits of what operations of MLX give, and of what one task does
    fn bits(gradients: &[Array], loss: f32, max_loss: Option<f64>) -> Result<[[u32; 3]; 2]> {
        let guard = Guard { max_loss };
        let loss = Array::from_f32(loss);
        let norm = global_norm(gradients, &vec![None; gradients.len()])?;
        #[allow(clippy::cast_possible_truncation)] // MLX keeps Python's floats as float32
        let max_norm = Array::from_f32(MAX_NORM as f32);
        let (factor, good) = (scale(&norm, &max_norm)?, guard.good(&loss, &norm)?);
        let none = vec![None; gradients.len()];
        let checked = checked(gradients, &none, &loss, Some(MAX_NORM), guard.limit())?;
        let Some(Checked {
            norm: our_norm,
            factor: our_factor,
            good: our_good,
            bad: Some(bad),
        }) = checked
        else {
            return Err(Exception::custom("there is no such task"));
        };
        let bad = bad.item_exact::<bool>();
        let (good, our_good) = (good.item_exact::<bool>(), our_good.item_exact::<bool>());
        assert_eq!(our_good, !bad);
        let number = |array: &Array| {
            let value = array.item_exact::<f32>();
            if value.is_nan() { f32::NAN } else { value }.to_bits()
        };
        Ok([
            [number(&norm), number(&factor), good.into()],
            [number(&our_norm), number(&our_factor), our_good.into()],
        ])
    }

    #[test]
    fn one_task_gives_what_operations_give() -> Result<()> {
        if join::is_cuda() {
            return Ok(());
        }
        let small = array(&[0.1, -0.2, 0.3]);
        let matrix = Array::from_slice(&[0.5_f32, 1.0, -2.0, 3.0, 4.0, -5.0], &[2, 3]);
        let cases = [
            vec![small.clone()],
            vec![small.clone(), matrix.clone()],
            vec![matrix.transpose()?, small.clone()],
            vec![array(&[0.0; 5]), array(&[])],
            vec![Array::from_f32(0.25)],
            vec![Array::ones::<f32>(&[200, 300])?.multiply(Array::from_f32(0.1))?],
            vec![
                small.as_dtype(Dtype::Bfloat16)?,
                matrix.as_dtype(Dtype::Float16)?,
            ],
            vec![small.clone(), array(&[f32::NAN])],
            vec![small.clone(), array(&[f32::INFINITY])],
            vec![array(&[1e30])], // its square overflows
            (0_i16..50).map(|i| array(&[f32::from(i), 0.5])).collect(),
        ];
        for gradients in &cases {
            for loss in [
                0.5,
                3.0,
                f32::NAN,
                f32::INFINITY,
                f32::NEG_INFINITY,
                f32::MAX,
            ] {
                for max_loss in [None, Some(1.0)] {
                    let [theirs, ours] = bits(gradients, loss, max_loss)?;
                    assert_eq!(ours, theirs, "{gradients:?}, {loss}, {max_loss:?}");
                }
            }
        }
        Ok(())
    }
}
