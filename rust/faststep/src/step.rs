//! How a step is evaluated: its arrays, one evaluation with a handful of outputs, a bounded number of steps in flight.
//!
//! Between two steps the engine holds every array of the state once. For the evaluation it lets go of all of them, so
//! that MLX can write the new values into the old memory; whoever shows the arrays to a user lets go too, when
//! [`Owner::release`] is called, and shows the new ones afterwards.
mod keep;

use std::{collections::VecDeque, ops::AddAssign, rc::Rc, time::Instant};

use mlx_rs::{
    error::{Exception, Result as MlxResult},
    memory::active_memory,
    transforms::{async_eval, eval},
    Array,
};

use crate::{
    array,
    error::{Error, Result},
    extras::{Needs, Places},
    fused,
    layout::Layout,
    memory,
    meter::{self, Reading},
    outputs::Outputs,
    plan::{self, Plan},
    scene::{Part as Planned, Scene},
    trace::{Part, Rule, Trace},
};

/// Of a first evaluation's update, so many bytes are computed while the old state is still held: enough to meet every
/// kernel, little enough not to need the memory twice.
const TRIAL_BYTES: usize = 64 << 20;

/// Of so many updates one is metered.
const METER_EVERY: usize = 128;

/// Steps that hold more are not handed to the device before it has done the last one: what that costs is a small part of
/// so large a step (5 % of 19 ms, measured on one H200), and the memory would be needed twice.
pub(crate) const OVERLAP_BYTES: usize = 1 << 30;

/// So many operations of one step may have failed: each is an error of its own.
const MAX_FAILURES: usize = 16;

/// Who else refers to the arrays of a step.
pub trait Owner {
    /// The loss has been run, and parts of it once more while it was differentiated: what that has left behind goes.
    fn clean(&mut self);

    /// Let go of the arrays of parameters and state: their memory is about to be reused.
    fn release(&mut self);

    /// Run work that waits for the device, with whatever lock the caller holds released.
    fn unlocked(&mut self, work: &mut dyn FnMut());
}

/// Nobody else does.
impl Owner for () {
    fn clean(&mut self) {}

    fn release(&mut self) {}

    fn unlocked(&mut self, work: &mut dyn FnMut()) {
        work();
    }
}

/// The arrays that a step reads beside parameters and state.
#[derive(Debug, Default)]
pub struct Call {
    /// The model's other arrays.
    pub others: Vec<Array>,
    /// The random key, then the arrays of the batch.
    pub rest: Vec<Array>,
}

/// Where the time of a call goes, in seconds.
#[derive(Clone, Copy, Debug, Default)]
pub struct Seconds {
    /// Tracing, or replaying a trace into a graph.
    pub build: f64,
    /// Handing the graph to MLX, which on a CPU computes most of it.
    pub evaluate: f64,
    /// Waiting for steps in flight.
    pub wait: f64,
}

impl AddAssign for Seconds {
    fn add_assign(&mut self, other: Self) {
        self.build += other.build;
        self.evaluate += other.evaluate;
        self.wait += other.wait;
    }
}

/// What a step gives beside new parameters and state.
#[derive(Debug)]
pub struct Output {
    /// Loss, auxiliary arrays, buffers, random key, and whether nothing is taken of this batch.
    pub batch: Outputs,
    /// Norm, and whether nothing is taken, of the update by a window that this batch has filled.
    pub update: Option<Outputs>,
    /// Where the time went.
    pub seconds: Seconds,
}

impl Output {
    /// Of a call that has one part only.
    #[must_use]
    pub fn of(batch: Outputs) -> Self {
        Self {
            batch,
            update: None,
            seconds: Seconds::default(),
        }
    }
}

/// A step that the device may not have done yet.
#[derive(Debug)]
struct Flight {
    /// There when the step is done.
    done: Array,
    /// What it took of memory when it was handed over: on a GPU its activations.
    bytes: usize,
}

