//! How a step is evaluated: its arrays, one evaluation with a handful of outputs, a bounded number of steps in flight.
//!
//! Between two steps the engine holds every array of the state once. For the evaluation it lets go of all of them, so
//! that MLX can write the new values into the old memory; whoever shows the arrays to a user lets go too, when
//! [`Owner::release`] is called, and shows the new ones afterwards.
use std::{collections::VecDeque, rc::Rc};

use mlx_rs::{
    error::{Exception, Result as MlxResult},
    transforms::{async_eval, eval},
    Array,
};

use crate::{
    error::{Error, Result},
    layout::Layout,
    trace::{Outline, Trace},
};

/// Of a first evaluation's update, so many bytes are computed while the old state is still held: enough to meet every
/// kernel, little enough not to need the memory twice.
const TRIAL_BYTES: usize = 64 << 20;

/// Who else refers to the arrays of a step.
pub trait Owner {
    /// Let go of the arrays of parameters and state: their memory is about to be reused.
    fn release(&mut self);

    /// Run work that waits for the device, with whatever lock the caller holds released.
    fn unlocked(&mut self, work: &mut dyn FnMut());
}

/// Nobody else does.
impl Owner for () {
    fn release(&mut self) {}

    fn unlocked(&mut self, work: &mut dyn FnMut()) {
        work();
    }
}

/// The arrays that a step reads beside parameters and state.
#[derive(Debug)]
pub struct Call {
    /// The model's other arrays.
    pub others: Vec<Array>,
    /// The random key.
    pub key: Array,
    /// The arrays of the batch.
    pub batch: Vec<Array>,
}

/// What a step gives beside new parameters and state.
#[derive(Debug)]
pub struct Output {
    /// The loss.
    pub loss: Array,
    /// What the loss function returned beside it.
    pub aux: Vec<Array>,
    /// The gradients' global norm before clipping, where they are clipped or guarded.
    pub norm: Option<Array>,
    /// Whether the step was not taken, a bool scalar, where it is guarded.
    pub skipped: Option<Array>,
    /// Gradients: by tensor of a trace without an update, by buffer where the recipe keeps them.
    pub gradients: Vec<Array>,
    /// Buffers of the model that were written, with their index among the others.
    pub others: Vec<(usize, Array)>,
    /// State arrays that were written, by index.
    pub state: Vec<usize>,
    /// The random key, where it was drawn from.
    pub key: Option<Array>,
}

/// Parameters and optimizer state of one model, and the steps in flight.
#[derive(Debug)]
pub struct Engine {
    layout: Rc<Layout>,
    parameters: Vec<Array>,
    shared: Vec<Array>,
    state: Vec<Array>,
    states: usize,
    fresh: Vec<Array>,
    in_flight: VecDeque<Array>,
    failed: bool,
}

