//! Python's `mx.array` objects and mlx-rs arrays: the same `mlx::core::array`, without a copy.
//!
//! Guarantee: an object made here is an ordinary `mlx.core.array`; an [`Array`] read here shares its value. Rationale:
//! `mlx.core` is built with nanobind, domain `mlx`; `native/bridge.cpp` is built with the same version and domain, and so
//! finds its array type. Limits: the mlx package is pinned, because neither nanobind's nor MLX's C++ ABI is stable. Threads:
//! every function needs the GIL, which its `Bound` argument proves.
#![allow(unsafe_code)]

use std::{ffi::c_void, ptr::null_mut};

use faststep::engine::Group;
use mlx_rs::Array;
use pyo3::{
    ffi::PyObject,
    prelude::*,
    types::{PyDict, PyFunction, PyTuple, PyType},
};

extern "C" {
    fn faststep_bridge_init(module: *mut PyObject) -> i32;
    fn faststep_bridge_is_array(object: *mut PyObject) -> i32;
    fn faststep_bridge_borrow(object: *mut PyObject) -> *mut c_void;
    fn faststep_bridge_clone(object: *mut PyObject) -> *mut c_void;
    fn faststep_bridge_group(object: *mut PyObject) -> *const c_void;
    fn faststep_bridge_wrap(array: *const c_void) -> *mut PyObject;
    fn faststep_bridge_assign(object: *mut PyObject, array: *const c_void);
    fn faststep_array_id(array: *const c_void) -> usize;
}

/// Join the domain of `mlx.core`. Call it once, before anything else of this module.
pub fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
    // SAFETY: a live module; mlx.core has been imported.
    if unsafe { faststep_bridge_init(module.as_ptr()) } != 0 {
        return Err(PyErr::fetch(module.py()));
    }
    Ok(())
}

/// Return whether the object is an `mx.array`.
pub fn is_array(object: &Bound<'_, PyAny>) -> bool {
    // SAFETY: a live object.
    unsafe { faststep_bridge_is_array(object.as_ptr()) != 0 }
}

/// The identity of the value inside an `mx.array` object; `None` for other objects.
pub fn id(object: &Bound<'_, PyAny>) -> Option<usize> {
    // SAFETY: `borrow` only sees arrays, and what it returns lives as long as the object.
    is_array(object).then(|| unsafe { faststep_array_id(faststep_bridge_borrow(object.as_ptr())) })
}

/// Return whether two dicts have the same objects as keys and values, in the same order.
pub fn has_same_items(a: &Bound<'_, PyDict>, b: &Bound<'_, PyDict>) -> bool {
    let (mut at_a, mut at_b) = (0, 0);
    let [mut key_a, mut value_a, mut key_b, mut value_b] = [null_mut(); 4];
    // SAFETY: two live dicts, which nothing changes meanwhile; what is written is compared, and not used.
    unsafe {
        use pyo3::ffi::PyDict_Next;
        while PyDict_Next(a.as_ptr(), &raw mut at_a, &raw mut key_a, &raw mut value_a) != 0 {
            if PyDict_Next(b.as_ptr(), &raw mut at_b, &raw mut key_b, &raw mut value_b) == 0
                || key_a != key_b
                || value_a != value_b
            {
                return false;
            }
        }
        PyDict_Next(b.as_ptr(), &raw mut at_b, &raw mut key_b, &raw mut value_b) == 0
    }
}

/// Return whether an object's class is this one or derived from it.
///
/// `isinstance` asks the class, which takes ten times as long and is asked of everything in a model.
pub fn is_of(object: &Bound<'_, PyAny>, class: &Bound<'_, PyType>) -> bool {
    // SAFETY: two classes, which live as long as the object and the reference.
    unsafe { pyo3::ffi::PyType_IsSubtype(object.get_type_ptr(), class.as_type_ptr()) != 0 }
}

/// The value inside an `mx.array` object; `None` for other objects.
pub fn get(object: &Bound<'_, PyAny>) -> Option<Array> {
    // SAFETY: `clone` only sees arrays, and returns a heap handle of the kind that mlx-c's arrays own.
    is_array(object).then(|| unsafe {
        Array::from_ptr(mlx_sys::mlx_array {
            ctx: faststep_bridge_clone(object.as_ptr()),
        })
    })
}

/// The group inside an `mx.distributed.Group`; `None` for other objects.
pub fn group(object: &Bound<'_, PyAny>) -> Option<Group> {
    // SAFETY: a live object in; null, or the group that it owns, of which `of` makes a handle at once.
    unsafe {
        let group = faststep_bridge_group(object.as_ptr());
        (!group.is_null()).then(|| Group::of(group))
    }
}

