//! `mlx.optimizers.SGD`: stochastic gradient descent.
use super::{
    rule::{fields, like, Given, Moment, Rule, Updated},
    Optimizer,
};

fields! {
    /// Stochastic gradient descent.
    Sgd {
        /// The momentum strength; 0 keeps no velocity.
        momentum: f64 = 0.0,
        /// The L2 penalty.
        weight_decay: f64 = 0.0,
        /// Dampening of the momentum.
        dampening: f64 = 0.0,
        /// Nesterov momentum.
        nesterov: bool = false,
    }
}

impl Optimizer {
    /// [`Sgd`] with this momentum.
    #[must_use]
    pub fn sgd(momentum: f64) -> Self {
        Self::Sgd(Sgd {
            momentum,
            ..Sgd::default()
        })
    }
}

impl Rule for Sgd {
    fn moments(&self, shape: &[i32]) -> Vec<Moment> {
        let names: &[_] = if self.momentum > 0.0 { &["v"] } else { &[] };
        like(shape, names)
    }

    fn numbers(&self) -> Vec<f64> {
        vec![self.momentum, self.weight_decay, 1.0 - self.dampening]
    }

    // v = momentum v + (1 - dampening) g;  w = w - lr v, or w - lr (g + momentum v) with Nesterov
    fn update(&self, given: &Given) -> Updated {
        let (rate, parameter) = (given.rate()?, given.parameter);
        let [momentum, decay, rest] = given.numbers(self)?;
        let mut gradient = given.gradient.clone();
        if self.weight_decay != 0.0 {
            gradient = gradient.add(decay.multiply(parameter)?)?;
        }
        let Some(old) = given.moments.first() else {
            let parameter = parameter.subtract(rate.multiply(&gradient)?)?;
            return given.updated(parameter, Vec::new());
        };
        let mut velocity = momentum.multiply(old)?;
        velocity = if self.dampening > 0.0 {
            velocity.add(rest.multiply(&gradient)?)?
        } else {
            velocity.add(&gradient)?
        };
        velocity = given.moment(velocity, old)?;
        let update = if self.nesterov {
            gradient.add(momentum.multiply(&velocity)?)?
        } else {
            velocity.clone()
        };
        given.updated(parameter.subtract(rate.multiply(update)?)?, vec![velocity])
    }
}
