//! Tracers in the places of the arrays among the arguments, while the loss is called.
use std::collections::{HashMap, HashSet};

use faststep::engine::array::id;
use mlx_rs::{Array, Dtype};
use pyo3::{
    prelude::*,
    types::{PyDict, PyList, PyTuple},
};

use crate::{
    mlx::{bridge, classes::is_module, errors::mlx},
    tree::{ordered, rebuild::again, walk::fields},
};

/// Arguments in whose own dicts, lists and dataclasses tracers stand, so that all else that the loss does to these is the user's to
/// see. Each place has a tracer of its own, as MLX gives each a copy.
pub struct LentArguments<'py> {
    of_model: HashSet<usize>,
    made: HashMap<usize, (usize, Dtype)>, // by the address of each object: the tracer's identity, and the user's dtype
    places: Vec<(Holder<'py>, Bound<'py, PyAny>, Bound<'py, PyAny>)>, // with the user's object, and the one in its place
}

enum Holder<'py> {
    Item(Bound<'py, PyDict>, Bound<'py, PyAny>),
    Index(Bound<'py, PyList>, usize),
    Field(Bound<'py, PyAny>, Bound<'py, PyAny>),
}

impl<'py> Holder<'py> {
    fn get(&self) -> PyResult<Option<Bound<'py, PyAny>>> {
        match self {
            Self::Item(dict, key) => dict.get_item(key),
            Self::Index(list, at) => Ok(list.get_item(*at).ok()),
            Self::Field(object, name) => object.getattr_opt(name.cast::<pyo3::types::PyString>()?),
        }
    }

    fn set(&self, value: &Bound<'py, PyAny>) -> PyResult<()> {
        match self {
            Self::Item(dict, key) => dict.set_item(key, value),
            Self::Index(list, at) => list.set_item(*at, value),
            Self::Field(object, name) => {
                // a frozen dataclass refuses its own
                let set = object.py().get_type::<PyAny>().getattr("__setattr__")?;
                set.call1((object, name, value)).map(drop)
            }
        }
    }
}

impl<'py> LentArguments<'py> {
    /// The arguments with a tracer for each array, in the order of a tree.
    ///
    /// `of_model`: the identities of the tracers of the model, one of whose dicts may be among the arguments.
    pub fn put(
        arguments: &Bound<'py, PyTuple>,
        tracers: &[Array],
        of_model: &[usize],
    ) -> PyResult<(Self, Bound<'py, PyAny>)> {
        let mut lent = Self {
            made: HashMap::new(),
            of_model: of_model.iter().copied().collect(),
            places: Vec::new(),
        };
        let mut next = tracers.iter();
        match lent.replace_all(arguments, &mut next) {
            Ok(replaced) => Ok((lent, replaced)),
            Err(error) => {
                lent.take_back()?;
                Err(error)
            }
        }
    }

    // the positional arguments, and the dict of the named ones, which is the call's
    fn replace_all(
        &mut self,
        arguments: &Bound<'py, PyTuple>,
        tracers: &mut std::slice::Iter<'_, Array>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let positional = self.replace(&arguments.get_item(0)?, tracers)?;
        let named = PyDict::new(arguments.py());
        for (name, value) in arguments.get_item(1)?.cast::<PyDict>()? {
            named.set_item(name, self.replace(&value, tracers)?)?;
        }
        Ok(PyTuple::new(arguments.py(), [positional, named.into_any()])?.into_any())
    }

    fn replace(
        &mut self,
        object: &Bound<'py, PyAny>,
        tracers: &mut std::slice::Iter<'_, Array>,
    ) -> PyResult<Bound<'py, PyAny>> {
        if bridge::is_array(object) {
            let Some(tracer) = tracers.next() else {
                return Ok(object.clone());
            };
            if bridge::id(object).is_some_and(|id| self.of_model.contains(&id)) {
                return Ok(object.clone());
            }
            let made = bridge::wrap(object.py(), tracer)?;
            let dtype = bridge::get(object).map_or(Dtype::Float32, |array| array.dtype());
            self.made.insert(made.as_ptr().addr(), (id(tracer), dtype));
            return Ok(made);
        }
        if let Ok(dict) = object.cast::<PyDict>() {
            if !is_module(object) {
                for (key, value) in ordered::items(dict) {
                    self.put_into(Holder::Item(dict.clone(), key), value, tracers)?;
                }
            }
        } else if let Ok(list) = object.cast::<PyList>() {
            for (at, value) in list.iter().enumerate() {
                self.put_into(Holder::Index(list.clone(), at), value, tracers)?;
            }
        } else if let Ok(tuple) = object.cast::<PyTuple>() {
            let items = tuple.iter().map(|item| self.replace(&item, tracers));
            let items = items.collect::<PyResult<Vec<_>>>()?;
            if tuple.iter().zip(&items).all(|(old, now)| old.is(now)) {
                return Ok(object.clone());
            }
            return again(tuple, items);
        } else if let Some(names) = fields(object) {
            for name in names {
                let value = object.getattr(&name)?;
                let holder = Holder::Field(object.clone(), name.into_any());
                self.put_into(holder, value, tracers)?;
            }
        }
        Ok(object.clone())
    }

    fn put_into(
        &mut self,
        holder: Holder<'py>,
        value: Bound<'py, PyAny>,
        tracers: &mut std::slice::Iter<'_, Array>,
    ) -> PyResult<()> {
        let now = self.replace(&value, tracers)?;
        if !now.is(&value) {
            holder.set(&now)?;
            self.places.push((holder, value, now));
        }
        Ok(())
    }

    /// Put the user's objects back, but where the loss has changed the one in their place.
    pub fn take_back(self) -> PyResult<()> {
        for (holder, own, now) in &self.places {
            let stands = holder.get()?.is_some_and(|there| there.is(now));
            if stands && !self.is_changed(now)? {
                holder.set(own)?;
            }
        }
        Ok(())
    }

    // true if an array has been changed in place; it gets the dtype that it had outside of mixed precision
    fn is_changed(&self, now: &Bound<'py, PyAny>) -> PyResult<bool> {
        if let Ok(tuple) = now.cast::<PyTuple>() {
            for item in tuple {
                if self.is_changed(&item)? {
                    return Ok(true);
                }
            }
            return Ok(false);
        }
        let Some((tracer, dtype)) = self.made.get(&now.as_ptr().addr()) else {
            return Ok(false);
        };
        match bridge::get(now).filter(|array| id(array) != *tracer) {
            Some(array) => {
                bridge::assign(now, &array.as_dtype(*dtype).map_err(mlx)?);
                Ok(true)
            }
            None => Ok(false),
        }
    }

    /// The positional arguments behind the model, and the named ones.
    pub fn split(
        model: &Bound<'py, PyAny>,
        arguments: &Bound<'py, PyAny>,
    ) -> PyResult<(Bound<'py, PyTuple>, Bound<'py, PyDict>)> {
        let py = model.py();
        let positional = arguments.get_item(0)?.cast_into::<PyTuple>()?;
        let named = arguments.get_item(1)?.cast_into::<PyDict>()?;
        let all = std::iter::once(model.clone()).chain(positional.iter());
        Ok((PyTuple::new(py, all.collect::<Vec<_>>())?, named))
    }
}
