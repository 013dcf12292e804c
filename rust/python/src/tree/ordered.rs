//! `OrderedDict`: it keeps an order of its own, which only its own methods may change.
use pyo3::{
    intern,
    prelude::*,
    types::{PyDict, PyList, PyType},
};

use crate::mlx::classes::ordered_dict;

fn class_of<'py>(dict: &Bound<'py, PyDict>) -> Option<Bound<'py, PyType>> {
    let exact = dict.is_exact_instance_of::<PyDict>();
    let class = (!exact).then(|| ordered_dict(dict.py())).flatten();
    let class = class.filter(|class| dict.is_instance(class).unwrap_or(false));
    class.cloned()
}

/// Return whether a dict is an `OrderedDict`.
pub fn has_own_order(dict: &Bound<'_, PyDict>) -> bool {
    class_of(dict).is_some()
}

/// The keys of an `OrderedDict` in its order; `None` for another dict.
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

/// Give a dict other contents; `order`: the keys of an `OrderedDict` in its order.
pub fn refill(
    dict: &Bound<'_, PyDict>,
    contents: &Bound<'_, PyDict>,
    order: Option<&Bound<'_, PyList>>,
) -> PyResult<()> {
    let py = dict.py();
    let (Some(class), Some(order)) = (class_of(dict), order) else {
        dict.clear();
        return dict.update(contents.as_mapping());
    };
    class.call_method1(intern!(py, "clear"), (dict,))?;
    for key in order {
        if let Some(value) = contents.get_item(&key)? {
            class.call_method1(intern!(py, "__setitem__"), (dict, key, value))?;
        }
    }
    Ok(())
}
