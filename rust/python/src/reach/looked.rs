//! What has been found at one look, and where.
use std::{
    cell::RefCell,
    collections::HashMap,
    rc::{Rc, Weak},
};

use pyo3::{
    intern,
    prelude::*,
    types::{PyDict, PyFrozenSet, PyTuple},
};

use super::{
    identities::Containers,
    node::{attributes_of, Expect, How, Met, Node},
    suspect::is_number,
    Program,
};
use crate::mlx::collector::{Collector, Refers, Visited};
use crate::{
    mlx::bridge,
    tree::{slot::Place, text::text, walk::Scope, Tree},
};
use faststep::engine::{HeldArrays, Tensor};

/// The number of containers of a call itself: what is passed, by position and by name.
const OF_CALL: usize = 3;

/// Place of an array that a loss reaches, and its object.
pub struct Spot<'py> {
    /// The object.
    pub object: Bound<'py, PyAny>,
    pub(super) place: Option<Place<'py>>, // in a module; elsewhere at a node
    node: usize,
}

impl Spot<'_> {
    /// The number of dicts, lists and tuples around the array, from the nearest one on, that nobody refers to but their places and
    /// looks; none where somebody else refers to the array's object. `known`: how many references to each object are known.
    pub(super) fn alone(&self, looked: &Looked, known: &References) -> Option<usize> {
        let py = self.object.py();
        let nodes = &looked.program.nodes;
        let known = |object: &Bound<'_, PyAny>| {
            let known = known.get(&object.as_ptr().addr()).copied();
            known.unwrap_or(0)
        };
        if bridge::refcount(&self.object) != known(&self.object) {
            return None;
        }
        let around = std::iter::successors(nodes[self.node].parent, |at| nodes[*at].parent);
        let alone = around.take_while(|at| {
            let object = looked.object(*at, py);
            matches!(nodes[*at].expect, Expect::Container(..))
                && object.is_some_and(|it| bridge::refcount(&it) == 2 + known(&it))
        });
        Some(alone.count())
    }
}

type Objects = Vec<Option<Py<PyAny>>>;

/// How often something refers to objects, by their addresses.
pub type References = HashMap<usize, isize>;

/// The objects of the looks that are not done with, and what else refers to objects for as long as a call is under way.
#[derive(Default)]
pub struct Alive {
    looks: RefCell<Vec<Weak<Objects>>>,
    others: RefCell<Vec<Weak<References>>>,
}

impl Alive {
    fn note(&self, objects: &Rc<Objects>) {
        let mut alive = self.looks.borrow_mut();
        alive.retain(|known| known.strong_count() > 0);
        alive.push(Rc::downgrade(objects));
    }

    /// These are known as long as they are held.
    pub fn note_others(&self, references: &Rc<References>) {
        let mut others = self.others.borrow_mut();
        others.retain(|known| known.strong_count() > 0);
        others.push(Rc::downgrade(references));
    }

    /// How often these refer to each object.
    pub fn counts(&self) -> References {
        let mut counts = References::new();
        for objects in self.looks.borrow().iter().filter_map(Weak::upgrade) {
            for object in objects.iter().flatten() {
                *counts.entry(object.as_ptr().addr()).or_insert(0) += 1;
            }
        }
        for references in self.others.borrow().iter().filter_map(Weak::upgrade) {
            for (address, count) in references.iter() {
                *counts.entry(*address).or_insert(0) += count;
            }
        }
        counts
    }
}

/// Values and arrays that a loss reaches at one call.
pub struct Looked {
    /// The program that was looked through.
    pub program: Rc<Program>,
    objects: Rc<Objects>, // of each node that is no value and in no row
    /// The arrays.
    pub arrays: Rc<HeldArrays>,
    /// Shape and dtype of each.
    pub tensors: Rc<Vec<Tensor>>,
    /// The first of them that has another one than at the look before.
    pub reshaped: Option<usize>,
    /// False if nothing has been looked at, to spare a search.
    pub is_known: bool,
    /// Numbers, strings, and the contents of what is changed in place.
    pub values: Rc<Vec<Py<PyAny>>>,
    given: Containers, // among the arguments: the first three are new at each call
    pub(super) others: Vec<Py<PyAny>>, // in which there is more than the program has nodes for
}

