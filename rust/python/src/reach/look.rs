//! Comparison of the objects that a loss reads with those of the last call.
use std::{collections::HashSet, rc::Rc};

use mlx_rs::Array;
use pyo3::{
    exceptions::PyRuntimeError,
    intern,
    prelude::*,
    types::{PyDict, PyFrozenSet, PyList, PyTuple},
};

use super::{
    contents::{contents, copy, refill},
    node::{attributes_of, Expect, How, Met},
    row::{Kind, Places, Row},
    seen::equal,
    suspect::is_number,
    Program,
};
use crate::{
    mlx::{
        bridge,
        classes::{is_deque, is_module},
    },
    tree::{
        slot::Place,
        snapshot::{holds_array, Snapshot},
        text::text,
        walk::Scope,
        Tree,
    },
};
use faststep::engine::{HeldArrays, Tensor};

/// Result of comparing a program's nodes.
pub enum Look<'py> {
    /// Everything is where it was: the object of each node that is no value, and the values.
    Same(Vec<Option<Met<'py>>>, Rc<Vec<Py<PyAny>>>),
    /// That node's object is another one.
    Differs(usize),
    /// A class has another method.
    Class(String),
    /// A class of the user's raises when it is looked at, and what.
    Fails(String),
}

// values met on a look, beside those of the last one
struct Values<'a> {
    last: &'a [Py<PyAny>],
    changed: Vec<(usize, Py<PyAny>)>,
}

impl Values<'_> {
    fn meet(&mut self, number: usize, object: Bound<'_, PyAny>) {
        let last = self.last[number].bind(object.py());
        if !last.is(&object) && !equal(last, &object) {
            self.changed.push((number, object.unbind()));
        }
    }
}

