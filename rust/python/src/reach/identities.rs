//! Which of the objects that a loss reaches are one, and which of them are the model's.
//!
//! What is told by that: whether a change of one is seen in another, whether an array is a parameter, what `is`, `==` and a dict
//! with objects as keys make of them.
use std::{
    cell::{OnceCell, RefCell},
    collections::HashMap,
    rc::Rc,
};

use pyo3::{
    prelude::*,
    types::{PyDict, PyList, PyTuple},
};

use super::node::{Expect, Met, Node};
use crate::{
    mlx::{bridge, classes::is_deque},
    tree::Tree,
};

/// Addresses of a model's modules, dicts and lists, in the order of a walk.
pub type Containers = Rc<Vec<usize>>;

/// So many objects that are others than at the last look are compared one by one with all.
const FEW: usize = 4;

/// The objects of a program as they were when it was made.
#[derive(Default)]
pub struct Identities {
    made_for: Containers, // of the model
    by_address: bool,     // the code asks for addresses, and not only whether two objects are one
    first: OnceCell<First>,
    last: RefCell<Things>,               // of the last look
    placed: RefCell<Option<Containers>>, // of the model in which all but `others` were last found to be as they were
    others: RefCell<Vec<usize>>,
}

// what is compared at the first look
struct First {
    watched: Vec<(usize, usize)>, // nodes, and the number of each among the objects of a look
    things: Vec<usize>,
    same: Vec<usize>,             // for each thing the first one that is the same
    alone: Vec<bool>,             // whether there is no other one that is the same
    in_model: Vec<Option<usize>>, // the place of each in the model
}

#[derive(Default)]
struct Things {
    addresses: Vec<usize>, // of the objects, of those in modules, then of the cells and globals of functions
    nodes: Vec<usize>,     // of each
    modules: Vec<Containers>, // in the modules that are looked at as a whole
}

// what is another one than at the last look
enum Others {
    Few(Vec<(usize, usize)>), // objects that are no functions or modules: their numbers and addresses
    Many,
}

impl Identities {
    /// Those of a program for a model with these containers. `by_address`: whether the code asks for addresses.
    pub fn new(made_for: Containers, by_address: bool) -> Self {
        Self {
            made_for,
            by_address,
            ..Self::default()
        }
    }

