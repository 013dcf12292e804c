//! What a step computes: loss, gradients, norm, clipping and update as one function over arrays, traced once.
//!
//! The function's inputs and outputs are plain lists of arrays in a fixed order, so that MLX can compile it, and
//! whoever evaluates it needs to know nothing of what is in it.
use std::{
    cell::{Cell, RefCell},
    rc::Rc,
};

use mlx_rs::{
    error::{Exception, Result},
    transforms::compile::compile,
    Array, Dtype,
};

use crate::{
    array,
    body::Body,
    extras::Places,
    guard::Guard,
    layout::Layout,
    outputs::{Outline, Outputs},
    rules::Rules,
};

/// What the loss is computed from.
#[derive(Clone, Copy, Debug)]
pub struct LossCall<'a> {
    /// The trainable tensors, in the order of the layout, in the dtype to compute in.
    pub parameters: &'a [Array],
    /// The model's other arrays: frozen parameters and buffers.
    pub others: &'a [Array],
    /// The arrays of the batch, float32 ones in the dtype to compute in.
    pub batch: &'a [Array],
    /// The random key.
    pub key: &'a Array,
}

/// Result of one loss call.
#[derive(Debug)]
pub struct LossOutput {
    /// The scalar to differentiate.
    pub loss: Array,
    /// What the loss is a mean over, a scalar: the weight of this batch among those of a window; `None`: each counts as one.
    pub weight: Option<Array>,
    /// Arrays that the caller gets beside the loss.
    pub aux: Vec<Array>,
    /// Trainable tensors to which the loss assigned, with their index.
    pub parameters: Vec<(usize, Array)>,
}

impl LossOutput {
    /// Of a loss alone.
    #[must_use]
    pub fn new(loss: Array) -> Self {
        Self {
            loss,
            weight: None,
            aux: Vec::new(),
            parameters: Vec::new(),
        }
    }
}

/// Arrays that differ from what they were before a loss was differentiated.
#[derive(Debug, Default)]
pub struct Left {
    /// Buffers: other arrays to which the loss assigned, with their index.
    pub others: Vec<(usize, Array)>,
    /// Arrays that the model keeps beyond its slots and that have to be evaluated with the step.
    pub kept: Vec<Array>,
    /// The random key, where the loss drew from it.
    pub key: Option<Array>,
}

/// What an optimizer that is not native is given: lists by tensor, and the arrays of its state.
#[derive(Clone, Copy, Debug)]
pub struct UpdateCall<'a> {
    /// The clipped gradients.
    pub gradients: &'a [Array],
    /// The parameters to update.
    pub parameters: &'a [Array],
    /// The optimizer's arrays.
    pub state: &'a [Array],
}

/// What such an optimizer gives back.
#[derive(Debug)]
pub struct UpdateOutput {
    /// The new parameters, all of them.
    pub parameters: Vec<Array>,
    /// The state arrays that changed, with their index.
    pub state: Vec<(usize, Array)>,
}

