//! A step as one function over arrays, traced once: loss, gradients, norm, clipping and update.
//!
//! The function's inputs and outputs are plain lists of arrays in a fixed order, so that MLX can compile it, and
//! an evaluation needs to know nothing of what is in it.
use std::{
    cell::{Cell, RefCell},
    rc::Rc,
};

use mlx_rs::{
    error::{Exception, Result as MlxResult},
    transforms::{compile::compile, fallible_vjp},
    Array,
};

use super::{
    body::{Body, CompiledUpdate},
    captured::CaptureState,
    host::Host,
    inputs::{Inputs, Versions},
    options::Replay,
    outputs::{OutputCounts, Outputs},
    recipe::Recipe,
};
use crate::{
    error::{Error, Result},
    evaluation::Evaluated,
    mlx::{array, caller::Caller, fuse, quantized, tape::Tape},
};

type Function = Box<dyn FnMut(&[Array]) -> MlxResult<Vec<Array>>>;

/// What of a step MLX compiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compiled {
    /// All of it: the host is called once.
    Whole,
    /// The update by rules of this crate, whose kernels write over parameters and state: the host is called at every call.
    Update,
    /// Nothing, which needs no compiler.
    Nothing,
}

/// A step's function for one signature of its inputs.
pub struct Trace {
    function: Function,
    counts: Rc<RefCell<OutputCounts>>,
    /// The computation.
    pub recipe: Rc<Recipe>,
    traced: Rc<Cell<usize>>, // the identity of the first input that the body saw
    exchanges: Rc<Cell<u64>>, // a number of what a body over shards exchanges with other ranks
    error: Rc<RefCell<Option<Error>>>, // the body's own, which MLX's compilation loses
    compiled: Compiled,
    eager: bool,
    tape: Option<Tape>,     // of what MLX has compiled, from the second call on
    fits: Option<Versions>, // the lists of the last inputs of the tape: of these, all arrays have the forms of its inputs
    pub(crate) evaluated: Evaluated,
    pub(crate) caller: Caller,
    pub(crate) usual: Option<usize>, // the bytes that another batch has taken
    pub(crate) operations: usize, // of its graph, and whether they exchange arrays with other ranks; known once evaluated
    pub(crate) collective: bool,
    pub(crate) capture: CaptureState,
}

impl std::fmt::Debug for Trace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Trace")
            .field("recipe", &self.recipe)
            .field("evaluated", &self.evaluated)
            .finish_non_exhaustive()
    }
}

impl Trace {
    /// A trace of the same, which is made once more.
    #[must_use]
    pub fn again(&self, host: Rc<dyn Host>) -> Self {
        let compiled = match self.compiled {
            Compiled::Whole if self.eager => Compiled::Nothing, // there is no compiler
            compiled => compiled,
        };
        Self::new((*self.recipe).clone(), host, compiled)
    }

    /// A trace that is made at its first call.
    pub fn new(recipe: Recipe, host: Rc<dyn Host>, compiled: Compiled) -> Self {
        let whole = compiled == Compiled::Whole;
        let recipe = Rc::new(recipe);
        let counts = Rc::new(RefCell::new(OutputCounts::default()));
        let traced = Rc::new(Cell::new(0));
        let exchanges = Rc::new(Cell::new(0));
        let error = Rc::new(RefCell::new(None));
        let body = {
            let (recipe, counts, traced) = (recipe.clone(), counts.clone(), traced.clone());
            let (exchanges, error) = (exchanges.clone(), error.clone());
            let update = (compiled == Compiled::Update).then(CompiledUpdate::default);
            move |inputs: &[Array]| -> MlxResult<Vec<Array>> {
                traced.set(inputs.first().map_or(0, array::id));
                let note = |to: fn(Exception) -> Error| {
                    let error = &error;
                    move |e: Exception| {
                        let what = Exception::custom(e.what());
                        error.replace(Some(to(e))); // itself: it knows its place
                        what
                    }
                };
                let made = Body::new(&recipe, &*host, !whole, update.as_ref()).trace(inputs);
                let (values, made) = made.map_err(note(Error::Trace))?.flatten();
                quantized::rewrite(inputs, &values).map_err(note(Error::Compile))?;
                counts.replace(made);
                let values = if whole {
                    array::rewritten(&values).map_err(note(Error::Compile))?
                } else {
                    values
                };
                if recipe.shards.is_none() {
                    return Ok(values);
                }
                let (values, number) =
                    array::exchange_in_order(&values).map_err(note(Error::Trace))?;
                exchanges.set(number);
                Ok(values)
            }
        };
        let function: Function = if whole {
            Box::new(compile(body, false))
        } else {
            Box::new(body)
        };
        Self {
            function,
            counts,
            recipe,
            traced,
            exchanges,
            error,
            compiled,
            eager: !whole,
            tape: None,
            fits: None,
            evaluated: Evaluated::default(),
            caller: Caller::default(),
            usual: None,
            operations: 0,
            collective: false,
            capture: CaptureState::default(),
        }
    }

