//! `mlx.optimizers.Adam`.
//!
//! Kingma & Ba, Adam: A Method for Stochastic Optimization (2015).
use mlx_rs::{error::Result, Array, Dtype};

use super::{
    rule::{averaged, fields, like, shares, Given, Moment, Rule, Updated},
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

    fn numbers(&self) -> Vec<f64> {
        let (b1, b2) = self.betas;
        [&shares(b1)[..], &shares(b2), &[self.eps]].concat()
    }

    fn update(&self, given: &Given) -> Updated {
        let numbers = given.numbers(self)?;
        let [b1, _, b2, _, _] = given.numbers_in(self, Dtype::Float32)?;
        self.update_from(given, given.parameter, numbers, [b1, b2])
    }
}

impl Adam {
    // m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2;  w = w - lr m / (sqrt(v) + eps)
    // bias correction scales m by 1 / (1 - b1^t) and v by 1 / (1 - b2^t)
    // `betas`: in float32
    pub(super) fn update_from(
        &self,
        given: &Given,
        parameter: &Array,
        [b1, rest1, b2, rest2, eps]: [Array; 5],
        betas: [Array; 2],
    ) -> Updated {
        let [m, v] = given.moments()?;
        let (rate, dtype) = (given.rate()?, given.gradient.dtype());
        let m = given.moment(averaged([&b1, &rest1], m, given.gradient)?, m)?;
        let square = given.gradient.square()?;
        let v = given.moment(averaged([&b2, &rest2], v, &square)?, v)?;
        let (numerator, denominator) = if self.bias_correction {
            let [one, two] = betas.map(|beta| -> Result<Array> {
                let power = beta.power(given.step)?;
                scalar(1.0, Dtype::Float32).subtract(power)
            });
            let c1 = rate.divide(one?)?.as_dtype(dtype)?.contiguous()?;
            let c2 = two?.rsqrt()?.as_dtype(dtype)?.contiguous()?;
            let root = v.sqrt()?.multiply(c2)?;
            (c1.multiply(&m)?, root.add(eps)?)
        } else {
            let root = v.sqrt()?;
            (rate.multiply(&m)?, root.add(eps)?)
        };
        let parameter = parameter.subtract(numerator.divide(denominator)?)?;
        given.updated(parameter, vec![m, v])
    }
}
