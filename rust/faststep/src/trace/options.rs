//! The options of a step, with the names, meanings and defaults that they have in Python.
use mlx_rs::Dtype;

use super::Guard;
use crate::{
    error::{Error, Result},
    layout::{
        aux_state::Needs,
        precision::{self, Stored},
    },
    optim::Optimizer,
};

/// The treatment of a NaN or an infinity in the loss or in a gradient.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Nonfinite {
    /// Leave parameters, optimizer state and buffers as they are, on the device, without a wait.
    #[default]
    Skip,
    /// The same, then wait for the step and return [`Error::Nonfinite`], which names the first such gradient.
    Raise,
    /// Take every step, as a plain loop does.
    Allow,
}

impl Nonfinite {
    /// All choices.
    pub const ALL: [Self; 3] = [Self::Skip, Self::Raise, Self::Allow];

    /// The name in Python.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Skip => "skip",
            Self::Raise => "raise",
            Self::Allow => "allow",
        }
    }
}

impl std::fmt::Display for Nonfinite {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}", self.name())
    }
}

/// Replay of a step: as one CUDA graph, or as a list of a CPU's tasks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Replay {
    /// MLX evaluates every step.
    Never,
    /// A trace that has been evaluated a few times, on a CPU where that is faster.
    #[default]
    Auto,
    /// A trace as soon as the memory that it takes has been measured.
    Always,
}

/// The options of a [`Step`](crate::Step): the defaults, and what is set by the methods of the fields' names.
///
/// ```
/// use faststep::Options;
///
/// let options = Options::default().max_grad_norm(1.0).accumulate(4);
/// assert_eq!((options.max_grad_norm, options.accumulate), (Some(1.0), 4));
/// assert_eq!(options.max_grad_norm(None).max_grad_norm, None);
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Options {
    /// Clip the gradients to this global norm, as `clip_grad_norm` does.
    pub max_grad_norm: Option<f64>,
    /// Bring every element of the gradients into `[-max_grad_value, max_grad_value]`, after clipping by norm.
    pub max_grad_value: Option<f64>,
    /// Update once for so many calls, by the average of their gradients. 1: at each call.
    pub accumulate: usize,
    /// The treatment of a NaN or an infinity.
    pub nonfinite: Nonfinite,
    /// A loss above this counts as not finite.
    pub max_loss: Option<f64>,
    /// Compute the loss in this dtype, while float32 masters are updated; `None`: that of the parameters.
    pub compute_dtype: Option<Dtype>,
    /// Keep a moving average of the parameters: `decay * average + (1 - decay) * parameter` after every update.
    pub ema_decay: Option<f64>,
    /// Keep the moments of Adam and AdamW in 8 bits, those of tensors of fewer than 4,096 elements apart; `None`: as they are.
    pub state_bits: Option<usize>,
    /// Compute the update of bfloat16 parameters in float32, and round up or down by chance, so that no update is lost.
    pub stochastic_rounding: bool,
    /// Compile the step. Without, the loss function is called at every step.
    pub compile: bool,
    /// Replay of steps.
    pub replay: Replay,
    /// The most steps under way on the device when a call returns. Default: 2.
    pub in_flight: usize,
    /// The most traces that are kept, 2 or more; the one used least recently is dropped first. Default: 64.
    pub max_traces: usize,
    /// Let MLX keep at most so many bytes of freed memory, in the whole process; `None`: leave it.
    pub cache_limit: Option<usize>,
    /// Clear MLX's cache after every so many steps; 0: never.
    pub clear_cache_every: usize,
    /// True in a step whose gradients are summed over the ranks of a group before each update: every batch goes into a window.
    pub reduced: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            max_grad_norm: None,
            max_grad_value: None,
            accumulate: 1,
            nonfinite: Nonfinite::default(),
            max_loss: None,
            compute_dtype: None,
            ema_decay: None,
            state_bits: None,
            stochastic_rounding: false,
            compile: true,
            replay: Replay::Auto,
            in_flight: 2,
            max_traces: 64,
            cache_limit: None,
            clear_cache_every: 0,
            reduced: false,
        }
    }
}

