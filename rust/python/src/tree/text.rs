//! Texts of Python objects.
use pyo3::{
    prelude::*,
    types::{PyInt, PyString},
};

/// The text of an object, as `str` gives it.
///
/// No Python code runs for a string or an integer: `str` itself handles signals, and a Ctrl-C there would be lost.
pub fn text(object: &Bound<'_, PyAny>) -> String {
    if let Ok(text) = object.cast_exact::<PyString>() {
        return text.to_string_lossy().into_owned();
    }
    let number = object.cast_exact::<PyInt>().ok();
    if let Some(number) = number.and_then(|number| number.extract::<i64>().ok()) {
        return number.to_string();
    }
    let text = object.str();
    text.map_or_else(|_| "?".into(), |text| text.to_string_lossy().into_owned())
}
