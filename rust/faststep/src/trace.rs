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
    transforms::{compile::compile, value_and_grad_with_argnums},
    Array,
};

use crate::{
    array, clip,
    guard::{choose, Guard},
    layout::Layout,
    optimizer::Optimizer,
};

/// What the loss is computed from.
#[derive(Clone, Copy, Debug)]
pub struct LossCall<'a> {
    /// The trainable tensors, in the order of the layout.
    pub parameters: &'a [Array],
    /// The model's other arrays: frozen parameters and buffers.
    pub others: &'a [Array],
    /// The arrays of the batch.
    pub batch: &'a [Array],
    /// The random key.
    pub key: &'a Array,
}

/// What came of computing the loss.
#[derive(Debug)]
pub struct LossOutput {
    /// The scalar to differentiate.
    pub loss: Array,
    /// Arrays that the caller gets beside the loss.
    pub aux: Vec<Array>,
    /// Trainable tensors to which the loss assigned, with their index.
    pub parameters: Vec<(usize, Array)>,
    /// Buffers: other arrays to which the loss assigned, with their index.
    pub others: Vec<(usize, Array)>,
    /// Arrays that the model keeps beyond its slots and that have to be evaluated with the step.
    pub kept: Vec<Array>,
    /// The random key after the loss, where it drew from it.
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
    /// Compute the loss.
    ///
    /// # Errors
    /// Whatever the loss raises; it ends the trace.
    fn loss(&self, call: LossCall) -> Result<LossOutput>;

    /// The learning rate of a schedule after `step` updates; `None` where the rate is not scheduled on the device.
    ///
    /// # Errors
    /// Whatever the schedule raises.
    fn learning_rate(&self, step: &Array) -> Result<Option<Array>>;

    /// Update by an optimizer of the host's own.
    ///
    /// # Errors
    /// Whatever the optimizer raises.
    fn update(&self, call: UpdateCall) -> Result<UpdateOutput>;
}

/// How parameters are updated.
#[derive(Clone, Debug, PartialEq)]
pub enum Rule {
    /// By a rule of this crate. State: step, learning rate, then each moment's buffers.
    Native(Optimizer),
    /// By the host's optimizer. State: its arrays.
    Host,
    /// Not at all: loss and gradients only.
    None,
}

/// What to compute, apart from the model.
#[derive(Clone, Debug)]
pub struct Recipe {
    /// Where the trainable tensors lie.
    pub layout: Rc<Layout>,
    /// How they are updated.
    pub rule: Rule,
    /// The global norm to clip to.
    pub max_grad_norm: Option<f64>,
    /// Which steps are not to be taken; `None` takes every one.
    pub guard: Option<Guard>,
    /// Whether the gradients are given out too, buffer by buffer.
    pub keep_gradients: bool,
    /// The number of state arrays.
    pub state: usize,
    /// The number of other arrays of the model.
    pub others: usize,
}

/// How many outputs of each kind a traced function has, in their order.
#[derive(Clone, Debug, Default)]
pub(crate) struct Outline {
    pub aux: usize,
    pub kept: usize,
    pub norm: bool,
    pub skipped: bool,
    pub gradients: usize,
    pub parameters: usize,
    pub state: Vec<usize>,
    pub others: Vec<usize>,
    pub key: bool,
}

type Function = Box<dyn FnMut(&[Array]) -> Result<Vec<Array>>>;

/// A step's function for one signature of its inputs.
pub struct Trace {
    function: Function,
    outline: Rc<RefCell<Outline>>,
    pub(crate) recipe: Rc<Recipe>,
    traced: Rc<Cell<usize>>, // the identity of the first input that the body saw
    eager: bool,
    pub(crate) warm: bool,
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
        let body = {
            let (recipe, outline, traced) = (recipe.clone(), outline.clone(), traced.clone());
            move |inputs: &[Array]| -> Result<Vec<Array>> {
                traced.set(inputs.first().map_or(0, array::id));
                Body {
                    recipe: &recipe,
                    host: &*host,
                    outline: &outline,
                }
                .trace(inputs)
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
            eager: !compiled,
            warm: false,
        }
    }

    /// Whether the host is called at every call: without `compiled`, and where MLX compiles nothing because it finds no
    /// compiler or has been told not to.
    #[must_use]
    pub fn is_eager(&self) -> bool {
        self.eager
    }

