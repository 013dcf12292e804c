//! Python's `mx.array` objects and mlx-rs arrays: the same `mlx::core::array`, without a copy.
//!
//! Guarantee: an object made here is an ordinary `mlx.core.array`, an [`Array`] read here shares its value. Rationale:
//! `mlx.core` is built with nanobind, domain `mlx`; the C++ beside this file is built with the same version and domain
//! and so finds its array type. Limits: the mlx package is pinned, because neither nanobind's nor MLX's C++ ABI is
//! stable. Threads: every function wants the GIL, which its `Bound` argument proves.
#![allow(unsafe_code)]

use std::{ffi::c_void, sync::OnceLock};

use mlx_rs::Array;
use pyo3::{
    ffi::PyObject,
    prelude::*,
    types::{PyDict, PyList, PyTuple, PyType},
};

extern "C" {
    fn faststep_bridge_init(module: *mut PyObject) -> i32;
    fn faststep_bridge_is_array(object: *mut PyObject) -> i32;
    fn faststep_bridge_borrow(object: *mut PyObject) -> *mut c_void;
    fn faststep_bridge_clone(object: *mut PyObject) -> *mut c_void;
    fn faststep_bridge_wrap(array: *const c_void) -> *mut PyObject;
    fn faststep_bridge_assign(object: *mut PyObject, array: *const c_void);
    fn faststep_array_id(array: *const c_void) -> usize;
    fn faststep_bridge_version(dict: *mut PyObject) -> usize;
    fn faststep_bridge_list_holds(
        list: *mut PyObject,
        first: usize,
        ids: *const usize,
        count: usize,
    ) -> usize;
    fn faststep_bridge_dict_holds(
        dict: *mut PyObject,
        keys: *const *mut PyObject,
        ids: *const usize,
        count: usize,
    ) -> usize;
}

/// Return the number of items of a list, from the first one on, that are arrays with these identities.
pub fn list_holds(list: &Bound<'_, PyList>, first: usize, ids: &[usize]) -> usize {
    // SAFETY: a live list; a list of numbers and its length.
    unsafe { faststep_bridge_list_holds(list.as_ptr(), first, ids.as_ptr(), ids.len()) }
}

/// Join the domain of `mlx.core`. To be called once, before anything else of this module.
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

/// Return the number of keys, from the first on and in the order of a dict, at which arrays with these identities stand.
pub fn dict_holds(dict: &Bound<'_, PyDict>, keys: &[Py<PyAny>], ids: &[usize]) -> usize {
    let count = keys.len().min(ids.len());
    // SAFETY: a live dict; live keys, each of which is one pointer, and as many numbers.
    unsafe { faststep_bridge_dict_holds(dict.as_ptr(), keys.as_ptr().cast(), ids.as_ptr(), count) }
}

/// Return whether two dicts have the same objects as keys and values, in the same order.
pub fn has_same_items(a: &Bound<'_, PyDict>, b: &Bound<'_, PyDict>) -> bool {
    let (mut at_a, mut at_b) = (0, 0);
    let [mut key_a, mut value_a, mut key_b, mut value_b] = [std::ptr::null_mut(); 4];
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

/// Return whether the objects of two classes end alike: those of all that come of a `class` statement do, of one in C none.
pub fn ends_alike(one: &Bound<'_, PyType>, other: &Bound<'_, PyType>) -> bool {
    // SAFETY: live classes.
    let end = |class: &Bound<'_, PyType>| unsafe {
        (*class.as_type_ptr()).tp_dealloc.map(|end| end as usize)
    };
    end(one) == end(other)
}

/// Return whether a list has the very items of a tuple.
pub fn has_items(list: &Bound<'_, PyList>, tuple: &Bound<'_, PyTuple>) -> bool {
    // SAFETY: a live list, whose items nothing changes meanwhile: they are compared by address.
    let items = unsafe {
        let list = list.as_ptr().cast::<pyo3::ffi::PyListObject>();
        let count = usize::try_from(pyo3::ffi::PyList_GET_SIZE(list.cast())).unwrap_or(0);
        let first = (*list).ob_item;
        if first.is_null() {
            &[]
        } else {
            std::slice::from_raw_parts(first, count)
        }
    };
    let tuple = tuple.as_slice();
    items.len() == tuple.len() && items.iter().zip(tuple).all(|(a, b)| *a == b.as_ptr())
}