    /// Return whether the host is called at every call: where not all is compiled, and where MLX compiles nothing because it
    /// finds no compiler or has been told not to.
    #[must_use]
    pub fn is_eager(&self) -> bool {
        self.eager
    }

    /// Return whether a part of it, or all, is not to be compiled.
    #[must_use]
    pub fn is_partial(&self) -> bool {
        self.compiled != Compiled::Whole
    }

    /// Expect a batch of other shapes, which has never been evaluated: one that calls the host takes any.
    pub fn expect_others(&mut self) {
        self.evaluated.tried = false;
        self.usual = self.evaluated.bytes.take().or(self.usual);
    }

    /// Its capture, or why it is not replayed; none where that is not asked for.
    pub(crate) fn replayed(&self) -> Option<String> {
        (self.recipe.options.replay != Replay::Never).then(|| self.capture.to_string())
    }

    /// Return the reason why it is not replayed, although that is asked for.
    #[must_use]
    pub fn not_replayed(&self) -> Option<&str> {
        let asked = self.recipe.options.replay == Replay::Always;
        self.capture.refused.as_deref().filter(|_| asked)
    }

    /// The model's other arrays that the step writes, by index, and whether it writes the random key; known once it has
    /// been called.
    pub(crate) fn written(&self) -> (Vec<usize>, bool) {
        self.counts.borrow().written()
    }

    // a number of what its last call exchanges with other ranks, where it is one over shards
    pub(crate) fn exchanges(&self) -> u64 {
        self.exchanges.get()
    }

    // the arrays of the state that it writes
    pub(crate) fn written_state(&self) -> Vec<usize> {
        self.counts.borrow().written_state()
    }

    // whether its last call had new parameters among its outputs
    pub(crate) fn sets_parameters(&self) -> bool {
        self.counts.borrow().sets_parameters()
    }

    /// Build the graph of a step over `inputs`: parameters, shared buffers, state, others, key, batch.
    ///
    /// # Errors
    /// [`Error::Trace`] of the body, [`Error::Compile`] behind a body that succeeded.
    pub(crate) fn call(&mut self, inputs: &Inputs) -> Result<Outputs> {
        let outputs = match self.taped(inputs)? {
            Some(outputs) => outputs,
            None => self.compiled(&inputs.all())?,
        };
        Outputs::split(outputs, self.counts.borrow().clone()).map_err(Error::Trace)
    }

    // the outputs by the tape, where there is one and it is one of inputs like these
    fn taped(&mut self, inputs: &Inputs) -> Result<Option<Vec<Array>>> {
        let Some(tape) = &self.tape else {
            return Ok(None);
        };
        let versions = inputs.versions();
        let (handles, first, held) = inputs.handles();
        let fits = self.fits.as_ref() == Some(&versions);
        let known = if fits { first..first + held } else { 0..0 };
        let outputs = tape.build(&handles, known).map_err(Error::Trace)?;
        self.fits = outputs.is_some().then_some(versions);
        Ok(outputs)
    }

    // the outputs by MLX's compilation, which calls the body for inputs like which there have been none
    fn compiled(&mut self, inputs: &[Array]) -> Result<Vec<Array>> {
        self.traced.set(0);
        let outputs = (self.function)(inputs);
        let outputs = outputs.map_err(|error| self.failed(error))?;
        fuse::in_blocks(&outputs).map_err(Error::Trace)?;
        if self.traced.get() != 0 {
            // a compiled call passes tracers to the body, an eager call the input arrays themselves
            self.eager = inputs.first().map(array::id) == Some(self.traced.get());
        } else if !self.eager {
            let tape = Tape::of(&mut self.function, inputs);
            self.tape = Some(tape.map_err(|error| self.failed(error))?);
        }
        Ok(outputs)
    }

    // the body's own error, where that is why MLX's compilation failed
    fn failed(&self, error: Exception) -> Error {
        match self.error.take() {
            Some(error) => {
                take_closure_error();
                error
            }
            None => Error::Compile(error),
        }
    }
}

// mlx-rs keeps what a closure has returned for the next transformation that fails, and compiling does not ask for it
fn take_closure_error() {
    let one = Array::from_f32(1.0);
    let fails = |_: &[Array]| Err(Exception::custom("no error"));
    let one = std::slice::from_ref(&one);
    let _ = fallible_vjp(fails, one, one);
}
