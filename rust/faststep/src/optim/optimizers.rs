//! The optimizers of a step: rules with their learning rates, and a filter for the parameters that each of them takes.
use std::{fmt, rc::Rc};

use mlx_rs::{error::Result, Array, Dtype};

use super::optimizer::Optimizer;

type Schedule = Rc<dyn Fn(&Array) -> Result<Array>>;
type Filter = Rc<dyn Fn(&str, &Array) -> bool>;

/// A learning rate: a number, or a function of the number of updates so far.
#[derive(Clone)]
pub enum LearningRate {
    /// A number.
    Constant(f64),
    /// A function of the number of updates so far, a uint64 scalar: it gives a float32 scalar, and is computed on the
    /// device. See [`schedulers`](crate::schedulers).
    Schedule(Schedule),
}

impl LearningRate {
    /// A learning rate that changes from update to update.
    pub fn schedule(schedule: impl Fn(&Array) -> Result<Array> + 'static) -> Self {
        Self::Schedule(Rc::new(schedule))
    }

    /// The value after `step` updates.
    pub(crate) fn at(&self, step: &Array) -> Result<Array> {
        match self {
            #[allow(clippy::cast_possible_truncation)] // MLX keeps Python's floats as float32
            Self::Constant(rate) => Ok(Array::from_f32(*rate as f32)),
            Self::Schedule(schedule) => schedule(step)?.as_dtype(Dtype::Float32),
        }
    }
}

impl From<f64> for LearningRate {
    fn from(rate: f64) -> Self {
        Self::Constant(rate)
    }
}

impl fmt::Debug for LearningRate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Constant(rate) => write!(f, "{rate}"),
            Self::Schedule(_) => f.write_str("schedule"),
        }
    }
}

/// One rule with its learning rate, or several, as in `mlx.optimizers.MultiOptimizer`.
///
/// ```
/// use faststep::{Optimizer, Optimizers};
///
/// let one = Optimizers::new(Optimizer::adamw(0.01), 3e-4);
/// let two = Optimizers::new(Optimizer::adamw(0.01), 3e-4)
///     .with(Optimizer::muon(), 0.02, |name, array| array.ndim() == 2 && !name.starts_with("embedding"));
/// # assert_ne!(format!("{one:?}"), format!("{two:?}"));
/// ```
#[derive(Clone)]
pub struct Optimizers {
    parts: Vec<(Filter, Optimizer, LearningRate)>, // the rule for all other parameters is the last one
}

impl Optimizers {
    /// Use one rule for all parameters.
    pub fn new(rule: impl Into<Optimizer>, learning_rate: impl Into<LearningRate>) -> Self {
        let all: Filter = Rc::new(|_, _| true);
        Self {
            parts: vec![(all, rule.into(), learning_rate.into())],
        }
    }

    /// Another rule for those parameters for which `filter` says so, by name and array, and no earlier filter has.
    #[must_use]
    pub fn with(
        mut self,
        rule: impl Into<Optimizer>,
        learning_rate: impl Into<LearningRate>,
        filter: impl Fn(&str, &Array) -> bool + 'static,
    ) -> Self {
        let before = self.parts.len() - 1;
        let part: (Filter, _, _) = (Rc::new(filter), rule.into(), learning_rate.into());
        self.parts.insert(before, part);
        self
    }

    /// The rules, in the order in which `MultiOptimizer` takes their optimizers.
    pub(crate) fn rules(&self) -> Vec<Optimizer> {
        self.parts.iter().map(|(_, rule, _)| rule.clone()).collect()
    }

    /// The learning rate of each rule.
    pub(crate) fn rates(&self) -> impl Iterator<Item = &LearningRate> {
        self.parts.iter().map(|(_, _, rate)| rate)
    }

    pub(crate) fn set_rates(&mut self, rate: &LearningRate) {
        for (_, _, old) in &mut self.parts {
            old.clone_from(rate);
        }
    }

    /// The number of the rule that takes a parameter.
    pub(crate) fn rule_of(&self, name: &str, array: &Array) -> usize {
        let takes = |(filter, _, _): &(Filter, _, _)| filter(name, array);
        let last = self.parts.len() - 1;
        self.parts.iter().position(takes).unwrap_or(last)
    }
}

impl fmt::Debug for Optimizers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts = self.parts.iter().map(|(_, rule, rate)| (rule, rate));
        f.debug_list().entries(parts).finish()
    }
}
