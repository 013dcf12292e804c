//! The updates of `mlx.optimizers`, operation for operation, over whole buffers.
use half::{bf16, f16};
use mlx_rs::{error::Result, Array, Dtype};

/// Buffers of at least this many bytes are updated by one kernel for each output: a fused kernel with several outputs
/// cannot take over its inputs' memory, one with a single output can.
const BARRIER_BYTES: usize = 16 << 20;

/// An update rule with its options. The learning rate and the step are arrays of their own.
#[derive(Clone, Debug, PartialEq)]
pub enum Optimizer {
    /// `mlx.optimizers.SGD`.
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
    /// `mlx.optimizers.Adam`, and `AdamW` where there is a weight decay.
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
}

/// A scalar in the dtype in which MLX puts a Python number beside an array.
#[allow(clippy::cast_possible_truncation)]
fn scalar(value: f64, dtype: Dtype) -> Array {
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

    /// The names of a tensor's state that the update reads and writes, as in `optimizer.state`.
    #[must_use]
    pub fn moments(&self) -> &'static [&'static str] {
        match self {
            Self::Sgd { momentum, .. } if *momentum <= 0.0 => &[],
            Self::Sgd { .. } => &["v"],
            Self::Adam { .. } => &["m", "v"],
        }
    }

    /// One update: the new parameter and its new moments.
    ///
    /// `gradient`, `parameter` and `moments` are of one shape and dtype; `learning_rate` is a float scalar, `step` the
    /// number of this update (from 1), an integer scalar.
    ///
    /// # Errors
    /// When MLX refuses an operation.
    pub fn update(
        &self,
        gradient: &Array,
        parameter: &Array,
        moments: &[Array],
        learning_rate: &Array,
        step: &Array,
    ) -> Result<(Array, Vec<Array>)> {
        let rate = learning_rate.as_dtype(gradient.dtype())?;
        match self {
            Self::Sgd { .. } => self.sgd(gradient, parameter, moments, &rate),
            Self::Adam { .. } => self.adam(gradient, parameter, moments, &rate, step),
        }
    }

    // v = momentum v + (1 - dampening) g;  w = w - lr v, or w - lr (g + momentum v) with Nesterov
    fn sgd(
        &self,
        gradient: &Array,
        parameter: &Array,
        moments: &[Array],
        rate: &Array,
    ) -> Result<(Array, Vec<Array>)> {
        let &Self::Sgd {
            momentum,
            weight_decay,
            dampening,
            nesterov,
        } = self
        else {
            return Ok((parameter.clone(), moments.to_vec()));
        };
        let number = |value| scalar(value, gradient.dtype());
        let mut gradient = gradient.clone();
        if weight_decay != 0.0 {
            gradient = gradient.add(number(weight_decay).multiply(parameter)?)?;
        }
        let [velocity] = moments else {
            return Ok((parameter.subtract(rate.multiply(&gradient)?)?, Vec::new()));
        };
        let mut velocity = number(momentum).multiply(velocity)?;
        velocity = if dampening > 0.0 {
            velocity.add(number(1.0 - dampening).multiply(&gradient)?)?
        } else {
            velocity.add(&gradient)?
        };
        velocity = alone(velocity)?;
        let update = if nesterov {
            gradient.add(number(momentum).multiply(&velocity)?)?
        } else {
            velocity.clone()
        };
        let parameter = parameter.subtract(rate.multiply(update)?)?;
        Ok((parameter, vec![velocity]))
    }

    // m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2;  w = w - lr m / (sqrt(v) + eps)
    // AdamW decays w by (1 - lr wd) before; bias correction scales m by 1 / (1 - b1^t) and v by 1 / (1 - b2^t)
    fn adam(
        &self,
        gradient: &Array,
        parameter: &Array,
        moments: &[Array],
        rate: &Array,
        step: &Array,
    ) -> Result<(Array, Vec<Array>)> {
        let (
            &Self::Adam {
                betas: (b1, b2),
                eps,
                bias_correction,
                weight_decay,
            },
            [m, v],
        ) = (self, moments)
        else {
            return Ok((parameter.clone(), moments.to_vec()));
        };
        let dtype = gradient.dtype();
        let number = |value| scalar(value, dtype);
        let mut parameter = parameter.clone();
        if let Some(decay) = weight_decay {
            let keep = number(1.0).subtract(rate.multiply(number(decay))?)?;
            let keep = keep.contiguous()?; // once, not for every element
            parameter = parameter.multiply(keep)?;
        }
        let m = number(b1).multiply(m)?;
        let m = alone(m.add(number(1.0 - b1).multiply(gradient)?)?)?;
        let v = number(b2).multiply(v)?;
        let v = alone(v.add(number(1.0 - b2).multiply(gradient.square()?)?)?)?;
        let (numerator, denominator) = if bias_correction {
            let power = |beta| -> Result<Array> {
                let power = scalar(beta, Dtype::Float32).power(step)?;
                scalar(1.0, Dtype::Float32).subtract(power)
            };
            let c1 = rate.divide(power(b1)?)?.as_dtype(dtype)?.contiguous()?;
            let c2 = power(b2)?.rsqrt()?.as_dtype(dtype)?.contiguous()?;
            (c1.multiply(&m)?, v.sqrt()?.multiply(c2)?.add(number(eps))?)
        } else {
            (rate.multiply(&m)?, v.sqrt()?.add(number(eps))?)
        };
        let parameter = parameter.subtract(numerator.divide(denominator)?)?;
        Ok((parameter, vec![m, v]))
    }
}

// A barrier to fusion, without a copy, where the memory that it saves outweighs a kernel more.
fn alone(moment: Array) -> Result<Array> {
    if moment.nbytes() < BARRIER_BYTES {
        return Ok(moment);
    }
    moment.contiguous()
}
