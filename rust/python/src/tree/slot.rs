//! The place of an array object in a tree.
use std::{cell::OnceCell, rc::Rc};

use mlx_rs::Array;
use pyo3::{
    prelude::*,
    types::{PyDict, PyList},
};

use super::Tree;
use crate::mlx::bridge;

/// Place of an object, so that another can be put there.
#[derive(Clone)]
pub enum Place<'py> {
    /// Under a key of a dict.
    Dict(Bound<'py, PyDict>, Bound<'py, PyAny>),
    /// At an index of a list.
    List(Bound<'py, PyList>, usize),
    /// In a tuple.
    Tuple,
    /// The place of the array with this number, to be found when it is needed.
    Nth(Rc<Places<'py>>, usize),
}

/// Places of a model's arrays, which are found when the first is needed.
pub struct Places<'py> {
    root: Bound<'py, PyAny>,
    found: OnceCell<Vec<Place<'py>>>,
}

impl<'py> Places<'py> {
    /// The places in a model.
    pub fn of(root: Bound<'py, PyAny>) -> Self {
        Self {
            root,
            found: OnceCell::new(),
        }
    }

    fn get(&self, number: usize) -> PyResult<&Place<'py>> {
        let found = if let Some(found) = self.found.get() {
            found
        } else {
            let slots = Tree::slots(&self.root)?.into_iter();
            let places = slots.map(|slot| slot.place).collect();
            self.found.get_or_init(|| places)
        };
        Ok(found.get(number).unwrap_or(&Place::Tuple))
    }
}

impl<'py> Place<'py> {
    /// Return whether both are one place.
    pub fn is(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Dict(one, key), Self::Dict(other, name)) => {
                one.is(other) && key.eq(name).unwrap_or(false)
            }
            (Self::List(one, at), Self::List(other, index)) => one.is(other) && at == index,
            (Self::Nth(places, number), other) => places.get(*number).is_ok_and(|it| it.is(other)),
            (one, Self::Nth(places, number)) => places.get(*number).is_ok_and(|it| it.is(one)),
            _ => false,
        }
    }

    /// Put another object there.
    pub fn set(&self, object: &Bound<'py, PyAny>) -> PyResult<()> {
        match self {
            Self::Dict(dict, key) => dict.set_item(key, object),
            Self::List(list, index) => list.set_item(*index, object),
            Self::Tuple => Ok(()),
            Self::Nth(places, number) => places.get(*number)?.set(object),
        }
    }

    /// The object that stands there now.
    pub fn get(&self) -> PyResult<Option<Bound<'py, PyAny>>> {
        match self {
            Self::Dict(dict, key) => dict.get_item(key),
            Self::List(list, index) => Ok(list.get_item(*index).ok()),
            Self::Tuple => Ok(None),
            Self::Nth(places, number) => places.get(*number)?.get(),
        }
    }
}

/// An array object and where it stands.
pub struct Slot<'py> {
    /// Its place.
    pub place: Place<'py>,
    /// The `mx.array` object.
    pub object: Bound<'py, PyAny>,
}

impl Slot<'_> {
    /// Show another value in the slot: in the same object if nobody else refers to it, else in a new one.
    pub fn show(&self, array: &Array) -> PyResult<()> {
        if self.is_unshared() {
            bridge::assign(&self.object, array);
            return Ok(());
        }
        self.put(array)
    }

    /// Put a new object with another value into the slot.
    pub fn put(&self, array: &Array) -> PyResult<()> {
        self.place.set(&bridge::wrap(self.object.py(), array)?)
    }

    /// Give the object a hollow value, unless others refer to it than its container and this number of slots.
    pub fn empty(&self, hollow: &Array, slots: isize) {
        if bridge::refcount(&self.object) == 1 + slots {
            bridge::assign(&self.object, hollow);
        }
    }

    /// Return whether the object has this value.
    pub fn holds(&self, array: &Array) -> bool {
        bridge::id(&self.object) == Some(faststep::engine::array::id(array))
    }

    /// Return whether only the slot's container and this struct refer to the object.
    pub fn is_unshared(&self) -> bool {
        bridge::refcount(&self.object) == 2
    }
}
