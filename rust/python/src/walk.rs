//! Walking Python containers: what stands where, and how to put something else there.
use mlx_rs::Array;
use pyo3::{
    intern,
    prelude::*,
    sync::PyOnceLock,
    types::{PyDict, PyList, PyString, PyTuple, PyType},
};

use crate::bridge;

/// Deeper trees than this are taken for cycles.
pub const MAX_DEPTH: usize = 200;

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
    /// The fields of a dataclass, behind the class.
    Dataclass,
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

    /// Let the object go of its value, unless somebody refers to it beside its container and so many slots.
    pub fn empty(&self, hollow: &Array, slots: isize) {
        if bridge::refcount(&self.object) == 1 + slots {
            bridge::assign(&self.object, hollow);
        }
    }

    /// Whether the object has this value.
    pub fn holds(&self, array: &Array) -> bool {
        bridge::id(&self.object) == Some(faststep::engine::array::id(array))
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
    pub fn skips(self, key: &str) -> bool {
        key == "_initialized" || (self == Self::Options && key == "_state")
    }
}

/// What a walk reports; `None` ends it.
pub trait Visitor<'py> {
    fn open(&mut self, kind: Kind, container: &Bound<'py, PyAny>, len: usize) -> Option<()>;
    fn key(&mut self, key: &Bound<'py, PyAny>) -> Option<()>;
    fn array(&mut self, place: Place<'py>, object: Bound<'py, PyAny>) -> Option<()>;
    fn leaf(&mut self, object: &Bound<'py, PyAny>) -> Option<()>;

    /// Whether to pass over an attribute of an optimizer.
    fn skips(&self, key: &str) -> bool;

    /// Whether dataclasses are containers, and modules are not.
    fn takes_arguments(&self) -> bool {
        false
    }
}

pub fn walk<'py>(
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
        if module && visitor.takes_arguments() {
            return visitor.leaf(&object);
        }
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
    if visitor.takes_arguments() {
        if let Some(fields) = fields(&object) {
            return walk_fields(&object, &fields, depth, visitor);
        }
    }
    visitor.leaf(&object)
}

fn walk_fields<'py>(
    object: &Bound<'py, PyAny>,
    fields: &[Bound<'py, PyString>],
    depth: usize,
    visitor: &mut impl Visitor<'py>,
) -> Option<()> {
    visitor.open(Kind::Dataclass, object, fields.len() + 1)?;
    visitor.leaf(object.get_type().as_any())?;
    for name in fields {
        visitor.key(name.as_any())?;
        walk(object.getattr(name).ok()?, Place::Tuple, depth + 1, visitor)?;
    }
    Some(())
}

// the names of the fields of a dataclass's instance
fn fields<'py>(object: &Bound<'py, PyAny>) -> Option<Vec<Bound<'py, PyString>>> {
    let name = intern!(object.py(), "__dataclass_fields__");
    let fields = object.get_type().getattr_opt(name).ok().flatten()?;
    let names = fields.cast::<PyDict>().ok()?.keys().into_iter();
    let names = names.map(|name| name.cast_into::<PyString>().ok());
    let names: Vec<_> = names.collect::<Option<_>>()?;
    let there = names
        .iter()
        .all(|name| object.hasattr(name).unwrap_or(false));
    there.then_some(names)
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

/// Whether the object is a NumPy array.
pub fn is_numpy(object: &Bound<'_, PyAny>) -> bool {
    static CLASS: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    let class = class(object.py(), &CLASS, "numpy", "ndarray");
    class.is_some_and(|class| object.is_instance(class).unwrap_or(false))
}

