//! A walk through containers that only compares addresses, in one call of C++ (`native/glance.cpp`).
//!
//! The list of words is the format that `native/glance.cpp` describes.
#![allow(unsafe_code)]

use pyo3::{
    ffi::PyObject,
    prelude::*,
    types::{PySet, PyType, PyWeakrefReference},
};

use super::collector::{Collector, Refers, Visited};

extern "C" {
    fn faststep_bridge_glance(
        root: *mut PyObject,
        expected: *mut usize,
        count: usize,
        ids: *const usize,
        arrays: usize,
        met: *mut *mut PyObject,
    ) -> i32;
    fn faststep_bridge_place(set: *mut PyObject, string: *mut PyObject) -> usize;
    fn faststep_bridge_dict_distance(object: *mut PyObject) -> usize;
}

/// Kind of an object, in the lowest bits of a word; the C++ has the same numbers.
#[repr(usize)]
#[derive(Clone, Copy, Debug)]
enum Kind {
    Array,
    Value,
    Weak,
    Strings,
    List,
    Tuple,
    Dict,
    Module,
}

// the lowest bit of a class: a weak reference to it follows
const REFERRED: usize = 1;

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

/// Objects that a walk has to meet, in order. Keys, values and references are held; containers and arrays are not.
#[derive(Debug, Default)]
pub struct Glance {
    words: Vec<usize>,
    held: Vec<Py<PyAny>>,
}

impl Refers for Glance {
    fn visit(&self, collector: &mut Collector<'_>) -> Visited {
        self.held.visit(collector)
    }
}

impl Glance {
    fn hold(&mut self, object: &Bound<'_, PyAny>) -> usize {
        self.held.push(object.clone().unbind());
        object.as_ptr().addr()
    }

    fn push(&mut self, kind: Kind, object: &Bound<'_, PyAny>) {
        let word = self.hold(object) | kind as usize;
        self.words.push(word);
    }

    /// An array with the next identity.
    pub fn array(&mut self) {
        self.words.push(Kind::Array as usize);
    }

    /// A key, before its value.
    pub fn key(&mut self, key: &Bound<'_, PyAny>) {
        let word = self.hold(key);
        self.words.push(word);
    }

    /// This object.
    pub fn value(&mut self, value: &Bound<'_, PyAny>) {
        self.push(Kind::Value, value);
    }

    /// The object of a weak reference.
    pub fn weak(&mut self, reference: &Bound<'_, PyWeakrefReference>) {
        self.push(Kind::Weak, reference);
    }

    /// A set of strings.
    pub fn strings(&mut self, set: &Bound<'_, PySet>) {
        self.words.push(set.len() << 3 | Kind::Strings as usize);
        self.words.push(set.as_ptr().addr());
        for each in set {
            self.key(&each);
            // SAFETY: a live set, and a string in it.
            let place = unsafe { faststep_bridge_place(set.as_ptr(), each.as_ptr()) };
            self.words.push(place);
        }
    }

    /// A container of a class; `reference`: a weak reference to the class, if nobody else holds it.
    pub fn container(
        &mut self,
        kind: Container,
        container: &Bound<'_, PyAny>,
        size: usize,
        class: &Bound<'_, PyType>,
        reference: Option<&Bound<'_, PyWeakrefReference>>,
    ) {
        let bits = match kind {
            Container::List => Kind::List as usize,
            Container::Tuple => Kind::Tuple as usize,
            Container::Dict => Kind::Dict as usize,
            Container::Module => Kind::Module as usize,
            Container::Attributes => 0, // the place behind a module's items tells
        };
        self.words.push(container.as_ptr().addr() | bits);
        if let Some(reference) = reference {
            self.words.push(class.as_ptr().addr() | REFERRED);
            self.key(reference);
        } else {
            self.key(class);
        }
        if matches!(kind, Container::Module) {
            // SAFETY: a live object.
            let distance = unsafe { faststep_bridge_dict_distance(container.as_ptr()) };
            self.words.push(distance);
        }
        self.words.push(size);
        if !matches!(kind, Container::List | Container::Tuple) {
            self.words.push(0); // the version of the dict, not known yet
        }
    }

    /// The array objects in `root`, if it has all these objects, and arrays of these identities.
    pub fn arrays<'py>(
        &mut self,
        root: &Bound<'py, PyAny>,
        ids: &[usize],
    ) -> Option<impl Iterator<Item = Bound<'py, PyAny>>> {
        let mut met = vec![std::ptr::null_mut(); ids.len()];
        // SAFETY: a live object, and lists with their lengths. Keys, values and references are held; of containers and classes
        // addresses are compared. As many objects are written as there are identities, or none.
        let is_same = unsafe {
            faststep_bridge_glance(
                root.as_ptr(),
                self.words.as_mut_ptr(),
                self.words.len(),
                ids.as_ptr(),
                ids.len(),
                met.as_mut_ptr(),
            ) != 0
        };
        let py = root.py();
        // SAFETY: each is a new reference, which ends here.
        let own = move |object| unsafe { Bound::from_owned_ptr(py, object) };
        is_same.then(|| met.into_iter().map(own))
    }
}
