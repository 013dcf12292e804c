//! What Python's garbage collector has to see: the references of Rust's to objects that may lead back to a step, each of them once.
use std::{cell::RefCell, collections::HashSet, rc::Rc};

use pyo3::{prelude::*, PyTraverseError, PyVisit};

/// Whether the collector goes on.
pub type Visited = Result<(), PyTraverseError>;

/// One visit of the collector's.
pub struct Collector<'a> {
    visit: PyVisit<'a>,
    shared: HashSet<usize>, // what several hold, by address, that has been visited
}

impl<'a> Collector<'a> {
    pub fn new(visit: PyVisit<'a>) -> Self {
        Self {
            visit,
            shared: HashSet::new(),
        }
    }
}

/// What refers to objects. A reference that is not visited keeps its object; one that is visited twice would have it freed too soon.
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
        let inner = self.try_borrow(); // else a call is under way, which needs it
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
