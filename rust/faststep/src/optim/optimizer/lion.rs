//! `mlx.optimizers.Lion`.
//!
//! Chen et al., Symbolic Discovery of Optimization Algorithms (2023).
use mlx_rs::ops;

use super::{
    rule::{averaged, fields, like, shares, Given, Moment, Rule, Updated},
    Optimizer,
};

fields! {
    /// The sign of an interpolated momentum.
    Lion {
        /// The interpolation of the update, and the decay of the momentum.
        betas: (f64, f64) = (0.9, 0.99),
        /// The decoupled weight decay.
        weight_decay: f64 = 0.0,
    }
}

impl Optimizer {
    /// [`Lion`] with this weight decay; MLX's own is 0.
    #[must_use]
    pub fn lion(weight_decay: f64) -> Self {
        Self::Lion(Lion {
            weight_decay,
            ..Lion::default()
        })
    }
}

impl Rule for Lion {
    fn moments(&self, shape: &[i32]) -> Vec<Moment> {
        like(shape, &["m"])
    }

    fn moves_by_rate(&self) -> bool {
        true
    }

    fn numbers(&self) -> Vec<f64> {
        let (b1, b2) = self.betas;
        [&shares(b1)[..], &shares(b2), &[self.weight_decay]].concat()
    }

    // c = b1 m + (1 - b1) g;  m = b2 m + (1 - b2) g;  w = (1 - lr wd) w - lr sign(c)
    fn update(&self, given: &Given) -> Updated {
        let [b1, rest1, b2, rest2, decay] = given.numbers(self)?;
        let ([m], rate) = (given.moments()?, given.rate()?);
        let direction = averaged([&b1, &rest1], m, given.gradient)?;
        let m = given.moment(averaged([&b2, &rest2], m, given.gradient)?, m)?;
        let mut parameter = given.parameter.clone();
        if self.weight_decay > 0.0 {
            let decay = rate.multiply(decay)?;
            let keep = given.number(1.0).subtract(decay)?.contiguous()?;
            parameter = keep.multiply(parameter)?;
        }
        let update = rate.multiply(ops::sign(direction)?)?;
        let (parameter, moments) = given.updated(parameter.subtract(update)?, vec![m])?;
        // the parameter whatever the moment is: one kernel computes both then, and writes over what it reads
        let same = moments[0].eq(&moments[0])?;
        Ok((ops::select(&same, &parameter, &parameter)?, moments))
    }
}