impl Program {
    /// Look at every node.
    pub fn look<'py>(&self, roots: &[Bound<'py, PyAny>]) -> PyResult<Look<'py>> {
        let py = roots[0].py();
        if let Some(class) = self.classes.changed(py) {
            return Ok(Look::Class(class));
        }
        let mut objects: Vec<Option<Met<'py>>> = Vec::with_capacity(self.nodes.len());
        let mut number = 0; // of the next array
        let last = self.values.borrow().clone();
        let mut values = Values {
            last: &last,
            changed: Vec::new(),
        };
        let mut rows = self.rows.iter().peekable();
        while let Some(node) = self.nodes.get(objects.len()) {
            let at = objects.len();
            if let Some(row) = rows.next_if(|row| row.first == at) {
                let met = self.look_at_row(row, &objects, &mut values);
                objects.resize_with(at + met, || None);
                if row.kind == Kind::Arrays {
                    number += met;
                }
                if met > 0 {
                    continue;
                }
            }
            let object = node.find(&objects, roots);
            if let (Expect::Absent, None) = (&node.expect, &object) {
                objects.push(None);
                continue;
            }
            let Some(object) = object else {
                return Ok(Look::Differs(at));
            };
            if let Expect::Value(_, number) = &node.expect {
                if !node.fits_value(&object) {
                    return Ok(Look::Differs(at));
                }
                values.meet(*number, object);
                objects.push(None);
                continue;
            }
            let met = Met::new(object, node).filter(|met| node.fits(met, &objects));
            let Some(met) = met else {
                return Ok(Look::Differs(at));
            };
            let same = match &node.expect {
                Expect::Array => self.holds(&mut number, &met.object),
                Expect::Module(tree, first) => {
                    let held = self.held.borrow().clone();
                    let known = held.ids().get(*first..).unwrap_or_default();
                    let known = &known[..known.len().min(tree.tensors().len())];
                    if tree.is_same(&met.object, known) {
                        number += known.len();
                        objects.push(Some(met));
                        continue;
                    }
                    let slots = tree.check_whole(&met.object, known);
                    drop(held);
                    slots.is_some_and(|slots| {
                        let mut slots = slots.iter();
                        slots.all(|slot| self.holds(&mut number, &slot.object))
                    })
                }
                Expect::Contents(_, number) => {
                    values.meet(*number, contents(&met.object)?);
                    true
                }
                Expect::Container(.., keys) => {
                    let dict = met.object.cast();
                    dict.map_or(true, |dict| keys.are_of(dict))
                }
                _ => true,
            };
            if !same {
                return Ok(Look::Differs(at));
            }
            objects.push(Some(met));
        }
        let changed = values.changed;
        if changed.is_empty() {
            return Ok(Look::Same(objects, last));
        }
        let mut values: Vec<_> = last.iter().map(|value| value.clone_ref(py)).collect();
        for (number, value) in changed {
            values[number] = value;
        }
        let values = Rc::new(values);
        self.values.replace(values.clone());
        Ok(Look::Same(objects, values))
    }

    // the number of values of a row, from the first on, that still are numbers and strings; or of arrays that are the same
    fn look_at_row(
        &self,
        row: &Row,
        objects: &[Option<Met<'_>>],
        values: &mut Values<'_>,
    ) -> usize {
        let first = &self.nodes[row.first];
        if row.kind == Kind::Fixed {
            let (Places::Keys(keys), Some(dict)) = (&row.places, first.dict(objects)) else {
                return 0;
            };
            return bridge::dict_has(&dict, keys, &row.known);
        }
        if row.kind == Kind::Arrays {
            let held = self.held.borrow();
            let known = held.ids().get(row.number..).unwrap_or_default();
            let known = &known[..known.len().min(row.len())];
            return match &row.places {
                Places::Indices(index, _) => first
                    .list(objects)
                    .map_or(0, |list| bridge::list_holds(list, *index, known)),
                Places::Keys(keys) => first
                    .dict(objects)
                    .map_or(0, |dict| bridge::dict_holds(&dict, keys, known)),
            };
        }
        let (Places::Keys(keys), Some(dict)) = (&row.places, first.dict(objects)) else {
            return 0;
        };
        let known = &values.last[row.number..][..keys.len()];
        bridge::walk(&dict, keys, known, |at, object| {
            let fits = self.nodes[row.first + at].fits_value(&object);
            if fits {
                values.meet(row.number + at, object);
            }
            fits
        })
    }

    // true if the next array has the recorded shape and dtype; keeps a reference to it
    fn holds(&self, number: &mut usize, object: &Bound<'_, PyAny>) -> bool {
        let at = *number;
        *number += 1;
        let mut held = self.held.borrow_mut();
        let id = bridge::id(object);
        if held.ids().get(at).copied() == id {
            return true;
        }
        let array = bridge::get(object);
        let array = array.filter(|array| self.tensors.get(at) == Some(&Tensor::of(array)));
        let Some(array) = array else {
            return false;
        };
        Rc::make_mut(&mut held).set(at, array);
        true
    }

    // the number of the first array of each node, or of the next one behind it
    fn firsts(&self) -> Vec<usize> {
        let mut next = 0;
        let firsts = self.nodes.iter().map(|node| {
            let first = next;
            next += node.arrays();
            first
        });
        firsts.collect()
    }

    // the nodes that are found from one
    fn children(&self, at: usize) -> Vec<usize> {
        let nodes = self.nodes.iter().enumerate().skip(at + 1);
        let children = nodes.filter(|(_, node)| {
            node.parent == Some(at) && matches!(node.how, How::Item | How::Index)
        });
        children.map(|(child, _)| child).collect()
    }

    // the index of each array's node
    fn arrays(&self) -> Vec<usize> {
        let nodes = self.nodes.iter().enumerate();
        let arrays = nodes.flat_map(|(at, node)| std::iter::repeat_n(at, node.arrays()));
        arrays.collect()
    }
}

/// Arrays that a loss reaches, with their numbers.
type Numbered = Vec<(usize, Array)>;

/// Place of an array that a loss reaches, and its object.
pub struct Spot<'py> {
    /// The object.
    pub object: Bound<'py, PyAny>,
    place: Option<Place<'py>>, // in a module; elsewhere at a node
    node: usize,
}

/// Values and arrays that a loss reaches at one call.
pub struct Looked {
    /// The program that was looked through.
    pub program: Rc<Program>,
    objects: Vec<Option<Py<PyAny>>>, // of each node that is no value and, where it is a row's, no array
    /// The arrays.
    pub arrays: Rc<HeldArrays>,
    /// Numbers, strings, and the contents of what is changed in place.
    pub values: Rc<Vec<Py<PyAny>>>,
}

impl Looked {
    pub(super) fn new(
        program: Rc<Program>,
        objects: Vec<Option<Met<'_>>>,
        values: Rc<Vec<Py<PyAny>>>,
    ) -> Self {
        let arrays = program.held.borrow().clone();
        let objects = objects.into_iter().map(|met| Some(met?.object.unbind()));
        Self {
            objects: objects.collect(),
            program,
            arrays,
            values,
        }
    }

