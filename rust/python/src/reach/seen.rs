//! The numbers for which a trace is valid, and the constants that it takes for them.
use std::rc::Rc;

use mlx_rs::Array;
use pyo3::prelude::*;

use super::{advance::Advance, Looked};
use crate::mlx::collector::{Collector, Refers, Visited};
use crate::tree::static_value::equal;

/// Numbers for which a trace has been found to hold.
pub struct Seen {
    program: usize,
    values: Rc<Vec<Py<PyAny>>>,
    /// The constants that the trace takes as inputs.
    pub constants: Vec<Array>,
    /// Structure that the loss returned, with holes for its arrays, and the numbers and texts of what it has replaced.
    pub template: Option<Py<PyAny>>,
    /// What the loss adds to numbers of its own in a call with these numbers.
    pub adds: Rc<Vec<Advance>>,
    /// True if it adds the same in the next call, to the numbers that there are then.
    pub goes_on: bool,
    /// The numbers of the model to which losses add: this one may read them where another one adds to them.
    pub counted: Rc<Vec<Py<PyAny>>>,
}

impl Refers for Seen {
    fn visit(&self, collector: &mut Collector<'_>) -> Visited {
        self.values.visit(collector)?;
        self.template.visit(collector)?;
        self.adds.visit(collector)?;
        self.counted.visit(collector)
    }
}

impl Seen {
    /// Made from the current values.
    pub fn new(looked: &Looked, constants: Vec<Array>, template: Option<Py<PyAny>>) -> Self {
        Self {
            program: looked.program.id,
            values: looked.values.clone(),
            constants,
            template,
            adds: Rc::default(),
            goes_on: true,
            counted: Rc::default(),
        }
    }

    /// The same for other numbers.
    pub fn with(&self, py: Python<'_>, looked: &Looked) -> Self {
        let template = self.template.as_ref().map(|t| t.clone_ref(py));
        Self {
            adds: self.adds.clone(),
            goes_on: self.goes_on,
            counted: self.counted.clone(),
            ..Self::new(looked, self.constants.clone(), template)
        }
    }

    /// Where these are the numbers that have changed, beside others than those of a look, they become what they are behind it.
    pub fn advance(
        &mut self,
        changed: &[usize],
        (before, after): (&Looked, &Looked),
        py: Python<'_>,
    ) {
        let is_before = |at: &usize| equal(self.values[*at].bind(py), before.values[*at].bind(py));
        let same = self.program == before.program.id && changed.iter().all(is_before);
        if !same || are_equal(&self.values, &before.values, py) {
            return;
        }
        let mut values: Vec<_> = self
            .values
            .iter()
            .map(|value| value.clone_ref(py))
            .collect();
        for at in changed {
            values[*at] = after.values[*at].clone_ref(py);
        }
        self.values = Rc::new(values);
    }

    /// The bytes of the constants.
    pub fn bytes(&self) -> usize {
        self.constants.iter().map(Array::nbytes).sum()
    }

    /// The numbers alone.
    pub fn numbers(&self) -> Self {
        Self {
            program: self.program,
            values: self.values.clone(),
            constants: Vec::new(),
            template: None,
            adds: Rc::default(),
            goes_on: true,
            counted: Rc::default(),
        }
    }

    /// Return whether they are those of what has been looked at now.
    pub fn is_of(&self, looked: &Looked) -> bool {
        self.program == looked.program.id
    }

    /// Return whether these are the numbers that are there now.
    pub fn fits(&self, py: Python<'_>, looked: &Looked) -> bool {
        self.program == looked.program.id && are_equal(&self.values, &looked.values, py)
    }

    /// Return whether the loss is known to do the same with numbers of the model to which losses add: it adds to them itself, or
    /// they are what they have been.
    pub fn holds_for(&self, counted: &[Py<PyAny>], py: Python<'_>) -> bool {
        let mut pairs = self.counted.iter().zip(counted);
        let same = self.counted.len() == counted.len()
            && pairs.all(|(one, other)| equal(one.bind(py), other.bind(py)));
        counted.is_empty() || same || self.adds.iter().any(Advance::is_of_model)
    }

    /// Return whether both are the same numbers.
    pub fn equals(&self, other: &Self, py: Python<'_>) -> bool {
        self.program == other.program && are_equal(&self.values, &other.values, py)
    }

    /// The values that are other ones now, by number, where the structure is the same.
    pub fn changes(&self, py: Python<'_>, looked: &Looked) -> Vec<usize> {
        if self.program != looked.program.id {
            return Vec::new();
        }
        others(&self.values, &looked.values, py)
    }
}

impl Looked {
    /// The values that are other ones at a later look, by number, where the structure is the same.
    pub fn changes(&self, py: Python<'_>, later: &Self) -> Vec<usize> {
        if self.program.id != later.program.id {
            return Vec::new();
        }
        others(&self.values, &later.values, py)
    }
}

fn others(one: &[Py<PyAny>], other: &[Py<PyAny>], py: Python<'_>) -> Vec<usize> {
    let pairs = one.iter().zip(other).enumerate();
    let changed = pairs.filter(|(_, (a, b))| !equal(a.bind(py), b.bind(py)));
    changed.map(|(number, _)| number).collect()
}

fn are_equal(one: &Rc<Vec<Py<PyAny>>>, other: &Rc<Vec<Py<PyAny>>>, py: Python<'_>) -> bool {
    let mut pairs = one.iter().zip(other.iter());
    Rc::ptr_eq(one, other) || pairs.all(|(a, b)| equal(a.bind(py), b.bind(py)))
}
