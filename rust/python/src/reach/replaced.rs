//! Dicts, lists and tuples in whose place a loss puts others.
use pyo3::{
    exceptions::PyRuntimeError,
    intern,
    prelude::*,
    types::{PyDict, PyList, PyTuple},
};

use super::{
    looked::Looked,
    node::{Expect, How, Met},
    stop::{another, Stop},
    Program,
};
use crate::{
    mlx::{
        bridge,
        classes::{is_deque, is_module},
    },
    tree::{ordered, snapshot::refill, static_value::equal},
};
use faststep::engine::Tensor;

/// Array objects that a loss has put somewhere, with the numbers of the arrays in whose places they are.
pub(super) type Placed<'py> = Vec<(usize, Bound<'py, PyAny>)>;

/// A dict, list or tuple in whose place a loss has put another one.
pub(super) struct Replaced<'py> {
    /// Its node.
    pub node: usize,
    /// The arrays of the new one.
    pub arrays: Placed<'py>,
    /// Its numbers and texts, in the order of their nodes.
    pub values: Bound<'py, PyTuple>,
}

#[derive(Default)]
struct Items<'py> {
    arrays: Placed<'py>,
    values: Vec<Bound<'py, PyAny>>,
}

impl Program {
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

    // the nodes that lead to an array, by its number, from the nearest one on
    fn ancestors(&self, array: usize) -> impl Iterator<Item = usize> + '_ {
        let at = self.arrays().get(array).copied();
        let up = |at: &usize| self.nodes[*at].parent;
        std::iter::successors(at.and_then(|at| up(&at)), up)
    }

    /// How many nodes lie between an array, by its number, and a node that leads to it.
    pub(super) fn above(&self, node: usize, array: usize) -> usize {
        self.ancestors(array).take_while(|it| *it != node).count()
    }

    /// The node so far above an array.
    pub(super) fn over(&self, array: usize, above: usize) -> Option<usize> {
        self.ancestors(array).nth(above)
    }

    // the nodes that are found from one
    fn children(&self, at: usize) -> Vec<usize> {
        let nodes = self.nodes.iter().enumerate().skip(at + 1);
        let children = nodes.filter(|(_, node)| {
            node.parent == Some(at) && matches!(node.how, How::Item | How::Index)
        });
        children.map(|(child, _)| child).collect()
    }
}

