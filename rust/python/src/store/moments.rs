//! `optimizer.state` of an optimizer whose moments lie in flat buffers.
//!
//! The dicts are MLX's own and stay where they are. Between steps their arrays are hollow, unless somebody holds one of
//! the dicts or has read the property since: then they are views of the buffers.
use faststep::engine::{codes, Engine, Rules, StateLayout, Tensor};
use mlx_rs::Array;
use pyo3::{
    prelude::*,
    types::{PyDict, PyList, PyString},
};

use crate::{
    mlx::{
        bridge,
        errors::{mlx, to_python},
    },
    optimizer::{leaves, state},
    tree::slot::{Place, Slot},
};

/// The dicts of an optimizer that is updated natively, or of those in a `MultiOptimizer`.
pub struct Moments {
    members: Vec<Py<PyDict>>,     // by rule
    entries: Vec<Py<PyDict>>,     // by tensor
    containers: Vec<Py<PyAny>>,   // of the entries
    ways: Vec<(Part, Key, Part)>, // to containers and entries, each from what it is in
    layout: StateLayout,
    shown: Option<Vec<Array>>, // the arrays of the entries, tensor by tensor; None: none
}

fn slot<'py>(dict: &Bound<'py, PyDict>, name: &str) -> PyResult<Option<Slot<'py>>> {
    let key = PyString::intern(dict.py(), name);
    let object = dict.get_item(&key)?.filter(bridge::is_array);
    let place = Place::Dict(dict.clone(), key.into_any());
    Ok(object.map(|object| Slot { place, object }))
}

/// A part of an optimizer's state, by its number among those of its kind.
#[derive(Clone, Copy)]
enum Part {
    Member(usize),
    Container(usize),
    Entry(usize),
}

/// The place of a part in another one.
enum Key {
    Name(Py<PyString>),
    Index(usize),
}

impl Key {
    fn new(container: &Bound<'_, PyAny>, part: &str) -> Option<Self> {
        if container.is_instance_of::<PyList>() {
            return part.parse().ok().map(Self::Index);
        }
        Some(Self::Name(PyString::intern(container.py(), part).unbind()))
    }

    fn get<'py>(&self, container: &Bound<'py, PyAny>) -> Option<Bound<'py, PyAny>> {
        match self {
            Self::Name(name) => container.cast::<PyDict>().ok()?.get_item(name).ok()?,
            Self::Index(index) => container.cast::<PyList>().ok()?.get_item(*index).ok(),
        }
    }
}

impl Moments {
    /// Find the entry of each path in an initialised optimizer's state; `None` where one is missing. `expected`: the forms of its
    /// arrays.
    pub fn find(
        optimizer: &Bound<'_, PyAny>,
        paths: &[Vec<String>],
        rules: &Rules,
        layout: StateLayout,
        expected: &[Vec<Tensor>],
    ) -> PyResult<Option<Self>> {
        let states = leaves(optimizer)
            .iter()
            .map(state)
            .collect::<PyResult<Vec<_>>>()?;
        let mut moments = Self {
            members: states.into_iter().map(Bound::unbind).collect(),
            entries: Vec::with_capacity(paths.len()),
            containers: Vec::new(),
            ways: Vec::new(),
            layout,
            shown: None,
        };
        for (path, &rule) in paths.iter().zip(rules.of()) {
            if moments.follow(optimizer.py(), path, rule).is_none() {
                return Ok(None);
            }
        }
        moments.recode(optimizer.py(), expected)?;
        let shown = moments.slots(optimizer.py())?;
        let arrays = shown.iter().map(|slot| bridge::get(&slot.object)).collect();
        moments.shown = arrays;
        let names = moments.layout.moments().iter().map(Vec::len);
        let complete = shown.len() == names.sum::<usize>();
        Ok(complete.then_some(moments))
    }

    // note the entry at a path in the state of a rule, and the containers on the way
    fn follow(&mut self, py: Python<'_>, path: &[String], rule: usize) -> Option<()> {
        let mut from = Part::Member(rule);
        let mut at = self.members.get(rule)?.bind(py).clone().into_any();
        for (depth, part) in path.iter().enumerate() {
            let key = Key::new(&at, part)?;
            let next = key.get(&at)?;
            if depth + 1 == path.len() {
                self.ways.push((from, key, Part::Entry(self.entries.len())));
                self.entries.push(next.cast_into::<PyDict>().ok()?.unbind());
                break;
            }
            let known = self.containers.iter().position(|c| c.is(&next));
            let to = Part::Container(known.unwrap_or(self.containers.len()));
            if known.is_none() {
                self.containers.push(next.clone().unbind());
                self.ways.push((from, key, to));
            }
            (from, at) = (to, next);
        }
        Some(())
    }

