//! One step: its parts are traced, tried out the first time, and handed to the device.
use std::time::Instant;

use mlx_rs::Array;

use super::{
    engine::Undo,
    evaluate::{evaluate, Work},
    nonfinite,
    ranks::{hash, Round},
    replay::{Launch, OnGraph},
    Engine, Output, Owner, Seconds, Stage,
};
use crate::{
    error::{Error, Result},
    evaluation::{Evaluate, Evaluated},
    layout::aux_state::{self, Open},
    mlx::{array, fuse, graph, kernels},
    trace::{Call, CallTraces, Inputs, Options, Outputs, Part, Recipe, Task, Trace},
};

impl Undo {
    // of all that a batch may change but the window
    fn new(engine: &Engine) -> Self {
        let own = engine.places.optimizer;
        let window = engine
            .places
            .window
            .map(|first| first..=first + engine.layout.len());
        let state = engine.state.iter().cloned().enumerate().skip(own);
        Self {
            parameters: engine.parameters.clone(),
            shared: engine.shared.clone(),
            state: state
                .filter(|(at, _)| !window.as_ref().is_some_and(|window| window.contains(at)))
                .collect(),
        }
    }

    // keep what the trace has written
    fn keep(&mut self, trace: &Trace) {
        let written = trace.written_state();
        self.state.retain(|(at, _)| written.contains(at));
        if !trace.sets_parameters() {
            (self.parameters, self.shared) = (Vec::new(), Vec::new());
        }
    }
}

/// Arrays of the state from this place on, as they were before a batch.
struct Before {
    first: usize,
    arrays: Vec<Array>,
}

impl Engine {
    /// The recipe of a part, over the engine's state and so many other arrays.
    #[must_use]
    pub fn recipe(&self, part: Part, options: Options, others: usize) -> Recipe {
        Recipe {
            part,
            layout: self.layout.clone(),
            places: self.places,
            options,
            others,
            shards: None,
        }
    }

    /// One call by the traces of its task: a batch whose update is called ends with [`Task::Given`], or with
    /// [`Engine::without_update`]. After a step, parameters and state are the new ones, lazily; at most
    /// [`Options::in_flight`] steps are under way then. Large ones overlap within the memory that one takes alone.
    ///
    /// `name`: that of a tensor, for an error; `ranks`: those over which a window is summed before its update, or that share the model.
    ///
    /// # Errors
    /// [`Error::Trace`], [`Error::Compile`], [`Error::FirstEvaluation`], [`Error::Beside`] and [`Error::Nonfinite`] leave everything
    /// as it was; [`Error::Ranks`] all but the window, which is gone.
    pub fn call(
        &mut self,
        task: Task,
        traces: CallTraces<'_>,
        call: Call,
        name: &dyn Fn(usize) -> String,
        owner: &mut dyn Owner,
        ranks: Option<Round<'_>>,
    ) -> Result<Output> {
        let raises = traces.trace.recipe.options.raises();
        let output = match task {
            Task::Gradients => {
                let gradients = self.gradients(traces.trace, call, owner, ranks);
                return gradients.map(Output::of);
            }
            Task::Flush => self.flush(traces.trace, &call, owner, ranks)?,
            Task::Given => self.update_behind(traces.trace, call, owner, ranks)?,
            Task::Whole | Task::Called | Task::Clipped | Task::Batch { .. } => {
                self.step(traces, call, name, owner, ranks)?
            }
        };
        if raises && task.accumulates() && task.updates() {
            nonfinite::check_update(output.last())?;
        }
        Ok(output)
    }