/// Parameters and optimizer state of one model, and the steps in flight.
#[derive(Debug)]
pub struct Engine {
    layout: Rc<Layout>,
    parameters: Vec<Array>,
    shared: Vec<Array>,
    state: Vec<Array>,
    places: Places,
    batches: usize, // in the window
    masters_are_old: bool,
    updates: usize,
    reading: Option<Reading>,
    fresh: Vec<Array>,
    in_flight: VecDeque<Flight>,
    max_in_flight: usize,
    handed_over: usize, // bytes, by the step that is being made
    seconds: Seconds,
    failed: bool,
    drafted: bool, // nothing is evaluated: to be planned with
}

impl Engine {
    /// Take over parameters (by tensor) and state; small parameters are joined into shared buffers.
    ///
    /// # Errors
    /// [`Error::NoParameters`], or an array that cannot be evaluated.
    pub fn new(layout: Rc<Layout>, parameters: Vec<Array>, state: Vec<Array>) -> Result<Self> {
        Self::of(layout, parameters, state, false)
    }

    /// The same without memory of its own: everything stays lazy, to be planned with and dropped.
    ///
    /// # Errors
    /// [`Error::NoParameters`], or an array that cannot be joined.
    pub fn draft(layout: Rc<Layout>, parameters: Vec<Array>, state: Vec<Array>) -> Result<Self> {
        Self::of(layout, parameters, state, true)
    }

    fn of(
        layout: Rc<Layout>,
        parameters: Vec<Array>,
        state: Vec<Array>,
        drafted: bool,
    ) -> Result<Self> {
        if layout.is_empty() {
            return Err(Error::NoParameters);
        }
        // A thread's first evaluation settles its stream, which is a key of MLX's cache of compiled functions: without it
        // the first step would be traced twice.
        eval([&Array::from_int(0).add(Array::from_int(0))?])?;
        let mut engine = Self {
            layout,
            parameters,
            shared: Vec::new(),
            places: Places::behind(state.len()),
            state,
            batches: 0,
            masters_are_old: false,
            updates: 0,
            reading: None,
            fresh: Vec::new(),
            in_flight: VecDeque::new(),
            max_in_flight: 0,
            handed_over: 0,
            seconds: Seconds::default(),
            failed: false,
            drafted,
        };
        engine.pack()?;
        Ok(engine)
    }

    /// Where the parameters lie.
    #[must_use]
    pub fn layout(&self) -> &Rc<Layout> {
        &self.layout
    }

    /// Where the arrays of the state stand.
    #[must_use]
    pub fn places(&self) -> Places {
        self.places
    }

    /// The parameters, by tensor.
    #[must_use]
    pub fn parameters(&self) -> &[Array] {
        &self.parameters
    }

    /// The optimizer's arrays.
    #[must_use]
    pub fn state(&self) -> &[Array] {
        &self.state[..self.places.optimizer]
    }

    /// The bytes of what is kept beside parameters and the optimizer's state.
    #[must_use]
    pub fn extra_bytes(&self) -> usize {
        let extras = self.state[self.places.optimizer..].iter();
        extras.map(Array::nbytes).sum()
    }

    /// The share of weights that the last metered update left as they were, from 0 to 1; waits for that update.
    #[must_use]
    pub fn unchanged(&self) -> Option<f64> {
        self.reading.as_ref()?.share()
    }

    /// The number of batches in the window.
    #[must_use]
    pub fn batches(&self) -> usize {
        self.batches
    }

    /// Put another value into the optimizer's state.
    pub fn set_state(&mut self, index: usize, value: Array) {
        self.state[index] = value;
    }

    /// Put other values into parameters; the buffers in which they lie are joined anew, and so are their masters.
    ///
    /// # Errors
    /// An array that cannot be evaluated.
    pub fn set_parameters(&mut self, values: Vec<(usize, Array)>) -> Result<()> {
        for (index, value) in values {
            self.parameters[index] = value;
        }
        self.pack()?;
        if self.places.masters.is_some() {
            let masters = self.masters()?;
            self.set_masters(masters)?;
        }
        Ok(())
    }

