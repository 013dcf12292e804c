//! The training step of an mlx-rs module: the whole of it in one call.
use std::{cell::Cell, fmt, rc::Rc};

use mlx_rs::{
    error::Result as MlxResult,
    module::{FlattenedModuleParam, ModuleParameters},
    Array,
};

use super::{
    host::ModuleHost,
    key::ModuleKey,
    loss::Loss,
    optimizer::{self, Arrays},
    output::{Spent, StepOutput},
    slots::{ModuleArrays, Slots},
};
use crate::{
    engine::{nonfinite::is_true, Engine, Flags, Options, Ranks},
    error::{Error, Result},
    layout::NamedAuxState,
    mlx::{group::Group, kernels, memory, openblas, random},
    optim::{LearningRate, Optimizers, Rules},
    trace::{Key, Outputs, Task, TraceCache},
};

/// The state of a step by parameter name, of parameters that are frozen now too.
#[derive(Debug, Default)]
pub(super) struct Kept {
    pub(super) optimizer: Arrays,
    pub(super) aux_state: NamedAuxState,
}

/// Access of the user to the module since the last step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shown {
    /// Nothing: it has no arrays.
    Nothing,
    /// Its arrays are there.
    Read,
    /// Its arrays are there, and anything may have changed.
    Open,
}

/// The training step of a module: gradients, clipping, update and evaluation in one call.
///
/// It takes the place of these lines, and gives the same numbers:
///
/// ```no_run
/// # use mlx_rs::{error::Exception, module::FlattenedModuleParam, nn, optimizers::*, Array, transforms::eval_params};
/// # use mlx_rs::module::{Module, ModuleParameters};
/// # fn one(model: &mut nn::Linear, optimizer: &mut AdamW, x: Array, y: Array) -> Result<(), Box<dyn std::error::Error>> {
/// # let loss_fn = |model: &mut nn::Linear, (x, y): (&Array, &Array)| -> Result<Array, Exception> {
/// #     model.forward(x)?.subtract(y)?.square()?.mean(None)
/// # };
/// let (loss, gradients) = nn::value_and_grad(loss_fn)(model, (&x, &y))?;
/// let (clipped, _norm) = clip_grad_norm(&gradients, 1.0)?;
/// let clipped: FlattenedModuleParam = clipped.into_iter().map(|(k, v)| (k, v.into_owned())).collect();
/// optimizer.update(model, clipped)?;
/// eval_params(model.parameters())?; // and the optimizer's state with them
/// # Ok(())
/// # }
/// ```
///
/// The loss function is called while the step is traced, which is once for each signature of the batch; the trace is
/// replayed from then on. What it does beside computing arrays (printing, counting) happens then only, and an array that
/// it captures, or finds in a field that is no parameter, is a constant. Draws from mlx-rs's random functions begin where
/// this thread's random state is when the step is made, and are new ones in each step.
///
/// Trainable parameters that are not frozen are updated, but for `running_mean` and `running_var`: buffers, which MLX's
/// Python freezes in its `BatchNorm` and mlx-rs does not. Whatever else of the module's arrays the loss function assigns
/// to, in the same shape and dtype, is a buffer too and moves with each step.
///
/// The step has the module, and lets its arrays go while it trains; [`Step::parameters`] and [`Step::to_model`] give
/// them out between two steps, [`Step::model`] and [`Step::model_mut`] put them back into the module until the next
/// one.
pub struct Step<M> {
    pub(super) host: Rc<ModuleHost<M>>,
    pub(super) engine: Engine,
    pub(super) rules: Rc<Rules>,
    pub(super) optimizers: Optimizers,
    pub(super) options: Options,
    pub(super) ranks: Option<Ranks>,
    pub(super) others: Vec<Array>,
    pub(super) key: Array,
    pub(super) shown: Cell<Shown>,
    pub(super) kept: Kept, // with the arrays of parameters that are frozen now
    pub(super) version: usize, // of what the loss and the schedules may depend on
    pub(super) traces: TraceCache<Key<ModuleKey>, ()>,
    pub(super) steps: usize,
    pub(super) updates: usize,
    pub(super) skips: Flags,
    pub(super) misses: Flags,
    pub(super) seconds: Spent,
}