impl Refers for Looked {
    fn visit(&self, collector: &mut Collector<'_>) -> Visited {
        self.program.visit(collector)?;
        self.objects.visit(collector)?;
        self.others.visit(collector)?;
        self.values.visit(collector)
    }
}

impl Looked {
    pub(super) fn new(
        program: Rc<Program>,
        objects: Vec<Option<Met<'_>>>,
        values: Rc<Vec<Py<PyAny>>>,
        given: Containers,
    ) -> Self {
        let arrays = program.held.borrow().clone();
        let reshaped = program.forms.settle();
        let objects = objects.into_iter().map(|met| Some(met?.object.unbind()));
        let objects = Rc::new(objects.collect());
        program.alive.note(&objects);
        Self {
            objects,
            tensors: program.forms.now(),
            program,
            arrays,
            reshaped,
            is_known: true,
            values,
            given,
            others: Vec::new(),
        }
    }

    /// What has been found by a program that has other lengths and keys, without the arrays.
    pub(super) fn loosely(
        program: Rc<Program>,
        objects: Vec<Option<Met<'_>>>,
        values: Rc<Vec<Py<PyAny>>>,
        others: Vec<Py<PyAny>>,
    ) -> Self {
        let objects = objects.into_iter().map(|met| Some(met?.object.unbind()));
        let objects = Rc::new(objects.collect());
        program.alive.note(&objects);
        Self {
            program,
            objects,
            arrays: Rc::default(),
            tensors: Rc::default(),
            reshaped: None,
            is_known: false,
            values,
            given: Rc::default(),
            others,
        }
    }

    /// Nothing, where a search is left out.
    pub fn nothing() -> Self {
        let program = Rc::new(Program::nothing(0, None));
        Self {
            is_known: false,
            ..Self::new(program, Vec::new(), Rc::default(), Rc::default())
        }
    }

    fn kept(&self, node: usize) -> Option<&Py<PyAny>> {
        self.objects.get(self.program.nodes[node].kept?)?.as_ref()
    }

