//! The schedules of `mlx.optimizers`, operation for operation; each gives a [`LearningRate`].
//!
//! ```
//! use faststep::{schedulers::{cosine_decay, join_schedules, linear_schedule}, Optimizer, Optimizers};
//!
//! let warm_up = linear_schedule(0.0, 3e-4, 100);
//! let rate = join_schedules(warm_up, vec![(100, cosine_decay(3e-4, 10_000, 3e-5))]);
//! let optimizers = Optimizers::new(Optimizer::adamw(0.1), rate);
//! # assert_eq!(format!("{optimizers:?}").matches("schedule").count(), 1);
//! ```
use std::f64::consts::PI;

use mlx_rs::{error::Result, ops, Array, Dtype};

use super::optimizers::LearningRate;
use crate::mlx::ops::scalar;

fn number(value: f64) -> Array {
    scalar(value, Dtype::Float32)
}

// an integer constant in the dtype of the update count, as MLX converts a Python int
fn count(steps: u32, step: &Array) -> Result<Array> {
    Array::from_slice(&[u64::from(steps)], &[]).as_dtype(step.dtype())
}

/// `init * decay_rate ** step`.
#[must_use]
pub fn exponential_decay(init: f64, decay_rate: f64) -> LearningRate {
    LearningRate::schedule(move |step| number(init).multiply(number(decay_rate).power(step)?))
}

/// `init * decay_rate ** (step // step_size)`; `step_size` is 1 or more.
#[must_use]
pub fn step_decay(init: f64, decay_rate: f64, step_size: u32) -> LearningRate {
    LearningRate::schedule(move |step| {
        let decays = step.floor_divide(count(step_size.max(1), step)?)?;
        number(init).multiply(number(decay_rate).power(decays)?)
    })
}

/// From `init` to `end` along half a cosine, in so many updates (1 or more).
#[must_use]
pub fn cosine_decay(init: f64, decay_steps: u32, end: f64) -> LearningRate {
    let steps = decay_steps.max(1);
    LearningRate::schedule(move |step| {
        let step = ops::minimum(step, count(steps, step)?)?;
        let cosine = number(PI / f64::from(steps)).multiply(step)?.cos()?;
        let decay = number(0.5).multiply(number(1.0).add(cosine)?)?;
        number(end).add(decay.multiply(number(init - end))?)
    })
}

/// From `init` to `end` along a line, in so many updates (1 or more).
#[must_use]
pub fn linear_schedule(init: f64, end: f64, steps: u32) -> LearningRate {
    let steps = steps.max(1);
    LearningRate::schedule(move |step| {
        let step = ops::minimum(step, count(steps, step)?)?;
        let slope = number((end - init) / f64::from(steps));
        step.multiply(slope)?.add(number(init))
    })
}

/// One schedule after the other: each but the first begins at its boundary, and counts from there.
#[must_use]
pub fn join_schedules(first: LearningRate, rest: Vec<(u32, LearningRate)>) -> LearningRate {
    LearningRate::schedule(move |step| {
        let mut rate = first.at(step)?;
        for (boundary, schedule) in &rest {
            let boundary = count(*boundary, step)?;
            let next = schedule.at(&step.subtract(&boundary)?)?;
            rate = ops::select(step.lt(&boundary)?, rate, next)?;
        }
        Ok(rate)
    })
}
