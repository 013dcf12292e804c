//! Evaluation by MLX: what is handed to the device, and recovery when a step fails.
use std::time::Instant;

use mlx_rs::{
    error::{Exception, Result as MlxResult},
    transforms::{async_eval, eval},
    Array,
};

use super::{nonfinite::is_true, Engine, Owner, Stage};
use crate::{
    error::{Error, Result},
    evaluation::{Evaluate, Evaluated, HandOver, Schedule},
    mlx::{
        array,
        caller::Caller,
        join,
        memory::{self, MemoryLimit, Watch},
    },
    trace::{in_turn, trial, Inputs, Outputs, Trace},
};

/// Largest number of failed operations of one step, each of which is an error of its own.
const MAX_FAILURES: usize = 16;

/// One part of a step that MLX evaluates.
pub(super) struct Work {
    /// The inputs of its graph, until it is submitted.
    pub inputs: Option<Inputs>,
    /// Its outputs; submitted, those that the engine does not take up.
    pub outputs: Outputs,
    /// True if the gradients are outputs too.
    pub keep_gradients: bool,
    /// True if it updates float32 masters.
    pub keep_masters: bool,
    /// True if the update is evaluated buffer by buffer.
    pub by_buffer: bool,
    /// Whether the calling thread computes it.
    pub caller: Caller,
    known: Evaluated, // with the memory that it takes, or that it took for another batch
}

impl Work {
    /// The part that a trace computes.
    pub fn new(trace: &Trace, inputs: Inputs, outputs: Outputs) -> Self {
        Self {
            inputs: Some(inputs),
            outputs,
            keep_gradients: trace.recipe.options.raises(),
            keep_masters: trace.recipe.options.compute_dtype.is_some(),
            by_buffer: trace.recipe.updates_by_buffer(),
            caller: trace.caller,
            known: Evaluated {
                bytes: trace.evaluated.bytes.or(trace.usual),
                ..trace.evaluated
            },
        }
    }
}

/// MLX's default device, as it evaluates the parts of an engine's steps.
pub(super) struct OnDevice<'a> {
    pub engine: &'a mut Engine,
    pub owner: &'a mut dyn Owner,
    /// Of the memory of a part that is measured.
    pub watch: Option<Watch>,
}

impl Evaluate for OnDevice<'_> {
    type Work = Work;
    type Ticket = Array;
    type Error = Error;

    fn active(&mut self) -> usize {
        memory::active()
    }

    fn watch(&mut self) {
        self.watch = Some(Watch::begin());
    }

    fn watched(&mut self) -> usize {
        self.watch.take().map_or(0, Watch::end)
    }

    fn wait(&mut self, done: &Array) -> Result<()> {
        let started = Instant::now();
        let (before, _) = self.engine.clock.now();
        // otherwise other ranks may be waited for, or a compiler
        let waits = matches!(before, Stage::Evaluation | Stage::Objects);
        if waits {
            self.engine.clock.enter(Stage::Wait);
        }
        let outcome = evaluate(std::iter::once(done), self.owner);
        if waits {
            self.engine.clock.enter(before);
        }
        self.engine.seconds.wait += started.elapsed().as_secs_f64();
        outcome.map_err(|error| self.engine.lost(error, self.owner))
    }

    fn synchronize(&mut self) -> Result<()> {
        synchronize(self.owner).map_err(Error::Beside)
    }

    fn release(&mut self, _: &Work) -> Result<()> {
        self.owner.release(); // of a first step, the arrays before they got their layout
        Ok(())
    }

    fn try_out(&mut self, work: &mut Work) -> Result<()> {
        if work.known.warm {
            let before: Vec<&Array> = work.outputs.before_update().collect();
            let tried = unlocked(self.owner, || {
                work.caller
                    .evaluate(work.known.bytes, || async_eval(before.iter().copied()))?;
                eval(before)
            });
            return tried.map_err(Error::FirstEvaluation);
        }
        let inputs = work.inputs.as_ref().map_or_else(Vec::new, Inputs::all);
        let mut tried = evaluate_one_by_one(work.outputs.before_update(), self.owner);
        if tried.is_ok() {
            let update = trial(&work.outputs, &inputs).map_err(Error::FirstEvaluation)?;
            let update: Vec<Array> = update.into_iter().cloned().collect();
            let skipped = work.outputs.skipped.as_ref();
            let skipped = skipped.filter(|_| work.keep_gradients).map(is_true);
            if !skipped
                .transpose()
                .map_err(Error::FirstEvaluation)?
                .unwrap_or(false)
            {
                work.outputs.gradients.clear(); // nobody asks which of them is no number
            }
            let mut portions = update.chunks(if work.by_buffer { 1 } else { usize::MAX });
            tried = portions.try_for_each(|portion| evaluate_one_by_one(portion, self.owner));
        }
        tried.map_err(Error::FirstEvaluation)
    }

    fn submit(&mut self, work: &mut Work, way: HandOver) -> Result<Option<Array>> {
        let mut done = work.outputs.marker().cloned();
        if work.by_buffer {
            // computed with the last buffer, not with the first
            let last = done.map(|marker| marker.reshape(&[-1])).transpose();
            done = last.map_err(Error::Trace)?;
        }
        let changed = self.engine.install(work);
        let list = (work.by_buffer, &changed[..], done.as_ref());
        self.engine.dispatch(work, list, way, self.owner)?;
        Ok(done)
    }
}

