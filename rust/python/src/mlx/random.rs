//! The random key that `mx.random` draws from.
use pyo3::{prelude::*, types::PyList};

/// The list in which `mx.random.state` keeps this thread's key: `mx.random.seed` and every draw replace its only item.
///
/// The sentinel that `mx.random.state` is has no setter; its iterator runs over that list, and tells it when asked how
/// to pickle itself.
///
/// # Errors
/// When MLX keeps the key in another way.
pub fn key_list(py: Python<'_>) -> PyResult<Bound<'_, PyList>> {
    let state = py.import("mlx.core")?.getattr("random")?.getattr("state")?;
    let recipe = state.try_iter()?.call_method0("__reduce__")?;
    let list = recipe.get_item(1)?.get_item(0)?;
    Ok(list.cast_into::<PyList>()?)
}
