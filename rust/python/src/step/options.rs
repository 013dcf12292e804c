//! Conversion of the options from Python.
use std::ops::Deref;

use faststep::engine::{self, Field, Nonfinite, Replay};
use mlx_rs::Dtype;
use pyo3::{
    exceptions::{PyTypeError, PyValueError},
    prelude::*,
};

use crate::mlx::errors::to_python;

/// The engine's options, and the one that only a Python loss has.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// True if the loss returns the weight that it is a mean over.
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

fn other_type(name: &str, expected: &str, value: &Bound<'_, PyAny>) -> PyErr {
    let got = value.get_type();
    let got = got.fully_qualified_name();
    let got = got.map_or_else(|error| error.to_string(), |name| name.to_string());
    PyTypeError::new_err(format!("{name}: expected {expected}, got {got}"))
}

fn read<'py, T>(name: &str, expected: &str, value: &Bound<'py, PyAny>) -> PyResult<T>
where
    T: FromPyObjectOwned<'py>,
{
    let extracted = value.extract();
    extracted.map_err(|_| other_type(name, expected, value))
}

fn count(name: &str, value: i64) -> PyResult<usize> {
    let negative = |_| refused(name, "no negative number", &value.to_string());
    usize::try_from(value).map_err(negative)
}

fn nonfinite(name: &str, value: &str) -> PyResult<Nonfinite> {
    let mut known = Nonfinite::ALL.into_iter();
    let found = known.find(|each| each.name() == value);
    let expected = "\"skip\", \"raise\" or \"allow\"";
    found.ok_or_else(|| refused(name, expected, &format!("{value:?}")))
}

fn replay(name: &str, given: &Bound<'_, PyAny>) -> PyResult<Replay> {
    if let Ok(given) = given.extract::<bool>() {
        return Ok(if given { Replay::Always } else { Replay::Never });
    }
    let expected = "\"auto\", True or False";
    match read::<String>(name, expected, given)?.as_str() {
        "auto" => Ok(Replay::Auto),
        other => Err(refused(name, expected, &format!("{other:?}"))),
    }
}

fn dtype(option: &str, given: &Bound<'_, PyAny>) -> PyResult<Dtype> {
    let mlx = given.py().import("mlx.core")?;
    if !given.is_instance(&mlx.getattr("Dtype")?)? {
        return Err(other_type(option, "mx.Dtype or None", given));
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
        option,
        "mx.bfloat16, mx.float16, mx.float32 or None",
        &given.repr()?.to_string(),
    ))
}

fn set(name: &str, field: Field<'_>, value: &Bound<'_, PyAny>) -> PyResult<()> {
    match field {
        Field::Number(number) => *number = read(name, "a number or None", value)?,
        Field::Flag(flag) => *flag = read(name, "a bool", value)?,
        Field::Count(size) => *size = count(name, read(name, "an int", value)?)?,
        Field::Limit(limit) => {
            let given: Option<i64> = read(name, "an int or None", value)?;
            *limit = given.map(|given| count(name, given)).transpose()?;
        }
        Field::Dtype(to) => {
            let given = (!value.is_none()).then(|| dtype(name, value));
            *to = given.transpose()?;
        }
        Field::Nonfinite(to) => {
            let text: String = read(name, "a str", value)?;
            *to = nonfinite(name, &text)?;
        }
        Field::Replay(to) => *to = replay(name, value)?,
    }
    Ok(())
}

impl Options {
    /// Set another norm to which gradients are clipped; return whether it is another.
    ///
    /// # Errors
    /// `ValueError` where there was none or it is out of its range, `TypeError` for another type.
    pub fn set_max_grad_norm(&mut self, value: &Bound<'_, PyAny>) -> PyResult<bool> {
        const NAME: &str = "max_grad_norm";
        let new: Option<f64> = read(NAME, "a number or None", value)?;
        let old = self.step.max_grad_norm;
        if new.is_some() != old.is_some() {
            let expected = match old {
                Some(_) => "a number in a step that was made with one (math.inf clips nothing)",
                None => "None in a step that was made with None (made with math.inf, it takes others later)",
            };
            return Err(refused(NAME, expected, &value.repr()?.to_string()));
        }
        let step = self.step.max_grad_norm(new);
        step.check().map_err(|error| to_python(&error))?;
        self.step = step;
        Ok(new != old)
    }

    /// Read and check them; `reduced`: those of a step with a group.
    ///
    /// # Errors
    /// `ValueError` for an option that is out of its range, `TypeError` for one of another type.
    pub fn read(options: &Bound<'_, PyAny>, reduced: bool) -> PyResult<Self> {
        let mut step = engine::Options::default();
        step.reduced = reduced;
        for (name, field) in step.fields() {
            if let Some(value) = options.getattr_opt(name)? {
                set(name, field, &value)?;
            }
        }
        step.check().map_err(|error| to_python(&error))?;
        Ok(Self {
            weighted: read("weighted", "a bool", &options.getattr("weighted")?)?,
            step,
        })
    }
}
