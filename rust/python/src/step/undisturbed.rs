//! Calls of a loss on trial, which no signal ends half way.
use pyo3::{exceptions::PyValueError, intern, prelude::*};

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
    let mut begun = Ok(());
    for number in suspect.getattr("SIGNALS")?.try_iter()? {
        let number = number?;
        let handler = signal.call_method1(intern!(py, "getsignal"), (&number,))?;
        if !handler.is_callable() {
            continue;
        }
        match put(&number, &deferred) {
            Ok(()) => handlers.push((number, handler)),
            Err(error) if error.is_instance_of::<PyValueError>(py) => break, // of another thread, on which none runs
            Err(error) => {
                begun = Err(error.into());
                break;
            }
        }
    }
    let outcome = begun.and_then(|()| work());
    for (number, handler) in &handlers {
        if put(number, handler).is_err() {
            put(number, handler)?; // a second Ctrl-C has ended the first
        }
    }
    for number in deferred.getattr(intern!(py, "came"))?.try_iter()? {
        py.import("_thread")?
            .call_method1("interrupt_main", (number?,))?; // as soon as Python code runs
    }
    outcome
}
