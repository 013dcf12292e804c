//! One place that a loss reads, and what is expected there.
//!
//! No Python code runs in a comparison: objects are read from dicts, lists, tuples, cells and the attributes that
//! Python's own types have.
use std::slice::from_ref;

use mlx_rs::Array;
use pyo3::{
    exceptions::PyValueError,
    intern,
    prelude::*,
    types::{
        PyBool, PyBytes, PyComplex, PyDict, PyFloat, PyFunction, PyInt, PyList, PyMappingProxy,
        PyString, PyTuple, PyType,
    },
};

use crate::{
    mlx::{
        bridge,
        collector::{Collector, Refers, Visited},
    },
    python::reach,
    tree::static_value::equal,
};

/// A place in an object. A function of `None` is the loss function of the current call.
pub enum Place {
    /// An item of a dict, or an attribute in an instance dict.
    Item(Py<PyDict>, Py<PyAny>),
    /// An item of a list.
    List(Py<PyList>, usize),
    /// An item of a tuple.
    Tuple(Py<PyTuple>, usize),
    /// An attribute in a class's own dict.
    Class(Py<PyAny>, Py<PyAny>),
    /// A name in the globals of a function, else in the builtins.
    Global(Option<Py<PyDict>>, Py<PyDict>, Py<PyAny>),
    /// A part of a function.
    Function(Option<Py<PyAny>>, Part),
    /// A part of the loss function, if it is of this class: a bound method.
    Method(Py<PyType>, Py<PyString>),
    /// The loss function itself.
    Itself,
    /// The keys of a dict.
    Keys(Py<PyDict>),
    /// The length of a list or of a class's dict.
    Length(Py<PyAny>),
    /// The class of an object.
    Type(Py<PyAny>),
    /// The instance dict of an object.
    Dict(Py<PyAny>),
    /// A class's order of bases.
    Bases(Py<PyType>),
}

/// A part of a function.
pub enum Part {
    /// Contents of a cell of its closure.
    Cell(usize),
    /// A default of a positional argument.
    Default(usize),
    /// A default of a keyword argument.
    KeywordDefault(Py<PyAny>),
    /// Its code.
    Code,
}

/// Expectation at a place.
pub enum Expect {
    /// This number or string, or an equal one of the same class; floats are compared by their bits.
    Plain(Py<PyAny>),
    /// An array object of this value, which is held so that its identity stays its own.
    Array(Array),
    /// This object.
    Same(Py<PyAny>),
    /// Nothing.
    Absent,
    /// This number of items.
    Length(usize),
    /// These keys, in their order.
    Keys(Vec<Py<PyAny>>),
}

/// Objects by which entries are read.
pub struct Reading<'py> {
    builtins: Bound<'py, PyDict>,
    absent: Bound<'py, PyAny>,
    method: Bound<'py, PyType>,
}

impl<'py> Reading<'py> {
    /// Import them.
    pub fn new(py: Python<'py>) -> PyResult<Self> {
        Ok(Self {
            builtins: py.import("builtins")?.dict(),
            absent: reach(py)?.getattr("ABSENT")?,
            method: py.import("types")?.getattr("MethodType")?.cast_into()?,
        })
    }

    /// The place of an entry.
    pub fn place(
        &self,
        parent: &Bound<'py, PyAny>,
        way: &str,
        key: &Bound<'py, PyAny>,
    ) -> PyResult<Place> {
        let owned = || key.clone().unbind();
        Ok(match way {
            "item" => Place::Item(dict(parent)?, owned()),
            "attribute" => Place::Item(attributes(parent)?, owned()),
            "index" => index(parent, key.extract()?)?,
            "class" => Place::Class(own_dict(parent)?, owned()),
            "keys" => Place::Keys(dict(parent)?),
            "length" if parent.is_instance_of::<PyType>() => Place::Length(own_dict(parent)?),
            "length" => Place::Length(parent.clone().unbind()),
            "type" => Place::Type(parent.clone().unbind()),
            "dict" => Place::Dict(parent.clone().unbind()),
            "mro" => Place::Bases(parent.cast::<PyType>()?.clone().unbind()),
            "itself" => Place::Itself,
            "part" => {
                let name = key.cast::<PyString>()?.clone();
                Place::Method(self.method.clone().unbind(), name.unbind())
            }
            "global" => {
                let globals = bridge::globals(parent).map(Bound::unbind);
                Place::Global(globals, self.builtins.clone().unbind(), owned())
            }
            _ => Place::Function(
                (!parent.is_none()).then(|| parent.clone().unbind()),
                Part::new(way, key)?,
            ),
        })
    }

