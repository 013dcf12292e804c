//! Trees of Python containers: the model, the optimizer, a batch. What is in them, and whether it is still the same.
//!
//! A [`Tree`] is what a walk met, in order: containers, keys, arrays, and everything else as static values. Two walks
//! that meet the same may share a trace; arrays are its inputs, and only their shape and dtype count.
use faststep::layout::Tensor;
use mlx_rs::Array;
use pyo3::{
    exceptions::{PyRecursionError, PyTypeError},
    prelude::*,
    sync::PyOnceLock,
    types::{
        PyBool, PyBytes, PyComplex, PyDict, PyFloat, PyFrozenSet, PyInt, PyList, PySet, PyString,
        PyTuple, PyType, PyWeakrefReference,
    },
};

use crate::bridge;

/// Deeper trees than this are taken for cycles.
const MAX_DEPTH: usize = 200;

/// What kind of container a walk met.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A dict, or a subclass that is no module.
    Dict,
    /// A list.
    List,
    /// A tuple.
    Tuple,
    /// An `nn.Module`: a dict with attributes.
    Module,
    /// An `optimizers.Optimizer`.
    Optimizer,
    /// The instance dict of a module or an optimizer.
    Attributes,
}

/// Where an object stands, so that another can be put there.
#[derive(Clone)]
pub enum Place<'py> {
    /// Under a key of a dict.
    Dict(Bound<'py, PyDict>, Bound<'py, PyAny>),
    /// At an index of a list.
    List(Bound<'py, PyList>, usize),
    /// In a tuple.
    Tuple,
}

impl<'py> Place<'py> {
    /// Put another object there.
    pub fn set(&self, object: &Bound<'py, PyAny>) -> PyResult<()> {
        match self {
            Self::Dict(dict, key) => dict.set_item(key, object),
            Self::List(list, index) => list.set_item(*index, object),
            Self::Tuple => Ok(()),
        }
    }

    /// The object that stands there now.
    pub fn get(&self) -> PyResult<Option<Bound<'py, PyAny>>> {
        match self {
            Self::Dict(dict, key) => dict.get_item(key),
            Self::List(list, index) => Ok(list.get_item(*index).ok()),
            Self::Tuple => Ok(None),
        }
    }
}

/// An array object and where it stands.
pub struct Slot<'py> {
    /// Where.
    pub place: Place<'py>,
    /// The `mx.array` object.
    pub object: Bound<'py, PyAny>,
}

impl Slot<'_> {
    /// Show another value in the slot: in the same object when nobody else refers to it, else in a new one.
    pub fn show(&self, array: &Array) -> PyResult<()> {
        if self.is_unshared() {
            bridge::assign(&self.object, array);
            return Ok(());
        }
        self.put(array)
    }

    /// Put a new object with another value into the slot.
    pub fn put(&self, array: &Array) -> PyResult<()> {
        self.place.set(&bridge::wrap(self.object.py(), array)?)
    }

    /// Let the object go of its value, unless somebody else refers to it.
    pub fn empty(&self, hollow: &Array) {
        if self.is_unshared() {
            bridge::assign(&self.object, hollow);
        }
    }

    /// Whether the object has this value.
    pub fn holds(&self, array: &Array) -> bool {
        bridge::id(&self.object) == Some(faststep::array::id(array))
    }

    /// Whether only the slot's container and this struct refer to the object.
    pub fn is_unshared(&self) -> bool {
        bridge::refcount(&self.object) == 2
    }
}

/// What a tree is walked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Scope {
    /// A model or an optimizer with all its arrays.
    #[default]
    Whole,
    /// An optimizer without the state that it keeps for each parameter.
    Options,
    /// The arguments of a call: arrays may stand in tuples, objects other than plain values may not stand at all.
    Arguments,
}

impl Scope {
    fn skips(self, key: &str) -> bool {
        key == "_initialized" || (self == Self::Options && key == "_state")
    }
}