/// An option of some type, to be set.
#[derive(Debug)]
pub enum Field<'a> {
    /// A number, or none.
    Number(&'a mut Option<f64>),
    /// True or false.
    Flag(&'a mut bool),
    /// A whole number.
    Count(&'a mut usize),
    /// A whole number, or none.
    Limit(&'a mut Option<usize>),
    /// A dtype, or none.
    Dtype(&'a mut Option<Dtype>),
    /// The treatment of a NaN.
    Nonfinite(&'a mut Nonfinite),
    /// Replay of steps.
    Replay(&'a mut Replay),
}

macro_rules! fields {
    ($($kind:ident: $type:ty,)*) => {$(
        impl<'a> From<&'a mut $type> for Field<'a> {
            fn from(value: &'a mut $type) -> Self {
                Self::$kind(value)
            }
        }
    )*};
}

fields! {
    Number: Option<f64>,
    Flag: bool,
    Count: usize,
    Limit: Option<usize>,
    Dtype: Option<Dtype>,
    Nonfinite: Nonfinite,
    Replay: Replay,
}

macro_rules! setters {
    ($($name:ident: $value:ty,)*) => {
        /// Each method gives the same options but for one field.
        impl Options {$(
            #[doc = concat!("With another [`", stringify!($name), "`](field@Options::", stringify!($name), ").")]
            #[must_use]
            pub fn $name(mut self, $name: $value) -> Self {
                self.$name = $name.into();
                self
            }
        )*

            /// All options with their names, to be read from another language.
            pub fn fields(&mut self) -> Vec<(&'static str, Field<'_>)> {
                vec![$((stringify!($name), (&mut self.$name).into()),)*]
            }
        }
    };
}

setters! {
    max_grad_norm: impl Into<Option<f64>>,
    max_grad_value: impl Into<Option<f64>>,
    accumulate: usize,
    nonfinite: Nonfinite,
    max_loss: impl Into<Option<f64>>,
    compute_dtype: impl Into<Option<Dtype>>,
    ema_decay: impl Into<Option<f64>>,
    state_bits: impl Into<Option<usize>>,
    stochastic_rounding: bool,
    compile: bool,
    replay: Replay,
    in_flight: usize,
    max_traces: usize,
    cache_limit: impl Into<Option<usize>>,
    clear_cache_every: usize,
}

fn refused<T>(name: &str, expected: &str, got: impl std::fmt::Display) -> Result<T> {
    Err(Error::Invalid(format!(
        "{name}: expected {expected}, got {got}"
    )))
}

impl Options {
    /// Refuse what is out of its range, by its name.
    ///
    /// # Errors
    /// [`Error::Invalid`].
    pub fn check(&self) -> Result<()> {
        for (name, value) in [
            ("max_grad_norm", self.max_grad_norm),
            ("max_grad_value", self.max_grad_value),
        ] {
            if let Some(value) = value.filter(|value| value.is_nan() || *value < 0.0) {
                return refused(name, "a number from 0 on or None", value);
            }
        }
        match self.max_loss {
            Some(limit) if limit.is_nan() => return refused("max_loss", "a number or None", limit),
            Some(limit) if self.nonfinite == Nonfinite::Allow => {
                let expected = "None where nonfinite allows every step";
                return refused("max_loss", expected, limit);
            }
            _ => {}
        }
        if let Some(dtype) = self
            .compute_dtype
            .filter(|&dtype| !Optimizer::supports(dtype))
        {
            let (expected, got) = ("bfloat16, float16, float32 or None", format!("{dtype:?}"));
            return refused("compute_dtype", expected, got);
        }
        if precision::scales(self.compute_dtype) && self.nonfinite != Nonfinite::Skip {
            let expected =
                "skip where compute_dtype is float16, whose loss scale is found by skipping steps";
            return refused("nonfinite", expected, self.nonfinite);
        }
        if let Some(decay) = self.ema_decay.filter(|decay| !(0.0..1.0).contains(decay)) {
            return refused("ema_decay", "a number from 0 to below 1 or None", decay);
        }
        if let Some(bits) = self.state_bits.filter(|&bits| bits != 8) {
            return refused("state_bits", "8 or None", bits);
        }
        if self.stochastic_rounding && self.compute_dtype.is_some() {
            let expected = "false where compute_dtype has the update work on float32 masters";
            return refused("stochastic_rounding", expected, true);
        }
        if self.accumulate == 0 {
            return refused("accumulate", "a number from 1 on", self.accumulate);
        }
        if self.max_traces < 2 {
            return refused("max_traces", "a number from 2 on", self.max_traces);
        }
        Ok(())
    }

    /// The condition for skipping a step; `None`: none is skipped.
    #[must_use]
    pub fn guard(&self) -> Option<Guard> {
        let max_loss = self.max_loss;
        (self.nonfinite != Nonfinite::Allow).then_some(Guard { max_loss })
    }

    /// The condition for leaving a batch out of its window. What is summed over ranks has its limit there.
    #[must_use]
    pub(crate) fn batch_guard(&self) -> Option<Guard> {
        let guard = self.guard();
        guard.map(|guard| {
            if self.reduced {
                Guard::default()
            } else {
                guard
            }
        })
    }

    /// The way in which an update stores what it computes.
    #[must_use]
    pub fn stored(&self) -> Stored {
        Stored {
            codes: self.state_bits.is_some(),
            stochastic: self.stochastic_rounding,
        }
    }

    /// Return whether a step that is not taken is an error.
    #[must_use]
    pub fn raises(&self) -> bool {
        self.nonfinite == Nonfinite::Raise
    }

    /// The state that a step needs beside the optimizer's.
    #[must_use]
    pub fn needs(&self, window: bool) -> Needs {
        Needs {
            masters: self.compute_dtype.is_some(),
            average: self.ema_decay.is_some(),
            window,
            scale: precision::scales(self.compute_dtype),
            losses: window && self.reduced,
            stored: self.stored(),
            ..Needs::default()
        }
    }
}
