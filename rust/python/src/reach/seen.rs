//! The numbers for which a trace is valid, and the constants that it takes for them.
use std::rc::Rc;

use mlx_rs::Array;
use pyo3::{prelude::*, types::PyFloat};

use super::Looked;

/// Numbers for which a trace has been found to hold.
pub struct Seen {
    program: usize,
    values: Rc<Vec<Py<PyAny>>>,
    /// The constants that the trace takes as inputs.
    pub constants: Vec<Array>,
    /// Structure that the loss returned, with holes for its arrays.
    pub template: Option<Py<PyAny>>,
}

impl Seen {
    /// Made from the current values.
    pub fn new(looked: &Looked, constants: Vec<Array>, template: Option<Py<PyAny>>) -> Self {
        Self {
            program: looked.program.id,
            values: looked.values.clone(),
            constants,
            template,
        }
    }

    /// The same for other numbers.
    pub fn with(&self, py: Python<'_>, looked: &Looked) -> Self {
        let template = self.template.as_ref().map(|t| t.clone_ref(py));
        Self::new(looked, self.constants.clone(), template)
    }

    /// The numbers alone.
    pub fn numbers(&self) -> Self {
        Self {
            program: self.program,
            values: self.values.clone(),
            constants: Vec::new(),
            template: None,
        }
    }

    /// Return whether these are the numbers that are there now.
    pub fn fits(&self, py: Python<'_>, looked: &Looked) -> bool {
        let mut pairs = self.values.iter().zip(looked.values.iter());
        self.program == looked.program.id
            && (Rc::ptr_eq(&self.values, &looked.values)
                || pairs.all(|(a, b)| equal(a.bind(py), b.bind(py))))
    }

    /// The values that are other ones now, by number, where the structure is the same.
    pub fn changes(&self, py: Python<'_>, looked: &Looked) -> Vec<usize> {
        if self.program != looked.program.id {
            return Vec::new();
        }
        let pairs = self.values.iter().zip(looked.values.iter()).enumerate();
        let changed = pairs.filter(|(_, (a, b))| !equal(a.bind(py), b.bind(py)));
        changed.map(|(number, _)| number).collect()
    }
}

/// Return whether two values are the same number, string or set; of floats, bit by bit.
pub fn equal(a: &Bound<'_, PyAny>, b: &Bound<'_, PyAny>) -> bool {
    if a.is(b) {
        return true;
    }
    if let (Ok(a), Ok(b)) = (a.cast::<PyFloat>(), b.cast::<PyFloat>()) {
        return a.value().to_bits() == b.value().to_bits();
    }
    a.get_type().is(b.get_type()) && a.eq(b).unwrap_or(false)
}