impl Engine {
    /// Wait for everything in flight.
    ///
    /// # Errors
    /// [`Error::Device`], when a step failed.
    pub fn synchronize(&mut self, owner: &mut dyn Owner) -> Result<()> {
        self.complete(owner)?;
        self.wait(0, owner)
    }

    /// The error of a step under way that has shown in a value that was read.
    pub fn fail(&mut self, error: Exception, owner: &mut dyn Owner) -> Error {
        self.schedule.forget();
        self.lost(error, owner)
    }

    pub(super) fn wait(&mut self, in_flight: usize, owner: &mut dyn Owner) -> Result<()> {
        self.scheduled(owner, |schedule, device| schedule.wait(device, in_flight))
    }

    // the schedule and the device that it is for
    pub(super) fn scheduled<T>(
        &mut self,
        owner: &mut dyn Owner,
        work: impl FnOnce(&mut Schedule<Array>, &mut OnDevice<'_>) -> Result<T>,
    ) -> Result<T> {
        let mut schedule = std::mem::replace(&mut self.schedule, Schedule::new(true));
        let engine = &mut *self;
        let mut device = OnDevice {
            engine,
            owner,
            watch: None,
        };
        let outcome = work(&mut schedule, &mut device);
        self.schedule = schedule;
        outcome
    }

    // release the old arrays and install the new ones; returns the places of those in the state
    fn install(&mut self, work: &mut Work) -> Vec<usize> {
        let outputs = &mut work.outputs;
        if !work.keep_gradients {
            outputs.gradients.clear();
        }
        if let Some(inputs) = work.inputs.take() {
            self.put_back(inputs);
        }
        let mut changed = Vec::new();
        for (index, array) in std::mem::take(&mut outputs.state) {
            self.state[index] = array;
            changed.push(index);
        }
        if !outputs.parameters.is_empty() {
            self.masters_stale = !work.keep_masters;
            self.parameters.clear();
            self.shared.clear();
            self.fresh = std::mem::take(&mut outputs.parameters);
        }
        changed
    }

    // evaluate changed arrays only: an output of an evaluation cannot be donated to the next one before it is done
    fn dispatch(
        &mut self,
        work: &mut Work,
        (by_buffer, changed, done): (bool, &[usize], Option<&Array>),
        way: HandOver,
        owner: &mut dyn Owner,
    ) -> Result<()> {
        let started = Instant::now();
        let mut sent = Ok(());
        owner.unlocked(&mut || {
            let state = changed.iter().map(|&index| &self.state[index]);
            let portions = work
                .outputs
                .portions(&self.fresh, state.chain(done), by_buffer);
            sent = match way {
                HandOver::First(_) if !join::is_cuda() => {
                    let mut buffers = in_turn(&self.fresh, by_buffer).into_iter();
                    buffers
                        .try_for_each(|array| array::eval_one_by_one([array]))
                        .and_then(|()| array::eval_one_by_one(portions.into_iter().flatten()))
                }
                HandOver::First(limit) | HandOver::Whole(limit) => {
                    MemoryLimit::to(limit).and_then(|_limited| {
                        work.caller
                            .evaluate(work.known.bytes, || hand_over(&portions))
                    })
                }
            };
        });
        self.show()?;
        self.seconds.evaluate += started.elapsed().as_secs_f64();
        let Err(error) = sent else {
            return Ok(());
        };
        if !finds_no_memory(&error) {
            return Err(self.lost(error, owner));
        }
        self.failed = true;
        memory::clear_cache(); // arrays that found no memory stay lazy: all are evaluated again
        self.complete(owner)
    }

    // parameters as views into the new buffers
    pub(super) fn show(&mut self) -> MlxResult<()> {
        if self.fresh.is_empty() {
            return Ok(());
        }
        let buffers = std::mem::take(&mut self.fresh);
        self.parameters = self.layout.views(&buffers)?;
        let shared: Vec<usize> = self.layout.shared().collect();
        let buffers = buffers.into_iter().enumerate();
        let buffers = buffers.filter(|(buffer, _)| shared.contains(buffer));
        self.shared = buffers.map(|(_, array)| array).collect();
        Ok(())
    }

    // evaluate the remaining lazy arrays from the values at hand, so that reading them does not raise the error again
    pub(super) fn lost(&mut self, error: Exception, owner: &mut dyn Owner) -> Error {
        self.failed = true;
        let kept = || {
            self.shared
                .iter()
                .chain(&self.parameters)
                .chain(&self.state)
        };
        for _ in 0..MAX_FAILURES {
            owner.unlocked(&mut || array::recover(kept()));
            if evaluate(kept(), owner).is_ok() {
                break;
            }
        }
        Error::Device(error)
    }

    // after a failure: compute what is still lazy
    pub(super) fn complete(&mut self, owner: &mut dyn Owner) -> Result<()> {
        if !self.failed {
            return Ok(());
        }
        let arrays = self.shared.iter().chain(&self.parameters);
        evaluate(arrays.chain(&self.state), owner).map_err(|error| {
            if finds_no_memory(&error) {
                Error::Memory(error)
            } else {
                Error::Device(error)
            }
        })?;
        self.failed = false;
        Ok(())
    }
}

// one portion after another, each when the one before the last is done
fn hand_over(portions: &[Vec<&Array>]) -> MlxResult<()> {
    for (number, portion) in portions.iter().enumerate() {
        let before = number
            .checked_sub(2)
            .and_then(|number| portions[number].last());
        before.map_or(Ok(()), |array| eval([*array]))?;
        async_eval(portion.iter().copied())?;
    }
    Ok(())
}

fn finds_no_memory(error: &Exception) -> bool {
    ["malloc", "out of memory"]
        .iter()
        .any(|words| error.what().contains(words))
}

pub(super) fn evaluate<'a>(
    arrays: impl IntoIterator<Item = &'a Array>,
    owner: &mut dyn Owner,
) -> MlxResult<()> {
    unlocked(owner, || eval(arrays))
}

/// Wait until the device has nothing to do.
///
/// # Errors
/// Of anything that was under way.
pub(super) fn synchronize(owner: &mut dyn Owner) -> MlxResult<()> {
    unlocked(owner, memory::synchronize)
}

// while it is not known whether it succeeds: on a CPU it takes no memory ahead of the worker
fn evaluate_one_by_one<'a>(
    arrays: impl IntoIterator<Item = &'a Array>,
    owner: &mut dyn Owner,
) -> MlxResult<()> {
    unlocked(owner, || array::eval_one_by_one(arrays))
}

fn unlocked(owner: &mut dyn Owner, work: impl FnOnce() -> MlxResult<()>) -> MlxResult<()> {
    let mut work = Some(work);
    let mut result = Ok(());
    owner.unlocked(&mut || {
        if let Some(work) = work.take() {
            result = work();
        }
    });
    result
}
