//! `nonfinite="raise"`: the exception for a batch or an update that is not finite.
use faststep::engine::{nonfinite, Guard, Layout, Outputs, Owner};
use mlx_rs::{error::Result as MlxResult, Array};
use pyo3::{exceptions::PyRuntimeError, prelude::*};

use crate::{
    mlx::{errors::to_python, gil::Waiting},
    tree::role::dotted,
};

/// Wait for a bool scalar, without the GIL.
pub fn is_true(py: Python<'_>, flag: &Array) -> MlxResult<bool> {
    let mut value = Ok(true);
    Waiting(py).unlocked(&mut || value = nonfinite::is_true(flag));
    value
}

/// The exception of a flag that could not be read.
pub fn read<T>(result: MlxResult<T>) -> PyResult<T> {
    result.map_err(|error| PyRuntimeError::new_err(error.what().to_owned()))
}

/// Raise for a batch that is no number, with the first tensor whose gradient is none; waits for the step
pub fn refuse(
    py: Python<'_>,
    paths: &[Vec<String>],
    layout: &Layout,
    guard: Option<Guard>,
    batch: &Outputs,
) -> PyResult<()> {
    let names = paths.iter().map(|path| dotted(path));
    let checked = nonfinite::check(names, layout, guard, batch, &|flag| is_true(py, flag));
    checked.map_err(|error| to_python(&error))
}

/// Raise for an update whose window's sum is no number.
pub fn refuse_update(update: &Outputs) -> PyResult<()> {
    nonfinite::check_update(update).map_err(|error| to_python(&error))
}
