//! The module of a step: empty while it trains, whole when the user asks for it.
use std::{
    cell::{Ref, RefMut},
    collections::BTreeMap,
    rc::Rc,
};

use mlx_rs::{module::ModuleParameters, Array};

use super::{optimizer, output::Stats, state::Kept, Step};
use crate::{
    array,
    error::{Error, Result},
    module::{look, Looked, Role},
    nonfinite::is_true,
    openblas,
};

/// What the user may have seen of the module since the last step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shown {
    /// Nothing: it has no arrays.
    Nothing,
    /// Its arrays are there.
    Read,
    /// Its arrays are there, and anything may have changed.
    Open,
}

impl<M: ModuleParameters + 'static> Step<M> {
    /// The module as the last step left it.
    #[must_use]
    pub fn model(&self) -> Ref<'_, M> {
        self.show();
        self.host.model.borrow()
    }

    /// The module, to be changed or called (mlx-rs's `forward` wants it mutable).
    ///
    /// Whatever is changed is seen: parameters, `freeze_parameters` and `unfreeze_parameters`, `training_mode`, any
    /// field. So the next step looks at the whole module and traces the loss anew, which takes milliseconds.
    pub fn model_mut(&mut self) -> RefMut<'_, M> {
        self.show();
        self.shown.set(Shown::Open);
        self.host.model.borrow_mut()
    }

    /// The module, for good.
    ///
    /// # Errors
    /// [`Error::Device`], when a step in flight fails.
    pub fn into_model(mut self) -> Result<M> {
        self.synchronize()?;
        self.show();
        let Self { host, traces, .. } = self;
        drop(traces);
        let host = Rc::into_inner(host).map(|host| host.model.into_inner());
        host.ok_or_else(|| Error::Option("the module is still in use".into()))
    }

    /// What the step has done so far; waits for the steps in flight.
    ///
    /// # Errors
    /// When the device has failed.
    pub fn stats(&mut self) -> Result<Stats> {
        self.skips.read(0, &is_true)?;
        self.misses.read(0, &is_true)?;
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

    // before a step: take over what the user has changed, and let the module go of its arrays
    pub(super) fn take_in(&mut self) -> Result<()> {
        if self.shown.get() == Shown::Open {
            self.version += 1;
            let looked = look(&*self.host.model.borrow());
            self.take_over(looked)?;
        }
        if self.shown.get() != Shown::Nothing {
            self.slots().hide(&mut *self.host.model.borrow_mut());
            self.shown.set(Shown::Nothing);
        }
        Ok(())
    }

    fn take_over(&mut self, looked: Looked) -> Result<()> {
        if looked.slots != *self.slots() {
            return self.adopt(looked);
        }
        let old = self.engine.parameters().iter().map(array::id);
        let pairs = looked.parameters.into_iter().enumerate().zip(old);
        let changed = pairs.filter(|((_, new), old)| array::id(new) != *old);
        let changed: Vec<(usize, Array)> = changed.map(|(new, _)| new).collect();
        if !changed.is_empty() {
            self.engine.set_parameters(changed)?;
        }
        self.others = looked.others;
        Ok(())
    }

    // other parameters, or other shapes: lay everything out anew, and keep what the step has for those that stay
    fn adopt(&mut self, looked: Looked) -> Result<()> {
        let kept = Kept {
            optimizer: self.optimizer_state()?,
            extras: self.extras()?.with_rest_of(&self.kept.extras),
        };
        self.begin(looked, kept)
    }

    /// Begin with these arrays of a module, and with what is kept for those of its parameters that have it.
    pub(super) fn begin(&mut self, looked: Looked, mut kept: Kept) -> Result<()> {
        let (rules, mut engine) =
            optimizer::lay_out(&looked, &self.optimizers, &self.options, &kept.optimizer)?;
        let keep = kept.extras.onto(&looked.slots);
        engine.need(self.options.needs(keep.window.is_some()))?;
        engine.take_up(&keep)?;
        (self.engine, self.rules) = (engine, Rc::new(rules));
        self.others = looked.others;
        self.host.slots.replace(Rc::new(looked.slots));
        let current = optimizer::named(&self.rules, &self.engine, &self.slots().parameters)?;
        kept.optimizer.retain(|name, _| !current.contains_key(name));
        kept.extras.forget(&self.slots().parameters);
        self.kept = kept;
        Ok(())
    }
}