impl<M: ModuleParameters + 'static> Step<M> {
    /// Make the step; nothing is traced before its first call.
    ///
    /// `loss` takes the module and the batch and returns a scalar, or the scalar with auxiliary arrays, or a [`Loss`] that
    /// has a weight too. On a CPU, MLX's matrix products are bound to OpenBLAS, where it is found ([`openblas`]), and its
    /// fused kernels compiled for the processor ([`kernels`]; `FASTSTEP_KERNELS=0` in the environment leaves MLX as it is).
    /// `FASTSTEP_FLUSH_DENORMALS=1` makes moments zero that have faded to numbers with which a CPU computes slowly.
    ///
    /// # Errors
    /// [`Error::NoParameters`]; [`Error::Invalid`] for an option that is out of its range, and for a trainable parameter
    /// that is not of float32, float16 or bfloat16.
    pub fn new<F, L>(
        model: M,
        optimizers: Optimizers,
        mut loss: F,
        options: Options,
    ) -> Result<Self>
    where
        F: FnMut(&mut M, &[Array]) -> MlxResult<L> + 'static,
        L: Into<Loss>,
    {
        options.check()?;
        if let Some(limit) = options.cache_limit {
            mlx_rs::memory::set_cache_limit(limit)?;
        }
        openblas::bind_once();
        kernels::bind_once();
        let arrays = ModuleArrays::of(&model);
        let loss =
            Box::new(move |model: &mut M, batch: &[Array]| loss(model, batch).map(Into::into));
        let rates = optimizers.rates().cloned().collect();
        let host = ModuleHost::new(model, loss, rates, &options);
        let (rules, engine) = optimizer::lay_out(&arrays, &optimizers, &options, &Arrays::new())?;
        host.slots.replace(Rc::new(arrays.slots));
        Ok(Self {
            host: Rc::new(host),
            engine,
            rules: Rc::new(rules),
            optimizers,
            options,
            ranks: None,
            others: arrays.others,
            key: random::current()?,
            shown: Cell::new(Shown::Read),
            kept: Kept::default(),
            version: 0,
            traces: TraceCache::default(),
            steps: 0,
            updates: 0,
            skips: Flags::default(),
            misses: Flags::default(),
            seconds: Spent::default(),
        })
    }

    /// The same step as one of several processes: before each update the gradients are averaged over the ranks of a group, each
    /// of which has batches of its own. Make the same module on all of them, and take as many batches.
    ///
    /// [`StepOutput::loss`] is the mean over the window and all ranks then. [`Step::gradients`] stays that of this rank.
    #[must_use]
    pub fn with_group(mut self, group: Group) -> Self {
        if group.size() > 1 {
            self.ranks = Some(Ranks::new(group));
            self.options.reduced = true;
        }
        self
    }

    /// One step: the loss of `batch`, its gradients, clipping, the update, and the evaluation of all that has changed.
    ///
    /// With [`Options::accumulate`] above 1 the gradients are added to a window, and the update follows when it is full.
    ///
    /// # Errors
    /// [`Error::Trace`], [`Error::Untraceable`], [`Error::FirstEvaluation`], [`Error::Beside`] and [`Error::Nonfinite`] leave module,
    /// optimizer and random state as they were; [`Error::Device`] says that they are lost. [`Error::Ranks`]: another rank of the group
    /// has failed, is gone or does not agree; nothing was updated.
    ///
    /// # Panics
    /// When the loss function panics; everything is then as it was.
    pub fn step(&mut self, batch: &[Array]) -> Result<StepOutput> {
        self.take_in()?;
        let task = Task::of(
            self.options.accumulate,
            self.engine.batches(),
            self.options.reduced,
        );
        let output = self.run(batch, task)?;
        self.steps += 1;
        self.clear_cache();
        let pushed = self.skips.push(output.batch.skipped.as_ref(), &is_true);
        pushed.map_err(|error| self.engine.fail(error, &mut ()))?;
        let update = task.updates().then(|| output.last());
        if let Some(update) = update {
            self.count_update(update)?;
        }
        StepOutput::new(&output.batch, update)
    }

    /// Loss and gradients of `batch`; nothing changes. The gradients have the names of their parameters, and their shapes
    /// and dtypes.
    ///
    /// # Errors
    /// As [`Step::step`].
    pub fn gradients(&mut self, batch: &[Array]) -> Result<(Array, FlattenedModuleParam)> {
        self.take_in()?;
        let outputs = self.run(batch, Task::Gradients)?.batch;
        let names = self.slots().parameters.clone();
        let gradients = names.into_iter().zip(outputs.gradients).collect();
        Ok((outputs.loss.ok_or_else(Error::no_loss)?, gradients))
    }

    /// Apply a window that is not full, averaged by what is in it; true if there was one. With a group on all ranks: one without
    /// a window adds nothing.
    ///
    /// # Errors
    /// As [`Step::step`].
    pub fn flush(&mut self) -> Result<bool> {
        self.take_in()?;
        if self.ranks.is_none() && self.engine.batches() == 0 {
            return Ok(false);
        }
        let output = self.run(&[], Task::Flush)?;
        self.count_update(&output.batch)?;
        Ok(self.ranks.as_ref().is_none_or(Ranks::has_flushed))
    }

    /// Wait for all work in flight.
    ///
    /// # Errors
    /// [`Error::Device`], when a step failed.
    pub fn synchronize(&mut self) -> Result<()> {
        self.engine.synchronize(&mut ())
    }

    /// The number of batches in the open window.
    #[must_use]
    pub fn batches(&self) -> usize {
        self.engine.batches()
    }

    /// Update once for so many calls from now on; a window that has as many batches is applied at the next call.
    ///
    /// # Errors
    /// [`Error::Invalid`] for 0.
    pub fn set_accumulate(&mut self, calls: usize) -> Result<()> {
        let options = self.options.accumulate(calls);
        options.check()?;
        self.options = options;
        Ok(())
    }

    /// The options.
    #[must_use]
    pub fn options(&self) -> &Options {
        &self.options
    }

    /// Draw from this seed on, as after `mlx_rs::random::seed` and `mx.random.seed`.
    ///
    /// # Errors
    /// When MLX refuses to make the key.
    pub fn seed(&mut self, seed: u64) -> Result<()> {
        self.key = random::seeded(seed)?;
        Ok(())
    }

    /// The learning rate of the rule of that number (0 where there is one), of the last update where it is scheduled: a
    /// float32 scalar. `None` for a rule without.
    #[must_use]
    pub fn learning_rate(&self, rule: usize) -> Option<Array> {
        let at = self.rules.rate_at(rule)?;
        self.engine.state().get(at).cloned()
    }

    /// Another learning rate for all rules from now on; a number in place of a number costs no new trace.
    ///
    /// # Errors
    /// Whatever a schedule says to the number of updates so far.
    pub fn set_learning_rate(&mut self, rate: impl Into<LearningRate>) -> Result<()> {
        let rate = rate.into();
        let scheduled = |rate: &LearningRate| matches!(rate, LearningRate::Schedule(_));
        let rules = 0..self.rules.rules().len();
        let places = rules.filter_map(|rule| self.rules.rate_at(rule));
        let values = places.map(|at| Ok((at, rate.at(&self.engine.state()[at - 1])?)));
        for (at, value) in values.collect::<Result<Vec<_>>>()? {
            self.engine.set_state(at, value);
        }
        if scheduled(&rate) || self.optimizers.rates().any(scheduled) {
            self.version += 1;
        }
        self.optimizers.set_rates(&rate);
        self.host
            .rates
            .replace(self.optimizers.rates().cloned().collect());
        Ok(())
    }

    pub(super) fn slots(&self) -> Rc<Slots> {
        self.host.slots.borrow().clone()
    }

    fn count_update(&mut self, update: &Outputs) -> Result<()> {
        self.updates += 1;
        let pushed = self.misses.push(update.skipped.as_ref(), &is_true);
        pushed.map_err(|error| self.engine.fail(error, &mut ()))
    }

    fn clear_cache(&self) {
        let every = self.options.clear_cache_every;
        if every > 0 && self.steps.is_multiple_of(every) {
            memory::clear_cache();
        }
    }
}

impl<M> fmt::Debug for Step<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Step")
            .field("optimizers", &self.optimizers)
            .field("options", &self.options)
            .field("steps", &self.steps)
            .finish_non_exhaustive()
    }
}
