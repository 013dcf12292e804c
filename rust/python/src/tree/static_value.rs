//! Values of a tree that belong to its signature.
use mlx_rs::Array;
use pyo3::{
    ffi::{PyType_HasFeature, Py_TPFLAGS_HEAPTYPE},
    intern,
    prelude::*,
    type_object::PyTypeInfo,
    types::{
        PyBool, PyBytes, PyComplex, PyFloat, PyFrozenSet, PyInt, PySet, PyString, PyTuple,
        PyWeakrefReference,
    },
};

use crate::mlx::{
    bridge,
    classes::{is_dtype, is_numpy_float, is_numpy_number},
    collector::{Collector, Refers, Visited},
    errors::answer,
};

/// A value that belongs to the signature.
#[derive(Debug)]
pub enum Static {
    /// A number, a string, or what cannot be referred to weakly.
    Value(Py<PyAny>),
    /// Any other object; a strong reference could keep the model alive.
    Weak(Py<PyWeakrefReference>),
    /// The members of a set, for objects that are compared by identity weak references to them.
    Set(Py<PyFrozenSet>),
    /// An array in a tuple, which cannot be given another value in its place.
    Constant(Array),
}

/// Return whether the object is a number, a string, bytes or None.
pub fn is_plain(object: &Bound<'_, PyAny>) -> bool {
    object.is_none()
        || object.is_instance_of::<PyBool>()
        || object.is_instance_of::<PyInt>()
        || object.is_instance_of::<PyFloat>()
        || object.is_instance_of::<PyString>()
        || object.is_instance_of::<PyBytes>()
        || object.is_instance_of::<PyComplex>()
}

/// Return whether the object is such a value, a dtype of MLX's, or a tuple of them: a shape, say.
pub fn is_fixed(object: &Bound<'_, PyAny>) -> bool {
    if let Ok(tuple) = object.cast_exact::<PyTuple>() {
        return tuple.iter().all(|each| is_fixed(&each));
    }
    is_plain(object) || is_dtype(object)
}

impl Refers for Static {
    fn visit(&self, collector: &mut Collector<'_>) -> Visited {
        match self {
            Self::Value(value) => value.visit(collector),
            Self::Set(members) => members.visit(collector),
            Self::Weak(_) | Self::Constant(_) => Ok(()),
        }
    }
}

impl Static {
    pub fn of(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        if let Some(array) = bridge::get(object) {
            return Ok(Self::Constant(array));
        }
        if let Ok(set) = object.cast::<PySet>() {
            return Ok(Self::Set(members(set)?.unbind()));
        }
        if !is_plain(object) {
            if let Ok(weak) = PyWeakrefReference::new(object) {
                return Ok(Self::Weak(weak.unbind()));
            }
        }
        Ok(Self::Value(object.clone().unbind()))
    }

    // identity only: no user code is called
    pub fn is(&self, object: &Bound<'_, PyAny>) -> bool {
        let py = object.py();
        match self {
            Self::Value(value) => value.is(object),
            Self::Weak(weak) => weak.bind(py).upgrade().is_some_and(|o| o.is(object)),
            Self::Set(members) => object.cast::<PySet>().is_ok_and(|set| {
                let mine = members.bind(py);
                let same = || self::members(set).map(|members| equal(&members, mine));
                set.len() == mine.len() && (set.is_empty() || same().unwrap_or(false))
            }),
            Self::Constant(array) => bridge::id(object) == Some(faststep::engine::array::id(array)),
        }
    }

    // a number or a flag of Python's own classes, or one of NumPy's floats
    pub fn is_number(&self, py: Python<'_>) -> bool {
        matches!(self, Self::Value(value) if {
            let value = value.bind(py);
            value.is_exact_instance_of::<PyFloat>()
                || value.is_exact_instance_of::<PyInt>()
                || value.is_exact_instance_of::<PyBool>()
                || is_numpy_float(value)
        })
    }

    pub fn is_callable(&self, py: Python<'_>) -> bool {
        matches!(self, Self::Weak(weak) if weak.bind(py).upgrade().is_some_and(|it| it.is_callable()))
    }

    pub fn is_flag(&self, py: Python<'_>) -> bool {
        matches!(self, Self::Value(value) if value.bind(py).is_exact_instance_of::<PyBool>())
    }