    /// Make room for what a step needs beside the optimizer's state.
    ///
    /// # Errors
    /// An array that cannot be evaluated.
    pub fn need(&mut self, needs: Needs) -> Result<()> {
        let old = needs.masters && std::mem::take(&mut self.masters_are_old);
        if old && self.places.masters.is_some() {
            self.set_masters(vec![None; self.layout.tensors().len()])?;
        }
        let new = self.places.add(needs, &self.layout, &self.buffers())?;
        if !new.is_empty() {
            if !self.drafted {
                eval(&new)?;
            }
            self.state.extend(new);
        }
        Ok(())
    }

    fn pack(&mut self) -> Result<()> {
        let shared = self.layout.shared();
        let packed = shared.map(|buffer| self.layout.pack_one(buffer, &self.parameters));
        self.shared = packed.collect::<MlxResult<_>>()?;
        if !self.drafted {
            let arrays = self.shared.iter().chain(&self.parameters);
            eval(arrays.chain(&self.state))?;
        }
        let buffers = self.buffers();
        self.parameters = self.layout.views(&buffers)?;
        Ok(())
    }

    fn buffers(&self) -> Vec<Array> {
        let mut shared = self.shared.iter();
        let buffers = (0..self.layout.len()).map(|buffer| match self.layout.single(buffer) {
            Some(tensor) => Some(&self.parameters[tensor]),
            None => shared.next(),
        });
        buffers.flatten().cloned().collect()
    }

    /// One step: parameters and state become the new ones, lazily; at most `in_flight` steps are under way then, and
    /// one only where they hold more than 1 GiB.
    ///
    /// `trace` is of a whole step, or of a batch; `update` follows the batch that fills a window, if `approve` says so.
    ///
    /// # Errors
    /// [`Error::Trace`] and [`Error::FirstEvaluation`] leave everything as it was.
    pub fn step(
        &mut self,
        trace: &mut Trace,
        mut update: Option<&mut Trace>,
        call: Call,
        in_flight: usize,
        owner: &mut dyn Owner,
        approve: &mut dyn FnMut(&Layout, &Outputs) -> bool,
    ) -> Result<Output> {
        self.complete(owner)?;
        self.seconds = Seconds::default();
        self.max_in_flight = in_flight;
        let before = match &mut update {
            Some(update) => self.prove(update)?,
            None => None,
        };
        let adds = trace.recipe.part == Part::Batch;
        let batch = self.run(trace, call, owner)?;
        let waiting = Instant::now();
        let approved = approve(&self.layout, &batch);
        self.seconds.wait += waiting.elapsed().as_secs_f64();
        self.batches += usize::from(adds && approved);
        let mut done = batch.marker().cloned();
        let update = match update {
            Some(trace) if approved => match self.update(trace, owner) {
                Ok(update) => {
                    done = update.marker().cloned();
                    Some(update)
                }
                Err(error) => {
                    if let (Some(window), Some(first)) = (before, self.places.window) {
                        self.state.splice(first..first + window.len(), window);
                    }
                    self.batches -= 1;
                    return Err(error);
                }
            },
            _ => None,
        };
        self.fly(done);
        self.wait(in_flight, owner)?;
        Ok(Output {
            batch,
            update,
            seconds: self.seconds,
        })
    }

    /// Update by a window that is not full.
    ///
    /// # Errors
    /// As [`Engine::step`].
    pub fn flush(&mut self, update: &mut Trace, owner: &mut dyn Owner) -> Result<Output> {
        self.complete(owner)?;
        self.seconds = Seconds::default();
        let outputs = self.update(update, owner)?;
        self.fly(outputs.marker().cloned());
        Ok(Output {
            batch: outputs,
            update: None,
            seconds: self.seconds,
        })
    }

    fn update(&mut self, update: &mut Trace, owner: &mut dyn Owner) -> Result<Outputs> {
        let outputs = self.run(update, Call::default(), owner)?;
        self.batches = 0;
        Ok(outputs)
    }

