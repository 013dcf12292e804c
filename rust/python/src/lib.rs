//! Python bindings of the step: `faststep._core`.
#![deny(unsafe_code)]

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
mod refuse;
mod registry;
mod step;
mod store;
mod traces;
mod tree;
mod walk;

use std::path::PathBuf;

use pyo3::{
    exceptions::{PyOSError, PyRuntimeError},
    prelude::*,
};

use faststep::blas::{bind, BlasError};

/// Make MLX's CPU use the OpenBLAS of this library; returns how many functions were bound.
#[pyfunction]
#[allow(clippy::needless_pass_by_value)] // what PyO3 extracts
fn bind_blas(library: PathBuf) -> PyResult<usize> {
    match bind(&library) {
        Ok(bound) => Ok(bound.names.len()),
        Err(error @ (BlasError::Load { .. } | BlasError::Protect(_))) => {
            Err(PyOSError::new_err(error.to_string()))
        }
        Err(error @ (BlasError::Foreign(_) | BlasError::NoMlx)) => {
            Err(PyRuntimeError::new_err(error.to_string()))
        }
    }
}

#[pymodule]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.py().import("mlx.core")?;
    bridge::init(module)?;
    module.add_class::<step::MemoryPlan>()?;
    module.add_class::<step::Step>()?;
    module.add_class::<traces::TraceRecord>()?;
    module.add_function(wrap_pyfunction!(bind_blas, module)?)?;
    module.add_function(wrap_pyfunction!(registry::current_state, module)?)
}
