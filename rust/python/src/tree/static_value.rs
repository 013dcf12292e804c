//! Values that are part of a tree: all but containers, keys and arrays.
use faststep::engine::array::id;
use mlx_rs::Array;
use pyo3::{
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
};

/// A value that is part of a tree.
#[derive(Debug)]
pub enum Static {
    /// A number, a string, or an object without weak references.
    Value(Py<PyAny>),
    /// Any other object; a strong reference could keep the model alive.
    Weak(Py<PyWeakrefReference>),
    /// The members of a set; members that are compared by identity are weak references.
    Set(Py<PyFrozenSet>),
    /// An array in a tuple, where no other array can be put.
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

/// Return whether the object is a number, a string, bytes, None, a dtype of MLX, or a tuple of these: a shape, say.
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
    /// Refer to an object.
    ///
    /// # Errors
    /// When the members of a set cannot be hashed.
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

    /// Return whether it is this object, or a set with these members.
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
            Self::Constant(array) => bridge::id(object) == Some(id(array)),
        }
    }

    /// Return whether both are equal; see [`equal`].
    pub fn equals(&self, other: &Self, py: Python<'_>) -> bool {
        let object = |it: &Self| match it {
            Self::Value(value) => Some(value.bind(py).clone()),
            Self::Weak(weak) => weak.bind(py).upgrade(),
            Self::Set(_) | Self::Constant(_) => None,
        };
        match (self, other) {
            (Self::Set(a), Self::Set(b)) => equal(a.bind(py), b.bind(py)),
            (Self::Constant(a), Self::Constant(b)) => id(a) == id(b),
            _ => match (object(self), object(other)) {
                (Some(a), Some(b)) => equal(&a, &b),
                _ => false,
            },
        }
    }
}

// the members of a set, which must not keep a model alive; there is one weak reference to each object
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

/// Return whether two objects are the same, or equal values of one class.
///
/// Values are numbers, strings, bytes, dtypes of MLX, and tuples and frozen sets of values. Floats are compared by their bits, and
/// frozen sets in their order. No Python code runs.
pub fn equal(a: &Bound<'_, PyAny>, b: &Bound<'_, PyAny>) -> bool {
    a.is(b) || (a.get_type().is(b.get_type()) && are_equal(a, b))
}

fn are_equal(a: &Bound<'_, PyAny>, b: &Bound<'_, PyAny>) -> bool {
    if let (Ok(a), Ok(b)) = (a.cast_exact::<PyFloat>(), b.cast_exact::<PyFloat>()) {
        return a.value().to_bits() == b.value().to_bits();
    }
    if let (Ok(a), Ok(b)) = (a.cast_exact::<PyComplex>(), b.cast_exact::<PyComplex>()) {
        let bits = |it: &Bound<'_, PyComplex>| (it.real().to_bits(), it.imag().to_bits());
        return bits(a) == bits(b);
    }
    if let (Ok(a), Ok(b)) = (a.cast_exact::<PyTuple>(), b.cast_exact::<PyTuple>()) {
        return a.len() == b.len() && a.iter().zip(b).all(|(a, b)| equal(&a, &b));
    }
    let sets = (a.cast_exact::<PyFrozenSet>(), b.cast_exact::<PyFrozenSet>());
    if let (Ok(a), Ok(b)) = sets {
        return a.len() == b.len() && a.iter().zip(b).all(|(a, b)| equal(&a, &b));
    }
    let is_value = a.is_exact_instance_of::<PyInt>()
        || a.is_exact_instance_of::<PyString>()
        || a.is_exact_instance_of::<PyBytes>()
        || is_dtype(a)
        || is_numpy_number(a);
    let has_same_sign = || !is_numpy_float(a) || is_negative(a) == is_negative(b); // 0.0 equals -0.0
    is_value && a.eq(b).unwrap_or(false) && has_same_sign()
}

fn is_negative(float: &Bound<'_, PyAny>) -> Option<bool> {
    float.extract().map(f64::is_sign_negative).ok()
}
