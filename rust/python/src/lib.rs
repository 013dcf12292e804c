//! Python bindings of the step.
use pyo3::prelude::*;

#[pymodule]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.py().import("mlx.core")?;
    Ok(())
}
