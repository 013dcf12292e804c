//! Calls of a loss on trial, which no signal ends half way.
use pyo3::{intern, prelude::*};

use crate::mlx::errors::raise_late;

/// Do what calls the loss on trial, while the user's handlers of signals wait, which may raise. No Python code runs as these come and
/// go, so that none can do so half way.
///
/// # Errors
/// Those of `work`, and what such a handler raises before it begins; a second Ctrl-C's is raised as the call of the step returns.
pub(super) fn undisturbed<T, E: From<PyErr>>(
    py: Python<'_>,
    work: impl FnOnce() -> Result<T, E>,
) -> Result<T, E> {
    let signal = py.import("_signal")?; // of which no function is Python code, in which a signal could come
    let suspect = py.import("faststep._step._suspect")?;
    let deferred = suspect.getattr("Deferred")?.call0()?;
    let put = |number: &Bound<'_, PyAny>, handler: &Bound<'_, PyAny>| -> PyResult<()> {
        let put = signal.call_method1(intern!(py, "signal"), (number, handler));
        put.map(drop)
    };
    let mut handlers = Vec::new();
    let begun = deferred
        .getattr("numbers")?
        .try_iter()?
        .try_for_each(|number| {
            let number = number?;
            let handler = signal.call_method1(intern!(py, "getsignal"), (&number,))?;
            if handler.is_callable() {
                handlers.push((number.clone(), handler));
                put(&number, &deferred)?;
            }
            Ok(())
        });
    let outcome = begun.map_err(E::from).and_then(|()| work());
    for (number, handler) in &handlers {
        // what a handler raises that is in its place again, or for a second Ctrl-C, may end each
        while let Err(error) = put(number, handler) {
            raise_late(error);
        }
    }
    let raised = deferred.getattr(intern!(py, "raised"))?;
    if !raised.is_none() {
        raise_late(PyErr::from_value(raised)); // in the loss on trial, where it passes for the loss's own
    }
    for number in deferred.getattr(intern!(py, "came"))?.try_iter()? {
        py.import("_thread")?
            .call_method1("interrupt_main", (number?,))?; // as soon as Python code runs
    }
    outcome
}
