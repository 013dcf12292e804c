//! Trees of Python containers: the model, the optimizer, a batch. What is in them, and whether it is still the same.
//!
//! A [`Tree`] is what a walk met, in order: containers, keys, arrays, and everything else as static values. Two walks
//! that meet the same may share a trace; arrays are its inputs, and only their shape and dtype count. Uses `mlx`.
mod glance;
pub mod identity;
pub mod ordered;
pub mod paths;
pub mod rebuild;
pub mod slot;
pub mod snapshot;
pub mod static_value;
pub mod text;
pub mod walk;

use std::{cell::RefCell, collections::HashMap, ops::Range, rc::Rc};

use faststep::engine::Tensor;
use pyo3::{
    exceptions::PyRecursionError,
    prelude::*,
    types::{PyCFunction, PyDict, PyList, PyTuple, PyType},
};

use crate::mlx::{
    bridge,
    classes::is_numeric,
    collector::{Collector, Refers, Visited},
    glance::Glance,
};
use identity::Class;
use paths::Paths;
use slot::{Place, Places, Slot};
use static_value::{equal, is_fixed, is_plain, Static};
use text::text;
use walk::{walk, Kind, Scope, Visitor, MAX_DEPTH};

#[derive(Debug)]
enum Item {
    Open(Kind, usize, Option<Class>), // its length, and its class where that decides what it does
    Key(Py<PyAny>),
    Array,
    Static(Static),
    Object, // a number, a text, an argument with attributes of its own, an array in a tuple: `reach` looks at it
}

impl Item {
    fn equals(&self, other: &Self, py: Python<'_>) -> bool {
        match (self, other) {
            (Self::Open(a, n, class), Self::Open(b, m, other)) => {
                let same = match (class, other) {
                    (Some(class), Some(other)) => class.equals(other, py),
                    _ => class.is_none() && other.is_none(),
                };
                a == b && n == m && same
            }
            (Self::Key(a), Self::Key(b)) => equal(a.bind(py), b.bind(py)),
            (Self::Array, Self::Array) | (Self::Object, Self::Object) => true,
            (Self::Static(a), Self::Static(b)) => a.equals(b, py),
            _ => false,
        }
    }
}

impl Refers for Item {
    fn visit(&self, collector: &mut Collector<'_>) -> Visited {
        match self {
            Self::Open(.., class) => class.visit(collector),
            Self::Key(key) => key.visit(collector),
            Self::Static(value) => value.visit(collector),
            Self::Array | Self::Object => Ok(()),
        }
    }
}

/// The arguments of a call.
pub struct RecordedArguments<'py> {
    /// Their structure.
    pub tree: Tree,
    /// Their arrays.
    pub slots: Vec<Slot<'py>>,
    /// Modules and other objects among them, then classes, and containers with attributes.
    pub objects: Vec<Bound<'py, PyAny>>,
    /// True if there are NumPy arrays among them.
    pub numpy: bool,
}

/// Structure of the objects that a walk met, in order.
#[derive(Debug, Default)]
pub struct Tree {
    items: Vec<Item>,
    tensors: Vec<Tensor>,
    aliases: Vec<(usize, usize)>,
    containers: RefCell<Rc<Vec<usize>>>, // of the last check: where they are the same, so are the aliases
    glance: RefCell<Option<Glance>>, // of the same, where it has been asked for; empty where it cannot tell
    doubles: Vec<(usize, usize)>,    // array slots that a later one is too, and the last of those
    /// Which of the arrays stand for NumPy's among arguments, with their dtypes.
    pub numpy: Vec<(usize, i64)>,
}

impl Refers for Tree {
    fn visit(&self, collector: &mut Collector<'_>) -> Visited {
        self.items.visit(collector)?;
        self.glance.visit(collector)
    }
}

/// Containers that stand at several places: the number of each, and of the one before it that is the same.
fn aliases(containers: &[usize]) -> Vec<(usize, usize)> {
    let mut sorted: Vec<(usize, usize)> = containers.iter().copied().zip(0..).collect();
    sorted.sort_unstable();
    let pairs = sorted.windows(2).filter(|pair| pair[0].0 == pair[1].0);
    let mut pairs: Vec<_> = pairs.map(|pair| (pair[1].1, pair[0].1)).collect();
    pairs.sort_unstable();
    pairs
}

