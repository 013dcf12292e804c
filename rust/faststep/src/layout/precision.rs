//! Mixed precision: the loss in half precision, the update in float32, and a scale that keeps float16 gradients in range.
use mlx_rs::{error::Result, ops, Array, Dtype};

use crate::mlx::ops::choose;

/// The way in which an update stores what it computes in float32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stored {
    /// True if the moments of large tensors are codes of 8 bits.
    pub codes: bool,
    /// True if parameters and moments in bfloat16 are rounded up or down by chance.
    pub stochastic: bool,
}

// Micikevicius et al., Mixed Precision Training (2018), with the constants of PyTorch's GradScaler; the bounds keep a
// long run of bad or good batches from reaching zero or infinity
const FIRST_SCALE: f32 = 65536.0;
const GROWTH_INTERVAL: i32 = 2000;
const SMALLEST: f32 = 1.0 / 1024.0;
const LARGEST: f32 = 16_777_216.0;

/// Return whether tensors of this dtype have a float32 master.
#[must_use]
pub fn is_half(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::Float16 | Dtype::Bfloat16)
}

/// The dtype in which tensors of this dtype are summed up.
#[must_use]
pub fn wide(dtype: Dtype) -> Dtype {
    if is_half(dtype) {
        Dtype::Float32
    } else {
        dtype
    }
}

/// Return whether a loss computed in this dtype has to be scaled.
#[must_use]
pub fn scales(compute: Option<Dtype>) -> bool {
    compute == Some(Dtype::Float16)
}

/// The scale to begin with, and no good step yet.
pub(crate) fn first_scale() -> [Array; 2] {
    [Array::from_f32(FIRST_SCALE), Array::from_int(0)]
}

/// The scale after a step: half of it after a bad one, twice it after 2,000 good ones in a row.
pub(crate) fn next_scale([scale, streak]: [&Array; 2], good: &Array) -> Result<[Array; 2]> {
    let longer = streak.add(Array::from_int(1))?;
    let grows = longer.ge(Array::from_int(GROWTH_INTERVAL))?;
    let larger = scale.multiply(Array::from_f32(2.0))?;
    let larger = choose(
        Some(&grows),
        ops::minimum(larger, Array::from_f32(LARGEST))?,
        scale,
    )?;
    let smaller = scale.multiply(Array::from_f32(0.5))?;
    let smaller = ops::maximum(smaller, Array::from_f32(SMALLEST))?;
    let none = Array::from_int(0);
    let streak = choose(
        Some(&ops::logical_and(good, grows.logical_not()?)?),
        longer,
        &none,
    )?;
    Ok([choose(Some(good), larger, &smaller)?, streak])
}
