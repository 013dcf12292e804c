//! Tracers in the places of the model's arrays, while the loss is called.
use faststep::engine::{array::id, Role};
use mlx_rs::Array;
use pyo3::prelude::*;

use crate::{mlx::bridge, tree::slot::Slot};

/// Other objects in the places of a model's arrays, as after `model.update`: each place has one of its own.
pub struct Lent<'a, 'py> {
    slots: &'a [Slot<'py>],
    doubled: bool,   // a module stands in the model twice
    ids: Vec<usize>, // of each place the tracer; 0 where there is none
}

/// An array that the loss has put into the place of one, or has made of one in place.
pub struct Assigned<'py> {
    /// The number of the place.
    pub slot: usize,
    /// The object that it has put there.
    pub object: Bound<'py, PyAny>,
}

impl<'a, 'py> Lent<'a, 'py> {
    /// Put the tracer of each role into its places. `doubled`: some of these are one.
    pub fn put(
        py: Python<'py>,
        slots: &'a [Slot<'py>],
        roles: &'a [(Role, Vec<String>)],
        doubled: bool,
        tracer: impl Fn(Role) -> &'a Array,
    ) -> PyResult<Self> {
        let mut lent = Self {
            slots,
            doubled,
            ids: Vec::with_capacity(slots.len()),
        };
        for (slot, (role, _)) in slots.iter().zip(roles) {
            let now = slot.place.get()?;
            // the last place of a module that stands in the model twice counts
            let again = || lent.doubled && lent.has_lent(now.as_ref());
            if !now.as_ref().is_some_and(|now| now.is(&slot.object)) && !again() {
                lent.ids.push(0); // the loss has put something else there
                continue;
            }
            let tracer = tracer(*role);
            let put = bridge::wrap(py, tracer).and_then(|object| slot.place.set(&object));
            if let Err(error) = put {
                lent.take_back(None)?;
                return Err(error);
            }
            lent.ids.push(id(tracer));
        }
        Ok(lent)
    }

    // true if the object is one of the tracers
    fn has_lent(&self, object: Option<&Bound<'py, PyAny>>) -> bool {
        let id = object.and_then(bridge::id);
        id.is_some_and(|id| self.ids.contains(&id))
    }

    /// The identities of the tracers by place; 0 where there is none.
    pub fn ids(&self) -> &[usize] {
        &self.ids
    }

    /// Put the model's own objects back; return what the loss has assigned. `places`: the new ones of arrays whose containers the loss
    /// has replaced. What it has taken out, or put there that is no array, stays.
    pub fn take_back(self, places: Option<&[Option<Slot<'py>>]>) -> PyResult<Vec<Assigned<'py>>> {
        let mut assigned = Vec::new();
        for (number, (slot, id)) in self.slots.iter().zip(&self.ids).enumerate() {
            if *id == 0 {
                continue;
            }
            let now = slot.place.get()?.filter(bridge::is_array);
            let has_tracer = now.as_ref().and_then(bridge::id) == Some(*id);
            let moved = places.and_then(|places| places[number].as_ref());
            let object = if let Some(moved) = moved {
                if has_tracer {
                    slot.place.set(&slot.object)?;
                }
                let is_tracer = bridge::id(&moved.object) == Some(*id);
                if is_tracer {
                    moved.place.set(&slot.object)?;
                }
                (!is_tracer).then(|| moved.object.clone())
            } else {
                let Some(now) = now else { continue };
                let known = self.doubled && (now.is(&slot.object) || self.has_lent(Some(&now)));
                slot.place.set(&slot.object)?;
                (!has_tracer && !known).then_some(now)
            };
            let slot = number;
            assigned.extend(object.map(|object| Assigned { slot, object }));
        }
        Ok(assigned)
    }
}
