//! The module of a step: empty while it trains, whole when the user asks for it.
use std::{
    cell::{Ref, RefMut},
    collections::BTreeMap,
    panic::{catch_unwind, resume_unwind, AssertUnwindSafe},
    rc::Rc,
};

use mlx_rs::{
    module::{FlattenedModuleParam, ModuleParameters},
    Array,
};

use super::{
    optimizer,
    output::Stats,
    slots::ModuleArrays,
    step::{Kept, Shown, Step},
};
use crate::{
    engine::nonfinite::is_true,
    error::{Error, Result},
    mlx::{array, openblas},
    trace::Role,
};

impl<M: ModuleParameters + 'static> Step<M> {
    /// All arrays of the module as the last step left them, with the names that `parameters().flatten()` gives them.
    ///
    /// The module itself stays without arrays, so that the next step finds nothing changed.
    /// An array that is kept keeps its value, and its memory: the next step cannot write over it.
    #[must_use]
    pub fn parameters(&self) -> FlattenedModuleParam {
        if self.shown.get() == Shown::Open {
            let model = self.host.model.borrow();
            let arrays = model.parameters().flatten();
            return arrays
                .into_iter()
                .map(|(name, array)| (name, array.clone()))
                .collect();
        }
        let slots = self.slots();
        let parameters = slots.parameters.iter().zip(self.engine.parameters());
        let others = slots.others.iter().zip(&self.others);
        let pairs = parameters.chain(others);
        pairs
            .map(|(name, array)| (name.clone(), array.clone()))
            .collect()
    }

    /// A copy of the module as the last step left it, which shares its arrays: to be called between two steps.
    ///
    /// Whatever is done to the copy, in a `forward` that counts something, with `training_mode` or `freeze_parameters`, the
    /// step's own module does not change, and no trace is made anew. While the copy lives, the next step cannot write over
    /// its arrays, and takes their memory once more.
    ///
    /// ```
    /// # use faststep::{Error, Optimizer, Optimizers, Options, Step};
    /// # use mlx_rs::{error::Exception, module::Module, nn::Linear, Array};
    /// # let loss = |model: &mut Linear, batch: &[Array]| -> Result<Array, Exception> {
    /// #     model.forward(&batch[0])?.square()?.mean(None)
    /// # };
    /// # let optimizers = Optimizers::new(Optimizer::adamw(0.01), 1e-2);
    /// # let mut step = Step::new(Linear::new(4, 2)?, optimizers, loss, Options::default())?;
    /// # let (x, validation) = (Array::ones::<f32>(&[8, 4])?, Array::ones::<f32>(&[8, 4])?);
    /// for _ in 0..10 {
    ///     step.step(&[x.clone()])?;
    ///     let mut model = step.to_model();
    ///     model.training_mode(false);
    ///     let outputs = model.forward(&validation)?;
    /// #     assert_eq!(outputs.shape(), [8, 2]);
    /// }
    /// assert_eq!(step.stats()?.traced, 1);
    /// # Ok::<(), Error>(())
    /// ```
    #[must_use]
    pub fn to_model(&self) -> M
    where
        M: Clone,
    {
        let mut model = self.host.model.borrow().clone();
        if self.shown.get() == Shown::Nothing {
            self.slots().fill(&mut model, |role| self.value(role));
        }
        model
    }

    /// Call a function with the module as the last step left it, for a module that cannot be cloned: no trace is made anew.
    ///
    /// Changes of arrays are forgotten when the function returns. Any other field that it changes it has to change
    /// back, as `training_mode(true)` does after `training_mode(false)`: the step looks for changes after
    /// [`Step::model_mut`] only.
    ///
    /// # Errors
    /// When MLX refuses what [`Step::model_mut`] has changed before.
    ///
    /// # Panics
    /// When the function panics; changes of arrays are forgotten then, too.
    pub fn with_model<R>(&mut self, function: impl FnOnce(&mut M) -> R) -> Result<R> {
        self.take_in()?;
        let mut model = self.host.model.borrow_mut();
        let slots = self.slots();
        slots.fill(&mut *model, |role| self.value(role));
        let returned = catch_unwind(AssertUnwindSafe(|| function(&mut model)));
        slots.hide(&mut *model);
        returned.map_or_else(|payload| resume_unwind(payload), Ok)
    }

    /// The module as the last step left it. [`Step::parameters`] is cheaper for a look at single arrays.
    #[must_use]
    pub fn model(&self) -> Ref<'_, M> {
        self.show();
        self.host.model.borrow()
    }

    /// The module, to be changed or called (mlx-rs's `forward` wants it mutable).
    ///
    /// Whatever is changed is seen: parameters, `freeze_parameters` and `unfreeze_parameters`, `training_mode`, any
    /// field. So the next step looks at the whole module and traces the loss anew, which takes milliseconds. For a
    /// validation between two steps, [`Step::to_model`] and [`Step::with_model`] cost less.
    pub fn model_mut(&mut self) -> RefMut<'_, M> {
        self.show();
        self.shown.set(Shown::Open);
        self.host.model.borrow_mut()
    }

    /// The module; the step ends.
    ///
    /// # Errors
    /// [`Error::Device`], when a step in flight fails.
    pub fn into_model(mut self) -> Result<M> {
        self.synchronize()?;
        self.show();
        let Self { host, traces, .. } = self;
        drop(traces);
        let host = Rc::into_inner(host).map(|host| host.model.into_inner());
        host.ok_or_else(|| Error::Invalid("the module is still in use".into()))
    }

    /// Return the step's counters; waits for the steps in flight.
    ///
    /// # Errors
    /// When the device has failed.
    pub fn stats(&mut self) -> Result<Stats> {
        for flags in [&mut self.skips, &mut self.misses] {
            let read = flags.read(0, &is_true);
            read.map_err(|error| self.engine.fail(error, &mut ()))?;
        }
        let sum = |arrays: &[Array]| arrays.iter().map(Array::nbytes).sum();
        Ok(Stats {
            steps: self.steps,
            updates: self.updates - self.misses.count(),
            skipped: self.skips.count(),
            compiled: self.options.compile
                && self
                    .traces
                    .last()
                    .is_none_or(|entry| !entry.trace.is_eager()),
            openblas: openblas::is_bound(),
            traces: self.traces.records(),
            traced: self.traces.made(),
            seconds: self.seconds.by_name(),
            bytes: BTreeMap::from([
                ("parameters", sum(self.engine.parameters())),
                ("optimizer", sum(self.engine.state())),
                ("step", self.engine.extra_bytes()),
                ("model", sum(&self.others)),
            ]),
            unchanged: self.engine.unchanged(),
        })
    }

    pub(super) fn value(&self, role: Role) -> Option<Array> {
        match role {
            Role::Parameter(i) => self.engine.parameters().get(i).cloned(),
            Role::Other(i) => self.others.get(i).cloned(),
        }
    }

    pub(super) fn show(&self) {
        if self.shown.get() == Shown::Nothing {
            let mut model = self.host.model.borrow_mut();
            self.slots().fill(&mut *model, |role| self.value(role));
            self.shown.set(Shown::Read);
        }
    }

    // before a step: read the user's changes, and remove the arrays from the module
    pub(super) fn take_in(&mut self) -> Result<()> {
        if self.shown.get() == Shown::Open {
            self.version += 1;
            let arrays = ModuleArrays::of(&*self.host.model.borrow());
            self.take_over(arrays)?;
        }
        if self.shown.get() != Shown::Nothing {
            self.slots().hide(&mut *self.host.model.borrow_mut());
            self.shown.set(Shown::Nothing);
        }
        Ok(())
    }

    fn take_over(&mut self, arrays: ModuleArrays) -> Result<()> {
        if arrays.slots != *self.slots() {
            return self.adopt(arrays);
        }
        let old = self.engine.parameters().iter().map(array::id);
        let pairs = arrays.parameters.into_iter().enumerate().zip(old);
        let changed = pairs.filter(|((_, new), old)| array::id(new) != *old);
        let changed: Vec<(usize, Array)> = changed.map(|(new, _)| new).collect();
        if !changed.is_empty() {
            self.engine.set_parameters(changed)?;
        }
        self.others = arrays.others;
        Ok(())
    }

    // for other parameters or shapes: build a new engine that keeps the state of the parameters that remain
    fn adopt(&mut self, arrays: ModuleArrays) -> Result<()> {
        let kept = Kept {
            optimizer: self.optimizer_state()?,
            aux_state: self.aux_state()?,
        };
        self.begin(arrays, kept)
    }

    /// Begin with these arrays of a module, and with what is kept for those of its parameters that have it.
    pub(super) fn begin(&mut self, arrays: ModuleArrays, mut kept: Kept) -> Result<()> {
        let (rules, mut engine) =
            optimizer::lay_out(&arrays, &self.optimizers, &self.options, &kept.optimizer)?;
        let slots = &arrays.slots;
        let aux_state = kept.aux_state.onto(&slots.parameters, slots.tensors());
        engine.need(self.options.needs(aux_state.window.is_some()))?;
        engine.load_aux_state(&aux_state)?;
        (self.engine, self.rules) = (engine, Rc::new(rules));
        self.others = arrays.others;
        self.host.slots.replace(Rc::new(arrays.slots));
        let current = optimizer::named(&self.rules, &self.engine, &self.slots().parameters)?;
        let recoded = optimizer::names(&self.rules, &self.slots().parameters);
        kept.optimizer
            .retain(|name, _| !current.contains_key(name) && !recoded.contains(name));
        kept.aux_state = kept.aux_state.without(&self.slots().parameters);
        self.kept = kept;
        Ok(())
    }
}
