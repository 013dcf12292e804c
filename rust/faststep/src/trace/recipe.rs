//! The recipe of a trace: which part of a step is computed, by which options.
use std::rc::Rc;

use mlx_rs::Dtype;

use super::guard::Guard;
use crate::{
    layout::{aux_state::Places, Layout},
    optim::Rules,
};

/// How parameters are updated.
#[derive(Clone, Debug, PartialEq)]
pub enum Rule {
    /// By rules of this crate. State: as [`Rules`] has it.
    Native(Rc<Rules>),
    /// By the host's optimizer. State: its arrays.
    Host,
}

/// Which part of a step is traced.
#[derive(Clone, Debug, PartialEq)]
pub enum Part {
    /// Loss, gradients and update.
    Whole(Rule),
    /// Loss and gradients, which are added to the window.
    Batch,
    /// The update by the window's average.
    Update(Rule),
    /// Loss and gradients by tensor.
    Gradients,
}

/// What to compute, apart from the model.
#[derive(Clone, Debug)]
pub struct Recipe {
    /// Which part of a step.
    pub part: Part,
    /// Where the trainable tensors lie.
    pub layout: Rc<Layout>,
    /// Where the arrays of the state stand.
    pub places: Places,
    /// The global norm to clip to.
    pub max_grad_norm: Option<f64>,
    /// The largest absolute value of a gradient's element, after clipping by norm.
    pub max_grad_value: Option<f64>,
    /// Which steps are not to be taken; `None` takes every one.
    pub guard: Option<Guard>,
    /// The dtype in which the loss is computed, while float32 masters are updated; `None`: that of the parameters.
    pub compute: Option<Dtype>,
    /// The decay of the parameters' moving average.
    pub ema_decay: Option<f64>,
    /// Whether the gradients are given out too, buffer by buffer.
    pub keep_gradients: bool,
    /// The number of other arrays: of the model, and what the loss reaches beside it.
    pub others: usize,
}