    /// Build the graph of a step over `inputs`: parameters, shared buffers, state, others, key, batch.
    pub(crate) fn call(&mut self, inputs: &[Array]) -> Result<(Vec<Array>, Outline)> {
        self.traced.set(0);
        let outputs = (self.function)(inputs)?;
        if self.traced.get() != 0 {
            // a trace sees tracers, an eager call the arrays themselves
            self.eager = inputs.first().map(array::id) == Some(self.traced.get());
        }
        Ok((outputs, self.outline.borrow().clone()))
    }
}

struct Body<'a> {
    recipe: &'a Recipe,
    host: &'a dyn Host,
    outline: &'a RefCell<Outline>,
}

/// The function's inputs, named.
struct Inputs<'a> {
    parameters: &'a [Array],
    shared: &'a [Array],
    state: &'a [Array],
    others: &'a [Array],
    key: &'a Array,
    batch: &'a [Array],
}

impl Body<'_> {
    fn split<'a>(&self, inputs: &'a [Array]) -> Result<Inputs<'a>> {
        let layout = &self.recipe.layout;
        let short = || Exception::custom("a step was called with too few arrays");
        let take = |inputs: &'a [Array], n| inputs.split_at_checked(n).ok_or_else(short);
        let (parameters, rest) = take(inputs, layout.tensors().len())?;
        let (shared, rest) = take(rest, layout.shared().count())?;
        let (state, rest) = take(rest, self.recipe.state)?;
        let (others, rest) = take(rest, self.recipe.others)?;
        let (key, batch) = rest.split_first().ok_or_else(short)?;
        Ok(Inputs {
            parameters,
            shared,
            state,
            others,
            key,
            batch,
        })
    }

    fn trace(&self, inputs: &[Array]) -> Result<Vec<Array>> {
        let inputs = self.split(inputs)?;
        let (mut values, rebound, gradients) = self.differentiate(&inputs)?;
        let mut buffers_written = values.split_off(self.values_before_others());
        if self.recipe.rule == Rule::None {
            self.outline.borrow_mut().gradients = gradients.len();
            values.extend(gradients);
        } else {
            let gradients = self.recipe.layout.pack(&gradients)?;
            let good = self.update(&inputs, &rebound, gradients, &mut values)?;
            let written = &self.outline.borrow().others;
            for (new, &index) in buffers_written.iter_mut().zip(written) {
                *new = choose(good.as_ref(), new.clone(), &inputs.others[index])?;
            }
        }
        values.extend(buffers_written);
        Ok(values)
    }

    fn values_before_others(&self) -> usize {
        let outline = self.outline.borrow();
        1 + outline.aux + outline.kept
    }

    // loss, aux, kept, others, key; the parameters that the loss assigned; gradients by tensor
    #[allow(clippy::type_complexity)]
    fn differentiate(
        &self,
        inputs: &Inputs,
    ) -> Result<(Vec<Array>, Vec<(usize, Array)>, Vec<Array>)> {
        let rebound = RefCell::new(Vec::new());
        let loss = |parameters: &[Array]| -> Result<Vec<Array>> {
            let output = self.host.loss(LossCall {
                parameters,
                others: inputs.others,
                batch: inputs.batch,
                key: inputs.key,
            })?;
            let (written, others): (Vec<_>, Vec<_>) = output.others.into_iter().unzip();
            let (assigned, values_assigned): (Vec<_>, Vec<_>) =
                output.parameters.into_iter().unzip();
            rebound.replace(assigned);
            self.outline.replace(Outline {
                aux: output.aux.len(),
                kept: output.kept.len(),
                others: written,
                key: output.key.is_some(),
                ..Outline::default()
            });
            let mut values = vec![output.loss];
            values.extend(output.aux);
            values.extend(output.kept);
            values.extend(others);
            values.extend(output.key);
            values.extend(values_assigned);
            Ok(values)
        };
        let numbers = 0..i32::try_from(inputs.parameters.len()).unwrap_or(i32::MAX);
        let numbers: Vec<i32> = numbers.collect();
        let (mut values, gradients) =
            value_and_grad_with_argnums(loss, numbers.as_slice())(inputs.parameters)?;
        let rebound = rebound.into_inner();
        let assigned = values.split_off(values.len() - rebound.len());
        Ok((
            values,
            rebound.into_iter().zip(assigned).collect(),
            gradients,
        ))
    }

    // appends norm, skipped, gradients, parameters, state; gives whether the step is good
    fn update(
        &self,
        inputs: &Inputs,
        rebound: &[(usize, Array)],
        gradients: Vec<Array>,
        values: &mut Vec<Array>,
    ) -> Result<Option<Array>> {
        let recipe = self.recipe;
        let mut norm = None;
        if recipe.max_grad_norm.is_some() || recipe.guard.is_some() {
            norm = Some(clip::global_norm(&gradients)?);
        }
        let good = match (&recipe.guard, &norm) {
            (Some(guard), Some(norm)) => Some(guard.good(&values[0], norm)?),
            _ => None,
        };
        let clipped = match (recipe.max_grad_norm, &norm) {
            (Some(max_norm), Some(norm)) => clip::by_global_norm(&gradients, norm, max_norm)?,
            _ => gradients.clone(),
        };
        let updated = self.updated(inputs, rebound, &clipped, good.as_ref())?;
        let mut outline = self.outline.borrow_mut();
        outline.norm = norm.is_some();
        outline.skipped = good.is_some();
        outline.gradients = gradients.len();
        outline.parameters = updated.parameters.len();
        values.extend(norm);
        values.extend(good.as_ref().map(Array::logical_not).transpose()?);
        values.extend(gradients);
        values.extend(updated.parameters);
        for (index, array) in updated.state {
            outline.state.push(index);
            values.push(array);
        }
        Ok(good)
    }

    fn updated(
        &self,
        inputs: &Inputs,
        rebound: &[(usize, Array)],
        gradients: &[Array],
        good: Option<&Array>,
    ) -> Result<UpdateOutput> {
        let parameters = self.parameters(inputs, rebound)?;
        let mut output = match &self.recipe.rule {
            Rule::Native(rule) => self.native(rule, inputs, gradients, &parameters, good)?,
            Rule::Host | Rule::None => {
                let mut output = self.host.update(UpdateCall {
                    gradients,
                    parameters: &parameters,
                    state: inputs.state,
                })?;
                for (new, old) in output.parameters.iter_mut().zip(&parameters) {
                    *new = choose(good, new.clone(), old)?;
                }
                for (index, new) in &mut output.state {
                    *new = choose(good, new.clone(), &inputs.state[*index])?;
                }
                output
            }
        };
        if !rebound.is_empty() {
            // a step that is not taken leaves what was there before the loss
            let before = self.parameters(inputs, &[])?;
            for (new, old) in output.parameters.iter_mut().zip(&before) {
                *new = choose(good, new.clone(), old)?;
            }
        }
        Ok(output)
    }

    // the buffers to update: what the step was given, or what the loss assigned
    fn parameters(&self, inputs: &Inputs, rebound: &[(usize, Array)]) -> Result<Vec<Array>> {
        let layout = &self.recipe.layout;
        let mut parameters = inputs.parameters.to_vec();
        for (index, array) in rebound {
            parameters[*index] = array.clone();
        }
        let mut shared = inputs.shared.iter();
        let touched: Vec<usize> = rebound.iter().map(|(i, _)| layout.buffer_of(*i)).collect();
        (0..layout.len())
            .map(|buffer| match layout.single(buffer) {
                Some(tensor) => Ok(parameters[tensor].clone()),
                None => match shared.next() {
                    Some(flat) if !touched.contains(&buffer) => Ok(flat.clone()),
                    _ => layout.pack_one(buffer, &parameters),
                },
            })
            .collect()
    }

    fn native(
        &self,
        rule: &Optimizer,
        inputs: &Inputs,
        gradients: &[Array],
        parameters: &[Array],
        good: Option<&Array>,
    ) -> Result<UpdateOutput> {
        let [step, rate, moments @ ..] = inputs.state else {
            return Err(Exception::custom(
                "an update needs its step and learning rate",
            ));
        };
        let scheduled = self.host.learning_rate(step)?;
        let old_rate = rate;
        let rate = scheduled.as_ref().unwrap_or(rate);
        let old_step = step;
        let step = step.add(Array::from_int(1).as_dtype(step.dtype())?)?;
        let buffers = parameters.len();
        let mut state = Vec::with_capacity(inputs.state.len());
        let mut updated = Vec::with_capacity(buffers);
        for (buffer, (gradient, parameter)) in gradients.iter().zip(parameters).enumerate() {
            let places: Vec<usize> = (buffer..moments.len()).step_by(buffers).collect();
            let old: Vec<Array> = places.iter().map(|&i| moments[i].clone()).collect();
            let (parameter, new) = rule.update(gradient, parameter, &old, rate, &step, good)?;
            updated.push(parameter);
            state.extend(places.into_iter().map(|i| i + 2).zip(new));
        }
        state.push((0, choose(good, step, old_step)?));
        if let Some(rate) = scheduled {
            state.push((1, choose(good, rate, old_rate)?));
        }
        Ok(UpdateOutput {
            parameters: updated,
            state,
        })
    }
}