/// What a walk reports; `None` ends it.
trait Visitor<'py> {
    fn open(&mut self, kind: Kind, container: &Bound<'py, PyAny>, len: usize) -> Option<()>;
    fn key(&mut self, key: &Bound<'py, PyAny>) -> Option<()>;
    fn array(&mut self, place: Place<'py>, object: Bound<'py, PyAny>) -> Option<()>;
    fn leaf(&mut self, object: &Bound<'py, PyAny>) -> Option<()>;

    /// Whether to pass over an attribute of an optimizer.
    fn skips(&self, key: &str) -> bool;
}

fn walk<'py>(
    object: Bound<'py, PyAny>,
    place: Place<'py>,
    depth: usize,
    visitor: &mut impl Visitor<'py>,
) -> Option<()> {
    if depth > MAX_DEPTH {
        return None;
    }
    if bridge::is_array(&object) {
        return visitor.array(place, object);
    }
    if let Ok(dict) = object.cast::<PyDict>() {
        let module = !dict.is_exact_instance_of::<PyDict>() && is_module(&object);
        let kind = if module { Kind::Module } else { Kind::Dict };
        visitor.open(kind, &object, dict.len())?;
        walk_items(dict, depth, visitor)?;
        if module {
            walk_attributes(&object, depth, visitor)?;
        }
        return Some(());
    }
    if let Ok(list) = object.cast::<PyList>() {
        visitor.open(Kind::List, &object, list.len())?;
        for (index, item) in list.iter().enumerate() {
            walk(item, Place::List(list.clone(), index), depth + 1, visitor)?;
        }
        return Some(());
    }
    if let Ok(tuple) = object.cast::<PyTuple>() {
        visitor.open(Kind::Tuple, &object, tuple.len())?;
        for item in tuple.iter() {
            walk(item, Place::Tuple, depth + 1, visitor)?;
        }
        return Some(());
    }
    if is_optimizer(&object) {
        visitor.open(Kind::Optimizer, &object, 0)?;
        return walk_attributes(&object, depth, visitor);
    }
    visitor.leaf(&object)
}

fn walk_items<'py>(
    dict: &Bound<'py, PyDict>,
    depth: usize,
    visitor: &mut impl Visitor<'py>,
) -> Option<()> {
    for (key, value) in dict.iter() {
        visitor.key(&key)?;
        walk(value, Place::Dict(dict.clone(), key), depth + 1, visitor)?;
    }
    Some(())
}

fn walk_attributes<'py>(
    object: &Bound<'py, PyAny>,
    depth: usize,
    visitor: &mut impl Visitor<'py>,
) -> Option<()> {
    let attributes = object
        .getattr(pyo3::intern!(object.py(), "__dict__"))
        .ok()?;
    let attributes = attributes.cast::<PyDict>().ok()?;
    if !is_optimizer(object) {
        visitor.open(Kind::Attributes, attributes.as_any(), attributes.len())?;
        return walk_items(attributes, depth, visitor);
    }
    let kept = attributes.iter().filter(|(key, _)| {
        let key = key.cast::<PyString>().ok();
        !key.is_some_and(|key| key.to_str().is_ok_and(|key| visitor.skips(key)))
    });
    let kept: Vec<_> = kept.collect();
    visitor.open(Kind::Attributes, attributes.as_any(), kept.len())?;
    for (key, value) in kept {
        visitor.key(&key)?;
        let place = Place::Dict(attributes.clone(), key);
        walk(value, place, depth + 1, visitor)?;
    }
    Some(())
}

fn class<'py>(
    py: Python<'py>,
    cell: &'static PyOnceLock<Py<PyType>>,
    module: &str,
    name: &str,
) -> Option<&'py Bound<'py, PyType>> {
    cell.import(py, module, name).ok()
}

/// Whether the object is an `nn.Module`.
pub fn is_module(object: &Bound<'_, PyAny>) -> bool {
    static CLASS: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    let class = class(object.py(), &CLASS, "mlx.nn", "Module");
    class.is_some_and(|class| object.is_instance(class).unwrap_or(false))
}

/// Whether the object is an `optimizers.Optimizer`.
pub fn is_optimizer(object: &Bound<'_, PyAny>) -> bool {
    static CLASS: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    let class = class(object.py(), &CLASS, "mlx.optimizers", "Optimizer");
    class.is_some_and(|class| object.is_instance(class).unwrap_or(false))
}

/// A value that belongs to the signature.
#[derive(Debug)]
enum Static {
    /// A number, a string, or what cannot be referred to weakly.
    Value(Py<PyAny>),
    /// Any other object; a strong reference could keep the model alive.
    Weak(Py<PyWeakrefReference>),
    /// The members of a set.
    Set(Py<PyFrozenSet>),
    /// An array in a tuple, which cannot be given another value in its place.
    Constant(Array),
}

fn is_plain(object: &Bound<'_, PyAny>) -> bool {
    object.is_none()
        || object.is_instance_of::<PyBool>()
        || object.is_instance_of::<PyInt>()
        || object.is_instance_of::<PyFloat>()
        || object.is_instance_of::<PyString>()
        || object.is_instance_of::<PyBytes>()
        || object.is_instance_of::<PyComplex>()
}

