//! References from Rust to Python objects, as Python's garbage collector visits them: each once.
use std::{cell::RefCell, collections::HashSet, rc::Rc};

use pyo3::{prelude::*, PyTraverseError, PyVisit};

/// An error if the collector stops.
pub type Visited = Result<(), PyTraverseError>;

/// One visit of the collector.
pub struct Collector<'a> {
    visit: PyVisit<'a>,
    shared: HashSet<usize>, // addresses of shared objects that have been visited
}

impl<'a> Collector<'a> {
    pub fn new(visit: PyVisit<'a>) -> Self {
        Self {
            visit,
            shared: HashSet::new(),
        }
    }
}

/// An owner of references that may lead back to a step.
///
/// A reference that is not visited keeps its object alive. One that is visited twice has it freed too soon.
pub trait Refers {
    fn visit(&self, collector: &mut Collector<'_>) -> Visited;
}

impl<T> Refers for Py<T> {
    fn visit(&self, collector: &mut Collector<'_>) -> Visited {
        collector.visit.call(self)
    }
}

impl<T: Refers> Refers for [T] {
    fn visit(&self, collector: &mut Collector<'_>) -> Visited {
        self.iter().try_for_each(|each| each.visit(collector))
    }
}

impl<T: Refers> Refers for Vec<T> {
    fn visit(&self, collector: &mut Collector<'_>) -> Visited {
        self.as_slice().visit(collector)
    }
}

impl<T: Refers> Refers for Option<T> {
    fn visit(&self, collector: &mut Collector<'_>) -> Visited {
        self.as_slice().visit(collector)
    }
}

impl<A: Refers, B: Refers> Refers for (A, B) {
    fn visit(&self, collector: &mut Collector<'_>) -> Visited {
        self.0.visit(collector)?;
        self.1.visit(collector)
    }
}

impl<T: Refers> Refers for RefCell<T> {
    fn visit(&self, collector: &mut Collector<'_>) -> Visited {
        let inner = self.try_borrow(); // an error: a call is under way and needs it
        inner.map_or(Ok(()), |inner| inner.visit(collector))
    }
}

impl<T: Refers> Refers for Rc<T> {
    fn visit(&self, collector: &mut Collector<'_>) -> Visited {
        if !collector.shared.insert(Rc::as_ptr(self).addr()) {
            return Ok(());
        }
        self.as_ref().visit(collector)
    }
}