    /// A node whose object is another one's now, or was, if there is one; `objects`: those of a look. The first look tells how it
    /// has to be.
    pub fn other(&self, nodes: &[Node], objects: &[Option<Met<'_>>]) -> Option<usize> {
        let first = self.first.get_or_init(|| {
            let (first, things) = First::of(nodes, objects, &self.made_for);
            self.last.replace(things);
            first
        });
        let others = self.last.borrow().others(&first.watched, nodes, objects);
        if let Others::Few(others) = &others {
            if others.is_empty() {
                return None;
            }
            if !self.by_address && self.take(first, others) {
                return None;
            }
        }
        let now = Things::of(&first.watched, nodes, objects);
        let other = if self.by_address {
            differs(&first.things, &now.addresses)
        } else {
            differs(&first.same, &groups(&now.addresses))
        };
        if let Some(at) = other {
            let node = now.nodes.get(at).or_else(|| now.nodes.last());
            return Some(node.copied().unwrap_or_default());
        }
        self.last.replace(now);
        self.placed.take();
        None
    }

    // take a few others for those of the last look, where no two of all are one; whether that is so
    fn take(&self, first: &First, others: &[(usize, usize)]) -> bool {
        let mut last = self.last.borrow_mut();
        let known = &last.addresses;
        let is_new = |(number, &(at, address)): (usize, &(usize, usize))| {
            let mut before = others[..number].iter();
            first.alone[at]
                && !known.contains(&address)
                && !before.any(|&(_, other)| other == address)
        };
        if !others.iter().enumerate().all(is_new) {
            return false;
        }
        for &(at, address) in others {
            last.addresses[at] = address;
        }
        if self.placed.borrow().is_some() {
            let numbers = others.iter().map(|&(at, _)| at);
            self.others.borrow_mut().extend(numbers);
        }
        true
    }

    /// A node whose object at the last look stands elsewhere in the model, which has these containers now, than it did.
    pub fn moved(&self, model: &Containers) -> Option<usize> {
        let first = self.first.get()?;
        let last = self.last.borrow();
        let mut placed = self.placed.borrow_mut();
        let mut others = self.others.borrow_mut();
        let is_known = placed.as_ref().is_some_and(|it| Rc::ptr_eq(it, model));
        let other = if is_known {
            let place = |at: usize| model.iter().position(|it| *it == last.addresses[at]);
            let mut others = others.iter().copied();
            others.find(|&at| place(at) != first.in_model[at])
        } else if self.by_address && **model != *self.made_for {
            Some(0)
        } else {
            differs(&first.in_model, &places(&last.addresses, model))
        };
        if other.is_none() {
            others.clear();
            *placed = Some(model.clone());
        }
        other.map(|at| last.nodes.get(at).copied().unwrap_or_default())
    }
}

impl First {
    fn of(nodes: &[Node], objects: &[Option<Met<'_>>], model: &[usize]) -> (Self, Things) {
        let kept = nodes.iter().enumerate();
        let kept = kept.filter_map(|(at, node)| Some((at, node, node.kept?)));
        let watched = kept.filter(|(_, node, kept)| {
            let met = objects.get(*kept).and_then(Option::as_ref);
            met.is_some_and(|met| has_identity(node, &met.object))
        });
        let watched: Vec<_> = watched.map(|(at, _, kept)| (at, kept)).collect();
        let things = Things::of(&watched, nodes, objects);
        let same = groups(&things.addresses);
        let mut counts = vec![0; same.len()];
        for &first in &same {
            counts[first] += 1;
        }
        let first = Self {
            watched,
            alone: same.iter().map(|&first| counts[first] == 1).collect(),
            same,
            in_model: places(&things.addresses, model),
            things: things.addresses.clone(),
        };
        (first, things)
    }
}

impl Things {
    fn of(watched: &[(usize, usize)], nodes: &[Node], objects: &[Option<Met<'_>>]) -> Self {
        let addresses = watched.iter().map(|&(_, kept)| address(objects, kept));
        let mut found = Self {
            addresses: addresses.collect(),
            nodes: watched.iter().map(|&(node, _)| node).collect(),
            modules: Vec::new(),
        };
        for (at, tree) in trees(watched, nodes) {
            let containers = tree.containers();
            found.add(at, containers.iter().copied());
            found.modules.push(containers);
        }
        for &(at, kept) in watched {
            let function = match (&nodes[at].expect, objects.get(kept)) {
                (Expect::Function(..), Some(Some(met))) => &met.object,
                _ => continue,
            };
            let cells = bridge::cells(function);
            found.add(at, cells.iter().map(|cell| cell.as_ptr().addr()));
            let globals = bridge::globals(function);
            found.add(at, globals.iter().map(|dict| dict.as_ptr().addr()));
        }
        found
    }

    fn add(&mut self, node: usize, addresses: impl Iterator<Item = usize>) {
        self.addresses.extend(addresses);
        self.nodes.resize(self.addresses.len(), node);
    }

    // what is another one at a look
    fn others(
        &self,
        watched: &[(usize, usize)],
        nodes: &[Node],
        objects: &[Option<Met<'_>>],
    ) -> Others {
        let mut few = Vec::new();
        let mut modules = self.modules.iter();
        for (number, (&(at, kept), known)) in watched.iter().zip(&self.addresses).enumerate() {
            let whole = match &nodes[at].expect {
                Expect::Module(tree, ..) => modules
                    .next()
                    .is_some_and(|known| tree.has_containers(known)),
                _ => true,
            };
            let now = address(objects, kept);
            if now == *known && whole {
                continue;
            }
            let alone = !matches!(nodes[at].expect, Expect::Function(..) | Expect::Module(..));
            if !alone || few.len() == FEW {
                return Others::Many;
            }
            few.push((number, now));
        }
        Others::Few(few)
    }
}

// the modules that are looked at as a whole, by node
fn trees<'a>(
    watched: &'a [(usize, usize)],
    nodes: &'a [Node],
) -> impl Iterator<Item = (usize, &'a Tree)> {
    watched
        .iter()
        .filter_map(|&(at, _)| match &nodes[at].expect {
            Expect::Module(tree, ..) => Some((at, &**tree)),
            _ => None,
        })
}

// whether it matters that the object at a node is that one: of what cannot be changed, most often not
fn has_identity(node: &Node, object: &Bound<'_, PyAny>) -> bool {
    match &node.expect {
        Expect::Container(..) | Expect::Contents(..) => !object.is_exact_instance_of::<PyTuple>(),
        Expect::Object(..) | Expect::Function(..) | Expect::Module(..) | Expect::Identity(..) => {
            true
        }
        Expect::Anything => {
            object.is_instance_of::<PyDict>()
                || object.is_instance_of::<PyList>()
                || is_deque(object)
        }
        Expect::Array | Expect::Value(..) | Expect::Same(..) | Expect::Absent => false,
    }
}

fn address(objects: &[Option<Met<'_>>], kept: usize) -> usize {
    let met = objects.get(kept).and_then(Option::as_ref);
    met.map_or(0, |met| met.object.as_ptr().addr())
}

// the first place at which two lists are not the same
fn differs<T: PartialEq>(one: &[T], other: &[T]) -> Option<usize> {
    (0..one.len().max(other.len())).find(|&at| one.get(at) != other.get(at))
}

// for each the first one that has the same address
fn groups(addresses: &[usize]) -> Vec<usize> {
    let mut first = HashMap::with_capacity(addresses.len());
    let all = addresses.iter().enumerate();
    all.map(|(at, address)| *first.entry(*address).or_insert(at))
        .collect()
}

// the number of each among a model's containers
fn places(addresses: &[usize], model: &[usize]) -> Vec<Option<usize>> {
    let places = addresses.iter().map(|address| (*address, None));
    let mut places: HashMap<usize, Option<usize>> = places.collect();
    for (at, container) in model.iter().enumerate() {
        if let Some(place) = places.get_mut(container) {
            place.get_or_insert(at);
        }
    }
    addresses.iter().map(|address| places[address]).collect()
}
