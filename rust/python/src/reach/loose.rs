//! A look at what a loss reaches where containers have other items than a program has: for what a bad batch has changed.
use std::rc::Rc;

use pyo3::{
    prelude::*,
    types::{PyFunction, PyModule, PyType},
};

use super::{
    contents::contents,
    node::{Expect, How, Met, Node},
    Looked, Program, Reach,
};
use crate::{
    mlx::classes::is_module,
    tree::{walk::Scope, Tree},
};

/// The objects at the nodes, the values, and objects that stand where the program has none, or others.
type Found<'py> = (
    Vec<Option<Met<'py>>>,
    Vec<Py<PyAny>>,
    Vec<Bound<'py, PyAny>>,
);

impl Program {
    // none where something else is another one than what is in dicts, lists and objects, which only a search can follow
    fn look_loosely<'py>(&self, roots: &[Bound<'py, PyAny>]) -> PyResult<Option<Found<'py>>> {
        let py = roots[0].py();
        if self.hidden.is_some() || self.classes.changed(py).is_some() {
            return Ok(None);
        }
        let last = self.values.borrow().clone();
        let mut values: Vec<_> = last.iter().map(|value| value.clone_ref(py)).collect();
        let (mut objects, mut others) = (Vec::new(), Vec::new());
        let mut missing = vec![false; self.nodes.len()];
        for (at, node) in self.nodes.iter().enumerate() {
            let in_container = matches!(node.how, How::Item | How::Index | How::Instance);
            let gone = node.parent.is_some_and(|parent| missing[parent]);
            let object = (!gone).then(|| node.find(&objects, roots)).flatten();
            let Some(object) = object else {
                missing[at] = true;
                if !(gone || in_container || matches!(node.expect, Expect::Absent)) {
                    return Ok(None);
                }
                objects.extend(node.kept.map(|_| None));
                continue;
            };
            match &node.expect {
                Expect::Value(_, number) if node.fits_value(&object) => {
                    values[*number] = object.unbind();
                    continue;
                }
                Expect::Contents(class, number, _) if object.get_type().is(class) => {
                    values[*number] = contents(&object)?.unbind();
                }
                Expect::Module(tree, _, (number, _)) => {
                    let (now, _) = Tree::record(&object, Scope::Whole)?;
                    if !tree.equals_but_numbers(&now, py) {
                        return Ok(None);
                    }
                    values[*number] = now.number_values(py)?.into_any().unbind();
                }
                Expect::Container(class, ..) | Expect::Object(class, _)
                    if class.is(&object.get_type()) =>
                {
                    if !is_known(node, &object, &objects) {
                        others.push(object.clone()); // there is more, or less, than the nodes under it
                    }
                }
                Expect::Array | Expect::Value(..) | Expect::Contents(..) | Expect::Absent
                    if in_container && !is_followed(&object) =>
                {
                    missing[at] = true;
                    others.push(object);
                    objects.extend(node.kept.map(|_| None));
                    continue;
                }
                _ => {
                    let met = Met::new(object.clone(), node);
                    if !met.is_some_and(|met| node.fits(&met, &objects)) {
                        return Ok(None);
                    }
                }
            }
            if node.kept.is_some() {
                objects.push(Met::new(object, node));
            }
        }
        Ok(Some((objects, values, others)))
    }
}

// whether an object has the items and as many attributes as when it was searched
fn is_known<'py>(node: &Node, object: &Bound<'py, PyAny>, objects: &[Option<Met<'py>>]) -> bool {
    let met = Met::new(object.clone(), node);
    node.is_made_up(object, objects) && met.is_some_and(|met| node.fits(&met, objects))
}

// whether code leads on from an object, which a search follows
fn is_followed(object: &Bound<'_, PyAny>) -> bool {
    object.is_instance_of::<PyFunction>()
        || object.is_instance_of::<PyType>()
        || object.is_instance_of::<PyModule>()
        || is_module(object)
}

impl Reach {
    /// Look at what the loss reaches now by the last program, where no search is wanted: a search finds more.
    pub fn look_loosely(&self, roots: &[Bound<'_, PyAny>]) -> PyResult<Option<Looked>> {
        let Some(program) = self.programs.last() else {
            return Ok(None);
        };
        let found = program.look_loosely(roots)?;
        Ok(found.map(|(objects, values, others)| {
            let others = others.into_iter().map(Bound::unbind).collect();
            Looked::loosely(program.clone(), objects, Rc::new(values), others)
        }))
    }
}