    // An update that cannot be traced is no reason to lose a batch. What it gives beside: the window as it is, for an
    // update that may still fail.
    fn prove(&mut self, update: &mut Trace) -> Result<Option<Vec<Array>>> {
        if update.warm && !update.is_eager() {
            return Ok(None);
        }
        if !update.is_eager() {
            let inputs = self.take(Call::default());
            let traced = update.call(&inputs);
            self.put_back(inputs);
            traced.map_err(Error::Trace)?;
        }
        let window = self
            .places
            .window
            .map(|first| first..=first + self.layout.len());
        Ok(window.map(|window| self.state[window].to_vec()))
    }

    fn run(&mut self, trace: &mut Trace, call: Call, owner: &mut dyn Owner) -> Result<Outputs> {
        let started = Instant::now();
        let metered = self.sample(trace, owner)?;
        let inputs = self.take(call);
        let mut outputs = match build(trace, &inputs, owner) {
            Ok(outputs) => outputs,
            Err(error) => {
                self.put_back(inputs);
                return Err(Error::Trace(error));
            }
        };
        self.seconds.build += started.elapsed().as_secs_f64();
        if !trace.warm {
            if let Err(error) = try_out(&outputs, owner) {
                self.put_back(inputs);
                return Err(Error::FirstEvaluation(error));
            }
            trace.warm = true;
        }
        if let Err(error) = self.make_room(owner) {
            self.put_back(inputs);
            return Err(error);
        }
        let updates = !outputs.parameters.is_empty();
        if updates {
            owner.release();
            self.masters_are_old = trace.recipe.compute.is_none();
        }
        if !trace.recipe.keep_gradients {
            outputs.gradients.clear();
        }
        self.put_back(inputs);
        let mut changed = Vec::new();
        for (index, array) in std::mem::take(&mut outputs.state) {
            self.state[index] = array;
            changed.push(index);
        }
        if updates {
            self.parameters.clear();
            self.shared.clear();
            self.fresh = std::mem::take(&mut outputs.parameters);
        }
        self.dispatch(&outputs, &changed, owner)?;
        if let Some(before) = metered {
            self.meter(trace, &before, outputs.skipped.clone(), owner)?;
        }
        self.updates += usize::from(updates);
        Ok(outputs)
    }

    // every now and then: a few weights before the update
    fn sample(&self, trace: &Trace, owner: &mut dyn Owner) -> Result<Option<Vec<Array>>> {
        let updates = matches!(trace.recipe.part, Part::Whole(_) | Part::Update(_));
        if !updates || self.updates % METER_EVERY != 1 {
            return Ok(None);
        }
        let sample = meter::samples(&self.weights(trace))?;
        evaluate(&sample, owner)?; // before the update takes the memory over
        Ok(Some(sample))
    }

    fn meter(
        &mut self,
        trace: &Trace,
        before: &[Array],
        skipped: Option<Array>,
        owner: &mut dyn Owner,
    ) -> Result<()> {
        let after = meter::samples(&self.weights(trace))?;
        let moments = self.first_moments(trace)?;
        let reading = Reading::of(before, &after, &moments, skipped)?;
        evaluate(reading.arrays(), owner)?;
        self.reading = Some(reading);
        Ok(())
    }

    // samples of the first moment of each buffer that has one of its own size
    fn first_moments(&self, trace: &Trace) -> Result<Vec<Option<Array>>> {
        let (Part::Whole(Rule::Native(rules)) | Part::Update(Rule::Native(rules))) =
            &trace.recipe.part
        else {
            return Ok(vec![None; self.layout.len()]);
        };
        let places = rules.places(&self.layout).into_iter();
        let samples = places.zip(self.buffers()).map(|(place, buffer)| {
            let moment = self.state[place].first();
            let moment = moment.filter(|moment| moment.size() == buffer.size());
            moment.map(meter::sample).transpose()
        });
        Ok(samples.collect::<MlxResult<_>>()?)
    }

    // the buffers that the trace updates
    fn weights(&self, trace: &Trace) -> Vec<Array> {
        match trace.recipe.compute {
            Some(_) => self.wide_buffers(),
            None => self.buffers(),
        }
    }