    pub(super) fn object<'py>(&self, node: usize, py: Python<'py>) -> Option<Bound<'py, PyAny>> {
        let it = &self.program.nodes[node];
        let object = match &it.expect {
            Expect::Value(_, number) => self.values.get(*number),
            _ => self.kept(node),
        };
        match (object, &it.expect) {
            (Some(object), _) => Some(object.bind(py).clone()),
            (None, Expect::Array) => {
                let parent = it.parent?;
                let object = self.kept(parent)?.bind(py).clone();
                it.find_in(&Met::new(object, &self.program.nodes[parent])?)
            }
            (None, Expect::Identity(known)) => known.get(py),
            (None, _) => None,
        }
    }

    /// Return whether an object is one of those at the nodes.
    pub fn has(&self, object: &Bound<'_, PyAny>) -> bool {
        let mut objects = self.objects.iter().flatten();
        objects.any(|known| known.is(object))
    }

    /// Why a loss cannot be traced that changes something in a dict or a list which it reaches and is given too, or asks whether
    /// that is one, if it is such a loss: it is given copies of those among its arguments. `stored`: arrays in whose places it puts
    /// others; `counts`: whether it changes numbers.
    pub fn is_given(&self, (stored, counts): (&[usize], bool), py: Python<'_>) -> Option<String> {
        let program = &self.program;
        let anywhere = counts || program.tells_apart;
        if (stored.is_empty() && !anywhere) || !self.is_given_containers() {
            return None;
        }
        let given = self.given_nodes(py);
        let first = *given.first()?;
        let arrays = program.arrays();
        let is_within = |array: &usize| {
            let mut above = std::iter::successors(arrays.get(*array).copied(), |&node| {
                program.nodes[node].parent
            });
            above.any(|node| given.contains(&node))
        };
        let matters = anywhere || stored.iter().any(is_within);
        let name = matters.then(|| program.name(py, first))?;
        Some(format!(
            "{name}, which it reaches, is among its arguments too: pass it, or let the loss reach it, not both"
        ))
    }

    /// Return whether there are dicts, lists or tuples among the arguments.
    pub fn is_given_containers(&self) -> bool {
        self.given.len() > OF_CALL
    }

    // the nodes of dicts and lists that are among the arguments
    fn given_nodes(&self, py: Python<'_>) -> Vec<usize> {
        let is_one = |object: &Bound<'_, PyAny>| {
            self.given.contains(&object.as_ptr().addr())
                && !object.is_exact_instance_of::<PyTuple>()
        };
        let nodes = self.program.nodes.iter().enumerate();
        let nodes = nodes.filter(|(at, node)| {
            let object = self.kept(*at).map(|object| object.bind(py));
            node.how != How::Root && object.is_some_and(is_one)
        });
        nodes.map(|(at, _)| at).collect()
    }

    pub(super) fn bound<'py>(&self, py: Python<'py>) -> Vec<Option<Met<'py>>> {
        let nodes = self.program.nodes.iter().filter(|node| node.kept.is_some());
        let met = nodes
            .zip(&*self.objects)
            .map(|(node, object)| Met::new(object.as_ref()?.bind(py).clone(), node));
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

    /// Arrays that are one object with another one before them, by their numbers.
    pub fn shared(&self, py: Python<'_>) -> PyResult<Vec<(usize, usize)>> {
        let mut first = HashMap::new();
        let spots = self.spots(py)?.into_iter().enumerate();
        let pairs = spots.filter_map(|(number, spot)| {
            let known = *first.entry(spot.object.as_ptr()).or_insert(number);
            (known != number).then_some((number, known))
        });
        Ok(pairs.collect())
    }

    /// The number of references to objects that are known, by address: of looks, of the places of arrays and of these spots.
    pub(super) fn known_references(&self, spots: &[Spot<'_>]) -> References {
        let mut known = self.program.alive.counts();
        for spot in spots {
            *known.entry(spot.object.as_ptr().addr()).or_insert(0) += 2;
        }
        known
    }

    /// Return whether two arrays have one value, as those that are one object have.
    pub fn has_doubles(&self) -> bool {
        let mut ids = self.arrays.ids().to_vec();
        ids.sort_unstable();
        ids.windows(2).any(|pair| pair[0] == pair[1])
    }

    /// Return the path of an array, by its number, as a user writes it.
    pub fn name(&self, py: Python<'_>, array: usize) -> String {
        let Some(&at) = self.program.arrays().get(array) else {
            return String::new();
        };
        let name = self.program.name(py, at);
        match &self.program.nodes[at].expect {
            Expect::Module(tree, first, _) => {
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
            .filter(|(_, node)| {
                matches!(
                    node.expect,
                    Expect::Value(..) | Expect::Contents(..) | Expect::Module(..)
                )
            })
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
                Expect::Contents(_, number, _) => {
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

    /// The name that code has for an object; empty: it is at no node.
    pub fn name_of(&self, object: &Bound<'_, PyAny>) -> String {
        let py = object.py();
        let mut nodes = 0..self.program.nodes.len();
        let at = nodes.find(|&at| self.object(at, py).is_some_and(|it| it.is(object)));
        at.map_or_else(String::new, |at| self.key_name(py, at))
    }

    /// Return whether the loss may do more with numbers of these names than add to them.
    pub fn may_read(&self, names: Vec<String>, py: Python<'_>) -> PyResult<bool> {
        let Some(codes) = self.codes(py) else {
            return Ok(true);
        };
        let later = py.import("faststep._step._later")?;
        later.call_method1("may_read", (codes, names))?.extract()
    }

    /// The codes of the functions that the loss calls.
    pub fn codes<'py>(&self, py: Python<'py>) -> Option<&Bound<'py, PyAny>> {
        self.program.codes.as_ref().map(|codes| codes.bind(py))
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

    /// The object that stands at a spot now.
    pub fn now<'py>(&self, spot: &Spot<'py>) -> Option<Bound<'py, PyAny>> {
        if let Some(place) = &spot.place {
            return place.get().ok().flatten();
        }
        self.program.nodes[spot.node].find_in(&self.parent(spot.node, spot.object.py())?)
    }

    // the object from which that at a node is found
    fn parent<'py>(&self, node: usize, py: Python<'py>) -> Option<Met<'py>> {
        let at = self.program.nodes[node].parent?;
        Met::new(self.kept(at)?.bind(py).clone(), &self.program.nodes[at])
    }

    /// The objects of the nodes that are no values.
    pub fn all<'py>(&self, py: Python<'py>) -> Vec<Bound<'py, PyAny>> {
        let nodes = self.program.nodes.iter().enumerate();
        let nodes = nodes.filter(|(_, node)| !matches!(node.expect, Expect::Value(..)));
        nodes.filter_map(|(at, _)| self.object(at, py)).collect()
    }

    /// The place of a node in its parent, and the parent.
    pub fn place<'py>(&self, node: usize, py: Python<'py>) -> Option<(Node, Bound<'py, PyAny>)> {
        let it = &self.program.nodes[node];
        Some((it.alone(py), self.object(it.parent?, py)?))
    }

    /// The model.
    pub fn model<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyAny>> {
        let mut nodes = self.program.nodes.iter();
        let at = nodes.position(|node| node.how == How::Root && node.index() == 1)?;
        self.object(at, py)
    }

    /// The node of an object that is, or has, what is at an address: its instance dict, the globals or a cell of a function. `hint`:
    /// where it was last; `is_place`: whether it may be that node.
    pub fn holder(
        &self,
        address: usize,
        hint: usize,
        is_place: impl Fn(usize) -> bool,
        py: Python<'_>,
    ) -> Option<usize> {
        let holds = |node: &usize| {
            self.object(*node, py).is_some_and(|object| {
                let at = |other: &Bound<'_, PyAny>| other.as_ptr().addr() == address;
                at(&object)
                    || attributes_of(&object).is_some_and(|dict| at(dict.as_any()))
                    || bridge::globals(&object).is_some_and(|dict| at(dict.as_any()))
                    || bridge::cells(&object).iter().any(at)
            })
        };
        let count = self.program.nodes.len();
        if hint < count && holds(&hint) && is_place(hint) {
            return Some(hint);
        }
        (0..count).find(|node| holds(node) && is_place(*node))
    }

    /// Return whether a node is the place of another one at another look. Functions may share a cell, and have the globals of
    /// their module.
    pub fn is_place(&self, node: usize, other: &Self, at: usize, py: Python<'_>) -> bool {
        let (one, two) = (&self.program.nodes[node], &other.program.nodes[at]);
        let parent = |looked: &Self, node: &Node| looked.object(node.parent?, py);
        let same_key = match (one.key(py), two.key(py)) {
            (Some(one), Some(two)) => one.eq(two).unwrap_or(false),
            (one, two) => one.is_none() && two.is_none(),
        };
        let place = |looked: &Self, node: &Node| {
            let parent = parent(looked, node)?;
            match node.how {
                How::Cell => bridge::closure_cell(&parent, node.index()),
                How::Global => bridge::globals(&parent).map(Bound::into_any),
                _ => Some(parent),
            }
        };
        one.how == two.how
            && (one.how == How::Cell || (one.index() == two.index() && same_key))
            && matches!((place(self, one), place(other, two)), (Some(one), Some(two)) if one.is(&two))
    }

    /// Return whether a node is what a dict, the globals of a function, has under a key.
    pub fn is_global(&self, node: usize, dict: &Bound<'_, PyDict>, key: &Bound<'_, PyAny>) -> bool {
        let it = &self.program.nodes[node];
        let globals = || bridge::globals(&self.object(it.parent?, dict.py())?);
        it.how == How::Global
            && it
                .key(dict.py())
                .is_some_and(|own| own.eq(key).unwrap_or(false))
            && globals().is_some_and(|globals| globals.is(dict))
    }

    /// The object that stands at a node now.
    pub fn at<'py>(&self, py: Python<'py>, node: usize) -> Option<Bound<'py, PyAny>> {
        match self.program.nodes[node].how {
            How::Root => self.object(node, py),
            _ => self.program.nodes[node].find_in(&self.parent(node, py)?),
        }
    }

    /// Put another object at a node; whether that can be.
    pub fn put_at(&self, node: usize, object: &Bound<'_, PyAny>) -> PyResult<bool> {
        let parent = self.parent(node, object.py());
        self.program.nodes[node].put(parent.as_ref(), object)
    }

    /// Put another object at a spot.
    pub fn put<'py>(&self, spot: &Spot<'py>, object: &Bound<'py, PyAny>) -> PyResult<()> {
        if let Some(place) = &spot.place {
            return place.set(object);
        }
        self.put_at(spot.node, object)?;
        Ok(())
    }
}

impl Program {
    // the index of each array's node
    pub(super) fn arrays(&self) -> Vec<usize> {
        let nodes = self.nodes.iter().enumerate();
        let arrays = nodes.flat_map(|(at, node)| std::iter::repeat_n(at, node.arrays()));
        arrays.collect()
    }
}
