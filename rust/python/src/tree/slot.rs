//! The place of an array object in a tree.
use mlx_rs::Array;
use pyo3::{
    prelude::*,
    types::{PyDict, PyList},
};

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
}

impl<'py> Place<'py> {
    /// The address of the dict or list.
    pub fn container(&self) -> usize {
        match self {
            Self::Dict(dict, _) => dict.as_ptr().addr(),
            Self::List(list, _) => list.as_ptr().addr(),
            Self::Tuple => 0,
        }
    }

    /// Put another object there.
    pub fn set(&self, object: &Bound<'py, PyAny>) -> PyResult<()> {
        match self {
            Self::Dict(dict, key) => dict.set_item(key, object),
            Self::List(list, index) => list.set_item(*index, object),
            Self::Tuple => Ok(()),
        }
    }

    /// The object that stands there now.
    pub fn get(&self) -> PyResult<Option<Bound<'py, PyAny>>> {
        match self {
            Self::Dict(dict, key) => dict.get_item(key),
            Self::List(list, index) => Ok(list.get_item(*index).ok()),
            Self::Tuple => Ok(None),
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
    /// Show another value in the slot: in the same object when nobody else refers to it, else in a new one.
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

    /// Let the object go of its value, unless somebody refers to it beside its container and so many slots.
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
