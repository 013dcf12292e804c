//! Texts of Python's objects, as far as they can be had without running Python code.
//!
//! `str` and `repr` handle signals, of a text too: where no error can be passed on, a Ctrl-C would be lost there.
use pyo3::{
    prelude::*,
    types::{PyInt, PyString},
};

/// The text of an object, as `str` gives it.
pub fn text(object: &Bound<'_, PyAny>) -> String {
    plain(object).unwrap_or_else(|| {
        let text = object.str();
        text.map_or_else(|_| "?".into(), |text| text.to_string_lossy().into_owned())
    })
}

/// The text of a key, as `repr` gives it; none where it gives none.
pub fn quoted(key: &Bound<'_, PyAny>) -> Option<String> {
    let is_simple = |text: &str| {
        text.chars()
            .all(|c| c == ' ' || (c.is_ascii_graphic() && !"'\\".contains(c)))
    };
    match plain(key).filter(|text| is_simple(text)) {
        Some(text) if key.is_instance_of::<PyString>() => Some(format!("'{text}'")),
        Some(text) => Some(text),
        None => Some(key.repr().ok()?.to_string_lossy().into_owned()),
    }
}

fn plain(object: &Bound<'_, PyAny>) -> Option<String> {
    if let Ok(text) = object.cast_exact::<PyString>() {
        return Some(text.to_string_lossy().into_owned());
    }
    let number = object.cast_exact::<PyInt>().ok()?;
    number
        .extract::<i64>()
        .ok()
        .map(|number| number.to_string())
}
