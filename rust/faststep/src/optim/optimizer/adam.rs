//! `mlx.optimizers.Adam`.
//!
//! Kingma & Ba, Adam: A Method for Stochastic Optimization (2015).
use mlx_rs::{error::Result, Array, Dtype};

use super::{
    rule::{fields, like, Given, Moment, Rule, Updated},
    Optimizer,
};
use crate::mlx::ops::scalar;

fields! {
    /// Adam, as MLX has it without bias correction unless told otherwise.
    Adam {
        /// The decay of the running averages of the gradient and of its square.
        betas: (f64, f64) = (0.9, 0.999),
        /// Added to the denominator.
        eps: f64 = 1e-8,
        /// True if the averages are corrected for their start at zero.
        bias_correction: bool = false,
    }
}

impl Optimizer {
    /// [`Adam`] with its defaults.
    #[must_use]
    pub fn adam() -> Self {
        Self::Adam(Adam::default())
    }
}

impl Rule for Adam {
    fn moments(&self, shape: &[i32]) -> Vec<Moment> {
        like(shape, &["m", "v"])
    }

    fn moves_by_rate(&self) -> bool {
        true
    }

    fn update(&self, given: &Given) -> Updated {
        self.update_from(given, given.parameter)
    }
}

impl Adam {
    // m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2;  w = w - lr m / (sqrt(v) + eps)
    // bias correction scales m by 1 / (1 - b1^t) and v by 1 / (1 - b2^t)
    pub(super) fn update_from(&self, given: &Given, parameter: &Array) -> Updated {
        let ([m, v], (b1, b2)) = (given.moments()?, self.betas);
        let (rate, dtype) = (given.rate()?, given.gradient.dtype());
        let m = given.moment(given.average(b1, m, given.gradient)?, m)?;
        let v = given.moment(given.average(b2, v, &given.gradient.square()?)?, v)?;
        let (numerator, denominator) = if self.bias_correction {
            let rest = |beta| -> Result<Array> {
                let power = scalar(beta, Dtype::Float32).power(given.step)?;
                scalar(1.0, Dtype::Float32).subtract(power)
            };
            let c1 = rate.divide(rest(b1)?)?.as_dtype(dtype)?.contiguous()?;
            let c2 = rest(b2)?.rsqrt()?.as_dtype(dtype)?.contiguous()?;
            let root = v.sqrt()?.multiply(c2)?;
            (c1.multiply(&m)?, root.add(given.number(self.eps))?)
        } else {
            let root = v.sqrt()?;
            (rate.multiply(&m)?, root.add(given.number(self.eps))?)
        };
        let parameter = parameter.subtract(numerator.divide(denominator)?)?;
        given.updated(parameter, vec![m, v])
    }
}
