//! Trees of Python containers: the model, the optimizer, the arguments of a call.
//!
//! A [`Tree`] lists the objects that a walk met, in order: containers, keys, arrays, and all else as static values. Of an array
//! only its shape and dtype count. Two trees are equal if both walks met the same. Uses `mlx`.
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

use std::{cell::RefCell, rc::Rc};

use faststep::engine::{array::id, Tensor};
use mlx_rs::Array;
use pyo3::{
    exceptions::PyRecursionError,
    prelude::*,
    types::{PyCFunction, PyDict, PyList, PyTuple, PyType},
};

use crate::mlx::{
    bridge,
    classes::{is_numeric, is_numpy_number},
    collector::{Collector, Refers, Visited},
    glance::Glance,
};
use identity::Class;
use paths::Paths;
use slot::{Place, Places, Slot};
use static_value::{equal, is_fixed, is_plain, Static};
use text::text;
use walk::{is_builtin, walk, Kind, Scope, Visitor, MAX_DEPTH};

#[derive(Debug)]
enum Item {
    Open(Kind, usize, Option<Class>), // its length; the class of a module or an optimizer
    Key(Py<PyAny>),
    Array,
    Static(Static),
    Fixed(Array), // in a tuple: no slot, so that its value is compared
    Object,       // a NumPy array or another object among arguments: not compared
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
            (Self::Fixed(a), Self::Fixed(b)) => id(a) == id(b),
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
            Self::Array | Self::Fixed(_) | Self::Object => Ok(()),
        }
    }
}

/// The arguments of a call, as a walk met them.
pub struct RecordedArguments<'py> {
    /// Their structure.
    pub tree: Tree,
    /// Their arrays.
    pub slots: Vec<Slot<'py>>,
    /// Modules, other objects, and containers of the user's classes among them.
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
    containers: RefCell<Rc<Vec<usize>>>, // addresses at the last check; while they stay the same, so do the aliases
    glance: RefCell<Option<Glance>>, // for the last check of a whole tree; an empty one never holds
    doubles: Vec<(usize, usize)>, // array slots that are the same place as a later one, and the last such slot
}

impl Refers for Tree {
    fn visit(&self, collector: &mut Collector<'_>) -> Visited {
        self.items.visit(collector)?;
        self.glance.visit(collector)
    }
}

/// Containers that the walk met before: the number of each, and the number of the same one before it.
fn aliases(containers: &[usize]) -> Vec<(usize, usize)> {
    let mut sorted: Vec<(usize, usize)> = containers.iter().copied().zip(0..).collect();
    sorted.sort_unstable();
    let pairs = sorted.windows(2).filter(|pair| pair[0].0 == pair[1].0);
    let mut pairs: Vec<_> = pairs.map(|pair| (pair[1].1, pair[0].1)).collect();
    pairs.sort_unstable();
    pairs
}

