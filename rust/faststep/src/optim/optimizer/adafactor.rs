//! `mlx.optimizers.Adafactor`: second moments by their rows and columns.
//!
//! Shazeer & Stern, Adafactor: Adaptive Learning Rates with Sublinear Memory Cost (2018).
use mlx_rs::{error::Result, ops, Array, Dtype};

use super::{
    rule::{averaged, shares, Attributes, Field, Fields, Given, Moment, Rule, Updated},
    Optimizer,
};
use crate::mlx::{join::paced, means, ops::scalar};

/// Factored second moments.
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
    /// True if the learning rate is multiplied by the parameter's root mean square.
    pub scale_parameter: bool,
    /// True if the learning rate follows from the step.
    pub relative_step: bool,
    /// True if it begins small then.
    pub warmup_init: bool,
    /// True if `optimizer.state` has a learning rate.
    pub has_rate: bool,
}

/// Squares of so many bytes are paced: smaller ones take less memory than that is worth.
const SQUARES: usize = 512 << 10;

// squares that nothing but sums reads, where they are stored: in half precision, and not on a CPU
fn stored(squares: Array) -> Result<Array> {
    if squares.nbytes() < SQUARES {
        return Ok(squares);
    }
    paced(&squares)
}

// root mean square of the whole array, or of each slice along the first axis if stacked
fn root_mean_square(array: &Array, stacked: bool) -> Result<Array> {
    if let Some(mean) = means::of_squares(array, stacked)? {
        return mean.sqrt();
    }
    let squared = stored(array.square()?)?;
    if stacked {
        let axes: Vec<i32> = (1..).take(array.ndim() - 1).collect();
        return squared.mean_axes(&axes, true)?.sqrt();
    }
    squared.mean(None)?.sqrt()
}

/// MLX's defaults for a learning rate that is given; without one, MLX derives it from the step.
impl Default for Adafactor {
    fn default() -> Self {
        Self {
            eps: (1e-30, 1e-3),
            clip_threshold: 1.0,
            decay_rate: -0.8,
            beta_1: None,
            weight_decay: 0.0,
            scale_parameter: true,
            relative_step: false,
            warmup_init: false,
            has_rate: true,
        }
    }
}

impl Optimizer {
    /// [`Adafactor`] with its defaults.
    #[must_use]
    pub fn adafactor() -> Self {
        Self::Adafactor(Adafactor::default())
    }
}

impl Fields for Adafactor {
    fn read(attributes: &dyn Attributes) -> Option<Self> {
        let rule = Self {
            eps: attributes.pair("eps")?,
            clip_threshold: attributes.number("clip_threshold")?,
            decay_rate: attributes.number("decay_rate")?,
            beta_1: attributes.optional("beta_1")?,
            weight_decay: attributes.number("weight_decay")?,
            scale_parameter: attributes.flag("scale_parameter")?,
            relative_step: attributes.flag("relative_step")?,
            warmup_init: attributes.flag("warmup_init")?,
            has_rate: attributes.keeps("learning_rate"),
        };
        (rule.has_rate || rule.relative_step).then_some(rule)
    }

    fn form(&self) -> Self {
        Self {
            eps: self.eps.form(),
            clip_threshold: self.clip_threshold.form(),
            decay_rate: self.decay_rate.form(),
            beta_1: self.beta_1.form(),
            weight_decay: self.weight_decay.form(),
            ..self.clone()
        }
    }
}

impl Rule for Adafactor {
    fn moments(&self, shape: &[i32]) -> Vec<Moment> {
        let mut moments = match shape {
            [rest @ .., rows, columns] => vec![
                Moment::new("exp_avg_sq_row", [rest, &[*rows]].concat()),
                Moment::new("exp_avg_sq_col", [rest, &[*columns]].concat()),
            ],
            _ => vec![Moment::new("exp_avg_sq", shape.to_vec())],
        };
        if self.beta_1.is_some() {
            moments.push(Moment::new("exp_avg", shape.to_vec()));
        }
        moments
    }

    fn is_elementwise(&self, _: &[i32]) -> bool {
        false
    }

    fn has_rate(&self) -> bool {
        self.has_rate
    }

    fn numbers(&self) -> Vec<f64> {
        let [beta, rest] = shares(self.beta_1.unwrap_or_default());
        vec![
            self.eps.1,
            self.clip_threshold,
            beta,
            rest,
            -self.weight_decay,
            self.eps.0,
            self.decay_rate,
        ]
    }

