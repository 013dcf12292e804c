//! `mlx.optimizers.AdamW`.
//!
//! Loshchilov & Hutter, Decoupled Weight Decay Regularization (2019).
use super::{
    adam::Adam,
    rule::{Attributes, Given, Moment, Rule, Updated},
    Optimizer,
};

/// Adam with decoupled weight decay.
#[derive(Clone, Debug, PartialEq)]
pub struct AdamW {
    /// The decay of the running averages of the gradient and of its square.
    pub betas: (f64, f64),
    /// Added to the denominator.
    pub eps: f64,
    /// Whether the averages are corrected for their start at zero.
    pub bias_correction: bool,
    /// The decoupled weight decay.
    pub weight_decay: f64,
}

impl Default for AdamW {
    fn default() -> Self {
        Self::of(&Adam::default(), 0.01)
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
    fn of(adam: &Adam, weight_decay: f64) -> Self {
        Self {
            betas: adam.betas,
            eps: adam.eps,
            bias_correction: adam.bias_correction,
            weight_decay,
        }
    }

    fn adam(&self) -> Adam {
        Adam {
            betas: self.betas,
            eps: self.eps,
            bias_correction: self.bias_correction,
        }
    }
}

impl Rule for AdamW {
    fn read(attributes: &dyn Attributes) -> Option<Self> {
        let weight_decay = attributes.number("weight_decay")?;
        Adam::read(attributes).map(|adam| Self::of(&adam, weight_decay))
    }

    fn moments(&self, shape: &[i32]) -> Vec<Moment> {
        self.adam().moments(shape)
    }

    fn moves_by_rate(&self) -> bool {
        true
    }

    // w = (1 - lr wd) w, then as Adam
    fn update(&self, given: &Given) -> Updated {
        let decay = given.number(self.weight_decay);
        let decay = given.rate()?.multiply(decay)?;
        let keep = given.number(1.0).subtract(decay)?.contiguous()?; // once, not for every element
        let parameter = given.parameter.multiply(keep)?;
        self.adam().update_from(given, &parameter)
    }
}
