//! Comparison of the objects that a loss reads with those of the last call.
use std::rc::Rc;

use mlx_rs::Array;
use pyo3::{
    intern,
    prelude::*,
    types::{PyList, PyTuple},
};

use super::{
    node::{attributes_of, Expect, How, Met},
    Program,
};
use crate::{
    mlx::{bridge, classes::is_numpy, numpy},
    tree::{slot::Place, snapshot::Snapshot, walk::Scope, Tree},
};
use faststep::engine::Tensor;

/// Of larger NumPy arrays that a loss reaches a hash is compared, in bytes.
const MAX_NUMPY: usize = 1 << 16;

/// What a look at a program's nodes gives.
pub enum Look<'py> {
    /// Everything is where it was: the object of each node.
    Same(Vec<Met<'py>>),
    /// That node's object is another one.
    Differs(usize),
}

impl Program {
    /// Look at every node.
    pub fn look<'py>(&self, roots: &[Bound<'py, PyAny>]) -> Look<'py> {
        let mut objects: Vec<Met<'py>> = Vec::with_capacity(self.nodes.len());
        let mut number = 0; // of the next array
        for (at, node) in self.nodes.iter().enumerate() {
            let met = node
                .find(&objects, roots)
                .map(|object| Met::new(object, node));
            let Some(met) = met.filter(|met| node.fits(met, &objects)) else {
                return Look::Differs(at);
            };
            let same = match &node.expect {
                Expect::Array => self.holds(&mut number, &met.object),
                Expect::Module(tree, first) => {
                    let ids = self.ids.borrow();
                    let known = ids.get(*first..).unwrap_or_default();
                    let slots = tree.check(&met.object, Scope::Whole, known);
                    drop(ids);
                    slots.is_some_and(|slots| {
                        slots
                            .iter()
                            .all(|slot| self.holds(&mut number, &slot.object))
                    })
                }
                _ => true,
            };
            if !same {
                return Look::Differs(at);
            }
            objects.push(met);
        }
        Look::Same(objects)
    }

    // whether the next array has the shape and dtype that it had; it is held from now on
    fn holds(&self, number: &mut usize, object: &Bound<'_, PyAny>) -> bool {
        let at = *number;
        *number += 1;
        let mut ids = self.ids.borrow_mut();
        let id = bridge::id(object);
        if ids.get(at).copied() == id {
            return true;
        }
        let array = bridge::get(object);
        let array = array.filter(|array| self.tensors.get(at) == Some(&Tensor::of(array)));
        let (Some(array), Some(id)) = (array, id) else {
            return false;
        };
        let mut held = self.held.borrow_mut();
        let held = Rc::make_mut(&mut held);
        if at < held.len() {
            (held[at], ids[at]) = (array, id);
        } else {
            held.push(array);
            ids.push(id);
        }
        true
    }

    // the node of each array
    fn arrays(&self) -> Vec<usize> {
        let nodes = self.nodes.iter().enumerate();
        let arrays = nodes.flat_map(|(at, node)| {
            let count = match &node.expect {
                Expect::Array => 1,
                Expect::Module(tree, _) => tree.tensors().len(),
                _ => 0,
            };
            std::iter::repeat_n(at, count)
        });
        arrays.collect()
    }
}

/// Where an array stands that a loss reaches, and its object.
pub struct Spot<'py> {
    /// The object.
    pub object: Bound<'py, PyAny>,
    place: Option<Place<'py>>, // in a module; elsewhere at a node
    node: usize,
}

/// What a loss reaches at one call.
pub struct Looked {
    /// The program that was looked through.
    pub program: Rc<Program>,
    objects: Vec<Py<PyAny>>,
    /// The arrays.
    pub arrays: Rc<Vec<Array>>,
    /// Numbers, strings, and the contents of what is changed in place.
    pub values: Vec<Py<PyAny>>,
}

impl Looked {
    pub(super) fn new(program: Rc<Program>, objects: Vec<Met<'_>>) -> PyResult<Self> {
        let arrays = program.held.borrow().clone();
        let mut values = Vec::new();
        for (node, met) in program.nodes.iter().zip(&objects) {
            match node.expect {
                Expect::Value(_) => values.push(met.object.clone().unbind()),
                Expect::Contents(_) => values.push(contents(&met.object)?.unbind()),
                _ => {}
            }
        }
        let objects = objects.into_iter().map(|met| met.object.unbind());
        Ok(Self {
            objects: objects.collect(),
            program,
            arrays,
            values,
        })
    }

