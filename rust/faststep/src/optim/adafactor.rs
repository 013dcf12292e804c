//! The update of `mlx.optimizers.Adafactor`, operation for operation: second moments by their rows and columns.
//!
//! Shazeer & Stern, Adafactor: Adaptive Learning Rates with Sublinear Memory Cost (2018).
use mlx_rs::{error::Result, ops, Array, Dtype};

use super::given::{no_rate, wrong, Moment, Updated};
use crate::mlx::ops::{choose, scalar};

/// The options of Adafactor, named and meant as in `mlx.optimizers`.
#[derive(Clone, Debug, PartialEq)]
#[allow(clippy::struct_excessive_bools)] // they are MLX's
pub struct Adafactor {
    /// Added to squared gradients, and the least scale of a parameter.
    pub eps: (f64, f64),
    /// The root mean square to which an update is clipped.
    pub clip_threshold: f64,
    /// The exponent of the second moments' decay.
    pub decay_rate: f64,
    /// The decay of the first moment; `None` keeps none.
    pub beta_1: Option<f64>,
    /// The decoupled weight decay.
    pub weight_decay: f64,
    /// Whether the learning rate is multiplied by the parameter's root mean square.
    pub scale_parameter: bool,
    /// Whether the learning rate follows from the step.
    pub relative_step: bool,
    /// Whether it begins small then.
    pub warmup_init: bool,
    /// Whether `optimizer.state` has a learning rate.
    pub has_rate: bool,
}

// of the whole array, or of each along the first axis
fn root_mean_square(array: &Array, stacked: bool) -> Result<Array> {
    let squared = array.square()?;
    if stacked {
        let axes: Vec<i32> = (1..).take(array.ndim() - 1).collect();
        return squared.mean_axes(&axes, true)?.sqrt();
    }
    squared.mean(None)?.sqrt()
}

impl Adafactor {
    pub(super) fn moments(&self, shape: &[i32]) -> Vec<Moment> {
        let mut moments = match shape {
            [rest @ .., rows, columns] => vec![
                ("exp_avg_sq_row", [rest, &[*rows]].concat()),
                ("exp_avg_sq_col", [rest, &[*columns]].concat()),
            ],
            _ => vec![("exp_avg_sq", shape.to_vec())],
        };
        if self.beta_1.is_some() {
            moments.push(("exp_avg", shape.to_vec()));
        }
        moments
    }

    // u = g / sqrt(v), divided by max(1, rms(u) / clip_threshold), times the learning rate;  m = b1 m + (1 - b1) u
    // w = w - lr wd w - u, or m in place of u
    pub(super) fn update(
        &self,
        [gradient, parameter]: [&Array; 2],
        moments: &[Array],
        rate: Option<&Array>,
        step: &Array,
        take: Option<&Array>,
        stacked: bool,
    ) -> Updated {
        let number = |value| scalar(value, parameter.dtype());
        let rate = self.rate(parameter, rate, step, stacked)?;
        let (second, first) = moments.split_at(moments.len() - usize::from(self.beta_1.is_some()));
        let (root, mut new) = self.second(gradient, parameter, (second, moments), step, take)?;
        let update = root.multiply(gradient)?;
        let clip = root_mean_square(&update, stacked)?.divide(number(self.clip_threshold))?;
        let update = update.divide(ops::maximum(number(1.0), clip)?)?;
        let mut update = rate.multiply(update)?;
        if let (Some(beta), [old]) = (self.beta_1, first) {
            let old_part = number(beta).multiply(old)?;
            let average = old_part.add(number(1.0 - beta).multiply(update)?)?;
            update = choose(take, average, old)?;
            new.push(update.clone());
        }
        let mut decayed = parameter.clone();
        if self.weight_decay != 0.0 {
            let decay = number(-self.weight_decay).multiply(rate)?;
            decayed = decayed.add(parameter.multiply(decay)?)?;
        }
        Ok((choose(take, decayed.subtract(update)?, parameter)?, new))
    }

    // lr = max(eps_2, rms(w)) min(10^-2, step^-0.5), or 10^-6 step in place of 10^-2, or the given one in place of both
    fn rate(
        &self,
        parameter: &Array,
        rate: Option<&Array>,
        step: &Array,
        stacked: bool,
    ) -> Result<Array> {
        let size = if self.relative_step {
            let least = if self.warmup_init {
                scalar(1e-6, Dtype::Float32).multiply(step)?
            } else {
                scalar(1e-2, Dtype::Float32)
            };
            ops::minimum(least, step.rsqrt()?)?
        } else {
            rate.ok_or_else(|| no_rate(self))?.clone()
        };
        let size = size.as_dtype(parameter.dtype())?;
        let scale = if self.scale_parameter {
            let least = scalar(self.eps.1, parameter.dtype());
            ops::maximum(least, root_mean_square(parameter, stacked)?)?
        } else {
            scalar(1.0, parameter.dtype())
        };
        scale.multiply(size)
    }

    // v = b2 v + (1 - b2) (g^2 + eps_1) with b2 = 1 - step^decay_rate: the new ones, and 1 / sqrt(v)
    // of a matrix v is kept as the means of its rows r and columns c, and taken for r c^T / mean(r)
    fn second(
        &self,
        gradient: &Array,
        parameter: &Array,
        (old, all): (&[Array], &[Array]),
        step: &Array,
        take: Option<&Array>,
    ) -> Result<(Array, Vec<Array>)> {
        let dtype = parameter.dtype();
        let power = step.power(scalar(self.decay_rate, Dtype::Float32))?;
        let beta = scalar(1.0, dtype).subtract(power.as_dtype(dtype)?)?;
        let rest = scalar(1.0, dtype).subtract(&beta)?;
        let squared = gradient.square()?.add(scalar(self.eps.0, dtype))?;
        let average = |old: &Array, new: Array| -> Result<Array> {
            let new = beta.multiply(old)?.add(rest.multiply(new)?)?;
            choose(take, new, old)
        };
        match old {
            [rows, columns] => {
                let rows = average(rows, squared.mean_axis(-1, None)?)?;
                let columns = average(columns, squared.mean_axis(-2, None)?)?;
                let row = rows.divide(rows.mean_axis(-1, true)?)?.rsqrt()?;
                let column = columns.rsqrt()?;
                let root = row.expand_dims(-1)?.multiply(column.expand_dims(-2)?)?;
                Ok((root, vec![rows, columns]))
            }
            [v] => {
                let v = average(v, squared)?;
                Ok((v.rsqrt()?, vec![v]))
            }
            _ => Err(wrong(self, &self.moments(parameter.shape()), all)),
        }
    }
}
