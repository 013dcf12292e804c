//! Python bindings of the step: `faststep._core`.
#![deny(unsafe_code)]

mod alarms;
mod bridge;
mod call;
mod errors;
mod extras;
mod holder;
mod host;
mod moments;
mod native;
mod optimizer;
mod options;
mod random;
mod reach;
mod refuse;
mod registry;
mod step;
mod store;
mod traces;
mod tree;
mod walk;

use std::path::PathBuf;

use pyo3::{
    exceptions::{PyOSError, PyRuntimeError, PyTypeError},
    prelude::*,
};

use faststep::{
    engine::{
        blas::{self, BlasError},
        RebindError,
    },
    kernels,
};

/// Make MLX's CPU use the OpenBLAS of this library; returns how many functions were bound.
#[pyfunction]
#[allow(clippy::needless_pass_by_value)] // what PyO3 extracts
fn bind_blas(library: PathBuf) -> PyResult<usize> {
    match blas::bind(&library) {
        Ok(bound) => Ok(bound.names.len()),
        Err(BlasError::Rebind(error)) => Err(rebind_error(&error)),
        Err(error @ BlasError::Load { .. }) => Err(PyOSError::new_err(error.to_string())),
        Err(error @ BlasError::Foreign(_)) => Err(PyRuntimeError::new_err(error.to_string())),
    }
}

/// Have MLX's CPU kernels compiled for this processor; returns whether they are, here.
#[pyfunction]
fn bind_kernels() -> PyResult<bool> {
    kernels::bind().map_err(|error| rebind_error(&error))
}

/// A number that array objects of the same value have in common, while one of them lives.
#[pyfunction]
fn array_id(array: &Bound<'_, PyAny>) -> PyResult<usize> {
    let not_one = || PyTypeError::new_err("array: expected mx.array");
    bridge::id(array).ok_or_else(not_one)
}

fn rebind_error(error: &RebindError) -> PyErr {
    match error {
        RebindError::NoMlx => PyRuntimeError::new_err(error.to_string()),
        RebindError::Protect(_) => PyOSError::new_err(error.to_string()),
    }
}

#[pymodule]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.py().import("mlx.core")?;
    bridge::init(module)?;
    module.add_class::<step::MemoryPlan>()?;
    module.add_class::<step::Step>()?;
    module.add_class::<traces::TraceRecord>()?;
    module.add_function(wrap_pyfunction!(array_id, module)?)?;
    module.add_function(wrap_pyfunction!(bind_blas, module)?)?;
    module.add_function(wrap_pyfunction!(bind_kernels, module)?)?;
    module.add_function(wrap_pyfunction!(registry::current_state, module)?)
}
