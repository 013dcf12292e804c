//! The updates of `mlx.optimizers`, operation for operation, over whole buffers where they are elementwise.
use half::{bf16, f16};
use mlx_rs::{
    error::{Exception, Result},
    ops, Array, Dtype,
};

use crate::{adafactor::Adafactor, guard::choose, muon::Muon};

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

/// A name in a tensor's part of `optimizer.state`, and the shape of the array behind it.
pub type Moment = (&'static str, Vec<i32>);

/// A scalar in the dtype in which MLX puts a Python number beside an array.
#[allow(clippy::cast_possible_truncation)]
pub(crate) fn scalar(value: f64, dtype: Dtype) -> Array {
    match dtype {
        Dtype::Float16 => Array::from_slice(&[f16::from_f32(value as f32)], &[]),
        Dtype::Bfloat16 => Array::from_slice(&[bf16::from_f32(value as f32)], &[]),
        _ => Array::from_f32(value as f32),
    }
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
    pub(crate) fn update_all(
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
            _ => Err(wrong(self, parameter, moments)),
        }
    }
}

pub(crate) fn no_rate(rule: &Optimizer) -> Exception {
    Exception::custom(format!("{rule:?}: expected a learning rate, got none"))
}

pub(crate) fn wrong(rule: &Optimizer, parameter: &Array, moments: &[Array]) -> Exception {
    Exception::custom(format!(
        "{rule:?}: expected the moments {:?}, got {}",
        rule.moments(parameter.shape()),
        moments.len()
    ))
}

/// What every rule is given.
#[derive(Clone, Copy)]
pub(crate) struct Given<'a> {
    pub(crate) gradient: &'a Array,
    pub(crate) parameter: &'a Array,
    pub(crate) rate: &'a Array,
    pub(crate) take: Option<&'a Array>,
}

pub(crate) type Updated = Result<(Array, Vec<Array>)>;

