//! Tracers in the places of the model's arrays, while the loss is called.
use faststep::engine::{array::id, Role};
use mlx_rs::Array;
use pyo3::prelude::*;

use crate::{
    mlx::bridge,
    tree::slot::Slot,
};

/// Other objects in the places of a model's arrays, as after `model.update`: each place has one of its own.
pub struct Lent<'a, 'py> {
    slots: &'a [Slot<'py>],
    ids: Vec<Option<usize>>, // of each place the tracer; none where there is none
}

/// An array that the loss has put into the place of one, or has made of one in place.
pub struct Assigned<'py> {
    /// The number of the place.
    pub slot: usize,
    /// The object that it has put there.
    pub object: Bound<'py, PyAny>,
}

impl<'a, 'py> Lent<'a, 'py> {
    /// Put the tracer of each role into its places.
    pub fn put(
        py: Python<'py>,
        slots: &'a [Slot<'py>],
        roles: &'a [(Role, Vec<String>)],
        tracer: impl Fn(Role) -> &'a Array,
    ) -> PyResult<Self> {
        let mut lent = Self {
            slots,
            ids: Vec::with_capacity(slots.len()),
        };
        for (slot, (role, _)) in slots.iter().zip(roles) {
            if !slot.place.get()?.is_some_and(|now| now.is(&slot.object)) {
                lent.ids.push(None); // of a module that stands in the model twice, or the loss has put something else there
                continue;
            }
            let tracer = tracer(*role);
            let put = bridge::wrap(py, tracer).and_then(|object| slot.place.set(&object));
            if let Err(error) = put {
                lent.take_back()?;
                return Err(error);
            }
            lent.ids.push(Some(id(tracer)));
        }
        Ok(lent)
    }

    /// Put the model's own objects back, and return what the loss has assigned. What it has taken out, or put there that is no
    /// array, stays.
    pub fn take_back(self) -> PyResult<Vec<Assigned<'py>>> {
        let mut assigned = Vec::new();
        for (at, (slot, id)) in self.slots.iter().zip(&self.ids).enumerate() {
            let Some(now) = slot.place.get()?.filter(|_| id.is_some()) else {
                continue;
            };
            let Some(found) = bridge::id(&now) else {
                continue;
            };
            if Some(found) != *id {
                let object = now.clone();
                assigned.push(Assigned { slot: at, object });
            }
            slot.place.set(&slot.object)?;
        }
        Ok(assigned)
    }
}