/// The slots that are the same place as a later one, and the last that is.
fn doubles(slots: &[Slot<'_>]) -> Vec<(usize, usize)> {
    let mut places: Vec<(usize, usize, usize)> = Vec::new();
    for (number, slot) in slots.iter().enumerate() {
        match &slot.place {
            Place::Dict(dict, key) => {
                places.push((dict.as_ptr().addr(), key.as_ptr().addr(), number));
            }
            Place::List(list, index) => places.push((list.as_ptr().addr(), *index, number)),
            Place::Tuple | Place::Nth(..) => {}
        }
    }
    places.sort_unstable();
    let same = places.chunk_by(|a, b| (a.0, a.1) == (b.0, b.1));
    let pairs = same.flat_map(|same| {
        let last = same.last().map_or(0, |place| place.2);
        same[..same.len() - 1]
            .iter()
            .map(move |place| (place.2, last))
    });
    pairs.collect()
}

impl Tree {
    /// Walk `root` and record its structure and the arrays' slots.
    ///
    /// # Errors
    /// A tree that is nested too deeply.
    pub fn record<'py>(root: &Bound<'py, PyAny>, scope: Scope) -> PyResult<(Self, Vec<Slot<'py>>)> {
        let mut recorder = Recorder {
            scope,
            ..Recorder::default()
        };
        recorder.run(root)?;
        recorder.tree.aliases = aliases(&recorder.containers);
        recorder.tree.containers = RefCell::new(Rc::new(recorder.containers));
        if !recorder.tree.aliases.is_empty() {
            recorder.tree.doubles = doubles(&recorder.slots);
        }
        Ok((recorder.tree, recorder.slots))
    }

    /// As [`Tree::record`], for the model of a step.
    ///
    /// # Errors
    /// A tree that is nested too deeply.
    pub fn of_model<'py>(model: &Bound<'py, PyAny>) -> PyResult<(Self, Vec<Slot<'py>>)> {
        Self::record(model, Scope::Whole)
    }

    /// As [`Tree::record`], for the arguments of a call.
    ///
    /// # Errors
    /// A tree that is nested too deeply.
    pub fn record_arguments<'py>(root: &Bound<'py, PyAny>) -> PyResult<RecordedArguments<'py>> {
        let mut recorder = Recorder {
            scope: Scope::Arguments,
            ..Recorder::default()
        };
        recorder.run(root)?;
        recorder.tree.containers = RefCell::new(Rc::new(recorder.containers));
        Ok(RecordedArguments {
            tree: recorder.tree,
            slots: recorder.slots,
            objects: recorder.objects,
            numpy: recorder.numpy,
        })
    }

    /// Walk `root` again: its slots, when it is what was noted, with arrays of the noted shapes and dtypes.
    ///
    /// `known` are the identities of the arrays that are sure to have them.
    pub fn check<'py>(
        &self,
        root: &Bound<'py, PyAny>,
        scope: Scope,
        known: &[usize],
    ) -> Option<Vec<Slot<'py>>> {
        let mut checker = Checker {
            tree: self,
            scope,
            known,
            at: 0,
            slots: Vec::with_capacity(self.tensors.len()),
            containers: Vec::new(),
        };
        walk(root.clone(), Place::Tuple, &mut checker)?;
        if checker.at != self.items.len() {
            return None;
        }
        let mut containers = self.containers.borrow_mut();
        if **containers != checker.containers {
            if aliases(&checker.containers) != self.aliases {
                return None;
            }
            *containers = Rc::new(checker.containers);
            self.glance.take();
        }
        Some(checker.slots)
    }

    /// Return whether `root` is what was checked last and `known` are its arrays, where a glance can tell: most often.
    pub fn is_same(&self, root: &Bound<'_, PyAny>, known: &[usize]) -> bool {
        let mut glance = self.glance.borrow_mut();
        glance
            .as_mut()
            .is_some_and(|glance| glance.meets(root, known))
    }

    /// The slots, where `root` is what was checked last and `known` are its arrays, and a glance can tell.
    pub fn same_slots<'py>(
        &self,
        root: &Bound<'py, PyAny>,
        known: &[usize],
    ) -> Option<Vec<Slot<'py>>> {
        let mut glance = self.glance.borrow_mut();
        let Some(objects) = glance.as_mut()?.arrays(root, known) else {
            return None;
        };
        let places = Rc::new(Places::of(root.clone()));
        let slots = objects.enumerate().map(|(number, object)| Slot {
            place: Place::Nth(places.clone(), number),
            object,
        });
        Some(slots.collect())
    }

    /// As [`Tree::check`] of all arrays, so that the next look may be a glance.
    pub fn check_whole<'py>(
        &self,
        root: &Bound<'py, PyAny>,
        known: &[usize],
    ) -> Option<Vec<Slot<'py>>> {
        let slots = self.check(root, Scope::Whole, known)?;
        let mut glance = self.glance.borrow_mut();
        glance.get_or_insert_with(|| {
            glance::written(&self.items, root).unwrap_or_default()
        });
        Some(slots)
    }

    /// The addresses of its containers, in order, as they were when it was recorded or checked last.
    pub fn containers(&self) -> Rc<Vec<usize>> {
        self.containers.borrow().clone()
    }

    /// Return whether these are they.
    pub fn has_containers(&self, known: &Rc<Vec<usize>>) -> bool {
        Rc::ptr_eq(known, &self.containers.borrow())
    }

    /// Take the containers of another tree, of the same form, for its own.
    pub fn take_containers(&self, other: &Self) {
        self.containers.replace(other.containers());
    }

    /// The array slots that stand at a later place too, because an object that has them does, and the last such place.
    pub fn doubles(&self) -> &[(usize, usize)] {
        &self.doubles
    }

    /// The last array slot that is the same place as this one: what is put there stays.
    pub fn last_place(&self, slot: usize) -> usize {
        let double = self.doubles.iter().find(|&&(double, _)| double == slot);
        double.map_or(slot, |&(_, last)| last)
    }

    /// Shape and dtype of the array in each slot.
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// Return whether both have the same keys and values, and arrays of the same shapes and dtypes.
    pub fn equals(&self, other: &Self, py: Python<'_>) -> bool {
        self.tensors == other.tensors
            && self.aliases == other.aliases
            && self.items.len() == other.items.len()
            && self
                .items
                .iter()
                .zip(&other.items)
                .all(|(a, b)| a.equals(b, py))
    }

    /// The same, but for numbers and flags: another one of any kind may stand in the place of one.
    pub fn equals_but_numbers(&self, other: &Self, py: Python<'_>) -> bool {
        let equal = |(a, b): (&Item, &Item)| match (a, b) {
            (Item::Static(a), Item::Static(b)) if a.is_number(py) => b.is_number(py),
            _ => a.equals(b, py),
        };
        self.tensors == other.tensors
            && self.aliases == other.aliases
            && self.items.len() == other.items.len()
            && self.items.iter().zip(&other.items).all(equal)
    }

    /// The numbers of the items that are other numbers there; none where more than that is another.
    pub fn other_numbers(&self, other: &Self, py: Python<'_>) -> Option<Vec<usize>> {
        let pairs = || self.items.iter().zip(&other.items).enumerate();
        let differ = pairs().filter(|(_, (a, b))| !a.equals(b, py));
        self.equals_but_numbers(other, py)
            .then(|| differ.map(|(at, _)| at).collect())
    }

    /// Those of the items that are numbers, and not flags, in both trees, and other numbers in each.
    pub fn changed_numbers(&self, other: &Self, py: Python<'_>) -> Vec<usize> {
        let differ = self.other_numbers(other, py).unwrap_or_default();
        let is_one = |tree: &Self, at: usize| match &tree.items[at] {
            Item::Static(value) => value.is_number(py) && !value.is_flag(py),
            _ => false,
        };
        let both = |&at: &usize| is_one(self, at) && is_one(other, at);
        differ.into_iter().filter(both).collect()
    }

    /// The number at an item.
    pub fn number<'py>(&self, at: usize, py: Python<'py>) -> Option<Bound<'py, PyAny>> {
        match self.items.get(at)? {
            Item::Static(value @ Static::Value(number)) if value.is_number(py) => {
                Some(number.bind(py).clone())
            }
            _ => None,
        }
    }

    /// All numbers, flags among them.
    pub fn own_numbers(&self, py: Python<'_>) -> Vec<Py<PyAny>> {
        let numbers = (0..self.items.len()).filter_map(|at| self.number(at, py));
        numbers.map(Bound::unbind).collect()
    }

    /// The same as a tuple.
    pub fn number_values<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.own_numbers(py))
    }

    /// The item of each number, and the path to it.
    pub fn numbers(&self, py: Python<'_>) -> Vec<(usize, String)> {
        let mut paths = Paths::default();
        let mut numbers = Vec::new();
        for (at, item) in self.items.iter().enumerate() {
            if self.number(at, py).is_some() {
                numbers.push((at, paths.next_path().join(".")));
            }
            paths.step(item, py);
        }
        numbers
    }

    /// The name of an item, where that is an attribute of a module.
    pub fn attribute(&self, at: usize, py: Python<'_>) -> Option<String> {
        let mut paths = Paths::default();
        self.items[..at]
            .iter()
            .for_each(|item| paths.step(item, py));
        paths.attribute()
    }

    /// The attributes of modules in which something is another thing there, but numbers, functions and modules
    /// themselves.
    pub fn changed_attributes(&self, other: &Self, py: Python<'_>) -> Vec<String> {
        let is_one = |items: &[Item]| match items {
            [Item::Static(value)] => !value.is_number(py) && !value.is_callable(py),
            [Item::Open(kind, ..), ..] => matches!(kind, Kind::Dict | Kind::List | Kind::Tuple),
            _ => false,
        };
        let theirs = other.attributes(py);
        let theirs = theirs.iter().rev(); // what is in front of modules counts
        let theirs: HashMap<_, _> = theirs.map(|(path, at)| (path, at.clone())).collect();
        let mut changed = Vec::new();
        for (path, at) in self.attributes(py) {
            let items = &self.items[at];
            let there = theirs.get(&path).map(|at| &other.items[at.clone()]);
            let Some(there) = there.filter(|there| is_one(items) && is_one(there)) else {
                continue;
            };
            let mut pairs = items.iter().zip(there);
            if items.len() != there.len() || !pairs.all(|(a, b)| a.equals(b, py)) {
                changed.extend(path.last().cloned());
            }
        }
        changed
    }

    // the items behind the key of each attribute of a module, by the path to it; of a module, those that are in no other one
    fn attributes(&self, py: Python<'_>) -> Vec<(Vec<String>, Range<usize>)> {
        let mut found: Vec<(Vec<String>, Range<usize>)> = Vec::new();
        let mut paths = Paths::default();
        for (at, item) in self.items.iter().enumerate() {
            if let Some((module, name)) = paths.of_module() {
                let is_last = |last: &[String]| last.split_last() == Some((name, module));
                match found.last_mut() {
                    Some((last, known)) if known.end == at && is_last(last) => known.end = at + 1,
                    _ => found.push(([module, std::slice::from_ref(name)].concat(), at..at + 1)),
                }
            }
            paths.step(item, py);
        }
        found
    }

    /// The path to the first place where the other one has another key, value or container; arrays may be others.
    pub fn difference(&self, other: &Self, py: Python<'_>) -> Option<Vec<String>> {
        let mut paths = Paths::default();
        for (item, other) in self.items.iter().zip(&other.items) {
            if !item.equals(other, py) {
                return Some(paths.next_path());
            }
            paths.step(item, py);
        }
        let same = self.items.len() == other.items.len() && self.aliases == other.aliases;
        (!same).then(|| paths.next_path())
    }

    /// The path to each array: keys and indices from the root.
    pub fn paths(&self, py: Python<'_>) -> Vec<Vec<String>> {
        let mut paths = Paths::default();
        self.items.iter().for_each(|item| paths.step(item, py));
        paths.arrays
    }

    /// The path to each object that `reach` looks at.
    pub fn object_paths(&self, py: Python<'_>) -> Vec<Vec<String>> {
        let mut paths = Paths::default();
        self.items.iter().for_each(|item| paths.step(item, py));
        paths.objects
    }
}