/// Return whether a dict has these very keys and values, in their order.
pub fn has_keys_and_values(
    dict: &Bound<'_, PyDict>,
    keys: &Bound<'_, PyTuple>,
    values: &Bound<'_, PyTuple>,
) -> bool {
    let mut pairs = keys.as_slice().iter().zip(values.as_slice());
    let (mut at, mut key, mut value) = (0, std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: a live dict, which nothing changes meanwhile; what is written is compared, and not used.
    unsafe {
        while pyo3::ffi::PyDict_Next(dict.as_ptr(), &raw mut at, &raw mut key, &raw mut value) != 0
        {
            let same = |(one, other): (&Bound<'_, PyAny>, &Bound<'_, PyAny>)| {
                one.as_ptr() == key && other.as_ptr() == value
            };
            if !pairs.next().is_some_and(same) {
                return false;
            }
        }
    }
    pairs.next().is_none()
}

/// Return whether an object's class is this one or derived from it. `isinstance` asks the class, which takes ten times as long
/// and is asked of everything in a model.
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

// of a class whose number holds, before Python 3.13
const VALID_VERSION: std::ffi::c_ulong = 1 << 19;

/// The contents of a cell of a function's closure.
pub fn cell<'py>(function: &Bound<'py, PyAny>, index: usize) -> Option<Bound<'py, PyAny>> {
    let cell = closure_cell(function, index)?;
    // SAFETY: a cell; an empty one gives null and no error, a full one a new reference.
    unsafe { Bound::from_owned_ptr_or_opt(function.py(), pyo3::ffi::PyCell_Get(cell.as_ptr())) }
}

/// The cells of a function's closure.
pub fn cells<'py>(function: &Bound<'py, PyAny>) -> Vec<Bound<'py, PyAny>> {
    (0..)
        .map_while(|index| closure_cell(function, index))
        .collect()
}

/// Put an object into a cell of a function's closure.
pub fn set_cell(function: &Bound<'_, PyAny>, index: usize, object: &Bound<'_, PyAny>) {
    if let Some(cell) = closure_cell(function, index) {
        // SAFETY: a cell and a live object; it fails for other objects than cells only.
        unsafe { pyo3::ffi::PyCell_Set(cell.as_ptr(), object.as_ptr()) };
    }
}

/// A cell of a function's closure.
pub fn closure_cell<'py>(function: &Bound<'py, PyAny>, index: usize) -> Option<Bound<'py, PyAny>> {
    if !is_function(function) {
        return None;
    }
    // SAFETY: a function; its closure is a borrowed tuple of cells, or null.
    let closure = unsafe {
        Bound::from_borrowed_ptr_or_opt(
            function.py(),
            pyo3::ffi::PyFunction_GetClosure(function.as_ptr()),
        )
    };
    closure?.cast::<PyTuple>().ok()?.get_item(index).ok()
}

/// The value of a context variable; none where it has none, or is no such variable.
pub fn context_value<'py>(variable: &Bound<'py, PyAny>) -> Option<Bound<'py, PyAny>> {
    let mut value = std::ptr::null_mut();
    // SAFETY: a context variable; the value is a new reference, or null where there is none.
    unsafe {
        if pyo3::ffi::PyContextVar_CheckExact(variable.as_ptr()) == 0 {
            return None;
        }
        let variable_ptr = variable.as_ptr();
        let found = pyo3::ffi::PyContextVar_Get(variable_ptr, std::ptr::null_mut(), &raw mut value);
        if found != 0 {
            drop(PyErr::take(variable.py()));
            return None;
        }
        Bound::from_owned_ptr_or_opt(variable.py(), value)
    }
}

/// The globals of a function.
pub fn globals<'py>(function: &Bound<'py, PyAny>) -> Option<Bound<'py, PyDict>> {
    if !is_function(function) {
        return None;
    }
    // SAFETY: a function; its globals are a borrowed dict.
    let globals = unsafe {
        Bound::from_borrowed_ptr_or_opt(
            function.py(),
            pyo3::ffi::PyFunction_GetGlobals(function.as_ptr()),
        )
    };
    globals?.cast_into::<PyDict>().ok()
}

/// The modules that have been imported, by name.
pub fn modules(py: Python<'_>) -> Option<Bound<'_, PyDict>> {
    // SAFETY: a borrowed dict, which the interpreter holds.
    let modules =
        unsafe { Bound::from_borrowed_ptr_or_opt(py, pyo3::ffi::PyImport_GetModuleDict()) };
    modules?.cast_into::<PyDict>().ok()
}

/// Return the number of keys, from the first one on, under which a dict has the objects at these addresses; 0: nothing.
pub fn dict_has(dict: &Bound<'_, PyDict>, keys: &[Py<PyAny>], known: &[usize]) -> usize {
    let pairs = keys.iter().zip(known);
    let same = pairs.take_while(|(key, &known)| {
        // SAFETY: a live dict and a live key; the object, borrowed from the dict or null, is compared only.
        let found = unsafe { pyo3::ffi::PyDict_GetItemWithError(dict.as_ptr(), key.as_ptr()) };
        found.addr() == known
    });
    let same = same.count();
    if same < keys.len() {
        drop(PyErr::take(dict.py())); // of a key without a hash
    }
    same
}

/// The code of a function.
pub fn code<'py>(function: &Bound<'py, PyAny>) -> Option<Bound<'py, PyAny>> {
    if !is_function(function) {
        return None;
    }
    // SAFETY: a function; its code is a borrowed object.
    unsafe {
        Bound::from_borrowed_ptr_or_opt(
            function.py(),
            pyo3::ffi::PyFunction_GetCode(function.as_ptr()),
        )
    }
}