impl Static {
    fn of(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        if let Some(array) = bridge::get(object) {
            return Ok(Self::Constant(array));
        }
        if let Ok(set) = object.cast::<PySet>() {
            return Ok(Self::Set(
                PyFrozenSet::new(object.py(), set.iter())?.unbind(),
            ));
        }
        if !is_plain(object) {
            if let Ok(weak) = PyWeakrefReference::new(object) {
                return Ok(Self::Weak(weak.unbind()));
            }
        }
        Ok(Self::Value(object.clone().unbind()))
    }

    // the same object, without calling anything of the user's
    fn is(&self, object: &Bound<'_, PyAny>) -> bool {
        let py = object.py();
        match self {
            Self::Value(value) => value.is(object),
            Self::Weak(weak) => weak.bind(py).upgrade().is_some_and(|o| o.is(object)),
            Self::Set(members) => object.cast::<PySet>().is_ok_and(|set| {
                let members = members.bind(py);
                set.len() == members.len() && (set.is_empty() || set.eq(members).unwrap_or(false))
            }),
            Self::Constant(array) => bridge::id(object) == Some(faststep::array::id(array)),
        }
    }

    fn equals(&self, other: &Self, py: Python<'_>) -> bool {
        let object = match other {
            Self::Value(value) => Some(value.bind(py).clone()),
            Self::Weak(weak) => weak.bind(py).upgrade(),
            Self::Set(set) => {
                return matches!(self, Self::Set(mine) if equal(mine.bind(py), set.bind(py)))
            }
            Self::Constant(array) => {
                let id = faststep::array::id(array);
                return matches!(self, Self::Constant(mine) if faststep::array::id(mine) == id);
            }
        };
        let mine = match self {
            Self::Value(value) => Some(value.bind(py).clone()),
            Self::Weak(weak) => weak.bind(py).upgrade(),
            Self::Set(_) | Self::Constant(_) => None,
        };
        let (Some(mine), Some(object)) = (mine, object) else {
            return false;
        };
        if let (Ok(a), Ok(b)) = (mine.cast::<PyFloat>(), object.cast::<PyFloat>()) {
            return a.value().to_bits() == b.value().to_bits();
        }
        equal(&mine, &object)
    }
}

fn equal(a: &Bound<'_, PyAny>, b: &Bound<'_, PyAny>) -> bool {
    a.is(b) || (a.get_type().is(b.get_type()) && a.eq(b).unwrap_or(false))
}

#[derive(Debug)]
enum Item {
    Open(Kind, usize),
    Key(Py<PyAny>),
    Array,
    Static(Static),
}

/// What a walk met, in order.
#[derive(Debug, Default)]
pub struct Tree {
    items: Vec<Item>,
    tensors: Vec<Tensor>,
    aliases: Vec<(usize, usize)>,
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

impl Tree {
    /// Walk `root` and note what is there, and the arrays' slots.
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
        Ok((recorder.tree, recorder.slots))
    }

    /// As [`Tree::record`], for the arguments of a call.
    ///
    /// # Errors
    /// An argument that is neither an array nor a plain value; the message has its `name`.
    pub fn record_arguments<'py>(
        root: &Bound<'py, PyAny>,
        name: impl Fn(&Tree) -> String,
    ) -> PyResult<(Self, Vec<Slot<'py>>)> {
        let mut recorder = Recorder {
            scope: Scope::Arguments,
            ..Recorder::default()
        };
        let outcome = recorder.run(root);
        let Some(object) = recorder.refused.take() else {
            outcome?;
            return Ok((recorder.tree, recorder.slots));
        };
        let class = object.get_type().fully_qualified_name()?;
        let hint = if class == "numpy.ndarray" {
            ": convert it with mx.array()"
        } else {
            ""
        };
        Err(PyTypeError::new_err(format!(
            "argument {}: expected mx.array, a dict, list or tuple of them, or a static value \
             (number, string, None), got {class}{hint}",
            name(&recorder.tree)
        )))
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
        walk(root.clone(), Place::Tuple, 0, &mut checker)?;
        let same = checker.at == self.items.len() && aliases(&checker.containers) == self.aliases;
        same.then_some(checker.slots)
    }

    /// Whether a container of arrays stands at more than one place.
    pub fn is_aliased(&self) -> bool {
        !self.aliases.is_empty()
    }

    /// Shape and dtype of the array in each slot.
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// Whether both have the same keys and values, and arrays of the same shapes and dtypes.
    pub fn equals(&self, other: &Self, py: Python<'_>) -> bool {
        self.tensors == other.tensors
            && self.aliases == other.aliases
            && self.items.len() == other.items.len()
            && self.items.iter().zip(&other.items).all(|pair| match pair {
                (Item::Open(a, n), Item::Open(b, m)) => a == b && n == m,
                (Item::Key(a), Item::Key(b)) => equal(a.bind(py), b.bind(py)),
                (Item::Array, Item::Array) => true,
                (Item::Static(a), Item::Static(b)) => a.equals(b, py),
                _ => false,
            })
    }

    /// The path to each array: keys and indices from the root.
    pub fn paths(&self, py: Python<'_>) -> Vec<Vec<String>> {
        let mut paths = Paths::default();
        self.items.iter().for_each(|item| paths.step(item, py));
        paths.arrays
    }

    /// The path to where the walk ended.
    pub fn last_path(&self, py: Python<'_>) -> Vec<String> {
        let mut paths = Paths::default();
        self.items.iter().for_each(|item| paths.step(item, py));
        paths.next_path()
    }
}