// a flag of classes that a program has made
const HEAP: usize = 1 << 9;

/// Follows items to tell where each one stands.
#[derive(Default)]
struct Recorder<'py> {
    tree: Tree,
    slots: Vec<Slot<'py>>,
    containers: Vec<usize>,
    objects: Vec<Bound<'py, PyAny>>,
    wholes: Vec<Bound<'py, PyAny>>, // what is more than what is in it
    numpy: bool,
    optimizer: bool,
    scope: Scope,
    error: Option<PyErr>,
}

impl<'py> Recorder<'py> {
    // note a container among the arguments that is more than its items
    fn note_container(&mut self, container: &Bound<'py, PyAny>) {
        let exact = container.is_exact_instance_of::<PyDict>()
            || container.is_exact_instance_of::<PyList>()
            || container.is_exact_instance_of::<PyTuple>();
        if !exact && self.scope == Scope::Arguments {
            self.objects.push(container.clone());
        }
    }

    fn run(&mut self, root: &Bound<'py, PyAny>) -> PyResult<()> {
        match walk(root.clone(), Place::Tuple, self) {
            Some(()) => Ok(()),
            None => Err(self.error.take().unwrap_or_else(|| {
                PyRecursionError::new_err(format!(
                    "the tree is nested more than {MAX_DEPTH} levels deep: does a part of it contain the whole?"
                ))
            })),
        }
    }
}

