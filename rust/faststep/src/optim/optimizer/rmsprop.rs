//! `mlx.optimizers.RMSprop`.
//!
//! Tieleman & Hinton, lecture 6.5 of Neural Networks for Machine Learning (2012).
use super::{
    rule::{averaged, fields, like, shares, Given, Moment, Rule, Updated},
    Optimizer,
};

fields! {
    /// Gradients over the root of their mean square.
    RmsProp {
        /// The decay of the mean square.
        alpha: f64 = 0.99,
        /// Added to the denominator.
        eps: f64 = 1e-8,
    }
}

impl Optimizer {
    /// [`RmsProp`] with its defaults.
    #[must_use]
    pub fn rmsprop() -> Self {
        Self::RmsProp(RmsProp::default())
    }
}

impl Rule for RmsProp {
    fn moments(&self, shape: &[i32]) -> Vec<Moment> {
        like(shape, &["v"])
    }

    fn numbers(&self) -> Vec<f64> {
        [&shares(self.alpha)[..], &[self.eps]].concat()
    }

    // v = alpha v + (1 - alpha) g^2;  w = w - lr g / (sqrt(v) + eps)
    fn update(&self, given: &Given) -> Updated {
        let [alpha, rest, eps] = given.numbers(self)?;
        let [v] = given.moments()?;
        let square = given.gradient.square()?;
        let v = given.moment(averaged([&alpha, &rest], v, &square)?, v)?;
        given.over_root(v, eps)
    }
}