impl Looked {
    /// Dicts, lists and tuples in whose place the loss has put another one of the same form. The old ones are put back.
    /// `reshapes`: the arrays may have other shapes.
    pub(super) fn replaced<'py>(
        &self,
        py: Python<'py>,
        reshapes: bool,
    ) -> Result<Vec<Replaced<'py>>, Stop> {
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
            let mut items = Items::default();
            if !self.has_form(at, &now, &firsts, &mut items) || items.arrays.is_empty() {
                continue;
            }
            let Items { arrays, values } = items;
            for (number, object) in arrays.iter().filter(|_| !reshapes) {
                let array = bridge::get(object);
                let array =
                    array.filter(|array| self.tensors.get(*number) != Some(&Tensor::of(array)));
                if let Some(array) = array {
                    let what = another(&self.name(py, *number), &self.arrays[*number], &array);
                    return Err(Stop::Reshapes(what));
                }
            }
            if node.put(node.parent_in(&objects), &old)? {
                replaced.push(Replaced {
                    node: at,
                    arrays,
                    values: PyTuple::new(py, values)?,
                });
            }
        }
        Ok(replaced)
    }

    // true if an object is made up as the one of a node is, but for its arrays, numbers and texts, which are gathered
    fn has_form<'py>(
        &self,
        at: usize,
        now: &Bound<'py, PyAny>,
        firsts: &[usize],
        items: &mut Items<'py>,
    ) -> bool {
        let py = now.py();
        let Some(met) = Met::new(now.clone(), &self.program.nodes[at]) else {
            return false;
        };
        // a known one stays that one, under another name
        let is_known = !now.is_instance_of::<PyTuple>() && self.has(now);
        let is_one = !is_module(now) && !is_known && self.program.nodes[at].fits(&met, &[]);
        if !is_one || !self.is_kept_alike(at, now) {
            return false;
        }
        let mut objects: Vec<Option<Met<'py>>> = Vec::new();
        objects.resize_with(self.program.nodes[at].kept.unwrap_or(0), || None);
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
                        let is_array = bridge::get(&item).is_some();
                        items.arrays.push((firsts[child], item));
                        is_array
                    }
                    Expect::Container(..) => self.has_form(child, &item, firsts, items),
                    Expect::Value(..) => {
                        let fits = node.fits_value(&item);
                        items.values.push(item);
                        fits
                    }
                    _ => self.object(child, py).is_some_and(|old| old.is(&item)),
                }
            })
    }

    // false of a dict with other keys than the one of a node or in another order, and of a container that grows in another way
    fn is_kept_alike(&self, at: usize, now: &Bound<'_, PyAny>) -> bool {
        let Some(old) = self.object(at, now.py()) else {
            return true;
        };
        let mut names = ["maxlen", "default_factory"].into_iter();
        let same = names.all(|name| {
            let [one, other] = [&old, now].map(|it| it.getattr_opt(name).ok().flatten());
            match (one, other) {
                (Some(one), Some(other)) => equal(&one, &other),
                (one, other) => one.is_none() && other.is_none(),
            }
        });
        let is_like = || match (old.cast(), now.cast()) {
            (Ok(old), Ok(now)) => ordered::is_like(now, old),
            _ => true,
        };
        same && is_like()
    }

    /// Put a copy with other array objects, by number, and with other values in the place of the dict, list or tuple of a node.
    pub(super) fn replace<'py>(
        &self,
        py: Python<'py>,
        at: usize,
        arrays: &Placed<'py>,
        values: Option<&Bound<'py, PyTuple>>,
    ) -> PyResult<()> {
        let mut values = values.into_iter().flatten();
        let copy = self.copy_with(py, at, &self.program.firsts(), arrays, &mut values)?;
        self.put_at(at, &copy)?;
        Ok(())
    }

    fn copy_with<'py>(
        &self,
        py: Python<'py>,
        at: usize,
        firsts: &[usize],
        arrays: &Placed<'py>,
        values: &mut dyn Iterator<Item = Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let missing = || PyRuntimeError::new_err("the step has not been prepared");
        let old = self.object(at, py).ok_or_else(missing)?;
        let mut items = Vec::new();
        for child in self.program.children(at) {
            let node = &self.program.nodes[child];
            let item = match &node.expect {
                Expect::Array => {
                    let made = arrays.iter().find(|(number, _)| *number == firsts[child]);
                    let made = made.map(|(_, object)| object.clone());
                    made.or_else(|| self.object(child, py))
                }
                Expect::Container(..) => Some(self.copy_with(py, child, firsts, arrays, values)?),
                Expect::Value(..) => values.next().or_else(|| self.object(child, py)),
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
        if let Ok(dict) = copy.cast::<PyDict>() {
            // what a loss writes into the one that it replaces is not in the new one
            let known = |key: &Bound<'py, PyAny>| {
                let mut keys = items.iter().filter_map(|(node, _)| node.key(py));
                keys.any(|other| other.eq(key).unwrap_or(false))
            };
            for key in dict.keys().iter().filter(|key| !known(key)) {
                ordered::del_item(dict, &key)?;
            }
        }
        if copy.is_instance_of::<PyList>() || is_deque(&copy) {
            items.sort_by_key(|(node, _)| node.index());
            let items = PyList::new(py, items.into_iter().map(|(_, item)| item))?;
            match copy.cast::<PyList>() {
                Ok(list) => list.set_slice(0, list.len(), items.as_any())?,
                Err(_) => refill(&copy, items.as_any())?,
            }
            return Ok(copy);
        }
        for (node, item) in items {
            match node.key(py) {
                Some(key) if copy.is_instance_of::<PyDict>() => copy.set_item(key, item)?,
                _ => copy.set_item(node.index(), item)?,
            }
        }
        Ok(copy)
    }
}
