//! Contents of the containers in an optimizer, to be put back.
use std::collections::HashSet;

use pyo3::{
    intern,
    prelude::*,
    types::{PyDict, PyFrozenSet, PyList, PySet},
};

use super::{
    ordered,
    slot::Place,
    walk::{walk, Kind, Visitor},
};
use crate::mlx::bridge;

/// The contents of every dict, list and set in an object.
#[derive(Default)]
pub struct Snapshot<'py> {
    dicts: Vec<Contents<'py>>,
    lists: Vec<(Bound<'py, PyList>, Bound<'py, PyList>)>, // with a copy
    sets: Vec<(Bound<'py, PySet>, Bound<'py, PyFrozenSet>)>, // with a copy
    met: HashSet<usize>,                                  // the addresses of all these
    error: Option<PyErr>,
}

struct Contents<'py> {
    dict: Bound<'py, PyDict>,
    copy: Bound<'py, PyDict>,
    order: Option<Bound<'py, PyList>>, // the keys of an `OrderedDict`
}

impl<'py> Snapshot<'py> {
    /// Note the contents of `root` and of everything in it.
    ///
    /// # Errors
    /// When an `OrderedDict` or a set cannot be read.
    pub fn take(root: &Bound<'py, PyAny>) -> PyResult<Self> {
        let mut snapshot = Self::default();
        walk(root.clone(), Place::Tuple, &mut snapshot);
        match snapshot.error.take() {
            None => Ok(snapshot),
            Some(error) => Err(error),
        }
    }

    /// Put everything back.
    ///
    /// # Errors
    /// When a method of an `OrderedDict` or a set fails.
    pub fn restore(&self) -> PyResult<()> {
        for each in &self.dicts {
            each.restore()?;
        }
        for (list, copy) in &self.lists {
            list.set_slice(0, list.len(), copy.as_any())?;
        }
        for (set, copy) in &self.sets {
            refill(set, copy)?;
        }
        Ok(())
    }

    fn note(&mut self, container: &Bound<'py, PyAny>) -> PyResult<()> {
        if !self.met.insert(container.as_ptr().addr()) {
            return Ok(());
        }
        if let Ok(dict) = container.cast::<PyDict>() {
            self.dicts.push(Contents {
                dict: dict.clone(),
                copy: dict.copy()?,
                order: ordered::keys(dict)?,
            });
        } else if let Ok(list) = container.cast::<PyList>() {
            let copy = list.get_slice(0, list.len());
            self.lists.push((list.clone(), copy));
        } else if let Ok(set) = container.cast::<PySet>() {
            let copy = PyFrozenSet::new(set.py(), set.iter())?;
            self.sets.push((set.clone(), copy));
        }
        Ok(())
    }

    fn noted(&mut self, container: &Bound<'py, PyAny>) -> Option<()> {
        let noted = self.note(container);
        noted.map_err(|error| self.error = Some(error)).ok()
    }
}

impl Contents<'_> {
    fn restore(&self) -> PyResult<()> {
        let Self { dict, copy, order } = self;
        let is_same_order = match (order, ordered::keys(dict)?) {
            (Some(order), Some(now)) => has_same(order, &now),
            _ => true,
        };
        if is_same_order && bridge::has_same_items(dict, copy) {
            return Ok(());
        }
        ordered::refill(dict, copy, order.as_ref())
    }
}

fn has_same(one: &Bound<'_, PyList>, other: &Bound<'_, PyList>) -> bool {
    one.len() == other.len() && one.iter().zip(other.iter()).all(|(a, b)| a.is(&b))
}

// Calls the methods of `set`: a user's class may have its own. Members that stay are not removed, which would change their order.
fn refill(set: &Bound<'_, PySet>, copy: &Bound<'_, PyFrozenSet>) -> PyResult<()> {
    let py = set.py();
    let class = py.get_type::<PySet>();
    let added = class.call_method1(intern!(py, "difference"), (set, copy))?;
    class.call_method1(intern!(py, "difference_update"), (set, added))?;
    class.call_method1(intern!(py, "update"), (set, copy))?;
    Ok(())
}

impl<'py> Visitor<'py> for Snapshot<'py> {
    fn open(&mut self, kind: Kind, container: &Bound<'py, PyAny>, _: usize) -> Option<()> {
        match kind {
            Kind::Optimizer => Some(()), // its attributes come next
            _ => self.noted(container),
        }
    }

    fn key(&mut self, _: &Bound<'py, PyAny>) -> Option<()> {
        Some(())
    }

    fn array(&mut self, _: Place<'py>, _: Bound<'py, PyAny>) -> Option<()> {
        Some(())
    }

    fn leaf(&mut self, object: &Bound<'py, PyAny>) -> Option<()> {
        if object.is_instance_of::<PySet>() {
            return self.noted(object);
        }
        Some(())
    }

    fn skips(&self, _: &str) -> bool {
        false
    }
}