    // put codes in the place of moments, or moments in that of codes, where the others are expected
    fn recode(&self, py: Python<'_>, expected: &[Vec<Tensor>]) -> PyResult<()> {
        for (at, entry) in self.entries.iter().enumerate() {
            let (entry, names) = (entry.bind(py), &self.layout.moments()[at]);
            let others: &[&str] = match names.len() {
                4 => &codes::PLAIN,
                _ => &codes::CODED,
            };
            let found = others.iter().map(|name| entry.get_item(name));
            let found = found.collect::<PyResult<Vec<_>>>()?;
            let found: Option<Vec<Array>> =
                found.iter().map(|it| bridge::get(it.as_ref()?)).collect();
            let Some(found) = found else {
                continue;
            };
            let Some(made) = codes::recoded(&found, &expected[at]).map_err(mlx)? else {
                continue;
            };
            for name in others {
                entry.del_item(name)?;
            }
            for (moment, array) in names.iter().zip(&made) {
                entry.set_item(PyString::intern(py, moment.name), bridge::wrap(py, array)?)?;
            }
        }
        Ok(())
    }

    fn part<'a, 'py>(&'a self, py: Python<'py>, part: Part) -> &'a Bound<'py, PyAny> {
        match part {
            Part::Member(at) => self.members[at].bind(py).as_any(),
            Part::Container(at) => self.containers[at].bind(py),
            Part::Entry(at) => self.entries[at].bind(py).as_any(),
        }
    }

    // whether each container and entry is where it was; of hidden ones, as far as the states themselves tell
    fn is_in_place(&self, py: Python<'_>) -> bool {
        let ways = self
            .ways
            .iter()
            .filter(|(from, ..)| self.shown.is_some() || matches!(from, Part::Member(_)));
        let mut pairs = ways.map(|(from, key, to)| (key.get(self.part(py, *from)), *to));
        pairs.all(|(found, to)| found.is_some_and(|found| found.is(self.part(py, to))))
    }

    fn slots<'py>(&self, py: Python<'py>) -> PyResult<Vec<Slot<'py>>> {
        let mut slots = Vec::new();
        for (entry, moments) in self.entries.iter().zip(self.layout.moments()) {
            for moment in moments {
                slots.extend(slot(entry.bind(py), moment.name)?);
            }
        }
        Ok(slots)
    }

    /// The arrays that the entries show: for each tensor, a list by name.
    pub fn arrays(&self) -> Vec<&[Array]> {
        let mut rest = self.shown.as_deref().unwrap_or_default();
        let entries = self.layout.moments().iter().map(|moments| {
            let (arrays, others) = rest.split_at(moments.len().min(rest.len()));
            rest = others;
            arrays
        });
        entries.collect()
    }

    /// Names, shapes and places of the arrays.
    pub fn layout(&self) -> &StateLayout {
        &self.layout
    }

    /// The slots of step and learning rate of each optimizer; `None` where one is missing.
    pub fn scalars<'py>(&self, py: Python<'py>) -> PyResult<Option<Vec<Slot<'py>>>> {
        let members = self.members.iter().zip(self.layout.scalars());
        let names =
            members.flat_map(|(state, names)| names.iter().map(|name| (state.bind(py), name)));
        names.map(|(state, name)| slot(state, name)).collect()
    }

    /// Return whether this is still the optimizer's state, with nothing in it replaced.
    pub fn is_current(&self, optimizer: &Bound<'_, PyAny>) -> PyResult<bool> {
        let py = optimizer.py();
        let optimizers = leaves(optimizer);
        if optimizers.len() != self.members.len() {
            return Ok(false);
        }
        for (optimizer, member) in optimizers.iter().zip(&self.members) {
            if !state(optimizer)?.is(member.bind(py)) {
                return Ok(false);
            }
        }
        if !self.is_in_place(py) {
            return Ok(false);
        }
        let Some(shown) = &self.shown else {
            return Ok(true);
        };
        let slots = self.slots(py)?;
        let same = slots.len() == shown.len()
            && slots.iter().zip(shown).all(|(slot, array)| {
                bridge::id(&slot.object) == Some(faststep::engine::array::id(array))
            });
        Ok(same)
    }

    /// Return whether somebody else refers to a state or to a part of it, beside the call under way with the slots of
    /// `scalars`.
    pub fn is_held(&self, py: Python<'_>) -> bool {
        let count = |object: &Bound<'_, PyAny>| bridge::refcount(object).unsigned_abs();
        let mut members = self.members.iter().zip(self.layout.scalars());
        members.any(|(state, scalars)| count(state.bind(py)) > 2 + scalars.len())
            || self.containers.iter().any(|c| count(c.bind(py)) > 2)
            || self.entries.iter().any(|e| count(e.bind(py)) > 2)
    }

    /// Return the arrays of the entries, tensor by tensor; none where they are hollow.
    pub fn shown(&self) -> &[Array] {
        self.shown.as_deref().unwrap_or_default()
    }

    /// Return whether the entries hold their values.
    pub fn is_shown(&self) -> bool {
        self.shown.is_some()
    }

    /// Let the entries go of their values.
    pub fn hide(&mut self, py: Python<'_>) -> PyResult<()> {
        if self.shown.take().is_some() {
            let hollow = faststep::engine::array::hollow();
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
        let views = engine.moments(&self.layout).map_err(|e| to_python(&e))?;
        for (slot, array) in self.slots(py)?.iter().zip(&views) {
            slot.show(array)?;
        }
        self.shown = Some(views);
        Ok(())
    }
}