/// A number for what is in a class, another one whenever that is changed; none where Python counts no further.
pub fn version(class: &Bound<'_, PyType>) -> Option<u32> {
    static ALWAYS: OnceLock<bool> = OnceLock::new();
    let counted = || {
        // SAFETY: a live class, whose number is read while Python's lock is held.
        let (version, flags) = unsafe {
            let class = class.as_type_ptr();
            ((*class).tp_version_tag, pyo3::ffi::PyType_GetFlags(class))
        };
        let always = || class.py().version_info() >= (3, 13);
        let holds = flags & VALID_VERSION != 0 || *ALWAYS.get_or_init(always);
        (version != 0 && holds).then_some(version)
    };
    counted().or_else(|| {
        let _ = class.hasattr(pyo3::intern!(class.py(), "__init__")); // Python counts when a class is looked through
        counted()
    })
}

/// The instance dict of an object; without a question to its class, whose `__getattr__` takes ten times as long.
pub fn attributes<'py>(object: &Bound<'py, PyAny>) -> Option<Bound<'py, PyDict>> {
    // SAFETY: a live object in, a new reference or null with an error set out.
    let attributes = unsafe {
        let dict = pyo3::ffi::PyObject_GenericGetDict(object.as_ptr(), std::ptr::null_mut());
        Bound::from_owned_ptr_or_err(object.py(), dict)
    };
    attributes.ok()?.cast_into::<PyDict>().ok()
}

/// Walk a dict in which keys are expected in this order, and these values; other keys between them are passed over.
///
/// Of another object than expected, `other` is called with its number, and returns whether to go on. Returns how many
/// have been found.
pub fn walk<'py>(
    dict: &Bound<'py, PyDict>,
    keys: &[Py<PyAny>],
    values: &[Py<PyAny>],
    mut other: impl FnMut(usize, Bound<'py, PyAny>) -> bool,
) -> usize {
    let (mut position, mut found) = (0, 0);
    let (mut key, mut value) = (std::ptr::null_mut(), std::ptr::null_mut());
    while found < keys.len() {
        // SAFETY: a live dict. A position behind its end, as when `other` has changed it, gives none. The references are
        // borrowed, and compared only until `other` owns its own.
        let next = unsafe {
            pyo3::ffi::PyDict_Next(
                dict.as_ptr(),
                &raw mut position,
                &raw mut key,
                &raw mut value,
            )
        };
        if next == 0 {
            break;
        }
        if key != keys[found].as_ptr() {
            continue;
        }
        if value != values[found].as_ptr() {
            // SAFETY: borrowed from the dict, in which nothing has changed since.
            let object = unsafe { Bound::from_borrowed_ptr(dict.py(), value) };
            if !other(found, object) {
                break;
            }
        }
        found += 1;
    }
    found
}

/// A number for what is in a dict, another one whenever that is changed; none where Python counts that no longer.
pub fn dict_version(dict: &Bound<'_, PyDict>) -> Option<usize> {
    // SAFETY: a live dict.
    let version = unsafe { faststep_bridge_version(dict.as_ptr()) };
    (version != 0).then_some(version)
}

/// Return whether a dict has the keys at these addresses, in this order.
pub fn has_keys(dict: &Bound<'_, PyDict>, mut keys: impl Iterator<Item = usize>) -> bool {
    each_key(dict, |key| keys.next() == Some(key)) && keys.next().is_none()
}

// false once `is` is false of the address of a key
fn each_key(dict: &Bound<'_, PyDict>, mut is: impl FnMut(usize) -> bool) -> bool {
    let (mut position, mut key) = (0, std::ptr::null_mut());
    let next = |position: &mut isize, key: &mut *mut PyObject| {
        // SAFETY: a live dict, which nothing changes meanwhile; the key is borrowed.
        unsafe { pyo3::ffi::PyDict_Next(dict.as_ptr(), position, key, std::ptr::null_mut()) != 0 }
    };
    while next(&mut position, &mut key) {
        if !is(key.addr()) {
            return false;
        }
    }
    true
}

fn is_function(object: &Bound<'_, PyAny>) -> bool {
    // SAFETY: a live object.
    unsafe { pyo3::ffi::PyFunction_Check(object.as_ptr()) != 0 }
}
