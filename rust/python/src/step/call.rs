//! One call of the step: what the user has changed is taken over, the loss is called or left out, the engine runs, and what came of
//! it is shown.
use std::time::Instant;

use faststep::engine::{memory, Output, Outputs, Ranks, Rule, Stage, Task};
use mlx_rs::Array;
use pyo3::{
    exceptions::PyTypeError,
    prelude::*,
    types::{PyBool, PyTuple},
};

use super::{
    arguments::{Arguments, Batch},
    choose::{loss_key, Way},
    first_skipped::{Context, StepGraph},
    flags::{is_true, read},
    left_out::Standing,
    traces::warn,
    Inner, Returned, Watched,
};
use crate::{
    host::{Called, LossInputs},
    mlx::{bridge, errors::mlx, gil::Waiting},
    optimizer::HostSchedules,
    store::{registry::Shared, Prepared, Store},
    tree::rebuild::rebuild,
};

/// Purpose of a call of the loss.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Purpose {
    /// A step by the trace of its graph.
    Step,
    /// A step in which it is evaluated by itself: its graph is not kept.
    Plain,
    /// A plan: nothing is computed.
    Plan,
}

/// Outcome of a call.
pub(super) struct Done<'py> {
    output: Output,
    way: Way<'py>,
}

impl Inner {
    /// Train on a batch, or update by a window.
    pub(super) fn step<'py>(
        &mut self,
        shared: &Shared,
        mut user: Arguments<'py>,
        accumulate: usize,
        flush: bool,
    ) -> PyResult<Returned<'py>> {
        let py = user.py();
        let task = {
            let store = shared.enter()?;
            if flush {
                Task::Flush
            } else {
                Task::of(accumulate, store.batches(), self.options.reduced)
            }
        };
        let rounds = self.begin_rounds();
        let (done, batch) = match self.take(shared, &mut user, task) {
            Ok(done) => done,
            Err(error) => return Err(self.failed(py, shared, rounds, error)),
        };
        let returned = self.returned(py, &done)?;
        let taken = self.taken(py, &done.output, returned, task)?;
        let argument = |number| user.name_in(&batch, number);
        let options = self.options;
        let is_noted = task != Task::Flush && self.alarms.notes_batch(self.steps);
        let context = Context {
            options: &options,
            argument: &argument,
            graph: is_noted.then(|| self.graph_of(&done.way)).flatten(),
        };
        if is_noted {
            self.alarms
                .note_batch(py, self.steps, &done.output, &batch.arrays, &context)?;
        }
        self.warn(py, shared, &context)?;
        Ok(taken)
    }

    // the number of rounds before a call, which has one until its parts are known
    fn begin_rounds(&mut self) -> usize {
        self.awaited = 1;
        self.ranks.as_mut().map_or(0, Ranks::begin_call)
    }

    // the error of a call, behind the round in which other ranks hear of it
    fn failed(&mut self, py: Python<'_>, shared: &Shared, rounds: usize, error: PyErr) -> PyErr {
        let update = self.updates + 1;
        let awaited = rounds + self.awaited;
        let Some(ranks) = self.ranks.as_mut().filter(|it| it.rounds() < awaited) else {
            return error;
        };
        shared.clock.enter(Stage::Collective);
        if let Ok(mut store) = shared.enter() {
            if let Some(engine) = store.engine.as_mut() {
                engine.drop_window();
            }
        }
        drop(ranks.fail(update, &mut Waiting(py))); // the error of this rank is the one to show
        error
    }

    // the arguments; those of a flush are none
    pub(super) fn batch<'py>(
        &mut self,
        shared: &Shared,
        user: &mut Arguments<'py>,
        task: Task,
    ) -> PyResult<Batch<'py>> {
        let py = user.py();
        self.check_compiler(py)?;
        if self.numpy_as_mlx {
            user.convert_numpy()?;
        }
        let batch = user.batch()?;
        let mut store = shared.enter()?;
        if task != Task::Flush {
            for (index, array) in batch.arrays.iter().enumerate() {
                let name = || format!("argument {}", user.name_in(&batch, index));
                store.lazy.look(array, name);
            }
        }
        Ok(batch)
    }

    /// Run a call; an error leaves model and optimizer as they were. NumPy arrays that MLX refuses are passed as `mx.array`s from
    /// then on.
    fn take<'py>(
        &mut self,
        shared: &Shared,
        user: &mut Arguments<'py>,
        task: Task,
    ) -> PyResult<(Done<'py>, Batch<'py>)> {
        let mut batch = self.batch(shared, user, task)?;
        let mut outcome = self.take_batch(shared, user, &batch, task);
        if matches!(&outcome, Err(error) if batch.numpy && is_refusal(user.py(), error)) {
            self.numpy_as_mlx = true;
            batch = self.batch(shared, user, task)?;
            outcome = self.take_batch(shared, user, &batch, task);
        }
        let done = outcome?;
        self.note_way(user, &batch, &done.way)?;
        Ok((done, batch))
    }

    fn take_batch<'py>(
        &mut self,
        shared: &Shared,
        user: &Arguments<'py>,
        batch: &Batch<'py>,
        task: Task,
    ) -> PyResult<Done<'py>> {
        let started = Instant::now();
        let mut prepared = self.prepare(&mut *shared.enter()?, user, task, Store::prepare)?;
        let undo = prepared.undo.take();
        let mut schedules = HostSchedules::of(&user.optimizer);
        let outcome = self.take_prepared(
            shared,
            user,
            (&mut prepared, batch),
            (&mut schedules, started),
            task,
        );
        if outcome.is_err() {
            schedules.undo()?;
        }
        if let (true, Some(undo)) = (outcome.is_err() || task == Task::Gradients, undo) {
            undo.restore()?; // the optimizer is initialised by its first update
            shared.enter()?.discard();
        }
        outcome
    }

    fn take_prepared<'py>(
        &mut self,
        shared: &Shared,
        user: &Arguments<'py>,
        (prepared, batch): (&mut Prepared<'py>, &Batch<'py>),
        (schedules, started): (&mut HostSchedules<'py>, Instant),
        task: Task,
    ) -> PyResult<Done<'py>> {
        let py = user.py();
        let spent = self.seconds.call;
        let mut way = self.way(shared, user, (prepared, batch), task)?;
        self.look(user, batch, &way)?;
        let moved = match &mut way {
            Way::Called(called) | Way::Plain(called) => move_places(prepared, called),
            _ => Vec::new(),
        };
        let mut store = shared.enter()?;
        let has_schedules = task.updates() && matches!(store.rule, Some(Rule::Native(_)));
        if has_schedules {
            schedules.call()?;
        }
        if has_schedules && schedules.are_there() || way.called().is_some() {
            store.look_again(prepared, &user.model, &user.optimizer)?;
        }
        self.seconds.look += started.elapsed().as_secs_f64() - (self.seconds.call - spent);
        let outcome = self.run(&mut store, user, prepared, (batch, &mut way), task);
        if outcome.is_err() {
            for (slot, old) in &moved {
                prepared.model[*slot].place.set(old)?;
            }
        }
        let (output, new) = outcome?;
        let shown = Instant::now();
        if let Way::Called(called) = &way {
            let values = output.batch.loss.iter().chain(&output.batch.aux);
            called.fill(values).map_err(mlx)?;
        }
        let skipped = output.batch.skipped.as_ref();
        settle_reshaped(py, prepared, &way, skipped, task)?;
        if task != Task::Gradients {
            store.take_output(&user.model, prepared, &output)?;
            if let (true, Some(missed)) = (has_schedules, &output.last().skipped) {
                schedules.settle(missed)?;
            }
            if new {
                store.check_layout(py)?;
            }
        }
        self.seconds.engine += output.seconds;
        self.seconds.show += shown.elapsed().as_secs_f64();
        Ok(Done { output, way })
    }

    // call the loss, or leave the call out
    pub(super) fn way<'py>(
        &mut self,
        shared: &Shared,
        user: &Arguments<'py>,
        (prepared, batch): (&Prepared<'py>, &Batch<'py>),
        task: Task,
    ) -> PyResult<Way<'py>> {
        let py = user.py();
        let (key, signature) = {
            let store = shared.enter()?;
            (loss_key(&store, batch, task)?, store.signature()?)
        };
        let Some(key) = key else {
            return Ok(Way::Nothing);
        };
        let plain = self.plain.is_some() || !self.options.compile;
        if plain {
            return self
                .called(shared, user, (prepared, batch), Purpose::Plain)
                .map(Way::Plain);
        }
        let due = match self.standing(py, &user.loss_fn, &key) {
            Standing::Yes(trace) => return Ok(Way::LeftOut(trace)),
            Standing::Due(graph) => graph,
            Standing::No => None,
        };
        self.traces.forget_replaced(&user.loss_fn)?;
        let list = self.begin_watching(shared, user, &key)?;
        let began = Instant::now();
        let outcome = self.called(shared, user, (prepared, batch), Purpose::Step);
        let seconds = began.elapsed().as_secs_f64();
        let list = list.map(|(list, calls)| Ok::<_, PyErr>((list, calls.end(py)?)));
        let list = list.transpose()?;
        let mut called = outcome?;
        self.seconds.call += seconds;
        let number = called.graph.as_ref().map(|graph| graph.number);
        called.is_check = due.is_some() && due == number;
        if due.is_some() && due != number {
            self.is_unsteady(py)?;
        }
        self.watched = Some(Watched {
            key,
            signature,
            list,
            seconds,
        });
        self.graphs.keep(2 * self.options.max_traces);
        if self.is_rare(py, &called, batch) {
            if let Some(why) = self.never_comes_again() {
                self.become_plain(py, why)?;
            }
            return Ok(Way::Plain(called));
        }
        Ok(Way::Called(called))
    }

    // call the loss for a trace that is not run
    pub(super) fn call_for_trace<'py>(
        &mut self,
        shared: &Shared,
        user: &Arguments<'py>,
        given: (&Prepared<'py>, &Batch<'py>),
    ) -> PyResult<Way<'py>> {
        self.called(shared, user, given, Purpose::Plan)
            .map(Way::Called)
    }

    // call the loss, for a step or a plan; the store is free meanwhile, for what the loss reads of the optimizer
    fn called<'py>(
        &mut self,
        shared: &Shared,
        user: &Arguments<'py>,
        (prepared, batch): (&Prepared<'py>, &Batch<'py>),
        purpose: Purpose,
    ) -> PyResult<Called<'py>> {
        let (given, signature, key_list) = {
            let store = shared.enter()?;
            store.clock.enter_call();
            let key_list = store.key_list.bind(user.py()).clone();
            (
                self.given(&store, prepared, batch)?,
                store.signature()?,
                key_list,
            )
        };
        let inputs = LossInputs {
            signature: &signature,
            model: &user.model,
            loss_fn: &user.loss_fn,
            arguments: &user.passed,
            slots: &prepared.model,
            roles: &signature.roles,
            key_list: &key_list,
            is_step: purpose != Purpose::Plan,
            weighted: self.options.weighted,
            mixed: self.options.compute_dtype.is_some(),
            shards: self.shards.as_deref(),
        };
        let graphs = (purpose != Purpose::Plain).then_some(&mut self.graphs);
        let called = Called::make(&inputs, given, graphs);
        shared.clock.enter(Stage::Objects);
        called
    }

    // counts a step; returns its outputs
    fn taken<'py>(
        &mut self,
        py: Python<'py>,
        output: &Output,
        returned: Bound<'py, PyAny>,
        task: Task,
    ) -> PyResult<Returned<'py>> {
        let update = output.last();
        if task != Task::Flush {
            self.steps += 1;
            let skipped = output.batch.skipped.as_ref();
            read(self.skips.push(skipped, &|flag| is_true(py, flag)))?;
            let checked = self.options.guard().is_some();
            self.alarms.note(py, self.steps, output, checked)?;
        }
        let every = self.options.clear_cache_every;
        if every > 0 && self.steps.is_multiple_of(every) {
            memory::clear_cache();
        }
        if let Some(loss) = &output.batch.loss {
            let object = match returned.cast::<PyTuple>() {
                Ok(values) => values.get_item(0)?,
                Err(_) => returned.clone(),
            };
            self.alarms.note_loss(self.steps, loss, &object);
        }
        let wrap = |array: &Option<Array>| array.as_ref().map(|a| bridge::wrap(py, a)).transpose();
        let skipped = wrap(&output.batch.skipped)?;
        if !task.updates() {
            let updated = PyBool::new(py, false).to_owned().into_any();
            return Ok((returned, None, skipped, updated, None));
        }
        self.updates += 1;
        let missed = update.skipped.as_ref();
        read(self.misses.push(missed, &|flag| is_true(py, flag)))?;
        let missed = wrap(&update.skipped)?;
        let updated = missed.unwrap_or_else(|| PyBool::new(py, true).to_owned().into_any());
        let mean = self.ranks.as_ref().and(output.update.as_ref());
        let mean = mean.map_or(Ok(None), |update| wrap(&update.loss))?;
        Ok((returned, wrap(&update.norm)?, skipped, updated, mean))
    }

    // warn of numbers out of range before the first batch of a graph is computed
    fn look<'py>(
        &mut self,
        user: &Arguments<'py>,
        batch: &Batch<'py>,
        way: &Way<'py>,
    ) -> PyResult<()> {
        let graph = match way {
            Way::Called(called) if called.is_new => called.graph.as_ref(),
            _ => None,
        };
        let Some(graph) = graph else { return Ok(()) };
        let argument = |number| user.name_in(batch, number);
        let found = self
            .alarms
            .look(user.py(), graph, &batch.arrays, &argument)?;
        found.map_or(Ok(()), |message| {
            self.warned.push(message.clone());
            warn(user.py(), &message)
        })
    }

    // the graph by which the loss was computed, and the arrays that it ended in
    fn graph_of(&self, way: &Way<'_>) -> Option<StepGraph> {
        match way {
            Way::Called(called) => Some((called.graph.clone()?, called.leaves.clone())),
            Way::LeftOut(_) => {
                let kept = &self.traces.last()?.kept;
                Some((kept.graph.clone()?, kept.leaves.to_vec()))
            }
            Way::Plain(_) | Way::Nothing | Way::Updated(_) => None,
        }
    }

    fn warn(&mut self, py: Python<'_>, shared: &Shared, context: &Context<'_>) -> PyResult<()> {
        let mut due: Vec<String> = self.traces.warning().into_iter().collect();
        let not_replayed = self
            .traces
            .last()
            .and_then(|last| last.trace.not_replayed());
        if let (Some(reason), None) = (not_replayed, &self.told) {
            due.push(format!("this step is not replayed: {reason}"));
            self.told = Some(reason.to_owned());
        }
        let mut store = shared.enter()?;
        due.extend(store.lazy.message());
        due.extend(self.alarms.raised(py, &store, (&self.skips, context))?);
        drop(store);
        self.warned.extend(due.iter().cloned());
        for message in due {
            warn(py, &message)?; // a warning may raise: everything is in its place by now
        }
        Ok(())
    }

    // the state beside the optimizer's
    pub(super) fn needs(&self, task: Task) -> faststep::engine::Needs {
        faststep::engine::Needs {
            max_norm: self.varies_norm,
            ..self.options.needs(task.accumulates())
        }
    }

    /// The loss function's return value, and the tree of gradients.
    pub(super) fn gradients<'py>(
        &mut self,
        shared: &Shared,
        mut user: Arguments<'py>,
    ) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyAny>)> {
        let py = user.py();
        let rounds = self.begin_rounds();
        let taken = self.take(shared, &mut user, Task::Gradients);
        let (done, _) = match taken {
            // of replicas, the caller tells the others
            Err(error) if self.shards.is_some() => {
                return Err(self.failed(py, shared, rounds, error))
            }
            taken => taken?,
        };
        let returned = self.returned(py, &done)?;
        let trainable = shared.enter()?.signature()?.trainable.bind(py).clone();
        let tree = fill(&trainable, done.output.batch.gradients.iter())?;
        Ok((returned, tree))
    }

    // note if the next call may be left out
    fn note_way<'py>(
        &mut self,
        user: &Arguments<'py>,
        batch: &Batch<'py>,
        way: &Way<'py>,
    ) -> PyResult<()> {
        if let (Way::Called(called), Some(watched)) = (way, self.watched.take()) {
            self.note_call(user, batch, called, watched)?;
        }
        if let ("called", reason @ None) = (self.mode.0, &mut self.mode.1) {
            *reason = Some(self.leaving_out.reason());
        }
        Ok(())
    }

    // return value of this call, or of the one that made the trace, with the arrays of this step
    fn returned<'py>(&mut self, py: Python<'py>, done: &Done<'py>) -> PyResult<Bound<'py, PyAny>> {
        if let Some(called) = done.way.called() {
            return Ok(called.result.clone());
        }
        let output: &Outputs = &done.output.batch;
        let template = self
            .traces
            .last()
            .and_then(|last| last.kept.template.as_ref());
        match template.map(|template| template.bind(py)) {
            Some(template) if !bridge::is_array(template) => {
                fill(template, output.loss.iter().chain(&output.aux))
            }
            _ => match &output.loss {
                Some(loss) => bridge::wrap(py, loss),
                None => Ok(py.None().into_bound(py)),
            },
        }
    }
}