impl<'py> Visitor<'py> for Recorder<'py> {
    fn open(&mut self, kind: Kind, container: &Bound<'py, PyAny>, len: usize) -> Option<()> {
        self.note_container(container);
        self.optimizer |= kind == Kind::Optimizer;
        self.containers.push(container.as_ptr() as usize);
        let has_class = matches!(kind, Kind::Module | Kind::Optimizer);
        let class = has_class.then(|| Class::of_class(&container.get_type()));
        self.tree.items.push(Item::Open(kind, len, class));
        Some(())
    }

    fn key(&mut self, key: &Bound<'py, PyAny>) -> Option<()> {
        if self.scope == Scope::Arguments && !(is_fixed(key) || is_static_object(key)) {
            self.objects.push(key.clone());
        }
        self.tree.items.push(Item::Key(key.clone().unbind()));
        Some(())
    }

    fn array(&mut self, place: Place<'py>, object: Bound<'py, PyAny>) -> Option<()> {
        if matches!(place, Place::Tuple) && self.scope != Scope::Arguments {
            if self.optimizer {
                return self.leaf(&object);
            }
            self.tree.items.push(Item::Object);
            return Some(());
        }
        let array = bridge::get(&object)?;
        self.tree.items.push(Item::Array);
        self.tree.tensors.push(Tensor::of(&array));
        self.slots.push(Slot { place, object });
        Some(())
    }

    fn leaf(&mut self, object: &Bound<'py, PyAny>) -> Option<()> {
        if self.scope == Scope::Arguments && !is_plain(object) && !is_static_object(object) {
            if is_numeric(object) {
                self.numpy = true;
            } else {
                self.objects.push(object.clone());
            }
            self.tree.items.push(Item::Object);
            return Some(());
        }
        match Static::of(object) {
            Ok(value) => self.tree.items.push(Item::Static(value)),
            Err(error) => {
                self.error = Some(error);
                return None;
            }
        }
        Some(())
    }

    fn takes_arguments(&self) -> bool {
        self.scope == Scope::Arguments
    }

    fn skips(&self, key: &str) -> bool {
        self.scope.skips(key)
    }
}