    // an update of its own follows a batch that fills a window, unless that is refused
    fn step(
        &mut self,
        CallTraces { trace, mut update }: CallTraces<'_>,
        call: Call,
        name: &dyn Fn(usize) -> String,
        owner: &mut dyn Owner,
        mut ranks: Option<Round<'_>>,
    ) -> Result<Output> {
        self.begin(owner)?;
        let options = trace.recipe.options;
        self.schedule.allow(options.in_flight);
        let beside = update.is_some().then(|| call.clone());
        let before = match (&mut update, &beside) {
            (Some(update), Some(beside)) => self.prepare(update, beside, owner, &mut ranks)?,
            _ => None,
        };
        let adds = trace.recipe.part.fills_window();
        self.gives &= !adds;
        let clips = trace.recipe.part == Part::Clipped;
        let mut undo = clips.then(|| Undo::new(self));
        let mut batch = self.run(trace, call, owner, &mut ranks)?;
        self.note(&batch);
        let refused = self.refusal(&options, name, &batch, owner);
        let approved = refused.is_none() && !(clips && self.is_skipped(&batch, owner)?);
        if let (Some(mut undo), true) = (undo.take(), approved) {
            undo.keep(trace);
            self.undo = Some(undo);
            return Ok(Output {
                calls: true,
                seconds: self.seconds,
                ..Output::of(batch)
            });
        }
        if approved && update.as_ref().is_some_and(|update| update.is_eager()) {
            owner.take_batch(&batch).map_err(Error::Trace)?;
        }
        self.averages |= approved && options.ema_decay.is_some();
        let window = self.window;
        if adds && approved {
            self.window.get_or_insert_with(|| Open::new(0)).batches += 1;
        }
        ranks = ranks.filter(|_| approved && update.is_some());
        if let Some((ranks, number)) = ranks.as_mut().filter(|_| options.reduced) {
            self.reduce((&mut **ranks, *number), &options, owner)?;
        }
        let update = match update.zip(beside) {
            Some((trace, beside)) if approved => {
                let call = beside.of_update(trace.recipe.others, &batch.others);
                let updated = self.update(trace, call, owner, ranks);
                Some(updated.map_err(|error| {
                    self.window = window;
                    self.not_updated(error, before, owner)
                })?)
            }
            _ => None,
        };
        if let (true, Some(update)) = (options.reduced, &update) {
            batch.skipped.clone_from(&update.skipped); // what one rank had was bad for all
        }
        self.schedule.end();
        let waited = self.wait(options.in_flight, owner);
        refused.map_or(waited, Err)?;
        Ok(Output {
            update,
            seconds: self.seconds,
            ..Output::of(batch)
        })
    }

    // the update behind a batch that the host's optimizer has been called for
    fn update_behind(
        &mut self,
        update: &mut Trace,
        call: Call,
        owner: &mut dyn Owner,
        mut ranks: Option<Round<'_>>,
    ) -> Result<Output> {
        let options = update.recipe.options;
        let outputs = self.run(update, call, owner, &mut ranks)?;
        self.averages |= options.ema_decay.is_some();
        self.undo = None;
        self.schedule.end();
        self.wait(options.in_flight, owner)?;
        Ok(Output {
            seconds: self.seconds,
            ..Output::of(outputs)
        })
    }

    // let go of the gradients that an update is given: they go with the arrays that it writes over
    fn forget_gradients(&self, inputs: &mut Inputs) -> Result<()> {
        let Some(first) = self.places.window else {
            return Ok(());
        };
        let before = self.layout.tensors().len() + self.layout.shared().count();
        for array in &mut inputs.own[before + first..][..self.layout.len()] {
            *array = aux_state::nothing(array.shape(), array.dtype())?;
        }
        Ok(())
    }

    /// End a step whose batch has been taken and whose update has failed: nothing has changed.
    pub fn without_update(&mut self) {
        if let Some(undo) = self.undo.take() {
            if !undo.parameters.is_empty() {
                (self.parameters, self.shared) = (undo.parameters, undo.shared);
            }
            for (at, array) in undo.state {
                self.state[at] = array;
            }
        }
        self.schedule.end();
    }