/// A new `mx.array` object.
pub fn wrap<'py>(py: Python<'py>, array: &Array) -> PyResult<Bound<'py, PyAny>> {
    // SAFETY: a live array in, a new reference or null with an error set out.
    unsafe { Bound::from_owned_ptr_or_err(py, faststep_bridge_wrap(array.as_ptr().ctx)) }
}

/// Give an `mx.array` object another value; other objects stay as they are.
///
/// Whoever else holds the object sees it change, and a memoryview of it loses its memory: only for objects that
/// nobody but the caller's container refers to ([`refcount`]).
pub fn assign(object: &Bound<'_, PyAny>, array: &Array) {
    if is_array(object) {
        // SAFETY: an array object and a live array.
        unsafe { faststep_bridge_assign(object.as_ptr(), array.as_ptr().ctx) }
    }
}

/// Return the number of references to the object, the given one included.
pub fn refcount(object: &Bound<'_, PyAny>) -> isize {
    // SAFETY: a live object.
    unsafe { pyo3::ffi::Py_REFCNT(object.as_ptr()) }
}

/// The contents of a cell of a function's closure; `None` if it is empty or there is none.
pub fn cell<'py>(function: &Bound<'py, PyAny>, index: usize) -> Option<Bound<'py, PyAny>> {
    // SAFETY: a function; its closure is borrowed.
    let closure = unsafe { part(function, pyo3::ffi::PyFunction_GetClosure) }?;
    let cell = closure.cast::<PyTuple>().ok()?.get_item(index).ok()?;
    // SAFETY: a cell; an empty one gives null and no error, a full one a new reference.
    unsafe { Bound::from_owned_ptr_or_opt(function.py(), pyo3::ffi::PyCell_Get(cell.as_ptr())) }
}

/// The globals of a function.
pub fn globals<'py>(function: &Bound<'py, PyAny>) -> Option<Bound<'py, PyDict>> {
    // SAFETY: a function; its globals are borrowed.
    let globals = unsafe { part(function, pyo3::ffi::PyFunction_GetGlobals) };
    globals?.cast_into::<PyDict>().ok()
}

/// The code of a function.
pub fn code<'py>(function: &Bound<'py, PyAny>) -> Option<Bound<'py, PyAny>> {
    // SAFETY: a function; its code is borrowed.
    unsafe { part(function, pyo3::ffi::PyFunction_GetCode) }
}

/// A part of a function; `None` if it has none, or the object is no function.
///
/// # Safety
/// `get` takes a function, and returns a borrowed reference to an object or null.
unsafe fn part<'py>(
    function: &Bound<'py, PyAny>,
    get: unsafe extern "C" fn(*mut PyObject) -> *mut PyObject,
) -> Option<Bound<'py, PyAny>> {
    if !function.is_instance_of::<PyFunction>() {
        return None;
    }
    // SAFETY: as the caller promises.
    unsafe { Bound::from_borrowed_ptr_or_opt(function.py(), get(function.as_ptr())) }
}

/// Return the number of keys, from the first one on, at which a dict has the objects with these addresses; 0: nothing.
pub fn dict_has(dict: &Bound<'_, PyDict>, keys: &[Py<PyAny>], known: &[usize]) -> usize {
    let pairs = keys.iter().zip(known);
    let same = pairs.take_while(|(key, &known)| {
        // SAFETY: a live dict and a live key; the object, borrowed from the dict or null, is compared only.
        let found = unsafe { pyo3::ffi::PyDict_GetItemWithError(dict.as_ptr(), key.as_ptr()) };
        found.addr() == known
    });
    let same = same.count();
    if same < keys.len() {
        drop(PyErr::take(dict.py())); // an error of a key without a hash
    }
    same
}

/// Return whether a dict has the keys at these addresses, in this order.
pub fn has_keys(dict: &Bound<'_, PyDict>, mut keys: impl Iterator<Item = usize>) -> bool {
    let (mut position, mut key) = (0, null_mut());
    // SAFETY: a live dict, which nothing changes meanwhile; the key is borrowed, and compared only.
    while unsafe {
        pyo3::ffi::PyDict_Next(dict.as_ptr(), &raw mut position, &raw mut key, null_mut()) != 0
    } {
        if keys.next() != Some(key.addr()) {
            return false;
        }
    }
    keys.next().is_none()
}

/// The instance dict of an object. Its class is not asked: its `__getattr__` would take ten times as long.
pub fn attributes<'py>(object: &Bound<'py, PyAny>) -> Option<Bound<'py, PyDict>> {
    // SAFETY: a live object in, a new reference or null with an error set out.
    let attributes = unsafe {
        let dict = pyo3::ffi::PyObject_GenericGetDict(object.as_ptr(), null_mut());
        Bound::from_owned_ptr_or_err(object.py(), dict)
    };
    attributes.ok()?.cast_into::<PyDict>().ok()
}