// argument values beside arrays and numbers that compare by identity: classes, enums, dtypes, C functions
fn is_static_object(object: &Bound<'_, PyAny>) -> bool {
    let class = object.get_type();
    let module = class
        .module()
        .map_or_else(|_| String::new(), |name| text(&name));
    object.is_instance_of::<PyType>()
        || object.is_instance_of::<PyCFunction>()
        || module == "mlx.core"
        || class.hasattr("__members__").unwrap_or(false)
}

struct Checker<'a, 'py> {
    tree: &'a Tree,
    scope: Scope,
    known: &'a [usize],
    at: usize,
    slots: Vec<Slot<'py>>,
    containers: Vec<usize>,
}

impl Checker<'_, '_> {
    fn next(&mut self) -> Option<&Item> {
        let item = self.tree.items.get(self.at);
        self.at += 1;
        item
    }
}

impl<'py> Visitor<'py> for Checker<'_, 'py> {
    fn open(&mut self, kind: Kind, container: &Bound<'py, PyAny>, len: usize) -> Option<()> {
        self.containers.push(container.as_ptr() as usize);
        let Item::Open(known, number, class) = self.next()? else {
            return None;
        };
        let same = class
            .as_ref()
            .is_none_or(|class| class.is(container.get_type().as_any()));
        (*known == kind && *number == len && same).then_some(())
    }

    fn key(&mut self, key: &Bound<'py, PyAny>) -> Option<()> {
        matches!(self.next()?, Item::Key(k) if k.is(key)).then_some(())
    }

    fn array(&mut self, place: Place<'py>, object: Bound<'py, PyAny>) -> Option<()> {
        if matches!(place, Place::Tuple) {
            return match self.next()? {
                Item::Object => Some(()),
                Item::Static(value) => value.is(&object).then_some(()),
                _ => None,
            };
        }
        matches!(self.next()?, Item::Array).then_some(())?;
        let index = self.slots.len();
        let id = bridge::id(&object)?;
        if self.known.get(index) != Some(&id) {
            let tensor = Tensor::of(&bridge::get(&object)?);
            (self.tree.tensors.get(index) == Some(&tensor)).then_some(())?;
        }
        self.slots.push(Slot { place, object });
        Some(())
    }

    fn leaf(&mut self, object: &Bound<'py, PyAny>) -> Option<()> {
        matches!(self.next()?, Item::Static(value) if value.is(object)).then_some(())
    }

    fn skips(&self, key: &str) -> bool {
        self.scope.skips(key)
    }
}
