//! Exchange of values between the engine and the user's objects.
use std::rc::Rc;

use faststep::engine::{Output, Role, Tensor};
use mlx_rs::Array;
use pyo3::prelude::*;

use super::{detect::sign, Prepared, Store};
use crate::{
    mlx::{bridge, errors::to_python, gil::unlocked},
    tree::{paths::dotted, slot::Slot},
};

impl Store {
    /// Show what a step wrote beside parameters and optimizer state: buffers and the random key.
    pub fn take_output<'py>(
        &mut self,
        model: &Bound<'py, PyAny>,
        prepared: &Prepared<'py>,
        output: &Output,
    ) -> PyResult<()> {
        let signature = self.signature()?;
        let of_update = || output.update.iter().flat_map(|update| &update.others);
        let is_last = |(index, _): &&(usize, Array)| !of_update().any(|(at, _)| at == index);
        let of_batch = output.batch.others.iter().filter(is_last);
        for (index, array) in of_batch.chain(of_update()) {
            Rc::make_mut(&mut self.others).set(*index, array.clone());
            let slots = prepared.model.iter().zip(signature.roles.iter());
            for (slot, _) in slots.filter(|(_, (role, _))| *role == Role::Other(*index)) {
                if prepared.aliased {
                    slot.put(array)?;
                } else {
                    slot.show(array)?;
                }
            }
        }
        let last = output.last().key.as_ref().or(output.batch.key.as_ref());
        if let Some(key) = last {
            let keys = self.key_list.bind(model.py());
            keys.set_item(0, bridge::wrap(model.py(), key)?)?;
        }
        Ok(())
    }

    // read arrays that the user has replaced since the last step; true if parameters are among them
    pub(super) fn take_values(
        &mut self,
        model: &[Slot<'_>],
        state: &[Slot<'_>],
        adopted: bool,
    ) -> PyResult<bool> {
        let signature = self.signature()?;
        let Some(engine) = &mut self.engine else {
            return Ok(false);
        };
        let differs = |slot: &Slot<'_>, array: Option<&Array>| {
            bridge::id(&slot.object) != array.map(faststep::engine::array::id)
        };
        let mut changed = Vec::new();
        for (slot, (role, path)) in model.iter().zip(signature.roles.iter()) {
            let known = match role {
                Role::Parameter(i) => engine.parameters().get(*i),
                Role::Other(i) => self.others.get(*i),
            };
            if !differs(slot, known) {
                continue;
            }
            let Some(value) = bridge::get(&slot.object) else {
                continue;
            };
            self.lazy.look(&value, || format!("model.{}", dotted(path)));
            match role {
                Role::Parameter(_) if adopted => {}
                Role::Parameter(i) => changed.push((*i, value)),
                Role::Other(i) => Rc::make_mut(&mut self.others).set(*i, value),
            }
        }
        let mut formed = adopted || self.forms.is_empty();
        for (index, slot) in state.iter().enumerate() {
            let known = engine.state().get(index);
            if differs(slot, known) {
                if let Some(value) = bridge::get(&slot.object) {
                    formed |= known.map(Tensor::of) != Some(Tensor::of(&value));
                    engine.set_state(index, value);
                }
            }
        }
        if formed && self.moments.is_some() {
            // a rate that is an integer, say: another one is in another trace
            let forms = engine.state().iter().take(state.len());
            let forms = forms.map(Tensor::of).collect();
            sign(&mut self.forms, &mut self.next_id, forms, Vec::eq);
        }
        let packed = !changed.is_empty();
        if packed {
            unlocked(model[0].object.py(), || engine.set_parameters(changed))
                .map_err(|e| to_python(&e))?;
        }
        Ok(packed)
    }
}
