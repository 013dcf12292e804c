//! `nonfinite="raise"`: an exception for a batch or an update that is no number.
use faststep::{guard::Guard, layout::Layout, outputs::Outputs, step::Owner, Error};
use mlx_rs::Array;
use pyo3::{
    exceptions::{PyFloatingPointError, PyRuntimeError},
    prelude::*,
};

use crate::{errors::to_python, holder::Waiting, host::dotted};

/// Wait for a bool scalar.
pub fn is_true(py: Python<'_>, flag: &Array) -> PyResult<bool> {
    let mut value = Ok(true);
    Waiting(py).unlocked(&mut || value = flag.try_item_exact::<bool>());
    value.map_err(|e| PyRuntimeError::new_err(e.to_string()))
}

/// Raise for a batch that is no number, with the first tensor whose gradient is none; waits for the step
pub fn refuse(
    py: Python<'_>,
    paths: &[Vec<String>],
    layout: &Layout,
    guard: Option<Guard>,
    batch: &Outputs,
) -> PyResult<()> {
    let failed = |e: mlx_rs::error::Exception| to_python(&Error::Mlx(e));
    let flag = batch.skipped.as_ref();
    if !flag
        .map(|flag| is_true(py, flag))
        .transpose()?
        .unwrap_or(false)
    {
        return Ok(());
    }
    let gradients = layout.views(&batch.gradients).map_err(failed)?;
    for (gradient, path) in gradients.iter().zip(paths) {
        let finite = gradient
            .abs()
            .and_then(|g| g.lt(Array::from_f32(f32::INFINITY)));
        let finite = finite.and_then(|finite| finite.all(None)).map_err(failed)?;
        if !is_true(py, &finite)? {
            return Err(PyFloatingPointError::new_err(format!(
                "the gradient of {} has NaN or infinite values; nothing was updated",
                dotted(path)
            )));
        }
    }
    let loss = batch.loss.as_ref().map(Array::try_item_cast::<f32>);
    let loss = loss.and_then(Result::ok).unwrap_or(f32::NAN);
    let limit = guard.and_then(|guard| guard.max_loss);
    if loss.is_finite() && limit.is_none_or(|limit| f64::from(loss) <= limit) {
        return refuse_norm(batch, "the gradients"); // or the weight is none: nothing to average, and nothing bad
    }
    Err(PyFloatingPointError::new_err(format!(
        "the loss is {loss}, not finite or above max_loss; nothing was updated"
    )))
}

/// Raise for an update whose window's sum is no number.
pub fn refuse_update(update: &Outputs) -> PyResult<()> {
    refuse_norm(update, "the sum of the window's gradients")
}

fn refuse_norm(outputs: &Outputs, what: &str) -> PyResult<()> {
    let norm = outputs.norm.as_ref().map(Array::try_item_exact::<f32>);
    match norm.and_then(Result::ok) {
        Some(norm) if norm == f32::INFINITY => Err(PyFloatingPointError::new_err(format!(
            "{what}: the norm overflows float32; nothing was updated"
        ))),
        _ => Ok(()),
    }
}
