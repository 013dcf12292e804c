//! `optimizer.state` of an optimizer whose moments lie in flat buffers.
//!
//! The dicts are MLX's own and stay where they are. Between steps their arrays are hollow, unless somebody holds one of
//! the dicts or has read the property since: then they are views of the buffers.
use faststep::step::Engine;
use mlx_rs::{error::Result as MlxResult, Array};
use pyo3::{
    intern,
    prelude::*,
    types::{PyDict, PyList},
};

use crate::{
    bridge,
    walk::{Place, Slot},
};

/// The dicts of one optimizer that is updated natively.
pub struct Moments {
    state: Py<PyDict>,
    entries: Vec<Py<PyDict>>, // by tensor
    containers: Vec<Py<PyAny>>,
    names: &'static [&'static str],
    shown: Option<Vec<Array>>, // what the entries hold, tensor by tensor; None: nothing
}

impl Moments {
    /// Find the entry of each path in an initialised optimizer's state; `None` where one is missing.
    pub fn find(
        optimizer: &Bound<'_, PyAny>,
        paths: &[Vec<String>],
        names: &'static [&'static str],
    ) -> PyResult<Option<Self>> {
        let state = optimizer.getattr(intern!(optimizer.py(), "_state"))?;
        let state = state.cast_into::<PyDict>()?;
        let mut containers: Vec<Py<PyAny>> = Vec::new();
        let mut entries = Vec::with_capacity(paths.len());
        for path in paths {
            let mut at = state.clone().into_any();
            for part in path {
                let next = if let Ok(list) = at.cast::<PyList>() {
                    part.parse().ok().and_then(|i: usize| list.get_item(i).ok())
                } else {
                    at.cast::<PyDict>()
                        .ok()
                        .and_then(|d| d.get_item(part).ok().flatten())
                };
                let Some(next) = next else {
                    return Ok(None);
                };
                if !containers.iter().any(|c| c.is(&next)) {
                    containers.push(next.clone().unbind());
                }
                at = next;
            }
            let Ok(entry) = at.cast_into::<PyDict>() else {
                return Ok(None);
            };
            entries.push(entry.unbind());
        }
        let mut moments = Self {
            state: state.unbind(),
            entries,
            containers,
            names,
            shown: None,
        };
        let shown = moments.slots(optimizer.py())?;
        let arrays = shown.iter().map(|slot| bridge::get(&slot.object)).collect();
        moments.shown = arrays;
        let complete = shown.len() == moments.entries.len() * names.len();
        Ok(complete.then_some(moments))
    }

    fn slots<'py>(&self, py: Python<'py>) -> PyResult<Vec<Slot<'py>>> {
        let mut slots = Vec::with_capacity(self.entries.len() * self.names.len());
        for entry in &self.entries {
            let entry = entry.bind(py);
            for name in self.names {
                let key = pyo3::types::PyString::intern(py, name);
                if let Some(object) = entry.get_item(&key)? {
                    if bridge::is_array(&object) {
                        let place = Place::Dict(entry.clone(), key.into_any());
                        slots.push(Slot { place, object });
                    }
                }
            }
        }
        Ok(slots)
    }

    /// The arrays that the entries show: for each moment, a list by tensor.
    pub fn arrays(&self) -> Vec<Vec<Array>> {
        let shown = self.shown.as_deref().unwrap_or_default();
        let by_name = (0..self.names.len()).map(|n| shown.iter().skip(n).step_by(self.names.len()));
        by_name.map(|arrays| arrays.cloned().collect()).collect()
    }

    /// The slots of step and learning rate.
    pub fn scalars<'py>(&self, py: Python<'py>) -> PyResult<Option<[Slot<'py>; 2]>> {
        let state = self.state.bind(py);
        let slot = |key: &Bound<'py, pyo3::types::PyString>| -> PyResult<Option<Slot<'py>>> {
            let object = state.get_item(key)?.filter(bridge::is_array);
            let place = Place::Dict(state.clone(), key.clone().into_any());
            Ok(object.map(|object| Slot { place, object }))
        };
        let step = slot(intern!(py, "step"))?;
        let rate = slot(intern!(py, "learning_rate"))?;
        Ok(step.zip(rate).map(|(step, rate)| [step, rate]))
    }

    /// Whether this is still the optimizer's state, with nothing in it replaced.
    pub fn is_current(&self, optimizer: &Bound<'_, PyAny>) -> PyResult<bool> {
        let py = optimizer.py();
        if !optimizer
            .getattr(intern!(py, "_state"))?
            .is(self.state.bind(py))
        {
            return Ok(false);
        }
        let Some(shown) = &self.shown else {
            return Ok(true);
        };
        let slots = self.slots(py)?;
        let same = slots.len() == shown.len()
            && slots
                .iter()
                .zip(shown)
                .all(|(slot, array)| bridge::id(&slot.object) == Some(faststep::array::id(array)));
        Ok(same)
    }

    /// Whether somebody else refers to the state or to a part of it, beside `slots` of the call under way.
    pub fn is_held(&self, py: Python<'_>, slots: usize) -> bool {
        let own = isize::try_from(2 + slots).unwrap_or(isize::MAX);
        bridge::refcount(self.state.bind(py).as_any()) > own
            || self
                .containers
                .iter()
                .any(|c| bridge::refcount(c.bind(py)) > 2)
    }

    /// Whether the entries hold their values.
    pub fn is_shown(&self) -> bool {
        self.shown.is_some()
    }

    /// Let the entries go of their values.
    pub fn hide(&mut self, py: Python<'_>) -> PyResult<()> {
        if self.shown.take().is_some() {
            let hollow = faststep::array::hollow();
            for slot in self.slots(py)? {
                slot.show(&hollow)?;
            }
        }
        Ok(())
    }

    /// Put the values into the entries, as views of the buffers.
    pub fn show(&mut self, py: Python<'_>, engine: &Engine) -> PyResult<()> {
        if self.shown.is_some() {
            return Ok(());
        }
        let views = self
            .views(engine)
            .map_err(|e| pyo3::exceptions::PyRuntimeError::new_err(e.what().to_owned()))?;
        for (slot, array) in self.slots(py)?.iter().zip(&views) {
            slot.show(array)?;
        }
        self.shown = Some(views);
        Ok(())
    }

    // tensor by tensor
    fn views(&self, engine: &Engine) -> MlxResult<Vec<Array>> {
        let layout = engine.layout();
        let buffers = engine.state().get(2..).unwrap_or_default();
        let moments = buffers
            .chunks(layout.len())
            .map(|buffers| layout.views(buffers));
        let moments = moments.collect::<MlxResult<Vec<_>>>()?;
        let tensors = 0..self.entries.len();
        Ok(tensors
            .flat_map(|i| moments.iter().map(move |m| m[i].clone()))
            .collect())
    }
}