    /// Loss and gradients; nothing changes.
    ///
    /// # Errors
    /// Of the trace or of the device.
    pub fn gradients(
        &mut self,
        trace: &mut Trace,
        call: Call,
        owner: &mut dyn Owner,
    ) -> Result<Outputs> {
        self.complete(owner)?;
        let inputs = self.take(call);
        let traced = build(trace, &inputs, owner);
        self.put_back(inputs);
        let outputs = traced.map_err(Error::Trace)?;
        evaluate(outputs.before_update(), owner).map_err(Error::FirstEvaluation)?;
        Ok(outputs)
    }

    /// What `calls` steps, which make one update, take of the device's memory. They are traced and not evaluated, and
    /// nothing changes. `shown` is what the user's objects hold of parameters and state until the first update.
    ///
    /// # Errors
    /// Of a trace, or of a step before.
    pub fn plan(
        &mut self,
        trace: &mut Trace,
        update: Option<&mut Trace>,
        call: Call,
        (calls, in_flight): (usize, usize),
        shown: &[Array],
        owner: &mut dyn Owner,
    ) -> Result<Plan> {
        self.synchronize(owner)?;
        let others = call.others.len();
        let inputs = self.take(call);
        let kept = self.layout.tensors().len() + self.layout.shared().count() + self.places.len;
        let mut traced = build(trace, &inputs, owner).map(|outputs| vec![outputs]);
        let mut asked = vec![trace];
        if let (Ok(all), Some(update)) = (&mut traced, update) {
            match build(update, &inputs[..kept], owner) {
                Ok(outputs) => all.push(outputs),
                Err(error) => traced = Err(error),
            }
            asked.push(update);
        }
        let planned = traced.and_then(|outputs| {
            let parts = asked.iter().zip(&outputs);
            let parts = parts.map(|(trace, outputs)| Planned {
                outputs,
                keep_gradients: trace.recipe.keep_gradients,
                warm: trace.warm,
                eager: trace.is_eager(),
            });
            plan::plan(&Scene {
                layout: &self.layout,
                inputs: &inputs,
                states: self.places.len,
                window: self.places.window,
                others,
                shown,
                parts: &parts.collect::<Vec<_>>(),
                calls,
                in_flight,
            })
        });
        self.put_back(inputs);
        planned.map_err(Error::Trace)
    }

    /// Wait for everything in flight.
    ///
    /// # Errors
    /// [`Error::Device`], when a step failed.
    pub fn synchronize(&mut self, owner: &mut dyn Owner) -> Result<()> {
        self.complete(owner)?;
        self.wait(0, owner)
    }

    // moves the state into the list of a trace's inputs; `put_back` is the inverse
    fn take(&mut self, call: Call) -> Vec<Array> {
        let mut inputs = std::mem::take(&mut self.parameters);
        inputs.append(&mut self.shared);
        inputs.append(&mut self.state);
        inputs.extend(call.others);
        inputs.extend(call.rest);
        inputs
    }

    fn put_back(&mut self, mut inputs: Vec<Array>) {
        let mut rest = inputs.split_off(self.layout.tensors().len());
        self.parameters = inputs;
        let mut state = rest.split_off(self.layout.shared().count());
        self.shared = rest;
        state.truncate(self.places.len);
        self.state = state;
    }

    // no array but those that changed: what an evaluation is asked for, no later one can take over before it is done
    fn dispatch(
        &mut self,
        outputs: &Outputs,
        changed: &[usize],
        owner: &mut dyn Owner,
    ) -> Result<()> {
        let started = Instant::now();
        let mut sent = Ok(());
        let before = active();
        owner.unlocked(&mut || {
            let arrays = outputs.before_update().chain(&self.fresh);
            sent = async_eval(arrays.chain(changed.iter().map(|&index| &self.state[index])));
        });
        self.handed_over += active().saturating_sub(before);
        self.show()?;
        self.seconds.evaluate += started.elapsed().as_secs_f64();
        let Err(error) = sent else {
            return Ok(());
        };
        let no_memory = ["malloc", "out of memory"];
        if !no_memory.iter().any(|words| error.what().contains(words)) {
            return Err(self.lost(error, owner));
        }
        self.failed = true;
        memory::clear_cache(); // what found no memory stays lazy: once more, all of it
        self.complete(owner)
    }

