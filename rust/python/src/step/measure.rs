//! The operations of a step, measured one by one.
use faststep::engine::{
    measure::{self, KINDS},
    CallTraces, PlannedCalls,
};
use pyo3::{exceptions::PyRuntimeError, prelude::*};

use super::{
    arguments::Arguments,
    run::{finished, Given},
    Inner, Task,
};
use crate::{
    mlx::{bridge, errors::mlx},
    reach::stop::Stop,
    store::{owner::Holder, Prepared, Store},
    tree::paths::dotted,
};

/// Name, module, output, bytes and seconds of an operation, whether the device has timed it, memory while it runs by kind, and
/// freed buffers that MLX keeps.
pub type Measured = (
    String,
    String,
    String,
    usize,
    f64,
    bool,
    [usize; KINDS.len()],
    usize,
);

/// The operations that these arrays are computed from, and have no module yet, belong to this one; until a step is
/// measured.
#[pyfunction]
#[allow(clippy::needless_pass_by_value)] // PyO3 passes extracted values
pub fn label(arrays: Vec<Bound<'_, PyAny>>, module: &str) -> PyResult<()> {
    let arrays: Vec<_> = arrays.iter().filter_map(bridge::get).collect();
    measure::label(&arrays, module).map_err(mlx)
}

impl Inner {
    /// Measure a step on the user's batch, of so many that make one update: the one that updates.
    pub(super) fn measure(
        &mut self,
        store: &mut Store,
        user: Arguments<'_>,
        accumulate: usize,
    ) -> PyResult<Vec<Measured>> {
        let outcome = self.rehearse(store, user, accumulate, Store::prepare, Self::measured);
        measure::clear_labels(); // of a trace that failed, too
        outcome
    }

    fn measured<'py>(
        &mut self,
        store: &mut Store,
        user: &Arguments<'py>,
        prepared: &Prepared<'py>,
        given: &Given,
        (task, calls): (Task, usize),
    ) -> Result<Vec<Measured>, Stop> {
        let missing = || PyRuntimeError::new_err("the step has not been prepared");
        let signature = store.signature()?;
        let varying = self.varying();
        let call = self.enter_host(store, user, given, true, &varying)?;
        let engine = store.engine.as_mut().ok_or_else(missing)?;
        let in_flight = self.in_flight();
        let CallTraces { trace, update } = self.traces.of(task).ok_or_else(missing)?;
        let mut trace = trace.again(self.host.clone()); // its operations get their modules while it is made
        let trace = &mut trace;
        let mut holder = Holder::new(user.py(), prepared, &signature.roles, None);
        let module = |tensor: usize| match signature.path(tensor) {
            [module @ .., _] => dotted(module),
            [] => String::new(),
        };
        let traces = CallTraces { trace, update };
        let calls = PlannedCalls {
            calls,
            in_flight,
            shown: &[], // after the first update its objects hold the step's arrays
        };
        let outcome = engine.measure(traces, call, calls, &module, &mut holder);
        let put_back = holder.show(engine, false);
        let stop = self.leave_host(user, given, false);
        put_back?;
        let found = finished(outcome, stop?)?;
        Ok(found
            .into_iter()
            .map(|each| {
                (
                    each.name,
                    each.module,
                    each.output,
                    each.bytes,
                    each.seconds,
                    each.by_events,
                    each.held.bytes,
                    each.held.cache,
                )
            })
            .collect())
    }
}