impl Engine {
    /// Take over parameters (by tensor) and state; small parameters are joined into shared buffers.
    ///
    /// # Errors
    /// [`Error::NoParameters`], or an array that cannot be evaluated.
    pub fn new(layout: Rc<Layout>, parameters: Vec<Array>, state: Vec<Array>) -> Result<Self> {
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
            states: state.len(),
            state,
            fresh: Vec::new(),
            in_flight: VecDeque::new(),
            failed: false,
        };
        engine.pack()?;
        Ok(engine)
    }

    /// Where the parameters lie.
    #[must_use]
    pub fn layout(&self) -> &Rc<Layout> {
        &self.layout
    }

    /// The parameters, by tensor.
    #[must_use]
    pub fn parameters(&self) -> &[Array] {
        &self.parameters
    }

    /// The optimizer's arrays.
    #[must_use]
    pub fn state(&self) -> &[Array] {
        &self.state
    }

    /// Put another value into the optimizer's state.
    pub fn set_state(&mut self, index: usize, value: Array) {
        self.state[index] = value;
    }

    /// Put other values into parameters; the buffers in which they lie are joined anew.
    ///
    /// # Errors
    /// An array that cannot be evaluated.
    pub fn set_parameters(&mut self, values: Vec<(usize, Array)>) -> Result<()> {
        for (index, value) in values {
            self.parameters[index] = value;
        }
        self.pack()
    }

    fn pack(&mut self) -> Result<()> {
        let shared = self.layout.shared();
        let packed = shared.map(|buffer| self.layout.pack_one(buffer, &self.parameters));
        self.shared = packed.collect::<MlxResult<_>>()?;
        eval(
            self.shared
                .iter()
                .chain(&self.parameters)
                .chain(&self.state),
        )?;
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

    /// One step: parameters and state become the new ones, lazily; at most `in_flight` steps wait for the device.
    ///
    /// # Errors
    /// [`Error::Trace`] and [`Error::FirstEvaluation`] leave everything as it was.
    pub fn step(
        &mut self,
        trace: &mut Trace,
        call: Call,
        in_flight: usize,
        owner: &mut dyn Owner,
    ) -> Result<Output> {
        self.complete(owner)?;
        let inputs = self.take(call);
        let traced = trace.call(&inputs);
        let traced =
            traced.and_then(|(values, outline)| Ok((Outputs::split(values, &outline)?, outline)));
        let (mut outputs, outline) = match traced {
            Ok(traced) => traced,
            Err(error) => {
                self.put_back(inputs);
                return Err(Error::Trace(error));
            }
        };
        if !trace.warm {
            if let Err(error) = try_out(&outputs, owner) {
                self.put_back(inputs);
                return Err(Error::FirstEvaluation(error));
            }
            trace.warm = true;
        }
        owner.release();
        if !trace.recipe.keep_gradients {
            outputs.gradients.clear();
        }
        self.adopt(inputs, &mut outputs, &outline);
        self.dispatch(&outputs, owner)?;
        self.wait(in_flight, owner)?;
        Ok(outputs.into_output(outline))
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
    ) -> Result<Output> {
        self.complete(owner)?;
        let inputs = self.take(call);
        let traced = trace.call(&inputs);
        self.put_back(inputs);
        let (outputs, outline) = traced.map_err(Error::Trace)?;
        let outputs = Outputs::split(outputs, &outline).map_err(Error::Trace)?;
        evaluate(outputs.before_update(), owner).map_err(Error::FirstEvaluation)?;
        Ok(outputs.into_output(outline))
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
        inputs.push(call.key);
        inputs.extend(call.batch);
        inputs
    }

    fn put_back(&mut self, mut inputs: Vec<Array>) {
        let mut rest = inputs.split_off(self.layout.tensors().len());
        self.parameters = inputs;
        let mut state = rest.split_off(self.layout.shared().count());
        self.shared = rest;
        state.truncate(self.states);
        self.state = state;
    }

    // the new parameters and state in the place of the old ones, of which nothing is kept
    fn adopt(&mut self, inputs: Vec<Array>, outputs: &mut Outputs, outline: &Outline) {
        self.put_back(inputs);
        for (&index, array) in outline.state.iter().zip(outputs.state.drain(..)) {
            self.state[index] = array;
        }
        self.parameters.clear();
        self.shared.clear();
        self.fresh = std::mem::take(&mut outputs.parameters);
    }

    fn dispatch(&mut self, outputs: &Outputs, owner: &mut dyn Owner) -> Result<()> {
        let arrays = || {
            let rest = outputs.before_update().chain(&outputs.others);
            rest.chain(&outputs.key)
                .chain(&self.fresh)
                .chain(&self.state)
        };
        let mut sent = Ok(());
        owner.unlocked(&mut || sent = async_eval(arrays()));
        self.show()?;
        self.in_flight.push_back(outputs.loss.clone());
        if sent.is_err() {
            self.failed = true; // what was not computed stays lazy: once more, all of it
            self.complete(owner)?;
        }
        Ok(())
    }

    // parameters as views into the new buffers
    fn show(&mut self) -> Result<()> {
        let buffers = std::mem::take(&mut self.fresh);
        self.parameters = self.layout.views(&buffers)?;
        let shared: Vec<usize> = self.layout.shared().collect();
        let buffers = buffers.into_iter().enumerate();
        let buffers = buffers.filter(|(buffer, _)| shared.contains(buffer));
        self.shared = buffers.map(|(_, array)| array).collect();
        Ok(())
    }

    fn wait(&mut self, in_flight: usize, owner: &mut dyn Owner) -> Result<()> {
        while self.in_flight.len() > in_flight {
            let Some(loss) = self.in_flight.pop_front() else {
                break;
            };
            if let Err(error) = evaluate(std::iter::once(&loss), owner) {
                self.failed = true;
                return Err(Error::Device(error));
            }
        }
        Ok(())
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

// everything that comes before the update, then a part of the update, while the old state is held
fn try_out(outputs: &Outputs, owner: &mut dyn Owner) -> MlxResult<()> {
    let before = outputs.before_update().chain(&outputs.others);
    evaluate(before.chain(&outputs.key), owner)?;
    let mut update: Vec<&Array> = outputs.parameters.iter().chain(&outputs.state).collect();
    update.sort_by_key(|array| array.nbytes());
    let mut bytes = 0;
    let trial = update.into_iter().take_while(|array| {
        let fits = bytes == 0 || bytes + array.nbytes() <= TRIAL_BYTES;
        bytes += array.nbytes();
        fits
    });
    let trial: Vec<&Array> = trial.collect();
    evaluate(trial, owner)
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

/// A trace's outputs, named.
struct Outputs {
    loss: Array,
    aux: Vec<Array>,
    kept: Vec<Array>,
    norm: Option<Array>,
    skipped: Option<Array>,
    gradients: Vec<Array>,
    parameters: Vec<Array>,
    state: Vec<Array>,
    others: Vec<Array>,
    key: Option<Array>,
}

impl Outputs {
    fn split(outputs: Vec<Array>, outline: &Outline) -> MlxResult<Self> {
        let mut outputs = outputs.into_iter();
        let short = || Exception::custom("a traced step returned too few arrays");
        let loss = outputs.next().ok_or_else(short)?;
        let mut take = |n: usize| outputs.by_ref().take(n).collect::<Vec<_>>();
        Ok(Self {
            loss,
            aux: take(outline.aux),
            kept: take(outline.kept),
            norm: take(usize::from(outline.norm)).pop(),
            skipped: take(usize::from(outline.skipped)).pop(),
            gradients: take(outline.gradients),
            parameters: take(outline.parameters),
            state: take(outline.state.len()),
            others: take(outline.others.len()),
            key: take(usize::from(outline.key)).pop(),
        })
    }

    fn before_update(&self) -> impl Iterator<Item = &Array> {
        let values = std::iter::once(&self.loss)
            .chain(&self.aux)
            .chain(&self.kept);
        values
            .chain(&self.norm)
            .chain(&self.skipped)
            .chain(&self.gradients)
    }

    fn into_output(self, outline: Outline) -> Output {
        Output {
            loss: self.loss,
            aux: self.aux,
            norm: self.norm,
            skipped: self.skipped,
            gradients: self.gradients,
            others: outline.others.into_iter().zip(self.others).collect(),
            state: outline.state,
            key: self.key,
        }
    }
}