    // parameters as views into the new buffers
    fn show(&mut self) -> Result<()> {
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

    fn fly(&mut self, done: Option<Array>) {
        let bytes = std::mem::take(&mut self.handed_over);
        self.in_flight
            .extend(done.map(|done| Flight { done, bytes }));
    }

    // before another step is handed to the device; the one that is there has been built meanwhile
    fn make_room(&mut self, owner: &mut dyn Owner) -> Result<()> {
        let held: usize = self.in_flight.iter().map(|flight| flight.bytes).sum();
        let others = self.max_in_flight.saturating_sub(1);
        self.wait(if held > OVERLAP_BYTES { 0 } else { others }, owner)
    }

    fn wait(&mut self, in_flight: usize, owner: &mut dyn Owner) -> Result<()> {
        let started = Instant::now();
        while self.in_flight.len() > in_flight {
            let Some(flight) = self.in_flight.pop_front() else {
                break;
            };
            if let Err(error) = evaluate(std::iter::once(&flight.done), owner) {
                return Err(self.lost(error, owner));
            }
        }
        self.seconds.wait += started.elapsed().as_secs_f64();
        Ok(())
    }

    // what is lazy by now is computed, from whatever there is, so that nobody who reads it meets the error once more
    fn lost(&mut self, error: Exception, owner: &mut dyn Owner) -> Error {
        self.failed = true;
        self.in_flight.clear();
        let kept = || {
            self.shared
                .iter()
                .chain(&self.parameters)
                .chain(&self.state)
        };
        for _ in 0..MAX_FAILURES {
            owner.unlocked(&mut || array::settle(kept()));
            if evaluate(kept(), owner).is_ok() {
                break;
            }
        }
        Error::Device(error)
    }

    // after a failure: compute what is still lazy
    fn complete(&mut self, owner: &mut dyn Owner) -> Result<()> {
        if !self.failed {
            return Ok(());
        }
        let arrays = self.shared.iter().chain(&self.parameters);
        evaluate(arrays.chain(&self.state), owner).map_err(Error::Device)?;
        self.failed = false;
        Ok(())
    }
}

// the bytes in use; none where MLX does not say, which is no reason to leave a step half done
fn active() -> usize {
    active_memory().unwrap_or(0)
}

// the graph of a trace
fn build(trace: &mut Trace, inputs: &[Array], owner: &mut dyn Owner) -> MlxResult<Outputs> {
    let outputs = trace.call(inputs);
    if trace.has_traced() {
        owner.clean();
    }
    let outputs = outputs?;
    fused::in_place(outputs.update())?;
    Ok(outputs)
}

// everything that comes before the update, then a part of the update, while the old state is held
fn try_out(outputs: &Outputs, owner: &mut dyn Owner) -> MlxResult<()> {
    evaluate(outputs.before_update(), owner)?;
    evaluate(trial(outputs), owner)
}

// the part of the update that a first evaluation tries out
pub(crate) fn trial(outputs: &Outputs) -> Vec<&Array> {
    let mut update: Vec<&Array> = outputs.update().collect();
    update.sort_by_key(|array| array.nbytes());
    let mut bytes = 0;
    let trial = update.into_iter().take_while(|array| {
        let fits = bytes == 0 || bytes + array.nbytes() <= TRIAL_BYTES;
        bytes += array.nbytes();
        fits
    });
    trial.collect()
}

fn evaluate<'a>(
    arrays: impl IntoIterator<Item = &'a Array>,
    owner: &mut dyn Owner,
) -> MlxResult<()> {
    let mut arrays = Some(arrays.into_iter());
    let mut result = Ok(());
    owner.unlocked(&mut || {
        if let Some(arrays) = arrays.take() {
            result = eval(arrays);
        }
    });
    result
}
