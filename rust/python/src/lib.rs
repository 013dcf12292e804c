//! Python bindings of the step: `faststep._core`.
//!
//! # The rooms, from the top
//! - `step`: the Python class. One call: arguments, the trace that fits, the run, what is returned.
//! - `host`: the user's loss and optimizer, called with tracers.
//! - `watch`: what a loss reads, while its calls are left out.
//! - `store`: the arrays of one model and optimizer in the engine, and whether the user has replaced any.
//! - `optimizer`: MLX's optimizers as rules of the engine.
//! - `tree`: Python containers of arrays: walks, slots, signatures.
//! - `mlx`: `mx.array` objects, classes, the random key, the GIL, errors.
//! - `python`: the modules of the package that are called.
//!
//! Each uses only those below it. A batch goes through `step/call.rs`, `step/arguments.rs`,
//! `store/detect.rs`, `host/call.rs`, `step/choose.rs`, `step/run.rs`, then the engine, then `store/owner.rs` and `store/values.rs`.
#![deny(unsafe_code)]

mod host;
mod mlx;
mod optimizer;
mod python;
mod step;
mod store;
mod tree;
mod watch;

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
#[allow(clippy::needless_pass_by_value)] // PyO3 passes extracted values
fn bind_blas(library: PathBuf) -> PyResult<usize> {
    match blas::bind(&library) {
        Ok(bound) => Ok(bound.names.len()),
        Err(BlasError::Rebind(error)) => Err(rebind_error(&error)),
        Err(error @ BlasError::Load { .. }) => Err(PyOSError::new_err(error.to_string())),
        Err(error @ BlasError::Foreign(_)) => Err(PyRuntimeError::new_err(error.to_string())),
    }
}

/// Have MLX's kernels compiled for this processor, or several at a time for CUDA; returns whether they are, here.
#[pyfunction]
fn bind_kernels() -> PyResult<bool> {
    kernels::bind().map_err(|error| rebind_error(&error))
}

/// Return how many of MLX's kernels this process has compiled, or begun to compile.
#[pyfunction]
fn compiled_kernels() -> usize {
    kernels::compiled()
}

/// Return whether fused kernels on a CPU have to be compiled: otherwise they can be computed in blocks.
#[pyfunction]
fn kernels_need_compiler() -> bool {
    kernels::need_compiler()
}

/// A number that array objects of the same value have in common, while one of them lives.
#[pyfunction]
fn array_id(array: &Bound<'_, PyAny>) -> PyResult<usize> {
    let not_one = || PyTypeError::new_err("array: expected mx.array");
    mlx::bridge::id(array).ok_or_else(not_one)
}

/// Return whether two groups are one.
#[pyfunction]
fn same_group(one: &Bound<'_, PyAny>, other: &Bound<'_, PyAny>) -> bool {
    let groups = mlx::bridge::group(one).zip(mlx::bridge::group(other));
    groups.is_some_and(|(one, other)| one.is(&other))
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
    mlx::bridge::init(module)?;
    module.add(
        "RankError",
        module.py().get_type::<mlx::errors::RankError>(),
    )?;
    module.add_class::<step::MemoryPlan>()?;
    module.add_class::<step::Step>()?;
    module.add_class::<step::TraceRecord>()?;
    module.add_function(wrap_pyfunction!(array_id, module)?)?;
    module.add_function(wrap_pyfunction!(bind_blas, module)?)?;
    module.add_function(wrap_pyfunction!(bind_kernels, module)?)?;
    module.add_function(wrap_pyfunction!(compiled_kernels, module)?)?;
    module.add_function(wrap_pyfunction!(kernels_need_compiler, module)?)?;
    module.add_function(wrap_pyfunction!(same_group, module)?)?;
    module.add_function(wrap_pyfunction!(step::label, module)?)?;
    module.add_function(wrap_pyfunction!(optimizer::optimizers_within, module)?)?;
    module.add_function(wrap_pyfunction!(store::registry::current_state, module)?)
}
