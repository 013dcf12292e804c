//! Copies of what is in objects that are changed in place.
use pyo3::{
    intern,
    prelude::*,
    types::{PyBytes, PyDict, PyFrozenSet, PyList, PySet, PyTuple},
};

use crate::{
    mlx::{
        bridge,
        classes::{is_deque, is_numpy},
        numpy,
    },
    tree::snapshot,
};

/// Bytes of a NumPy array from which on a hash is compared.
const MAX_NUMPY: usize = 1 << 16;

/// The number of items, whatever a user's class makes of `len`
pub fn size(object: &Bound<'_, PyAny>) -> PyResult<usize> {
    if let Ok(dict) = object.cast::<PyDict>() {
        return Ok(dict.len());
    }
    match (object.cast::<PyList>(), object.cast::<PyTuple>()) {
        (Ok(list), _) => Ok(list.len()),
        (_, Ok(tuple)) => Ok(tuple.len()),
        _ => object.len(),
    }
}

/// Give an object that is changed in place, no dict or list, the contents of a copy.
pub fn refill(object: &Bound<'_, PyAny>, copy: &Bound<'_, PyAny>) -> PyResult<()> {
    let py = object.py();
    if is_numpy(object) {
        return object.set_item(py.Ellipsis(), copy);
    }
    if !object.is_instance_of::<PySet>() && !is_deque(object) {
        let things = py.import("faststep._step._things")?;
        return things.call_method1("refill", (object, copy)).map(drop);
    }
    snapshot::refill(object, copy)
}

/// A copy of an object that is changed in place, no dict or list; of a buffer its bytes, of a stream its position too.
pub fn copy<'py>(object: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    let py = object.py();
    if is_deque(object) {
        let items = object.try_iter()?.collect::<PyResult<Vec<_>>>()?;
        return items.into_pyobject(py); // of any class
    }
    if let Ok(set) = object.cast::<PySet>() {
        return Ok(PyFrozenSet::new(py, set.iter())?.into_any());
    }
    if let Ok(dict) = object.cast::<PyDict>() {
        return Ok(dict.copy()?.into_any());
    }
    if is_numpy(object) || object.is_instance_of::<PyFrozenSet>() {
        return object.call_method0(intern!(py, "copy"));
    }
    if let Some(get) = object.getattr_opt(intern!(py, "getvalue"))? {
        let at = object.call_method0(intern!(py, "tell"))?;
        return Ok((get.call0()?, at).into_pyobject(py)?.into_any()); // of a stream
    }
    py.get_type::<PyBytes>().call1((object,))
}

/// Return whether a list, a tuple or a dict holds the very objects of a copy by `contents`; false of anything else.
pub fn is_copied(object: &Bound<'_, PyAny>, copy: &Bound<'_, PyAny>) -> bool {
    let Ok(copy) = copy.cast::<PyTuple>() else {
        return false;
    };
    if let Ok(list) = object.cast::<PyList>() {
        return bridge::has_items(list, copy);
    }
    if let (Ok(dict), Ok((keys, values))) = (object.cast::<PyDict>(), copy.extract()) {
        return bridge::has_keys_and_values(dict, &keys, &values);
    }
    object.is(copy)
}

/// A copy of an object's contents (of a large NumPy array a hash), since the object may be changed in place.
pub fn contents<'py>(object: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    let py = object.py();
    if let Ok(dict) = object.cast::<PyDict>() {
        let parts = (dict.keys().to_tuple(), dict.values().to_tuple()); // in their order
        return Ok(parts.into_pyobject(py)?.into_any());
    }
    if !is_numpy(object) {
        return match object.cast::<PyList>() {
            Ok(list) => Ok(list.to_tuple().into_any()),
            Err(_) if object.is_instance_of::<PyTuple>() => Ok(object.clone()),
            Err(_) => copy(object),
        };
    }
    let shape = object.getattr(intern!(py, "shape"))?;
    let dtype = object.getattr(intern!(py, "dtype"))?;
    if object.getattr(intern!(py, "nbytes"))?.extract::<usize>()? > MAX_NUMPY {
        return Ok((shape, dtype, numpy::hash(object)?)
            .into_pyobject(py)?
            .into_any());
    }
    let data = object.call_method0(intern!(py, "tobytes"))?;
    Ok((shape, dtype, data).into_pyobject(py)?.into_any())
}
