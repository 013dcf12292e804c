//! The place of an array object in a tree.
use std::{cell::OnceCell, rc::Rc};

use mlx_rs::Array;
use pyo3::{
    prelude::*,
    types::{PyDict, PyList, PyString, PyTuple},
};

use super::{text::text, Tree};
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
    /// That of the array of this number in a tree, to be found when it is asked for.
    Nth(Rc<Places<'py>>, usize),
}

/// The places of a tree's arrays, which are found at the first question.
pub struct Places<'py> {
    root: Bound<'py, PyAny>,
    found: OnceCell<Vec<Place<'py>>>,
}

impl<'py> Places<'py> {
    /// Those of the tree that this object is.
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
            let (_, slots) = Tree::of_model(&self.root)?;
            let places = slots.into_iter().map(|slot| slot.place).collect();
            self.found.get_or_init(|| places)
        };
        Ok(found.get(number).unwrap_or(&Place::Tuple))
    }
}

impl<'py> Place<'py> {
    /// The place at the end of a path of keys and indices from an object; none in a tuple.
    pub fn at(root: &Bound<'py, PyAny>, path: &[String]) -> Option<Self> {
        let mut place = None;
        let mut object = root.clone();
        for part in path {
            let next = match object.cast::<PyList>() {
                Ok(list) => Some(Self::List(list.clone(), part.parse().ok()?)),
                Err(_) => [
                    object.cast::<PyDict>().ok().cloned(),
                    bridge::attributes(&object),
                ]
                .into_iter()
                .flatten()
                .find_map(|dict| {
                    let direct = PyString::new(dict.py(), part).into_any();
                    if dict.contains(&direct).unwrap_or(false) {
                        return Some(Self::Dict(dict, direct));
                    }
                    let key = dict.keys().iter().find(|key| text(key) == *part)?;
                    Some(Self::Dict(dict, key))
                }),
            };
            place = next;
            object = match place.as_ref() {
                Some(place) => place.get().ok()??,
                None => object
                    .cast::<PyTuple>()
                    .ok()?
                    .get_item(part.parse().ok()?)
                    .ok()?,
            };
        }
        place
    }

    /// The same in another dict or list.
    pub fn within(&self, container: &Bound<'py, PyAny>) -> Option<Self> {
        match self {
            Self::Dict(_, key) => Some(Self::Dict(container.cast().ok()?.clone(), key.clone())),
            Self::List(_, at) => Some(Self::List(container.cast().ok()?.clone(), *at)),
            _ => None,
        }
    }

    /// Return whether both are one place, where that is known.
    pub fn is(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Dict(one, key), Self::Dict(other, name)) => {
                one.is(other) && key.eq(name).unwrap_or(false)
            }
            (Self::List(one, at), Self::List(other, index)) => one.is(other) && at == index,
            _ => false,
        }
    }

    /// The address of the dict or list; 0 where there is none, or it has not been looked for.
    pub fn container(&self) -> usize {
        match self {
            Self::Dict(dict, _) => dict.as_ptr().addr(),
            Self::List(list, _) => list.as_ptr().addr(),
            Self::Tuple | Self::Nth(..) => 0,
        }
    }

    /// The dict or list, where it is known.
    pub fn object(&self) -> Option<Bound<'py, PyAny>> {
        match self {
            Self::Dict(dict, _) => Some(dict.clone().into_any()),
            Self::List(list, _) => Some(list.clone().into_any()),
            Self::Tuple | Self::Nth(..) => None,
        }
    }

    /// The key or index in that, where it is known.
    pub fn key(&self, py: Python<'py>) -> PyResult<Option<Py<PyAny>>> {
        Ok(match self {
            Self::Dict(_, key) => Some(key.clone().unbind()),
            Self::List(_, index) => Some(index.into_pyobject(py)?.into_any().unbind()),
            Self::Tuple | Self::Nth(..) => None,
        })
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

    /// Return whether an array stands there now.
    pub fn holds_array(&self) -> PyResult<bool> {
        Ok(self.get()?.is_some_and(|now| bridge::is_array(&now)))
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