    fn object<'py>(&self, node: usize, py: Python<'py>) -> Option<Bound<'py, PyAny>> {
        let it = &self.program.nodes[node];
        let object = match &it.expect {
            Expect::Value(_, number) => self.values.get(*number),
            _ => self.objects[node].as_ref(),
        };
        match (object, &it.expect) {
            (Some(object), _) => Some(object.bind(py).clone()),
            (None, Expect::Array) => {
                let parent = it.parent?;
                let object = self.objects[parent].as_ref()?.bind(py).clone();
                it.find_in(&Met::new(object, &self.program.nodes[parent])?)
            }
            (None, Expect::Identity(known)) => known.get(py),
            (None, _) => None,
        }
    }

    fn bound<'py>(&self, py: Python<'py>) -> Vec<Option<Met<'py>>> {
        let objects = self.program.nodes.iter().zip(&self.objects);
        let met = objects.map(|(node, object)| Met::new(object.as_ref()?.bind(py).clone(), node));
        met.collect()
    }

    /// Return the place of each array.
    pub fn spots<'py>(&self, py: Python<'py>) -> PyResult<Vec<Spot<'py>>> {
        let mut spots = Vec::new();
        for (at, node) in self.program.nodes.iter().enumerate() {
            let Some(object) = self.object(at, py) else {
                continue;
            };
            match &node.expect {
                Expect::Array => spots.push(Spot {
                    object: object.clone(),
                    place: None,
                    node: at,
                }),
                Expect::Module(..) => {
                    let (_, inner) = Tree::record(&object, Scope::Whole)?;
                    spots.extend(inner.into_iter().map(|slot| Spot {
                        object: slot.object,
                        place: Some(slot.place),
                        node: at,
                    }));
                }
                _ => {}
            }
        }
        Ok(spots)
    }

    /// Return the path of an array, by its number, as a user writes it.
    pub fn name(&self, py: Python<'_>, array: usize) -> String {
        let Some(&at) = self.program.arrays().get(array) else {
            return String::new();
        };
        let name = self.program.name(py, at);
        match &self.program.nodes[at].expect {
            Expect::Module(tree, first) => {
                let paths = tree.paths(py);
                let path = paths.get(array - first).map(|path| path.join("."));
                format!("{name}.{}", path.unwrap_or_default())
            }
            _ => name,
        }
    }

    /// Return the path of a value, by its number, as a user writes it.
    pub fn value_name(&self, py: Python<'_>, value: usize) -> String {
        let nodes = self.program.nodes.iter().enumerate();
        let mut values = nodes
            .filter(|(_, node)| matches!(node.expect, Expect::Value(..) | Expect::Contents(..)))
            .map(|(at, _)| self.program.name(py, at));
        values.nth(value).unwrap_or_default()
    }

    /// The numbers among the values and among keys of dicts, each with the name that code has for it or for the container.
    pub fn numbers<'py>(&self, py: Python<'py>) -> Vec<(String, Bound<'py, PyAny>)> {
        let mut numbers = Vec::new();
        for (at, node) in self.program.nodes.iter().enumerate() {
            let parent = || {
                node.parent
                    .map_or_else(String::new, |it| self.key_name(py, it))
            };
            let key = node.key(py);
            let key = key.filter(|key| node.how == How::Item && is_number(key));
            numbers.extend(key.map(|key| (parent(), key.clone())));
            match &node.expect {
                Expect::Value(_, number) if is_number(self.values[*number].bind(py)) => {
                    let value = self.values[*number].bind(py).clone();
                    let of_parent = node.how == How::Index || key.is_some();
                    let name = if of_parent {
                        parent()
                    } else {
                        self.key_name(py, at)
                    };
                    numbers.push((name, value));
                }
                Expect::Contents(_, number) => {
                    if let Ok(set) = self.values[*number].bind(py).cast::<PyFrozenSet>() {
                        let name = self.key_name(py, at);
                        let items = set.iter().filter(is_number);
                        numbers.extend(items.map(|item| (name.clone(), item)));
                    }
                }
                _ => {}
            }
        }
        numbers
    }

    /// The name that code has for what is at a node.
    pub fn key_name(&self, py: Python<'_>, at: usize) -> String {
        let node = &self.program.nodes[at];
        if let (How::Cell, Some(parent)) = (node.how, node.parent) {
            let names = self.object(parent, py).and_then(|function| {
                let code = bridge::code(&function)?;
                code.getattr(intern!(py, "co_freevars")).ok()
            });
            let name = names.and_then(|names| names.get_item(node.index()).ok());
            return name.map_or_else(String::new, |name| text(&name));
        }
        node.key(py).map_or_else(String::new, text)
    }

    /// The name that code has for an object; empty: it is at no node.
    pub fn name_of(&self, object: &Bound<'_, PyAny>) -> String {
        let py = object.py();
        let mut nodes = 0..self.program.nodes.len();
        let at = nodes.find(|&at| self.object(at, py).is_some_and(|it| it.is(object)));
        at.map_or_else(String::new, |at| self.key_name(py, at))
    }

    /// The codes of the functions that the loss calls.
    pub fn codes<'py>(&self, py: Python<'py>) -> Option<&Bound<'py, PyAny>> {
        self.program.codes.as_ref().map(|codes| codes.bind(py))
    }

    /// The object that stands at a spot now.
    pub fn now<'py>(&self, spot: &Spot<'py>) -> Option<Bound<'py, PyAny>> {
        if let Some(place) = &spot.place {
            return place.get().ok().flatten();
        }
        let objects = self.bound(spot.object.py());
        self.program.nodes[spot.node].find(&objects, &[])
    }

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

    /// Dicts, lists and tuples in whose place the loss has put another one of the same form, by node, and the arrays in
    /// each, by number. The old ones are put back.
    pub fn replaced(&self, py: Python<'_>) -> PyResult<Vec<(usize, Numbered)>> {
        let objects = self.bound(py);
        let firsts = self.program.firsts();
        let mut replaced = Vec::new();
        for (at, node) in self.program.nodes.iter().enumerate() {
            let (Expect::Container(..), Some(old)) = (&node.expect, self.object(at, py)) else {
                continue;
            };
            let now = node.find(&objects, &[]).filter(|now| !now.is(&old));
            let Some(now) = now else {
                continue;
            };
            let mut arrays = Vec::new();
            if self.has_form(at, &now, &firsts, &mut arrays)
                && !arrays.is_empty()
                && node.put(&objects, &old)?
            {
                replaced.push((at, arrays));
            }
        }
        Ok(replaced)
    }

    // true if an object is made up as the one of a node is, but for its arrays, which are gathered
    fn has_form<'py>(
        &self,
        at: usize,
        now: &Bound<'py, PyAny>,
        firsts: &[usize],
        arrays: &mut Vec<(usize, Array)>,
    ) -> bool {
        let py = now.py();
        let Some(met) = Met::new(now.clone(), &self.program.nodes[at]) else {
            return false;
        };
        if is_module(now) || !self.program.nodes[at].fits(&met, &[]) {
            return false;
        }
        let mut objects: Vec<Option<Met<'py>>> = Vec::new();
        objects.resize_with(at, || None);
        objects.push(Some(met));
        let children = self.program.children(at);
        let whole = now.len().is_ok_and(|len| len == children.len());
        whole
            && children.into_iter().all(|child| {
                let node = &self.program.nodes[child];
                let Some(item) = node.find(&objects, &[]) else {
                    return false;
                };
                match &node.expect {
                    Expect::Array => {
                        let array = bridge::get(&item);
                        let fits = array.as_ref().is_some_and(|array| {
                            self.program.tensors.get(firsts[child]) == Some(&Tensor::of(array))
                        });
                        arrays.extend(array.map(|array| (firsts[child], array)));
                        fits
                    }
                    Expect::Container(..) => self.has_form(child, &item, firsts, arrays),
                    Expect::Value(_, number) => equal(self.values[*number].bind(py), &item),
                    _ => self.object(child, py).is_some_and(|old| old.is(&item)),
                }
            })
    }

    /// Put a copy with other arrays, by number, in the place of the dict, list or tuple of a node.
    pub fn replace(&self, py: Python<'_>, at: usize, arrays: &[(usize, Array)]) -> PyResult<()> {
        let objects = self.bound(py);
        let copy = self.copy_with(py, at, &self.program.firsts(), arrays)?;
        self.program.nodes[at].put(&objects, &copy)?;
        Ok(())
    }

    fn copy_with<'py>(
        &self,
        py: Python<'py>,
        at: usize,
        firsts: &[usize],
        arrays: &[(usize, Array)],
    ) -> PyResult<Bound<'py, PyAny>> {
        let missing = || PyRuntimeError::new_err("the step has not been prepared");
        let old = self.object(at, py).ok_or_else(missing)?;
        let mut items = Vec::new();
        for child in self.program.children(at) {
            let node = &self.program.nodes[child];
            let item = match &node.expect {
                Expect::Array => {
                    let made = arrays.iter().find(|(number, _)| *number == firsts[child]);
                    let made = made.map(|(_, array)| bridge::wrap(py, array)).transpose()?;
                    made.or_else(|| self.object(child, py))
                }
                Expect::Container(..) => Some(self.copy_with(py, child, firsts, arrays)?),
                _ => self.object(child, py),
            };
            items.push((node, item.ok_or_else(missing)?));
        }
        if let Ok(tuple) = old.cast::<PyTuple>() {
            let mut all = tuple.iter().collect::<Vec<_>>();
            for (node, item) in items {
                all[node.index()] = item;
            }
            let tuple = PyTuple::new(py, all)?;
            return match old.getattr_opt(intern!(py, "_make"))? {
                Some(make) => make.call1((tuple,)),
                None => Ok(tuple.into_any()),
            };
        }
        let copy = py.import("copy")?.call_method1("copy", (old,))?;
        for (node, item) in items {
            match node.key(py) {
                Some(key) if copy.is_instance_of::<PyDict>() => copy.set_item(key, item)?,
                _ => copy.set_item(node.index(), item)?,
            }
        }
        Ok(copy)
    }

    /// The objects of the nodes that are no values.
    pub fn all<'py>(&self, py: Python<'py>) -> Vec<Bound<'py, PyAny>> {
        let nodes = self.program.nodes.iter().enumerate();
        let nodes = nodes.filter(|(_, node)| !matches!(node.expect, Expect::Value(..)));
        nodes.filter_map(|(at, _)| self.object(at, py)).collect()
    }

    /// The object that stands at a node now.
    pub fn at<'py>(&self, py: Python<'py>, node: usize) -> Option<Bound<'py, PyAny>> {
        self.program.nodes[node].find(&self.bound(py), &[])
    }

    /// Put another object at a node; whether that can be.
    pub fn put_at(&self, node: usize, object: &Bound<'_, PyAny>) -> PyResult<bool> {
        let objects = self.bound(object.py());
        self.program.nodes[node].put(&objects, object)
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
            (Expect::Contents(_, number), Some(object)) => {
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

    /// Give the object at a node the contents of a copy.
    pub fn refill(&self, node: usize, copy: &Bound<'_, PyAny>) -> PyResult<()> {
        match self.object(node, copy.py()) {
            Some(object) => refill(&object, copy),
            None => Ok(()),
        }
    }

    /// Values in cells, globals and attributes of classes that are other ones now: their nodes, and what was there.
    pub fn changed<'py>(&self, py: Python<'py>) -> Vec<(usize, Bound<'py, PyAny>)> {
        let objects = self.bound(py);
        let nodes = self.program.nodes.iter().enumerate();
        let changed = nodes.filter_map(|(at, node)| {
            let Expect::Value(_, number) = &node.expect else {
                return None;
            };
            if !node.how.stands_alone() {
                return None;
            }
            let before = self.values[*number].bind(py);
            let now = node.find(&objects, &[])?;
            (!equal(before, &now) && !bridge::is_array(&now)).then(|| (at, before.clone()))
        });
        changed.collect()
    }

    /// Put another object at a spot.
    pub fn put<'py>(&self, spot: &Spot<'py>, object: &Bound<'py, PyAny>) -> PyResult<()> {
        if let Some(place) = &spot.place {
            return place.set(object);
        }
        let objects = self.bound(spot.object.py());
        self.program.nodes[spot.node].put(&objects, object)?;
        Ok(())
    }

    /// The contents of dicts, lists, modules and objects on the way.
    pub fn snapshot<'py>(&self, py: Python<'py>) -> PyResult<Snapshot<'py>> {
        let mut snapshot = Snapshot::default();
        for (at, node) in self.program.nodes.iter().enumerate() {
            let Some(object) = self.object(at, py) else {
                continue;
            };
            if let Expect::Module(..) = &node.expect {
                snapshot.note_all(&object)?;
            }
            if matches!(node.expect, Expect::Container(..) | Expect::Contents(..))
                || is_deque(&object)
            {
                snapshot.note(&object)?;
            }
            if node.opens || matches!(node.expect, Expect::Object(..)) {
                if let Some(dict) = attributes_of(&object) {
                    snapshot.note(dict.as_any())?;
                }
            }
        }
        Ok(snapshot)
    }

    /// Put everything on the way back; the contents of containers are left to a snapshot.
    pub fn put_back(&self, py: Python<'_>) -> PyResult<()> {
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
                    node.put(&objects, &object)?;
                }
            }
        }
        Ok(())
    }
}