/// Take arrays of another shape out of the model again, where the batch was skipped, and behind gradients alone.
pub(super) fn settle_reshaped(
    py: Python<'_>,
    prepared: &Prepared<'_>,
    way: &Way<'_>,
    skipped: Option<&Array>,
    task: Task,
) -> PyResult<()> {
    let reshaped = way.called().map_or(&[][..], |called| &called.reshaped);
    if reshaped.is_empty() {
        return Ok(());
    }
    let skipped = skipped.map_or(Ok(false), |skipped| read(is_true(py, skipped)))?;
    if skipped || task == Task::Gradients {
        for reshaped in reshaped {
            let slot = &prepared.model[reshaped.slot];
            let now = slot.place.get()?;
            if now.is_some_and(|now| now.is(&reshaped.now)) {
                slot.place.set(&slot.object)?;
            }
        }
    }
    Ok(())
}

// the step goes on in the dicts and lists that the loss has left; which slots these are, and the arrays that were there before
fn move_places<'py>(
    prepared: &mut Prepared<'py>,
    called: &mut Called<'py>,
) -> Vec<(usize, Bound<'py, PyAny>)> {
    let mut old = Vec::new();
    let moved = called.moved.take().unwrap_or_default();
    for (index, (slot, now)) in prepared.model.iter_mut().zip(moved).enumerate() {
        if let Some(now) = now {
            old.push((index, slot.object.clone()));
            if let Ok(Some(object)) = now.place.get() {
                slot.object = object;
            }
            slot.place = now.place;
        }
    }
    prepared.moved = !old.is_empty();
    old
}

// true if one of MLX's functions has refused a NumPy array
fn is_refusal(py: Python<'_>, error: &PyErr) -> bool {
    let message = || error.value(py).to_string();
    error.is_instance_of::<PyTypeError>(py)
        && message().contains("incompatible function arguments")
        && message().contains("ndarray")
}

fn fill<'a, 'py>(
    template: &Bound<'py, PyAny>,
    mut arrays: impl Iterator<Item = &'a Array>,
) -> PyResult<Bound<'py, PyAny>> {
    rebuild(template, &mut |hole| match arrays.next() {
        Some(array) => bridge::wrap(hole.py(), array),
        None => Ok(hole.clone()),
    })
}
