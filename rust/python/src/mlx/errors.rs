//! Errors of the engine as Python exceptions.
use faststep::Error;
use pyo3::{
    create_exception,
    exceptions::{PyFloatingPointError, PyRuntimeError, PyValueError},
    prelude::*,
};

create_exception!(
    faststep._core,
    RankError,
    PyRuntimeError,
    "Ranks of a step's group that have failed, do not agree or are gone; `ranks` has their numbers, as far as they are known."
);

// the numbers are an attribute
fn rank_error(message: &str, ranks: &[usize]) -> PyErr {
    Python::attach(|py| {
        let error = RankError::new_err(message.to_owned());
        match error.value(py).setattr("ranks", ranks.to_vec()) {
            Ok(()) => error,
            Err(other) => other,
        }
    })
}

/// The exception for an error of the engine.
pub fn to_python(error: &Error) -> PyErr {
    match error {
        Error::Trace(e) | Error::Mlx(e) => PyValueError::new_err(e.what().to_owned()),
        Error::FirstEvaluation(e) | Error::Compile(e) => {
            PyRuntimeError::new_err(e.what().to_owned())
        }
        Error::NoParameters | Error::Invalid(_) => PyValueError::new_err(error.to_string()),
        Error::Ranks { ranks, message } => rank_error(message, ranks),
        Error::Nonfinite(_) => PyFloatingPointError::new_err(error.to_string()),
        // the device, a loss that cannot be traced, a checkpoint, and what later versions of the engine bring
        _ => PyRuntimeError::new_err(error.to_string()),
    }
}

/// The exception for an operation that MLX refused.
pub fn mlx(error: mlx_rs::error::Exception) -> PyErr {
    to_python(&Error::Mlx(error))
}