/// Follows items to tell where each one stands.
#[derive(Default)]
struct Paths {
    open: Vec<(Kind, usize, usize)>, // kind, length, items seen
    keys: Vec<String>,
    key: Option<String>,
    arrays: Vec<Vec<String>>,
}

impl Paths {
    fn next_path(&self) -> Vec<String> {
        let mut path = self.keys.clone();
        match (&self.key, self.open.last()) {
            (Some(key), _) => path.push(key.clone()),
            (None, Some((Kind::List | Kind::Tuple, _, seen))) => path.push(seen.to_string()),
            _ => {}
        }
        path.retain(|part| !part.is_empty());
        path
    }

    fn step(&mut self, item: &Item, py: Python<'_>) {
        match item {
            Item::Key(key) => {
                self.key = Some(
                    key.bind(py)
                        .str()
                        .map_or_else(|_| "?".into(), |s| s.to_string()),
                );
            }
            Item::Open(kind, len) => {
                let part = match (self.key.take(), self.open.last()) {
                    (Some(key), _) => key,
                    (None, Some((Kind::List | Kind::Tuple, _, seen))) => seen.to_string(),
                    _ => String::new(),
                };
                self.keys.push(part);
                self.open.push((*kind, *len, 0));
                self.close();
            }
            Item::Array | Item::Static(_) => {
                if matches!(item, Item::Array) {
                    let path = self.next_path();
                    self.arrays.push(path);
                }
                self.key = None;
                self.seen();
            }
        }
    }

    fn seen(&mut self) {
        if let Some((_, _, seen)) = self.open.last_mut() {
            *seen += 1;
        }
        self.close();
    }

    // a module's or optimizer's attributes follow its items: it ends with them
    fn close(&mut self) {
        while let Some(&(kind, len, seen)) = self.open.last() {
            let attributes = usize::from(matches!(kind, Kind::Module | Kind::Optimizer));
            if seen < len + attributes {
                return;
            }
            self.open.pop();
            self.keys.pop();
            if let Some((_, _, seen)) = self.open.last_mut() {
                *seen += 1;
            }
        }
    }
}

#[derive(Default)]
struct Recorder<'py> {
    tree: Tree,
    slots: Vec<Slot<'py>>,
    containers: Vec<usize>,
    scope: Scope,
    refused: Option<Bound<'py, PyAny>>,
    error: Option<PyErr>,
}

