//! [`Nonfinite::Raise`](crate::Nonfinite::Raise): an error for a batch or an update that is no number.
use mlx_rs::{error::Result as MlxResult, Array};

use super::Owner;
use crate::{
    error::{unread, Error, Result},
    layout::Layout,
    trace::{Guard, Outputs},
};

/// Wait for a bool scalar.
///
/// # Errors
/// When the device has failed.
pub fn is_true(flag: &Array) -> MlxResult<bool> {
    let value = flag.try_item_exact::<bool>();
    value.map_err(unread)
}

/// Wait for a bool scalar without the owner's lock.
///
/// # Errors
/// When the device has failed.
pub fn wait_true(flag: &Array, owner: &mut dyn Owner) -> MlxResult<bool> {
    let mut value = Ok(true);
    owner.unlocked(&mut || value = is_true(flag));
    value
}

// refuses a batch that is no number, with the first tensor whose gradient is none; waits for the step
pub(super) fn check(
    name: &dyn Fn(usize) -> String,
    layout: &Layout,
    guard: Option<Guard>,
    batch: &Outputs,
    owner: &mut dyn Owner,
) -> Result<()> {
    match &batch.skipped {
        Some(skipped) if wait_true(skipped, owner)? => {}
        _ => return Ok(()),
    }
    for (tensor, gradient) in layout.views(&batch.gradients)?.iter().enumerate() {
        let finite = gradient.abs()?.lt(Array::from_f32(f32::INFINITY))?;
        if !wait_true(&finite.all(None)?, owner)? {
            let name = name(tensor);
            return refuse(format!("the gradient of {name} has NaN or infinite values"));
        }
    }
    let loss = batch.loss.as_ref().map(Array::try_item_cast::<f32>);
    let loss = loss.and_then(std::result::Result::ok).unwrap_or(f32::NAN);
    let limit = guard.and_then(|guard| guard.max_loss);
    if loss.is_finite() && limit.is_none_or(|limit| f64::from(loss) <= limit) {
        if norm_of(batch).is_some_and(f32::is_nan) {
            // those of this rank are numbers
            let whose = "those of another rank, which shares the model, have NaN values";
            return refuse(format!("the gradients: {whose}"));
        }
        return check_norm(batch, "the gradients"); // or the weight is none: nothing to average, and nothing bad
    }
    refuse(format!("the loss is {loss}, not finite or above max_loss"))
}

// refuses an update whose window's sum is no number
pub(super) fn check_update(update: &Outputs) -> Result<()> {
    let loss = update.loss.as_ref().map(Array::try_item_exact::<f32>);
    let skipped = update.skipped.as_ref().map(is_true).transpose()?;
    if let (Some(Ok(loss)), Some(true)) = (loss, skipped) {
        // only what is summed over ranks has a loss here
        let what = "or the gradients' norm is not finite";
        return refuse(format!("over all ranks the loss is {loss}, {what}"));
    }
    check_norm(update, "the sum of the window's gradients")
}

fn check_norm(outputs: &Outputs, what: &str) -> Result<()> {
    match norm_of(outputs) {
        Some(norm) if norm == f32::INFINITY => {
            refuse(format!("{what}: the norm overflows float32"))
        }
        _ => Ok(()),
    }
}

fn norm_of(outputs: &Outputs) -> Option<f32> {
    outputs.norm.as_ref()?.try_item_exact::<f32>().ok()
}

fn refuse(message: String) -> Result<()> {
    Err(Error::Nonfinite(message))
}
