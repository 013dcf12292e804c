//! The operations of a step, measured one by one.
use faststep::engine::{
    measure::{self, KINDS},
    CallTraces, PlannedCalls,
};
use pyo3::prelude::*;

use super::{arguments::Arguments, memory_plan::Rehearsed, Inner};
use crate::{
    mlx::{bridge, errors::mlx},
    store::registry::Shared,
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
        shared: &Shared,
        user: Arguments<'_>,
        accumulate: usize,
    ) -> PyResult<Vec<Measured>> {
        let graphs = std::mem::take(&mut self.graphs); // the operations of this call have their modules, and no others
        let (host, in_flight) = (self.host.clone(), self.in_flight());
        let outcome = self.rehearse(shared, user, accumulate, false, &mut |holder, work| {
            let Rehearsed {
                engine,
                traces,
                call,
                calls,
                signature,
                ..
            } = work;
            let CallTraces { trace, update } = traces;
            let mut trace = trace.again(host.clone());
            let traces = CallTraces {
                trace: &mut trace,
                update,
            };
            let calls = PlannedCalls {
                calls,
                in_flight,
                shown: &[], // after the first update its objects hold the step's arrays
            };
            let module = |tensor: usize| match signature.path(tensor) {
                [module @ .., _] => dotted(module),
                [] => String::new(),
            };
            engine.measure(traces, call, calls, &module, holder)
        });
        self.graphs = graphs;
        measure::clear_labels(); // of a trace that failed, too
        let found = outcome?.into_iter();
        let found = found.map(|each| {
            let held = each.held;
            let what = (each.name, each.module, each.output, each.bytes);
            let (name, module, output, bytes) = what;
            (
                name,
                module,
                output,
                bytes,
                each.seconds,
                each.by_events,
                held.bytes,
                held.cache,
            )
        });
        Ok(found.collect())
    }
}
