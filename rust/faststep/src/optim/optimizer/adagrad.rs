//! `mlx.optimizers.Adagrad`.
//!
//! Duchi, Hazan & Singer, Adaptive Subgradient Methods for Online Learning and Stochastic Optimization (2011).
use super::{
    rule::{like, Attributes, Given, Moment, Rule, Updated},
    Optimizer,
};

/// Gradients over the root of their sum of squares.
#[derive(Clone, Debug, PartialEq)]
pub struct Adagrad {
    /// Added to the denominator.
    pub eps: f64,
}

impl Default for Adagrad {
    fn default() -> Self {
        Self { eps: 1e-8 }
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
    fn read(attributes: &dyn Attributes) -> Option<Self> {
        let eps = attributes.number("eps")?;
        Some(Self { eps })
    }

    fn moments(&self, shape: &[i32]) -> Vec<Moment> {
        like(shape, &["v"])
    }

    // v = v + g^2;  w = w - lr g / (sqrt(v) + eps)
    fn update(&self, given: &Given) -> Updated {
        let [v] = given.moments()?;
        let v = given.moment(v.add(given.gradient.square()?)?, v)?;
        given.over_root(v, self.eps)
    }
}
