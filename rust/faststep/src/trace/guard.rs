//! The check on the device that a step is finite; one that is not changes nothing.
use mlx_rs::{error::Result, ops, Array, Dtype};

/// The condition for skipping a step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Guard {
    /// A loss above this counts as bad as NaN does.
    pub max_loss: Option<f64>,
}

impl Guard {
    /// The largest loss that is good.
    #[allow(clippy::cast_possible_truncation)] // MLX keeps Python's floats as float32
    pub(crate) fn limit(self) -> f32 {
        let limit = self.max_loss.map_or(f32::MAX, |limit| limit as f32);
        limit.min(f32::MAX)
    }

    /// Build the flag of a good step, a bool scalar: loss and norm are finite and the loss is not above its limit.
    ///
    /// A gradient so large that its square overflows float32 counts as infinite.
    ///
    /// # Errors
    /// When MLX refuses an operation.
    pub fn good(&self, loss: &Array, norm: &Array) -> Result<Array> {
        let limit = self.limit();
        // A barrier: otherwise the divisor of the loss is a constant in the kernel's source, and each number of tokens
        // compiles another kernel (half a second of g++).
        let loss = loss.as_dtype(Dtype::Float32)?.contiguous()?;
        // comparisons with NaN are false
        let below = loss.le(Array::from_f32(limit))?;
        let above = loss.ge(Array::from_f32(f32::MIN))?;
        let good = ops::logical_and(ops::logical_and(below, above)?, Self::finite(norm)?)?;
        good.contiguous() // a barrier: once, not for every element
    }

    /// Build the flag of a finite norm, a bool scalar.
    pub(crate) fn finite(norm: &Array) -> Result<Array> {
        norm.le(Array::from_f32(f32::MAX))
    }

    /// Build [`Guard::good`] with the condition that there is anything to average over.
    pub(crate) fn any(good: &Array, weight: &Array) -> Result<Array> {
        let some = weight.contiguous()?.gt(Array::from_f32(0.0))?;
        Self::and_weight(&ops::logical_and(good, some)?, weight)
    }

    /// Build [`Guard::good`] with the condition that a weight is a number from 0 on.
    pub(crate) fn and_weight(good: &Array, weight: &Array) -> Result<Array> {
        let weight = weight.as_dtype(Dtype::Float32)?.contiguous()?;
        let within = ops::logical_and(
            weight.ge(Array::from_f32(0.0))?,
            weight.le(Array::from_f32(f32::MAX))?,
        )?;
        ops::logical_and(good, within)?.contiguous()
    }
}