/// Slots that are the same place as a later one, and the last such slot.
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
    /// When the tree is nested too deeply.
    pub fn record<'py>(root: &Bound<'py, PyAny>, scope: Scope) -> PyResult<(Self, Vec<Slot<'py>>)> {
        let Recorder {
            mut tree,
            slots,
            containers,
            ..
        } = Recorder::run(root, scope)?;
        tree.aliases = aliases(&containers);
        if !tree.aliases.is_empty() {
            tree.doubles = doubles(&slots);
        }
        tree.containers = RefCell::new(Rc::new(containers));
        Ok((tree, slots))
    }

    /// The arrays' slots in `root`, as of [`Tree::record`] of the whole, without the structure around them.
    ///
    /// # Errors
    /// When the tree is nested too deeply.
    pub fn slots<'py>(root: &Bound<'py, PyAny>) -> PyResult<Vec<Slot<'py>>> {
        let mut slots = Slots::default();
        let walked = walk(root.clone(), Place::Tuple, &mut slots);
        walked.map(|()| slots.0).ok_or_else(nested_too_deeply)
    }

    /// Record the model of a step.
    ///
    /// # Errors
    /// As [`Tree::record`].
    pub fn of_model<'py>(model: &Bound<'py, PyAny>) -> PyResult<(Self, Vec<Slot<'py>>)> {
        Self::record(model, Scope::Whole)
    }

    /// Record the arguments of a call.
    ///
    /// # Errors
    /// As [`Tree::record`].
    pub fn record_arguments<'py>(root: &Bound<'py, PyAny>) -> PyResult<RecordedArguments<'py>> {
        let mut recorder = Recorder::run(root, Scope::Arguments)?;
        recorder.tree.containers = RefCell::new(Rc::new(recorder.containers));
        Ok(RecordedArguments {
            tree: recorder.tree,
            slots: recorder.slots,
            objects: recorder.objects,
            numpy: recorder.numpy,
        })
    }

    /// Walk `root` again. Returns its slots, if it has the recorded structure, and arrays of the recorded shapes and dtypes.
    ///
    /// Arrays with the identities in `known` are known to have them.
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

    /// The addresses of its containers, in order, as they were when it was recorded or checked last.
    pub fn containers(&self) -> Rc<Vec<usize>> {
        self.containers.borrow().clone()
    }

    /// The slots of `root`, if a glance finds nothing changed since the last check, and these arrays.
    pub fn same_slots<'py>(
        &self,
        root: &Bound<'py, PyAny>,
        known: &[usize],
    ) -> Option<Vec<Slot<'py>>> {
        let mut glance = self.glance.borrow_mut();
        let objects = glance.as_mut()?.arrays(root, known)?;
        let places = Rc::new(Places::of(root.clone()));
        let slots = objects.enumerate().map(|(number, object)| Slot {
            place: Place::Nth(places.clone(), number),
            object,
        });
        Some(slots.collect())
    }

    /// Check a whole tree, so that [`Tree::same_slots`] may answer the next time.
    pub fn check_whole<'py>(
        &self,
        root: &Bound<'py, PyAny>,
        known: &[usize],
    ) -> Option<Vec<Slot<'py>>> {
        let slots = self.check(root, Scope::Whole, known)?;
        let mut glance = self.glance.borrow_mut();
        glance.get_or_insert_with(|| glance::written(&self.items, root).unwrap_or_default());
        Some(slots)
    }

    /// Array slots that are the same place as a later one, because their container stands twice, and the last such slot.
    pub fn doubles(&self) -> &[(usize, usize)] {
        &self.doubles
    }

    /// Shape and dtype of the array in each slot.
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// Return whether both have the same keys and values, and arrays of the same shapes and dtypes.
    pub fn equals(&self, other: &Self, py: Python<'_>) -> bool {
        let mut pairs = self.items.iter().zip(&other.items);
        self.tensors == other.tensors
            && self.aliases == other.aliases
            && self.items.len() == other.items.len()
            && pairs.all(|(a, b)| a.equals(b, py))
    }

    /// The path to the first item that is another one in the other tree; none where both are equal.
    pub fn difference(&self, other: &Self, py: Python<'_>) -> Option<Vec<String>> {
        let same = |at: usize, item: &Item| {
            let its = other.items.get(at);
            its.is_some_and(|its| item.equals(its, py))
        };
        self.first(py, |at, item, _| !same(at, item))
    }

    /// The path to the first module, dict or list in whose place there is another one in the other tree, of the same structure.
    pub fn replaced(&self, other: &Self, py: Python<'_>) -> Option<Vec<String>> {
        let (mine, its) = (self.containers(), other.containers());
        self.first(py, |_, item, before| {
            matches!(item, Item::Open(..)) && mine.get(before) != its.get(before)
        })
    }

    // the path to the first item of which this is true: its number, the item, and the number of containers before it
    fn first(
        &self,
        py: Python<'_>,
        is_it: impl Fn(usize, &Item, usize) -> bool,
    ) -> Option<Vec<String>> {
        let mut paths = Paths::default();
        let mut containers = 0;
        for (at, item) in self.items.iter().enumerate() {
            if is_it(at, item, containers) {
                return Some(paths.here());
            }
            containers += usize::from(matches!(item, Item::Open(..)));
            paths.step(item, py);
        }
        None
    }

    /// The path to each array: keys and indices from the root.
    pub fn paths(&self, py: Python<'_>) -> Vec<Vec<String>> {
        let mut paths = Paths::default();
        self.items.iter().for_each(|item| paths.step(item, py));
        paths.arrays
    }
}

