//! The watch list: what a loss reads, compared before its call is left out.
//!
//! `list`: the list and its look. `entry`: one place and what is expected there. The search is Python's
//! (`faststep._reach`), as are the checks of one call. Uses `tree`, `mlx` and
//! `python`.
mod entry;
mod list;

use pyo3::{
    intern,
    prelude::*,
    types::{PyList, PyTuple},
};

use crate::python::reach;

pub use list::WatchList;

/// List what a loss reads, or say why that cannot be watched.
///
/// `arguments`: objects among the call's arguments that are no containers, arrays or numbers. `seconds`: the time that the search may
/// take.
pub fn search(
    loss_fn: &Bound<'_, PyAny>,
    model: &Bound<'_, PyAny>,
    arguments: &Bound<'_, PyTuple>,
    seconds: f64,
) -> PyResult<Result<WatchList, String>> {
    let given = (loss_fn, model, arguments, seconds);
    listed(&reach(loss_fn.py())?.call_method1("search", given)?)
}

/// List what the update of an optimizer reads, an `Optimizer` of MLX's.
///
/// `transform`: the function that is called with the gradients before it.
pub fn search_update(
    optimizer: &Bound<'_, PyAny>,
    model: &Bound<'_, PyAny>,
    transform: Option<&Py<PyAny>>,
    seconds: f64,
) -> PyResult<Result<WatchList, String>> {
    let given = (optimizer, model, transform, seconds);
    listed(&reach(optimizer.py())?.call_method1("search_update", given)?)
}

fn listed(found: &Bound<'_, PyAny>) -> PyResult<Result<WatchList, String>> {
    let py = found.py();
    let (entries, codes, reason): (Bound<'_, PyList>, Bound<'_, PyAny>, Option<String>) =
        found.extract()?;
    match reason {
        Some(reason) => Ok(Err(reason)),
        None => WatchList::new(py, &entries, codes.unbind()).map(Ok),
    }
}

/// A check of one call of the loss, which is under way.
pub struct Calls(Py<PyAny>);

impl Calls {
    /// Begin. To be ended also where the call raises: until then a profiler is set.
    pub fn begin(py: Python<'_>, list: &WatchList) -> PyResult<Self> {
        let calls = reach(py)?.call_method1("Calls", (list.codes(py),))?;
        calls.call_method0(intern!(py, "__enter__"))?;
        Ok(Self(calls.unbind()))
    }

    /// End. Returns why the call may not be left out later: the first unknown function that ran.
    pub fn end(self, py: Python<'_>) -> PyResult<Option<String>> {
        let calls = self.0.bind(py);
        calls.call_method1(intern!(py, "__exit__"), (py.None(), py.None(), py.None()))?;
        calls.getattr(intern!(py, "reason"))?.extract()
    }
}
