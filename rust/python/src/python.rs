//! The Python modules of the package that native code calls.
use pyo3::prelude::*;

/// The search of what a loss reads, and the check of one of its calls.
pub fn reach(py: Python<'_>) -> PyResult<Bound<'_, PyModule>> {
    py.import("faststep._reach")
}
