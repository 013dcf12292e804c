//! Copies of trees with other arrays.
use pyo3::{
    prelude::*,
    types::{PyDict, PyList, PySlice, PyTuple},
};

use super::{ordered, walk::fields};
use crate::mlx::{bridge, classes::is_module};

/// Copy `object`, with each array, in walking order, replaced by what `next` makes of it. Modules are not copied.
pub fn rebuild<'py>(
    object: &Bound<'py, PyAny>,
    next: &mut impl FnMut(&Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    replace(object, bridge::is_array, next)
}

/// Replace the objects that are wanted.
pub fn replace<'py>(
    object: &Bound<'py, PyAny>,
    wanted: fn(&Bound<'_, PyAny>) -> bool,
    next: &mut impl FnMut(&Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    let py = object.py();
    if wanted(object) {
        return next(object);
    }
    if let Ok(dict) = object.cast::<PyDict>() {
        if !dict.is_exact_instance_of::<PyDict>() && is_module(object) {
            return Ok(object.clone());
        }
        let copy = if dict.is_exact_instance_of::<PyDict>() {
            PyDict::new(py).into_any()
        } else {
            py.import("copy")?.call_method1("copy", (object,))? // a defaultdict keeps its factory
        };
        for (key, value) in ordered::items(dict) {
            copy.set_item(key, replace(&value, wanted, next)?)?;
        }
        return Ok(copy);
    }
    if let Ok(list) = object.cast::<PyList>() {
        let items = list.iter().map(|item| replace(&item, wanted, next));
        let items = PyList::new(py, items.collect::<PyResult<Vec<_>>>()?)?;
        if list.is_exact_instance_of::<PyList>() {
            return Ok(items.into_any());
        }
        let copy = py.import("copy")?.call_method1("copy", (object,))?;
        copy.set_item(PySlice::full(py), items)?;
        return Ok(copy);
    }
    if let Ok(tuple) = object.cast::<PyTuple>() {
        let items = tuple.iter().map(|item| replace(&item, wanted, next));
        return again(tuple, items.collect::<PyResult<_>>()?);
    }
    let Some(fields) = fields(object) else {
        return Ok(object.clone());
    };
    let copy = py.import("copy")?.call_method1("copy", (object,))?;
    let set = py.get_type::<PyAny>().getattr("__setattr__")?; // a frozen dataclass refuses its own
    for name in fields {
        let value = replace(&object.getattr(&name)?, wanted, next)?;
        set.call1((&copy, name, value))?;
    }
    Ok(copy)
}

/// Make a tuple of the same class and with the same attributes, but of other items.
pub fn again<'py>(
    tuple: &Bound<'py, PyTuple>,
    items: Vec<Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    let py = tuple.py();
    let items = PyTuple::new(py, items)?;
    if tuple.is_exact_instance_of::<PyTuple>() {
        return Ok(items.into_any());
    }
    if tuple.hasattr("_fields")? {
        return tuple.get_type().call1(items);
    }
    let new = py.get_type::<PyTuple>().getattr("__new__")?;
    let copy = new.call1((tuple.get_type(), items))?;
    if let Some(attributes) = bridge::attributes(tuple) {
        copy.getattr("__dict__")?
            .call_method1("update", (attributes,))?;
    }
    Ok(copy)
}
