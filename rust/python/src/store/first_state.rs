//! Whether the state that an optimizer of one's own begins with depends on the values of the arrays that it is made of.
//!
//! A plain loop makes it at the first update, of the gradients: `Optimizer.apply_gradients` does. The step makes it before
//! that, of the parameters, which comes to the same for zeros of their shape and not for a copy of their values.
use mlx_rs::{error::Result as MlxResult, ops, transforms::eval, Array, Dtype};
use pyo3::{exceptions::PyException, intern, prelude::*};

use crate::{
    mlx::{bridge, errors::mlx, gil::unlocked, random::key_list},
    optimizer::{leaves, native_rule},
    tree::{rebuild::rebuild, snapshot::Snapshot, walk::Scope, Tree},
};

/// Return whether that is so, by what the optimizer makes of arrays that are no numbers; it is left as it was.
pub(super) fn depends_on_values<'py>(
    optimizer: &Bound<'py, PyAny>,
    trainable: &Bound<'py, PyAny>,
) -> PyResult<bool> {
    let py = optimizer.py();
    let made = optimizer
        .getattr(intern!(py, "_initialized"))?
        .is_truthy()?;
    let of_mlx = |leaf: &Bound<'py, PyAny>| native_rule(leaf).is_some();
    if made || leaves(optimizer).iter().all(of_mlx) {
        return Ok(false);
    }
    let none = rebuild(trainable, &mut |object| match bridge::get(object) {
        Some(array) if inexact(&array) => {
            let nan = Array::from_f32(f32::NAN).as_dtype(array.dtype());
            let nan = nan.and_then(|nan| ops::full::<f32>(array.shape(), nan));
            bridge::wrap(py, &nan.map_err(mlx)?)
        }
        _ => Ok(object.clone()),
    })?;
    let snapshot = Snapshot::take(optimizer)?;
    let keys = key_list(py)?;
    let key = keys.get_item(0)?;
    let found = match optimizer.call_method1(intern!(py, "init"), (none,)) {
        Ok(_) => holds_nan(optimizer),
        Err(error) if error.is_instance_of::<PyException>(py) => Ok(true),
        Err(error) => Err(error),
    };
    keys.set_item(0, key)?;
    snapshot.restore()?;
    found
}

fn holds_nan(optimizer: &Bound<'_, PyAny>) -> PyResult<bool> {
    let (_, slots) = Tree::record(optimizer, Scope::Whole)?;
    for slot in &slots {
        let Some(array) = bridge::get(&slot.object).filter(inexact) else {
            continue;
        };
        if is_nan(optimizer.py(), &array).map_err(mlx)? {
            return Ok(true);
        }
    }
    Ok(false)
}

fn is_nan(py: Python<'_>, array: &Array) -> MlxResult<bool> {
    let any = ops::is_nan(array)?.any(None)?;
    unlocked(py, || eval([&any]))?;
    any.try_item_exact::<bool>()
        .map_err(faststep::engine::unread)
}

fn inexact(array: &Array) -> bool {
    array.dtype().is_float() || array.dtype() == Dtype::Complex64
}