    fn bound<'py>(&self, py: Python<'py>) -> Vec<Met<'py>> {
        let objects = self.program.nodes.iter().zip(&self.objects);
        let met = objects.map(|(node, object)| Met::new(object.bind(py).clone(), node));
        met.collect()
    }

    /// Where each array stands.
    pub fn spots<'py>(&self, py: Python<'py>) -> PyResult<Vec<Spot<'py>>> {
        let mut spots = Vec::new();
        for (at, node) in self.program.nodes.iter().enumerate() {
            let object = self.objects[at].bind(py);
            match &node.expect {
                Expect::Array => spots.push(Spot {
                    object: object.clone(),
                    place: None,
                    node: at,
                }),
                Expect::Module(..) => {
                    let (_, inner) = Tree::record(object, Scope::Whole)?;
                    spots.extend(inner.into_iter().map(|slot| Spot {
                        object: slot.object,
                        place: Some(slot.place),
                        node: at,
                    }));
                }
                _ => {}
            }
        }
        Ok(spots)
    }

    /// How a user writes the place of an array, by its number.
    pub fn name(&self, py: Python<'_>, array: usize) -> String {
        let Some(&at) = self.program.arrays().get(array) else {
            return String::new();
        };
        let name = self.program.name(py, at);
        match &self.program.nodes[at].expect {
            Expect::Module(tree, first) => {
                let paths = tree.paths(py);
                let path = paths.get(array - first).map(|path| path.join("."));
                format!("{name}.{}", path.unwrap_or_default())
            }
            _ => name,
        }
    }

    /// How a user writes the place of a value, by its number.
    pub fn value_name(&self, py: Python<'_>, value: usize) -> String {
        let nodes = self.program.nodes.iter().enumerate();
        let mut values = nodes
            .filter(|(_, node)| matches!(node.expect, Expect::Value(_) | Expect::Contents(_)))
            .map(|(at, _)| self.program.name(py, at));
        values.nth(value).unwrap_or_default()
    }

    /// The object that stands at a spot now.
    pub fn now<'py>(&self, spot: &Spot<'py>) -> Option<Bound<'py, PyAny>> {
        if let Some(place) = &spot.place {
            return place.get().ok().flatten();
        }
        let objects = self.bound(spot.object.py());
        self.program.nodes[spot.node].find(&objects, &[])
    }

    /// The place of a number in which an array stands now.
    pub fn value_that_is_array(&self, py: Python<'_>) -> Option<String> {
        let objects = self.bound(py);
        let nodes = self.program.nodes.iter().enumerate();
        let mut values = nodes.filter(|(_, node)| matches!(node.expect, Expect::Value(_)));
        let at = values.find(|(_, node)| {
            let now = node.find(&objects, &[]);
            now.is_some_and(|now| bridge::is_array(&now))
        });
        at.map(|(at, _)| self.program.name(py, at))
    }

    /// Put another object at a spot.
    pub fn put<'py>(&self, spot: &Spot<'py>, object: &Bound<'py, PyAny>) -> PyResult<()> {
        if let Some(place) = &spot.place {
            return place.set(object);
        }
        let objects = self.bound(spot.object.py());
        self.program.nodes[spot.node].put(&objects, object)?;
        Ok(())
    }

    /// The contents of dicts, lists, modules and objects on the way.
    pub fn snapshot<'py>(&self, py: Python<'py>) -> PyResult<Snapshot<'py>> {
        let mut snapshot = Snapshot::default();
        for (node, object) in self.program.nodes.iter().zip(&self.objects) {
            let object = object.bind(py);
            if let Expect::Module(..) = &node.expect {
                snapshot.note_all(object)?;
            }
            if let Expect::Container(..) | Expect::Contents(_) = &node.expect {
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
        for (node, Met { object, .. }) in self.program.nodes.iter().zip(&objects) {
            if let How::Cell | How::Global | How::Class | How::Attribute = node.how {
                let now = node.find(&objects, &[]);
                if !now.is_some_and(|now| now.is(object)) {
                    node.put(&objects, object)?;
                }
            }
        }
        Ok(())
    }
}

// a copy of what an object holds, or of a large NumPy array the hash of that: the object may be changed in place
fn contents<'py>(object: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    let py = object.py();
    if !is_numpy(object) {
        return match object.cast::<PyList>() {
            Ok(list) => Ok(list.to_tuple().into_any()),
            Err(_) if object.is_instance_of::<PyTuple>() => Ok(object.clone()),
            Err(_) => object.call_method0(intern!(py, "copy")),
        };
    }
    let shape = object.getattr(intern!(py, "shape"))?;
    let dtype = object.getattr(intern!(py, "dtype"))?.str()?;
    if object.getattr(intern!(py, "nbytes"))?.extract::<usize>()? > MAX_NUMPY {
        return Ok((shape, dtype, numpy::hash(object)?)
            .into_pyobject(py)?
            .into_any());
    }
    let data = object.call_method0(intern!(py, "tobytes"))?;
    Ok((shape, dtype, data).into_pyobject(py)?.into_any())
}
