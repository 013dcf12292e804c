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
                lent.take_back_from(slots.iter().map(Some))?;
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

    /// Put the model's own objects back where they were.
    pub fn take_back(self) -> PyResult<Vec<Assigned<'py>>> {
        let slots = self.slots;
        self.take_back_from(slots.iter().map(Some))
    }

    /// The same where the places are now, in containers that the loss may have replaced; return what it has assigned. What it has taken
    /// out, or put there that is no array, stays.
    pub fn take_back_from<'b>(
        self,
        places: impl Iterator<Item = Option<&'b Slot<'py>>>,
    ) -> PyResult<Vec<Assigned<'py>>>
    where
        'py: 'b,
    {
        let mut assigned = Vec::new();
        for (number, (place, id)) in places.zip(&self.ids).enumerate() {
            let Some(place) = place.filter(|_| *id != 0).map(|slot| &slot.place) else {
                continue;
            };
            let Some(now) = place.get()? else {
                continue;
            };
            let Some(found) = bridge::id(&now) else {
                continue;
            };
            let own = &self.slots[number].object;
            let known = self.doubled && (now.is(own) || self.has_lent(Some(&now)));
            if found != *id && !known {
                assigned.push(Assigned {
                    slot: number,
                    object: now,
                });
            }
            place.set(own)?;
        }
        Ok(assigned)
    }
}
