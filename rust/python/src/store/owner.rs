//! Release of the user's arrays before an evaluation, and their new values after it.
use std::{cell::RefCell, collections::HashMap, rc::Rc};

use faststep::engine::{Engine, Outputs, Owner, Role};
use mlx_rs::error::{Exception, Result as MlxResult};
use pyo3::prelude::*;

use super::{moments::Moments, Prepared};
use crate::{
    mlx::gil::Waiting,
    tree::{slot::Slot, snapshot::Snapshot},
};

/// A call of an optimizer's own code, between a batch and its update.
pub struct CallsUpdate<'a, 'py> {
    /// The optimizer.
    pub optimizer: &'a Bound<'py, PyAny>,
    /// Gives what the loss has returned its values, which that code may read.
    pub fill: &'a dyn Fn(&Outputs) -> MlxResult<()>,
}

/// The slots of one call.
pub struct Holder<'a, 'py> {
    py: Python<'py>,
    prepared: &'a Prepared<'py>,
    roles: &'a [(Role, Vec<String>)],
    moments: Option<&'a mut Moments>,
    calls: Option<CallsUpdate<'a, 'py>>,
    goes_on: bool, // code that may come by the arrays is called behind this part
    before: Option<Snapshot<'py>>, // the optimizer, before its own code is called
    called: Option<Rc<RefCell<Option<Snapshot<'py>>>>>, // the same, where that has been called
    released: bool,
    held: bool,
    error: Option<PyErr>,
}

impl<'a, 'py> Holder<'a, 'py> {
    /// Make an owner for the slots of a prepared call. `calls`: where the optimizer's own code updates.
    pub fn new(
        py: Python<'py>,
        prepared: &'a Prepared<'py>,
        roles: &'a [(Role, Vec<String>)],
        moments: Option<&'a mut Moments>,
        calls: Option<CallsUpdate<'a, 'py>>,
    ) -> Self {
        Self {
            py,
            prepared,
            roles,
            moments,
            calls,
            goes_on: false,
            before: None,
            called: None,
            released: false,
            held: false,
            error: None,
        }
    }

    fn parameters(&self) -> impl Iterator<Item = (usize, &Slot<'py>)> {
        let slots = self.prepared.model.iter().zip(self.roles);
        slots.filter_map(|(slot, (role, _))| match role {
            Role::Parameter(index) => Some((*index, slot)),
            Role::Other(_) => None,
        })
    }

    /// Take a batch whose update is called behind it.
    pub fn before_call(mut self, goes_on: bool) -> Self {
        self.goes_on = goes_on;
        self
    }

    /// Go on behind a batch, for which arrays may have to be shown; `before`: the optimizer as it was before its code was called, as
    /// long as that can be put back.
    pub fn behind(
        mut self,
        released: bool,
        before: Option<Rc<RefCell<Option<Snapshot<'py>>>>>,
    ) -> Self {
        (self.released, self.called) = (released, before);
        self
    }

    // let go of the optimizer as it was, or that would hold arrays that the update writes over
    fn drop_before(&mut self) {
        self.before = None;
        self.called.iter().for_each(|before| drop(before.take()));
    }

    /// Return whether the arrays of the engine are to be shown.
    pub fn has_released(&self) -> bool {
        self.released
    }

    /// Show what the engine holds, where `release` was called, or where a call that is done has laid it out again. Where nothing has
    /// been computed, the optimizer is as it was.
    pub fn show(&mut self, engine: &Engine, done: bool) -> PyResult<()> {
        if let Some(before) = self.before.take().filter(|_| !done) {
            before.restore()?;
        }
        if self.released || (done && self.prepared.packed) {
            self.show_all(engine)?;
        }
        self.error.take().map_or(Ok(()), Err)
    }

    fn show_all(&mut self, engine: &Engine) -> PyResult<()> {
        for (index, slot) in self.parameters() {
            let array = &engine.parameters()[index];
            if self.prepared.aliased {
                slot.put(array)?; // the last of the slots that are one wins, as in `model.update`
            } else {
                slot.show(array)?;
            }
        }
        for (slot, array) in self.prepared.state.iter().zip(engine.state()) {
            if !slot.holds(array) {
                slot.show(array)?;
            }
        }
        if let (Some(moments), true) = (&mut self.moments, self.held) {
            moments.show(self.py, engine)?;
        }
        Ok(())
    }
}

impl Owner for Holder<'_, '_> {
    fn release(&mut self) {
        self.released = true;
        if self.calls.is_some() || self.goes_on {
            return; // code that is yet to be called may come by the arrays
        }
        self.drop_before();
        let hollow = faststep::engine::array::hollow();
        let mut slots: HashMap<usize, isize> = HashMap::new(); // of an object that stands in the model twice
        if self.prepared.aliased {
            for (_, slot) in self.parameters() {
                *slots.entry(slot.object.as_ptr().addr()).or_default() += 1;
            }
        }
        for (_, slot) in self.parameters() {
            let slots = slots.get(&slot.object.as_ptr().addr()).copied();
            slot.empty(&hollow, slots.unwrap_or(1));
        }
        for slot in &self.prepared.state {
            slot.empty(&hollow, 1);
        }
        let Some(moments) = &mut self.moments else {
            return;
        };
        if moments.is_shown() || self.prepared.packed {
            self.held = moments.is_held(self.py);
            if let Err(error) = moments.hide(self.py) {
                self.error.get_or_insert(error);
            }
        }
    }

    fn holds_alone(&mut self) -> Option<usize> {
        self.drop_before();
        let prepared = self.prepared;
        let hidden = self
            .moments
            .as_ref()
            .is_none_or(|moments| !moments.is_shown());
        let same = !(prepared.aliased || prepared.packed || prepared.moved || self.released);
        let parameters = self.parameters().map(|(_, slot)| slot);
        let alone = hidden && same && parameters.chain(&prepared.state).all(Slot::is_unshared);
        alone.then_some(prepared.state.len())
    }

    fn take_batch(&mut self, batch: &Outputs) -> MlxResult<()> {
        let Some(calls) = self.calls.take() else {
            return Ok(());
        };
        match Snapshot::take(calls.optimizer) {
            Ok(before) => self.before = Some(before),
            Err(error) => {
                self.error = Some(error);
                return Err(Exception::custom("the optimizer cannot be read"));
            }
        }
        (calls.fill)(batch)
    }

    fn unlocked(&mut self, work: &mut dyn FnMut()) {
        Waiting(self.py).unlocked(work);
    }
}
