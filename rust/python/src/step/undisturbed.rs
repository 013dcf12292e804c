//! Calls of a loss on trial, which no signal ends half way.
use pyo3::{exceptions::PyKeyboardInterrupt, intern, prelude::*};

/// Do what calls the loss on trial, while the user's handlers of signals wait, which may raise. No Python code runs as these come and
/// go, so that none can do so half way.
///
/// # Errors
/// Those of `work`, and what such a handler raises before it begins.
pub(super) fn undisturbed<T, E: From<PyErr>>(
    py: Python<'_>,
    work: impl FnOnce() -> Result<T, E>,
) -> Result<T, E> {
    let (signal, suspect) = (py.import("signal")?, py.import("faststep._step._suspect")?);
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
                put(&number, &deferred)?;
                handlers.push((number, handler));
            }
            Ok(())
        });
    let outcome = begun.map_err(E::from).and_then(|()| work());
    for (number, handler) in &handlers {
        // a second Ctrl-C, which has come too, may end each
        while put(number, handler)
            .is_err_and(|error| error.is_instance_of::<PyKeyboardInterrupt>(py))
        {}
    }
    for number in deferred.getattr(intern!(py, "came"))?.try_iter()? {
        py.import("_thread")?
            .call_method1("interrupt_main", (number?,))?; // as soon as Python code runs
    }
    outcome
}
