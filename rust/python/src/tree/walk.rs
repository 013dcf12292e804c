//! The walk through Python containers.
use std::collections::HashSet;

use pyo3::{
    intern,
    prelude::*,
    types::{
        PyBool, PyCFunction, PyDict, PyFloat, PyFunction, PyInt, PyList, PyModule, PyString,
        PyTuple, PyType,
    },
};

use super::{ordered, slot::Place};
use crate::mlx::{
    bridge,
    classes::{is_module, is_optimizer},
};

/// Deeper trees than this are taken for cycles.
pub const MAX_DEPTH: usize = 200;

/// Budget of a search for an optimizer in an object: a number, a text or an array costs one.
const MAX_LOOKED: usize = 4096;
/// Cost of any other object in that search.
const LOOK: usize = 16;

/// Kind of container that a walk met.
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
    /// An `optimizers.Optimizer`, or an object in one that refers to another optimizer.
    Optimizer,
    /// The instance dict of a module or an optimizer.
    Attributes,
    /// A dataclass: its class, then its fields.
    Dataclass,
}

/// Purpose of a walk, which decides what it enters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Scope {
    /// A model or an optimizer with all its arrays.
    #[default]
    Whole,
    /// An optimizer without the state that it keeps for each parameter.
    Options,
    /// The arguments of a call: arrays in tuples have slots, dataclasses are containers, modules and optimizers are not.
    Arguments,
}

impl Scope {
    /// Return whether to pass over an attribute of an optimizer.
    pub fn skips(self, key: &str) -> bool {
        matches!(key, "_initialized" | "_faststep") || (self == Self::Options && key == "_state")
    }
}

/// Receiver of a walk's reports; `None` ends the walk.
pub trait Visitor<'py> {
    fn open(&mut self, kind: Kind, container: &Bound<'py, PyAny>, len: usize) -> Option<()>;
    fn key(&mut self, key: &Bound<'py, PyAny>) -> Option<()>;
    fn array(&mut self, place: Place<'py>, object: Bound<'py, PyAny>) -> Option<()>;
    fn leaf(&mut self, object: &Bound<'py, PyAny>) -> Option<()>;

    /// Return whether to pass over an attribute of an optimizer.
    fn skips(&self, key: &str) -> bool;

    /// Return whether dataclasses are containers, and modules and optimizers are not.
    fn takes_arguments(&self) -> bool {
        false
    }
}

/// The containers around an object. Modules and containers of optimizers are known: an attribute may refer back to one.
#[derive(Clone, Copy, Default)]
struct Around<'a> {
    depth: usize,
    known: Option<(usize, &'a Self)>,
    updates: bool, // the object is in an optimizer
}

impl<'a> Around<'a> {
    fn deeper(self) -> Self {
        Self {
            depth: self.depth + 1,
            ..self
        }
    }

    fn within(&'a self, container: &Bound<'_, PyAny>) -> Self {
        Self {
            known: Some((container.as_ptr().addr(), self)),
            ..*self
        }
    }

    fn has(&self, object: &Bound<'_, PyAny>) -> bool {
        self.known
            .is_some_and(|(known, around)| known == object.as_ptr().addr() || around.has(object))
    }
}

/// Walk an object and everything in it.
pub fn walk<'py>(
    object: Bound<'py, PyAny>,
    place: Place<'py>,
    visitor: &mut impl Visitor<'py>,
) -> Option<()> {
    enter(object, place, Around::default(), visitor)
}

fn enter<'py>(
    object: Bound<'py, PyAny>,
    place: Place<'py>,
    around: Around<'_>,
    visitor: &mut impl Visitor<'py>,
) -> Option<()> {
    if around.depth > MAX_DEPTH {
        return None;
    }
    if bridge::is_array(&object) {
        return visitor.array(place, object);
    }
    if let Ok(dict) = object.cast::<PyDict>() {
        let is_module = !dict.is_exact_instance_of::<PyDict>() && is_module(&object);
        if is_module {
            return enter_module(&object, dict, around, visitor);
        }
        visitor.open(Kind::Dict, &object, dict.len())?;
        if around.updates {
            return walk_items(dict, around.within(&object), visitor);
        }
        return walk_items(dict, around, visitor);
    }
    if let Ok(list) = object.cast::<PyList>() {
        visitor.open(Kind::List, &object, list.len())?;
        for (index, item) in list.iter().enumerate() {
            let place = Place::List(list.clone(), index);
            enter(item, place, around.deeper(), visitor)?;
        }
        return Some(());
    }
    if let Ok(tuple) = object.cast::<PyTuple>() {
        visitor.open(Kind::Tuple, &object, tuple.len())?;
        for item in tuple.iter() {
            enter(item, Place::Tuple, around.deeper(), visitor)?;
        }
        return Some(());
    }
    if !visitor.takes_arguments() {
        return enter_optimizer(&object, around, visitor);
    }
    match fields(&object) {
        Some(fields) => walk_fields(&object, &fields, around, visitor),
        None => visitor.leaf(&object),
    }
}

fn enter_module<'py>(
    module: &Bound<'py, PyAny>,
    items: &Bound<'py, PyDict>,
    around: Around<'_>,
    visitor: &mut impl Visitor<'py>,
) -> Option<()> {
    if visitor.takes_arguments() || around.has(module) {
        return visitor.leaf(module);
    }
    visitor.open(Kind::Module, module, items.len())?;
    let around = Around {
        updates: false,
        ..around.within(module)
    };
    walk_items(items, around, visitor)?;
    walk_attributes(module, around, visitor)
}

