//! Contents of containers, to be restored.
use pyo3::{
    prelude::*,
    types::{PyDict, PyList, PyTuple},
};

use super::{
    slot::Place,
    walk::{walk, Kind, Visitor, MAX_DEPTH},
};
use crate::mlx::bridge;

/// The contents of every container of a tree, to be put back.
#[derive(Default)]
pub struct Snapshot<'py> {
    dicts: Vec<(Bound<'py, PyDict>, Bound<'py, PyDict>)>,
    lists: Vec<(Bound<'py, PyList>, Bound<'py, PyList>)>,
    error: Option<PyErr>,
}

impl<'py> Snapshot<'py> {
    /// Note the contents of `root` and of everything in it.
    pub fn take(root: &Bound<'py, PyAny>) -> PyResult<Self> {
        let mut snapshot = Self::default();
        snapshot.note_all(root)?;
        Ok(snapshot)
    }

    /// Note the contents of another root and of everything in it too.
    pub fn note_all(&mut self, root: &Bound<'py, PyAny>) -> PyResult<()> {
        walk(root.clone(), Place::Tuple, 0, self);
        self.error.take().map_or(Ok(()), Err)
    }

    /// Return whether an array has been put where there was none, or something else.
    pub fn has_new_arrays(&self) -> PyResult<bool> {
        for (dict, copy) in &self.dicts {
            for (key, value) in dict.iter() {
                let before = copy.get_item(&key)?;
                if !before.is_some_and(|before| before.is(&value)) && has_array(&value, 0) {
                    return Ok(true);
                }
            }
        }
        for (list, copy) in &self.lists {
            for (at, value) in list.iter().enumerate() {
                let before = copy.get_item(at).ok();
                if !before.is_some_and(|before| before.is(&value)) && has_array(&value, 0) {
                    return Ok(true);
                }
            }
        }
        Ok(false)
    }

    /// Put everything back.
    pub fn restore(&self) -> PyResult<()> {
        for (dict, copy) in &self.dicts {
            dict.clear();
            dict.update(copy.as_mapping())?;
        }
        for (list, copy) in &self.lists {
            list.set_slice(0, list.len(), copy.as_any())?;
        }
        Ok(())
    }

    /// Note the contents of one dict or list.
    pub fn note(&mut self, container: &Bound<'py, PyAny>) -> PyResult<()> {
        if let Ok(dict) = container.cast::<PyDict>() {
            self.dicts.push((dict.clone(), dict.copy()?));
        } else if let Ok(list) = container.cast::<PyList>() {
            self.lists
                .push((list.clone(), list.get_slice(0, list.len())));
        }
        Ok(())
    }
}

fn has_array(object: &Bound<'_, PyAny>, depth: usize) -> bool {
    if bridge::is_array(object) {
        return true;
    }
    if depth > MAX_DEPTH {
        return false;
    }
    if let Ok(dict) = object.cast::<PyDict>() {
        return dict
            .values()
            .iter()
            .any(|value| has_array(&value, depth + 1));
    }
    let items = match object.cast::<PyList>() {
        Ok(list) => list.as_sequence().to_list(),
        Err(_) if object.is_instance_of::<PyTuple>() => object
            .cast::<PyTuple>()
            .map(PyTupleMethods::to_list)
            .map_err(Into::into),
        Err(_) => return false,
    };
    items.is_ok_and(|items| items.iter().any(|item| has_array(&item, depth + 1)))
}

impl<'py> Visitor<'py> for Snapshot<'py> {
    fn open(&mut self, kind: Kind, container: &Bound<'py, PyAny>, _: usize) -> Option<()> {
        if kind == Kind::Optimizer {
            return Some(());
        }
        self.note(container).map_err(|e| self.error = Some(e)).ok()
    }

    fn key(&mut self, _: &Bound<'py, PyAny>) -> Option<()> {
        Some(())
    }

    fn array(&mut self, _: Place<'py>, _: Bound<'py, PyAny>) -> Option<()> {
        Some(())
    }

    fn leaf(&mut self, _: &Bound<'py, PyAny>) -> Option<()> {
        Some(())
    }

    fn skips(&self, _: &str) -> bool {
        false
    }
}
