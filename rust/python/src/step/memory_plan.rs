//! The memory plan of a step, from a trace that the step after it reuses.
use faststep::engine::{Needs, Plan, PlannedCalls, Role, Rule};
use mlx_rs::Array;
use pyo3::{exceptions::PyRuntimeError, prelude::*};

use super::{
    arguments::Arguments,
    run::{finished, Given},
    trace_cache::warn,
    Inner, Task,
};
use crate::{
    mlx::bridge,
    reach::{stop::Stop, Before},
    store::{moments::Moments, owner::Holder, Prepared, Store},
};

/// Memory of the device that a step takes, in bytes.
#[pyclass(frozen, get_all, module = "faststep._core")]
pub struct MemoryPlan {
    /// The trainable parameters.
    parameters: usize,
    /// The optimizer's state.
    state: usize,
    /// The gradients.
    gradients: usize,
    /// The rest of the peak.
    activations: usize,
    /// Bytes that are held all the time beside that.
    others: usize,
    /// Freed buffers that MLX keeps.
    cache: usize,
    /// Bytes that captures hold.
    replay: usize,
    /// The peak of the first step.
    first_peak: usize,
    /// The peak of the steps after it.
    steady_peak: usize,
    /// Memory that there is.
    limit: Option<usize>,
    /// True if that is enough.
    fits: bool,
}

impl From<Plan> for MemoryPlan {
    fn from(plan: Plan) -> Self {
        Self {
            parameters: plan.parameters,
            state: plan.state,
            gradients: plan.gradients,
            activations: plan.activations,
            others: plan.others,
            cache: plan.cache,
            replay: plan.replay,
            first_peak: plan.first,
            steady_peak: plan.steady,
            limit: plan.limit,
            fits: plan.fits(),
        }
    }
}

impl Inner {
    /// Plan steps on the user's batch, so many of which make one update.
    pub(super) fn memory_plan(
        &mut self,
        store: &mut Store,
        user: Arguments<'_>,
        accumulate: usize,
    ) -> PyResult<MemoryPlan> {
        let plan = self.rehearse(store, user, accumulate, Store::prepare_draft, Self::plan)?;
        Ok(plan.into())
    }

    /// Run `work` as the last call of a whole window, on the user's batch; an optimizer that it initialises is taken back.
    pub(super) fn rehearse<'py, T>(
        &mut self,
        store: &mut Store,
        mut user: Arguments<'py>,
        accumulate: usize,
        prepare: impl FnOnce(
            &mut Store,
            &Bound<'py, PyAny>,
            &Bound<'py, PyAny>,
            Needs,
        ) -> PyResult<Prepared<'py>>,
        work: impl Fn(
            &mut Self,
            &mut Store,
            &Arguments<'py>,
            &Prepared<'py>,
            &Given,
            (Task, usize),
        ) -> Result<T, Stop>,
    ) -> PyResult<T> {
        let mut given = self.given(store, &mut user, false)?;
        let user = &user;
        let before = Before::of(&user.model, &user.model, &given.looked)?;
        let (task, calls) = window_of(accumulate, store);
        let needs = self.needs(task);
        self.look_at_update(store, user, task)?;
        let mut prepared = prepare(store, &user.model, &user.optimizer, needs)?;
        let undo = prepared.undo.take();
        let own = matches!(store.rule, Some(Rule::Host));
        if own && !self.compiled {
            let how = (&self.reach, task.accumulates());
            self.read.look(&user.optimizer, &user.model, how)?;
        }
        let of_update = self.read.looked().filter(|_| own).cloned();
        let of_update = of_update.map(|looked| Before::of(&user.model, &user.optimizer, &looked));
        let of_update = of_update.transpose()?;
        let outcome = self.run(store, user, &mut given, task, |inner, store, given| {
            work(inner, store, user, &prepared, given, (task, calls))
        });
        let of_update = of_update.map(|before| before.restore(user.py()));
        let mut taken = of_update.transpose()?.unwrap_or_default();
        if let Some(undo) = undo {
            undo.restore()?; // the optimizer is initialised by its first update
            store.discard();
        }
        taken.extend(before.restore(user.py())?);
        self.traces.drop_suspects(); // the first step is to call the loss
        self.suspect = None;
        if !taken.is_empty() {
            let message = format!(
                "the loss has been called, and what it has taken from {} cannot be put back: the next step goes on behind that. \
                 Make it anew before training begins",
                taken.join(", ")
            );
            warn(user.py(), &message)?;
        }
        Ok(outcome?.0)
    }

    // the calls that are under way at once
    pub(super) fn in_flight(&self) -> usize {
        if self.options.raises() {
            0 // every step is waited for
        } else {
            self.options.in_flight
        }
    }

    fn plan<'py>(
        &mut self,
        store: &mut Store,
        user: &Arguments<'py>,
        prepared: &Prepared<'py>,
        given: &Given,
        (task, calls): (Task, usize),
    ) -> Result<Plan, Stop> {
        let missing = || PyRuntimeError::new_err("the step has not been prepared");
        let signature = store.signature()?;
        let shown = shown(store, prepared)?;
        let varying = self.varying();
        let call = self.enter_host(store, user, given, true, &varying)?;
        let engine = store.engine.as_mut().ok_or_else(missing)?;
        let in_flight = self.in_flight();
        let traces = self.traces.of(task).ok_or_else(missing)?;
        let calls = PlannedCalls {
            calls,
            in_flight,
            shown: &shown,
        };
        let mut holder = Holder::new(user.py(), prepared, &signature.roles, None);
        let outcome = engine.plan(traces, call, calls, &mut holder);
        let put_back = holder.show(engine, false);
        let stop = self.leave_host(user, given, false);
        put_back?;
        finished(outcome, stop?)
    }
}

/// The whole window, regardless of the batches in it now: the task of its last call, which updates, and how many there are.
fn window_of(accumulate: usize, store: &Store) -> (Task, usize) {
    match Task::of(accumulate, store.batches()) {
        Task::Whole => (Task::Whole, 1),
        _ => (Task::Batch { fills: true }, accumulate),
    }
}

// the arrays held by the model's and the optimizer's objects that a step replaces
fn shown(store: &Store, prepared: &Prepared<'_>) -> PyResult<Vec<Array>> {
    let signature = store.signature()?;
    let slots = prepared.model.iter().zip(signature.roles.iter());
    let parameters = slots.filter(|(_, (role, _))| matches!(role, Role::Parameter(_)));
    let slots = parameters.map(|(slot, _)| slot).chain(&prepared.state);
    let arrays = slots.filter_map(|slot| bridge::get(&slot.object));
    let moments = store.moments.iter().flat_map(Moments::shown);
    Ok(arrays.chain(moments.cloned()).collect())
}
