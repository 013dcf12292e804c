//! Dicts that keep an order of their own beside a dict's: what changes them without their class's methods breaks them.
use pyo3::{
    intern,
    prelude::*,
    types::{PyDict, PyList, PyType},
};

use super::static_value::equal;
use crate::mlx::classes::ordered_dict;

fn class_of<'py>(dict: &Bound<'py, PyDict>) -> Option<Bound<'py, PyType>> {
    let exact = dict.is_exact_instance_of::<PyDict>();
    let class = (!exact).then(|| ordered_dict(dict.py())).flatten();
    let class = class.filter(|class| dict.is_instance(class).unwrap_or(false));
    class.cloned()
}

/// Return whether a dict is such a one.
pub fn has_own_order(dict: &Bound<'_, PyDict>) -> bool {
    class_of(dict).is_some()
}

/// The keys of such a dict in its order; None of another dict.
pub fn keys<'py>(dict: &Bound<'py, PyDict>) -> PyResult<Option<Bound<'py, PyList>>> {
    let Some(class) = class_of(dict) else {
        return Ok(None);
    };
    let keys = class.call_method1(intern!(dict.py(), "__iter__"), (dict,))?;
    let keys = keys.try_iter()?.collect::<PyResult<Vec<_>>>()?;
    PyList::new(dict.py(), keys).map(Some)
}

/// The items of a dict in its order.
pub fn items<'py>(dict: &Bound<'py, PyDict>) -> Vec<(Bound<'py, PyAny>, Bound<'py, PyAny>)> {
    match keys(dict) {
        Ok(Some(keys)) => {
            let items = keys.iter().map(|key| {
                let value = dict.get_item(&key).ok().flatten()?;
                Some((key, value))
            });
            items.flatten().collect()
        }
        _ => dict.iter().collect(),
    }
}

/// Return whether the keys of a dict are those that another one has among its keys, in the same order, each in its own.
pub fn is_like(one: &Bound<'_, PyDict>, other: &Bound<'_, PyDict>) -> bool {
    let (one_items, mut other) = (items(one), items(other));
    other.retain(|(key, _)| one.contains(key).unwrap_or(false));
    let mut pairs = one_items.iter().zip(&other);
    one_items.len() == other.len() && pairs.all(|((key, _), (other, _))| equal(key, other))
}

/// Put a value into a dict.
pub fn set_item(
    dict: &Bound<'_, PyDict>,
    key: &Bound<'_, PyAny>,
    value: &Bound<'_, PyAny>,
) -> PyResult<()> {
    match class_of(dict) {
        Some(class) => class
            .call_method1(intern!(dict.py(), "__setitem__"), (dict, key, value))
            .map(drop),
        None => dict.set_item(key, value),
    }
}

/// Remove a key from a dict.
pub fn del_item(dict: &Bound<'_, PyDict>, key: &Bound<'_, PyAny>) -> PyResult<()> {
    match class_of(dict) {
        Some(class) => class
            .call_method1(intern!(dict.py(), "__delitem__"), (dict, key))
            .map(drop),
        None => dict.del_item(key),
    }
}

/// Give a dict other contents; `order`: what `keys` gave of it when it had these.
pub fn refill(
    dict: &Bound<'_, PyDict>,
    contents: &Bound<'_, PyDict>,
    order: Option<&Bound<'_, PyList>>,
) -> PyResult<()> {
    let (Some(class), Some(order)) = (class_of(dict), order) else {
        dict.clear();
        return dict.update(contents.as_mapping());
    };
    class.call_method1(intern!(dict.py(), "clear"), (dict,))?;
    for key in order {
        if let Some(value) = contents.get_item(&key)? {
            set_item(dict, &key, &value)?;
        }
    }
    Ok(())
}
