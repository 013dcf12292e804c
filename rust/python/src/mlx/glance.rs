//! A walk through containers that only compares addresses, in one call of C++ (`native/bridge.cpp`).
#![allow(unsafe_code)]

use pyo3::{
    ffi::PyObject,
    prelude::*,
    types::{PyFrozenSet, PyType, PyWeakrefReference},
};

extern "C" {
    fn faststep_bridge_glance(
        root: *mut PyObject,
        expected: *const Expected,
        count: usize,
        ids: *const usize,
        arrays: usize,
        met: *mut *mut PyObject,
    ) -> i32;
}

/// Kind of an object; the C++ has the same numbers.
#[repr(usize)]
#[derive(Clone, Copy, Debug)]
enum Kind {
    Array,
    Value,
    Weak,
    Strings,
    Key,
    List,
    Tuple,
    Dict,
    Module,
    Attributes,
}

/// An object that the walk is to meet; the C++ has the same.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Expected {
    kind: Kind,
    size: usize,   // of a container, or of a set
    object: usize, // a container, a key, a value, or a weak reference to it
    class: usize,
    class_reference: usize, // a weak reference to the class, or 0 where that is held
}

/// Kind of a container.
#[derive(Clone, Copy, Debug)]
pub enum Container {
    /// A list, before its items.
    List,
    /// A tuple, before its items.
    Tuple,
    /// A dict, before its keys and items.
    Dict,
    /// A module, before its keys and items and its attributes.
    Module,
    /// The instance dict of a module, before its keys and items.
    Attributes,
}

/// Objects that a walk is to meet, in order. Keys, values and references are held, containers and arrays are not.
#[derive(Debug, Default)]
pub struct Glance {
    expected: Vec<Expected>,
    held: Vec<Py<PyAny>>,
}

impl Glance {
    fn push(&mut self, kind: Kind, object: usize) {
        self.expected.push(Expected {
            kind,
            size: 0,
            object,
            class: 0,
            class_reference: 0,
        });
    }

    fn hold(&mut self, kind: Kind, object: Bound<'_, PyAny>) {
        self.push(kind, object.as_ptr().addr());
        self.held.push(object.unbind());
    }

    /// An array, of the next identity.
    pub fn array(&mut self) {
        self.push(Kind::Array, 0);
    }

    /// A key, in front of what stands there.
    pub fn key(&mut self, key: &Bound<'_, PyAny>) {
        self.hold(Kind::Key, key.clone());
    }

    /// That very object.
    pub fn value(&mut self, value: &Bound<'_, PyAny>) {
        self.hold(Kind::Value, value.clone());
    }

    /// What a weak reference refers to.
    pub fn weak(&mut self, reference: &Bound<'_, PyWeakrefReference>) {
        self.hold(Kind::Weak, reference.clone().into_any());
    }

    /// A set of strings.
    pub fn strings(&mut self, set: &Bound<'_, PyFrozenSet>) {
        self.push(Kind::Strings, 0);
        if let Some(last) = self.expected.last_mut() {
            last.size = set.len();
        }
        for each in set {
            self.hold(Kind::Value, each);
        }
    }

    /// A container by its address, of a class; `reference`: a weak one to the class, where nobody holds that.
    pub fn container(
        &mut self,
        kind: Container,
        address: usize,
        size: usize,
        class: &Bound<'_, PyType>,
        reference: Option<&Bound<'_, PyWeakrefReference>>,
    ) {
        let kind = match kind {
            Container::List => Kind::List,
            Container::Tuple => Kind::Tuple,
            Container::Dict => Kind::Dict,
            Container::Module => Kind::Module,
            Container::Attributes => Kind::Attributes,
        };
        self.expected.push(Expected {
            kind,
            size,
            object: address,
            class: class.as_ptr().addr(),
            class_reference: reference.map_or(0, |reference| reference.as_ptr().addr()),
        });
        match reference {
            Some(reference) => self.held.push(reference.clone().into_any().unbind()),
            None => self.held.push(class.clone().into_any().unbind()),
        }
    }

    /// Return whether a walk from `root` meets all of this, and arrays of these identities.
    pub fn meets(&self, root: &Bound<'_, PyAny>, ids: &[usize]) -> bool {
        self.walk(root, ids, std::ptr::null_mut())
    }

    /// The array objects that a walk from `root` meets, where they have these identities and all else is met too.
    pub fn arrays<'py>(
        &self,
        root: &Bound<'py, PyAny>,
        ids: &[usize],
    ) -> Option<impl Iterator<Item = Bound<'py, PyAny>>> {
        let mut met = vec![std::ptr::null_mut(); ids.len()];
        let py = root.py();
        // SAFETY: each is a new reference, which ends here.
        let own = move |object| unsafe { Bound::from_owned_ptr(py, object) };
        self.walk(root, ids, met.as_mut_ptr())
            .then(|| met.into_iter().map(own))
    }

    // `met` is null, or has room for as many objects as there are identities
    fn walk(&self, root: &Bound<'_, PyAny>, ids: &[usize], met: *mut *mut PyObject) -> bool {
        // SAFETY: a live object, and two lists with their lengths. Keys, values and references are held; of containers and
        // classes addresses are compared. As many objects are written as there are identities, or none.
        unsafe {
            faststep_bridge_glance(
                root.as_ptr(),
                self.expected.as_ptr(),
                self.expected.len(),
                ids.as_ptr(),
                ids.len(),
                met,
            ) != 0
        }
    }
}
