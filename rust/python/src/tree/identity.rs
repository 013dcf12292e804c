//! Objects and classes that are compared by identity.
use pyo3::{
    intern,
    prelude::*,
    types::{PyType, PyWeakrefReference},
};

use super::text::text;
use crate::mlx::collector::{Collector, Refers, Visited};

/// An object, without keeping it alive where that can be.
#[derive(Debug)]
pub enum Weak {
    /// By a weak reference.
    Weak(Py<PyWeakrefReference>),
    /// An object without weak references.
    Strong(Py<PyAny>),
}

/// A class, which is not kept alive either.
pub type Class = Weak;

impl Refers for Weak {
    fn visit(&self, collector: &mut Collector<'_>) -> Visited {
        match self {
            Self::Weak(_) => Ok(()),
            Self::Strong(object) => object.visit(collector),
        }
    }
}

impl Weak {
    /// An object.
    pub fn of(object: &Bound<'_, PyAny>) -> Self {
        match PyWeakrefReference::new(object) {
            Ok(weak) => Self::Weak(weak.unbind()),
            Err(_) => Self::Strong(object.clone().unbind()),
        }
    }

    /// A class: one that is a module attribute lives as long as the process; one made by a function may refer to a model.
    pub fn of_class(class: &Bound<'_, PyType>) -> Self {
        let made = class.qualname();
        if made.is_ok_and(|name| !text(&name).contains("<locals>")) {
            return Self::Strong(class.clone().into_any().unbind());
        }
        Self::of(class.as_any())
    }

    /// A function or a descriptor, by the same rule.
    pub fn of_code(object: &Bound<'_, PyAny>) -> Self {
        let made = object.getattr(intern!(object.py(), "__qualname__"));
        if made.is_ok_and(|name| !text(&name).contains("<locals>")) {
            return Self::Strong(object.clone().unbind());
        }
        Self::of(object)
    }

    /// The object, while there is one.
    pub fn get<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyAny>> {
        match self {
            Self::Weak(weak) => weak.bind(py).upgrade(),
            Self::Strong(mine) => Some(mine.bind(py).clone()),
        }
    }

    /// Return whether both are one object that is still there.
    pub fn equals(&self, other: &Self, py: Python<'_>) -> bool {
        match other {
            Self::Weak(weak) => weak.bind(py).upgrade().is_some_and(|other| self.is(&other)),
            Self::Strong(other) => self.is(other.bind(py)),
        }
    }

    /// Return whether it is that object.
    pub fn is(&self, object: &Bound<'_, PyAny>) -> bool {
        match self {
            Self::Weak(weak) => weak
                .bind(object.py())
                .upgrade()
                .is_some_and(|mine| mine.is(object)),
            Self::Strong(mine) => mine.is(object),
        }
    }
}
