//! A module with its loss function while a step is traced.
//!
//! Tracers are put where the arrays are, the loss function is called, what it assigned is read off, and the module is left
//! without arrays, whether the function returned, failed or panicked.
use std::{
    any::Any,
    cell::{Cell, RefCell},
    panic::{catch_unwind, AssertUnwindSafe},
    rc::Rc,
};

use mlx_rs::{
    error::{Exception, Result as MlxResult},
    module::ModuleParameters,
    Array,
};

use super::{loss::Loss, slots::Slots};
use crate::{
    layout::Tensor,
    mlx::{array, random},
    optim::{LearningRate, UpdateOutput},
    trace::{Host, Left, LossCall, LossOutput, Options, Role, UpdateCall},
};

/// End of a trace other than by an error of MLX.
pub(crate) enum Stop {
    /// The loss function panicked.
    Panic(Box<dyn Any + Send>),
    /// It reads the value of a tracer.
    Reads,
}

pub(crate) type LossFunction<M> = Box<dyn FnMut(&mut M, &[Array]) -> MlxResult<Loss>>;

/// A module with its loss function, as the engine's host. Between calls the module is empty or shown to the user.
pub(crate) struct ModuleHost<M> {
    pub(crate) model: RefCell<M>,
    pub(crate) slots: RefCell<Rc<Slots>>,
    pub(crate) rates: RefCell<Vec<LearningRate>>,
    /// True if the loss is computed in another dtype than the parameters': then it may assign in that one.
    pub(crate) mixed: bool,
    compiled: bool,
    pub(crate) stop: Cell<Option<Stop>>,
    loss: RefCell<LossFunction<M>>,
    left: RefCell<Left>, // of the loss call under way
}

impl<M: ModuleParameters> ModuleHost<M> {
    pub(crate) fn new(
        model: M,
        loss: LossFunction<M>,
        rates: Vec<LearningRate>,
        options: &Options,
    ) -> Self {
        Self {
            model: RefCell::new(model),
            slots: RefCell::default(),
            rates: RefCell::new(rates),
            mixed: options.compute_dtype.is_some(),
            compiled: options.compile,
            stop: Cell::new(None),
            loss: RefCell::new(loss),
            left: RefCell::default(),
        }
    }

    // pass the stop to the step directly: MLX does not preserve the error's payload
    fn stopped(&self, stop: Stop) -> Exception {
        self.stop.set(Some(stop));
        Exception::custom("the loss function was stopped")
    }

    fn call(&self, model: &mut M, batch: &[Array]) -> MlxResult<Loss> {
        let mut loss = self.loss.borrow_mut();
        let refused = array::refused_reads();
        let returned = catch_unwind(AssertUnwindSafe(|| loss(model, batch)));
        // it may have dropped the error and returned what an array without a value gives
        if self.compiled && array::refused_reads() > refused {
            return Err(self.stopped(Stop::Reads));
        }
        returned.unwrap_or_else(|payload| Err(self.stopped(Stop::Panic(payload))))
    }

    // collect the arrays that the loss assigned to the module's slots
    fn assigned(
        &self,
        model: &M,
        call: &LossCall,
        output: &mut LossOutput,
        left: &mut Left,
    ) -> MlxResult<()> {
        let slots = self.slots.borrow();
        let arrays = model.parameters().flatten();
        if arrays.len() != slots.len() {
            let what =
                "the loss function: expected the module's parameters, it adds or removes some";
            return Err(Exception::custom(what));
        }
        for (name, now) in arrays {
            let (tracer, assigned, index) = match slots.role(&name) {
                Some(Role::Parameter(i)) => (&call.parameters[i], &mut output.parameters, i),
                Some(Role::Other(i)) => (&call.others[i], &mut left.others, i),
                None => return Err(Exception::custom(format!("the loss function adds {name}"))),
            };
            if array::id(now) != array::id(tracer) {
                assigned.push((index, self.fitting(&name, now, tracer)?));
            }
        }
        output.parameters.sort_by_key(|(index, _)| *index); // a map's order is another one each time
        left.others.sort_by_key(|(index, _)| *index);
        Ok(())
    }

    // the array assigned in place of `tracer`, cast to its dtype in mixed precision
    fn fitting(&self, name: &str, now: &Array, tracer: &Array) -> MlxResult<Array> {
        let cast = self.mixed && now.dtype().is_float() && tracer.dtype().is_float();
        let dtype = if cast { tracer.dtype() } else { now.dtype() };
        let now = now.as_dtype(dtype)?;
        let (wanted, got) = (Tensor::of(tracer), Tensor::of(&now));
        if got == wanted {
            return Ok(now);
        }
        Err(Exception::custom(format!(
            "{name}: expected {:?} {:?}, the loss function assigns {:?} {:?}",
            wanted.dtype, wanted.shape, got.dtype, got.shape
        )))
    }

    fn traced(&self, model: &mut M, call: &LossCall) -> MlxResult<LossOutput> {
        self.slots.borrow().fill(model, |role| match role {
            Role::Parameter(i) => call.parameters.get(i).cloned(),
            Role::Other(i) => call.others.get(i).cloned(),
        });
        let (loss, key) = random::draw_from(call.key, || self.call(model, call.batch))?;
        if let Some(weight) = loss.weight.as_ref().filter(|weight| weight.ndim() > 0) {
            return Err(Exception::custom(format!(
                "the loss function: expected a scalar weight, got one of shape {:?}",
                weight.shape()
            )));
        }
        let mut output = LossOutput {
            weight: loss.weight,
            aux: loss.aux,
            ..LossOutput::new(loss.value)
        };
        let mut left = Left {
            key: (array::id(&key) != array::id(call.key)).then_some(key),
            ..Left::default()
        };
        self.assigned(model, call, &mut output, &mut left)?;
        self.left.replace(left);
        Ok(output)
    }
}

impl<M: ModuleParameters> Host for ModuleHost<M> {
    fn differentiate(
        &self,
        _: &[Array],
        _: &Array,
        work: &mut dyn FnMut() -> MlxResult<()>,
    ) -> MlxResult<Left> {
        let outcome = work();
        self.slots.borrow().hide(&mut *self.model.borrow_mut());
        outcome.map(|()| self.left.take())
    }

    fn loss(&self, call: LossCall) -> MlxResult<LossOutput> {
        self.traced(&mut self.model.borrow_mut(), &call)
    }

    fn learning_rate(&self, rule: usize, step: &Array) -> MlxResult<Option<Array>> {
        match self.rates.borrow().get(rule) {
            Some(rate @ LearningRate::Schedule(_)) => rate.at(step).map(Some),
            _ => Ok(None),
        }
    }

    fn update(&self, _: UpdateCall) -> MlxResult<UpdateOutput> {
        Err(Exception::custom("a module is updated by rules"))
    }
}
