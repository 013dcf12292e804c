//! `mlx.optimizers.Adagrad`.
//!
//! Duchi, Hazan & Singer, Adaptive Subgradient Methods for Online Learning and Stochastic Optimization (2011).
use super::{
    rule::{fields, like, Given, Moment, Rule, Updated},
    Optimizer,
};

fields! {
    /// Gradients over the root of their sum of squares.
    Adagrad {
        /// Added to the denominator.
        eps: f64 = 1e-8,
    }
}

impl Optimizer {
    /// [`Adagrad`] with its defaults.
    #[must_use]
    pub fn adagrad() -> Self {
        Self::Adagrad(Adagrad::default())
    }
}

impl Rule for Adagrad {
    fn moments(&self, shape: &[i32]) -> Vec<Moment> {
        like(shape, &["v"])
    }

    fn numbers(&self) -> Vec<f64> {
        vec![self.eps]
    }

    // v = v + g^2;  w = w - lr g / (sqrt(v) + eps)
    fn update(&self, given: &Given) -> Updated {
        let ([v], [eps]) = (given.moments()?, given.numbers(self)?);
        let v = given.moment(v.add(given.gradient.square()?)?, v)?;
        given.over_root(v, eps)
    }
}