/// Whose model, loss and optimizer are traced. Called while tracing only.
pub trait Host {
    /// Differentiate the loss: `work` calls [`Host::loss`], and may call parts of the loss again, as gradient checkpointing
    /// does. The model is put back afterwards, and not before.
    ///
    /// `others` and `key` are as in [`LossCall`].
    ///
    /// # Errors
    /// Those of `work`, and what the loss leaves in a model that cannot be put back.
    fn differentiate(
        &self,
        others: &[Array],
        key: &Array,
        work: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Left> {
        let _ = (others, key);
        work().map(|()| Left::default())
    }

    /// Look at the graph of a trace with a loss before it is compiled; what the outputs are computed from may be replaced.
    ///
    /// # Errors
    /// It ends the trace.
    fn traced(&self, inputs: &[Array], outputs: &[Array]) -> Result<()> {
        let _ = (inputs, outputs);
        Ok(())
    }

    /// Compute the loss.
    ///
    /// # Errors
    /// Whatever the loss raises; it ends the trace.
    fn loss(&self, call: LossCall) -> Result<LossOutput>;

    /// The learning rate of a rule's schedule after `step` updates; `None` where it is not scheduled on the device.
    ///
    /// `rule`: its number in [`Rules::rules`].
    ///
    /// # Errors
    /// Whatever the schedule raises.
    fn learning_rate(&self, rule: usize, step: &Array) -> Result<Option<Array>>;

    /// Update by an optimizer of the host's own.
    ///
    /// # Errors
    /// Whatever the optimizer raises.
    fn update(&self, call: UpdateCall) -> Result<UpdateOutput>;
}

/// How parameters are updated.
#[derive(Clone, Debug, PartialEq)]
pub enum Rule {
    /// By rules of this crate. State: as [`Rules`] has it.
    Native(Rc<Rules>),
    /// By the host's optimizer. State: its arrays.
    Host,
}

/// Which part of a step is traced.
#[derive(Clone, Debug, PartialEq)]
pub enum Part {
    /// Loss, gradients and update.
    Whole(Rule),
    /// Loss and gradients, which are added to the window.
    Batch,
    /// The update by the window's average.
    Update(Rule),
    /// Loss and gradients by tensor.
    Gradients,
}

/// What to compute, apart from the model.
#[derive(Clone, Debug)]
pub struct Recipe {
    /// Which part of a step.
    pub part: Part,
    /// Where the trainable tensors lie.
    pub layout: Rc<Layout>,
    /// Where the arrays of the state stand.
    pub places: Places,
    /// The global norm to clip to.
    pub max_grad_norm: Option<f64>,
    /// The largest absolute value of a gradient's element, after clipping by norm.
    pub max_grad_value: Option<f64>,
    /// Which steps are not to be taken; `None` takes every one.
    pub guard: Option<Guard>,
    /// The dtype in which the loss is computed, while float32 masters are updated; `None`: that of the parameters.
    pub compute: Option<Dtype>,
    /// The decay of the parameters' moving average.
    pub ema_decay: Option<f64>,
    /// Whether the gradients are given out too, buffer by buffer.
    pub keep_gradients: bool,
    /// The number of other arrays: of the model, and what the loss reaches beside it.
    pub others: usize,
}

type Function = Box<dyn FnMut(&[Array]) -> Result<Vec<Array>>>;

/// A step's function for one signature of its inputs.
pub struct Trace {
    function: Function,
    outline: Rc<RefCell<Outline>>,
    pub(crate) recipe: Rc<Recipe>,
    traced: Rc<Cell<usize>>, // the identity of the first input that the body saw
    error: Rc<RefCell<Option<Exception>>>, // the body's own, which MLX's compilation loses
    eager: bool,
    pub(crate) warm: bool,
    pub(crate) bytes: Option<usize>, // the most memory that it took, alone
}

impl std::fmt::Debug for Trace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Trace")
            .field("recipe", &self.recipe)
            .field("warm", &self.warm)
            .finish_non_exhaustive()
    }
}

impl Trace {
    /// A trace that is made at its first call; without `compiled` the host is called at every call.
    pub fn new(recipe: Recipe, host: Rc<dyn Host>, compiled: bool) -> Self {
        let recipe = Rc::new(recipe);
        let outline = Rc::new(RefCell::new(Outline::default()));
        let traced = Rc::new(Cell::new(0));
        let error = Rc::new(RefCell::new(None));
        let body = {
            let (recipe, outline, traced) = (recipe.clone(), outline.clone(), traced.clone());
            let error = error.clone();
            move |inputs: &[Array]| -> Result<Vec<Array>> {
                traced.set(inputs.first().map_or(0, array::id));
                let made = Body::new(&recipe, &*host).trace(inputs);
                let made = made.map_err(|e| {
                    let what = Exception::custom(e.what());
                    error.replace(Some(e)); // itself: it knows its place
                    what
                })?;
                let (values, made) = made.flatten();
                if !matches!(recipe.part, Part::Update(_)) {
                    host.traced(inputs, &values)?;
                }
                outline.replace(made);
                Ok(values)
            }
        };
        let function: Function = if compiled {
            Box::new(compile(body, false))
        } else {
            Box::new(body)
        };
        Self {
            function,
            outline,
            recipe,
            traced,
            error,
            eager: !compiled,
            warm: false,
            bytes: None,
        }
    }

    /// Whether the host is called at every call: without `compiled`, and where MLX compiles nothing because it finds no
    /// compiler or has been told not to.
    #[must_use]
    pub fn is_eager(&self) -> bool {
        self.eager
    }

    /// Build the graph of a step over `inputs`: parameters, shared buffers, state, others, key, batch.
    pub(crate) fn call(&mut self, inputs: &[Array]) -> Result<Outputs> {
        self.traced.set(0);
        let outputs = (self.function)(inputs);
        let outputs = outputs.map_err(|error| self.error.take().unwrap_or(error))?;
        if self.traced.get() != 0 {
            // a trace sees tracers, an eager call the arrays themselves
            self.eager = inputs.first().map(array::id) == Some(self.traced.get());
        }
        Outputs::split(outputs, self.outline.borrow().clone())
    }
}
