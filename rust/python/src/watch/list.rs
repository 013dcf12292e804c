//! The list, and the look that compares it.
use pyo3::{
    prelude::*,
    types::{PyList, PyTuple},
};

use super::entry::{Expect, Place, Reading};
use crate::mlx::collector::{Collector, Refers, Visited};

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
        for (at, entry) in self.entries.iter().enumerate() {
            if !entry.place.holds(&entry.expect, loss_fn)? {
                return Ok(Some(at));
            }
        }
        Ok(None)
    }

    /// Return whether an array of it is no longer there: another one may be there for good.
    pub fn is_stale(&self, loss_fn: &Bound<'_, PyAny>) -> PyResult<bool> {
        let arrays = self.entries.iter();
        for entry in arrays.filter(|entry| matches!(entry.expect, Expect::Array(_))) {
            if !entry.place.holds(&entry.expect, loss_fn)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Return whether an array of this identity is on it.
    pub fn has(&self, id: usize) -> bool {
        let arrays = self.entries.iter();
        let mut ids = arrays.filter_map(|entry| match &entry.expect {
            Expect::Array(array) => Some(faststep::engine::array::id(array)),
            _ => None,
        });
        ids.any(|it| it == id)
    }

    /// The text of an entry, as a user writes it: `cfg["beta"]`.
    pub fn name(&self, entry: usize) -> &str {
        self.names.get(entry).map_or("", String::as_str)
    }

    /// All Python code that may run in a call, as a set.
    pub fn codes<'py>(&self, py: Python<'py>) -> &Bound<'py, PyAny> {
        self.codes.bind(py)
    }
}
