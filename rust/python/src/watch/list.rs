//! The list, and the look that compares it.
use mlx_rs::Array;
use pyo3::{
    prelude::*,
    types::{PyList, PyTuple},
};

use super::entry::{Expect, Place, Reading};
use crate::mlx::{
    bridge,
    collector::{Collector, Refers, Visited},
};

/// Places that a loss reads, and what was there.
pub struct WatchList {
    entries: Vec<Entry>,
    names: Vec<String>,
    codes: Py<PyAny>, // a set of all Python code that the search has read
}

struct Entry {
    place: Place,
    expect: Expect,
}

impl Refers for WatchList {
    fn visit(&self, collector: &mut Collector<'_>) -> Visited {
        self.codes.visit(collector)?;
        self.entries.iter().try_for_each(|entry| {
            entry.place.visit(collector)?;
            entry.expect.visit(collector)
        })
    }
}

impl WatchList {
    /// Make a list of the entries that `faststep._reach.search` returns.
    pub fn new(py: Python<'_>, entries: &Bound<'_, PyList>, codes: Py<PyAny>) -> PyResult<Self> {
        let reading = Reading::new(py)?;
        let mut list = Self {
            entries: Vec::with_capacity(entries.len()),
            names: Vec::with_capacity(entries.len()),
            codes,
        };
        for entry in entries {
            let entry = entry.cast_into::<PyTuple>()?;
            let (parent, way, key, value, name): (
                Bound<'_, PyAny>,
                String,
                Bound<'_, PyAny>,
                Bound<'_, PyAny>,
                String,
            ) = entry.extract()?;
            list.entries.push(Entry {
                place: reading.place(&parent, &way, &key)?,
                expect: reading.expect(&way, &value)?,
            });
            list.names.push(name);
        }
        Ok(list)
    }

    /// Compare every entry. Returns the first that does not hold; `None` if all do.
    pub fn look(&self, loss_fn: &Bound<'_, PyAny>) -> PyResult<Option<usize>> {
        self.look_from(loss_fn, 0)
    }

    /// Compare the entries from this one on: to go on behind an array that is another one now.
    pub fn look_from(&self, loss_fn: &Bound<'_, PyAny>, first: usize) -> PyResult<Option<usize>> {
        for (at, entry) in self.entries.iter().enumerate().skip(first) {
            if !entry.place.holds(&entry.expect, loss_fn)? {
                return Ok(Some(at));
            }
        }
        Ok(None)
    }

    /// The text of an entry, as a user writes it: `cfg["beta"]`.
    pub fn name(&self, entry: usize) -> &str {
        self.names.get(entry).map_or("", String::as_str)
    }

    /// The arrays: the identity of each value, and its entry.
    pub fn arrays(&self) -> Vec<(usize, usize)> {
        let entries = self.entries.iter().enumerate();
        let arrays = entries.filter_map(|(at, entry)| match entry.expect {
            Expect::Array(_, id) => Some((id, at)),
            _ => None,
        });
        arrays.collect()
    }

    /// The array that is at an entry now.
    pub fn array(&self, loss_fn: &Bound<'_, PyAny>, entry: usize) -> PyResult<Option<Array>> {
        let Some(entry) = self.entries.get(entry) else {
            return Ok(None);
        };
        let found = entry.place.find(loss_fn)?;
        Ok(found.and_then(|object| bridge::get(&object)))
    }

    /// Expect the array that is at an entry now. Returns it; `None` if no array was expected there, or none is there.
    pub fn renew(&mut self, loss_fn: &Bound<'_, PyAny>, entry: usize) -> PyResult<Option<Array>> {
        let Some(array) = self.array(loss_fn, entry)? else {
            return Ok(None);
        };
        let expect = self.entries.get_mut(entry).map(|entry| &mut entry.expect);
        let Some(Expect::Array(known, id)) = expect else {
            return Ok(None);
        };
        *id = faststep::engine::array::id(&array);
        *known = array.clone();
        Ok(Some(array))
    }

    /// Number of entries.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// All Python code that may run in a call, as a set.
    pub fn codes<'py>(&self, py: Python<'py>) -> &Bound<'py, PyAny> {
        self.codes.bind(py)
    }
}