    // whether nothing is taken of a batch; waits for it
    fn is_skipped(&mut self, batch: &Outputs, owner: &mut dyn Owner) -> Result<bool> {
        let waiting = Instant::now();
        let skipped = batch.skipped.as_ref();
        let skipped = skipped.map_or(Ok(false), |flag| nonfinite::wait_true(flag, owner));
        self.seconds.wait += waiting.elapsed().as_secs_f64();
        skipped.map_err(|error| self.lost(error, owner))
    }

    // why a batch is refused where one that is no number raises
    fn refusal(
        &mut self,
        options: &Options,
        name: &dyn Fn(usize) -> String,
        batch: &Outputs,
        owner: &mut dyn Owner,
    ) -> Option<Error> {
        if !options.raises() {
            return None;
        }
        let waiting = Instant::now();
        let checked = nonfinite::check(name, &self.layout, options.guard(), batch, owner);
        self.seconds.wait += waiting.elapsed().as_secs_f64();
        checked.err()
    }

    // updates by a window that is not full
    fn flush(
        &mut self,
        update: &mut Trace,
        call: &Call,
        owner: &mut dyn Owner,
        ranks: Option<Round<'_>>,
    ) -> Result<Output> {
        self.begin(owner)?;
        let mut ranks = ranks;
        let options = &update.recipe.options;
        if let Some((ranks, number)) = ranks.as_mut().filter(|_| options.reduced) {
            let summed = self.reduce((&mut **ranks, *number), options, owner)?;
            ranks.flushed = summed && self.has_weight(owner)?;
            if !ranks.flushed {
                self.drop_window(); // no rank has a batch
                return Ok(Output::of(Outputs {
                    skipped: Some(Array::from_bool(true)),
                    ..Outputs::default()
                }));
            }
        }
        let call = call.of_update(update.recipe.others, &[]);
        let outputs = self.update(update, call, owner, ranks)?;
        self.averages |= update.recipe.options.ema_decay.is_some();
        self.schedule.end();
        Ok(Output {
            seconds: self.seconds,
            ..Output::of(outputs)
        })
    }

    // the update has failed, the batch before it has not: with the state as it was before that nothing has changed
    fn not_updated(
        &mut self,
        error: Error,
        before: Option<Before>,
        owner: &mut dyn Owner,
    ) -> Error {
        match (error, before) {
            (error, Some(Before { first, arrays })) => {
                self.state.splice(first..first + arrays.len(), arrays);
                error
            }
            (Error::Beside(error), None) => self.lost(error, owner),
            (error, None) => error,
        }
    }

    fn begin(&mut self, owner: &mut dyn Owner) -> Result<()> {
        self.seconds = Seconds::default();
        self.schedule.begin();
        self.complete(owner)
    }

    fn update(
        &mut self,
        update: &mut Trace,
        call: Call,
        owner: &mut dyn Owner,
        mut ranks: Option<Round<'_>>,
    ) -> Result<Outputs> {
        let outputs = self.run(update, call, owner, &mut ranks)?;
        self.window = None;
        if let Some(round) = ranks {
            self.gather(round, &update.recipe, owner)?;
        }
        Ok(outputs)
    }

    // Try the update out before the batch runs, by the sums that there are, so that one that fails loses no batch. Returns what the
    // batch changes of the state, for an update that cannot be known to succeed.
    fn prepare(
        &mut self,
        update: &mut Trace,
        call: &Call,
        owner: &mut dyn Owner,
        ranks: &mut Option<Round<'_>>,
    ) -> Result<Option<Before>> {
        if !update.is_eager() {
            if !update.evaluated.tried {
                let call = call.of_update(update.recipe.others, &[]);
                self.try_out(update, call, owner, ranks)?;
            }
            return Ok(None);
        }
        let count = self.layout.len() + 1;
        Ok(self.places.window.map(|first| Before {
            first,
            arrays: self.state[first..first + count].to_vec(),
        }))
    }

