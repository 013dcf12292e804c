//! Flags of steps that have been taken.
use faststep::engine::nonfinite;
use mlx_rs::{
    error::{Exception, Result as MlxResult},
    transforms::eval,
    Array, ArrayElement,
};
use pyo3::{create_exception, exceptions::PyRuntimeError, prelude::*};

use crate::{
    mlx::{
        errors::to_python,
        gil::{unlocked, Waiting},
    },
    store::registry::Shared,
};

create_exception!(faststep._core, Unread, PyRuntimeError);

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

/// The value, or an exception for [`told`].
pub fn read<T>(result: MlxResult<T>) -> PyResult<T> {
    result.map_err(|error| Unread::new_err(error.what().to_owned()))
}

/// The error for the user: where a value could not be read, a step under way has failed.
pub fn told(py: Python<'_>, shared: &Shared, error: PyErr) -> PyErr {
    if !error.is_instance_of::<Unread>(py) {
        return error;
    }
    let failed = Exception::custom(error.value(py).to_string());
    let store = shared.enter();
    let told = store.map(|mut store| {
        let engine = store.engine.as_mut();
        engine.map(|engine| to_python(&engine.fail(failed, &mut Waiting(py))))
    });
    told.ok().flatten().unwrap_or(error)
}