// an optimizer, or an object in one that leads to another; any other object is a leaf
fn enter_optimizer<'py>(
    object: &Bound<'py, PyAny>,
    around: Around<'_>,
    visitor: &mut impl Visitor<'py>,
) -> Option<()> {
    let updates = is_optimizer(object) || (around.updates && leads_to_optimizer(object));
    if !updates {
        return visitor.leaf(object);
    }
    let attributes = bridge::attributes(object)?;
    if around.has(object) || around.has(attributes.as_any()) {
        return visitor.leaf(object);
    }
    visitor.open(Kind::Optimizer, object, 0)?;
    let within = around.within(object);
    let around = Around {
        updates,
        ..within.within(attributes.as_any())
    };
    walk_attributes(object, around, visitor)
}

fn walk_fields<'py>(
    object: &Bound<'py, PyAny>,
    fields: &[Bound<'py, PyString>],
    around: Around<'_>,
    visitor: &mut impl Visitor<'py>,
) -> Option<()> {
    visitor.open(Kind::Dataclass, object, fields.len() + 1)?;
    visitor.leaf(object.get_type().as_any())?;
    for name in fields {
        visitor.key(name.as_any())?;
        enter(
            object.getattr(name).ok()?,
            Place::Tuple,
            around.deeper(),
            visitor,
        )?;
    }
    Some(())
}

fn walk_items<'py>(
    dict: &Bound<'py, PyDict>,
    around: Around<'_>,
    visitor: &mut impl Visitor<'py>,
) -> Option<()> {
    let mut item = |key: Bound<'py, PyAny>, value| {
        visitor.key(&key)?;
        let place = Place::Dict(dict.clone(), key);
        enter(value, place, around.deeper(), visitor)
    };
    if dict.is_exact_instance_of::<PyDict>() {
        return dict.iter().try_for_each(|(key, value)| item(key, value));
    }
    let mut items = ordered::items(dict).into_iter();
    items.try_for_each(|(key, value)| item(key, value))
}

fn walk_attributes<'py>(
    object: &Bound<'py, PyAny>,
    around: Around<'_>,
    visitor: &mut impl Visitor<'py>,
) -> Option<()> {
    let attributes = &bridge::attributes(object)?;
    if !is_optimizer(object) {
        visitor.open(Kind::Attributes, attributes.as_any(), attributes.len())?;
        return walk_items(attributes, around, visitor);
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
        enter(value, place, around.deeper(), visitor)?;
    }
    Some(())
}

/// List an optimizer, those in it, and the objects in it that refer to others: all whose attributes are its state.
pub fn optimizers_within<'py>(optimizer: &Bound<'py, PyAny>) -> Vec<Bound<'py, PyAny>> {
    let mut within = Within(Vec::new());
    walk(optimizer.clone(), Place::Tuple, &mut within);
    within.0
}

struct Within<'py>(Vec<Bound<'py, PyAny>>);

impl<'py> Visitor<'py> for Within<'py> {
    fn open(&mut self, kind: Kind, container: &Bound<'py, PyAny>, _: usize) -> Option<()> {
        if kind == Kind::Optimizer {
            self.0.push(container.clone());
        }
        Some(())
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

    fn skips(&self, key: &str) -> bool {
        Scope::Options.skips(key)
    }
}

// search for an optimizer in the attributes of an object, and in objects, lists, dicts and tuples there
fn leads_to_optimizer(object: &Bound<'_, PyAny>) -> bool {
    let mut looking = Looking {
        seen: HashSet::new(),
        left: MAX_LOOKED,
    };
    looking.leads(object)
}

struct Looking {
    seen: HashSet<usize>,
    left: usize,
}

impl Looking {
    fn leads(&mut self, object: &Bound<'_, PyAny>) -> bool {
        if is_builtin(object) || bridge::is_array(object) {
            self.left = self.left.saturating_sub(1);
            return false;
        }
        self.left = self.left.saturating_sub(LOOK);
        if self.left == 0 || !self.seen.insert(object.as_ptr().addr()) {
            return false;
        }
        if let Ok(dict) = object.cast::<PyDict>() {
            return !is_module(object) && self.any(dict.iter().map(|(_, value)| value));
        }
        if let Ok(list) = object.cast::<PyList>() {
            return self.any(list.iter());
        }
        if let Ok(tuple) = object.cast::<PyTuple>() {
            return self.any(tuple.iter());
        }
        if is_optimizer(object) {
            return true;
        }
        let is_code = object.is_instance_of::<PyType>()
            || object.is_instance_of::<PyModule>()
            || object.is_instance_of::<PyFunction>()
            || object.is_instance_of::<PyCFunction>();
        let attributes = (!is_code).then(|| bridge::attributes(object)).flatten();
        attributes.is_some_and(|it| self.any(it.iter().map(|(_, value)| value)))
    }

    fn any<'py>(&mut self, items: impl Iterator<Item = Bound<'py, PyAny>>) -> bool {
        for item in items {
            if self.left == 0 {
                return false;
            }
            if self.leads(&item) {
                return true;
            }
        }
        false
    }
}

// a text, a number or None: a batch may hold many
pub fn is_builtin(object: &Bound<'_, PyAny>) -> bool {
    object.is_exact_instance_of::<PyString>()
        || object.is_exact_instance_of::<PyInt>()
        || object.is_exact_instance_of::<PyFloat>()
        || object.is_exact_instance_of::<PyBool>()
        || object.is_none()
}

/// The names of the fields of a dataclass's instance.
pub fn fields<'py>(object: &Bound<'py, PyAny>) -> Option<Vec<Bound<'py, PyString>>> {
    if is_builtin(object) {
        return None; // a look for an attribute that is missing takes a microsecond
    }
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
