//! What a loss leaves in what it reaches, and how that is put back.
use std::collections::HashSet;

use pyo3::{
    intern,
    prelude::*,
    types::{PyDict, PyFrozenSet, PyList, PyString, PyTuple},
};

use super::{
    contents::{contents, copy, refill},
    looked::{Looked, Spot},
    node::{attributes_of, Expect, How},
};
use crate::{
    mlx::{bridge, classes::is_deque},
    tree::{
        snapshot::{has_members, holds_array, Snapshot},
        static_value::equal,
        text::text,
        walk::Scope,
        Tree,
    },
};

impl Looked {
    /// The place of a number or an object in which something with arrays stands now; not of what a snapshot shows.
    pub fn new_array(&self, py: Python<'_>) -> Option<String> {
        let objects = self.bound(py);
        let mut nodes = self.program.nodes.iter().enumerate();
        let at = nodes.find(|(at, node)| {
            let Some(now) = node.find(&objects, &[]) else {
                return false;
            };
            match &node.expect {
                Expect::Array => false,
                Expect::Value(..) if node.fits_value(&now) && !now.is_instance_of::<PyTuple>() => {
                    false // of a class that holds none
                }
                Expect::Value(..) | Expect::Absent => holds_array(&now, &mut HashSet::new()),
                _ => {
                    node.how.stands_alone()
                        && !self.object(*at, py).is_some_and(|before| before.is(&now))
                        && holds_array(&now, &mut HashSet::new())
                }
            }
        });
        at.map(|(at, _)| self.program.name(py, at))
    }

