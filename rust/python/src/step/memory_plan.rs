//! The memory plan of a step, from a trace that the step after it reuses.
use faststep::{
    engine::{Call, CallTraces, Engine, Plan, PlannedCalls, Role, Rule, Task},
    Error,
};
use mlx_rs::Array;
use pyo3::prelude::*;

use super::{
    arguments::{Arguments, Batch},
    call::settle_reshaped,
    choose::{loss_key, task_of, Way},
    left_out::Standing,
    updates::Take,
    Inner,
};
use crate::{
    mlx::bridge,
    store::{moments::Moments, owner::Holder, registry::Shared, ModelSignature, Prepared, Store},
    tree::snapshot::Snapshot,
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
        shared: &Shared,
        user: Arguments<'_>,
        accumulate: usize,
    ) -> PyResult<MemoryPlan> {
        let in_flight = self.in_flight();
        let plan: Plan = self.rehearse(shared, user, accumulate, true, &mut |given, work| {
            let Rehearsed {
                engine,
                traces,
                call,
                calls,
                shown,
                ..
            } = work;
            let calls = PlannedCalls {
                calls,
                in_flight,
                shown,
            };
            engine.plan(traces, call, calls, given)
        })?;
        Ok(plan.into())
    }

    /// Call the loss as the last call of a whole window does, and do `work` with its traces; an optimizer that this initialises is
    /// taken back. `drafts`: what has not been taken over yet takes no memory.
    pub(super) fn rehearse<T>(
        &mut self,
        shared: &Shared,
        mut user: Arguments<'_>,
        accumulate: usize,
        drafts: bool,
        work: &mut dyn FnMut(&mut Holder<'_, '_>, Rehearsed<'_>) -> Result<T, Error>,
    ) -> PyResult<T> {
        let (task, calls) = window_of(accumulate, self.options.reduced, &*shared.enter()?);
        let batch = self.batch(shared, &mut user, task)?;
        let take: Take<'_> = if drafts {
            Store::prepare_draft
        } else {
            Store::prepare
        };
        let mut prepared = self.prepare(&mut *shared.enter()?, &user, task, take)?;
        let undo = prepared.undo.take();
        let left_out = if drafts {
            self.left_out(&*shared.enter()?, &user, &batch, task)?
        } else {
            None
        };
        let way = match left_out {
            Some(way) => way,
            None => self.call_for_trace(shared, &user, (&prepared, &batch))?,
        };
        let given = (&mut prepared, &batch, way);
        let outcome = self.rehearsed(shared, &user, given, (task, calls), work);
        if let Some(undo) = undo {
            undo.restore()?; // the optimizer is initialised by its first update
            shared.enter()?.discard();
        }
        outcome
    }

    fn rehearsed<'py, T>(
        &mut self,
        shared: &Shared,
        user: &Arguments<'py>,
        (prepared, batch, mut way): (&mut Prepared<'py>, &Batch<'py>, Way<'py>),
        (task, calls): (Task, usize),
        work: &mut dyn FnMut(&mut Holder<'_, '_>, Rehearsed<'_>) -> Result<T, Error>,
    ) -> PyResult<T> {
        let mut store = shared.enter()?;
        store.look_again(prepared, &user.model, &user.optimizer)?;
        let task = match task_of(&store, task, self.update_left_out(&way)) {
            Task::Clipped => Task::Called,
            task => task,
        };
        let (shown, signature) = (shown(&store, prepared)?, store.signature()?);
        let updates = matches!(store.rule, Some(Rule::Host));
        let before = updates.then(|| Snapshot::take(&user.model)).transpose()?; // an update of the user's own may change it
        let given = (&*prepared, batch, &mut way);
        let outcome = self.evaluate(
            &mut store,
            user,
            given,
            task,
            &mut |engine, traces, call, holder| {
                let rehearsed = Rehearsed {
                    engine,
                    traces,
                    call,
                    calls,
                    shown: &shown,
                    signature: &signature,
                };
                (work(holder, rehearsed), false)
            },
        );
        self.traces.settle(0.0);
        self.own_updates.observed = None;
        before.map_or(Ok(()), |before| before.restore())?;
        if let Way::Called(called) = &way {
            self.recover(&store, user, prepared, batch, called)?;
        }
        drop(store);
        settle_reshaped(user.py(), prepared, &way, None, Task::Gradients)?;
        outcome
    }

    // the way of a call that the next step would leave out
    fn left_out<'py>(
        &mut self,
        store: &Store,
        user: &Arguments<'py>,
        batch: &Batch<'py>,
        task: Task,
    ) -> PyResult<Option<Way<'py>>> {
        let key = loss_key(store, batch, task)?;
        let standing = key.map(|key| self.standing(user.py(), &user.loss_fn, &key));
        Ok(match standing {
            Some(Standing::Yes(trace)) => Some(Way::LeftOut(trace)),
            _ => None,
        })
    }

    // the calls that are under way at once
    pub(super) fn in_flight(&self) -> usize {
        if self.options.raises() {
            0 // every step is waited for
        } else {
            self.options.in_flight
        }
    }
}

/// Work with the traces of a call that is not made.
pub(super) struct Rehearsed<'a> {
    /// The engine.
    pub(super) engine: &'a mut Engine,
    /// The traces.
    pub(super) traces: CallTraces<'a>,
    /// Its arguments.
    pub(super) call: Call,
    /// The number of calls that make one update.
    pub(super) calls: usize,
    /// The arrays held by the user's objects that a step replaces.
    pub(super) shown: &'a [Array],
    /// The model's signature.
    pub(super) signature: &'a ModelSignature,
}

/// The whole window, regardless of the batches in it now: the task of its last call, which updates, and how many there are.
fn window_of(accumulate: usize, reduced: bool, store: &Store) -> (Task, usize) {
    match Task::of(accumulate, store.batches(), reduced) {
        Task::Batch { .. } => {
            let only = accumulate <= 1;
            (Task::Batch { fills: true, only }, accumulate)
        }
        whole => (whole, 1),
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