/// Whether the object is an `optimizers.Optimizer`.
pub fn is_optimizer(object: &Bound<'_, PyAny>) -> bool {
    static CLASS: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    let class = class(object.py(), &CLASS, "mlx.optimizers", "Optimizer");
    class.is_some_and(|class| object.is_instance(class).unwrap_or(false))
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
        snapshot.note_all(root)?;
        Ok(snapshot)
    }

    /// Note the contents of another root and of everything in it too.
    pub fn note_all(&mut self, root: &Bound<'py, PyAny>) -> PyResult<()> {
        walk(root.clone(), Place::Tuple, 0, self);
        self.error.take().map_or(Ok(()), Err)
    }

    /// Whether an array has been put where there was none, or something else.
    pub fn has_new_arrays(&self) -> PyResult<bool> {
        for (dict, copy) in &self.dicts {
            for (key, value) in dict.iter() {
                let before = copy.get_item(&key)?;
                if !before.is_some_and(|before| before.is(&value)) && has_array(&value, 0) {
                    return Ok(true);
                }
            }
        }
        for (list, copy) in &self.lists {
            for (at, value) in list.iter().enumerate() {
                let before = copy.get_item(at).ok();
                if !before.is_some_and(|before| before.is(&value)) && has_array(&value, 0) {
                    return Ok(true);
                }
            }
        }
        Ok(false)
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

    /// Note the contents of one dict or list.
    pub fn note(&mut self, container: &Bound<'py, PyAny>) -> PyResult<()> {
        if let Ok(dict) = container.cast::<PyDict>() {
            self.dicts.push((dict.clone(), dict.copy()?));
        } else if let Ok(list) = container.cast::<PyList>() {
            self.lists
                .push((list.clone(), list.get_slice(0, list.len())));
        }
        Ok(())
    }
}

fn has_array(object: &Bound<'_, PyAny>, depth: usize) -> bool {
    if bridge::is_array(object) {
        return true;
    }
    if depth > MAX_DEPTH {
        return false;
    }
    if let Ok(dict) = object.cast::<PyDict>() {
        return dict
            .values()
            .iter()
            .any(|value| has_array(&value, depth + 1));
    }
    let items = match object.cast::<PyList>() {
        Ok(list) => list.as_sequence().to_list(),
        Err(_) if object.is_instance_of::<PyTuple>() => object
            .cast::<PyTuple>()
            .map(PyTupleMethods::to_list)
            .map_err(Into::into),
        Err(_) => return false,
    };
    items.is_ok_and(|items| items.iter().any(|item| has_array(&item, depth + 1)))
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

/// A copy of `object` in which the arrays, in walking order, are those of `next`; modules stay what they are.
pub fn rebuild<'py>(
    object: &Bound<'py, PyAny>,
    next: &mut impl FnMut(&Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    rebuild_where(object, bridge::is_array, next)
}

/// A copy of `object` in which those that are `wanted` are replaced by `next`.
pub fn rebuild_where<'py>(
    object: &Bound<'py, PyAny>,
    wanted: fn(&Bound<'_, PyAny>) -> bool,
    next: &mut impl FnMut(&Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    let py = object.py();
    if wanted(object) {
        return next(object);
    }
    if let Ok(dict) = object.cast::<PyDict>() {
        if !dict.is_exact_instance_of::<PyDict>() && is_module(object) {
            return Ok(object.clone());
        }
        let copy = PyDict::new(py);
        for (key, value) in dict.iter() {
            copy.set_item(key, rebuild_where(&value, wanted, next)?)?;
        }
        return Ok(copy.into_any());
    }
    if let Ok(list) = object.cast::<PyList>() {
        let items = list.iter().map(|item| rebuild_where(&item, wanted, next));
        return Ok(PyList::new(py, items.collect::<PyResult<Vec<_>>>()?)?.into_any());
    }
    if let Ok(tuple) = object.cast::<PyTuple>() {
        let items = tuple.iter().map(|item| rebuild_where(&item, wanted, next));
        let items = PyTuple::new(py, items.collect::<PyResult<Vec<_>>>()?)?;
        if tuple.is_exact_instance_of::<PyTuple>() {
            return Ok(items.into_any());
        }
        return tuple.get_type().call1(items); // a named tuple
    }
    let Some(fields) = fields(object) else {
        return Ok(object.clone());
    };
    let copy = py.import("copy")?.call_method1("copy", (object,))?;
    let set = py.get_type::<PyAny>().getattr("__setattr__")?; // a frozen dataclass refuses its own
    for name in fields {
        let value = rebuild_where(&object.getattr(&name)?, wanted, next)?;
        set.call1((&copy, name, value))?;
    }
    Ok(copy)
}