    fn run(
        &mut self,
        trace: &mut Trace,
        call: Call,
        owner: &mut dyn Owner,
        ranks: &mut Option<Round<'_>>,
    ) -> Result<Outputs> {
        let started = Instant::now();
        if trace.recipe.part.has_loss() {
            self.pace(trace); // with the update behind it
        }
        let metered = self.sample(trace, owner)?;
        let (outputs, updates) = match self.replayed(trace, call) {
            Ok(launch) => {
                self.seconds.build += started.elapsed().as_secs_f64();
                self.begin_part(trace, ranks, owner)?;
                self.replay(trace, launch, owner)?
            }
            Err(call) => self.evaluate(trace, call, (started, ranks), owner)?,
        };
        if let Some(before) = metered {
            self.meter(trace, &before, outputs.skipped.clone(), owner)?;
        }
        self.updates += usize::from(updates);
        Ok(outputs)
    }

    // a part that is launched again
    fn replay(
        &mut self,
        trace: &Trace,
        mut launch: Launch,
        owner: &mut dyn Owner,
    ) -> Result<(Outputs, bool)> {
        let (updates, replaces) = (trace.recipe.part.updates(), launch.updates);
        self.clock.set_operations(trace.operations);
        self.clock.enter(Stage::Evaluation);
        self.scheduled(owner, |schedule, device| {
            let mut known = Evaluated {
                tried: true,
                warm: true,
                bytes: Some(0), // its memory is in use already
            };
            schedule.evaluate(&mut OnGraph(device), &mut launch, &mut known, replaces)
        })?;
        self.keep(trace, launch.captured);
        Ok((launch.outputs, updates))
    }

