//! The numbers for which a trace is valid, and the constants that it takes for them.
use mlx_rs::Array;
use pyo3::{prelude::*, types::PyFloat};

use super::Looked;

/// Numbers for which a trace has been found to hold.
pub struct Seen {
    program: usize,
    values: Vec<Py<PyAny>>,
    /// The constants that the trace takes as inputs.
    pub constants: Vec<Array>,
    /// What the loss returned, with holes for its arrays.
    pub template: Option<Py<PyAny>>,
}

impl Seen {
    /// Of what is there now.
    pub fn new(
        py: Python<'_>,
        looked: &Looked,
        constants: Vec<Array>,
        template: Option<Py<PyAny>>,
    ) -> Self {
        let values = looked.values.iter().map(|value| value.clone_ref(py));
        Self {
            program: looked.program.id,
            values: values.collect(),
            constants,
            template,
        }
    }

    /// The same for other numbers.
    pub fn with(&self, py: Python<'_>, looked: &Looked) -> Self {
        let template = self.template.as_ref().map(|t| t.clone_ref(py));
        Self::new(py, looked, self.constants.clone(), template)
    }

    /// Whether these are the numbers that are there now.
    pub fn fits(&self, py: Python<'_>, looked: &Looked) -> bool {
        let mut pairs = self.values.iter().zip(&looked.values);
        self.program == looked.program.id && pairs.all(|(a, b)| equal(a.bind(py), b.bind(py)))
    }

    /// The values that are other ones now, by number, where the structure is the same.
    pub fn changes(&self, py: Python<'_>, looked: &Looked) -> Vec<usize> {
        if self.program != looked.program.id {
            return Vec::new();
        }
        let pairs = self.values.iter().zip(&looked.values).enumerate();
        let changed = pairs.filter(|(_, (a, b))| !equal(a.bind(py), b.bind(py)));
        changed.map(|(number, _)| number).collect()
    }
}

/// Whether two values are the same number, string or set; of floats, bit by bit.
pub fn equal(a: &Bound<'_, PyAny>, b: &Bound<'_, PyAny>) -> bool {
    if a.is(b) {
        return true;
    }
    if let (Ok(a), Ok(b)) = (a.cast::<PyFloat>(), b.cast::<PyFloat>()) {
        return a.value().to_bits() == b.value().to_bits();
    }
    a.get_type().is(b.get_type()) && a.eq(b).unwrap_or(false)
}
