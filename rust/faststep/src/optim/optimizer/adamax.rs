//! `mlx.optimizers.Adamax`.
//!
//! Kingma & Ba, Adam: A Method for Stochastic Optimization (2015), section 7.1.
use mlx_rs::ops;

use super::{
    rule::{averaged, fields, like, shares, Given, Moment, Rule, Updated},
    Optimizer,
};

fields! {
    /// Adam with the infinity norm in place of the root of the second moment.
    Adamax {
        /// The decay of the running averages.
        betas: (f64, f64) = (0.9, 0.999),
        /// Added to the denominator.
        eps: f64 = 1e-8,
    }
}

impl Optimizer {
    /// [`Adamax`] with its defaults.
    #[must_use]
    pub fn adamax() -> Self {
        Self::Adamax(Adamax::default())
    }
}

impl Rule for Adamax {
    fn moments(&self, shape: &[i32]) -> Vec<Moment> {
        like(shape, &["m", "v"])
    }

    fn moves_by_rate(&self) -> bool {
        true
    }

    fn numbers(&self) -> Vec<f64> {
        let (b1, b2) = self.betas;
        [&shares(b1)[..], &[b2, self.eps]].concat()
    }

    // m = b1 m + (1 - b1) g;  v = max(b2 v, |g|);  w = w - lr m / (v + eps)
    fn update(&self, given: &Given) -> Updated {
        let [b1, rest, b2, eps] = given.numbers(self)?;
        let [m, v] = given.moments()?;
        let m = given.moment(averaged([&b1, &rest], m, given.gradient)?, m)?;
        let decayed = b2.multiply(v)?;
        let v = given.moment(ops::maximum(decayed, given.gradient.abs()?)?, v)?;
        let denominator = v.add(eps)?;
        let update = given.rate()?.multiply(&m)?.divide(denominator)?;
        given.updated(given.parameter.subtract(update)?, vec![m, v])
    }
}
