//! The updates of `mlx.optimizers`, operation for operation, over whole buffers where they are elementwise.
use mlx_rs::{error::Result, Array, Dtype};

use super::{
    adafactor::Adafactor,
    given::{no_rate, wrong, Given, Moment, Updated},
    muon::Muon,
};

/// An update rule with its options, named and meant as in `mlx.optimizers`. The learning rate and the step are arrays of
/// their own.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Optimizer {
    /// Stochastic gradient descent.
    Sgd {
        /// The momentum strength; 0 keeps no velocity.
        momentum: f64,
        /// The L2 penalty.
        weight_decay: f64,
        /// Dampening of the momentum.
        dampening: f64,
        /// Nesterov momentum.
        nesterov: bool,
    },
    /// Adam, and `AdamW` where there is a weight decay.
    Adam {
        /// The decay of the running averages of the gradient and of its square.
        betas: (f64, f64),
        /// Added to the denominator.
        eps: f64,
        /// Whether the averages are corrected for their start at zero.
        bias_correction: bool,
        /// The decoupled weight decay of `AdamW`; `None` is Adam.
        weight_decay: Option<f64>,
    },
    /// Adam with the infinity norm in place of the root of the second moment.
    Adamax {
        /// The decay of the running averages.
        betas: (f64, f64),
        /// Added to the denominator.
        eps: f64,
    },
    /// The sign of an interpolated momentum.
    Lion {
        /// The interpolation of the update, and the decay of the momentum.
        betas: (f64, f64),
        /// The decoupled weight decay.
        weight_decay: f64,
    },
    /// Gradients over the root of their mean square.
    RmsProp {
        /// The decay of the mean square.
        alpha: f64,
        /// Added to the denominator.
        eps: f64,
    },
    /// Gradients over the root of their sum of squares.
    Adagrad {
        /// Added to the denominator.
        eps: f64,
    },
    /// Steps in the units of the parameters.
    AdaDelta {
        /// The decay of both running averages.
        rho: f64,
        /// Added below both roots.
        eps: f64,
    },
    /// Factored second moments.
    Adafactor(Adafactor),
    /// Orthogonalised momentum.
    Muon(Muon),
}

impl Optimizer {
    /// Whether the rule is written for tensors of this dtype.
    #[must_use]
    pub fn supports(dtype: Dtype) -> bool {
        matches!(dtype, Dtype::Float32 | Dtype::Float16 | Dtype::Bfloat16)
    }

    /// The state of a tensor of this shape that the update reads and writes, in its order, in the tensor's dtype.
    #[must_use]
    pub fn moments(&self, shape: &[i32]) -> Vec<Moment> {
        let names: &[_] = match self {
            Self::Adafactor(rule) => return rule.moments(shape),
            Self::Sgd { momentum, .. } if *momentum <= 0.0 => &[],
            Self::Adam { .. } | Self::Adamax { .. } => &["m", "v"],
            Self::Lion { .. } => &["m"],
            Self::AdaDelta { .. } => &["v", "u"],
            Self::Sgd { .. } | Self::RmsProp { .. } | Self::Adagrad { .. } | Self::Muon(_) => {
                &["v"]
            }
        };
        names.iter().map(|name| (*name, shape.to_vec())).collect()
    }

    /// Whether a weight moves by about the learning rate, whatever the size of its gradients.
    #[must_use]
    pub fn moves_by_rate(&self) -> bool {
        matches!(
            self,
            Self::Adam { .. } | Self::Adamax { .. } | Self::Lion { .. } | Self::Muon(_)
        )
    }

    /// Whether a tensor of this shape is updated element by element, so that it may share a buffer with others.
    #[must_use]
    pub fn is_elementwise(&self, shape: &[i32]) -> bool {
        match self {
            Self::Adafactor(_) => false,
            Self::Muon(_) => shape.len() < 2,
            _ => true,
        }
    }

    /// Whether `optimizer.state` has a learning rate.
    #[must_use]
    pub fn has_rate(&self) -> bool {
        !matches!(self, Self::Adafactor(rule) if !rule.has_rate)
    }

    /// One update: the new parameter and its new moments.
    ///
    /// `gradient`, `parameter` and `moments` are of one dtype, the moments of the shapes that [`Optimizer::moments`] gives;
    /// `learning_rate` is a float scalar where the rule has one, `step` the number of this update (from 1), an integer
    /// scalar. Where `take` is given and false, all come back as they were.
    ///
    /// # Errors
    /// When MLX refuses an operation.
    pub fn update(
        &self,
        gradient: &Array,
        parameter: &Array,
        moments: &[Array],
        learning_rate: Option<&Array>,
        step: &Array,
        take: Option<&Array>,
    ) -> Result<(Array, Vec<Array>)> {
        self.update_all(
            gradient,
            parameter,
            moments,
            learning_rate,
            step,
            take,
            false,
        )
    }

    /// The same; where `stacked`, of many tensors along an axis more, the first one of each array.
    #[allow(clippy::too_many_arguments)] // those of `update`
    pub(super) fn update_all(
        &self,
        gradient: &Array,
        parameter: &Array,
        moments: &[Array],
        learning_rate: Option<&Array>,
        step: &Array,
        take: Option<&Array>,
        stacked: bool,
    ) -> Updated {
        if let Self::Adafactor(rule) = self {
            let given = [gradient, parameter];
            return rule.update(given, moments, learning_rate, step, take, stacked);
        }
        let rate = learning_rate.ok_or_else(|| no_rate(self))?;
        let rate = rate.as_dtype(gradient.dtype())?;
        let given = Given {
            gradient,
            parameter,
            rate: &rate,
            take,
        };
        match (self, moments) {
            (
                &Self::Sgd {
                    momentum,
                    weight_decay,
                    dampening,
                    nesterov,
                },
                moments,
            ) => given.sgd(
                moments.first(),
                (momentum, dampening, nesterov),
                weight_decay,
            ),
            (
                &Self::Adam {
                    betas,
                    eps,
                    bias_correction,
                    weight_decay,
                },
                [m, v],
            ) => given.adam(
                [m, v],
                betas,
                eps,
                bias_correction.then_some(step),
                weight_decay,
            ),
            (&Self::Adamax { betas, eps }, [m, v]) => given.adamax([m, v], betas, eps),
            (
                &Self::Lion {
                    betas,
                    weight_decay,
                },
                [m],
            ) => given.lion(m, betas, weight_decay),
            (&Self::RmsProp { alpha, eps }, [v]) => given.rms_prop(v, alpha, eps),
            (&Self::Adagrad { eps }, [v]) => given.adagrad(v, eps),
            (&Self::AdaDelta { rho, eps }, [v, u]) => given.ada_delta([v, u], rho, eps),
            (Self::Muon(rule), [v]) => rule.update(&given, v, stacked),
            _ => Err(wrong(self, &self.moments(parameter.shape()), moments)),
        }
    }
}
