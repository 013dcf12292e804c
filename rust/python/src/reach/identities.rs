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

/// The objects of a program as they were when it was made.
#[derive(Default)]
pub struct Identities {
    made_for: Containers, // of the model
    by_address: bool,     // the code asks for addresses, and not only whether two objects are one
    first: OnceCell<First>,
    last: RefCell<Rc<Objects>>,                         // of the last look
    placed: RefCell<Option<(Rc<Objects>, Containers)>>, // those that were last found to be in the model as they were
}

// what is compared at the first look
struct First {
    watched: Vec<(usize, usize)>, // nodes, and the number of each among the objects of a look
    objects: Rc<Objects>,
    same: Vec<usize>,             // for each thing the first one that is the same
    in_model: Vec<Option<usize>>, // the place of each in the model
}

#[derive(Default)]
struct Objects {
    addresses: Vec<usize>,    // of those watched
    modules: Vec<Containers>, // of modules that are looked at as a whole
    things: Vec<usize>, // the addresses, those in the modules, then those of the cells and globals of functions
    nodes: Vec<usize>,  // of each thing
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
            let first = First::of(nodes, objects, &self.made_for);
            self.last.replace(first.objects.clone());
            first
        });
        if self.last.borrow().are(&first.watched, nodes, objects) {
            return None;
        }
        let now = Objects::of(&first.watched, nodes, objects);
        let other = if self.by_address {
            differs(&first.objects.things, &now.things)
        } else {
            differs(&first.same, &groups(&now.things))
        };
        if other.is_none() {
            self.last.replace(Rc::new(now));
        }
        other.map(|at| first.objects.nodes.get(at).copied().unwrap_or_default())
    }

    /// A node whose object at the last look stands elsewhere in the model, which has these containers now, than it did.
    pub fn moved(&self, model: &Containers) -> Option<usize> {
        let first = self.first.get()?;
        let last = self.last.borrow();
        let mut placed = self.placed.borrow_mut();
        let is_known = placed.as_ref().is_some_and(|(objects, containers)| {
            Rc::ptr_eq(objects, &last) && Rc::ptr_eq(containers, model)
        });
        if is_known {
            return None;
        }
        if self.by_address && **model != *self.made_for {
            return Some(0);
        }
        let other = differs(&first.in_model, &places(&last.things, model));
        if other.is_none() {
            *placed = Some((last.clone(), model.clone()));
        }
        other.map(|at| last.nodes[at])
    }
}

impl First {
    fn of(nodes: &[Node], objects: &[Option<Met<'_>>], model: &[usize]) -> Self {
        let kept = nodes.iter().enumerate();
        let kept = kept.filter_map(|(at, node)| Some((at, node, node.kept?)));
        let watched = kept.filter(|(_, node, kept)| {
            let met = objects.get(*kept).and_then(Option::as_ref);
            met.is_some_and(|met| has_identity(node, &met.object))
        });
        let watched: Vec<_> = watched.map(|(at, _, kept)| (at, kept)).collect();
        let objects = Objects::of(&watched, nodes, objects);
        Self {
            same: groups(&objects.things),
            in_model: places(&objects.things, model),
            watched,
            objects: Rc::new(objects),
        }
    }
}

impl Objects {
    fn of(watched: &[(usize, usize)], nodes: &[Node], objects: &[Option<Met<'_>>]) -> Self {
        let addresses = watched.iter().map(|&(_, kept)| address(objects, kept));
        let mut found = Self {
            addresses: addresses.collect(),
            nodes: watched.iter().map(|&(node, _)| node).collect(),
            ..Self::default()
        };
        found.things.clone_from(&found.addresses);
        let trees = trees(watched, nodes);
        for (at, tree) in trees {
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

    fn add(&mut self, node: usize, things: impl Iterator<Item = usize>) {
        self.things.extend(things);
        self.nodes.resize(self.things.len(), node);
    }

    // true if these are the objects of a look
    fn are(&self, watched: &[(usize, usize)], nodes: &[Node], objects: &[Option<Met<'_>>]) -> bool {
        let mut pairs = watched.iter().zip(&self.addresses);
        let mut modules = self.modules.iter();
        pairs.all(|(&(at, kept), known)| {
            address(objects, kept) == *known
                && match &nodes[at].expect {
                    Expect::Module(tree, ..) => {
                        let known = modules.next();
                        known.is_some_and(|known| tree.has_containers(known))
                    }
                    _ => true,
                }
        })
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
