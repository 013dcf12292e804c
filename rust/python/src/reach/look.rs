//! Looking at what a loss reaches, before a call.
use std::rc::Rc;

use mlx_rs::Array;
use pyo3::{intern, prelude::*};

use super::{
    node::{attributes_of, Expect, How},
    Program,
};
use crate::{bridge, walk::Snapshot};
use faststep::layout::Tensor;

/// Larger NumPy arrays that a loss reaches are not compared, in bytes.
const MAX_NUMPY: usize = 1 << 16;

/// What a look at a program's nodes gives.
pub enum Look<'py> {
    /// Everything is where it was: the object of each node.
    Same(Vec<Bound<'py, PyAny>>),
    /// That node's object is another one.
    Differs(usize),
}

impl Program {
    /// Look at every node.
    pub fn look<'py>(&self, roots: &[Bound<'py, PyAny>]) -> Look<'py> {
        let mut objects: Vec<Bound<'py, PyAny>> = Vec::with_capacity(self.nodes.len());
        let mut ids = self.ids.borrow_mut();
        let mut arrays = 0;
        for (at, node) in self.nodes.iter().enumerate() {
            let Some(object) = node.find(&objects, roots) else {
                return Look::Differs(at);
            };
            if !node.fits(&object, &objects) {
                return Look::Differs(at);
            }
            if let Expect::Array = node.expect {
                let id = bridge::id(&object);
                if ids.get(arrays).copied() != id {
                    let tensor = bridge::get(&object).as_ref().map(Tensor::of);
                    if tensor.as_ref() != self.tensors.get(arrays) {
                        return Look::Differs(at);
                    }
                    ids.resize(self.tensors.len(), 0);
                    ids[arrays] = id.unwrap_or(0);
                }
                arrays += 1;
            }
            objects.push(object);
        }
        Look::Same(objects)
    }

    fn arrays(&self) -> impl Iterator<Item = usize> + '_ {
        let nodes = self.nodes.iter().enumerate();
        nodes.filter_map(|(at, node)| matches!(node.expect, Expect::Array).then_some(at))
    }
}

/// What a loss reaches at one call.
pub struct Looked {
    /// The program that was looked through.
    pub program: Rc<Program>,
    objects: Vec<Py<PyAny>>,
    /// The arrays.
    pub arrays: Vec<Array>,
    /// Numbers, strings and the contents of small NumPy arrays.
    pub values: Vec<Py<PyAny>>,
}

impl Looked {
    pub(super) fn new(program: Rc<Program>, objects: Vec<Bound<'_, PyAny>>) -> PyResult<Self> {
        let arrays = program.arrays().filter_map(|at| bridge::get(&objects[at]));
        let arrays = arrays.collect();
        let mut values = Vec::new();
        for (node, object) in program.nodes.iter().zip(&objects) {
            match node.expect {
                Expect::Value(_) => values.push(object.clone().unbind()),
                Expect::NumPy => values.push(contents(object)?.unbind()),
                _ => {}
            }
        }
        Ok(Self {
            program,
            objects: objects.into_iter().map(Bound::unbind).collect(),
            arrays,
            values,
        })
    }

    fn bound<'py>(&self, py: Python<'py>) -> Vec<Bound<'py, PyAny>> {
        let objects = self.objects.iter();
        objects.map(|object| object.bind(py).clone()).collect()
    }

    /// The object of each array.
    pub fn slots<'py>(&self, py: Python<'py>) -> Vec<Bound<'py, PyAny>> {
        let arrays = self.program.arrays();
        arrays.map(|at| self.objects[at].bind(py).clone()).collect()
    }

    /// How a user writes the place of an array, by its number.
    pub fn name(&self, py: Python<'_>, array: usize) -> String {
        let at = self.program.arrays().nth(array);
        at.map_or_else(String::new, |at| self.program.name(py, at))
    }

    /// How a user writes the place of a value, by its number.
    pub fn value_name(&self, py: Python<'_>, value: usize) -> String {
        let nodes = self.program.nodes.iter().enumerate();
        let mut values = nodes
            .filter(|(_, node)| matches!(node.expect, Expect::Value(_) | Expect::NumPy))
            .map(|(at, _)| self.program.name(py, at));
        values.nth(value).unwrap_or_default()
    }

    /// The object that stands in the place of each array now.
    pub fn now<'py>(&self, py: Python<'py>) -> Vec<Option<Bound<'py, PyAny>>> {
        let objects = self.bound(py);
        let find = |at: usize| self.program.nodes[at].find(&objects, &objects);
        self.program.arrays().map(find).collect()
    }

    /// The place of a number in which an array stands now.
    pub fn value_that_is_array(&self, py: Python<'_>) -> Option<String> {
        let objects = self.bound(py);
        let nodes = self.program.nodes.iter().enumerate();
        let mut values = nodes.filter(|(_, node)| matches!(node.expect, Expect::Value(_)));
        let at = values.find(|(_, node)| {
            let now = node.find(&objects, &objects);
            now.is_some_and(|now| bridge::is_array(&now))
        });
        at.map(|(at, _)| self.program.name(py, at))
    }

    /// Put another object in the place of an array, by its number; whether that can be.
    pub fn put(&self, array: usize, object: &Bound<'_, PyAny>) -> PyResult<bool> {
        let objects = self.bound(object.py());
        match self.program.arrays().nth(array) {
            Some(at) => self.program.nodes[at].put(&objects, object),
            None => Ok(false),
        }
    }

    /// The contents of dicts, lists, modules and objects on the way.
    pub fn snapshot<'py>(&self, py: Python<'py>) -> PyResult<Snapshot<'py>> {
        let mut snapshot = Snapshot::default();
        for (node, object) in self.program.nodes.iter().zip(&self.objects) {
            let object = object.bind(py);
            if let Expect::Container(..) = &node.expect {
                snapshot.note(object)?;
            }
            if let Expect::Container(_, _, Some(_)) | Expect::Object(..) = &node.expect {
                if let Some(dict) = attributes_of(object) {
                    snapshot.note(dict.as_any())?;
                }
            }
        }
        Ok(snapshot)
    }

    /// Put everything on the way where it was; what stands in a container is left to a snapshot.
    pub fn put_back(&self, py: Python<'_>) -> PyResult<()> {
        let objects = self.bound(py);
        for (node, object) in self.program.nodes.iter().zip(&objects) {
            if let How::Cell | How::Global | How::Class | How::Attribute = node.how {
                let now = node.find(&objects, &objects);
                if !now.is_some_and(|now| now.is(object)) {
                    node.put(&objects, object)?;
                }
            }
        }
        Ok(())
    }
}

// what a small NumPy array holds; a larger one stands for itself
fn contents<'py>(array: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    let py = array.py();
    let bytes: usize = array.getattr(intern!(py, "nbytes"))?.extract()?;
    if bytes > MAX_NUMPY {
        return Ok(array.as_ptr().addr().into_pyobject(py)?.into_any());
    }
    let shape = array.getattr(intern!(py, "shape"))?;
    let dtype = array.getattr(intern!(py, "dtype"))?.str()?;
    let data = array.call_method0(intern!(py, "tobytes"))?;
    Ok((shape, dtype, data).into_pyobject(py)?.into_any())
}