    // u = g / sqrt(v), divided by max(1, rms(u) / clip_threshold), times the learning rate;  m = b1 m + (1 - b1) u
    // w = w - lr wd w - u, or m in place of u
    fn update(&self, given: &Given) -> Updated {
        let [least, threshold, beta, rest, decay, added, _] = given.numbers(self)?;
        let rate = self.rate(given, least)?;
        let kept = given.moments.len();
        let (second, first) = given
            .moments
            .split_at(kept.saturating_sub(usize::from(self.beta_1.is_some())));
        let (root, mut new) = self.second(given, second, &added)?;
        let update = paced(&root.multiply(given.gradient)?)?;
        let clip = root_mean_square(&update, given.stacked)?;
        let clip = clip.divide(threshold)?;
        let update = update.divide(ops::maximum(given.number(1.0), clip)?)?;
        let mut update = rate.multiply(update)?;
        if let (true, [old]) = (self.beta_1.is_some(), first) {
            update = given.moment(averaged([&beta, &rest], old, &update)?, old)?;
            new.push(update.clone());
        }
        let mut decayed = given.parameter.clone();
        if self.weight_decay != 0.0 {
            let decay = decay.multiply(rate)?;
            decayed = decayed.add(given.parameter.multiply(decay)?)?;
        }
        given.updated(decayed.subtract(update)?, new)
    }
}

impl Adafactor {
    // lr = max(eps_2, rms(w)) min(10^-2, step^-0.5), or 10^-6 step in place of 10^-2, or the given one in place of both
    fn rate(&self, given: &Given, least_scale: Array) -> Result<Array> {
        let size = if self.relative_step {
            let least = if self.warmup_init {
                scalar(1e-6, Dtype::Float32).multiply(given.step)?
            } else {
                scalar(1e-2, Dtype::Float32)
            };
            let size = ops::minimum(least, given.step.rsqrt()?)?;
            size.as_dtype(given.gradient.dtype())?
        } else {
            given.rate()?.clone()
        };
        let scale = if self.scale_parameter {
            ops::maximum(
                least_scale,
                root_mean_square(given.parameter, given.stacked)?,
            )?
        } else {
            given.number(1.0)
        };
        scale.multiply(size)
    }

    // v = b2 v + (1 - b2) (g^2 + eps_1) with b2 = 1 - step^decay_rate: the new ones, and 1 / sqrt(v)
    // of a matrix v is kept as the means of its rows r and columns c, and taken for r c^T / mean(r)
    fn second(&self, given: &Given, old: &[Array], added: &Array) -> Result<(Array, Vec<Array>)> {
        let [.., decay_rate]: [_; 7] = given.numbers_in(self, Dtype::Float32)?;
        let power = given.step.power(decay_rate)?;
        let power = power.as_dtype(given.gradient.dtype())?;
        let beta = given.number(1.0).subtract(power)?;
        let rest = given.number(1.0).subtract(&beta)?;
        let average = |old: &Array, new: Array| -> Result<Array> {
            let new = beta.multiply(old)?.add(rest.multiply(new)?)?;
            given.moment(new, old)
        };
        match old {
            [rows, columns] => {
                let [of_rows, of_columns] = means_of(given.gradient, added)?;
                let (rows, columns) = (average(rows, of_rows)?, average(columns, of_columns)?);
                let row = rows.divide(rows.mean_axis(-1, true)?)?.rsqrt()?;
                let column = columns.rsqrt()?;
                let root = row.expand_dims(-1)?.multiply(column.expand_dims(-2)?)?;
                Ok((root, vec![rows, columns]))
            }
            [v] => {
                let v = average(v, squared(given.gradient, added)?)?;
                Ok((v.rsqrt()?, vec![v]))
            }
            _ => Err(given.refuse_moments(self.moments(given.parameter.shape()).len())),
        }
    }
}

// g^2 + eps_1
fn squared(gradient: &Array, added: &Array) -> Result<Array> {
    gradient.square()?.add(added)
}

// its means over the rows and the columns of matrices
fn means_of(gradient: &Array, added: &Array) -> Result<[Array; 2]> {
    if let Some(means) = means::of_rows_and_columns(gradient, added)? {
        return Ok(means);
    }
    let squared = stored(squared(gradient, added)?)?;
    Ok([squared.mean_axis(-1, None)?, squared.mean_axis(-2, None)?])
}
