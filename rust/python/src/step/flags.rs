//! Flags of steps that have been taken.
use faststep::engine::nonfinite;
use mlx_rs::{error::Result as MlxResult, transforms::eval, Array, ArrayElement};
use pyo3::{exceptions::PyRuntimeError, prelude::*};

use crate::mlx::gil::{unlocked, Waiting};

/// Wait for a bool scalar, without the GIL.
pub fn is_true(py: Python<'_>, flag: &Array) -> MlxResult<bool> {
    nonfinite::wait_true(flag, &mut Waiting(py))
}

/// Wait for a scalar, without the GIL.
pub fn number_of<T: ArrayElement>(py: Python<'_>, scalar: &Array) -> MlxResult<T> {
    unlocked(py, || eval([scalar]))?;
    scalar
        .try_item_cast::<T>()
        .map_err(faststep::engine::unread)
}

/// The exception of a flag that could not be read.
pub fn read<T>(result: MlxResult<T>) -> PyResult<T> {
    result.map_err(|error| PyRuntimeError::new_err(error.what().to_owned()))
}
