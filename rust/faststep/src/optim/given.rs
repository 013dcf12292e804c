//! The elementwise updates of `mlx.optimizers`, operation for operation, and what every rule is given.
use std::fmt::Debug;

use mlx_rs::{
    error::{Exception, Result},
    ops, Array, Dtype,
};

use crate::mlx::ops::{choose, scalar};

/// A name in a tensor's part of `optimizer.state`, and the shape of the array behind it.
pub type Moment = (&'static str, Vec<i32>);

/// The error of a rule without its learning rate.
pub(super) fn no_rate(rule: &dyn Debug) -> Exception {
    Exception::custom(format!("{rule:?}: expected a learning rate, got none"))
}

/// The error of a rule with other moments than it keeps.
pub(super) fn wrong(rule: &dyn Debug, expected: &[Moment], moments: &[Array]) -> Exception {
    Exception::custom(format!(
        "{rule:?}: expected the moments {expected:?}, got {}",
        moments.len()
    ))
}

/// Gradient, parameter and learning rate of one update, and whether it is taken.
#[derive(Clone, Copy)]
pub(super) struct Given<'a> {
    pub(super) gradient: &'a Array,
    pub(super) parameter: &'a Array,
    pub(super) rate: &'a Array,
    pub(super) take: Option<&'a Array>,
}

/// The new parameter and its new moments.
pub(super) type Updated = Result<(Array, Vec<Array>)>;

impl Given<'_> {
    pub(super) fn number(&self, value: f64) -> Array {
        scalar(value, self.gradient.dtype())
    }

    pub(super) fn moment(&self, new: Array, old: &Array) -> Result<Array> {
        choose(self.take, new, old)
    }

    pub(super) fn updated(&self, parameter: Array, moments: Vec<Array>) -> Updated {
        Ok((choose(self.take, parameter, self.parameter)?, moments))
    }

    // decay * average + (1 - decay) * value
    fn average(&self, decay: f64, average: &Array, value: &Array) -> Result<Array> {
        let old = self.number(decay).multiply(average)?;
        old.add(self.number(1.0 - decay).multiply(value)?)
    }

    // v = momentum v + (1 - dampening) g;  w = w - lr v, or w - lr (g + momentum v) with Nesterov
    pub(super) fn sgd(
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
    pub(super) fn adam(
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
    pub(super) fn adamax(&self, [m, v]: [&Array; 2], (b1, b2): (f64, f64), eps: f64) -> Updated {
        let m = self.moment(self.average(b1, m, self.gradient)?, m)?;
        let decayed = self.number(b2).multiply(v)?;
        let v = self.moment(ops::maximum(decayed, self.gradient.abs()?)?, v)?;
        let update = self.rate.multiply(&m)?.divide(v.add(self.number(eps))?)?;
        self.updated(self.parameter.subtract(update)?, vec![m, v])
    }

    // c = b1 m + (1 - b1) g;  m = b2 m + (1 - b2) g;  w = (1 - lr wd) w - lr sign(c)
    pub(super) fn lion(&self, m: &Array, (b1, b2): (f64, f64), weight_decay: f64) -> Updated {
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
    pub(super) fn rms_prop(&self, v: &Array, alpha: f64, eps: f64) -> Updated {
        let v = self.moment(self.average(alpha, v, &self.gradient.square()?)?, v)?;
        self.over_root(v, eps)
    }

    // v = v + g^2;  w = w - lr g / (sqrt(v) + eps)
    pub(super) fn adagrad(&self, v: &Array, eps: f64) -> Updated {
        let v = self.moment(v.add(self.gradient.square()?)?, v)?;
        self.over_root(v, eps)
    }

    fn over_root(&self, v: Array, eps: f64) -> Updated {
        let root = v.sqrt()?.add(self.number(eps))?;
        let update = self.rate.multiply(self.gradient)?.divide(root)?;
        self.updated(self.parameter.subtract(update)?, vec![v])
    }

    // v = rho v + (1 - rho) g^2;  d = sqrt(u + eps) / sqrt(v + eps) g;  u = rho u + (1 - rho) d^2;  w = w - lr d
    pub(super) fn ada_delta(&self, [v, u]: [&Array; 2], rho: f64, eps: f64) -> Updated {
        let v = self.moment(self.average(rho, v, &self.gradient.square()?)?, v)?;
        let ratio = u.add(self.number(eps))?.sqrt()?;
        let ratio = ratio.divide(v.add(self.number(eps))?.sqrt()?)?;
        let delta = ratio.multiply(self.gradient)?;
        let u = self.moment(self.average(rho, u, &delta.square()?)?, u)?;
        let parameter = self.parameter.subtract(self.rate.multiply(delta)?)?;
        self.updated(parameter, vec![v, u])
    }
}
