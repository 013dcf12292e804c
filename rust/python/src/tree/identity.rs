//! Classes, which are compared by identity.
use pyo3::{
    prelude::*,
    types::{PyType, PyWeakrefReference},
};

use super::text::text;
use crate::mlx::collector::{Collector, Refers, Visited};

/// A reference to a class.
#[derive(Debug)]
pub enum Class {
    /// A class that is defined in a function. It may refer to a model, and is not kept alive.
    Weak(Py<PyWeakrefReference>),
    /// A class of a module, which lives as long as the process.
    Strong(Py<PyAny>),
}

impl Refers for Class {
    fn visit(&self, collector: &mut Collector<'_>) -> Visited {
        match self {
            Self::Weak(_) => Ok(()),
            Self::Strong(class) => class.visit(collector),
        }
    }
}

impl Class {
    /// Refer to a class.
    pub fn of(class: &Bound<'_, PyType>) -> Self {
        let name = class.qualname();
        let is_local = name.map_or(true, |name| text(&name).contains("<locals>"));
        let weak = is_local.then(|| PyWeakrefReference::new(class.as_any()));
        match weak {
            Some(Ok(weak)) => Self::Weak(weak.unbind()),
            _ => Self::Strong(class.clone().into_any().unbind()),
        }
    }

    /// Return whether both refer to one class that still exists.
    pub fn equals(&self, other: &Self, py: Python<'_>) -> bool {
        match other {
            Self::Weak(weak) => weak.bind(py).upgrade().is_some_and(|other| self.is(&other)),
            Self::Strong(other) => self.is(other.bind(py)),
        }
    }

    /// Return whether it refers to this class.
    pub fn is(&self, class: &Bound<'_, PyAny>) -> bool {
        match self {
            Self::Weak(weak) => {
                let mine = weak.bind(class.py()).upgrade();
                mine.is_some_and(|mine| mine.is(class))
            }
            Self::Strong(mine) => mine.is(class),
        }
    }
}
