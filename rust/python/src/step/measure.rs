//! The operations of a step, measured one by one.
use pyo3::{exceptions::PyRuntimeError, prelude::*};

use super::{
    arguments::Arguments,
    run::{from_device, Given},
    Inner, Task,
};
use crate::{
    reach::stop::Stop,
    store::{owner::Holder, Prepared, Store},
};

/// Name, output, bytes and seconds of an operation.
pub type Measured = (String, String, usize, f64);

impl Inner {
    /// Measure a step on the user's batch, of so many that make one update: the one that updates.
    pub(super) fn measure(
        &mut self,
        store: &mut Store,
        mut user: Arguments<'_>,
        accumulate: usize,
    ) -> PyResult<Vec<Measured>> {
        let mut given = self.given(&mut user)?;
        let user = &user;
        let task = match Task::of(accumulate, store.batches()) {
            Task::Whole => Task::Whole,
            _ => Task::Batch { fills: true },
        };
        let needs = self.options.needs(task.accumulates());
        let mut prepared = store.prepare(&user.model, &user.optimizer, needs)?;
        let undo = prepared.undo.take();
        let outcome = self.run(store, user, &mut given, task, |inner, store, given| {
            inner.measured(store, user, &prepared, given, task)
        });
        if let Some(undo) = undo {
            undo.restore()?; // the optimizer is initialised by its first update
            store.discard();
        }
        Ok(outcome?.0)
    }

    fn measured(
        &mut self,
        store: &mut Store,
        user: &Arguments<'_>,
        prepared: &Prepared<'_>,
        given: &Given,
        task: Task,
    ) -> Result<Vec<Measured>, Stop> {
        let missing = || PyRuntimeError::new_err("the step has not been prepared");
        let signature = store.signature()?;
        let varying = self.varying();
        let call = self.enter_host(store, user, given, true, &varying)?;
        let engine = store.engine.as_mut().ok_or_else(missing)?;
        let traces = self.traces.of(task).ok_or_else(missing)?;
        let mut holder = Holder::new(user.py(), prepared, &signature.roles, None);
        let outcome = engine.measure(traces, call, &mut holder);
        let put_back = holder.show(engine, false);
        let stop = self.leave_host(user, given, &signature);
        put_back?;
        let stop = stop?;
        match (outcome, stop) {
            (Ok(found), _) => Ok(found
                .into_iter()
                .map(|each| (each.name, each.output, each.bytes, each.seconds))
                .collect()),
            (Err(_), Some(stop)) => Err(stop),
            (Err(error), None) => Err(from_device(&error)),
        }
    }
}