    /// The expectation for the object that is there now.
    pub fn expect(&self, way: &str, value: &Bound<'py, PyAny>) -> PyResult<Expect> {
        let owned = || value.clone().unbind();
        Ok(match way {
            "length" => Expect::Length(value.extract()?),
            "keys" => {
                let keys = value.cast::<PyTuple>()?.iter();
                Expect::Keys(keys.map(Bound::unbind).collect())
            }
            _ if value.is(&self.absent) => Expect::Absent,
            _ if is_plain(value) => Expect::Plain(owned()),
            _ => match bridge::get(value) {
                Some(array) => Expect::Array(array),
                _ => Expect::Same(owned()),
            },
        })
    }
}

impl Place {
    /// Return whether the expected object is there.
    pub fn holds(&self, expect: &Expect, loss_fn: &Bound<'_, PyAny>) -> PyResult<bool> {
        let py = loss_fn.py();
        Ok(match (self, expect) {
            (
                Self::Item(dict, key) | Self::Global(Some(dict), _, key),
                Expect::Plain(known) | Expect::Same(known),
            ) if has(dict.bind(py), key, known) => true,
            (Self::Keys(dict), Expect::Keys(keys)) => {
                let addresses = keys.iter().map(|key| key.as_ptr().addr());
                bridge::has_keys(dict.bind(py), addresses)
            }
            (Self::Length(object), Expect::Length(length)) => object.bind(py).len()? == *length,
            (Self::Type(object), Expect::Same(class)) => {
                object.bind(py).get_type_ptr().addr() == class.as_ptr().addr()
            }
            _ => expect.is_met(self.find(loss_fn)?.as_ref()),
        })
    }

    /// The object that is there now.
    pub fn find<'py>(&self, loss_fn: &Bound<'py, PyAny>) -> PyResult<Option<Bound<'py, PyAny>>> {
        let py = loss_fn.py();
        Ok(match self {
            Self::Item(dict, key) => dict.bind(py).get_item(key.bind(py))?,
            Self::List(list, at) => list.bind(py).get_item(*at).ok(),
            Self::Tuple(tuple, at) => tuple.bind(py).get_item(*at).ok(),
            Self::Class(dict, key) => dict.bind(py).get_item(key.bind(py)).ok(),
            Self::Global(globals, builtins, key) => {
                let key = key.bind(py);
                let found = match globals {
                    Some(globals) => globals.bind(py).get_item(key)?,
                    None => bridge::globals(loss_fn).map_or(Ok(None), |it| it.get_item(key))?,
                };
                found.map_or_else(|| builtins.bind(py).get_item(key), |found| Ok(Some(found)))?
            }
            Self::Function(function, part) => {
                part.find(function.as_ref().map_or(loss_fn, |it| it.bind(py)))?
            }
            Self::Method(class, name) if loss_fn.get_type().is(class) => {
                Some(loss_fn.getattr(name.bind(py))?)
            }
            Self::Itself => Some(loss_fn.clone()),
            Self::Type(object) => Some(object.bind(py).get_type().into_any()),
            Self::Dict(object) => bridge::attributes(object.bind(py)).map(Bound::into_any),
            Self::Bases(class) => Some(class.bind(py).mro().into_any()),
            Self::Method(..) | Self::Keys(_) | Self::Length(_) => None,
        })
    }
}

impl Part {
    fn new(way: &str, key: &Bound<'_, PyAny>) -> PyResult<Self> {
        Ok(match way {
            "cell" => Self::Cell(key.extract()?),
            "default" => Self::Default(key.extract()?),
            "kwdefault" => Self::KeywordDefault(key.clone().unbind()),
            "code" => Self::Code,
            _ => return Err(PyValueError::new_err(format!("watch list: no way {way}"))),
        })
    }