    pub fn equals(&self, other: &Self, py: Python<'_>) -> bool {
        let object = match other {
            Self::Value(value) => Some(value.bind(py).clone()),
            Self::Weak(weak) => weak.bind(py).upgrade(),
            Self::Set(set) => {
                return matches!(self, Self::Set(mine) if equal(mine.bind(py), set.bind(py)))
            }
            Self::Constant(array) => {
                let id = faststep::engine::array::id(array);
                return matches!(self, Self::Constant(mine) if faststep::engine::array::id(mine) == id);
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
        equal(&mine, &object)
    }
}

// of a set, which may lead to a model: two weak references to one object are equal
fn members<'py>(set: &Bound<'py, PySet>) -> PyResult<Bound<'py, PyFrozenSet>> {
    let py = set.py();
    let name = intern!(py, "__hash__");
    let by_identity = PyAny::type_object(py).getattr(name)?;
    let member = |each: Bound<'py, PyAny>| -> PyResult<Bound<'py, PyAny>> {
        if is_plain(&each) || !each.get_type().getattr(name)?.is(&by_identity) {
            return Ok(each);
        }
        let weak = PyWeakrefReference::new(&each);
        Ok(weak.map_or(each, Bound::into_any))
    };
    let members = set.iter().map(member).collect::<PyResult<Vec<_>>>()?;
    PyFrozenSet::new(py, members)
}

/// Return whether two objects are one, or of one class and equal: numbers bit by bit, also within tuples and, in their order, within
/// sets. Of a user's class their attributes are the same too, whatever it calls equal, of a library's what it pickles.
pub fn equal(a: &Bound<'_, PyAny>, b: &Bound<'_, PyAny>) -> bool {
    if a.is(b) {
        return true;
    }
    a.get_type().is(b.get_type()) && are_equal(a, b) && (is_nothing_more(a) || are_alike(a, b))
}

// whether objects that are equal have nothing else that code could read
fn is_nothing_more(object: &Bound<'_, PyAny>) -> bool {
    let is_exact = object.is_exact_instance_of::<PyString>()
        || object.is_exact_instance_of::<PyInt>()
        || object.is_exact_instance_of::<PyFloat>()
        || object.is_exact_instance_of::<PyBytes>()
        || object.is_exact_instance_of::<PyComplex>()
        || object.is_exact_instance_of::<PyTuple>()
        || object.is_exact_instance_of::<PyFrozenSet>();
    // SAFETY: an object has a type.
    #[allow(unsafe_code)]
    let is_made = unsafe { PyType_HasFeature(object.get_type_ptr(), Py_TPFLAGS_HEAPTYPE) } != 0;
    let is_index = || {
        object
            .hasattr(intern!(object.py(), "__index__"))
            .unwrap_or(false)
    };
    let is_number = || is_numpy_float(object) || (is_numpy_number(object) && is_index());
    let is_row = || object.is_instance_of::<PyTuple>() && has_no_dict(object).unwrap_or(false);
    is_exact
        || object.is_instance_of::<PyWeakrefReference>()
        || (!is_made && is_number())
        || is_dtype(object)
        || is_row() // of names, say
}

fn has_no_dict(object: &Bound<'_, PyAny>) -> PyResult<bool> {
    let offset = object
        .get_type()
        .getattr(intern!(object.py(), "__dictoffset__"))?;
    Ok(offset.extract::<isize>()? == 0)
}

fn are_alike(a: &Bound<'_, PyAny>, b: &Bound<'_, PyAny>) -> bool {
    let things = a.py().import("faststep._step._things");
    let same = things.and_then(|things| things.call_method1("are_alike", (a, b)));
    answer(a.py(), same.and_then(|same| same.is_truthy()), false)
}

fn are_equal(a: &Bound<'_, PyAny>, b: &Bound<'_, PyAny>) -> bool {
    if let (Ok(a), Ok(b)) = (a.cast::<PyFloat>(), b.cast::<PyFloat>()) {
        return a.value().to_bits() == b.value().to_bits();
    }
    if let (Ok(a), Ok(b)) = (a.cast::<PyComplex>(), b.cast::<PyComplex>()) {
        let bits = |it: &Bound<'_, PyComplex>| (it.real().to_bits(), it.imag().to_bits());
        return bits(a) == bits(b);
    }
    if let (Ok(a), Ok(b)) = (a.cast::<PyTuple>(), b.cast::<PyTuple>()) {
        return a.len() == b.len() && a.iter().zip(b).all(|(a, b)| equal(&a, &b));
    }
    let sets = (a.cast_exact::<PyFrozenSet>(), b.cast_exact::<PyFrozenSet>());
    if let (Ok(a), Ok(b)) = sets {
        // also in their order
        return a.len() == b.len() && a.iter().zip(b).all(|(a, b)| equal(&a, &b));
    }
    answer(a.py(), a.eq(b), false) && (!is_numpy_float(a) || has_same_sign(a, b))
}

// of NumPy's floats, where 0.0 equals -0.0
fn has_same_sign(a: &Bound<'_, PyAny>, b: &Bound<'_, PyAny>) -> bool {
    let sign = |it: &Bound<'_, PyAny>| it.extract().map(f64::is_sign_negative);
    sign(a).ok() == sign(b).ok()
}
