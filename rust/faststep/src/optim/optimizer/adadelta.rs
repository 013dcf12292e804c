//! `mlx.optimizers.AdaDelta`.
//!
//! Zeiler, ADADELTA: An Adaptive Learning Rate Method (2012).
use super::{
    rule::{fields, like, Given, Moment, Rule, Updated},
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

    // v = rho v + (1 - rho) g^2;  d = sqrt(u + eps) / sqrt(v + eps) g;  u = rho u + (1 - rho) d^2;  w = w - lr d
    fn update(&self, given: &Given) -> Updated {
        let [v, u] = given.moments()?;
        let square = given.gradient.square()?;
        let v = given.moment(given.average(self.rho, v, &square)?, v)?;
        let ratio = u.add(given.number(self.eps))?.sqrt()?;
        let ratio = ratio.divide(v.add(given.number(self.eps))?.sqrt()?)?;
        let delta = ratio.multiply(given.gradient)?;
        let u = given.moment(given.average(self.rho, u, &delta.square()?)?, u)?;
        let update = given.rate()?.multiply(delta)?;
        given.updated(given.parameter.subtract(update)?, vec![v, u])
    }
}
