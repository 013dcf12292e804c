//! `mlx.optimizers.AdamW`.
//!
//! Loshchilov & Hutter, Decoupled Weight Decay Regularization (2019).
use mlx_rs::Dtype;

use super::{
    adam::Adam,
    rule::{fields, Given, Moment, Rule, Updated},
    Optimizer,
};

fields! {
    /// Adam with decoupled weight decay.
    AdamW {
        /// The decay of the running averages of the gradient and of its square.
        betas: (f64, f64) = (0.9, 0.999),
        /// Added to the denominator.
        eps: f64 = 1e-8,
        /// True if the averages are corrected for their start at zero.
        bias_correction: bool = false,
        /// The decoupled weight decay.
        weight_decay: f64 = 0.01,
    }
}

impl Optimizer {
    /// [`AdamW`] with this weight decay; MLX's own is 0.01.
    #[must_use]
    pub fn adamw(weight_decay: f64) -> Self {
        Self::AdamW(AdamW {
            weight_decay,
            ..AdamW::default()
        })
    }
}

impl AdamW {
    fn adam(&self) -> Adam {
        Adam {
            betas: self.betas,
            eps: self.eps,
            bias_correction: self.bias_correction,
        }
    }
}

impl Rule for AdamW {
    fn moments(&self, shape: &[i32]) -> Vec<Moment> {
        self.adam().moments(shape)
    }

    fn moves_by_rate(&self) -> bool {
        true
    }

    fn numbers(&self) -> Vec<f64> {
        [self.adam().numbers(), vec![self.weight_decay]].concat()
    }

    // w = (1 - lr wd) w, then as Adam
    fn update(&self, given: &Given) -> Updated {
        let [b1, rest1, b2, rest2, eps, decay] = given.numbers(self)?;
        let [wide1, _, wide2, ..]: [_; 6] = given.numbers_in(self, Dtype::Float32)?;
        let decay = given.rate()?.multiply(decay)?;
        let keep = given.number(1.0).subtract(decay)?.contiguous()?; // once, not for every element
        let parameter = given.parameter.multiply(keep)?;
        let numbers = [b1, rest1, b2, rest2, eps];
        self.adam()
            .update_from(given, &parameter, numbers, [wide1, wide2])
    }
}