impl Given<'_> {
    pub(crate) fn number(&self, value: f64) -> Array {
        scalar(value, self.gradient.dtype())
    }

    pub(crate) fn moment(&self, new: Array, old: &Array) -> Result<Array> {
        choose(self.take, new, old)
    }

    pub(crate) fn updated(&self, parameter: Array, moments: Vec<Array>) -> Updated {
        Ok((choose(self.take, parameter, self.parameter)?, moments))
    }

    // decay * average + (1 - decay) * value
    fn average(&self, decay: f64, average: &Array, value: &Array) -> Result<Array> {
        let old = self.number(decay).multiply(average)?;
        old.add(self.number(1.0 - decay).multiply(value)?)
    }

    // v = momentum v + (1 - dampening) g;  w = w - lr v, or w - lr (g + momentum v) with Nesterov
    fn sgd(
        &self,
        velocity: Option<&Array>,
        (momentum, dampening, nesterov): (f64, f64, bool),
        weight_decay: f64,
    ) -> Updated {
        let mut gradient = self.gradient.clone();
        if weight_decay != 0.0 {
            gradient = gradient.add(self.number(weight_decay).multiply(self.parameter)?)?;
        }
        let Some(old) = velocity else {
            let parameter = self.parameter.subtract(self.rate.multiply(&gradient)?)?;
            return self.updated(parameter, Vec::new());
        };
        let mut velocity = self.number(momentum).multiply(old)?;
        velocity = if dampening > 0.0 {
            velocity.add(self.number(1.0 - dampening).multiply(&gradient)?)?
        } else {
            velocity.add(&gradient)?
        };
        velocity = self.moment(velocity, old)?;
        let update = if nesterov {
            gradient.add(self.number(momentum).multiply(&velocity)?)?
        } else {
            velocity.clone()
        };
        let parameter = self.parameter.subtract(self.rate.multiply(update)?)?;
        self.updated(parameter, vec![velocity])
    }

    // m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2;  w = w - lr m / (sqrt(v) + eps)
    // AdamW decays w by (1 - lr wd) before; bias correction scales m by 1 / (1 - b1^t) and v by 1 / (1 - b2^t)
    fn adam(
        &self,
        [m, v]: [&Array; 2],
        (b1, b2): (f64, f64),
        eps: f64,
        corrected_at: Option<&Array>,
        weight_decay: Option<f64>,
    ) -> Updated {
        let dtype = self.gradient.dtype();
        let mut parameter = self.parameter.clone();
        if let Some(decay) = weight_decay {
            let keep = self
                .number(1.0)
                .subtract(self.rate.multiply(self.number(decay))?)?;
            parameter = parameter.multiply(keep.contiguous()?)?; // once, not for every element
        }
        let m = self.moment(self.average(b1, m, self.gradient)?, m)?;
        let v = self.moment(self.average(b2, v, &self.gradient.square()?)?, v)?;
        let (numerator, denominator) = if let Some(step) = corrected_at {
            let rest = |beta| -> Result<Array> {
                let power = scalar(beta, Dtype::Float32).power(step)?;
                scalar(1.0, Dtype::Float32).subtract(power)
            };
            let c1 = self.rate.divide(rest(b1)?)?.as_dtype(dtype)?.contiguous()?;
            let c2 = rest(b2)?.rsqrt()?.as_dtype(dtype)?.contiguous()?;
            (
                c1.multiply(&m)?,
                v.sqrt()?.multiply(c2)?.add(self.number(eps))?,
            )
        } else {
            (self.rate.multiply(&m)?, v.sqrt()?.add(self.number(eps))?)
        };
        let parameter = parameter.subtract(numerator.divide(denominator)?)?;
        self.updated(parameter, vec![m, v])
    }

    // m = b1 m + (1 - b1) g;  v = max(b2 v, |g|);  w = w - lr m / (v + eps)
    fn adamax(&self, [m, v]: [&Array; 2], (b1, b2): (f64, f64), eps: f64) -> Updated {
        let m = self.moment(self.average(b1, m, self.gradient)?, m)?;
        let decayed = self.number(b2).multiply(v)?;
        let v = self.moment(ops::maximum(decayed, self.gradient.abs()?)?, v)?;
        let update = self.rate.multiply(&m)?.divide(v.add(self.number(eps))?)?;
        self.updated(self.parameter.subtract(update)?, vec![m, v])
    }

    // c = b1 m + (1 - b1) g;  m = b2 m + (1 - b2) g;  w = (1 - lr wd) w - lr sign(c)
    fn lion(&self, m: &Array, (b1, b2): (f64, f64), weight_decay: f64) -> Updated {
        let direction = self.average(b1, m, self.gradient)?;
        let m = self.moment(self.average(b2, m, self.gradient)?, m)?;
        let mut parameter = self.parameter.clone();
        if weight_decay > 0.0 {
            let decay = self.rate.multiply(self.number(weight_decay))?;
            let keep = self.number(1.0).subtract(decay)?.contiguous()?;
            parameter = keep.multiply(parameter)?;
        }
        let update = self.rate.multiply(ops::sign(direction)?)?;
        self.updated(parameter.subtract(update)?, vec![m])
    }

    // v = alpha v + (1 - alpha) g^2;  w = w - lr g / (sqrt(v) + eps)
    fn rms_prop(&self, v: &Array, alpha: f64, eps: f64) -> Updated {
        let v = self.moment(self.average(alpha, v, &self.gradient.square()?)?, v)?;
        self.over_root(v, eps)
    }

    // v = v + g^2;  w = w - lr g / (sqrt(v) + eps)
    fn adagrad(&self, v: &Array, eps: f64) -> Updated {
        let v = self.moment(v.add(self.gradient.square()?)?, v)?;
        self.over_root(v, eps)
    }

    fn over_root(&self, v: Array, eps: f64) -> Updated {
        let root = v.sqrt()?.add(self.number(eps))?;
        let update = self.rate.multiply(self.gradient)?.divide(root)?;
        self.updated(self.parameter.subtract(update)?, vec![v])
    }

    // v = rho v + (1 - rho) g^2;  d = sqrt(u + eps) / sqrt(v + eps) g;  u = rho u + (1 - rho) d^2;  w = w - lr d
    fn ada_delta(&self, [v, u]: [&Array; 2], rho: f64, eps: f64) -> Updated {
        let v = self.moment(self.average(rho, v, &self.gradient.square()?)?, v)?;
        let ratio = u.add(self.number(eps))?.sqrt()?;
        let ratio = ratio.divide(v.add(self.number(eps))?.sqrt()?)?;
        let delta = ratio.multiply(self.gradient)?;
        let u = self.moment(self.average(rho, u, &delta.square()?)?, u)?;
        let parameter = self.parameter.subtract(self.rate.multiply(delta)?)?;
        self.updated(parameter, vec![v, u])
    }
}
