//! Conversion of the options from Python.
use std::ops::Deref;

use faststep::engine::{self, Nonfinite};
use mlx_rs::Dtype;
use pyo3::{
    exceptions::{PyTypeError, PyValueError},
    prelude::*,
};

use crate::mlx::errors::to_python;

/// The options as Python's `Options` has them.
#[derive(FromPyObject)]
struct Given {
    max_grad_norm: Option<f64>,
    max_grad_value: Option<f64>,
    weighted: bool,
    nonfinite: String,
    max_loss: Option<f64>,
    compute_dtype: Option<Py<PyAny>>,
    ema_decay: Option<f64>,
    compile: bool,
    in_flight: i64,
    max_traces: i64,
    clear_cache_every: i64,
}

/// The engine's options, and the one that only a Python loss has.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Whether the loss returns the weight that it is a mean over.
    pub weighted: bool,
    step: engine::Options,
}

impl Deref for Options {
    type Target = engine::Options;

    fn deref(&self) -> &engine::Options {
        &self.step
    }
}

fn refused(name: &str, expected: &str, got: &str) -> PyErr {
    PyValueError::new_err(format!("{name}: expected {expected}, got {got}"))
}

fn count(name: &str, value: i64) -> PyResult<usize> {
    let negative = |_| refused(name, "no negative number", &value.to_string());
    usize::try_from(value).map_err(negative)
}

fn nonfinite(name: &str) -> PyResult<Nonfinite> {
    match name {
        "skip" => Ok(Nonfinite::Skip),
        "raise" => Ok(Nonfinite::Raise),
        "allow" => Ok(Nonfinite::Allow),
        other => Err(refused(
            "nonfinite",
            "\"skip\", \"raise\" or \"allow\"",
            &format!("{other:?}"),
        )),
    }
}

fn compute_dtype(given: &Bound<'_, PyAny>) -> PyResult<Dtype> {
    let mlx = given.py().import("mlx.core")?;
    if !given.is_instance(&mlx.getattr("Dtype")?)? {
        return Err(PyTypeError::new_err(format!(
            "compute_dtype: expected mx.Dtype or None, got {}",
            given.get_type().fully_qualified_name()?
        )));
    }
    for (name, dtype) in [
        ("bfloat16", Dtype::Bfloat16),
        ("float16", Dtype::Float16),
        ("float32", Dtype::Float32),
    ] {
        if given.eq(mlx.getattr(name)?)? {
            return Ok(dtype);
        }
    }
    Err(refused(
        "compute_dtype",
        "mx.bfloat16, mx.float16, mx.float32 or None",
        &given.repr()?.to_string(),
    ))
}

impl Options {
    /// Read and check them.
    ///
    /// # Errors
    /// `ValueError` for an option that is out of its range, `TypeError` for one of another type.
    pub fn read(options: &Bound<'_, PyAny>) -> PyResult<Self> {
        let given: Given = options.extract()?;
        let dtype = given.compute_dtype.as_ref();
        let dtype = dtype.map(|dtype| compute_dtype(dtype.bind(options.py())));
        let step = engine::Options::default()
            .max_grad_norm(given.max_grad_norm)
            .max_grad_value(given.max_grad_value)
            .nonfinite(nonfinite(&given.nonfinite)?)
            .max_loss(given.max_loss)
            .compute_dtype(dtype.transpose()?)
            .ema_decay(given.ema_decay)
            .compile(given.compile)
            .in_flight(count("in_flight", given.in_flight)?)
            .max_traces(count("max_traces", given.max_traces)?)
            .clear_cache_every(count("clear_cache_every", given.clear_cache_every)?);
        step.check().map_err(|error| to_python(&error))?;
        Ok(Self {
            weighted: given.weighted,
            step,
        })
    }
}