    // a part that MLX evaluates
    fn evaluate(
        &mut self,
        trace: &mut Trace,
        call: Call,
        (started, ranks): (Instant, &mut Option<Round<'_>>),
        owner: &mut dyn Owner,
    ) -> Result<(Outputs, bool)> {
        self.leave_replay(owner)?;
        self.make_way(trace);
        let rehearsal = self.rehearse(trace, &call, owner);
        let mut inputs = self.take(call);
        let known = trace.evaluated.warm && !trace.is_eager();
        self.clock
            .enter(if known { Stage::Build } else { Stage::Trace });
        let built = build(trace, &inputs);
        let begun =
            built.and_then(|outputs| self.begin_part(trace, ranks, owner).map(|()| outputs));
        let outputs = match begun {
            Ok(outputs) => outputs,
            Err(error) => {
                self.put_back(inputs);
                return Err(error);
            }
        };
        self.seconds.build += started.elapsed().as_secs_f64();
        self.enter_evaluation(trace, &inputs, &outputs, owner);
        if trace.recipe.part == Part::Given && rehearsal.is_none() {
            self.forget_gradients(&mut inputs)?;
        }
        // those of a batch are what the loss has assigned: no update
        let replaces = !outputs.parameters.is_empty();
        let updates = replaces && trace.recipe.part.updates();
        let mut work = Work::new(trace, inputs, outputs);
        let evaluated = &mut trace.evaluated;
        let blocks = fuse::computed_in_blocks();
        let done = self.scheduled(owner, |schedule, device| {
            schedule.evaluate(device, &mut work, evaluated, replaces)
        });
        trace.caller = work.caller;
        if let Some(inputs) = work.inputs {
            self.put_back(inputs); // it has not been submitted
        }
        done?;
        trace.capture.in_blocks = fuse::computed_in_blocks() > blocks;
        if let Some(rehearsal) = rehearsal {
            self.capture(trace, rehearsal, &work.outputs, owner)?;
        }
        Ok((work.outputs, updates))
    }

    // nothing changes
    fn try_out(
        &mut self,
        trace: &mut Trace,
        call: Call,
        owner: &mut dyn Owner,
        ranks: &mut Option<Round<'_>>,
    ) -> Result<()> {
        self.clock.enter(Stage::Trace);
        let inputs = self.take(call);
        let built = build(trace, &inputs);
        let begun =
            built.and_then(|outputs| self.begin_part(trace, ranks, owner).map(|()| outputs));
        let outputs = match begun {
            Ok(outputs) => outputs,
            Err(error) => {
                self.put_back(inputs);
                return Err(error);
            }
        };
        self.enter_evaluation(trace, &inputs, &outputs, owner);
        let mut work = Work::new(trace, inputs, outputs);
        let tried = self.scheduled(owner, |_, device| device.try_out(&mut work));
        if let Some(inputs) = work.inputs {
            self.put_back(inputs);
        }
        trace.evaluated.tried = tried.is_ok();
        tried
    }

    fn enter_evaluation(
        &self,
        trace: &mut Trace,
        inputs: &Inputs,
        outputs: &Outputs,
        owner: &mut dyn Owner,
    ) {
        let all = outputs.before_update().chain(outputs.update());
        let all: Vec<&Array> = all.filter(|_| !trace.evaluated.warm).collect();
        if !trace.evaluated.warm {
            let all: Vec<Array> = all.iter().copied().cloned().collect();
            trace.operations = graph::size(&inputs.all(), &all);
            trace.collective = array::ranks(&all) > 1;
        }
        self.clock.set_operations(trace.operations);
        self.clock
            .enter(match (trace.collective, trace.evaluated.warm) {
                (true, _) => Stage::Collective,
                (false, true) => Stage::Evaluation,
                (false, false) => Stage::FirstEvaluation,
            });
        if !all.is_empty() {
            owner.unlocked(&mut || kernels::ask(&all));
        }
    }

    // the row before a part that exchanges arrays with ranks that share the model: behind it, nothing but the device can fail
    fn begin_part(
        &self,
        trace: &Trace,
        ranks: &mut Option<Round<'_>>,
        owner: &mut dyn Owner,
    ) -> Result<()> {
        let Some((ranks, update)) = ranks.as_mut().filter(|(ranks, _)| ranks.shards().is_some())
        else {
            return Ok(());
        };
        self.clock.enter(Stage::Collective);
        let part = std::mem::discriminant(&trace.recipe.part);
        let work = hash((part, trace.exchanges()));
        let given = (&self.layout, &trace.recipe.options, work);
        ranks.begin_part(*update, given, owner)
    }

    // loss and gradients; nothing changes
    fn gradients(
        &mut self,
        trace: &mut Trace,
        call: Call,
        owner: &mut dyn Owner,
        mut ranks: Option<Round<'_>>,
    ) -> Result<Outputs> {
        self.complete(owner)?;
        self.clock.enter(Stage::Trace);
        let inputs = self.take(call);
        let traced = build(trace, &inputs);
        self.put_back(inputs);
        let outputs = traced?;
        self.begin_part(trace, &mut ranks, owner)?;
        self.clock.enter(Stage::FirstEvaluation);
        evaluate(outputs.before_update(), owner).map_err(Error::FirstEvaluation)?;
        Ok(outputs)
    }

    // moves the state into the list of a trace's inputs; `put_back` is the inverse
    pub(super) fn take(&mut self, call: Call) -> Inputs {
        let mut own = std::mem::take(&mut self.parameters);
        own.append(&mut self.shared);
        own.append(&mut self.state);
        Inputs { own, call }
    }

    pub(super) fn put_back(&mut self, inputs: Inputs) {
        let mut parameters = inputs.own;
        let mut shared = parameters.split_off(self.layout.tensors().len());
        self.state = shared.split_off(self.layout.shared().count());
        (self.parameters, self.shared) = (parameters, shared);
    }
}

// the graph of a trace
pub(super) fn build(trace: &mut Trace, inputs: &Inputs) -> Result<Outputs> {
    let outputs = trace.call(inputs)?;
    fuse::casts(outputs.update()).map_err(Error::Trace)?;
    fuse::in_place(outputs.update()).map_err(Error::Trace)?;
    Ok(outputs)
}
