//! The options of a step, checked.
use faststep::engine::{precision, Guard, Needs};
use mlx_rs::Dtype;
use pyo3::{
    exceptions::{PyTypeError, PyValueError},
    prelude::*,
};

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

/// The options of one step.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// The global norm to clip to.
    pub max_grad_norm: Option<f64>,
    /// The largest absolute value of a gradient's element.
    pub max_grad_value: Option<f64>,
    /// Whether the loss returns what it is a mean over.
    pub weighted: bool,
    /// Which steps are not taken.
    pub guard: Option<Guard>,
    /// Whether such a step raises.
    pub raises: bool,
    /// The dtype to compute the loss in.
    pub compute: Option<Dtype>,
    /// The decay of the parameters' average.
    pub ema_decay: Option<f64>,
    /// Whether the step is compiled.
    pub compiled: bool,
    /// How many steps may be under way when a call returns.
    pub in_flight: usize,
    /// How many traces are kept.
    pub max_traces: usize,
    /// After how many steps MLX's cache is cleared; 0: never.
    pub clear_cache_every: usize,
}

fn refused(name: &str, expected: &str, got: &str) -> PyErr {
    PyValueError::new_err(format!("{name}: expected {expected}, got {got}"))
}

fn count(name: &str, value: i64, least: i64) -> PyResult<usize> {
    usize::try_from(value)
        .ok()
        .filter(|_| value >= least)
        .ok_or_else(|| {
            refused(
                name,
                &format!("a number from {least} on"),
                &value.to_string(),
            )
        })
}

fn limit(name: &str, value: Option<f64>) -> PyResult<Option<f64>> {
    match value {
        Some(value) if value.is_nan() || value < 0.0 => Err(refused(
            name,
            "a number from 0 on or None",
            &value.to_string(),
        )),
        _ => Ok(value),
    }
}

impl Given {
    fn guard(&self) -> PyResult<Option<Guard>> {
        if self.max_loss.is_some_and(f64::is_nan) {
            return Err(refused("max_loss", "a number or None", "nan"));
        }
        match (self.nonfinite.as_str(), self.max_loss) {
            ("skip" | "raise", max_loss) => Ok(Some(Guard { max_loss })),
            ("allow", None) => Ok(None),
            ("allow", Some(limit)) => Err(refused(
                "max_loss",
                "None with nonfinite=\"allow\", which takes every step",
                &limit.to_string(),
            )),
            (other, _) => Err(refused(
                "nonfinite",
                "\"skip\", \"raise\" or \"allow\"",
                &format!("{other:?}"),
            )),
        }
    }

    fn compute(&self, py: Python<'_>) -> PyResult<Option<Dtype>> {
        let Some(given) = &self.compute_dtype else {
            return Ok(None);
        };
        let given = given.bind(py);
        let mlx = py.import("mlx.core")?;
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
                return Ok(Some(dtype));
            }
        }
        Err(refused(
            "compute_dtype",
            "mx.bfloat16, mx.float16, mx.float32 or None",
            &given.repr()?.to_string(),
        ))
    }
}

impl Options {
    /// Read and check them.
    ///
    /// # Errors
    /// `ValueError` for an option that is out of its range, `TypeError` for one of another type.
    pub fn read(options: &Bound<'_, PyAny>) -> PyResult<Self> {
        let given: Given = options.extract()?;
        let compute = given.compute(options.py())?;
        if precision::scales(compute) && given.nonfinite != "skip" {
            return Err(refused(
                "nonfinite",
                "\"skip\" with compute_dtype=mx.float16, whose loss scale is found by skipping steps",
                &format!("{:?}", given.nonfinite),
            ));
        }
        if let Some(decay) = given.ema_decay.filter(|d| !(0.0..1.0).contains(d)) {
            return Err(refused(
                "ema_decay",
                "a number from 0 to below 1 or None",
                &decay.to_string(),
            ));
        }
        Ok(Self {
            max_grad_norm: limit("max_grad_norm", given.max_grad_norm)?,
            max_grad_value: limit("max_grad_value", given.max_grad_value)?,
            weighted: given.weighted,
            guard: given.guard()?,
            raises: given.nonfinite == "raise",
            compute,
            ema_decay: given.ema_decay,
            compiled: given.compile,
            in_flight: count("in_flight", given.in_flight, 0)?,
            max_traces: count("max_traces", given.max_traces, 2)?,
            clear_cache_every: count("clear_cache_every", given.clear_cache_every, 0)?,
        })
    }

    /// What a step keeps beside the optimizer's state.
    pub fn needs(&self, window: bool) -> Needs {
        Needs {
            masters: self.compute.is_some(),
            average: self.ema_decay.is_some(),
            window,
            scale: precision::scales(self.compute),
        }
    }
}