fn nested_too_deeply() -> PyErr {
    PyRecursionError::new_err(format!(
        "the tree is nested more than {MAX_DEPTH} levels deep: does a part of it contain the whole?"
    ))
}

/// Collects the arrays that have a place.
#[derive(Default)]
struct Slots<'py>(Vec<Slot<'py>>);

impl<'py> Visitor<'py> for Slots<'py> {
    fn open(&mut self, _: Kind, _: &Bound<'py, PyAny>, _: usize) -> Option<()> {
        Some(())
    }

    fn key(&mut self, _: &Bound<'py, PyAny>) -> Option<()> {
        Some(())
    }

    fn array(&mut self, place: Place<'py>, object: Bound<'py, PyAny>) -> Option<()> {
        if !matches!(place, Place::Tuple) {
            self.0.push(Slot { place, object });
        }
        Some(())
    }

    fn leaf(&mut self, _: &Bound<'py, PyAny>) -> Option<()> {
        Some(())
    }

    fn skips(&self, key: &str) -> bool {
        Scope::Whole.skips(key)
    }
}

/// Records what a walk meets.
#[derive(Default)]
struct Recorder<'py> {
    tree: Tree,
    slots: Vec<Slot<'py>>,
    containers: Vec<usize>,
    objects: Vec<Bound<'py, PyAny>>,
    numpy: bool,
    optimizer: bool, // an optimizer has been met
    scope: Scope,
    error: Option<PyErr>,
}

impl<'py> Recorder<'py> {
    fn run(root: &Bound<'py, PyAny>, scope: Scope) -> PyResult<Self> {
        let mut recorder = Self {
            scope,
            ..Self::default()
        };
        if walk(root.clone(), Place::Tuple, &mut recorder).is_some() {
            return Ok(recorder);
        }
        Err(recorder.error.take().unwrap_or_else(nested_too_deeply))
    }

    // a container of a user's class may have attributes
    fn note_container(&mut self, container: &Bound<'py, PyAny>) {
        let exact = container.is_exact_instance_of::<PyDict>()
            || container.is_exact_instance_of::<PyList>()
            || container.is_exact_instance_of::<PyTuple>();
        if !exact && self.scope == Scope::Arguments {
            self.objects.push(container.clone());
        }
    }
}

impl<'py> Visitor<'py> for Recorder<'py> {
    fn open(&mut self, kind: Kind, container: &Bound<'py, PyAny>, len: usize) -> Option<()> {
        self.note_container(container);
        self.optimizer |= kind == Kind::Optimizer;
        self.containers.push(container.as_ptr() as usize);
        let has_class = matches!(kind, Kind::Module | Kind::Optimizer);
        let class = has_class.then(|| Class::of(&container.get_type()));
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
            self.tree.items.push(Item::Fixed(bridge::get(&object)?));
            return Some(());
        }
        let array = bridge::get(&object)?;
        self.tree.items.push(Item::Array);
        self.tree.tensors.push(Tensor::of(&array));
        self.slots.push(Slot { place, object });
        Some(())
    }

    fn leaf(&mut self, object: &Bound<'py, PyAny>) -> Option<()> {
        let is_value = || is_plain(object) && is_builtin(object);
        if self.scope == Scope::Arguments && !is_value() && !is_static_object(object) {
            if is_numeric(object) || is_numpy_number(object) {
                self.numpy = true;
            } else {
                self.objects.push(object.clone());
            }
            self.tree.items.push(Item::Object);
            return Some(());
        }
        if self.scope == Scope::Arguments && object.is_instance_of::<PyType>() {
            self.objects.push(object.clone()); // its attributes may be others at the next call
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

// arguments that are compared by identity: classes, C functions, objects of MLX, members of enums
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

/// Compares what a walk meets with a tree.
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
                Item::Fixed(array) => (bridge::id(&object) == Some(id(array))).then_some(()),
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
