//! The recipe of a trace: which part of a step is computed, by which options.
use std::rc::Rc;

use mlx_rs::{error::Result, Array, Dtype};

use super::options::Options;
use crate::{
    layout::{aux_state::Places, precision, Layout},
    mlx::{group::Group, join},
    optim::Rules,
};

/// The role of one of the model's arrays in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// A trainable parameter, by its index.
    Parameter(usize),
    /// Any other array, by its index.
    Other(usize),
}

/// The update of the parameters.
#[derive(Clone, Debug, PartialEq)]
pub enum Rule {
    /// Update by rules of this crate. State: as [`Rules`] has it.
    Native(Rc<Rules>),
    /// Update by the host's optimizer. State: its arrays.
    Host,
}

/// The part of a step that is traced.
#[derive(Clone, Debug, PartialEq)]
pub enum Part {
    /// Loss, gradients and update.
    Whole(Rule),
    /// Loss and gradients, which are added to the window.
    Batch,
    /// Loss and gradients, which are all of the window.
    OnlyBatch,
    /// The update by the window's average.
    Update(Rule),
    /// Loss and gradients, clipped, which are left in the places of a window for an update by the host's optimizer.
    Clipped,
    /// The update by the host's optimizer with the gradients of [`Part::Clipped`].
    Given,
    /// Loss and gradients by tensor.
    Gradients,
}

impl Part {
    /// Return whether it updates.
    #[must_use]
    pub fn updates(&self) -> bool {
        matches!(self, Self::Whole(_) | Self::Update(_) | Self::Given)
    }

    /// Return whether it leaves its gradients in the window.
    #[must_use]
    pub fn fills_window(&self) -> bool {
        matches!(self, Self::Batch | Self::OnlyBatch)
    }

    /// Return whether a loss is computed in it.
    #[must_use]
    pub fn has_loss(&self) -> bool {
        !matches!(self, Self::Update(_) | Self::Given)
    }
}

/// The computation of a trace, apart from the model.
#[derive(Clone, Debug)]
pub struct Recipe {
    /// The part of a step.
    pub part: Part,
    /// The layout of the trainable tensors.
    pub layout: Rc<Layout>,
    /// The indices of the arrays of the state.
    pub places: Places,
    /// The step's options; where a step that is not taken raises, the gradients are outputs too, buffer by buffer.
    pub options: Options,
    /// The number of other arrays: of the model, and what the loss reaches beside it.
    pub others: usize,
    /// The ranks that share the model, where some of its tensors are shards.
    pub shards: Option<Rc<Group>>,
}

impl Recipe {
    /// Gradients in the dtypes in which the host's optimizer takes them, from those in the places of a window.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn gradients(&self, wide: &[Array]) -> Result<Vec<Array>> {
        let dtype = |buffer| match self.options.compute_dtype {
            None => match self.layout.dtype(buffer) {
                // whole numbers times a factor, as MLX's clipping makes them
                dtype if !dtype.is_inexact() && self.options.max_grad_norm.is_some() => {
                    Dtype::Float32
                }
                dtype => dtype,
            },
            Some(_) => precision::wide(self.layout.dtype(buffer)),
        };
        let gradients = wide.iter().enumerate();
        let gradients = gradients.map(|(buffer, gradient)| gradient.as_dtype(dtype(buffer)));
        gradients.collect()
    }

    /// The index in the state of the buffer that is updated in place of this one's parameters, if there is one: its master.
    #[must_use]
    pub fn master(&self, buffer: usize) -> Option<usize> {
        self.options.compute_dtype?;
        self.places.master(&self.layout, buffer)
    }

    /// Return whether the update is best evaluated buffer by buffer: on a CPU, where it takes more than one kernel for some, whose
    /// arrays would be there for all buffers at once otherwise.
    pub(crate) fn updates_by_buffer(&self) -> bool {
        let (Part::Whole(Rule::Native(rules)) | Part::Update(Rule::Native(rules))) = &self.part
        else {
            return false;
        };
        let is_one = rules.are_elementwise(self.layout.tensors()) && !rules.are_coded();
        !join::is_cuda() && !is_one
    }
}