    /// Copies of the sets, queues and NumPy arrays that may be changed in place, with their nodes.
    pub fn copies<'py>(&self, py: Python<'py>) -> PyResult<Vec<(usize, Bound<'py, PyAny>)>> {
        let mut copies = Vec::new();
        for (at, node) in self.program.nodes.iter().enumerate() {
            let (Expect::Contents(..), Some(object)) = (&node.expect, self.object(at, py)) else {
                continue;
            };
            let noted = object.is_instance_of::<PyDict>() || object.is_instance_of::<PyList>();
            let fixed =
                object.is_instance_of::<PyTuple>() || object.is_instance_of::<PyFrozenSet>();
            if !noted && !fixed {
                copies.push((at, copy(&object)?));
            }
        }
        Ok(copies)
    }

    /// Return whether the contents at a node are those of the last look.
    pub fn has_contents(&self, py: Python<'_>, node: usize) -> PyResult<bool> {
        match (&self.program.nodes[node].expect, self.object(node, py)) {
            (Expect::Contents(_, number, _), Some(object)) => {
                Ok(equal(self.values[*number].bind(py), &contents(&object)?))
            }
            _ => Ok(true),
        }
    }

    /// The place of a queue or a set in which arrays stand now.
    pub fn contents_with_array(&self, py: Python<'_>, node: usize) -> Option<String> {
        let object = self.object(node, py)?;
        if object.hasattr(intern!(py, "readline")).unwrap_or(false) {
            return None; // a look at what is in a stream would take it
        }
        let mut items = object.try_iter().ok()?;
        let has = items.any(|item| item.is_ok_and(|item| bridge::is_array(&item)));
        has.then(|| self.program.name(py, node))
    }

    // give the object at a node the contents of a copy
    fn refill(&self, node: usize, copy: &Bound<'_, PyAny>) -> PyResult<()> {
        match self.object(node, copy.py()) {
            Some(object) => refill(&object, copy),
            None => Ok(()),
        }
    }

    /// Return whether something has changed that is in no container and no object: what is in a cell, say, or in a set.
    pub fn has_changed(&self, py: Python<'_>) -> PyResult<bool> {
        let spots = self.spots(py)?;
        let moved = |spot: &Spot<'_>| !self.now(spot).is_some_and(|now| now.is(&spot.object));
        Ok(spots.iter().any(moved)
            || self.new_array(py).is_some()
            || !self.changed(py).is_empty()
            || self.other_value(py)?.is_some()
            || self.gone(py).is_some()
            || !self.program.classes.made(py)?.is_empty()
            || !self.made_states(py)?.is_empty())
    }

    /// The name of a value that is another one now, wherever it stands, or of an object that is made up in another way.
    pub fn other_value(&self, py: Python<'_>) -> PyResult<Option<String>> {
        let objects = self.bound(py);
        for (at, node) in self.program.nodes.iter().enumerate() {
            let same = match &node.expect {
                _ if node.how == How::Root => true,
                Expect::Value(_, number) => {
                    let now = node.find(&objects, &[]);
                    now.is_some_and(|now| equal(self.values[*number].bind(py), &now))
                }
                Expect::Contents(..) => self.has_contents(py, at)?,
                Expect::Module(tree, _, (number, _)) => {
                    let now = self.object(at, py);
                    let now = now.map(|module| Tree::record(&module, Scope::Whole));
                    now.transpose()?.map_or(Ok(true), |(now, _)| {
                        let numbers = now.number_values(py)?;
                        Ok::<_, PyErr>(
                            tree.equals_but_numbers(&now, py)
                                && equal(self.values[*number].bind(py), numbers.as_any()),
                        )
                    })?
                }
                _ => {
                    let now = node.find(&objects, &[]);
                    if let Some(name) = now.as_ref().map(|now| self.new_attribute(at, now)) {
                        if let Some(name) = name? {
                            let object = self.program.name(py, at);
                            return Ok(Some(format!("{object}.{name}")));
                        }
                    }
                    let absent = matches!(node.expect, Expect::Absent);
                    now.map_or(absent, |now| node.is_made_up(&now, &objects))
                }
            };
            if !same {
                return Ok(Some(self.program.name(py, at)));
            }
        }
        Ok(None)
    }

    // an attribute of an object that it did not have, and whose name is one that code reads
    fn new_attribute(&self, at: usize, now: &Bound<'_, PyAny>) -> PyResult<Option<String>> {
        let py = now.py();
        let expect = &self.program.nodes[at].expect;
        let (Expect::Object(_, known), Some(attributes)) = (expect, bridge::attributes(now)) else {
            return Ok(None);
        };
        if *known == Some(attributes.len()) {
            return Ok(None);
        }
        let nodes = self.program.nodes.iter();
        let known = nodes.filter(|node| node.parent == Some(at));
        let known: HashSet<_> = known.filter_map(|node| Some(text(node.key(py)?))).collect();
        for name in attributes.keys().iter().map(|name| text(&name)) {
            if !known.contains(&name) && self.may_read(vec![name.clone()], py)? {
                return Ok(Some(name));
            }
        }
        Ok(None)
    }

    /// The name of an array that is one of these, by their identities.
    pub fn array_among(&self, ids: &HashSet<usize>, py: Python<'_>) -> Option<String> {
        let known = self.arrays.ids().iter().enumerate();
        let mut among = known.filter(|(_, id)| ids.contains(id));
        among.find_map(|(at, _)| self.named(at, py))
    }

    // the name of an array, unless it is one of a module, which is looked at as a whole, and no code names it
    fn named(&self, array: usize, py: Python<'_>) -> Option<String> {
        let name = self.name(py, array);
        let node = self.program.arrays().get(array).copied();
        let of_module = node.map(|at| &self.program.nodes[at].expect);
        let last = name.rsplit('.').next().unwrap_or_default().to_owned();
        let is_read = !matches!(of_module, Some(Expect::Module(..)))
            || self.may_read(vec![last], py).unwrap_or(true);
        is_read.then_some(name)
    }

    /// The name of an array that is another one now, but for those that were these.
    pub fn other_array(&self, but: &HashSet<usize>, py: Python<'_>) -> PyResult<Option<String>> {
        let spots = self.spots(py)?;
        let pairs = spots.iter().zip(self.arrays.ids()).enumerate();
        let mut others = pairs.filter(|(_, (spot, id))| {
            let now = self.now(spot);
            !but.contains(id) && now.is_some_and(|now| bridge::id(&now) != Some(**id))
        });
        Ok(others.find_map(|(at, _)| self.named(at, py)))
    }

    /// Values and objects in cells, globals and attributes of classes that are other ones now: their nodes, and what was there.
    pub fn changed<'py>(&self, py: Python<'py>) -> Vec<(usize, Bound<'py, PyAny>)> {
        let objects = self.bound(py);
        let nodes = self.program.nodes.iter().enumerate();
        let changed = nodes.filter_map(|(at, node)| {
            if !node.how.stands_alone() || node.is_property(&objects) {
                return None;
            }
            let Expect::Value(_, number) = &node.expect else {
                // another object; a getter may make one at each look
                let (before, now) = (self.object(at, py)?, node.find(&objects, &[])?);
                let other = node.is_kept(&objects)
                    && !matches!(node.expect, Expect::Array | Expect::Absent)
                    && !before.is(&now)
                    && !holds_array(&now, &mut HashSet::new());
                return other.then_some((at, before));
            };
            let before = self.values[*number].bind(py);
            let now = node.find(&objects, &[])?;
            (!equal(before, &now) && !bridge::is_array(&now)).then(|| (at, before.clone()))
        });
        changed.collect()
    }

    /// The place of an object in a cell, a global, a slot or an attribute of a class, that is empty now.
    pub fn gone(&self, py: Python<'_>) -> Option<String> {
        let objects = self.bound(py);
        let mut nodes = self.program.nodes.iter().enumerate();
        let at = nodes.find(|(at, node)| {
            node.how.stands_alone()
                && node.is_kept(&objects)
                && self.object(*at, py).is_some()
                && node.find(&objects, &[]).is_none()
        });
        at.map(|(at, _)| self.program.name(py, at))
    }

    /// Globals that were not there and are now, in which no arrays stand: the dict and the key of each.
    pub fn made<'py>(
        &self,
        py: Python<'py>,
    ) -> PyResult<Vec<(Bound<'py, PyDict>, Bound<'py, PyAny>)>> {
        let mut made = Vec::new();
        for node in &self.program.nodes {
            if !matches!((&node.expect, node.how), (Expect::Absent, How::Global)) {
                continue;
            }
            let function = node.parent.and_then(|parent| self.object(parent, py));
            let globals = function.as_ref().and_then(bridge::globals);
            if let Some((globals, key)) = globals.zip(node.key(py)) {
                let now = globals.get_item(key)?;
                if now.is_some_and(|now| !holds_array(&now, &mut HashSet::new())) {
                    made.push((globals, key.clone()));
                }
            }
        }
        Ok(made)
    }

    /// Take out of the caches of functions what they have kept since the look.
    pub fn forget_results(&self, py: Python<'_>) -> PyResult<()> {
        let things = py.import("faststep._step._things")?;
        for (at, node) in self.program.nodes.iter().enumerate() {
            let cache = node.parent.and_then(|parent| self.object(parent, py));
            if let (How::Misses, Some(before), Some(cache)) = (node.how, self.object(at, py), cache)
            {
                let now = cache.call_method0("cache_info")?.getattr("misses")?;
                if !now.eq(&before)? {
                    things.call_method1("forget_states", (cache, before))?;
                }
            }
        }
        Ok(())
    }

    /// Functions that have made what they keep in their caches, and in which something may change: those with the number of results
    /// that they had made before.
    pub fn made_states<'py>(
        &self,
        py: Python<'py>,
    ) -> PyResult<Vec<(Bound<'py, PyAny>, Bound<'py, PyAny>)>> {
        let mut made = Vec::new();
        for (at, node) in self.program.nodes.iter().enumerate() {
            if !matches!((&node.expect, node.how), (Expect::Identity(_), How::Misses)) {
                continue;
            }
            let cache = node.parent.and_then(|parent| self.object(parent, py));
            let Some((before, cache)) = self.object(at, py).zip(cache) else {
                continue;
            };
            let misses = cache.call_method0("cache_info")?.getattr("misses")?;
            let states = || {
                let things = py.import("faststep._step._things")?;
                things.call_method1("states_in", (&cache,))?.is_truthy()
            };
            if !misses.eq(&before)? && states()? {
                made.push((cache, before));
            }
        }
        Ok(made)
    }

    /// The contents of dicts, lists, modules and objects on the way.
    pub fn snapshot<'py>(&self, root: &Snapshot<'py>, py: Python<'py>) -> PyResult<Snapshot<'py>> {
        let mut snapshot = Snapshot::default();
        let items = self.program.nodes.iter();
        let items = items.filter(|node| node.how == How::Item && node.arrays() > 0);
        let looked_into: HashSet<_> = items.filter_map(|node| node.parent).collect();
        for (at, node) in self.program.nodes.iter().enumerate() {
            let Some(object) = self.object(at, py) else {
                continue;
            };
            // the state of another optimizer, say, of which some arrays are looked at
            if matches!(node.expect, Expect::Anything) && looked_into.contains(&at) {
                snapshot.note(&object)?;
            }
            if let Expect::Module(..) = &node.expect {
                snapshot.note_all(&object)?;
            }
            if matches!(node.expect, Expect::Container(..) | Expect::Contents(..))
                || is_deque(&object)
            {
                snapshot.note(&object)?;
            }
            let has_attributes = matches!(
                node.expect,
                Expect::Object(..) | Expect::Function(..) | Expect::Contents(..)
            );
            if node.opens || has_attributes {
                if let Some(dict) = attributes_of(&object) {
                    snapshot.note(dict.as_any())?;
                }
            }
        }
        if !self.others.is_empty() {
            let mut known = root.addresses().clone();
            known.extend(self.all(py).iter().map(|object| object.as_ptr().addr()));
            for other in &self.others {
                snapshot.note_within(other.bind(py), &known)?;
            }
        }
        Ok(snapshot)
    }

    /// Put everything back as it was when these were taken.
    pub fn restore(
        &self,
        py: Python<'_>,
        snapshot: &Snapshot<'_>,
        copies: &[(usize, Bound<'_, PyAny>)],
    ) -> PyResult<()> {
        snapshot.restore()?;
        for (node, copy) in copies {
            let set = self.object(*node, py);
            let same = match (set.as_ref().map(|set| set.cast()), copy.cast()) {
                (Some(Ok(set)), Ok(copy)) => has_members(set, copy),
                _ => self.has_contents(py, *node)?,
            };
            if !same {
                self.refill(*node, copy)?;
            }
        }
        self.put_back(py)
    }

    // put everything on the way back; the contents of containers are left to a snapshot
    fn put_back(&self, py: Python<'_>) -> PyResult<()> {
        for (globals, key) in self.made(py)? {
            globals.del_item(key)?;
        }
        for (cache, misses) in self.made_states(py)? {
            let things = py.import("faststep._step._things")?;
            things.call_method1("forget_states", (cache, misses))?;
        }
        for (class, name) in self.program.classes.made(py)? {
            class.delattr(name.cast_into::<PyString>()?)?;
        }
        let objects = self.bound(py);
        for (at, node) in self.program.nodes.iter().enumerate() {
            let Some(object) = self.object(at, py) else {
                continue;
            };
            if node.how.stands_alone() {
                let is_number = matches!(node.expect, Expect::Value(..)); // made anew by a class in C, at each look
                let now = node.find(&objects, &[]);
                let same =
                    |now: Bound<'_, PyAny>| now.is(&object) || (is_number && equal(&now, &object));
                if !now.is_some_and(same) {
                    node.put(node.parent_in(&objects), &object)?;
                }
            }
        }
        Ok(())
    }
}
