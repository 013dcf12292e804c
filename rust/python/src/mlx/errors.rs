//! Errors of the engine as Python exceptions.
use std::cell::RefCell;

use faststep::Error;
use pyo3::{
    exceptions::{PyException, PyFloatingPointError, PyRuntimeError, PyValueError},
    prelude::*,
};

/// The exception for an error of the engine.
pub fn to_python(error: &Error) -> PyErr {
    match error {
        Error::Trace(e) | Error::Mlx(e) => PyValueError::new_err(e.what().to_owned()),
        Error::FirstEvaluation(e) | Error::Compile(e) => {
            PyRuntimeError::new_err(e.what().to_owned())
        }
        Error::NoParameters | Error::Invalid(_) => PyValueError::new_err(error.to_string()),
        Error::Nonfinite(_) => PyFloatingPointError::new_err(error.to_string()),
        // the device, a loss that cannot be traced, a checkpoint, and what later versions of the engine bring
        _ => PyRuntimeError::new_err(error.to_string()),
    }
}

/// The exception for an operation that MLX refused.
pub fn mlx(error: mlx_rs::error::Exception) -> PyErr {
    to_python(&Error::Mlx(error))
}

thread_local! {
    static LATE: RefCell<Option<PyErr>> = const { RefCell::new(None) };
}

/// An error that is raised as the call of the step returns: until then all is put in its place.
pub fn raise_late(error: PyErr) {
    LATE.replace(Some(error));
}

/// Return whether there is such an error.
pub fn is_late() -> bool {
    LATE.with_borrow(Option::is_some)
}

/// Return what a step does, or the error of a Ctrl-C that came where none could be raised, with the step's own as its cause.
pub fn or_late<T>(py: Python<'_>, done: PyResult<T>) -> PyResult<T> {
    let Some(late) = LATE.take() else {
        return done;
    };
    let own = done.err();
    late.set_cause(py, own.filter(|own| !own.value(py).is(late.value(py))));
    Err(late)
}

/// Return the answer of Python code, or another one where that raises an error; a Ctrl-C in it is raised late.
pub fn answer(py: Python<'_>, given: PyResult<bool>, otherwise: bool) -> bool {
    given.unwrap_or_else(|error| {
        if !error.is_instance_of::<PyException>(py) {
            raise_late(error);
        }
        otherwise
    })
}
