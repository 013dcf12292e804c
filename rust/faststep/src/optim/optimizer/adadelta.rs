//! `mlx.optimizers.AdaDelta`.
//!
//! Zeiler, ADADELTA: An Adaptive Learning Rate Method (2012).
use mlx_rs::{error::Result, Array};

use super::{
    rule::{averaged, fields, like, shares, Given, Moment, Rule, Updated},
    Optimizer,
};

fields! {
    /// Steps in the units of the parameters.
    AdaDelta {
        /// The decay of both running averages.
        rho: f64 = 0.9,
        /// Added below both roots.
        eps: f64 = 1e-6,
    }
}

impl Optimizer {
    /// [`AdaDelta`] with its defaults.
    #[must_use]
    pub fn adadelta() -> Self {
        Self::AdaDelta(AdaDelta::default())
    }
}

impl Rule for AdaDelta {
    fn moments(&self, shape: &[i32]) -> Vec<Moment> {
        like(shape, &["v", "u"])
    }

    fn numbers(&self) -> Vec<f64> {
        [&shares(self.rho)[..], &[self.eps]].concat()
    }

    // v = rho v + (1 - rho) g^2;  d = sqrt(u + eps) / sqrt(v + eps) g;  u = rho u + (1 - rho) d^2;  w = w - lr d
    fn update(&self, given: &Given) -> Updated {
        let [rho, rest, eps] = given.numbers(self)?;
        let [v, u] = given.moments()?;
        let average = |old: &Array, value: Array| -> Result<Array> {
            given.moment(averaged([&rho, &rest], old, &value)?, old)
        };
        let v = average(v, given.gradient.square()?)?;
        let ratio = u.add(&eps)?.sqrt()?.divide(v.add(&eps)?.sqrt()?)?;
        let delta = ratio.multiply(given.gradient)?;
        let u = average(u, delta.square()?)?;
        let update = given.rate()?.multiply(delta)?;
        given.updated(given.parameter.subtract(update)?, vec![v, u])
    }
}
