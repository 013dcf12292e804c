//! The interface to the owner of model, loss and optimizer, called while a step is traced.
use mlx_rs::{error::Result as MlxResult, Array};

use crate::optim::UpdateOutput;

/// The inputs of a loss.
#[derive(Clone, Copy, Debug)]
pub struct LossCall<'a> {
    /// The trainable tensors, in the order of the layout, in the dtype to compute in.
    pub parameters: &'a [Array],
    /// The model's other arrays: frozen parameters and buffers.
    pub others: &'a [Array],
    /// The arrays of the batch, float32 ones in the dtype to compute in.
    pub batch: &'a [Array],
    /// The random key.
    pub key: &'a Array,
}

/// Result of one loss call.
#[derive(Debug)]
pub struct LossOutput {
    /// The scalar to differentiate.
    pub loss: Array,
    /// The weight of this batch in a window, a scalar: the number of items that the loss is a mean over; `None`: 1.
    pub weight: Option<Array>,
    /// Arrays that the caller gets beside the loss.
    pub aux: Vec<Array>,
    /// Trainable tensors to which the loss assigned, with their index.
    pub parameters: Vec<(usize, Array)>,
}

impl LossOutput {
    /// Return the output of a loss alone.
    #[must_use]
    pub fn new(loss: Array) -> Self {
        Self {
            loss,
            weight: None,
            aux: Vec::new(),
            parameters: Vec::new(),
        }
    }
}

/// Arrays that differ from what they were before a loss was differentiated.
#[derive(Clone, Debug, Default)]
pub struct Left {
    /// Buffers: other arrays to which the loss assigned, with their index.
    pub others: Vec<(usize, Array)>,
    /// The random key, where the loss drew from it.
    pub key: Option<Array>,
}

/// A loss with its gradients.
#[derive(Debug)]
pub struct Differentiated {
    /// Values that the loss returned or assigned.
    pub output: LossOutput,
    /// Arrays that the loss has left other than they were.
    pub left: Left,
    /// The gradients of the loss, or of the loss times the scale, by trainable tensor.
    pub gradients: Vec<Array>,
}

/// The inputs of an optimizer that is not native: lists by tensor, and the arrays of its state.
#[derive(Clone, Copy, Debug)]
pub struct UpdateCall<'a> {
    /// The clipped gradients.
    pub gradients: &'a [Array],
    /// The parameters to update.
    pub parameters: &'a [Array],
    /// The optimizer's arrays.
    pub state: &'a [Array],
    /// Buffers: the other arrays, as the loss has left them.
    pub others: &'a [Array],
    /// The random key behind the loss; `None` in the update by a window.
    pub key: Option<&'a Array>,
}

/// The owner of the model, loss and optimizer that are traced. Called while tracing only.
pub trait Host {
    /// Differentiate the loss: `work` calls [`Host::loss`], and may call parts of the loss again, as gradient checkpointing
    /// does. The model is put back afterwards, and not before.
    ///
    /// `others` and `key` are as in [`LossCall`].
    ///
    /// # Errors
    /// Those of `work`, and changes of the model by the loss that cannot be undone.
    fn differentiate(
        &self,
        others: &[Array],
        key: &Array,
        work: &mut dyn FnMut() -> MlxResult<()>,
    ) -> MlxResult<Left> {
        let _ = (others, key);
        work().map(|()| Left::default())
    }

    /// Run work that waits for arrays in a step that is not compiled, with whatever lock the caller holds released.
    fn unlocked(&self, work: &mut dyn FnMut()) {
        work();
    }

    /// The loss with its gradients, where the host has their graph; `None`: the loss is to be differentiated.
    ///
    /// `scale`: that of the loss in half precision, a scalar.
    ///
    /// # Errors
    /// When MLX refuses an operation.
    fn differentiated(
        &self,
        call: LossCall,
        scale: Option<&Array>,
    ) -> MlxResult<Option<Differentiated>> {
        let _ = (call, scale);
        Ok(None)
    }

    /// Compute the loss.
    ///
    /// # Errors
    /// Whatever the loss raises; it ends the trace.
    fn loss(&self, call: LossCall) -> MlxResult<LossOutput>;

    /// The learning rate of a rule's schedule after `step` updates; `None` where it is not scheduled on the device.
    ///
    /// `rule`: its number in [`Rules::rules`](crate::optim::Rules::rules).
    ///
    /// # Errors
    /// Whatever the schedule raises.
    fn learning_rate(&self, rule: usize, step: &Array) -> MlxResult<Option<Array>>;

    /// Update by an optimizer of the host's own.
    ///
    /// # Errors
    /// Whatever the optimizer raises.
    fn update(&self, call: UpdateCall) -> MlxResult<UpdateOutput>;
}