impl<'py> Recorder<'py> {
    fn run(&mut self, root: &Bound<'py, PyAny>) -> PyResult<()> {
        match walk(root.clone(), Place::Tuple, 0, self) {
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
        if self.scope == Scope::Arguments && matches!(kind, Kind::Module | Kind::Optimizer) {
            self.refused = Some(container.clone());
            return None;
        }
        self.containers.push(container.as_ptr() as usize);
        self.tree.items.push(Item::Open(kind, len));
        Some(())
    }

    fn key(&mut self, key: &Bound<'py, PyAny>) -> Option<()> {
        self.tree.items.push(Item::Key(key.clone().unbind()));
        Some(())
    }

    fn array(&mut self, place: Place<'py>, object: Bound<'py, PyAny>) -> Option<()> {
        if matches!(place, Place::Tuple) && self.scope != Scope::Arguments {
            return self.leaf(&object);
        }
        let array = bridge::get(&object)?;
        self.tree.items.push(Item::Array);
        self.tree.tensors.push(Tensor::of(&array));
        self.slots.push(Slot { place, object });
        Some(())
    }

    fn leaf(&mut self, object: &Bound<'py, PyAny>) -> Option<()> {
        if self.scope == Scope::Arguments && !is_plain(object) && !is_static_object(object) {
            self.refused = Some(object.clone());
            return None;
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

    fn skips(&self, key: &str) -> bool {
        self.scope.skips(key)
    }
}

// what may stand in a call beside arrays and numbers: functions, classes, enums, dtypes
fn is_static_object(object: &Bound<'_, PyAny>) -> bool {
    let class = object.get_type();
    let module = class
        .module()
        .map_or_else(|_| String::new(), |m| m.to_string());
    object.is_callable() || module == "mlx.core" || class.hasattr("__members__").unwrap_or(false)
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
        matches!(self.next()?, Item::Open(k, n) if *k == kind && *n == len).then_some(())
    }

    fn key(&mut self, key: &Bound<'py, PyAny>) -> Option<()> {
        matches!(self.next()?, Item::Key(k) if k.is(key)).then_some(())
    }

    fn array(&mut self, place: Place<'py>, object: Bound<'py, PyAny>) -> Option<()> {
        if matches!(place, Place::Tuple) {
            return self.leaf(&object);
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

/// The contents of every container of a tree, to be put back.
#[derive(Default)]
pub struct Snapshot<'py> {
    dicts: Vec<(Bound<'py, PyDict>, Bound<'py, PyDict>)>,
    lists: Vec<(Bound<'py, PyList>, Bound<'py, PyList>)>,
    error: Option<PyErr>,
}

impl<'py> Snapshot<'py> {
    /// Note the contents of `root` and of everything in it.
    pub fn take(root: &Bound<'py, PyAny>) -> PyResult<Self> {
        let mut snapshot = Self::default();
        walk(root.clone(), Place::Tuple, 0, &mut snapshot);
        match snapshot.error.take() {
            Some(error) => Err(error),
            None => Ok(snapshot),
        }
    }

    /// Put everything back.
    pub fn restore(&self) -> PyResult<()> {
        for (dict, copy) in &self.dicts {
            dict.clear();
            dict.update(copy.as_mapping())?;
        }
        for (list, copy) in &self.lists {
            list.set_slice(0, list.len(), copy.as_any())?;
        }
        Ok(())
    }

    fn note(&mut self, container: &Bound<'py, PyAny>) -> PyResult<()> {
        if let Ok(dict) = container.cast::<PyDict>() {
            self.dicts.push((dict.clone(), dict.copy()?));
        } else if let Ok(list) = container.cast::<PyList>() {
            self.lists
                .push((list.clone(), list.get_slice(0, list.len())));
        }
        Ok(())
    }
}

impl<'py> Visitor<'py> for Snapshot<'py> {
    fn open(&mut self, kind: Kind, container: &Bound<'py, PyAny>, _: usize) -> Option<()> {
        if kind == Kind::Optimizer {
            return Some(());
        }
        self.note(container).map_err(|e| self.error = Some(e)).ok()
    }

    fn key(&mut self, _: &Bound<'py, PyAny>) -> Option<()> {
        Some(())
    }

    fn array(&mut self, _: Place<'py>, _: Bound<'py, PyAny>) -> Option<()> {
        Some(())
    }

    fn leaf(&mut self, _: &Bound<'py, PyAny>) -> Option<()> {
        Some(())
    }

    fn skips(&self, _: &str) -> bool {
        false
    }
}

/// A copy of `object` in which the arrays, in walking order, are those of `next`.
pub fn rebuild<'py>(
    object: &Bound<'py, PyAny>,
    next: &mut impl FnMut(&Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    let py = object.py();
    if bridge::is_array(object) {
        return next(object);
    }
    if let Ok(dict) = object.cast::<PyDict>() {
        let copy = PyDict::new(py);
        for (key, value) in dict.iter() {
            copy.set_item(key, rebuild(&value, next)?)?;
        }
        return Ok(copy.into_any());
    }
    if let Ok(list) = object.cast::<PyList>() {
        let items = list.iter().map(|item| rebuild(&item, next));
        return Ok(PyList::new(py, items.collect::<PyResult<Vec<_>>>()?)?.into_any());
    }
    if let Ok(tuple) = object.cast::<PyTuple>() {
        let items = tuple.iter().map(|item| rebuild(&item, next));
        let items = PyTuple::new(py, items.collect::<PyResult<Vec<_>>>()?)?;
        if tuple.is_exact_instance_of::<PyTuple>() {
            return Ok(items.into_any());
        }
        return tuple.get_type().call1(items); // a named tuple
    }
    Ok(object.clone())
}