    fn find<'py>(&self, function: &Bound<'py, PyAny>) -> PyResult<Option<Bound<'py, PyAny>>> {
        let py = function.py();
        let of_function = |name| match function.cast::<PyFunction>() {
            Ok(function) => function.getattr(name).map(Some),
            Err(_) => Ok(None),
        };
        Ok(match self {
            Self::Cell(at) => bridge::cell(function, *at),
            Self::Code => bridge::code(function),
            Self::Default(at) => {
                let defaults = of_function(intern!(py, "__defaults__"))?;
                defaults.and_then(|it| it.cast::<PyTuple>().ok()?.get_item(*at).ok())
            }
            Self::KeywordDefault(key) => {
                let defaults = of_function(intern!(py, "__kwdefaults__"))?;
                let defaults = defaults.and_then(|it| it.cast_into::<PyDict>().ok());
                defaults.map_or(Ok(None), |it| it.get_item(key.bind(py)))?
            }
        })
    }
}

impl Expect {
    fn is_met(&self, found: Option<&Bound<'_, PyAny>>) -> bool {
        let Some(found) = found else {
            return matches!(self, Self::Absent);
        };
        match self {
            Self::Same(known) => found.is(known),
            Self::Plain(known) => found.is(known) || equal(known.bind(found.py()), found),
            Self::Array(array) => bridge::id(found) == Some(faststep::engine::array::id(array)),
            Self::Absent | Self::Length(_) | Self::Keys(_) => false,
        }
    }
}

impl Refers for Place {
    fn visit(&self, collector: &mut Collector<'_>) -> Visited {
        match self {
            Self::Item(dict, key) => (dict.visit(collector)).and_then(|()| key.visit(collector)),
            Self::List(list, _) => list.visit(collector),
            Self::Tuple(tuple, _) => tuple.visit(collector),
            Self::Class(dict, key) => (dict.visit(collector)).and_then(|()| key.visit(collector)),
            Self::Global(globals, builtins, key) => {
                globals.visit(collector)?;
                builtins.visit(collector)?;
                key.visit(collector)
            }
            Self::Function(function, part) => {
                function.visit(collector)?;
                match part {
                    Part::KeywordDefault(key) => key.visit(collector),
                    Part::Cell(_) | Part::Default(_) | Part::Code => Ok(()),
                }
            }
            Self::Method(class, name) => {
                class.visit(collector)?;
                name.visit(collector)
            }
            Self::Keys(dict) => dict.visit(collector),
            Self::Length(object) | Self::Type(object) | Self::Dict(object) => {
                object.visit(collector)
            }
            Self::Bases(class) => class.visit(collector),
            Self::Itself => Ok(()),
        }
    }
}

impl Refers for Expect {
    fn visit(&self, collector: &mut Collector<'_>) -> Visited {
        match self {
            Self::Plain(known) | Self::Same(known) => known.visit(collector),
            Self::Keys(keys) => keys.visit(collector),
            Self::Array(..) | Self::Absent | Self::Length(_) => Ok(()),
        }
    }
}

fn dict(object: &Bound<'_, PyAny>) -> PyResult<Py<PyDict>> {
    Ok(object.cast::<PyDict>()?.clone().unbind())
}

fn attributes(object: &Bound<'_, PyAny>) -> PyResult<Py<PyDict>> {
    let none = || PyValueError::new_err("watch list: an object without attributes");
    bridge::attributes(object)
        .map(Bound::unbind)
        .ok_or_else(none)
}

// compare by address: a new reference takes as long again
fn has(dict: &Bound<'_, PyDict>, key: &Py<PyAny>, known: &Py<PyAny>) -> bool {
    bridge::dict_has(dict, from_ref(key), &[known.as_ptr().addr()]) == 1
}

// a view of it, which follows each change
fn own_dict(class: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
    let class = class.cast::<PyType>()?;
    let own = class.getattr(intern!(class.py(), "__dict__"))?;
    Ok(own.cast_into::<PyMappingProxy>()?.into_any().unbind())
}

fn index(parent: &Bound<'_, PyAny>, at: usize) -> PyResult<Place> {
    if let Ok(list) = parent.cast::<PyList>() {
        return Ok(Place::List(list.clone().unbind(), at));
    }
    Ok(Place::Tuple(parent.cast::<PyTuple>()?.clone().unbind(), at))
}

// a number or a string of Python's own classes
fn is_plain(object: &Bound<'_, PyAny>) -> bool {
    object.is_none()
        || object.is_exact_instance_of::<PyBool>()
        || object.is_exact_instance_of::<PyInt>()
        || object.is_exact_instance_of::<PyFloat>()
        || object.is_exact_instance_of::<PyString>()
        || object.is_exact_instance_of::<PyBytes>()
        || object.is_exact_instance_of::<PyComplex>()
}
